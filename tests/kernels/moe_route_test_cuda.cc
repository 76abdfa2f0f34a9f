// SPDX-License-Identifier: Apache-2.0
// moe_route_cuda against a full sort of the logits, a softmax in double and a stable sort of all pairs, on both sides
// of the border between one launch and two, with slots in every order; weights have the bits of router_topk_cuda.
// Without a GPU it says that it was skipped.
#include "kernels/moe/moe_route.h"

#include <cmath>

#include "tests/kernels/device_order.h"
#include "tests/kernels/router_case.h"
#include "tests/support/device_rows.h"

using namespace moelora;
using namespace moelora::test;

namespace {

struct Shape {
  int32_t num_rows, num_experts, top_k;
};

struct Chosen {
  explicit Chosen(const Shape& shape)
      : ids(static_cast<size_t>(shape.num_rows * shape.top_k) * 4),
        weights(static_cast<size_t>(shape.num_rows * shape.top_k) * 4) {}
  RouterTopkArgs args(const Shape& shape, const DeviceRows& logits, bool renormalize) const {
    return {logits.view(),         shape.num_rows, shape.num_experts, shape.top_k,
            RouterScore::kSoftmax, renormalize,    ids.as<int32_t>(), weights.as<float>()};
  }
  DeviceBuffer ids, weights;
};

void check_route(const Shape& shape, const std::vector<float>& values, const std::vector<int32_t>& row_slot,
                 bool renormalize, bool with_totals = true) {
  const DeviceRows logits(shape.num_rows, shape.num_experts, Dtype::kF32, values);
  const DeviceBuffer slots(row_slot);
  const Chosen expected(shape);
  router_topk_cuda(expected.args(shape, logits, renormalize), *gpu()->stream);
  for (int run = 0; run < 2; ++run) {
    const Chosen chosen(shape);
    const DeviceOrder order(chosen.ids.size() / 4, static_cast<size_t>(shape.num_experts));
    MoeRouteArgs args;
    args.topk = chosen.args(shape, logits, renormalize);
    args.row_slot = row_slot.empty() ? nullptr : slots.as<int32_t>();
    args.order = order.view(with_totals);
    moe_route_cuda(args, *gpu()->stream);
    const std::vector<int32_t> ids = chosen.ids.read<int32_t>();
    REQUIRE(ids == expected.ids.read<int32_t>());
    CHECK(same_bits(chosen.weights.read<float>(), expected.weights.read<float>()));
    CHECK((chosen.ids.guard_intact() && chosen.weights.guard_intact()));
    check_order(order, ids, row_slot, shape.top_k, shape.num_experts, with_totals);
  }
}

enum class Slots { kNone, kSorted, kDrawn, kFalling, kOne, kAlternating };

std::vector<int32_t> make_slots(Draw& draw, int32_t num_rows, Slots form) {
  std::vector<int32_t> slots;
  for (int32_t t = 0; form != Slots::kNone && t < num_rows; ++t) {
    slots.push_back(form == Slots::kFalling       ? 100000 - t
                    : form == Slots::kOne         ? 3
                    : form == Slots::kAlternating ? t % 2
                                                  : draw.below(9));
  }
  if (form == Slots::kSorted) {
    std::sort(slots.begin(), slots.end());
  }
  return slots;
}

}  // namespace

