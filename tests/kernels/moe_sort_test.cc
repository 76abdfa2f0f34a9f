// SPDX-License-Identifier: Apache-2.0
// moe_sort against a stable sort of all pairs by (expert, slot, row), and a case worked out by hand.
#include "kernels/moe/moe_sort.h"

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/draw.h"
#include "tests/support/moe_order.h"

using namespace moelora;
using namespace moelora::test;

namespace {

MoeOrderArrays sorted(const Kernels& kernels, Stream& stream, const std::vector<int32_t>& ids,
                      const std::vector<int32_t>& row_slot, int32_t top_k, int32_t num_experts) {
  MoeOrderArrays arrays(ids.size(), static_cast<size_t>(num_experts));
  MoeSortArgs args;
  args.ids = ids.data();
  args.row_slot = row_slot.empty() ? nullptr : row_slot.data();
  args.num_rows = static_cast<int32_t>(ids.size()) / top_k;
  args.top_k = top_k;
  args.num_experts = num_experts;
  args.order = arrays.view();
  kernels.moe_sort(args, stream);
  return arrays;
}

void check_equal(const MoeOrderArrays& actual, const MoeOrderArrays& expected) {
  CHECK(actual.pair_row == expected.pair_row);
  CHECK(actual.pair_position == expected.pair_position);
  CHECK(actual.expert_begin == expected.expert_begin);
  REQUIRE(actual.num_segments == expected.num_segments);
  const auto count = static_cast<int64_t>(actual.num_segments[0]);
  CHECK(std::equal(actual.segment_begin.begin(), actual.segment_begin.begin() + count + 1,
                   expected.segment_begin.begin()));
  CHECK(std::equal(actual.segment_expert.begin(), actual.segment_expert.begin() + count,
                   expected.segment_expert.begin()));
  CHECK(std::equal(actual.segment_slot.begin(), actual.segment_slot.begin() + count, expected.segment_slot.begin()));
}

}  // namespace

TEST_CASE("moe_sort of three rows by hand") {
  // Rows 0, 1, 2 in slots 2, 0, 2 choose experts {1, 3}, {3, 1}, {1, 0} of four.
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const MoeOrderArrays order = sorted(*kernels, stream, {1, 3, 3, 1, 1, 0}, {2, 0, 2}, 2, 4);
    CHECK(order.pair_row == std::vector<int32_t>{2, 1, 0, 2, 1, 0});
    CHECK(order.pair_position == std::vector<int32_t>{2, 5, 4, 1, 3, 0});
    CHECK(order.expert_begin == std::vector<int32_t>{0, 1, 4, 4, 6});
    REQUIRE(order.num_segments[0] == 5);
    CHECK(std::vector<int32_t>(order.segment_begin.begin(), order.segment_begin.begin() + 6) ==
          std::vector<int32_t>{0, 1, 2, 4, 5, 6});
    CHECK(std::vector<int32_t>(order.segment_expert.begin(), order.segment_expert.begin() + 5) ==
          std::vector<int32_t>{0, 1, 1, 3, 3});
    CHECK(std::vector<int32_t>(order.segment_slot.begin(), order.segment_slot.begin() + 5) ==
          std::vector<int32_t>{2, 0, 2, 0, 2});
  }
}

TEST_CASE("moe_sort equals a stable sort of all pairs") {
  Stream stream(2, kTestScratchBytes);
  struct Shape {
    int32_t num_rows, top_k, num_experts, num_slots;
  };
  for (const Kernels* kernels : backends()) {
    for (const Shape shape : {Shape{0, 2, 4, 3}, Shape{1, 8, 128, 2}, Shape{7, 1, 4, 8}, Shape{64, 4, 60, 9},
                              Shape{300, 8, 64, 1}, Shape{5, 4, 4, 2000}}) {
      for (const bool with_slots : {false, true}) {
        INFO(kernels->name << " T=" << shape.num_rows << " K=" << shape.top_k << " E=" << shape.num_experts);
        Draw draw(61);
        const std::vector<int32_t> ids = draw_choices(draw, shape.num_rows, shape.top_k, shape.num_experts);
        std::vector<int32_t> row_slot;
        for (int32_t t = 0; with_slots && t < shape.num_rows; ++t) {
          row_slot.push_back(draw.below(shape.num_slots));
        }
        MoeOrderArrays expected(ids.size(), static_cast<size_t>(shape.num_experts));
        expected.fill(ids, row_slot, shape.top_k);
        check_equal(sorted(*kernels, stream, ids, row_slot, shape.top_k, shape.num_experts), expected);
      }
    }
  }
}

TEST_CASE("moe_sort of rows that all choose one expert makes one run a slot") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const std::vector<int32_t> ids(6, 2);
    const MoeOrderArrays order = sorted(*kernels, stream, ids, {1, 0, 1, 0, 1, 0}, 1, 3);
    CHECK(order.pair_row == std::vector<int32_t>{1, 3, 5, 0, 2, 4});
    CHECK(order.expert_begin == std::vector<int32_t>{0, 0, 0, 6});
    CHECK(order.num_segments[0] == 2);
  }
}
