// Row-wise operators: what one instruction set has to provide, and the choice of the path. Every table gives the same
// bits; only the speed differs. No torch, no intrinsics.
//
// Suffixes: K elements of a row. Mode: IEEE (the caller holds an FpIeeeScope), but for `chain_tile`,
// `chain_columns` and `chain_scaled`. Specification: ORDER.md A8, A9, sections C and R.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"

namespace tbik {

inline constexpr int64_t kSumBlock = 512;  // elements of a row in one block of its sum (ORDER.md A9)

constexpr int64_t sum_blocks(int64_t length) { return (length + kSumBlock - 1) / kSumBlock; }

// node(0, n) of the values; +0 for n = 0. Compiled once, outside every instruction set.
float fold_canonical(const float* values, int64_t n);

using MapFn = void (*)(float* y, const float* x, int64_t n);

// Row i starts at data + ((i / inner) * stride_outer + (i % inner) * stride_inner) elements; its elements are adjacent.
struct RowsView {
  const void* data;  // null: no such operand
  DType dtype;
  int64_t inner;
  int64_t stride_outer;
  int64_t stride_inner;
};

// R1, R2: rms norm (x + residual first, if there is one); R3: layer norm (centered). Results lie row after row.
struct NormArgs {
  int64_t length;
  float eps;
  bool centered;
  RowsView x;
  RowsView residual;  // forward: added to x; backward: the gradient of that sum, added to dx
  RowsView dy;        // backward only
  const void* w;      // [K] in w_dtype
  const void* bias;   // alike, or null
  DType w_dtype;      // fp32 or bf16; backward bf16 only where x, dy, residual and dx are bf16
  void* y;            // forward: y; backward: dx, or null
  DType y_dtype;
  bool stream;  // y is fp32, its rows begin at 64-byte boundaries, and no cache will hold it
  void* sum;    // forward with residual: x + residual, in the dtype of x
};

enum class Activation : uint8_t { kSilu, kGelu };

// R5, R6. up null: y = f(gate). Row i of y at y + i * y_stride, of dup at dup + i * y_stride (elements).
struct ActivationArgs {
  int64_t length;
  Activation kind;
  RowsView gate;
  RowsView up;
  RowsView dy;  // backward only
  void* y;      // forward: y; backward: dgate
  void* dup;    // backward with up
  DType y_dtype;
  int64_t y_stride;
};

// R4. Row (token, head) of x is row token * heads + head; row `token` of the tables is fp32 [rotary / 2].
struct RopeArgs {
  int64_t heads;
  int64_t dim;
  int64_t rotary;
  bool interleaved;
  bool backward;  // sin negated
  RowsView x;
  RowsView sin;
  RowsView cos;
  void* y;  // [token][head][dim]
  DType y_dtype;
};

// R9. Element f of row i draws word (first_feature + f) % 4 of philox((first_feature + f) / 4, position, sample, 0).
struct DropoutArgs {
  int64_t length;
  int64_t first_feature;
  uint32_t key[2];
  uint64_t threshold;  // an element is kept if its word is >= threshold
  float scale;
  const uint32_t* sample;
  const uint32_t* position;
  RowsView x;
  void* y;
  DType y_dtype;
};

// Of one row: r and mean as in the forward, c1 = row_sum(g) / K (centered, else 0), c = row_sum(g n) / K.
struct RowMeans {
  float r;
  float mean;
  float c1;
  float c;
};

// Rows row, row + step, ... (count of them, at most kTileTokens), columns [column, column + width), width at most
// kTileColumns, of a norm's backward.
struct NormTile {
  int64_t row;
  int64_t step;
  int64_t count;
  int64_t column;
  int64_t width;
  const RowMeans* means;  // of `row`; of the next at + step
  float* normed;          // [count][width], in the path's order of columns; null: not wanted
  float* wide;            // alike: memory for dy where it has to be converted
};

inline constexpr int64_t kTokensPerBlock = 512;  // tokens of one chain of a parameter gradient (ORDER.md S1)
inline constexpr int64_t kTileTokens = 16;
inline constexpr int64_t kTileColumns = 256;

struct Rows {
  const char* name;
  bool hardware_flush;  // the chains need FTZ and DAZ on; otherwise IEEE mode

  // y = f(x), element by element (section C). y may be x.
  MapFn exp;
  MapFn log;
  MapFn sigmoid;
  MapFn tanh;
  MapFn silu;
  MapFn gelu;
  void (*sin_cos)(float* sin_a, float* cos_a, const float* angle, int64_t n);

  // One leaf of A9; `sums`: memory for sum_blocks(n) values.
  float (*row_sum)(const float* x, int64_t n, float* sums);
  float (*row_max)(const float* x, int64_t n);

  // Rows [first, last). `scratch`: norm_scratch(K) floats.
  void (*norm_forward)(const NormArgs& args, int64_t first, int64_t last, float* scratch);
  // means[i] of row first + i; c1 and c where dx (args.y) is wanted, else 0.
  void (*norm_means)(const NormArgs& args, int64_t first, int64_t last, RowMeans* means, float* scratch);
  // dx (args.y) and tile.normed, where wanted; tile.wide where chain_tile will read it.
  void (*norm_tile)(const NormArgs& args, const NormTile& tile);
  // acc[j] = fma(dy[i][j], normed[i][j], acc[j]) and ones[j] = fma(dy[i][j], 1, ones[j]) for the rows i of the tile in
  // order; null: not wanted. The order of j is the path's until finish_chain. The mode is the caller's business.
  void (*chain_tile)(const NormArgs& args, const NormTile& tile, float* acc, float* ones);
  // acc[j] = acc[j] + (+0.0), j in order.
  void (*finish_chain)(const NormArgs& args, float* acc, int64_t width);
  void (*activation)(const ActivationArgs& args, int64_t first, int64_t last);
  void (*activation_backward)(const ActivationArgs& args, int64_t first, int64_t last);
  // Tokens [first, last). `scratch`: rope_scratch(args) floats.
  void (*rope)(const RopeArgs& args, int64_t first, int64_t last, float* scratch);
  void (*dropout)(const DropoutArgs& args, int64_t first, int64_t last);

