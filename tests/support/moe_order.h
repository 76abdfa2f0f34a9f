// SPDX-License-Identifier: Apache-2.0
// The arrays of a MoeOrder, poisoned, and two ways to fill them: with a table's moe_sort, or by the definition (a
// stable sort of all pairs), which tests of other MoE ops use so as not to depend on the first.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/moe/moe_sort.h"

namespace moelora::test {

struct MoeOrderArrays {
  static constexpr int32_t kPoison = 0x7ffffff0;
  MoeOrderArrays(size_t pairs, size_t num_experts)
      : pair_row(pairs, kPoison),
        pair_position(pairs, kPoison),
        expert_begin(num_experts + 1, kPoison),
        segment_begin(pairs + 1, kPoison),
        segment_expert(pairs, kPoison),
        segment_slot(pairs, kPoison),
        num_segments(1, kPoison) {}
  [[nodiscard]] MoeOrder view() {
    return {pair_row.data(),       pair_position.data(), expert_begin.data(), segment_begin.data(),
            segment_expert.data(), segment_slot.data(),  num_segments.data()};
  }

  // By definition: pairs sorted by (expert, slot, row), stably.
  void fill(const std::vector<int32_t>& ids, const std::vector<int32_t>& row_slot, int32_t top_k) {
    struct Pair {
      int32_t expert, slot, row, index;
    };
    std::vector<Pair> pairs;
    for (size_t p = 0; p < ids.size(); ++p) {
      const int32_t row = static_cast<int32_t>(p) / top_k;
      pairs.push_back(
          {ids[p], row_slot.empty() ? 0 : row_slot[static_cast<size_t>(row)], row, static_cast<int32_t>(p)});
    }
    std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) {
      if (a.expert != b.expert) {
        return a.expert < b.expert;
      }
      return a.slot != b.slot ? a.slot < b.slot : a.row < b.row;
    });
    num_segments[0] = 0;
    for (size_t i = 0; i < pairs.size(); ++i) {
      pair_row[i] = pairs[i].row;
      pair_position[static_cast<size_t>(pairs[i].index)] = static_cast<int32_t>(i);
      if (i == 0 || pairs[i].expert != pairs[i - 1].expert || pairs[i].slot != pairs[i - 1].slot) {
        const auto s = static_cast<size_t>(num_segments[0]++);
        segment_begin[s] = static_cast<int32_t>(i);
        segment_expert[s] = pairs[i].expert;
        segment_slot[s] = pairs[i].slot;
      }
    }
    segment_begin[static_cast<size_t>(num_segments[0])] = static_cast<int32_t>(pairs.size());
    for (size_t e = 0; e < expert_begin.size(); ++e) {
      expert_begin[e] = static_cast<int32_t>(
          std::count_if(ids.begin(), ids.end(), [e](int32_t id) { return id < static_cast<int32_t>(e); }));
    }
  }

  std::vector<int32_t> pair_row, pair_position, expert_begin, segment_begin, segment_expert, segment_slot, num_segments;
};

// K different experts for each of T rows.
template <class DrawType>
std::vector<int32_t> draw_choices(DrawType& draw, int32_t num_rows, int32_t top_k, int32_t num_experts) {
  std::vector<int32_t> ids;
  for (int32_t t = 0; t < num_rows; ++t) {
    const std::vector<int32_t> order = draw.permutation(num_experts);
    ids.insert(ids.end(), order.begin(), order.begin() + top_k);
  }
  return ids;
}

}  // namespace moelora::test
