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

// 16 adjacent elements, one per lane of a sum. fp32: in their order. bf16: registers hold pairs of elements, the first
// of a pair is the low half and becomes fp32 by a shift, the second by clearing that half, so no lane has to move; the
// order is then 0, 2, 4, ... in one register and 1, 3, 5, ... in the next. (A register of 16 lanes would hold two
// terms of one lane.)
struct Lanes {
  Vec v[kVecs];
};

template <class T>
constexpr bool kPaired = __is_same(T, Bf16) && kWidth < kLanes;

inline __attribute__((always_inline)) void load_pairs(const Bf16* p, Vec& first, Vec& second) {
  UVec u;
  __builtin_memcpy(&u, p, sizeof(u));
  first = reinterpret_cast<Vec>(u << 16);
  second = reinterpret_cast<Vec>(u & 0xffff0000u);
}

template <class T>
inline __attribute__((always_inline)) Lanes load_lanes(const T* p) {
  Lanes x;
  if constexpr (kPaired<T>) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v += 2) load_pairs(p + v * kWidth, x.v[v], x.v[v + 1]);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) x.v[v] = widen_vec(p + v * kWidth);
  }
  return x;
}

// A power of two of lanes: the canonical tree pairs neighbours, level by level.
template <class T>
inline float fold_lanes(const Vec* acc) {
  float lanes[kLanes];
  float pairs[8];
  float fours[4];
  if constexpr (kPaired<T>) {
    Vec sums[kVecs / 2 + 1];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v += 2) sums[v / 2] = acc[v] + acc[v + 1];
    __builtin_memcpy(pairs, sums, sizeof(pairs));
  } else {
    __builtin_memcpy(lanes, acc, sizeof(lanes));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) pairs[i] = lanes[2 * i] + lanes[2 * i + 1];
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) fours[i] = pairs[2 * i] + pairs[2 * i + 1];
  return (fours[0] + fours[1]) + (fours[2] + fours[3]);
}

// The place of element i of 16 among the lanes.
template <class T>
constexpr int place_of(int i) {
  if (!kPaired<T>) return i;
  return i / (2 * kWidth) * (2 * kWidth) + i % 2 * kWidth + i % (2 * kWidth) / 2;
}

template <class Term, class T>
struct Operands {
  const T* a;
  const T* b;
  Term term;
};

// Terms of kSums sums: lanes(i, out) those of the 16 elements from i on, one(i, out) those of element i.
template <class Term, class T>
struct TermsOf : Operands<Term, T> {
  static constexpr int kSums = 1;
  using Element = T;
  __attribute__((always_inline)) void lanes(int64_t i, Lanes* out) const {
    const Lanes x = load_lanes(this->a + i);
    const Lanes y = load_lanes(this->b + i);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) out->v[v] = this->term.of(x.v[v], y.v[v]);
  }
  __attribute__((always_inline)) void one(int64_t i, float* out) const {
    *out = this->term.of(widen(this->a[i]), widen(this->b[i]));
  }
};

// The terms of a sum of one or two rows.
struct Single {
  template <class T>
  __attribute__((always_inline)) T of(T a, T) const {
    return a;
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

// B whole blocks from element `at` on side by side, so that one addition need not wait for the last. Sum s of block b
// goes to sums[s * stride + b].
template <int B, class Terms>
inline void sum_whole_blocks(const Terms& terms, int64_t at, float* sums, int64_t stride) {
  constexpr int kSums = Terms::kSums;
  Vec acc[B][kSums][kVecs];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) {
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[b][s][v] = Vec{};
    }
  }
  for (int64_t i = at; i < at + kRowBlock; i += kLanes) {
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      Lanes term[kSums];
      terms.lanes(i + b * kRowBlock, term);
#pragma GCC unroll 2
      for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) acc[b][s][v] = acc[b][s][v] + term[s].v[v];
      }
    }
  }
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) {
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) sums[s * stride + b] = fold_lanes<typename Terms::Element>(acc[b][s]);
  }
}

// One block of n <= 512 elements. Sum s goes to sums[s * stride].
template <class Terms>
inline void sum_block(const Terms& terms, int64_t at, int64_t n, float* sums, int64_t stride) {
  using T = typename Terms::Element;
  constexpr int kSums = Terms::kSums;
  Vec acc[kSums][kVecs];
#pragma GCC unroll 2
  for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[s][v] = Vec{};
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes term[kSums];
    terms.lanes(at + i, term);
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[s][v] = acc[s][v] + term[s].v[v];
    }
  }
  if (i < n) {
    // A lane without an element adds +0, which changes nothing: it starts at +0 and never becomes -0.
    float lanes[kSums][kLanes] = {};
    for (int j = 0; i + j < n; ++j) {
      float term[kSums];
      terms.one(at + i + j, term);
      for (int s = 0; s < kSums; ++s) lanes[s][place_of<T>(j)] = term[s];
    }
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[s][v] = acc[s][v] + load_vec(lanes[s] + v * kWidth);
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < kSums; ++s) sums[s * stride] = fold_lanes<T>(acc[s]);
}

// The S sums of n elements. `sums`: memory for S * ceil(n / 512) block sums.
template <class Terms>
inline void row_sums(const Terms& terms, int64_t n, float* sums, float* out) {
  constexpr int kSums = Terms::kSums;
  constexpr int kTogether = 4 / kSums;
  if (n <= kRowBlock) return sum_block(terms, 0, n, out, 1);
  const int64_t stride = (n + kRowBlock - 1) / kRowBlock;
  int64_t block = 0;
  int64_t i = 0;
  for (; i + kTogether * kRowBlock <= n; i += kTogether * kRowBlock, block += kTogether) {
    sum_whole_blocks<kTogether>(terms, i, sums + block, stride);
  }
  if constexpr (kTogether > 2) {
    for (; i + 2 * kRowBlock <= n; i += 2 * kRowBlock, block += 2) {
      sum_whole_blocks<2>(terms, i, sums + block, stride);
    }
  }
  for (; i + kRowBlock <= n; i += kRowBlock) sum_whole_blocks<1>(terms, i, sums + block++, stride);
  if (i < n) sum_block(terms, i, n - i, sums + block++, stride);
  for (int s = 0; s < kSums; ++s) out[s] = fold_canonical(sums + s * stride, block);
}

// `sums`: memory for ceil(n / 512) block sums. b: a second row, or a again where the term has one factor.
template <class Term, class T>
inline float row_sum(const T* a, const T* b, int64_t n, float* sums, Term term = Term{}) {
  float out;
  row_sums(TermsOf<Term, T>{{a, b, term}}, n, sums, &out);
  return out;
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
