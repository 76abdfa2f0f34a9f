// SPDX-License-Identifier: Apache-2.0
// One step as flat arrays: what the device is told. Memory for the largest step is taken once; `stage` fills it from
// a Batch and allocates nothing. The field names are those of the ops' contracts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/adapter/adapter_cache.h"
#include "runtime/engine/batch.h"
#include "runtime/engine/block_tables.h"
#include "runtime/model/model.h"

namespace moelora {

struct StepInputLimits {
  int32_t num_rows_max = 0;
  int32_t num_sequences_max = 0;
  int32_t num_logit_rows_max = 0;
  int32_t num_blocks_max = 0;  // of one sequence
  int32_t vocab_size = 0;
  int32_t lora_rank_max = 0;  // multiple of 8
};

class StepInput {
 public:
  StepInput(const StepInputLimits& limits, const KvGeometry& geometry, Device& device);
  ~StepInput();
  StepInput(const StepInput&) = delete;
  StepInput& operator=(const StepInput&) = delete;

  // Sampled rows come first among the logits rows, in order of the batch's entries; capture-only rows follow.
  void stage(const Batch& batch, const PagePool& pool, const AdapterCache& adapters);
  // Queues the copies of what `stage` wrote; it may not stage again before the stream was synchronised.
  void push(Stream& stream);
  // What the sampler is told of the sampled sequences: host memory alone, so the step may run meanwhile.
  void stage_sampling();
  // What forward_input() is after staging `rows` sequences of one new token each, all sampled; LoraBatch::modules.
  [[nodiscard]] ForwardInput decode_input(int32_t rows, uint32_t modules, const PagePool& pool,
                                          const AdapterCache& adapters);
  // True if the last staged batch is such a one.
  [[nodiscard]] bool is_decode() const;
  // Bytes of adapter matrices that the step reads, each once; `segments` = (expert, adapter) pairs with rows.
  [[nodiscard]] double lora_bytes(int32_t segments) const;

  [[nodiscard]] const ForwardInput& forward_input() const { return input_; }
  [[nodiscard]] int32_t num_sampled() const { return static_cast<int32_t>(sampled_.size()); }
  [[nodiscard]] const std::vector<Sequence*>& sampled() const { return sampled_; }
  [[nodiscard]] const SampleRow* sample_rows() const { return sample_rows_.data(); }
  [[nodiscard]] const std::vector<CaptureRow>& captures() const { return captures_; }
  // Smallest router gap of the row over its layers (router_gap.h); infinity without a router, -1: not known (CUDA).
  [[nodiscard]] float router_gap(const CaptureRow& capture) const;
  [[nodiscard]] int32_t num_adapters() const { return num_adapters_; }

  // Keeps the token counts for penalties current; stage_sampling builds them when a sequence starts.
  void count_token(const Sequence& sequence, int32_t token);

 private:
  void stage_entry(const BatchEntry& entry, int32_t sequence_index);
  void stage_adapters(const Batch& batch, const AdapterCache& adapters);
  void start_sequence(const Sequence& sequence);
  [[nodiscard]] uint16_t* token_state(const Sequence& sequence);

  StepInputLimits limits_;
  Device& device_;
  ForwardInput input_;
  LoraBatch lora_;
  // Arrays of a step, equally far apart so that one copy pushes what is used of all of them.
  size_t pitch_ = 0;
  std::unique_ptr<MirrorMemory> arrays_;
  BlockTables tables_;
  int32_t *token_ids_, *positions_, *row_sequence_, *row_begin_, *logit_rows_, *row_slot_, *sorted_rows_;
  int32_t *segment_begin_, *segment_slot_, *counts_;
  float* row_scale_;
  double dense_lora_bytes_ = 0, expert_lora_bytes_ = 0;  // of the batch's adapters; mean of one expert's
  std::vector<int32_t> entry_order_;
  std::vector<Sequence*> sampled_;
  std::vector<SampleRow> sample_rows_;
  std::vector<CaptureRow> captures_;
  std::vector<float> router_gaps_;  // [num_rows_max] on the host's own backend, else empty
  int32_t num_adapters_ = 0;
  uint16_t* token_states_ = nullptr;  // [num_sequences_max, V], touched only by requests with penalties
  size_t token_states_bytes_ = 0;
};

// True if sampling this request needs token counts.
bool needs_token_state(const Sampling& sampling);

}  // namespace moelora
