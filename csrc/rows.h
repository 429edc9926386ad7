// Row-wise operators: what one instruction set has to provide, and the choice of the path. Every table gives the same
// bits; only the speed differs. No torch, no intrinsics.
//
// Suffixes: K elements of a row. Mode: IEEE (the caller holds an FpIeeeScope), but for `chain_columns`.
// Specification: ORDER.md A8, A9, sections C and R.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"

namespace tbik {

inline constexpr int64_t kSumBlock = 512;  // elements of a row in one block of its sum (ORDER.md A9)

constexpr int64_t sum_blocks(int64_t length) { return (length + kSumBlock - 1) / kSumBlock; }

// node(0, n) of the values; +0 for n = 0. Compiled once, outside every instruction set.
float fold_canonical(const float* values, int64_t n);

using MapFn = void (*)(float* y, const float* x, int64_t n);

struct Rows {
  const char* name;

  // y = f(x), element by element (section C). y may be x.
  MapFn exp;
  MapFn log;
  MapFn sigmoid;
  MapFn tanh;
  MapFn silu;
  void (*sin_cos)(float* sin_a, float* cos_a, const float* angle, int64_t n);

  // One leaf of A9; `sums`: memory for sum_blocks(n) values.
  float (*row_sum)(const float* x, int64_t n, float* sums);
  float (*row_max)(const float* x, int64_t n);
};

// Null when the path was not compiled for this architecture or the CPU lacks the instructions.
const Rows* portable_rows();
const Rows* avx2_rows();
const Rows* avx512f_rows();

// The rows of find_path(path, float32) (gemm.h); avx512_bf16 has those of avx512f.
const Rows& find_rows(const std::string& path);

}  // namespace tbik
