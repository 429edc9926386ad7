// The transports over shared memory and sockets and the collectives above them, without torch: ranks as threads (for
// sanitizers) and as forked processes (for faults). Run by tests/test_transport.py, which builds it three times: plain,
// thread and address sanitizer. Every failure prints a line and ends the program with status 1.
//
//   test_transport bits [seed] [n]  every placement against a recursive fold, over every transport; one in n of all
//                                   pairs of op and element type over shared memory, one in 4n over the others
//   test_transport processes        attach by token in forked ranks; no name in /dev/shm, no file left open
//   test_transport faults N [seed] [shm|tcp|tcp+shm]
//                                   N times each of SIGKILL, SIGSTOP, missing participant, mismatched count
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <thread>

#include "collective.h"
#include "transport_shm.h"
#include "transport_tcp.h"

namespace tbik {

// The rest of csrc/gemm.cpp is not needed here.
void FreeDeleter::operator()(void* p) const { std::free(p); }
AlignedBuffer aligned_buffer(int64_t bytes) {
  return AlignedBuffer(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
}
void require_narrowing(const char*, DType, const Schedule&, DType) {}

}  // namespace tbik

namespace {

using namespace tbik;
using Clock = std::chrono::steady_clock;

const Combine kCombine{&fold, portable_kernels()->loops};

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "FAILED: %s\n", text.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

void require(bool condition, const std::string& text) {
  if (!condition) fail(text);
}

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// --- a second, slow definition ----------------------------------------------------------------

float widen_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

uint16_t narrow_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
T apply(Op op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case Op::kProduct:
        return a * b;
      case Op::kMin:
        return a != a ? a : b != b ? b : (a < b || (a == b && std::signbit(a))) ? a : b;
      case Op::kMax:
        return a != a ? a : b != b ? b : (a > b || (a == b && !std::signbit(a))) ? a : b;
      default:
        return a + b;
    }
  } else {
    using U = std::make_unsigned_t<T>;
    switch (op) {
      case Op::kProduct:
        return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
      case Op::kMin:
        return std::min(a, b);
      case Op::kMax:
        return std::max(a, b);
      case Op::kBand:
        return a & b;
      case Op::kBor:
        return a | b;
      case Op::kBxor:
        return a ^ b;
      default:
        return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    }
  }
}

template <class T>
T tree(Op op, const std::vector<T>& x, size_t lo, size_t hi) {
  if (hi - lo == 1) return x[lo];
  size_t power = 1;
  while (power * 2 < hi - lo) power *= 2;
  return apply(op, tree(op, x, lo, lo + power), tree(op, x, lo + power, hi));
}

struct Case {
  Element element;
  Op op;
  int64_t count;
  bool same_factor = true;
};

double factor_of(const Case& c, int rank) { return c.same_factor ? 0.3 : 0.3 + 0.1 * rank; }

using Bytes = std::vector<unsigned char>;

