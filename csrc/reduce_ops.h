// What a collective may do to two values: out = epilogue(schedule(x_0, x_1, ...)), element by element.
//
//   sum, avg, premul_sum   left + right          fp32 (bf16, fp16, fp32) or fp64; epilogue / W or * factor (ORDER.md
//   A4, A7) product                left * right          the same types, one rounding per node, one cast at the root
//   min, max               IEEE 754-2019 minimum, maximum: NaN wins, -0 < +0 (ORDER.md A8); integers as usual
//   integers               sum and product modulo 2^bits; band, bor, bxor
//   bool                   sum = max = bor, product = min = band, bxor
//
// Sums run through csrc/combine (`fold`). Mode: IEEE, set and restored. NaN leaves as the canonical quiet NaN.
// Guarantees: deterministic, element-wise, layout-invariant through the schedule. Errors: std::invalid_argument.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "combine.h"

namespace tbik {

enum class Element : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kInt8, kUInt8, kInt16, kInt32, kInt64, kBool };
enum class Op : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

const char* name_of(Element element);
const char* name_of(Op op);
int64_t size_of(Element element);
bool is_float(Element element);

// The type of a node: fp32 for bf16 and fp16, otherwise the element itself.
Element accumulation_of(Element element);

// Empty if `op` is defined for `element`, else the reason.
std::string refusal_of(Op op, Element element);

// The arithmetic of csrc/combine: the driver and the loops of the instruction set chosen at run time.
struct Combine {
  decltype(&fold) fold_values;
  const Loops* loops;
};

// How leaves become nodes and the root becomes the result.
struct Rule {
  Op op = Op::kSum;
  Element element = Element::kFloat32;
  int64_t divisor = 1;          // kAvg, applied to a root
  double factor = 1.0;          // kPremulSum, rounded to the accumulation type first
  bool factor_at_leaf = false;  // the ranks' factors differ: each rank scales its own value, rounded, before the fold
};

// inputs[i]: `count` values of load step i, of rule.element if `from_elements`, else of its accumulation type (nodes).
// out: one run of `count` values per output of the program: rule.element if the program makes a root, else nodes.
// leaf_factors: one per input, read if rule.factor_at_leaf and from_elements.
void reduce(const Rule& rule, const std::vector<const void*>& inputs, bool from_elements, int64_t count,
            const Schedule& program, void* out, const Combine& combine,
            const std::vector<double>* leaf_factors = nullptr);

}  // namespace tbik
