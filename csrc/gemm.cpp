// Driver of the tree GEMM: packing, blocking, the schedule, the choice of path. See gemm.h for the equation.
//
// Blocking. A panel of 64 columns of B is packed per chain; rows of A are cut evenly into register tiles of at most six
// rows, the tiles into row blocks. One task = (panel, row block): slot s of the schedule is an array acc[rows][64], a
// load step runs one chain for all tiles of the block, 128 packed steps at a time so that this part of B stays in L1,
// and an add step adds two arrays. The task's memory is private, so threads cannot change a bit.
// A path with strips (StripKernels) copies each run of B strip by strip and lets all tiles pass over one strip; slots
// are then [strip][row][16]. If a block of A is small (dW), the whole schedule runs on one strip, then on the next.
// The order of A14 runs on AMX tiles where there are some: rows of A are cut into tiles of 16, packed as the tiles load
// them, a chain is one call, slots are whole tiles. Elsewhere the fp32 chains do it, block by block.
// The floating-point mode is IEEE for the whole task and flush only around the chain kernels that ask for it.
#include "gemm.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "fpmode.h"

namespace tbik {

namespace {

constexpr int64_t kSharedSteps = 128;            // steps of B kept in L1 when several tiles share them
constexpr int64_t kStreamSteps = 512;            // steps per call when one tile reads B once
constexpr int64_t kStreamAhead = 4096;           // bytes of B asked for ahead of their use
constexpr int64_t kBlockTiles = 16;              // register tiles of one row block (96 rows)
constexpr int64_t kStripBlockTiles = 32;         // the same for strips: B is copied once per block
constexpr int64_t kShortBlockTiles = 4;          // when chains are short: the slots then fit in L1
constexpr int64_t kBlockMajorBytes = 16 << 20;   // of packed B, which then stays in L3
constexpr int64_t kShortChain = 48;              // steps
constexpr int64_t kStripMajorBytes = 256 << 10;  // of a block of A
constexpr int64_t kAmxRows = 16;                 // of a tile of A
constexpr int64_t kAmxBlockTiles = 4;            // tiles of one row block (64 rows)
constexpr int64_t kAmxShortTiles = 2;            // when chains are short: the slots then stay in L1
constexpr int64_t kAmxCacheBytes = 1792 << 10;   // of L2, for a row block of A and two panels of B
constexpr int64_t kAmxTileBytes = 1024;          // of one block of a tile

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of one element of a packed step: pairs of bf16 count as one.
int64_t step_bytes(DType compute) { return compute == DType::kFloat64 ? 8 : compute == DType::kFloat16 ? 2 : 4; }

// dst[i] = src[i * stride] for elements of `size` bytes.
void gather(void* dst, const void* src, int64_t size, int64_t stride, int64_t n) {
  auto copy = [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(src);
    T* to = static_cast<T*>(dst);
    for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
  };
  if (size == 2) copy(uint16_t{});
  if (size == 4) copy(uint32_t{});
  if (size == 8) copy(uint64_t{});
}

const char* element(const Operand& x, int64_t row, int64_t k) {
  return static_cast<const char*>(x.data) + (row * x.stride_row + k * x.stride_k) * size_of(x.dtype);
}

// Values of one contraction index lie side by side.
bool is_along_rows(const Operand& x) { return x.stride_row == 1 && x.stride_k != 1; }

// Rows that lie far apart are asked for this many rows early: no hardware prefetcher follows them.
constexpr int64_t kRowsAhead = 6;

void prefetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Reads runs of an operand as `to` values rounded to `compute`, whatever the strides.
class Reader {
 public:
  Reader(const Loops& loops, DType compute, DType to) : loops_(loops), compute_(compute), to_(to) {}

  // dst[i] = x[row, k + i]
  void along_k(void* dst, const Operand& x, int64_t row, int64_t k, int64_t n) {
    read(dst, element(x, row, k), x.dtype, x.stride_k, n);
  }
  // dst[i] = x[row + i, k]
  void along_rows(void* dst, const Operand& x, int64_t row, int64_t k, int64_t n) {
    read(dst, element(x, row, k), x.dtype, x.stride_row, n);
  }

 private:
  static constexpr int64_t kChunk = 256;

  void read(void* dst, const char* src, DType from, int64_t stride, int64_t n) {
    for (int64_t i = 0; i < n; i += kChunk) {
      const int64_t count = std::min(kChunk, n - i);
      const void* run = src + i * stride * size_of(from);
      if (stride != 1) {
        gather(gathered_, run, size_of(from), stride, count);
        run = gathered_;
      }
      char* out = static_cast<char*>(dst) + i * size_of(to_);
      const bool rounds = from != compute_ && size_of(from) > size_of(compute_) && to_ != compute_;
      if (rounds) {
        loops_.cast(rounded_, compute_, run, from, count);
        loops_.cast(out, to_, rounded_, compute_, count);
      } else {
        loops_.cast(out, to_, run, from, count);
      }
    }
  }

  const Loops& loops_;
  DType compute_;
  DType to_;
  alignas(64) char gathered_[kChunk * 8];
  alignas(64) char rounded_[kChunk * 8];
};

// Packs adjacent panels of B, each of total_steps rows of 64.
class PanelPacker {
 public:
  PanelPacker(const Loops& loops, const ChainLayout& layout)
      : loops_(loops), layout_(layout), reader_(loops, layout.compute, layout.compute) {
    std::memset(zero_row_, 0, sizeof(zero_row_));
  }

  // How many adjacent panels are best packed together: where the contraction index strides over whole rows of the
  // source, a run of 64 columns is a fraction of the page it lies in, and the pages are what costs.
  static int64_t group(const std::vector<Operand>& sources) {
    for (const Operand& x : sources) {
      if (is_along_rows(x)) return 4;
    }
    return 1;
  }

  // Columns [n0, n0 + columns) as ceil(columns / 64) panels.
  void pack(char* panels, const std::vector<Operand>& sources, int64_t n0, int64_t columns) {
    const int64_t bytes = step_bytes(layout_.compute) * kPanel;
    const int64_t panel_bytes = layout_.total_steps * bytes;
    for (int64_t chain = 0; chain < layout_.num_chains(); ++chain) {
      char* const first = panels + layout_.offset[static_cast<size_t>(chain)] * bytes;
      int64_t position = 0;
      for (size_t s = 0; s < sources.size(); ++s) {
        const int64_t count = layout_.segment(s, chain);
        const int64_t k0 = layout_.cuts[s][static_cast<size_t>(chain)];
        const int64_t some = columns > kPanel ? kGroupRows : std::max<int64_t>(count, 1);
        for (int64_t k = 0; k < count; k += some) {
          const int64_t n = std::min(some, count - k);
          for (int64_t column = 0; column < columns; column += kPanel) {
            char* dst = first + column / kPanel * panel_bytes;
            const int64_t width = std::min<int64_t>(kPanel, columns - column);
            if (layout_.compute == DType::kBFloat16) {
              pack_pairs(reinterpret_cast<uint32_t*>(dst), position + k, sources[s], n0 + column, width, k0 + k, n);
            } else {
              pack_plain(dst + (position + k) * bytes, sources[s], n0 + column, width, k0 + k, n);
            }
          }
        }
        position += count;
      }
    }
  }

 private:
  static constexpr int64_t kGroupRows = 32;  // source rows read for all panels of a group before the next
  static constexpr int64_t kWords = 64;      // 32-bit words per row and round of a transposition

