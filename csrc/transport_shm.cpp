// See transport_shm.h for the protocol.
#include "transport_shm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>

namespace tbik {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

namespace {

constexpr uint64_t kMagic = 0x6b6962742d6d6873;  // "shm-tbik"
constexpr uint32_t kVersion = 1;
constexpr int64_t kLine = 64;  // bytes of a cache line
// Few: on a busy machine a rank that spins on costs its peer the processor (400 spins instead of 20: four times
// slower).
constexpr int kSpins = 20;
constexpr std::chrono::microseconds kYielding{200};
constexpr milliseconds kFirstSlice{5};
constexpr milliseconds kSlice{50};  // a look at the abort flag, the deadline and the peer at least this often
constexpr size_t kReasonBytes = 1536;

enum LineState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2 };
enum AbortState : uint32_t { kRunning = 0, kWriting = 1, kAborted = 2 };

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

std::string hex(uint64_t value) {
  std::ostringstream text;
  text << std::hex << value;
  return text.str();
}

std::string seconds(Clock::duration d) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", std::chrono::duration<double>(d).count());
  return text;
}

std::string system_error(const std::string& what) {
  const int error = errno;
  return what + ": " + std::strerror(error);
}

// Process state letter and start time (clock ticks since boot) of /proc/<pid>/stat; letter 0 = no such process.
struct ProcessStat {
  char state = 0;
  uint64_t start_time = 0;
};

ProcessStat process_stat(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return {};
  const size_t close = text.rfind(')');  // the command name may hold anything, also ')'
  if (close == std::string::npos) return {};
  std::istringstream fields(text.substr(close + 1));
  ProcessStat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start_time;
  return fields ? stat : ProcessStat{};
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen, std::chrono::nanoseconds limit) {
  const timespec t{static_cast<time_t>(limit.count() / 1000000000), static_cast<long>(limit.count() % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &t, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::atomic<uint64_t> g_fork_generation{0};

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { g_fork_generation.fetch_add(1, std::memory_order_relaxed); });
  });
}

}  // namespace

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct ShmRegion::Header {
  uint64_t magic;
  uint32_t version;
  uint32_t world;
  int64_t bytes;
  int64_t slot_bytes;
  uint64_t nonce[2];
  alignas(kLine) std::atomic<uint32_t> abort_state;
  int32_t abort_rank;
  char abort_reason[kReasonBytes];
};

struct ShmRegion::Line {
  alignas(kLine) std::atomic<uint32_t> posted;  // low 32 bits of the round; the futex word
  std::atomic<uint32_t> sleepers;
  alignas(kLine) std::atomic<uint32_t> state;
  std::atomic<int64_t> pid;
  std::atomic<uint64_t> start_time;
  std::atomic<uint64_t> activity[4];  // 32 characters
};

struct alignas(64) ShmRegion::Message {
  uint64_t round;
  Tag tag;

  std::byte* payload() { return reinterpret_cast<std::byte*>(this) + round_up(sizeof(Message), kLine); }
};

uint64_t fork_generation() {
  watch_forks();
  return g_fork_generation.load(std::memory_order_relaxed);
}

std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string identity;
  std::getline(file, identity);
  if (identity.empty()) return "";
  for (const char* name : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    char space[128] = {};
    if (readlink(name, space, sizeof space - 1) < 0) return "";
    identity += std::string(" ") + space;
  }
  char host[256] = {};
  if (gethostname(host, sizeof host - 1) != 0) return "";
  return identity + " " + host;
}

std::string describe(const Where& where, int rank, int size) {
  std::string text = std::string(where.collective) + ", call " + std::to_string(where.call) + ", rank " +
                     std::to_string(rank) + " of " + std::to_string(size) + ", phase '" + where.phase + "'";
  if (where.num_segments > 1) {
    text += ", segment " + std::to_string(where.segment + 1) + " of " + std::to_string(where.num_segments);
  }
  return text;
}

