// The sum over contiguous elements. Included by each fingerprint_<isa>.cpp inside its own target region and namespace,
// behind a struct Lanes that holds `kWidth` 64-bit numbers:
//
//   V splat(uint64_t), V ramp(start, step) = start + i*step, V load(const T*) zero-extended, V add(V, V),
//   V mixed_right<n>(V x) = x ^ x>>n, V times<c>(V), uint64_t total(V)
//
// M is a chain of about forty dependent cycles. kUnroll vectors (Lanes) go through it side by side, step by step: left
// to reorder two whole chains, a CPU's scheduler is full before it reaches the second, and 8-bit elements ran at 0.6 of
// this.
//
// No include guard on purpose (see combine_loops.h).

namespace {

inline uint64_t mix_one(uint64_t x) {
  x = (x ^ (x >> 30)) * kMixFirst;
  x = (x ^ (x >> 27)) * kMixSecond;
  return x ^ (x >> 31);
}

// kUnroll times M.
template <int kUnroll>
inline __attribute__((always_inline)) void mix_all(Lanes::V* x) {
#pragma GCC unroll 8
  for (int u = 0; u < kUnroll; ++u) x[u] = Lanes::mixed_right<30>(x[u]);
  Lanes::times<kMixFirst, kUnroll>(x);
#pragma GCC unroll 8
  for (int u = 0; u < kUnroll; ++u) x[u] = Lanes::mixed_right<27>(x[u]);
  Lanes::times<kMixSecond, kUnroll>(x);
#pragma GCC unroll 8
  for (int u = 0; u < kUnroll; ++u) x[u] = Lanes::mixed_right<31>(x[u]);
}

template <class T>
uint64_t sum_of(const void* data, int64_t n, uint64_t position, uint64_t step) {
  constexpr int kUnroll = Lanes::kUnroll;
  constexpr int64_t kStride = kUnroll * Lanes::kWidth;
  const char* x = static_cast<const char*>(data);
  const int64_t whole = n - n % kStride;
  Lanes::V sum = Lanes::splat(0);
  Lanes::V key = Lanes::ramp(position, step);
  const Lanes::V advance = Lanes::splat(static_cast<uint64_t>(Lanes::kWidth) * step);
  for (int64_t i = 0; i < whole; i += kStride) {
    Lanes::V terms[kUnroll];
#pragma GCC unroll 8
    for (int u = 0; u < kUnroll; ++u) {
      terms[u] = key;
      key = Lanes::add(key, advance);
    }
    mix_all<kUnroll>(terms);
#pragma GCC unroll 8
    for (int u = 0; u < kUnroll; ++u) {
      const Lanes::V bits = Lanes::load<T>(x + (i + u * Lanes::kWidth) * static_cast<int64_t>(sizeof(T)));
      terms[u] = Lanes::add(terms[u], bits);
    }
    mix_all<kUnroll>(terms);
#pragma GCC unroll 8
    for (int u = 0; u < kUnroll; ++u) sum = Lanes::add(sum, terms[u]);
  }
  uint64_t result = Lanes::total(sum);
  for (int64_t i = whole; i < n; ++i) {
    T bits;
    __builtin_memcpy(&bits, x + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    result += mix_one(mix_one(position + static_cast<uint64_t>(i) * step) + bits);
  }
  return result;
}

const FingerprintKernels kKernels = {{sum_of<uint8_t>, sum_of<uint16_t>, sum_of<uint32_t>, sum_of<uint64_t>}};

}  // namespace
