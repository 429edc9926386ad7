// See movement.h.
#include "movement.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>

namespace py = pybind11;

namespace tbik {

using c10d::OpType;
using std::chrono::milliseconds;

namespace {

[[noreturn]] void refuse(const std::string& text) { C10_THROW_ERROR(ValueError, "tbik: " + text); }

at::Tensor bytes_of(const at::Tensor& contiguous) { return contiguous.view({-1}).view(at::kByte); }

void require_cpu(const at::Tensor& x, const char* where) {
  if (!x.defined() || !x.device().is_cpu() || x.layout() != at::kStrided) {
    refuse(std::string(where) + ": expected dense CPU tensors");
  }
}

// A tensor that receives: contiguous memory, copied back at the end if it is not its own.
struct Target {
  at::Tensor original;
  at::Tensor flat;
};

Target target_of(const at::Tensor& x, const char* where) {
  require_cpu(x, where);
  return {x, x.is_contiguous() ? x : at::empty(x.sizes(), x.options())};
}

at::Tensor source_of(const at::Tensor& x, const char* where) {
  require_cpu(x, where);
  return x.contiguous();
}

void require_bytes(const at::Tensor& a, const at::Tensor& b, const char* where) {
  if (a.nbytes() != b.nbytes()) {
    refuse(std::string(where) + ": expected " + std::to_string(b.nbytes()) + " bytes in the output, got " +
           std::to_string(a.nbytes()));
  }
}

}  // namespace

struct Movement::Parcel {
  explicit Parcel(int size) : to(static_cast<size_t>(size)), from(static_cast<size_t>(size)) {}
  void receive(int p, const Target& target) {
    from[static_cast<size_t>(p)] = bytes_of(target.flat);
    targets.push_back(target);
  }
  Tensors to;  // undefined: nothing
  Tensors from;
  std::vector<Target> targets;
};

class Movement::CallWork final : public c10d::Work {
 public:
  CallWork(int rank, OpType type, std::vector<py::object> requests, Tensors kept, std::vector<Target> targets,
           Tensors outputs, milliseconds limit, std::string what)
      : Work(rank, type),
        requests_(std::move(requests)),
        kept_(std::move(kept)),
        targets_(std::move(targets)),
        outputs_(std::move(outputs)),
        limit_(limit),
        what_(std::move(what)) {}

  ~CallWork() override {
    if (Py_IsInitialized() == 0) {
      for (py::object& request : requests_) request.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    requests_.clear();
  }

  bool isCompleted() override {
    const py::gil_scoped_acquire gil;
    const std::lock_guard<std::recursive_mutex> lock(own_);
    if (ended_) return true;
    try {
      for (const py::object& request : requests_) {
        if (!request.attr("test")().cast<bool>()) return false;
      }
    } catch (py::error_already_set& error) {
      end(failure_of(error));
      return true;
    }
    end(nullptr);
    return true;
  }
  bool isSuccess() const override { return ended_ && !failure_; }
  std::exception_ptr exception() const override { return failure_; }
  int sourceRank() const override {
    const py::gil_scoped_acquire gil;
    return requests_.at(0).attr("source").cast<int>();
  }
  Tensors result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }

  bool wait(milliseconds timeout) override {
    const py::gil_scoped_acquire gil;
    // The GIL is given up inside request.wait: another thread may wait for the same work, and finds it ended.
    if (!ended_) {
      const milliseconds limit = timeout != kNoTimeout && timeout.count() > 0 ? timeout : limit_;
      std::exception_ptr failure;
      try {
        for (const py::object& request : requests_) {
          request.attr("wait")(std::chrono::duration<double>(limit).count(), what_);
        }
      } catch (py::error_already_set& error) {
        failure = failure_of(error);
      }
      const std::lock_guard<std::recursive_mutex> lock(own_);
      if (!ended_) end(failure);
    }
    if (failure_) std::rethrow_exception(failure_);
    return true;
  }

