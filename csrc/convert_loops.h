// Exact and once-rounded conversions between fp32 and the 16-bit types, by integers. Included by each
// <kernel>_<isa>.cpp inside its own target region and namespace, like csrc/combine_loops.h (which includes it). No
// include guard on purpose.
//
//   widen: exact      narrow: round to nearest even, subnormals kept, NaN canonical      (ORDER.md A3, A7)
//
// No result depends on the floating-point mode. Guarantee: deterministic, element-wise.

#include "host_device.h"

namespace {

TBIK_HOST_DEVICE uint32_t bits(float x) { return __builtin_bit_cast(uint32_t, x); }
TBIK_HOST_DEVICE float as_f32(uint32_t u) { return __builtin_bit_cast(float, u); }
TBIK_HOST_DEVICE uint64_t bits(double x) { return __builtin_bit_cast(uint64_t, x); }
TBIK_HOST_DEVICE double as_f64(uint64_t u) { return __builtin_bit_cast(double, u); }

TBIK_HOST_DEVICE float canonical(float x) { return x == x ? x : as_f32(0x7fc00000u); }
TBIK_HOST_DEVICE double canonical(double x) {
  return (bits(x) & 0x7fffffffffffffffull) > 0x7ff0000000000000ull ? as_f64(0x7ff8000000000000ull) : x;
}

// RNE; NaN -> 0x7fc0; subnormals kept (integers only). The result sits in the low half.
TBIK_HOST_DEVICE uint32_t bf16_of(float x) {
  const uint32_t u = bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

// RNE; NaN -> 0x7e00; subnormals kept.
TBIK_HOST_DEVICE uint32_t f16_of(float x) {
  const uint32_t u = bits(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t sign = (u >> 16) & 0x8000u;
  // Below 2^-14 the unit of fp16 is 2^-24, the unit of fp32 in [0.5, 1): the addition rounds, the subtraction is exact.
  const uint32_t small = bits(as_f32(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t result = magnitude < 0x38800000u ? small : normal;
  result = magnitude >= 0x47800000u ? 0x7c00u : result;
  result |= sign;
  return magnitude > 0x7f800000u ? 0x7e00u : result;
}

TBIK_HOST_DEVICE float f32_of_f16(uint32_t h) {
  const uint32_t magnitude = (h & 0x7fffu) << 13;
  const uint32_t sign = (h & 0x8000u) << 16;
  const uint32_t normal = magnitude + 0x38000000u;
  const uint32_t special = magnitude + 0x70000000u;
  // Subnormal: 2^-14 * (1 + fraction) - 2^-14; both are normal fp32 numbers, so no mode matters.
  const uint32_t small = bits(as_f32(magnitude + 0x38800000u) - as_f32(0x38800000u));
  uint32_t result = magnitude < 0x00800000u ? small : normal;
  result = magnitude >= 0x0f800000u ? special : result;
  return as_f32(result | sign);
}

TBIK_HOST_DEVICE float f32_of_bf16(uint32_t h) { return as_f32(h << 16); }

struct Bf16 {
  uint16_t u;
};
struct F16 {
  uint16_t u;
};

template <class To>
TBIK_HOST_DEVICE To narrow(float x) {
  if constexpr (__is_same(To, Bf16)) return {static_cast<uint16_t>(bf16_of(x))};
  if constexpr (__is_same(To, F16)) return {static_cast<uint16_t>(f16_of(x))};
  if constexpr (__is_same(To, float) || __is_same(To, double)) return static_cast<To>(x);
}
template <class To>
TBIK_HOST_DEVICE To narrow(double x) {
  static_assert(__is_same(To, float) || __is_same(To, double));
  return static_cast<To>(x);
}
TBIK_HOST_DEVICE float widen(float x) { return x; }
TBIK_HOST_DEVICE double widen(double x) { return x; }
TBIK_HOST_DEVICE float widen(Bf16 x) { return f32_of_bf16(x.u); }
TBIK_HOST_DEVICE float widen(F16 x) { return f32_of_f16(x.u); }

}  // namespace