  // bf16 values at chain positions [position, position + count); pairs may straddle two sources.
  void pack_pairs(uint32_t* dst_KP, int64_t position, const Operand& x, int64_t n0, int64_t columns, int64_t k0,
                  int64_t count) {
    if (count == 0) return;
    if (position % 2 == 1) {  // low half of a pair that the previous source began
      column(x, n0, columns, k0);
      uint32_t* row = dst_KP + position / 2 * kPanel;
      for (int p = 0; p < kPanel; ++p) row[p] |= half_[0][p];
      ++position, ++k0, --count;
    }
    uint32_t* row = dst_KP + position / 2 * kPanel;
    const int64_t pairs = count / 2;
    if (is_along_rows(x)) {
      for (int64_t k = 0; k < pairs; ++k) {
        const uint16_t* halves[2];
        for (int h = 0; h < 2; ++h) {
          const int64_t later = 2 * k + h + kRowsAhead;
          if (later < count) prefetch(element(x, n0, k0 + later), columns * size_of(x.dtype));
          if (x.dtype == DType::kBFloat16 && columns == kPanel) {
            halves[h] = reinterpret_cast<const uint16_t*>(element(x, n0, k0 + 2 * k + h));
          } else {
            fill(half_[h], x, n0, columns, k0 + 2 * k + h);
            halves[h] = half_[h];
          }
        }
        loops_.pair(row + k * kPanel, halves[0], halves[1], kPanel);
      }
    } else {
      for (int64_t k = 0; k < pairs; k += kWords) {
        const int64_t words = std::min(kWords, pairs - k);
        const void* rows[kPanel];
        row_pointers(rows, x, n0, columns, k0 + 2 * k, 2 * words);
        loops_.transpose(row + k * kPanel, rows, words, true);
      }
    }
    if (count % 2 == 1) {  // high half of the last pair; the low half stays +0 unless another source follows
      column(x, n0, columns, k0 + count - 1);
      uint32_t* last = row + pairs * kPanel;
      for (int p = 0; p < kPanel; ++p) last[p] = static_cast<uint32_t>(half_[0][p]) << 16;
    }
  }

  void pack_plain(char* dst_KP, const Operand& x, int64_t n0, int64_t columns, int64_t k0, int64_t count) {
    const int64_t bytes = step_bytes(layout_.compute) * kPanel;
    if (is_along_rows(x)) {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t later = k + kRowsAhead;
        if (later < count) prefetch(element(x, n0, k0 + later), columns * size_of(x.dtype));
        fill(dst_KP + k * bytes, x, n0, columns, k0 + k);
      }
      return;
    }
    const int64_t per_round = layout_.compute == DType::kFloat16 ? 2 * kWords : kWords;
    for (int64_t k = 0; k < count; k += per_round) {
      const int64_t n = std::min(per_round, count - k);
      const void* rows[kPanel];
      row_pointers(rows, x, n0, columns, k0 + k, n);
      char* dst = dst_KP + k * bytes;
      if (layout_.compute == DType::kFloat32) {
        loops_.transpose(reinterpret_cast<uint32_t*>(dst), rows, n, false);
      } else if (layout_.compute == DType::kFloat64) {
        for (int p = 0; p < kPanel; ++p) {
          const double* from = static_cast<const double*>(rows[p]);
          for (int64_t i = 0; i < n; ++i) reinterpret_cast<double*>(dst)[i * kPanel + p] = from[i];
        }
      } else {
        for (int p = 0; p < kPanel; ++p) {
          const uint16_t* from = static_cast<const uint16_t*>(rows[p]);
          for (int64_t i = 0; i < n; ++i) reinterpret_cast<uint16_t*>(dst)[i * kPanel + p] = from[i];
        }
      }
    }
  }

  // One index k of 64 columns, zero beyond `columns`.
  void fill(void* dst, const Operand& x, int64_t n0, int64_t columns, int64_t k) {
    reader_.along_rows(dst, x, n0, k, columns);
    const int64_t size = size_of(layout_.compute);
    std::memset(static_cast<char*>(dst) + columns * size, 0, static_cast<size_t>((kPanel - columns) * size));
  }
  void column(const Operand& x, int64_t n0, int64_t columns, int64_t k) { fill(half_[0], x, n0, columns, k); }

  // Pointers to n compute-typed values of each of 64 columns; columns beyond the last point at zeros.
  void row_pointers(const void** rows, const Operand& x, int64_t n0, int64_t columns, int64_t k, int64_t n) {
    for (int64_t p = 0; p < kPanel; ++p) {
      if (p >= columns) {
        rows[p] = zero_row_;
      } else if (x.dtype == layout_.compute && x.stride_k == 1) {
        rows[p] = element(x, n0 + p, k);
      } else {
        char* row = staged_ + p * kRowBytes;
        reader_.along_k(row, x, n0 + p, k, n);
        rows[p] = row;
      }
    }
  }

  static constexpr int64_t kRowBytes = kWords * 8 + 64;  // + a line: rows then start in different L1 sets
  const Loops& loops_;
  const ChainLayout& layout_;
  Reader reader_;
  alignas(64) char zero_row_[kWords * 8];
  alignas(64) char staged_[kPanel * kRowBytes];
  alignas(64) uint16_t half_[2][kPanel];
};

// How rows are cut: tile t = rows [m*t/tiles, m*(t+1)/tiles), or, where tiles have a fixed height, [16*t, 16*(t+1));
// block b = tiles [tiles*b/blocks, tiles*(b+1)/blocks).
// The rows are looked up: two divisions cost as much as a tile's chain of four steps.
struct RowCut {
  RowCut(int64_t m, int64_t tiles_per_block, int64_t height = 0)
      : tiles(ceil_div(m, height != 0 ? height : kTileRows)), blocks(ceil_div(tiles, tiles_per_block)) {
    for (int64_t t = 0; t <= tiles; ++t) first_row.push_back(height != 0 ? std::min(m, height * t) : m * t / tiles);
  }
  int64_t row(int64_t tile) const { return first_row[static_cast<size_t>(tile)]; }
  int64_t tile(int64_t block) const { return tiles * block / blocks; }

  int64_t tiles;
  int64_t blocks;
  std::vector<int64_t> first_row;  // of each tile; tiles + 1 entries
};

// A run of packed steps of one chain that is processed for all tiles of a block before the next run.
struct Run {
  int64_t chain;
  int64_t begin;  // in the chain, packed steps
  int64_t steps;
};

struct Plan {
  const GemmKernels* kernels;
  const ChainLayout* layout;
  RowCut rows;
  std::vector<Run> runs;           // ascending
  std::vector<int64_t> first_run;  // of each chain; num_chains + 1 entries
  const ChainTable* table;
  const StripKernels* strips;        // or null; then `table` is not used
  int64_t width;                     // columns of a slot's row: a panel, or a strip
  bool widen;                        // B is widened to fp32 before the chain reads it
  const TileKernels* tiles;          // A14 on tiles, or null; then `table` is not used
  int64_t height;                    // rows of a tile of A there
  std::vector<int64_t> first_block;  // of each chain there, in a packed tile of A; num_chains + 1 entries
  bool blocks;                       // A14 by `table`: even and odd elements apart, block by block
  int64_t a_bytes;                   // bytes of one packed value of A (a pair of bf16 for `dot`)
  int64_t a_per_step;                // packed values of A per packed step of B
};

// The pieces of the sources that make up chain positions [begin, begin + count): body(source, k, at, n).
template <class Body>
void each_piece(const ChainLayout& layout, const std::vector<Operand>& sources, int64_t chain, int64_t begin,
                int64_t count, const Body& body) {
  int64_t start = 0;
  for (size_t s = 0; s < sources.size(); ++s) {
    const int64_t length = layout.segment(s, chain);
    const int64_t lo = std::max(begin, start);
    const int64_t hi = std::min(begin + count, start + length);
    if (lo < hi) body(sources[s], layout.cuts[s][static_cast<size_t>(chain)] + lo - start, lo - begin, hi - lo);
    start += length;
  }
}

// Packs the values of A that run `run` reads for row block `block`: [tile][step][row of the tile].
class BlockPacker {
 public:
  BlockPacker(const Plan& plan, const std::vector<Operand>& sources)
      : plan_(plan),
        sources_(sources),
        dot_(plan.table == plan.kernels->dot && plan.table != nullptr),
        to_(dot_ ? DType::kBFloat16 : accumulation(plan.layout->compute)),
        reader_(*plan.kernels->loops, plan.layout->compute, to_) {}

