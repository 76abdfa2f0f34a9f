// SPDX-License-Identifier: Apache-2.0
// A drawn linear op whose rows use drawn adapters of given ranks, for linear_test_cuda.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/linear_case_cuda.h"

namespace moelora::test {

struct LinearShape {
  int32_t rows;
  int32_t k;
  std::vector<int32_t> outputs;
};
inline std::string text(const LinearShape& shape) {
  std::string result = "T " + std::to_string(shape.rows) + " K " + std::to_string(shape.k) + " N";
  for (const int32_t n : shape.outputs) {
    result += " " + std::to_string(n);
  }
  return result;
}

// One adapter a rank for the first parts' modules q, k, v. Every third lacks k, every second has lora_B.bias.
inline std::vector<TestAdapter> draw_adapters(Draw& draw, const std::vector<int32_t>& ranks, const LinearShape& shape) {
  std::vector<TestAdapter> adapters;
  for (size_t i = 0; i < ranks.size(); ++i) {
    TestAdapter adapter;
    for (size_t p = 0; p < shape.outputs.size(); ++p) {
      if (i % 3 == 2 && p == 1) {
        continue;
      }
      // The parts of an adapter may differ in rank too.
      const int32_t rank = p == 2 ? (ranks[i] + 1) / 2 : ranks[i];
      adapter.dense.emplace(std::pair(CudaLinearCase::kLayer, static_cast<LoraModule>(p)),
                            draw_pair(draw, rank, shape.k, shape.outputs[p], Dtype::kBf16, i % 2 == 1));
    }
    adapters.push_back(std::move(adapter));
  }
  return adapters;
}
inline void adapt_all(CudaLinearCase& linear) {
  for (size_t p = 0; p < linear.modules.size(); ++p) {
    linear.modules[p] = static_cast<LoraModule>(p);
  }
}

inline std::vector<int32_t> draw_slots(Draw& draw, int32_t rows, int32_t num_adapters) {
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < rows; ++t) {
    slots.push_back(draw.below(num_adapters + 1));
  }
  return slots;
}
// Different scales, every seventh 0.
inline std::vector<float> draw_scales(Draw& draw, int32_t rows) {
  std::vector<float> scales;
  for (int32_t t = 0; t < rows; ++t) {
    scales.push_back(t % 7 == 3 ? 0.0f : 1.0f + 0.5f * draw.signed_unit());
  }
  return scales;
}

struct LoraCase {
  LoraCase(const LinearShape& shape, const std::vector<int32_t>& ranks, Dtype weight, Dtype out, uint32_t seed,
           Dtype bias = Dtype::kBf16)
      : draw(seed),
        linear(shape.rows, shape.k, shape.outputs, seed + 1, weight, out, bias),
        adapters(draw_adapters(draw, ranks, shape), 2, 1, 3, seed + 2),
        device(adapters) {
    adapt_all(linear);
  }
  std::vector<std::vector<float>> run(const std::vector<int32_t>& slots, const std::vector<float>& scales) {
    const LoraBatch* batch = device.batch(slots, scales);
    return linear.run(batch, device.scratch_bytes(static_cast<size_t>(linear.rows), static_cast<size_t>(linear.k)));
  }
  // Row t of part p.
  [[nodiscard]] bool same_row(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b,
                              size_t p, int32_t t) const {
    const auto n = static_cast<size_t>(linear.outputs[p]);
    const size_t at = static_cast<size_t>(t) * n;
    return same_bits(a[p].data() + at, b[p].data() + at, n);
  }

  Draw draw;
  CudaLinearCase linear;
  AdapterFixture adapters;
  DeviceAdapters device;
};

}  // namespace moelora::test
