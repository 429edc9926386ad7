// The one order in C++: which pairs of values are added. Integers only. Twin of tbik/tree.py, same names, same results.
//
//   node(lo, hi) = leaf(lo)                            if hi - lo == 1
//                = node(lo, mid) (+) node(mid, hi)     mid = lo + largest power of two < hi - lo
//
// Node (level, index) holds the leaves [index * 2^level, (index + 1) * 2^level). Header only, no torch; nvcc compiles
// it too. Errors: std::invalid_argument. Bits: layout-invariant (tests/test_order_agreement.py).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host_device.h"

namespace tbik {

inline constexpr int64_t kMaxGranule = 64;

struct Node {
  int level = 0;
  int64_t index = 0;

  int64_t lo() const { return index << level; }
  int64_t hi() const { return (index + 1) << level; }
  bool operator==(const Node&) const = default;
};

// kLoad: slot = input `source`. kAdd: slot = slot (+) slot `source` (left, right). kZero: slot = +0 (a sample without
// tokens). `round`: the result is then rounded to bfloat16 and +0.0 is added (ORDER.md A6).
enum class StepKind : uint8_t { kLoad, kAdd, kZero };

struct Step {
  StepKind kind;
  int slot;
  int64_t source;
  bool round;
};

// A straight-line program over a stack of slots; outputs[i] is the node left in slot i at the end.
struct Schedule {
  std::vector<Step> steps;
  int num_slots = 0;
  std::vector<Node> outputs;
  int64_t num_inputs = 0;
  bool is_root = false;
};

namespace tree_internal {

inline void require_leaves(int64_t leaves) {
  if (leaves < 1) {
    throw std::invalid_argument("tree: the number of leaves must be >= 1, got " + std::to_string(leaves));
  }
}

constexpr int bit_length(int64_t value) { return std::bit_width(static_cast<uint64_t>(value)); }

inline bool are_siblings(const Node& left, const Node& right) {
  return left.level == right.level && left.index % 2 == 0 && right.index == left.index + 1;
}

inline std::string to_string(const Node& node) {
  std::string text = "(";
  text += std::to_string(node.level);
  text += ", ";
  text += std::to_string(node.index);
  text += ")";
  return text;
}

}  // namespace tree_internal

// q = largest power of two <= 64 with length % (q*p) == 0 and length/q >= leaves, else 1; p = 2-part of leaves.
inline int64_t granule(int64_t length, int64_t leaves) {
  tree_internal::require_leaves(leaves);
  if (length < 0) throw std::invalid_argument("tree.granule: length must be >= 0, got " + std::to_string(length));
  const int64_t two_part = leaves & -leaves;
  int64_t q = kMaxGranule;
  while (q > 1 && ((length / q) % two_part != 0 || length % q != 0 || length / q < leaves)) q /= 2;
  return q;
}

// cut(i) = q * ((length/q) * i / leaves), i = 0..leaves; leaf i = [cut(i), cut(i+1)), possibly empty.
inline std::vector<int64_t> cuts(int64_t length, int64_t leaves) {
  const int64_t q = granule(length, leaves);
  const int64_t units = length / q;
  std::vector<int64_t> result(static_cast<size_t>(leaves) + 1);
  for (int64_t i = 0; i <= leaves; ++i) {
    // units * i / leaves without overflow: split units by leaves first.
    result[static_cast<size_t>(i)] = q * (units / leaves * i + units % leaves * i / leaves);
  }
  return result;
}

// Where node(lo, hi) splits: lo + the largest power of two strictly below hi - lo.
constexpr int64_t middle(int64_t lo, int64_t hi) {
  if (hi - lo < 2) {
    throw std::invalid_argument("tree.middle: a leaf does not split, got [" + std::to_string(lo) + ", " +
                                std::to_string(hi) + ")");
  }
  return lo + (int64_t{1} << (tree_internal::bit_length(hi - lo - 1) - 1));
}

// node(lo, hi) with its pairs fixed at compile time, for kernels that hold all leaves in registers: leaf(i) is leaf i,
// add(left, right) a node.
template <int64_t kLo, int64_t kHi>
inline constexpr int64_t kMiddle = middle(kLo, kHi);

template <int64_t kLo, int64_t kHi, class Leaf, class Add>
TBIK_HOST_DEVICE auto canonical_node(const Leaf& leaf, const Add& add) {
  if constexpr (kHi - kLo == 1) {
    return leaf(kLo);
  } else {
    const auto left = canonical_node<kLo, kMiddle<kLo, kHi>>(leaf, add);
    return add(left, canonical_node<kMiddle<kLo, kHi>, kHi>(leaf, add));
  }
}

// The fewest whole nodes that make up the leaves [lo, hi), in ascending order.
inline std::vector<Node> cover(int64_t lo, int64_t hi) {
  if (lo < 0 || lo > hi) {
    throw std::invalid_argument("tree.cover: expected 0 <= lo <= hi, got [" + std::to_string(lo) + ", " +
                                std::to_string(hi) + ")");
  }
  std::vector<Node> nodes;
  while (lo < hi) {
    const int aligned = lo != 0 ? std::countr_zero(static_cast<uint64_t>(lo)) : tree_internal::bit_length(hi);
    const int level = std::min(aligned, tree_internal::bit_length(hi - lo) - 1);
    nodes.push_back({level, lo >> level});
    lo += int64_t{1} << level;
  }
  return nodes;
}

// The leaves [lo, hi) as level-0 nodes: the inputs of a rank's own schedule.
inline std::vector<Node> leaf_nodes(int64_t lo, int64_t hi) {
  std::vector<Node> nodes;
  for (int64_t i = lo; i < hi; ++i) nodes.push_back({0, i});
  return nodes;
}

namespace tree_internal {

// The stack machine behind every schedule: push a node that some step has just written, then combine siblings.
struct Builder {
  Schedule program;
  std::vector<Node> stack;
  bool round;

