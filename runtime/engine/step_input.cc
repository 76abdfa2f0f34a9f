// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/step_input.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/base/error.h"

namespace moelora {
namespace {

constexpr uint16_t kInPrompt = 0x8000;
constexpr uint16_t kCountMax = 0x7fff;
constexpr size_t kNumArrays = 11;

}  // namespace

bool needs_token_state(const Sampling& sampling) {
  return sampling.repetition_penalty != 1.0f || sampling.presence_penalty != 0.0f || sampling.frequency_penalty != 0.0f;
}

StepInput::StepInput(const StepInputLimits& limits, const KvGeometry& geometry, Device& device)
    : limits_(limits),
      device_(device),
      tables_(limits.num_sequences_max, limits.num_blocks_max * geometry.layout.num_groups, device) {
  const auto sequences = static_cast<size_t>(limits.num_sequences_max);
  const auto logit_rows = static_cast<size_t>(limits.num_logit_rows_max);
  const size_t longest = std::max({static_cast<size_t>(limits.num_rows_max), sequences + 1, logit_rows, size_t{3}});
  pitch_ = (longest * sizeof(int32_t) + 255) / 256 * 256;
  arrays_ = std::make_unique<MirrorMemory>(device, kNumArrays * pitch_, "arrays of a step");
  size_t next = 0;
  const auto take = [&](const int32_t*& bound) {
    bound = reinterpret_cast<const int32_t*>(arrays_->device() + next * pitch_);
    return reinterpret_cast<int32_t*>(arrays_->host() + next++ * pitch_);
  };
  const int32_t* scales = nullptr;
  token_ids_ = take(input_.token_ids);
  positions_ = take(input_.positions);
  row_sequence_ = take(input_.row_sequence);
  row_begin_ = take(input_.row_begin);
  logit_rows_ = take(input_.logit_rows);
  row_slot_ = take(lora_.row_slot);
  row_scale_ = reinterpret_cast<float*>(take(scales));
  lora_.row_scale = reinterpret_cast<const float*>(scales);
  sorted_rows_ = take(lora_.sorted_rows);
  segment_begin_ = take(lora_.segment_begin);
  segment_slot_ = take(lora_.segment_slot);
  counts_ = take(lora_.counts);
  MOELORA_ASSERT(next == kNumArrays);
  lora_.rank_stride = limits.lora_rank_max;
  entry_order_.reserve(sequences);
  sampled_.reserve(logit_rows);
  sample_rows_.reserve(logit_rows);
  captures_.reserve(logit_rows);
  router_gaps_.resize(device.is_host() ? static_cast<size_t>(limits.num_rows_max) : 0);
  input_.kv.layout = geometry.layout;
  input_.kv.page_bytes = geometry.page_bytes;
  input_.kv.block_tables = tables_.device();
  input_.kv.max_blocks = limits.num_blocks_max;
  token_states_bytes_ = sequences * static_cast<size_t>(limits.vocab_size) * sizeof(uint16_t);
  void* memory = mmap(nullptr, token_states_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Status::kNomem, "token counts: cannot take " + std::to_string(token_states_bytes_) + " bytes");
  }
  token_states_ = static_cast<uint16_t*>(memory);
}

StepInput::~StepInput() {
  munmap(token_states_, token_states_bytes_);
}

uint16_t* StepInput::token_state(const Sequence& sequence) {
  return token_states_ + static_cast<size_t>(sequence.batch_row) * static_cast<size_t>(limits_.vocab_size);
}

void StepInput::start_sequence(const Sequence& sequence) {
  if (!needs_token_state(sequence.request().sampling)) {
    return;
  }
  uint16_t* state = token_state(sequence);
  std::memset(state, 0, static_cast<size_t>(limits_.vocab_size) * sizeof(uint16_t));
  for (int32_t i = 0; i < sequence.num_prompt; ++i) {
    state[sequence.tokens[static_cast<size_t>(i)]] |= kInPrompt;
  }
  for (int32_t i = sequence.num_prompt; i < sequence.num_tokens(); ++i) {
    count_token(sequence, sequence.tokens[static_cast<size_t>(i)]);
  }
}

