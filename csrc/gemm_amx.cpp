// Chains in the order of TDPBF16PS (ORDER.md A14) on AMX tiles.
//
//   e, o = +0; for k < 16 ascending: o = fma(a_2k, b_2k, o), e = fma(a_2k+1, b_2k+1, e);  acc = acc + (e + o)   per
//   block
//
// Packed pairs hold element 2k in the high half and 2k+1 in the low one, in A and in B alike; which half of the sum is
// called even does not matter, since e + o = o + e. A block is 16 packed steps; what an operand lacks of one is +0.
// Tiles: 0-3 sums, 4-7 operands. 2 x 2 tiles share two loads of A and two of B; a single tile of A reads B row by row,
// as it lies. The instruction flushes and rounds to nearest whatever MXCSR says.
// Bits: deterministic, batch-invariant, equal to the chains of gemm.cpp on every other path (tests/test_amx.py).
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.
#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16,avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f")
#endif

namespace tbik {
namespace amx {
namespace {

constexpr int64_t kTileBytes = 1024;        // 16 rows of 64 bytes
constexpr int64_t kStepBytes = kPanel * 4;  // of packed B
constexpr int64_t kBlockBytes = 16 * kStepBytes;
constexpr int64_t kAhead = 8192;  // bytes of B asked for ahead of their use, where B is read once

struct alignas(64) Config {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The intrinsics do not tell every compiler how much memory they read.
inline void fence(const void* read) { __asm__ volatile("" : : "r"(read) : "memory"); }

void open(int rows) {
  Config config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : 16);
  }
  fence(&config);
  _tile_loadconfig(&config);
}

void close() { _tile_release(); }

// Columns 0-63 of one tile of rows; tiles 4 of A, 6 and 7 of B.
void one(const char* a, const char* b, const char* tail, int64_t blocks, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < blocks; ++i, a += kTileBytes, b += kBlockBytes) {
    const char* at = tail != nullptr && i == blocks - 1 ? tail : b;
    for (int64_t line = 0; line < kBlockBytes; line += 64) _mm_prefetch(b + kAhead + line, _MM_HINT_T0);
    _tile_loadd(4, a, 64);
    _tile_loadd(6, at, kStepBytes);
    _tile_loadd(7, at + 64, kStepBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, at + 128, kStepBytes);
    _tile_loadd(7, at + 192, kStepBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, out, kPanel * 4);
  _tile_stored(1, out + 16, kPanel * 4);
  _tile_stored(2, out + 32, kPanel * 4);
  _tile_stored(3, out + 48, kPanel * 4);
}

// 32 columns of two tiles of rows.
void two(const char* a, int64_t stride, const char* b, const char* tail, int64_t blocks, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < blocks; ++i, a += kTileBytes, b += kBlockBytes) {
    const char* at = tail != nullptr && i == blocks - 1 ? tail : b;
    _tile_loadd(4, a, 64);
    _tile_loadd(6, at, kStepBytes);
    _tile_loadd(7, at + 64, kStepBytes);
    _tile_loadd(5, a + stride, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, kPanel * 4);
  _tile_stored(1, out + 16, kPanel * 4);
  _tile_stored(2, out + 16 * kPanel, kPanel * 4);
  _tile_stored(3, out + 16 * kPanel + 16, kPanel * 4);
}

void chain(const void* a, int64_t stride, const void* b_KP, const void* tail_KP, int64_t blocks, float* out,
           int64_t tiles) {
  const char* const rows = static_cast<const char*>(a);
  const char* const b = static_cast<const char*>(b_KP);
  const char* const tail = static_cast<const char*>(tail_KP);
  fence(a);
  for (int half = 0; half < 2; ++half) {
    const char* const end = tail == nullptr ? nullptr : tail + half * 128;
    for (int64_t tile = 0; tile + 1 < tiles; tile += 2) {
      two(rows + tile * stride, stride, b + half * 128, end, blocks, out + tile * 16 * kPanel + half * 32);
    }
  }
  if (tiles % 2 == 1) one(rows + (tiles - 1) * stride, b, tail, blocks, out + (tiles - 1) * 16 * kPanel);
}

const TileKernels kKernels = {open, close, chain};

bool is_supported() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool has_tiles = (d & (1u << 24)) != 0 && (d & (1u << 22)) != 0;  // AMX-TILE, AMX-BF16
  constexpr long kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM: Linux gives a process the tiles' state where it asks
  constexpr long kTileData = 18;
  return has_tiles && __builtin_cpu_supports("avx512f") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace
}  // namespace amx
}  // namespace tbik

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tbik {

const TileKernels* amx_tiles() {
  static const bool supported = amx::is_supported();
  return supported ? &amx::kKernels : nullptr;
}

}  // namespace tbik

#else  // not x86-64 Linux

namespace tbik {
const TileKernels* amx_tiles() { return nullptr; }
}  // namespace tbik

#endif
