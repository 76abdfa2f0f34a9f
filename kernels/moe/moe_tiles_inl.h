// SPDX-License-Identifier: Apache-2.0
// What moe_gate_up and moe_down share: which adapter spans a step has, the shrink of their pairs, and the walk
// over (active expert, tile of outputs) by ticket. A span is a run of sorted pairs with one expert and one
// adapter; its pairs own consecutive shrunk rows, so a tile finds them by binary search.
#if defined(MOELORA_KERNELS_MOE_MOE_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_MOE_MOE_TILES_INL_H_
#undef MOELORA_KERNELS_MOE_MOE_TILES_INL_H_
#else
#define MOELORA_KERNELS_MOE_MOE_TILES_INL_H_
#endif

#include "kernels/dense/tile_inl.h"
#include "kernels/lora/lora_inl.h"
#include "kernels/moe/moe_gate_up.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

struct LoraSpan {
  int32_t begin;  // sorted pairs
  int32_t end;
  int32_t first;  // shrunk row of pair `begin`
  int32_t expert;
  int32_t slot;
};
// One span lies in the place of at least one shrunk row of 16 floats.
static_assert(sizeof(LoraSpan) <= 16 * sizeof(float));

struct ExpertLora {
  const LoraBatch* batch = nullptr;  // null: no pair has an adapter
  const LoraSpan* spans = nullptr;
  int32_t num_spans = 0;
  int32_t num_pairs = 0;  // in spans
  int32_t layer = 0;
  float* shrunk = nullptr;  // [module][pairs in spans, stride]
  int64_t stride = 0;

  [[nodiscard]] float* row(int32_t module, int32_t index) const {
    return shrunk + (static_cast<int64_t>(module) * num_pairs + index) * stride;
  }
};

// Lays the list of spans and `modules` sets of shrunk rows into `memory`, which has room for three sets.
inline ExpertLora find_spans(const LoraBatch* batch, const MoeOrder& order, int32_t layer, std::byte* memory) {
  ExpertLora lora;
  if (batch == nullptr || batch->num_rows == 0) {
    return lora;
  }
  auto* spans = reinterpret_cast<LoraSpan*>(memory);
  for (int32_t s = 0; s < *order.num_segments; ++s) {
    if (order.segment_slot[s] == 0) {
      continue;
    }
    spans[lora.num_spans++] = {order.segment_begin[s], order.segment_begin[s + 1], lora.num_pairs,
                               order.segment_expert[s], order.segment_slot[s]};
    lora.num_pairs += order.segment_begin[s + 1] - order.segment_begin[s];
  }
  if (lora.num_pairs == 0) {
    return lora;
  }
  lora.batch = batch;
  lora.spans = spans;
  lora.layer = layer;
  lora.stride = shrunk_stride(batch->max_rank);
  lora.shrunk = reinterpret_cast<float*>(memory) + lora.num_pairs * lora.stride;
  return lora;
}

// The first span that ends after `pair`.
inline int32_t span_at(const ExpertLora& lora, int32_t pair) {
  const LoraSpan* at = std::upper_bound(lora.spans, lora.spans + lora.num_spans, pair,
                                        [](int32_t value, const LoraSpan& span) { return value < span.end; });
  return static_cast<int32_t>(at - lora.spans);
}

inline int32_t span_of_row(const ExpertLora& lora, int32_t index) {
  const LoraSpan* at = std::upper_bound(lora.spans, lora.spans + lora.num_spans, index,
                                        [](int32_t value, const LoraSpan& span) { return value < span.first; });
  return static_cast<int32_t>(at - lora.spans) - 1;
}

// Shrinks eight ranks (`panel`) of shrunk row `index` of `module`; x(pair) gives the pair's activations.
template <class RowOfPair>
HWY_INLINE void shrink_pair(const ExpertLora& lora, int32_t index, ExpertModule module, int32_t set, int32_t panel,
                            int32_t k, const RowOfPair& x) {
  const LoraSpan& span = lora.spans[span_of_row(lora, index)];
  const LoraRecord* record = lora.batch->table.expert(span.slot, lora.layer, span.expert, module);
  if (record == nullptr || panel * kTileRanks >= record->rank) {
    return;
  }
  const float* const from = x(span.begin + index - span.first);
  float* const to = lora.row(set, index) + panel * kTileRanks;
  shrink_panel(lora.batch->table, span.slot, *record, panel, &from, 1, k, &to);
}

// Adds the deltas of `count` pairs from `first` on to a tile of `outputs` sums from output n of `width` on.
HWY_INLINE void expand_pairs(const ExpertLora& lora, const MoeOrder& order, ExpertModule module, int32_t set,
                             int32_t width, int32_t n, int32_t outputs, int32_t first, int32_t count, float* sums) {
  for (int32_t s = span_at(lora, first); s < lora.num_spans && lora.spans[s].begin < first + count; ++s) {
    const LoraSpan& span = lora.spans[s];
    const LoraRecord* record = lora.batch->table.expert(span.slot, lora.layer, span.expert, module);
    if (record == nullptr) {
      continue;
    }
    const Granules b = granules_of_b(lora.batch->table, span.slot, *record, width);
    const int32_t end = std::min(span.end, first + count);
    for (int32_t pair = std::max(span.begin, first); pair < end;) {
      LoraSums rows[kLoraRows];
      int32_t num_rows = 0;
      for (; pair < end && num_rows < kLoraRows; ++pair) {
        const float scale = lora.batch->row_scale[order.pair_row[pair]] * record->scale;
        if (scale != 0.0f) {
          rows[num_rows++] = {lora.row(set, span.first + pair - span.begin), sums + (pair - first) * kTileOutputs,
                              scale};
        }
      }
      if (num_rows > 0) {
        expand_add(lora.batch->table, span.slot, *record, b, rows, num_rows, n, outputs);
      }
    }
  }
}