  void pack(char* dst, int64_t block, const Run& run) {
    const bool pairs = plan_.layout->compute == DType::kBFloat16;
    const int64_t begin = run.begin * (pairs ? 2 : 1);
    const int64_t count = run.steps * (pairs ? 2 : 1);
    const int64_t tile0 = plan_.rows.tile(block);
    const int64_t tile1 = plan_.rows.tile(block + 1);
    const int64_t row0 = plan_.rows.row(tile0);
    bool along_rows = true;
    for (const Operand& x : sources_) along_rows = along_rows && is_along_rows(x);
    if (along_rows) {
      pack_lines(dst, run, begin, count, tile0, tile1);
      return;
    }
    const int64_t size = size_of(to_);
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      const int64_t r0 = plan_.rows.row(tile);
      const int64_t rows = plan_.rows.row(tile + 1) - r0;
      char* out = dst + (r0 - row0) * run.steps * plan_.a_per_step * plan_.a_bytes;
      const int64_t row_bytes = count * size;
      for (int64_t r = 0; r < rows; ++r) {
        char* row = staged_ + r * row_bytes;
        const int64_t real = std::min(count, plan_.layout->length[static_cast<size_t>(run.chain)] - begin);
        std::memset(row + real * size, 0, static_cast<size_t>((count - real) * size));
        each_piece(*plan_.layout, sources_, run.chain, begin, count,
                   [&](const Operand& x, int64_t k, int64_t at, int64_t n) {
                     reader_.along_k(row + at * size, x, r0 + r, k, n);
                   });
        if (plan_.blocks) part_block(reinterpret_cast<float*>(row), count);
      }
      if (dot_) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(staged_);
        interleave(reinterpret_cast<uint32_t*>(out), words, rows, run.steps);
        uint32_t* swapped = reinterpret_cast<uint32_t*>(out);
        for (int64_t i = 0; i < run.steps * rows; ++i) swapped[i] = (swapped[i] << 16) | (swapped[i] >> 16);
      } else if (size == 8) {
        interleave(reinterpret_cast<uint64_t*>(out), reinterpret_cast<const uint64_t*>(staged_), rows, count);
      } else {
        interleave(reinterpret_cast<uint32_t*>(out), reinterpret_cast<const uint32_t*>(staged_), rows, count);
      }
    }
  }

 private:
  // Even elements before odd ones (A14).
  static void part_block(float* row, int64_t count) {
    float odd[kBlockSteps];
    for (int64_t i = 0; i < count / 2; ++i) {
      odd[i] = row[2 * i + 1];
      row[i] = row[2 * i];
    }
    std::copy(odd, odd + count / 2, row + count / 2);
  }

  // Sources whose rows lie side by side: one index of all rows of the block at a time, then dealt out to the tiles.
  void pack_lines(char* dst, const Run& run, int64_t begin, int64_t count, int64_t tile0, int64_t tile1) {
    const int64_t row0 = plan_.rows.row(tile0);
    const int64_t rows = plan_.rows.row(tile1) - row0;
    const int64_t values = run.steps * (dot_ ? 1 : plan_.a_per_step);  // per row
    auto deal = [&](const char* line, int64_t index) {
      if (plan_.blocks) index = index % 2 * run.steps + index / 2;
      for (int64_t tile = tile0; tile < tile1; ++tile) {
        const int64_t r = plan_.rows.row(tile) - row0;
        const int64_t n = plan_.rows.row(tile + 1) - row0 - r;
        char* out = dst + (r * values + index * n) * plan_.a_bytes;
        const char* in = line + r * plan_.a_bytes;
        if (n == kTileRows && plan_.a_bytes == 4) {
          std::memcpy(out, in, kTileRows * 4);  // a constant: two moves
        } else {
          std::memcpy(out, in, static_cast<size_t>(n * plan_.a_bytes));
        }
      }
    };
    int64_t done = 0;
    each_piece(*plan_.layout, sources_, run.chain, begin, count,
               [&](const Operand& x, int64_t k, int64_t at, int64_t n) {
                 for (int64_t i = 0; i < n; ++i) {
                   if (i + kRowsAhead < n) prefetch(element(x, row0, k + i + kRowsAhead), rows * size_of(x.dtype));
                   char* line = lines_[dot_ ? (at + i) % 2 : 0];
                   reader_.along_rows(line, x, row0, k + i, rows);
                   if (!dot_) {
                     deal(line, at + i);
                   } else if ((at + i) % 2 == 1) {
                     deal_pair(rows, deal, (at + i) / 2);
                   }
                 }
                 done = at + n;
               });
    if (done == count) return;
    std::memset(lines_[dot_ ? 1 : 0], 0, static_cast<size_t>(rows * size_of(to_)));  // the odd half of the chain
    if (dot_) {
      deal_pair(rows, deal, done / 2);
    } else {
      deal(lines_[0], done);
    }
  }

  template <class Deal>
  void deal_pair(int64_t rows, const Deal& deal, int64_t index) {
    plan_.kernels->loops->pair(reinterpret_cast<uint32_t*>(words_), reinterpret_cast<const uint16_t*>(lines_[0]),
                               reinterpret_cast<const uint16_t*>(lines_[1]), rows);
    deal(words_, index);
  }

  template <class T>
  static void interleave(T* dst, const T* src, int64_t rows, int64_t count) {
    auto fixed = [&](auto constant) {
      constexpr int64_t kRows = decltype(constant)::value;
      for (int64_t k = 0; k < count; ++k) {
        for (int64_t r = 0; r < kRows; ++r) dst[k * kRows + r] = src[r * count + k];
      }
    };
    switch (rows) {
      case 1:
        std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(T));
        break;
      case 2:
        fixed(std::integral_constant<int64_t, 2>{});
        break;
      case 3:
        fixed(std::integral_constant<int64_t, 3>{});
        break;
      case 4:
        fixed(std::integral_constant<int64_t, 4>{});
        break;
      case 5:
        fixed(std::integral_constant<int64_t, 5>{});
        break;
      default:
        fixed(std::integral_constant<int64_t, 6>{});
        break;
    }
  }

  const Plan& plan_;
  const std::vector<Operand>& sources_;
  bool dot_;
  DType to_;
  Reader reader_;
  alignas(64) char staged_[kTileRows * 2 * kStreamSteps * 8];
  static constexpr int64_t kLineBytes = std::max(kBlockTiles, kStripBlockTiles) * kTileRows * 8;
  alignas(64) char lines_[2][kLineBytes];
  alignas(64) char words_[kLineBytes];
};

// Packs tiles of A for TileKernels: [block][row][32 bf16], the halves of each pair exchanged, +0 where the chain or the
// rows have ended.
class TilePacker {
 public:
  TilePacker(const Plan& plan, const std::vector<Operand>& sources)
      : plan_(plan), sources_(sources), reader_(*plan.kernels->loops, DType::kBFloat16, DType::kBFloat16) {
    for (const Operand& x : sources) along_rows_ = along_rows_ && is_along_rows(x);
  }

