// Tree GEMM for CPUs: out_MN = schedule over chains c of ( fma chain over the indices of chain c of a_MK, b_NK ).
//
//   leaf_c[m,n] = chain over s, k ascending in [cuts[s][c], cuts[s][c+1]) of a_s[m,k] * b_s[n,k]      (ORDER.md A1, A2,
//   L2) out = epilogue(schedule(leaf_0, leaf_1, ...))                                                    (ORDER.md
//   T2-T5, A6, A7)
//
// Suffixes: M rows of a and out, N rows of b = columns of out, K contraction, P panel of 64 columns, R register tile.
// Compute types: bf16, fp16 (operands rounded to them, chain in fp32), fp32, fp64. Torch-free.
// Guarantees: deterministic, batch-invariant (a row's bits ignore M and the other rows), layout-invariant through the
// schedule; the path, the number of threads and the process's floating-point mode change no bit.
// Errors: std::invalid_argument with what, where, expected, got.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "tree.h"

namespace tbik {

// Calls body(begin, end) on disjoint ranges that make up [0, count), perhaps on several threads.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

// Element (row r, contraction index k) lies at data[r * stride_row + k * stride_k] (in elements).
struct Operand {
  const void* data;
  DType dtype;
  int64_t stride_row;
  int64_t stride_k;
};

// The order inside a leaf of bf16 operands: A1, or A14. Other operands are A1's.
enum class Leaf : uint8_t { kFma, kAmx };

// Where the chains lie: per source the cuts; per chain its length, packed one behind the other. bf16 counts in pairs.
struct ChainLayout {
  ChainLayout(std::vector<std::vector<int64_t>> cuts, DType compute);

  int64_t num_chains() const { return static_cast<int64_t>(length.size()); }
  int64_t segment(size_t source, int64_t chain) const {
    return cuts[source][static_cast<size_t>(chain) + 1] - cuts[source][static_cast<size_t>(chain)];
  }

  DType compute;
  std::vector<std::vector<int64_t>> cuts;
  std::vector<int64_t> length;  // contraction indices of each chain
  std::vector<int64_t> steps;   // packed steps: pairs for bf16 (odd lengths padded by a zero), else indices
  std::vector<int64_t> offset;  // first packed step of each chain
  int64_t total_steps = 0;
};

// b_NK as [ceil(N/64)][total_steps][64]; a step of bf16 is a pair: high half index k, low half k + 1. Columns beyond N
// and the odd half of an odd chain are +0. The layout is the same for every path.
class PackedB {
 public:
  PackedB(const std::vector<Operand>& sources, int64_t n, ChainLayout layout, const ParallelFor& parallel);

  int64_t n() const { return n_; }
  int64_t panels() const { return (n_ + kPanel - 1) / kPanel; }
  int64_t nbytes() const;
  const ChainLayout& layout() const { return layout_; }
  const char* panel(int64_t index) const;

 private:
  int64_t n_;
  ChainLayout layout_;
  AlignedBuffer data_;
};

// Output o of the schedule, row m, column n at data[o * stride_output + m * stride_row + n] (in elements of dtype).
struct Result {
  void* data;
  DType dtype;
  int64_t stride_output;
  int64_t stride_row;
};

// b_NK, packed before or packed in the call: panel by panel, while a panel is in cache and by the thread that uses it.
struct RightOperand {
  const PackedB* packed;                // or null
  const std::vector<Operand>* sources;  // if packed is null
  int64_t n;
};

// What computes: the kernels of a path, and for Leaf::kAmx the tiles, or null where the chains do without.
struct Path {
  const GemmKernels* kernels;
  Leaf leaf = Leaf::kFma;
  const TileKernels* tiles = nullptr;
};

// bias: n values in the accumulation dtype, or null.
void gemm(const std::vector<Operand>& a, int64_t m, const RightOperand& b, const ChainLayout& layout,
          const Schedule& program, const void* bias, const Result& out, const Path& path, const ParallelFor& parallel);

constexpr DType accumulation(DType compute) { return compute == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

// Refuses what ORDER.md A6, A7 refuse: an fp64 accumulator is not rounded to bf16 on a wire nor to a 16-bit result.
void require_narrowing(const char* where, DType accumulation, const Schedule& program, DType out);

// Whether `source` can be an operand of `compute`: itself, a wider type that a cast rounds once, or exact widening.
bool is_operand(DType source, DType compute);
std::string operand_list(DType compute);

// The paths this CPU can run, best first. find_path: "" = TBIK_CPU_PATH or the fastest for this compute type.
std::vector<std::string> cpu_paths();
const GemmKernels& find_path(const std::string& name, DType compute);

// The same for chains of A14: "amx" where the CPU has tiles, and the paths with fp32 chains.
std::vector<std::string> amx_paths();
Path find_leaf_path(const std::string& name, DType compute, Leaf leaf);

}  // namespace tbik
