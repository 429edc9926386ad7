// tbik._C: whether a kernel may be called without the dispatcher. The questions of tbik/ops/rowwise.py in one call,
// because asked one by one from Python they cost more than a small row.
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/api.h>

#include "bindings.h"

namespace py = pybind11;

namespace tbik::bindings {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Nobody sees or changes the operators that this thread calls: no mode, transform or profiler.
bool is_observed() {
  const DispatchKeySet plain({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  const DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included.raw_repr() & ~plain.raw_repr()) != 0 || at::impl::PythonTorchFunctionTLS::stack_len() > 0 ||
         torch::profiler::impl::profilerEnabled();
}

// A Tensor or Parameter, no subclass; dense CPU memory as it stands; no gradient asked for.
bool is_direct_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return false;
  const at::Tensor& t = THPVariable_Unpack(object);
  const DispatchKeySet plain(
      {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU});
  if ((t.key_set().raw_repr() & ~plain.raw_repr()) != 0) return false;
  return !(at::GradMode::is_enabled() && t.requires_grad());
}

bool is_direct(const py::args& tensors) {
  if (is_observed()) return false;
  for (const py::handle t : tensors) {
    if (!t.is_none() && !is_direct_tensor(t.ptr())) return false;
  }
  return true;
}

bool is_row_type(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
}

// is_direct of rows x [..., K], K >= 1, and parameters [K] or None.
bool is_simple(const py::handle& x, const py::args& parameters) {
  if (is_observed() || !is_direct_tensor(x.ptr())) return false;
  const at::Tensor& rows = THPVariable_Unpack(x.ptr());
  if (!is_row_type(rows) || rows.dim() == 0 || rows.size(-1) == 0) return false;
  for (const py::handle p : parameters) {
    if (p.is_none()) continue;
    if (!is_direct_tensor(p.ptr())) return false;
    const at::Tensor& w = THPVariable_Unpack(p.ptr());
    if (!is_row_type(w) || w.dim() != 1 || w.size(0) != rows.size(-1)) return false;
  }
  return true;
}

// is_direct of rows that are alike in shape and dtype; None is no row.
bool is_simple_pair(const py::handle& a, const py::handle& b) {
  if (!is_simple(a, {})) return false;
  if (b.is_none()) return true;
  if (!is_direct_tensor(b.ptr())) return false;
  const at::Tensor& x = THPVariable_Unpack(a.ptr());
  const at::Tensor& y = THPVariable_Unpack(b.ptr());
  return x.scalar_type() == y.scalar_type() && x.sizes().equals(y.sizes());
}

}  // namespace

void bind_plain(py::module_& m);

void bind_plain(py::module_& m) {
  m.def("is_direct", is_direct);
  m.def("is_simple", is_simple);
  m.def("is_simple_pair", is_simple_pair);
}

}  // namespace tbik::bindings
