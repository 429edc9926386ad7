// Portable tree-GEMM chains: plain C++, correct on any architecture and in any hardware mode it is called in (IEEE).
//
//   acc = +0; for k ascending: acc = flush(fma(a_k, b_k, acc))      flush = ORDER.md A2, written out (FTZ + DAZ of x86)
//
// a_KR fp32 or fp64, b_KP fp32 or fp64, acc_RP in the same type. fp64 does not flush. deterministic, batch-invariant.
#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace tbik {
namespace portable {

#include "combine_loops.h"
#include "flushed_fma.h"

namespace {

template <int R>
void chain_f32(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first, const void*) {
  const float* a = static_cast<const float*>(a_KR);
  const float* b = static_cast<const float*>(b_KP);
  float* acc = static_cast<float*>(acc_RP);
  if (first) {
    for (int i = 0; i < R * kPanel; ++i) acc[i] = 0.0f;
  }
  for (int64_t k = 0; k < steps; ++k, a += R, b += kPanel) {
    for (int r = 0; r < R; ++r) {
      const float av = flush_input(a[r]);
      for (int p = 0; p < kPanel; ++p) {
        acc[r * kPanel + p] = flushed_fma(av, flush_input(b[p]), acc[r * kPanel + p]);
      }
    }
  }
}

template <int R>
void chain_f64(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first, const void*) {
  const double* a = static_cast<const double*>(a_KR);
  const double* b = static_cast<const double*>(b_KP);
  double* acc = static_cast<double*>(acc_RP);
  if (first) {
    for (int i = 0; i < R * kPanel; ++i) acc[i] = 0.0;
  }
  for (int64_t k = 0; k < steps; ++k, a += R, b += kPanel) {
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < kPanel; ++p) acc[r * kPanel + p] = std::fma(a[r], b[p], acc[r * kPanel + p]);
    }
  }
}

#define TBIK_ROWS(chain) {chain<1>, chain<2>, chain<3>, chain<4>, chain<5>, chain<6>}
const ChainTable kF32 = {{TBIK_ROWS(chain_f32), TBIK_ROWS(chain_f32), TBIK_ROWS(chain_f32)}};
const ChainTable kF64 = {{TBIK_ROWS(chain_f64), TBIK_ROWS(chain_f64), TBIK_ROWS(chain_f64)}};
#undef TBIK_ROWS

const Loops kLoops = make_loops(transpose_plain);
const GemmKernels kKernels = {
    "portable", &kLoops,           false,          false, &kF32, &kF64, nullptr, nullptr, nullptr,
    nullptr,    widen_pairs_plain, widen_f16_plain};

}  // namespace
}  // namespace portable

const GemmKernels* portable_kernels() { return &portable::kKernels; }

}  // namespace tbik
