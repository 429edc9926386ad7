// What one instruction set has to provide. Every table computes the same bits; only the speed differs.
//
// Suffixes: _MK = rows by contraction index; R = rows of one register tile (1..6); P = panel width (64 columns).
// No torch, no CUDA, no intrinsics. Every pointer may be unaligned unless said otherwise.
#pragma once

#include <cstdint>

namespace tbik {

enum class DType : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

inline constexpr int kPanel = 64;    // columns of one packed panel of B
inline constexpr int kTileRows = 6;  // rows of the largest register tile

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

const char* name_of(DType dtype);

// Contiguous arrays of n elements; IEEE mode; never fused, never flushed (ORDER.md A3, A4, A5, A6, A7). One text,
// csrc/combine_loops.h, compiled once per instruction set.
struct Loops {
  // dst = (to) src, one rounding to nearest even, subnormals kept, narrowed NaN canonical; widening is exact. fp64 is
  // not cast to bf16 or fp16 (a trap: the callers refuse it before).
  void (*cast)(void* dst, DType to, const void* src, DType from, int64_t n);

  // out = left + right; _wire: rounded to bf16, then + (+0.0). out may be left or right.
  void (*add_f32)(float* out, const float* left, const float* right, int64_t n);
  void (*add_f64)(double* out, const double* left, const double* right, int64_t n);
  void (*add_wire)(float* out, const float* left, const float* right, int64_t n);

  // left = left + (leaf + (+0.0)): a node whose right operand is a chain that was not yet finished.
  void (*add_leaf_f32)(float* left, const float* leaf, int64_t n);
  void (*add_leaf_f64)(double* left, const double* leaf, int64_t n);

  // x_0 = x_0 + (x_1 + (... + (x_last + (+0.0)))): `count` - 1 >= 1 nodes, innermost first, in few passes. The other
  // arrays keep what they hold or take a partial sum.
  void (*add_leaves_f32)(float* const* x, int count, int64_t n);
  void (*add_leaves_f64)(double* const* x, int count, int64_t n);

  // x = x + (+0.0); _wire: x rounded to bf16 first.
  void (*finish_f32)(float* x, int64_t n);
  void (*finish_f64)(double* x, int64_t n);
  void (*finish_wire)(float* x, int64_t n);

  // dst = (to)(x / divisor + bias), one cast, NaN canonical. divisor == 1: no division. bias may be null.
  void (*store_f32)(void* dst, DType to, const float* x, int64_t n, float divisor, const float* bias);
  void (*store_f64)(void* dst, DType to, const double* x, int64_t n, double divisor, const double* bias);

  // out = left + right, both read from bf16, fp16 or fp32; dst = (to)(left + right), NaN canonical; dst = left + right,
  // all of one type, accumulated in fp32 (fp64 for fp64), NaN canonical. What cast, add and store give one after
  // another.
  void (*add_from)(float* out, const void* left, const void* right, DType from, int64_t n);
  void (*add_to)(void* dst, DType to, const float* left, const float* right, int64_t n);
  void (*add_both)(void* dst, const void* left, const void* right, DType dtype, int64_t n);

  // dst_j = (hi_j << 16) | lo_j: one row of pairs of a packed bf16 panel.
  void (*pair)(uint32_t* dst, const uint16_t* hi, const uint16_t* lo, int64_t n);

