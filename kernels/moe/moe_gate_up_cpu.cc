// SPDX-License-Identifier: Apache-2.0
// The reference of the experts' first half: pair by pair, gate and up of one output at a time, each with its LoRA and
// bias added before the activation. The pair's expert follows from where it lies between expert_begin's borders.
#include "kernels/moe/moe_gate_up.h"

#include <algorithm>
#include <cmath>

#include "kernels/lora/lora_reference.h"
#include "kernels/moe/expert_reference.h"

namespace moelora {
namespace {

// One projection of one pair: the expert's matrix and the row's adapter on it.
struct Projection {
  const ExpertWeights& weights;
  int32_t expert;
  LoraRow lora;
  float* shrunk;
};

Projection begin_projection(const MoeGateUpArgs& args, const ExpertWeights& weights, ExpertModule module,
                            int32_t expert, int32_t row, const float* x, float* shrunk) {
  const LoraRow lora = lora_row_expert(args.lora, row, args.layer, expert, module);
  if (lora.active()) {
    lora_shrink_reference(lora, x, weights.cols, shrunk);
  }
  return {weights, expert, lora, shrunk};
}

double output(const Projection& projection, Compute compute, int32_t n, const float* x) {
  float y = expert_dot_reference(projection.weights, projection.expert, compute, n, x);
  y = lora_expand_reference(projection.lora, projection.shrunk, n, y);
  return static_cast<double>(y + expert_bias(projection.weights, projection.expert, n));
}

double activation(const MoeGateUpArgs& args, double g, double u) {
  if (args.activation == MoeActivation::kSilu) {
    return g / (1.0 + std::exp(-g)) * u;
  }
  const auto limit = static_cast<double>(args.limit);
  g = g > limit ? limit : g;  // a NaN is no more than the limit: it stays
  u = u > limit ? limit : u < -limit ? -limit : u;
  return (u + 1.0) * g / (1.0 + std::exp(-1.702 * g));
}

}  // namespace

void moe_gate_up_cpu(const MoeGateUpArgs& args, Stream& stream) {
  check_lora_scratch(args.lora, stream, 2);
  check_expert_weights(args.gate);
  check_expert_weights(args.up);
  const float* const x = args.x.f32();
  float* const act = args.act.f32();
  const int32_t max_rank = args.lora != nullptr ? args.lora->max_rank : 0;
  const size_t pairs = static_cast<size_t>(args.num_rows) * static_cast<size_t>(args.top_k);
  stream.parallel_for(pairs, [&](size_t i, int worker) {
    const int32_t* begin = args.order.expert_begin;
    const int32_t* after = std::upper_bound(begin, begin + args.num_experts, static_cast<int32_t>(i));
    const auto expert = static_cast<int32_t>(after - begin) - 1;
    const int32_t row = args.order.pair_row[i];
    const float* from = x + row * args.x.stride;
    float* to = act + static_cast<int64_t>(i) * args.act.stride;
    auto* shrunk = reinterpret_cast<float*>(stream.scratch(worker));
    const Projection gate = begin_projection(args, args.gate, ExpertModule::kGate, expert, row, from, shrunk);
    const Projection up = begin_projection(args, args.up, ExpertModule::kUp, expert, row, from, shrunk + max_rank);
    for (int32_t n = 0; n < args.gate.rows; ++n) {
      const double g = output(gate, args.compute, n, from);
      const double u = output(up, args.compute, n, from);
      to[n] = static_cast<float>(activation(args, g, u));
    }
  });
}

}  // namespace moelora
