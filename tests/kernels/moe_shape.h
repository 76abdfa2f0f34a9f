// SPDX-License-Identifier: Apache-2.0
// Shapes of MoE layers and ways of computing them, and what tests call them.
#pragma once

#include <string>

#include "kernels/moe/expert_path.h"
#include "tests/kernels/device_experts.h"

namespace moelora::test {

constexpr ExpertPath kPaths[] = {ExpertPath::kAuto,
                                 ExpertPath::kFewTokens,
                                 ExpertPath::kManyTokens,
                                 ExpertPath::kManyTokensMma,
                                 ExpertPath::kFewTokensApart,
                                 ExpertPath::kFewRowsBeside,
                                 ExpertPath::kFewTokensBlocks,
                                 ExpertPath::kManyTokensGather,
                                 ExpertPath::kManyTokensBulk,
                                 ExpertPath::kManyTokensPairs};

struct MoeShape {
  int32_t rows, top_k, experts, hidden, intermediate;
  bool one_expert = false;  // all choices are the last expert; top_k 1
};

inline std::string describe(const MoeShape& shape, Store store, ExpertPath path) {
  const char* stores[] = {"rows", "alternating rows", "tiles"};
  const char* paths[] = {"auto",
                         "few",
                         "many",
                         "many by mma.sync",
                         "few, shrink and expand apart",
                         "few rows, shrink beside",
                         "few, deltas without clusters",
                         "many, gathered",
                         "many, in bulk",
                         "many, in pairs"};
  return "T=" + std::to_string(shape.rows) + " K=" + std::to_string(shape.top_k) +
         " E=" + std::to_string(shape.experts) + " H=" + std::to_string(shape.hidden) +
         " I=" + std::to_string(shape.intermediate) + " " + stores[static_cast<int>(store)] + " " +
         paths[static_cast<int>(path)];
}

}  // namespace moelora::test
