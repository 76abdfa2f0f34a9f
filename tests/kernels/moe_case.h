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
#include "tests/support/mxfp4_matrix.h"
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

// How the matrices of a case are stored.
struct ExpertForm {
  ExpertForm(Dtype rows_of) : dtype(rows_of) {}  // NOLINT(google-explicit-constructor): a dtype is a form
  ExpertForm(bool is_mxfp4, bool is_interleaved, bool with_bias)
      : mxfp4(is_mxfp4), interleaved(is_interleaved), bias(with_bias) {}
  Dtype dtype = Dtype::kBf16;
  bool mxfp4 = false;
  bool interleaved =
      false;  // gate in the even rows of its matrix, up in the odd ones of its own; the others are poison
  bool bias = false;
};

inline std::vector<ExpertForm> all_forms() {
  std::vector<ExpertForm> forms;
  for (const bool mxfp4 : {false, true}) {
    for (const bool interleaved : {false, true}) {
      forms.emplace_back(mxfp4, interleaved, interleaved != mxfp4);
    }
  }
  return forms;
}
inline std::string form_name(const ExpertForm& form) {
  return std::string(form.mxfp4 ? "mxfp4" : dtype_name(form.dtype)) + (form.interleaved ? " interleaved" : "") +
         (form.bias ? " bias" : "");
}

struct ExpertSet {
  // Row n is stored row `first` + n * step, step 2 where the form interleaves and `can_interleave`.
  ExpertSet(int32_t num_experts, int32_t rows, int32_t cols, const ExpertForm& form, Draw& draw, int32_t first = 0,
            bool can_interleave = false)
      : first_row(first * (form.interleaved && can_interleave ? 1 : 0)) {
    const int32_t step = form.interleaved && can_interleave ? 2 : 1;
    for (int32_t e = 0; e < num_experts; ++e) {
      if (form.mxfp4) {
        packed.emplace_back(rows * step, cols, draw);
      } else {
        experts.emplace_back(rows * step, cols, form.dtype, draw);
      }
      for (int32_t n = 0; step == 2 && n < rows; ++n) {
        const int32_t other = 2 * n + 1 - first_row;
        form.mxfp4 ? packed.back().poison(other) : experts.back().poison(other);
      }
    }
    if (form.bias) {
      bias = draw.floats(static_cast<size_t>(num_experts) * static_cast<size_t>(rows));
    }
    view.row_step = step;
    view.rows = rows;
    view.cols = cols;
    view.dtype = form.dtype;
    view.format = form.mxfp4 ? ExpertFormat::kMxfp4Rows : ExpertFormat::kRows;
    point();
  }
  void point() {
    pointers.clear();
    scales.clear();
    const auto row_bytes = static_cast<int64_t>(dtype_bytes(view.dtype)) * view.cols;
    for (const StoredMatrix& expert : experts) {
      pointers.push_back(static_cast<const char*>(expert.data()) + first_row * row_bytes);
    }
    for (Mxfp4Matrix& expert : packed) {
      pointers.push_back(expert.nibbles(first_row));
      scales.push_back(expert.scales(first_row));
    }
    view.data = pointers.data();
    view.scales = packed.empty() ? nullptr : scales.data();
    view.bias = bias.empty() ? nullptr : bias.data();
  }
  [[nodiscard]] double at(int32_t e, int32_t n, int32_t k) const {
    const int32_t row = first_row + n * view.row_step;
    return packed.empty() ? experts[static_cast<size_t>(e)].at(row, k) : packed[static_cast<size_t>(e)].at(row, k);
  }
  [[nodiscard]] double bias_at(int32_t e, int32_t n) const {
    return bias.empty() ? 0.0 : static_cast<double>(bias[static_cast<size_t>(e * view.rows + n)]);
  }
  // The same numbers as rows of `dtype`, without gaps.
  void unpack(Dtype dtype) {
    for (size_t e = 0; e < packed.size(); ++e) {
      experts.emplace_back(view.rows, view.cols, dtype,
                           [&](int32_t n, int32_t k) { return at(static_cast<int32_t>(e), n, k); });
    }
    packed.clear();
    first_row = 0;
    view.row_step = 1;
    view.dtype = dtype;
    view.format = ExpertFormat::kRows;
    point();
  }
  int32_t first_row;
  std::vector<StoredMatrix> experts;
  std::vector<Mxfp4Matrix> packed;
  std::vector<float> bias;
  std::vector<const void*> pointers;
  std::vector<const uint8_t*> scales;
  ExpertWeights view;
};

struct MoeCase {
  static constexpr int32_t kLayer = 1;
  static constexpr int32_t kLayers = 2;

  MoeCase(const ExpertForm& form, int32_t hidden_width, int32_t intermediate_width, int32_t experts, int32_t choices,
          int32_t rows, uint32_t seed)
      : hidden(hidden_width),
        intermediate(intermediate_width),
        num_experts(experts),
        top_k(choices),
        num_rows(rows),
        draw(seed),
        gate(experts, intermediate, hidden, form, draw, 0, true),
        up(experts, intermediate, hidden, form, draw, 1, true),
        down(experts, hidden, intermediate, form, draw),
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
    double sum = set.bias_at(e, n) + (pair != nullptr ? factor * pair->bias_at(n) : 0.0);
    for (int32_t k = 0; k < set.view.cols; ++k) {
      const double merged = set.at(e, n, k) + (pair != nullptr ? pair->delta(n, k, factor) : 0.0);
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
  MoeActivation activation = MoeActivation::kSilu;
  float limit = 0.0f;
  bool intact = true;
};

}  // namespace moelora::test
