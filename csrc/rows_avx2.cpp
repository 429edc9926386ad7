// Row-wise kernels, 256-bit vectors (AVX2). The text is csrc/rows_loops.h.
// Bits: deterministic, batch-invariant, equal to rows_portable.cpp (tests/test_rows.py).
#include <cstdint>

#include "rows.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace tbik {
namespace avx2 {
namespace {
constexpr int kWidth = 8;
}

#include "convert_loops.h"

namespace {
// One step of a leaf chain; the caller has FTZ and DAZ on (ORDER.md A2). Only chain_columns may use it.
inline float fma_flushed(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
}  // namespace

#include "rows_loops.h"

namespace {
const Rows kRows = make_rows("avx2", true);
}
}  // namespace avx2
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const Rows* avx2_rows() { return avx2_kernels() != nullptr ? &avx2::kRows : nullptr; }

}  // namespace tbik

#else  // not x86-64

namespace tbik {
const Rows* avx2_rows() { return nullptr; }
}  // namespace tbik

#endif
