// Floating-point mode of the calling thread: two states, each set whole and restored.
//
//   ieee:   round to nearest even, gradual underflow      every node, epilogue, cast, fp64 chain
//   flush:  ieee + FTZ + DAZ                               fp32 chains of the x86 paths only (ORDER.md A2, A3)
//
// A compiler may move arithmetic across a mode change, so nothing here is used next to arithmetic: the caller switches
// and then calls a kernel through a function pointer that reads and writes memory.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#error "tbik: floating-point mode control is written for x86-64 and aarch64 only"
#endif

namespace tbik {

#if defined(__x86_64__)
inline constexpr uint64_t kFpIeee = 0x1f80;            // all exceptions masked, nearest even
inline constexpr uint64_t kFpFlush = 0x1f80 | 0x8040;  // + FTZ (bit 15) + DAZ (bit 6)
inline uint64_t fp_get() { return _mm_getcsr(); }
inline void fp_set(uint64_t mode) {
  asm volatile("" ::: "memory");
  _mm_setcsr(static_cast<unsigned>(mode));
  asm volatile("" ::: "memory");
}
// FTZ and DAZ as they stand now; 0 = gradual underflow.
inline uint64_t fp_flush_bits() { return fp_get() & 0x8040; }
#else
inline constexpr uint64_t kFpIeee = 0;   // FPCR: FZ, FZ16, AH, FIZ, rounding mode all zero
inline constexpr uint64_t kFpFlush = 0;  // aarch64 flushes in software: its FZ is not the rule of A2
inline uint64_t fp_get() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
  return mode;
}
inline void fp_set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
inline uint64_t fp_flush_bits() { return fp_get() & ((uint64_t{1} << 24) | (uint64_t{1} << 19) | 3); }
#endif

// ieee for the life of the object, the caller's mode afterwards, also when an exception passes.
class FpIeeeScope {
 public:
  FpIeeeScope() : saved_(fp_get()) { fp_set(kFpIeee); }
  ~FpIeeeScope() { fp_set(saved_); }
  FpIeeeScope(const FpIeeeScope&) = delete;
  FpIeeeScope& operator=(const FpIeeeScope&) = delete;

 private:
  uint64_t saved_;
};

// flush (if `on`) inside an FpIeeeScope.
class FpFlushScope {
 public:
  explicit FpFlushScope(bool on) : on_(on) {
    if (on_) fp_set(kFpFlush);
  }
  ~FpFlushScope() {
    if (on_) fp_set(kFpIeee);
  }
  FpFlushScope(const FpFlushScope&) = delete;
  FpFlushScope& operator=(const FpFlushScope&) = delete;

 private:
  bool on_;
};

}  // namespace tbik
