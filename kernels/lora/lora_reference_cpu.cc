// SPDX-License-Identifier: Apache-2.0
// Element-wise reader of packed adapters; see lora_reference.h.
#include "kernels/lora/lora_reference.h"

#include "kernels/base/error.h"

namespace moelora {
namespace {

// Element `index` of tile `tile` of the matrix that starts at granule `start`.
double tile_element(const LoraRow& row, int32_t start, int32_t tile, int32_t index) {
  const auto dtype = static_cast<Dtype>(row.record->dtype);
  const std::byte* base = row.table->granule(row.slot, start + tile * tile_granules(dtype));
  return static_cast<double>(load_element(base, dtype, static_cast<size_t>(index)));
}

LoraRow finish(const LoraBatch& lora, int32_t row, int32_t slot, const LoraRecord* record) {
  LoraRow result;
  result.table = &lora.table;
  result.record = record;
  result.slot = slot;
  if (record != nullptr) {
    result.scale = lora.row_scale[row] * record->scale;
  }
  return result;
}

}  // namespace

LoraRow lora_row_dense(const LoraBatch* lora, int32_t row, int32_t layer, LoraModule module) {
  if (lora == nullptr || lora->num_rows == 0 || module == LoraModule::kNone) {
    return {};
  }
  const int32_t slot = lora->row_slot[row];
  return finish(*lora, row, slot, lora->table.dense(slot, layer, module));
}

LoraRow lora_row_expert(const LoraBatch* lora, int32_t row, int32_t layer, int32_t expert, ExpertModule module) {
  if (lora == nullptr || lora->num_rows == 0) {
    return {};
  }
  const int32_t slot = lora->row_slot[row];
  return finish(*lora, row, slot, lora->table.expert(slot, layer, expert, module));
}

void check_lora_scratch(const LoraBatch* lora, const Stream& stream, size_t count) {
  if (lora == nullptr || lora->num_rows == 0) {
    return;
  }
  MOELORA_ASSERT(stream.scratch_bytes() >= count * static_cast<size_t>(lora->max_rank) * sizeof(float));
}

void lora_shrink_reference(const LoraRow& row, const float* x, int32_t k, float* shrunk) {
  const int32_t blocks = ceil_div(k, kTileColumns);
  for (int32_t r = 0; r < row.record->rank; ++r) {
    double sum = 0.0;
    for (int32_t i = 0; i < k; ++i) {
      const int32_t tile = r / kTileRanks * blocks + i / kTileColumns;
      sum += tile_element(row, row.record->a, tile, tile_index_a(r % kTileRanks, i % kTileColumns)) *
             static_cast<double>(x[i]);
    }
    shrunk[r] = static_cast<float>(sum);
  }
}

float lora_expand_reference(const LoraRow& row, const float* shrunk, int32_t n, float y) {
  if (!row.active()) {
    return y;
  }
  const int32_t panels = ceil_div(row.record->rank, kTileRanks);
  double sum = 0.0;
  for (int32_t r = 0; r < row.record->rank; ++r) {
    const int32_t tile = n / kTileColumns * panels + r / kTileRanks;
    sum += tile_element(row, row.record->b, tile, tile_index_b(r % kTileRanks, n % kTileColumns)) *
           static_cast<double>(shrunk[r]);
  }
  y += row.scale * static_cast<float>(sum);
  if (row.record->bias >= 0) {
    constexpr int32_t kPerGranule = kGranuleBytes / sizeof(float);
    const std::byte* granule = row.table->granule(row.slot, row.record->bias + n / kPerGranule);
    y += row.scale * load_element(granule, Dtype::kF32, static_cast<size_t>(n % kPerGranule));
  }
  return y;
}

}  // namespace moelora
