// The all-reduce of numpy arrays among the ranks of one transport, for programs without torch tensors
// (tbik.launch.allreduce).
//
//   out[e] = cast(node(0, W)[e] / avg)     one leaf per rank; csrc/collective does it, as for torch.distributed
//
// A call whose arguments are plain (exactly numpy.ndarray, C-contiguous, native, of a known dtype) costs one method
// call; the caller handles all others, and tells the ranks with refuse() when it cannot take part. Every message
// carries dtype, shape, op and call number, so that ranks which disagree all learn it, and stay in step. Knows Python's
// buffers and nothing of torch. The GIL is released while bytes move. Errors: tbik.errors, by class.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "collective.h"

namespace tbik {

class Communicator {
 public:
  Communicator(std::unique_ptr<Transport> transport, const Settings& settings, const Combine& combine,
               double timeout_s);

  enum Outcome { kUnusual = 0, kDone = 1, kDisagree = 2 };

  // out = sum over the ranks of array. out may be array. dtype: "bfloat16" for uint16 arrays that hold such bits, else
  // None. timeout_s: None for the default. kUnusual: not plain, nothing was sent.
  Outcome all_reduce(pybind11::handle array, pybind11::handle out, pybind11::handle op, pybind11::handle dtype,
                     pybind11::handle timeout_s);

  // Takes the place of an all_reduce that this rank cannot make: the others find out.
  void refuse(double timeout_s);

  // Every rank's text. At most kText bytes of each arrive.
  std::vector<pybind11::bytes> gather(const std::string& text, double timeout_s);

  const Transport& transport() const { return *transport_; }
  const Collectives& collectives() const { return collectives_; }
  void leave();

  static constexpr int64_t kText = 8192;

 private:
  void set_limit(double timeout_s);

  std::unique_ptr<Transport> transport_;
  Collectives collectives_;
  const double timeout_s_;
  uint64_t gathers_ = 0;
};

// A transport over a Python function move(to, from, what, limit_s): lists of memoryviews, None where there is nothing.
std::unique_ptr<Transport> make_mover_transport(pybind11::object function, const std::string& name, int rank, int size,
                                                int64_t capacity);

void bind_communicator(pybind11::module& m, const Combine& combine);

}  // namespace tbik
