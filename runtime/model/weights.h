// SPDX-License-Identifier: Apache-2.0
// The weights of a model as plain views, in stored dtype, straight out of the mapped checkpoint (or out of
// memory of random values for benchmarks). Memory of their own have only vectors that kernels want in fp32 (sinks,
// biases of experts) and the experts of gpt-oss in bf16, which are stored transposed. Every expected tensor is checked
// for presence, dtype and shape; every unexpected tensor is refused by name (formats.md A0).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"
#include "kernels/kernels.h"
#include "runtime/model/config.h"
#include "runtime/model/random_routing.h"

namespace moelora {

struct LayerWeights {
  Weight input_norm;                      // [1, H]
  Weight q, k, v, o;                      // [Nq*D, H] [Nkv*D, H] [Nkv*D, H] [H, Nq*D]
  Weight q_bias, k_bias, v_bias, o_bias;  // [1, rows of the matrix]
  Weight q_norm, k_norm;                  // [1, D] per head, or [1, Nq*D] / [1, Nkv*D] full
  const float* sinks = nullptr;           // [Nq], gpt-oss; else null
  Weight post_norm;                       // [1, H]
  // Dense MLP.
  Weight gate, up, down;  // [I, H] [I, H] [H, I]
  Weight gate_bias, up_bias, down_bias;
  // MoE.
  Weight router;                                                                         // [E, H]
  Weight router_bias;                                                                    // [1, E]
  std::vector<const void*> expert_gate_data, expert_up_data, expert_down_data;           // [E] each
  std::vector<const uint8_t*> expert_gate_scales, expert_up_scales, expert_down_scales;  // [E] each; MXFP4
  ExpertWeights expert_gate, expert_up, expert_down;  // view the vectors above and below
  Weight shared_gate, shared_up, shared_down;         // Qwen2-MoE
  Weight shared_expert_gate;                          // [1, H]
  // gpt-oss: vectors as stored, and what `sinks` and the biases of the experts point to.
  Weight stored_sinks;         // [1, Nq]
  Weight stored_gate_up_bias;  // [E, 2I], gate and up by turns
  Weight stored_down_bias;     // [E, H]
  std::vector<float> sink_values, gate_bias_values, up_bias_values, down_bias_values;
  std::vector<float> router_offsets;  // of a random model whose routing was chosen: what `router_bias` points to
};

class Weights {
 public:
  // Opens DIR's safetensors (index or single file). The files stay mapped while Weights lives.
  static std::unique_ptr<Weights> load(const std::string& dir, const ModelConfig& config);
  // Values of fill_random, |w| about 1/sqrt(width), norms near 1, in huge-page friendly memory.
  static std::unique_ptr<Weights> random(const ModelConfig& config, uint64_t seed);
  // The shapes and types alone, without a value; move_to fills them.
  static std::unique_ptr<Weights> shapes(const ModelConfig& config);
  // Random models, before move_to: the router's bias becomes the offsets of random_routing.h.
  void choose_routing(const ModelConfig& config, const RandomRouting& routing, uint64_t seed);
  // Copies all to `device`, which must outlive the weights, in the types that its kernels read, and lets go of the
  // checkpoint; `random`: fills shapes() with values of `seed` there. Afterwards every view is device memory.
  void move_to(Device& device, Stream& stream, const Kernels& kernels, const ModelConfig& config, bool random,
               uint64_t seed);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  Weight embedding;                 // [V, H]
  Weight final_norm;                // [1, H]
  Weight lm_head;                   // [V, H]; the embedding where tied
  const float* inv_freq = nullptr;  // [D / 2] on a device that cannot read the config; null: the config's
  std::vector<LayerWeights> layers;
  [[nodiscard]] uint64_t bytes() const { return bytes_; }  // stored bytes of all tensors used
  // The largest contiguous areas, to measure the read bandwidth of this very memory (bench).
  struct Area {
    const std::byte* data;
    size_t bytes;
  };
  [[nodiscard]] std::vector<Area> areas() const;

 private:
  friend class WeightsLoader;
  friend uint64_t weight_bytes_of_config(const ModelConfig& config);
  Weights();
  struct Storage;
  std::unique_ptr<Storage> storage_;
  uint64_t bytes_ = 0;
};

// Bytes that a decode step reads of the weights when `active` experts of each MoE layer are used; without the
// embedding table.
double weight_bytes_of_step(const ModelConfig& config, const Weights& weights, double active);
// Stored bytes that config.json implies, without opening weights (plan_memory).
uint64_t weight_bytes_of_config(const ModelConfig& config);

}  // namespace moelora
