// tbik._C, row-wise operators: checks arguments, allocates results, calls csrc/rows.cpp without the GIL.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "combine.h"
#include "fpmode.h"
#include "gemm.h"
#include "memory.h"
#include "rows.h"
#include "tree.h"

namespace py = pybind11;

namespace tbik::bindings {

namespace {

#include "philox.h"

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

// --- operands -------------------------------------------------------------------------------------------------------

DType row_dtype(at::ScalarType type, const std::string& where) {
  const DType dtype = dtype_of(type, where);
  if (dtype == DType::kFloat64) refuse(where + ": expected bfloat16, float16 or float32, got float64");
  return dtype;
}

// The rows of x [..., K]: in place if its leading axes are at most two runs of even strides, else of a copy.
struct Held {
  at::Tensor tensor;
  RowsView view{nullptr, DType::kFloat32, 1, 0, 0};
  int64_t rows = 0;
};

bool find_view(const at::Tensor& x, RowsView& view) {
  const int64_t last = x.dim() - 1;
  if (x.size(last) > 1 && x.stride(last) != 1) return false;
  std::vector<std::pair<int64_t, int64_t>> runs;  // (count, stride), innermost first
  for (int64_t axis = last - 1; axis >= 0; --axis) {
    const int64_t count = x.size(axis);
    if (count == 1) continue;
    if (!runs.empty() && x.stride(axis) == runs.back().first * runs.back().second) {
      runs.back().first *= count;
    } else {
      runs.emplace_back(count, x.stride(axis));
    }
  }
  if (runs.size() > 2) return false;
  view.inner = 1;
  view.stride_outer = view.stride_inner = 0;
  if (runs.size() == 1) view.stride_outer = runs[0].second;
  if (runs.size() == 2) {
    view.inner = runs[0].first;
    view.stride_inner = runs[0].second;
    view.stride_outer = runs[1].second;
  }
  return true;
}

Held rows_of(const at::Tensor& x, const std::string& where) {
  require_plain_cpu(x, where);
  if (x.dim() == 0) refuse(where + ": expected [..., K], got a scalar");
  Held held{x, {nullptr, row_dtype(x.scalar_type(), where), 1, 0, 0}, 1};
  for (int64_t axis = 0; axis + 1 < x.dim(); ++axis) held.rows *= x.size(axis);
  if (held.rows > 0 && !find_view(x, held.view)) {
    held.tensor = x.contiguous();
    find_view(held.tensor, held.view);
  }
  held.view.data = held.tensor.const_data_ptr();
  return held;
}

// Alike in shape; the dtype may differ.
Held beside(const at::Tensor& x, const at::Tensor& other, const std::string& where) {
  Held held = rows_of(x, where);
  if (!x.sizes().equals(other.sizes())) {
    refuse(where + ": expected shape " + shape_of(other) + ", got " + shape_of(x));
  }
  return held;
}

std::string path_of(const std::string& path) { return path == "avx512_bf16" ? "avx512f" : path; }

const Loops& loops_of(const std::string& path) { return *find_path(path_of(path), DType::kFloat32).loops; }

// w [K] rounded to `compute` if that has fewer bits, then exactly in fp32; 1 + w in fp32 if `one_plus`.
std::vector<float> weight_of(const at::Tensor& w, int64_t length, at::ScalarType compute, bool one_plus,
                             const Loops& loops, const std::string& where) {
  require_plain_cpu(w, where);
  if (w.dim() != 1 || w.size(0) != length) {
    refuse(where + ": expected shape [" + std::to_string(length) + "], got " + shape_of(w));
  }
  const DType from = row_dtype(w.scalar_type(), where);
  const DType to = row_dtype(compute, where + ": compute dtype");
  const at::Tensor dense = w.contiguous();
  std::vector<float> values(static_cast<size_t>(length));
  const FpIeeeScope ieee;
  loops.cast(values.data(), DType::kFloat32, dense.const_data_ptr(), from, length);
  if (from == DType::kFloat32 && to != DType::kFloat32) {
    std::vector<uint16_t> narrow(values.size());
    loops.cast(narrow.data(), to, values.data(), DType::kFloat32, length);
    loops.cast(values.data(), DType::kFloat32, narrow.data(), to, length);
  }
  if (one_plus) {
    for (float& value : values) value = 1.0f + value;
  }
  return values;
}

// w and bias of a norm: as they stand if the kernel takes their type and no rounding is asked for, else copies, bf16
// where that holds them exactly. takes_bf16: whether the kernel does.
struct Weights {
  at::Tensor held_w, held_bias;
  std::vector<float> w, bias;
  std::vector<uint16_t> narrow_w, narrow_bias;
};

Weights norm_weights(NormArgs& args, const at::Tensor& w, const std::optional<at::Tensor>& bias, at::ScalarType compute,
                     bool one_plus, bool takes_bf16, const Loops& loops, const std::string& where) {
  Weights weights;
  const auto stands = [&](const at::Tensor& t) {
    if (t.dim() != 1 || t.size(0) != args.length || !t.is_contiguous() || t.scalar_type() != w.scalar_type()) {
      return false;
    }
    if (t.scalar_type() == at::kFloat) return compute == at::kFloat && !one_plus;
    return t.scalar_type() == at::kBFloat16 && compute != at::kHalf && !one_plus && takes_bf16;
  };
  if (stands(w) && (!bias || stands(*bias))) {
    require_plain_cpu(w, where + ": w");
    row_dtype(compute, where + ": compute dtype");
    weights.held_w = w;
    args.w = w.const_data_ptr();
    args.w_dtype = row_dtype(w.scalar_type(), where);
    if (bias) {
      require_plain_cpu(*bias, where + ": bias");
      weights.held_bias = *bias;
      args.bias = bias->const_data_ptr();
    }
    return weights;
  }
  weights.w = weight_of(w, args.length, compute, one_plus, loops, where + ": w");
  if (bias) weights.bias = weight_of(*bias, args.length, compute, false, loops, where + ": bias");
  const auto rounded = [&](const at::Tensor& t) { return t.scalar_type() == at::kFloat; };
  if (takes_bf16 && compute == at::kBFloat16 && !one_plus && rounded(w) && (!bias || rounded(*bias))) {
    const FpIeeeScope ieee;
    const auto narrow = [&](std::vector<uint16_t>& to, const std::vector<float>& from) {
      to.resize(from.size());
      loops.cast(to.data(), DType::kBFloat16, from.data(), DType::kFloat32, args.length);
      return to.data();
    };
    args.w_dtype = DType::kBFloat16;
    args.w = narrow(weights.narrow_w, weights.w);
    if (bias) args.bias = narrow(weights.narrow_bias, weights.bias);
    return weights;
  }
  args.w_dtype = DType::kFloat32;
  args.w = weights.w.data();
  if (bias) args.bias = weights.bias.data();
  return weights;
}

template <class Body>
void over_rows(int64_t rows, int64_t length, int64_t scratch, const Body& body) {
  parallel_for(rows, row_grain(length), [&](int64_t first, int64_t last) {
    const FpIeeeScope ieee;
    const AlignedBuffer memory = aligned_buffer(std::max<int64_t>(scratch, 16) * 4);
    body(first, last, static_cast<float*>(memory.get()));
  });
}

at::Tensor like(const at::Tensor& x, at::ScalarType dtype) {
  return empty_result(x.sizes(), at::TensorOptions().dtype(dtype));
}

// --- sums -----------------------------------------------------------------------------------------------------------

// [..., K] -> fp32 nodes [C, ...] of the schedule over the leaves between `cut`, or its root [...] in out_dtype,
// divided by `divisor`.
at::Tensor row_nodes(const at::Tensor& x, const std::vector<int64_t>& cut, const Schedule& program, int64_t divisor,
                     at::ScalarType out_dtype, const std::string& path) {
  const Rows& rows = find_rows(path);
  const Loops& loops = loops_of(path);
  const Held held = rows_of(x, "row_sum: x");
  const int64_t leaves = static_cast<int64_t>(cut.size()) - 1;
  if (cut.empty() || leaves != program.num_inputs || !std::is_sorted(cut.begin(), cut.end()) || cut.front() < 0 ||
      cut.back() > x.size(-1)) {
    refuse("row_nodes: expected ascending cuts within the row, one more than the schedule loads");
  }
  const DType out = row_dtype(out_dtype, "row_nodes: out_dtype");
  const at::Tensor values = at::empty({leaves, held.rows}, at::kFloat);
  float* data = values.mutable_data_ptr<float>();
  const int64_t length = cut.back() - cut.front();
  over_rows(held.rows, length, length + sum_blocks(length) + 16, [&](int64_t first, int64_t last, float* scratch) {
    rows.sum_leaves(data, held.view, first, last, held.rows, cut.data(), leaves, scratch);
  });
  std::vector<const void*> inputs;
  for (int64_t leaf = 0; leaf < leaves; ++leaf) inputs.push_back(data + leaf * held.rows);
  std::vector<int64_t> shape = x.sizes().slice(0, x.dim() - 1).vec();
  if (!program.is_root) shape.insert(shape.begin(), static_cast<int64_t>(program.outputs.size()));
  at::Tensor result = at::empty(shape, at::TensorOptions().dtype(program.is_root ? out_dtype : at::kFloat));
  const auto grain = [](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    parallel_for(count, 16, body);
  };
  fold(inputs, DType::kFloat32, held.rows, program, divisor, nullptr, 1,
       {result.data_ptr(), program.is_root ? out : DType::kFloat32}, loops, grain);
  return result;
}

// sum of tensors alike, in order, in fp32; one cast.
at::Tensor sum_inputs(const std::vector<at::Tensor>& inputs, const std::string& path) {
  const Rows& rows = find_rows(path);
  if (inputs.empty()) refuse("sum_inputs: at least one tensor is needed");
  std::vector<at::Tensor> dense;
  std::vector<const void*> pointers;
  const DType dtype = row_dtype(inputs[0].scalar_type(), "sum_inputs");
  for (const at::Tensor& x : inputs) {
    require_plain_cpu(x, "sum_inputs");
    if (x.scalar_type() != inputs[0].scalar_type() || !x.sizes().equals(inputs[0].sizes())) {
      refuse("sum_inputs: expected tensors alike");
    }
    dense.push_back(x.contiguous());
    pointers.push_back(dense.back().const_data_ptr());
  }
  at::Tensor out = like(inputs[0], inputs[0].scalar_type());
  parallel_for(out.numel(), kGrain, [&](int64_t first, int64_t last) {
    const FpIeeeScope ieee;
    rows.sum_inputs(out.data_ptr(), dtype, pointers.data(), static_cast<int64_t>(pointers.size()), first, last);
  });
  return out;
}

// --- norms ----------------------------------------------------------------------------------------------------------

void set_result(NormArgs& args, const at::Tensor& y, DType dtype) {
  constexpr int64_t kLine = 64;
  args.y = y.data_ptr();
  args.y_dtype = dtype;
  args.stream = dtype == DType::kFloat32 && reinterpret_cast<uintptr_t>(args.y) % kLine == 0 &&
                args.length * 4 % kLine == 0 && exceeds_caches(static_cast<int64_t>(y.nbytes()));
}

std::tuple<at::Tensor, at::Tensor> norm(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                                        const at::Tensor& w, const std::optional<at::Tensor>& bias, double eps,
                                        bool centered, bool one_plus, at::ScalarType compute, const std::string& path) {
  const Rows& rows = find_rows(path);
  const Loops& loops = loops_of(path);
  const Held held = rows_of(x, "norm: x");
  const int64_t length = x.size(-1);
  NormArgs args{.length = length, .eps = static_cast<float>(eps), .centered = centered, .x = held.view};
  const Weights weights = norm_weights(args, w, bias, compute, one_plus, true, loops, "norm");
  Held added;
  at::Tensor sum;
  if (residual) {
    added = beside(*residual, x, "norm: residual");
    if (added.view.dtype != held.view.dtype) refuse("norm: residual: expected the dtype of x");
    args.residual = added.view;
    sum = like(x, x.scalar_type());
    args.sum = sum.data_ptr();
  }
  at::Tensor y = like(x, x.scalar_type());
  set_result(args, y, held.view.dtype);
  over_rows(held.rows, length, norm_scratch(length), [&](int64_t first, int64_t last, float* scratch) {
    rows.norm_forward(args, first, last, scratch);
    finish_stream(args);
  });
  return {y, sum};
}

// dx alone, rows in parallel.
void run_norm_dx(const NormGradients& args, int64_t num_rows, const Rows& rows) {
  parallel_for(num_rows, row_grain(args.norm.length),
               [&](int64_t first, int64_t last) { norm_dx(args, first, last, rows); });
}

// Chains, and dx if norm.y is there. One thread takes whole chains, as long as that gives every thread its share; else
// the rows' means first, then strips of columns.
void run_norm_gradients(const NormGradients& args, int64_t chains, const Rows& rows) {
  constexpr int64_t kEnough = 4;  // chains per thread
  const int64_t threads = at::get_num_threads();
  if (chains % threads == 0 || chains >= kEnough * threads) {
    parallel_for(chains, 1, [&](int64_t first, int64_t last) { norm_gradients(args, first, last, rows); });
    return;
  }
  const int64_t num_rows = args.cuts[chains] * args.heads;
  std::vector<RowMeans> means;
  if (args.norm.x.data != nullptr) {
    means.resize(static_cast<size_t>(num_rows));
    parallel_for(num_rows, row_grain(args.norm.length),
                 [&](int64_t first, int64_t last) { norm_row_means(args, first, last, means.data(), rows); });
  }
  const RowMeans* of_rows = means.empty() ? nullptr : means.data();
  parallel_for(chain_tasks(args, chains), 1,
               [&](int64_t first, int64_t last) { chain_task(args, first, last, of_rows, rows); });
}

void require_cuts(int64_t num_rows, int64_t heads, const std::vector<int64_t>& cut) {
  if (heads < 1 || num_rows % heads != 0 || cut.empty() || !std::is_sorted(cut.begin(), cut.end()) || cut.front() < 0 ||
      cut.back() > num_rows / heads) {
    refuse("column_leaves: expected heads that divide the rows and ascending cuts within the tokens");
  }
}

// dy [..., H, K]: fp32 [chains, H * K], chain c over the tokens [cuts[c], cuts[c + 1]). x: b_k = normalised x, else 1.
at::Tensor column_leaves(const at::Tensor& dy, const std::optional<at::Tensor>& x, int64_t heads, double eps,
                         bool centered, const std::vector<int64_t>& cut, const std::string& path) {
  const Rows& rows = find_rows(path);
  const Held upstream = rows_of(dy, "column_leaves: dy");
  Held held;
  if (x) held = beside(*x, dy, "column_leaves: x");
  require_cuts(upstream.rows, heads, cut);
  const int64_t length = dy.size(-1);
  const int64_t chains = static_cast<int64_t>(cut.size()) - 1;
  at::Tensor leaves = at::empty({chains, heads * length}, at::kFloat);
  float* values = leaves.mutable_data_ptr<float>();
  const NormArgs norm{
      .length = length, .eps = static_cast<float>(eps), .centered = centered, .x = held.view, .dy = upstream.view};
  run_norm_gradients({norm, heads, cut.data(), x ? values : nullptr, x ? nullptr : values}, chains, rows);
  return leaves;
}

// (dx, leaves of dw, leaves of dbias), each None where not wanted; the leaves as column_leaves gives them. cut: empty
// where neither dw nor dbias is wanted.
std::tuple<std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>> norm_gradients(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& residual,
    double eps, bool centered, bool one_plus, at::ScalarType compute, at::ScalarType out_dtype, bool with_dx,
    bool with_dw, bool with_dbias, int64_t heads, const std::vector<int64_t>& cut, const std::string& path) {
  const Rows& rows = find_rows(path);
  const Held held = rows_of(x, "norm_gradients: x");
  const Held upstream = beside(dy, x, "norm_gradients: dy");
  const int64_t length = x.size(-1);
  NormGradients args{
      .norm = {.length = length, .eps = static_cast<float>(eps), .centered = centered, .dy = upstream.view},
      .heads = heads,
      .cuts = cut.data()};
  if (with_dx || with_dw) args.norm.x = held.view;
  Held added;
  Weights weights;
  at::Tensor dx;
  if (with_dx) {
    if (residual) added = beside(*residual, x, "norm_gradients: residual");
    dx = like(x, out_dtype);
    args.norm.residual = added.view;
    set_result(args.norm, dx, row_dtype(out_dtype, "norm_gradients: out_dtype"));
    const auto is_bf16 = [](const Held& t) { return !t.tensor.defined() || t.view.dtype == DType::kBFloat16; };
    const bool takes_bf16 = is_bf16(held) && is_bf16(upstream) && is_bf16(added) && out_dtype == at::kBFloat16;
    weights = norm_weights(args.norm, w, {}, compute, one_plus, takes_bf16, loops_of(path), "norm_gradients");
  }
  at::Tensor leaves;
  at::Tensor ones;
  if (with_dw || with_dbias) {
    require_cuts(held.rows, heads, cut);
    const int64_t chains = static_cast<int64_t>(cut.size()) - 1;
    if (with_dw) {
      leaves = at::empty({chains, heads * length}, at::kFloat);
      args.leaves = leaves.mutable_data_ptr<float>();
    }
    if (with_dbias) {
      ones = at::empty({chains, heads * length}, at::kFloat);
      args.ones = ones.mutable_data_ptr<float>();
    }
    if (with_dx && (cut.front() > 0 || cut.back() < held.rows / heads)) {
      run_norm_dx(args, held.rows, rows);
      args.norm.y = nullptr;
    }
    run_norm_gradients(args, chains, rows);
  } else if (with_dx) {
    run_norm_dx(args, held.rows, rows);
  }
  const auto wanted = [](at::Tensor t) { return t.defined() ? std::optional<at::Tensor>(std::move(t)) : std::nullopt; };
  return {wanted(std::move(dx)), wanted(std::move(leaves)), wanted(std::move(ones))};
}

at::Tensor norm_dx(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
                   const std::optional<at::Tensor>& residual, double eps, bool centered, bool one_plus,
                   at::ScalarType compute, at::ScalarType out_dtype, const std::string& path) {
  auto [dx, leaves, ones] =
      norm_gradients(dy, x, w, residual, eps, centered, one_plus, compute, out_dtype, true, false, false, 1, {}, path);
  return *dx;
}

// --- activations ----------------------------------------------------------------------------------------------------

Activation activation_of(const std::string& kind) {
  if (kind == "silu") return Activation::kSilu;
  if (kind == "gelu_tanh") return Activation::kGelu;
  refuse("activation: expected 'silu' or 'gelu_tanh', got '" + kind + "'");
}

at::Tensor activation(const at::Tensor& gate, const std::optional<at::Tensor>& up, const std::string& kind,
                      const std::string& path) {
  const Rows& rows = find_rows(path);
  const Held held = rows_of(gate, "activation: gate");
  Held other;
  if (up) other = beside(*up, gate, "activation: up");
  const int64_t length = gate.size(-1);
  at::Tensor y = like(gate, gate.scalar_type());
  const ActivationArgs args{length,  activation_of(kind), held.view, other.view, {}, y.data_ptr(),
                            nullptr, held.view.dtype,     length};
  over_rows(held.rows, length, 0, [&](int64_t first, int64_t last, float*) { rows.activation(args, first, last); });
  return y;
}

// packed: one tensor [..., 2 I], dgate before dup.
std::vector<at::Tensor> activation_dx(const at::Tensor& dy, const at::Tensor& gate, const std::optional<at::Tensor>& up,
                                      const std::string& kind, bool packed, const std::string& path) {
  const Rows& rows = find_rows(path);
  const Held held = rows_of(gate, "activation_dx: gate");
  const Held upstream = beside(dy, gate, "activation_dx: dy");
  Held other;
  if (up) other = beside(*up, gate, "activation_dx: up");
  const int64_t length = gate.size(-1);
  std::vector<at::Tensor> results;
  ActivationArgs args{length,     activation_of(kind), held.view,
                      other.view, upstream.view,       nullptr,
                      nullptr,    held.view.dtype,     packed ? 2 * length : length};
  if (packed) {
    std::vector<int64_t> shape = gate.sizes().vec();
    shape.back() = 2 * length;
    results.push_back(empty_result(shape, gate.options()));
    args.y = results[0].data_ptr();
    args.dup = static_cast<char*>(args.y) + length * size_of(held.view.dtype);
  } else {
    results.push_back(like(gate, gate.scalar_type()));
    args.y = results[0].data_ptr();
    if (up) {
      results.push_back(like(gate, gate.scalar_type()));
      args.dup = results[1].data_ptr();
    }
  }
  over_rows(held.rows, length, 0,
            [&](int64_t first, int64_t last, float*) { rows.activation_backward(args, first, last); });
  return results;
}

// --- rope -----------------------------------------------------------------------------------------------------------

at::Tensor rope(const at::Tensor& x, const at::Tensor& sine, const at::Tensor& cosine, bool interleaved, bool backward,
                at::ScalarType out_dtype, const std::string& path) {
  const Rows& rows = find_rows(path);
  const Held held = rows_of(x, "rope: x");
  if (x.dim() < 2) refuse("rope: x: expected [..., H, D], got " + shape_of(x));
  std::vector<int64_t> lead = x.sizes().slice(0, x.dim() - 2).vec();
  const int64_t heads = x.size(-2);
  const int64_t dim = x.size(-1);
  const int64_t half = sine.dim() > 0 ? sine.size(-1) : 0;
  if (2 * half > dim) refuse("rope: the tables rotate " + std::to_string(2 * half) + " of " + std::to_string(dim));
  lead.push_back(half);
  if (sine.scalar_type() != at::kFloat || cosine.scalar_type() != at::kFloat) refuse("rope: tables are float32");
  const Held s = rows_of(sine.expand(lead), "rope: sin");
  const Held c = rows_of(cosine.expand(lead), "rope: cos");
  at::Tensor y = like(x, out_dtype);
  const RopeArgs args{heads,     dim,    2 * half, interleaved,  backward,
                      held.view, s.view, c.view,   y.data_ptr(), row_dtype(out_dtype, "rope: out_dtype")};
  over_rows(s.rows, heads * dim, rope_scratch(args),
            [&](int64_t first, int64_t last, float* scratch) { rows.rope(args, first, last, scratch); });
  return y;
}

// (sin, cos) of fp32(position) * inv_freq, times `scale` if it is not 1: fp32 [..., R / 2].
std::tuple<at::Tensor, at::Tensor> rope_tables(const at::Tensor& positions, const at::Tensor& inv_freq, double scale,
                                               const std::string& path) {
  require_plain_cpu(positions, "rope_tables: positions");
  if (positions.scalar_type() != at::kLong) refuse("rope_tables: positions: expected int64");
  const Rows& rows = find_rows(path);
  const at::Tensor dense = positions.contiguous();
  const at::Tensor freq = float_rows(inv_freq, "rope_tables: inv_freq");
  if (freq.dim() != 1) refuse("rope_tables: inv_freq: expected [R / 2], got " + shape_of(inv_freq));
  const int64_t half = freq.numel();
  const int64_t* p = dense.const_data_ptr<int64_t>();
  const float* f = freq.const_data_ptr<float>();
  int64_t highest = 0;
  for (int64_t i = 0; i < dense.numel(); ++i) {
    if (p[i] <= -(int64_t{1} << 24) || p[i] >= int64_t{1} << 24) {
      refuse("rope_tables: positions stay below 2^24, where float32 holds every integer; got " + std::to_string(p[i]));
    }
    highest = std::max(highest, std::abs(p[i]));
  }
  for (int64_t j = 0; j < half; ++j) {
    if (!(std::fabs(static_cast<float>(highest) * f[j]) <= 0x1p+20f) || !std::isfinite(f[j])) {
      refuse("rope_tables: angles are finite and at most 2^20, got position " + std::to_string(highest) +
             " times frequency " + std::to_string(f[j]));
    }
  }
  std::vector<int64_t> shape = positions.sizes().vec();
  shape.push_back(half);
  at::Tensor sine = at::empty(shape, at::kFloat);
  at::Tensor cosine = at::empty(shape, at::kFloat);
  float* s = sine.mutable_data_ptr<float>();
  float* c = cosine.mutable_data_ptr<float>();
  const float factor = static_cast<float>(scale);
  over_rows(dense.numel(), half, half, [&](int64_t first, int64_t last, float* angle) {
    for (int64_t i = first; i < last; ++i) {
      for (int64_t j = 0; j < half; ++j) angle[j] = static_cast<float>(p[i]) * f[j];
      rows.sin_cos(s + i * half, c + i * half, angle, half);
      if (factor == 1.0f) continue;
      for (int64_t j = 0; j < half; ++j) s[i * half + j] = s[i * half + j] * factor;
      for (int64_t j = 0; j < half; ++j) c[i * half + j] = c[i * half + j] * factor;
    }
  });
  return {sine, cosine};
}

// --- samples --------------------------------------------------------------------------------------------------------

void require_offsets(const std::vector<int64_t>& offsets, int64_t tokens, const std::string& where) {
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != tokens ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    refuse(where + ": sample_offsets ascend from 0 to the " + std::to_string(tokens) + " tokens");
  }
}

// --- dropout --------------------------------------------------------------------------------------------------------

std::vector<uint32_t> philox_words(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
  if (counter.size() != 4 || key.size() != 2) refuse("philox: expected 4 counter words and 2 key words");
  const Words words = philox(counter[0], counter[1], counter[2], counter[3], key[0], key[1]);
  return {words.w, words.w + 4};
}

at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, uint64_t step, uint64_t name,
                   const std::vector<int64_t>& offsets, int64_t first_sample, int64_t first_position,
                   int64_t first_feature, const std::string& path) {
  const Rows& rows = find_rows(path);
  const Held held = rows_of(x, "dropout: x");
  const int64_t length = x.size(-1);
  if (!(p >= 0.0 && p <= 1.0)) refuse("dropout: p: expected 0 <= p <= 1, got " + std::to_string(p));
  require_offsets(offsets, held.rows, "dropout");
  constexpr int64_t kLimit = int64_t{1} << 32;
  const int64_t samples = static_cast<int64_t>(offsets.size()) - 1;
  if (first_sample < 0 || first_position < 0 || first_feature < 0 || first_sample > kLimit - samples ||
      first_position > kLimit - held.rows || first_feature > 4 * kLimit - length) {
    refuse("dropout: samples, positions and groups of four features are numbered below 2^32");
  }
  std::vector<uint32_t> sample(static_cast<size_t>(held.rows));
  std::vector<uint32_t> position(sample.size());
  for (int64_t s = 0; s < samples; ++s) {
    for (int64_t t = offsets[static_cast<size_t>(s)]; t < offsets[static_cast<size_t>(s) + 1]; ++t) {
      sample[static_cast<size_t>(t)] = static_cast<uint32_t>(first_sample + s);
      position[static_cast<size_t>(t)] = static_cast<uint32_t>(first_position + t - offsets[static_cast<size_t>(s)]);
    }
  }
  const auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
  const auto high = [](uint64_t v) { return static_cast<uint32_t>(v >> 32); };
  const Words key = philox(low(step), high(step), low(name), high(name), low(seed), high(seed));
  at::Tensor y = like(x, x.scalar_type());
  const DropoutArgs args{length,
                         first_feature,
                         {key.w[0], key.w[1]},
                         static_cast<uint64_t>(std::floor(p * 0x1p+32)),
                         p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f,
                         sample.data(),
                         position.data(),
                         held.view,
                         y.data_ptr(),
                         held.view.dtype};
  over_rows(held.rows, 4 * length, 0, [&](int64_t first, int64_t last, float*) { rows.dropout(args, first, last); });
  return y;
}

