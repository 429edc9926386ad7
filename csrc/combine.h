// Folds of node values: out = epilogue(schedule(input_0, input_1, ...)), element by element (ORDER.md T4, T5, A4, A6,
// A7).
//
//   x_i        read from bf16, fp16, fp32 (accumulated in fp32) or fp64 (accumulated in fp64), exactly
//   node       left (+) right = left + right, rounded to bf16 if the schedule's steps say so
//   epilogue   cast(root / divisor + bias), NaN canonical; a cover leaves in the accumulation dtype
//
// No fused multiply-add, no flush: the mode is set to IEEE and restored. A loaded value is not touched (-0 stays -0,
// A8) unless the schedule rounds. Guarantees: deterministic, element-wise, layout-invariant through the schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm.h"
#include "kernels.h"
#include "tree.h"

namespace tbik {

struct FoldResult {
  void* data;  // contiguous; output o at o * count
  DType dtype;
};

// inputs: one pointer to `count` contiguous elements of `dtype` per load step. bias: `columns` values in the
// accumulation dtype, added to element i as bias[i % columns], or null. divisor: an integer >= 1, exact in the
// accumulation dtype.
void fold(const std::vector<const void*>& inputs, DType dtype, int64_t count, const Schedule& program, int64_t divisor,
          const void* bias, int64_t columns, const FoldResult& out, const Loops& loops, const ParallelFor& parallel);

}  // namespace tbik