template <class T>
T get(const Bytes& bytes, int64_t i) {
  T x;
  std::memcpy(&x, bytes.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return x;
}
template <class T>
void put(Bytes& bytes, int64_t i, T x) {
  std::memcpy(bytes.data() + i * static_cast<int64_t>(sizeof(T)), &x, sizeof(T));
}

template <class T>
T root_of(const Case& c, std::vector<T> leaves) {
  if (c.op == Op::kPremulSum && !c.same_factor) {
    for (size_t r = 0; r < leaves.size(); ++r)
      leaves[r] = leaves[r] * static_cast<T>(factor_of(c, static_cast<int>(r)));
  }
  T root = tree(c.op, leaves, 0, leaves.size());
  if constexpr (std::is_floating_point_v<T>) {
    if (c.op == Op::kAvg) root = root / static_cast<T>(leaves.size());
    if (c.op == Op::kPremulSum && c.same_factor) root = root * static_cast<T>(factor_of(c, 0));
    if (root != root) root = std::numeric_limits<T>::quiet_NaN();
  }
  return root;
}

template <class T>
void expect_plain(const Case& c, const std::vector<Bytes>& values, Bytes& out) {
  for (int64_t i = 0; i < c.count; ++i) {
    std::vector<T> leaves;
    for (const Bytes& v : values) leaves.push_back(get<T>(v, i));
    put(out, i, root_of(c, leaves));
  }
}

Bytes expect(const Case& c, const std::vector<Bytes>& values) {
  Bytes out(static_cast<size_t>(c.count * size_of(c.element)));
  switch (c.element) {
    case Element::kFloat32:
      expect_plain<float>(c, values, out);
      break;
    case Element::kFloat64:
      expect_plain<double>(c, values, out);
      break;
    case Element::kInt8:
      expect_plain<int8_t>(c, values, out);
      break;
    case Element::kUInt8:
      expect_plain<uint8_t>(c, values, out);
      break;
    case Element::kInt16:
      expect_plain<int16_t>(c, values, out);
      break;
    case Element::kInt32:
      expect_plain<int32_t>(c, values, out);
      break;
    case Element::kInt64:
      expect_plain<int64_t>(c, values, out);
      break;
    case Element::kBFloat16:
      for (int64_t i = 0; i < c.count; ++i) {
        std::vector<float> leaves;
        for (const Bytes& v : values) leaves.push_back(widen_bf16(get<uint16_t>(v, i)));
        put(out, i, narrow_bf16(root_of(c, leaves)));
      }
      break;
    default:
      fail("no expectation for this element type");
  }
  return out;
}

Bytes random_values(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(static_cast<size_t>(c.count * size_of(c.element)));
  for (int64_t i = 0; i < c.count; ++i) {
    const uint64_t r = random();
    const double magnitude = std::ldexp(1.0 + static_cast<double>(r >> 12) * 0x1p-52, static_cast<int>(r % 40) - 20);
    const double x = (r >> 8 & 1) != 0 ? magnitude : -magnitude;
    const bool special = r >> 40 & 1 && i % 17 == 3;  // a zero, an infinity or a NaN now and then
    const double odd[] = {0.0, -0.0, std::numeric_limits<double>::infinity(), std::nan(""), 1e-310, 1e-40};
    const double value = special ? odd[r >> 50 & 3] : x;
    switch (c.element) {
      case Element::kFloat32:
        put(bytes, i, static_cast<float>(value));
        break;
      case Element::kFloat64:
        put(bytes, i, value);
        break;
      case Element::kBFloat16:
        put(bytes, i, narrow_bf16(static_cast<float>(value)));
        break;
      default:
        std::memcpy(bytes.data() + i * size_of(c.element), &r, static_cast<size_t>(size_of(c.element)));
    }
  }
  return bytes;
}

// --- ranks ----------------------------------------------------------------

enum class Wires { kShm, kTcp, kBoth };

const char* name_of(Wires wires) { return wires == Wires::kShm ? "shm" : wires == Wires::kTcp ? "tcp" : "tcp+shm"; }

// What the ranks of one group need, made before they are started. kBoth: "hosts" of two ranks, the last perhaps of one.
struct Group {
  Group(Wires wires, int world, int64_t capacity) : wires(wires), world(world), capacity(capacity) {
    if (wires == Wires::kShm) regions.push_back(ShmRegion::create(world, capacity));
    for (int host = 0; wires == Wires::kBoth && host * 2 < world; ++host) {
      const int ranks = std::min(2, world - host * 2);
      regions.push_back(ranks > 1 ? ShmRegion::create(ranks, capacity) : nullptr);
    }
    ends.assign(static_cast<size_t>(world), std::vector<int>(static_cast<size_t>(world), -1));
    for (int p = 0; p < world; ++p) {
      for (int q = p + 1; q < world && wires != Wires::kShm; ++q) {
        if (wires == Wires::kBoth && p / 2 == q / 2) continue;
        int pair[2];
        require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
        ends[static_cast<size_t>(p)][static_cast<size_t>(q)] = pair[0];
        ends[static_cast<size_t>(q)][static_cast<size_t>(p)] = pair[1];
      }
    }
  }

  std::unique_ptr<Transport> transport(int rank) const {
    if (wires == Wires::kShm) return std::make_unique<ShmTransport>(regions[0], rank, world);
    std::shared_ptr<ShmRegion> region;
    std::vector<int> local;
    if (wires == Wires::kBoth && regions[static_cast<size_t>(rank / 2)]) {
      region = regions[static_cast<size_t>(rank / 2)];
      local = {rank / 2 * 2, rank / 2 * 2 + 1};
    }
    return std::make_unique<TcpTransport>(ends[static_cast<size_t>(rank)], rank, capacity, region, local);
  }

  // In a forked rank: attach as another process would, and drop the ends of the others.
  void keep_only(int rank) {
    for (size_t p = 0; p < ends.size(); ++p) {
      if (static_cast<int>(p) != rank) drop(ends[p]);
    }
    for (auto& region : regions) {
      if (region) region = ShmRegion::attach(region->token(), wires == Wires::kShm ? world : 2);
    }
  }
  void drop_all() {
    for (auto& of_rank : ends) drop(of_rank);
  }

  Wires wires;
  int world;
  int64_t capacity;
  std::vector<std::shared_ptr<ShmRegion>> regions;
  std::vector<std::vector<int>> ends;

 private:
  static void drop(std::vector<int>& of_rank) {
    for (int& fd : of_rank) {
      if (fd >= 0) close(fd);
      fd = -1;
    }
  }
};

// body(transport, rank) on `world` threads over one mapping.
void on_threads(Wires wires, int world, int64_t capacity, const std::function<void(Transport&, int)>& body) {
  const Group group(wires, world, capacity);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const auto transport = group.transport(rank);
      transport->set_limit(std::chrono::seconds(60));
      body(*transport, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Request request_of(const Case& c, int rank, void* in, void* out) {
  Request request;
  request.op = c.op;
  request.element = c.element;
  request.factor = factor_of(c, rank);
  request.inputs = {in};
  request.counts = {c.count};
  request.out = out;
  return request;
}

void check_bits(uint64_t seed, uint64_t one_in, Wires wires) {
  std::mt19937_64 random(seed);
  const Element elements[] = {Element::kFloat32, Element::kFloat64, Element::kBFloat16, Element::kInt32,
                              Element::kInt8,    Element::kUInt8,   Element::kInt16,    Element::kInt64};
  const Op ops[] = {Op::kSum,  Op::kAvg, Op::kProduct, Op::kMin,      Op::kMax,
                    Op::kBand, Op::kBor, Op::kBxor,    Op::kPremulSum};
  int64_t compared = 0;
  for (int world = 1; world <= 9; ++world) {
    if (wires != Wires::kShm && world % 3 == 0 && world > 3) continue;
    std::vector<Case> cases;
    for (Element element : elements) {
      for (Op op : ops) {
        if (!refusal_of(op, element).empty()) continue;
        if (random() % (wires == Wires::kShm ? one_in : 4 * one_in) != 0) continue;
        for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{1000}, int64_t(random() % 4000)}) {
          cases.push_back({element, op, count, random() % 2 == 0});
        }
      }
    }
    cases.push_back({Element::kFloat32, Op::kSum, 30007});
    for (Placement chosen : {Placement::kOneShot, Placement::kTwoShot, Placement::kTwoLevel}) {
      for (int node_size = 1; node_size <= world; ++node_size) {
        if (world % node_size != 0 || (chosen != Placement::kTwoLevel && node_size != world)) continue;
        if (chosen == Placement::kTwoLevel && node_size == world) continue;
        Settings settings;
        settings.placement = chosen;
        settings.node_size = node_size;
        settings.segment_bytes = 4096;
        settings.single_bytes = 4096;
        std::vector<std::vector<Bytes>> values(cases.size());
        std::vector<Bytes> wanted;
        for (size_t i = 0; i < cases.size(); ++i) {
          for (int r = 0; r < world; ++r)
            values[i].push_back(random_values(cases[i], seed + i * 64 + static_cast<size_t>(r)));
          wanted.push_back(expect(cases[i], values[i]));
        }
        on_threads(wires, world, 32768, [&](Transport& transport, int rank) {
          Collectives collectives(transport, settings, kCombine);
          std::mt19937_64 jitter(seed * 100 + static_cast<uint64_t>(rank));
          for (size_t i = 0; i < cases.size(); ++i) {
            const std::string what = std::string(name_of(wires)) + " " + name_of(chosen) + " world " +
                                     std::to_string(world) + " node " + std::to_string(node_size) + " " +
                                     name_of(cases[i].element) + " " + name_of(cases[i].op) + " " +
                                     std::to_string(cases[i].count) + " rank " + std::to_string(rank);
            Bytes x = values[i][static_cast<size_t>(rank)];
            if (jitter() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(jitter() % 200));
            collectives.run(request_of(cases[i], rank, x.data(), x.data()));  // in place
            require(x == wanted[i], "all_reduce in place: " + what);

            Bytes y = values[i][static_cast<size_t>(rank)];
            Request reduce = request_of(cases[i], rank, y.data(), y.data());
            reduce.collective = Collective::kReduce;
            reduce.root = static_cast<int>(i) % world;
            collectives.run(reduce);
            require(y == (rank == reduce.root ? wanted[i] : values[i][static_cast<size_t>(rank)]), "reduce: " + what);

            // Uneven chunks: rank p gets elements [p*(p+1)/2 ...) as far as there are any.
            Request scatter = request_of(cases[i], rank, nullptr, nullptr);
            scatter.collective = Collective::kReduceScatter;
            scatter.inputs.clear();
            scatter.counts.clear();
            const Bytes& z = values[i][static_cast<size_t>(rank)];
            const int64_t bytes = size_of(cases[i].element);
            int64_t at = 0;
            int64_t own = 0;
            for (int p = 0; p < world; ++p) {
              const int64_t rest = cases[i].count - at;
              const int64_t take = p + 1 == world ? rest
                                                  : std::min(rest, cases[i].count / world + p - world / 2 > 0
                                                                       ? cases[i].count / world + p - world / 2
                                                                       : int64_t{0});
              if (p == rank) own = at;
              scatter.inputs.push_back(z.data() + at * bytes);
              scatter.counts.push_back(take);
              at += take;
            }
            Bytes part(static_cast<size_t>(scatter.counts[static_cast<size_t>(rank)] * bytes));
            scatter.out = part.data();
            collectives.run(scatter);
            require(std::equal(part.begin(), part.end(), wanted[i].begin() + own * bytes), "reduce_scatter: " + what);
            if (i % 50 == 0) collectives.barrier();
          }
        });
        compared += static_cast<int64_t>(cases.size()) * world * 3;
      }
    }
  }
  std::printf("bits, %s: %lld results equal\n", name_of(wires), static_cast<long long>(compared));
}

// --- processes ----------------------------------------------------------------

size_t open_files() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

size_t shm_names() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    count += entry.path().filename().string().find("tbik") != std::string::npos;
  }
  return count;
}

