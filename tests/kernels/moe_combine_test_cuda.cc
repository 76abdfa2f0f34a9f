// SPDX-License-Identifier: Apache-2.0
// moe_combine_cuda against the weighted sum in double, with and without a shared expert and its gate, from bf16 and
// fp32 results, at widths and strides that fit no vector, invariant to neighbours, and with a norm of the result
// against rms_norm_cuda, bit for bit. Without a GPU it says that it was skipped.
#include "kernels/moe/moe_combine.h"

#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/moe_order.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

struct CombineCase {
  CombineCase(int32_t rows, int32_t choices, int32_t columns, Dtype dtype, int shared_form)
      : num_rows(rows),
        top_k(choices),
        width(columns),
        draw(91),
        down_in(draw.floats(static_cast<size_t>(rows * choices * columns))),
        shared_in(draw.floats(static_cast<size_t>(rows * columns))),
        gate_in(draw.floats(static_cast<size_t>(rows), 4.0f)),
        hidden_in(draw.floats(static_cast<size_t>(rows * columns), 5.0f)),
        weights_in(draw.floats(static_cast<size_t>(rows * choices))),
        order(static_cast<size_t>(rows * choices), 64),
        has_shared(shared_form > 0),
        has_gate(shared_form == 2),
        down(int64_t{rows} * choices, columns, dtype, down_in, columns == 64 ? columns + 2 : 0),
        shared(rows, columns, Dtype::kF32, shared_in),
        gate(rows, 1, Dtype::kF32, gate_in),
        weights(weights_in),
        position(weights_in.size() * 4) {
    order.fill(draw_choices(draw, rows, choices, 64), {}, choices);
    position.write(order.pair_position.data(), position.size());
    if (dtype == Dtype::kBf16) {
      down_in = rounded_to_bf16(down_in);
    }
  }

  // Rows [first, first + count) of hidden after the op.
  std::vector<float> run(int32_t first, int32_t count) const {
    const DeviceRows out(num_rows, width, Dtype::kF32, hidden_in);
    moe_combine_cuda(args_for(out, first, count), *gpu()->stream);
    CHECK(out.padding_intact());
    const std::vector<float> all = out.values();
    return {all.begin() + first * width, all.begin() + (first + count) * width};
  }

  [[nodiscard]] MoeCombineArgs args_for(const DeviceRows& out, int32_t first, int32_t count) const {
    MoeCombineArgs args;
    args.down = down.view();
    args.weights = weights.as<float>() + first * top_k;
    args.order.pair_position = position.as<int32_t>() + first * top_k;
    args.num_rows = count;
    args.top_k = top_k;
    args.width = width;
    if (has_shared) {
      args.shared = shared.view_from(first);
    }
    if (has_gate) {
      args.shared_gate = gate.view_from(first);
    }
    args.hidden = out.view_from(first);
    return args;
  }

  [[nodiscard]] std::vector<double> expected() const {
    std::vector<double> result;
    for (int32_t t = 0; t < num_rows; ++t) {
      const double factor =
          has_gate ? 1.0 / (1.0 + std::exp(-static_cast<double>(gate_in[static_cast<size_t>(t)]))) : 1.0;
      for (int32_t i = 0; i < width; ++i) {
        const auto at = static_cast<size_t>(t * width + i);
        double sum = static_cast<double>(hidden_in[at]);
        for (int32_t j = 0; j < top_k; ++j) {
          const auto pair = static_cast<size_t>(t * top_k + j);
          sum += static_cast<double>(weights_in[pair]) *
                 static_cast<double>(down_in[static_cast<size_t>(order.pair_position[pair] * width + i)]);
        }
        result.push_back(sum + (has_shared ? factor * static_cast<double>(shared_in[at]) : 0.0));
      }
    }
    return result;
  }

  int32_t num_rows, top_k, width;
  Draw draw;
  std::vector<float> down_in, shared_in, gate_in, hidden_in, weights_in;
  MoeOrderArrays order;
  bool has_shared, has_gate;
  DeviceRows down, shared, gate;
  DeviceBuffer weights, position;
};