  // Chain `chain` of tile `tile`, ceil(steps / 16) blocks.
  void pack(char* dst, int64_t tile, int64_t chain) {
    const int64_t row0 = plan_.rows.row(tile);
    const int64_t rows = plan_.rows.row(tile + 1) - row0;
    const int64_t length = plan_.layout->length[static_cast<size_t>(chain)];
    for (int64_t begin = 0; begin < length; begin += kValues, dst += kAmxTileBytes) {
      const int64_t count = std::min(kValues, length - begin);
      if (rows < plan_.height || count < kValues) std::memset(dst, 0, kAmxTileBytes);
      if (along_rows_) {
        std::memset(lines_, 0, sizeof(lines_));
        each_piece(*plan_.layout, sources_, chain, begin, count,
                   [&](const Operand& x, int64_t k, int64_t at, int64_t n) {
                     for (int64_t i = 0; i < n; ++i) {
                       if (i + kRowsAhead < n) prefetch(element(x, row0, k + i + kRowsAhead), rows * size_of(x.dtype));
                       reader_.along_rows(lines_[at + i], x, row0, k + i, rows);
                     }
                   });
        for (int64_t i = 0; i < kValues; i += 2) {
          for (int64_t r = 0; r < rows; ++r) {
            const uint32_t word = static_cast<uint32_t>(lines_[i][r]) << 16 | lines_[i + 1][r];
            std::memcpy(dst + r * 64 + i * 2, &word, 4);
          }
        }
      } else {
        for (int64_t r = 0; r < rows; ++r) {
          each_piece(*plan_.layout, sources_, chain, begin, count,
                     [&](const Operand& x, int64_t k, int64_t at, int64_t n) {
                       reader_.along_k(dst + r * 64 + at * 2, x, row0 + r, k, n);
                     });
          uint32_t words[kBlockSteps];
          std::memcpy(words, dst + r * 64, sizeof(words));
          for (uint32_t& word : words) word = word << 16 | word >> 16;
          std::memcpy(dst + r * 64, words, sizeof(words));
        }
      }
    }
  }

 private:
  static constexpr int64_t kValues = 2 * kBlockSteps;

  const Plan& plan_;
  const std::vector<Operand>& sources_;
  Reader reader_;
  bool along_rows_ = true;
  alignas(64) uint16_t lines_[kValues][kAmxRows];
};

// The tiles of this thread while they are wanted.
class TileScope {
 public:
  explicit TileScope(const Plan& plan) : tiles_(plan.tiles) {
    if (tiles_ != nullptr) tiles_->open(static_cast<int>(plan.height));
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
  ~TileScope() {
    if (tiles_ != nullptr) tiles_->close();
  }

 private:
  const TileKernels* tiles_;
};

Plan make_plan(const Path& path, const ChainLayout& layout, int64_t m) {
  const GemmKernels& kernels = *path.kernels;
  const bool is_amx = path.leaf == Leaf::kAmx && layout.compute == DType::kBFloat16;
  // A row or two are read by vectors as fast as memory gives B; a tile would wait for its 16 lines.
  const bool few = is_amx && m <= kAmxPairRows && kernels.amx_pair != nullptr;
  const TileKernels* tiles = is_amx && !few ? path.tiles : nullptr;
  const int64_t height = tiles != nullptr ? std::min(m, kAmxRows) : 0;
  int64_t nonempty = 0;
  for (int64_t steps : layout.steps) nonempty += steps > 0;
  const bool is_short = nonempty > 0 && layout.total_steps / nonempty < kShortChain;
  const bool strips = kernels.strips != nullptr && layout.compute != DType::kFloat64 && !is_amx;
  const int64_t block_tiles = tiles != nullptr ? (is_short ? kAmxShortTiles : kAmxBlockTiles)
                              : strips         ? (is_short ? kBlockTiles : kStripBlockTiles)
                              : is_short       ? kShortBlockTiles
                                               : kBlockTiles;
  Plan plan{.kernels = &kernels,
            .layout = &layout,
            .rows = RowCut(m, block_tiles, height),
            .runs = {},
            .first_run = {},
            .table = nullptr,
            .strips = nullptr,
            .width = kPanel,
            .widen = false,
            .tiles = tiles,
            .height = height,
            .first_block = {},
            .blocks = is_amx && tiles == nullptr && !few,
            .a_bytes = 4,
            .a_per_step = 1};
  const bool one_tile = plan.rows.tiles == 1;
  switch (layout.compute) {
    case DType::kFloat64:
      plan.table = kernels.f64;
      break;
    case DType::kFloat32:
      plan.table = kernels.f32;
      break;
    case DType::kFloat16:
      plan.table = kernels.f32;
      plan.widen = true;
      break;
    case DType::kBFloat16:
      if (is_amx) {
        plan.table = few ? kernels.amx_pair : kernels.f32;
        plan.widen = plan.blocks;
        plan.a_per_step = 2;
      } else if (kernels.dot != nullptr) {
        plan.table = kernels.dot;
      } else if (kernels.pair != nullptr && plan.rows.tiles <= 2) {
        plan.table = kernels.pair;
        plan.a_per_step = 2;
      } else {
        plan.table = kernels.f32;
        plan.widen = true;
        plan.a_per_step = 2;
      }
      break;
  }
  plan.a_bytes = layout.compute == DType::kFloat64 ? 8 : 4;
  if (strips && plan.table == kernels.f32 && plan.rows.tiles > 2) {
    plan.strips = kernels.strips;
    plan.width = kStrip;
    plan.widen = false;
  }
  const int64_t limit = plan.blocks               ? kBlockSteps
                        : plan.strips != nullptr  ? kStripSteps / plan.a_per_step
                        : one_tile && !plan.widen ? kStreamSteps
                                                  : kSharedSteps / plan.a_per_step;
  for (int64_t chain = 0; chain < layout.num_chains(); ++chain) {
    plan.first_run.push_back(static_cast<int64_t>(plan.runs.size()));
    const int64_t steps = layout.steps[static_cast<size_t>(chain)];
    for (int64_t begin = 0; begin < steps; begin += limit) {
      plan.runs.push_back({chain, begin, std::min(limit, steps - begin)});
    }
  }
  plan.first_run.push_back(static_cast<int64_t>(plan.runs.size()));
  if (tiles != nullptr) {
    plan.first_block.assign(1, 0);
    for (int64_t steps : layout.steps) {
      plan.first_block.push_back(plan.first_block.back() + ceil_div(steps, kBlockSteps));
    }
  }
  return plan;
}

void widen(const Plan& plan, float* dst, const char* src, int64_t steps) {
  if (plan.layout->compute == DType::kBFloat16) {
    plan.kernels->widen_pairs(dst, reinterpret_cast<const uint32_t*>(src), steps);
  } else {
    plan.kernels->widen_f16(dst, reinterpret_cast<const uint16_t*>(src), steps);
  }
}

// The accumulators of one row block and the schedule that runs on them.
template <class T>
class Task {
 public:
  Task(const Plan& plan, const Schedule& program, const RightOperand& b, const char* a_packed, const T* bias,
       const Result& out, int64_t first_panel, int64_t last_panel)
      : plan_(plan), program_(program), b_(b), a_(a_packed), bias_(bias), out_(out), last_panel_(last_panel) {
    if (b.packed == nullptr) {
      packer_ = std::make_unique<PanelPacker>(*plan.kernels->loops, *plan.layout);
      group_ = std::min(PanelPacker::group(*b.sources), last_panel - first_panel + 1);
      fresh_ = aligned_buffer(group_ * panel_bytes());
    }
    int64_t most = 0;
    for (int64_t i = 0; i < plan.rows.blocks; ++i) most = std::max(most, slot_rows(plan, i));
    // Strips: the whole schedule runs on one strip after the other if the slots and the block of A are then in cache.
    const int64_t a_bytes = most * plan.layout->total_steps * plan.a_per_step * plan.a_bytes;
    strips_at_once_ = plan.strips == nullptr ? 1 : a_bytes <= kStripMajorBytes ? 1 : kPanel / kStrip;
    slot_stride_ = most * plan.width * strips_at_once_;
    output_stride_ = most * kPanel;
    const int64_t outputs = static_cast<int64_t>(program.outputs.size());
    const int64_t others = program.num_slots - outputs;
    slots_ = aligned_buffer((outputs * output_stride_ + others * slot_stride_) * static_cast<int64_t>(sizeof(T)));
    raw_.assign(static_cast<size_t>(program.num_slots), false);
    if (plan.widen) {
      int64_t steps = 0;
      for (const Run& run : plan.runs) steps = std::max(steps, run.steps);
      widened_ = aligned_buffer(steps * plan.a_per_step * kPanel * 4 * (plan.blocks ? 2 : 1));
    }
    if (plan.tiles != nullptr) widened_ = aligned_buffer(kBlockSteps * kPanel * 4);
    if (plan.strips != nullptr) widened_ = aligned_buffer(kStripSteps * kStrip * strips_at_once_ * 4);
  }