  // Complete when it is handed out: it waits first.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    try {
      wait(kNoTimeout);
      future->markCompleted(c10::IValue(outputs_));
    } catch (...) {
      future->setError(std::current_exception());
    }
    return future;
  }

 private:
  static std::exception_ptr failure_of(py::error_already_set& error) {
    return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                                         "tbik: " + std::string(py::str(error.value()))));
  }
  void end(const std::exception_ptr& failure) {
    failure_ = failure;
    if (!failure) {
      const at::NoGradGuard no_grad;
      for (const Target& target : targets_) {
        if (!target.flat.is_same(target.original)) target.original.copy_(target.flat);
      }
      kept_.clear();
      targets_.clear();
    }
    ended_ = true;
  }

  std::vector<py::object> requests_;
  Tensors kept_;  // what MPI still reads or writes; after a failure, for good
  std::vector<Target> targets_;
  Tensors outputs_;
  const milliseconds limit_;
  const std::string what_;
  std::recursive_mutex own_;
  std::exception_ptr failure_;
  std::atomic<bool> ended_{false};
};

Movement::Movement(py::object mover, int rank, int size, Milliseconds timeout)
    : Backend(rank, size),
      mover_(std::move(mover)),
      name_(py::str(mover_.attr("name"))),
      options_(c10::make_intrusive<Options>(name_, timeout)) {}

Movement::~Movement() {
  if (Py_IsInitialized() == 0) {
    mover_.release();
    return;
  }
  const py::gil_scoped_acquire gil;
  mover_ = py::object();
}

Movement::WorkPtr Movement::exchange(OpType type, std::vector<Parcel> parcels, Tensors outputs, Milliseconds timeout,
                                     const char* what) {
  const at::NoGradGuard no_grad;
  std::vector<Target> targets;
  Tensors kept;
  const py::gil_scoped_acquire gil;
  std::vector<py::object> requests;
  const auto list = [&](const Tensors& tensors) {
    py::list result;
    for (int p = 0; p < size_; ++p) {
      const at::Tensor& x = tensors[static_cast<size_t>(p)];
      if (p == rank_ || !x.defined() || x.numel() == 0) {
        result.append(py::none());
      } else {
        kept.push_back(x);
        result.append(py::cast(x));
      }
    }
    return result;
  };
  try {
    for (Parcel& parcel : parcels) {
      const size_t own = static_cast<size_t>(rank_);
      if (parcel.to[own].defined() && parcel.from[own].defined()) parcel.from[own].copy_(parcel.to[own]);
      requests.push_back(mover_.attr("exchange")(list(parcel.to), list(parcel.from)));
      targets.insert(targets.end(), parcel.targets.begin(), parcel.targets.end());
    }
  } catch (py::error_already_set& error) {
    C10_THROW_ERROR(DistBackendError, "tbik: " + std::string(what) + ": " + std::string(py::str(error.value())));
  }
  return c10::make_intrusive<CallWork>(rank_, type, std::move(requests), std::move(kept), std::move(targets),
                                       std::move(outputs), limit(timeout), what);
}

Movement::WorkPtr Movement::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Parcel parcel(size_);
  const int root = static_cast<int>(options.rootRank);
  if (rank_ == root) {
    const at::Tensor source = bytes_of(source_of(tensors.at(0), "broadcast"));
    for (int p = 0; p < size_; ++p) {
      if (p != rank_) parcel.to[static_cast<size_t>(p)] = source;
    }
  } else {
    parcel.receive(root, target_of(tensors.at(0), "broadcast"));
  }
  return exchange(OpType::BROADCAST, {parcel}, tensors, options.timeout, "broadcast");
}

Movement::WorkPtr Movement::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& options) {
  if (outputs.size() != 1 || inputs.size() != 1 || static_cast<int>(outputs[0].size()) != size_) {
    refuse("all_gather: expected one list of " + std::to_string(size_) + " tensors");
  }
  Parcel parcel(size_);
  const at::Tensor source = source_of(inputs[0], "all_gather");
  parcel.to.assign(static_cast<size_t>(size_), bytes_of(source));
  for (int p = 0; p < size_; ++p) {
    const Target target = target_of(outputs[0][static_cast<size_t>(p)], "all_gather");
    require_bytes(target.flat, source, "all_gather");
    parcel.receive(p, target);
  }
  return exchange(OpType::ALLGATHER, {parcel}, outputs[0], options.timeout, "all_gather");
}

