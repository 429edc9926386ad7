// Attention chains of few query rows over bf16 keys and values where they lie (decoding), in 512-bit registers.
// Included by attention_avx512f.cpp inside its target region and namespace, after attention_loops.h. No include guard
// on purpose.
//
//   s[r][k] = chain over d of q[r, d] k[k, d]        16 keys by 4 pairs of dimensions turned in registers, then 8
//                                                    ascending steps
//   c[r][d] = chain over k of p[r, k] v[k, d]        rows of v are contiguous over d, its pairs parted into even and
//   odd
//
// A bf16 number is the high half of its fp32: the two of a pair are one shift and one mask away, whatever the lanes.
// The caller sets FTZ and DAZ. Bits: equal to attention_rows.h over the widened rows.

namespace {

inline __m512 even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Eight rows at equal distances: an address is a base and a register times 1, 2 or 4. What the compiler does not see
// through it keeps in registers, of which there are few.
struct Distances {
  int64_t one, three, five, seven;  // bytes
  explicit Distances(int64_t stride) : one(2 * stride), three(6 * stride), five(10 * stride), seven(14 * stride) {
    asm("" : "+r"(one), "+r"(three), "+r"(five), "+r"(seven));
  }
  const char* row(const char* first, int r) const {
    return first + (r == 3 ? three : r == 5 ? five : r == 6 ? 2 * three : r == 7 ? seven : r * one);
  }
};

inline __m128i load_dwords(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Four dwords of row 4 i + j in the quarter i; 8 rows from a on, 8 from b on.
inline __m512i load_quarters(const char* a, const char* b, int j, const Distances& by) {
  __m512i x = _mm512_zextsi128_si512(load_dwords(by.row(a, j)));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, load_dwords(by.row(a, 4 + j)));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, load_dwords(by.row(b, j)));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, load_dwords(by.row(b, 4 + j)));
}

// R rows by G groups of 16 keys: the accumulators of several groups hide the latency of a chain.
template <int R, int G>
__attribute__((noinline)) void chain_pair_key_tile(const float* q, int64_t q_row, const void* const* groups,
                                                   const void* const* ahead, int64_t stride, int64_t dim, float* s) {
  __m512 acc[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) acc[r][g] = _mm512_setzero_ps();
  }
  const Distances by(stride);
  const char* group[2 * G];
#pragma GCC unroll 8
  for (int g = 0; g < 2 * G; ++g) group[g] = static_cast<const char*>(groups[g]);
  for (int64_t d = 0; d < dim; d += 8) {
    // 2 G groups of 8 rows, their lines of 32 values in the four steps of a line
    const int64_t quarter = d / 8 % 4;
    const int64_t line = d / 32 * 64;
#pragma GCC unroll 2
    for (int g = 0; g < (G + 1) / 2; ++g) {
      const int64_t at = quarter * 4 * G + 8 * g;
      const char* next = static_cast<const char*>(ahead[at / 8]) + line + at % 8 * by.one;
#pragma GCC unroll 8
      for (int r = 0; r < (G == 1 ? 4 : 8); ++r) __builtin_prefetch(by.row(next, r), 0, 2);
    }
    __m512i pairs[G][4];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) x[j] = load_quarters(group[2 * g], group[2 * g + 1], j, by);
      group[2 * g] += 16;
      group[2 * g + 1] += 16;
      const __m512i y0 = _mm512_unpacklo_epi32(x[0], x[1]);
      const __m512i y1 = _mm512_unpackhi_epi32(x[0], x[1]);
      const __m512i y2 = _mm512_unpacklo_epi32(x[2], x[3]);
      const __m512i y3 = _mm512_unpackhi_epi32(x[2], x[3]);
      pairs[g][0] = _mm512_unpacklo_epi64(y0, y2);
      pairs[g][1] = _mm512_unpackhi_epi64(y0, y2);
      pairs[g][2] = _mm512_unpacklo_epi64(y1, y3);
      pairs[g][3] = _mm512_unpackhi_epi64(y1, y3);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        __m512 k[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) k[g] = odd != 0 ? odd_of(pairs[g][i]) : even_of(pairs[g][i]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512 qv = _mm512_set1_ps(q[r * q_row + d + 2 * i + odd]);
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) acc[r][g] = _mm512_fmadd_ps(qv, k[g], acc[r][g]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) _mm512_storeu_ps(s + r * kKeys + g * 16, acc[r][g]);
  }
}

template <int R>
void chain_pair_key_rows(const float* q, int64_t q_row, const RowGroups& keys, int64_t dim, int64_t columns, float* s) {
  constexpr int kGroups = R < 3 ? 4 : R < 5 ? 2 : 1;
  for (int g = 0; g * 16 < columns; g += kGroups) {
    chain_pair_key_tile<R, kGroups>(q, q_row, keys.group + 2 * g, keys.ahead + 2 * g, keys.stride, dim, s + g * 16);
  }
}

