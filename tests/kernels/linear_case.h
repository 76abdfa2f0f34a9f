// SPDX-License-Identifier: Apache-2.0
// One drawn linear op for linear_test and linear_lora_test: runs it on a table over poisoned memory and computes
// what it must give in double.
#pragma once

#include <string>
#include <vector>

#include "tests/support/adapter_builder.h"
#include "tests/support/backends.h"
#include "tests/support/compare.h"
#include "tests/support/stored_matrix.h"

namespace moelora::test {

struct LinearCase {
  static constexpr int32_t kLayer = 1;
  // Odd parts have a bias.
  LinearCase(Dtype dtype, int32_t width, std::vector<int32_t> outputs, int32_t rows, uint32_t seed)
      : k(width), num_rows(rows), draw(seed), x(rows, width, draw.floats(static_cast<size_t>(rows * width))) {
    for (const int32_t n : outputs) {
      weights.emplace_back(n, width, dtype, draw);
      biases.emplace_back(1, n, dtype, draw);
      before.push_back(draw.floats(static_cast<size_t>(rows * n)));
      modules.push_back(LoraModule::kNone);
    }
  }

  // Rows [first, first + count), parts one after the other for each row; count < 0: all.
  std::vector<float> run(const Kernels& kernels, Stream& stream, int32_t first = 0, int32_t count = -1) {
    if (count < 0) {
      count = num_rows;
    }
    std::vector<PoisonedRows> outs;
    LinearArgs args;
    args.x = x.view_from(first);
    args.num_rows = count;
    args.k = k;
    args.num_parts = static_cast<int>(weights.size());
    args.accumulate = accumulate;
    args.layer = kLayer;
    args.lora = lora;
    args.compute = compute;
    outs.reserve(weights.size());
    for (size_t p = 0; p < weights.size(); ++p) {
      const int32_t n = weights[p].view().rows;
      outs.emplace_back(count, n);
      for (int32_t t = 0; accumulate && t < count; ++t) {
        std::copy_n(before[p].begin() + (first + t) * n, n, outs[p].row(t));
      }
      args.parts[p] = {weights[p].view(), p % 2 == 1 ? biases[p].view() : Weight{}, outs[p].view(), modules[p]};
    }
    const auto lora_rows = static_cast<size_t>(lora != nullptr ? lora->num_rows : 0);
    const auto max_rank = static_cast<size_t>(lora != nullptr ? lora->max_rank : 0);
    const PoisonedBytes scratch(
        linear_scratch_bytes(static_cast<size_t>(count), static_cast<size_t>(k), lora_rows, max_rank));
    args.scratch = scratch.data();
    args.scratch_bytes = scratch.size();
    kernels.linear(args, stream);
    std::vector<float> result;
    for (int32_t t = 0; t < count; ++t) {
      for (size_t p = 0; p < outs.size(); ++p) {
        result.insert(result.end(), outs[p].row(t), outs[p].row(t) + outs[p].width());
      }
    }
    intact = intact && scratch.guard_intact() && x.padding_intact();
    for (const PoisonedRows& out : outs) {
      intact = intact && out.padding_intact();
    }
    return result;
  }

  // `adapters` null: the base alone.
  [[nodiscard]] std::vector<double> expected(const AdapterFixture* adapters = nullptr) const {
    std::vector<double> result;
    for (int32_t t = 0; t < num_rows; ++t) {
      for (size_t p = 0; p < weights.size(); ++p) {
        const int32_t outputs = weights[p].view().rows;
        double factor = 0.0;
        const LoraPair* pair = adapters != nullptr && modules[p] != LoraModule::kNone
                                   ? adapters->dense(t, kLayer, modules[p], &factor)
                                   : nullptr;
        for (int32_t n = 0; n < outputs; ++n) {
          double sum = accumulate ? static_cast<double>(before[p][static_cast<size_t>(t * outputs + n)]) : 0.0;
          if (p % 2 == 1) {
            sum += biases[p].at(0, n);
          }
          if (pair != nullptr) {
            sum += factor * pair->bias_at(n);
          }
          for (int32_t i = 0; i < k; ++i) {
            const double merged = weights[p].at(n, i) + (pair != nullptr ? pair->delta(n, i, factor) : 0.0);
            sum += merged * static_cast<double>(x.row(t)[i]);
          }
          result.push_back(sum);
        }
      }
    }
    return result;
  }

  [[nodiscard]] std::vector<float> rows_of(const std::vector<float>& all, int32_t first, int32_t count) const {
    int32_t width = 0;
    for (const StoredMatrix& weight : weights) {
      width += weight.view().rows;
    }
    return {all.begin() + first * width, all.begin() + (first + count) * width};
  }
  [[nodiscard]] bool memory_intact() const { return intact; }

  int32_t k;
  int32_t num_rows;
  Draw draw;
  PoisonedRows x;
  std::vector<StoredMatrix> weights;
  std::vector<StoredMatrix> biases;
  std::vector<std::vector<float>> before;
  std::vector<LoraModule> modules;
  bool accumulate = false;
  Compute compute = Compute::kExact;
  const LoraBatch* lora = nullptr;
  bool intact = true;
};

}  // namespace moelora::test
