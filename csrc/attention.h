// Attention for CPUs, forward and backward: one algorithm for packed sequences and for paged keys (ORDER.md K).
//
//   s[t,k] = chain over d of q[t,d] k[k,d], * scale (, cap tanh(s / cap))     live keys k only
//   out[t] = sum over blocks of 64 keys of (chain over live k of p[k] v[k]) / the same with v = 1,  p = exp(s - max)
//
// Suffixes: T query tokens, H query heads, S key tokens, G KV heads, D head_dim, Dp = D rounded up to 16, R rows of a
// tile. Position = index in the sequence; the queries of a sequence are its last q_length positions. Torch-free.
// Guarantees: deterministic, batch-invariant (a query's bits ignore the other rows, paging, chunking and threads),
// layout-invariant over heads. Errors: std::invalid_argument.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gemm.h"
#include "kernels.h"
#include "tree.h"

namespace tbik {

inline constexpr int64_t kKeyBlock = 64;    // keys of one block (ORDER.md K1)
inline constexpr int64_t kQueryBlock = 64;  // query positions of one block of dK and dV (ORDER.md K3)
inline constexpr int64_t kScoreRows = 64;   // query rows that scores in columns lie side by side
inline constexpr int64_t kMaxHeadDim = 512;

// K5. The pair (query at position t, key s) of query head h of sequence b is kept if word s % 4 of
// philox(s / 4, t, first_sample + b, 1 + first_head + h) is at least `threshold`, and multiplied by `scale`.
struct PairDropout {
  bool active = false;
  uint64_t threshold = 0;
  float scale = 1.0f;
  uint32_t key[2] = {0, 0};
  uint32_t first_sample = 0;
  uint32_t first_head = 0;
};

// 64 rows where they lie: row k = group[k / 8] + (k % 8) * stride values; fp32 in multiples of 16 values, bf16 in
// multiples of 32. `ahead`: groups that will be read next, at the same distances; a kernel asks for them line by line
// as it goes.
struct RowGroups {
  const void* group[kKeyBlock / 8];
  const void* ahead[kKeyBlock / 8];
  int64_t stride;
  DType dtype;
};

// What one instruction set provides; every table computes the same bits.
struct AttentionKernels {
  const char* name;
  bool hardware_flush;  // `chains` and `sums` need FTZ and DAZ on; otherwise IEEE mode
  bool bf16_rows;       // row_keys and row_values take bf16 where it lies

  // c[r][n] = chain over k of a[r * a_row + k * a_step] * b[n / 16 * b_panel + k * b_step + n % 16], without the final
  // + 0.0; n < columns, rounded up to 16 (b and c reach that far). One of a_row and a_step is 1. Chain mode.
  void (*chains)(const float* a, int64_t a_row, int64_t a_step, int64_t rows, const float* b, int64_t b_panel,
                 int64_t b_step, int64_t steps, float* c, int64_t c_row, int64_t columns);
  // s[r * 64 + k] = chain over d of q[r * q_row + d] * keys[k][d], without the final + 0.0; k < columns, rounded up to
  // 64 at most (s and keys reach that far); dim a multiple of 16. Few rows, keys in place. Chain mode.
  void (*row_keys)(const float* q, int64_t q_row, int64_t rows, const RowGroups& keys, int64_t dim, int64_t columns,
                   float* s_RK);
  // c[r * c_row + d] = chain over k in [lo, hi) of p[r * 64 + k] * values[k][d], the same. Chain mode.
  void (*row_values)(const float* p_RK, int64_t rows, const RowGroups& values, int64_t lo, int64_t hi, int64_t dim,
                     float* c, int64_t c_row);
  // sum[r] = chain over k in [lo, hi) of p[r * 64 + k] * 1, without the final + 0.0. Chain mode.
  void (*sums)(const float* p_RK, int64_t rows, int64_t lo, int64_t hi, float* sum);

