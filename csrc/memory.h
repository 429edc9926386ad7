// Memory of the kernels: aligned, and on huge pages where it is large.
#pragma once

#include <cstdint>
#include <memory>

namespace tbik {

struct FreeDeleter {
  void operator()(void* p) const;
};
using AlignedBuffer = std::unique_ptr<void, FreeDeleter>;
AlignedBuffer aligned_buffer(int64_t bytes);  // 64-byte aligned; std::bad_alloc

// Large memory that is read or written in order: a packed weight streams faster from huge pages (prefetchers stop at
// page borders), and fresh pages cost less: a result of 200 MB is 51,000 page faults of 4 KiB. Advice only: where there
// are none, nothing happens.
void ask_for_huge_pages(void* p, int64_t bytes);

// Whether a result of that many bytes, written in order, is gone from every cache before it is read: at least as large
// as the largest of them. False where the system does not say how large that is.
bool exceeds_caches(int64_t bytes);

}  // namespace tbik
