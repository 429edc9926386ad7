// Position-keyed additive digest of raw bits (ORDER.md F1): any partition of a tensor gives partial sums that add up.
//
//   F = sum over elements of M(M(key * (index + 1)) + bits)  mod 2^64
//   M(x): x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9; x = (x ^ x >> 27) * 0x94d049bb133111eb; x ^ x >> 31
//
// index: row-major, of the element in the whole tensor; bits: its storage, zero-extended. M is the output function of
// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014, with Stafford's variant 13), so the inner M is that generator.
// Integers only: no rounding, no order, no floating-point mode. deterministic and layout-invariant; every path and
// thread count gives the same number (tests/test_fingerprint.py). No torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm.h"

namespace tbik {

inline constexpr uint64_t kMixFirst = 0xbf58476d1ce4e5b9;
inline constexpr uint64_t kMixSecond = 0x94d049bb133111eb;

// One dimension of a strided box: `stride_bytes` apart in memory, `index_stride` apart in the whole tensor.
struct BoxDim {
  int64_t size;
  int64_t stride_bytes;
  uint64_t index_stride;
};

// n contiguous elements, key * (index + 1) = position, position + step, ...
using FingerprintFn = uint64_t (*)(const void* data, int64_t n, uint64_t position, uint64_t step);

// By log2 of the element size in bytes: 1, 2, 4, 8.
struct FingerprintKernels {
  FingerprintFn sum[4];
};

// Null when the path was not compiled for this architecture or the CPU lacks the instructions.
const FingerprintKernels* portable_fingerprint();
const FingerprintKernels* avx2_fingerprint();
const FingerprintKernels* avx512f_fingerprint();

// data: the element with all coordinates 0, whose index is `first`. element_size: 1, 2, 4 or 8; anything else is
// std::invalid_argument. path: a name of cpu_paths(), "" = TBIK_CPU_PATH or the fastest (avx512_bf16 reads as avx512f).
uint64_t fingerprint(const void* data, int64_t element_size, std::vector<BoxDim> dims, uint64_t first, uint64_t key,
                     const std::string& path, const ParallelFor& parallel);

}  // namespace tbik
