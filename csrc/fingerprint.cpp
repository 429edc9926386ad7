// Driver of the fingerprint: walks a strided box in the order of memory, in parallel. See fingerprint.h.
//
// The sum is an integer sum, so the walk is free to go along whichever dimension is cheapest, and partial sums of
// threads may be added in any order.
#include "fingerprint.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tbik {

namespace fingerprint_portable {

namespace {

struct Lanes {
  using V = uint64_t;
  static constexpr int64_t kWidth = 1;
  static constexpr int kUnroll = 2;
  static V splat(uint64_t x) { return x; }
  static V ramp(uint64_t start, uint64_t) { return start; }
  template <class T>
  static V load(const char* x) {
    T bits;
    std::memcpy(&bits, x, sizeof(T));
    return bits;
  }
  static V add(V a, V b) { return a + b; }
  template <int n>
  static V mixed_right(V x) {
    return x ^ (x >> n);
  }
  template <uint64_t c, int kVectors>
  static void times(V* x) {
    for (int u = 0; u < kVectors; ++u) x[u] *= c;
  }
  static uint64_t total(V x) { return x; }
};

}  // namespace

#include "fingerprint_loops.h"

}  // namespace fingerprint_portable

const FingerprintKernels* portable_fingerprint() { return &fingerprint_portable::kKernels; }

namespace {

constexpr int64_t kBlock = 1 << 16;  // elements of one work item
constexpr int64_t kVectorRow = 32;   // a contiguous dimension of at least this many elements is walked directly
constexpr int64_t kGather = 512;     // elements gathered at a time where memory is not contiguous

const FingerprintKernels& find_fingerprint(const std::string& path) {
  const std::string name = find_path(path, path == "avx512_bf16" ? DType::kBFloat16 : DType::kFloat32).name;
  const FingerprintKernels* kernels = name.rfind("avx512", 0) == 0 ? avx512f_fingerprint()
                                      : name == "avx2"             ? avx2_fingerprint()
                                                                   : portable_fingerprint();
  if (kernels == nullptr) throw std::logic_error("fingerprint: path '" + name + "' has no kernels on this CPU");
  return *kernels;
}

// Dimensions of one element leave; neighbours that are one run in memory and in index become one dimension.
std::vector<BoxDim> coalesced(std::vector<BoxDim> dims) {
  std::erase_if(dims, [](const BoxDim& dim) { return dim.size == 1; });
  std::stable_sort(dims.begin(), dims.end(),
                   [](const BoxDim& a, const BoxDim& b) { return a.stride_bytes > b.stride_bytes; });
  std::vector<BoxDim> result;
  for (const BoxDim& dim : dims) {
    if (!result.empty() && result.back().stride_bytes == dim.stride_bytes * dim.size &&
        result.back().index_stride == dim.index_stride * static_cast<uint64_t>(dim.size)) {
      result.back() = {result.back().size * dim.size, dim.stride_bytes, dim.index_stride};
    } else {
      result.push_back(dim);
    }
  }
  return result;
}

// The dimension of the inner loop, taken out of dims.
BoxDim take_inner(std::vector<BoxDim>& dims, int64_t element_size) {
  if (dims.empty()) return {1, element_size, 0};
  auto inner = std::find_if(dims.begin(), dims.end(), [&](const BoxDim& dim) {
    return dim.stride_bytes == element_size && dim.size >= kVectorRow;
  });
  if (inner == dims.end()) {
    inner =
        std::max_element(dims.begin(), dims.end(), [](const BoxDim& a, const BoxDim& b) { return a.size < b.size; });
  }
  const BoxDim dim = *inner;
  dims.erase(inner);
  return dim;
}

template <class T>
uint64_t sum_gathered(const char* data, int64_t stride_bytes, int64_t n, uint64_t position, uint64_t step,
                      FingerprintFn sum) {
  T values[kGather];
  uint64_t result = 0;
  for (int64_t begin = 0; begin < n; begin += kGather) {
    const int64_t count = std::min(kGather, n - begin);
    for (int64_t i = 0; i < count; ++i) std::memcpy(values + i, data + (begin + i) * stride_bytes, sizeof(T));
    result += sum(values, count, position + static_cast<uint64_t>(begin) * step, step);
  }
  return result;
}

uint64_t sum_run(const char* data, int64_t element_size, int64_t stride_bytes, int64_t n, uint64_t position,
                 uint64_t step, FingerprintFn sum) {
  if (stride_bytes == element_size) return sum(data, n, position, step);
  switch (element_size) {
    case 1:
      return sum_gathered<uint8_t>(data, stride_bytes, n, position, step, sum);
    case 2:
      return sum_gathered<uint16_t>(data, stride_bytes, n, position, step, sum);
    case 4:
      return sum_gathered<uint32_t>(data, stride_bytes, n, position, step, sum);
    default:
      return sum_gathered<uint64_t>(data, stride_bytes, n, position, step, sum);
  }
}

}  // namespace

uint64_t fingerprint(const void* data, int64_t element_size, std::vector<BoxDim> dims, uint64_t first, uint64_t key,
                     const std::string& path, const ParallelFor& parallel) {
  const int size_index = element_size == 1 ? 0 : element_size == 2 ? 1 : element_size == 4 ? 2 : 3;
  if ((int64_t{1} << size_index) != element_size) {
    throw std::invalid_argument("fingerprint: expected elements of 1, 2, 4 or 8 bytes, got " +
                                std::to_string(element_size));
  }
  const FingerprintFn sum = find_fingerprint(path).sum[size_index];
  if (std::any_of(dims.begin(), dims.end(), [](const BoxDim& dim) { return dim.size == 0; })) return 0;
  std::vector<BoxDim> outer = coalesced(std::move(dims));
  const BoxDim inner = take_inner(outer, element_size);
  const int64_t blocks = (inner.size + kBlock - 1) / kBlock;  // per row
  int64_t rows = 1;
  for (const BoxDim& dim : outer) rows *= dim.size;
  const int64_t rows_per_item = std::max<int64_t>(1, kBlock / inner.size);
  const int64_t items = blocks * ((rows + rows_per_item - 1) / rows_per_item);

  std::atomic<uint64_t> total{0};
  parallel(items, [&](int64_t begin, int64_t end) {
    uint64_t partial = 0;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t offset = item % blocks * kBlock;
      const int64_t length = std::min(kBlock, inner.size - offset);
      const int64_t row_end = std::min(rows, (item / blocks + 1) * rows_per_item);
      for (int64_t row = item / blocks * rows_per_item; row < row_end; ++row) {
        int64_t bytes = offset * inner.stride_bytes;
        uint64_t index = first + static_cast<uint64_t>(offset) * inner.index_stride;
        int64_t rest = row;
        for (size_t d = outer.size(); d-- > 0;) {
          const int64_t coordinate = rest % outer[d].size;
          rest /= outer[d].size;
          bytes += coordinate * outer[d].stride_bytes;
          index += static_cast<uint64_t>(coordinate) * outer[d].index_stride;
        }
        partial += sum_run(static_cast<const char*>(data) + bytes, element_size, inner.stride_bytes, length,
                           key * (index + 1), key * inner.index_stride, sum);
      }
    }
    total.fetch_add(partial, std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace tbik
