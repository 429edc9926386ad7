// The row-wise kernels of one instruction set. Included by each rows_<isa>.cpp inside its own target region and
// namespace (the technique of csrc/combine_loops.h); the file sets kWidth, includes convert_loops.h and defines
// fma_flushed before. No include
// guard on purpose; internal linkage.
//
// Formulas: ORDER.md, section R. Rows are taken to fp32 exactly, computed in fp32, and rounded once when they are
// stored. Mode: IEEE (csrc/fpmode.h), never fused, but for chain_tile, chain_columns and chain_scaled.

#include "elementary.h"
#include "four.h"
#include "philox.h"

namespace {

#define TBIK_MAP(name)                                             \
  void map_##name(float* y, const float* x, int64_t n) {           \
    for (int64_t i = 0; i < n; ++i) y[i] = elementary::name(x[i]); \
  }
TBIK_MAP(exp)
TBIK_MAP(log)
TBIK_MAP(sigmoid)
TBIK_MAP(tanh)
TBIK_MAP(silu)
TBIK_MAP(gelu)
#undef TBIK_MAP

void map_sin_cos(float* sin_a, float* cos_a, const float* angle, int64_t n) {
  for (int64_t i = 0; i < n; ++i) elementary::sin_cos(angle[i], sin_a + i, cos_a + i);
}

float sum_of_row(const float* x, int64_t n, float* sums) { return row_sum<Single>(x, x, n, sums); }
float max_of_row(const float* x, int64_t n) { return row_max(x, n); }

// --- rows in and out ------------------------------------------------------------------------------------------------

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline const char* row_at(const RowsView& x, int64_t row) {
  const int64_t at =
      x.inner == 1 ? row * x.stride_outer : row / x.inner * x.stride_outer + row % x.inner * x.stride_inner;
  return static_cast<const char*>(x.data) + at * bytes_of(x.dtype);
}

template <class From>
inline void widen_n(float* dst, const char* src_, int64_t n) {
  const From* src = reinterpret_cast<const From*>(src_);
  for (int64_t i = 0; i < n; ++i) dst[i] = widen(src[i]);
}

inline void load(float* dst, const char* src, DType dtype, int64_t n) {
  if (dtype == DType::kBFloat16) return widen_n<Bf16>(dst, src, n);
  if (dtype == DType::kFloat16) return widen_n<F16>(dst, src, n);
  __builtin_memcpy(dst, src, static_cast<size_t>(n) * 4);
}

// The row in fp32: where it stands, or in `buffer`.
inline const float* load_row(const RowsView& x, int64_t row, int64_t n, float* buffer) {
  const char* src = row_at(x, row);
  if (x.dtype == DType::kFloat32) return reinterpret_cast<const float*>(src);
  load(buffer, src, x.dtype, n);
  return buffer;
}

inline const float* load_part(const RowsView& x, const char* row, int64_t first, int64_t n, float* buffer) {
  const char* src = row + first * bytes_of(x.dtype);
  if (x.dtype == DType::kFloat32) return reinterpret_cast<const float*>(src);
  load(buffer, src, x.dtype, n);
  return buffer;
}

template <class To>
inline void store_n(void* dst, const float* x, int64_t n) {
  map_n(static_cast<To*>(dst), n, [](auto v) { return v; }, x);
}

void store(void* dst, DType to, const float* x, int64_t n) {
  if (to == DType::kBFloat16) return store_n<Bf16>(dst, x, n);
  if (to == DType::kFloat16) return store_n<F16>(dst, x, n);
  return store_n<float>(dst, x, n);
}

// f(T{}) for the type of the elements.
template <class F>
inline void with_type(DType dtype, const F& f) {
  if (dtype == DType::kBFloat16) return f(Bf16{});
  if (dtype == DType::kFloat16) return f(F16{});
  f(float{});
}

// --- R1, R2, R3: norms ----------------------------------------------------------------------------------------------

// Asks for the lines of p's elements [i, i + 16): a row that the next pass needs, so that memory works while this one
// computes.
template <class T>
TBIK_INLINE void ask_for(const T* p, int64_t i) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  if (i % kLine == 0) __builtin_prefetch(p + i);
}

// The terms of a row's sum, asking for the same elements of another row.
template <class Term, class T>
struct AskingTerms : TermsOf<Term, T> {
  const T* other;
  __attribute__((always_inline)) void lanes(int64_t i, Lanes* out) const {
    ask_for(other, i);
    TermsOf<Term, T>::lanes(i, out);
  }
};

struct Statistics {
  float r;
  float mean;
};

// x: fp32 or bf16 (whose conversion is one or two instructions, cheaper than a pass over memory). SquareTerms:
// TermsOf or AskingTerms, with what it asks for.
template <template <class, class> class SquareTerms = TermsOf, class T, class... Other>
inline Statistics statistics(bool centered, int64_t n, float eps, const T* x, float* sums, Other... other) {
  const float count = static_cast<float>(n);
  float mean = 0.0f;
  float root;
  if (centered) {
    mean = row_sum<Single>(x, x, n, sums) / count;
    row_sums(SquareTerms<CentredSquare, T>{{x, x, {mean}}, other...}, n, sums, &root);
  } else {
    row_sums(SquareTerms<Square, T>{{x, x, {}}, other...}, n, sums, &root);
  }
  return {1.0f / __builtin_sqrtf(root / count + eps), mean};
}

