// Tree-GEMM chains with 256-bit fused multiply-adds (AVX2 + FMA + F16C).
//
//   acc_RP = +0; for k ascending: acc_RP = fma(a_KR[k], b_KP[k], acc_RP)      R = 1..6 rows, P = 64 columns
//
// The panel is walked in strips of two registers (16 fp32 or 8 fp64 columns): 6 x 2 = 12 accumulators of 16 registers.
// Tiles of one to three rows take wider strips: 8 accumulators hide the latency. One row reads whole lines in order and
// ignores `ahead`: the hardware's prefetcher is then faster (measured, Zen 3); narrower strips jump and ask for lines.
// fp32 chains run with FTZ and DAZ on (the caller sets them), fp64 chains in IEEE mode.
// Bits: deterministic, batch-invariant, equal to gemm_portable.cpp.
#include <cstdint>

#include "kernels.h"

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

#include "combine_loops.h"

namespace {

// Registers of one strip of the panel: as many accumulators as there are, and at least the 8 that hide the latency.
template <int R>
constexpr int kWide = R == 1   ? 8
                      : R <= 3 ? 4
                               : 2;

// Strips narrower than the panel jump from line to line, so each asks for its share of the kLines lines per step of
// `ahead`, whose first step is `line`.
template <int kLines, int kStrips>
inline __attribute__((always_inline)) void prefetch(const char*& line, int64_t k) {
  if constexpr (kStrips == 1) return;
  if constexpr (kLines >= kStrips) {
#pragma GCC unroll 2
    for (int i = 0; i < kLines / kStrips; ++i) _mm_prefetch(line + i * 64, _MM_HINT_T0);
    line += kLines / kStrips * 64;
  } else if (k % (kStrips / kLines) == 0) {
    _mm_prefetch(line, _MM_HINT_T0);
    line += 64;
  }
}

// One step of the widest tiles: two registers of B, a row of A at a time.
template <int R>
inline __attribute__((always_inline)) void chain_step(const float* a, const float* b, __m256 acc[R][2]) {
  const __m256 b0 = _mm256_loadu_ps(b);
  const __m256 b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const __m256 av = _mm256_broadcast_ss(a + r);
    acc[r][0] = _mm256_fmadd_ps(av, b0, acc[r][0]);
    acc[r][1] = _mm256_fmadd_ps(av, b1, acc[r][1]);
  }
}

template <int R, int kLines>
__attribute__((noinline)) void chain_f32(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first,
                                         const void* ahead) {
  constexpr int W = kWide<R>;
  const char* line = static_cast<const char*>(ahead);
  for (int strip = 0; strip < kPanel; strip += W * 8) {
    const float* a = static_cast<const float*>(a_KR);
    const float* b = static_cast<const float*>(b_KP) + strip;
    float* out = static_cast<float*>(acc_RP) + strip;
    __m256 acc[R][W];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < W; ++j) acc[r][j] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(out + r * kPanel + j * 8);
    }
    for (int64_t k = 0; k < steps; ++k, a += R, b += kPanel) {
      prefetch<kLines, kPanel / (W * 8)>(line, k);
      if constexpr (W == 2) {
        chain_step<R>(a, b, acc);
      } else {
        __m256 av[R];
#pragma GCC unroll 3
        for (int r = 0; r < R; ++r) av[r] = _mm256_broadcast_ss(a + r);
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) {
          const __m256 bv = _mm256_loadu_ps(b + j * 8);
#pragma GCC unroll 3
          for (int r = 0; r < R; ++r) acc[r][j] = _mm256_fmadd_ps(av[r], bv, acc[r][j]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < W; ++j) _mm256_storeu_ps(out + r * kPanel + j * 8, acc[r][j]);
    }
  }
}

// One step with the high or low halves of a row of pairs.
template <int R, int W, class Half>
inline __attribute__((always_inline)) void chain_half(const float* a, const Half& half, __m256 acc[R][W]) {
  if constexpr (W == 2) {
    const __m256 b0 = _mm256_castsi256_ps(half(0));
    const __m256 b1 = _mm256_castsi256_ps(half(1));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 av = _mm256_broadcast_ss(a + r);
      acc[r][0] = _mm256_fmadd_ps(av, b0, acc[r][0]);
      acc[r][1] = _mm256_fmadd_ps(av, b1, acc[r][1]);
    }
  } else {
    __m256 av[R];
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r) av[r] = _mm256_broadcast_ss(a + r);
#pragma GCC unroll 8
    for (int j = 0; j < W; ++j) {
      const __m256 bv = _mm256_castsi256_ps(half(j));
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) acc[r][j] = _mm256_fmadd_ps(av[r], bv, acc[r][j]);
    }
  }
}

