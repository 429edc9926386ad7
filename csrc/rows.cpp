// Drivers of the row-wise operators and the choice of path: see rows.h.
#include "rows.h"

#include <cstring>

#include "gemm.h"
#include "tree.h"

namespace tbik {

namespace {

float fold_range(const float* values, int64_t lo, int64_t hi) {
  if (hi - lo == 1) return values[lo];
  const int64_t mid = middle(lo, hi);
  return fold_range(values, lo, mid) + fold_range(values, mid, hi);
}

}  // namespace

float fold_canonical(const float* values, int64_t n) { return n == 0 ? 0.0f : fold_range(values, 0, n); }

const Rows& find_rows(const std::string& path) {
  const DType compute = path == "avx512_bf16" ? DType::kBFloat16 : DType::kFloat32;
  const char* name = find_path(path, compute).name;
  if (std::strcmp(name, "portable") == 0) return *portable_rows();
  if (std::strcmp(name, "avx2") == 0) return *avx2_rows();
  return *avx512f_rows();
}

}  // namespace tbik
