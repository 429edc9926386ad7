// What both libraries answer alike: text of errors, sizes, programs.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "program.h"
#include "shim.h"

namespace tbik::peer {

inline constexpr int kRefused = -1;  // the text is in last_refusal()

inline std::string& last_refusal() {
  thread_local std::string text;
  return text;
}

inline int refuse(const std::string& text) {
  last_refusal() = text;
  return kRefused;
}

}  // namespace tbik::peer

void tbik_peer_sizes(int64_t* sizes) {
  using namespace tbik::peer;
  sizes[0] = sizeof(Call);
  sizes[1] = sizeof(Status);
  sizes[2] = sizeof(Header);
  sizes[3] = kMaxRanks;
  sizes[4] = kMaxBlocks;
  sizes[5] = kMaxInputs;
}

int tbik_peer_set_program(tbik::peer::Call* call, const int64_t* steps, int64_t num_steps, const int64_t* sources,
                          int64_t num_sources, int rounds) {
  using namespace tbik::peer;
  try {
    std::vector<tbik::Step> program;
    for (int64_t i = 0; i < num_steps; ++i) {
      const tbik::StepKind kind = steps[3 * i] == 0 ? tbik::StepKind::kLoad : tbik::StepKind::kAdd;
      program.push_back({kind, static_cast<int>(steps[3 * i + 1]), steps[3 * i + 2], rounds != 0});
    }
    std::vector<Source> inputs;
    for (int64_t i = 0; i < num_sources; ++i) inputs.push_back({sources[2 * i], sources[2 * i + 1]});
    set_program(*call, program, inputs, rounds != 0);
    return 0;
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
}
