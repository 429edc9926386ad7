// See process_group.h. The only C++ that knows torch.distributed; holds the Python module tbik._C_dist.
#include "process_group.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "communicator.h"
#include "movement.h"

namespace py = pybind11;

namespace tbik {

using c10d::OpType;
using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

namespace {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
constexpr OpType kReduceScatterCoalesced = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else  // an older torch has no name for it
constexpr OpType kReduceScatterCoalesced = OpType::COALESCED;
#endif

constexpr milliseconds kDrain{5000};
constexpr milliseconds kGrace{500};  // the worker's own error, which says more, comes first
constexpr int64_t kGlooMessage = int64_t{8} << 20;

[[noreturn]] void refuse(const std::string& text) { C10_THROW_ERROR(ValueError, "tbik: " + text); }

Element element_of(at::ScalarType type, const char* where) {
  switch (type) {
    case at::kFloat:
      return Element::kFloat32;
    case at::kDouble:
      return Element::kFloat64;
    case at::kBFloat16:
      return Element::kBFloat16;
    case at::kHalf:
      return Element::kFloat16;
    case at::kChar:
      return Element::kInt8;
    case at::kByte:
      return Element::kUInt8;
    case at::kShort:
      return Element::kInt16;
    case at::kInt:
      return Element::kInt32;
    case at::kLong:
      return Element::kInt64;
    case at::kBool:
      return Element::kBool;
    default:
      refuse(
          std::string(where) + ": " + at::toString(type) +
          " has no reduction here; expected float32, float64, bfloat16, float16, int8, uint8, int16, int32, int64 or "
          "bool");
  }
}

Op op_of(const c10d::ReduceOp& op, const char* where) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return Op::kSum;
    case c10d::ReduceOp::AVG:
      return Op::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return Op::kProduct;
    case c10d::ReduceOp::MIN:
      return Op::kMin;
    case c10d::ReduceOp::MAX:
      return Op::kMax;
    case c10d::ReduceOp::BAND:
      return Op::kBand;
    case c10d::ReduceOp::BOR:
      return Op::kBor;
    case c10d::ReduceOp::BXOR:
      return Op::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return Op::kPremulSum;
    case c10d::ReduceOp::UNUSED:
      break;
  }
  refuse(std::string(where) + ": unknown reduction operator");
}

double factor_of(const c10d::ReduceOp& op, const char* where) {
  if (static_cast<c10d::ReduceOp::RedOpType>(op) != c10d::ReduceOp::PREMUL_SUM) return 1.0;
  // by the name that torch 2.11 has too
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) refuse(std::string(where) + ": PREMUL_SUM without a factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

// What Python raises, as this backend's errors. The text says it all; only the type is another.
template <class Call>
auto from_python(const Call& call) {
  try {
    return call();
  } catch (py::error_already_set& error) {
    std::string text = py::str(error.value()).cast<std::string>();
    if (text.rfind("tbik: ", 0) == 0) text = text.substr(6);
    if (error.matches(PyExc_ValueError)) refuse(text);
    if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt
    C10_THROW_ERROR(DistBackendError, "tbik: " + text);
  }
}

// A Python object that may die on any thread, or after Python.
std::shared_ptr<py::object> held(py::object object) {
  return {new py::object(std::move(object)), [](py::object* owned) {
            if (Py_IsInitialized() == 0) {
              owned->release();
              delete owned;
              return;
            }
            const py::gil_scoped_acquire gil;
            delete owned;
          }};
}

bool is_timeout(const std::string& text) {
  return text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
}

}  // namespace

// --- bytes over another backend
// ----------------------------------------------------------------------------------------

// One alltoall_base per exchange. Each message begins with its tag. gloo ends the process that receives more bytes than
// it expects, so every receive has room for the largest message: ranks that make different calls then find it in the
// tags. Before the data of a group's first call (of every call with `check`) the tags alone are exchanged.
class GroupTransport final : public Transport {
 public:
  GroupTransport(c10::intrusive_ptr<c10d::Backend> group, bool check)
      : Transport(group->getRank(), group->getSize()), group_(std::move(group)), check_(check) {
    tags_.resize(static_cast<size_t>(size_));
    // Address space only: pages that no message reaches are never touched.
    const size_t bytes = static_cast<size_t>(kRoom) * static_cast<size_t>(std::max(1, size_ - 1));
    void* room = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
      throw TransportError(TransportFailure::kMisuse, "gloo: no address space for " + std::to_string(bytes) +
                                                          " bytes of messages: " + std::strerror(errno));
    }
    room_ = {static_cast<std::byte*>(room), [bytes](std::byte* memory) { munmap(memory, bytes); }};
  }

  const char* name() const override { return "gloo"; }
  int64_t capacity() const override { return kGlooMessage; }

  std::byte* outgoing() override {
    std::vector<std::byte>& buffer = messages_[(round_ + 1) % 2];
    if (buffer.empty()) buffer.resize(static_cast<size_t>(kGlooMessage));
    return buffer.data();
  }

  void exchange(const Tag& tag, const std::vector<Part>& parts, const Where& where) override {
    if (const std::string reason = broken(); !reason.empty()) {
      throw TransportError(TransportFailure::kAborted, "gloo: " + describe(where, rank_, size_) +
                                                           ": an earlier call on this group failed (" + reason +
                                                           "). Destroy the group and make a new one");
    }
    const std::byte* own = outgoing();
    ++round_;
    parts_ = &parts;
    own_ = own;
    tags_[static_cast<size_t>(rank_)] = tag;
    if (size_ == 1) return;
    const bool new_call = tag.call != last_call_;
    last_call_ = tag.call;
    if (new_call && (check_ || round_ == 1)) {
      pack(tag, own, {});
      move({}, where, "comparison of calls");
      for (int p = 0; p < size_; ++p) {
        if (tags_[static_cast<size_t>(p)].call != tag.call) return;  // the caller compares, and finds it
      }
    }
    pack(tag, own, parts);
    move(parts, where, where.phase);
  }

  const std::byte* incoming(int peer, size_t part) const override {
    if (peer == rank_) return own_ + (*parts_)[part].to[static_cast<size_t>(rank_)].offset;
    return room_.get() + starts_[static_cast<size_t>(peer) * parts_->size() + part];
  }
  const Tag& tag(int peer) const override { return tags_[static_cast<size_t>(peer)]; }

  void abort(const std::string& reason) override {
    give_up(reason);
    try {
      group_->abort();
    } catch (const std::exception&) {  // a backend without abort: its own timeout ends the wait
    }
  }

 private:
  void pack(const Tag& tag, const std::byte* own, const std::vector<Part>& parts) {
    send_sizes_.assign(static_cast<size_t>(size_), 0);
    int64_t total = 0;
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      int64_t size = sizeof(Tag);
      for (const Part& part : parts) size += part.to.empty() ? 0 : part.to[static_cast<size_t>(p)].size;
      send_sizes_[static_cast<size_t>(p)] = size;
      total += size;
    }
    out_->resize(static_cast<size_t>(total));
    std::byte* at = out_->data();
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      std::memcpy(at, &tag, sizeof(Tag));
      at += sizeof(Tag);
      for (const Part& part : parts) {
        if (part.to.empty()) continue;
        const Piece& piece = part.to[static_cast<size_t>(p)];
        if (piece.size > 0) std::memcpy(at, own + piece.offset, static_cast<size_t>(piece.size));
        at += piece.size;
      }
    }
  }

  void move(const std::vector<Part>& parts, const Where& where, const char* phase) {
    std::vector<int64_t> receive_sizes(static_cast<size_t>(size_), kRoom);  // gloo takes them over
    receive_sizes[static_cast<size_t>(rank_)] = 0;
    starts_.assign(static_cast<size_t>(size_) * parts.size(), 0);
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      int64_t at = room_of(p) + static_cast<int64_t>(sizeof(Tag));
      for (size_t i = 0; i < parts.size(); ++i) {
        starts_[static_cast<size_t>(p) * parts.size() + i] = at;
        if (!parts[i].from.empty()) at += parts[i].from[static_cast<size_t>(p)].size;
      }
    }
    const auto start = std::chrono::steady_clock::now();
    try {
      c10d::AllToAllOptions options;
      options.timeout = std::chrono::duration_cast<milliseconds>(limit_);
      // Each keeps its memory: gloo may still use it when an abort has ended this wait.
      at::Tensor in = at::from_blob(room_.get(), {kRoom * (size_ - 1)}, [keep = room_](void*) {}, at::kByte);
      at::Tensor out =
          at::from_blob(out_->data(), {static_cast<int64_t>(out_->size())}, [keep = out_](void*) {}, at::kByte);
      wait(*group_->alltoall_base(in, out, receive_sizes, send_sizes_, options));
    } catch (const Given& given) {
      throw TransportError(TransportFailure::kAborted, "gloo: " + describe(where, rank_, size_) +
                                                           ": this rank has given up the group: " + given.up);
    } catch (const std::exception& error) {
      const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      const std::string reason = std::string(error.what()).substr(0, 400);
      give_up("call " + std::to_string(where.call));
      Where here = where;
      here.phase = phase;
      throw TransportError(
          is_timeout(reason) ? TransportFailure::kTimeout : TransportFailure::kPeerGone,
          "gloo: " + describe(here, rank_, size_) + ": failed after " + std::to_string(elapsed) + " s (limit " +
              std::to_string(std::chrono::duration<double>(limit_).count()) +
              " s, the timeout of this call). The group is not usable any more. Look for the rank that failed "
              "first; if all live, one of them makes fewer calls. gloo says: " +
              reason);
    }
    for (int p = 0; p < size_; ++p) {
      if (p != rank_) std::memcpy(&tags_[static_cast<size_t>(p)], room_.get() + room_of(p), sizeof(Tag));
    }
  }

  struct Given {
    std::string up;
  };

  // gloo's own wait ends at its limit, but nobody can wake it.
  void wait(c10d::Work& work) {
    const std::shared_ptr<Bell> bell = bell_;
    {
      const std::lock_guard<std::mutex> lock(bell->mutex);
      bell->rung = false;
    }
    work.getFuture()->addCallback([bell](c10::ivalue::Future&) {
      const std::lock_guard<std::mutex> lock(bell->mutex);
      bell->rung = true;
      bell->changed.notify_all();
    });
    {
      std::unique_lock<std::mutex> lock(bell->mutex);
      const auto until = std::chrono::steady_clock::now() + limit_ + kGrace;
      bell->changed.wait_until(lock, until, [&] { return bell->rung || !bell->reason.empty(); });
      if (!bell->rung && !bell->reason.empty()) throw Given{bell->reason};
    }
    work.wait(kGrace);  // has ended, or fails
  }

  std::string broken() const {
    const std::lock_guard<std::mutex> lock(bell_->mutex);
    return bell_->reason;
  }

  void give_up(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(bell_->mutex);
    if (bell_->reason.empty()) bell_->reason = reason.substr(0, 300);
    bell_->changed.notify_all();
  }

  // Rung by gloo's thread at the end of an exchange, or by whoever gives the group up.
  struct Bell {
    std::mutex mutex;
    std::condition_variable changed;
    bool rung = false;
    std::string reason;  // why the group is given up
  };

  int64_t room_of(int peer) const { return kRoom * (peer < rank_ ? peer : peer - 1); }

  static constexpr int64_t kRoom = kGlooMessage + 4096;  // of one peer: its message and tag

  c10::intrusive_ptr<c10d::Backend> group_;
  const bool check_;
  uint64_t round_ = 0;
  std::array<uint64_t, 7> last_call_{};
  std::vector<std::byte> messages_[2];
  std::shared_ptr<std::vector<std::byte>> out_ = std::make_shared<std::vector<std::byte>>();
  std::shared_ptr<std::byte> room_;
  std::vector<int64_t> send_sizes_;
  std::vector<int64_t> starts_;  // of part i from peer p in room_: [p][i]
  std::vector<Tag> tags_;
  const std::vector<Part>* parts_ = nullptr;
  const std::byte* own_ = nullptr;
  const std::shared_ptr<Bell> bell_ = std::make_shared<Bell>();
};