template <class T>
inline bool all_finite(const T* x, int64_t n) {
  uint32_t special = 0;
  for (int64_t i = 0; i < n; ++i) special |= (bits(widen(x[i])) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  return special == 0;
}

// 1/r^2 is the mean of finite squares, so every element is finite and at most 2^64 away from the mean, and times r at
// most 2^124: where w and bias are finite, too, no operation of a row gives NaN.
inline bool is_calm(Statistics s) { return s.r > 0.0f && s.r <= 0x1p60f && s.mean - s.mean == 0.0f; }

template <class To>
inline Leave leave_of(bool calm, bool stream) {
  if (!calm) return Leave::kCanonical;
  return stream && __is_same(To, float) ? Leave::kStreamed : Leave::kCalm;
}

template <Leave kHow>
struct How {
  static constexpr Leave kLeave = kHow;
};

// f(How<leave>{}); only fp32 is streamed.
template <class To, class F>
inline void with_leave(Leave leave, const F& f) {
  if constexpr (__is_same(To, float)) {
    if (leave == Leave::kStreamed) return f(How<Leave::kStreamed>{});
  }
  if (leave == Leave::kCalm) return f(How<Leave::kCalm>{});
  f(How<Leave::kCanonical>{});
}

// y = ((x - mean) r) w + bias
template <Leave kLeave, class To, class T, class W>
inline void norm_leave(const NormArgs& args, To* y, const T* x, Statistics s) {
  const W* w = static_cast<const W*>(args.w);
  const W* bias = static_cast<const W*>(args.bias);
  const float r = s.r;
  const float mean = s.mean;
  if (args.centered) {
    if (bias != nullptr) {
      map_n<kLeave>(y, args.length, [=](auto x, auto w, auto b) { return ((x - mean) * r) * w + b; }, x, w, bias);
    } else {
      map_n<kLeave>(y, args.length, [=](auto x, auto w) { return ((x - mean) * r) * w; }, x, w);
    }
  } else {
    map_n<kLeave>(y, args.length, [=](auto x, auto w) { return (x * r) * w; }, x, w);
  }
}

template <class W, class T>
inline void norm_rows(const NormArgs& args, int64_t first, int64_t last, float* scratch) {
  const int64_t n = args.length;
  float* sums = scratch + n + 16;
  const W* w = static_cast<const W*>(args.w);
  const W* bias = static_cast<const W*>(args.bias);
  constexpr int64_t kWorthwhile = 4;  // rows for which a reading of w pays
  const bool finite = last - first >= kWorthwhile && all_finite(w, n) && (bias == nullptr || all_finite(bias, n));
  for (int64_t row = first; row < last; ++row) {
    const T* x = reinterpret_cast<const T*>(row_at(args.x, row));
    if (args.residual.data != nullptr) {
      // h = (type of x)(x + residual), stored and read again
      T* h = static_cast<T*>(args.sum) + row * n;
      const T* residual = reinterpret_cast<const T*>(row_at(args.residual, row));
      map_n(h, n, [](auto a, auto b) { return a + b; }, x, residual);
      x = h;
    }
    T* y = static_cast<T*>(args.y) + row * n;
    if constexpr (__is_same(T, F16)) {
      const float* wide = scratch;
      widen_n<F16>(scratch, reinterpret_cast<const char*>(x), n);
      norm_leave<Leave::kCanonical, T, float, W>(args, y, wide, statistics(args.centered, n, args.eps, wide, sums));
    } else {
      const Statistics s = statistics(args.centered, n, args.eps, x, sums);
      const Leave leave = leave_of<T>(finite && is_calm(s), args.stream);
      with_leave<T>(leave, [&](auto how) { norm_leave<decltype(how)::kLeave, T, T, W>(args, y, x, s); });
    }
  }
}

void norm_forward(const NormArgs& args, int64_t first, int64_t last, float* scratch) {
  with_type(args.x.dtype, [&](auto t) {
    using T = decltype(t);
    if (args.w_dtype == DType::kBFloat16) return norm_rows<Bf16, T>(args, first, last, scratch);
    norm_rows<float, T>(args, first, last, scratch);
  });
}

// The terms of row_sum(g n) and, centered, row_sum(g); g = dy w, n = (x - mean) r.
template <class T, bool kCentered>
struct GradientTerms {
  static constexpr int kSums = kCentered ? 2 : 1;
  using Element = T;
  const T* x;
  const T* dy;
  const T* w;
  const T* ahead;
  float r;
  float mean;
  __attribute__((always_inline)) void lanes(int64_t i, Lanes* out) const {
    ask_for(ahead, i);
    const Lanes a = load_lanes(x + i);
    const Lanes b = load_lanes(dy + i);
    const Lanes c = load_lanes(w + i);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Vec n = kCentered ? (a.v[v] - mean) * r : a.v[v] * r;
      const Vec g = b.v[v] * c.v[v];
      out[0].v[v] = g * n;
      if constexpr (kCentered) out[1].v[v] = g;
    }
  }
  __attribute__((always_inline)) void one(int64_t i, float* out) const {
    const float n = kCentered ? (widen(x[i]) - mean) * r : widen(x[i]) * r;
    const float g = widen(dy[i]) * widen(w[i]);
    out[0] = g * n;
    if constexpr (kCentered) out[1] = g;
  }
};

