// SPDX-License-Identifier: Apache-2.0
// One drawn MoE layer for moe_gate_up_test and moe_down_test: experts each in memory of their own, choices, their order
// by definition, and adapters on any of the projections. Oracles merge W + s B A by hand in double.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "tests/support/adapter_builder.h"
#include "tests/support/backends.h"
#include "tests/support/compare.h"
#include "tests/support/moe_order.h"
#include "tests/support/stored_matrix.h"

namespace moelora::test {

// Rows take slots 0, 3, 6, ... modulo the number of slots and the base.
inline std::vector<int32_t> slots_in_turn(int32_t num_rows, int32_t num_slots) {
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < num_rows; ++t) {
    slots.push_back(t * 3 % (num_slots + 1));
  }
  return slots;
}

struct ExpertSet {
  ExpertSet(int32_t num_experts, int32_t rows, int32_t cols, Dtype dtype, Draw& draw) {
    for (int32_t e = 0; e < num_experts; ++e) {
      experts.emplace_back(rows, cols, dtype, draw);
    }
    for (const StoredMatrix& expert : experts) {
      pointers.push_back(expert.data());
    }
    view = {pointers.data(), dtype, rows, cols};
  }
  std::vector<StoredMatrix> experts;
  std::vector<const void*> pointers;
  ExpertWeights view;
};

struct MoeCase {
  static constexpr int32_t kLayer = 1;
  static constexpr int32_t kLayers = 2;

  MoeCase(Dtype dtype, int32_t hidden_width, int32_t intermediate_width, int32_t experts, int32_t choices, int32_t rows,
          uint32_t seed)
      : hidden(hidden_width),
        intermediate(intermediate_width),
        num_experts(experts),
        top_k(choices),
        num_rows(rows),
        draw(seed),
        gate(experts, intermediate, hidden, dtype, draw),
        up(experts, intermediate, hidden, dtype, draw),
        down(experts, hidden, intermediate, dtype, draw),
        x(rows, hidden, draw.floats(static_cast<size_t>(rows * hidden))),
        choice(draw_choices(draw, rows, choices, experts)) {}

  // Adapter with pairs for the expert modules of `which` (bits gate 1, up 2, down 4), ranks in turn by expert; every
  // third expert is left out. Layer 0 gets something else.
  TestAdapter draw_adapter(const std::vector<int32_t>& ranks, int which, Dtype dtype, bool bias, bool share_a) {
    TestAdapter adapter;
    adapter.share_a = share_a;
    for (int32_t e = 0; e < num_experts; ++e) {
      const int32_t rank = ranks[static_cast<size_t>(e) % ranks.size()];
      for (int32_t m = 0; m < kNumExpertModules; ++m) {
        if ((which >> m & 1) == 0) {
          continue;
        }
        const bool is_down = m == 2;
        const int32_t k = is_down ? intermediate : hidden;
        const int32_t n = is_down ? hidden : intermediate;
        adapter.experts[{0, e, static_cast<ExpertModule>(m)}] = draw_pair(draw, rank, k, n, dtype, false);
        if (num_experts > 2 && e % 3 == 2) {
          continue;
        }
        LoraPair pair = draw_pair(draw, rank, k, n, dtype, bias);
        const LoraPair* gate_pair = adapter.find(kLayer, e, ExpertModule::kGate);
        if (share_a && m == 1 && gate_pair != nullptr) {
          pair.a = gate_pair->a;
        }
        adapter.experts[{kLayer, e, static_cast<ExpertModule>(m)}] = pair;
      }
    }
    return adapter;
  }

  // A batch of some of the rows, in order; `fixture` may be null.
  void use(AdapterFixture* fixture, const std::vector<int32_t>& rows, const std::vector<int32_t>& slots,
           const std::vector<float>& scales) {
    used = rows;
    std::vector<int32_t> ids;
    std::vector<int32_t> row_slot;
    std::vector<float> row_scale;
    for (const int32_t t : rows) {
      ids.insert(ids.end(), choice.begin() + t * top_k, choice.begin() + (t + 1) * top_k);
      row_slot.push_back(slots.empty() ? 0 : slots[static_cast<size_t>(t)]);
      row_scale.push_back(scales.empty() ? 1.0f : scales[static_cast<size_t>(t)]);
    }
    order = MoeOrderArrays(ids.size(), static_cast<size_t>(num_experts));
    order.fill(ids, row_slot, top_k);
    pair_expert.assign(ids.size(), 0);
    for (size_t p = 0; p < ids.size(); ++p) {
      pair_expert[static_cast<size_t>(order.pair_position[p])] = ids[p];
    }
    adapters = fixture;
    lora = fixture == nullptr ? nullptr : fixture->batch(row_slot, row_scale);
  }
  void use_all(AdapterFixture* fixture, const std::vector<int32_t>& slots, const std::vector<float>& scales) {
    std::vector<int32_t> rows(static_cast<size_t>(num_rows));
    std::iota(rows.begin(), rows.end(), 0);
    use(fixture, rows, slots, scales);
  }

  // Reorders a result in sorted order into [used row][choice][width].
  [[nodiscard]] std::vector<float> by_choice(const std::vector<float>& sorted, int32_t width) const {
    std::vector<float> result;
    for (const int32_t position : order.pair_position) {
      result.insert(result.end(), sorted.begin() + int64_t{position} * width,
                    sorted.begin() + int64_t{position + 1} * width);
    }
    return result;
  }

  // Projection `m` of input `in` for sorted pair `i`, merged with its adapter.
  [[nodiscard]] double project(const ExpertSet& set, ExpertModule m, size_t i, int32_t n, const float* in) const {
    const int32_t e = pair_expert[i];
    double factor = 0.0;
    const LoraPair* pair = adapters == nullptr ? nullptr : adapters->expert(order.pair_row[i], kLayer, e, m, &factor);
    double sum = pair != nullptr ? factor * pair->bias_at(n) : 0.0;
    for (int32_t k = 0; k < set.view.cols; ++k) {
      const double merged =
          set.experts[static_cast<size_t>(e)].at(n, k) + (pair != nullptr ? pair->delta(n, k, factor) : 0.0);
      sum += merged * static_cast<double>(in[k]);
    }
    return sum;
  }

  [[nodiscard]] PoisonedBytes scratch(int32_t rows, int32_t width) const {
    const auto pairs = static_cast<size_t>(lora != nullptr ? lora->num_rows : 0) * static_cast<size_t>(top_k);
    const auto max_rank = static_cast<size_t>(lora != nullptr ? lora->max_rank : 0);
    return PoisonedBytes(linear_scratch_bytes(static_cast<size_t>(rows), static_cast<size_t>(width), pairs, max_rank));
  }

  int32_t hidden, intermediate, num_experts, top_k, num_rows;
  Draw draw;
  ExpertSet gate, up, down;
  PoisonedRows x;
  std::vector<int32_t> choice;  // [T, K]
  std::vector<int32_t> used;    // rows of the batch
  MoeOrderArrays order{0, 0};
  std::vector<int32_t> pair_expert;  // of sorted pairs
  AdapterFixture* adapters = nullptr;
  const LoraBatch* lora = nullptr;
  Compute compute = Compute::kExact;
  bool intact = true;
};

}  // namespace moelora::test
