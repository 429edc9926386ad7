// Attention chains with 512-bit fused multiply-adds (AVX-512F).
//
//   c[r][n] = chain over k of a[r, k] * b[k, n]        register tiles of R rows by N strips of 16 columns
//
// Six rows by four strips are 24 accumulators of 32 registers.
// The caller sets FTZ and DAZ around `chains` and `sums`. Bits: equal to attention_portable.cpp.
#include <cstdint>

#include "attention.h"

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
namespace attention_512 {

#include "attention_loops.h"

namespace {
using Row = __m512;
constexpr int kRow = 16;
inline Row load_row(const float* p) { return _mm512_loadu_ps(p); }
inline Row broadcast_row(const float* p) { return _mm512_set1_ps(*p); }
inline Row fma_row(Row a, Row b, Row c) { return _mm512_fmadd_ps(a, b, c); }
inline void store_row(float* p, Row x) { _mm512_storeu_ps(p, x); }
}  // namespace

#include "attention_rows.h"
// after attention_rows.h
#include "attention_pairs_avx512f.h"
#include "attention_softmax_avx512f.h"
namespace {

// kAlongSteps: a_step = 1 and rows lie `a_stride` apart; else rows lie side by side and steps `a_stride` apart.
template <int R, int N, bool kAlongSteps>
__attribute__((noinline)) void chain_tile(const float* a, int64_t a_stride, const float* b, int64_t b_panel,
                                          int64_t b_step, int64_t steps, float* c, int64_t c_row) {
  __m512 acc[R][N];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) acc[r][j] = _mm512_setzero_ps();
  }
  const float* row[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) row[r] = a + r * a_stride;
  for (int64_t k = 0; k < steps; ++k, b += b_step) {
    __m512 bv[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) bv[j] = _mm512_loadu_ps(b + j * b_panel);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 av = _mm512_set1_ps(kAlongSteps ? row[r][k] : a[r]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) acc[r][j] = _mm512_fmadd_ps(av, bv[j], acc[r][j]);
    }
    if constexpr (!kAlongSteps) a += a_stride;
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) _mm512_storeu_ps(c + r * c_row + j * 16, acc[r][j]);
  }
}

template <int R, bool kAlongSteps>
void chain_rows(const float* a, int64_t a_stride, const float* b, int64_t b_panel, int64_t b_step, int64_t steps,
                float* c, int64_t c_row, int64_t columns) {
  int64_t n = 0;
  for (; n + 64 <= columns; n += 64)
    chain_tile<R, 4, kAlongSteps>(a, a_stride, b + n / 16 * b_panel, b_panel, b_step, steps, c + n, c_row);
  for (; n + 32 <= columns; n += 32)
    chain_tile<R, 2, kAlongSteps>(a, a_stride, b + n / 16 * b_panel, b_panel, b_step, steps, c + n, c_row);
  for (; n < columns; n += 16)
    chain_tile<R, 1, kAlongSteps>(a, a_stride, b + n / 16 * b_panel, b_panel, b_step, steps, c + n, c_row);
}

template <bool kAlongSteps>
void chain_any(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t b_panel, int64_t b_step,
               int64_t steps, float* c, int64_t c_row, int64_t columns) {
  const int64_t a_next = kAlongSteps ? a_stride : 1;
  const int64_t whole = rows / 6 * 6;
  for (int64_t r = 0; r < whole; r += 6) {
    chain_rows<6, kAlongSteps>(a + r * a_next, a_stride, b, b_panel, b_step, steps, c + r * c_row, c_row, columns);
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

const AttentionKernels kKernels = make_attention("avx512f", true, true, chain_tiles, chain_keys_or_pairs,
                                                 chain_values_or_pairs, chain_sums, wide_softmax, wide_softmax_columns);

}  // namespace
}  // namespace attention_512
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const AttentionKernels* attention_avx512f() {
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return supported ? &attention_512::kKernels : nullptr;
}

}  // namespace tbik

#else  // not x86-64

namespace tbik {
const AttentionKernels* attention_avx512f() { return nullptr; }
}  // namespace tbik

#endif
