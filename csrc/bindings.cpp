// Python module tbik._C: checks arguments, allocates results, calls the torch-free core without the GIL.
//
// Only bindings*.cpp include torch; each operator family has a file. Every refusal is a ValueError that says what,
// where, expected and got.
#include "bindings.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "combine.h"
#include "fpmode.h"
#include "gemm.h"
#include "kernels.h"
#include "reduce_ops.h"
#include "tree.h"

namespace py = pybind11;

namespace {

using tbik::DType;
using tbik::bindings::dtype_of;
using tbik::bindings::refuse;
using tbik::bindings::require_plain_cpu;
using tbik::bindings::shape_of;

void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) { at::parallel_for(0, count, 1, body); }

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
  }
  return at::kFloat;
}

DType compute_of(const std::string& name) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    if (name == tbik::name_of(dtype)) return dtype;
  }
  refuse("compute: expected 'bfloat16', 'float16', 'float32' or 'float64', got '" + name + "'");
}

struct Operands {
  std::vector<tbik::Operand> sources;
  int64_t rows;
};

// x[s] is [rows, K_s], or [K_s, rows] if k_major; `lengths`, if not null, receives or checks K_s.
Operands operands_of(const std::vector<at::Tensor>& x, bool k_major, const std::vector<std::vector<int64_t>>& cuts,
                     DType compute, const std::string& name, std::vector<int64_t>* lengths) {
  if (x.size() != cuts.size()) {
    refuse("gemm: " + name + " has " + std::to_string(x.size()) + " sources, cuts has " + std::to_string(cuts.size()));
  }
  Operands result{{}, 0};
  for (size_t s = 0; s < x.size(); ++s) {
    const std::string where = "gemm: " + name + "[" + std::to_string(s) + "]";
    require_plain_cpu(x[s], where);
    if (x[s].dim() != 2) refuse(where + ": expected 2 dimensions, got shape " + shape_of(x[s]));
    const DType dtype = dtype_of(x[s].scalar_type(), where);
    if (!tbik::is_operand(dtype, compute)) {
      refuse(where + ": compute '" + tbik::name_of(compute) + "' takes " + tbik::operand_list(compute) + ", got " +
             tbik::name_of(dtype));
    }
    const int row_dim = k_major ? 1 : 0;
    const int64_t rows = x[s].size(row_dim);
    const int64_t length = x[s].size(1 - row_dim);
    if (s == 0) result.rows = rows;
    if (rows != result.rows) {
      refuse(where + ": " + std::to_string(rows) + " rows, " + name + "[0] has " + std::to_string(result.rows));
    }
    if (cuts[s].empty() || cuts[s].back() > length) {
      refuse(where + ": cuts[" + std::to_string(s) + "] ends at " +
             (cuts[s].empty() ? std::string("nothing") : std::to_string(cuts[s].back())) +
             ", the contraction dimension has " + std::to_string(length) + " (shape " + shape_of(x[s]) +
             (k_major ? ", k-major)" : ")"));
    }
    if (lengths != nullptr && lengths->size() > s && (*lengths)[s] != length) {
      refuse(where + ": contraction dimension " + std::to_string(length) + " (shape " + shape_of(x[s]) +
             "), the other operand has " + std::to_string((*lengths)[s]));
    }
    if (lengths != nullptr && lengths->size() <= s) lengths->push_back(length);
    result.sources.push_back({x[s].const_data_ptr(), dtype, x[s].stride(row_dim), x[s].stride(1 - row_dim)});
  }
  return result;
}

std::shared_ptr<tbik::PackedB> pack(const std::vector<at::Tensor>& b, bool k_major,
                                    const std::vector<std::vector<int64_t>>& cuts, const std::string& compute_name) {
  const DType compute = compute_of(compute_name);
  tbik::ChainLayout layout(cuts, compute);
  const Operands operands = operands_of(b, k_major, cuts, compute, "b", nullptr);
  return std::make_shared<tbik::PackedB>(operands.sources, operands.rows, std::move(layout), parallel);
}