// Whether x, dy, w and, where it is wanted, dx have the type T: rows are then read where they stand.
template <class T>
inline bool all_are(const NormArgs& args) {
  constexpr DType kType = __is_same(T, Bf16) ? DType::kBFloat16 : DType::kFloat32;
  const auto is = [&](const void* data, DType dtype) { return data == nullptr || dtype == kType; };
  return is(args.x.data, args.x.dtype) && is(args.dy.data, args.dy.dtype) && is(args.w, args.w_dtype) &&
         is(args.y, args.y_dtype) && is(args.residual.data, args.residual.dtype);
}

template <bool kCentered, class T>
inline RowMeans means_of(const NormArgs& args, const T* x, const T* dy, const T* w, const T* ahead, float* sums) {
  const int64_t n = args.length;
  const Statistics s = statistics<AskingTerms>(kCentered, n, args.eps, x, sums, dy);
  RowMeans means{s.r, s.mean, 0.0f, 0.0f};
  if (args.y != nullptr) {
    const float count = static_cast<float>(n);
    float roots[2] = {};
    row_sums(GradientTerms<T, kCentered>{x, dy, w, ahead, s.r, s.mean}, n, sums, roots);
    means.c = roots[0] / count;
    if (kCentered) means.c1 = roots[1] / count;
  }
  return means;
}

template <bool kCentered>
inline void norm_means_rows(const NormArgs& args, int64_t first, int64_t last, RowMeans* means, float* scratch) {
  const int64_t n = args.length;
  float* wide_x = scratch;
  float* wide_dy = wide_x + n + 16;
  float* sums = wide_dy + n + 16;
  for (int64_t row = first; row < last; ++row, ++means) {
    const auto in_place = [&](auto t) {
      using T = decltype(t);
      const T* x = reinterpret_cast<const T*>(row_at(args.x, row));
      const T* dy = reinterpret_cast<const T*>(row_at(args.dy, row));
      // A streamed dx must not be in a cache; memory then fetches the next row, which need not be there.
      const bool cached = args.y != nullptr && !args.stream;
      const T* ahead =
          cached ? static_cast<const T*>(args.y) + row * n : reinterpret_cast<const T*>(row_at(args.x, row + 1));
      *means = means_of<kCentered>(args, x, dy, static_cast<const T*>(args.w), ahead, sums);
    };
    if (all_are<Bf16>(args)) {
      in_place(Bf16{});
    } else if (all_are<float>(args)) {
      in_place(float{});
    } else {
      const float* dy = load_row(args.dy, row, n, wide_dy);
      *means =
          means_of<kCentered>(args, load_row(args.x, row, n, wide_x), dy, static_cast<const float*>(args.w), dy, sums);
    }
  }
}

void norm_means(const NormArgs& args, int64_t first, int64_t last, RowMeans* means, float* scratch) {
  (args.centered ? norm_means_rows<true> : norm_means_rows<false>)(args, first, last, means, scratch);
}

// n = (x - mean) r and dx = ((g - c1) - n c) r + residual of a part of one row. kN, kDx: whether they are wanted. The
// lanes of n lie as load_four<true> has them.
template <class T, bool kCentered, bool kN, bool kDx, Leave kLeave>
inline void norm_part(T* __restrict dx, float* __restrict n, const T* __restrict x, const T* __restrict dy,
                      const T* __restrict w, const T* __restrict residual, RowMeans s, int64_t count) {
  constexpr bool kPairs = kAllBf16<T>;
  const auto normed = [=](auto x) { return kCentered ? (x - s.mean) * s.r : x * s.r; };
  const auto gradient = [=](auto dy, auto w, auto n) {
    const auto g = dy * w;
    return ((kCentered ? g - s.c1 : g) - n * s.c) * s.r;
  };
  int64_t i = 0;
  for (; i + kFour <= count; i += kFour) {
    const Four v = normed(load_four<kPairs>(x + i));
    if constexpr (kN) {
      store_vec(n + i, v.a);
      store_vec(n + i + kWidth, v.b);
      store_vec(n + i + 2 * kWidth, v.c);
      store_vec(n + i + 3 * kWidth, v.d);
    }
    if constexpr (kDx) {
      Four d = gradient(load_four<kPairs>(dy + i), load_four<kPairs>(w + i), v);
      if constexpr (kLeave == Leave::kCanonical) {
        if (residual != nullptr) d = d + load_four<kPairs>(residual + i);
      }
      store_four<kPairs, kLeave>(dx + i, d);
    }
  }
  for (; i < count; ++i) {
    const float v = normed(widen(x[i]));
    if constexpr (kN) n[i] = v;
    if constexpr (kDx) {
      float d = gradient(widen(dy[i]), widen(w[i]), v);
      if (residual != nullptr) d = d + widen(residual[i]);
      dx[i] = leave<T>(d);
    }
  }
}