void StepInput::count_token(const Sequence& sequence, int32_t token) {
  if (!needs_token_state(sequence.request().sampling)) {
    return;
  }
  uint16_t& state = token_state(sequence)[token];
  if ((state & kCountMax) != kCountMax) {
    ++state;
  }
}

void StepInput::stage(const Batch& batch, const PagePool& pool, const AdapterCache& adapters) {
  input_.kv.pool = pool.base();
  input_.num_rows = 0;
  input_.num_sequences = static_cast<int32_t>(batch.entries.size());
  input_.num_logit_rows = 0;
  sampled_.clear();
  captures_.clear();
  for (const BatchEntry& entry : batch.entries) {
    if (entry.samples) {
      sampled_.push_back(entry.sequence);
    }
  }
  input_.num_logit_rows = num_sampled();
  row_begin_[0] = 0;
  int32_t sampled_index = 0;
  for (size_t i = 0; i < batch.entries.size(); ++i) {
    const BatchEntry& entry = batch.entries[i];
    stage_entry(entry, static_cast<int32_t>(i));
    const int32_t last_row = input_.num_rows - 1;
    if (entry.samples) {
      logit_rows_[static_cast<size_t>(sampled_index++)] = last_row;
    }
    if (entry.capture_first < 0) {
      continue;
    }
    for (int32_t position = std::max(entry.first, entry.capture_first); position < entry.first + entry.count;
         ++position) {
      const bool is_sampled = entry.samples && position == entry.first + entry.count - 1;
      const int32_t logit_row = is_sampled ? sampled_index - 1 : input_.num_logit_rows++;
      if (!is_sampled) {
        logit_rows_[static_cast<size_t>(logit_row)] = last_row - (entry.first + entry.count - 1 - position);
      }
      captures_.push_back({entry.sequence, logit_row, position - entry.sequence->num_history});
    }
  }
  input_.router_gaps = nullptr;
  if (!captures_.empty() && !router_gaps_.empty()) {
    std::fill_n(router_gaps_.data(), input_.num_rows, std::numeric_limits<float>::infinity());
    input_.router_gaps = router_gaps_.data();
  }
  stage_adapters(batch, adapters);
}

float StepInput::router_gap(const CaptureRow& capture) const {
  const auto row = static_cast<size_t>(logit_rows_[capture.logit_row]);
  return router_gaps_.empty() ? -1.0f : router_gaps_[row];
}

void StepInput::stage_entry(const BatchEntry& entry, int32_t sequence_index) {
  const Sequence& sequence = *entry.sequence;
  for (int32_t i = 0; i < entry.count; ++i) {
    const auto row = static_cast<size_t>(input_.num_rows + i);
    token_ids_[row] = sequence.tokens[static_cast<size_t>(entry.first + i)];
    positions_[row] = entry.first + i;
    row_sequence_[row] = sequence_index;
    row_slot_[row] = sequence.slot;
    row_scale_[row] = sequence.row_scale;
  }
  input_.num_rows += entry.count;
  row_begin_[static_cast<size_t>(sequence_index) + 1] = input_.num_rows;
  tables_.set(sequence_index, sequence.kv->pages);
}