  void run(int64_t panel, int64_t block) {
    if (b_.packed != nullptr) {
      panel_ = b_.packed->panel(panel);
    } else {
      if (panel < fresh_begin_ || panel >= fresh_end_) {
        fresh_begin_ = panel;
        fresh_end_ = std::min(panel + group_, last_panel_ + 1);
        const int64_t n0 = panel * kPanel;
        packer_->pack(static_cast<char*>(fresh_.get()), *b_.sources, n0, std::min(b_.n, fresh_end_ * kPanel) - n0);
      }
      panel_ = static_cast<const char*>(fresh_.get()) + (panel - fresh_begin_) * panel_bytes();
    }
    tile0_ = plan_.rows.tile(block);
    tile1_ = plan_.rows.tile(block + 1);
    row0_ = plan_.rows.row(tile0_);
    rows_ = slot_rows(plan_, block);
    heights_.clear();
    for (int64_t tile = tile0_; tile < tile1_; ++tile) {
      const int64_t rows = plan_.rows.row(tile + 1) - plan_.rows.row(tile);
      if (heights_.empty() || heights_.back().rows != rows) heights_.push_back({rows, 0});
      ++heights_.back().tiles;
    }
    const int64_t columns = std::min<int64_t>(kPanel, b_.n - panel * kPanel);
    const int64_t at_once = plan_.width * strips_at_once_;
    for (int64_t column = 0; column < columns; column += at_once) {
      first_strip_ = column / plan_.width;
      run_program();
    }
    first_strip_ = 0;
    store_outputs(panel * kPanel, columns);
  }

 private:
  // Rows of a slot: those of the row block, whole tiles of them where tiles compute.
  static int64_t slot_rows(const Plan& plan, int64_t block) {
    const int64_t first = plan.rows.tile(block);
    const int64_t last = plan.rows.tile(block + 1);
    return plan.tiles != nullptr ? (last - first) * plan.height : plan.rows.row(last) - plan.rows.row(first);
  }

  // The schedule on columns [first_strip_ * width, ...) of the panel.
  void run_program() {
    const int64_t n = rows_ * plan_.width * strips_at_once_;
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      const Step& step = program_.steps[i];
      T* x = slot(step.slot);
      std::vector<bool>::reference raw = raw_[static_cast<size_t>(step.slot)];
      switch (step.kind) {
        case StepKind::kZero:
          std::memset(x, 0, static_cast<size_t>(n) * sizeof(T));
          raw = false;
          break;
        case StepKind::kLoad:
          load_run(i);
          if (step.round) finish_wire(x, n);
          break;
        case StepKind::kAdd: {
          // Without rounding the +0.0 of a leaf is left to the addition: l + (r + 0.0) is never -0, so a raw -0 on
          // the left gives the same sum as +0.
          const int right = static_cast<int>(step.source);
          if (step.round) {
            if (raw) finish(x, n);
            if (raw_[static_cast<size_t>(right)]) finish(slot(right), n);
            add_wire(x, slot(right), n);
          } else {
            add_run(i, n);
            continue;
          }
          raw = false;
          break;
        }
      }
    }
  }

  // Columns [n0, n0 + columns) of the outputs.
  void store_outputs(int64_t n0, int64_t columns) {
    const Loops& loops = *plan_.kernels->loops;
    const int64_t strips = ceil_div(columns, plan_.width);
    for (size_t o = 0; o < program_.outputs.size(); ++o) {
      T* x = slot(static_cast<int>(o));
      if (raw_[o]) finish(x, strips * rows_ * plan_.width);
      char* base = static_cast<char*>(out_.data) +
                   (static_cast<int64_t>(o) * out_.stride_output + row0_ * out_.stride_row + n0) * size_of(out_.dtype);
      const T* bias = bias_ == nullptr ? nullptr : bias_ + n0;
      const int64_t live = plan_.rows.row(tile1_) - row0_;
      for (int64_t r = 0; r < live; ++r) {
        const T* row = x + r * plan_.width;
        if (strips > 1) {
          for (int64_t i = 0; i < strips; ++i) {
            std::memcpy(row_ + i * kStrip, x + (i * rows_ + r) * kStrip, kStrip * sizeof(T));
          }
          row = row_;
        }
        store(loops, base + r * out_.stride_row * size_of(out_.dtype), row, columns, bias);
      }
    }
  }

  int64_t panel_bytes() const { return plan_.layout->total_steps * kPanel * step_bytes(plan_.layout->compute); }

  // The outputs hold a whole panel, the other slots what one pass of the schedule works on.
  T* slot(int index) {
    const int64_t outputs = static_cast<int64_t>(program_.outputs.size());
    T* const base = static_cast<T*>(slots_.get());
    if (index < outputs) return base + index * output_stride_ + first_strip_ * rows_ * plan_.width;
    return base + outputs * output_stride_ + (index - outputs) * slot_stride_;
  }

  // Add step i and the add steps behind it that take its sum as their right operand: one pass over the slots.
  void add_run(size_t& i, int64_t n) {
    const Step* step = &program_.steps[i];
    siblings_.assign(1, slot(static_cast<int>(step->source)));
    while (true) {
      siblings_.push_back(slot(step->slot));
      const int sum = step->slot;
      if (i + 1 == program_.steps.size()) break;
      step = &program_.steps[i + 1];
      if (step->kind != StepKind::kAdd || step->round || step->source != sum) break;
      ++i;
    }
    std::reverse(siblings_.begin(), siblings_.end());
    raw_[static_cast<size_t>(program_.steps[i].slot)] = false;
    add_leaves(siblings_.data(), static_cast<int>(siblings_.size()), n);
  }

  // Load step i and, under one change of the mode, the load steps right behind it (a leaf and its right sibling).
  void load_run(size_t& i) {
    const FpFlushScope flush(plan_.kernels->hardware_flush && plan_.layout->compute != DType::kFloat64);
    while (true) {
      const Step& step = program_.steps[i];
      raw_[static_cast<size_t>(step.slot)] = chain(step.source, slot(step.slot)) && !step.round;
      const bool more = i + 1 < program_.steps.size() && program_.steps[i + 1].kind == StepKind::kLoad;
      if (!more || step.round) return;
      ++i;
    }
  }

  // slot = chain `index` of the block, without the final +0.0; false if the chain is empty (then the slot is +0).
  bool chain(int64_t index, T* x) {
    const int64_t first = plan_.first_run[static_cast<size_t>(index)];
    const int64_t last = plan_.first_run[static_cast<size_t>(index) + 1];
    if (first == last) {
      std::memset(x, 0, static_cast<size_t>(rows_ * plan_.width * strips_at_once_) * sizeof(T));
      return false;
    }
    if (plan_.tiles != nullptr) {
      chain_tiles(index, x);
      return true;
    }
    if (plan_.blocks) {
      chain_blocks(index, x);
      return true;
    }
    if (plan_.strips != nullptr) {
      chain_strips(index, x);
      return true;
    }
    const ChainLayout& layout = *plan_.layout;
    const int64_t a_step = plan_.a_per_step * plan_.a_bytes;
    const int64_t b_step = step_bytes(layout.compute) * kPanel;
    const int64_t tiles = tile1_ - tile0_;
    // One tile reads B once, a few KiB behind its own prefetches. Several tiles share a run of B in L1 and fetch the
    // next run meanwhile, each tile its part of it.
    const int level = tiles == 1 ? 2 : tiles < 4 ? 1 : 0;
    const ChainFn* kernels = plan_.table->tile[level];
    for (int64_t i = first; i < last; ++i) {
      const Run& run = plan_.runs[static_cast<size_t>(i)];
      const int64_t at = layout.offset[static_cast<size_t>(index)] + run.begin;
      const char* b = panel_ + at * b_step;
      const char* next = b + (tiles == 1 ? kStreamAhead : run.steps * b_step);
      const char* next_end = next + run.steps * b_step;
      int64_t steps = run.steps;
      if (plan_.widen) {
        float* const wide = static_cast<float*>(widened_.get());
        widen(plan_, wide, b, run.steps);
        b = reinterpret_cast<const char*>(wide);
        steps *= plan_.a_per_step;
      }
      const char* a = a_ + (row0_ * layout.total_steps + at * rows_) * a_step;
      T* acc = x;
      for (const auto& [rows, count] : heights_) {
        const ChainFn kernel = kernels[rows - 1];
        for (int64_t tile = 0; tile < count; ++tile) {
          kernel(a, b, steps, acc, i == first, next < next_end ? next : a);
          a += rows * run.steps * a_step;
          acc += rows * kPanel;
          next += steps * (int64_t{64} << level);
        }
      }
    }
    return true;
  }

