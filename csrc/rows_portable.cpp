// Row-wise kernels in plain C++, for any architecture. The text is csrc/rows_loops.h. deterministic, batch-invariant.
#include <cmath>
#include <cstdint>

#include "rows.h"

namespace tbik {
namespace portable {
namespace {
constexpr int kWidth = 4;
}

#include "convert_loops.h"
#include "flushed_fma.h"

namespace {
inline float fma_flushed(float a, float b, float c) { return flushed_fma(flush_input(a), flush_input(b), c); }

template <class V>
inline __attribute__((always_inline)) V fma_flushed(V a, V b, V c) {
  for (int i = 0; i < kWidth; ++i) c[i] = fma_flushed(static_cast<float>(a[i]), static_cast<float>(b[i]), c[i]);
  return c;
}
// fma(a, 1, c)
template <class V>
inline __attribute__((always_inline)) V add_flushed(V a, V c) {
  return fma_flushed(a, V{} + 1.0f, c);
}

// Through the caches.
template <class V>
inline __attribute__((always_inline)) void stream_vec(float* p, V x) {
  __builtin_memcpy(p, &x, sizeof(x));
}

template <class V>
inline __attribute__((always_inline)) V floor_vec(V x) {
  for (int i = 0; i < kWidth; ++i) x[i] = __builtin_floorf(x[i]);
  return x;
}

// dst[0, 8) = the high halves of the lanes of a, then of b.
template <class U>
inline __attribute__((always_inline)) void store_high_halves(void* dst, U a, U b) {
  uint16_t half[2 * kWidth];
  for (int i = 0; i < kWidth; ++i) {
    half[i] = static_cast<uint16_t>(a[i] >> 16);
    half[kWidth + i] = static_cast<uint16_t>(b[i] >> 16);
  }
  __builtin_memcpy(dst, half, sizeof(half));
}
}  // namespace

#include "rows_loops.h"

namespace {
const Rows kRows = make_rows("portable", false);
}
}  // namespace portable

const Rows* portable_rows() { return &portable::kRows; }

}  // namespace tbik
