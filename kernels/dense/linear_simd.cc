// SPDX-License-Identifier: Apache-2.0
// linear on vectors: rows are packed and adapter rows shrunk first (phase one), then workers take tiles of
// outputs by ticket; each tile adds its part of the LoRA expand, the bias and the old output while its sums
// are in cache. Parts whose dtypes need another pack order are done after the others. Bits: see dot_inl.h.
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
  bool lora;  // any part of this pass adapted
};

struct LoraTarget {
  const LoraRecord* record;
  int32_t slot;
  float scale;
};

// What adapts row `row` in `part`; record is null if nothing does.
LoraTarget lora_target(const LinearArgs& args, int32_t part, int32_t row) {
  const LoraBatch& lora = *args.lora;
  const int32_t slot = lora.row_slot[row];
  const LoraModule module = args.parts[part].module;
  if (module == LoraModule::kNone) {
    return {nullptr, 0, 0.0f};
  }
  const LoraRecord* record = lora.table.dense(slot, args.layer, module);
  const float scale = record == nullptr ? 0.0f : lora.row_scale[row] * record->scale;
  return {scale == 0.0f ? nullptr : record, slot, scale};
}

float* shrunk_row(const LinearPlan& plan, int32_t part, int32_t index) {
  return plan.shrunk + (static_cast<int64_t>(part) * plan.args->lora->num_rows + index) * plan.stride;
}

// One item of phase one: packs row `item`, or shrinks eight ranks of an adapter row of a part.
void prepare(const LinearPlan& plan, int32_t item, std::byte* scratch) {
  const LinearArgs& args = *plan.args;
  if (item < args.num_rows) {
    pack_tile_row(args.x.row(item), args.k, plan.order, args.compute, plan.by_classes,
                  plan.packed + item * padded_k(args.k), scratch);
    return;
  }
  const int32_t panels = ceil_div(args.lora->max_rank, kTileRanks);
  const int32_t shrink = item - args.num_rows;
  const int32_t panel = shrink % panels;
  const int32_t part = plan.part[shrink / panels % plan.num_parts];
  const int32_t index = shrink / panels / plan.num_parts;
  const int32_t row = args.lora->sorted_rows[index];
  const LoraTarget target = lora_target(args, part, row);
  if (target.record == nullptr || panel * kTileRanks >= target.record->rank) {
    return;
  }
  shrink_panel(args.lora->table, target.slot, *target.record, panel, args.x.row(row), args.k,
               shrunk_row(plan, part, index));
}

void add_lora(const LinearPlan& plan, int32_t part, int32_t n, int32_t outputs, int32_t first, int32_t count,
              float* sums) {
  const LoraBatch& lora = *plan.args->lora;
  // One behind, so that what a row needs is on its way while the row before it is done.
  LoraTarget target{};
  int32_t target_index = 0;
  for (int32_t index = 0; index <= lora.num_rows; ++index) {
    LoraTarget next{};
    if (index < lora.num_rows) {
      const int32_t row = lora.sorted_rows[index];
      if (row < first || row >= first + count) {
        continue;
      }
      next = lora_target(*plan.args, part, row);
      if (next.record == nullptr) {
        continue;
      }
      prefetch_expand(lora.table, next.slot, *next.record, n, outputs);
    }
    if (target.record != nullptr) {
      expand_add(lora.table, target.slot, *target.record, target.scale, shrunk_row(plan, part, target_index), n,
                 outputs, sums + (lora.sorted_rows[target_index] - first) * kTileOutputs);
    }
    target = next;
    target_index = index;
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

void run_tiles(const LinearPlan& plan, Stream& stream) {
  const LinearArgs& args = *plan.args;
  for_each_ticket(stream, plan.begin[plan.num_parts], [&](int32_t ticket, int32_t next, int worker) HWY_ATTR {
    const Tile tile = tile_at(plan, ticket);
    const Tile ahead = tile_at(plan, next);
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
  plan.outputs = tile_outputs(args.k, 1, plan.by_classes, total, stream.num_threads());
  const bool lora = args.lora != nullptr && args.lora->num_rows > 0;
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
    items += args.lora->num_rows * plan.num_parts * ceil_div(args.lora->max_rank, kTileRanks);
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
