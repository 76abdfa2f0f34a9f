// SPDX-License-Identifier: Apache-2.0
// moe_router has the bits of the three ops that it is made of, in everything that they write, and each row the bits
// that it has alone.
#include "kernels/moe/moe_router.h"

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/moe_order.h"
#include "tests/support/poison.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

struct Shape {
  int32_t num_rows, width, num_experts, top_k;
};

struct Inputs {
  explicit Inputs(const Shape& shape)
      : draw(91),
        hidden(shape.num_rows, shape.width, draw.floats(static_cast<size_t>(shape.num_rows * shape.width), 3.0f)),
        norm(1, shape.width, Dtype::kBf16, draw),
        router(shape.num_experts, shape.width, Dtype::kBf16, draw),
        bias(1, shape.num_experts, Dtype::kF32, draw) {
    for (int32_t t = 0; t < shape.num_rows; ++t) {
      row_slot.push_back(draw.below(4));
    }
  }
  Draw draw;
  PoisonedRows hidden;
  StoredMatrix norm, router, bias;
  std::vector<int32_t> row_slot;
};

struct Outputs {
  explicit Outputs(const Shape& shape)
      : normed(shape.num_rows, shape.width),
        logits(shape.num_rows, shape.num_experts),
        ids(static_cast<size_t>(shape.num_rows * shape.top_k), -7),
        weights(ids.size(), bf16_to_f32(0xFFFF)),
        order(ids.size(), static_cast<size_t>(shape.num_experts)),
        scratch(kTestScratchBytes) {}
  PoisonedRows normed, logits;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  MoeOrderArrays order;
  PoisonedBytes scratch;
};

// Of rows from `first` on.
MoeRouterArgs router_args(const Inputs& in, Outputs& out, const Shape& shape, int32_t first) {
  MoeRouterArgs args;
  args.norm = {in.hidden.view_from(first), nullptr, in.norm.view(), 1e-5f, shape.num_rows, shape.width,
               out.normed.view()};
  args.router.x = out.normed.view();
  args.router.num_rows = shape.num_rows;
  args.router.k = shape.width;
  args.router.parts[0] = {in.router.view(), in.bias.view(), out.logits.view(), LoraModule::kRouter};
  args.router.num_parts = 1;
  args.router.scratch = out.scratch.data();
  args.router.scratch_bytes = out.scratch.size();
  args.route.topk = {out.logits.view(),     shape.num_rows, shape.num_experts, shape.top_k,
                     RouterScore::kSoftmax, true,           out.ids.data(),    out.weights.data()};
  args.route.row_slot = in.row_slot.data() + first;
  args.route.order = out.order.view();
  return args;
}

}  // namespace

TEST_CASE("moe_router is rms_norm, linear and moe_route") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Shape shape : {Shape{0, 64, 8, 2}, Shape{1, 72, 8, 2}, Shape{5, 200, 32, 4}, Shape{20, 64, 60, 4}}) {
      INFO(kernels->name << " T=" << shape.num_rows << " H=" << shape.width << " E=" << shape.num_experts);
      const Inputs in(shape);
      Outputs apart(shape);
      const MoeRouterArgs three = router_args(in, apart, shape, 0);
      kernels->rms_norm(three.norm, stream);
      kernels->linear(three.router, stream);
      kernels->moe_route(three.route, stream);
      Outputs out(shape);
      kernels->moe_router(router_args(in, out, shape, 0), stream);
      CHECK(same_bits(out.normed.values(), apart.normed.values()));
      CHECK(same_bits(out.logits.values(), apart.logits.values()));
      CHECK((out.ids == apart.ids && same_bits(out.weights, apart.weights)));
      CHECK((out.normed.padding_intact() && out.logits.padding_intact() && in.hidden.padding_intact()));
      MoeOrderArrays expected(out.ids.size(), static_cast<size_t>(shape.num_experts));
      expected.fill(out.ids, in.row_slot, shape.top_k);
      CHECK((out.order.pair_row == expected.pair_row && out.order.pair_position == expected.pair_position));
      CHECK((out.order.expert_begin == expected.expert_begin && out.order.num_segments == expected.num_segments));
      for (int32_t t = 0; t < shape.num_rows; t += 3) {
        const Shape one{1, shape.width, shape.num_experts, shape.top_k};
        Outputs alone(one);
        kernels->moe_router(router_args(in, alone, one, t), stream);
        CHECK(same_bits(alone.logits.row(0), out.logits.row(t), static_cast<size_t>(shape.num_experts)));
      }
    }
  }
}
