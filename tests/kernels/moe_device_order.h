// SPDX-License-Identifier: Apache-2.0
// Uploads a MoeOrder that a test has made by definition.
#pragma once

#include <vector>

#include "tests/support/device_buffer.cuh"
#include "tests/support/moe_order.h"

namespace moelora::test {

// A MoeOrder in device memory, as the host has it.
struct DeviceMoeOrder {
  explicit DeviceMoeOrder(const MoeOrderArrays& host)
      : pair_row(host.pair_row),
        pair_position(host.pair_position),
        expert_begin(host.expert_begin),
        segment_begin(host.segment_begin),
        segment_expert(host.segment_expert),
        segment_slot(host.segment_slot),
        num_segments(host.num_segments),
        active_experts(active(host)),
        num_active(std::vector<int32_t>{count(host)}) {}
  static int32_t count(const MoeOrderArrays& host) {
    int32_t result = 0;
    for (size_t e = 0; e + 1 < host.expert_begin.size(); ++e) {
      result += host.expert_begin[e + 1] > host.expert_begin[e] ? 1 : 0;
    }
    return result;
  }
  static std::vector<int32_t> active(const MoeOrderArrays& host) {
    std::vector<int32_t> result;
    for (size_t e = 0; e + 1 < host.expert_begin.size(); ++e) {
      if (host.expert_begin[e + 1] > host.expert_begin[e]) {
        result.push_back(static_cast<int32_t>(e));
      }
    }
    result.resize(host.expert_begin.size() - 1, MoeOrderArrays::kPoison);
    return result;
  }
  [[nodiscard]] MoeOrder view() const {
    return {pair_row.as<int32_t>(),      pair_position.as<int32_t>(),  expert_begin.as<int32_t>(),
            segment_begin.as<int32_t>(), segment_expert.as<int32_t>(), segment_slot.as<int32_t>(),
            num_segments.as<int32_t>(),  active_experts.as<int32_t>(), num_active.as<int32_t>()};
  }
  DeviceBuffer pair_row, pair_position, expert_begin, segment_begin, segment_expert, segment_slot, num_segments,
      active_experts, num_active;
};

}  // namespace moelora::test
