// tbik._C, what experts and soft caps need beside products and folds: chains over slots, products row by row, the cap.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "fpmode.h"
#include "rows.h"

namespace py = pybind11;

namespace tbik::bindings {

namespace {

constexpr int64_t kGrain = 16384;  // elements that one thread takes at least
constexpr int64_t kChunk = 512;

at::Tensor dense_of(const at::Tensor& x, at::ScalarType dtype, int64_t dims, const std::string& where) {
  require_plain_cpu(x, where);
  if (x.scalar_type() != dtype || x.dim() != dims) {
    refuse(where + ": expected " + at::toString(dtype) + " with " + std::to_string(dims) + " dimensions, got " +
           at::toString(x.scalar_type()) + " " + shape_of(x));
  }
  return x.contiguous();
}

at::Tensor combine_slots(const at::Tensor& values, const at::Tensor& rows, const std::optional<at::Tensor>& scale,
                         const std::string& path) {
  const at::Tensor dense = dense_of(values, at::kFloat, 3, "combine_slots: values");
  const at::Tensor row = dense_of(rows, at::kLong, 2, "combine_slots: rows");
  at::Tensor factors;
  if (scale) {
    factors = dense_of(*scale, at::kFloat, 2, "combine_slots: scale");
    if (!factors.sizes().equals(row.sizes())) refuse("combine_slots: scale: expected the shape of rows");
  }
  const int64_t* data = row.const_data_ptr<int64_t>();
  const int64_t limit = dense.size(1);
  if (!std::all_of(data, data + row.numel(), [&](int64_t r) { return r >= -1 && r < limit; })) {
    refuse("combine_slots: rows: expected numbers from -1 to " + std::to_string(limit - 1));
  }
  const int64_t tokens = row.size(0);
  at::Tensor out = at::empty({dense.size(0), tokens, dense.size(2)}, at::kFloat);
  const SlotChains args{dense.size(2),
                        limit,
                        tokens,
                        row.size(1),
                        dense.const_data_ptr<float>(),
                        data,
                        scale ? factors.const_data_ptr<float>() : nullptr,
                        out.mutable_data_ptr<float>()};
  const Rows& kernels = find_rows(path);
  const int64_t work = std::max<int64_t>(1, args.length * args.slots);
  parallel_for(dense.size(0) * tokens, std::max<int64_t>(1, kGrain / work),
               [&](int64_t first, int64_t last) { tbik::combine_slots(args, first, last, kernels); });
  return out;
}

// --- element by element ---------------------------------------------------------------------------------------------

// [rows, K] of a tensor [..., K].
struct Flat {
  at::Tensor tensor;
  RowsView view;
  int64_t rows;
  int64_t length;
};

Flat flat_of(const at::Tensor& x, const std::string& where) {
  require_plain_cpu(x, where);
  const DType dtype = dtype_of(x.scalar_type(), where);
  if (dtype == DType::kFloat64) refuse(where + ": expected bfloat16, float16 or float32, got float64");
  const int64_t length = x.dim() == 0 ? 1 : x.size(-1);
  int64_t rows = 1;  // also where they are empty
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  Flat flat{x.contiguous(), {nullptr, dtype, 1, length, 0}, rows, length};
  flat.view.data = flat.tensor.const_data_ptr();
  return flat;
}

Flat beside(const at::Tensor& x, const at::Tensor& other, const std::string& where) {
  if (!x.sizes().equals(other.sizes())) {
    refuse(where + ": expected shape " + shape_of(other) + ", got " + shape_of(x));
  }
  return flat_of(x, where);
}

// y = cast(body(row, first element, a, b, n)): a and b in fp32, n <= 512 elements of a row; body leaves the result in
// a.
template <class Body>
at::Tensor over_elements(const Flat& a, const Flat* b, at::ScalarType out_dtype, const Rows& rows,
                         const std::string& where, const Body& body) {
  const DType to = dtype_of(out_dtype, where + ": out_dtype");
  if (to == DType::kFloat64) refuse(where + ": out_dtype: expected bfloat16, float16 or float32, got float64");
  at::Tensor y = at::empty(a.tensor.sizes(), at::TensorOptions().dtype(out_dtype));
  char* data = static_cast<char*>(y.data_ptr());
  const int64_t bytes = to == DType::kFloat32 ? 4 : 2;
  parallel_for(a.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.length)), [&](int64_t first, int64_t last) {
    const FpIeeeScope ieee;
    float left[kChunk];
    float right[kChunk];
    for (int64_t row = first; row < last; ++row) {
      for (int64_t at = 0; at < a.length; at += kChunk) {
        const int64_t n = std::min(kChunk, a.length - at);
        rows.load_tile(left, a.view, row, 1, 1, at, n);
        if (b != nullptr) rows.load_tile(right, b->view, row, 1, 1, at, n);
        body(row, left, right, n);
        rows.store(data + (row * a.length + at) * bytes, to, left, n);
      }
    }
  });
  return y;
}

