// The loops of the vocabulary operators over one contiguous piece of a row; see vocab.h for the equations. Included by
// each vocab_<isa>.cpp inside its own target region and namespace, after kWidth is set: one text, one copy per
// instruction set, same bits. No include guard on purpose. Mode: IEEE (csrc/fpmode.h). Nothing here is fused.

#include "convert_loops.h"
// after the conversions that they use
#include "elementary.h"
#include "row_sum_loops.h"

namespace {

// Ascending with x: NaN above everything, +0 above -0.
inline int32_t order_key(float x) {
  const int32_t b = static_cast<int32_t>(bits(x));
  const int32_t key = b ^ ((b >> 31) & 0x7fffffff);
  return (b & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : key;
}
template <class T>
float max_n(const void* x, int64_t n) {
  return row_max(static_cast<const T*>(x), n);
}

inline float block_sum(const float* terms, int64_t n) {
  const TermsOf<Single, float> of{{terms, terms, {}}};
  float sum;
  if (n < kSumBlock) {
    sum_block(of, 0, n, &sum, 1);
  } else {
    sum_whole_blocks<1>(of, 0, &sum, 1);
  }
  return sum;
}

template <class T>
void sums_n(float* sums, const void* x_, int64_t n) {
  const T* x = static_cast<const T*>(x_);
  float terms[kSumBlock];
  for (int64_t at = 0; at < n; at += kSumBlock, x += kSumBlock) {
    const int64_t length = n - at < kSumBlock ? n - at : kSumBlock;
    for (int64_t i = 0; i < length; ++i) terms[i] = widen(x[i]);
    *sums++ = block_sum(terms, length);
  }
}

// Up to here exp(d) and exp(-d) are normal numbers, and the two factors of C1 are one: y * 2^n without a rounding.
constexpr float kNear = 87.0f;

// elementary::exp for |d| <= kNear: the same bits by fewer operations (tests/test_softmax.py).
inline float exp_near(float d) {
  const float n = __builtin_floorf(d * elementary::kLog2E + 0.5f);
  const float high = d - n * elementary::kLn2High;
  const float low = n * elementary::kLn2Low;
  const float r = high - low;
  const float c = (high - r) - low;
  const float h = 1.0f + r;
  const float e = r - (h - 1.0f);
  float p = 0x1.9df7a8p-13f;
  p = p * r + 0x1.6d4ccep-10f;
  p = p * r + 0x1.11131p-7f;
  p = p * r + 0x1.5554e8p-5f;
  p = p * r + 0x1.555554p-3f;
  p = p * r + 0x1p-1f;
  const float y = h + (e + (c + (r * r) * p));
  return as_f32(bits(y) + (static_cast<uint32_t>(static_cast<int32_t>(n)) << 23));
}

// d[i] = x[i] - m for at most one block; whether all are near (so that no NaN is among them).
template <class T>
inline bool differences(float* __restrict d, const T* __restrict x, int64_t n, float m) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    d[i] = widen(x[i]) - m;
    const int32_t magnitude = static_cast<int32_t>(bits(d[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest <= static_cast<int32_t>(bits(kNear));
}

// e[i] = exp(x[i] - m) for at most one block; whether all were near.
template <class T>
inline bool exponentials(float* __restrict e, const T* __restrict x, int64_t n, float m) {
  if (differences(e, x, n, m)) {
    for (int64_t i = 0; i < n; ++i) e[i] = exp_near(e[i]);
    return true;
  }
  for (int64_t i = 0; i < n; ++i) e[i] = elementary::exp(e[i]);
  return false;
}

inline bool is_finite(float x) { return (bits(x) & 0x7fffffffu) < 0x7f800000u; }

// narrow<T>(canonical(x)) where x is no NaN.
template <class T>
inline T narrow_number(float x) {
  if constexpr (__is_same(T, Bf16)) {
    const uint32_t u = bits(x);
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  } else {
    return narrow<T>(x);
  }
}

template <class T>
void exp_sums_n(float* sums, const void* x_, int64_t n, float m, float* e) {
  const T* x = static_cast<const T*>(x_);
  float terms[kSumBlock];
  for (int64_t at = 0; at < n; at += kSumBlock) {
    const int64_t length = n - at < kSumBlock ? n - at : kSumBlock;
    float* t = e == nullptr ? terms : e + at;
    exponentials(t, x + at, length, m);
    *sums++ = block_sum(t, length);
  }
}

template <class T>
void dots_n(float* sums, const float* p, const void* dp_, int64_t n) {
  const T* dp = static_cast<const T*>(dp_);
  float terms[kSumBlock];
  for (int64_t at = 0; at < n; at += kSumBlock) {
    const int64_t length = n - at < kSumBlock ? n - at : kSumBlock;
    for (int64_t i = 0; i < length; ++i) terms[i] = p[at + i] * widen(dp[at + i]);
    *sums++ = block_sum(terms, length);
  }
}

template <class T>
void softmax_p_n(float* p, const void* x_, int64_t n, float m, float s) {
  const T* x = static_cast<const T*>(x_);
  for (int64_t at = 0; at < n; at += kSumBlock) {
    const int64_t length = n - at < kSumBlock ? n - at : kSumBlock;
    float* t = p + at;
    exponentials(t, x + at, length, m);
    for (int64_t i = 0; i < length; ++i) t[i] = t[i] / s;
  }
}

// y may be e.
template <class T>
void divide_n(void* y_, const float* e, int64_t n, float s) {
  T* y = static_cast<T*>(y_);
  for (int64_t i = 0; i < n; ++i) y[i] = narrow<T>(canonical(e[i] / s));
}

template <class T>
void softmax_dx_n(void* __restrict dx_, const float* __restrict p, const void* __restrict dp_, int64_t n, float d) {
  T* dx = static_cast<T*>(dx_);
  const T* dp = static_cast<const T*>(dp_);
  for (int64_t i = 0; i < n; ++i) dx[i] = narrow<T>(canonical(p[i] * (widen(dp[i]) - d)));
}

template <class T>
void subtract_n(void* __restrict y_, const void* __restrict x_, int64_t n, float lse) {
  T* __restrict y = static_cast<T*>(y_);
  const T* __restrict x = static_cast<const T*>(x_);
  float d[kSumBlock];
  for (int64_t at = 0; at < n; at += kSumBlock) {
    const int64_t length = n - at < kSumBlock ? n - at : kSumBlock;
    if (differences(d, x + at, length, lse)) {
      for (int64_t i = 0; i < length; ++i) y[at + i] = narrow_number<T>(d[i]);
    } else {
      for (int64_t i = 0; i < length; ++i) y[at + i] = narrow<T>(canonical(d[i]));
    }
  }
}

template <class T>
void log_softmax_dx_n(void* dx_, const void* dy_, const void* x_, int64_t n, float lse, float total) {
  const T* x = static_cast<const T*>(x_);
  float p[kSumBlock];
  for (int64_t at = 0; at < n; at += kSumBlock) {
    const int64_t length = n - at < kSumBlock ? n - at : kSumBlock;
    T* __restrict dx = static_cast<T*>(dx_) + at;
    const T* __restrict dy = static_cast<const T*>(dy_) + at;
    exponentials(p, x + at, length, lse);
    for (int64_t i = 0; i < length; ++i) dx[i] = narrow<T>(canonical(widen(dy[i]) - p[i] * total));
  }
}

template <class T>
void cross_entropy_dx_n(void* dx_, const void* x_, int64_t n, float lse, float g) {
  const T* x = static_cast<const T*>(x_);
  float p[kSumBlock];
  const bool finite = is_finite(g);
  for (int64_t at = 0; at < n; at += kSumBlock) {
    const int64_t length = n - at < kSumBlock ? n - at : kSumBlock;
    T* __restrict dx = static_cast<T*>(dx_) + at;
    if (exponentials(p, x + at, length, lse) && finite) {
      for (int64_t i = 0; i < length; ++i) dx[i] = narrow_number<T>(g * p[i]);
    } else {
      for (int64_t i = 0; i < length; ++i) dx[i] = narrow<T>(canonical(g * p[i]));
    }
  }
}

template <class T>
void cross_entropy_hit(void* dx_, const void* x, float lse, float g) {
  const float p = elementary::exp(widen(*static_cast<const T*>(x)) - lse);
  *static_cast<T*>(dx_) = narrow<T>(canonical(g * (p - 1.0f)));
}

// The first i >= begin whose key (with -0 read as +0) exceeds `above`, else n.
template <class T>
int64_t first_above_n(const void* x_, int64_t begin, int64_t n, int32_t above) {
  constexpr int64_t kStep = 128;
  const T* x = static_cast<const T*>(x_);
  int64_t i = begin;
  for (; i + kStep <= n; i += kStep) {
    int32_t any = 0;
    for (int64_t j = 0; j < kStep; ++j) any |= order_key(widen(x[i + j]) + 0.0f) > above ? 1 : 0;
    if (any != 0) break;
  }
  for (; i < n; ++i) {
    if (order_key(widen(x[i]) + 0.0f) > above) return i;
  }
  return n;
}

template <class T>
float value_at(const void* x, int64_t i) {
  return widen(static_cast<const T*>(x)[i]);
}

void finish_log_sum_exp_n(const float* m, const float* s, float* lse, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float y = canonical(m[i] + elementary::log(s[i]));
    lse[i] = m[i] == -__builtin_inff() ? m[i] : y;
  }
}

void losses_n(float* loss, const float* lse, const float* picked, const int64_t* targets, int64_t ignored, int64_t n) {
  for (int64_t i = 0; i < n; ++i) loss[i] = targets[i] == ignored ? 0.0f : canonical(lse[i] - picked[i]);
}

int32_t key_of(float x) { return order_key(x + 0.0f); }

template <class T>
constexpr VocabTable make_vocab_table() {
  return {.max = max_n<T>,
          .sums = sums_n<T>,
          .exp_sums = exp_sums_n<T>,
          .dots = dots_n<T>,
          .softmax_p = softmax_p_n<T>,
          .divide = divide_n<T>,
          .softmax_dx = softmax_dx_n<T>,
          .subtract = subtract_n<T>,
          .log_softmax_dx = log_softmax_dx_n<T>,
          .cross_entropy_dx = cross_entropy_dx_n<T>,
          .cross_entropy_hit = cross_entropy_hit<T>,
          .first_above = first_above_n<T>,
          .value_at = value_at<T>};
}

constexpr VocabLoops make_vocab_loops() {
  return {.f32 = make_vocab_table<float>(),
          .bf16 = make_vocab_table<Bf16>(),
          .f16 = make_vocab_table<F16>(),
          .finish_log_sum_exp = finish_log_sum_exp_n,
          .losses = losses_n,
          .key_of = key_of};
}

}  // namespace
