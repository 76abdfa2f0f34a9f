// SPDX-License-Identifier: Apache-2.0
// router_topk_cuda against a full sort and a softmax in double, and against the ids of the CPU op: order, ties to the
// lower index, both normalisations, infinities, rows of NaN. Without a GPU it says that it was skipped.
#include "kernels/moe/router_topk.h"

#include <cmath>

#include "tests/kernels/router_case.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"

using namespace moelora;
using namespace moelora::test;

namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed route(int64_t num_rows, int32_t num_experts, const std::vector<float>& logits, int32_t top_k, bool renormalize) {
  const DeviceRows rows(num_rows, num_experts, Dtype::kF32, logits);
  const DeviceBuffer ids(static_cast<size_t>(num_rows * top_k) * 4);
  const DeviceBuffer weights(static_cast<size_t>(num_rows * top_k) * 4);
  RouterTopkArgs args;
  args.logits = rows.view();
  args.num_rows = static_cast<int32_t>(num_rows);
  args.num_experts = num_experts;
  args.top_k = top_k;
  args.renormalize = renormalize;
  args.ids = ids.as<int32_t>();
  args.weights = weights.as<float>();
  router_topk_cuda(args, *gpu()->stream);
  CHECK((ids.guard_intact() && weights.guard_intact()));
  return {ids.read<int32_t>(), weights.read<float>()};
}

}  // namespace

TEST_CASE("router_topk_cuda picks the largest logits and their probabilities") {
  if (gpu() == nullptr) {
    return;
  }
  struct Shape {
    int32_t num_experts, top_k;
  };
  for (const Shape shape : {Shape{4, 1}, Shape{8, 2}, Shape{32, 4}, Shape{60, 4}, Shape{64, 8}, Shape{128, 8},
                            Shape{200, 16}, Shape{512, 10}, Shape{512, 16}, Shape{5, 5}, Shape{1, 1}}) {
    for (const int32_t num_rows : {0, 1, 7, 64, 300}) {
      for (const bool renormalize : {false, true}) {
        INFO("E=" << shape.num_experts << " K=" << shape.top_k << " T=" << num_rows << " renormalize=" << renormalize);
        Draw draw(51);
        const std::vector<float> logits = draw.floats(static_cast<size_t>(num_rows * shape.num_experts), 6.0f);
        const Routed routed = route(num_rows, shape.num_experts, logits, shape.top_k, renormalize);
        for (int32_t t = 0; t < num_rows; ++t) {
          check_row(logits.data() + t * shape.num_experts, shape.num_experts, routed.ids.data() + t * shape.top_k,
                    routed.weights.data() + t * shape.top_k, shape.top_k, renormalize, 2e-6);
        }
        const Routed again = route(num_rows, shape.num_experts, logits, shape.top_k, renormalize);
        CHECK((routed.ids == again.ids && same_bits(routed.weights, again.weights)));
      }
    }
  }
}

TEST_CASE("router_topk_cuda gives ties to the lower index, even where rounding would hide the winner") {
  if (gpu() == nullptr) {
    return;
  }
  const float next = std::nextafter(2.0f, 3.0f);
  const Routed routed = route(3, 6,
                              {1.0f, 3.0f, 3.0f, 1.0f, 3.0f, 0.0f,  //
                               5.0f, 5.0f, 5.0f, 5.0f, 5.0f, 5.0f,  //
                               2.0f, next, 2.0f, -90.0f, 2.0f, next},
                              4, true);
  CHECK(routed.ids == std::vector<int32_t>{1, 2, 4, 0, 0, 1, 2, 3, 1, 5, 0, 2});
  CHECK(relative_error({routed.weights.begin() + 4, routed.weights.begin() + 8}, {0.25, 0.25, 0.25, 0.25}) <= 1e-7);
  // Ties across lanes and registers: expert e and e + 32 are the same lane's.
  std::vector<float> logits(128, -1.0f);
  for (const size_t e : {97, 33, 65, 1, 2, 34}) {
    logits[e] = 2.0f;
  }
  CHECK(route(1, 128, logits, 8, true).ids == std::vector<int32_t>{1, 2, 33, 34, 65, 97, 0, 3});
}

TEST_CASE("router_topk_cuda treats zeros, infinities and NaN as the CPU op does") {
  if (gpu() == nullptr) {
    return;
  }
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> logits = {-0.0f, 0.0f,  -0.0f, 0.0f,  -kInf, -kInf,  //
                                     -kInf, -kInf, 1.0f,  -kInf, -kInf, -kInf,  //
                                     4.0f,  NAN,   2.0f,  0.0f,  5.0f,  -NAN,   //
                                     NAN,   NAN,   NAN,   NAN,   NAN,   NAN,    //
                                     -kInf, -kInf, -kInf, -kInf, -kInf, -kInf,  //
                                     kInf,  1.0f,  kInf,  1.0f,  1.0f,  1.0f};
  Stream host(1, 64);
  for (const bool renormalize : {false, true}) {
    INFO("renormalize=" << renormalize);
    std::vector<int32_t> ids(6 * 3);
    std::vector<float> weights(6 * 3);
    std::vector<float> copy = logits;
    RouterTopkArgs args;
    args.logits = {copy.data(), Dtype::kF32, 6};
    args.num_rows = 6;
    args.num_experts = 6;
    args.top_k = 3;
    args.renormalize = renormalize;
    args.ids = ids.data();
    args.weights = weights.data();
    router_topk_cpu(args, host);
    const Routed routed = route(6, 6, logits, 3, renormalize);
    CHECK(routed.ids == ids);
    for (size_t i = 0; i < weights.size(); ++i) {
      INFO("pair " << i << ": " << routed.weights[i] << " for " << weights[i]);
      CHECK(
          (std::isnan(weights[i]) ? std::isnan(routed.weights[i]) : std::abs(weights[i] - routed.weights[i]) <= 1e-6f));
    }
  }
}
