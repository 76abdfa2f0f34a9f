// SPDX-License-Identifier: Apache-2.0
// moe_down on vectors: the sorted pairs' activations are packed and the adapters' pairs shrunk (phase one); then
// workers take (active expert, tile of outputs) by ticket and add LoRA and bias in the tile's tail. Bits: see
// dot_inl.h.
#include "kernels/base/simd_targets.h"
#include "kernels/dense/linear.h"
#include "kernels/moe/expert_reference.h"
#include "kernels/moe/moe_down.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/moe_down_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#if HWY_TARGET != HWY_SCALAR
#include "kernels/moe/moe_tiles_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {
namespace {

struct DownPlan {
  const MoeDownArgs* args;
  PackOrder order;
  bool by_classes;  // many rows for most experts
  float* packed;    // [T * K, padded_k]
  ExpertLora lora;
  int32_t outputs;  // of a tile
};

// One item of phase one: packs pair `item`, or shrinks eight ranks of one pair.
void prepare(const DownPlan& plan, int32_t item, std::byte* scratch) {
  const MoeDownArgs& args = *plan.args;
  const int32_t k = args.down.cols;
  const int32_t pairs = args.num_rows * args.top_k;
  if (item < pairs) {
    pack_tile_row(args.act.row(item), k, plan.order, args.compute, plan.by_classes, plan.packed + item * padded_k(k),
                  scratch);
    return;
  }
  const int32_t panels = ceil_div(plan.lora.batch->max_rank, kTileRanks);
  shrink_pair(plan.lora, (item - pairs) / panels, ExpertModule::kDown, 0, (item - pairs) % panels, k,
              [&](int32_t pair) { return args.act.row(pair); });
}

void run_tiles(const DownPlan& plan, Stream& stream) {
  const MoeDownArgs& args = *plan.args;
  const int32_t* begin = args.order.expert_begin;
  const int32_t k = args.down.cols;
  const ExpertWeights* const matrices[1] = {&args.down};
  const int32_t tiles = ceil_div(args.down.rows, plan.outputs);
  const int32_t tickets = active_experts(begin, args.num_experts) * tiles;
  const auto run = [&](int32_t ticket, int32_t expert, int32_t tile, int32_t next_expert, int32_t next_tile,
                       int worker) HWY_ATTR {
    const int32_t n = tile * plan.outputs;
    const TileWeights weights = expert_tile(matrices, 1, expert, n, plan.outputs);
    TileWeights ahead = expert_tile(matrices, 1, next_expert, next_tile * plan.outputs, plan.outputs);
    ReadSpans beside;
    add_shrinks_ahead(args.ahead, ticket, tickets, beside);
    ahead.beside = &beside;
    const int32_t outputs = weights.count;
    const TileRows rows{plan.packed, padded_k(k),   plan.by_classes,
                        nullptr,     begin[expert], begin[expert + 1] - begin[expert]};
    const auto finish = [&](int32_t first, int32_t count, float* const* sums) HWY_ATTR {
      const int32_t pair = begin[expert] + first;
      if (plan.lora.batch != nullptr) {
        expand_pairs(plan.lora, args.order, ExpertModule::kDown, 0, args.down.rows, n, outputs, pair, count, sums[0]);
      }
      add_bias(args.down, expert, n, outputs, count, sums[0]);
      for (int32_t r = 0; r < count; ++r) {
        std::memcpy(args.out.row(pair + r) + n, sums[0] + r * kTileOutputs,
                    static_cast<size_t>(outputs) * sizeof(float));
      }
    };
    run_expert_tile(args.down, weights, rows, ahead, stream.scratch(worker), finish);
  };
  for_each_expert_tile(stream, begin, args.num_experts, tiles, run);
}

}  // namespace
size_t down_worker_bytes() {
  return kTileScratchBytes;
}
void down_dispatch(const MoeDownArgs& args, Stream& stream) {
  const int32_t pairs = args.num_rows * args.top_k;
  DownPlan plan{};
  plan.args = &args;
  plan.order = pack_order(stored_as(args.down));
  const int32_t active = active_experts(args.order.expert_begin, args.num_experts);
  plan.by_classes = many_rows(args.order.expert_begin, args.num_experts);
  plan.outputs = tile_outputs(args.down.cols, 1, plan.by_classes, static_cast<int64_t>(active) * args.down.rows,
                              stream.num_threads());
  plan.packed = reinterpret_cast<float*>(args.scratch);
  plan.lora = find_spans(args.lora, args.order, args.layer, args.scratch + pairs * padded_k(args.down.cols) * 4);
  int32_t items = pairs;
  if (plan.lora.batch != nullptr) {
    items += plan.lora.num_pairs * ceil_div(args.lora->max_rank, kTileRanks);
  }
  stream.parallel_for(static_cast<size_t>(items), [&](size_t item, int worker) HWY_ATTR {
    prepare(plan, static_cast<int32_t>(item), stream.scratch(worker));
  });
  run_tiles(plan, stream);
}
}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();
#else
namespace moelora::HWY_NAMESPACE {
size_t down_worker_bytes() {
  return 0;
}
void down_dispatch(const MoeDownArgs& args, Stream& stream) {
  moe_down_cpu(args, stream);
}
}  // namespace moelora::HWY_NAMESPACE
#endif

#if HWY_ONCE
namespace moelora {

HWY_EXPORT(down_dispatch);
HWY_EXPORT(down_worker_bytes);

void moe_down_simd(const MoeDownArgs& args, Stream& stream) {
  if (args.num_rows == 0) {
    return;
  }
  check_expert_weights(args.down);
  MOELORA_ASSERT(stream.scratch_bytes() >= HWY_DYNAMIC_DISPATCH(down_worker_bytes)());
  const bool lora = args.lora != nullptr && args.lora->num_rows > 0;
  MOELORA_ASSERT(args.scratch_bytes >=
                 linear_scratch_bytes(static_cast<size_t>(args.num_rows * args.top_k),
                                      static_cast<size_t>(args.down.cols),
                                      static_cast<size_t>(lora ? args.lora->num_rows * args.top_k : 0),
                                      static_cast<size_t>(lora ? args.lora->max_rank : 0)));
  HWY_DYNAMIC_DISPATCH(down_dispatch)(args, stream);
}

}  // namespace moelora
#endif  // HWY_ONCE
