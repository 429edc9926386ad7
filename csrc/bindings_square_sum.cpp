// tbik._C.square_sum: checks the argument and calls csrc/square_sum.cpp without the GIL.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "square_sum.h"

namespace py = pybind11;

namespace tbik::bindings {

namespace {

// (low halves, high halves, nan, infinite), 256 bins.
using Bins = std::tuple<std::vector<uint64_t>, std::vector<uint64_t>, bool, bool>;

Bins square_sum_of(const at::Tensor& x) {
  require_plain_cpu(x, "square_sum");
  if (x.scalar_type() != at::kFloat || !x.is_contiguous()) {
    refuse("square_sum: expected contiguous float32, got " + c10::str(x.scalar_type()) + " " + shape_of(x));
  }
  const SquareSum sum = square_sum(
      x.const_data_ptr<float>(), x.numel(),
      [](int64_t count, const std::function<void(int64_t, int64_t)>& body) { parallel_for(count, 1, body); });
  return {{sum.low.begin(), sum.low.end()}, {sum.high.begin(), sum.high.end()}, sum.nan, sum.infinite};
}

}  // namespace

void bind_square_sum(py::module_& m) {
  m.def("square_sum", square_sum_of, py::arg("x"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace tbik::bindings
