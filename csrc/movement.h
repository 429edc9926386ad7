// A c10d backend that carries tensors by a Python object (MPI: tbik/launch.py), for the collectives that the "tbik"
// backend delegates. It adds nothing: reductions are refused here.
//
//   mover.exchange(to, from) -> request          to[p]: bytes for rank p, from[p]: where p's bytes go; None = nothing
//   mover.send(tensor, rank, tag) -> request
//   mover.receive(tensor, rank, tag) -> request  rank -1: from any; request.source says whose it was
//   request.test() -> bool, request.wait(limit_s, what)
//
// Tensors in these calls are contiguous bytes (uint8) and live until the request is done. A Work makes progress when it
// is waited for or asked. Every wait has the group's timeout. Errors: DistBackendError, ValueError.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace tbik {

class Movement final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Milliseconds = std::chrono::milliseconds;

  Movement(pybind11::object mover, int rank, int size, Milliseconds timeout);
  ~Movement() override;

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  struct Parcel;  // what one exchange carries
  class CallWork;
  WorkPtr exchange(c10d::OpType type, std::vector<Parcel> parcels, Tensors outputs, Milliseconds timeout,
                   const char* what);
  Milliseconds limit(Milliseconds timeout) const { return timeout.count() > 0 ? timeout : options_->timeout; }

  pybind11::object mover_;
  std::string name_;
  c10::intrusive_ptr<Options> options_;
};

void bind_movement(pybind11::module& m);

}  // namespace tbik