// --- the thread that reduces
// -------------------------------------------------------------------------------------------

// Runs jobs one after another, in the order of add(); run_here() takes the place of the thread when nothing is queued.
class Engine {
 public:
  Engine(std::unique_ptr<Transport> transport, const Settings& settings, const Combine& combine, milliseconds limit)
      : transport(std::move(transport)),
        collectives(*this->transport, settings, combine),
        default_limit(limit),
        fork_generation_(fork_generation()) {}

  using Job = std::function<void()>;

  static void start(const std::shared_ptr<Engine>& engine) {
    engine->thread_ = std::thread([engine] { engine->loop(); });
  }

  bool forked() const { return fork_generation_ != fork_generation(); }

  void add(Job job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_all();
  }

  // True if the job ran here, on this thread.
  bool run_here(const Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (busy_ || stop_ || !jobs_.empty()) return false;
      busy_ = true;
    }
    job();
    bool waiting;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
      waiting = stop_ || !jobs_.empty();
    }
    if (waiting) wake_.notify_all();
    return true;
  }

  bool stopped() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stop_;
  }

  // Queued jobs get kDrain to finish; then the group is given up, so that neither this rank nor its peers wait for the
  // limit of a call that cannot end any more (a rank that failed elsewhere and cleans up).
  void stop() {
    if (forked()) {
      if (thread_.joinable()) thread_.detach();
      return;
    }
    const bool on_worker = thread_.get_id() == std::this_thread::get_id();
    bool idle;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      stop_ = true;
      wake_.notify_all();
      const auto until = std::chrono::steady_clock::now() + kDrain;
      idle = on_worker || wake_.wait_until(lock, until, [this] { return !busy_ && jobs_.empty(); });
    }
    if (!idle) {
      transport->abort("rank " + std::to_string(transport->rank()) +
                       ": the group was shut down or dropped while calls were under way");
    }
    if (!thread_.joinable()) return;
    if (on_worker) {
      thread_.detach();  // the last reference fell in a callback of the worker itself
    } else {
      thread_.join();
    }
  }

  std::unique_ptr<Transport> transport;
  Collectives collectives;
  std::atomic<c10d::ErrorType> error{c10d::ErrorType::SUCCESS};
  const milliseconds default_limit;

 private:
  void loop() {
    while (true) {
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return !busy_ && (stop_ || !jobs_.empty()); });
        if (jobs_.empty()) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
        busy_ = true;
      }
      job();
      job = nullptr;  // its tensors and callbacks die here, not under the lock
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        busy_ = false;
      }
      wake_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  bool busy_ = false;
  bool stop_ = false;
  std::thread thread_;
  const uint64_t fork_generation_;
};

// --- work
// --------------------------------------------------------------------------------------------------------------