  // The rest in IEEE mode, never fused. Live keys of row r in this block: [lo[r], hi[r]).
  // s = raw chains; scores = s * scale (capped); m = max(m, scores); factor = exp(m_before - m); s = p = exp(s - m),
  // +0 where masked.
  void (*softmax)(float* s_RK, int64_t rows, const int32_t* lo, const int32_t* hi, float scale, float cap, float* m,
                  float* factor);
  // The same for scores in columns, s[k * 64 + r], keys [first, end) of the block and `rows` rows, a multiple of 16.
  // A row without a live key keeps its m, and its factor is anything.
  void (*softmax_columns)(float* s_KR, int64_t rows, int64_t first, int64_t end, const int32_t* lo, const int32_t* hi,
                          float scale, float cap, float* m, float* factor);
  // acc[r] = acc[r] * factor[r] + (block[r] + 0.0), `columns` values per row
  void (*rescale)(float* acc, const float* block, int64_t rows, int64_t columns, int64_t stride, const float* factor);
  // keep[k] = scale where the pair of key 64 * block + k is kept, else +0 (K5); 64 values
  void (*keep)(float* keep, int64_t block, uint32_t position, uint32_t sample, uint32_t head, const PairDropout& drop);
  // s[k * stride] = s[k * stride] * keep[k] where kept, else +0; k in [first, end)
  void (*drop)(float* s, int64_t stride, int64_t first, int64_t end, const float* keep);
  // s = raw chains of q k, dp = raw chains of dO v; s = p = exp(s - m) * w, dp = dS, both +0 where masked. With keep
  // [R][64]: s = p * keep and dS from dp * keep, +0 where dropped; null: no dropout.
  void (*softmax_backward)(float* s_RK, float* dp_RK, int64_t rows, const int32_t* lo, const int32_t* hi, float scale,
                           float cap, const float* m, const float* w, const float* d, const float* keep);
  // sum of x[i] * y[i] by the row rule (ORDER.md A9), n <= 512
  float (*row_dot)(const float* x, const float* y, int64_t n);
  float (*exp)(float x);
  float (*log)(float x);
  bool (*is_finite)(const float* x, int64_t n);
};

const AttentionKernels* attention_portable();
const AttentionKernels* attention_avx2();
const AttentionKernels* attention_avx512f();

// [rows][heads][D] with any strides (in elements).
struct HeadRows {
  const void* data;
  DType dtype;
  int64_t stride_row;
  int64_t stride_head;
  int64_t stride_dim;
};

// Where key `position` of a sequence lies: packed, row first + position; paged, slot position % page of page
// table[position / page].
struct KeyRows {
  HeadRows rows;
  int64_t stride_page = 0;
  int64_t page_size = 0;  // 0: packed
};

struct Sequence {
  int64_t q_first;  // row of its first query
  int64_t q_length;
  int64_t k_first;  // packed: row of its first key
  int64_t k_length;
  const int32_t* pages;  // paged: its row of the block table
};

struct AttentionProblem {
  std::vector<Sequence> sequences;
  std::vector<int64_t> head_offsets;  // G + 1: KV head g serves the query heads [head_offsets[g], head_offsets[g + 1])
  int64_t heads;
  int64_t dim;
  float scale;
  float cap;  // 0: none
  bool causal;
  int64_t window;  // keys that a query sees at most on its left side, itself included; 0: all
  HeadRows q;
  KeyRows k;
  KeyRows v;
  const float* sinks;  // [H] or null
  PairDropout dropout;
};

// out [T][H][D] in `dtype`; m, l fp32 [T][H]: the maximum and the sum of exponentials, contiguous.
struct AttentionResult {
  void* out;
  DType dtype;
  float* m;
  float* l;
};

void attention(const AttentionProblem& problem, const AttentionResult& result, const AttentionKernels& kernels,
               const Loops& loops, const ParallelFor& parallel);

// programs[g]: folds dK, dV of KV head g's query heads (their number is the number of inputs), to a cover or the root.
struct AttentionGradients {
  const HeadRows* grad_out;
  const HeadRows* out;
  const float* m;
  const float* l;
  const std::vector<Schedule>* programs;
  float* dq;           // fp32 [T][H][D]
  float* dk;           // fp32 [S][C][D], C = outputs of all programs
  float* dv;           // the same
  float* d_sink_rows;  // fp32 [T][H] or null: what each row adds to dsinks
  int64_t num_keys;    // S
};

void attention_backward(const AttentionProblem& problem, const AttentionGradients& gradients,
                        const AttentionKernels& kernels, const Loops& loops, const ParallelFor& parallel);

// The attention path that belongs to a GEMM path.
const AttentionKernels& attention_kernels(const std::string& path);

}  // namespace tbik