template <bool kCentered, class T>
inline void norm_part_of(bool stream, T* dx, float* n, const T* x, const T* dy, const T* w, const T* residual,
                         RowMeans s, int64_t count) {
  if (dx == nullptr) {
    return norm_part<T, kCentered, true, false, Leave::kCalm>(dx, n, x, dy, w, residual, s, count);
  }
  // c is the sum of all g n, so they are finite; c1 is too small to make g infinite, n c is subtracted once: no NaN.
  const auto small = [](float c) { return c <= 0x1p60f && c >= -0x1p60f; };
  const bool calm = residual == nullptr && is_calm({s.r, s.mean}) && small(s.c) && small(s.c1);
  with_leave<T>(leave_of<T>(calm, stream), [&](auto how) {
    constexpr Leave kLeave = decltype(how)::kLeave;
    if (n == nullptr) return norm_part<T, kCentered, false, true, kLeave>(dx, n, x, dy, w, residual, s, count);
    norm_part<T, kCentered, true, true, kLeave>(dx, n, x, dy, w, residual, s, count);
  });
}

template <class T>
inline const T* part_at(const RowsView& x, int64_t row, int64_t column) {
  return x.data != nullptr ? reinterpret_cast<const T*>(row_at(x, row)) + column : nullptr;
}

template <bool kCentered, class T>
inline void norm_tile_of(const NormArgs& args, const NormTile& tile) {
  const T* w = static_cast<const T*>(args.w);
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t row = tile.row + i * tile.step;
    T* dx = args.y != nullptr ? static_cast<T*>(args.y) + row * args.length + tile.column : nullptr;
    float* normed = tile.normed != nullptr ? tile.normed + i * tile.width : nullptr;
    norm_part_of<kCentered>(args.stream, dx, normed, part_at<T>(args.x, row, tile.column),
                            part_at<T>(args.dy, row, tile.column), w != nullptr ? w + tile.column : nullptr,
                            part_at<T>(args.residual, row, tile.column), tile.means[i * tile.step], tile.width);
  }
}

// Operands of several types, or fp16: in fp32 first.
template <bool kCentered>
inline void norm_tile_mixed(const NormArgs& args, const NormTile& tile) {
  float x[kTileColumns];
  float dx[kTileColumns];
  float residual[kTileColumns];
  const float* w = static_cast<const float*>(args.w);
  const auto part = [&](const RowsView& rows, int64_t row, float* buffer) -> const float* {
    if (rows.data == nullptr) return nullptr;
    return load_part(rows, row_at(rows, row), tile.column, tile.width, buffer);
  };
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t row = tile.row + i * tile.step;
    const float* dy = part(args.dy, row, tile.wide + i * tile.width);
    if (args.y == nullptr && tile.normed == nullptr) continue;
    float* normed = tile.normed != nullptr ? tile.normed + i * tile.width : nullptr;
    norm_part_of<kCentered>(false, args.y != nullptr ? dx : nullptr, normed, part(args.x, row, x), dy,
                            w != nullptr ? w + tile.column : nullptr, part(args.residual, row, residual),
                            tile.means[i * tile.step], tile.width);
    if (args.y == nullptr) continue;
    store(static_cast<char*>(args.y) + (row * args.length + tile.column) * bytes_of(args.y_dtype), args.y_dtype, dx,
          tile.width);
  }
}

template <bool kCentered>
inline void norm_tile_any(const NormArgs& args, const NormTile& tile) {
  const bool wanted = args.y != nullptr || tile.normed != nullptr;
  if (all_are<Bf16>(args)) return wanted ? norm_tile_of<kCentered, Bf16>(args, tile) : void();
  if (all_are<float>(args)) return wanted ? norm_tile_of<kCentered, float>(args, tile) : void();
  norm_tile_mixed<kCentered>(args, tile);
}

void norm_tile(const NormArgs& args, const NormTile& tile) {
  (args.centered ? norm_tile_any<true> : norm_tile_any<false>)(args, tile);
}

// acc += dy n, ones += dy, row after row; the caller has FTZ and DAZ on where the path needs them.
template <bool kN, bool kOnes, class T>
__attribute__((noinline)) void chain_part(float* __restrict acc, float* __restrict ones, const float* __restrict n,
                                          const T* const* dy, int64_t count, int64_t width) {
  constexpr bool kPairs = kAllBf16<T>;
  int64_t j = 0;
  for (; j + kFour <= width; j += kFour) {
    Four a{};
    Four b{};
    if constexpr (kN) a = load_four(acc + j);
    if constexpr (kOnes) b = load_four(ones + j);
    for (int64_t i = 0; i < count; ++i) {
      const Four d = load_four<kPairs>(dy[i] + j);
      if constexpr (kN) {
        const float* p = n + i * width + j;
        a = {fma_flushed(d.a, load_vec(p), a.a), fma_flushed(d.b, load_vec(p + kWidth), a.b),
             fma_flushed(d.c, load_vec(p + 2 * kWidth), a.c), fma_flushed(d.d, load_vec(p + 3 * kWidth), a.d)};
      }
      if constexpr (kOnes) {
        b = {add_flushed(d.a, b.a), add_flushed(d.b, b.b), add_flushed(d.c, b.c), add_flushed(d.d, b.d)};
      }
    }
    const auto keep = [j](float* to, Four x) {
      store_vec(to + j, x.a);
      store_vec(to + j + kWidth, x.b);
      store_vec(to + j + 2 * kWidth, x.c);
      store_vec(to + j + 3 * kWidth, x.d);
    };
    if constexpr (kN) keep(acc, a);
    if constexpr (kOnes) keep(ones, b);
  }
  for (; j < width; ++j) {
    for (int64_t i = 0; i < count; ++i) {
      const float d = widen(dy[i][j]);
      if constexpr (kN) acc[j] = fma_flushed(d, n[i * width + j], acc[j]);
      if constexpr (kOnes) ones[j] = fma_flushed(d, 1.0f, ones[j]);
    }
  }
}

