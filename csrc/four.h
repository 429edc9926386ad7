// Four registers side by side: the latency of one hides behind the others. Included by each rows_<isa>.cpp inside its
// own target region and namespace, after convert_loops.h and elementary.h; the file defines floor_vec, stream_vec
// and store_high_halves before. No include guard on purpose; internal linkage.
//
//   Four f(Four): every operation is one IEEE operation per lane, so a formula written once for float and for Four
//                 gives the same bits
//   map_n(y, n, f, x...): y_i = one rounding of f(widened x_i...), NaN canonical but for Leave::kCalm
//
// Where every operand and the result are bf16, the lanes of a Four hold pairs of elements apart (load_pairs): nothing
// is moved between lanes on the way in or out.
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

template <bool kPairs = false, class T>
TBIK_INLINE Four load_four(const T* p) {
  if constexpr (kPairs && __is_same(T, Bf16)) {
    Four x;
    load_pairs(p, x.a, x.b);
    load_pairs(p + 2 * kWidth, x.c, x.d);
    return x;
  } else if constexpr (__is_same(T, F16)) {
    float wide[kFour];
    for (int64_t i = 0; i < kFour; ++i) wide[i] = widen(p[i]);
    return load_four(static_cast<const float*>(wide));
  } else {
    return {widen_vec(p), widen_vec(p + kWidth), widen_vec(p + 2 * kWidth), widen_vec(p + 3 * kWidth)};
  }
}

TBIK_INLINE Vec canonical(Vec x) {
  const Vec nan = Vec{} + as_f32(0x7fc00000u);
  return x == x ? x : nan;
}

TBIK_INLINE void store_vec(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }

// How a result leaves: NaN canonical; or the caller knows that there is no NaN; or moreover past the caches, fp32 from
// a 64-byte boundary on (the caller fences).
enum class Leave : uint8_t { kCanonical, kCalm, kStreamed };

// The rounded number in the high half of each lane.
template <Leave kLeave>
TBIK_INLINE UVec bf16_high(Vec x) {
  const UVec u = bits(x);
  UVec rounded;
  if constexpr (kWidth < 16) {
    // u + 0x7fff + bit 16, by a comparison: some CPUs shift on one port only
    const UVec even = reinterpret_cast<UVec>((u & 0x10000u) == 0u);
    rounded = u + 0x8000u + even;
  } else {
    rounded = u + 0x7fffu + ((u >> 16) & 1u);
  }
  if constexpr (kLeave != Leave::kCanonical) return rounded;
  const UVec nan = UVec{} + 0x7fc00000u;
  return x == x ? rounded : nan;
}

template <Leave kLeave>
TBIK_INLINE void store_pairs(Bf16* p, Vec first, Vec second) {
  const UVec u = (bf16_high<kLeave>(first) >> 16) | (bf16_high<kLeave>(second) & 0xffff0000u);
  __builtin_memcpy(p, &u, sizeof(u));
}

template <bool kPairs = false, Leave kLeave = Leave::kCanonical, class T>
TBIK_INLINE void store_four(T* p, Four x) {
  if constexpr (kPairs && __is_same(T, Bf16)) {
    store_pairs<kLeave>(p, x.a, x.b);
    store_pairs<kLeave>(p + 2 * kWidth, x.c, x.d);
  } else if constexpr (__is_same(T, Bf16)) {
    store_high_halves(p, bf16_high<kLeave>(x.a), bf16_high<kLeave>(x.b));
    store_high_halves(p + 2 * kWidth, bf16_high<kLeave>(x.c), bf16_high<kLeave>(x.d));
  } else if constexpr (__is_same(T, F16)) {
    float wide[kFour];
    store_vec(wide, x.a);
    store_vec(wide + kWidth, x.b);
    store_vec(wide + 2 * kWidth, x.c);
    store_vec(wide + 3 * kWidth, x.d);
    for (int64_t i = 0; i < kFour; ++i) p[i] = narrow<F16>(wide[i]);
  } else {
    const auto leave = [](float* to, Vec x) {
      if constexpr (kLeave == Leave::kStreamed) {
        stream_vec(to, x);
      } else {
        store_vec(to, kLeave == Leave::kCalm ? x : canonical(x));
      }
    };
    leave(p, x.a);
    leave(p + kWidth, x.b);
    leave(p + 2 * kWidth, x.c);
    leave(p + 3 * kWidth, x.d);
  }
}

// One rounding, NaN canonical.
template <class To>
TBIK_INLINE To leave(float x) {
  if constexpr (__is_same(To, float)) return canonical(x);
  return narrow<To>(x);
}

template <class... T>
constexpr bool kAllBf16 = (__is_same(T, Bf16) && ...);

template <Leave kLeave = Leave::kCanonical, class To, class F, class... T>
TBIK_INLINE void map_n(To* __restrict y, int64_t n, F f, const T* __restrict... x) {
  constexpr bool kPairs = kAllBf16<To, T...>;
  int64_t i = 0;
  for (; i + kFour <= n; i += kFour) store_four<kPairs, kLeave>(y + i, f(load_four<kPairs>(x + i)...));
  for (; i < n; ++i) y[i] = leave<To>(f(widen(x[i])...));
}

}  // namespace
