// The "tbik" backend of torch.distributed: every reduction in the canonical order (ORDER.md B1), everything else by
// gloo.
//
//   allreduce, allreduce_coalesced, reduce, reduce_scatter, _reduce_scatter_base, reduce_scatter_tensor_coalesced,
//   sparse all-reduce      ours: csrc/collective over a transport; never delegated
//   barrier                ours, after the delegated calls that are still under way
//   alltoall               one alltoall_base of gloo
//   the rest               gloo (or csrc/movement), on the caller's thread
//
// Tensors of the device type (CUDA) go another way: reductions, checked here, to tbik/device_reductions.py, on the
// caller's thread, which enqueues them on a stream and returns; everything else to the backend that moves them (NCCL).
// Inside a coalescing block their reductions wait for its end.
//
// A reduction runs on this group's worker thread, in call order; a blocking call with nothing queued before it runs on
// the caller's thread. Its bytes move over shared memory, over sockets of our own, or over a second gloo group (of its
// own, since gloo matches calls of one group by their order, which two threads would mix up).
// Dense tensors. Errors: DistBackendError (waits, peers, disagreement), ValueError (unsupported). A rank that
// refuses a reduction raises at once; the others, if they make that call, get a DistBackendError that names it, and the
// group stays usable. A wait that ends before its call raises, too: then the call is given up, its inputs are as they
// were, and the group is not usable any more. What Python or gloo refuse on one rank alone is no call of the group: the
// others wait for their timeout. With device tensors an error leaves the output undefined, unless the text says that no
// tensor was changed. Results as promised by csrc/collective.h; world size is in the bits of a plain
// tensor's sum.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "collective.h"
#include "transport_shm.h"
#include "transport_tcp.h"

namespace tbik {

class Engine;

class ProcessGroupTbik final : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Milliseconds = std::chrono::milliseconds;

  struct Setup {
    BackendPtr movement;                // gloo, for the caller's thread
    BackendPtr worker;                  // gloo, for the worker thread; null with a region or sockets
    std::shared_ptr<ShmRegion> region;  // null without shared memory
    std::vector<int> sockets;           // empty without; see TcpTransport
    std::vector<int> local;             // the ranks that share `region`, where sockets reach the others
    int64_t capacity = 0;               // bytes of a message, with sockets
    pybind11::object move;              // carries the reductions' bytes (MPI); None without
    Settings settings;
    bool check = false;  // compare every call before its data moves (TBIK_CHECK=1)
    Milliseconds timeout{0};
    pybind11::object split;  // (store, rank, size, timeout) -> backend
    at::DeviceType device_type = at::kCUDA;
    pybind11::object device_movement;    // () -> backend that moves tensors of device_type, or None
    pybind11::object device_reductions;  // () -> tbik.device_reductions.DeviceReductions; None: no reductions of them
    std::string info;                    // what tbik.backend.group_info shows
  };

  ProcessGroupTbik(int rank, int size, Setup setup, const Combine& combine);
  ~ProcessGroupTbik() override;

  const std::string getBackendName() const override { return "tbik"; }
  std::string transport() const;
  std::string placement(int64_t bytes) const;
  std::vector<int64_t> bytes_sent() const;
  uint64_t calls() const;
  const std::string& info() const { return info_; }
  pybind11::object device_reductions() const { return reductions_; }  // None before the first

  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override;
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& options) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& options) override;

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

 private:
  class ReductionWork;
  class DeviceWork;
  struct Dense;
  struct DeviceCall;

  // Throws TransportError where the caller has given up; else what follows may write the caller's tensors.
  using Commit = std::function<void()>;
  using Body = std::function<void(const Commit&)>;

  WorkPtr submit(c10d::OpType type, std::vector<at::Tensor> outputs, Milliseconds timeout, bool async, Body body);
  c10d::Backend& mover(const char* activity, const at::Tensor* tensor);
  void stop_engine();
  WorkPtr track(WorkPtr work);
  template <class Check>
  auto checked(Collective collective, const at::Device& device, const Check& check);
  Request request_of(Collective collective, const c10d::ReduceOp& op, const at::Tensor& tensor,
                     const at::Device& device) const;
  void require_usable(c10d::OpType type) const;
  at::Device device_of(const std::vector<at::Tensor>& tensors) const;
  void require_dense(const at::Tensor& x, const char* where, const at::Device& device) const;
  WorkPtr submit_to_device(DeviceCall call);
  pybind11::object& reductions();
  c10d::Backend* device_backend();
  void end_device(const char* method, const std::string& reason);
  void sparse(at::Tensor& tensor, const c10d::ReduceOp& op, Milliseconds timeout);

  BackendPtr movement_;
  BackendPtr worker_;
  BackendPtr device_backend_;
  pybind11::object split_;
  const at::DeviceType device_type_;
  pybind11::object device_movement_;
  pybind11::object make_reductions_;
  pybind11::object reductions_ = pybind11::none();
  c10::intrusive_ptr<Options> options_;
  Combine combine_;
  std::string info_;
  std::shared_ptr<Engine> engine_;
  std::map<std::string, int> splits_;  // of these members, so far
  // The last split: of which store (kept, so that no other has its address), of whom, and what came of it.
  c10::intrusive_ptr<c10d::Store> split_store_;
  std::string split_members_;
  std::optional<c10::weak_intrusive_ptr<c10d::Backend>> split_backend_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex delegated_mutex_;
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> delegated_;  // perhaps still under way
  bool coalescing_ = false;
  bool device_coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  std::vector<std::function<void()>> device_queue_;  // of a coalescing block
};

}  // namespace tbik
