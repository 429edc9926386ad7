// The one rounding rule: casts, node additions, epilogues. Included by each gemm_<isa>.cpp inside its own target region
// and namespace, so the text is one and every instruction set gets its own copy (internal linkage: no copy compiled for
// a wider set can be linked into a narrower one). No include guard on purpose.
//
//   node:      left + right                                          fp32 or fp64, never fused, never flushed
//   wire:      bf16(x) + (+0.0)                                      ties to even
//   epilogue:  cast(x / divisor + bias)                              NaN leaves as the canonical quiet NaN
//
// Where out is exactly left or right (in place), an element still depends on itself alone: `ivdep` says so, else such
// loops would run without vectors. fp64 is never narrowed below fp32 (ORDER.md A6, A7): the callers refuse it, and so
// does this file. Mode: IEEE (csrc/fpmode.h). Guarantee: deterministic, element-wise, so batch- and layout-invariant.

#include "convert_loops.h"

namespace {

template <class To, class From>
void cast_n(void* dst_, const void* src_, int64_t n) {
  To* dst = static_cast<To*>(dst_);
  const From* src = static_cast<const From*>(src_);
  if constexpr (__is_same(To, From)) {
    __builtin_memcpy(dst, src, static_cast<size_t>(n) * sizeof(To));
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = narrow<To>(widen(src[i]));
  }
}

template <class To>
void cast_from(void* dst, const void* src, DType from, int64_t n) {
  switch (from) {
    case DType::kFloat32:
      return cast_n<To, float>(dst, src, n);
    case DType::kFloat64:
      if constexpr (__is_same(To, float) || __is_same(To, double)) return cast_n<To, double>(dst, src, n);
      __builtin_trap();
    case DType::kBFloat16:
      return cast_n<To, Bf16>(dst, src, n);
    case DType::kFloat16:
      return cast_n<To, F16>(dst, src, n);
  }
}

void cast(void* dst, DType to, const void* src, DType from, int64_t n) {
  switch (to) {
    case DType::kFloat32:
      return cast_from<float>(dst, src, from, n);
    case DType::kFloat64:
      return cast_from<double>(dst, src, from, n);
    case DType::kBFloat16:
      return cast_from<Bf16>(dst, src, from, n);
    case DType::kFloat16:
      return cast_from<F16>(dst, src, from, n);
  }
}

inline float wire(float x) { return as_f32(bf16_of(x) << 16) + 0.0f; }

template <class T>
void add(T* out, const T* left, const T* right, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = left[i] + right[i];
}

void add_wire(float* out, const float* left, const float* right, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = wire(left[i] + right[i]);
}

template <class T>
void add_leaf(T* left, const T* leaf, int64_t n) {
  for (int64_t i = 0; i < n; ++i) left[i] = left[i] + (leaf[i] + T(0));
}

// A node is never -0 where + (+0.0) could matter: l + (r + 0.0) is not -0, so only the last array needs it.
template <class T>
void add_leaves(T* const* x, int count, int64_t n) {
  int last = count - 1;
  for (; last >= 3; last -= 3) {
    T* __restrict a = x[last - 3];
    const T* __restrict b = x[last - 2];
    const T* __restrict c = x[last - 1];
    const T* __restrict d = x[last];
    for (int64_t i = 0; i < n; ++i) a[i] = a[i] + (b[i] + (c[i] + (d[i] + T(0))));
  }
  if (last == 2) {
    T* __restrict a = x[0];
    const T* __restrict b = x[1];
    const T* __restrict c = x[2];
    for (int64_t i = 0; i < n; ++i) a[i] = a[i] + (b[i] + (c[i] + T(0)));
  }
  if (last == 1) add_leaf(x[0], x[1], n);
}

template <class T>
void finish(T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] + T(0);
}

void finish_wire(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = wire(x[i]);
}

