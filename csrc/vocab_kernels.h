// What one instruction set provides for the vocabulary operators (vocab.h). One text, vocab_loops.h, compiled once per
// set: every table computes the same bits. x, dp, dy, dx: contiguous pieces of a row in the table's dtype.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"

namespace tbik {

struct VocabTable {
  float (*max)(const void* x, int64_t n);
  // One value per block of 512 of a leaf: of x, of e = exp(x - m) (kept in `e` unless null), of p*dp.
  void (*sums)(float* sums, const void* x, int64_t n);
  void (*exp_sums)(float* sums, const void* x, int64_t n, float m, float* e);
  void (*dots)(float* sums, const float* p, const void* dp, int64_t n);
  void (*softmax_p)(float* p, const void* x, int64_t n, float m, float s);  // p = exp(x - m) / s
  void (*divide)(void* y, const float* e, int64_t n, float s);              // y = cast(e / s); y may be e
  void (*softmax_dx)(void* dx, const float* p, const void* dp, int64_t n, float d);
  void (*subtract)(void* y, const void* x, int64_t n, float lse);  // y = cast(x - lse)
  void (*log_softmax_dx)(void* dx, const void* dy, const void* x, int64_t n, float lse, float total);
  void (*cross_entropy_dx)(void* dx, const void* x, int64_t n, float lse, float g);  // cast(g * exp(x - lse))
  void (*cross_entropy_hit)(void* dx, const void* x, float lse, float g);            // cast(g * (exp(x - lse) - 1))
  int64_t (*first_above)(const void* x, int64_t begin, int64_t n, int32_t above);
  float (*value_at)(const void* x, int64_t i);
};

struct VocabLoops {
  VocabTable f32;
  VocabTable bf16;
  VocabTable f16;
  void (*finish_log_sum_exp)(const float* m, const float* s, float* lse, int64_t n);
  void (*losses)(float* loss, const float* lse, const float* picked, const int64_t* targets, int64_t ignored,
                 int64_t n);
  int32_t (*key_of)(float x);  // ascending with x: NaN highest, -0 = +0

  const VocabTable& of(DType dtype) const {
    return dtype == DType::kFloat32 ? f32 : dtype == DType::kBFloat16 ? bf16 : f16;
  }
};

const VocabLoops* portable_vocab();
const VocabLoops* avx2_vocab();  // null where it was not compiled; whether the CPU can run it, find_path knows
const VocabLoops* avx512f_vocab();

// The loops of a path of find_path, by name; "" = the fastest.
const VocabLoops& find_vocab(const std::string& path);

}  // namespace tbik
