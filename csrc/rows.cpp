// Drivers of the row-wise operators and the choice of path: see rows.h.
#include "rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "fpmode.h"
#include "gemm.h"
#include "memory.h"
#include "tree.h"

namespace tbik {

namespace {

float fold_range(const float* values, int64_t lo, int64_t hi) {
  if (hi - lo == 1) return values[lo];
  const int64_t mid = middle(lo, hi);
  return fold_range(values, lo, mid) + fold_range(values, mid, hi);
}

}  // namespace

float fold_canonical(const float* values, int64_t n) { return n == 0 ? 0.0f : fold_range(values, 0, n); }

const Rows& find_rows(const std::string& path) {
  const DType compute = path == "avx512_bf16" ? DType::kBFloat16 : DType::kFloat32;
  const char* name = find_path(path, compute).name;
  if (std::strcmp(name, "portable") == 0) return *portable_rows();
  if (std::strcmp(name, "avx2") == 0) return *avx2_rows();
  return *avx512f_rows();
}

namespace {

int64_t strips(const NormGradients& args) { return (args.norm.length + kTileColumns - 1) / kTileColumns; }

// One thread's way through tiles.
class Tiles {
 public:
  Tiles(const NormGradients& args, const Rows& rows)
      : args_(args), rows_(rows), memory_(aligned_buffer(2 * kTileTokens * kTileColumns * 4)) {}

  // Tokens [token, token + count) of one head and strip; means of row token * heads.
  void run(int64_t token, int64_t count, int64_t head, int64_t strip, const RowMeans* means, float* leaf,
           float* ones) const {
    float* normed = static_cast<float*>(memory_.get());
    const int64_t column = strip * kTileColumns;
    const NormTile tile{.row = token * args_.heads + head,
                        .step = args_.heads,
                        .count = count,
                        .column = column,
                        .width = std::min(kTileColumns, args_.norm.length - column),
                        .means = means != nullptr ? means + head : nullptr,
                        .normed = leaf != nullptr ? normed : nullptr,
                        .wide = normed + kTileTokens * kTileColumns};
    rows_.norm_tile(args_.norm, tile);
    if (leaf == nullptr && ones == nullptr) return;
    const FpFlushScope flush(rows_.hardware_flush);
    rows_.chain_tile(args_.norm, tile, leaf, ones);
  }

  // The strip's part of chain `chain` in `values`.
  float* part(float* values, int64_t chain, int64_t head, int64_t strip) const {
    if (values == nullptr) return nullptr;
    return values + (chain * args_.heads + head) * args_.norm.length + strip * kTileColumns;
  }

  void begin(float* part, int64_t strip) const {
    if (part != nullptr) std::fill(part, part + width(strip), 0.0f);
  }
  void finish(float* part, int64_t strip) const {
    if (part != nullptr) rows_.finish_chain(args_.norm, part, width(strip));
  }

 private:
  int64_t width(int64_t strip) const { return std::min(kTileColumns, args_.norm.length - strip * kTileColumns); }

  const NormGradients& args_;
  const Rows& rows_;
  AlignedBuffer memory_;
};

// Tokens whose rows of x, dy and dx stay in a cache of the second level (512 KiB) between their means and their tiles.
int64_t tokens_at_once(const NormGradients& args) {
  constexpr int64_t kElements = 1 << 15;
  return std::clamp<int64_t>(kElements / std::max<int64_t>(1, args.heads * args.norm.length), 1, kTileTokens);
}

class Means {
 public:
  explicit Means(const NormGradients& args)
      : args_(args),
        means_(static_cast<size_t>(tokens_at_once(args) * args.heads)),
        scratch_(aligned_buffer(norm_scratch(args.norm.length) * 4)) {}

  // Of the rows [first, last), at most those of tokens_at_once.
  const RowMeans* of(int64_t first, int64_t last, const Rows& rows) {
    rows.norm_means(args_.norm, first, last, means_.data(), static_cast<float*>(scratch_.get()));
    return means_.data();
  }

