// tbik._C, row-wise operators: checks arguments, allocates results, calls csrc/rows.cpp without the GIL.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "fpmode.h"
#include "gemm.h"
#include "rows.h"
#include "tree.h"

namespace py = pybind11;

namespace tbik::bindings {

namespace {

constexpr int64_t kGrain = 16384;  // elements that one thread takes at least

int64_t row_grain(int64_t length) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, length)); }

at::Tensor float_rows(const at::Tensor& x, const std::string& where) {
  require_plain_cpu(x, where);
  if (x.scalar_type() != at::kFloat) refuse(where + ": expected float32, got " + at::toString(x.scalar_type()));
  return x.contiguous();
}

// y = f(x) of fp32 tensors: the elementary functions as they stand in the kernels, for tests and tables.
at::Tensor elementary(MapFn Rows::* function, const std::string& name, const at::Tensor& x, const std::string& path) {
  const Rows& rows = find_rows(path);
  const at::Tensor dense = float_rows(x, name + ": x");
  at::Tensor y = at::empty_like(dense);
  parallel_for(dense.numel(), kGrain, [&](int64_t begin, int64_t end) {
    const FpIeeeScope ieee;
    (rows.*function)(y.mutable_data_ptr<float>() + begin, dense.const_data_ptr<float>() + begin, end - begin);
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> sin_cos(const at::Tensor& angle, const std::string& path) {
  const Rows& rows = find_rows(path);
  const at::Tensor dense = float_rows(angle, "sin_cos: angle");
  at::Tensor sine = at::empty_like(dense);
  at::Tensor cosine = at::empty_like(dense);
  const float* a = dense.const_data_ptr<float>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    if (!(std::fabs(a[i]) <= 0x1p+20f)) refuse("sin_cos: an angle is finite and at most 2^20 in magnitude");
  }
  parallel_for(dense.numel(), kGrain, [&](int64_t begin, int64_t end) {
    const FpIeeeScope ieee;
    rows.sin_cos(sine.mutable_data_ptr<float>() + begin, cosine.mutable_data_ptr<float>() + begin, a + begin,
                 end - begin);
  });
  return {sine, cosine};
}

// fp32 [..., K] -> fp32 [...]: the canonical tree over `leaves` leaves of A9.
at::Tensor row_sum(const at::Tensor& x, int64_t leaves, const std::string& path) {
  const Rows& rows = find_rows(path);
  const at::Tensor dense = float_rows(x, "row_sum: x");
  if (x.dim() == 0) refuse("row_sum: x: expected [..., K], got a scalar");
  const int64_t length = x.size(-1);
  const std::vector<int64_t> cut = cuts(length, leaves);
  at::Tensor out = at::empty(x.sizes().slice(0, x.dim() - 1), x.options());
  const float* data = dense.const_data_ptr<float>();
  parallel_for(out.numel(), row_grain(length), [&](int64_t begin, int64_t end) {
    const FpIeeeScope ieee;
    std::vector<float> values(static_cast<size_t>(leaves));
    std::vector<float> sums(static_cast<size_t>(sum_blocks(length)));
    for (int64_t row = begin; row < end; ++row) {
      for (size_t leaf = 0; leaf < values.size(); ++leaf) {
        values[leaf] = rows.row_sum(data + row * length + cut[leaf], cut[leaf + 1] - cut[leaf], sums.data());
      }
      out.mutable_data_ptr<float>()[row] = fold_canonical(values.data(), leaves);
    }
  });
  return out;
}

at::Tensor row_max(const at::Tensor& x, const std::string& path) {
  const Rows& rows = find_rows(path);
  const at::Tensor dense = float_rows(x, "row_max: x");
  if (x.dim() == 0) refuse("row_max: x: expected [..., K], got a scalar");
  const int64_t length = x.size(-1);
  at::Tensor out = at::empty(x.sizes().slice(0, x.dim() - 1), x.options());
  const float* data = dense.const_data_ptr<float>();
  parallel_for(out.numel(), row_grain(length), [&](int64_t begin, int64_t end) {
    const FpIeeeScope ieee;
    for (int64_t row = begin; row < end; ++row) {
      out.mutable_data_ptr<float>()[row] = rows.row_max(data + row * length, length);
    }
  });
  return out;
}

}  // namespace

void bind_rows(py::module_& m);

void bind_rows(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  struct Named {
    const char* name;
    MapFn Rows::* function;
  };
  for (const auto& [name, function] :
       {Named{"exp", &Rows::exp}, Named{"log", &Rows::log}, Named{"sigmoid", &Rows::sigmoid},
        Named{"tanh", &Rows::tanh}, Named{"silu", &Rows::silu}}) {
    m.def(
        name,
        [function, name](const at::Tensor& x, const std::string& path) { return elementary(function, name, x, path); },
        py::arg("x"), py::arg("path") = "", Release());
  }
  m.def("sin_cos", sin_cos, py::arg("angle"), py::arg("path") = "", Release());
  m.def("row_sum", row_sum, py::arg("x"), py::arg("leaves") = 1, py::arg("path") = "", Release());
  m.def("row_max", row_max, py::arg("x"), py::arg("path") = "", Release());
}

}  // namespace tbik::bindings