struct Child {
  pid_t pid;
  int from;  // read end: its report
};

int g_to_parent = -1;

Child start(int rank, const std::function<std::string(int)>& body) {
  int ends[2];
  require(pipe(ends) == 0, "pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    g_to_parent = ends[1];
    const std::string text = body(rank);
    require(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()), "write");
    std::_Exit(0);
  }
  close(ends[1]);
  return {pid, ends[0]};
}

std::string report_of(const Child& child) {
  std::string text;
  char buffer[4096];
  ssize_t n;
  while ((n = read(child.from, buffer, sizeof buffer)) > 0) text.append(buffer, static_cast<size_t>(n));
  close(child.from);
  return text;
}

void check_processes() {
  const int world = 4;
  const size_t files = open_files();
  const Case c{Element::kFloat32, Op::kSum, 100003};
  std::vector<Bytes> values;
  for (int r = 0; r < world; ++r) values.push_back(random_values(c, 7 + static_cast<uint64_t>(r)));
  const Bytes wanted = expect(c, values);
  {
    auto region = ShmRegion::create(world, 1 << 16);
    const std::string token = region->token();
    std::vector<Child> children;
    for (int rank = 0; rank < world; ++rank) {
      children.push_back(start(rank, [&](int r) -> std::string {
        try {
          ShmTransport transport(ShmRegion::attach(token, world), r, world);
          transport.set_limit(std::chrono::seconds(30));
          Collectives collectives(transport, {}, kCombine);
          collectives.barrier();
          for (int i = 0; i < 20; ++i) {
            Bytes x = values[static_cast<size_t>(r)];
            collectives.run(request_of(c, r, x.data(), x.data()));
            if (x != wanted) return "bits differ";
          }
          collectives.barrier();
          return "ok";
        } catch (const std::exception& error) {
          return error.what();
        }
      }));
    }
    for (const Child& child : children) {
      const std::string text = report_of(child);
      require(text == "ok", "process: " + text);
      waitpid(child.pid, nullptr, 0);
    }
    require(shm_names() == 0, "a name in /dev/shm");
    for (const std::string& bad :
         {std::string("nonsense"), token.substr(0, token.size() - 1) + (token.back() == '0' ? "1" : "0")}) {
      try {
        ShmRegion::attach(bad, world);
        fail("attached to " + bad);
      } catch (const TransportError&) {
      }
    }
    try {
      ShmRegion::attach(token, world + 1);
      fail("attached with another world size");
    } catch (const TransportError&) {
    }
    try {
      ShmTransport again(ShmRegion::attach(token, world), 0, world);
      fail("rank 0 attached twice");
    } catch (const TransportError&) {
    }
  }
  require(open_files() == files, "files left open");
}