// --- region ----------------------------------------------------------------

namespace {

int64_t lines_offset() { return round_up(sizeof(ShmRegion::Header), 4096); }
int64_t slots_offset(int world) {
  return round_up(lines_offset() + world * static_cast<int64_t>(sizeof(ShmRegion::Line)), 4096);
}

}  // namespace

ShmRegion::Header* ShmRegion::header() const { return reinterpret_cast<Header*>(base_); }
ShmRegion::Line* ShmRegion::line(int rank) const { return reinterpret_cast<Line*>(base_ + lines_offset()) + rank; }
ShmRegion::Message* ShmRegion::message(int rank, uint64_t round) const {
  return reinterpret_cast<Message*>(base_ + slots_offset(world_) +
                                    (2 * rank + static_cast<int64_t>(round % 2)) * slot_bytes_);
}

std::shared_ptr<ShmRegion> ShmRegion::create(int world, int64_t capacity) {
  std::shared_ptr<ShmRegion> region(new ShmRegion);
  region->fork_generation_ = fork_generation();
  region->world_ = world;
  region->slot_bytes_ = round_up(round_up(sizeof(Message), kLine) + capacity, 4096);
  region->bytes_ = slots_offset(world) + 2 * world * region->slot_bytes_;
  region->fd_ = memfd_create("tbik", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (region->fd_ < 0) throw TransportError(TransportFailure::kMisuse, system_error("shm: memfd_create"));
  if (fchmod(region->fd_, 0600) != 0 || ftruncate(region->fd_, region->bytes_) != 0 ||
      fcntl(region->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw TransportError(TransportFailure::kMisuse,
                         system_error("shm: memory file of " + std::to_string(region->bytes_) + " bytes"));
  }
  void* memory = mmap(nullptr, static_cast<size_t>(region->bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, region->fd_, 0);
  if (memory == MAP_FAILED) throw TransportError(TransportFailure::kMisuse, system_error("shm: mmap"));
  region->base_ = static_cast<std::byte*>(memory);
  uint64_t nonce[2];
  if (getrandom(nonce, sizeof nonce, 0) != static_cast<ssize_t>(sizeof nonce)) {
    throw TransportError(TransportFailure::kMisuse, system_error("shm: getrandom"));
  }
  Header* header = region->header();  // the file is zero: every counter starts at 0
  header->version = kVersion;
  header->world = static_cast<uint32_t>(world);
  header->bytes = region->bytes_;
  header->slot_bytes = region->slot_bytes_;
  header->nonce[0] = nonce[0];
  header->nonce[1] = nonce[1];
  header->magic = kMagic;
  std::ostringstream token;
  token << "tbik-shm " << kVersion << ' ' << getpid() << ' ' << process_stat(getpid()).start_time << ' ' << region->fd_
        << ' ' << region->bytes_ << ' ' << hex(nonce[0]) << ' ' << hex(nonce[1]);
  region->token_ = token.str();
  return region;
}

std::shared_ptr<ShmRegion> ShmRegion::attach(const std::string& token, int world) {
  std::istringstream fields(token);
  std::string kind;
  uint32_t version = 0;
  int64_t pid = 0;
  uint64_t start_time = 0;
  int fd = -1;
  int64_t bytes = 0;
  uint64_t nonce[2];
  fields >> kind >> version >> pid >> start_time >> fd >> bytes >> std::hex >> nonce[0] >> nonce[1];
  const auto refuse = [&](const std::string& why) {
    throw TransportError(TransportFailure::kMisuse, "shm: cannot attach to '" + token + "': " + why);
  };
  if (!fields || kind != "tbik-shm") refuse("expected 'tbik-shm <version> <pid> <start time> <fd> <bytes> <nonce>'");
  if (version != kVersion) refuse("expected version " + std::to_string(kVersion));
  if (process_stat(pid).start_time != start_time) refuse("its creator's process is gone or not visible here");
  std::shared_ptr<ShmRegion> region(new ShmRegion);
  region->fork_generation_ = fork_generation();
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  region->fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (region->fd_ < 0) refuse(system_error("open " + path));
  struct stat status;
  const int seals = fcntl(region->fd_, F_GET_SEALS);
  if (fstat(region->fd_, &status) != 0) refuse(system_error("fstat"));
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) refuse("it is no sealed memory file");
  if (status.st_uid != geteuid() || (status.st_mode & 077) != 0) refuse("another user owns it or may write to it");
  if (status.st_size != bytes || bytes < slots_offset(world)) {
    refuse("expected " + std::to_string(bytes) + " bytes, found " + std::to_string(status.st_size));
  }
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, region->fd_, 0);
  if (memory == MAP_FAILED) refuse(system_error("mmap"));
  region->base_ = static_cast<std::byte*>(memory);
  region->bytes_ = bytes;
  region->world_ = world;
  region->token_ = token;
  const Header* header = region->header();
  region->slot_bytes_ = header->slot_bytes;
  if (header->magic != kMagic || header->version != kVersion || header->nonce[0] != nonce[0] ||
      header->nonce[1] != nonce[1]) {
    refuse("magic, version or nonce differ");
  }
  if (header->world != static_cast<uint32_t>(world) || header->bytes != bytes ||
      bytes != slots_offset(world) + 2 * world * header->slot_bytes) {
    refuse("it is made for " + std::to_string(header->world) + " ranks, expected " + std::to_string(world));
  }
  region->close_file();
  return region;
}

void ShmRegion::close_file() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

ShmRegion::~ShmRegion() {
  close_file();
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(bytes_));
}

