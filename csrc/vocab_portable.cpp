// The vocabulary loops in plain C++, for any architecture; and the choice among the tables.
#include <cstdint>
#include <string>

#include "gemm.h"
#include "rows.h"
#include "vocab_kernels.h"

namespace tbik {
namespace vocab_portable {

namespace {
constexpr int kWidth = 4;
}  // namespace

#include "vocab_loops.h"

namespace {
const VocabLoops kLoops = make_vocab_loops();
}  // namespace
}  // namespace vocab_portable

const VocabLoops* portable_vocab() { return &vocab_portable::kLoops; }

const VocabLoops& find_vocab(const std::string& path) {
  const std::string name = find_path(path, DType::kBFloat16).name;
  const VocabLoops* loops = name.starts_with("avx512") ? avx512f_vocab() : name == "avx2" ? avx2_vocab() : nullptr;
  return loops == nullptr ? *portable_vocab() : *loops;
}

}  // namespace tbik
