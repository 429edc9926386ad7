// Row-wise kernels, 512-bit vectors. The text is csrc/rows_loops.h.
// Bits: deterministic, batch-invariant, equal to rows_portable.cpp (tests/test_rows.py).
#include <cstdint>

#include "rows.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

namespace tbik {
namespace avx512f {
namespace {
constexpr int kWidth = 16;
}

#include "convert_loops.h"

namespace {
// One step of a leaf chain; the caller has FTZ and DAZ on (ORDER.md A2). Only chain_columns may use it.
inline float fma_flushed(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
}  // namespace

#include "rows_loops.h"

namespace {
const Rows kRows = make_rows("avx512f", true);
}
}  // namespace avx512f
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const Rows* avx512f_rows() { return avx512f_kernels() != nullptr ? &avx512f::kRows : nullptr; }

}  // namespace tbik

#else  // not x86-64

namespace tbik {
const Rows* avx512f_rows() { return nullptr; }
}  // namespace tbik

#endif
