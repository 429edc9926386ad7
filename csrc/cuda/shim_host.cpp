// See shim.h: the same interface and the same csrc/cuda/peer_reduce.h without a GPU, for tests and dry runs. Segments
// are POSIX shared memory, so that ranks may be threads or processes; a launch runs its blocks one after another on the
// caller's thread and returns when they have ended. What it shows are bits, offsets and the protocol; no speed.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "../fpmode.h"
#include "../reduce_ops.h"
#include "peer_reduce.h"
#include "shim_common.h"

namespace tbik::peer {

namespace {

static_assert(static_cast<int>(Element::kFloat16) == static_cast<int>(tbik::Element::kFloat16));
static_assert(static_cast<int>(Element::kInt32) == static_cast<int>(tbik::Element::kInt32));
static_assert(static_cast<int>(Element::kInt64) == static_cast<int>(tbik::Element::kInt64));
static_assert(static_cast<int>(Op::kAvg) == static_cast<int>(tbik::Op::kAvg));
static_assert(static_cast<int>(Op::kMax) == static_cast<int>(tbik::Op::kMax));
static_assert(static_cast<int>(Op::kPremulSum) == static_cast<int>(tbik::Op::kPremulSum));

constexpr int kDevices = kMaxRanks;
constexpr int kSpins = 50;  // on a busy machine a rank that spins costs its peer the processor

struct HostWorld {
  int number;

  int block() const { return number; }
  int thread() const { return 0; }
  int threads() const { return 1; }
  void sync() const {}
  bool any(bool value) const { return value; }
  template <class T>
  void store_release(T* to, T value) const {
    std::atomic_ref<T>(*to).store(value, std::memory_order_release);
  }
  template <class T>
  T load_acquire(const T* from) const {
    return std::atomic_ref<T>(*const_cast<T*>(from)).load(std::memory_order_acquire);
  }
  bool claim(uint32_t* flag) const {
    uint32_t free = 0;
    return std::atomic_ref<uint32_t>(*flag).compare_exchange_strong(free, 1);
  }
  int64_t now_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void pause() const {
    thread_local int turns = 0;
    if (++turns % kSpins != 0) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
};

struct Mapping {
  int64_t bytes;
  std::string name;  // of what this process made
};

std::mutex mappings_mutex;
std::map<uint64_t, Mapping> mappings;

int failed(const std::string& what) { return refuse(what + ": " + std::strerror(errno)); }

int map_segment(int file, int64_t bytes, const std::string& name, uint64_t* address) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int result = memory == MAP_FAILED ? failed("mmap of a segment") : 0;
  close(file);
  if (result != 0) return result;
  *address = reinterpret_cast<uint64_t>(memory);
  const std::lock_guard<std::mutex> lock(mappings_mutex);
  mappings[*address] = {bytes, name};
  return 0;
}

int unmap_segment(uint64_t address) {
  const std::lock_guard<std::mutex> lock(mappings_mutex);
  const auto found = mappings.find(address);
  if (found == mappings.end()) return refuse("not a segment of this process");
  munmap(reinterpret_cast<void*>(address), static_cast<size_t>(found->second.bytes));
  if (!found->second.name.empty()) shm_unlink(found->second.name.c_str());
  mappings.erase(found);
  return 0;
}

template <class S>
void run_blocks(const Call& call) {
  for (int block = 0; block < call.blocks; ++block) {
    const HostWorld world{block};
    switch (std::is_integral_v<S> ? 0 : unrolled_ranks(call)) {
      case 2:
        peer_reduce<S, 2>(call, world);
        break;
      case 4:
        peer_reduce<S, 4>(call, world);
        break;
      case 8:
        peer_reduce<S, 8>(call, world);
        break;
      default:
        peer_reduce<S, 0>(call, world);
    }
  }
}

}  // namespace

}  // namespace tbik::peer

using namespace tbik::peer;

const char* tbik_peer_error(int error) { return error == 0 ? "" : last_refusal().c_str(); }

int tbik_peer_device_count(int* count) {
  *count = kDevices;
  return 0;
}

int tbik_peer_device_name(int device, char* name) {
  std::snprintf(name, kNameBytes, "host memory %d", device);
  return 0;
}

int tbik_peer_can_access(int, int, int* can) {
  *can = 1;
  return 0;
}

int tbik_peer_allocate(int, int64_t bytes, uint64_t* address, char* handle) {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return failed("getrandom");
  char name[kHandleBytes] = {};
  std::snprintf(name, sizeof name, "/tbik-peer-%d-%016llx", static_cast<int>(getpid()),
                static_cast<unsigned long long>(nonce));
  const int file = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0) return failed(std::string("shm_open of ") + name);
  if (ftruncate(file, bytes) != 0) {
    const int result = failed("ftruncate of a segment");
    close(file);
    shm_unlink(name);
    return result;
  }
  std::memcpy(handle, name, kHandleBytes);
  const int result = map_segment(file, bytes, name, address);
  if (result != 0) shm_unlink(name);
  return result;
}

int tbik_peer_seal(int, uint64_t address) {  // so that a killed process leaves no file behind
  const std::lock_guard<std::mutex> lock(mappings_mutex);
  const auto found = mappings.find(address);
  if (found == mappings.end() || found->second.name.empty()) return refuse("not a segment that this process made");
  shm_unlink(found->second.name.c_str());
  found->second.name.clear();
  return 0;
}

int tbik_peer_free(int, uint64_t address) { return unmap_segment(address); }

int tbik_peer_open(int, const char* handle, int64_t bytes, uint64_t* address) {
  const std::string name(handle, strnlen(handle, kHandleBytes));
  const int file = shm_open(name.c_str(), O_RDWR, 0);
  if (file < 0) return failed("shm_open of " + name);
  return map_segment(file, bytes, "", address);
}

int tbik_peer_close(int, uint64_t address) { return unmap_segment(address); }

int tbik_peer_status_allocate(int, Status** host, uint64_t* address) {
  *host = new Status{};
  *address = reinterpret_cast<uint64_t>(*host);
  return 0;
}

int tbik_peer_status_free(int, Status* host) {
  delete host;
  return 0;
}

int tbik_peer_launch(int, const Call* call, uint64_t) {
  const tbik::FpIeeeScope ieee;
  switch (call->element) {
    case Element::kFloat32:
      run_blocks<float>(*call);
      return 0;
    case Element::kFloat64:
      run_blocks<double>(*call);
      return 0;
    case Element::kBFloat16:
      run_blocks<Bf16>(*call);
      return 0;
    case Element::kFloat16:
      run_blocks<F16>(*call);
      return 0;
    case Element::kInt32:
      run_blocks<int32_t>(*call);
      return 0;
    case Element::kInt64:
      run_blocks<int64_t>(*call);
      return 0;
  }
  return refuse("no kernel for element type " + std::to_string(static_cast<int>(call->element)));
}

int tbik_peer_synchronize(int) { return 0; }
