// The sum over contiguous elements. Included by each fingerprint_<isa>.cpp inside its own target region and namespace,
// behind a struct Lanes that holds `kWidth` 64-bit numbers:
//
//   V splat(uint64_t), V ramp(start, step) = start + i*step, V load(const T*) zero-extended, V add(V, V), V mix(V) = M,
//   uint64_t total(V)
//
// No include guard on purpose (see combine_loops.h).

namespace {

inline uint64_t mix_one(uint64_t x) {
  x = (x ^ (x >> 30)) * kMixFirst;
  x = (x ^ (x >> 27)) * kMixSecond;
  return x ^ (x >> 31);
}

template <class T>
uint64_t sum_of(const void* data, int64_t n, uint64_t position, uint64_t step) {
  constexpr int64_t kUnroll = 2;  // two chains of dependent instructions
  constexpr int64_t kStride = kUnroll * Lanes::kWidth;
  const char* x = static_cast<const char*>(data);
  const int64_t whole = n - n % kStride;
  Lanes::V sum[kUnroll];
  Lanes::V key[kUnroll];
  for (int64_t u = 0; u < kUnroll; ++u) {
    sum[u] = Lanes::splat(0);
    key[u] = Lanes::ramp(position + static_cast<uint64_t>(u * Lanes::kWidth) * step, step);
  }
  const Lanes::V advance = Lanes::splat(static_cast<uint64_t>(kStride) * step);
  for (int64_t i = 0; i < whole; i += kStride) {
#pragma GCC unroll 2
    for (int64_t u = 0; u < kUnroll; ++u) {
      const Lanes::V bits = Lanes::load<T>(x + (i + u * Lanes::kWidth) * static_cast<int64_t>(sizeof(T)));
      sum[u] = Lanes::add(sum[u], Lanes::mix(Lanes::add(Lanes::mix(key[u]), bits)));
      key[u] = Lanes::add(key[u], advance);
    }
  }
  uint64_t result = 0;
  for (int64_t u = 0; u < kUnroll; ++u) result += Lanes::total(sum[u]);
  for (int64_t i = whole; i < n; ++i) {
    T bits;
    __builtin_memcpy(&bits, x + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    result += mix_one(mix_one(position + static_cast<uint64_t>(i) * step) + bits);
  }
  return result;
}

const FingerprintKernels kKernels = {{sum_of<uint8_t>, sum_of<uint16_t>, sum_of<uint32_t>, sum_of<uint64_t>}};

}  // namespace