// Bias as contiguous values of the accumulation dtype.
tbik::AlignedBuffer bias_of(const at::Tensor& bias, int64_t n, DType accumulation, const std::string& where,
                            const tbik::Loops& loops) {
  require_plain_cpu(bias, where);
  const DType dtype = dtype_of(bias.scalar_type(), where);
  if (bias.dim() != 1 || bias.size(0) != n) {
    refuse(where + ": expected shape [" + std::to_string(n) + "], got " + shape_of(bias));
  }
  if (dtype == DType::kFloat64 && accumulation != DType::kFloat64) {
    refuse(where + ": must convert exactly to float32: expected bfloat16, float16 or float32, got float64");
  }
  const at::Tensor dense = bias.contiguous();
  tbik::AlignedBuffer values = tbik::aligned_buffer(n * tbik::size_of(accumulation));
  const tbik::FpIeeeScope ieee;
  loops.cast(values.get(), accumulation, dense.const_data_ptr(), dtype, n);
  return values;
}

at::Tensor gemm(const std::vector<at::Tensor>& a, bool a_k_major,
                const std::variant<std::shared_ptr<tbik::PackedB>, std::vector<at::Tensor>>& b, bool b_k_major,
                const std::vector<std::vector<int64_t>>& cuts, const tbik::Schedule& program,
                const std::string& compute_name, const std::optional<at::Tensor>& bias, at::ScalarType out_dtype,
                const std::string& path, const std::string& leaf) {
  const DType compute = compute_of(compute_name);
  const DType accumulation = tbik::accumulation(compute);
  if (leaf != "fma" && leaf != "amx") refuse("gemm: leaf: expected 'fma' or 'amx', got '" + leaf + "'");
  const tbik::Path where = tbik::find_leaf_path(path, compute, leaf == "amx" ? tbik::Leaf::kAmx : tbik::Leaf::kFma);
  const tbik::GemmKernels& kernels = *where.kernels;
  const tbik::ChainLayout layout(cuts, compute);
  if (layout.num_chains() != program.num_inputs) {
    refuse("gemm: cuts describe " + std::to_string(layout.num_chains()) + " chains, the schedule loads " +
           std::to_string(program.num_inputs));
  }
  std::vector<int64_t> lengths;
  const Operands left = operands_of(a, a_k_major, cuts, compute, "a", &lengths);
  const tbik::PackedB* packed = nullptr;
  std::vector<tbik::Operand> sources;
  int64_t n = 0;
  if (const auto* ready = std::get_if<std::shared_ptr<tbik::PackedB>>(&b)) {
    packed = ready->get();
    if (packed == nullptr) refuse("gemm: b is None; expected a list of tensors or a Packed");
    if (packed->layout().compute != compute) {
      refuse("gemm: b was packed for compute '" + std::string(tbik::name_of(packed->layout().compute)) + "', got '" +
             compute_name + "'");
    }
    if (packed->layout().cuts.size() != cuts.size() || packed->layout().num_chains() != layout.num_chains()) {
      refuse("gemm: b was packed with " + std::to_string(packed->layout().cuts.size()) + " sources and " +
             std::to_string(packed->layout().num_chains()) + " chains, cuts have " + std::to_string(cuts.size()) +
             " and " + std::to_string(layout.num_chains()));
    }
    for (size_t s = 0; s < cuts.size(); ++s) {
      for (int64_t c = 0; c < layout.num_chains(); ++c) {
        if (layout.segment(s, c) != packed->layout().segment(s, c)) {
          refuse("gemm: chain " + std::to_string(c) + " of source " + std::to_string(s) + " has " +
                 std::to_string(layout.segment(s, c)) + " indices in cuts, " +
                 std::to_string(packed->layout().segment(s, c)) + " where b was packed");
        }
      }
    }
    n = packed->n();
  } else {
    const auto& tensors = std::get<std::vector<at::Tensor>>(b);
    const Operands right = operands_of(tensors, b_k_major, cuts, compute, "b", &lengths);
    sources = right.sources;
    n = right.rows;
  }
  const int64_t m = left.rows;
  DType result_dtype = accumulation;
  std::vector<int64_t> shape = {m, n};
  tbik::AlignedBuffer bias_values(nullptr);
  if (program.is_root) {
    result_dtype = dtype_of(out_dtype, "gemm: out_dtype");
    if (bias) bias_values = bias_of(*bias, n, accumulation, "gemm: bias", *kernels.loops);
  } else {
    if (bias) refuse("gemm: a bias is added at the root only; this schedule leaves a cover");
    shape.insert(shape.begin(), static_cast<int64_t>(program.outputs.size()));
  }
  at::Tensor out = at::empty(shape, at::TensorOptions().dtype(scalar_type_of(result_dtype)));
  tbik::gemm(left.sources, m, {packed, &sources, n}, layout, program, bias_values.get(),
             {out.data_ptr(), result_dtype, m * n, n}, where, parallel);
  return out;
}

