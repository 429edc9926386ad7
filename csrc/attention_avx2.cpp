// Attention chains with 256-bit fused multiply-adds (AVX2 + FMA).
//
//   c[r][n] = chain over k of a[r, k] * b[k, n]        register tiles of R rows by N strips of 16 columns
//
// Six rows by one strip are 12 accumulators; fewer rows take more strips, so that the latency of a chain stays hidden.
// The caller sets FTZ and DAZ around `chains` and `sums`. Bits: equal to attention_portable.cpp.
#include <cstdint>

#include "attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace tbik {
namespace attention_256 {

#include "attention_loops.h"

namespace {
using Row = __m256;
constexpr int kRow = 8;
inline Row load_row(const float* p) { return _mm256_loadu_ps(p); }
inline Row broadcast_row(const float* p) { return _mm256_broadcast_ss(p); }
inline Row fma_row(Row a, Row b, Row c) { return _mm256_fmadd_ps(a, b, c); }
inline void store_row(float* p, Row x) { _mm256_storeu_ps(p, x); }
}  // namespace

#include "attention_rows.h"
namespace {

// kAlongSteps: a_step = 1 and rows lie `a_stride` apart; else rows lie side by side and steps `a_stride` apart.
template <int R, int N, bool kAlongSteps>
__attribute__((noinline)) void chain_tile(const float* a, int64_t a_stride, const float* b, int64_t b_panel,
                                          int64_t b_step, int64_t steps, float* c, int64_t c_row) {
  __m256 acc[R][2 * N];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < 2 * N; ++j) acc[r][j] = _mm256_setzero_ps();
  }
  const float* row[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) row[r] = a + r * a_stride;
  for (int64_t k = 0; k < steps; ++k, b += b_step) {
    __m256 bv[2 * N];
#pragma GCC unroll 8
    for (int j = 0; j < 2 * N; ++j) bv[j] = _mm256_loadu_ps(b + j / 2 * b_panel + j % 2 * 8);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 av = _mm256_broadcast_ss(kAlongSteps ? row[r] + k : a + r);
#pragma GCC unroll 8
      for (int j = 0; j < 2 * N; ++j) acc[r][j] = _mm256_fmadd_ps(av, bv[j], acc[r][j]);
    }
    if constexpr (!kAlongSteps) a += a_stride;
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < 2 * N; ++j) _mm256_storeu_ps(c + r * c_row + j * 8, acc[r][j]);
  }
}

template <int R, bool kAlongSteps>
void chain_rows(const float* a, int64_t a_stride, const float* b, int64_t b_panel, int64_t b_step, int64_t steps,
                float* c, int64_t c_row, int64_t columns) {
  constexpr int kStrips = R == 1 ? 4 : R == 2 ? 2 : 1;
  int64_t n = 0;
  for (; n + kStrips * 16 <= columns; n += kStrips * 16) {
    chain_tile<R, kStrips, kAlongSteps>(a, a_stride, b + n / 16 * b_panel, b_panel, b_step, steps, c + n, c_row);
  }
  for (; n < columns; n += 16)
    chain_tile<R, 1, kAlongSteps>(a, a_stride, b + n / 16 * b_panel, b_panel, b_step, steps, c + n, c_row);
}

template <bool kAlongSteps>
void chain_any(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t b_panel, int64_t b_step,
               int64_t steps, float* c, int64_t c_row, int64_t columns) {
  const int64_t a_next = kAlongSteps ? a_stride : 1;
  // A strip of b stays in L1 while all row tiles read it.
  const int64_t whole = rows / 6 * 6;
  if (whole > 0) {
    for (int64_t n = 0; n < columns; n += 16) {
      for (int64_t r = 0; r < whole; r += 6) {
        chain_tile<6, 1, kAlongSteps>(a + r * a_next, a_stride, b + n / 16 * b_panel, b_panel, b_step, steps,
                                      c + r * c_row + n, c_row);
      }
    }
  }
  a += whole * a_next;
  c += whole * c_row;
  switch (rows - whole) {
    case 5:
      return chain_rows<5, kAlongSteps>(a, a_stride, b, b_panel, b_step, steps, c, c_row, columns);
    case 4:
      return chain_rows<4, kAlongSteps>(a, a_stride, b, b_panel, b_step, steps, c, c_row, columns);
    case 3:
      return chain_rows<3, kAlongSteps>(a, a_stride, b, b_panel, b_step, steps, c, c_row, columns);
    case 2:
      return chain_rows<2, kAlongSteps>(a, a_stride, b, b_panel, b_step, steps, c, c_row, columns);
    case 1:
      return chain_rows<1, kAlongSteps>(a, a_stride, b, b_panel, b_step, steps, c, c_row, columns);
    default:
      return;
  }
}

void chain_tiles(const float* a, int64_t a_row, int64_t a_step, int64_t rows, const float* b, int64_t b_panel,
                 int64_t b_step, int64_t steps, float* c, int64_t c_row, int64_t columns) {
  if (a_step == 1) {
    chain_any<true>(a, a_row, rows, b, b_panel, b_step, steps, c, c_row, columns);
  } else {
    chain_any<false>(a, a_step, rows, b, b_panel, b_step, steps, c, c_row, columns);
  }
}

// A multiplication by one rounds nothing: fma(p, 1, acc) = p + acc. Twelve rows at a time hide the latency.
template <int R>
__attribute__((noinline)) void chain_sum(const float* p, int64_t lo, int64_t hi, float* sum) {
  float acc[R] = {};
  for (int64_t k = lo; k < hi; ++k) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r] = acc[r] + p[r * kKeys + k];
  }
  for (int r = 0; r < R; ++r) sum[r] = acc[r];
}

void chain_sums(const float* p_RK, int64_t rows, int64_t lo, int64_t hi, float* sum) {
  int64_t r = 0;
  for (; r + 12 <= rows; r += 12) chain_sum<12>(p_RK + r * kKeys, lo, hi, sum + r);
  for (; r + 4 <= rows; r += 4) chain_sum<4>(p_RK + r * kKeys, lo, hi, sum + r);
  for (; r < rows; ++r) chain_sum<1>(p_RK + r * kKeys, lo, hi, sum + r);
}

const AttentionKernels kKernels =
    make_attention("avx2", true, false, chain_tiles, chain_keys, chain_values, chain_sums);

}  // namespace
}  // namespace attention_256
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const AttentionKernels* attention_avx2() {
  const bool supported =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return supported ? &attention_256::kKernels : nullptr;
}

}  // namespace tbik

#else  // not x86-64

namespace tbik {
const AttentionKernels* attention_avx2() { return nullptr; }
}  // namespace tbik

#endif
