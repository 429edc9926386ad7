// The row-wise kernels of one instruction set. Included by each rows_<isa>.cpp inside its own target region and
// namespace (the technique of csrc/combine_loops.h); the file sets kWidth, includes convert_loops.h and defines
// fma_flushed before. No include
// guard on purpose; internal linkage.
//
// Formulas: ORDER.md, section R. Rows are taken to fp32 exactly, computed in fp32, and rounded once when they are
// stored. Mode: IEEE (csrc/fpmode.h), never fused, but for chain_columns and chain_scaled.

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

struct Statistics {
  float r;
  float mean;
};

// x: fp32 or bf16 (whose conversion is one shift, cheaper than a pass over memory).
template <class T>
inline Statistics statistics(const NormArgs& args, const T* x, float* sums) {
  const int64_t n = args.length;
  const float count = static_cast<float>(n);
  float mean = 0.0f;
  float root;
  if (args.centered) {
    mean = row_sum<Single>(x, x, n, sums) / count;
    root = row_sum(x, x, n, sums, CentredSquare{mean});
  } else {
    root = row_sum<Square>(x, x, n, sums);
  }
  return {1.0f / __builtin_sqrtf(root / count + args.eps), mean};
}

// y = ((x - mean) r) w + bias
template <class To, class T, class W>
inline void norm_leave(const NormArgs& args, To* y, const T* x, Statistics s) {
  const W* w = static_cast<const W*>(args.w);
  const W* bias = static_cast<const W*>(args.bias);
  const float r = s.r;
  const float mean = s.mean;
  if (args.centered) {
    if (bias != nullptr) {
      map_n(y, args.length, [=](auto x, auto w, auto b) { return ((x - mean) * r) * w + b; }, x, w, bias);
    } else {
      map_n(y, args.length, [=](auto x, auto w) { return ((x - mean) * r) * w; }, x, w);
    }
  } else {
    map_n(y, args.length, [=](auto x, auto w) { return (x * r) * w; }, x, w);
  }
}

template <class To, class T>
inline void norm_row(const NormArgs& args, To* y, const T* x, float* sums) {
  const Statistics s = statistics(args, x, sums);
  if (args.w_dtype == DType::kBFloat16) return norm_leave<To, T, Bf16>(args, y, x, s);
  norm_leave<To, T, float>(args, y, x, s);
}

template <class T>
inline void norm_rows(const NormArgs& args, int64_t first, int64_t last, float* scratch) {
  const int64_t n = args.length;
  float* sums = scratch + n + 16;
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
      widen_n<F16>(scratch, reinterpret_cast<const char*>(x), n);
      norm_row(args, y, static_cast<const float*>(scratch), sums);
    } else {
      norm_row(args, y, x, sums);
    }
  }
}

void norm_forward(const NormArgs& args, int64_t first, int64_t last, float* scratch) {
  with_type(args.x.dtype, [&](auto t) { norm_rows<decltype(t)>(args, first, last, scratch); });
}

// Of a row of any type; `wide`: memory for it in fp32.
inline Statistics statistics_of(const NormArgs& args, int64_t row, float* wide, float* sums) {
  if (args.x.dtype == DType::kBFloat16) {
    return statistics(args, reinterpret_cast<const Bf16*>(row_at(args.x, row)), sums);
  }
  return statistics(args, load_row(args.x, row, args.length, wide), sums);
}

void norm_statistics(const NormArgs& args, int64_t first, int64_t last, float* r, float* mean, float* scratch) {
  for (int64_t row = first; row < last; ++row) {
    const Statistics s = statistics_of(args, row, scratch, scratch + args.length + 16);
    r[row] = s.r;
    if (args.centered) mean[row] = s.mean;
  }
}

template <class T, class W>
inline void norm_terms(const NormArgs& args, float* __restrict normed, float* __restrict g, const T* __restrict x,
                       const T* __restrict dy, const W* __restrict w, Statistics s) {
  const int64_t n = args.length;
  if (args.centered) {
    for (int64_t i = 0; i < n; ++i) normed[i] = (widen(x[i]) - s.mean) * s.r;
  } else {
    for (int64_t i = 0; i < n; ++i) normed[i] = widen(x[i]) * s.r;
  }
  for (int64_t i = 0; i < n; ++i) g[i] = widen(dy[i]) * widen(w[i]);
}

