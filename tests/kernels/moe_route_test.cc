// SPDX-License-Identifier: Apache-2.0
// moe_route against a full sort of the logits, a softmax in double and a stable sort of all pairs, and against the two
// ops that it is made of.
#include "kernels/moe/moe_route.h"

#include <cmath>

#include "tests/kernels/router_case.h"
#include "tests/support/backends.h"
#include "tests/support/draw.h"
#include "tests/support/moe_order.h"
#include "tests/support/poison.h"

using namespace moelora;
using namespace moelora::test;

namespace {

struct Routed {
  Routed(int32_t num_rows, int32_t top_k, int32_t num_experts)
      : ids(static_cast<size_t>(num_rows * top_k), -7),
        weights(ids.size(), NAN),
        order(ids.size(), static_cast<size_t>(num_experts)) {}
  std::vector<int32_t> ids;
  std::vector<float> weights;
  MoeOrderArrays order;
};

MoeRouteArgs route_args(Routed& routed, const PoisonedRows& logits, const std::vector<int32_t>& row_slot,
                        int32_t top_k) {
  MoeRouteArgs args;
  args.topk = {logits.view(),
               static_cast<int32_t>(logits.num_rows()),
               static_cast<int32_t>(logits.width()),
               top_k,
               RouterScore::kSoftmax,
               true,
               routed.ids.data(),
               routed.weights.data()};
  args.row_slot = row_slot.empty() ? nullptr : row_slot.data();
  args.order = routed.order.view();
  return args;
}

}  // namespace

TEST_CASE("moe_route chooses experts and sorts their pairs") {
  Stream stream(2, kTestScratchBytes);
  struct Shape {
    int32_t num_rows, num_experts, top_k;
  };
  for (const Kernels* kernels : backends()) {
    for (const Shape shape : {Shape{0, 8, 2}, Shape{1, 32, 4}, Shape{64, 32, 4}, Shape{70, 128, 8}}) {
      for (const bool with_slots : {false, true}) {
        INFO(kernels->name << " T=" << shape.num_rows << " E=" << shape.num_experts << " slots " << with_slots);
        Draw draw(71);
        const PoisonedRows logits(shape.num_rows, shape.num_experts,
                                  draw.floats(static_cast<size_t>(shape.num_rows * shape.num_experts), 6.0f));
        std::vector<int32_t> row_slot;
        for (int32_t t = 0; with_slots && t < shape.num_rows; ++t) {
          row_slot.push_back(draw.below(5));
        }
        Routed routed(shape.num_rows, shape.top_k, shape.num_experts);
        kernels->moe_route(route_args(routed, logits, row_slot, shape.top_k), stream);
        for (int32_t t = 0; t < shape.num_rows; ++t) {
          check_row(logits.row(t), shape.num_experts, routed.ids.data() + t * shape.top_k,
                    routed.weights.data() + t * shape.top_k, shape.top_k, true, 1e-6);
        }
        MoeOrderArrays expected(routed.ids.size(), static_cast<size_t>(shape.num_experts));
        expected.fill(routed.ids, row_slot, shape.top_k);
        CHECK((routed.order.pair_row == expected.pair_row && routed.order.pair_position == expected.pair_position));
        CHECK(routed.order.num_segments == expected.num_segments);
        Routed two(shape.num_rows, shape.top_k, shape.num_experts);
        const MoeRouteArgs args = route_args(two, logits, row_slot, shape.top_k);
        kernels->router_topk(args.topk, stream);
        kernels->moe_sort(route_sort(args), stream);
        CHECK((routed.ids == two.ids && same_bits(routed.weights, two.weights)));
        CHECK(routed.order.expert_begin == two.order.expert_begin);
        CHECK(routed.order.segment_begin == two.order.segment_begin);
        CHECK(routed.order.segment_slot == two.order.segment_slot);
      }
    }
  }
}
