// Attention chains in plain C++: correct on any architecture, called in IEEE mode, the flush written out (ORDER.md A2).
//
//   c[r][n] = chain over k of a[r, k] * b[k, n]
//
// Bits: deterministic, batch-invariant; the reference for attention_avx2.cpp and attention_avx512f.cpp.
#include <cmath>
#include <cstdint>

#include "attention.h"

namespace tbik {
namespace attention_plain {

#include "attention_loops.h"
#include "flushed_fma.h"

namespace {

void chain_tiles(const float* a, int64_t a_row, int64_t a_step, int64_t rows, const float* b, int64_t b_panel,
                 int64_t b_step, int64_t steps, float* c, int64_t c_row, int64_t columns) {
  columns = (columns + 15) / 16 * 16;
  for (int64_t r = 0; r < rows; ++r, a += a_row, c += c_row) {
    for (int64_t n = 0; n < columns; ++n) c[n] = 0.0f;
    for (int64_t k = 0; k < steps; ++k) {
      const float av = flush_input(a[k * a_step]);
      for (int64_t n = 0; n < columns; ++n)
        c[n] = flushed_fma(av, flush_input(b[n / 16 * b_panel + k * b_step + n % 16]), c[n]);
    }
  }
}

void chain_keys(const float* q, int64_t q_row, int64_t rows, const RowGroups& keys, int64_t dim, int64_t columns,
                float* s_RK) {
  for (int64_t r = 0; r < rows; ++r, q += q_row, s_RK += kKeys) {
    for (int64_t k = 0; k < columns; ++k) {
      const float* key = static_cast<const float*>(keys.group[k / 8]) + k % 8 * keys.stride;
      float acc = 0.0f;
      for (int64_t d = 0; d < dim; ++d) acc = flushed_fma(flush_input(q[d]), flush_input(key[d]), acc);
      s_RK[k] = acc;
    }
  }
}

void chain_values(const float* p_RK, int64_t rows, const RowGroups& values, int64_t lo, int64_t hi, int64_t dim,
                  float* c, int64_t c_row) {
  for (int64_t r = 0; r < rows; ++r, p_RK += kKeys, c += c_row) {
    for (int64_t d = 0; d < dim; ++d) c[d] = 0.0f;
    for (int64_t k = lo; k < hi; ++k) {
      const float* value = static_cast<const float*>(values.group[k / 8]) + k % 8 * values.stride;
      const float p = flush_input(p_RK[k]);
      for (int64_t d = 0; d < dim; ++d) c[d] = flushed_fma(p, flush_input(value[d]), c[d]);
    }
  }
}

void chain_sums(const float* p_RK, int64_t rows, int64_t lo, int64_t hi, float* sum) {
  for (int64_t r = 0; r < rows; ++r) {
    sum[r] = 0.0f;
    for (int64_t k = lo; k < hi; ++k) sum[r] = flushed_fma(flush_input(p_RK[r * kKeys + k]), 1.0f, sum[r]);
  }
}

const AttentionKernels kKernels =
    make_attention("portable", false, false, chain_tiles, chain_keys, chain_values, chain_sums);

}  // namespace
}  // namespace attention_plain

const AttentionKernels* attention_portable() { return &attention_plain::kKernels; }

}  // namespace tbik