class ProcessGroupTbik::ReductionWork final : public c10d::Work {
 public:
  ReductionWork(const std::shared_ptr<Engine>& engine, OpType type, Tensors outputs, uint64_t sequence,
                milliseconds timeout)
      : Work(engine->transport->rank(), type),
        engine_(engine),
        outputs_(std::move(outputs)),
        size_(engine->transport->size()),
        sequence_(sequence),
        timeout_(timeout) {}

  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }

  bool wait(milliseconds timeout) override {
    const bool own_limit = timeout != kNoTimeout && timeout.count() > 0;
    const milliseconds limit = own_limit ? timeout : timeout_ + kGrace;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto done = [this] { return completed_; };
    if (!cv_.wait_until(lock, std::chrono::steady_clock::now() + limit, done)) {
      const Stage stage = give_up();
      if (stage != Stage::kCommitting) {
        const std::string text = late(limit, stage);
        lock.unlock();
        const bool left = stage == Stage::kDropped || leave_to_worker(text);
        C10_THROW_ERROR(DistBackendError, "tbik: " + text +
                                              (left ? ". Its input is unchanged. "
                                                    : ". Its tensors are still in use and must not be touched. ") +
                                              "Destroy the group and make a new one");
      }
      cv_.wait(lock, done);  // copies of memory, no waits
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (completed_) {
        const auto future = future_;
        lock.unlock();
        settle(*future);
        return future;
      }
    }
    return future_;
  }

  // On the thread that runs the call. False: the caller has given up, and nothing of it may be done.
  bool begin() { return advance(Stage::kQueued, Stage::kRunning); }
  bool commit() { return advance(Stage::kRunning, Stage::kCommitting) || stage_.load() == Stage::kCommitting; }
  std::string reason() const {
    return "rank " + std::to_string(rank_) + ": " + name() + ": its caller has given it up";
  }

  void done(const std::exception_ptr& exception) {
    finish(exception);
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      future = future_;
    }
    if (future) settle(*future);
  }

 private:
  void settle(c10::ivalue::Future& future) {
    if (exception_) {
      future.setErrorIfNeeded(exception_);
    } else {
      future.markCompleted(c10::IValue(outputs_));
    }
  }

  // A caller may give up a call that is queued (kDropped: it never runs) or running (kAbandoned: what was written is
  // restored); from kCommitting on it waits for the end.
  enum class Stage : uint8_t { kQueued, kRunning, kCommitting, kDropped, kAbandoned };

  bool advance(Stage from, Stage to) { return stage_.compare_exchange_strong(from, to); }

  // kDropped, kAbandoned, or kCommitting: too late.
  Stage give_up() {
    advance(Stage::kQueued, Stage::kDropped);
    advance(Stage::kRunning, Stage::kAbandoned);
    return stage_.load();
  }

  std::string name() const {
    return c10d::opTypeToString(opType_) + ", call " + std::to_string(sequence_) + " of this group";
  }

  std::string late(milliseconds limit, Stage stage) const {
    const std::shared_ptr<Engine> engine = engine_.lock();
    const int awaited = engine ? engine->transport->awaited() : -1;
    return "wait for " + name() + ", rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
           ": not finished after " + std::to_string(limit.count()) + " ms, the limit of this wait; " +
           (stage == Stage::kDropped ? "it was queued behind other calls" : "it was under way") +
           (awaited >= 0 ? ", waiting for rank " + std::to_string(awaited) : "") + ", and is given up";
  }

  // Wakes the worker, which restores what it has written. False if it has not ended in time.
  bool leave_to_worker(const std::string& text) {
    if (const std::shared_ptr<Engine> engine = engine_.lock()) engine->transport->abort(text);
    std::unique_lock<std::mutex> lock(mutex_);
    return cv_.wait_until(lock, std::chrono::steady_clock::now() + kDrain, [this] { return completed_; });
  }

  const std::weak_ptr<Engine> engine_;
  Tensors outputs_;
  const int size_;
  const uint64_t sequence_;
  const milliseconds timeout_;
  std::atomic<Stage> stage_{Stage::kQueued};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

namespace {

// The values lie in one run of memory as they are.
bool in_place(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_neg(); }

}  // namespace

// A tensor as contiguous memory; written back by commit() if that needed a copy.
struct ProcessGroupTbik::Dense {
  explicit Dense(const at::Tensor& tensor) : original(tensor), flat(tensor.contiguous().resolve_neg()) {}
  void* data() const { return flat.data_ptr(); }
  bool copied() const { return flat.data_ptr() != original.data_ptr(); }
  void commit() const {
    if (copied()) original.copy_(flat);
  }

  at::Tensor original;
  at::Tensor flat;
};

// --- reductions of device tensors
// ---------------------------------------------------------------------------------------

struct ProcessGroupTbik::DeviceCall {
  OpType type;
  Collective collective;
  c10d::ReduceOp op;
  int root = 0;
  Tensors results;              // as the caller gave them
  Tensors outputs;              // the same, real
  std::vector<Tensors> inputs;  // as DeviceReductions.run has them
  Milliseconds timeout;
  bool async;
};

// Complete, for its future and for the host, when it is enqueued: an event on the stream that makes the result says the
// rest. Without a stream (the CPU, in tests) the result is there.
class ProcessGroupTbik::DeviceWork final : public c10d::Work {
 public:
  DeviceWork(int rank, OpType type, Tensors outputs, uint64_t sequence, at::Device device, milliseconds timeout)
      : Work(rank, type), outputs_(std::move(outputs)), sequence_(sequence), device_(device), timeout_(timeout) {
    std::vector<at::Device> devices;
    if (!device.is_cpu()) devices.push_back(device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  }

  // With the stream of the result as the current one.
  void complete() {
    if (!device_.is_cpu()) {
      event_.emplace(device_.type());
      event_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    }
    future_->markCompleted(c10::IValue(outputs_));
  }
  void set_check(std::shared_ptr<py::object> check) { check_ = std::move(check); }

  bool isCompleted() override { return future_->completed() && (!event_ || event_->query()); }
  bool isSuccess() const override { return future_->hasValue(); }
  std::exception_ptr exception() const override { return nullptr; }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  bool wait(milliseconds timeout) override {
    if (!future_->completed()) {
      C10_THROW_ERROR(DistBackendError, "tbik: wait for " + name() +
                                            ": the call was not made; its coalescing block has not ended, or an "
                                            "earlier call of the block has failed");
    }
    if (event_) {
      event_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
      if (blocks_host()) wait_on_host(timeout != kNoTimeout && timeout.count() > 0 ? timeout : timeout_);
    }
    if (check_) {
      const py::gil_scoped_acquire gil;
      from_python([&] { (*check_)(); });
    }
    return true;
  }

 private:
  // As NCCL's: the host waits, with a limit, where the user asks for it.
  static bool blocks_host() {
    for (const char* variable : {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}) {
      const char* value = std::getenv(variable);
      if (value != nullptr && std::string(value) == "1") return true;
    }
    return false;
  }

  void wait_on_host(milliseconds limit) const {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (!event_->query()) {
      if (std::chrono::steady_clock::now() > until) {
        C10_THROW_ERROR(DistBackendError,
                        "tbik: wait for " + name() + ": not finished after " + std::to_string(limit.count()) +
                            " ms, the limit of this wait. Its output is undefined. Destroy the group and make a new "
                            "one; look for the rank that failed first");
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  std::string name() const {
    return c10d::opTypeToString(opType_) + " of " + device_.str() + " tensors, call " + std::to_string(sequence_) +
           " of this group, rank " + std::to_string(rank_);
  }

  const Tensors outputs_;
  const uint64_t sequence_;
  const at::Device device_;
  const milliseconds timeout_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::optional<c10::Event> event_;
  std::shared_ptr<py::object> check_;  // tells what the device has met; empty: nothing does
};

// --- the group
// ---------------------------------------------------------------------------------------------------------

ProcessGroupTbik::ProcessGroupTbik(int rank, int size, Setup setup, const Combine& combine)
    : Backend(rank, size),
      movement_(std::move(setup.movement)),
      worker_(std::move(setup.worker)),
      split_(std::move(setup.split)),
      device_type_(setup.device_type),
      device_movement_(std::move(setup.device_movement)),
      make_reductions_(std::move(setup.device_reductions)),
      options_(c10::make_intrusive<Options>("tbik", setup.timeout)),
      combine_(combine),
      info_(std::move(setup.info)) {
  const bool moves = setup.move && !setup.move.is_none();
  const bool direct = setup.region != nullptr || !setup.sockets.empty();
  if (direct + (worker_ != nullptr) + moves != 1) {
    refuse(
        "process group: expected one of shared memory or sockets, a second gloo group, and a function that moves "
        "bytes");
  }
  std::unique_ptr<Transport> transport;
  if (!setup.sockets.empty()) {
    transport = std::make_unique<TcpTransport>(std::move(setup.sockets), rank, setup.capacity, setup.region,
                                               std::move(setup.local));
  } else if (setup.region) {
    transport = std::make_unique<ShmTransport>(setup.region, rank, size);
  } else if (moves) {
    transport = make_mover_transport(std::move(setup.move), "mpi", rank, size, kGlooMessage);
  } else {
    transport = std::make_unique<GroupTransport>(worker_, setup.check);
  }
  engine_ = std::make_shared<Engine>(std::move(transport), setup.settings, combine, setup.timeout);
  Engine::start(engine_);
  init();
}

ProcessGroupTbik::~ProcessGroupTbik() {
  if (Py_IsInitialized() != 0) {
    stop_engine();
    if (!engine_->forked()) end_device("close", "");
    const py::gil_scoped_acquire gil;
    for (py::object* object : {&split_, &device_movement_, &make_reductions_, &reductions_}) *object = py::object();
  } else {
    engine_->stop();
    for (py::object* object : {&split_, &device_movement_, &make_reductions_, &reductions_}) object->release();
  }
}

std::string ProcessGroupTbik::transport() const { return engine_->transport->name(); }
std::string ProcessGroupTbik::placement(int64_t bytes) const {
  return name_of(engine_->collectives.placement_for(Collective::kAllReduce, Element::kFloat32, bytes));
}
std::vector<int64_t> ProcessGroupTbik::bytes_sent() const { return engine_->transport->bytes_sent(); }
uint64_t ProcessGroupTbik::calls() const { return sequence_.load(); }

void ProcessGroupTbik::setTimeout(Milliseconds timeout) {
  options_->timeout = timeout;
  movement_->setTimeout(timeout);
  if (worker_) worker_->setTimeout(timeout);
}

ProcessGroupTbik::BackendPtr ProcessGroupTbik::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  // Groups that are split at once get one store: the members make its keys their own.
  std::string members;
  for (int rank : ranks) members += std::to_string(rank) + ",";
  // Torch asks once for each device type and keeps the first answer alone: a second one would close its connections
  // while the other ranks still make theirs.
  if (split_backend_ && store == split_store_ && members == split_members_) {
    if (BackendPtr same = split_backend_->lock()) return same;
  }
  const int count = splits_[members]++;
  auto own = c10::make_intrusive<c10d::PrefixStore>("split/" + members + std::to_string(count) + "/", store);
  const py::gil_scoped_acquire gil;
  BackendPtr backend = split_(c10::intrusive_ptr<c10d::Store>(std::move(own)), static_cast<int>(found - ranks.begin()),
                              static_cast<int>(ranks.size()), options->timeout)
                           .cast<BackendPtr>();
  split_store_ = store;
  split_members_ = members;
  split_backend_.emplace(backend);
  return backend;
}

void ProcessGroupTbik::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
  device_queue_.clear();
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::endCoalescing() {
  coalescing_ = false;
  std::vector<WorkPtr> works = std::move(coalesced_);
  coalesced_.clear();
  const std::vector<std::function<void()>> queue = std::move(device_queue_);
  device_queue_.clear();
  if (device_coalescing_) {
    device_coalescing_ = false;
    WorkPtr work = device_backend_->endCoalescing();
    if (works.empty()) return work;
    works.push_back(std::move(work));
  }
  for (const std::function<void()>& start : queue) start();
  // Not on the worker thread: the works of reductions are finished there.
  Tensors outputs;
  class AllOf final : public c10d::Work {
   public:
    AllOf(int rank, std::vector<WorkPtr> works) : Work(rank, OpType::COALESCED), works_(std::move(works)) {}
    bool isCompleted() override {
      return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& w) { return w->isCompleted(); });
    }
    bool isSuccess() const override {
      return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& w) { return w->isSuccess(); });
    }
    std::exception_ptr exception() const override {
      for (const WorkPtr& w : works_) {
        if (w->exception()) return w->exception();
      }
      return nullptr;
    }
    void synchronize() override {
      for (const WorkPtr& w : works_) w->synchronize();
    }
    bool wait(milliseconds timeout) override {
      for (const WorkPtr& w : works_) w->wait(timeout);
      return true;
    }
    Tensors result() override {
      Tensors all;
      for (const WorkPtr& w : works_) {
        const Tensors some = w->result();
        all.insert(all.end(), some.begin(), some.end());
      }
      return all;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
      // gloo's works have futures of their own; the last one to finish completes ours.
      auto all = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      auto left = std::make_shared<std::atomic<size_t>>(works_.size());
      if (works_.empty()) all->markCompleted(c10::IValue(Tensors{}));
      for (const WorkPtr& w : works_) {
        w->getFuture()->addCallback([all, left](c10::ivalue::Future& one) {
          if (one.hasError()) {
            all->setErrorIfNeeded(one.exception_ptr());
          } else if (left->fetch_sub(1) == 1 && !all->completed()) {
            all->markCompleted(c10::IValue(Tensors{}));
          }
        });
      }
      return all;
    }