Movement::WorkPtr Movement::_allgather_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

Movement::WorkPtr Movement::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& options) {
  const char* what = "all_gather_into_tensor";
  std::vector<Parcel> parcels;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Parcel parcel(size_);
    const at::Tensor source = bytes_of(source_of(inputs[i], what));
    const Target target = target_of(outputs.at(i), what);
    if (target.flat.nbytes() != source.nbytes() * static_cast<size_t>(size_)) {
      refuse(std::string(what) + ": expected an output of " + std::to_string(size_) + " times the input");
    }
    parcel.to.assign(static_cast<size_t>(size_), source);
    const at::Tensor all = bytes_of(target.flat);
    for (int p = 0; p < size_; ++p) {
      parcel.from[static_cast<size_t>(p)] = all.narrow(0, p * source.numel(), source.numel());
    }
    parcel.targets.push_back(target);
    parcels.push_back(std::move(parcel));
  }
  return exchange(OpType::_ALLGATHER_BASE, std::move(parcels), outputs, options.timeout, what);
}

Movement::WorkPtr Movement::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& options) {
  const char* what = "all_gather_coalesced";
  if (static_cast<int>(outputs.size()) != size_) refuse(std::string(what) + ": expected one list per rank");
  std::vector<Parcel> parcels;
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Parcel parcel(size_);
    const at::Tensor source = source_of(inputs[i], what);
    parcel.to.assign(static_cast<size_t>(size_), bytes_of(source));
    for (int p = 0; p < size_; ++p) {
      const Target target = target_of(outputs[static_cast<size_t>(p)].at(i), what);
      require_bytes(target.flat, source, what);
      parcel.receive(p, target);
      all.push_back(target.original);
    }
    parcels.push_back(std::move(parcel));
  }
  return exchange(OpType::ALLGATHER_COALESCED, std::move(parcels), all, options.timeout, what);
}

Movement::WorkPtr Movement::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  Parcel parcel(size_);
  const int root = static_cast<int>(options.rootRank);
  const at::Tensor source = source_of(inputs.at(0), "gather");
  parcel.to[static_cast<size_t>(root)] = bytes_of(source);
  Tensors results;
  if (rank_ == root) {
    if (outputs.size() != 1 || static_cast<int>(outputs[0].size()) != size_) {
      refuse("gather: expected one list of " + std::to_string(size_) + " tensors on the root");
    }
    for (int p = 0; p < size_; ++p) {
      const Target target = target_of(outputs[0][static_cast<size_t>(p)], "gather");
      require_bytes(target.flat, source, "gather");
      parcel.receive(p, target);
    }
    results = outputs[0];
  }
  return exchange(OpType::GATHER, {parcel}, results, options.timeout, "gather");
}

Movement::WorkPtr Movement::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ScatterOptions& options) {
  Parcel parcel(size_);
  const int root = static_cast<int>(options.rootRank);
  const Target target = target_of(outputs.at(0), "scatter");
  if (rank_ == root) {
    if (inputs.size() != 1 || static_cast<int>(inputs[0].size()) != size_) {
      refuse("scatter: expected one list of " + std::to_string(size_) + " tensors on the root");
    }
    for (int p = 0; p < size_; ++p) {
      const at::Tensor source = source_of(inputs[0][static_cast<size_t>(p)], "scatter");
      require_bytes(target.flat, source, "scatter");
      parcel.to[static_cast<size_t>(p)] = bytes_of(source);
    }
  }
  parcel.receive(root, target);
  return exchange(OpType::SCATTER, {parcel}, outputs, options.timeout, "scatter");
}

