// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/step_input.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "kernels/base/error.h"

namespace moelora {
namespace {

constexpr uint16_t kInPrompt = 0x8000;
constexpr uint16_t kCountMax = 0x7fff;

}  // namespace

bool needs_token_state(const Sampling& sampling) {
  return sampling.repetition_penalty != 1.0f || sampling.presence_penalty != 0.0f || sampling.frequency_penalty != 0.0f;
}

StepInput::StepInput(const StepInputLimits& limits, const KvGeometry& geometry)
    : limits_(limits), num_groups_(geometry.layout.num_groups), block_tokens_(geometry.layout.block_tokens) {
  const auto rows = static_cast<size_t>(limits.num_rows_max);
  const auto sequences = static_cast<size_t>(limits.num_sequences_max);
  const auto logit_rows = static_cast<size_t>(limits.num_logit_rows_max);
  for (auto* array : {&token_ids_, &positions_, &row_sequence_, &row_slot_, &sorted_rows_}) {
    array->resize(rows);
  }
  row_scale_.resize(rows);
  row_begin_.resize(sequences + 1);
  segment_begin_.resize(sequences + 1);
  segment_slot_.resize(sequences);
  entry_order_.reserve(sequences);
  logit_rows_.resize(logit_rows);
  block_tables_.resize(sequences * static_cast<size_t>(limits.num_blocks_max) * static_cast<size_t>(num_groups_));
  sampled_.reserve(logit_rows);
  sample_rows_.reserve(logit_rows);
  captures_.reserve(logit_rows);
  input_.kv.layout = geometry.layout;
  input_.kv.page_bytes = geometry.page_bytes;
  input_.kv.block_tables = block_tables_.data();
  input_.kv.max_blocks = limits.num_blocks_max;
  input_.token_ids = token_ids_.data();
  input_.positions = positions_.data();
  input_.row_sequence = row_sequence_.data();
  input_.row_begin = row_begin_.data();
  input_.logit_rows = logit_rows_.data();
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
  sample_rows_.clear();
  captures_.clear();
  for (const BatchEntry& entry : batch.entries) {
    if (entry.samples) {
      sampled_.push_back(entry.sequence);
      stage_sampling(*entry.sequence);
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
  stage_adapters(batch, adapters);
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
  const int32_t blocks = (entry.first + entry.count + block_tokens_ - 1) / block_tokens_;
  std::copy_n(sequence.kv->pages.data(), blocks * num_groups_,
              block_tables_.data() + static_cast<int64_t>(sequence_index) * limits_.num_blocks_max * num_groups_);
}

void StepInput::stage_adapters(const Batch& batch, const AdapterCache& adapters) {
  lora_ = LoraBatch();
  num_adapters_ = 0;
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
    if (lora_.num_segments == 0 || segment_slot_[static_cast<size_t>(lora_.num_segments) - 1] != slot) {
      segment_begin_[static_cast<size_t>(lora_.num_segments)] = lora_.num_rows;
      segment_slot_[static_cast<size_t>(lora_.num_segments)] = slot;
      ++lora_.num_segments;
      lora_.max_rank = std::max(lora_.max_rank, ceil_div(adapters.image(slot).max_rank, kTileRanks) * kTileRanks);
    }
    for (int32_t row = row_begin_[static_cast<size_t>(i)]; row < row_begin_[static_cast<size_t>(i) + 1]; ++row) {
      sorted_rows_[static_cast<size_t>(lora_.num_rows++)] = row;
    }
  }
  segment_begin_[static_cast<size_t>(lora_.num_segments)] = lora_.num_rows;
  lora_.table = adapters.table();
  lora_.row_slot = row_slot_.data();
  lora_.row_scale = row_scale_.data();
  lora_.sorted_rows = sorted_rows_.data();
  lora_.segment_begin = segment_begin_.data();
  lora_.segment_slot = segment_slot_.data();
  num_adapters_ = lora_.num_segments;
  input_.lora = &lora_;
}

void StepInput::stage_sampling(const Sequence& sequence) {
  const Sampling& sampling = sequence.request().sampling;
  SampleRow row;
  row.temperature = sampling.temperature;
  row.top_k = sampling.top_k;
  row.top_p = sampling.top_p;
  row.min_p = sampling.min_p;
  row.repetition_penalty = sampling.repetition_penalty;
  row.presence_penalty = sampling.presence_penalty;
  row.frequency_penalty = sampling.frequency_penalty;
  row.num_top_logprobs = sampling.logprobs;
  row.seed = sequence.result.seed;
  row.draw_index = static_cast<uint64_t>(sequence.num_outputs());
  if (needs_token_state(sampling)) {
    row.token_state = token_state(sequence);
  }
  if (sequence.num_outputs() < sampling.min_tokens) {
    row.suppressed = sequence.suppressed.data();
    row.num_suppressed = static_cast<int32_t>(sequence.suppressed.size());
  }
  sample_rows_.push_back(row);
}

}  // namespace moelora
