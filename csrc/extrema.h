// minimum and maximum of two values: IEEE 754-2019 for floats (NaN wins, -0 < +0; ORDER.md A8), as usual for integers.
// No result depends on the floating-point mode's rounding. Guarantee: deterministic, element-wise.
#pragma once

#include <cstdint>
#include <type_traits>

#include "host_device.h"

namespace tbik {

TBIK_HOST_DEVICE bool is_negative(float x) { return __builtin_bit_cast(uint32_t, x) >> 31 != 0; }
TBIK_HOST_DEVICE bool is_negative(double x) { return __builtin_bit_cast(uint64_t, x) >> 63 != 0; }

template <class T>
TBIK_HOST_DEVICE T minimum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a) return a;
    if (b != b) return b;
    if (a == b) return is_negative(a) ? a : b;
  }
  return b < a ? b : a;
}

template <class T>
TBIK_HOST_DEVICE T maximum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a) return a;
    if (b != b) return b;
    if (a == b) return is_negative(a) ? b : a;
  }
  return a < b ? b : a;
}

}  // namespace tbik
