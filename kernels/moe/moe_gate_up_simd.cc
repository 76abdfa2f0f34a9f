// SPDX-License-Identifier: Apache-2.0
// moe_gate_up on vectors: rows are packed once and the adapters' pairs shrunk (phase one); then workers take
// (active expert, tile) by ticket, each tile the same outputs of gate and of up for all rows of the expert,
// gathered by pointer. The tail adds LoRA and bias and applies the activation while both sums are in cache. MXFP4 is
// expanded in registers and summed in the order of bf16: the same weights give the same bits. Bits: see dot_inl.h.
#include "kernels/base/simd_targets.h"
#include "kernels/dense/linear.h"
#include "kernels/moe/expert_reference.h"
#include "kernels/moe/moe_gate_up.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/moe_gate_up_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#if HWY_TARGET != HWY_SCALAR
#include "kernels/dense/silu_inl.h"
#include "kernels/moe/moe_tiles_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {
namespace {

struct GateUpPlan {
  const MoeGateUpArgs* args;
  PackOrder order;
  bool by_classes;  // many rows for most experts
  float* packed;    // [T, padded_k]
  ExpertLora lora;
  int32_t outputs;  // of a tile, of each matrix
};

constexpr ExpertModule kModules[2] = {ExpertModule::kGate, ExpertModule::kUp};

// One item of phase one: packs row `item`, or shrinks eight ranks of one pair for gate or up.
void prepare(const GateUpPlan& plan, int32_t item, std::byte* scratch) {
  const MoeGateUpArgs& args = *plan.args;
  const int32_t k = args.gate.cols;
  if (item < args.num_rows) {
    pack_tile_row(args.x.row(item), k, plan.order, args.compute, plan.by_classes, plan.packed + item * padded_k(k),
                  scratch);
    return;
  }
  const int32_t panels = ceil_div(plan.lora.batch->max_rank, kTileRanks);
  const int32_t shrink = item - args.num_rows;
  const int32_t set = shrink / panels % 2;
  shrink_pair(plan.lora, shrink / panels / 2, kModules[set], set, shrink % panels, k,
              [&](int32_t pair) { return args.x.row(args.order.pair_row[pair]); });
}

void activate(const MoeGateUpArgs& args, const float* gate, const float* up, int32_t count, float* out) {
  if (args.activation == MoeActivation::kClampedSwiglu) {
    return activate_pairs(gate, up, count, out, ClampedSwiglu{args.limit});
  }
  activate_pairs(gate, up, count, out, SiluMultiply());
}

void run_tiles(const GateUpPlan& plan, Stream& stream) {
  const MoeGateUpArgs& args = *plan.args;
  const int32_t* begin = args.order.expert_begin;
  const int32_t k = args.gate.cols;
  const ExpertWeights* const matrices[2] = {&args.gate, &args.up};
  const auto run = [&](int32_t /*ticket*/, int32_t expert, int32_t tile, int32_t next_expert, int32_t next_tile,
                       int worker) HWY_ATTR {
    const int32_t n = tile * plan.outputs;
    const TileWeights weights = expert_tile(matrices, 2, expert, n, plan.outputs);
    const TileWeights ahead = expert_tile(matrices, 2, next_expert, next_tile * plan.outputs, plan.outputs);
    const int32_t outputs = weights.count;
    const TileRows rows{plan.packed,         padded_k(k),   plan.by_classes,
                        args.order.pair_row, begin[expert], begin[expert + 1] - begin[expert]};
    const auto finish = [&](int32_t first, int32_t count, float* const* sums) HWY_ATTR {
      const int32_t pair = begin[expert] + first;
      for (int32_t set = 0; set < 2; ++set) {
        if (plan.lora.batch != nullptr) {
          expand_pairs(plan.lora, args.order, kModules[set], set, args.gate.rows, n, outputs, pair, count, sums[set]);
        }
        add_bias(*matrices[set], expert, n, outputs, count, sums[set]);
      }
      for (int32_t r = 0; r < count; ++r) {
        activate(args, sums[0] + r * kTileOutputs, sums[1] + r * kTileOutputs, outputs, args.act.row(pair + r) + n);
      }
    };
    run_expert_tile(args.gate, weights, rows, ahead, stream.scratch(worker), finish);
  };
  for_each_expert_tile(stream, begin, args.num_experts, ceil_div(args.gate.rows, plan.outputs), run);
}

}  // namespace
size_t gate_up_worker_bytes() {
  return kTileScratchBytes;
}
void gate_up_dispatch(const MoeGateUpArgs& args, Stream& stream) {
  GateUpPlan plan{};
  plan.args = &args;
  plan.order = pack_order(stored_as(args.gate));
  const int32_t active = active_experts(args.order.expert_begin, args.num_experts);
  plan.by_classes = many_rows(args.order.expert_begin, args.num_experts);
  plan.outputs = tile_outputs(args.gate.cols, 2, plan.by_classes, static_cast<int64_t>(active) * args.gate.rows,
                              stream.num_threads());
  plan.packed = reinterpret_cast<float*>(args.scratch);
  std::byte* const rest = args.scratch + args.num_rows * padded_k(args.gate.cols) * 4;
  plan.lora = find_spans(args.lora, args.order, args.layer, rest);
  int32_t items = args.num_rows;
  if (plan.lora.batch != nullptr) {
    items += plan.lora.num_pairs * 2 * ceil_div(args.lora->max_rank, kTileRanks);
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
size_t gate_up_worker_bytes() {
  return 0;
}
void gate_up_dispatch(const MoeGateUpArgs& args, Stream& stream) {
  moe_gate_up_cpu(args, stream);
}
}  // namespace moelora::HWY_NAMESPACE
#endif

#if HWY_ONCE
namespace moelora {

HWY_EXPORT(gate_up_dispatch);
HWY_EXPORT(gate_up_worker_bytes);

void moe_gate_up_simd(const MoeGateUpArgs& args, Stream& stream) {
  if (args.num_rows == 0) {
    return;
  }
  MOELORA_ASSERT(args.gate.dtype == args.up.dtype && args.gate.format == args.up.format);
  check_expert_weights(args.gate);
  check_expert_weights(args.up);
  MOELORA_ASSERT(args.gate.rows == args.up.rows && args.gate.cols == args.up.cols);
  MOELORA_ASSERT(stream.scratch_bytes() >= HWY_DYNAMIC_DISPATCH(gate_up_worker_bytes)());
  const bool lora = args.lora != nullptr && args.lora->num_rows > 0;
  MOELORA_ASSERT(args.scratch_bytes >=
                 linear_scratch_bytes(static_cast<size_t>(args.num_rows), static_cast<size_t>(args.gate.cols),
                                      static_cast<size_t>(lora ? args.lora->num_rows * args.top_k : 0),
                                      static_cast<size_t>(lora ? args.lora->max_rank : 0)));
  HWY_DYNAMIC_DISPATCH(gate_up_dispatch)(args, stream);
}

}  // namespace moelora
#endif  // HWY_ONCE
