// SPDX-License-Identifier: Apache-2.0
// What is noted about steps, uploads and requests (engine thread, under the lock), and how the host sees it.
#include <algorithm>

#include "runtime/engine/engine_parts.h"

namespace moelora {

void Engine::Parts::count_prompt(const Sequence& sequence, const BatchEntry& entry) {
  const auto count = static_cast<uint64_t>(std::clamp(sequence.num_prompt - entry.first, 0, entry.count));
  counters.prompt_tokens += count;
  if (sequence.request().adapter != nullptr) {
    sequence.request().adapter->prompt_tokens += count;
  }
}

void Engine::Parts::record_step(double start, double end) {
  ++counters.steps;
  counters.last_step_ms = end - start;
  counters.steps_ms += end - start;
  counters.step.add((end - start) / 1e3);
  const auto* totals = reinterpret_cast<const uint32_t*>(workspace->totals().host());
  const auto moe_layers = static_cast<uint64_t>(
      std::count_if(config.layer_is_moe.begin(), config.layer_is_moe.end(), [](uint8_t is) { return is != 0; }));
  const uint32_t active = totals[0] - totals_before_[0];
  const uint32_t segments = totals[1] - totals_before_[1];
  std::copy_n(totals, 2, totals_before_);
  counters.active_expert_sum += active;
  counters.moe_layer_steps += moe_layers;
  counters.adapters_touched_last = static_cast<uint64_t>(step_input->num_adapters());
  StepRecord& record = records[num_records++ % records.size()];
  record.start_ms = start;
  record.ms = end - start;
  note_rates(record.ms);
  record.rows = batch_.num_rows;
  record.prefill_rows = batch_.num_prefill_rows;
  record.sequences = static_cast<int32_t>(batch_.entries.size());
  record.adapters = step_input->num_adapters();
  record.active_experts = moe_layers == 0 ? 0.0f : static_cast<float>(active) / static_cast<float>(moe_layers);
  record.lora_bytes = step_input->lora_bytes(static_cast<int32_t>(segments));
  const auto token_bytes = static_cast<double>(geometry.token_bytes());
  record.kv_bytes = 0;
  for (const BatchEntry& entry : batch_.entries) {
    record.kv_bytes += token_bytes * (entry.first + entry.count);
  }
  if (timeline.is_on()) {
    StepEvent event;
    event.start_ms = start;
    event.end_ms = end;
    event.index = counters.steps - 1;
    event.rows = record.rows;
    event.prefill_rows = record.prefill_rows;
    event.sequences = record.sequences;
    event.adapters = record.adapters;
    event.running = static_cast<int32_t>(scheduler->running().size());
    event.waiting = static_cast<int32_t>(scheduler->waiting().size());
    event.loads = static_cast<int32_t>(adapters->num_loads() - loads_before_);
    event.pages_free = pool->num_free();
    event.pages_kv = pool->num_used(PageUse::kKv);
    event.pages_adapter = pool->num_used(PageUse::kAdapter);
    timeline.add(event);
    loads_before_ = adapters->num_loads();
  }
}

void Engine::Parts::record_upload(const Adapter& adapter, double ms) {
  const double now = now_ms();
  counters.adapter_load_bytes += adapter.image->stream_bytes;
  timeline.add(UploadEvent{now - ms, now, adapter.id, adapter.image->stream_bytes});
}

void Engine::Parts::record_end(const Sequence& sequence, double now) {
  const double submitted = sequence.submission->submitted_ms;
  counters.request.add((now - submitted) / 1e3);
  if (sequence.started_ms > 0) {
    counters.queue.add((sequence.started_ms - submitted) / 1e3);
  }
  if (sequence.first_token_ms > 0) {
    counters.first_token.add((sequence.first_token_ms - submitted) / 1e3);
  }
  if (timeline.is_on()) {
    RequestEvent event;
    event.submitted_ms = submitted;
    event.started_ms = sequence.started_ms;
    event.first_token_ms = sequence.first_token_ms;
    event.end_ms = now;
    event.adapter = sequence.request().adapter == nullptr ? 0 : sequence.request().adapter->id;
    event.prompt_tokens = sequence.result.prompt_tokens;
    event.output_tokens = sequence.result.output_tokens;
    event.finish = static_cast<int32_t>(sequence.result.finish);
    timeline.add(event);
  }
}

std::vector<AdapterQueue> Engine::adapter_queues() const {
  std::vector<AdapterQueue> queues;
  {
    const Parts& parts = *parts_;
    const std::lock_guard<std::mutex> lock(parts.mutex);
    const auto add = [&queues](const Sequence& sequence, bool is_running) {
      if (const Adapter* adapter = sequence.request().adapter.get(); adapter != nullptr) {
        queues.push_back({adapter->id, is_running ? 1 : 0, is_running ? 0 : 1});
      }
    };
    queues.reserve(parts.scheduler->running().size() + parts.scheduler->waiting().size() + parts.inbox.size());
    for (const auto& sequence : parts.scheduler->running()) {
      add(*sequence, true);
    }
    for (const auto* list : {&parts.scheduler->waiting(), &parts.inbox}) {
      for (const auto& sequence : *list) {
        add(*sequence, false);
      }
    }
  }
  std::sort(queues.begin(), queues.end(),
            [](const AdapterQueue& a, const AdapterQueue& b) { return a.adapter < b.adapter; });
  size_t count = 0;
  for (const AdapterQueue& one : queues) {
    if (count > 0 && queues[count - 1].adapter == one.adapter) {
      queues[count - 1].running += one.running;
      queues[count - 1].waiting += one.waiting;
    } else {
      queues[count++] = one;
    }
  }
  queues.resize(count);
  return queues;
}

// The lock is taken for a few thousand events at a time; those that leave meanwhile are counted as dropped.
void Engine::write_timeline(const std::string& path) const {
  constexpr uint64_t kEventsAtOnce = 4096;
  const Parts& parts = *parts_;
  std::vector<TimelineEvent> events;
  std::unordered_map<uint64_t, std::string> names;
  uint64_t next = 0, end = 0, num_dropped = 0;
  {
    const std::lock_guard<std::mutex> lock(parts.mutex);
    if (!parts.timeline.is_on()) {
      throw Error(Status::kInvalid, "there is no timeline: the engine was created with timeline_events = 0");
    }
    end = parts.timeline.num_added();
    next = num_dropped = parts.timeline.first_kept();
    for (const auto& adapter : parts.adapters->list()) {
      names.emplace(adapter->id, adapter->name);
    }
  }
  events.reserve(end - next);
  while (next < end) {
    const std::lock_guard<std::mutex> lock(parts.mutex);
    const uint64_t first = std::min(end, std::max(next, parts.timeline.first_kept()));
    num_dropped += first - next;
    next = std::min(end, first + kEventsAtOnce);
    for (uint64_t i = first; i < next; ++i) {
      events.push_back(parts.timeline.event(i));
    }
  }
  moelora::write_timeline(path, events, num_dropped, names);
}

}  // namespace moelora
