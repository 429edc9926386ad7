// Row-wise kernels, 512-bit vectors. The text is csrc/rows_loops.h.
// Bits: deterministic, batch-invariant, equal to rows_portable.cpp (tests/test_rows.py).
#include <cstdint>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

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
// One step of a leaf chain; the caller has FTZ and DAZ on (ORDER.md A2). Only the chains may use it.
inline float fma_flushed(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline __attribute__((always_inline)) __m512 fma_flushed(__m512 a, __m512 b, __m512 c) {
  return _mm512_fmadd_ps(a, b, c);
}
// fma(a, 1, c)
inline __attribute__((always_inline)) __m512 add_flushed(__m512 a, __m512 c) { return a + c; }

inline __attribute__((always_inline)) void stream_vec(float* p, __m512 x) { _mm512_stream_ps(p, x); }

inline __attribute__((always_inline)) __m512 floor_vec(__m512 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

// dst[0, 32) = the high halves of the lanes of a, then of b.
template <class U>
inline __attribute__((always_inline)) void store_high_halves(void* dst, U a, U b) {
  __m256i* to = static_cast<__m256i*>(dst);
  _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(reinterpret_cast<__m512i>(a), 16)));
  _mm256_storeu_si256(to + 1, _mm512_cvtepi32_epi16(_mm512_srli_epi32(reinterpret_cast<__m512i>(b), 16)));
}
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
