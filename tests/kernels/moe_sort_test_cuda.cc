// SPDX-License-Identifier: Apache-2.0
// moe_sort_cuda against a stable sort of all pairs by (expert, slot, row), on both sides of the border between its two
// forms, with rows in and out of order of slots; active experts and running totals. Without a GPU it says that it was
// skipped.
#include "kernels/moe/moe_sort.h"

#include "tests/kernels/device_order.h"
#include "tests/support/draw.h"

using namespace moelora;
using namespace moelora::test;

namespace {

void check_sort(const std::vector<int32_t>& ids, const std::vector<int32_t>& row_slot, int32_t top_k,
                int32_t num_experts, bool with_totals = true) {
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
  check_order(order, ids, row_slot, top_k, num_experts, with_totals);
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