template <class T>
inline void chain_tile_of(const T* const* dy, const NormTile& tile, float* acc, float* ones) {
  if (acc != nullptr && ones != nullptr) {
    chain_part<true, true>(acc, ones, tile.normed, dy, tile.count, tile.width);
  } else if (acc != nullptr) {
    chain_part<true, false>(acc, ones, tile.normed, dy, tile.count, tile.width);
  } else {
    chain_part<false, true>(acc, ones, tile.normed, dy, tile.count, tile.width);
  }
}

void chain_tile(const NormArgs& args, const NormTile& tile, float* acc, float* ones) {
  const Bf16* pairs[kTileTokens];
  const float* wide[kTileTokens];
  const bool paired = all_are<Bf16>(args);
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t row = tile.row + i * tile.step;
    if (paired) {
      pairs[i] = part_at<Bf16>(args.dy, row, tile.column);
    } else if (args.dy.dtype == DType::kFloat32) {
      wide[i] = part_at<float>(args.dy, row, tile.column);
    } else {
      wide[i] = tile.wide + i * tile.width;
    }
  }
  if (paired) return chain_tile_of<Bf16>(pairs, tile, acc, ones);
  chain_tile_of<float>(wide, tile, acc, ones);
}

void finish_chain(const NormArgs& args, float* acc, int64_t width) {
  if (all_are<Bf16>(args)) {
    for (int64_t j = 0; j + kFour <= width; j += kFour) {
      float lanes[kFour];
      __builtin_memcpy(lanes, acc + j, sizeof(lanes));
      for (int64_t i = 0; i < kFour; ++i) {
        acc[j + i] = lanes[i / (2 * kWidth) * (2 * kWidth) + i % 2 * kWidth + i % (2 * kWidth) / 2];
      }
    }
  }
  for (int64_t j = 0; j < width; ++j) acc[j] = acc[j] + 0.0f;
}

// --- R5, R6: activations --------------------------------------------------------------------------------------------

constexpr int64_t kChunk = 512;

// Whether every |x_i| <= limit; false where there is a NaN. Integers order magnitudes.
inline bool all_within(const float* x, int64_t n, float limit) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits(x[i]) & 0x7fffffffu;
    largest = u > largest ? u : largest;
  }
  return largest <= bits(limit);
}
inline bool all_within(const Bf16* x, int64_t n, float limit) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t u = x[i].u & 0x7fffu;
    largest = u > largest ? u : largest;
  }
  return largest <= bits(limit) >> 16;
}

template <Activation kind>
constexpr float kNearLimit = kind == Activation::kSilu ? elementary::kNear : elementary::kGeluNear;

template <Activation kind, class F>
TBIK_INLINE elementary::Activation<F> activated_near(F x) {
  if constexpr (kind == Activation::kSilu) return elementary::silu_near(x);
  if constexpr (kind == Activation::kGelu) return elementary::gelu_near(x);
}
template <Activation kind>
inline elementary::Activation<float> activated(float x) {
  if constexpr (kind == Activation::kSilu) return elementary::silu_with_slope(x);
  if constexpr (kind == Activation::kGelu) return elementary::gelu_with_slope(x);
}

// One chunk, every |gate| <= kNearLimit.
template <Activation kind, class T>
inline void activate_near(T* y, const T* gate, const T* up, int64_t n) {
  if (up != nullptr) {
    map_n(y, n, [](auto a, auto b) { return activated_near<kind>(a).value * b; }, gate, up);
  } else {
    map_n(y, n, [](auto a) { return activated_near<kind>(a).value; }, gate);
  }
}

template <Activation kind>
inline void activate_rows(const ActivationArgs& args, int64_t first, int64_t last) {
  float a_buffer[kChunk];
  float b_buffer[kChunk];
  float y[kChunk];
  const DType dtype = args.gate.dtype;
  const bool alike = args.y_dtype == dtype && (args.up.data == nullptr || args.up.dtype == dtype);
  for (int64_t row = first; row < last; ++row) {
    const char* gate = row_at(args.gate, row);
    const char* up = args.up.data != nullptr ? row_at(args.up, row) : nullptr;
    char* out = static_cast<char*>(args.y) + row * args.y_stride * bytes_of(args.y_dtype);
    for (int64_t at = 0; at < args.length; at += kChunk) {
      const int64_t n = args.length - at < kChunk ? args.length - at : kChunk;
      if (alike && dtype == DType::kBFloat16) {
        const Bf16* a = reinterpret_cast<const Bf16*>(gate) + at;
        const Bf16* b = up != nullptr ? reinterpret_cast<const Bf16*>(up) + at : nullptr;
        if (all_within(a, n, kNearLimit<kind>)) {
          activate_near<kind>(reinterpret_cast<Bf16*>(out) + at, a, b, n);
          continue;
        }
      }
      const float* a = load_part(args.gate, gate, at, n, a_buffer);
      const float* b = up != nullptr ? load_part(args.up, up, at, n, b_buffer) : nullptr;
      if (all_within(a, n, kNearLimit<kind>)) {
        float* to = args.y_dtype == DType::kFloat32 ? reinterpret_cast<float*>(out) + at : y;
        activate_near<kind>(to, a, b, n);
        if (to != y) continue;
      } else {
        for (int64_t i = 0; i < n; ++i) y[i] = activated<kind>(a[i]).value;
        if (b != nullptr) {
          for (int64_t i = 0; i < n; ++i) y[i] = y[i] * b[i];
        }
      }
      store(out + at * bytes_of(args.y_dtype), args.y_dtype, y, n);
    }
  }
}