   private:
    std::vector<WorkPtr> works_;
  };
  return c10::make_intrusive<AllOf>(rank_, std::move(works));
}

uint64_t ProcessGroupTbik::getSequenceNumberForGroup() { return sequence_.load(); }

c10d::ErrorType ProcessGroupTbik::getError() { return engine_->error.load(); }

void ProcessGroupTbik::abort() {
  if (engine_->forked()) return;
  const std::string reason = "rank " + std::to_string(rank_) + ": abort() was called";
  engine_->transport->abort(reason);
  end_device("abort", reason);
  for (const BackendPtr& backend : {movement_, worker_, device_backend_}) {
    if (backend) backend->abort();
  }
  stop_engine();
}

// Callbacks of works may want the GIL while the worker finishes.
void ProcessGroupTbik::stop_engine() {
  std::optional<py::gil_scoped_release> release;
  if (PyGILState_Check() != 0) release.emplace();
  engine_->stop();
}

void ProcessGroupTbik::shutdown() {
  if (engine_->forked()) return;
  stop_engine();
  end_device("close", "");
  engine_->transport->leave();
  for (const BackendPtr& backend : {movement_, worker_, device_backend_}) {
    if (backend) backend->shutdown();
  }
}

void ProcessGroupTbik::require_usable(OpType type) const {
  if (engine_->forked()) {
    C10_THROW_ERROR(DistBackendError,
                    "tbik: " + c10d::opTypeToString(type) +
                        ": this process was forked after the group was made; make a new group in the child");
  }
  if (engine_->stopped()) {
    C10_THROW_ERROR(DistBackendError, "tbik: " + c10d::opTypeToString(type) + ": the group was shut down or aborted");
  }
}

// Runs body now if the caller waits anyway and nothing is queued, else on the worker thread.
ProcessGroupTbik::WorkPtr ProcessGroupTbik::submit(OpType type, Tensors outputs, Milliseconds timeout, bool async,
                                                   Body body) {
  require_usable(type);
  if (timeout.count() <= 0) timeout = options_->timeout;
  auto work = c10::make_intrusive<ReductionWork>(engine_, type, std::move(outputs), ++sequence_, timeout);
  Engine* engine = engine_.get();
  const auto perform = [work, engine, timeout](const Body& steps) {
    const auto give_up = [&] {
      engine->transport->abort(work->reason());
      throw TransportError(TransportFailure::kAborted, work->reason());
    };
    const Commit commit = [&] {
      if (!work->commit()) give_up();
    };
    std::exception_ptr failure;
    try {
      if (!work->begin()) give_up();
      engine->transport->set_limit(timeout);
      steps(commit);
      commit();  // of a call that writes nothing
    } catch (const TransportError& error) {
      if (error.failure == TransportFailure::kTimeout) {
        engine->error = c10d::ErrorType::TIMEOUT;
      } else if (error.failure == TransportFailure::kAborted) {
        engine->error = c10d::ErrorType::REMOTE_ERROR;
      } else if (error.failure == TransportFailure::kPeerGone) {
        engine->error = c10d::ErrorType::COMM_ERROR;
      }
      failure = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                                              std::string("tbik: ") + error.what()));
    } catch (...) {
      failure = std::current_exception();
    }
    work->done(failure);
  };
  if (!async && !coalescing_ && engine_->run_here([&] { perform(body); })) return work;
  engine_->add([perform, steps = std::move(body), state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    perform(steps);
  });
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

// A call that this rank cannot make is still a call of the group: its peers learn at once that this rank refused, and
// ranks that all refuse stay in step. The error itself is raised here and now. Of device tensors the peers learn it
// where they compare the call.
template <class Check>
auto ProcessGroupTbik::checked(Collective collective, const at::Device& device, const Check& check) {
  try {
    return check();
  } catch (const c10::Error& error) {
    if (engine_->forked() || engine_->stopped()) throw;
    ++sequence_;
    if (device.type() == device_type_) {
      const py::gil_scoped_acquire gil;
      const py::object& hook = reductions();
      if (!hook.is_none()) {
        from_python([&] { hook.attr("refuse")(name_of(collective), error.what_without_backtrace(), device); });
      }
    } else {
      engine_->add([engine = engine_.get(), collective, timeout = options_->timeout] {
        try {
          engine->transport->set_limit(timeout);
          engine->collectives.refuse(collective);
        } catch (const TransportError&) {  // the peers say it, and so will this rank's next call
        }
      });
    }
    throw;
  }
}