// Maps ascending tickets to (expert with pairs, tile); one cursor a worker.
struct ExpertCursor {
  int32_t expert = 0;
  int32_t first_ticket = 0;
  // The expert of `ticket`; tickets asked for never fall.
  void seek(const int32_t* expert_begin, int32_t tiles, int32_t ticket) {
    while (expert_begin[expert + 1] == expert_begin[expert] || ticket >= first_ticket + tiles) {
      if (expert_begin[expert + 1] != expert_begin[expert]) {
        first_ticket += tiles;
      }
      ++expert;
    }
  }
};

inline int32_t active_experts(const int32_t* expert_begin, int32_t num_experts) {
  int32_t active = 0;
  for (int32_t e = 0; e < num_experts; ++e) {
    active += expert_begin[e + 1] != expert_begin[e];
  }
  return active;
}

// Whether most pairs belong to experts with so many that tiles should go the way of outer_inl.h.
inline bool many_rows(const int32_t* expert_begin, int32_t num_experts) {
  int64_t many = 0;
  for (int32_t e = 0; e < num_experts; ++e) {
    const int32_t count = expert_begin[e + 1] - expert_begin[e];
    if (count > kClassesRows) {
      many += count;
    }
  }
  return 2 * many > expert_begin[num_experts];
}

inline Stored stored_as(const ExpertWeights& weights) {
  return weights.format == ExpertFormat::kMxfp4Rows ? Stored::kMxfp4 : stored_as(weights.dtype);
}

// Rows [n, n + outputs) of an expert's matrix; no tile if expert < 0.
inline TileWeights expert_tile(const ExpertWeights* const* matrices, int32_t count, int32_t expert, int32_t n,
                               int32_t outputs) {
  TileWeights tile;
  if (expert < 0) {
    return tile;
  }
  tile.matrices = count;
  tile.count = std::min(outputs, matrices[0]->rows - n);
  for (int32_t m = 0; m < count; ++m) {
    const ExpertWeights& weights = *matrices[m];
    StoredRows& rows = tile.rows[m];
    rows.stride = weights.row_step * stored_bytes(stored_as(weights), weights.cols);
    rows.first = static_cast<const uint8_t*>(weights.data[expert]) + n * rows.stride;
    if (weights.format == ExpertFormat::kMxfp4Rows) {
      rows.scale_stride = weights.row_step * (weights.cols / 32);
      rows.scales = weights.scales[expert] + n * rows.scale_stride;
    }
  }
  return tile;
}

template <class Finish>
HWY_INLINE void run_expert_tile(const ExpertWeights& weights, const TileWeights& tile, const TileRows& rows,
                                const TileWeights& next, std::byte* scratch, const Finish& finish) {
  if (weights.format == ExpertFormat::kMxfp4Rows) {
    return run_tile<Stored::kMxfp4>(tile, rows, weights.cols, next, scratch, finish);
  }
  run_tile(weights.dtype, tile, rows, weights.cols, next, scratch, finish);
}

// Adds the expert's bias to a tile of `outputs` sums from output n on.
HWY_INLINE void add_bias(const ExpertWeights& weights, int32_t expert, int32_t n, int32_t outputs, int32_t count,
                         float* sums) {
  if (weights.bias == nullptr) {
    return;
  }
  const float* bias = weights.bias + static_cast<int64_t>(expert) * weights.rows + n;
  for (int32_t r = 0; r < count; ++r, sums += kTileOutputs) {
    for (int32_t j = 0; j < outputs; ++j) {
      sums[j] += bias[j];
    }
  }
}

// task(ticket, expert, tile, next expert or -1, next tile, worker) for every tile of every expert that has pairs.
template <class Task>
void for_each_expert_tile(Stream& stream, const int32_t* expert_begin, int32_t num_experts, int32_t tiles,
                          const Task& task) {
  const int32_t tickets = active_experts(expert_begin, num_experts) * tiles;
  std::atomic<int32_t> shared{0};
  stream.parallel([&](int worker) HWY_ATTR {
    ExpertCursor here;
    int32_t ticket = shared.fetch_add(1, std::memory_order_relaxed);
    if (ticket < tickets) {
      here.seek(expert_begin, tiles, ticket);
    }
    while (ticket < tickets) {
      const int32_t next = shared.fetch_add(1, std::memory_order_relaxed);
      ExpertCursor there = here;
      if (next < tickets) {
        there.seek(expert_begin, tiles, next);
      }
      task(ticket, here.expert, ticket - here.first_ticket, next < tickets ? there.expert : -1,
           next - there.first_ticket, worker);
      here = there;
      ticket = next;
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_MOE_MOE_TILES_INL_H_