  // The same by strips; slots are [strip][row][16].
  void chain_strips(int64_t index, T* x) {
    const ChainLayout& layout = *plan_.layout;
    const int64_t first = plan_.first_run[static_cast<size_t>(index)];
    const int64_t last = plan_.first_run[static_cast<size_t>(index) + 1];
    const int64_t a_step = plan_.a_per_step * plan_.a_bytes;
    const int64_t b_step = step_bytes(layout.compute) * kPanel;
    for (int64_t i = first; i < last; ++i) {
      const Run& run = plan_.runs[static_cast<size_t>(i)];
      const int64_t at = layout.offset[static_cast<size_t>(index)] + run.begin;
      const char* const b = panel_ + at * b_step;
      const char* next = b + run.steps * b_step;
      const char* const next_end = next + run.steps * b_step;
      const int64_t steps = run.steps * plan_.a_per_step;
      const char* a = a_ + (row0_ * layout.total_steps + at * rows_) * a_step;
      const float* dealt = static_cast<const float*>(widened_.get());
      deal(b + first_strip_ * kStrip * step_bytes(layout.compute), run.steps);
      for (int64_t strip = 0; strip < strips_at_once_; ++strip, dealt += steps * kStrip) {
        const char* a_tile = a;
        T* acc = x + strip * rows_ * kStrip;
        for (const auto& [rows, tiles] : heights_) {
          const char* ahead = next < next_end ? next : a_tile;
          plan_.strips->tile[rows - 1](a_tile, dealt, steps, acc, i == first, ahead, tiles);
          a_tile += rows * tiles * run.steps * a_step;
          acc += rows * tiles * kStrip;
          next += tiles * (steps / 4 * 64);
        }
      }
    }
  }

  // The same on tiles (A14).
  void chain_tiles(int64_t index, float* x) {
    const int64_t steps = plan_.layout->steps[static_cast<size_t>(index)];
    const int64_t blocks = ceil_div(steps, kBlockSteps);
    constexpr int64_t kStepBytes = kPanel * 4;
    const char* const b = panel_ + plan_.layout->offset[static_cast<size_t>(index)] * kStepBytes;
    char* tail = nullptr;
    if (const int64_t rest = steps % kBlockSteps; rest != 0) {
      tail = static_cast<char*>(widened_.get());
      std::memcpy(tail, b + (steps - rest) * kStepBytes, static_cast<size_t>(rest * kStepBytes));
      std::memset(tail + rest * kStepBytes, 0, static_cast<size_t>((kBlockSteps - rest) * kStepBytes));
    }
    const int64_t stride = plan_.first_block.back() * kAmxTileBytes;
    const char* const a = a_ + tile0_ * stride + plan_.first_block[static_cast<size_t>(index)] * kAmxTileBytes;
    plan_.tiles->chain(a, stride, b, tail, blocks, x, tile1_ - tile0_);
  }
  void chain_tiles(int64_t, double*) {}

  // The same by fp32 chains: per block one over the even elements, one over the odd ones, acc = acc + (even + odd).
  void chain_blocks(int64_t index, float* x) {
    const ChainLayout& layout = *plan_.layout;
    const int64_t first = plan_.first_run[static_cast<size_t>(index)];
    const int64_t last = plan_.first_run[static_cast<size_t>(index) + 1];
    float* const wide = static_cast<float*>(widened_.get());
    for (int64_t i = first; i < last; ++i) {
      const Run& run = plan_.runs[static_cast<size_t>(i)];
      const int64_t at = layout.offset[static_cast<size_t>(index)] + run.begin;
      float* const even = wide + 2 * run.steps * kPanel;
      float* const odd = even + run.steps * kPanel;
      widen(plan_, wide, panel_ + at * kPanel * 4, run.steps);
      for (int64_t k = 0; k < run.steps; ++k) {
        std::memcpy(even + k * kPanel, wide + 2 * k * kPanel, kPanel * 4);
        std::memcpy(odd + k * kPanel, wide + (2 * k + 1) * kPanel, kPanel * 4);
      }
      const float* a = reinterpret_cast<const float*>(a_) + (row0_ * layout.total_steps + at * rows_) * 2;
      float* acc = x;
      for (const auto& [rows, count] : heights_) {
        const ChainFn kernel = plan_.table->tile[0][rows - 1];
        for (int64_t tile = 0; tile < count; ++tile) {
          kernel(a, even, run.steps, halves_[0], true, a);
          kernel(a + run.steps * rows, odd, run.steps, halves_[1], true, a);
          add_block(acc, rows * kPanel, i == first);
          a += 2 * run.steps * rows;
          acc += rows * kPanel;
        }
      }
    }
  }
  void chain_blocks(int64_t, double*) {}

  // acc = acc + (even + odd), each sum flushed as a step of A2 is: the mode may or may not do it.
  void add_block(float* acc, int64_t n, bool first) {
    for (int64_t i = 0; i < n; ++i) {
      const float sum = flushed(halves_[0][i] + halves_[1][i]);
      acc[i] = flushed((first ? 0.0f : acc[i]) + sum);
    }
  }
  static float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

  void deal(const char* src, int64_t steps) {
    const StripKernels& kernels = *plan_.strips;
    float* const dst = static_cast<float*>(widened_.get());
    const int strips = static_cast<int>(strips_at_once_);
    switch (plan_.layout->compute) {
      case DType::kBFloat16:
        return kernels.deal_pairs(dst, reinterpret_cast<const uint32_t*>(src), steps, strips);
      case DType::kFloat16:
        return kernels.deal_f16(dst, reinterpret_cast<const uint16_t*>(src), steps, strips);
      default:
        return kernels.deal_f32(dst, reinterpret_cast<const float*>(src), steps, strips);
    }
  }

  void finish(float* x, int64_t n) { plan_.kernels->loops->finish_f32(x, n); }
  void finish(double* x, int64_t n) { plan_.kernels->loops->finish_f64(x, n); }
  // No schedule rounds an fp64 accumulator: gemm() refuses it.
  void finish_wire(float* x, int64_t n) { plan_.kernels->loops->finish_wire(x, n); }
  void finish_wire(double*, int64_t) {}
  void add_wire(float* x, const float* y, int64_t n) { plan_.kernels->loops->add_wire(x, x, y, n); }
  void add_wire(double*, const double*, int64_t) {}
  void add_leaves(float* const* x, int count, int64_t n) { plan_.kernels->loops->add_leaves_f32(x, count, n); }
  void add_leaves(double* const* x, int count, int64_t n) { plan_.kernels->loops->add_leaves_f64(x, count, n); }
  void store(const Loops& loops, void* dst, const float* x, int64_t n, const float* bias) {
    loops.store_f32(dst, out_.dtype, x, n, 1.0f, bias);
  }
  void store(const Loops& loops, void* dst, const double* x, int64_t n, const double* bias) {
    loops.store_f64(dst, out_.dtype, x, n, 1.0, bias);
  }

