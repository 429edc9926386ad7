// Tree-GEMM chains with vdpbf16ps. The instruction computes, per lane, acc = fma(low_a, low_b, fma(high_a, high_b,
// acc)) with subnormal inputs and results flushed and nearest-even rounding whatever MXCSR says, i.e. two steps of
// ORDER.md A1 + A2, the high halves first. So operands are packed with k in the high half and k+1 in the low half:
//
//   acc_RP = +0; for pairs ascending: acc_RP = dp(acc_RP, a_KR[k], b_KP[k])      R = 1..6 rows, P = 64 columns
//
// a_KR, b_KP: uint32 pairs of bf16; acc_RP fp32. Bits: deterministic, batch-invariant, equal to gemm_portable.cpp.
#include <cstdint>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

namespace tbik {
namespace avx512_bf16 {
namespace {

constexpr int64_t kAheadA = 3072;  // as in gemm_avx512f.cpp

template <int R, int kLines>
__attribute__((noinline)) void chain_dot(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first,
                                         const void* ahead) {
  const uint32_t* a = static_cast<const uint32_t*>(a_KR);
  const uint32_t* b = static_cast<const uint32_t*>(b_KP);
  float* out = static_cast<float*>(acc_RP);
  const char* line = static_cast<const char*>(ahead);
  __m512 acc[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) acc[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * kPanel + j * 16);
  }
  for (int64_t k = 0; k < steps; ++k, a += R, b += kPanel) {
    _mm_prefetch(reinterpret_cast<const char*>(a) + kAheadA, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) _mm_prefetch(line + i * 64, kLines > 1 ? _MM_HINT_T0 : _MM_HINT_T1);
    line += kLines * 64;
    __m512bh bv[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) bv[j] = (__m512bh)_mm512_loadu_si512(b + j * 16);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512bh av = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r]));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], av, bv[j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(out + r * kPanel + j * 16, acc[r][j]);
  }
}

#define TBIK_ROWS(chain, lines) \
  {chain<1, lines>, chain<2, lines>, chain<3, lines>, chain<4, lines>, chain<5, lines>, chain<6, lines>}
const ChainTable kDot = {{TBIK_ROWS(chain_dot, 1), TBIK_ROWS(chain_dot, 2), TBIK_ROWS(chain_dot, 4)}};
#undef TBIK_ROWS

}  // namespace
}  // namespace avx512_bf16
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const GemmKernels* avx512_bf16_kernels() {
  const GemmKernels* wide = avx512f_kernels();
  if (wide == nullptr || !__builtin_cpu_supports("avx512bf16")) return nullptr;
  static const GemmKernels kernels = {"avx512_bf16", wide->loops,        false,   true,    nullptr, nullptr,
                                      nullptr,       &avx512_bf16::kDot, nullptr, nullptr, nullptr, nullptr};
  return &kernels;
}

}  // namespace tbik

#else  // not x86-64

namespace tbik {
const GemmKernels* avx512_bf16_kernels() { return nullptr; }
}  // namespace tbik

#endif