template <int R, int kLines>
__attribute__((noinline)) void chain_pair(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first,
                                          const void* ahead) {
  constexpr int W = kWide<R>;
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const char* line = static_cast<const char*>(ahead);
  for (int strip = 0; strip < kPanel; strip += W * 8) {
    const float* a = static_cast<const float*>(a_KR);
    const uint32_t* b = static_cast<const uint32_t*>(b_KP) + strip;
    float* out = static_cast<float*>(acc_RP) + strip;
    __m256 acc[R][W];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < W; ++j) acc[r][j] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(out + r * kPanel + j * 8);
    }
    for (int64_t k = 0; k < steps; ++k, a += 2 * R, b += kPanel) {
      prefetch<kLines, kPanel / (W * 8)>(line, k);
      chain_half<R, W>(
          a,
          [&](int j) {
            return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + j * 8)), high);
          },
          acc);
      chain_half<R, W>(
          a + R,
          [&](int j) { return _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + j * 8)), 16); },
          acc);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < W; ++j) _mm256_storeu_ps(out + r * kPanel + j * 8, acc[r][j]);
    }
  }
}

template <int R>
__attribute__((noinline)) void chain_strip(const void* a_KR, const void* b_KS, int64_t steps, void* acc_RS, bool first,
                                           const void* ahead, int64_t tiles) {
  const float* a = static_cast<const float*>(a_KR);
  float* out = static_cast<float*>(acc_RS);
  const char* line = static_cast<const char*>(ahead);
  for (int64_t tile = 0; tile < tiles; ++tile, out += R * kStrip) {
    const float* b = static_cast<const float*>(b_KS);
    __m256 acc[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) acc[r][j] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(out + r * kStrip + j * 8);
    }
    int64_t k = 0;
    for (; k + 4 <= steps; k += 4, a += 4 * R, b += 4 * kStrip, line += 64) {
      _mm_prefetch(line, _MM_HINT_T1);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) chain_step<R>(a + i * R, b + i * kStrip, acc);
    }
    for (; k < steps; ++k, a += R, b += kStrip) chain_step<R>(a, b, acc);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) _mm256_storeu_ps(out + r * kStrip + j * 8, acc[r][j]);
    }
  }
}

// The source is read once, in order; `strips` places are written.
void deal_f32(float* dst_SKS, const float* src_KP, int64_t steps, int strips) {
  for (int64_t k = 0; k < steps; ++k, src_KP += kPanel, dst_SKS += kStrip) {
    for (int s = 0; s < strips; ++s) {
      float* dst = dst_SKS + s * steps * kStrip;
      _mm256_storeu_ps(dst, _mm256_loadu_ps(src_KP + s * kStrip));
      _mm256_storeu_ps(dst + 8, _mm256_loadu_ps(src_KP + s * kStrip + 8));
    }
  }
}

void deal_pairs(float* dst_SKS, const uint32_t* src_KP, int64_t pairs, int strips) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t k = 0; k < pairs; ++k, src_KP += kPanel, dst_SKS += 2 * kStrip) {
    for (int s = 0; s < strips; ++s) {
      float* dst = dst_SKS + s * pairs * 2 * kStrip;
#pragma GCC unroll 2
      for (int j = 0; j < kStrip; j += 8) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src_KP + s * kStrip + j));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + j), _mm256_and_si256(both, high));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + kStrip + j), _mm256_slli_epi32(both, 16));
      }
    }
  }
}

void deal_f16(float* dst_SKS, const uint16_t* src_KP, int64_t steps, int strips) {
  for (int64_t k = 0; k < steps; ++k, src_KP += kPanel, dst_SKS += kStrip) {
    for (int s = 0; s < strips; ++s) {
      float* dst = dst_SKS + s * steps * kStrip;
#pragma GCC unroll 2
      for (int j = 0; j < kStrip; j += 8) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src_KP + s * kStrip + j));
        _mm256_storeu_ps(dst + j, _mm256_cvtph_ps(half));
      }
    }
  }
}

template <int R>
__attribute__((noinline)) void chain_f64(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first,
                                         const void*) {
  for (int strip = 0; strip < kPanel; strip += 8) {
    const double* a = static_cast<const double*>(a_KR);
    const double* b = static_cast<const double*>(b_KP) + strip;
    double* out = static_cast<double*>(acc_RP) + strip;
    __m256d acc[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) acc[r][j] = first ? _mm256_setzero_pd() : _mm256_loadu_pd(out + r * kPanel + j * 4);
    }
    for (int64_t k = 0; k < steps; ++k, a += R, b += kPanel) {
      const __m256d b0 = _mm256_loadu_pd(b);
      const __m256d b1 = _mm256_loadu_pd(b + 4);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m256d av = _mm256_broadcast_sd(a + r);
        acc[r][0] = _mm256_fmadd_pd(av, b0, acc[r][0]);
        acc[r][1] = _mm256_fmadd_pd(av, b1, acc[r][1]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) _mm256_storeu_pd(out + r * kPanel + j * 4, acc[r][j]);
    }
  }
}

// vcvtph2ps keeps fp16 subnormals whatever DAZ says.
void widen_f16(float* dst_KP, const uint16_t* src_KP, int64_t steps) {
  for (int64_t i = 0; i < steps * kPanel; i += 8) {
    _mm256_storeu_ps(dst_KP + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src_KP + i))));
  }
}

