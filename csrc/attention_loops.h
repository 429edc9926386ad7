// The element-wise part of attention: scores, softmax, rescaling, dS, row products. Included by each
// attention_<isa>.cpp inside its own target region and namespace: one text, one copy per instruction set with internal
// linkage. No include guard on purpose.
//
//   s = (chain + 0.0) * scale, then cap * tanh(s / cap)        p = exp(s - m)        dS = p * (dP - D) ... * scale
//
// Mode: IEEE (csrc/fpmode.h), nothing fused. Scores of a tile lie as [row][64 keys] or, in columns, as [key][64 rows];
// masked ones are selected away, never multiplied.
// Guarantee: deterministic; a row's bits ignore the other rows (tests/test_attention.py).

#include "convert_loops.h"
#include "elementary.h"
#include "philox.h"

namespace {

constexpr int kKeys = 64;
constexpr int kRows = 64;

inline float larger(float a, float b) { return a > b ? a : b; }  // b if one is NaN

// s = scores, masked ones -inf; the result is their maximum, NaN if one of them is. Which zero wins cannot show:
// exp(x - (+0)) = exp(x - (-0)).
template <bool kCapped, bool kMasked>
float score_row(float* s, int32_t first, int32_t end, float scale, float cap) {
  for (int k = 0; k < kKeys; ++k) {
    float x = (s[k] + 0.0f) * scale;
    if constexpr (kCapped) x = cap * elementary::tanh(x / cap);
    if constexpr (kMasked) x = (k >= first) & (k < end) ? x : -elementary::kInf;
    s[k] = x;
  }
  // As integers, whose maximum a compiler may reorder: negative numbers with their magnitude inverted ascend.
  int32_t highest = INT32_MIN;
  int32_t magnitude = 0;
  for (int k = 0; k < kKeys; ++k) {
    const int32_t b = static_cast<int32_t>(bits(s[k]));
    const int32_t key = b ^ ((b >> 31) & 0x7fffffff);
    highest = key > highest ? key : highest;
    magnitude = (b & 0x7fffffff) > magnitude ? b & 0x7fffffff : magnitude;
  }
  const int32_t b = highest ^ ((highest >> 31) & 0x7fffffff);
  return magnitude > 0x7f800000 ? elementary::kNan : as_f32(static_cast<uint32_t>(b));
}

template <bool kMasked>
void exp_row(float* s, int32_t first, int32_t end, float m) {
  for (int k = 0; k < kKeys; ++k) {
    const float p = elementary::exp(s[k] - m);
    s[k] = !kMasked || ((k >= first) & (k < end)) ? p : 0.0f;
  }
}

template <bool kCapped>
void softmax_rows(float* s_RK, int64_t rows, const int32_t* lo, const int32_t* hi, float scale, float cap, float* m,
                  float* factor) {
  for (int64_t r = 0; r < rows; ++r) {
    float* s = s_RK + r * kKeys;
    const bool masked = lo[r] > 0 || hi[r] < kKeys;
    const float highest = (masked ? score_row<kCapped, true> : score_row<kCapped, false>)(s, lo[r], hi[r], scale, cap);
    const float before = m[r];
    const float now = before != before || highest != highest ? elementary::kNan : larger(before, highest);
    m[r] = now;
    factor[r] = before - now;
    (masked ? exp_row<true> : exp_row<false>)(s, lo[r], hi[r], now);
  }
  for (int64_t r = 0; r < rows; ++r) factor[r] = elementary::exp(factor[r]);
}

void softmax(float* s_RK, int64_t rows, const int32_t* lo, const int32_t* hi, float scale, float cap, float* m,
             float* factor) {
  (cap != 0.0f ? softmax_rows<true> : softmax_rows<false>)(s_RK, rows, lo, hi, scale, cap, m, factor);
}

// The order of integers as the order of scores: negative numbers with their magnitude inverted ascend.
inline int32_t ascending(int32_t b) { return b ^ ((b >> 31) & 0x7fffffff); }

// Scores in columns: the loops over rows are the inner ones, so a lane keeps its row.
template <bool kCapped>
void softmax_lanes(float* s_KR, int64_t rows, int64_t first, int64_t end, const int32_t* lo, const int32_t* hi,
                   float scale, float cap, float* m, float* factor) {
  int32_t highest[kRows];
  int32_t magnitude[kRows];
  for (int64_t r = 0; r < rows; ++r) {
    highest[r] = INT32_MIN;
    magnitude[r] = 0;
  }
  for (int64_t k = first; k < end; ++k) {
    float* s = s_KR + k * kRows;
    const int32_t key = static_cast<int32_t>(k);
    for (int64_t r = 0; r < rows; ++r) {
      float x = (s[r] + 0.0f) * scale;
      if constexpr (kCapped) x = cap * elementary::tanh(x / cap);
      x = (key >= lo[r]) & (key < hi[r]) ? x : -elementary::kInf;
      s[r] = x;
      const int32_t b = static_cast<int32_t>(bits(x));
      highest[r] = ascending(b) > highest[r] ? ascending(b) : highest[r];
      magnitude[r] = (b & 0x7fffffff) > magnitude[r] ? b & 0x7fffffff : magnitude[r];
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float top = as_f32(static_cast<uint32_t>(ascending(highest[r])));
    const float before = m[r];
    const float now = (magnitude[r] > 0x7f800000) | (before != before) ? elementary::kNan : larger(before, top);
    m[r] = lo[r] < hi[r] ? now : before;
    factor[r] = elementary::exp(before - now);
  }
  for (int64_t k = first; k < end; ++k) {
    float* s = s_KR + k * kRows;
    const int32_t key = static_cast<int32_t>(k);
    for (int64_t r = 0; r < rows; ++r) {
      const float p = elementary::exp(s[r] - m[r]);
      s[r] = (key >= lo[r]) & (key < hi[r]) ? p : 0.0f;
    }
  }
}

void softmax_columns(float* s_KR, int64_t rows, int64_t first, int64_t end, const int32_t* lo, const int32_t* hi,
                     float scale, float cap, float* m, float* factor) {
  (cap != 0.0f ? softmax_lanes<true> : softmax_lanes<false>)(s_KR, rows, first, end, lo, hi, scale, cap, m, factor);
}

void rescale(float* acc, const float* block, int64_t rows, int64_t columns, int64_t stride, const float* factor) {
  if (columns == 1 && stride == 1) {
    for (int64_t r = 0; r < rows; ++r) acc[r] = acc[r] * factor[r] + (block[r] + 0.0f);
    return;
  }
  for (int64_t r = 0; r < rows; ++r, acc += stride, block += stride) {
    const float f = factor[r];
    for (int64_t n = 0; n < columns; ++n) acc[n] = acc[n] * f + (block[n] + 0.0f);
  }
}

void keep(float* keep, int64_t block, uint32_t position, uint32_t sample, uint32_t head, const PairDropout& drop) {
  uint32_t words[kKeys];
  const uint32_t first = static_cast<uint32_t>(block * (kKeys / 4));
  for (uint32_t g = 0; g < kKeys / 4; ++g) {
    const Words w = philox(first + g, position, sample, head, drop.key[0], drop.key[1]);
    for (int i = 0; i < 4; ++i) words[4 * g + i] = w.w[i];
  }
  for (int k = 0; k < kKeys; ++k) keep[k] = words[k] >= drop.threshold ? drop.scale : 0.0f;
}

void drop(float* s, int64_t stride, int64_t first, int64_t end, const float* keep) {
  for (int64_t k = first; k < end; ++k) {
    const float kept = s[k * stride] * keep[k];
    s[k * stride] = keep[k] > 0.0f ? kept : 0.0f;
  }
}

template <bool kCapped, bool kDropped>
void softmax_backward_rows(float* s_RK, float* dp_RK, int64_t rows, const int32_t* lo, const int32_t* hi, float scale,
                           float cap, const float* m, const float* w, const float* d, const float* keep) {
  for (int64_t r = 0; r < rows; ++r) {
    float* s = s_RK + r * kKeys;
    float* dp = dp_RK + r * kKeys;
    const int32_t first = lo[r];
    const int32_t end = hi[r];
    const float max = m[r];
    const float weight = w[r];
    const float mean = d[r];
    for (int k = 0; k < kKeys; ++k) {
      float x = (s[k] + 0.0f) * scale;
      float t = 0.0f;
      if constexpr (kCapped) {
        t = elementary::tanh(x / cap);
        x = cap * t;
      }
      const float p = elementary::exp(x - max) * weight;
      float grad = dp[k] + 0.0f;
      float used = p;
      if constexpr (kDropped) {
        const float factor = keep[r * kKeys + k];
        grad = factor > 0.0f ? grad * factor : 0.0f;
        used = factor > 0.0f ? p * factor : 0.0f;
      }
      float ds = p * (grad - mean);
      if constexpr (kCapped) ds = ds * (1.0f - t * t);
      ds = ds * scale;
      const bool live = (k >= first) & (k < end);
      s[k] = live ? used : 0.0f;
      dp[k] = live ? ds : 0.0f;
    }
  }
}

void softmax_backward(float* s_RK, float* dp_RK, int64_t rows, const int32_t* lo, const int32_t* hi, float scale,
                      float cap, const float* m, const float* w, const float* d, const float* keep) {
  if (keep != nullptr) {
    (cap != 0.0f ? softmax_backward_rows<true, true> : softmax_backward_rows<false, true>)(s_RK, dp_RK, rows, lo, hi,
                                                                                           scale, cap, m, w, d, keep);
  } else {
    (cap != 0.0f ? softmax_backward_rows<true, false> : softmax_backward_rows<false, false>)(s_RK, dp_RK, rows, lo, hi,
                                                                                             scale, cap, m, w, d, keep);
  }
}

// ORDER.md A9 for one block: 16 lanes, folded by the canonical tree over 16.
float row_dot(const float* x, const float* y, int64_t n) {
  float lane[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 16; ++j) lane[j] = lane[j] + x[i + j] * y[i + j];
  }
  for (int j = 0; i + j < n; ++j) lane[j] = lane[j] + x[i + j] * y[i + j];
  for (int step = 1; step < 16; step *= 2) {
    for (int j = 0; j < 16; j += 2 * step) lane[j] = lane[j] + lane[j + step];
  }
  return lane[0];
}

bool is_finite(const float* x, int64_t n) {
  uint32_t special = 0;
  for (int64_t i = 0; i < n; ++i) special |= (bits(x[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  return special == 0;
}

float exp_one(float x) { return elementary::exp(x); }
float log_one(float x) { return elementary::log(x); }

constexpr AttentionKernels make_attention(const char* name, bool hardware_flush, bool bf16_rows,
                                          decltype(AttentionKernels::chains) c,
                                          decltype(AttentionKernels::row_keys) row_keys,
                                          decltype(AttentionKernels::row_values) row_values,
                                          decltype(AttentionKernels::sums) s,
                                          decltype(AttentionKernels::softmax) softmax_of_rows = softmax,
                                          decltype(AttentionKernels::softmax_columns) of_columns = softmax_columns) {
  return {.name = name,
          .hardware_flush = hardware_flush,
          .bf16_rows = bf16_rows,
          .chains = c,
          .row_keys = row_keys,
          .row_values = row_values,
          .sums = s,
          .softmax = softmax_of_rows,
          .softmax_columns = of_columns,
          .rescale = rescale,
          .keep = keep,
          .drop = drop,
          .softmax_backward = softmax_backward,
          .row_dot = row_dot,
          .exp = exp_one,
          .log = log_one,
          .is_finite = is_finite};
}

}  // namespace