at::Tensor fold(const std::variant<at::Tensor, std::vector<at::Tensor>>& inputs, const tbik::Schedule& program,
                int64_t avg, const std::optional<at::Tensor>& bias, std::optional<at::ScalarType> out_dtype,
                const std::string& path) {
  std::vector<at::Tensor> tensors;
  if (const auto* stacked = std::get_if<at::Tensor>(&inputs)) {
    require_plain_cpu(*stacked, "fold: inputs");
    if (stacked->dim() == 0) refuse("fold: inputs: expected a tensor [n, ...] or a list, got a scalar");
    const at::Tensor dense = stacked->contiguous();
    for (int64_t i = 0; i < dense.size(0); ++i) tensors.push_back(dense.select(0, i));
  } else {
    for (const at::Tensor& x : std::get<std::vector<at::Tensor>>(inputs)) {
      require_plain_cpu(x, "fold: inputs[" + std::to_string(tensors.size()) + "]");
      tensors.push_back(x.contiguous());
    }
  }
  if (static_cast<int64_t>(tensors.size()) != program.num_inputs) {
    refuse("fold: " + std::to_string(tensors.size()) + " inputs, the schedule loads " +
           std::to_string(program.num_inputs));
  }
  if (tensors.empty()) refuse("fold: at least one input is needed to know the shape");
  const DType dtype = dtype_of(tensors[0].scalar_type(), "fold: inputs[0]");
  std::vector<const void*> pointers;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].scalar_type() != tensors[0].scalar_type() || !tensors[i].sizes().equals(tensors[0].sizes())) {
      refuse("fold: inputs[" + std::to_string(i) + "] is " + at::toString(tensors[i].scalar_type()) + " " +
             shape_of(tensors[i]) + ", inputs[0] is " + at::toString(tensors[0].scalar_type()) + " " +
             shape_of(tensors[0]));
    }
    pointers.push_back(tensors[i].const_data_ptr());
  }
  const DType accumulation = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (avg < 1 || avg > (int64_t{1} << 24)) {
    refuse("fold: avg: expected an integer from 1 to 2**24, got " + std::to_string(avg));
  }
  if (!program.is_root && (avg != 1 || bias)) {
    refuse("fold: avg and bias are applied at the root only; this schedule leaves a cover");
  }
  const tbik::Loops& loops = *tbik::find_path(path, DType::kBFloat16).loops;
  std::vector<int64_t> shape = tensors[0].sizes().vec();
  DType result_dtype = accumulation;
  tbik::AlignedBuffer bias_values(nullptr);
  int64_t columns = 1;
  if (program.is_root) {
    result_dtype = out_dtype ? dtype_of(*out_dtype, "fold: out_dtype") : accumulation;
    if (bias) {
      if (shape.empty()) refuse("fold: bias: the inputs have no last dimension");
      columns = shape.back();
      bias_values = bias_of(*bias, columns, accumulation, "fold: bias", loops);
    }
  } else {
    if (out_dtype && dtype_of(*out_dtype, "fold: out_dtype") != accumulation) {
      refuse(std::string("fold: out_dtype: a cover leaves in ") + tbik::name_of(accumulation));
    }
    shape.insert(shape.begin(), static_cast<int64_t>(program.outputs.size()));
  }
  at::Tensor out = at::empty(shape, at::TensorOptions().dtype(scalar_type_of(result_dtype)));
  tbik::fold(pointers, dtype, tensors[0].numel(), program, avg, bias_values.get(), columns,
             {out.data_ptr(), result_dtype}, loops, parallel);
  return out;
}