  // dst[c][r] = rows[r][c] for r < 64, c < cols; rotate: exchanges the halves of every word.
  void (*transpose)(uint32_t* dst_CP, const void* const* rows, int64_t cols, bool rotate);
};

// acc[r][p] = fma(a[k][r], b[k][p], acc[r][p]) for k = 0, 1, ... steps-1, in this order; acc = +0 first if `first`.
// a_KR: contiguous, one value per row and step; b_KP: 64 values per step; acc_RP: row stride 64. `ahead`: memory that
// will be read soon; a kernel may prefetch `lines` cache lines of it per step. It need not be mapped.
using ChainFn = void (*)(const void* a_KR, const void* b_KP, int64_t steps, void* acc_RP, bool first,
                         const void* ahead);

// tile[l][rows - 1] prefetches 1 << l lines per step: 4 when one tile streams B, 1 when many share a part of it.
struct ChainTable {
  ChainFn tile[3][kTileRows];
};

// For sets with too few registers for 64 columns of six rows: a run of B is dealt out to strips of 16 columns, one
// after the other; a strip lies in one piece and stays in L1 while all tiles of a block pass over it.
inline constexpr int kStrip = 16;        // fp32 columns
inline constexpr int kStripSteps = 256;  // steps of a run at most: 16 KiB of fp32

struct StripKernels {
  // As ChainFn for `tiles` tiles of equal height, whose a and acc lie one behind the other; but b_KS: 16 values per
  // step, acc_RS: row stride 16. One line of `ahead` per four steps.
  using Fn = void (*)(const void* a_KR, const void* b_KS, int64_t steps, void* acc_RS, bool first, const void* ahead,
                      int64_t tiles);
  Fn tile[kTileRows];
  // dst[s][k][i] = fp32 of src[k][16 s + i], s < strips, of a packed panel (row stride 64); pairs give two steps each;
  // exact. No arithmetic: any mode.
  void (*deal_f32)(float* dst_SKS, const float* src_KP, int64_t steps, int strips);
  void (*deal_pairs)(float* dst_SKS, const uint32_t* src_KP, int64_t pairs, int strips);
  void (*deal_f16)(float* dst_SKS, const uint16_t* src_KP, int64_t steps, int strips);
};

// Chains of bf16 in the order of TDPBF16PS, in blocks of 16 packed steps (ORDER.md A14), on tiles of 16 x 16 sums.
inline constexpr int kBlockSteps = 16;  // packed steps of a block: 32 elements
inline constexpr int kAmxPairRows = 2;  // rows that GemmKernels::amx_pair takes at most

struct TileKernels {
  // Gives this thread tiles for `rows` <= 16 rows of A at a time; close() hands them back.
  void (*open)(int rows);
  void (*close)();
  // out[t][r][p] = the chain over `blocks` >= 1 blocks of row r of tile t with column p < 64. a: tile t at
  // a + t * stride, a block there is [rows of a tile][32 bf16], 1 KiB apart, halves of a pair exchanged; b: packed
  // steps; tail: the last block of b with +0 beyond the chain's end, or null where it is full. out: tiles 16 * 64
  // apart.
  void (*chain)(const void* a, int64_t stride, const void* b_KP, const void* tail_KP, int64_t blocks, float* out,
                int64_t tiles);
};

struct GemmKernels {
  const char* name;
  const Loops* loops;
  bool hardware_flush;  // the fp32 chains need FTZ and DAZ on; otherwise they need IEEE mode
  bool only_bf16;       // no chains but `dot` (other compute types: the next path)

  const ChainTable* f32;   // a fp32, b fp32
  const ChainTable* f64;   // a fp64, b fp64; IEEE mode
  const ChainTable* pair;  // a fp32 (two values per step), b bf16 pairs: hi half first; null = widen first
  const ChainTable* dot;   // a bf16 pairs, b bf16 pairs: vdpbf16ps; null = use `pair` or `f32`

  const ChainTable* amx_pair;  // as `pair` in the order of A14, for 1 and 2 rows; runs end where a block does. Or null

  const StripKernels* strips;  // where three or more tiles share B (fp32, fp16, bf16); null = `f32`

  // dst[2k][p], dst[2k+1][p] = fp32 of the high, low half of src[k][p]; exact
  void (*widen_pairs)(float* dst_KP, const uint32_t* src_KP, int64_t pairs);
  // dst[k][p] = fp32 of the fp16 src[k][p]; exact
  void (*widen_f16)(float* dst_KP, const uint16_t* src_KP, int64_t steps);
};

// Null when the path was not compiled for this architecture or the CPU lacks the instructions.
const GemmKernels* portable_kernels();
const GemmKernels* avx2_kernels();
const GemmKernels* avx512f_kernels();
const GemmKernels* avx512_bf16_kernels();
const TileKernels* amx_tiles();

}  // namespace tbik
