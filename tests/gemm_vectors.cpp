// Runs the torch-free GEMM on operands from standard input, for machines without torch (tests/test_cross.py).
//
//   in:  int64 m, n, k, leaves, compute; x_MK, w_NK in the compute type      out: y_MN in the accumulation type
//
// The process's floating-point mode is set to flush first (FPCR.FZ on aarch64), which must change nothing and must be
// found unchanged afterwards; exit status 3 if it is not.
#include <cstdio>
#include <vector>

#include "../csrc/fpmode.h"
#include "../csrc/gemm.h"

namespace {

template <class T>
std::vector<T> read(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (std::fread(values.data(), sizeof(T), values.size(), stdin) != values.size()) std::exit(2);
  return values;
}

void serial(int64_t count, const std::function<void(int64_t, int64_t)>& body) { body(0, count); }

}  // namespace

int main() {
  using namespace tbik;
#if defined(__aarch64__)
  const uint64_t flush = uint64_t{1} << 24;
#else
  const uint64_t flush = kFpFlush;
#endif
  for (int64_t header[5]; std::fread(header, sizeof(header), 1, stdin) == 1;) {
    const auto [m, n, k, leaves, code] = header;
    const DType compute = static_cast<DType>(code);
    const int64_t size = size_of(compute);
    const std::vector<char> x = read<char>(m * k * size);
    const std::vector<char> w = read<char>(n * k * size);
    std::vector<char> y(static_cast<size_t>(m * n * size_of(accumulation(compute))));
    const ChainLayout layout({cuts(k, leaves)}, compute);
    const std::vector<Operand> right = {{w.data(), compute, k, 1}};
    fp_set(flush);
    gemm({{x.data(), compute, k, 1}}, m, {nullptr, &right, n}, layout, schedule(leaf_nodes(0, leaves), leaves), nullptr,
         {y.data(), accumulation(compute), 0, n}, {&find_path("portable", compute)}, serial);
    if (fp_flush_bits() == 0) return 3;
    fp_set(kFpIeee);
    std::fwrite(y.data(), 1, y.size(), stdout);
  }
  return 0;
}