// 8 x 8 words in registers.
inline void transpose_8(__m256i v[8]) {
  __m256i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  // v[4g + c] holds, in lane l, column 4l + c of rows 4g..4g+3.
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2x128_si256(v[c], v[4 + c], 0x20);
    t[4 + c] = _mm256_permute2x128_si256(v[c], v[4 + c], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = t[i];
}

void transpose(uint32_t* dst_CP, const void* const* rows, int64_t cols, bool rotate) {
  const int64_t whole = cols / 8 * 8;
  for (int64_t c0 = 0; c0 < whole; c0 += 8) {
    for (int r0 = 0; r0 < kPanel; r0 += 8) {
      __m256i v[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        const char* row = static_cast<const char*>(rows[r0 + r]) + c0 * 4;
        v[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
      }
      transpose_8(v);
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) {
        const __m256i swapped = _mm256_or_si256(_mm256_slli_epi32(v[c], 16), _mm256_srli_epi32(v[c], 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst_CP + (c0 + c) * kPanel + r0), rotate ? swapped : v[c]);
      }
    }
  }
  if (whole < cols) {
    const void* tail[kPanel];
    for (int r = 0; r < kPanel; ++r) tail[r] = static_cast<const char*>(rows[r]) + whole * 4;
    transpose_plain(dst_CP + whole * kPanel, tail, cols - whole, rotate);
  }
}

#define TBIK_ROWS(chain, lines) \
  {chain<1, lines>, chain<2, lines>, chain<3, lines>, chain<4, lines>, chain<5, lines>, chain<6, lines>}
const ChainTable kF32 = {{TBIK_ROWS(chain_f32, 1), TBIK_ROWS(chain_f32, 2), TBIK_ROWS(chain_f32, 4)}};
const ChainTable kPair = {{TBIK_ROWS(chain_pair, 1), TBIK_ROWS(chain_pair, 2), TBIK_ROWS(chain_pair, 4)}};
#undef TBIK_ROWS
#define TBIK_ROWS(chain) {chain<1>, chain<2>, chain<3>, chain<4>, chain<5>, chain<6>}
const StripKernels kStrips = {TBIK_ROWS(chain_strip), deal_f32, deal_pairs, deal_f16};
const ChainTable kF64 = {{TBIK_ROWS(chain_f64), TBIK_ROWS(chain_f64), TBIK_ROWS(chain_f64)}};
#undef TBIK_ROWS

// bf16 sums, 16 elements at a time. Interleaving with zeros widens inside each half of the register and packing undoes
// it, so no element has to cross halves. The bits are those of combine_loops.h.
inline __m256i round_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), even);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
}

void add_both_fast(void* dst_, const void* left_, const void* right_, DType dtype, int64_t n) {
  if (dtype != DType::kBFloat16) return add_both(dst_, left_, right_, dtype, n);
  uint16_t* dst = static_cast<uint16_t*>(dst_);
  const uint16_t* left = static_cast<const uint16_t*>(left_);
  const uint16_t* right = static_cast<const uint16_t*>(right_);
  const __m256i zero = _mm256_setzero_si256();
  const auto widen_low = [&](__m256i x) { return _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x)); };
  const auto widen_high = [&](__m256i x) { return _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x)); };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i l = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(left + i));
    const __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right + i));
    const __m256i low = round_bf16(_mm256_add_ps(widen_low(l), widen_low(r)));
    const __m256i high = round_bf16(_mm256_add_ps(widen_high(l), widen_high(r)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), _mm256_packus_epi32(low, high));
  }
  add_both(dst + i, left + i, right + i, dtype, n - i);
}

void add_to_fast(void* dst_, DType to, const float* left, const float* right, int64_t n) {
  if (to != DType::kBFloat16) return add_to(dst_, to, left, right, n);
  uint16_t* dst = static_cast<uint16_t*>(dst_);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256 first = _mm256_add_ps(_mm256_loadu_ps(left + i), _mm256_loadu_ps(right + i));
    const __m256 second = _mm256_add_ps(_mm256_loadu_ps(left + i + 8), _mm256_loadu_ps(right + i + 8));
    const __m256i packed = _mm256_packus_epi32(round_bf16(first), round_bf16(second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), _mm256_permute4x64_epi64(packed, 0xd8));
  }
  add_to(dst + i, to, left + i, right + i, n - i);
}

constexpr Loops with_fast_bf16(Loops loops) {
  loops.add_both = add_both_fast;
  loops.add_to = add_to_fast;
  return loops;
}

const Loops kLoops = with_fast_bf16(make_loops(transpose));
const GemmKernels kKernels = {"avx2",   &kLoops,           true,     false, &kF32, &kF64, &kPair, nullptr, nullptr,
                              &kStrips, widen_pairs_plain, widen_f16};

}  // namespace
}  // namespace avx2
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const GemmKernels* avx2_kernels() {
  const bool supported =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return supported ? &avx2::kKernels : nullptr;
}

}  // namespace tbik

#else  // not x86-64

namespace tbik {
const GemmKernels* avx2_kernels() { return nullptr; }
}  // namespace tbik

#endif