// y[row] = cast(x[row] * scale[row])
at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& scale, at::ScalarType out_dtype, const std::string& path) {
  const Flat flat = flat_of(x, "scale_rows: x");
  const at::Tensor factors = dense_of(scale, at::kFloat, 1, "scale_rows: scale");
  if (factors.size(0) != flat.rows) refuse("scale_rows: scale: expected one factor per row, got " + shape_of(scale));
  const float* factor = factors.const_data_ptr<float>();
  return over_elements(flat, nullptr, out_dtype, find_rows(path), "scale_rows",
                       [&](int64_t row, float* a, const float*, int64_t n) {
                         const float s = factor[row];
                         for (int64_t i = 0; i < n; ++i) a[i] = a[i] * s;
                       });
}

// fp32 a * b
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b, const std::string& path) {
  const Flat left = flat_of(a, "multiply: a");
  const Flat right = beside(b, a, "multiply: b");
  return over_elements(left, &right, at::kFloat, find_rows(path), "multiply",
                       [](int64_t, float* x, const float* y, int64_t n) {
                         for (int64_t i = 0; i < n; ++i) x[i] = x[i] * y[i];
                       });
}

float cap_of(double cap, const std::string& where) {
  const float value = static_cast<float>(cap);
  if (!(value > 0.0f) || value > 0x1.fffffep+127f) refuse(where + ": cap: expected a number above 0");
  return value;
}

// y = cap * tanh(x / cap)
at::Tensor softcap(const at::Tensor& x, double cap, const std::string& path) {
  const float c = cap_of(cap, "softcap");
  const Flat flat = flat_of(x, "softcap: x");
  const Rows& rows = find_rows(path);
  return over_elements(flat, nullptr, x.scalar_type(), rows, "softcap",
                       [&](int64_t, float* a, const float*, int64_t n) {
                         for (int64_t i = 0; i < n; ++i) a[i] = a[i] / c;
                         rows.tanh(a, a, n);
                         for (int64_t i = 0; i < n; ++i) a[i] = c * a[i];
                       });
}

// dx = dy * (1 - t * t), t = tanh(x / cap)
at::Tensor softcap_dx(const at::Tensor& dy, const at::Tensor& x, double cap, const std::string& path) {
  const float c = cap_of(cap, "softcap_dx");
  const Flat flat = flat_of(x, "softcap_dx: x");
  const Flat upstream = beside(dy, x, "softcap_dx: dy");
  const Rows& rows = find_rows(path);
  return over_elements(flat, &upstream, x.scalar_type(), rows, "softcap_dx",
                       [&](int64_t, float* a, const float* g, int64_t n) {
                         for (int64_t i = 0; i < n; ++i) a[i] = a[i] / c;
                         rows.tanh(a, a, n);
                         for (int64_t i = 0; i < n; ++i) a[i] = g[i] * (1.0f - a[i] * a[i]);
                       });
}

}  // namespace

void bind_experts(py::module_& m);

void bind_experts(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("combine_slots",
        py::overload_cast<const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const std::string&>(
            combine_slots),
        py::arg("values"), py::arg("rows"), py::arg("scale"), py::arg("path") = "", Release());
  m.def("scale_rows", scale_rows, py::arg("x"), py::arg("scale"), py::arg("out_dtype"), py::arg("path") = "",
        Release());
  m.def("multiply", multiply, py::arg("a"), py::arg("b"), py::arg("path") = "", Release());
  m.def("softcap", softcap, py::arg("x"), py::arg("cap"), py::arg("path") = "", Release());
  m.def("softcap_dx", softcap_dx, py::arg("dy"), py::arg("x"), py::arg("cap"), py::arg("path") = "", Release());
}

}  // namespace tbik::bindings
