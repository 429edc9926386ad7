// Row-wise kernels, 256-bit vectors (AVX2). The text is csrc/rows_loops.h.
// Bits: deterministic, batch-invariant, equal to rows_portable.cpp (tests/test_rows.py).
#include <cstdint>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

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
// One step of a leaf chain; the caller has FTZ and DAZ on (ORDER.md A2). Only the chains may use it.
inline float fma_flushed(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline __attribute__((always_inline)) __m256 fma_flushed(__m256 a, __m256 b, __m256 c) {
  return _mm256_fmadd_ps(a, b, c);
}
// fma(a, 1, c)
inline __attribute__((always_inline)) __m256 add_flushed(__m256 a, __m256 c) { return a + c; }

inline __attribute__((always_inline)) void stream_vec(float* p, __m256 x) { _mm256_stream_ps(p, x); }

inline __attribute__((always_inline)) __m256 floor_vec(__m256 x) { return _mm256_floor_ps(x); }

// dst[0, 16) = the high halves of the lanes of a, then of b.
template <class U>
inline __attribute__((always_inline)) void store_high_halves(void* dst, U a, U b) {
  const __m256i low = _mm256_srli_epi32(reinterpret_cast<__m256i>(a), 16);
  const __m256i high = _mm256_srli_epi32(reinterpret_cast<__m256i>(b), 16);
  const __m256i lanes = _mm256_packus_epi32(low, high);  // a and b by turns, in quarters
  _mm256_storeu_si256(static_cast<__m256i*>(dst), _mm256_permute4x64_epi64(lanes, 0xd8));
}
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
