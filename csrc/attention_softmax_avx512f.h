// The softmax step of attention in 512-bit registers, four of them side by side so that the latency of the exponential
// hides. Included by attention_avx512f.cpp inside its target region and namespace, after attention_loops.h, whose
// loops take what is not plain: soft-caps, and rows with an Inf or NaN among their live scores. No include guard on
// purpose.
//
//   m' = max(m, x), x = s * scale        factor = exp(m - m')        p = exp(x - m')
//
// Where m' and every x are finite, x - m' is no NaN and at most 0, so that the exponential needs one bound, and its
// (y 2^i) 2^(k - i), which rounds once, is one scaling by 2^k. A score -0 stays -0: exp(x - m) does not show it.
//
// Mode: IEEE, nothing fused. Bits: equal to attention_loops.h (tests/test_attention.py).

namespace {

template <int N>
struct Registers {
  __m512 v[N];
};

#define TBIK_EACH(expression)                                              \
  Registers<N> y;                                                          \
  _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) y.v[i] = expression; \
  return y

template <int N>
TBIK_INLINE Registers<N> operator+(Registers<N> a, Registers<N> b) {
  TBIK_EACH(_mm512_add_ps(a.v[i], b.v[i]));
}
template <int N>
TBIK_INLINE Registers<N> operator-(Registers<N> a, Registers<N> b) {
  TBIK_EACH(_mm512_sub_ps(a.v[i], b.v[i]));
}
template <int N>
TBIK_INLINE Registers<N> operator*(Registers<N> a, Registers<N> b) {
  TBIK_EACH(_mm512_mul_ps(a.v[i], b.v[i]));
}
template <int N>
TBIK_INLINE Registers<N> operator+(Registers<N> a, float b) {
  TBIK_EACH(_mm512_add_ps(a.v[i], _mm512_set1_ps(b)));
}
template <int N>
TBIK_INLINE Registers<N> operator-(Registers<N> a, float b) {
  TBIK_EACH(_mm512_sub_ps(a.v[i], _mm512_set1_ps(b)));
}
template <int N>
TBIK_INLINE Registers<N> operator*(Registers<N> a, float b) {
  TBIK_EACH(_mm512_mul_ps(a.v[i], _mm512_set1_ps(b)));
}
template <int N>
TBIK_INLINE Registers<N> operator+(float a, Registers<N> b) {
  return b + a;
}
template <int N>
TBIK_INLINE Registers<N> floor_of(Registers<N> a) {
  TBIK_EACH(_mm512_roundscale_ps(a.v[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
}

// elementary::exp of x <= 0, no NaN.
template <int N>
TBIK_INLINE Registers<N> exp_below(Registers<N> x) {
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x.v[i] = _mm512_max_ps(x.v[i], _mm512_set1_ps(elementary::kExpLowest));
  const elementary::Scaled<Registers<N>> e = elementary::exp_scaled(x);
  TBIK_EACH(_mm512_scalef_ps(e.y.v[i], e.n.v[i]));
}
#undef TBIK_EACH

inline __mmask16 not_finite(__m512 x) { return _mm512_fpclass_ps_mask(x, 0x99); }  // QNaN, SNaN, +Inf, -Inf

inline __mmask16 within(__m512i x, __m512i lo, __m512i hi) {
  return _mm512_cmple_epi32_mask(lo, x) & _mm512_cmplt_epi32_mask(x, hi);
}

// 16 rows; four keys at a time, those of the four outside [first, end) masked. False: nothing is done.
template <bool kMasked>
__attribute__((noinline)) bool softmax_group(float* s_KR, int64_t first, int64_t end, const int32_t* lo,
                                             const int32_t* hi, float scale, float* m, float* factor) {
  const __m512i low = _mm512_loadu_si512(lo);
  const __m512i high = _mm512_loadu_si512(hi);
  const __m512 by = _mm512_set1_ps(scale);
  const int64_t from = first / 4 * 4;
  auto live = [&](int64_t k) { return within(_mm512_set1_epi32(static_cast<int>(k)), low, high); };
  __m512 most[4];
  __m512 sum[4];  // finite only if every score is
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    most[i] = _mm512_set1_ps(-elementary::kInf);
    sum[i] = _mm512_setzero_ps();
  }
  for (int64_t k = from; k < end; k += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s_KR + (k + i) * kRows), by);
      const __mmask16 seen = kMasked ? live(k + i) : static_cast<__mmask16>(0xffff);
      most[i] = _mm512_mask_max_ps(most[i], seen, most[i], x);
      sum[i] = _mm512_mask_add_ps(sum[i], seen, sum[i], x);
    }
  }
  const __mmask16 rows = kMasked ? _mm512_cmplt_epi32_mask(low, high) : static_cast<__mmask16>(0xffff);
  const __m512 before = _mm512_loadu_ps(m);
  const __m512 top = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
  const __m512 now = _mm512_max_ps(before, top);
  const __m512 all = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
  const __mmask16 special = _mm512_cmp_ps_mask(before, before, _CMP_UNORD_Q) | not_finite(now) | not_finite(all);
  if ((special & rows) != 0) return false;
  _mm512_mask_storeu_ps(m, rows, now);
  const Registers<1> change{{_mm512_sub_ps(before, now)}};
  _mm512_storeu_ps(factor, exp_below(change).v[0]);
  for (int64_t k = from; k < end; k += 4) {
    Registers<4> x;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x.v[i] = _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(s_KR + (k + i) * kRows), by), now);
    }
    const Registers<4> p = exp_below(x);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 kept = kMasked ? _mm512_maskz_mov_ps(live(k + i), p.v[i]) : p.v[i];
      _mm512_storeu_ps(s_KR + (k + i) * kRows, kept);
    }
  }
  return true;
}

