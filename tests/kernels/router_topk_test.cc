// SPDX-License-Identifier: Apache-2.0
// router_topk against a full sort and a softmax in double: order, ties to the lower index, both normalisations, and
// rows of NaN, which must come out as NaN with ids that are still experts.
#include "kernels/moe/router_topk.h"

#include <cmath>

#include "tests/kernels/router_case.h"
#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/draw.h"
#include "tests/support/poison.h"

using namespace moelora;
using namespace moelora::test;

namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed route(const Kernels& kernels, Stream& stream, const PoisonedRows& logits, int32_t top_k, bool renormalize) {
  const auto pairs = static_cast<size_t>(logits.num_rows() * top_k);
  Routed result{std::vector<int32_t>(pairs, -7), std::vector<float>(pairs, NAN)};
  RouterTopkArgs args;
  args.logits = logits.view();
  args.num_rows = static_cast<int32_t>(logits.num_rows());
  args.num_experts = static_cast<int32_t>(logits.width());
  args.top_k = top_k;
  args.renormalize = renormalize;
  args.ids = result.ids.data();
  args.weights = result.weights.data();
  kernels.router_topk(args, stream);
  return result;
}

}  // namespace

TEST_CASE("router_topk picks the largest logits and their probabilities") {
  Stream stream(2, kTestScratchBytes);
  struct Shape {
    int32_t num_experts, top_k;
  };
  for (const Kernels* kernels : backends()) {
    for (const Shape shape : {Shape{4, 1}, Shape{8, 2}, Shape{60, 4}, Shape{128, 8}, Shape{512, 10}, Shape{5, 5}}) {
      for (const int32_t num_rows : {0, 1, 9}) {
        for (const bool renormalize : {false, true}) {
          INFO(kernels->name << " E=" << shape.num_experts << " K=" << shape.top_k << " T=" << num_rows);
          Draw draw(51);
          const PoisonedRows logits(num_rows, shape.num_experts,
                                    draw.floats(static_cast<size_t>(num_rows * shape.num_experts), 6.0f));
          const Routed routed = route(*kernels, stream, logits, shape.top_k, renormalize);
          for (int32_t t = 0; t < num_rows; ++t) {
            check_row(logits.row(t), shape.num_experts, routed.ids.data() + t * shape.top_k,
                      routed.weights.data() + t * shape.top_k, shape.top_k, renormalize, 1e-6);
          }
        }
      }
    }
  }
}

TEST_CASE("router_topk gives ties to the lower index, even where rounding would hide the winner") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const float next = std::nextafter(2.0f, 3.0f);  // exp() of both rounds to the same fp32 probability or near it
    const PoisonedRows logits(3, 6,
                              {1.0f, 3.0f, 3.0f, 1.0f, 3.0f, 0.0f,  //
                               5.0f, 5.0f, 5.0f, 5.0f, 5.0f, 5.0f,  //
                               2.0f, next, 2.0f, -90.0f, 2.0f, next});
    const Routed routed = route(*kernels, stream, logits, 4, true);
    CHECK(routed.ids == std::vector<int32_t>{1, 2, 4, 0, 0, 1, 2, 3, 1, 5, 0, 2});
    CHECK(relative_error({routed.weights.begin() + 4, routed.weights.begin() + 8}, {0.25, 0.25, 0.25, 0.25}) <= 1e-7);
  }
}

TEST_CASE("router_topk passes NaN on in the weights of that row only") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const bool renormalize : {false, true}) {
      INFO(kernels->name);
      const PoisonedRows logits(3, 4, {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, NAN, 2.0f, 0.0f, NAN, NAN, NAN, NAN});
      const Routed routed = route(*kernels, stream, logits, 2, renormalize);
      CHECK((routed.ids[0] == 3 && routed.ids[1] == 2 && std::isfinite(routed.weights[0])));
      for (size_t pair = 2; pair < 6; ++pair) {
        CHECK(std::isnan(routed.weights[pair]));
        CHECK((routed.ids[pair] >= 0 && routed.ids[pair] < 4));
      }
      CHECK(routed.ids[2] != routed.ids[3]);
      CHECK(routed.ids[4] != routed.ids[5]);
    }
  }
}
