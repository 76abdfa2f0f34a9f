// SPDX-License-Identifier: Apache-2.0
// LoRA as loops: the two products of one row with one record of an adapter, read tile by tile through the page
// table exactly as adapter_layout.h describes the stream. The reference linear, moe_gate_up and moe_down call it
// before adding their base result. Sums in double. Not for speed: every element is looked up on its own.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/lora/adapter_layout.h"

namespace moelora {

// One linear of one row as its adapter sees it. record == null, or scale == 0: the row keeps the base's bits.
struct LoraRow {
  const AdapterTable* table = nullptr;
  const LoraRecord* record = nullptr;
  int32_t slot = 0;
  float scale = 0.0f;  // row_scale * record.scale
  [[nodiscard]] bool active() const { return record != nullptr && scale != 0.0f; }
};

// `lora` may be null.
LoraRow lora_row_dense(const LoraBatch* lora, int32_t row, int32_t layer, LoraModule module);
LoraRow lora_row_expert(const LoraBatch* lora, int32_t row, int32_t layer, int32_t expert, ExpertModule module);

// Throws if the workers' scratch cannot hold `count` shrunk rows; ops call it before they start tasks.
void check_lora_scratch(const LoraBatch* lora, const Stream& stream, size_t count = 1);

// shrunk[r] = sum_k A[r, k] x[k] for r < record.rank.
void lora_shrink_reference(const LoraRow& row, const float* x, int32_t k, float* shrunk);

// y + scale * sum_r B[n, r] shrunk[r] + scale * lora_bias[n]; y itself if the row is not active.
float lora_expand_reference(const LoraRow& row, const float* shrunk, int32_t n, float y);

}  // namespace moelora