 private:
  const NormGradients& args_;
  std::vector<RowMeans> means_;
  AlignedBuffer scratch_;
};

}  // namespace

void finish_stream(const NormArgs& args) {
  if (args.stream) std::atomic_thread_fence(std::memory_order_seq_cst);
}

void norm_gradients(const NormGradients& args, int64_t first, int64_t last, const Rows& rows) {
  const FpIeeeScope ieee;
  const Tiles tiles(args, rows);
  Means means(args);
  const auto each = [&](const auto& body) {
    for (int64_t head = 0; head < args.heads; ++head) {
      for (int64_t strip = 0; strip < strips(args); ++strip) body(head, strip);
    }
  };
  for (int64_t chain = first; chain < last; ++chain) {
    const auto leaf = [&](int64_t head, int64_t strip) { return tiles.part(args.leaves, chain, head, strip); };
    const auto ones = [&](int64_t head, int64_t strip) { return tiles.part(args.ones, chain, head, strip); };
    each([&](int64_t head, int64_t strip) {
      tiles.begin(leaf(head, strip), strip);
      tiles.begin(ones(head, strip), strip);
    });
    for (int64_t token = args.cuts[chain]; token < args.cuts[chain + 1];) {
      const int64_t count = std::min(tokens_at_once(args), args.cuts[chain + 1] - token);
      const RowMeans* of_rows = nullptr;
      if (args.norm.x.data != nullptr) of_rows = means.of(token * args.heads, (token + count) * args.heads, rows);
      each([&](int64_t head, int64_t strip) {
        tiles.run(token, count, head, strip, of_rows, leaf(head, strip), ones(head, strip));
      });
      token += count;
    }
    each([&](int64_t head, int64_t strip) {
      tiles.finish(leaf(head, strip), strip);
      tiles.finish(ones(head, strip), strip);
    });
  }
  finish_stream(args.norm);
}

void norm_row_means(const NormGradients& args, int64_t first, int64_t last, RowMeans* means, const Rows& rows) {
  const FpIeeeScope ieee;
  const AlignedBuffer scratch = aligned_buffer(norm_scratch(args.norm.length) * 4);
  rows.norm_means(args.norm, first, last, means + first, static_cast<float*>(scratch.get()));
}

int64_t chain_tasks(const NormGradients& args, int64_t chains) { return chains * args.heads * strips(args); }

void chain_task(const NormGradients& args, int64_t first, int64_t last, const RowMeans* means, const Rows& rows) {
  const FpIeeeScope ieee;
  const Tiles tiles(args, rows);
  for (int64_t task = first; task < last; ++task) {
    const int64_t strip = task % strips(args);
    const int64_t head = task / strips(args) % args.heads;
    const int64_t chain = task / strips(args) / args.heads;
    float* leaf = tiles.part(args.leaves, chain, head, strip);
    float* ones = tiles.part(args.ones, chain, head, strip);
    tiles.begin(leaf, strip);
    tiles.begin(ones, strip);
    for (int64_t token = args.cuts[chain]; token < args.cuts[chain + 1]; token += kTileTokens) {
      const int64_t count = std::min(kTileTokens, args.cuts[chain + 1] - token);
      tiles.run(token, count, head, strip, means != nullptr ? means + token * args.heads : nullptr, leaf, ones);
    }
    tiles.finish(leaf, strip);
    tiles.finish(ones, strip);
  }
  finish_stream(args.norm);
}

void norm_dx(const NormGradients& args, int64_t first, int64_t last, const Rows& rows) {
  NormGradients rows_alone = args;
  const int64_t cuts[2] = {first, last};
  rows_alone.heads = 1;
  rows_alone.cuts = cuts;
  rows_alone.leaves = rows_alone.ones = nullptr;
  norm_gradients(rows_alone, 0, 1, rows);
}

namespace {

// The chain of the tokens order[first, last), all in one block of 512: a leaf.
void row_chain(const RowGradient& args, int64_t first, int64_t last, float* acc, float* tile, const Rows& rows,
               const Loops& loops) {
  const int64_t n = args.length;
  std::fill(acc, acc + n, 0.0f);
  for (int64_t i = first; i < last; ++i) {
    rows.load_tile(tile, args.dy, args.order[i], 1, 1, 0, n);
    const FpFlushScope flush(rows.hardware_flush);
    rows.chain_columns(acc, tile, nullptr, 1, n);
  }
  loops.finish_f32(acc, n);
}

}  // namespace

void row_gradient(const RowGradient& args, int64_t first, int64_t last, const Rows& rows, const Loops& loops) {
  const FpIeeeScope ieee;
  const int64_t n = args.length;
  const size_t width = static_cast<size_t>(n);
  std::vector<float> tile(width);
  for (int64_t u = first; u < last; ++u) {
    std::vector<std::vector<float>> leaves;  // of the samples that have the row
    std::vector<int64_t> samples;
    for (int64_t i = args.begin[u]; i < args.begin[u + 1];) {
      const int64_t sample = args.sample[args.order[i]];
      std::vector<std::vector<float>> blocks;
      std::vector<int64_t> indices;
      while (i < args.begin[u + 1] && args.sample[args.order[i]] == sample) {
        const int64_t block = args.position[args.order[i]] / kTokensPerBlock;
        int64_t end = i;
        while (end < args.begin[u + 1] && args.sample[args.order[end]] == sample &&
               args.position[args.order[end]] / kTokensPerBlock == block) {
          ++end;
        }
        indices.push_back(block);
        blocks.emplace_back(width);
        row_chain(args, i, end, blocks.back().data(), tile.data(), rows, loops);
        i = end;
      }
      const size_t root = fold_present(indices, args.blocks[sample], [&](size_t left, size_t right) {
        loops.add_f32(blocks[left].data(), blocks[left].data(), blocks[right].data(), n);
      });
      samples.push_back(sample);
      leaves.push_back(std::move(blocks[root]));
      if (args.narrow) loops.finish_wire(leaves.back().data(), n);
    }
    const size_t root = fold_present(samples, args.samples, [&](size_t left, size_t right) {
      (args.narrow ? loops.add_wire : loops.add_f32)(leaves[left].data(), leaves[left].data(), leaves[right].data(), n);
    });
    // NaN leaves as the canonical one
    rows.store(args.values + u * n, DType::kFloat32, leaves[root].data(), n);
  }
}

void combine_slots(const SlotChains& args, int64_t first, int64_t last, const Rows& rows) {
  const FpIeeeScope ieee;
  const int64_t n = args.length;
  std::vector<const float*> a(static_cast<size_t>(args.slots));
  std::vector<float> scale(a.size());
  for (int64_t item = first; item < last; ++item) {
    const int64_t token = item % args.tokens;
    const float* values = args.values + item / args.tokens * args.rows * n;
    int64_t count = 0;
    for (int64_t slot = token * args.slots; slot < (token + 1) * args.slots; ++slot) {
      if (args.row[slot] < 0) continue;
      a[static_cast<size_t>(count)] = values + args.row[slot] * n;
      scale[static_cast<size_t>(count++)] = args.scale != nullptr ? args.scale[slot] : 1.0f;
    }
    float* acc = args.out + item * n;
    std::fill(acc, acc + n, 0.0f);
    {
      const FpFlushScope flush(rows.hardware_flush);
      rows.chain_scaled(acc, a.data(), scale.data(), count, n);
    }
    for (int64_t j = 0; j < n; ++j) acc[j] = acc[j] + 0.0f;
  }
}

}  // namespace tbik
