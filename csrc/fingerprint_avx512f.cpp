// Fingerprint with eight 64-bit lanes (AVX-512 F and DQ). See fingerprint.h for the equation.
#include <cstdint>

#include "fingerprint.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx2")
#endif

namespace tbik {
namespace fingerprint_avx512f {

namespace {

struct Lanes {
  using V = __m512i;
  static constexpr int64_t kWidth = 8;
  static constexpr int kUnroll = 4;
  static V splat(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
  static V ramp(uint64_t start, uint64_t step) {
    const V count = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    return add(splat(start), _mm512_mullo_epi64(splat(step), count));
  }
  template <class T>
  static V load(const char* x) {
    if constexpr (sizeof(T) == 1) {
      return _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
    } else if constexpr (sizeof(T) == 2) {
      return _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    } else if constexpr (sizeof(T) == 4) {
      return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    } else {
      return _mm512_loadu_si512(x);
    }
  }
  static V add(V a, V b) { return _mm512_add_epi64(a, b); }
  template <int n>
  static V mixed_right(V x) {
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, n));
  }
  template <uint64_t c, int kVectors>
  static inline __attribute__((always_inline)) void times(V* x) {
#pragma GCC unroll 8
    for (int u = 0; u < kVectors; ++u) x[u] = _mm512_mullo_epi64(x[u], splat(c));
  }
  static uint64_t total(V x) { return static_cast<uint64_t>(_mm512_reduce_add_epi64(x)); }
};

}  // namespace

#include "fingerprint_loops.h"

}  // namespace fingerprint_avx512f
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const FingerprintKernels* avx512f_fingerprint() {
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  return supported ? &fingerprint_avx512f::kKernels : nullptr;
}

}  // namespace tbik

#else  // not x86-64

namespace tbik {
const FingerprintKernels* avx512f_fingerprint() { return nullptr; }
}  // namespace tbik

#endif