void activation(const ActivationArgs& args, int64_t first, int64_t last) {
  if (args.kind == Activation::kSilu) return activate_rows<Activation::kSilu>(args, first, last);
  activate_rows<Activation::kGelu>(args, first, last);
}

// dup = dy f(gate), dgate = (dy up) f'(gate); one chunk, every |gate| <= kNearLimit.
template <Activation kind, class T>
inline void activate_backward_near(T* __restrict dgate, T* __restrict dup, const T* __restrict dy,
                                   const T* __restrict gate, const T* __restrict up, int64_t n) {
  if (up == nullptr) {
    return map_n(dgate, n, [](auto d, auto a) { return d * activated_near<kind>(a).slope; }, dy, gate);
  }
  int64_t i = 0;
  for (; i + kFour <= n; i += kFour) {
    const elementary::Activation<Four> f = activated_near<kind>(load_four<true>(gate + i));
    const Four d = load_four<true>(dy + i);
    store_four<true>(dup + i, d * f.value);
    store_four<true>(dgate + i, (d * load_four<true>(up + i)) * f.slope);
  }
  for (; i < n; ++i) {
    const elementary::Activation<float> f = activated_near<kind>(widen(gate[i]));
    const float d = widen(dy[i]);
    dup[i] = leave<T>(d * f.value);
    dgate[i] = leave<T>((d * widen(up[i])) * f.slope);
  }
}

template <Activation kind>
inline void activate_backward_rows(const ActivationArgs& args, int64_t first, int64_t last) {
  float a_buffer[kChunk];
  float b_buffer[kChunk];
  float d_buffer[kChunk];
  float value[kChunk];
  float slope[kChunk];
  const DType dtype = args.gate.dtype;
  const bool gated = args.up.data != nullptr;
  const bool alike = args.y_dtype == dtype && args.dy.dtype == dtype && (!gated || args.up.dtype == dtype);
  const int64_t size = bytes_of(args.y_dtype);
  for (int64_t row = first; row < last; ++row) {
    const char* gate = row_at(args.gate, row);
    const char* up = gated ? row_at(args.up, row) : nullptr;
    const char* dy = row_at(args.dy, row);
    char* dgate = static_cast<char*>(args.y) + row * args.y_stride * size;
    char* dup = gated ? static_cast<char*>(args.dup) + row * args.y_stride * size : nullptr;
    for (int64_t at = 0; at < args.length; at += kChunk) {
      const int64_t n = args.length - at < kChunk ? args.length - at : kChunk;
      if (alike && dtype == DType::kBFloat16) {
        const Bf16* a = reinterpret_cast<const Bf16*>(gate) + at;
        if (all_within(a, n, kNearLimit<kind>)) {
          activate_backward_near<kind>(
              reinterpret_cast<Bf16*>(dgate) + at, gated ? reinterpret_cast<Bf16*>(dup) + at : nullptr,
              reinterpret_cast<const Bf16*>(dy) + at, a, gated ? reinterpret_cast<const Bf16*>(up) + at : nullptr, n);
          continue;
        }
      }
      const float* a = load_part(args.gate, gate, at, n, a_buffer);
      const float* d = load_part(args.dy, dy, at, n, d_buffer);
      const float* b = gated ? load_part(args.up, up, at, n, b_buffer) : nullptr;
      if (all_within(a, n, kNearLimit<kind>)) {
        const bool in_place = args.y_dtype == DType::kFloat32;
        float* to = in_place ? reinterpret_cast<float*>(dgate) + at : slope;
        float* to_up = in_place && gated ? reinterpret_cast<float*>(dup) + at : value;
        activate_backward_near<kind>(to, to_up, d, a, b, n);
        if (in_place) continue;
      } else {
        for (int64_t i = 0; i < n; ++i) {
          const elementary::Activation<float> f = activated<kind>(a[i]);
          value[i] = f.value;
          slope[i] = f.slope;
        }
        if (gated) {
          for (int64_t i = 0; i < n; ++i) value[i] = d[i] * value[i];
          for (int64_t i = 0; i < n; ++i) slope[i] = (d[i] * b[i]) * slope[i];
        } else {
          for (int64_t i = 0; i < n; ++i) slope[i] = d[i] * slope[i];
        }
      }
      if (gated) store(dup + at * size, args.y_dtype, value, n);
      store(dgate + at * size, args.y_dtype, slope, n);
    }
  }
}

void activation_backward(const ActivationArgs& args, int64_t first, int64_t last) {
  if (args.kind == Activation::kSilu) return activate_backward_rows<Activation::kSilu>(args, first, last);
  activate_backward_rows<Activation::kGelu>(args, first, last);
}

// --- R4: rope -------------------------------------------------------------------------------------------------------