// Of a reduction: what its first tensor says, the CPU where there is none.
at::Device ProcessGroupTbik::device_of(const Tensors& tensors) const {
  const bool is_device = !tensors.empty() && tensors[0].defined() && tensors[0].device().type() == device_type_;
  return is_device ? tensors[0].device() : at::Device(at::kCPU);
}

void ProcessGroupTbik::require_dense(const at::Tensor& x, const char* where, const at::Device& device) const {
  if (!x.defined()) refuse(std::string(where) + ": the tensor is undefined");
  if (x.device() != device) {
    refuse(std::string(where) + ": expected a tensor on " + device.str() + ", as the first one of the call" +
           (device.is_cpu() ? ", or all of them on one " + c10::DeviceTypeName(device_type_) + " device" : "") +
           ", got one on " + x.device().str());
  }
  if (x.layout() != at::kStrided) {
    refuse(std::string(where) + ": expected a dense tensor, got layout " + c10::str(x.layout()));
  }
  if (!device.is_cpu() && x.is_neg()) {
    refuse(std::string(where) + ": expected a tensor without a pending negation; resolve_neg() makes one");
  }
}

Request ProcessGroupTbik::request_of(Collective collective, const c10d::ReduceOp& op, const at::Tensor& tensor,
                                     const at::Device& device) const {
  const char* where = name_of(collective);
  require_dense(tensor, where, device);
  Request request;
  request.collective = collective;
  request.op = op_of(op, where);
  request.element = element_of(tensor.scalar_type(), where);
  request.factor = factor_of(op, where);
  const std::string refusal = refusal_of(request.op, request.element);
  if (!refusal.empty()) refuse(std::string(where) + ": " + refusal);
  return request;
}

// The object that reduces device tensors, made by the first call that needs it; None where the group has none. With
// the GIL.
py::object& ProcessGroupTbik::reductions() {
  if (reductions_.is_none() && make_reductions_ && !make_reductions_.is_none()) {
    device_backend();  // so that it is shut down with the group
    reductions_ = from_python([&] { return py::object(make_reductions_()); });
  }
  return reductions_;
}

c10d::Backend* ProcessGroupTbik::device_backend() {
  if (!device_backend_ && device_movement_ && !device_movement_.is_none()) {
    const py::gil_scoped_acquire gil;
    const py::object backend = from_python([&] { return py::object(device_movement_()); });
    if (!backend.is_none()) device_backend_ = backend.cast<BackendPtr>();
  }
  return device_backend_.get();
}

