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
typedef int32_t IVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UVec __attribute__((vector_size(kWidth * 4)));
constexpr int kLanes = 16;
constexpr int kVecs = kLanes / kWidth;
constexpr int64_t kRowBlock = 512;

inline Vec load_vec(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

inline __attribute__((always_inline)) Vec widen_vec(const float* p) { return load_vec(p); }
inline __attribute__((always_inline)) Vec widen_vec(const Bf16* p) {
  typedef uint16_t Half __attribute__((vector_size(kWidth * 2)));
  Half h;
  __builtin_memcpy(&h, p, sizeof(h));
  return reinterpret_cast<Vec>(__builtin_convertvector(h, UVec) << 16);
}

// The terms of a sum of one or two rows.
struct Single {
  template <class T>
  __attribute__((always_inline)) T of(T a, T) const {
    return a;
  }
};
struct Product {
  template <class T>
  __attribute__((always_inline)) T of(T a, T b) const {
    return a * b;
  }
};
struct Square {
  template <class T>
  __attribute__((always_inline)) T of(T a, T) const {
    return a * a;
  }
};
struct CentredSquare {
  float mean;
  template <class T>
  __attribute__((always_inline)) T of(T a, T) const {
    const T d = a - mean;
    return d * d;
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
template <int B, class Term, class T>
inline void sum_whole_blocks(const T* a, const T* b, float* sums, Term term = Term{}) {
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
        acc[s][v] = acc[s][v] + term.of(widen_vec(a + at), widen_vec(b + at));
      }
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < B; ++s) sums[s] = fold_lanes(acc[s]);
}

// One block of n <= 512 elements.
template <class Term, class T>
inline float sum_block(const T* a, const T* b, int64_t n, Term term = Term{}) {
  Vec acc[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) acc[v] = Vec{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      acc[v] = acc[v] + term.of(widen_vec(a + i + v * kWidth), widen_vec(b + i + v * kWidth));
    }
  }
  if (i < n) {
    // A lane without an element adds +0, which changes nothing: it starts at +0 and never becomes -0.
    float terms[kLanes] = {};
    for (int64_t j = 0; i + j < n; ++j) terms[j] = term.of(widen(a[i + j]), widen(b[i + j]));
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[v] = acc[v] + load_vec(terms + v * kWidth);
  }
  return fold_lanes(acc);
}

// `sums`: memory for ceil(n / 512) block sums. b: a second row, or a again where the term has one factor.
template <class Term, class T>
inline float row_sum(const T* a, const T* b, int64_t n, float* sums, Term term = Term{}) {
  if (n <= kRowBlock) return sum_block(a, b, n, term);
  int64_t block = 0;
  int64_t i = 0;
  constexpr int kTogether = 4;
  for (; i + kTogether * kRowBlock <= n; i += kTogether * kRowBlock, block += kTogether) {
    sum_whole_blocks<kTogether>(a + i, b + i, sums + block, term);
  }
  for (; i + kRowBlock <= n; i += kRowBlock) sum_whole_blocks<1>(a + i, b + i, sums + block++, term);
  if (i < n) sums[block++] = sum_block(a + i, b + i, n - i, term);
  return fold_canonical(sums, block);
}

// -0 < +0 < ... < inf < NaN as signed integers; a negative NaN is found by its own test.
template <class T>
inline float row_max(const T* x, int64_t n) {
  int32_t highest = static_cast<int32_t>(0x807fffffu);  // the key of -inf
  uint32_t nan = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits(widen(x[i]));
    const int32_t key = static_cast<int32_t>(u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) & 0x7fffffffu));
    highest = key > highest ? key : highest;
    nan |= (u & 0x7fffffffu) > 0x7f800000u ? 1u : 0u;
  }
  if (nan != 0) return as_f32(0x7fc00000u);
  const uint32_t k = static_cast<uint32_t>(highest);
  return as_f32(k ^ (static_cast<uint32_t>(highest >> 31) & 0x7fffffffu));
}

}  // namespace
