// The vocabulary loops of vocab_loops.h, compiled for avx512f. Bits: equal to vocab_portable.cpp.
#include <cstdint>

#include "rows.h"
#include "vocab_kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

namespace tbik {
namespace vocab_avx512f {

namespace {
constexpr int kWidth = 16;
}  // namespace

#include "vocab_loops.h"

namespace {
const VocabLoops kLoops = make_vocab_loops();
}  // namespace
}  // namespace vocab_avx512f
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {
const VocabLoops* avx512f_vocab() { return &vocab_avx512f::kLoops; }
}  // namespace tbik

#else  // not x86-64

namespace tbik {
const VocabLoops* avx512f_vocab() { return nullptr; }
}  // namespace tbik

#endif
