// What the binding files share: refusals, dtypes, threads. Only bindings*.cpp includes it; it includes torch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "memory.h"

namespace tbik::bindings {

[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

inline std::string shape_of(const at::Tensor& x) {
  std::string text = "[";
  for (int64_t i = 0; i < x.dim(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(x.size(i));
  return text + "]";
}

inline DType dtype_of(at::ScalarType type, const std::string& where) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      refuse(where + ": expected float32, float64, bfloat16 or float16, got " + std::string(at::toString(type)));
  }
}

inline void require_plain_cpu(const at::Tensor& x, const std::string& where) {
  if (!x.defined()) refuse(where + ": the tensor is undefined");
  if (x.layout() != at::kStrided || !x.device().is_cpu()) {
    refuse(where + ": expected a dense CPU tensor, got layout " + c10::str(x.layout()) + " on " + x.device().str());
  }
  if (x.is_neg() || x.is_conj()) refuse(where + ": a lazily negated or conjugated view; call .resolve_neg() first");
}

// at::empty for a result that will be written in order.
inline at::Tensor empty_result(at::IntArrayRef shape, const at::TensorOptions& options) {
  at::Tensor result = at::empty(shape, options);
  ask_for_huge_pages(result.data_ptr(), static_cast<int64_t>(result.nbytes()));
  return result;
}

// Disjoint ranges of [0, count) on torch's threads, at least `grain` items each.
inline void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, count, grain, body);
}

}  // namespace tbik::bindings
