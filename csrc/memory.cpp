// See memory.h.
#include "memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <new>

namespace tbik {

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr int64_t kHugeBytes = 4 << 20;

}  // namespace

void FreeDeleter::operator()(void* p) const { std::free(p); }

AlignedBuffer aligned_buffer(int64_t bytes) {
  const size_t size = (static_cast<size_t>(std::max<int64_t>(bytes, 1)) + 63) / 64 * 64;
  void* p = std::aligned_alloc(bytes >= kHugeBytes ? kHugePage : 64, size);
  if (p == nullptr) throw std::bad_alloc();
  ask_for_huge_pages(p, bytes);
  return AlignedBuffer(p);
}

void ask_for_huge_pages([[maybe_unused]] void* p, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  if (bytes < kHugeBytes) return;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(p) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

namespace {

// Linux's own word for it: sysconf gives the sum over the chip, of which a core may use a part.
int64_t last_level_cache() {
  std::ifstream size("/sys/devices/system/cpu/cpu0/cache/index3/size");
  int64_t kibibytes = 0;
  char unit = 0;
  return size >> kibibytes >> unit && unit == 'K' ? kibibytes << 10 : 0;
}

}  // namespace

bool exceeds_caches(int64_t bytes) {
  static const int64_t largest = last_level_cache();
  return largest > 0 && bytes >= largest;
}

}  // namespace tbik
