// Tree-GEMM chains with 512-bit fused multiply-adds.
//
//   acc_RP = +0; for k ascending: acc_RP = fma(a_KR[k], b_KP[k], acc_RP)      R = 1..6 rows, P = 64 columns
//
// fp32 chains run with FTZ and DAZ on (the caller sets them), fp64 chains in IEEE mode. `pair` reads bf16 pairs (high
// half = k, low half = k+1) and widens in registers. 6 x 64 tile = 24 accumulators, 4 registers of B, one of A.
// Each chain function is not inlined: its loads, arithmetic and stores stay between the two mode switches.
// Bits: deterministic, batch-invariant, equal to gemm_portable.cpp (tests/test_gemm.py).
#include <cstdint>

#include "kernels.h"

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

#include "combine_loops.h"

namespace {

// A lies in the order in which it is read, so the next tile's values follow: ask for the line 3 KiB ahead (a tile of
// 128 steps). Beyond the end a prefetch is harmless.
constexpr int64_t kAheadA = 3072;

// Lines k * kLines ... of `ahead`: into L1 if this tile is (nearly) the only one, else into L2.
template <int kLines>
inline void prefetch(const void* a, const char*& ahead) {
  _mm_prefetch(static_cast<const char*>(a) + kAheadA, _MM_HINT_T0);
#pragma GCC unroll 4
  for (int i = 0; i < kLines; ++i) _mm_prefetch(ahead + i * 64, kLines > 1 ? _MM_HINT_T0 : _MM_HINT_T1);
  ahead += kLines * 64;
}

template <int R, int kLines>
__attribute__((noinline)) void chain_f32(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first,
                                         const void* ahead) {
  const float* a = static_cast<const float*>(a_KR);
  const float* b = static_cast<const float*>(b_KP);
  float* out = static_cast<float*>(acc_RP);
  const char* line = static_cast<const char*>(ahead);
  __m512 acc[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) acc[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * kPanel + j * 16);
  }
  for (int64_t k = 0; k < steps; ++k, a += R, b += kPanel) {
    prefetch<kLines>(a, line);
    __m512 bv[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) bv[j] = _mm512_loadu_ps(b + j * 16);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 av = _mm512_set1_ps(a[r]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] = _mm512_fmadd_ps(av, bv[j], acc[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(out + r * kPanel + j * 16, acc[r][j]);
  }
}

template <int R, int kLines>
__attribute__((noinline)) void chain_pair(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first,
                                          const void* ahead) {
  const float* a = static_cast<const float*>(a_KR);
  const uint32_t* b = static_cast<const uint32_t*>(b_KP);
  float* out = static_cast<float*>(acc_RP);
  const char* line = static_cast<const char*>(ahead);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  __m512 acc[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) acc[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * kPanel + j * 16);
  }
  for (int64_t k = 0; k < steps; ++k, a += 2 * R, b += kPanel) {
    prefetch<kLines>(a, line);
    __m512 bv[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      bv[j] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(b + j * 16), high));
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 av = _mm512_set1_ps(a[r]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] = _mm512_fmadd_ps(av, bv[j], acc[r][j]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) bv[j] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(b + j * 16), 16));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 av = _mm512_set1_ps(a[R + r]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] = _mm512_fmadd_ps(av, bv[j], acc[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(out + r * kPanel + j * 16, acc[r][j]);
  }
}

// As chain_pair in the order of A14: per block of 16 steps a chain over the high halves and one over the low ones.
template <int R, int kLines>
__attribute__((noinline)) void chain_amx_pair(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP,
                                              bool first, const void* ahead) {
  const float* a = static_cast<const float*>(a_KR);
  const uint32_t* b = static_cast<const uint32_t*>(b_KP);
  float* out = static_cast<float*>(acc_RP);
  const char* line = static_cast<const char*>(ahead);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t begin = 0; begin < steps; begin += kBlockSteps) {
    const int64_t count = steps - begin < kBlockSteps ? steps - begin : kBlockSteps;
    __m512 sums[2][R][4];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sums[0][r][j] = sums[1][r][j] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < count; ++k, a += 2 * R, b += kPanel) {
      prefetch<kLines>(a, line);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i both = _mm512_loadu_si512(b + j * 16);
        const __m512 even = _mm512_castsi512_ps(_mm512_and_si512(both, high));
        const __m512 odd = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          sums[0][r][j] = _mm512_fmadd_ps(_mm512_set1_ps(a[r]), even, sums[0][r][j]);
          sums[1][r][j] = _mm512_fmadd_ps(_mm512_set1_ps(a[R + r]), odd, sums[1][r][j]);
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        float* const to = out + r * kPanel + j * 16;
        const __m512 acc = first && begin == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
        _mm512_storeu_ps(to, _mm512_add_ps(acc, _mm512_add_ps(sums[0][r][j], sums[1][r][j])));
      }
    }
  }
}