  const Plan& plan_;
  const Schedule& program_;
  const RightOperand& b_;
  std::unique_ptr<PanelPacker> packer_;
  AlignedBuffer fresh_;  // panels [fresh_begin_, fresh_end_)
  int64_t fresh_begin_ = 0;
  int64_t fresh_end_ = 0;
  int64_t group_ = 1;
  const char* a_;
  const T* bias_;
  const Result& out_;
  int64_t last_panel_;
  int64_t output_stride_ = 0;
  int64_t slot_stride_ = 0;
  AlignedBuffer slots_;
  AlignedBuffer widened_;
  std::vector<bool> raw_;
  const char* panel_ = nullptr;
  int64_t tile0_ = 0;
  int64_t tile1_ = 0;
  int64_t row0_ = 0;
  int64_t rows_ = 0;
  struct Height {
    int64_t rows;
    int64_t tiles;
  };
  std::vector<Height> heights_;  // of the block's tiles, equal ones counted
  alignas(64) float halves_[2][kTileRows * kPanel];
  std::vector<T*> siblings_;
  int64_t first_strip_ = 0;
  int64_t strips_at_once_ = 1;
  alignas(64) T row_[kPanel];
};

// Memory for the packed A, kept by the calling thread between calls: fresh pages cost more than the packing.
char* packed_a_buffer(int64_t bytes, AlignedBuffer& fresh) {
  constexpr int64_t kKeep = 32 << 20;
  if (bytes > kKeep) {
    fresh = aligned_buffer(bytes);
    return static_cast<char*>(fresh.get());
  }
  thread_local AlignedBuffer kept;
  thread_local int64_t kept_bytes = 0;
  if (kept_bytes < bytes) {
    kept.reset();
    kept_bytes = 0;
    kept = aligned_buffer(bytes);
    kept_bytes = bytes;
  }
  return static_cast<char*>(kept.get());
}

void serial(int64_t count, const std::function<void(int64_t, int64_t)>& body) { body(0, count); }

template <class T>
void run_tasks(const Plan& plan, const Schedule& program, const RightOperand& b, const char* a, const void* bias,
               const Result& out, bool block_major, bool in_pairs, const ParallelFor& parallel) {
  const int64_t panels = ceil_div(b.n, kPanel);
  parallel(panels * plan.rows.blocks, [&](int64_t begin, int64_t end) {
    const FpIeeeScope ieee;
    const TileScope tiles(plan);
    // The panels of this range, if the panels are the outer loop (else b is packed already).
    const int64_t first_panel = begin / plan.rows.blocks;
    const int64_t last_panel = (end - 1) / plan.rows.blocks;
    Task<T> task(plan, program, b, a, static_cast<const T*>(bias), out, first_panel, last_panel);
    for (int64_t i = begin; i < end; ++i) {
      if (block_major) {
        task.run(i % panels, i / panels);
      } else if (in_pairs) {  // both panels of a pair pass over a row block before the next
        const int64_t first = i / (2 * plan.rows.blocks) * 2;
        const int64_t width = std::min<int64_t>(2, panels - first);
        const int64_t at = i - first * plan.rows.blocks;
        task.run(first + at % width, at / width);
      } else {
        task.run(i / plan.rows.blocks, i % plan.rows.blocks);
      }
    }
  });
}

}  // namespace

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "?";
}

ChainLayout::ChainLayout(std::vector<std::vector<int64_t>> cuts_, DType compute_)
    : compute(compute_), cuts(std::move(cuts_)) {
  if (cuts.empty()) throw std::invalid_argument("gemm: cuts must name at least one source");
  for (size_t s = 0; s < cuts.size(); ++s) {
    const std::string where = "gemm: cuts[" + std::to_string(s) + "]";
    if (cuts[s].empty()) throw std::invalid_argument(where + " is empty; expected chains + 1 offsets");
    if (cuts[s].size() != cuts[0].size()) {
      throw std::invalid_argument(where + " has " + std::to_string(cuts[s].size()) + " offsets, cuts[0] has " +
                                  std::to_string(cuts[0].size()) + "; every source needs the same number of chains");
    }
    for (size_t i = 0; i < cuts[s].size(); ++i) {
      const int64_t before = i == 0 ? 0 : cuts[s][i - 1];
      if (cuts[s][i] < before) {
        throw std::invalid_argument(
            where + "[" + std::to_string(i) + "] = " + std::to_string(cuts[s][i]) +
            "; offsets must be >= 0 and must not descend (before it: " + std::to_string(before) + ")");
      }
    }
  }
  const int64_t chains = static_cast<int64_t>(cuts[0].size()) - 1;
  for (int64_t c = 0; c < chains; ++c) {
    int64_t sum = 0;
    for (size_t s = 0; s < cuts.size(); ++s) sum += segment(s, c);
    length.push_back(sum);
    steps.push_back(compute == DType::kBFloat16 ? (sum + 1) / 2 : sum);
    offset.push_back(total_steps);
    total_steps += steps.back();
  }
}

PackedB::PackedB(const std::vector<Operand>& sources, int64_t n, ChainLayout layout, const ParallelFor& parallel)
    : n_(n), layout_(std::move(layout)) {
  data_ = aligned_buffer(nbytes());
  const Loops& loops = *find_path("", DType::kFloat32).loops;
  const int64_t group = PanelPacker::group(sources);
  parallel(panels(), [&](int64_t begin, int64_t end) {
    const FpIeeeScope ieee;
    PanelPacker packer(loops, layout_);
    for (int64_t i = begin; i < end; i += group) {
      const int64_t n0 = i * kPanel;
      packer.pack(const_cast<char*>(panel(i)), sources, n0, std::min(n_, std::min(i + group, end) * kPanel) - n0);
    }
  });
}

int64_t PackedB::nbytes() const { return panels() * layout_.total_steps * kPanel * step_bytes(layout_.compute); }

const char* PackedB::panel(int64_t index) const {
  return static_cast<const char*>(data_.get()) + index * layout_.total_steps * kPanel * step_bytes(layout_.compute);
}

void gemm(const std::vector<Operand>& a, int64_t m, const RightOperand& b, const ChainLayout& layout,
          const Schedule& program, const void* bias, const Result& out, const Path& path, const ParallelFor& parallel) {
  require_narrowing("gemm", accumulation(layout.compute), program, out.dtype);
  if (m == 0 || b.n == 0) return;
  const Plan plan = make_plan(path, layout, m);
  if (out.stride_row == b.n) ask_for_huge_pages(out.data, m * b.n * size_of(out.dtype));
  const int64_t a_step = plan.a_per_step * plan.a_bytes;
  AlignedBuffer fresh;
  const int64_t tile_bytes = plan.tiles != nullptr ? plan.first_block.back() * kAmxTileBytes : 0;
  const int64_t a_bytes = plan.tiles != nullptr ? plan.rows.tiles * tile_bytes : m * layout.total_steps * a_step;
  char* packed = packed_a_buffer(a_bytes, fresh);
  const int64_t num_runs = static_cast<int64_t>(plan.runs.size());
  auto pack = [&](int64_t begin, int64_t end) {
    const FpIeeeScope ieee;
    BlockPacker packer(plan, a);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / num_runs;
      const Run& run = plan.runs[static_cast<size_t>(i % num_runs)];
      const int64_t row0 = plan.rows.row(plan.rows.tile(block));
      const int64_t rows = plan.rows.row(plan.rows.tile(block + 1)) - row0;
      const int64_t at = layout.offset[static_cast<size_t>(run.chain)] + run.begin;
      packer.pack(packed + (row0 * layout.total_steps + at * rows) * a_step, block, run);
    }
  };
  auto pack_tiles = [&](int64_t begin, int64_t end) {
    const FpIeeeScope ieee;
    TilePacker packer(plan, a);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile = i / layout.num_chains();
      const int64_t chain = i % layout.num_chains();
      const int64_t at = plan.first_block[static_cast<size_t>(chain)] * kAmxTileBytes;
      packer.pack(packed + tile * tile_bytes + at, tile, chain);
    }
  };
  // A small A is packed before a thread could be woken.
  const bool small = m * layout.total_steps < (1 << 15);
  if (plan.tiles != nullptr) {
    (small ? ParallelFor(serial) : parallel)(plan.rows.tiles * layout.num_chains(), pack_tiles);
  } else {
    (small ? ParallelFor(serial) : parallel)(plan.rows.blocks * num_runs, pack);
  }
  // If B is the smaller operand and stays in L3, the row blocks are the outer loop: a block of A stays in L2 and `out`
  // is written page by page (dW has this shape). Else the panels are: each is packed, if it has to be, and read by all
  // row blocks while it is in L2.
  const int64_t b_bytes = ceil_div(b.n, kPanel) * layout.total_steps * kPanel * step_bytes(layout.compute);
  const bool block_major = plan.rows.blocks > 1 && b_bytes <= std::min(a_bytes, kBlockMajorBytes);
  // On tiles, which outrun L3: a row block of A is read once for two panels, where L2 holds all three.
  const int64_t panel_bytes = layout.total_steps * kPanel * step_bytes(layout.compute);
  const bool in_pairs = plan.tiles != nullptr && b.packed != nullptr && plan.rows.blocks > 1 &&
                        a_bytes / plan.rows.blocks + 2 * panel_bytes <= kAmxCacheBytes;
  RightOperand right = b;
  std::optional<PackedB> small_b;
  if (block_major && b.packed == nullptr) {
    small_b.emplace(*b.sources, b.n, layout, parallel);
    right.packed = &*small_b;
  }
  if (layout.compute == DType::kFloat64) {
    run_tasks<double>(plan, program, right, packed, bias, out, block_major, in_pairs, parallel);
  } else {
    run_tasks<float>(plan, program, right, packed, bias, out, block_major, in_pairs, parallel);
  }
}