// --- transport ----------------------------------------------------------------

ShmTransport::ShmTransport(std::shared_ptr<ShmRegion> region, int rank, int world, std::vector<int> shown,
                           int shown_size)
    : Transport(rank, world),
      region_(std::move(region)),
      fork_generation_(fork_generation()),
      shown_(std::move(shown)),
      shown_size_(shown_size) {
  const ShmRegion::Header* header = region_->header();
  if (rank < 0 || rank >= world || header->world != static_cast<uint32_t>(world)) {
    throw TransportError(TransportFailure::kMisuse, "shm: rank " + std::to_string(rank) + " of " +
                                                        std::to_string(world) + " in a region for " +
                                                        std::to_string(header->world));
  }
  capacity_ = header->slot_bytes - round_up(sizeof(ShmRegion::Message), kLine);
  ShmRegion::Line* line = region_->line(rank);
  line->pid.store(getpid());
  line->start_time.store(process_stat(getpid()).start_time);
  uint32_t absent = kAbsent;
  if (!line->state.compare_exchange_strong(absent, kAttached)) {
    throw TransportError(TransportFailure::kMisuse, "shm: rank " + std::to_string(rank) + " has attached already");
  }
}

ShmTransport::~ShmTransport() { leave(); }

void ShmTransport::leave() {
  if (fork_generation_ != fork_generation()) return;
  ShmRegion::Line* line = region_->line(rank_);
  line->state.store(kLeft, std::memory_order_seq_cst);
  if (line->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&line->posted);
}

std::byte* ShmTransport::outgoing() { return region_->message(rank_, round_ + 1)->payload(); }

const Tag& ShmTransport::tag(int peer) const { return region_->message(peer, round_)->tag; }

const std::byte* ShmTransport::incoming(int peer, size_t part) const {
  const Part& p = (*parts_)[part];
  const int64_t offset =
      peer == rank_ ? p.to[static_cast<size_t>(rank_)].offset : p.from[static_cast<size_t>(peer)].offset;
  return region_->message(peer, round_)->payload() + offset;
}

