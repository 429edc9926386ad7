// Driver of attention: packing of key blocks, tiles of query rows, masks, the order of the blocks. See attention.h.
//
// Forward. The rows of a KV head are its (query, head) pairs, position by position; a tile is up to 64 of them and goes
// through the key blocks in ascending order: chains of q k, softmax step, chains of p v. Its scores lie as [key][row],
// so that a register holds one key's score for 16 rows: the queries are transposed (once), never the keys, and maximum,
// exponentials and sum of a row stay in its lane. A block of keys is widened to fp32 once for all tiles (in a first
// pass), or by its only tile. A tile of few rows (decoding) reads keys and values where they lie if the kernels take
// their dtype, else widened: packing would cost more than the chains; its scores lie as [row][key]. Backward. A task is
// one query head of one sequence: key blocks outside, query blocks inside, both ascending, so that dQ receives its key
// blocks and dK, dV their query blocks in order, from one evaluation of p and dS. The heads of a group are folded by
// the canonical tree afterwards. Every task writes its own rows only; the floating-point mode is IEEE, and flush around
// the chains that ask for it.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "fpmode.h"

namespace tbik {

namespace {

constexpr int64_t kTile = kScoreRows;                // query rows of a tile
constexpr int64_t kLanes = 16;                       // rows of a group that the softmax step takes together
constexpr int64_t kFewRows = 8;                      // rows of a tile that reads keys in place
constexpr int64_t kPackedBytes = int64_t{64} << 20;  // packed keys and values of one round
constexpr int64_t kKeptBytes = int64_t{32} << 20;    // memory a thread keeps between calls: fresh pages cost more
constexpr float kInf = std::numeric_limits<float>::infinity();

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Hands out 64-byte aligned pieces of one buffer; the first pass only measures.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return p;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Memory of the calling thread; kept between calls up to a limit. `slot`: two users that are alive at the same time.
template <int slot>
char* thread_buffer(int64_t bytes, AlignedBuffer& fresh) {
  if (bytes > kKeptBytes) {
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

// Tasks 0 .. count - 1, the next one to whoever is free.
void run_dynamic(int64_t count, const ParallelFor& parallel,
                 const std::function<void(const std::function<int64_t()>&)>& worker) {
  std::atomic<int64_t> next{0};
  parallel(count, [&](int64_t, int64_t) {
    const FpIeeeScope ieee;
    worker([&] { return next.fetch_add(1); });
  });
}

struct Live {
  int64_t lo;  // first live key position
  int64_t hi;  // one behind the last
};

Live live_keys(const AttentionProblem& p, const Sequence& s, int64_t query) {
  const int64_t position = s.k_length - s.q_length + query;
  Live live{0, s.k_length};
  if (p.causal) live.hi = position + 1;
  if (p.window > 0) {
    live.lo = std::max<int64_t>(0, position - p.window + 1);
    live.hi = std::min(live.hi, position + p.window);
  }
  return live;
}

// K5 counts positions like the query blocks of K3: from the first query where there are more queries than keys.
uint32_t counted_position(const Sequence& s, int64_t query) {
  return static_cast<uint32_t>(std::max<int64_t>(0, s.k_length - s.q_length) + query);
}

uint32_t head_word(const AttentionProblem& p, int64_t head) {
  return static_cast<uint32_t>(1 + p.dropout.first_head + head);
}

class Packer {
 public:
  Packer(const AttentionProblem& problem, const Loops& loops) : p_(problem), loops_(loops) {}

  static int64_t padded(int64_t dim) { return round_up(dim, 16); }

  // dst[0 .. Dp) = fp32 of D values, padded by +0
  void widen(float* dst, const HeadRows& x, const char* row) const {
    if (x.stride_dim == 1) {
      loops_.cast(dst, DType::kFloat32, row, x.dtype, p_.dim);
    } else {
      const int64_t size = size_of(x.dtype);
      for (int64_t d = 0; d < p_.dim; ++d) {
        loops_.cast(dst + d, DType::kFloat32, row + d * x.stride_dim * size, x.dtype, 1);
      }
    }
    for (int64_t d = p_.dim; d < padded(p_.dim); ++d) dst[d] = 0.0f;
  }

  static const char* at(const HeadRows& x, int64_t row, int64_t head) {
    return static_cast<const char*>(x.data) + (row * x.stride_row + head * x.stride_head) * size_of(x.dtype);
  }

  static const char* row_at(const KeyRows& x, const Sequence& s, int64_t head, int64_t position) {
    if (x.page_size == 0) return at(x.rows, s.k_first + position, head);
    const int64_t page = s.pages[position / x.page_size];
    return at(x.rows, position % x.page_size, head) + page * x.stride_page * size_of(x.rows.dtype);
  }

  // rows[k][0 .. Dp) = keys 64 j + k of the sequence; rows beyond its end are +0
  void widen_block(float* rows, const KeyRows& x, const Sequence& s, int64_t head, int64_t block) const {
    const int64_t dp = padded(p_.dim);
    const int64_t first = block * kKeyBlock;
    const int64_t count = std::min(kKeyBlock, s.k_length - first);
    const bool adjacent = x.rows.stride_dim == 1 && x.rows.stride_row == p_.dim && dp == p_.dim;
    const int64_t run = !adjacent ? 1 : x.page_size == 0 ? kKeyBlock : std::gcd(x.page_size, kKeyBlock);
    for (int64_t k = 0; k < count; k += run) {
      const char* row = row_at(x, s, head, first + k);
      if (adjacent) {
        loops_.cast(rows + k * dp, DType::kFloat32, row, x.rows.dtype, std::min(run, count - k) * dp);
      } else {
        widen(rows + k * dp, x.rows, row);
      }
    }
    std::memset(rows + count * dp, 0, static_cast<size_t>((kKeyBlock - count) * dp) * sizeof(float));
  }

  bool in_place(const KeyRows& x, int64_t count, bool bf16) const {
    const bool readable = x.rows.dtype == DType::kFloat32
                              ? p_.dim % 16 == 0
                              : x.rows.dtype == DType::kBFloat16 && bf16 && p_.dim % 32 == 0;
    return readable && x.rows.stride_dim == 1 && (x.page_size > 0 ? x.page_size : count) % 8 == 0;
  }

  // groups[i] = key 8 i of the block, as far as the sequence goes; those behind it stay.
  void find_groups(const void** groups, const KeyRows& x, const Sequence& s, int64_t head, int64_t block) const {
    const int64_t first = block * kKeyBlock;
    const int64_t count = std::min(kKeyBlock, s.k_length - first);
    const int64_t size = size_of(x.rows.dtype);
    const char* row = at(x.rows, 0, head);
    int64_t slot = s.k_first + first;  // packed: one page without end
    int64_t page = 0;
    if (x.page_size > 0) {
      page = first / x.page_size;  // the only division
      slot = first - page * x.page_size;
    }
    for (int64_t k = 0; k < count; k += 8, slot += 8) {
      if (x.page_size > 0 && slot >= x.page_size) {
        slot -= x.page_size;
        ++page;
      }
      const int64_t of_page = x.page_size > 0 ? s.pages[page] * x.stride_page : 0;
      groups[k / 8] = row + (of_page + slot * x.rows.stride_row) * size;
    }
  }

  // Keys 64 j ... of the sequence in place where they are rows of adjacent values that the kernels take, at equal
  // distances within groups of 8; else widened to `scratch` [64][Dp]. Every row may be read; those beyond the end of
  // the sequence hold anything. `groups`: those of the block before where `follows`, whose `ahead` is this block.
  void row_groups(RowGroups& groups, bool follows, const KeyRows& x, const Sequence& s, int64_t head, int64_t block,
                  float* scratch, bool bf16) const {
    const int64_t dp = padded(p_.dim);
    const int64_t count = std::min(kKeyBlock, s.k_length - block * kKeyBlock);
    if (!in_place(x, count, bf16)) {
      widen_block(scratch, x, s, head, block);
      groups.stride = dp;
      groups.dtype = DType::kFloat32;
      for (int64_t i = 0; i < kKeyBlock / 8; ++i) groups.ahead[i] = groups.group[i] = scratch + i * 8 * dp;
      return;
    }
    groups.stride = x.rows.stride_row;
    groups.dtype = x.rows.dtype;
    if (follows) {
      std::copy_n(groups.ahead, kKeyBlock / 8, groups.group);
    } else {
      find_groups(groups.group, x, s, head, block);
    }
    for (int64_t i = (count + 7) / 8; i < kKeyBlock / 8; ++i) groups.group[i] = groups.group[0];
    std::copy_n(groups.group, kKeyBlock / 8, groups.ahead);
    if ((block + 1) * kKeyBlock < s.k_length) find_groups(groups.ahead, x, s, head, block + 1);
  }

  // panels[k / 16][d][k % 16] = rows[k][d]; scratch [D][64]
  void transpose(float* panels, const float* rows, float* scratch) const {
    const void* pointers[kKeyBlock];
    for (int64_t k = 0; k < kKeyBlock; ++k) pointers[k] = rows + k * padded(p_.dim);
    loops_.transpose(reinterpret_cast<uint32_t*>(scratch), pointers, p_.dim, false);
    for (int64_t k = 0; k < kKeyBlock; k += 16) {
      for (int64_t d = 0; d < p_.dim; ++d, panels += 16) std::memcpy(panels, scratch + d * kKeyBlock + k, 64);
    }
  }

  // panels[d / 16][k][d % 16] = rows[k][d]
  void to_panels(float* panels, const float* rows, int64_t count) const {
    const int64_t dp = padded(p_.dim);
    for (int64_t d = 0; d < dp; d += 16) {
      for (int64_t k = 0; k < count; ++k, panels += 16) std::memcpy(panels, rows + k * dp + d, 64);
    }
  }

 private:
  const AttentionProblem& p_;
  const Loops& loops_;
};

// One block of keys and values in fp32, [64][Dp] each.
struct Block {
  float* keys;
  float* values;
  bool values_finite;
};

// c[r] = chain over the live k of row r of a[r, k] b[k]. Masked entries of a are +0: over a finite b they change
// nothing, so rows share the union of their ranges; over an Inf or NaN they would (0 * Inf is NaN), and each row takes
// its own range.
void masked_chains(const AttentionKernels& kernels, const float* a, int64_t a_row, int64_t a_step, int64_t rows,
                   const int32_t* lo, const int32_t* hi, bool finite, const float* b, int64_t b_panel, int64_t b_step,
                   float* c, int64_t dp) {
  const bool uniform = std::all_of(lo, lo + rows, [&](int32_t x) { return x == lo[0]; }) &&
                       std::all_of(hi, hi + rows, [&](int32_t x) { return x == hi[0]; });
  const int64_t step = uniform ? rows : finite ? 6 : 1;
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t count = std::min(step, rows - r);
    const int64_t first = *std::min_element(lo + r, lo + r + count);
    const int64_t end = std::max<int64_t>(first, *std::max_element(hi + r, hi + r + count));
    kernels.chains(a + r * a_row + first * a_step, a_row, a_step, count, b + first * b_step, b_panel, b_step,
                   end - first, c + r * dp, dp, dp);
  }
}

struct Pair {
  int64_t sequence;
  int64_t head;  // KV head
  int64_t rows;  // query rows: queries x heads of the group
  int64_t tiles;
  int64_t first_block;  // blocks [first_block, end_block) have a live key
  int64_t end_block;
  int64_t packed = -1;  // where its packed blocks begin; -1: packed by its only tile
};

class Forward {
 public:
  Forward(const AttentionProblem& problem, const AttentionResult& result, const AttentionKernels& kernels,
          const Loops& loops, const ParallelFor& parallel)
      : p_(problem),
        result_(result),
        kernels_(kernels),
        loops_(loops),
        parallel_(parallel),
        packer_(problem, loops),
        dp_(Packer::padded(problem.dim)),
        block_floats_(2 * kKeyBlock * dp_) {}

  void run() {
    std::vector<Pair> round;
    int64_t blocks = 0;
    const int64_t limit = std::max<int64_t>(1, kPackedBytes / (block_floats_ * 4));
    for (int64_t b = 0; b < static_cast<int64_t>(p_.sequences.size()); ++b) {
      for (int64_t g = 0; g + 1 < static_cast<int64_t>(p_.head_offsets.size()); ++g) {
        Pair pair = make_pair(b, g);
        if (pair.rows == 0) continue;
        const int64_t size = pair.tiles > 1 ? pair.end_block - pair.first_block : 0;
        if (blocks > 0 && blocks + size > limit) {
          run_round(round, blocks);
          round.clear();
          blocks = 0;
        }
        if (size > 0) {
          pair.packed = blocks;
          blocks += size;
        }
        round.push_back(pair);
      }
    }
    run_round(round, blocks);
  }

 private:
  struct Memory {
    Memory(Arena& arena, int64_t dp) {
      q = arena.take<float>(kTile * dp);
      q_DR = arena.take<float>(kTile * dp);
      s = arena.take<float>(kTile * kKeyBlock);
      partial = arena.take<float>(kTile * dp);
      acc = arena.take<float>(kTile * dp);
      keys = arena.take<float>(kKeyBlock * dp);
      values = arena.take<float>(kKeyBlock * dp);
      m = arena.take<float>(kTile);
      l = arena.take<float>(kTile);
      sums = arena.take<float>(kTile);
      factor = arena.take<float>(kTile);
      lo = arena.take<int32_t>(kTile);
      hi = arena.take<int32_t>(kTile);
      live = arena.take<Live>(kTile);
      position = arena.take<uint32_t>(kTile);
      head = arena.take<uint32_t>(kTile);
      keep = arena.take<float>(kKeyBlock);
    }
    float *q, *q_DR, *s, *partial, *acc, *keys, *values, *m, *l, *sums, *factor, *keep;
    uint32_t *position, *head;
    int32_t *lo, *hi;
    Live* live;
  };

  Pair make_pair(int64_t b, int64_t g) const {
    const Sequence& s = p_.sequences[static_cast<size_t>(b)];
    const int64_t group = p_.head_offsets[static_cast<size_t>(g) + 1] - p_.head_offsets[static_cast<size_t>(g)];
    Pair pair{b, g, s.q_length * group, 0, 0, 0};
    if (pair.rows == 0) return pair;
    pair.tiles = (pair.rows + kTile - 1) / kTile;
    pair.first_block = live_keys(p_, s, 0).lo / kKeyBlock;
    pair.end_block = (live_keys(p_, s, s.q_length - 1).hi + kKeyBlock - 1) / kKeyBlock;
    return pair;
  }

  void pack(Block& block, const Pair& pair, int64_t j) const {
    const Sequence& s = p_.sequences[static_cast<size_t>(pair.sequence)];
    packer_.widen_block(block.keys, p_.k, s, pair.head, j);
    packer_.widen_block(block.values, p_.v, s, pair.head, j);
    block.values_finite = kernels_.is_finite(block.values, kKeyBlock * dp_);
  }

  void run_round(const std::vector<Pair>& pairs, int64_t num_blocks) {
    if (pairs.empty()) return;
    AlignedBuffer fresh;
    char* base = thread_buffer<0>(num_blocks * block_floats_ * 4, fresh);
    std::vector<Block> blocks(static_cast<size_t>(num_blocks));
    std::vector<std::pair<int64_t, int64_t>> pack_tasks;  // pair, block
    std::vector<std::pair<int64_t, int64_t>> tile_tasks;  // pair, tile
    for (size_t i = 0; i < pairs.size(); ++i) {
      for (int64_t j = pairs[i].first_block; pairs[i].packed >= 0 && j < pairs[i].end_block; ++j) {
        pack_tasks.emplace_back(i, j);
      }
      // later tiles see more keys: first, so that no long task is left for the end
      for (int64_t t = pairs[i].tiles - 1; t >= 0; --t) tile_tasks.emplace_back(i, t);
    }
    if (!pack_tasks.empty()) {
      parallel_(static_cast<int64_t>(pack_tasks.size()), [&](int64_t begin, int64_t end) {
        const FpIeeeScope ieee;
        for (int64_t i = begin; i < end; ++i) {
          const auto [index, j] = pack_tasks[static_cast<size_t>(i)];
          const Pair& pair = pairs[static_cast<size_t>(index)];
          const int64_t at = pair.packed + j - pair.first_block;
          Block& block = blocks[static_cast<size_t>(at)];
          block.keys = reinterpret_cast<float*>(base) + at * block_floats_;
          block.values = block.keys + kKeyBlock * dp_;
          pack(block, pair, j);
        }
      });
    }
    run_dynamic(static_cast<int64_t>(tile_tasks.size()), parallel_, [&](const std::function<int64_t()>& next) {
      Arena measure(nullptr);
      Memory(measure, dp_);
      AlignedBuffer mine;
      Arena arena(thread_buffer<1>(measure.used(), mine));
      Memory memory(arena, dp_);
      for (int64_t i = next(); i < static_cast<int64_t>(tile_tasks.size()); i = next()) {
        const auto [index, tile] = tile_tasks[static_cast<size_t>(i)];
        const Pair& pair = pairs[static_cast<size_t>(index)];
        run_tile(pair, tile, pair.packed >= 0 ? &blocks[static_cast<size_t>(pair.packed)] : nullptr, memory);
      }
    });
  }

  void run_tile(const Pair& pair, int64_t tile, const Block* packed, Memory& w) {
    const Sequence& s = p_.sequences[static_cast<size_t>(pair.sequence)];
    const int64_t first_head = p_.head_offsets[static_cast<size_t>(pair.head)];
    const int64_t group = p_.head_offsets[static_cast<size_t>(pair.head) + 1] - first_head;
    const int64_t begin = pair.rows * tile / pair.tiles;
    const int64_t rows = pair.rows * (tile + 1) / pair.tiles - begin;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = (begin + r) / group;
      const int64_t head = first_head + (begin + r) % group;
      packer_.widen(w.q + r * dp_, p_.q, Packer::at(p_.q, s.q_first + query, head));
      w.live[r] = live_keys(p_, s, query);
      w.position[r] = counted_position(s, query);
      w.head[r] = head_word(p_, head);
      w.m[r] = p_.sinks == nullptr ? -kInf : p_.sinks[head];
      w.l[r] = w.m[r] > -kInf ? 1.0f : 0.0f;
    }
    const bool few = packed == nullptr && rows <= kFewRows;
    if (!few) transpose_queries(rows, w);
    std::memset(w.acc, 0, static_cast<size_t>(rows * dp_) * sizeof(float));
    RowGroups keys;
    RowGroups values;
    int64_t last = -1;  // the block that they are
    int64_t r0 = 0;     // rows [r0, r1) have a live key in block j
    int64_t r1 = 0;
    const int64_t end_block = (w.live[rows - 1].hi + kKeyBlock - 1) / kKeyBlock;
    for (int64_t j = w.live[0].lo / kKeyBlock; j < end_block; ++j) {
      const int64_t start = j * kKeyBlock;
      while (r0 < rows && w.live[r0].hi <= start) ++r0;
      while (r1 < rows && w.live[r1].lo < start + kKeyBlock) ++r1;
      if (r0 >= r1) continue;
      if (packed != nullptr) {
        step(packed[j - pair.first_block], pair.sequence, start, r0, r1 - r0, w);
      } else if (few) {
        const bool follows = last >= 0 && last == j - 1;
        packer_.row_groups(keys, follows, p_.k, s, pair.head, j, w.keys, kernels_.bf16_rows);
        packer_.row_groups(values, follows, p_.v, s, pair.head, j, w.values, kernels_.bf16_rows);
        last = j;
        step_in_place(keys, values, pair.sequence, start, r0, r1 - r0, w);
      } else {
        Block block{w.keys, w.values, true};
        pack(block, pair, j);
        step(block, pair.sequence, start, r0, r1 - r0, w);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = (s.q_first + (begin + r) / group) * p_.heads + first_head + (begin + r) % group;
      char* out = static_cast<char*>(result_.out) + row * p_.dim * size_of(result_.dtype);
      loops_.store_f32(out, result_.dtype, w.acc + r * dp_, p_.dim, w.l[r], nullptr);
      w.m[r] = w.m[r] + 0.0f;  // which zero is the maximum must not show
      loops_.store_f32(result_.m + row, DType::kFloat32, w.m + r, 1, 1.0f, nullptr);
      loops_.store_f32(result_.l + row, DType::kFloat32, w.l + r, 1, 1.0f, nullptr);
    }
  }

  // q_DR[d][r] = q[r][d]; the lanes of the last group behind the rows are zeros without a live key.
  void transpose_queries(int64_t rows, Memory& w) const {
    const void* pointers[kTile];
    for (int64_t r = 0; r < kTile; ++r) pointers[r] = w.q + r * dp_;
    const int64_t end = round_up(rows, kLanes);
    std::memset(w.q + rows * dp_, 0, static_cast<size_t>((end - rows) * dp_) * sizeof(float));
    for (int64_t r = rows; r < end; ++r) w.live[r] = {0, 0};
    std::fill(w.m + rows, w.m + end, 0.0f);
    for (int64_t r = end; r < kTile; ++r) pointers[r] = w.q;  // read, not used
    loops_.transpose(reinterpret_cast<uint32_t*>(w.q_DR), pointers, p_.dim, false);
  }

  static void set_ranges(int64_t start, int64_t r0, int64_t rows, Memory& w) {
    for (int64_t r = r0; r < r0 + rows; ++r) {
      w.lo[r] = static_cast<int32_t>(std::clamp<int64_t>(w.live[r].lo - start, 0, kKeyBlock));
      w.hi[r] = static_cast<int32_t>(std::clamp<int64_t>(w.live[r].hi - start, 0, kKeyBlock));
    }
  }

  void step_in_place(const RowGroups& keys, const RowGroups& values, int64_t sequence, int64_t start, int64_t r0,
                     int64_t rows, Memory& w) {
    set_ranges(start, r0, rows, w);
    float* scores = w.s + r0 * kKeyBlock;
    {
      const FpFlushScope flush(kernels_.hardware_flush);
      kernels_.row_keys(w.q + r0 * dp_, dp_, rows, keys, dp_, w.hi[r0 + rows - 1], scores);
    }
    kernels_.softmax(scores, rows, w.lo + r0, w.hi + r0, p_.scale, p_.cap, w.m + r0, w.factor + r0);
    {
      const FpFlushScope flush(kernels_.hardware_flush);
      for (int64_t r = 0; r < rows;) {  // rows of one live range (the heads of a query) together
        const int64_t lo = w.lo[r0 + r];
        const int64_t hi = w.hi[r0 + r];
        int64_t end = r + 1;
        while (end < rows && w.lo[r0 + end] == lo && w.hi[r0 + end] == hi) ++end;
        kernels_.sums(scores + r * kKeyBlock, end - r, lo, hi, w.sums + r0 + r);
        drop(sequence, start, r0 + r, end - r, w.s, kKeyBlock, 1, lo, hi, w);
        kernels_.row_values(scores + r * kKeyBlock, end - r, values, lo, hi, dp_, w.partial + (r0 + r) * dp_, dp_);
        r = end;
      }
    }
    rescale(r0, rows, w);
  }

  // The sum of exponentials takes every pair; what multiplies the values is dropped (K5). s[r * row + k * key].
  void drop(int64_t sequence, int64_t start, int64_t r0, int64_t rows, float* s, int64_t row, int64_t key, int64_t lo,
            int64_t hi, Memory& w) const {
    if (!p_.dropout.active) return;
    const FpIeeeScope ieee;
    const uint32_t sample = static_cast<uint32_t>(p_.dropout.first_sample + sequence);
    for (int64_t r = r0; r < r0 + rows; ++r) {
      kernels_.keep(w.keep, start / kKeyBlock, w.position[r], sample, w.head[r], p_.dropout);
      kernels_.drop(s + r * row, key, lo, hi, w.keep);
    }
  }

  void rescale(int64_t r0, int64_t rows, Memory& w) {
    kernels_.rescale(w.acc + r0 * dp_, w.partial + r0 * dp_, rows, dp_, dp_, w.factor + r0);
    kernels_.rescale(w.l + r0, w.sums + r0, rows, 1, 1, w.factor + r0);
  }

  void step(const Block& block, int64_t sequence, int64_t start, int64_t r0, int64_t rows, Memory& w) {
    static constexpr float kOne[kKeyBlock] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                              1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                              1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const int64_t g0 = r0 / kLanes * kLanes;  // whole groups; their rows outside [r0, r0 + rows) have no live key
    const int64_t lanes = round_up(r0 + rows, kLanes) - g0;
    set_ranges(start, g0, lanes, w);
    const int64_t lo = w.lo[r0];  // both ends ascend with the rows
    const int64_t hi = w.hi[r0 + rows - 1];
    {
      const FpFlushScope flush(kernels_.hardware_flush);
      kernels_.chains(block.keys + lo * dp_, dp_, 1, hi - lo, w.q_DR + g0, kLanes, kTile, p_.dim, w.s + lo * kTile + g0,
                      kTile, lanes);
    }
    kernels_.softmax_columns(w.s + g0, lanes, lo, hi, w.lo + g0, w.hi + g0, p_.scale, p_.cap, w.m + g0, w.factor + g0);
    {
      const FpFlushScope flush(kernels_.hardware_flush);
      // +0 where masked, so that a sum may take every key: fma(1, p, l) = p + l
      kernels_.chains(kOne, kKeyBlock, 1, 1, w.s + lo * kTile + g0, kLanes, kTile, hi - lo, w.sums + g0, kTile, lanes);
      drop(sequence, start, r0, rows, w.s, 1, kTile, lo, hi, w);
      masked_chains(kernels_, w.s + r0, 1, kTile, rows, w.lo + r0, w.hi + r0, block.values_finite, block.values, kLanes,
                    dp_, w.partial + r0 * dp_, dp_);
    }
    rescale(r0, rows, w);
  }

  const AttentionProblem& p_;
  const AttentionResult& result_;
  const AttentionKernels& kernels_;
  const Loops& loops_;
  const ParallelFor& parallel_;
  Packer packer_;
  int64_t dp_;
  int64_t block_floats_;
};

class Backward {
 public:
  Backward(const AttentionProblem& problem, const AttentionGradients& gradients, const AttentionKernels& kernels,
           const Loops& loops, const ParallelFor& parallel)
      : p_(problem),
        g_(gradients),
        kernels_(kernels),
        loops_(loops),
        parallel_(parallel),
        packer_(problem, loops),
        dp_(Packer::padded(problem.dim)) {
    for (const Schedule& program : *gradients.programs) {
      direct_ = direct_ && program.num_inputs == 1;
      first_output_.push_back(num_outputs_);
      num_outputs_ += static_cast<int64_t>(program.outputs.size());
    }
  }

  void run() {
    // Per query head: dK and dV [S][H][D]; a KV head of one query head needs no fold.
    AlignedBuffer parts;
    if (direct_) {
      dk_ = g_.dk;
      dv_ = g_.dv;
    } else {
      const int64_t size = g_.num_keys * p_.heads * p_.dim;
      parts = aligned_buffer(2 * size * 4);
      dk_ = static_cast<float*>(parts.get());
      dv_ = dk_ + size;
    }
    std::vector<std::pair<int64_t, int64_t>> tasks;  // sequence, query head
    for (size_t b = 0; b < p_.sequences.size(); ++b) {
      for (int64_t h = 0; h < p_.heads; ++h) tasks.emplace_back(b, h);
    }
    run_dynamic(static_cast<int64_t>(tasks.size()), parallel_, [&](const std::function<int64_t()>& next) {
      AlignedBuffer mine;
      for (int64_t i = next(); i < static_cast<int64_t>(tasks.size()); i = next()) {
        const auto [b, h] = tasks[static_cast<size_t>(i)];
        const Sequence& s = p_.sequences[static_cast<size_t>(b)];
        Arena measure(nullptr);
        Memory(measure, p_.dim, dp_, s.q_length);
        Arena arena(thread_buffer<1>(measure.used(), mine));
        Memory memory(arena, p_.dim, dp_, s.q_length);
        run_head(s, h, memory);
      }
    });
    if (!direct_) fold_heads();
  }

 private:
  struct Memory {
    Memory(Arena& arena, int64_t dim, int64_t dp, int64_t queries) {
      q = arena.take<float>(queries * dp);
      grad = arena.take<float>(queries * dp);
      q_panels = arena.take<float>(queries * dp);
      grad_panels = arena.take<float>(queries * dp);
      dq = arena.take<float>(queries * dp);
      m = arena.take<float>(queries);
      w = arena.take<float>(queries);
      d = arena.take<float>(queries);
      live = arena.take<Live>(queries);
      row = arena.take<float>(dp);
      s = arena.take<float>(kQueryBlock * kKeyBlock);
      dp_scores = arena.take<float>(kQueryBlock * kKeyBlock);
      keep = arena.take<float>(kQueryBlock * kKeyBlock);
      rows = arena.take<float>(2 * kKeyBlock * dp);
      keys = arena.take<float>(kKeyBlock * dp);
      keys_DK = arena.take<float>(round_up(dim, 16) * kKeyBlock);
      values_DK = arena.take<float>(round_up(dim, 16) * kKeyBlock);
      dk = arena.take<float>(kKeyBlock * dp);
      dv = arena.take<float>(kKeyBlock * dp);
      partial = arena.take<float>(kKeyBlock * dp);
      lo = arena.take<int32_t>(kQueryBlock);
      hi = arena.take<int32_t>(kQueryBlock);
      first = arena.take<int32_t>(kKeyBlock);
      end = arena.take<int32_t>(kKeyBlock);
    }
    float *q, *grad, *q_panels, *grad_panels, *dq, *m, *w, *d, *row, *s, *dp_scores, *rows, *keys, *keys_DK, *values_DK,
        *dk, *dv, *partial, *keep;
    Live* live;
    int32_t *lo, *hi, *first, *end;
  };

  struct QueryBlock {
    int64_t begin;  // queries
    int64_t end;
    bool q_finite;
    bool grad_finite;
  };

  int64_t kv_head(int64_t head) const {
    const auto& offsets = p_.head_offsets;
    return std::upper_bound(offsets.begin(), offsets.end(), head) - offsets.begin() - 1;
  }

  void run_head(const Sequence& s, int64_t head, Memory& w) {
    const int64_t g = kv_head(head);
    const float sink = p_.sinks == nullptr ? -kInf : p_.sinks[head];
    for (int64_t t = 0; t < s.q_length; ++t) {
      const int64_t row = (s.q_first + t) * p_.heads + head;
      packer_.widen(w.q + t * dp_, p_.q, Packer::at(p_.q, s.q_first + t, head));
      packer_.widen(w.grad + t * dp_, *g_.grad_out, Packer::at(*g_.grad_out, s.q_first + t, head));
      packer_.widen(w.row, *g_.out, Packer::at(*g_.out, s.q_first + t, head));
      w.m[t] = g_.m[row];
      w.w[t] = 1.0f / g_.l[row];
      w.d[t] = kernels_.row_dot(w.grad + t * dp_, w.row, p_.dim);
      w.live[t] = live_keys(p_, s, t);
      if (g_.d_sink_rows != nullptr) {
        const float p = kernels_.exp(sink - w.m[t]) * w.w[t];
        g_.d_sink_rows[row] = sink > -kInf || sink != sink ? p * (0.0f - w.d[t]) : 0.0f;
      }
    }
    std::memset(w.dq, 0, static_cast<size_t>(s.q_length * dp_) * sizeof(float));
    const std::vector<QueryBlock> query_blocks = cut_queries(s, w);
    for (int64_t j = 0; j * kKeyBlock < s.k_length; ++j) {
      run_key_block(s, head, g, j, query_blocks, w);
    }
    for (int64_t t = 0; t < s.q_length; ++t) {
      float* dq = g_.dq + ((s.q_first + t) * p_.heads + head) * p_.dim;
      std::memcpy(dq, w.dq + t * dp_, static_cast<size_t>(p_.dim) * sizeof(float));
    }
  }

  std::vector<QueryBlock> cut_queries(const Sequence& s, const Memory& w) const {
    std::vector<QueryBlock> blocks;
    // The first query of non-causal attention over fewer keys than queries stands at a negative position; blocks are
    // counted from position 0, or from the first query if that is lower.
    const int64_t first = std::max<int64_t>(0, s.k_length - s.q_length);
    for (int64_t t = 0; t < s.q_length;) {
      const int64_t position = first + t;
      const int64_t end = std::min(s.q_length, t + kQueryBlock - position % kQueryBlock);
      packer_.to_panels(w.q_panels + t * dp_, w.q + t * dp_, end - t);
      packer_.to_panels(w.grad_panels + t * dp_, w.grad + t * dp_, end - t);
      blocks.push_back({t, end, kernels_.is_finite(w.q + t * dp_, (end - t) * dp_),
                        kernels_.is_finite(w.grad + t * dp_, (end - t) * dp_)});
      t = end;
    }
    return blocks;
  }

  void run_key_block(const Sequence& s, int64_t head, int64_t g, int64_t j, const std::vector<QueryBlock>& query_blocks,
                     Memory& w) {
    const int64_t start = j * kKeyBlock;
    const int64_t count = std::min(kKeyBlock, s.k_length - start);
    const size_t bytes = static_cast<size_t>(kKeyBlock * dp_) * sizeof(float);
    std::memset(w.dk, 0, bytes);
    std::memset(w.dv, 0, bytes);
    bool packed = false;
    bool keys_finite = true;
    for (const QueryBlock& block : query_blocks) {
      // live rows [t0, t1): both ends of the live range ascend with the query
      int64_t t0 = block.begin;
      while (t0 < block.end && w.live[t0].hi <= start) ++t0;
      int64_t t1 = block.end;
      while (t1 > t0 && w.live[t1 - 1].lo >= start + kKeyBlock) --t1;
      if (t0 >= t1) continue;
      if (!packed) {
        float* scratch = w.rows + kKeyBlock * dp_;
        packer_.widen_block(w.rows, p_.v, s, g, j);
        packer_.transpose(w.values_DK, w.rows, scratch);
        packer_.widen_block(w.rows, p_.k, s, g, j);
        packer_.transpose(w.keys_DK, w.rows, scratch);
        packer_.to_panels(w.keys, w.rows, kKeyBlock);
        keys_finite = kernels_.is_finite(w.rows, kKeyBlock * dp_);
        packed = true;
      }
      fill_keep(s, head, j, t0, t1 - t0, w);
      step(block, t0, t1 - t0, start, count, keys_finite, w);
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t at = ((s.k_first + start + k) * p_.heads + head) * p_.dim;
      std::memcpy(dk_ + at, w.dk + k * dp_, static_cast<size_t>(p_.dim) * sizeof(float));
      std::memcpy(dv_ + at, w.dv + k * dp_, static_cast<size_t>(p_.dim) * sizeof(float));
    }
  }

  void fill_keep(const Sequence& s, int64_t head, int64_t j, int64_t t0, int64_t rows, Memory& w) const {
    if (!p_.dropout.active) return;
    const uint32_t sample = static_cast<uint32_t>(p_.dropout.first_sample + (&s - p_.sequences.data()));
    for (int64_t r = 0; r < rows; ++r) {
      kernels_.keep(w.keep + r * kKeyBlock, j, counted_position(s, t0 + r), sample, head_word(p_, head), p_.dropout);
    }
  }

  void step(const QueryBlock& block, int64_t t0, int64_t rows, int64_t start, int64_t count, bool keys_finite,
            Memory& w) {
    for (int64_t k = 0; k < kKeyBlock; ++k) w.first[k] = w.end[k] = 0;
    for (int64_t r = 0; r < rows; ++r) {
      w.lo[r] = static_cast<int32_t>(std::max<int64_t>(w.live[t0 + r].lo - start, 0));
      w.hi[r] = static_cast<int32_t>(std::min(w.live[t0 + r].hi - start, kKeyBlock));
    }
    // live queries of each key: [first, end)
    int64_t entered = 0;
    int64_t left = 0;
    for (int64_t k = 0; k < count; ++k) {
      while (entered < rows && w.hi[entered] <= k) ++entered;
      while (left < rows && w.lo[left] <= k) ++left;
      w.first[k] = static_cast<int32_t>(entered);
      w.end[k] = static_cast<int32_t>(std::max(left, entered));
    }
    const float* q = w.q + t0 * dp_;
    const float* grad = w.grad + t0 * dp_;
    {
      const FpFlushScope flush(kernels_.hardware_flush);
      const int64_t hi = w.hi[rows - 1];
      kernels_.chains(q, dp_, 1, rows, w.keys_DK, p_.dim * 16, 16, p_.dim, w.s, kKeyBlock, hi);
      kernels_.chains(grad, dp_, 1, rows, w.values_DK, p_.dim * 16, 16, p_.dim, w.dp_scores, kKeyBlock, hi);
    }
    kernels_.softmax_backward(w.s, w.dp_scores, rows, w.lo, w.hi, p_.scale, p_.cap, w.m + t0, w.w + t0, w.d + t0,
                              p_.dropout.active ? w.keep : nullptr);
    auto chains = [&](const float* a, int64_t a_row, int64_t a_step, int64_t n, const int32_t* lo, const int32_t* hi,
                      bool finite, const float* b, int64_t b_panel) {
      const FpFlushScope flush(kernels_.hardware_flush);
      masked_chains(kernels_, a, a_row, a_step, n, lo, hi, finite, b, b_panel, 16, w.partial, dp_);
    };
    // the live rows [t0, t0 + rows) of the block's panels
    const int64_t b_panel = (block.end - block.begin) * 16;
    const int64_t skipped = block.begin * dp_ + (t0 - block.begin) * 16;
    chains(w.s, 1, kKeyBlock, count, w.first, w.end, block.grad_finite, w.grad_panels + skipped, b_panel);
    loops_.add_leaf_f32(w.dv, w.partial, count * dp_);
    chains(w.dp_scores, 1, kKeyBlock, count, w.first, w.end, block.q_finite, w.q_panels + skipped, b_panel);
    loops_.add_leaf_f32(w.dk, w.partial, count * dp_);
    chains(w.dp_scores, kKeyBlock, 1, rows, w.lo, w.hi, keys_finite, w.keys, kKeyBlock * 16);
    loops_.add_leaf_f32(w.dq + t0 * dp_, w.partial, rows * dp_);
  }

  // dK, dV of a KV head = canonical tree over its query heads, key by key.
  void fold_heads() {
    const int64_t dim = p_.dim;
    int64_t slots = 1;
    for (const Schedule& program : *g_.programs) slots = std::max<int64_t>(slots, program.num_slots);
    parallel_(g_.num_keys, [&](int64_t begin, int64_t end) {
      const FpIeeeScope ieee;
      std::vector<float> memory(static_cast<size_t>(slots * dim));
      for (int64_t key = begin; key < end; ++key) {
        for (size_t g = 0; g < g_.programs->size(); ++g) {
          const int64_t head = p_.head_offsets[g];
          fold((*g_.programs)[g], dk_ + (key * p_.heads + head) * dim, memory.data(),
               g_.dk + (key * num_outputs_ + first_output_[g]) * dim);
          fold((*g_.programs)[g], dv_ + (key * p_.heads + head) * dim, memory.data(),
               g_.dv + (key * num_outputs_ + first_output_[g]) * dim);
        }
      }
    });
  }

  void fold(const Schedule& program, const float* heads_HD, float* slots, float* out) const {
    const int64_t dim = p_.dim;
    for (const Step& step : program.steps) {
      float* slot = slots + step.slot * dim;
      if (step.kind == StepKind::kLoad) {
        std::memcpy(slot, heads_HD + step.source * dim, static_cast<size_t>(dim) * sizeof(float));
      } else if (step.kind == StepKind::kAdd) {
        loops_.add_f32(slot, slot, slots + step.source * dim, dim);
      } else {
        std::memset(slot, 0, static_cast<size_t>(dim) * sizeof(float));
      }
    }
    std::memcpy(out, slots, program.outputs.size() * static_cast<size_t>(dim) * sizeof(float));
  }

  const AttentionProblem& p_;
  const AttentionGradients& g_;
  const AttentionKernels& kernels_;
  const Loops& loops_;
  const ParallelFor& parallel_;
  Packer packer_;
  int64_t dp_;
  bool direct_ = true;
  std::vector<int64_t> first_output_;
  int64_t num_outputs_ = 0;
  float* dk_ = nullptr;
  float* dv_ = nullptr;
};

}  // namespace

void attention(const AttentionProblem& problem, const AttentionResult& result, const AttentionKernels& kernels,
               const Loops& loops, const ParallelFor& parallel) {
  Forward(problem, result, kernels, loops, parallel).run();
}

void attention_backward(const AttentionProblem& problem, const AttentionGradients& gradients,
                        const AttentionKernels& kernels, const Loops& loops, const ParallelFor& parallel) {
  Backward(problem, gradients, kernels, loops, parallel).run();
}

const AttentionKernels& attention_kernels(const std::string& path) {
  if (path == "portable") return *attention_portable();
  if (path == "avx2" && attention_avx2() != nullptr) return *attention_avx2();
  if ((path == "avx512f" || path == "avx512_bf16") && attention_avx512f() != nullptr) return *attention_avx512f();
  throw std::invalid_argument("attention: no path '" + path + "' on this CPU");
}

}  // namespace tbik