// The last words to the object that reduces device tensors. Never throws.
void ProcessGroupTbik::end_device(const char* method, const std::string& reason) {
  const py::gil_scoped_acquire gil;
  if (!reductions_ || reductions_.is_none()) return;
  try {
    if (reason.empty()) {
      reductions_.attr(method)();
    } else {
      reductions_.attr(method)(reason);
    }
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("tbik: the end of a process group");
  }
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::submit_to_device(DeviceCall call) {
  require_usable(call.type);
  if (call.timeout.count() <= 0) call.timeout = options_->timeout;
  const at::Device device = call.outputs[0].device();
  auto work = c10::make_intrusive<DeviceWork>(rank_, call.type, call.results, ++sequence_, device, call.timeout);
  auto start = [this, work, call = std::move(call)] {
    const char* where = name_of(call.collective);
    const Op op = op_of(call.op, where);
    const double factor = factor_of(call.op, where);
    engine_->transport->note(where);
    const py::gil_scoped_acquire gil;
    const py::object& hook = reductions();
    if (hook.is_none()) {
      refuse(std::string(where) + ": this group has nothing that reduces " + call.outputs[0].device().str() +
             " tensors; expected CPU tensors");
    }
    const py::cpp_function complete([work] {
      const py::gil_scoped_release release;  // callbacks of the future may want the GIL
      work->complete();
    });
    py::object check = from_python([&] {
      return py::object(hook.attr("run")(where, name_of(op), factor, call.root, call.outputs, call.inputs, call.async,
                                         call.timeout, complete));
    });
    if (!check.is_none()) work->set_check(held(std::move(check)));
  };
  if (coalescing_) {
    device_queue_.push_back(std::move(start));
    coalesced_.push_back(work);
  } else {
    start();
  }
  return work;
}

namespace {

// Sums of complex tensors are sums of their parts.
at::Tensor real_view(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* where) {
  if (!tensor.is_complex()) return tensor;
  if (!c10d::isComplexViewAsRealAllowed(op))
    refuse(std::string(where) + ": this operator has no meaning for complex numbers");
  return at::view_as_real(tensor);
}

void require_one(const Tensors& tensors, const char* where) {
  if (tensors.size() != 1) {
    refuse(std::string(where) + ": expected one tensor, got " + std::to_string(tensors.size()));
  }
}

}  // namespace

ProcessGroupTbik::WorkPtr ProcessGroupTbik::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  const at::Device device = device_of(tensors);
  at::Tensor tensor;
  Request request = checked(Collective::kAllReduce, device, [&] {
    require_one(tensors, "all_reduce");
    tensor = real_view(tensors[0], options.reduceOp, "all_reduce");
    return request_of(Collective::kAllReduce, options.reduceOp, tensor, device);
  });
  if (device.type() == device_type_) {
    return submit_to_device({OpType::ALLREDUCE,
                             Collective::kAllReduce,
                             options.reduceOp,
                             0,
                             tensors,
                             {tensor},
                             {},
                             options.timeout,
                             options.asyncOp});
  }
  return submit(OpType::ALLREDUCE, tensors, options.timeout, options.asyncOp,
                [engine = engine_.get(), tensor, request = std::move(request)](const Commit& commit) mutable {
                  const at::NoGradGuard no_grad;
                  const Dense x(tensor);
                  request.inputs = {x.data()};
                  request.counts = {tensor.numel()};
                  request.out = x.data();
                  request.out_is_ours = x.copied();
                  if (!x.copied()) request.commit = commit;
                  engine->collectives.run(request);
                  commit();
                  x.commit();
                });
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::allreduce_coalesced(Tensors& tensors,
                                                                const c10d::AllreduceCoalescedOptions& options) {
  const at::Device device = device_of(tensors);
  Tensors views;
  const std::vector<Request> requests = checked(Collective::kAllReduceCoalesced, device, [&] {
    std::vector<Request> result;
    for (const at::Tensor& tensor : tensors) {
      views.push_back(real_view(tensor, options.reduceOp, "all_reduce_coalesced"));
      result.push_back(request_of(Collective::kAllReduceCoalesced, options.reduceOp, views.back(), device));
    }
    return result;
  });
  if (device.type() == device_type_) {
    return submit_to_device({OpType::ALLREDUCE_COALESCED,
                             Collective::kAllReduceCoalesced,
                             options.reduceOp,
                             0,
                             tensors,
                             views,
                             {},
                             options.timeout,
                             options.asyncOp});
  }
  // Tensors of one dtype travel as one message, and nothing is written before all of them have arrived.
  return submit(OpType::ALLREDUCE_COALESCED, tensors, options.timeout, options.asyncOp,
                [engine = engine_.get(), views, requests = requests](const Commit& commit) mutable {
                  const at::NoGradGuard no_grad;
                  std::vector<std::pair<at::Tensor, std::vector<size_t>>> flats;
                  std::vector<bool> taken(views.size());
                  for (size_t i = 0; i < views.size(); ++i) {
                    if (taken[i]) continue;
                    std::vector<size_t> members;
                    Tensors parts;
                    for (size_t j = i; j < views.size(); ++j) {
                      if (requests[j].element != requests[i].element) continue;
                      taken[j] = true;
                      members.push_back(j);
                      parts.push_back(views[j].reshape({-1}));
                    }
                    at::Tensor flat = at::cat(parts);
                    Request& request = requests[i];
                    request.inputs = {flat.data_ptr()};
                    request.counts = {flat.numel()};
                    request.out = flat.data_ptr();
                    request.out_is_ours = true;
                    engine->collectives.run(request);
                    flats.emplace_back(std::move(flat), std::move(members));
                  }
                  commit();
                  for (const auto& [flat, members] : flats) {
                    int64_t at = 0;
                    for (size_t j : members) {
                      views[j].copy_(flat.narrow(0, at, views[j].numel()).view(views[j].sizes()));
                      at += views[j].numel();
                    }
                  }
                });
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Device device = device_of(tensors);
  at::Tensor tensor;
  Request request = checked(Collective::kReduce, device, [&] {
    require_one(tensors, "reduce");
    if (options.rootRank < 0 || options.rootRank >= size_) {
      refuse("reduce: expected a root from 0 to " + std::to_string(size_ - 1) + ", got " +
             std::to_string(options.rootRank));
    }
    tensor = real_view(tensors[0], options.reduceOp, "reduce");
    return request_of(Collective::kReduce, options.reduceOp, tensor, device);
  });
  request.root = static_cast<int>(options.rootRank);
  if (device.type() == device_type_) {
    return submit_to_device({OpType::REDUCE,
                             Collective::kReduce,
                             options.reduceOp,
                             request.root,
                             tensors,
                             {tensor},
                             {},
                             options.timeout,
                             options.asyncOp});
  }
  return submit(OpType::REDUCE, tensors, options.timeout, options.asyncOp,
                [engine = engine_.get(), tensor, request = std::move(request)](const Commit& commit) mutable {
                  const at::NoGradGuard no_grad;
                  const Dense x(tensor);
                  request.inputs = {x.data()};
                  request.counts = {tensor.numel()};
                  request.out = x.data();
                  request.out_is_ours = x.copied();
                  if (!x.copied()) request.commit = commit;
                  engine->collectives.run(request);
                  commit();
                  if (engine->transport->rank() == request.root) x.commit();
                });
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                           const c10d::ReduceScatterOptions& options) {
  const at::Device device = device_of(outputs);
  at::Tensor output;
  Tensors chunks;
  Request request = checked(Collective::kReduceScatter, device, [&] {
    require_one(outputs, "reduce_scatter");
    if (inputs.size() != 1 || static_cast<int>(inputs[0].size()) != size_) {
      refuse("reduce_scatter: expected one list of " + std::to_string(size_) + " tensors");
    }
    output = real_view(outputs[0], options.reduceOp, "reduce_scatter");
    Request result = request_of(Collective::kReduceScatter, options.reduceOp, output, device);
    for (const at::Tensor& chunk : inputs[0]) {
      chunks.push_back(real_view(chunk, options.reduceOp, "reduce_scatter"));
      require_dense(chunks.back(), "reduce_scatter", device);
      if (chunks.back().scalar_type() != output.scalar_type()) refuse("reduce_scatter: the tensors differ in dtype");
    }
    const int64_t own = chunks[static_cast<size_t>(rank_)].numel();
    if (own != output.numel()) {
      refuse("reduce_scatter: expected " + std::to_string(output.numel()) +
             " elements (those of the output) in input " + std::to_string(rank_) + ", got " + std::to_string(own));
    }
    return result;
  });
  if (device.type() == device_type_) {
    return submit_to_device({OpType::REDUCE_SCATTER,
                             Collective::kReduceScatter,
                             options.reduceOp,
                             0,
                             outputs,
                             {output},
                             {chunks},
                             options.timeout,
                             options.asyncOp});
  }
  return submit(OpType::REDUCE_SCATTER, outputs, options.timeout, options.asyncOp,
                [engine = engine_.get(), output, chunks, request = std::move(request)](const Commit& commit) mutable {
                  const at::NoGradGuard no_grad;
                  std::vector<Dense> in(chunks.begin(), chunks.end());
                  const at::Tensor out = in_place(output) ? output : at::empty(output.sizes(), output.options());
                  for (const Dense& chunk : in) {
                    request.inputs.push_back(chunk.data());
                    request.counts.push_back(chunk.flat.numel());
                  }
                  request.out = out.data_ptr();
                  request.out_is_ours = !out.is_same(output);
                  if (!request.out_is_ours) request.commit = commit;
                  engine->collectives.run(request);
                  commit();
                  if (!out.is_same(output)) output.copy_(out);
                });
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                            const c10d::ReduceScatterOptions& options) {
  const Collective collective =
      outputs.size() == 1 ? Collective::kReduceScatterTensor : Collective::kReduceScatterTensorCoalesced;
  const char* where = name_of(collective);
  const at::Device device = device_of(outputs);
  Tensors out_views;
  Tensors in_views;
  const std::vector<Request> requests = checked(collective, device, [&] {
    if (outputs.size() != inputs.size()) refuse(std::string(where) + ": as many outputs as inputs are expected");
    std::vector<Request> result;
    for (size_t i = 0; i < outputs.size(); ++i) {
      out_views.push_back(real_view(outputs[i], options.reduceOp, where));
      in_views.push_back(real_view(inputs[i], options.reduceOp, where));
      result.push_back(request_of(collective, options.reduceOp, out_views[i], device));
      require_dense(in_views[i], where, device);
      if (in_views[i].scalar_type() != out_views[i].scalar_type() ||
          in_views[i].numel() != out_views[i].numel() * size_) {
        refuse(std::string(where) + ": expected an input of " + std::to_string(out_views[i].numel() * size_) +
               " elements of the output's dtype (" + std::to_string(size_) + " ranks), got " +
               std::to_string(in_views[i].numel()) + " of " + at::toString(in_views[i].scalar_type()));
      }
    }
    return result;
  });
  const OpType type = outputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : kReduceScatterCoalesced;
  if (device.type() == device_type_) {
    return submit_to_device(
        {type, collective, options.reduceOp, 0, outputs, out_views, {in_views}, options.timeout, options.asyncOp});
  }
  return submit(type, outputs, options.timeout, options.asyncOp,
                [engine = engine_.get(), out_views, in_views, requests = requests](const Commit& commit) mutable {
                  const at::NoGradGuard no_grad;
                  // Of several results those that lie in an input wait until the last one is there.
                  const auto in_an_input = [&in_views](const at::Tensor& output) {
                    return std::any_of(in_views.begin(), in_views.end(),
                                       [&](const at::Tensor& in) { return in.is_alias_of(output); });
                  };
                  Tensors results;
                  for (size_t i = 0; i < out_views.size(); ++i) {
                    const Dense in(in_views[i]);
                    const at::Tensor& output = out_views[i];
                    const bool direct = in_place(output) && (out_views.size() == 1 || !in_an_input(output));
                    const at::Tensor out = direct ? output : at::empty(output.sizes(), output.options());
                    results.push_back(out);
                    Request& request = requests[i];
                    const int64_t bytes = output.numel() * size_of(request.element);
                    for (int p = 0; p < engine->transport->size(); ++p) {
                      request.inputs.push_back(static_cast<const char*>(in.data()) + p * bytes);
                      request.counts.push_back(output.numel());
                    }
                    request.out = out.data_ptr();
                    request.out_is_ours = !direct;
                    if (direct && out_views.size() == 1) request.commit = commit;
                    engine->collectives.run(request);
                  }
                  commit();
                  for (size_t i = 0; i < out_views.size(); ++i) {
                    if (!results[i].is_same(out_views[i])) out_views[i].copy_(results[i]);
                  }
                });
}

// root[i] = dense all-reduce at the union of the ranks' indices; an index that a rank lacks is +0 there.
void ProcessGroupTbik::sparse(at::Tensor& tensor, const c10d::ReduceOp& op, Milliseconds timeout) {
  const at::NoGradGuard no_grad;
  const at::Tensor mine = tensor.coalesce();
  Rule rule{op_of(op, "sparse all_reduce"), element_of(mine.scalar_type(), "sparse all_reduce")};
  if (rule.op != Op::kSum && rule.op != Op::kAvg) refuse("sparse all_reduce: expected sum or avg");
  const std::string refusal = refusal_of(rule.op, rule.element);
  if (!refusal.empty()) refuse("sparse all_reduce: " + refusal);
  if (rule.op == Op::kAvg) rule.divisor = size_;
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  // [number of entries, dtype, sparse dimensions, dimensions, sizes...], at most 16 numbers
  at::Tensor head = at::zeros({16}, at::kLong);
  int64_t* h = head.data_ptr<int64_t>();
  if (tensor.dim() > 12) refuse("sparse all_reduce: at most 12 dimensions");
  h[0] = mine._nnz();
  h[1] = static_cast<int64_t>(tensor.scalar_type());
  h[2] = tensor.sparse_dim();
  h[3] = tensor.dim();
  for (int64_t i = 0; i < tensor.dim(); ++i) h[4 + i] = tensor.size(i);
  at::Tensor heads = at::empty({size_ * 16}, at::kLong);
  movement_->_allgather_base(heads, head, options)->wait(timeout);
  heads = heads.view({size_, 16});
  int64_t longest = 0;
  for (int p = 0; p < size_; ++p) {
    if (!heads[p].narrow(0, 1, 15).equal(head.narrow(0, 1, 15))) {
      C10_THROW_ERROR(DistBackendError, "tbik: sparse all_reduce: rank " + std::to_string(p) +
                                            " has another shape or dtype than rank " + std::to_string(rank_));
    }
    longest = std::max(longest, heads[p][0].item<int64_t>());
  }
  // Linear index of each entry over the sparse dimensions, and its values, padded to the longest.
  const at::Tensor values = mine.values().contiguous();
  std::vector<int64_t> shape = values.sizes().vec();
  at::Tensor linear = at::zeros({mine._nnz()}, at::kLong);
  for (int64_t d = 0; d < tensor.sparse_dim(); ++d) linear = linear * tensor.size(d) + mine.indices()[d];
  at::Tensor index = at::full({longest}, -1, at::kLong);
  index.narrow(0, 0, mine._nnz()).copy_(linear);
  shape[0] = longest;
  at::Tensor padded = at::zeros(shape, values.options());
  padded.narrow(0, 0, mine._nnz()).copy_(values);
  at::Tensor indices = at::empty({size_ * longest}, at::kLong);
  shape[0] = size_ * longest;
  at::Tensor all = at::empty(shape, values.options());
  if (longest > 0) {
    movement_->_allgather_base(indices, index, options)->wait(timeout);
    movement_->_allgather_base(all, padded, options)->wait(timeout);
  }
  at::Tensor present = std::get<0>(at::_unique2(indices));
  present = present.masked_select(present.ge(0));
  const int64_t count = present.numel();
  shape[0] = count;
  Tensors leaves;
  std::vector<const void*> inputs;
  for (int p = 0; p < size_; ++p) {
    const int64_t n = heads[p][0].item<int64_t>();
    at::Tensor leaf = at::zeros(shape, values.options());
    const at::Tensor at_rows = at::searchsorted(present, indices.narrow(0, p * longest, n));
    leaf.index_copy_(0, at_rows, all.narrow(0, p * longest, n));
    leaves.push_back(leaf);
    inputs.push_back(leaves.back().data_ptr());
  }
  at::Tensor root = at::empty(shape, values.options());
  if (root.numel() > 0) {
    tbik::reduce(rule, inputs, true, root.numel(), schedule(leaf_nodes(0, size_), size_), root.data_ptr(), combine_);
  }
  at::Tensor coordinates = at::empty({tensor.sparse_dim(), count}, at::kLong);
  at::Tensor rest = present;
  for (int64_t d = tensor.sparse_dim() - 1; d >= 0; --d) {
    coordinates[d].copy_(rest.remainder(tensor.size(d)));
    rest = rest.div(tensor.size(d), "floor");
  }
  const at::Tensor result = at::_sparse_coo_tensor_unsafe(coordinates, root, tensor.sizes())._coalesced_(true);
  tensor.copy_(result);
}

// On the caller's thread, since it moves its data by the caller's gloo group.
ProcessGroupTbik::WorkPtr ProcessGroupTbik::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  require_one(tensors, "sparse all_reduce");
  mover("sparse all_reduce", &tensors[0]);
  if (!tensors[0].device().is_cpu()) refuse("sparse all_reduce: expected a CPU tensor");
  const Milliseconds timeout = options.timeout.count() > 0 ? options.timeout : options_->timeout;
  auto work = c10::make_intrusive<ReductionWork>(engine_, OpType::_ALLREDUCE_SPARSE, tensors, ++sequence_, timeout);
  std::exception_ptr failure;
  try {
    sparse(tensors[0], options.reduceOp, timeout);
  } catch (...) {
    failure = std::current_exception();
  }
  work->done(failure);
  return work;
}

