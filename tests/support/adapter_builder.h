// SPDX-License-Identifier: Apache-2.0
// Adapters for op tests: plain matrices in, packed pages out. The packer here follows the text of
// kernels/lora/adapter_layout.h and shares no code with the loader, so that each can be held against the other. Pages
// are small, in random order, and everything that belongs to no adapter is NaN.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "kernels/lora/adapter_layout.h"
#include "tests/support/draw.h"
#include "tests/support/poison.h"

namespace moelora::test {

// One pair A [rank, k], B [n, rank], row-major, values already representable in `dtype`.
struct LoraPair {
  int32_t rank = 0;
  int32_t k = 0;
  int32_t n = 0;
  std::vector<float> a;
  std::vector<float> b;
  std::vector<float> bias;  // [n] or empty
  float scale = 1.0f;
  Dtype dtype = Dtype::kBf16;

  // scale * (B A)[n, k] with `scale` the whole factor of a row.
  [[nodiscard]] double delta(int32_t row, int32_t col, double factor) const;
  [[nodiscard]] double bias_at(int32_t row) const {
    return bias.empty() ? 0.0 : static_cast<double>(bias[static_cast<size_t>(row)]);
  }
};

LoraPair draw_pair(Draw& draw, int32_t rank, int32_t k, int32_t n, Dtype dtype, bool with_bias);

struct TestAdapter {
  std::map<std::pair<int32_t, LoraModule>, LoraPair> dense;                // (layer, module)
  std::map<std::tuple<int32_t, int32_t, ExpertModule>, LoraPair> experts;  // (layer, expert, module)
  bool share_a = false;  // up's record names gate's A, which must be equal

  [[nodiscard]] const LoraPair* find(int32_t layer, LoraModule module) const;
  [[nodiscard]] const LoraPair* find(int32_t layer, int32_t expert, ExpertModule module) const;
};

std::vector<std::byte> pack_adapter(const TestAdapter& adapter, int32_t num_layers, int32_t num_experts);

// A pool with adapters in slots 1, 2, ... and the batch of rows that use them.
class AdapterFixture {
 public:
  AdapterFixture(std::vector<TestAdapter> adapters, int32_t num_layers, int32_t num_experts, int32_t page_granules,
                 uint32_t seed);

  // Row t uses slot row_slot[t] at row_scale[t]; the returned view lives as long as this object or the next call.
  const LoraBatch* batch(std::vector<int32_t> row_slot, std::vector<float> row_scale);

  [[nodiscard]] const TestAdapter& adapter(int32_t slot) const { return adapters_[static_cast<size_t>(slot - 1)]; }
  [[nodiscard]] const AdapterTable& table() const { return batch_.table; }
  [[nodiscard]] const std::vector<TestAdapter>& adapters() const { return adapters_; }
  [[nodiscard]] size_t pool_bytes() const { return pool_.size(); }
  [[nodiscard]] const std::vector<int32_t>& page_table() const { return page_table_; }
  // The pair and the whole factor of row t; null for base rows.
  [[nodiscard]] const LoraPair* dense(int32_t t, int32_t layer, LoraModule module, double* factor) const;
  [[nodiscard]] const LoraPair* expert(int32_t t, int32_t layer, int32_t expert, ExpertModule module,
                                       double* factor) const;

 private:
  std::vector<TestAdapter> adapters_;
  PoisonedBytes pool_;
  std::vector<int32_t> page_table_;
  std::vector<int32_t> row_slot_;
  std::vector<float> row_scale_;
  std::vector<int32_t> sorted_rows_;
  std::vector<int32_t> segment_begin_;
  std::vector<int32_t> segment_slot_;
  LoraBatch batch_;
};

}  // namespace moelora::test