void ShmTransport::note(const char* activity) {
  char text[32] = {};
  std::strncpy(text, activity, sizeof text - 1);
  ShmRegion::Line* line = region_->line(rank_);
  for (int i = 0; i < 4; ++i) {
    uint64_t word;
    std::memcpy(&word, text + 8 * i, 8);
    line->activity[i].store(word, std::memory_order_relaxed);
  }
}

std::string ShmTransport::last_seen(int peer) const {
  const ShmRegion::Line* line = region_->line(peer);
  char text[33] = {};
  for (int i = 0; i < 4; ++i) {
    const uint64_t word = line->activity[i].load(std::memory_order_relaxed);
    std::memcpy(text + 8 * i, &word, 8);
  }
  text[31] = 0;
  return text;
}

std::string ShmTransport::shown(int rank) const {
  return std::to_string(shown_.empty() ? rank : shown_[static_cast<size_t>(rank)]);
}

std::string ShmTransport::here(const Where& where) const {
  return describe(where, shown_.empty() ? rank_ : shown_[static_cast<size_t>(rank_)], shown_size_);
}

void ShmTransport::require_usable(const Where& where) {
  if (fork_generation_ != fork_generation()) {
    throw TransportError(TransportFailure::kMisuse,
                         "shm: " + here(where) +
                             ": this process was forked after the group was made; a group belongs to the process that "
                             "made it. Make a new group in the child");
  }
  const ShmRegion::Header* header = region_->header();
  if (header->abort_state.load(std::memory_order_acquire) == kAborted) {
    broken_ = true;
    throw TransportError(TransportFailure::kAborted, "shm: " + here(where) + ": rank " +
                                                         std::to_string(header->abort_rank) +
                                                         " has given up this group. It says: " + header->abort_reason);
  }
  if (broken_) {
    throw TransportError(TransportFailure::kAborted, "shm: " + here(where) +
                                                         ": an earlier call on this group failed here. Destroy the "
                                                         "group and make a new one");
  }
}

void ShmTransport::abort(const std::string& reason) {
  if (fork_generation_ != fork_generation()) return;
  ShmRegion::Header* header = region_->header();
  uint32_t running = kRunning;
  if (header->abort_state.compare_exchange_strong(running, kWriting)) {
    header->abort_rank = shown_.empty() ? rank_ : shown_[static_cast<size_t>(rank_)];
    const size_t n = std::min(reason.size(), kReasonBytes - 1);
    std::memcpy(header->abort_reason, reason.data(), n);
    header->abort_reason[n] = 0;
    header->abort_state.store(kAborted, std::memory_order_release);
  }
  for (int rank = 0; rank < size_; ++rank) futex_wake_all(&region_->line(rank)->posted);
}

void ShmTransport::fail(TransportFailure failure, const std::string& text) {
  broken_ = true;
  abort(text);
  throw TransportError(failure, "shm: " + text);
}

void ShmTransport::exchange(const Tag& tag, const std::vector<Part>& parts, const Where& where) {
  require_usable(where);
  ++round_;
  parts_ = &parts;
  ShmRegion::Message* message = region_->message(rank_, round_);
  message->tag = tag;
  message->round = round_;
  // seq_cst: either a peer that goes to sleep sees this value, or we see that it sleeps.
  ShmRegion::Line* line = region_->line(rank_);
  line->posted.store(static_cast<uint32_t>(round_), std::memory_order_seq_cst);
  if (line->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&line->posted);
  for (int step = 1; step < size_; ++step) wait_for((rank_ + step) % size_, where);
}