TEST_CASE("moe_route_cuda chooses experts and sorts their pairs") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t num_rows : {1, 7, 32, 33, 51, 52, 64, 65, 130}) {
    for (const auto& [num_experts, top_k] :
         {std::pair(32, 4), std::pair(128, 8), std::pair(1, 1), std::pair(4, 4), std::pair(60, 4), std::pair(64, 8),
          std::pair(200, 10), std::pair(256, 8), std::pair(512, 8), std::pair(33, 32)}) {
      for (const Slots form :
           {Slots::kNone, Slots::kSorted, Slots::kDrawn, Slots::kFalling, Slots::kOne, Slots::kAlternating}) {
        if (num_experts != 32 && num_experts != 128 && form != Slots::kNone && form != Slots::kDrawn) {
          continue;
        }
        INFO("T=" << num_rows << " E=" << num_experts << " K=" << top_k << " slots " << static_cast<int>(form));
        Draw draw(81);
        const Shape shape{num_rows, num_experts, top_k};
        const std::vector<float> logits = draw.floats(static_cast<size_t>(num_rows * num_experts), 6.0f);
        check_route(shape, logits, make_slots(draw, num_rows, form), form != Slots::kSorted);
      }
    }
  }
}

TEST_CASE("moe_route_cuda of rows that choose alike, of poisoned rows, and without totals") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t num_rows : {1, 6, 64}) {
    for (const Slots form : {Slots::kNone, Slots::kDrawn, Slots::kFalling, Slots::kAlternating}) {
      INFO("T=" << num_rows << " slots " << static_cast<int>(form));
      Draw draw(82);
      const std::vector<int32_t> slots = make_slots(draw, num_rows, form);
      std::vector<float> alike(static_cast<size_t>(num_rows) * 32, 1.0f);  // ties: experts 0 to 3
      check_route({num_rows, 32, 4}, alike, slots, true, false);
      std::vector<float> last;  // experts 124 to 127, falling
      for (int32_t i = 0; i < num_rows * 128; ++i) {
        last.push_back(static_cast<float>(i % 128) * 0.01f);
      }
      check_route({num_rows, 128, 4}, last, slots, false);
    }
  }
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {-0.0f, 0.0f,  -0.0f, 0.0f,  -kInf, -kInf,  //
                                     4.0f,  NAN,   2.0f,  0.0f,  5.0f,  -NAN,   //
                                     NAN,   NAN,   NAN,   NAN,   NAN,   NAN,    //
                                     -kInf, -kInf, -kInf, -kInf, -kInf, -kInf,  //
                                     1.0f,  2.0f,  3.0f,  4.0f,  5.0f,  6.0f};
  const Shape shape{5, 6, 3};
  const DeviceRows logits(5, 6, Dtype::kF32, values);
  const Chosen chosen(shape);
  const DeviceOrder order(15, 6);
  MoeRouteArgs args;
  args.topk = chosen.args(shape, logits, true);
  args.order = order.view(true);
  moe_route_cuda(args, *gpu()->stream);
  const std::vector<int32_t> ids = chosen.ids.read<int32_t>();
  CHECK(ids == std::vector<int32_t>{0, 1, 2, 4, 0, 2, 0, 1, 2, 0, 1, 2, 5, 4, 3});
  check_order(order, ids, {}, 3, 6, true);
  const std::vector<float> weights = chosen.weights.read<float>();
  for (size_t pair = 0; pair < 15; ++pair) {
    INFO("pair " << pair << ": " << weights[pair]);
    CHECK(std::isnan(weights[pair]) == (pair >= 3 && pair < 12));
  }
}

TEST_CASE("moe_route_cuda of no rows writes nothing, and refuses what it cannot do before launching") {
  if (gpu() == nullptr) {
    return;
  }
  const Shape shape{0, 4, 2};
  const DeviceRows logits(0, 4, Dtype::kF32);
  const Chosen chosen(shape);
  const DeviceOrder order(4, 4);
  MoeRouteArgs args;
  args.topk = chosen.args(shape, logits, true);
  args.order = order.view(true);
  moe_route_cuda(args, *gpu()->stream);
  CHECK(order.num_segments.read<int32_t>()[0] == -1);
  CHECK(order.totals.read<uint32_t>() == std::vector<uint32_t>{7, 0xffffffffu});
  args.topk.top_k = 5;
  CHECK_THROWS_AS(moe_route_cuda(args, *gpu()->stream), Error);
}