// --- movement
// ----------------------------------------------------------------------------------------------------------

c10d::Backend& ProcessGroupTbik::mover(const char* activity, const at::Tensor* tensor) {
  if (engine_->forked()) {
    C10_THROW_ERROR(DistBackendError, std::string("tbik: ") + activity +
                                          ": this process was forked after the group was made; make a new group in the "
                                          "child");
  }
  engine_->transport->note(activity);
  if (tensor == nullptr || tensor->device().type() != device_type_) return *movement_;
  c10d::Backend* backend = device_backend();
  if (backend == nullptr) {
    refuse(std::string(activity) + ": " + tensor->device().str() +
           " tensors are moved by NCCL, which this torch does not have; expected CPU tensors");
  }
  if (coalescing_ && !device_coalescing_ && backend->supportsCoalescing()) {
    backend->startCoalescing();
    device_coalescing_ = true;
  }
  return *backend;
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::track(WorkPtr work) {
  if (!work) return work;  // a coalesced call of NCCL
  ++sequence_;
  if (coalescing_) coalesced_.push_back(work);
  const std::lock_guard<std::mutex> lock(delegated_mutex_);
  delegated_.erase(std::remove_if(delegated_.begin(), delegated_.end(),
                                  [](const c10::weak_intrusive_ptr<c10d::Work>& w) {
                                    const WorkPtr alive = w.lock();
                                    return !alive || alive->isCompleted();
                                  }),
                   delegated_.end());
  delegated_.emplace_back(work);
  return work;
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::barrier(const c10d::BarrierOptions& options) {
  std::vector<WorkPtr> earlier;
  {
    const std::lock_guard<std::mutex> lock(delegated_mutex_);
    for (const auto& w : delegated_) {
      if (const WorkPtr alive = w.lock(); alive && !alive->isCompleted() && alive->retrieveOpType() != OpType::RECV &&
                                          alive->retrieveOpType() != OpType::RECVANYSOURCE) {
        earlier.push_back(alive);
      }
    }
    delegated_.clear();
  }
  const Milliseconds timeout = options.timeout.count() > 0 ? options.timeout : options_->timeout;
  return submit(OpType::BARRIER, {}, timeout, options.asyncOp,
                [engine = engine_.get(), earlier, timeout](const Commit&) {
                  for (const WorkPtr& work : earlier) work->wait(timeout);
                  engine->collectives.barrier();
                });
}

void ProcessGroupTbik::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  mover("monitored_barrier", nullptr).monitoredBarrier(options, wait_all_ranks);
}

ProcessGroupTbik::WorkPtr ProcessGroupTbik::alltoall(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllToAllOptions& options) {
  if (static_cast<int>(outputs.size()) != size_ || static_cast<int>(inputs.size()) != size_) {
    refuse("all_to_all: expected " + std::to_string(size_) + " outputs and inputs, got " +
           std::to_string(outputs.size()) + " and " + std::to_string(inputs.size()));
  }
  c10d::Backend& backend = mover("all_to_all", &outputs[0]);
  if (&backend != movement_.get()) return track(backend.alltoall(outputs, inputs, options));
  const at::NoGradGuard no_grad;
  Tensors flat;
  std::vector<int64_t> send_sizes;
  std::vector<int64_t> receive_sizes;
  int64_t total = 0;
  for (const at::Tensor& x : inputs) {
    require_dense(x, "all_to_all", at::kCPU);
    flat.push_back(x.reshape({-1}));
    send_sizes.push_back(x.numel());
  }
  for (const at::Tensor& x : outputs) {
    require_dense(x, "all_to_all", at::kCPU);
    receive_sizes.push_back(x.numel());
    total += x.numel();
  }
  at::Tensor in = at::cat(flat);
  at::Tensor out = at::empty({total}, outputs[0].options());
  const WorkPtr moved = track(backend.alltoall_base(out, in, receive_sizes, send_sizes, options));
  const Milliseconds timeout = options.timeout.count() > 0 ? options.timeout : options_->timeout;
  return submit(OpType::ALLTOALL, outputs, timeout, options.asyncOp,
                [moved, in, out, outputs, timeout](const Commit& commit) {
                  const at::NoGradGuard no_grad;
                  moved->wait(timeout);
                  commit();
                  int64_t at = 0;
                  for (const at::Tensor& x : outputs) {
                    x.copy_(out.narrow(0, at, x.numel()).view(x.sizes()));
                    at += x.numel();
                  }
                });
}

namespace {

const at::Tensor* first(const Tensors& tensors) { return tensors.empty() ? nullptr : &tensors[0]; }

}  // namespace

ProcessGroupTbik::WorkPtr ProcessGroupTbik::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return track(mover("broadcast", first(tensors)).broadcast(tensors, options));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  return track(mover("all_gather", first(inputs)).allgather(outputs, inputs, options));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  return track(mover("all_gather_into_tensor", &input)._allgather_base(output, input, options));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  return track(mover("all_gather_coalesced", first(inputs)).allgather_coalesced(outputs, inputs, options));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                            const c10d::AllgatherOptions& options) {
  return track(mover("all_gather_into_tensor_coalesced", first(inputs))
                   .allgather_into_tensor_coalesced(outputs, inputs, options));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                   const c10d::GatherOptions& options) {
  return track(mover("gather", first(inputs)).gather(outputs, inputs, options));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                    const c10d::ScatterOptions& options) {
  return track(mover("scatter", first(outputs)).scatter(outputs, inputs, options));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_sizes,
                                                          std::vector<int64_t>& input_sizes,
                                                          const c10d::AllToAllOptions& options) {
  return track(mover("all_to_all_single", &input).alltoall_base(output, input, output_sizes, input_sizes, options));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::send(Tensors& tensors, int destination, int tag) {
  return track(mover("send", first(tensors)).send(tensors, destination, tag));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::recv(Tensors& tensors, int source, int tag) {
  return track(mover("recv", first(tensors)).recv(tensors, source, tag));
}
ProcessGroupTbik::WorkPtr ProcessGroupTbik::recvAnysource(Tensors& tensors, int tag) {
  return track(mover("recv from any rank", first(tensors)).recvAnysource(tensors, tag));
}

// --- Python
// ------------------------------------------------------------------------------------------------------------

namespace {

Collective collective_of(const std::string& name) {
  for (Collective c : {Collective::kAllReduce, Collective::kReduce, Collective::kReduceScatterTensor}) {
    if (name == name_of(c)) return c;
  }
  refuse("dry_run: expected 'all_reduce', 'reduce' or 'reduce_scatter_tensor', got '" + name + "'");
}

Settings settings_of(const std::string& placement, int node_size, int64_t one_shot_bytes, int64_t segment_bytes) {
  Settings settings;
  settings.placement = placement_of(placement);
  settings.node_size = node_size;
  if (one_shot_bytes >= 0) settings.one_shot_bytes = one_shot_bytes;
  if (segment_bytes > 0) settings.segment_bytes = segment_bytes;
  settings.single_bytes = std::max(settings.single_bytes, settings.segment_bytes);
  return settings;
}

py::list dry_run_list(const std::string& collective, const std::string& placement, int world, int node_size,
                      int64_t numel, int64_t element_bytes, int64_t segment_bytes, int64_t capacity) {
  Request request;
  request.collective = collective_of(collective);
  request.element = element_bytes == 8   ? Element::kFloat64
                    : element_bytes == 2 ? Element::kBFloat16
                                         : Element::kFloat32;
  request.inputs.assign(request.collective == Collective::kReduceScatterTensor ? static_cast<size_t>(world) : 1,
                        nullptr);
  request.counts.assign(request.inputs.size(), numel / static_cast<int64_t>(request.inputs.size()));
  std::vector<Traffic> traffic;
  {
    const py::gil_scoped_release release;
    traffic = dry_run(settings_of(placement, node_size, -1, segment_bytes), request, world, capacity);
  }
  py::list result;
  for (const Traffic& t : traffic) {
    py::dict row;
    row["within_node"] = t.within_node;
    row["between_nodes"] = t.between_nodes;
    row["largest_link"] = t.largest_link;
    row["rounds"] = t.rounds;
    result.append(row);
  }
  return result;
}

}  // namespace

}  // namespace tbik

PYBIND11_MODULE(_C_dist, m) {
  using tbik::ProcessGroupTbik;
  m.doc() = "tbik process group: reductions in the canonical order over shared memory or gloo";
  py::module::import("torch._C._distributed_c10d");
  const py::capsule capsule = py::module::import("tbik._C").attr("combine_v1");
  if (std::string(capsule.name()) != "tbik.combine_v1") throw py::import_error("tbik._C is of another build");
  static const tbik::Combine combine = *capsule.get_pointer<const tbik::Combine>();

  py::class_<tbik::ShmRegion, std::shared_ptr<tbik::ShmRegion>>(m, "ShmRegion")
      .def_static("create", &tbik::ShmRegion::create, py::arg("world"), py::arg("capacity"))
      .def_static("attach", &tbik::ShmRegion::attach, py::arg("token"), py::arg("world"))
      .def_property_readonly("token", &tbik::ShmRegion::token)
      .def("close_file", &tbik::ShmRegion::close_file);

  py::class_<ProcessGroupTbik, c10::intrusive_ptr<ProcessGroupTbik>, c10d::Backend>(m, "ProcessGroupTbik")
      .def(py::init([](ProcessGroupTbik::BackendPtr movement, std::optional<ProcessGroupTbik::BackendPtr> worker,
                       std::shared_ptr<tbik::ShmRegion> region, std::vector<int> sockets, std::vector<int> local,
                       int64_t capacity, py::object move, int rank, int size, std::chrono::milliseconds timeout,
                       const std::string& placement, int node_size, int64_t one_shot_bytes, int64_t segment_bytes,
                       bool check, py::object split, const std::string& device_type, py::object device_movement,
                       py::object device_reductions, std::string info) {
             ProcessGroupTbik::Setup setup;
             setup.movement = std::move(movement);
             if (worker) setup.worker = std::move(*worker);
             setup.region = std::move(region);
             setup.sockets = std::move(sockets);
             setup.local = std::move(local);
             setup.capacity = capacity;
             setup.move = std::move(move);
             setup.settings = tbik::settings_of(placement, node_size, one_shot_bytes, segment_bytes);
             setup.check = check;
             setup.timeout = timeout;
             setup.split = std::move(split);
             setup.device_type = at::Device(device_type).type();
             setup.device_movement = std::move(device_movement);
             setup.device_reductions = std::move(device_reductions);
             setup.info = std::move(info);
             return c10::make_intrusive<ProcessGroupTbik>(rank, size, std::move(setup), combine);
           }),
           py::kw_only(), py::arg("movement"), py::arg("worker"), py::arg("region"), py::arg("sockets"),
           py::arg("local"), py::arg("capacity"), py::arg("move"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("placement"), py::arg("node_size"), py::arg("one_shot_bytes"), py::arg("segment_bytes"),
           py::arg("check"), py::arg("split"), py::arg("device_type"), py::arg("device_movement"),
           py::arg("device_reductions"), py::arg("info"))
      .def_property_readonly("options", [](ProcessGroupTbik& group) { return group.getBackendOptions(); })
      .def_property_readonly("transport", &ProcessGroupTbik::transport)
      .def_property_readonly("calls", &ProcessGroupTbik::calls)
      .def_property_readonly("bytes_sent", &ProcessGroupTbik::bytes_sent)
      .def_property_readonly("info", &ProcessGroupTbik::info)
      .def_property_readonly("device_reductions", &ProcessGroupTbik::device_reductions)
      .def("placement", &ProcessGroupTbik::placement, py::arg("num_bytes"));

  tbik::bind_communicator(m, combine);
  tbik::bind_movement(m);
  m.def("dry_run", &tbik::dry_run_list, py::arg("collective"), py::arg("placement"), py::arg("world"),
        py::arg("node_size"), py::arg("numel"), py::arg("element_bytes") = 4,
        py::arg("segment_bytes") = tbik::kGlooMessage / 2, py::arg("capacity") = tbik::kGlooMessage);
  m.attr("FRAME_HEADER_BYTES") = tbik::TcpTransport::kHeaderBytes;
  m.def("host_identity", &tbik::host_identity);
  m.def("torch_version_built_against", [] { return std::string(TORCH_VERSION); });
}
