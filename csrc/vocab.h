// Vocabulary operators: softmax, log-softmax, cross-entropy, their gradients, and the k largest of a row.
//
//   m = maximum of the row      s = row sum of exp(x - m)      lse = m + log s                 (ORDER.md A9, A10, V1)
//   softmax:        p = exp(x - m) / s               dx = p * (dp - row sum of p*dp)                           (V2, V3)
//   log-softmax:    logp = x - lse                   dx = dy - exp(x - lse) * row sum of dy                    (V4, V5)
//   cross-entropy:  loss = lse - x_t                 dx_j = g * (exp(x_j - lse) - [j == t])                    (V6, V7)
//
// A row is x [V] or a run of its leaves; every sum can be left as the nodes of that run's cover, so that a vocabulary
// in shards gives the same bits. bf16, fp16 and fp32 in; fp32 inside; one rounding per result. Never fused, never
// flushed. Suffixes: M rows, V columns (the vocabulary, or this rank's part of it), C nodes of a cover. Torch-free.
// Guarantees: deterministic, batch-invariant, layout-invariant through the schedule; threads, path and floating-point
// mode change no bit. Errors: std::invalid_argument.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gemm.h"
#include "kernels.h"
#include "rows.h"
#include "tree.h"
#include "vocab_kernels.h"

namespace tbik {

// Element (r, j) lies at data[r * stride_row + j * stride_column], in elements.
struct RowInput {
  const void* data;
  DType dtype;
  int64_t rows;
  int64_t columns;
  int64_t stride_row;
  int64_t stride_column;
};

// The leaves [lo, hi) of a vocabulary of `length`; to_root: all of them, folded to the root.
struct LeafRun {
  int64_t length;
  int64_t leaves;
  int64_t lo;
  int64_t hi;
  bool to_root;
};

// Cuts inside the run's columns, and the additions that make the cover (or the root) of the blocks of all its leaves.
struct RowOrder {
  RowOrder(const LeafRun& run, int64_t columns);

  int64_t outputs() const { return static_cast<int64_t>(program.outputs.size()); }

  std::vector<int64_t> cuts;
  Schedule program;
};

struct VocabContext {
  const VocabLoops& loops;
  const ParallelFor& parallel;
};

// m_M: IEEE 754-2019 maximum, -inf of nothing, NaN canonical (A8).
void row_max(const RowInput& x, float* m_M, const VocabContext& context);

// sums_CM: row sum of x, or of exp(x - m) if m_M is not null.
void row_sums(const RowInput& x, const float* m_M, const RowOrder& order, float* sums_CM, const VocabContext& context);

// lse = m + log s; -inf for m = -inf.
void finish_log_sum_exp(const float* m, const float* s, float* lse, int64_t n, const VocabContext& context);

// lse_M of whole rows: the maximum first, then the sum over a row that is in cache.
void log_sum_exp(const RowInput& x, const RowOrder& order, float* lse_M, const VocabContext& context);

// p_MV = cast(exp(x - m) / s), contiguous, in x's dtype; m_M and s_M are results, or given.
void softmax(const RowInput& x, const RowOrder& order, float* m_M, float* s_M, void* p_MV, const VocabContext& context);
void softmax_of(const RowInput& x, const float* m_M, const float* s_M, void* p_MV, const VocabContext& context);

// dots_CM: row sum of p*dp, p = exp(x - m) / s in fp32.
void softmax_dots(const RowInput& dp, const RowInput& x, const float* m_M, const float* s_M, const RowOrder& order,
                  float* dots_CM, const VocabContext& context);

// dx_MV = cast(p * (dp - d)); d_M given, or null: computed by `order` in the same pass.
void softmax_dx(const RowInput& dp, const RowInput& x, const float* m_M, const float* s_M, const float* d_M,
                const RowOrder& order, void* dx_MV, const VocabContext& context);

// y_MV = cast(x - lse); lse_M is a result, or given.
void log_softmax(const RowInput& x, const RowOrder& order, float* lse_M, void* y_MV, const VocabContext& context);
void log_softmax_of(const RowInput& x, const float* lse_M, void* y_MV, const VocabContext& context);

// dx_MV = cast(dy - exp(x - lse) * total); total_M given, or null: computed by `order`.
void log_softmax_dx(const RowInput& dy, const RowInput& x, const float* lse_M, const float* total_M,
                    const RowOrder& order, void* dx_MV, const VocabContext& context);

// loss_M = lse - x_t, +0 where the target is ignored. x_t given in fp32.
void cross_entropy_losses(const float* lse_M, const float* picked_M, const int64_t* targets_M, int64_t ignore_index,
                          float* loss_M, int64_t rows, const VocabContext& context);

// picked_M = x[r, ids[r, i] - first] in fp32, -0 (the neutral element of A8) where the id lies in no column.
void pick(const RowInput& x, const int64_t* ids_Mn, int64_t n, int64_t first, float* picked_Mn,
          const VocabContext& context);

// dx_MV = cast(g_r * (exp(x - lse) - [j + first == t])), +0 in the rows whose target is ignored.
void cross_entropy_dx(const float* g_M, const RowInput& x, const int64_t* targets_M, const float* lse_M, int64_t first,
                      int64_t ignore_index, void* dx_MV, const VocabContext& context);

// The k first of each row in the order (value descending, NaN before everything, -0 = +0; then id ascending): their
// values in fp32 and their ids, j + first or, if given, ids_MV[r, j] (negative: no entry). Fewer than k entries: the
// rest is (-inf, -1).
void top_k(const RowInput& x, const int64_t* ids_MV, int64_t first, int64_t k, float* values_Mk, int64_t* ids_Mk,
           const VocabContext& context);

// sums_B: per sample the tree over blocks of 512 tokens of the chain acc = acc + loss (ORDER.md S1 with b = 1, A2).
void token_sums(const float* loss_T, const std::vector<int64_t>& offsets, float* sums_B);

}  // namespace tbik
