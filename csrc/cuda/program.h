// From a csrc/tree.h schedule to the pushes of a call, and from a call to the kernel that runs it. Host only.
// Errors: std::invalid_argument.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "../tree.h"
#include "call.h"

namespace tbik::peer {

struct Source {
  int64_t rank;
  int64_t row;
};

// Loads and additions of a stack machine as pushes. sources[i]: who holds input i of the schedule.
inline std::vector<Push> pushes_of(const std::vector<Step>& steps, const std::vector<Source>& sources) {
  std::vector<Push> pushes;
  int depth = 0;
  for (const Step& step : steps) {
    if (step.kind == StepKind::kLoad && step.slot == depth && step.source >= 0 &&
        step.source < static_cast<int64_t>(sources.size())) {
      const Source& source = sources[static_cast<size_t>(step.source)];
      if (source.rank < 0 || source.rank >= kMaxRanks || source.row < 0 || source.row > 255) {
        throw std::invalid_argument("input " + std::to_string(step.source) + " is row " + std::to_string(source.row) +
                                    " of rank " + std::to_string(source.rank) + ", expected ranks below " +
                                    std::to_string(kMaxRanks) + " and rows below 256");
      }
      pushes.push_back({static_cast<uint8_t>(source.rank), static_cast<uint8_t>(source.row), 0, 0});
      ++depth;
    } else if (step.kind == StepKind::kAdd && depth >= 2 && step.slot == depth - 2 && step.source == depth - 1) {
      ++pushes.back().adds;
      --depth;
    } else {
      throw std::invalid_argument("expected loads onto a stack and additions at its top");
    }
    if (depth > kMaxSlots) {
      throw std::invalid_argument("more than " + std::to_string(kMaxSlots) + " pending nodes; give a rank whole nodes");
    }
  }
  if (depth != 1) throw std::invalid_argument("expected a root, got " + std::to_string(depth) + " nodes");
  if (pushes.size() > static_cast<size_t>(kMaxInputs)) {
    throw std::invalid_argument(std::to_string(pushes.size()) + " nodes of all ranks together, expected at most " +
                                std::to_string(kMaxInputs));
  }
  return pushes;
}

inline void set_program(Call& call, const std::vector<Step>& steps, const std::vector<Source>& sources, bool rounds) {
  const std::vector<Push> pushes = pushes_of(steps, sources);
  call.num_pushes = static_cast<int32_t>(pushes.size());
  call.rounds = rounds ? 1 : 0;
  std::vector<Source> ranks;
  for (int64_t r = 0; r < call.size; ++r) ranks.push_back({r, 0});
  const std::vector<Push> tree = pushes_of(schedule(leaf_nodes(0, call.size), call.size).steps, ranks);
  call.is_tree_of_ranks = !rounds && tree.size() == pushes.size() ? 1 : 0;
  for (size_t i = 0; i < pushes.size(); ++i) {
    call.pushes[i] = pushes[i];
    if (call.is_tree_of_ranks == 0) continue;
    const bool same = pushes[i].rank == tree[i].rank && pushes[i].row == 0 && pushes[i].adds == tree[i].adds;
    call.is_tree_of_ranks = same ? 1 : 0;
  }
}

// kRanks of the kernel that serves a call: 2, 4 or 8 where it is the sum of one row per rank, else 0.
inline int unrolled_ranks(const Call& call) {
  const bool sums = call.op == Op::kSum || call.op == Op::kAvg;
  const bool integers = call.element == Element::kInt32 || call.element == Element::kInt64;
  const bool known = call.size == 2 || call.size == 4 || call.size == 8;
  return call.is_tree_of_ranks != 0 && sums && !integers && known ? call.size : 0;
}

}  // namespace tbik::peer