// R rows by N times 32 dimensions, keys [lo, hi).
template <int R, int N>
__attribute__((noinline)) void chain_pair_value_tile(const float* p, const RowGroups& values, int64_t lo, int64_t hi,
                                                     int64_t first, float* c, int64_t c_row) {
  __m512 even[R][N];
  __m512 odd[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) even[r][j] = odd[r][j] = _mm512_setzero_ps();
  }
  for (int64_t k = lo; k < hi;) {
    const int64_t at = k % 8 * values.stride + first;
    const uint16_t* v = static_cast<const uint16_t*>(values.group[k / 8]) + at;
    const uint16_t* next = static_cast<const uint16_t*>(values.ahead[k / 8]) + at;
    const int64_t end = k / 8 * 8 + 8 < hi ? k / 8 * 8 + 8 : hi;
    for (; k < end; ++k, v += values.stride, next += values.stride) {
      __m512 low[N];
      __m512 high[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        __builtin_prefetch(next + 32 * j, 0, 2);
        const __m512i pairs = _mm512_loadu_si512(v + 32 * j);
        low[j] = even_of(pairs);
        high[j] = odd_of(pairs);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512 pv = _mm512_set1_ps(p[r * kKeys + k]);
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
          even[r][j] = _mm512_fmadd_ps(pv, low[j], even[r][j]);
          odd[r][j] = _mm512_fmadd_ps(pv, high[j], odd[r][j]);
        }
      }
    }
  }
  const __m512i left = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(8));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      float* out = c + r * c_row + first + 32 * j;
      _mm512_storeu_ps(out, _mm512_permutex2var_ps(even[r][j], left, odd[r][j]));
      _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even[r][j], right, odd[r][j]));
    }
  }
}

template <int R>
void chain_pair_value_rows(const float* p, const RowGroups& values, int64_t lo, int64_t hi, int64_t dim, float* c,
                           int64_t c_row) {
  constexpr int kMost = R < 3 ? 4 : R < 7 ? 2 : 1;
  int64_t first = 0;
  for (; first + kMost * 32 <= dim; first += kMost * 32) {
    chain_pair_value_tile<R, kMost>(p, values, lo, hi, first, c, c_row);
  }
  if constexpr (kMost > 2) {
    for (; first + 64 <= dim; first += 64) chain_pair_value_tile<R, 2>(p, values, lo, hi, first, c, c_row);
  }
  for (; first < dim; first += 32) chain_pair_value_tile<R, 1>(p, values, lo, hi, first, c, c_row);
}

#define TBIK_TIMES(rows)                                                   \
  case rows:                                                               \
    return kKeyChains ? chain_pair_key_rows<rows>(a, a_row, x, dim, hi, c) \
                      : chain_pair_value_rows<rows>(a, x, lo, hi, dim, c, c_row)

// Up to 8 rows: keys with q, or values with p.
template <bool kKeyChains>
void chain_pairs_of(int64_t rows, const float* a, int64_t a_row, const RowGroups& x, int64_t lo, int64_t hi,
                    int64_t dim, float* c, int64_t c_row) {
  switch (rows) {
    TBIK_TIMES(1);
    TBIK_TIMES(2);
    TBIK_TIMES(3);
    TBIK_TIMES(4);
    TBIK_TIMES(5);
    TBIK_TIMES(6);
    TBIK_TIMES(7);
    TBIK_TIMES(8);
    default:
      return;
  }
}
#undef TBIK_TIMES

void chain_keys_or_pairs(const float* q, int64_t q_row, int64_t rows, const RowGroups& keys, int64_t dim,
                         int64_t columns, float* s_RK) {
  if (keys.dtype != DType::kBFloat16) return chain_keys(q, q_row, rows, keys, dim, columns, s_RK);
  for (; rows > 0; rows -= 8, q += 8 * q_row, s_RK += 8 * kKeys) {
    chain_pairs_of<true>(rows < 8 ? rows : 8, q, q_row, keys, 0, columns, dim, s_RK, kKeys);
  }
}

void chain_values_or_pairs(const float* p_RK, int64_t rows, const RowGroups& values, int64_t lo, int64_t hi,
                           int64_t dim, float* c, int64_t c_row) {
  if (values.dtype != DType::kBFloat16) return chain_values(p_RK, rows, values, lo, hi, dim, c, c_row);
  for (; rows > 0; rows -= 8, p_RK += 8 * kKeys, c += 8 * c_row) {
    chain_pairs_of<false>(rows < 8 ? rows : 8, p_RK, kKeys, values, lo, hi, dim, c, c_row);
  }
}

}  // namespace
