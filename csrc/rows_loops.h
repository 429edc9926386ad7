// The row-wise kernels of one instruction set. Included by each rows_<isa>.cpp inside its own target region and
// namespace (the technique of csrc/combine_loops.h). No include guard on purpose; internal linkage.
//
// Mode: IEEE (csrc/fpmode.h), but for chain_columns. Never fused, but for chain_columns.

#include "convert_loops.h"
#include "elementary.h"
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
#undef TBIK_MAP

void map_sin_cos(float* sin_a, float* cos_a, const float* angle, int64_t n) {
  for (int64_t i = 0; i < n; ++i) elementary::sin_cos(angle[i], sin_a + i, cos_a + i);
}

float sum_of_row(const float* x, int64_t n, float* sums) { return row_sum<Single>(x, x, n, sums); }
float max_of_row(const float* x, int64_t n) { return row_max(x, n); }

constexpr Rows make_rows(const char* name) {
  return {.name = name,
          .exp = map_exp,
          .log = map_log,
          .sigmoid = map_sigmoid,
          .tanh = map_tanh,
          .silu = map_silu,
          .sin_cos = map_sin_cos,
          .row_sum = sum_of_row,
          .row_max = max_of_row};
}

}  // namespace