// One launch where the rows allow it, else two: both must give what the two ops give one after the other.
void check_norm(const CombineCase& test, Dtype weight_dtype, Dtype normed_dtype, int32_t normed_stride = 0) {
  const auto [rows, width] = std::pair(test.num_rows, test.width);
  Draw draw(92);
  const StoredMatrix weight(1, width, weight_dtype, draw);
  const DeviceBuffer weight_device(weight.data(), static_cast<size_t>(width) * dtype_bytes(weight_dtype));
  const Weight stored = {weight_device.data(), weight_dtype, 1, width};
  const DeviceRows sums(rows, width, Dtype::kF32, test.hidden_in);
  moe_combine_cuda(test.args_for(sums, 0, rows), *gpu()->stream);
  const DeviceRows expected(rows, width, normed_dtype, normed_stride);
  rms_norm_cuda({sums.view(), nullptr, stored, 1e-5f, rows, width, expected.view()}, *gpu()->stream);
  for (int run = 0; run < 2; ++run) {
    const DeviceRows out(rows, width, Dtype::kF32, test.hidden_in);
    const DeviceRows normed(rows, width, normed_dtype, normed_stride);
    MoeCombineArgs args = test.args_for(out, 0, rows);
    args.norm_weight = stored;
    args.norm_eps = 1e-5f;
    args.normed = normed.view();
    moe_combine_cuda(args, *gpu()->stream);
    CHECK(same_bits(out.values(), sums.values()));
    CHECK(same_bits(normed.values(), expected.values()));
    CHECK((out.padding_intact() && normed.padding_intact()));
  }
}

}  // namespace

TEST_CASE("moe_combine_cuda adds weighted experts and the shared expert to the residual") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
    for (const int32_t top_k : {1, 2, 8}) {
      for (const int32_t width : {1, 33, 64, 2880}) {
        for (const int shared : {0, 1, 2}) {
          for (const int32_t num_rows : {0, 1, 7, 64}) {
            INFO(dtype_name(dtype) << " K=" << top_k << " H=" << width << " shared=" << shared << " T=" << num_rows);
            const CombineCase test(num_rows, top_k, width, dtype, shared);
            const std::vector<float> out = test.run(0, num_rows);
            CHECK(relative_error(out, test.expected()) <= 2e-6);
          }
        }
      }
    }
  }
}

TEST_CASE("a row of moe_combine_cuda has the same bits alone") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t width : {100, 1024}) {
    const CombineCase test(10, 4, width, Dtype::kBf16, 2);
    const std::vector<float> all = test.run(0, 10);
    CHECK(same_bits(all, test.run(0, 10)));
    for (int32_t t = 0; t < 10; ++t) {
      CHECK(same_bits(test.run(t, 1).data(), all.data() + t * width, static_cast<size_t>(width)));
    }
  }
}

TEST_CASE("moe_combine_cuda with a norm gives the bits of rms_norm_cuda after it") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
    for (const int32_t top_k : {2, 4, 8, 10}) {
      for (const int32_t width : {4, 33, 64, 1000, 2048, 2052, 2880, 4096, 4100}) {
        for (const int32_t num_rows : {1, 5}) {
          INFO(dtype_name(dtype) << " K=" << top_k << " H=" << width << " T=" << num_rows);
          check_norm(CombineCase(num_rows, top_k, width, dtype, (top_k + width) % 3), Dtype::kBf16, dtype);
        }
      }
    }
  }
  for (const Dtype weight_dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
    for (const Dtype normed_dtype : {Dtype::kF32, Dtype::kBf16}) {
      for (const int shared : {0, 1, 2}) {
        INFO("weight " << dtype_name(weight_dtype) << " normed " << dtype_name(normed_dtype) << " shared " << shared);
        check_norm(CombineCase(6, 4, 2880, Dtype::kBf16, shared), weight_dtype, normed_dtype);
        check_norm(CombineCase(6, 4, 2880, Dtype::kBf16, shared), weight_dtype, normed_dtype, 2881);
      }
    }
  }
}
