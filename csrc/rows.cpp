// Drivers of the row-wise operators and the choice of path: see rows.h.
#include "rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "fpmode.h"
#include "gemm.h"
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

int64_t strips(const ColumnChains& args) { return (args.length + kTileColumns - 1) / kTileColumns; }

}  // namespace

int64_t column_chain_tasks(const ColumnChains& args, int64_t chains) { return chains * args.heads * strips(args); }

void column_chains(const ColumnChains& args, int64_t first, int64_t last, const Rows& rows) {
  const FpIeeeScope ieee;
  std::vector<float> a(static_cast<size_t>(kTileTokens * kTileColumns));
  std::vector<float> b(args.leaves != nullptr ? a.size() : 0);
  for (int64_t task = first; task < last; ++task) {
    const int64_t column = task % strips(args) * kTileColumns;
    const int64_t head = task / strips(args) % args.heads;
    const int64_t chain = task / strips(args) / args.heads;
    const int64_t width = std::min(kTileColumns, args.length - column);
    const int64_t at = (chain * args.heads + head) * args.length + column;
    float* leaf = args.leaves != nullptr ? args.leaves + at : nullptr;
    float* ones = args.ones != nullptr ? args.ones + at : nullptr;
    if (leaf != nullptr) std::fill(leaf, leaf + width, 0.0f);
    if (ones != nullptr) std::fill(ones, ones + width, 0.0f);
    for (int64_t token = args.cuts[chain]; token < args.cuts[chain + 1]; token += kTileTokens) {
      const int64_t count = std::min(kTileTokens, args.cuts[chain + 1] - token);
      const int64_t row = token * args.heads + head;
      rows.load_tile(a.data(), args.dy, row, args.heads, count, column, width);
      if (leaf != nullptr) {
        rows.load_tile(b.data(), args.x, row, args.heads, count, column, width);
        rows.scale_tile(b.data(), args.r, args.mean, row, args.heads, count, width);
      }
      const FpFlushScope flush(rows.hardware_flush);
      if (leaf != nullptr) rows.chain_columns(leaf, a.data(), b.data(), count, width);
      if (ones != nullptr) rows.chain_columns(ones, a.data(), nullptr, count, width);
    }
    for (float* acc : {leaf, ones}) {
      for (int64_t j = 0; acc != nullptr && j < width; ++j) acc[j] = acc[j] + 0.0f;
    }
  }
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