void wide_softmax_columns(float* s_KR, int64_t rows, int64_t first, int64_t end, const int32_t* lo, const int32_t* hi,
                          float scale, float cap, float* m, float* factor) {
  for (int64_t r = 0; r < rows; r += 16, s_KR += 16, lo += 16, hi += 16, m += 16, factor += 16) {
    const __mmask16 partly = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(lo), _mm512_setzero_si512()) |
                             _mm512_cmplt_epi32_mask(_mm512_loadu_si512(hi), _mm512_set1_epi32(kKeys));
    const bool done = cap == 0.0f && (partly != 0 ? softmax_group<true> : softmax_group<false>)(s_KR, first, end, lo,
                                                                                                hi, scale, m, factor);
    if (!done) softmax_columns(s_KR, 16, first, end, lo, hi, scale, cap, m, factor);
  }
}

// One row of 64 keys, the same.
template <bool kMasked>
bool softmax_row(float* s, int32_t lo, int32_t hi, float scale, float* m, float* factor) {
  const __m512 by = _mm512_set1_ps(scale);
  __mmask16 live[4];
  Registers<4> x;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i key = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                         _mm512_set1_epi32(16 * i));
    live[i] = kMasked ? within(key, _mm512_set1_epi32(lo), _mm512_set1_epi32(hi)) : static_cast<__mmask16>(0xffff);
    x.v[i] = _mm512_mask_mul_ps(_mm512_set1_ps(-elementary::kInf), live[i], _mm512_loadu_ps(s + 16 * i), by);
  }
  const float before = *m;
  const __m512 top = _mm512_max_ps(_mm512_max_ps(x.v[0], x.v[1]), _mm512_max_ps(x.v[2], x.v[3]));
  const float now = larger(before, _mm512_reduce_max_ps(top));
  __mmask16 special = 0;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) special |= not_finite(x.v[i]) & live[i];
  if (special != 0 || before != before || !(now < elementary::kInf)) return false;
  *m = now;
  *factor = before - now;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x.v[i] = _mm512_sub_ps(x.v[i], _mm512_set1_ps(now));
  x = exp_below(x);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) _mm512_storeu_ps(s + 16 * i, _mm512_maskz_mov_ps(live[i], x.v[i]));
  return true;
}

void wide_softmax(float* s_RK, int64_t rows, const int32_t* lo, const int32_t* hi, float scale, float cap, float* m,
                  float* factor) {
  if (cap != 0.0f) return softmax(s_RK, rows, lo, hi, scale, cap, m, factor);
  for (int64_t r0 = 0; r0 < rows; r0 += 16) {
    const int64_t end = rows < r0 + 16 ? rows : r0 + 16;
    uint32_t done = 0;  // a bit per row
    for (int64_t r = r0; r < end; ++r) {
      float* s = s_RK + r * kKeys;
      const bool masked = lo[r] > 0 || hi[r] < kKeys;
      const bool plain = (masked ? softmax_row<true> : softmax_row<false>)(s, lo[r], hi[r], scale, m + r, factor + r);
      done |= static_cast<uint32_t>(plain) << (r - r0);
    }
    const __mmask16 mask = static_cast<__mmask16>(done);
    const Registers<1> change{{_mm512_maskz_loadu_ps(mask, factor + r0)}};
    _mm512_mask_storeu_ps(factor + r0, mask, exp_below(change).v[0]);
    for (int64_t r = r0; r < end; ++r) {
      if ((done >> (r - r0) & 1) == 0) softmax(s_RK + r * kKeys, 1, lo + r, hi + r, scale, cap, m + r, factor + r);
    }
  }
}

}  // namespace
