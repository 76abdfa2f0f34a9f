// SPDX-License-Identifier: Apache-2.0
// Random weights and adapters in OLMoE-1B-7B's layer shape (or gpt-oss-20b's, experts in MXFP4), and the arrays that
// one layer's ops of a step need.
// op_bench runs the ops of a layer on it as the engine would, without engine, attention context or sampling.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"

namespace moelora {

struct BenchShape {
  int32_t hidden = 2048;
  int32_t intermediate = 1024;
  int32_t num_experts = 64;
  int32_t top_k = 8;
  int32_t vocab = 50304;
  int32_t layers = 2;
  int32_t adapters = 8;
  int32_t rank = 16;
  bool mxfp4 = false;  // experts, with gate and up in one matrix by turns
};

struct FreeBytes {
  void operator()(std::byte* memory) const;
};
using Bytes = std::unique_ptr<std::byte[], FreeBytes>;

// Zero pages, 4 KiB each as in a mapped file; aligned to a page.
Bytes map_bytes(size_t bytes);

struct BenchLayer {
  Weight q, k, v, o, router;
  std::vector<const void*> gate, up, down;                          // [E]
  std::vector<const uint8_t*> gate_scales, up_scales, down_scales;  // [E], MXFP4
};

struct BenchModel {
  BenchModel(const BenchShape& shape, Stream& stream);

  BenchShape shape;
  Bytes weights;
  size_t weight_bytes = 0;
  std::vector<BenchLayer> layers;
  Weight lm_head;
  size_t scale_begin = 0;  // MXFP4: scales are the last bytes of `weights`
  Bytes adapters;
  std::vector<int32_t> page_table;  // [slots, pages_per_slot]
  AdapterTable table;

 private:
  void place_weights();
  void place_mxfp4(BenchLayer& layer, std::byte* data, std::byte* scales) const;
  void place_adapters(Stream& stream);
};

// Activations and orders of a step of `rows` rows, row t with adapter 1 + t mod adapters.
struct BenchStep {
  BenchStep(const BenchModel& model, int32_t rows, bool lora, uint32_t seed);
  [[nodiscard]] const LoraBatch* lora() const { return with_lora ? &batch : nullptr; }

  int32_t rows;
  bool with_lora;
  std::vector<int32_t> slots, sorted_rows, segment_begin, segment_slot, ids;
  std::vector<float> scales, router_weights;
  LoraBatch batch;
  std::vector<int32_t> pair_row, pair_position, expert_begin, segments, segment_experts, segment_slots, num_segments;
  MoeOrder order;
  Bytes arena;
  Rows x, q, k, v, hidden, logits, act, down, vocab_logits;
  std::byte* scratch = nullptr;
  size_t scratch_bytes = 0;
};

}  // namespace moelora