// Two halves of 32 columns: 6 x 32 doubles = 24 accumulators.
template <int R, int kLines>
__attribute__((noinline)) void chain_f64(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first,
                                         const void* ahead) {
  for (int half = 0; half < kPanel; half += 32) {
    const double* a = static_cast<const double*>(a_KR);
    const double* b = static_cast<const double*>(b_KP) + half;
    const char* line = static_cast<const char*>(ahead) + (half != 0 ? steps * kLines * 64 : 0);
    double* out = static_cast<double*>(acc_RP) + half;
    __m512d acc[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] = first ? _mm512_setzero_pd() : _mm512_loadu_pd(out + r * kPanel + j * 8);
    }
    for (int64_t k = 0; k < steps; ++k, a += R, b += kPanel) {
      prefetch<kLines>(a, line);
      __m512d bv[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) bv[j] = _mm512_loadu_pd(b + j * 8);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512d av = _mm512_set1_pd(a[r]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[r][j] = _mm512_fmadd_pd(av, bv[j], acc[r][j]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) _mm512_storeu_pd(out + r * kPanel + j * 8, acc[r][j]);
    }
  }
}

void widen_pairs(float* dst_KP, const uint32_t* src_KP, int64_t pairs) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t k = 0; k < pairs; ++k, src_KP += kPanel, dst_KP += 2 * kPanel) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanel; j += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(src_KP + j) + 2048, _MM_HINT_T0);
      const __m512i both = _mm512_loadu_si512(src_KP + j);
      _mm512_storeu_si512(dst_KP + j, _mm512_and_si512(both, high));
      _mm512_storeu_si512(dst_KP + kPanel + j, _mm512_slli_epi32(both, 16));
    }
  }
}

// vcvtph2ps keeps fp16 subnormals whatever DAZ says.
void widen_f16(float* dst_KP, const uint16_t* src_KP, int64_t steps) {
  for (int64_t i = 0; i < steps * kPanel; i += 16) {
    _mm512_storeu_ps(dst_KP + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src_KP + i))));
  }
}

// 16 x 16 words in registers: four rounds of exchanges at distance 1, 2 (inside 128-bit lanes), 4, 8 (lanes).
inline void transpose_16(__m512i v[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // v[4g + c] holds, in lane l, column 4l + c of rows 4g..4g+3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even01 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88);
    const __m512i odd01 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even01, even23, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

void transpose(uint32_t* dst_CP, const void* const* rows, int64_t cols, bool rotate) {
  for (int64_t c0 = 0; c0 < cols; c0 += 16) {
    const int64_t count = cols - c0 < 16 ? cols - c0 : 16;
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1u);
    for (int r0 = 0; r0 < kPanel; r0 += 16) {
      __m512i v[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        v[r] = _mm512_maskz_loadu_epi32(mask, static_cast<const char*>(rows[r0 + r]) + c0 * 4);
      }
      transpose_16(v);
      if (rotate) {
#pragma GCC unroll 16
        for (int c = 0; c < 16; ++c) v[c] = _mm512_rol_epi32(v[c], 16);
      }
      if (count == 16) {
#pragma GCC unroll 16
        for (int c = 0; c < 16; ++c) _mm512_storeu_si512(dst_CP + (c0 + c) * kPanel + r0, v[c]);
      } else {
        for (int c = 0; c < count; ++c) _mm512_storeu_si512(dst_CP + (c0 + c) * kPanel + r0, v[c]);
      }
    }
  }
}

#define TBIK_ROWS(chain, lines) \
  {chain<1, lines>, chain<2, lines>, chain<3, lines>, chain<4, lines>, chain<5, lines>, chain<6, lines>}
const ChainTable kF32 = {{TBIK_ROWS(chain_f32, 1), TBIK_ROWS(chain_f32, 2), TBIK_ROWS(chain_f32, 4)}};
const ChainTable kPair = {{TBIK_ROWS(chain_pair, 1), TBIK_ROWS(chain_pair, 2), TBIK_ROWS(chain_pair, 4)}};
const ChainTable kF64 = {{TBIK_ROWS(chain_f64, 1), TBIK_ROWS(chain_f64, 2), TBIK_ROWS(chain_f64, 4)}};
#undef TBIK_ROWS
#define TBIK_ROWS(lines) {chain_amx_pair<1, lines>, chain_amx_pair<2, lines>}
const ChainTable kAmxPair = {{TBIK_ROWS(1), TBIK_ROWS(2), TBIK_ROWS(4)}};
#undef TBIK_ROWS

const Loops kLoops = make_loops(transpose);
const GemmKernels kKernels = {"avx512f", &kLoops, true,      false,   &kF32,       &kF64,
                              &kPair,    nullptr, &kAmxPair, nullptr, widen_pairs, widen_f16};

}  // namespace
}  // namespace avx512f
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const GemmKernels* avx512f_kernels() {
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return supported ? &avx512f::kKernels : nullptr;
}

}  // namespace tbik

#else  // not x86-64

namespace tbik {
const GemmKernels* avx512f_kernels() { return nullptr; }
}  // namespace tbik

#endif
