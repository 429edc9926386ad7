// Four registers side by side: the latency of one hides behind the others. Included by each rows_<isa>.cpp inside its
// own target region and namespace, after convert_loops.h and elementary.h; the file defines floor_vec and
// store_high_halves before. No include guard on purpose; internal linkage.
//
//   Four f(Four): every operation is one IEEE operation per lane, so a formula written once for float and for Four
//                 gives the same bits
//   map_n(y, n, f, x...): y_i = one rounding of f(widened x_i...), NaN canonical
//
// Mode: IEEE. Guarantee: deterministic, element-wise.

#include "row_sum_loops.h"

namespace {

constexpr int64_t kFour = 4 * kWidth;  // lanes of a Four

struct Four {
  Vec a, b, c, d;
};

TBIK_INLINE Four operator+(Four x, Four y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
TBIK_INLINE Four operator-(Four x, Four y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
TBIK_INLINE Four operator*(Four x, Four y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
TBIK_INLINE Four operator/(Four x, Four y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
TBIK_INLINE Four operator+(Four x, float y) { return {x.a + y, x.b + y, x.c + y, x.d + y}; }
TBIK_INLINE Four operator-(Four x, float y) { return {x.a - y, x.b - y, x.c - y, x.d - y}; }
TBIK_INLINE Four operator*(Four x, float y) { return {x.a * y, x.b * y, x.c * y, x.d * y}; }
TBIK_INLINE Four operator+(float x, Four y) { return {x + y.a, x + y.b, x + y.c, x + y.d}; }
TBIK_INLINE Four operator-(float x, Four y) { return {x - y.a, x - y.b, x - y.c, x - y.d}; }
TBIK_INLINE Four operator*(float x, Four y) { return {x * y.a, x * y.b, x * y.c, x * y.d}; }

TBIK_INLINE UVec bits(Vec x) { return reinterpret_cast<UVec>(x); }
TBIK_INLINE Vec as_vec(UVec u) { return reinterpret_cast<Vec>(u); }

TBIK_INLINE Four floor_of(Four x) { return {floor_vec(x.a), floor_vec(x.b), floor_vec(x.c), floor_vec(x.d)}; }

TBIK_INLINE Vec minus_magnitude(Vec x) { return as_vec(bits(x) | 0x80000000u); }
TBIK_INLINE Four minus_magnitude(Four x) {
  return {minus_magnitude(x.a), minus_magnitude(x.b), minus_magnitude(x.c), minus_magnitude(x.d)};
}

TBIK_INLINE Vec times_power_of_two(Vec y, Vec n) {
  return as_vec(bits(y) + (reinterpret_cast<UVec>(__builtin_convertvector(n, IVec)) << 23));
}
TBIK_INLINE Four times_power_of_two(Four y, Four n) {
  return {times_power_of_two(y.a, n.a), times_power_of_two(y.b, n.b), times_power_of_two(y.c, n.c),
          times_power_of_two(y.d, n.d)};
}

TBIK_INLINE Vec where_negative(Vec x, Vec yes, float no) {
  const Vec other = Vec{} + no;
  return reinterpret_cast<IVec>(x) < 0 ? yes : other;
}
TBIK_INLINE Four where_negative(Four x, Four yes, float no) {
  return {where_negative(x.a, yes.a, no), where_negative(x.b, yes.b, no), where_negative(x.c, yes.c, no),
          where_negative(x.d, yes.d, no)};
}

// --- in and out -----------------------------------------------------------------------------------------------------

template <class T>
TBIK_INLINE Four load_four(const T* p) {
  return {widen_vec(p), widen_vec(p + kWidth), widen_vec(p + 2 * kWidth), widen_vec(p + 3 * kWidth)};
}
TBIK_INLINE Four load_four(const F16* p) {
  float wide[kFour];
  for (int64_t i = 0; i < kFour; ++i) wide[i] = widen(p[i]);
  return load_four(static_cast<const float*>(wide));
}

TBIK_INLINE Vec canonical(Vec x) {
  const Vec nan = Vec{} + as_f32(0x7fc00000u);
  return x == x ? x : nan;
}

TBIK_INLINE void store_vec(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }

TBIK_INLINE void store_four(float* p, Four x) {
  store_vec(p, canonical(x.a));
  store_vec(p + kWidth, canonical(x.b));
  store_vec(p + 2 * kWidth, canonical(x.c));
  store_vec(p + 3 * kWidth, canonical(x.d));
}

// The rounded number in the high half of each lane.
TBIK_INLINE UVec bf16_high(Vec x) {
  const UVec u = bits(x);
  const UVec rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const UVec nan = UVec{} + 0x7fc00000u;
  return x == x ? rounded : nan;
}

TBIK_INLINE void store_four(Bf16* p, Four x) {
  store_high_halves(p, bf16_high(x.a), bf16_high(x.b));
  store_high_halves(p + 2 * kWidth, bf16_high(x.c), bf16_high(x.d));
}

TBIK_INLINE void store_four(F16* p, Four x) {
  float wide[kFour];
  store_vec(wide, x.a);
  store_vec(wide + kWidth, x.b);
  store_vec(wide + 2 * kWidth, x.c);
  store_vec(wide + 3 * kWidth, x.d);
  for (int64_t i = 0; i < kFour; ++i) p[i] = narrow<F16>(wide[i]);
}

// One rounding, NaN canonical.
template <class To>
TBIK_INLINE To leave(float x) {
  if constexpr (__is_same(To, float)) return canonical(x);
  return narrow<To>(x);
}

template <class To, class F, class... T>
TBIK_INLINE void map_n(To* __restrict y, int64_t n, F f, const T* __restrict... x) {
  int64_t i = 0;
  for (; i + kFour <= n; i += kFour) store_four(y + i, f(load_four(x + i)...));
  for (; i < n; ++i) y[i] = leave<To>(f(widen(x[i])...));
}

}  // namespace
