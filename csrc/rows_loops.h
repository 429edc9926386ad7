// The row-wise kernels of one instruction set. Included by each rows_<isa>.cpp inside its own target region and
// namespace (the technique of csrc/combine_loops.h); the file sets kWidth, includes convert_loops.h and defines
// fma_flushed before. No include
// guard on purpose; internal linkage.
//
// Formulas: ORDER.md, section R. Rows are taken to fp32 exactly, computed in fp32, and rounded once when they are
// stored. Mode: IEEE (csrc/fpmode.h), never fused, but for chain_columns.

#include "elementary.h"
#include "philox.h"
#include "row_sum_loops.h"

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

// One rounding, NaN canonical.
template <class To>
inline To leave(float x) {
  if constexpr (__is_same(To, float)) return canonical(x);
  return narrow<To>(x);
}

template <class To>
inline void store_n(void* dst_, const float* x, int64_t n) {
  To* dst = static_cast<To*>(dst_);
  for (int64_t i = 0; i < n; ++i) dst[i] = leave<To>(x[i]);
}

void store(void* dst, DType to, const float* x, int64_t n) {
  if (to == DType::kBFloat16) return store_n<Bf16>(dst, x, n);
  if (to == DType::kFloat16) return store_n<F16>(dst, x, n);
  return store_n<float>(dst, x, n);
}

// --- R1, R2, R3: norms ----------------------------------------------------------------------------------------------

struct Statistics {
  float r;
  float mean;
};

// centered: n_i = x_i - mean is left in `buffer`.
inline Statistics statistics(const NormArgs& args, const float* x, float* buffer, float* sums) {
  const int64_t n = args.length;
  const float count = static_cast<float>(n);
  float mean = 0.0f;
  float root;
  if (args.centered) {
    mean = row_sum<Single>(x, x, n, sums) / count;
    for (int64_t i = 0; i < n; ++i) buffer[i] = x[i] - mean;
    root = row_sum<Product>(buffer, buffer, n, sums);
  } else {
    root = row_sum<Product>(x, x, n, sums);
  }
  return {1.0f / __builtin_sqrtf(root / count + args.eps), mean};
}

template <class To>
inline void norm_leave(const NormArgs& args, void* dst_, const float* x, float r) {
  To* dst = static_cast<To*>(dst_);
  const float* w = args.w;
  const float* bias = args.bias;
  if (bias != nullptr) {
    for (int64_t i = 0; i < args.length; ++i) dst[i] = leave<To>((x[i] * r) * w[i] + bias[i]);
  } else {
    for (int64_t i = 0; i < args.length; ++i) dst[i] = leave<To>((x[i] * r) * w[i]);
  }
}

// h = (type of x)(x + residual), stored and read again.
template <class T>
inline void add_rows(T* h, const char* x_, const char* residual_, float* wide, int64_t n) {
  const T* x = reinterpret_cast<const T*>(x_);
  const T* residual = reinterpret_cast<const T*>(residual_);
  for (int64_t i = 0; i < n; ++i) {
    const T sum = leave<T>(widen(x[i]) + widen(residual[i]));
    h[i] = sum;
    wide[i] = widen(sum);
  }
}

void norm_forward(const NormArgs& args, int64_t first, int64_t last, float* scratch) {
  const int64_t n = args.length;
  float* wide = scratch;
  float* centered = wide + n + 16;
  float* sums = centered + n + 16;
  for (int64_t row = first; row < last; ++row) {
    const float* x;
    if (args.residual.data != nullptr) {
      char* h = static_cast<char*>(args.sum) + row * n * bytes_of(args.x.dtype);
      const char* a = row_at(args.x, row);
      const char* b = row_at(args.residual, row);
      if (args.x.dtype == DType::kBFloat16) add_rows(reinterpret_cast<Bf16*>(h), a, b, wide, n);
      if (args.x.dtype == DType::kFloat16) add_rows(reinterpret_cast<F16*>(h), a, b, wide, n);
      if (args.x.dtype == DType::kFloat32) add_rows(reinterpret_cast<float*>(h), a, b, wide, n);
      x = wide;
    } else {
      x = load_row(args.x, row, n, wide);
    }
    const Statistics s = statistics(args, x, centered, sums);
    if (args.centered) x = centered;
    char* y = static_cast<char*>(args.y) + row * n * bytes_of(args.y_dtype);
    if (args.y_dtype == DType::kBFloat16) norm_leave<Bf16>(args, y, x, s.r);
    if (args.y_dtype == DType::kFloat16) norm_leave<F16>(args, y, x, s.r);
    if (args.y_dtype == DType::kFloat32) norm_leave<float>(args, y, x, s.r);
  }
}