// left (+) right on integers, neither associative nor commutative; tests/test_order_agreement.py has the same in
// Python.
uint64_t hash_node(uint64_t left, uint64_t right) {
  uint64_t h = 3 * left + 5 * right + 0x9e3779b97f4a7c15ull;
  h = (h ^ (h >> 29)) * 0xbf58476d1ce4e5b9ull;
  return h ^ (h >> 32);
}

std::vector<uint64_t> hash_fold(const std::vector<uint64_t>& values, const tbik::Schedule& program) {
  if (static_cast<int64_t>(values.size()) != program.num_inputs) {
    refuse("hash_fold: " + std::to_string(values.size()) + " values, the schedule loads " +
           std::to_string(program.num_inputs));
  }
  std::vector<uint64_t> slots(static_cast<size_t>(program.num_slots));
  for (const tbik::Step& step : program.steps) {
    uint64_t& slot = slots[static_cast<size_t>(step.slot)];
    const size_t source = static_cast<size_t>(step.source);
    switch (step.kind) {
      case tbik::StepKind::kLoad:
        slot = values[source];
        break;
      case tbik::StepKind::kZero:
        slot = 0;
        break;
      case tbik::StepKind::kAdd:
        slot = hash_node(slot, slots[source]);
        break;
    }
  }
  slots.resize(program.outputs.size());
  return slots;
}

tbik::Schedule run_schedule(int64_t lo, int64_t hi, int64_t leaves, bool to_root, bool round_bf16) {
  if (lo < 0 || lo > hi || hi > leaves) {
    refuse("run_schedule: expected 0 <= lo <= hi <= leaves, got lo=" + std::to_string(lo) +
           ", hi=" + std::to_string(hi) + ", leaves=" + std::to_string(leaves));
  }
  if (to_root && (lo != 0 || hi != leaves)) {
    refuse("run_schedule: the root needs all leaves [0, " + std::to_string(leaves) + "), got [" + std::to_string(lo) +
           ", " + std::to_string(hi) + ")");
  }
  return tbik::schedule(tbik::leaf_nodes(lo, hi), to_root ? std::optional<int64_t>(leaves) : std::nullopt, round_bf16);
}

tbik::Schedule nodes_schedule(const std::vector<std::pair<int, int64_t>>& nodes, std::optional<int64_t> leaves,
                              bool round_bf16) {
  std::vector<tbik::Node> converted;
  for (const auto& [level, index] : nodes) converted.push_back({level, index});
  return tbik::schedule(converted, leaves, round_bf16);
}

py::list steps_of(const tbik::Schedule& program) {
  py::list steps;
  for (const tbik::Step& step : program.steps) {
    const char* kind = step.kind == tbik::StepKind::kLoad ? "load" : step.kind == tbik::StepKind::kAdd ? "add" : "zero";
    steps.append(py::make_tuple(kind, step.slot, step.source));
  }
  return steps;
}

py::list nodes_of(const std::vector<tbik::Node>& nodes) {
  py::list list;
  for (const tbik::Node& node : nodes) list.append(py::make_tuple(node.level, node.index));
  return list;
}

}  // namespace

namespace tbik::bindings {
void bind_rows(pybind11::module_& m);         // bindings_rows.cpp
void bind_fingerprint(pybind11::module_& m);  // bindings_fingerprint.cpp
void bind_square_sum(pybind11::module_& m);   // bindings_square_sum.cpp
void bind_attention(pybind11::module_& m);    // bindings_attention.cpp
void bind_vocab(pybind11::module_& m);        // bindings_vocab.cpp
void bind_experts(pybind11::module_& m);      // bindings_experts.cpp
}  // namespace tbik::bindings