  int top() const { return static_cast<int>(stack.size()); }

  void emit(StepKind kind, int slot, int64_t source, bool rounded) {
    program.steps.push_back({kind, slot, source, rounded});
    program.num_slots = std::max(program.num_slots, slot + 1);
  }

  void push(const Node& node) {
    stack.push_back(node);
    while (stack.size() > 1 && are_siblings(stack[stack.size() - 2], stack.back())) {
      const Node right = stack.back();
      stack.pop_back();
      emit(StepKind::kAdd, top() - 1, top(), round);
      stack.back() = {right.level + 1, right.index / 2};
    }
  }

  Schedule finish(std::optional<int64_t> leaves) {
    if (leaves) {
      require_leaves(*leaves);
      if (stack != cover(0, *leaves)) {
        std::string got;
        for (const Node& node : stack) got += to_string(node);
        throw std::invalid_argument("tree.schedule: the root of " + std::to_string(*leaves) +
                                    " leaves needs all of them, got [" + got + "]");
      }
      for (int slot = top() - 2; slot >= 0; --slot) emit(StepKind::kAdd, slot, slot + 1, round);
      stack.resize(1);
      program.is_root = true;
    }
    program.outputs = stack;
    return std::move(program);
  }
};

}  // namespace tree_internal

// The additions that turn ascending disjoint nodes into a cover or, if `leaves` is given, into node(0, leaves).
// Input i of the schedule is the i-th node.
inline Schedule schedule(const std::vector<Node>& inputs, std::optional<int64_t> leaves = std::nullopt,
                         bool round = false) {
  tree_internal::Builder builder{{}, {}, round};
  for (const Node& node : inputs) {
    if (node.level < 0 || node.level > 61 || node.index < 0 || node.index > (int64_t{1} << (61 - node.level))) {
      throw std::invalid_argument("tree.schedule: not a node: " + tree_internal::to_string(node));
    }
    if (!builder.stack.empty() && node.lo() < builder.stack.back().hi()) {
      throw std::invalid_argument("tree.schedule: nodes must ascend and not overlap, got " +
                                  tree_internal::to_string(node) + " after " +
                                  tree_internal::to_string(builder.stack.back()));
    }
    builder.emit(StepKind::kLoad, builder.top(), builder.program.num_inputs++, round);
    builder.push(node);
  }
  return builder.finish(leaves);
}

namespace tree_internal {

// Leaf `first + s` of the outer tree is node(0, block_counts[s]) over its own blocks; no blocks: +0, still a leaf. Only
// the leaf and what lies above it is rounded.
inline Schedule nested_schedule(const std::vector<int64_t>& block_counts, int64_t first, std::optional<int64_t> leaves,
                                bool round, const char* what) {
  Builder outer{{}, {}, round};
  for (size_t leaf = 0; leaf < block_counts.size(); ++leaf) {
    const int base = outer.top();
    const int64_t count = block_counts[leaf];
    if (count < 0) {
      throw std::invalid_argument(std::string("tree.") + what + " " + std::to_string(leaf) +
                                  " has a negative number of blocks: " + std::to_string(count));
    }
    if (count == 0) {
      outer.emit(StepKind::kZero, base, 0, false);
    } else {
      const Schedule inner = schedule(leaf_nodes(0, count), count);
      for (size_t i = 0; i < inner.steps.size(); ++i) {
        const Step& step = inner.steps[i];
        const int64_t source =
            step.kind == StepKind::kLoad ? step.source + outer.program.num_inputs : step.source + base;
        outer.emit(step.kind, step.slot + base, source, round && i + 1 == inner.steps.size());
      }
      outer.program.num_inputs += count;
    }
    outer.push({0, first + static_cast<int64_t>(leaf)});
  }
  return outer.finish(leaves);
}

}  // namespace tree_internal

// Two levels (ORDER.md S1): leaf s of the outer tree is sample s, itself node(0, block_counts[s]) over its blocks. The
// inputs are the blocks of all samples in order. Only the sample leaf and what lies above it is rounded. A sample
// without blocks is +0, still a leaf.
inline Schedule sample_schedule(const std::vector<int64_t>& block_counts, bool round = false) {
  return tree_internal::nested_schedule(block_counts, 0, static_cast<int64_t>(block_counts.size()), round,
                                        "sample_schedule: sample");
}

// The same for a row reduction (ORDER.md A9): leaves lo, lo + 1, ... of a row, each the tree over its blocks; their
// cover, or the root of `leaves` leaves.
inline Schedule leaf_schedule(const std::vector<int64_t>& block_counts, int64_t lo,
                              std::optional<int64_t> leaves = std::nullopt) {
  return tree_internal::nested_schedule(block_counts, lo, leaves, false, "leaf_schedule: leaf");
}

namespace tree_internal {

template <class Add>
size_t fold_present(const std::vector<int64_t>& present, size_t first, size_t last, int64_t lo, int64_t hi,
                    const Add& add) {
  if (last - first == 1) return first;
  const int64_t mid = middle(lo, hi);
  const auto begin = present.begin();
  const size_t split = static_cast<size_t>(
      std::lower_bound(begin + static_cast<int64_t>(first), begin + static_cast<int64_t>(last), mid) - begin);
  if (split == first) return fold_present(present, first, last, mid, hi, add);
  if (split == last) return fold_present(present, first, last, lo, mid, add);
  const size_t left = fold_present(present, first, split, lo, mid, add);
  const size_t right = fold_present(present, split, last, mid, hi, add);
  add(left, right);
  return left;
}

}  // namespace tree_internal

// node(0, leaves) where only the leaves `present` (ascending, at least one) differ from +0: adding +0 changes no node,
// so absent leaves are skipped. add(i, j): value of present[i] = itself (+) value of present[j]. Returns where the root
// stands.
template <class Add>
size_t fold_present(const std::vector<int64_t>& present, int64_t leaves, const Add& add) {
  if (present.empty() || present.front() < 0 || present.back() >= leaves) {
    throw std::invalid_argument("tree.fold_present: expected leaves within [0, " + std::to_string(leaves) + ")");
  }
  return tree_internal::fold_present(present, 0, present.size(), 0, leaves, add);
}

}  // namespace tbik