  // dst[i][j] = fp32 of element `column + j` of row `row + i * step`, for i < count, j < width.
  void (*load_tile)(float* dst, const RowsView& x, int64_t row, int64_t step, int64_t count, int64_t column,
                    int64_t width);
  // values[leaf * stride + row] = sum of the elements [cuts[leaf], cuts[leaf + 1]) of a row; rows [first, last).
  // `scratch`: cuts[leaves] - cuts[0] + sum_blocks(...) + 16 floats.
  void (*sum_leaves)(float* values, const RowsView& x, int64_t first, int64_t last, int64_t stride, const int64_t* cuts,
                     int64_t leaves, float* scratch);
  // y[t] = (to) w[id[t] - first_row], -0 outside of w's rows; tokens [first, last).
  void (*look_up)(void* y, DType to, const RowsView& w, int64_t num_rows, int64_t length, const int64_t* id,
                  int64_t first_row, int64_t first, int64_t last);
  // acc[j] = fma(a[i][j], b[i][j], acc[j]) for i ascending; b null: b = 1. The mode is the caller's business.
  void (*chain_columns)(float* acc, const float* a, const float* b, int64_t count, int64_t width);
  // acc[j] = fma(scale[i], a[i][j], acc[j]) for i ascending. The mode is the caller's business.
  void (*chain_scaled)(float* acc, const float* const* a, const float* scale, int64_t count, int64_t width);
  // dst = (to) x, NaN canonical.
  void (*store)(void* dst, DType to, const float* x, int64_t n);
  // sum of n inputs of `count` contiguous elements, in order, in fp32; one cast.
  void (*sum_inputs)(void* dst, DType dtype, const void* const* inputs, int64_t n, int64_t begin, int64_t end);
};

constexpr int64_t norm_scratch(int64_t length) { return 2 * (length + 16) + 2 * sum_blocks(length) + 16; }
constexpr int64_t rope_scratch(const RopeArgs& args) { return 2 * args.dim + args.rotary; }

// Backward of norms (ORDER.md R1-R3, S1): dx, where norm.y is given, and chains of parameter gradients. Chain c adds
// the tokens [cuts[c], cuts[c + 1]) of dy[t, j] * b[t, j], b = normalised x (leaves) or 1 (ones): [chains][heads * K],
// finished by + (+0.0); null: not wanted.
struct NormGradients {
  NormArgs norm;  // x with dx or leaves
  int64_t heads;  // row (token, head) is row token * heads + head
  const int64_t* cuts;
  float* leaves;
  float* ones;
};
// After streamed results, before other threads may look: stores past the caches are ordered by a fence only.
void finish_stream(const NormArgs& args);
// Chains [first, last) and dx of their tokens, in one reading of x and dy.
void norm_gradients(const NormGradients& args, int64_t first, int64_t last, const Rows& rows);
// The same in parts, for more threads than chains: means of the rows [first, last), then tasks [first, last) of
// chain_tasks(args, chains), each a chain of a strip of columns.
void norm_row_means(const NormGradients& args, int64_t first, int64_t last, RowMeans* means, const Rows& rows);
int64_t chain_tasks(const NormGradients& args, int64_t chains);
void chain_task(const NormGradients& args, int64_t first, int64_t last, const RowMeans* means, const Rows& rows);
// dx alone, of rows [first, last).
void norm_dx(const NormGradients& args, int64_t first, int64_t last, const Rows& rows);

// The gradient of the embedding rows that occur (ORDER.md R7). order: the tokens sorted by row, ties by position; row u
// has tokens order[begin[u], begin[u + 1]). values: [u][K].
struct RowGradient {
  int64_t length;
  RowsView dy;
  const int64_t* order;
  const int64_t* begin;
  const int64_t* sample;    // of every token
  const int64_t* position;  // of every token in its sample
  const int64_t* blocks;    // of every sample
  int64_t samples;
  bool narrow;  // bf16 from the sample leaf upwards
  float* values;
};
void row_gradient(const RowGradient& args, int64_t first, int64_t last, const Rows& rows, const Loops& loops);

// The experts of each token, leaf by leaf (ORDER.md M2): out[c][t] = chain over its slots of scale * values[c][row]
// from +0, finished by + (+0.0). A slot with row -1 is not there.
struct SlotChains {
  int64_t length;  // N
  int64_t rows;    // P: values is [C][P][N]
  int64_t tokens;
  int64_t slots;
  const float* values;
  const int64_t* row;  // [T][slots]
  const float* scale;  // [T][slots], or null: 1
  float* out;          // [C][T][N]
};
// Items [first, last) of C * T.
void combine_slots(const SlotChains& args, int64_t first, int64_t last, const Rows& rows);

// Null when the path was not compiled for this architecture or the CPU lacks the instructions.
const Rows* portable_rows();
const Rows* avx2_rows();
const Rows* avx512f_rows();

// The rows of find_path(path, float32) (gemm.h); avx512_bf16 has those of avx512f.
const Rows& find_rows(const std::string& path);

}  // namespace tbik
