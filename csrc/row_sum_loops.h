// Sum and maximum of one fp32 row (ORDER.md A8, A9). Included by each <kernel>_<isa>.cpp inside its own target region
// and namespace, after convert_loops.h; the file sets kWidth (fp32 lanes of a register: 4, 8 or 16) before. No include
// guard on purpose; internal linkage.
//
//   sum:  blocks of 512; in a block lane j of 16 adds the terms j, j + 16, ... from +0, each rounded to fp32 first;
//         canonical tree over the lanes; canonical tree over the blocks
//   max:  IEEE 754-2019 maximum: NaN wins (canonical), +0 > -0; -inf for an empty row
//
// Mode: IEEE. Guarantee: deterministic, batch-invariant; bits independent of kWidth.

namespace {

typedef float Vec __attribute__((vector_size(kWidth * 4)));
constexpr int kLanes = 16;
constexpr int kVecs = kLanes / kWidth;
constexpr int64_t kRowBlock = 512;

inline Vec load_vec(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

// The terms of a sum of one or two rows. A term of two zeros must be +0 (the padding of a last group of 16).
struct Single {
  template <class T>
  static T of(T a, T) {
    return a;
  }
};
struct Product {
  template <class T>
  static T of(T a, T b) {
    return a * b;
  }
};

// A power of two of lanes: the canonical tree pairs neighbours, level by level.
inline float fold_lanes(const Vec* acc) {
  float lanes[kLanes];
  __builtin_memcpy(lanes, acc, sizeof(lanes));
  float pairs[8];
  float fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) pairs[i] = lanes[2 * i] + lanes[2 * i + 1];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) fours[i] = pairs[2 * i] + pairs[2 * i + 1];
  return (fours[0] + fours[1]) + (fours[2] + fours[3]);
}

// B whole blocks side by side, so that one addition need not wait for the last.
template <int B, class Term>
inline void sum_whole_blocks(const float* a, const float* b, float* sums) {
  Vec acc[B][kVecs];
#pragma GCC unroll 8
  for (int s = 0; s < B; ++s) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[s][v] = Vec{};
  }
  for (int64_t i = 0; i < kRowBlock; i += kLanes) {
#pragma GCC unroll 8
    for (int s = 0; s < B; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const int64_t at = s * kRowBlock + i + v * kWidth;
        acc[s][v] = acc[s][v] + Term::of(load_vec(a + at), load_vec(b + at));
      }
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < B; ++s) sums[s] = fold_lanes(acc[s]);
}

// One block of n <= 512 elements.
template <class Term>
inline float sum_block(const float* a, const float* b, int64_t n) {
  Vec acc[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) acc[v] = Vec{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      acc[v] = acc[v] + Term::of(load_vec(a + i + v * kWidth), load_vec(b + i + v * kWidth));
    }
  }
  if (i < n) {
    // A lane without an element adds +0, which changes nothing: it starts at +0 and never becomes -0.
    float tail_a[kLanes] = {};
    float tail_b[kLanes] = {};
    for (int64_t j = 0; i + j < n; ++j) {
      tail_a[j] = a[i + j];
      tail_b[j] = b[i + j];
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      acc[v] = acc[v] + Term::of(load_vec(tail_a + v * kWidth), load_vec(tail_b + v * kWidth));
    }
  }
  return fold_lanes(acc);
}

// `sums`: memory for ceil(n / 512) block sums. b: a second row, or a again where the term has one factor.
template <class Term>
inline float row_sum(const float* a, const float* b, int64_t n, float* sums) {
  if (n <= kRowBlock) return sum_block<Term>(a, b, n);
  int64_t block = 0;
  int64_t i = 0;
  constexpr int kTogether = kVecs == 1 ? 4 : 4 / (kVecs > 2 ? 2 : 1);
  for (; i + kTogether * kRowBlock <= n; i += kTogether * kRowBlock, block += kTogether) {
    sum_whole_blocks<kTogether, Term>(a + i, b + i, sums + block);
  }
  for (; i + kRowBlock <= n; i += kRowBlock) sum_whole_blocks<1, Term>(a + i, b + i, sums + block++);
  if (i < n) sums[block++] = sum_block<Term>(a + i, b + i, n - i);
  return fold_canonical(sums, block);
}

// -0 < +0 < ... < inf < NaN as signed integers; a negative NaN is found by its own test.
inline float row_max(const float* x, int64_t n) {
  int32_t highest = static_cast<int32_t>(0x807fffffu);  // the key of -inf
  uint32_t nan = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits(x[i]);
    const int32_t key = static_cast<int32_t>(u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) & 0x7fffffffu));
    highest = key > highest ? key : highest;
    nan |= (u & 0x7fffffffu) > 0x7f800000u ? 1u : 0u;
  }
  if (nan != 0) return as_f32(0x7fc00000u);
  const uint32_t k = static_cast<uint32_t>(highest);
  return as_f32(k ^ (static_cast<uint32_t>(highest >> 31) & 0x7fffffffu));
}

}  // namespace
