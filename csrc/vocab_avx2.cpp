// The vocabulary loops of vocab_loops.h, compiled for avx2. Bits: equal to vocab_portable.cpp.
#include <cstdint>

#include "rows.h"
#include "vocab_kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace tbik {
namespace vocab_avx2 {

namespace {
constexpr int kWidth = 8;
}  // namespace

#include "vocab_loops.h"

namespace {
const VocabLoops kLoops = make_vocab_loops();
}  // namespace
}  // namespace vocab_avx2
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {
const VocabLoops* avx2_vocab() { return &vocab_avx2::kLoops; }
}  // namespace tbik

#else  // not x86-64

namespace tbik {
const VocabLoops* avx2_vocab() { return nullptr; }
}  // namespace tbik

#endif
