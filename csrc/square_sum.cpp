// See square_sum.h.
#include "square_sum.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace tbik {

namespace {

constexpr int kTables = 4;                 // neighbours mostly share a bin: they add to tables of their own
constexpr int64_t kBlock = kTables << 15;  // 2^15 squares below 2^48 fit in 63 bits
constexpr int64_t kWorkItem = 8 * kBlock;

SquareSum sum_of_run(const float* x, int64_t n) {
  SquareSum total;
  uint64_t tables[kTables][256];
  for (int64_t first = 0; first < n; first += kBlock) {
    std::memset(tables, 0, sizeof(tables));
    const int64_t end = std::min(n, first + kBlock);
    for (int64_t i = first; i < end; ++i) {
      uint32_t bits;
      std::memcpy(&bits, x + i, sizeof(bits));
      const uint32_t exponent = bits >> 23 & 0xff;
      const uint64_t fraction = (bits & 0x7fffff) | (exponent != 0 ? 0x800000u : 0u);
      tables[i % kTables][exponent] += fraction * fraction;
      if (exponent == 255) [[unlikely]] {
        (fraction == 0x800000 ? total.infinite : total.nan) = true;
      }
    }
    for (const auto& table : tables) {
      for (int exponent = 0; exponent < 255; ++exponent) total.add(table[exponent], std::max(exponent, 1));
    }
  }
  return total;
}

}  // namespace

void SquareSum::add(const SquareSum& other) {
  for (int exponent = 0; exponent < 256; ++exponent) {
    add(other.low[exponent], exponent);
    high[exponent] += other.high[exponent];
  }
  nan |= other.nan;
  infinite |= other.infinite;
}

SquareSum square_sum(const float* x, int64_t n, const ParallelFor& parallel) {
  SquareSum total;
  std::mutex mutex;
  parallel((n + kWorkItem - 1) / kWorkItem, [&](int64_t lo, int64_t hi) {
    const int64_t first = lo * kWorkItem;
    const SquareSum part = sum_of_run(x + first, std::min(n, hi * kWorkItem) - first);
    const std::lock_guard<std::mutex> lock(mutex);
    total.add(part);
  });
  return total;
}

}  // namespace tbik