template <class To, class R>
inline void norm_dx_leave(To* dx, const float* g, const float* normed, const R* residual, float c1, float c, float r,
                          bool centered, int64_t n) {
  if (centered) {
    map_n(dx, n, [=](auto g, auto x) { return ((g - c1) - x * c) * r; }, g, normed);
  } else if (residual != nullptr) {
    map_n(dx, n, [=](auto g, auto x, auto h) { return (g - x * c) * r + h; }, g, normed, residual);
  } else {
    map_n(dx, n, [=](auto g, auto x) { return (g - x * c) * r; }, g, normed);
  }
}

void norm_backward(const NormArgs& args, int64_t first, int64_t last, float* scratch) {
  const int64_t n = args.length;
  const float count = static_cast<float>(n);
  float* normed = scratch;
  float* g = normed + n + 16;
  float* third = g + n + 16;
  float* sums = third + n + 16;
  for (int64_t row = first; row < last; ++row) {
    Statistics s;
    if (args.stored_r != nullptr) {
      s = {args.stored_r[row], args.centered ? args.stored_mean[row] : 0.0f};
    } else {
      s = statistics_of(args, row, third, sums);
    }
    const float* w = static_cast<const float*>(args.w);
    if (args.x.dtype == DType::kBFloat16 && args.dy.dtype == DType::kBFloat16) {
      const Bf16* x = reinterpret_cast<const Bf16*>(row_at(args.x, row));
      norm_terms(args, normed, g, x, reinterpret_cast<const Bf16*>(row_at(args.dy, row)), w, s);
    } else {
      const float* x = load_row(args.x, row, n, third);
      norm_terms(args, normed, g, x, load_row(args.dy, row, n, g), w, s);
    }
    const float c1 = args.centered ? row_sum<Single>(g, g, n, sums) / count : 0.0f;
    const float c = row_sum<Product>(g, normed, n, sums) / count;
    const float* residual = args.residual.data != nullptr ? load_row(args.residual, row, n, third) : nullptr;
    char* dx = static_cast<char*>(args.y) + row * n * bytes_of(args.y_dtype);
    with_type(args.y_dtype, [&](auto t) {
      norm_dx_leave(reinterpret_cast<decltype(t)*>(dx), g, normed, residual, c1, c, s.r, args.centered, n);
    });
  }
}

// --- R5, R6: activations --------------------------------------------------------------------------------------------

constexpr int64_t kChunk = 512;

inline const float* load_part(const RowsView& x, const char* row, int64_t first, int64_t n, float* buffer) {
  const char* src = row + first * bytes_of(x.dtype);
  if (x.dtype == DType::kFloat32) return reinterpret_cast<const float*>(src);
  load(buffer, src, x.dtype, n);
  return buffer;
}

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
    const elementary::Activation<Four> f = activated_near<kind>(load_four(gate + i));
    const Four d = load_four(dy + i);
    store_four(dup + i, d * f.value);
    store_four(dgate + i, (d * load_four(up + i)) * f.slope);
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

void scale_tile(float* tile, const float* r, const float* mean, int64_t row, int64_t step, int64_t count,
                int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    float* x = tile + i * width;
    const float scale = r[row + i * step];
    if (mean != nullptr) {
      const float m = mean[row + i * step];
      for (int64_t j = 0; j < width; ++j) x[j] = (x[j] - m) * scale;
    } else {
      for (int64_t j = 0; j < width; ++j) x[j] = x[j] * scale;
    }
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
          .norm_backward = norm_backward,
          .norm_statistics = norm_statistics,
          .activation = activation,
          .activation_backward = activation_backward,
          .rope = rope,
          .dropout = dropout,
          .load_tile = load_tile,
          .scale_tile = scale_tile,
          .sum_leaves = sum_leaves,
          .look_up = look_up,
          .chain_columns = chain_columns,
          .chain_scaled = chain_scaled,
          .store = store,
          .sum_inputs = sum_inputs};
}

}  // namespace
