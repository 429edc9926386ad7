// Attention chains of few query rows over keys and values where they lie (decoding): nothing is packed. Included by the
// x86 attention_<isa>.cpp inside their target regions and namespaces, after attention_loops.h. No include guard on
// purpose; keys take 256-bit registers, values what the file defines before: Row, kRow floats wide, its load,
// broadcast, fma and store.
//
//   s[r][k] = chain over d of q[r, d] k[k, d]        8 keys by 4 dimensions turned in registers, then 4 ascending steps
//   c[r][d] = chain over k of p[r, k] v[k, d]        rows of v are contiguous over d
//
// The caller sets FTZ and DAZ. Bits: equal to attention_portable.cpp.

namespace {

inline __m256 load_pair(const float* low, const float* high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

// R rows by G groups of 8 keys: the accumulators of several groups hide the latency of a chain.
template <int R, int G>
__attribute__((noinline)) void chain_key_tile(const float* q, int64_t q_row, const void* const* groups,
                                              const void* const* ahead, int64_t stride, int64_t dim, float* s) {
  __m256 acc[R][G];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) acc[r][g] = _mm256_setzero_ps();
  }
  const float* key[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) key[g] = static_cast<const float*>(groups[g]);
  const int64_t stride3 = 3 * stride;
  for (int64_t d = 0; d < dim; d += 4) {
    // Two of the eight rows per step: all of them in the 16 dimensions of a line.
    const int64_t line = d % 16 / 2 * stride + d / 16 * 16;
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const float* next = static_cast<const float*>(ahead[g]) + line;
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + stride, 0, 2);
    }
    __m256 k_DK[G][4];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const float* low = key[g] + d;
      const float* high = low + 4 * stride;
      const __m256 k04 = load_pair(low, high);
      const __m256 k15 = load_pair(low + stride, high + stride);
      const __m256 k26 = load_pair(low + 2 * stride, high + 2 * stride);
      const __m256 k37 = load_pair(low + stride3, high + stride3);
      const __m256 a = _mm256_unpacklo_ps(k04, k15);
      const __m256 b = _mm256_unpacklo_ps(k26, k37);
      const __m256 c = _mm256_unpackhi_ps(k04, k15);
      const __m256 e = _mm256_unpackhi_ps(k26, k37);
      k_DK[g][0] = _mm256_shuffle_ps(a, b, 0x44);
      k_DK[g][1] = _mm256_shuffle_ps(a, b, 0xee);
      k_DK[g][2] = _mm256_shuffle_ps(c, e, 0x44);
      k_DK[g][3] = _mm256_shuffle_ps(c, e, 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256 qv = _mm256_broadcast_ss(q + r * q_row + d + i);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) acc[r][g] = _mm256_fmadd_ps(qv, k_DK[g][i], acc[r][g]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) _mm256_storeu_ps(s + r * kKeys + g * 8, acc[r][g]);
  }
}

template <int R>
void chain_key_rows(const float* q, int64_t q_row, const RowGroups& keys, int64_t dim, int64_t columns, float* s) {
  constexpr int kGroups = R < 3 ? 4 : 2;
  for (int g = 0; g * 8 < columns; g += kGroups) {
    chain_key_tile<R, kGroups>(q, q_row, keys.group + g, keys.ahead + g, keys.stride, dim, s + g * 8);
  }
}

void chain_keys(const float* q, int64_t q_row, int64_t rows, const RowGroups& keys, int64_t dim, int64_t columns,
                float* s_RK) {
  for (; rows >= 4; rows -= 4, q += 4 * q_row, s_RK += 4 * kKeys) chain_key_rows<4>(q, q_row, keys, dim, columns, s_RK);
  if (rows == 3) return chain_key_rows<3>(q, q_row, keys, dim, columns, s_RK);
  if (rows == 2) return chain_key_rows<2>(q, q_row, keys, dim, columns, s_RK);
  if (rows == 1) return chain_key_rows<1>(q, q_row, keys, dim, columns, s_RK);
}

// R rows by N registers of dimensions, keys [lo, hi).
template <int R, int N>
__attribute__((noinline)) void chain_value_tile(const float* p, const RowGroups& values, int64_t lo, int64_t hi,
                                                int64_t first, float* c, int64_t c_row) {
  Row acc[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[r][j] = Row{};
  }
  for (int64_t k = lo; k < hi;) {
    const int64_t at = k % 8 * values.stride + first;
    const float* v = static_cast<const float*>(values.group[k / 8]) + at;
    const float* next = static_cast<const float*>(values.ahead[k / 8]) + at;
    const int64_t end = k / 8 * 8 + 8 < hi ? k / 8 * 8 + 8 : hi;
    for (; k < end; ++k, v += values.stride, next += values.stride) {
#pragma GCC unroll 4
      for (int j = 0; j < N * kRow; j += 16) __builtin_prefetch(next + j, 0, 2);
      Row row[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) row[j] = load_row(v + kRow * j);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Row pv = broadcast_row(p + r * kKeys + k);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[r][j] = fma_row(pv, row[j], acc[r][j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store_row(c + r * c_row + first + kRow * j, acc[r][j]);
  }
}

// As many registers as hide the latency of an addition behind the others, then what is left of `dim` by 16.
template <int R>
void chain_value_rows(const float* p, const RowGroups& values, int64_t lo, int64_t hi, int64_t dim, float* c,
                      int64_t c_row) {
  constexpr int kMost = R == 1 ? 8 : kRow == 16 || R == 2 ? 4 : 2;
  int64_t first = 0;
  for (; first + kMost * kRow <= dim; first += kMost * kRow)
    chain_value_tile<R, kMost>(p, values, lo, hi, first, c, c_row);
  if constexpr (kMost > 4) {
    for (; first + 4 * kRow <= dim; first += 4 * kRow) chain_value_tile<R, 4>(p, values, lo, hi, first, c, c_row);
  }
  for (; first < dim; first += 16) chain_value_tile<R, 16 / kRow>(p, values, lo, hi, first, c, c_row);
}

void chain_values(const float* p_RK, int64_t rows, const RowGroups& values, int64_t lo, int64_t hi, int64_t dim,
                  float* c, int64_t c_row) {
  for (; rows >= 4; rows -= 4, p_RK += 4 * kKeys, c += 4 * c_row)
    chain_value_rows<4>(p_RK, values, lo, hi, dim, c, c_row);
  if (rows == 3) return chain_value_rows<3>(p_RK, values, lo, hi, dim, c, c_row);
  if (rows == 2) return chain_value_rows<2>(p_RK, values, lo, hi, dim, c, c_row);
  if (rows == 1) return chain_value_rows<1>(p_RK, values, lo, hi, dim, c, c_row);
}

}  // namespace