void require_narrowing(const char* where, DType accumulation, const Schedule& program, DType out) {
  if (accumulation != DType::kFloat64) return;
  for (const Step& step : program.steps) {
    if (step.round) {
      throw std::invalid_argument(std::string(where) + ": a bfloat16 wire needs float32 accumulation, got float64");
    }
  }
  if (out != DType::kFloat64 && out != DType::kFloat32) {
    throw std::invalid_argument(std::string(where) + ": out_dtype: a float64 root leaves as float64 or float32, got " +
                                name_of(out));
  }
}

bool is_operand(DType source, DType compute) {
  if (source == compute) return true;
  switch (compute) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return source == DType::kFloat32;
    case DType::kFloat32:
      return source == DType::kBFloat16 || source == DType::kFloat16;
    case DType::kFloat64:
      return true;
  }
  return false;
}

std::string operand_list(DType compute) {
  std::string list;
  for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    if (is_operand(dtype, compute)) list += (list.empty() ? "" : ", ") + std::string(name_of(dtype));
  }
  return list;
}

namespace {

std::vector<const GemmKernels*> available() {
  std::vector<const GemmKernels*> paths;
  for (const GemmKernels* path : {avx512_bf16_kernels(), avx512f_kernels(), avx2_kernels(), portable_kernels()}) {
    if (path != nullptr) paths.push_back(path);
  }
  return paths;
}

// Seconds of one small compute-bound product on a path: 48 x 64 x 512 in bf16, best of several.
double time_bf16(const GemmKernels& kernels) {
  constexpr int64_t kRows = 48;
  constexpr int64_t kDepth = 512;
  const std::vector<uint16_t> ones(static_cast<size_t>(kPanel * kDepth), 0x3f80);
  std::vector<float> out(static_cast<size_t>(kRows * kPanel));
  const std::vector<Operand> operand = {{ones.data(), DType::kBFloat16, kDepth, 1}};
  const ChainLayout layout({{0, kDepth}}, DType::kBFloat16);
  const PackedB packed(operand, kPanel, layout, serial);
  const RightOperand b{&packed, nullptr, kPanel};
  const Schedule program = schedule(leaf_nodes(0, 1), 1);
  const Result result{out.data(), DType::kFloat32, 0, kPanel};
  double best = 1e9;
  for (int i = 0; i < 12; ++i) {
    const auto start = std::chrono::steady_clock::now();
    gemm(operand, kRows, b, layout, program, nullptr, result, {&kernels}, serial);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// vdpbf16ps does two steps per lane, but some cores start one only every second cycle; both give the same bits.
const GemmKernels* fastest_bf16() {
  static const GemmKernels* fastest = [] {
    const GemmKernels* dot = avx512_bf16_kernels();
    const GemmKernels* wide = avx512f_kernels();
    if (dot == nullptr || wide == nullptr) return available().front();
    return time_bf16(*dot) <= time_bf16(*wide) ? dot : wide;
  }();
  return fastest;
}

}  // namespace

std::vector<std::string> cpu_paths() {
  std::vector<std::string> names;
  for (const GemmKernels* path : available()) names.emplace_back(path->name);
  return names;
}

const GemmKernels& find_path(const std::string& name, DType compute) {
  const char* variable = std::getenv("TBIK_CPU_PATH");
  const bool forced_here = !name.empty();
  std::string wanted = forced_here ? name : variable == nullptr ? "" : variable;
  if (!forced_here && wanted == "amx" && amx_tiles() != nullptr) wanted = "";  // of A14's chains only
  const std::vector<const GemmKernels*> paths = available();
  if (wanted.empty()) {
    if (compute == DType::kBFloat16) return *fastest_bf16();
    return paths.front()->only_bf16 ? *paths[1] : *paths.front();
  }
  for (size_t i = 0; i < paths.size(); ++i) {
    if (wanted != paths[i]->name) continue;
    if (!paths[i]->only_bf16 || compute == DType::kBFloat16) return *paths[i];
    // The variable is for the whole process: other compute types take the next path. An argument is meant literally.
    if (!forced_here) return *paths[i + 1];
    throw std::invalid_argument("gemm: path 'avx512_bf16' computes bfloat16 only, got compute '" +
                                std::string(name_of(compute)) + "'");
  }
  if (wanted == "amx" && amx_tiles() != nullptr) {
    throw std::invalid_argument("path 'amx' computes the leaf 'amx' of bfloat16 only, got compute '" +
                                std::string(name_of(compute)) + "', or another leaf");
  }
  std::string known;
  for (const GemmKernels* path : paths) known += (known.empty() ? "" : ", ") + std::string(path->name);
  throw std::invalid_argument((forced_here ? "path '" : "TBIK_CPU_PATH '") + wanted +
                              "' is not available on this CPU; available: " + known);
}

std::vector<std::string> amx_paths() {
  std::vector<std::string> names;
  if (amx_tiles() != nullptr) names.emplace_back("amx");
  for (const GemmKernels* path : available()) {
    if (!path->only_bf16) names.emplace_back(path->name);
  }
  return names;
}

Path find_leaf_path(const std::string& name, DType compute, Leaf leaf) {
  if (leaf == Leaf::kFma || compute != DType::kBFloat16) return {&find_path(name, compute)};
  const char* variable = std::getenv("TBIK_CPU_PATH");
  const std::string wanted = !name.empty() ? name : variable == nullptr ? "" : variable;
  const std::string base = wanted == "amx" ? "" : wanted;
  // fp32's path: A14 needs fp32 chains, or tiles and none
  const GemmKernels* kernels = &find_path(base, base == "avx512_bf16" ? DType::kBFloat16 : DType::kFloat32);
  if (kernels->only_bf16) kernels = avx512f_kernels();
  const TileKernels* tiles = wanted.empty() || wanted == "amx" ? amx_tiles() : nullptr;
  if (wanted == "amx" && tiles == nullptr) {
    throw std::invalid_argument("path 'amx' is not available on this CPU or kernel: it has no AMX tiles");
  }
  return {kernels, leaf, tiles};
}

}  // namespace tbik