PYBIND11_MODULE(_C, m) {
  m.doc() = "tbik kernels: tree GEMM, folds of node values, schedules";
  using Release = py::call_guard<py::gil_scoped_release>;

  py::class_<tbik::Schedule>(m, "Schedule")
      .def_property_readonly("steps", steps_of)
      .def_property_readonly("rounds",
                             [](const tbik::Schedule& program) {
                               std::vector<bool> rounds;
                               for (const tbik::Step& step : program.steps) rounds.push_back(step.round);
                               return rounds;
                             })
      .def_readonly("num_slots", &tbik::Schedule::num_slots)
      .def_readonly("num_inputs", &tbik::Schedule::num_inputs)
      .def_readonly("is_root", &tbik::Schedule::is_root)
      .def_property_readonly("outputs", [](const tbik::Schedule& program) { return nodes_of(program.outputs); });

  py::class_<tbik::PackedB, std::shared_ptr<tbik::PackedB>>(m, "Packed")
      .def_property_readonly("n", &tbik::PackedB::n)
      .def_property_readonly("num_chains", [](const tbik::PackedB& b) { return b.layout().num_chains(); })
      .def_property_readonly("nbytes", &tbik::PackedB::nbytes)
      .def_property_readonly("compute", [](const tbik::PackedB& b) { return tbik::name_of(b.layout().compute); });

  m.def("run_schedule", run_schedule, py::arg("lo"), py::arg("hi"), py::arg("leaves"), py::arg("to_root"),
        py::arg("round_bf16") = false);
  m.def("nodes_schedule", nodes_schedule, py::arg("nodes"), py::arg("leaves") = py::none(),
        py::arg("round_bf16") = false);
  m.def("sample_schedule", tbik::sample_schedule, py::arg("block_counts"), py::arg("round_bf16") = false);
  m.def("cuts", tbik::cuts, py::arg("length"), py::arg("leaves"));
  m.def("cover", [](int64_t lo, int64_t hi) { return nodes_of(tbik::cover(lo, hi)); }, py::arg("lo"), py::arg("hi"));
  m.def("hash_fold", hash_fold, py::arg("values"), py::arg("schedule"));

  m.def("pack", pack, py::arg("b"), py::arg("b_k_major"), py::arg("cuts"), py::arg("compute"), Release());
  m.def("gemm", gemm, py::arg("a"), py::arg("a_k_major"), py::arg("b"), py::arg("b_k_major"), py::arg("cuts"),
        py::arg("schedule"), py::arg("compute"), py::arg("bias") = py::none(), py::arg("out_dtype"),
        py::arg("path") = "", py::arg("leaf") = "fma", Release());
  m.def("fold", fold, py::arg("inputs"), py::arg("schedule"), py::arg("avg") = 1, py::arg("bias") = py::none(),
        py::arg("out_dtype") = py::none(), py::arg("path") = "", Release());

  tbik::bindings::bind_rows(m);
  tbik::bindings::bind_fingerprint(m);
  tbik::bindings::bind_square_sum(m);
  tbik::bindings::bind_attention(m);
  tbik::bindings::bind_vocab(m);
  tbik::bindings::bind_experts(m);

  m.def("cpu_paths", tbik::cpu_paths);
  m.def("amx_paths", tbik::amx_paths);
  m.def(
      "default_path",
      [](const std::string& compute) { return std::string(tbik::find_path("", compute_of(compute)).name); },
      py::arg("compute"));
  // For tbik._C_dist: the same additions, by address.
  static const tbik::Combine combine{&tbik::fold, tbik::find_path("", DType::kBFloat16).loops};
  m.attr("combine_v1") = py::capsule(&combine, "tbik.combine_v1");
  m.def("fp_mode", [] { return tbik::fp_flush_bits(); });
  m.def("torch_version_built_against", [] { return std::string(TORCH_VERSION); });
}