Movement::WorkPtr Movement::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  const char* what = "all_to_all_single";
  Parcel parcel(size_);
  const at::Tensor source = source_of(input, what);
  const Target target = target_of(output, what);
  const auto cut = [&](const at::Tensor& whole, const std::vector<int64_t>& sizes, Tensors& runs) {
    const int64_t rows = whole.dim() == 0 ? 1 : whole.size(0);
    if (!sizes.empty() && static_cast<int>(sizes.size()) != size_) refuse(std::string(what) + ": one size per rank");
    if (sizes.empty() && rows % size_ != 0) {
      refuse(std::string(what) + ": " + std::to_string(rows) + " rows cannot be cut into " + std::to_string(size_));
    }
    const at::Tensor flat = bytes_of(whole);
    const int64_t row = rows == 0 ? 0 : flat.numel() / rows;
    int64_t at = 0;
    for (int p = 0; p < size_; ++p) {
      const int64_t n = sizes.empty() ? rows / size_ : sizes[static_cast<size_t>(p)];
      if (n < 0 || at + n > rows) refuse(std::string(what) + ": the sizes exceed the tensor");
      runs[static_cast<size_t>(p)] = flat.narrow(0, at * row, n * row);
      at += n;
    }
    if (at != rows) refuse(std::string(what) + ": the sizes do not add up to the tensor's rows");
  };
  cut(source, input_sizes, parcel.to);
  cut(target.flat, output_sizes, parcel.from);
  const size_t own = static_cast<size_t>(rank_);
  require_bytes(parcel.from[own], parcel.to[own], what);
  parcel.targets.push_back(target);
  return exchange(OpType::ALLTOALL_BASE, {parcel}, {output}, options.timeout, what);
}

Movement::WorkPtr Movement::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor source = bytes_of(source_of(tensors.at(0), "send"));
  const py::gil_scoped_acquire gil;
  try {
    std::vector<py::object> requests{mover_.attr("send")(py::cast(source), destination, tag)};
    return c10::make_intrusive<CallWork>(rank_, OpType::SEND, std::move(requests), Tensors{source},
                                         std::vector<Target>{}, tensors, options_->timeout, "send");
  } catch (py::error_already_set& error) {
    C10_THROW_ERROR(DistBackendError, "tbik: send: " + std::string(py::str(error.value())));
  }
}

Movement::WorkPtr Movement::recv(Tensors& tensors, int source, int tag) {
  const Target target = target_of(tensors.at(0), "recv");
  const at::Tensor bytes = bytes_of(target.flat);
  const py::gil_scoped_acquire gil;
  try {
    std::vector<py::object> requests{mover_.attr("receive")(py::cast(bytes), source, tag)};
    return c10::make_intrusive<CallWork>(rank_, source < 0 ? OpType::RECVANYSOURCE : OpType::RECV, std::move(requests),
                                         Tensors{bytes}, std::vector<Target>{target}, tensors, options_->timeout,
                                         "recv");
  } catch (py::error_already_set& error) {
    C10_THROW_ERROR(DistBackendError, "tbik: recv: " + std::string(py::str(error.value())));
  }
}

Movement::WorkPtr Movement::recvAnysource(Tensors& tensors, int tag) { return recv(tensors, -1, tag); }

void Movement::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  Parcel parcel(size_);
  parcel.to.assign(static_cast<size_t>(size_), at::zeros({1}, at::kByte));
  for (int p = 0; p < size_; ++p) parcel.from[static_cast<size_t>(p)] = at::zeros({1}, at::kByte);
  exchange(OpType::BARRIER, {parcel}, {}, options.timeout, "monitored_barrier")->wait(limit(options.timeout));
}

void bind_movement(py::module& m) {
  py::class_<Movement, c10::intrusive_ptr<Movement>, c10d::Backend>(m, "Movement")
      .def(py::init([](py::object mover, int rank, int size, milliseconds timeout) {
             return c10::make_intrusive<Movement>(std::move(mover), rank, size, timeout);
           }),
           py::arg("mover"), py::arg("rank"), py::arg("size"), py::arg("timeout"));
}

}  // namespace tbik
