// SPDX-License-Identifier: Apache-2.0
// linear on vectors: rows are packed and adapter rows shrunk first (phase one), then workers take tiles of
// outputs by ticket; each tile adds its part of the LoRA expand, the bias and the old output while its sums
// are in cache. Parts whose dtypes need another pack order are done after the others. Bits: see dot_inl.h.
#include <new>

#include "kernels/base/simd_targets.h"
#include "kernels/dense/linear.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dense/linear_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#if HWY_TARGET != HWY_SCALAR
#include "kernels/dense/tile_inl.h"
#include "kernels/lora/lora_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {
namespace {

struct LinearPlan {
  const LinearArgs* args;
  PackOrder order;
  bool by_classes;   // many rows: tiles go the way of outer_inl.h
  float* packed;     // [T, padded_k]
  float* shrunk;     // [part][lora rows, stride]
  int64_t stride;    // of shrunk rows
  int32_t outputs;   // of a tile
  int32_t part[3];   // parts of this pass
  int32_t begin[4];  // first ticket of each of them, and the end
  int32_t num_parts;
  int32_t item_rows;    // adapter rows of an item of phase one
  int32_t part_groups;  // 1: an item has them for all parts; else num_parts
  bool lora;          // any part of this pass adapted
};

// What adapts the rows of one adapter in a part; record is null if nothing does.
struct LoraTarget {
  const LoraRecord* record = nullptr;
  int32_t slot = 0;
};
// The same for one row, beside its shrunk row: phase one writes it, so that the tiles need not look it up.
struct AdapterRow {
  const LoraRecord* record = nullptr;
  float scale = 0.0f;
  int32_t slot = 0;
  Granules b;
};
static_assert(sizeof(AdapterRow) <= kShrunkBeside * sizeof(float));

LoraTarget lora_target(const LinearArgs& args, int32_t part, int32_t slot) {
  const LoraModule module = args.parts[part].module;
  return {module == LoraModule::kNone ? nullptr : args.lora->table.dense(slot, args.layer, module), slot};
}

float* shrunk_row(const LinearPlan& plan, int32_t part, int32_t index) {
  return plan.shrunk + (static_cast<int64_t>(part) * plan.args->lora->num_rows + index) * plan.stride;
}

std::byte* beside_shrunk(const LinearPlan& plan, int32_t part, int32_t index) {
  return reinterpret_cast<std::byte*>(shrunk_row(plan, part, index) + plan.stride - kShrunkBeside);
}

// Shrinks eight ranks of the adapter rows begin .. end - 1 of a part, at most kLoraRows, which share an adapter.
void shrink(const LinearPlan& plan, const LoraTarget& target, int32_t part, int32_t panel, int32_t begin, int32_t end,
            ReadSpans::Span next) {
  const LinearArgs& args = *plan.args;
  const LoraBatch& lora = *args.lora;
  const float* x[kLoraRows];
  float* shrunk[kLoraRows];
  int32_t count = 0;
  for (int32_t index = begin; index < end; ++index) {
    const int32_t row = lora.sorted_rows[index];
    const float scale = target.record == nullptr ? 0.0f : lora.row_scale[row] * target.record->scale;
    const LoraRecord* const record = scale == 0.0f ? nullptr : target.record;
    if (panel == 0) {
      AdapterRow& kept = *new (beside_shrunk(plan, part, index)) AdapterRow{record, scale, target.slot, {}};
      if (record != nullptr) {
        kept.b = granules_of_b(lora.table, target.slot, *record, args.parts[part].weight.rows);
      }
    }
    if (record != nullptr) {
      x[count] = args.x.row(row);
      shrunk[count++] = shrunk_row(plan, part, index) + panel * kTileRanks;
    }
  }
  if (count > 0 && panel * kTileRanks < target.record->rank) {
    shrink_panel(lora.table, target.slot, *target.record, panel, x, count, args.k, shrunk, next);
  }
}

// One item of phase one: packs row `item`, or shrinks eight ranks of some adapter rows, of one part or part after part
// of each adapter, whose matrices lie near each other. Of many adapters every matrix comes from memory: the next is
// asked for while one is multiplied.
void prepare(const LinearPlan& plan, int32_t item, std::byte* scratch) {
  const LinearArgs& args = *plan.args;
  if (item < args.num_rows) {
    pack_tile_row(args.x.row(item), args.k, plan.order, args.compute, plan.by_classes,
                  plan.packed + item * padded_k(args.k), scratch);
    return;
  }
  const LoraBatch& lora = *args.lora;
  const int32_t panels = ceil_div(lora.max_rank, kTileRanks);
  const int32_t shrinks = item - args.num_rows;
  const int32_t panel = shrinks % panels;
  const int32_t num_parts = plan.num_parts / plan.part_groups;
  const int32_t* const parts = plan.part + shrinks / panels % plan.part_groups * num_parts;
  const int32_t first = shrinks / panels / plan.part_groups * plan.item_rows;
  const int32_t end = std::min(first + plan.item_rows, lora.num_rows);
  const auto slot_of = [&](int32_t index) { return lora.row_slot[lora.sorted_rows[index]]; };
  LoraTarget target = lora_target(args, parts[0], slot_of(first));
  for (int32_t begin = first, next = first; begin < end; begin = next) {
    while (next < end && slot_of(next) == target.slot) {
      ++next;
    }
    for (int32_t p = 0; p < num_parts; ++p) {
      LoraTarget ahead = target;
      if (p + 1 < num_parts) {
        ahead = lora_target(args, parts[p + 1], target.slot);
      } else if (next < lora.num_rows) {
        ahead = lora_target(args, parts[0], slot_of(next));
      }
      ReadSpans::Span span{};
      if (ahead.record != nullptr && ahead.record != target.record && panel * kTileRanks < ahead.record->rank) {
        span = span_of_shrink(lora.table, ahead.slot, *ahead.record, panel, args.k);
      }
      for (int32_t at = begin; at < next; at += kLoraRows, span.bytes = 0) {
        shrink(plan, target, parts[p], panel, at, std::min(at + kLoraRows, next), span);
      }
      target = ahead;
    }
  }
}

// Some rows of one adapter, at most kLoraRows.
struct LoraRun {
  const AdapterRow* row = nullptr;  // the first
  LoraSums sums[kLoraRows];
  int32_t count = 0;
};
// The run that begins at indices[at] and ends before `end`; moves `at` behind it.
HWY_INLINE LoraRun next_run(const LinearPlan& plan, int32_t part, int32_t first, const int32_t* indices, int32_t end,
                            float* sums, int32_t& at) {
  const LoraBatch& lora = *plan.args->lora;
  LoraRun run;
  for (; at < end && run.count < kLoraRows; ++at) {
    const int32_t index = indices[at];
    const auto* const row = reinterpret_cast<const AdapterRow*>(beside_shrunk(plan, part, index));
    if (row->record == nullptr) {
      continue;
    }
    if (run.row == nullptr) {
      run.row = row;
    } else if (row->slot != run.row->slot) {
      break;
    }
    const int32_t sum = (lora.sorted_rows[index] - first) * kTileOutputs;
    run.sums[run.count++] = {shrunk_row(plan, part, index), sums + sum, row->scale};
  }
  return run;
}

// Rows first .. first + count - 1 of the batch; count <= kTileRows.
void add_lora(const LinearPlan& plan, int32_t part, int32_t n, int32_t outputs, int32_t first, int32_t count,
              float* sums) {
  const LoraBatch& lora = *plan.args->lora;
  // Which of the sorted rows are here follows no pattern where adapters are many: chosen without a branch.
  int32_t indices[kTileRows + 1];
  int32_t end = 0;
  for (int32_t index = 0; index < lora.num_rows; ++index) {
    indices[end] = index;
    const int32_t at = lora.sorted_rows[index] - first;
    end += static_cast<int32_t>(static_cast<uint32_t>(at) < static_cast<uint32_t>(count));
  }
  // One behind, so that what a row needs is on its way while the row before it is done.
  int32_t at = 0;
  for (LoraRun run = next_run(plan, part, first, indices, end, sums, at); run.row != nullptr;) {
    const LoraRun next = next_run(plan, part, first, indices, end, sums, at);
    if (next.row != nullptr && next.row->slot != run.row->slot) {
      prefetch_expand(*next.row->record, next.row->b, n, outputs);
    }
    expand_add(lora.table, run.row->slot, *run.row->record, run.row->b, run.sums, run.count, n, outputs);
    run = next;
  }
}

// Bias and the old output, then the store.
void store(const LinearArgs& args, const LinearPart& part, int32_t n, int32_t outputs, int32_t first, int32_t count,
           float* sums) {
  alignas(64) float bias[kTileOutputs];
  if (!part.bias.empty()) {
    for (int32_t j = 0; j < outputs; ++j) {
      bias[j] = load_element(part.bias.data, part.bias.dtype, static_cast<size_t>(n + j));
    }
  }
  for (int32_t r = 0; r < count; ++r) {
    float* from = sums + r * kTileOutputs;
    float* to = part.out.row(first + r) + n;
    if (!part.bias.empty()) {
      for (int32_t j = 0; j < outputs; ++j) {
        from[j] += bias[j];
      }
    }
    if (args.accumulate) {
      for (int32_t j = 0; j < outputs; ++j) {
        to[j] += from[j];
      }
    } else {
      std::memcpy(to, from, static_cast<size_t>(outputs) * sizeof(float));
    }
  }
}

struct Tile {
  TileWeights weights;
  int32_t part = 0;
  int32_t n = 0;
};

Tile tile_at(const LinearPlan& plan, int32_t ticket) {
  if (ticket >= plan.begin[plan.num_parts]) {
    return {};
  }
  int32_t at = 0;
  while (ticket >= plan.begin[at + 1]) {
    ++at;
  }
  const Weight& weight = plan.args->parts[plan.part[at]].weight;
  const int32_t n = (ticket - plan.begin[at]) * plan.outputs;
  const int64_t row_bytes = plan.args->k * static_cast<int64_t>(dtype_bytes(weight.dtype));
  TileWeights weights;
  weights.rows[0].first = static_cast<const uint8_t*>(weight.data) + n * row_bytes;
  weights.rows[0].stride = row_bytes;
  weights.matrices = 1;
  weights.count = std::min(plan.outputs, weight.rows - n);
  return {weights, plan.part[at], n};
}

// What the adapters of the batch will add to a tile.
void add_expands(const LinearPlan& plan, const Tile& tile, ReadSpans& spans) {
  const LoraBatch& lora = *plan.args->lora;
  for (int32_t s = 0; s < lora.num_segments; ++s) {
    const auto& row = *reinterpret_cast<const AdapterRow*>(beside_shrunk(plan, tile.part, lora.segment_begin[s]));
    if (row.record != nullptr) {
      const ReadSpans::Span span = span_of_expand(*row.record, row.b, tile.n, tile.weights.count);
      spans.add(span.first, span.bytes);
    }
  }
}

void run_tiles(const LinearPlan& plan, Stream& stream) {
  const LinearArgs& args = *plan.args;
  for_each_ticket(stream, plan.begin[plan.num_parts], [&](int32_t ticket, int32_t next, int worker) HWY_ATTR {
    const Tile tile = tile_at(plan, ticket);
    Tile ahead = tile_at(plan, next);
    ReadSpans beside;
    if (plan.lora && ahead.weights.matrices > 0) {
      add_expands(plan, ahead, beside);
    }
    add_shrinks_ahead(args.ahead, ticket, plan.begin[plan.num_parts], beside);
    ahead.weights.beside = &beside;
    const LinearPart& part = args.parts[tile.part];
    const TileRows rows{plan.packed, padded_k(args.k), plan.by_classes, nullptr, 0, args.num_rows};
    run_tile(part.weight.dtype, tile.weights, rows, args.k, ahead.weights, stream.scratch(worker),
             [&](int32_t first, int32_t count, float* const* sums) HWY_ATTR {
               const int32_t outputs = tile.weights.count;
               if (plan.lora) {
                 add_lora(plan, tile.part, tile.n, outputs, first, count, sums[0]);
               }
               store(args, part, tile.n, outputs, first, count, sums[0]);
             });
  });
}

void run_pass(const LinearArgs& args, PackOrder order, Stream& stream) {
  LinearPlan plan{};
  plan.args = &args;
  plan.order = order;
  int64_t total = 0;
  for (int32_t p = 0; p < args.num_parts; ++p) {
    total += args.parts[p].weight.rows;
  }
  plan.by_classes = args.num_rows > kClassesRows;
  // Each tile goes through all rows and their adapters: with many rows, as few tiles as workers of unlike speed allow.
  const int tiles = args.num_rows > kInPlaceRows ? 8 : 32;
  plan.outputs = tile_outputs(args.k, 1, plan.by_classes, total, stream.num_threads(), tiles);
  const bool lora = args.lora != nullptr && args.lora->num_rows > 0 && args.lora->max_rank > 0;
  for (int32_t p = 0; p < args.num_parts; ++p) {
    if (pack_order(stored_as(args.parts[p].weight.dtype)) != order) {
      continue;
    }
    plan.part[plan.num_parts] = p;
    plan.begin[plan.num_parts + 1] = plan.begin[plan.num_parts] + ceil_div(args.parts[p].weight.rows, plan.outputs);
    ++plan.num_parts;
    plan.lora = plan.lora || (lora && args.parts[p].module != LoraModule::kNone);
  }
  if (plan.num_parts == 0) {
    return;
  }
  plan.packed = reinterpret_cast<float*>(args.scratch);
  plan.shrunk = plan.packed + args.num_rows * padded_k(args.k);
  int32_t items = args.num_rows;
  if (plan.lora) {
    plan.stride = shrunk_stride(args.lora->max_rank);
    // Few rows are handed out one by one, so that every worker has some.
    plan.item_rows = args.lora->num_rows >= 16 * stream.num_threads() ? 2 * kLoraRows : 1;
    plan.part_groups = plan.item_rows == 1 ? plan.num_parts : 1;
    items += ceil_div(args.lora->num_rows, plan.item_rows) * plan.part_groups *
             ceil_div(args.lora->max_rank, kTileRanks);
  }
  stream.parallel_for(static_cast<size_t>(items), [&](size_t item, int worker) HWY_ATTR {
    prepare(plan, static_cast<int32_t>(item), stream.scratch(worker));
  });
  run_tiles(plan, stream);
}

void linear_target(const LinearArgs& args, Stream& stream) {
  run_pass(args, PackOrder::kSplit, stream);
  run_pass(args, PackOrder::kNatural, stream);
}

}  // namespace
// Every target has its own size of tile scratch.
size_t linear_worker_bytes() {
  return kTileScratchBytes;
}
void linear_dispatch(const LinearArgs& args, Stream& stream) {
  linear_target(args, stream);
}
}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();
#else
namespace moelora::HWY_NAMESPACE {
size_t linear_worker_bytes() {
  return 0;
}
void linear_dispatch(const LinearArgs& args, Stream& stream) {
  linear_cpu(args, stream);
}
}  // namespace moelora::HWY_NAMESPACE
#endif

#if HWY_ONCE
namespace moelora {

HWY_EXPORT(linear_dispatch);
HWY_EXPORT(linear_worker_bytes);

void linear_simd(const LinearArgs& args, Stream& stream) {
  if (args.num_rows == 0) {
    return;
  }
  const bool lora = args.lora != nullptr && args.lora->num_rows > 0;
  MOELORA_ASSERT(stream.scratch_bytes() >= HWY_DYNAMIC_DISPATCH(linear_worker_bytes)());
  MOELORA_ASSERT(args.scratch_bytes >= linear_scratch_bytes(static_cast<size_t>(args.num_rows),
                                                            static_cast<size_t>(args.k),
                                                            static_cast<size_t>(lora ? args.lora->num_rows : 0),
                                                            static_cast<size_t>(lora ? args.lora->max_rank : 0)));
  HWY_DYNAMIC_DISPATCH(linear_dispatch)(args, stream);
}

}  // namespace moelora
#endif  // HWY_ONCE
