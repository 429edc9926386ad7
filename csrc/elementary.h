// exp, log, sigmoid, tanh, sin and cos, silu, gelu: the polynomials of ORDER.md section C, in its order of operations.
// Included by each <kernel>_<isa>.cpp inside its own target region and namespace, after convert_loops.h (or
// combine_loops.h). No include guard on purpose; internal linkage.
//
//   elementary::exp(x) etc.: fp32 -> fp32, at most 2 ulp, NaN canonical
//
// Scalar code without branches or calls: a loop over it is vectorised, and the vector body gives the bits of the tail,
// because every operation is one IEEE operation, never fused (A5), with gradual underflow (A3; csrc/fpmode.h).
// Guarantee: deterministic, element-wise; bits equal to tbik/reference.py (tests/test_rows.py).

#ifndef TBIK_INLINE
#define TBIK_INLINE inline __attribute__((always_inline))
#endif

namespace {
namespace elementary {

constexpr float kNan = __builtin_bit_cast(float, 0x7fc00000u);
constexpr float kInf = __builtin_inff();

constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.62e4p-1f;
constexpr float kLn2Low = 0x1.7f7d1cp-20f;
constexpr float kExpHighest = 0x1.64p+6f;
constexpr float kExpLowest = -0x1.a4p+6f;
constexpr uint32_t kLogSqrtHalfBits = 0x3f3504f3u;
constexpr float kTanhSmall = 0x1.4p-1f;
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
constexpr double kPi2High = 0x1.921fb544p+0;
constexpr double kPi2Low = 0x1.0b4611a626331p-34;

// 2^n for n in -126..127.
inline float power_of_two(int32_t n) { return as_f32(static_cast<uint32_t>(n + 127) << 23); }

// The operations that have no operator. csrc/four.h has them for four registers at once; a template over F below is one
// formula for both.
inline float floor_of(float x) { return __builtin_floorf(x); }
inline float minus_magnitude(float x) { return as_f32(bits(x) | 0x80000000u); }
inline float where_negative(float x, float yes, float no) { return static_cast<int32_t>(bits(x)) < 0 ? yes : no; }
// y 2^n where that is a normal number, so that it is exact.
inline float times_power_of_two(float y, float n) {
  return as_f32(bits(y) + (static_cast<uint32_t>(static_cast<int32_t>(n)) << 23));
}

// C1 but for the scaling: exp(t) = y 2^n.
template <class F>
struct Scaled {
  F y;
  F n;
};

template <class F>
TBIK_INLINE Scaled<F> exp_scaled(F t) {
  const F n = floor_of(t * kLog2E + 0.5f);
  const F high = t - n * kLn2High;
  const F low = n * kLn2Low;
  const F r = high - low;
  const F c = (high - r) - low;
  const F h = 1.0f + r;
  const F d = r - (h - 1.0f);
  F p = r * 0x1.9df7a8p-13f + 0x1.6d4ccep-10f;
  p = p * r + 0x1.11131p-7f;
  p = p * r + 0x1.5554e8p-5f;
  p = p * r + 0x1.555554p-3f;
  p = p * r + 0x1p-1f;
  return {h + (d + (c + (r * r) * p)), n};
}

// C1 for t within [kExpLowest, kExpHighest].
inline float exp_within(float t) {
  const Scaled<float> e = exp_scaled(t);
  const int32_t k = static_cast<int32_t>(e.n);
  const int32_t i = k >> 1;
  return (e.y * power_of_two(i)) * power_of_two(k - i);
}

// C1. A comparison with NaN is false, so NaN becomes a bound here and NaN again at the end; in this form each bound is
// one instruction.
inline float exp(float x) {
  float t = x < kExpHighest ? x : kExpHighest;
  t = t > kExpLowest ? t : kExpLowest;
  const float e = exp_within(t);
  return x == x ? e : kNan;
}

// C2.
inline float log(float x) {
  const bool tiny = x < 0x1p-126f;  // also zeros and negative numbers, replaced at the end
  const int32_t b = static_cast<int32_t>(bits(tiny ? x * 8388608.0f : x) - kLogSqrtHalfBits);
  const float e = static_cast<float>((tiny ? -23 : 0) + (b >> 23));
  const float f = as_f32((static_cast<uint32_t>(b) & 0x7fffffu) + kLogSqrtHalfBits) - 1.0f;
  const float z = f * f;
  float p = 0x1.1484e8p-4f;
  p = p * f + -0x1.de1004p-4f;
  p = p * f + 0x1.e6c03ep-4f;
  p = p * f + -0x1.fc26acp-4f;
  p = p * f + 0x1.233b78p-3f;
  p = p * f + -0x1.555c4ep-3f;
  p = p * f + 0x1.99a478p-3f;
  p = p * f + -0x1.000006p-2f;
  p = p * f + 0x1.555548p-2f;
  float t = (f * z) * p;
  t = (t + e * kLn2Low) - 0.5f * z;
  float y = (t + f) + e * kLn2High;
  y = x == kInf ? kInf : y;
  y = x == 0.0f ? -kInf : y;
  y = x < 0.0f ? kNan : y;
  return x == x ? y : kNan;
}

// C3, of NaN any number.
inline float sigmoid_of_number(float x) {
  const float t = -__builtin_fabsf(x);
  const float e = exp_within(t > kExpLowest ? t : kExpLowest);
  const float d = 1.0f + e;
  const float c = e - (d - 1.0f);
  const float q = (x < 0.0f ? e : 1.0f) / d;
  return q - q * c;
}

// The same bits for |x| <= kNear, where e is normal, in fewer operations. -0 takes the other side; e is 1 there.
constexpr float kNear = 87.0f;

template <class F>
TBIK_INLINE F sigmoid_near(F x) {
  const Scaled<F> s = exp_scaled(minus_magnitude(x));
  const F e = times_power_of_two(s.y, s.n);
  const F d = 1.0f + e;
  const F c = e - (d - 1.0f);
  const F q = where_negative(x, e, 1.0f) / d;
  return q - q * c;
}

inline float sigmoid(float x) {
  const float y = sigmoid_of_number(x);
  return x == x ? y : kNan;
}

inline float silu(float x) { return canonical(x * sigmoid_of_number(x)); }

// C4.
inline float tanh(float x) {
  const float a = __builtin_fabsf(x);
  const float z = a * a;
  float p = -0x1.7547e2p-8f;
  p = p * z + 0x1.5203f4p-6f;
  p = p * z + -0x1.b836f4p-5f;
  p = p * z + 0x1.1106fcp-3f;
  p = p * z + -0x1.555532p-2f;
  const float small = a + a * (z * p);
  const float large = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  const float y = a < kTanhSmall ? small : large;
  return x == x ? as_f32(bits(y) | (bits(x) & 0x80000000u)) : kNan;
}

// C7. The square is capped where the result no longer depends on it, so that no finite x meets 0 * Inf.
template <class F>
struct Activation {
  F value;  // before NaN is made canonical
  F slope;
};

template <class F>
TBIK_INLINE Activation<F> silu_of(F x, F s) {
  const F a = x * s;
  return {a, s + a * (1.0f - s)};
}

inline Activation<float> silu_with_slope(float x) { return silu_of(x, sigmoid_of_number(x)); }

// |x| <= kNear.
template <class F>
TBIK_INLINE Activation<F> silu_near(F x) {
  return silu_of(x, sigmoid_near(x));
}

constexpr float kGeluTwice = 0x1.988454p+0f;
constexpr float kGeluCubic = 0x1.6e4e26p-5f;
constexpr float kGeluSlope = 0x1.b6676cp-3f;
constexpr float kGeluCap = 0x1p+14f;
constexpr float kGeluNear = 9.0f;  // the argument of the sigmoid stays below kNear: 67

template <class F>
TBIK_INLINE F gelu_argument(F x, F z) {
  return kGeluTwice * (x + kGeluCubic * (x * z));
}

template <class F>
TBIK_INLINE Activation<F> gelu_of(F x, F z, F s) {
  const F a = x * s;
  return {a, s + (a * (1.0f - s)) * (kGeluTwice + kGeluSlope * z)};
}

inline Activation<float> gelu_with_slope(float x) {
  const float square = x * x;
  const float z = square > kGeluCap ? kGeluCap : square;
  return gelu_of(x, z, sigmoid_of_number(gelu_argument(x, z)));
}

// |x| <= kGeluNear.
template <class F>
TBIK_INLINE Activation<F> gelu_near(F x) {
  const F z = x * x;
  return gelu_of(x, z, sigmoid_near(gelu_argument(x, z)));
}

inline float gelu(float x) { return canonical(gelu_with_slope(x).value); }

// C5, of an angle of at most 2^20: the caller refuses others.
inline void sin_cos(float angle, float* sin_a, float* cos_a) {
  const double a = static_cast<double>(angle);
  const double n = __builtin_floor(a * kTwoOverPi + 0.5);
  const float r = static_cast<float>((a - n * kPi2High) - n * kPi2Low);
  const float z = r * r;
  float p = 0x1.7c3d9p-19f;
  p = p * z + -0x1.a05976p-13f;
  p = p * z + 0x1.111174p-7f;
  p = p * z + -0x1.555556p-3f;
  const float s = r + r * (z * p);
  float q = 0x1.99e90ap-16f;
  q = q * z + -0x1.6c0c2ap-10f;
  q = q * z + 0x1.55554ap-5f;
  const float c = 1.0f + ((z * z) * q - 0.5f * z);
  const uint32_t quadrant = static_cast<uint32_t>(static_cast<int32_t>(n)) & 3u;
  const bool odd = (quadrant & 1u) != 0;
  const float sine = odd ? c : s;
  const float cosine = odd ? s : c;
  *sin_a = as_f32(bits(sine) ^ (quadrant >= 2u ? 0x80000000u : 0u));
  *cos_a = as_f32(bits(cosine) ^ (quadrant == 1u || quadrant == 2u ? 0x80000000u : 0u));
}

}  // namespace elementary
}  // namespace