// --- embedding ------------------------------------------------------------------------------------------------------

at::Tensor ids_of(const at::Tensor& ids, int64_t vocabulary, const std::string& where) {
  require_plain_cpu(ids, where);
  if (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt) {
    refuse(where + ": expected int64 or int32, got " + at::toString(ids.scalar_type()));
  }
  const at::Tensor dense = ids.to(at::kLong).contiguous();
  const int64_t* data = dense.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    if (data[i] < 0 || data[i] >= vocabulary) {
      refuse(where + ": expected ids within [0, " + std::to_string(vocabulary) + "), got " + std::to_string(data[i]));
    }
  }
  return dense;
}

// y[t] = (out) w[ids[t] - first_row], -0.0 for a row that is not in w.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& w, int64_t first_row, int64_t vocabulary,
                     at::ScalarType out_dtype, const std::string& path) {
  const Rows& rows = find_rows(path);
  if (w.dim() != 2) refuse("embedding: w: expected [V, D], got " + shape_of(w));
  const Held held = rows_of(w, "embedding: w");
  const at::Tensor dense = ids_of(ids, vocabulary, "embedding: ids");
  const int64_t* id = dense.const_data_ptr<int64_t>();
  const int64_t length = w.size(1);
  const DType out = row_dtype(out_dtype, "embedding: out_dtype");
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(length);
  at::Tensor y = empty_result(shape, at::TensorOptions().dtype(out_dtype));
  char* data = static_cast<char*>(y.data_ptr());
  over_rows(dense.numel(), length, 0, [&](int64_t first, int64_t last, float*) {
    rows.look_up(data, out, held.view, held.rows, length, id, first_row, first, last);
  });
  return y;
}

