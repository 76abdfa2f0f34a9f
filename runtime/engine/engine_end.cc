// SPDX-License-Identifier: Apache-2.0
// How sequences end and how the engine fails. Engine thread.
#include <algorithm>
#include <new>

#include "runtime/engine/engine_parts.h"

namespace moelora {

// Cancelled and overdue sequences end here, before they could take part in another step.
void Engine::Parts::end_by_host(double now) {
  const auto overdue = [&](const Sequence& sequence) {
    const Submission& submission = *sequence.submission;
    return submission.cancelled.load() || sequence.is_late ||
           (submission.deadline_at_ms > 0 && now >= submission.deadline_at_ms) ||
           (options.overrun == "fail" && sequence.num_unread() >= static_cast<size_t>(options.output_buffer_tokens));
  };
  scheduler->mark_late(now);
  for (const auto* list : {&scheduler->running(), &scheduler->waiting()}) {
    for (size_t i = 0; i < list->size();) {
      Sequence& sequence = *(*list)[i];
      if (!overdue(sequence)) {
        ++i;
      } else if (sequence.submission->cancelled.load()) {
        end_sequence(sequence, FinishReason::kCancelled, Status::kCancelled, "cancelled", now);
      } else if (sequence.submission->deadline_at_ms > 0 && now >= sequence.submission->deadline_at_ms) {
        end_sequence(sequence, FinishReason::kDeadline, Status::kDeadline, "deadline passed", now);
      } else if (sequence.is_late) {
        end_sequence(sequence, FinishReason::kDeadline, Status::kDeadline, "would be late", now);
      } else {
        end_sequence(sequence, FinishReason::kError, Status::kOverrun,
                     "the reader is output_buffer_tokens behind (option overrun = fail)", now);
      }
    }
  }
}

void Engine::Parts::end_sequence(Sequence& sequence, FinishReason reason, Status status, std::string_view message,
                                 double now) {
  const Submission& submission = *sequence.submission;
  RequestResult& result = sequence.result;
  result.finish = reason;
  result.status = status;
  result.message = message;
  result.prompt_tokens = sequence.num_prompt - sequence.num_history;
  result.output_tokens = sequence.num_outputs();
  if (sequence.started_ms > 0) {
    result.queue_ms = sequence.started_ms - submission.submitted_ms;
    const double first = sequence.first_token_ms > 0 ? sequence.first_token_ms : now;
    result.prefill_ms = first - sequence.started_ms;
    result.decode_ms = now - first;
  } else {
    result.queue_ms = now - submission.submitted_ms;
    result.adapter_wait_ms = sequence.adapter_wanted_ms > 0 ? now - sequence.adapter_wanted_ms : 0;
  }
  Session* session = sequence.request().session.get();
  if (session != nullptr) {
    const bool keep = status != Status::kInternal && status != Status::kCorrupt && !submission.drop_turn.load();
    if (keep) {
      session->tokens.assign(sequence.tokens.begin(), sequence.tokens.end());  // capacity was reserved
    } else {
      sequence.kv->truncate(geometry, sequence.num_history);
    }
  }
  // The token that ended it may already be on its way out.
  Emission* emission = nullptr;
  if (num_emissions_ > 0 && emissions_[num_emissions_ - 1].submission == sequence.submission) {
    emission = &emissions_[num_emissions_ - 1];
  } else {
    emission = &emissions_[num_emissions_++];
    emission->submission = sequence.submission;
    emission->sampled_index = -1;
  }
  emission->finished = true;
  emission->result = result;

  record_end(sequence, now);
  ++counters.requests_finished;
  counters.cached_tokens += static_cast<uint64_t>(result.cached_tokens);
  if (reason == FinishReason::kCancelled) {
    ++counters.requests_cancelled;
  }
  if (reason == FinishReason::kError || reason == FinishReason::kDeadline) {
    ++counters.requests_failed;
  }
  if (Adapter* adapter = sequence.request().adapter.get(); adapter != nullptr) {
    --adapter->in_flight;
    collect_adapters = collect_adapters || adapter->unloaded.load();  // perhaps its last user
  }
  const std::shared_ptr<Adapter> adapter = sequence.request().adapter;
  scheduler->finish(sequence);  // `sequence` may be gone after this
  if (adapter != nullptr) {
    drop_prefix(*adapter);
  }
  if (session != nullptr) {
    if (session->closed.load()) {
      session->kv->truncate(geometry, 0);
    }
    session->busy.store(false);
  }
}

void Engine::Parts::keep_captured_rows() {
  for (const CaptureRow& capture : step_input->captures()) {
    const float* row = workspace->logits.row(capture.logit_row);
    if (!device->is_host()) {
      device->copy_to_host(captured_.data(), row, captured_.size() * sizeof(float), *stream);
      row = captured_.data();
    }
    capture.sequence->submission->stream->capture(capture.position, row, step_input->router_gap(capture));
  }
}

// Nothing here calls the device, which may be what failed.
void Engine::Parts::fail(Status status, const std::string& message) {
  deliver();  // what was decided before
  {
    const std::lock_guard<std::mutex> lock(mutex);
    failure = status;
    failure_message = message;
    const double now = now_ms();
    for (std::shared_ptr<Sequence>& sequence : inbox) {
      scheduler->add(std::move(sequence));
    }
    inbox.clear();
    for (const auto* list : {&scheduler->running(), &scheduler->waiting()}) {
      while (!list->empty()) {
        if (num_emissions_ == emissions_.size()) {
          emissions_.emplace_back();
        }
        end_sequence(*list->back(), FinishReason::kError, status, message, now);
      }
    }
    for (const Prefetch& prefetch : prefetches) {
      if (prefetch.queue != nullptr) {
        prefetch.queue->push({EventKind::kAdapterReady, status, prefetch.handle, prefetch.tag});
      }
    }
    prefetches.clear();
    probes_done = probes_wanted;
  }
  deliver();
  tell_queues(status);
}

void Engine::Parts::note_queue(const std::shared_ptr<CompletionQueue>& queue) {
  if (queue == nullptr || queues.contains(queue)) {
    return;
  }
  if (queues.size() >= num_queues_swept) {
    std::erase_if(queues, [](const auto& held) { return held.expired(); });
    num_queues_swept = std::max<size_t>(64, 2 * queues.size());
  }
  try {
    const auto held = queues.insert(queue).first;
    try {
      queue->expect(1);
    } catch (const std::bad_alloc&) {
      queues.erase(held);
      throw;
    }
  } catch (const std::bad_alloc&) {  // the request is refused as any other, and its session left as it was
    throw Error(Status::kNomem, "out of host memory for the events of a queue");
  }
}

// Behind the ends of requests, so that this is the last event of the engine. A close is no failure.
void Engine::Parts::tell_queues(Status status) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& held : queues) {
    const std::shared_ptr<CompletionQueue> queue = held.lock();
    if (queue == nullptr) {
      continue;
    }
    if (status == Status::kClosed) {
      queue->expect(-1);
    } else {
      queue->push({EventKind::kEngineFailed, status, 0, 0});
    }
  }
  queues.clear();
}

