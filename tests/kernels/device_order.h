// SPDX-License-Identifier: Apache-2.0
// A MoeOrder in device memory, poisoned, and its check against a stable sort of all pairs: for tests of what fills one.
#pragma once

#include "tests/support/device_buffer.cuh"
#include "tests/support/moe_order.h"

namespace moelora::test {

struct DeviceOrder {
  DeviceOrder(size_t pairs, size_t num_experts)
      : pair_row(pairs * 4),
        pair_position(pairs * 4),
        expert_begin((num_experts + 1) * 4),
        segment_begin((pairs + 1) * 4),
        segment_expert(pairs * 4),
        segment_slot(pairs * 4),
        num_segments(4),
        active_experts(num_experts * 4),
        num_active(4),
        totals(std::vector<uint32_t>{7, 0xffffffffu}) {}
  [[nodiscard]] MoeOrder view(bool with_totals) const {
    return {pair_row.as<int32_t>(),       pair_position.as<int32_t>(),
            expert_begin.as<int32_t>(),   segment_begin.as<int32_t>(),
            segment_expert.as<int32_t>(), segment_slot.as<int32_t>(),
            num_segments.as<int32_t>(),   active_experts.as<int32_t>(),
            num_active.as<int32_t>(),     with_totals ? totals.as<uint32_t>() : nullptr};
  }
  DeviceBuffer pair_row, pair_position, expert_begin, segment_begin, segment_expert, segment_slot, num_segments,
      active_experts, num_active, totals;
};

inline bool same_prefix(const DeviceBuffer& actual, const std::vector<int32_t>& expected, int64_t count) {
  const std::vector<int32_t> values = actual.read<int32_t>();
  return actual.guard_intact() && std::equal(values.begin(), values.begin() + count, expected.begin());
}

// After one op; `with_totals` as the order was viewed.
inline void check_order(const DeviceOrder& order, const std::vector<int32_t>& ids, const std::vector<int32_t>& row_slot,
                        int32_t top_k, int32_t num_experts, bool with_totals) {
  MoeOrderArrays expected(ids.size(), static_cast<size_t>(num_experts));
  expected.fill(ids, row_slot, top_k);
  const auto pairs = static_cast<int64_t>(ids.size());
  const int64_t segments = expected.num_segments[0];
  CHECK(same_prefix(order.pair_row, expected.pair_row, pairs));
  CHECK(same_prefix(order.pair_position, expected.pair_position, pairs));
  CHECK(same_prefix(order.expert_begin, expected.expert_begin, num_experts + 1));
  REQUIRE(order.num_segments.read<int32_t>()[0] == segments);
  CHECK(same_prefix(order.segment_begin, expected.segment_begin, segments + 1));
  CHECK(same_prefix(order.segment_expert, expected.segment_expert, segments));
  CHECK(same_prefix(order.segment_slot, expected.segment_slot, segments));
  std::vector<int32_t> active;
  for (int32_t e = 0; e < num_experts; ++e) {
    const auto at = static_cast<size_t>(e);
    if (expected.expert_begin[at + 1] > expected.expert_begin[at]) {
      active.push_back(e);
    }
  }
  REQUIRE(order.num_active.read<int32_t>()[0] == static_cast<int32_t>(active.size()));
  CHECK(same_prefix(order.active_experts, active, static_cast<int64_t>(active.size())));
  const auto adapted = std::count_if(expected.segment_slot.begin(), expected.segment_slot.begin() + segments,
                                     [](int32_t slot) { return slot > 0; });
  const std::vector<uint32_t> totals = order.totals.read<uint32_t>();
  CHECK(totals[0] == 7 + (with_totals ? static_cast<uint32_t>(active.size()) : 0u));
  CHECK(totals[1] == 0xffffffffu + (with_totals ? static_cast<uint32_t>(adapted) : 0u));
}

}  // namespace moelora::test
