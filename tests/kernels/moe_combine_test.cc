// SPDX-License-Identifier: Apache-2.0
// moe_combine against the weighted sum in double, with and without a shared expert and its gate, invariant to
// neighbours, and with a norm of the result.
#include "kernels/moe/moe_combine.h"

#include <cmath>

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/draw.h"
#include "tests/support/moe_order.h"
#include "tests/support/poison.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

struct CombineCase {
  CombineCase(int32_t rows, int32_t choices, int32_t columns, bool with_shared, bool with_gate)
      : num_rows(rows),
        top_k(choices),
        width(columns),
        draw(91),
        down(int64_t{rows} * choices, columns, draw.floats(static_cast<size_t>(rows * choices * columns))),
        shared(rows, columns, draw.floats(static_cast<size_t>(rows * columns))),
        shared_gate(rows, 1, draw.floats(static_cast<size_t>(rows), 4.0f)),
        hidden(draw.floats(static_cast<size_t>(rows * columns), 5.0f)),
        weights(draw.floats(static_cast<size_t>(rows * choices))),
        order(static_cast<size_t>(rows * choices), 16),
        has_shared(with_shared),
        has_gate(with_gate) {
    order.fill(draw_choices(draw, rows, choices, 16), {}, choices);
  }

  // Rows [first, first + count).
  std::vector<float> run(const Kernels& kernels, Stream& stream, int32_t first, int32_t count) {
    const PoisonedRows out(num_rows, width, hidden);
    kernels.moe_combine(args_for(out, first, count), stream);
    CHECK(out.padding_intact());
    return {out.row(first), out.row(first) + count * out.view().stride};
  }

  MoeCombineArgs args_for(const PoisonedRows& out, int32_t first, int32_t count) {
    MoeCombineArgs args;
    args.down = down.view();
    args.weights = weights.data() + first * top_k;
    args.order = order.view();
    args.order.pair_position += first * top_k;
    args.num_rows = count;
    args.top_k = top_k;
    args.width = width;
    if (has_shared) {
      args.shared = shared.view_from(first);
    }
    if (has_gate) {
      args.shared_gate = shared_gate.view_from(first);
    }
    args.hidden = out.view_from(first);
    return args;
  }

  [[nodiscard]] double expected(int32_t t, int32_t i) const {
    double sum = static_cast<double>(hidden[static_cast<size_t>(t * width + i)]);
    for (int32_t j = 0; j < top_k; ++j) {
      const auto pair = static_cast<size_t>(t * top_k + j);
      sum += static_cast<double>(weights[pair]) * static_cast<double>(down.row(order.pair_position[pair])[i]);
    }
    const double gate = has_gate ? 1.0 / (1.0 + std::exp(-static_cast<double>(shared_gate.row(t)[0]))) : 1.0;
    return sum + (has_shared ? gate * static_cast<double>(shared.row(t)[i]) : 0.0);
  }

  int32_t num_rows, top_k, width;
  Draw draw;
  PoisonedRows down, shared, shared_gate;
  std::vector<float> hidden, weights;
  MoeOrderArrays order;
  bool has_shared, has_gate;
};

}  // namespace

TEST_CASE("moe_combine adds weighted experts and the shared expert to the residual") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int32_t top_k : {1, 2, 8}) {
      for (const int32_t width : {1, 33, 64}) {
        for (const int shared : {0, 1, 2}) {
          for (const int32_t num_rows : {0, 1, 11}) {
            INFO(kernels->name << " K=" << top_k << " H=" << width << " shared=" << shared << " T=" << num_rows);
            CombineCase test(num_rows, top_k, width, shared > 0, shared == 2);
            const std::vector<float> out = test.run(*kernels, stream, 0, num_rows);
            for (int32_t t = 0; t < num_rows; ++t) {
              const auto stride = static_cast<int64_t>(out.size()) / num_rows;
              std::vector<double> expected;
              for (int32_t i = 0; i < width; ++i) {
                expected.push_back(test.expected(t, i));
              }
              const auto at = out.begin() + t * stride;
              CHECK(relative_error({at, at + width}, expected) <= 2e-6);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a row of moe_combine has the same bits alone") {
  Stream stream(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    CombineCase test(10, 4, 100, true, true);
    const std::vector<float> all = test.run(*kernels, stream, 0, 10);
    CHECK(same_bits(all, test.run(*kernels, stream, 0, 10)));
    const size_t stride = all.size() / 10;
    for (int32_t t = 0; t < 10; ++t) {
      CHECK(same_bits(test.run(*kernels, stream, t, 1).data(), all.data() + static_cast<size_t>(t) * stride, 100));
    }
  }
}

TEST_CASE("moe_combine with a norm gives the bits of rms_norm after it") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const int32_t num_rows : {0, 1, 11}) {
        INFO(kernels->name << " " << dtype_name(dtype) << " T=" << num_rows);
        constexpr int32_t kWidth = 70;
        CombineCase test(num_rows, 4, kWidth, true, true);
        const StoredMatrix weight(1, kWidth, dtype, test.draw);
        const PoisonedRows sums(num_rows, kWidth, test.hidden);
        kernels->moe_combine(test.args_for(sums, 0, num_rows), stream);
        const PoisonedRows expected(num_rows, kWidth);
        kernels->rms_norm({sums.view(), nullptr, weight.view(), 1e-5f, num_rows, kWidth, expected.view()}, stream);
        const PoisonedRows out(num_rows, kWidth, test.hidden);
        const PoisonedRows normed(num_rows, kWidth);
        MoeCombineArgs args = test.args_for(out, 0, num_rows);
        args.norm_weight = weight.view();
        args.norm_eps = 1e-5f;
        args.normed = normed.view();
        kernels->moe_combine(args, stream);
        CHECK((same_bits(out.values(), sums.values()) && same_bits(normed.values(), expected.values())));
        CHECK((out.padding_intact() && normed.padding_intact()));
      }
    }
  }
}
