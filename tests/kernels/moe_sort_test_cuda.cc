// SPDX-License-Identifier: Apache-2.0
// moe_sort_cuda against a stable sort of all pairs by (expert, slot, row), on both sides of the border between its two
// forms, with rows in and out of order of slots; active experts and running totals. Without a GPU it says that it was
// skipped.
#include "kernels/moe/moe_sort.h"

#include "tests/support/device_buffer.cuh"
#include "tests/support/draw.h"
#include "tests/support/moe_order.h"

using namespace moelora;
using namespace moelora::test;

namespace {

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

bool same_prefix(const DeviceBuffer& actual, const std::vector<int32_t>& expected, int64_t count) {
  const std::vector<int32_t> values = actual.read<int32_t>();
  return actual.guard_intact() && std::equal(values.begin(), values.begin() + count, expected.begin());
}

void check_sort(const std::vector<int32_t>& ids, const std::vector<int32_t>& row_slot, int32_t top_k,
                int32_t num_experts, bool with_totals = true) {
  MoeOrderArrays expected(ids.size(), static_cast<size_t>(num_experts));
  expected.fill(ids, row_slot, top_k);
  const DeviceBuffer ids_device(ids);
  const DeviceBuffer slot_device(row_slot);
  const DeviceOrder order(ids.size(), static_cast<size_t>(num_experts));
  MoeSortArgs args;
  args.ids = ids_device.as<int32_t>();
  args.row_slot = row_slot.empty() ? nullptr : slot_device.as<int32_t>();
  args.num_rows = static_cast<int32_t>(ids.size()) / top_k;
  args.top_k = top_k;
  args.num_experts = num_experts;
  args.order = order.view(with_totals);
  moe_sort_cuda(args, *gpu()->stream);
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

}  // namespace

TEST_CASE("moe_sort_cuda equals a stable sort of all pairs") {
  if (gpu() == nullptr) {
    return;
  }
  struct Shape {
    int32_t num_rows, top_k, num_experts, num_slots;
  };
  for (const Shape shape :
       {Shape{1, 1, 1, 1}, Shape{1, 8, 128, 2}, Shape{7, 1, 4, 8}, Shape{7, 4, 32, 3}, Shape{64, 4, 60, 9},
        Shape{64, 8, 512, 65}, Shape{512, 1, 8, 300}, Shape{513, 1, 8, 5}, Shape{65, 8, 128, 70}, Shape{300, 8, 64, 1},
        Shape{5, 4, 4, 2000}, Shape{1000, 8, 128, 70000}, Shape{2000, 10, 512, 3}, Shape{8192, 8, 128, 64}}) {
    for (const int slots : {0, 1, 2}) {  // none, in order, drawn
      INFO("T=" << shape.num_rows << " K=" << shape.top_k << " E=" << shape.num_experts << " slots up to "
                << shape.num_slots << " form " << slots);
      Draw draw(61);
      const std::vector<int32_t> ids = draw_choices(draw, shape.num_rows, shape.top_k, shape.num_experts);
      std::vector<int32_t> row_slot;
      for (int32_t t = 0; slots > 0 && t < shape.num_rows; ++t) {
        row_slot.push_back(draw.below(shape.num_slots));
      }
      if (slots == 1) {
        std::sort(row_slot.begin(), row_slot.end());
      }
      check_sort(ids, row_slot, shape.top_k, shape.num_experts);
    }
  }
}

TEST_CASE("moe_sort_cuda of rows that choose alike, in every form of slots") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {6, 512, 700, 65536}) {  // one choice a row: all pairs in one expert, the last
    INFO("T=" << rows);
    const std::vector<int32_t> ids(static_cast<size_t>(rows), 2);
    std::vector<int32_t> alternating;
    std::vector<int32_t> falling;
    for (int32_t t = 0; t < rows; ++t) {
      alternating.push_back(t % 2);
      falling.push_back(rows - t);
    }
    check_sort(ids, {}, 1, 3, false);
    check_sort(ids, alternating, 1, 3);
    check_sort(ids, falling, 1, 3);
  }
}

TEST_CASE("moe_sort_cuda of no rows writes nothing") {
  if (gpu() == nullptr) {
    return;
  }
  const DeviceOrder order(4, 4);
  MoeSortArgs args;
  args.top_k = 2;
  args.num_experts = 4;
  args.order = order.view(true);
  moe_sort_cuda(args, *gpu()->stream);
  CHECK(order.num_segments.read<int32_t>()[0] == -1);
}