// One head, pairs (i, i + R / 2).
template <class To, class T>
inline void rotate_halves(const RopeArgs& args, To* __restrict y, const T* __restrict x, const float* __restrict s,
                          const float* __restrict c) {
  const int64_t half = args.rotary / 2;
  int64_t i = 0;
  for (; i + kFour <= half; i += kFour) {
    const Four x1 = load_four(x + i);
    const Four x2 = load_four(x + half + i);
    const Four sine = load_four(s + i);
    const Four cosine = load_four(c + i);
    store_four(y + i, x1 * cosine - x2 * sine);
    store_four(y + half + i, x2 * cosine + x1 * sine);
  }
  for (; i < half; ++i) {
    const float x1 = widen(x[i]);
    const float x2 = widen(x[half + i]);
    y[i] = leave<To>(x1 * c[i] - x2 * s[i]);
    y[half + i] = leave<To>(x2 * c[i] + x1 * s[i]);
  }
  for (i = args.rotary; i < args.dim; ++i) y[i] = leave<To>(widen(x[i]));
}

// One head, pairs (2i, 2i + 1).
inline void rotate_pairs(const RopeArgs& args, float* y, const float* x, const float* s, const float* c) {
  for (int64_t i = 0; i < args.rotary / 2; ++i) {
    const float x1 = x[2 * i];
    const float x2 = x[2 * i + 1];
    y[2 * i] = x1 * c[i] - x2 * s[i];
    y[2 * i + 1] = x2 * c[i] + x1 * s[i];
  }
  for (int64_t i = args.rotary; i < args.dim; ++i) y[i] = x[i];
}

void rope(const RopeArgs& args, int64_t first, int64_t last, float* scratch) {
  const int64_t dim = args.dim;
  const int64_t half = args.rotary / 2;
  float* x = scratch;
  float* y = x + dim;
  float* minus = y + dim;
  for (int64_t token = first; token < last; ++token) {
    const float* s = reinterpret_cast<const float*>(row_at(args.sin, token));
    const float* c = reinterpret_cast<const float*>(row_at(args.cos, token));
    if (args.backward) {
      for (int64_t i = 0; i < half; ++i) minus[i] = -s[i];
      s = minus;
    }
    for (int64_t row = token * args.heads; row < (token + 1) * args.heads; ++row) {
      const char* src = row_at(args.x, row);
      char* dst = static_cast<char*>(args.y) + row * dim * bytes_of(args.y_dtype);
      if (args.interleaved) {
        load(x, src, args.x.dtype, dim);
        rotate_pairs(args, y, x, s, c);
        store(dst, args.y_dtype, y, dim);
      } else {
        with_type(args.y_dtype, [&](auto to) {
          with_type(args.x.dtype, [&](auto from) {
            using To = decltype(to);
            using T = decltype(from);
            rotate_halves(args, reinterpret_cast<To*>(dst), reinterpret_cast<const T*>(src), s, c);
          });
        });
      }
    }
  }
}

// --- R9: dropout ----------------------------------------------------------------------------------------------------

void dropout(const DropoutArgs& args, int64_t first, int64_t last) {
  constexpr int64_t kGroups = 64;
  uint32_t words[kGroups * 4];
  float buffer[kGroups * 4];
  float y[kGroups * 4];
  for (int64_t row = first; row < last; ++row) {
    const char* x = row_at(args.x, row);
    char* out = static_cast<char*>(args.y) + row * args.length * bytes_of(args.y_dtype);
    for (int64_t at = 0; at < args.length;) {
      const int64_t feature = args.first_feature + at;
      const int64_t skip = feature % 4;
      const uint32_t group = static_cast<uint32_t>(feature / 4);
      for (int64_t g = 0; g < kGroups; ++g) {
        const Words w =
            philox(group + static_cast<uint32_t>(g), args.position[row], args.sample[row], 0, args.key[0], args.key[1]);
        for (int i = 0; i < 4; ++i) words[4 * g + i] = w.w[i];
      }
      int64_t n = kGroups * 4 - skip;
      if (args.length - at < n) n = args.length - at;
      const float* v = load_part(args.x, x, at, n, buffer);
      for (int64_t i = 0; i < n; ++i) y[i] = words[skip + i] >= args.threshold ? v[i] * args.scale : 0.0f;
      store(out + at * bytes_of(args.y_dtype), args.y_dtype, y, n);
      at += n;
    }
  }
}

// --- R7, R8: embedding, sums ----------------------------------------------------------------------------------------

// y = x with NaN canonical, rounded once where the type changes. bf16 to itself stays in 16-bit lanes.
template <class To, class T>
inline void copy_canonical(To* __restrict y, const T* __restrict x, int64_t n) {
  if constexpr (__is_same(To, Bf16) && __is_same(T, Bf16)) {
    for (int64_t i = 0; i < n; ++i) {
      const uint16_t u = x[i].u;
      y[i].u = (u & 0x7fffu) > 0x7f80u ? uint16_t{0x7fc0} : u;
    }
  } else {
    map_n(y, n, [](auto v) { return v; }, x);
  }
}

template <class To, class T>
inline void look_up_rows(To* y, const RowsView& w, int64_t num_rows, int64_t length, const int64_t* id,
                         int64_t first_row, int64_t first, int64_t last) {
  constexpr int64_t kAhead = 4;  // rows are asked for before their turn: they lie anywhere
  constexpr int64_t kLine = 64;
  for (int64_t t = first; t < last; ++t) {
    if (t + kAhead < last) {
      const int64_t next = id[t + kAhead] - first_row;
      if (next >= 0 && next < num_rows) {
        const char* line = row_at(w, next);
        const int64_t bytes = length * static_cast<int64_t>(sizeof(T));
        for (int64_t at = 0; at < bytes && at < 16 * kLine; at += kLine) __builtin_prefetch(line + at);
      }
    }
    const int64_t row = id[t] - first_row;
    To* to = y + t * length;
    if (row >= 0 && row < num_rows) {
      copy_canonical(to, reinterpret_cast<const T*>(row_at(w, row)), length);
    } else {
      for (int64_t i = 0; i < length; ++i) to[i] = narrow<To>(-0.0f);
    }
  }
}

