// SPDX-License-Identifier: Apache-2.0
// The network as straight code: embedding, layers in paper order, final norm, logits. Knows no request and no
// adapter by name; launches work only through the Kernels table. Owns no memory: weights and workspace are
// borrowed. The two halves of a layer are in attention_block.cc and moe_block.cc.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels/kernels.h"
#include "runtime/model/config.h"
#include "runtime/model/weights.h"
#include "runtime/model/workspace.h"

namespace moelora {

// What a step tells the device. Arrays live in device memory of StepInput.
struct ForwardInput {
  int32_t num_rows = 0;  // T
  int32_t num_sequences = 0;
  int32_t num_logit_rows = 0;             // S
  const int32_t* token_ids = nullptr;     // [T]
  const int32_t* positions = nullptr;     // [T]
  const int32_t* row_sequence = nullptr;  // [T] index of the batch's sequence
  const int32_t* row_begin = nullptr;     // [num_sequences + 1]
  const int32_t* logit_rows = nullptr;    // [S] rows whose logits are wanted
  KvView kv;
  const LoraBatch* lora = nullptr;  // null: no row has an adapter, and no LoRA work is launched
  float* router_gaps = nullptr;     // [T] host memory, or null: not wanted; see router_gap.h
};

class Model {
 public:
  Model(const ModelConfig& config, const Weights& weights, const Kernels& kernels, Compute compute)
      : config_(config), weights_(weights), kernels_(kernels), compute_(compute) {}

  // Leaves logits [S, V] in workspace.logits.
  void forward(const ForwardInput& input, Workspace& workspace, Stream& stream) const;

 private:
  void attention_block(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const;
  void attend(const ForwardInput& input, int32_t layer, const RopeKvWriteArgs* rope, Workspace& workspace,
              Stream& stream) const;
  void feed_forward_block(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const;
  void dense_mlp(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const;
  void shared_expert(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const;
  void route(const RmsNormArgs& norm, const ForwardInput& input, int32_t layer, Workspace& workspace,
             Stream& stream) const;
  void moe_mlp(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const;
  // The module if an adapter of the batch may have it.
  [[nodiscard]] static LoraModule adapted(const ForwardInput& input, LoraModule module);
  // What a later op with adapters shrinks with (LinearArgs::ahead): linears of `layer` with k inputs.
  [[nodiscard]] static LoraAhead ahead(const ForwardInput& input, int32_t layer,
                                       std::initializer_list<LoraModule> modules, int32_t k);
  [[nodiscard]] LoraAhead attention_ahead(const ForwardInput& input, int32_t layer) const;  // of q, k and v, if any
  [[nodiscard]] LinearArgs linear_args(const ForwardInput& input, int32_t layer, const Rows& x, int32_t k,
                                       Workspace& workspace) const;

  const ModelConfig& config_;
  const Weights& weights_;
  const Kernels& kernels_;
  Compute compute_;
};

}  // namespace moelora