void Engine::Parts::check_alive() const {
  if (failure != Status::kOk) {
    throw Error(failure, failure_message);
  }
}

// Adapters that have arrived are resident from here on. One that did not ends the requests that wait for it.
void Engine::Parts::poll_loads(double now) {
  adapters->poll(failed_loads_);
  for (const FailedLoad& failed : failed_loads_) {
    if (failed.status == Status::kDeviceLost) {
      throw Error(failed.status, failed.message);
    }
    const auto& waiting = scheduler->waiting();
    for (size_t i = 0; i < waiting.size();) {
      Sequence& sequence = *waiting[i];
      const Adapter* adapter = sequence.request().adapter.get();
      if (adapter == nullptr || adapter->image != failed.image) {
        ++i;
        continue;
      }
      end_sequence(sequence, FinishReason::kError, failed.status, "adapter '" + adapter->name + "': " + failed.message,
                   now);
    }
    for (Prefetch& prefetch : prefetches) {
      if (prefetch.adapter->image == failed.image) {
        prefetch.answered = true;
        prefetch.status = failed.status;
      }
    }
  }
  failed_loads_.clear();
}

// After schedule: adapters of waiting requests come first. A prefetched one is used once: idle, most recently used.
void Engine::Parts::admit_prefetches() {
  for (Prefetch& prefetch : prefetches) {
    Adapter& adapter = *prefetch.adapter;
    if (prefetch.answered) {
      continue;
    }
    if (adapter.unloaded.load()) {
      prefetch.answered = true;
      prefetch.status = Status::kNotFound;
      continue;
    }
    Residency residency = Residency::kShort;
    if (adapters->is_placed(adapter) || !scheduler->is_short()) {
      residency = scheduler->place(adapter, scheduler->headroom(), Evict::kUnwanted);
    }
    if (residency == Residency::kResident) {
      adapters->release(adapters->acquire(adapter));
      adapters->note_start(adapter, false);
      prefetch.answered = true;
    } else if (residency == Residency::kShort && !adapters->can_place(adapter)) {
      prefetch.answered = true;
      prefetch.status = Status::kDeviceNomem;
    }
  }
}

void Engine::Parts::finish_prefetches() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(prefetches, [](const Prefetch& prefetch) {
    if (prefetch.answered && prefetch.queue != nullptr) {
      prefetch.queue->push({EventKind::kAdapterReady, prefetch.status, prefetch.handle, prefetch.tag});
    }
    return prefetch.answered;
  });
}

void Engine::Parts::audit_parts() const {
  pool->audit();
  adapters->audit();
  if (prefix != nullptr) {
    prefix->audit();
  }
  scheduler->audit();
}

void Engine::Parts::probe_bandwidth_now() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (probes_wanted == probes_done) {
      return;
    }
  }
  // Rotates over the weights, 512 MiB a probe: more than any cache, and not the part that a step has just read.
  const size_t kProbeBytes = size_t{device->is_host() ? 512u : 4096u} << 20;  // 0.1 s or 1 ms
  const std::vector<Weights::Area> areas = weights->areas();
  double bytes = 0;
  const double start = now_ms();
  while (bytes < static_cast<double>(kProbeBytes) && !areas.empty()) {
    const Weights::Area& area = areas[probe_area_ % areas.size()];
    const size_t count = std::min(kProbeBytes, area.bytes - probe_offset_);
    kernels->read_memory({area.data + probe_offset_, count, nullptr}, *stream);
    bytes += static_cast<double>(count);
    probe_offset_ += count;
    if (probe_offset_ >= area.bytes) {
      probe_offset_ = 0;
      ++probe_area_;
    }
  }
  const double seconds = (now_ms() - start) / 1e3;
  const std::lock_guard<std::mutex> lock(mutex);
  probe_bandwidth = seconds > 0 ? bytes / seconds : 0;
  probes_done = probes_wanted;
  progress.notify_all();
}

}  // namespace moelora