// (rows that occur, ascending and counted from first_row; their gradients fp32 [n, D])
std::tuple<at::Tensor, at::Tensor> embedding_rows(const at::Tensor& dy, const at::Tensor& ids, int64_t first_row,
                                                  int64_t num_rows, int64_t vocabulary,
                                                  const std::vector<int64_t>& offsets, bool narrow,
                                                  const std::string& path) {
  const Rows& rows = find_rows(path);
  const Loops& loops = loops_of(path);
  const Held upstream = rows_of(dy, "embedding_rows: dy");
  const at::Tensor dense = ids_of(ids, vocabulary, "embedding_rows: ids");
  const int64_t* id = dense.const_data_ptr<int64_t>();
  const int64_t tokens = dense.numel();
  if (upstream.rows != tokens) refuse("embedding_rows: dy: expected one row per id, got " + shape_of(dy));
  require_offsets(offsets, tokens, "embedding_rows");
  std::vector<int64_t> sample(static_cast<size_t>(tokens));
  std::vector<int64_t> position(sample.size());
  std::vector<int64_t> blocks;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    for (int64_t t = offsets[s]; t < offsets[s + 1]; ++t) {
      sample[static_cast<size_t>(t)] = static_cast<int64_t>(s);
      position[static_cast<size_t>(t)] = t - offsets[s];
    }
    blocks.push_back((offsets[s + 1] - offsets[s] + kTokensPerBlock - 1) / kTokensPerBlock);
  }
  std::vector<std::pair<int64_t, int64_t>> touched;  // (row, token)
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = id[t] - first_row;
    if (row >= 0 && row < num_rows) touched.emplace_back(row, t);
  }
  std::sort(touched.begin(), touched.end());
  std::vector<int64_t> order;
  std::vector<int64_t> begin;
  std::vector<int64_t> unique;
  for (const auto& [row, token] : touched) {
    if (unique.empty() || unique.back() != row) {
      unique.push_back(row);
      begin.push_back(static_cast<int64_t>(order.size()));
    }
    order.push_back(token);
  }
  begin.push_back(static_cast<int64_t>(order.size()));
  const int64_t count = static_cast<int64_t>(unique.size());
  const int64_t length = dy.size(-1);
  at::Tensor found = at::empty({count}, at::kLong);
  std::copy(unique.begin(), unique.end(), found.mutable_data_ptr<int64_t>());
  at::Tensor values = at::empty({count, length}, at::kFloat);
  const RowGradient args{length,        upstream.view,
                         order.data(),  begin.data(),
                         sample.data(), position.data(),
                         blocks.data(), static_cast<int64_t>(blocks.size()),
                         narrow,        values.mutable_data_ptr<float>()};
  parallel_for(count, row_grain(length),
               [&](int64_t first, int64_t last) { row_gradient(args, first, last, rows, loops); });
  return {found, values};
}