void ShmTransport::wait_for(int peer, const Where& where) {
  ShmRegion::Line* line = region_->line(peer);
  const uint32_t wanted = static_cast<uint32_t>(round_);
  const auto arrived = [&] { return static_cast<int32_t>(line->posted.load(std::memory_order_acquire) - wanted) >= 0; };
  if (!arrived()) {
    bool done = false;
    for (int i = 0; i < kSpins && !done; ++i) {
      pause();
      done = arrived();
    }
    // A yield may last long where many processes want the processor: bounded by the clock, not by a count.
    const Clock::time_point start = Clock::now();
    while (!done && Clock::now() - start < kYielding) {
      sched_yield();
      done = arrived();
    }
    if (!done) {
      awaited_.store(shown_.empty() ? peer : shown_[static_cast<size_t>(peer)], std::memory_order_relaxed);
      while (!done) done = sleep(peer, where, start);
      awaited_.store(-1, std::memory_order_relaxed);
    }
  }
  const uint64_t got = region_->message(peer, round_)->round;
  if (got != round_) {
    fail(TransportFailure::kMisuse, here(where) + ": rank " + shown(peer) + " is at message " + std::to_string(got) +
                                        ", expected " + std::to_string(round_) +
                                        "; the shared memory was written by someone else");
  }
}

// One slice of waiting; true if the message is there. Throws if it will not come.
bool ShmTransport::sleep(int peer, const Where& where, Clock::time_point start) {
  ShmRegion::Line* line = region_->line(peer);
  const uint32_t wanted = static_cast<uint32_t>(round_);
  const auto arrived = [&] { return static_cast<int32_t>(line->posted.load(std::memory_order_seq_cst) - wanted) >= 0; };
  const Clock::duration before = Clock::now() - start;
  const std::chrono::nanoseconds slice =
      std::clamp<std::chrono::nanoseconds>(limit_ - before, milliseconds(1), before < kSlice ? kFirstSlice : kSlice);
  line->sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = line->posted.load(std::memory_order_seq_cst);
  const bool stopped = region_->header()->abort_state.load(std::memory_order_acquire) == kAborted ||
                       line->state.load(std::memory_order_seq_cst) == kLeft;
  if (static_cast<int32_t>(seen - wanted) < 0 && !stopped) futex_wait(&line->posted, seen, slice);
  line->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  if (arrived()) return true;

  const Clock::duration elapsed = Clock::now() - start;
  const auto context = [&] {
    const std::string last = last_seen(peer);
    return here(where) + ": waited " + seconds(elapsed) + " (limit " +
           seconds(std::chrono::duration_cast<Clock::duration>(limit_)) + ", the timeout of this call) for rank " +
           shown(peer) + ", expected its message " + std::to_string(round_) + ", got up to " +
           std::to_string(round_ - (wanted - line->posted.load(std::memory_order_acquire))) +
           (last.empty() ? std::string() : "; it was last seen in '" + last + "'");
  };
  require_usable(where);
  const uint32_t state = line->state.load(std::memory_order_acquire);
  if (state == kLeft) {
    if (arrived()) return true;  // it posted and left while we looked
    fail(TransportFailure::kPeerGone, context() + ". Rank " + shown(peer) +
                                          " has left the group (destroyed or shut down). The ranks must make the same "
                                          "calls before they destroy a group");
  }
  const int64_t pid = line->pid.load();
  if (state == kAttached) {
    const ProcessStat stat = process_stat(pid);
    const bool dead =
        stat.state == 0 || stat.state == 'Z' || stat.state == 'X' || stat.start_time != line->start_time.load();
    if (dead && !arrived()) {
      fail(TransportFailure::kPeerGone, context() + ". Its process " + std::to_string(pid) +
                                            " is gone: look at the log of rank " + shown(peer) +
                                            " and for the kernel's out-of-memory messages");
    }
    if (elapsed >= limit_ && !arrived()) {
      fail(TransportFailure::kTimeout,
           context() + ". Its process " + std::to_string(pid) +
               (stat.state == 'T' || stat.state == 't' ? " is stopped (SIGSTOP or a debugger)" : " lives") +
               ": see what rank " + shown(peer) + " is doing; perhaps it makes other calls, or fewer, than this rank");
    }
  } else if (elapsed >= limit_ && !arrived()) {
    fail(TransportFailure::kTimeout, context() + ". It has not attached to the shared memory");
  }
  return arrived();
}

}  // namespace tbik