template <class To, class T>
void store_n(void* dst_, const T* x, int64_t n, T divisor, const T* bias) {
  To* dst = static_cast<To*>(dst_);
  if (divisor != T(1) && bias != nullptr) {
    for (int64_t i = 0; i < n; ++i) dst[i] = narrow<To>(canonical(x[i] / divisor + bias[i]));
  } else if (divisor != T(1)) {
    for (int64_t i = 0; i < n; ++i) dst[i] = narrow<To>(canonical(x[i] / divisor));
  } else if (bias != nullptr) {
    for (int64_t i = 0; i < n; ++i) dst[i] = narrow<To>(canonical(x[i] + bias[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = narrow<To>(canonical(x[i]));
  }
}

template <class T>
void store(void* dst, DType to, const T* x, int64_t n, T divisor, const T* bias) {
  switch (to) {
    case DType::kFloat32:
      return store_n<float>(dst, x, n, divisor, bias);
    case DType::kFloat64:
      return store_n<double>(dst, x, n, divisor, bias);
    case DType::kBFloat16:
      if constexpr (__is_same(T, float)) return store_n<Bf16>(dst, x, n, divisor, bias);
      __builtin_trap();
    case DType::kFloat16:
      if constexpr (__is_same(T, float)) return store_n<F16>(dst, x, n, divisor, bias);
      __builtin_trap();
  }
}

// Both operands of a node straight from their own type, or its root straight into the result's: the same roundings as
// cast, add and store one after another, without the trips through memory.
template <class From>
void add_from_n(float* out, const void* left_, const void* right_, int64_t n) {
  const From* left = static_cast<const From*>(left_);
  const From* right = static_cast<const From*>(right_);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = widen(left[i]) + widen(right[i]);
}

void add_from(float* out, const void* left, const void* right, DType from, int64_t n) {
  switch (from) {
    case DType::kFloat32:
      return add_from_n<float>(out, left, right, n);
    case DType::kBFloat16:
      return add_from_n<Bf16>(out, left, right, n);
    case DType::kFloat16:
      return add_from_n<F16>(out, left, right, n);
    case DType::kFloat64:
      __builtin_trap();
  }
}

template <class To, class T>
void add_to_n(void* dst_, const T* left, const T* right, int64_t n) {
  To* dst = static_cast<To*>(dst_);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dst[i] = narrow<To>(canonical(left[i] + right[i]));
}

void add_to(void* dst, DType to, const float* left, const float* right, int64_t n) {
  switch (to) {
    case DType::kFloat32:
      return add_to_n<float>(dst, left, right, n);
    case DType::kFloat64:
      return add_to_n<double>(dst, left, right, n);
    case DType::kBFloat16:
      return add_to_n<Bf16>(dst, left, right, n);
    case DType::kFloat16:
      return add_to_n<F16>(dst, left, right, n);
  }
}

template <class X>
void add_both_n(void* dst_, const void* left_, const void* right_, int64_t n) {
  X* dst = static_cast<X*>(dst_);
  const X* left = static_cast<const X*>(left_);
  const X* right = static_cast<const X*>(right_);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dst[i] = narrow<X>(canonical(widen(left[i]) + widen(right[i])));
}

void add_both(void* dst, const void* left, const void* right, DType dtype, int64_t n) {
  switch (dtype) {
    case DType::kFloat32:
      return add_both_n<float>(dst, left, right, n);
    case DType::kFloat64:
      return add_both_n<double>(dst, left, right, n);
    case DType::kBFloat16:
      return add_both_n<Bf16>(dst, left, right, n);
    case DType::kFloat16:
      return add_both_n<F16>(dst, left, right, n);
  }
}

void pair(uint32_t* dst, const uint16_t* hi, const uint16_t* lo, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = (static_cast<uint32_t>(hi[i]) << 16) | lo[i];
}

// Eight columns at a time so that each source line is read once while the destination rows stay in L1.
[[maybe_unused]] void transpose_plain(uint32_t* dst_CP, const void* const* rows, int64_t cols, bool rotate) {
  for (int64_t c0 = 0; c0 < cols; c0 += 8) {
    const int64_t count = cols - c0 < 8 ? cols - c0 : 8;
    for (int r = 0; r < kPanel; ++r) {
      uint32_t word[8];
      __builtin_memcpy(word, static_cast<const char*>(rows[r]) + c0 * 4, static_cast<size_t>(count) * 4);
      for (int64_t c = 0; c < count; ++c) {
        dst_CP[(c0 + c) * kPanel + r] = rotate ? (word[c] << 16) | (word[c] >> 16) : word[c];
      }
    }
  }
}

[[maybe_unused]] void widen_pairs_plain(float* dst_KP, const uint32_t* src_KP, int64_t pairs) {
  for (int64_t k = 0; k < pairs; ++k, src_KP += kPanel, dst_KP += 2 * kPanel) {
    for (int p = 0; p < kPanel; ++p) dst_KP[p] = as_f32(src_KP[p] & 0xffff0000u);
    for (int p = 0; p < kPanel; ++p) dst_KP[kPanel + p] = as_f32(src_KP[p] << 16);
  }
}

[[maybe_unused]] void widen_f16_plain(float* dst_KP, const uint16_t* src_KP, int64_t steps) {
  for (int64_t i = 0; i < steps * kPanel; ++i) dst_KP[i] = f32_of_f16(src_KP[i]);
}

constexpr Loops make_loops(void (*transpose)(uint32_t*, const void* const*, int64_t, bool)) {
  return {.cast = cast,
          .add_f32 = add<float>,
          .add_f64 = add<double>,
          .add_wire = add_wire,
          .add_leaf_f32 = add_leaf<float>,
          .add_leaf_f64 = add_leaf<double>,
          .add_leaves_f32 = add_leaves<float>,
          .add_leaves_f64 = add_leaves<double>,
          .finish_f32 = finish<float>,
          .finish_f64 = finish<double>,
          .finish_wire = finish_wire,
          .store_f32 = store<float>,
          .store_f64 = store<double>,
          .add_from = add_from,
          .add_to = add_to,
          .add_both = add_both,
          .pair = pair,
          .transpose = transpose};
}

}  // namespace