// The pairs of fold_present on integers, neither associative nor commutative; tests/test_order_agreement.py has the
// same.
uint64_t hash_fold_present(std::vector<uint64_t> values, const std::vector<int64_t>& present, int64_t leaves) {
  if (values.size() != present.size()) refuse("hash_fold_present: expected one value per leaf");
  const size_t root = fold_present(present, leaves, [&](size_t left, size_t right) {
    uint64_t h = 3 * values[left] + 5 * values[right] + 0x9e3779b97f4a7c15ull;
    h = (h ^ (h >> 29)) * 0xbf58476d1ce4e5b9ull;
    values[left] = h ^ (h >> 32);
  });
  return values[root];
}

}  // namespace

void bind_plain(py::module_& m);
void bind_rows(py::module_& m);

void bind_rows(py::module_& m) {
  bind_plain(m);
  using Release = py::call_guard<py::gil_scoped_release>;
  struct Named {
    const char* name;
    MapFn Rows::* function;
  };
  for (const auto& [name, function] :
       {Named{"exp", &Rows::exp}, Named{"log", &Rows::log}, Named{"sigmoid", &Rows::sigmoid},
        Named{"tanh", &Rows::tanh}, Named{"silu", &Rows::silu}, Named{"gelu", &Rows::gelu}}) {
    m.def(
        name,
        [function, name](const at::Tensor& x, const std::string& path) { return elementary(function, name, x, path); },
        py::arg("x"), py::arg("path") = "", Release());
  }
  m.def("hash_fold_present", hash_fold_present, py::arg("values"), py::arg("present"), py::arg("leaves"));
  m.def("sin_cos", sin_cos, py::arg("angle"), py::arg("path") = "", Release());
  m.def(
      "row_sum",
      [](const at::Tensor& x, int64_t leaves, const std::string& path) {
        require_plain_cpu(x, "row_sum: x");
        if (x.dim() == 0) refuse("row_sum: x: expected [..., K], got a scalar");
        return row_nodes(x, cuts(x.size(-1), leaves), schedule(leaf_nodes(0, leaves), leaves), 1, at::kFloat, path);
      },
      py::arg("x"), py::arg("leaves") = 1, py::arg("path") = "", Release());
  m.def("row_nodes", row_nodes, py::arg("x"), py::arg("cuts"), py::arg("schedule"), py::arg("divisor"),
        py::arg("out_dtype"), py::arg("path") = "", Release());
  m.def("row_max", row_max, py::arg("x"), py::arg("path") = "", Release());
  m.def("sum_inputs", sum_inputs, py::arg("inputs"), py::arg("path") = "", Release());
  m.def("norm", norm, py::arg("x"), py::arg("residual"), py::arg("w"), py::arg("bias"), py::arg("eps"),
        py::arg("centered"), py::arg("one_plus"), py::arg("compute"), py::arg("path") = "", Release());
  m.def("norm_dx", norm_dx, py::arg("dy"), py::arg("x"), py::arg("w"), py::arg("residual"), py::arg("eps"),
        py::arg("centered"), py::arg("one_plus"), py::arg("compute"), py::arg("out_dtype"), py::arg("path") = "",
        Release());
  m.def("norm_gradients", norm_gradients, py::arg("dy"), py::arg("x"), py::arg("w"), py::arg("residual"),
        py::arg("eps"), py::arg("centered"), py::arg("one_plus"), py::arg("compute"), py::arg("out_dtype"),
        py::arg("with_dx"), py::arg("with_dw"), py::arg("with_dbias"), py::arg("heads"), py::arg("cuts"),
        py::arg("path") = "", Release());
  m.def("column_leaves", column_leaves, py::arg("dy"), py::arg("x"), py::arg("heads"), py::arg("eps"),
        py::arg("centered"), py::arg("cuts"), py::arg("path") = "", Release());
  m.def("activation", activation, py::arg("gate"), py::arg("up"), py::arg("kind"), py::arg("path") = "", Release());
  m.def("activation_dx", activation_dx, py::arg("dy"), py::arg("gate"), py::arg("up"), py::arg("kind"),
        py::arg("packed"), py::arg("path") = "", Release());
  m.def("rope", rope, py::arg("x"), py::arg("sin"), py::arg("cos"), py::arg("interleaved"), py::arg("backward"),
        py::arg("out_dtype"), py::arg("path") = "", Release());
  m.def("rope_tables", rope_tables, py::arg("positions"), py::arg("inv_freq"), py::arg("scale") = 1.0,
        py::arg("path") = "", Release());
  m.def("philox", philox_words, py::arg("counter"), py::arg("key"));
  m.def("dropout", dropout, py::arg("x"), py::arg("p"), py::arg("seed"), py::arg("step"), py::arg("name"),
        py::arg("sample_offsets"), py::arg("first_sample"), py::arg("first_position"), py::arg("first_feature"),
        py::arg("path") = "", Release());
  m.def("embedding", embedding, py::arg("ids"), py::arg("w"), py::arg("first_row"), py::arg("vocabulary"),
        py::arg("out_dtype"), py::arg("path") = "", Release());
  m.def("embedding_rows", embedding_rows, py::arg("dy"), py::arg("ids"), py::arg("first_row"), py::arg("num_rows"),
        py::arg("vocabulary"), py::arg("sample_offsets"), py::arg("narrow"), py::arg("path") = "", Release());
}

}  // namespace tbik::bindings
