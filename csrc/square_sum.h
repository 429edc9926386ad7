// Exact sum of the squares of fp32 numbers, in integers (ORDER.md S5).
//
//   sum of x^2 = sum over e of bins[e] * 2^(2(e - 1) - 298)        e: the biased exponent, 1 for subnormals
//
// |x| = fraction * 2^(e - 150) with a fraction below 2^24, so a square is an integer below 2^48 in its bin; bins have
// 128 bits. Integers only: any order, partition and thread count give the same number (tests/test_fsdp.py). No torch.
#pragma once

#include <array>
#include <cstdint>

#include "gemm.h"

namespace tbik {

struct SquareSum {
  std::array<uint64_t, 256> low{};
  std::array<uint64_t, 256> high{};
  bool nan = false;
  bool infinite = false;

  void add(uint64_t square_sum, int exponent) {
    low[exponent] += square_sum;
    high[exponent] += low[exponent] < square_sum;
  }
  void add(const SquareSum& other);
};

SquareSum square_sum(const float* x, int64_t n, const ParallelFor& parallel);

}  // namespace tbik