void look_up(void* y, DType to, const RowsView& w, int64_t num_rows, int64_t length, const int64_t* id,
             int64_t first_row, int64_t first, int64_t last) {
  with_type(to, [&](auto a) {
    with_type(w.dtype, [&](auto b) {
      using To = decltype(a);
      using T = decltype(b);
      look_up_rows<To, T>(static_cast<To*>(y), w, num_rows, length, id, first_row, first, last);
    });
  });
}

void sum_leaves(float* values, const RowsView& x, int64_t first, int64_t last, int64_t stride, const int64_t* cuts,
                int64_t leaves, float* scratch) {
  const int64_t n = cuts[leaves] - cuts[0];
  float* sums = scratch + n + 16;
  for (int64_t row = first; row < last; ++row) {
    const char* at = row_at(x, row);
    const float* wide = reinterpret_cast<const float*>(at);
    if (x.dtype == DType::kFloat16) {
      widen_n<F16>(scratch, at + cuts[0] * 2, n);
      wide = scratch - cuts[0];
    }
    for (int64_t leaf = 0; leaf < leaves; ++leaf) {
      const int64_t begin = cuts[leaf];
      const int64_t count = cuts[leaf + 1] - begin;
      if (x.dtype == DType::kBFloat16) {
        const Bf16* part = reinterpret_cast<const Bf16*>(at) + begin;
        values[leaf * stride + row] = row_sum<Single>(part, part, count, sums);
      } else {
        values[leaf * stride + row] = row_sum<Single>(wide + begin, wide + begin, count, sums);
      }
    }
  }
}

// --- parameter gradients, fan-in ------------------------------------------------------------------------------------

void load_tile(float* dst, const RowsView& x, int64_t row, int64_t step, int64_t count, int64_t column, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    load(dst + i * width, row_at(x, row + i * step) + column * bytes_of(x.dtype), x.dtype, width);
  }
}

__attribute__((noinline)) void chain_columns(float* acc, const float* a, const float* b, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i, a += width) {
    if (b != nullptr) {
      for (int64_t j = 0; j < width; ++j) acc[j] = fma_flushed(a[j], b[j], acc[j]);
      b += width;
    } else {
      for (int64_t j = 0; j < width; ++j) acc[j] = fma_flushed(a[j], 1.0f, acc[j]);
    }
  }
}

__attribute__((noinline)) void chain_scaled(float* acc, const float* const* a, const float* scale, int64_t count,
                                            int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    const float* x = a[i];
    const float s = scale[i];
    for (int64_t j = 0; j < width; ++j) acc[j] = fma_flushed(s, x[j], acc[j]);
  }
}

template <class T>
inline void sum_inputs_n(T* dst, const void* const* inputs, int64_t n, int64_t begin, int64_t end) {
  float acc[kChunk];
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t count = end - at < kChunk ? end - at : kChunk;
    const T* first = static_cast<const T*>(inputs[0]) + at;
    for (int64_t i = 0; i < count; ++i) acc[i] = widen(first[i]);
    for (int64_t k = 1; k < n; ++k) {
      const T* x = static_cast<const T*>(inputs[k]) + at;
      for (int64_t i = 0; i < count; ++i) acc[i] = acc[i] + widen(x[i]);
    }
    for (int64_t i = 0; i < count; ++i) dst[at + i] = leave<T>(acc[i]);
  }
}

void sum_inputs(void* dst, DType dtype, const void* const* inputs, int64_t n, int64_t begin, int64_t end) {
  if (dtype == DType::kBFloat16) return sum_inputs_n(static_cast<Bf16*>(dst), inputs, n, begin, end);
  if (dtype == DType::kFloat16) return sum_inputs_n(static_cast<F16*>(dst), inputs, n, begin, end);
  return sum_inputs_n(static_cast<float*>(dst), inputs, n, begin, end);
}

constexpr Rows make_rows(const char* name, bool hardware_flush) {
  return {.name = name,
          .hardware_flush = hardware_flush,
          .exp = map_exp,
          .log = map_log,
          .sigmoid = map_sigmoid,
          .tanh = map_tanh,
          .silu = map_silu,
          .gelu = map_gelu,
          .sin_cos = map_sin_cos,
          .row_sum = sum_of_row,
          .row_max = max_of_row,
          .norm_forward = norm_forward,
          .norm_means = norm_means,
          .norm_tile = norm_tile,
          .chain_tile = chain_tile,
          .finish_chain = finish_chain,
          .activation = activation,
          .activation_backward = activation_backward,
          .rope = rope,
          .dropout = dropout,
          .load_tile = load_tile,
          .sum_leaves = sum_leaves,
          .look_up = look_up,
          .chain_columns = chain_columns,
          .chain_scaled = chain_scaled,
          .store = store,
          .sum_inputs = sum_inputs};
}

}  // namespace