void norm_statistics(const NormArgs& args, int64_t first, int64_t last, float* r, float* mean, float* scratch) {
  const int64_t n = args.length;
  float* centered = scratch + n + 16;
  for (int64_t row = first; row < last; ++row) {
    const float* x = load_row(args.x, row, n, scratch);
    const Statistics s = statistics(args, x, centered, centered + n + 16);
    r[row] = s.r;
    if (args.centered) mean[row] = s.mean;
  }
}

template <class To>
inline void norm_dx_leave(void* dst_, const float* g, const float* normed, const float* residual, float c1, float c,
                          float r, bool centered, int64_t n) {
  To* dst = static_cast<To*>(dst_);
  if (centered) {
    for (int64_t i = 0; i < n; ++i) dst[i] = leave<To>(((g[i] - c1) - normed[i] * c) * r);
  } else if (residual != nullptr) {
    for (int64_t i = 0; i < n; ++i) dst[i] = leave<To>((g[i] - normed[i] * c) * r + residual[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = leave<To>((g[i] - normed[i] * c) * r);
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
    const float* x = load_row(args.x, row, n, third);
    const Statistics s = statistics(args, x, normed, sums);
    if (args.centered) x = normed;
    for (int64_t i = 0; i < n; ++i) normed[i] = x[i] * s.r;
    const float* dy = load_row(args.dy, row, n, g);
    for (int64_t i = 0; i < n; ++i) g[i] = dy[i] * args.w[i];
    const float c1 = args.centered ? row_sum<Single>(g, g, n, sums) / count : 0.0f;
    const float c = row_sum<Product>(g, normed, n, sums) / count;
    const float* residual = args.residual.data != nullptr ? load_row(args.residual, row, n, third) : nullptr;
    char* dx = static_cast<char*>(args.y) + row * n * bytes_of(args.y_dtype);
    if (args.y_dtype == DType::kBFloat16) norm_dx_leave<Bf16>(dx, g, normed, residual, c1, c, s.r, args.centered, n);
    if (args.y_dtype == DType::kFloat16) norm_dx_leave<F16>(dx, g, normed, residual, c1, c, s.r, args.centered, n);
    if (args.y_dtype == DType::kFloat32) norm_dx_leave<float>(dx, g, normed, residual, c1, c, s.r, args.centered, n);
  }
}

// --- R5, R6: activations --------------------------------------------------------------------------------------------

constexpr int64_t kChunk = 1024;

inline const float* load_part(const RowsView& x, const char* row, int64_t first, int64_t n, float* buffer) {
  const char* src = row + first * bytes_of(x.dtype);
  if (x.dtype == DType::kFloat32) return reinterpret_cast<const float*>(src);
  load(buffer, src, x.dtype, n);
  return buffer;
}

void activation(const ActivationArgs& args, int64_t first, int64_t last) {
  float a_buffer[kChunk];
  float b_buffer[kChunk];
  float y[kChunk];
  for (int64_t row = first; row < last; ++row) {
    const char* gate = row_at(args.gate, row);
    const char* up = args.up.data != nullptr ? row_at(args.up, row) : nullptr;
    char* out = static_cast<char*>(args.y) + row * args.y_stride * bytes_of(args.y_dtype);
    for (int64_t at = 0; at < args.length; at += kChunk) {
      const int64_t n = args.length - at < kChunk ? args.length - at : kChunk;
      const float* a = load_part(args.gate, gate, at, n, a_buffer);
      if (args.kind == Activation::kSilu) {
        for (int64_t i = 0; i < n; ++i) y[i] = a[i] * elementary::sigmoid_of_number(a[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) y[i] = elementary::gelu_with_slope(a[i]).value;
      }
      if (up != nullptr) {
        const float* b = load_part(args.up, up, at, n, b_buffer);
        for (int64_t i = 0; i < n; ++i) y[i] = y[i] * b[i];
      }
      store(out + at * bytes_of(args.y_dtype), args.y_dtype, y, n);
    }
  }
}

void activation_backward(const ActivationArgs& args, int64_t first, int64_t last) {
  float a_buffer[kChunk];
  float b_buffer[kChunk];
  float d_buffer[kChunk];
  float value[kChunk];
  float slope[kChunk];
  for (int64_t row = first; row < last; ++row) {
    const char* gate = row_at(args.gate, row);
    const char* up = args.up.data != nullptr ? row_at(args.up, row) : nullptr;
    const char* dy = row_at(args.dy, row);
    char* dgate = static_cast<char*>(args.y) + row * args.y_stride * bytes_of(args.y_dtype);
    char* dup = static_cast<char*>(args.dup) + row * args.y_stride * bytes_of(args.y_dtype);
    for (int64_t at = 0; at < args.length; at += kChunk) {
      const int64_t n = args.length - at < kChunk ? args.length - at : kChunk;
      const float* a = load_part(args.gate, gate, at, n, a_buffer);
      const float* d = load_part(args.dy, dy, at, n, d_buffer);
      if (args.kind == Activation::kSilu) {
        for (int64_t i = 0; i < n; ++i) {
          const elementary::Activation f = elementary::silu_with_slope(a[i]);
          value[i] = f.value;
          slope[i] = f.slope;
        }
      } else {
        for (int64_t i = 0; i < n; ++i) {
          const elementary::Activation f = elementary::gelu_with_slope(a[i]);
          value[i] = f.value;
          slope[i] = f.slope;
        }
      }
      if (up != nullptr) {
        const float* b = load_part(args.up, up, at, n, b_buffer);
        for (int64_t i = 0; i < n; ++i) value[i] = d[i] * value[i];
        for (int64_t i = 0; i < n; ++i) slope[i] = (d[i] * b[i]) * slope[i];
        store(dup + at * bytes_of(args.y_dtype), args.y_dtype, value, n);
      } else {
        for (int64_t i = 0; i < n; ++i) slope[i] = d[i] * slope[i];
      }
      store(dgate + at * bytes_of(args.y_dtype), args.y_dtype, slope, n);
    }
  }
}

// --- R4: rope -------------------------------------------------------------------------------------------------------

inline void rotate(const RopeArgs& args, float* y, const float* x, const float* s, const float* c) {
  const int64_t half = args.rotary / 2;
  if (args.interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float x1 = x[2 * i];
      const float x2 = x[2 * i + 1];
      y[2 * i] = x1 * c[i] - x2 * s[i];
      y[2 * i + 1] = x2 * c[i] + x1 * s[i];
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const float x1 = x[i];
      const float x2 = x[half + i];
      y[i] = x1 * c[i] - x2 * s[i];
      y[half + i] = x2 * c[i] + x1 * s[i];
    }
  }
  for (int64_t i = args.rotary; i < args.dim; ++i) y[i] = x[i];
}

void rope(const RopeArgs& args, int64_t first, int64_t last, float* scratch) {
  const int64_t dim = args.dim;
  const int64_t half = args.rotary / 2;
  const int64_t together = dim >= 2048 ? 1 : 2048 / (dim > 0 ? dim : 1);  // heads of one pass
  float* x = scratch;
  float* y = x + (dim > 2048 ? dim : 2048);
  float* minus = y + (dim > 2048 ? dim : 2048);
  for (int64_t token = first; token < last; ++token) {
    const float* s = reinterpret_cast<const float*>(row_at(args.sin, token));
    const float* c = reinterpret_cast<const float*>(row_at(args.cos, token));
    if (args.backward) {
      for (int64_t i = 0; i < half; ++i) minus[i] = -s[i];
      s = minus;
    }
    for (int64_t head = 0; head < args.heads; head += together) {
      const int64_t count = args.heads - head < together ? args.heads - head : together;
      const int64_t row = token * args.heads + head;
      if (args.adjacent) {
        load(x, row_at(args.x, row), args.x.dtype, count * dim);
      } else {
        for (int64_t h = 0; h < count; ++h) load(x + h * dim, row_at(args.x, row + h), args.x.dtype, dim);
      }
      for (int64_t h = 0; h < count; ++h) rotate(args, y + h * dim, x + h * dim, s, c);
      store(static_cast<char*>(args.y) + row * dim * bytes_of(args.y_dtype), args.y_dtype, y, count * dim);
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
          .chain_columns = chain_columns,
          .store = store,
          .sum_inputs = sum_inputs};
}

}  // namespace