// A forked child may not use what it inherited, and does no harm when it drops it.
void check_fork() {
  auto region = ShmRegion::create(1, 1 << 16);
  auto transport = std::make_unique<ShmTransport>(region, 0, 1);
  const Child child = start(0, [&](int) -> std::string {
    std::string text = "no error";
    try {
      transport->barrier({}, {"barrier", 1, "x", 0, 1});
    } catch (const TransportError& error) {
      text = error.what();
    }
    transport.reset();
    return text;
  });
  const std::string text = report_of(child);
  waitpid(child.pid, nullptr, 0);
  require(text.find("forked") != std::string::npos, "fork: " + text);
  transport->barrier({}, {"barrier", 1, "x", 0, 1});
}

// --- faults ----------------------------------------------------------------

enum class Fault { kKill, kStop, kMissing, kMismatch };

const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::kKill:
      return "SIGKILL";
    case Fault::kStop:
      return "SIGSTOP";
    case Fault::kMissing:
      return "missing participant";
    case Fault::kMismatch:
      return "mismatched count";
  }
  return "?";
}

// One trial: `world` processes loop over all-reduces of random sizes; at a random moment the fault happens to one rank.
// Every other rank must raise within the limit + 1 s after it, name the rank, and find its input unchanged.
double trial(Fault fault, Wires wires, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int world = 2 + static_cast<int>(random() % 3);
  const int culprit = static_cast<int>(random() % static_cast<uint64_t>(world));
  const int64_t moment_us = static_cast<int64_t>(random() % 20000);
  const int at_call = static_cast<int>(random() % 50);
  const double limit = 0.5;
  Group group(wires, world, 1 << 16);
  std::vector<Child> children;
  for (int rank = 0; rank < world; ++rank) {
    children.push_back(start(rank, [&](int r) -> std::string {
      std::mt19937_64 sizes(seed);  // the same on all ranks
      group.keep_only(r);
      const auto made = group.transport(r);
      Transport& transport = *made;
      Settings settings;
      settings.segment_bytes = 16384;
      settings.single_bytes = 16384;
      Collectives collectives(transport, settings, kCombine);
      transport.set_limit(std::chrono::seconds(20));
      collectives.barrier();
      transport.set_limit(std::chrono::milliseconds(static_cast<int>(limit * 1000)));
      require(write(g_to_parent, "r", 1) == 1, "write");
      for (int call = 0;; ++call) {
        Case c{Element::kFloat32, Op::kSum, static_cast<int64_t>(sizes() % 60000)};
        if (fault == Fault::kMissing && r == culprit && call == at_call) {
          std::this_thread::sleep_for(std::chrono::milliseconds(static_cast<int>(limit * 1000) + 2000));
          return "culprit";
        }
        if (fault == Fault::kMismatch && r == culprit && call == at_call) ++c.count;
        const Bytes before = random_values(c, 1 + static_cast<uint64_t>(r));
        Bytes x = before;
        const Clock::time_point start = Clock::now();
        try {
          collectives.run(request_of(c, r, x.data(), x.data()));
        } catch (const TransportError& error) {
          if (x != before) return std::string("input changed: ") + error.what();
          return std::to_string(since(start)) + " " + error.what();
        }
      }
    }));
  }
  group.drop_all();
  for (const Child& child : children) {
    char ready;
    require(read(child.from, &ready, 1) == 1 && ready == 'r', "a rank did not start");
  }
  const Clock::time_point begin = Clock::now();
  if (fault == Fault::kKill || fault == Fault::kStop) {
    std::this_thread::sleep_for(std::chrono::microseconds(moment_us));
    kill(children[static_cast<size_t>(culprit)].pid, fault == Fault::kKill ? SIGKILL : SIGSTOP);
  }
  double worst = 0;
  for (int rank = 0; rank < world; ++rank) {
    if (rank == culprit && fault != Fault::kMismatch) continue;
    const std::string text = report_of(children[static_cast<size_t>(rank)]);
    const std::string where = std::string(name_of(wires)) + ", " + name_of(fault) + " of rank " +
                              std::to_string(culprit) + ", world " + std::to_string(world) + ", seed " +
                              std::to_string(seed) + ", rank " + std::to_string(rank) + ": '" + text + "'";
    const double elapsed = std::atof(text.c_str());
    worst = std::max(worst, elapsed);
    require(!text.empty() && text[0] >= '0' && text[0] <= '9', "no error, or not this one: " + where);
    require(elapsed <= limit + 1, "late: " + where);
    require(text.find("rank " + std::to_string(culprit)) != std::string::npos, "culprit not named: " + where);
  }
  kill(children[static_cast<size_t>(culprit)].pid, SIGKILL);
  for (const Child& child : children) waitpid(child.pid, nullptr, 0);
  close(children[static_cast<size_t>(culprit)].from);
  require(since(begin) < 30, "a trial took too long");
  require(shm_names() == 0, "a name in /dev/shm");
  return worst;
}

void check_faults(int trials, Wires wires, uint64_t seed) {
  for (Fault fault : {Fault::kKill, Fault::kStop, Fault::kMissing, Fault::kMismatch}) {
    double worst = 0;
    for (int i = 0; i < trials; ++i) worst = std::max(worst, trial(fault, wires, seed + static_cast<uint64_t>(i)));
    std::printf("%s, %s: %d trials, slowest error after %.3f s (limit 0.5 s)\n", name_of(wires), name_of(fault), trials,
                worst);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "bits") {
      for (Wires wires : {Wires::kShm, Wires::kTcp, Wires::kBoth}) {
        check_bits(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1,
                   argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1, wires);
      }
    } else if (mode == "processes") {
      check_fork();
      check_processes();
    } else if (mode == "faults") {
      for (Wires wires : {Wires::kShm, Wires::kTcp, Wires::kBoth}) {
        if (argc > 4 && std::string(argv[4]) != name_of(wires)) continue;
        check_faults(argc > 2 ? std::atoi(argv[2]) : 5, wires, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
      }
    } else {
      std::fprintf(stderr, "usage: test_transport bits [seed] [n] | processes | faults N [seed] [transport]\n");
      return 2;
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
  return 0;
}