void StepInput::stage_adapters(const Batch& batch, const AdapterCache& adapters) {
  lora_.num_rows = lora_.num_segments = lora_.max_rank = 0;
  lora_.modules = 0;
  num_adapters_ = 0;
  dense_lora_bytes_ = expert_lora_bytes_ = 0;
  input_.lora = nullptr;
  entry_order_.clear();
  for (size_t i = 0; i < batch.entries.size(); ++i) {
    if (batch.entries[i].sequence->slot > 0) {
      entry_order_.push_back(static_cast<int32_t>(i));
    }
  }
  if (entry_order_.empty()) {
    return;
  }
  const auto slot_of = [&](int32_t i) { return batch.entries[static_cast<size_t>(i)].sequence->slot; };
  std::sort(entry_order_.begin(), entry_order_.end(),
            [&](int32_t a, int32_t b) { return slot_of(a) != slot_of(b) ? slot_of(a) < slot_of(b) : a < b; });
  for (const int32_t i : entry_order_) {
    const int32_t slot = slot_of(i);
    if (lora_.num_segments == 0 || segment_slot_[lora_.num_segments - 1] != slot) {
      segment_begin_[lora_.num_segments] = lora_.num_rows;
      segment_slot_[lora_.num_segments] = slot;
      ++lora_.num_segments;
      const AdapterFacts& image = adapters.image(slot);
      lora_.modules |= image.modules;
      lora_.max_rank = std::max(lora_.max_rank, ceil_div(image.max_rank, kTileRanks) * kTileRanks);
      dense_lora_bytes_ += static_cast<double>(image.dense_matrix_bytes);
      expert_lora_bytes_ += static_cast<double>(image.expert_matrix_bytes) /
                            std::max(1, image.num_layers * std::max(image.num_experts, 1));
    }
    for (int32_t row = row_begin_[i]; row < row_begin_[i + 1]; ++row) {
      sorted_rows_[lora_.num_rows++] = row;
    }
  }
  segment_begin_[lora_.num_segments] = lora_.num_rows;
  counts_[0] = lora_.num_rows;
  counts_[1] = lora_.num_segments;
  counts_[2] = lora_.max_rank;
  lora_.table = adapters.table();
  num_adapters_ = lora_.num_segments;
  input_.lora = &lora_;
}

void StepInput::push(Stream& stream) {
  const int32_t width =
      std::max({input_.num_rows, input_.num_sequences + 1, input_.num_logit_rows, lora_.num_segments + 1, 3});
  device_.push_rows(arrays_->mirror(), 0, pitch_, static_cast<size_t>(width) * sizeof(int32_t), kNumArrays, stream);
  tables_.push(stream);
}

ForwardInput StepInput::decode_input(int32_t rows, uint32_t modules, const PagePool& pool,
                                     const AdapterCache& adapters) {
  ForwardInput input = input_;
  input.kv.pool = pool.base();
  input.num_rows = input.num_sequences = input.num_logit_rows = rows;
  lora_.table = adapters.table();
  lora_.modules = modules;
  input.lora = modules != 0 ? &lora_ : nullptr;
  return input;
}

bool StepInput::is_decode() const {
  return input_.num_rows == input_.num_sequences && input_.num_logit_rows == input_.num_rows;
}

double StepInput::lora_bytes(int32_t segments) const {
  return num_adapters_ == 0 ? 0.0 : dense_lora_bytes_ + expert_lora_bytes_ / num_adapters_ * segments;
}

void StepInput::stage_sampling() {
  sample_rows_.clear();
  for (Sequence* sequence : sampled_) {
    if (!sequence->token_state_ready) {
      start_sequence(*sequence);
    }
    sequence->token_state_ready = true;
    const Sampling& sampling = sequence->request().sampling;
    SampleRow& row = sample_rows_.emplace_back();
    row.temperature = sampling.temperature;
    row.top_k = sampling.top_k;
    row.top_p = sampling.top_p;
    row.min_p = sampling.min_p;
    row.repetition_penalty = sampling.repetition_penalty;
    row.presence_penalty = sampling.presence_penalty;
    row.frequency_penalty = sampling.frequency_penalty;
    row.num_top_logprobs = sampling.logprobs;
    row.seed = sequence->result.seed;
    row.draw_index = static_cast<uint64_t>(sequence->num_outputs());
    if (needs_token_state(sampling)) {
      row.token_state = token_state(*sequence);
    }
    if (sequence->num_outputs() < sampling.min_tokens) {
      row.suppressed = sequence->suppressed.data();
      row.num_suppressed = static_cast<int32_t>(sequence->suppressed.size());
    }
  }
}

}  // namespace moelora
