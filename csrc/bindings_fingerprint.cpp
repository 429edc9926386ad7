// tbik._C.fingerprint: checks arguments and calls csrc/fingerprint.cpp without the GIL.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "fingerprint.h"

namespace py = pybind11;

namespace tbik::bindings {

namespace {

uint64_t fingerprint_of(const at::Tensor& x, uint64_t first, const std::vector<uint64_t>& index_strides, uint64_t key,
                        const std::string& path) {
  require_plain_cpu(x, "fingerprint");
  if (x.is_complex() || x.is_quantized()) {
    refuse("fingerprint: expected real, unquantized numbers, got " + c10::str(x.scalar_type()));
  }
  if (static_cast<int64_t>(index_strides.size()) != x.dim()) {
    refuse("fingerprint: expected one index stride per dimension, " + std::to_string(x.dim()) + ", got " +
           std::to_string(index_strides.size()));
  }
  if (key % 2 == 0) refuse("fingerprint: expected an odd key, got " + std::to_string(key));
  std::vector<BoxDim> dims;
  for (int64_t d = 0; d < x.dim(); ++d) {
    dims.push_back({x.size(d), x.stride(d) * x.element_size(), index_strides[static_cast<size_t>(d)]});
  }
  return fingerprint(
      x.const_data_ptr(), x.element_size(), std::move(dims), first, key, path,
      [](int64_t count, const std::function<void(int64_t, int64_t)>& body) { parallel_for(count, 1, body); });
}

}  // namespace

void bind_fingerprint(py::module_& m) {
  m.def("fingerprint", fingerprint_of, py::arg("x"), py::arg("first"), py::arg("index_strides"), py::arg("key"),
        py::arg("path") = "", py::call_guard<py::gil_scoped_release>());
}

}  // namespace tbik::bindings
