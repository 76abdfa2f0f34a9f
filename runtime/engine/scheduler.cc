// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/scheduler.h"

#include <algorithm>

#include "kernels/base/error.h"
#include "runtime/memory/prefix_cache.h"

namespace moelora {

Scheduler::Scheduler(const SchedulerLimits& limits, const KvGeometry& geometry, PagePool& pool, AdapterCache& adapters,
                     SwapSpace* swap_space, PrefixCache* prefix)
    : limits_(limits),
      geometry_(geometry),
      pool_(pool),
      adapters_(adapters),
      swap_space_(swap_space),
      prefix_(prefix),
      order_(limits.is_fair_by_adapter, static_cast<size_t>(limits.num_waiting_max + limits.num_sequences_max)) {
  swapped_in_.reserve(static_cast<size_t>(limits.num_sequences_max));
  running_.reserve(static_cast<size_t>(limits.num_sequences_max));
  // A preempted sequence waits again on top of a full queue.
  waiting_.reserve(static_cast<size_t>(limits.num_waiting_max + limits.num_sequences_max));
  for (int32_t row = limits.num_sequences_max; row-- > 0;) {
    free_rows_.push_back(row);
  }
}

bool Scheduler::ranks_before(const Sequence& a, const Sequence& b) {
  const int32_t priority_a = a.request().priority;
  const int32_t priority_b = b.request().priority;
  return priority_a != priority_b ? priority_a > priority_b : a.arrival < b.arrival;
}

void Scheduler::insert_waiting(std::shared_ptr<Sequence> sequence) {
  const auto at = std::upper_bound(waiting_.begin(), waiting_.end(), sequence,
                                   [](const auto& a, const auto& b) { return ranks_before(*a, *b); });
  waiting_.insert(at, std::move(sequence));
}

void Scheduler::add(std::shared_ptr<Sequence> sequence) {
  sequence->state = SequenceState::kWaiting;
  order_.note_arrival(*sequence, waiting_);
  insert_waiting(std::move(sequence));
}

void Scheduler::remove_session(const Session& session) {
  std::erase_if(sessions_, [&](const auto& held) { return held.get() == &session; });
}

void Scheduler::drop_all_pages() {
  for (const auto& session : sessions_) {
    session->kv->truncate(geometry_, 0);
  }
}

bool Scheduler::is_paused(const Sequence& sequence) const {
  return sequence.num_unread() >= static_cast<size_t>(limits_.output_buffer_tokens);
}

int32_t Scheduler::rows_that_fit(const Batch& batch, const Sequence& sequence) const {
  int32_t rows = std::min(limits_.num_rows_max - batch.num_rows, sequence.num_pending());
  const int32_t logit_rows = limits_.num_logit_rows_max - batch.num_logit_rows;
  const int32_t capture_from = sequence.request().capture_from;
  if (capture_from < 0) {
    return logit_rows > 0 ? rows : 0;
  }
  // Positions from capture_from on need a logits row each.
  const int32_t uncaptured = std::max(0, sequence.num_history + capture_from - sequence.kv->length);
  return std::min(rows, uncaptured + logit_rows);
}

void Scheduler::add_entry(Batch& batch, Sequence& sequence, int32_t count) {
  BatchEntry entry;
  entry.sequence = &sequence;
  entry.first = sequence.kv->length;
  entry.count = count;
  entry.samples = count == sequence.num_pending();
  if (entry.samples) {
    order_.note_output(sequence);
  }
  int32_t logit_rows = entry.samples ? 1 : 0;
  if (sequence.request().capture_from >= 0) {
    entry.capture_first = sequence.num_history + sequence.request().capture_from;
    logit_rows = std::max(logit_rows, entry.first + count - std::max(entry.first, entry.capture_first));
  }
  batch.entries.push_back(entry);
  batch.num_rows += count;
  batch.num_logit_rows += logit_rows;
  if (sequence.num_pending() > 1) {
    batch.num_prefill_rows += count;
  }
}

void Scheduler::schedule_running(Batch& batch, bool decode) {
  // Preemption takes sequences out from behind index i only, or sequence i itself.
  for (size_t i = 0; i < running_.size();) {
    Sequence& sequence = *running_[i];
    const int32_t count = rows_that_fit(batch, sequence);
    if ((sequence.num_pending() == 1) != decode || count <= 0 || is_paused(sequence)) {
      ++i;
      continue;
    }
    const Room room = ensure_pages(sequence, sequence.kv->length + count, batch);
    if (room == Room::kNone) {
      preempt(sequence, batch);
      continue;
    }
    if (room == Room::kTaken) {
      add_entry(batch, sequence, count);
    }
    ++i;
  }
}

int32_t Scheduler::headroom() const {
  return static_cast<int32_t>(running_.size()) * geometry_.layout.num_groups;
}

Residency Scheduler::place(Adapter& adapter, int32_t pages_beside, Evict evict) {
  const bool was_placed = adapters_.is_placed(adapter);
  // Another step begins it. One that copies pages to the host lets no upload write to them.
  if (!was_placed && (num_loads_ == limits_.num_loads_max || is_swapping_out_)) {
    return Residency::kLoading;
  }
  Residency residency = adapters_.place(adapter, pages_beside, evict);
  // Where no slot is free, idle sessions cannot help.
  const auto lacking = [&] { return adapters_.pages_of(*adapter.image) + pages_beside - pool_.num_free(); };
  while (residency == Residency::kShort && adapters_.has_free_slot() && reclaim_idle(evict, lacking())) {
    residency = adapters_.place(adapter, pages_beside, evict);
  }
  num_loads_ += !was_placed && adapters_.is_placed(adapter) ? 1 : 0;
  return residency;
}

Residency Scheduler::try_start(Sequence& sequence) {
  Adapter* adapter = sequence.request().adapter.get();
  if (adapter != nullptr && sequence.row_scale != 0.0f) {
    // What is short goes to those before: placing this one's adapter could cost them theirs, again and again.
    const bool was_placed = adapters_.is_placed(*adapter);
    if (is_short_ && !was_placed) {
      return Residency::kShort;
    }
    const int32_t pages = geometry_.pages(sequence.num_tokens()) - sequence.kv->pages.size();
    Residency residency = place(*adapter, std::max(0, pages) + headroom());
    while (residency == Residency::kShort && adapters_.has_free_slot() && running_.empty() &&
           reclaim_waiting(&sequence)) {
      residency = place(*adapter, std::max(0, pages) + headroom());
    }
    if (residency != Residency::kResident) {
      sequence.num_uploads += !was_placed && adapters_.is_placed(*adapter) ? 1 : 0;
      return residency;
    }
    sequence.slot = adapters_.acquire(*adapter);
  }
  if (!take_pages(sequence)) {
    if (sequence.slot > 0) {
      adapters_.release(sequence.slot);
    }
    sequence.slot = 0;
    return Residency::kShort;
  }
  sequence.batch_row = free_rows_.back();
  free_rows_.pop_back();
  return Residency::kResident;
}

void Scheduler::start(Sequence& sequence, Batch& batch, double now) {
  order_.note_start(sequence);
  const auto held =
      std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& other) { return other.get() == &sequence; });
  std::shared_ptr<Sequence> owner = std::move(*held);
  waiting_.erase(held);
  const auto at =
      std::find_if(running_.begin(), running_.end(), [&](const auto& other) { return ranks_before(sequence, *other); });
  running_.insert(at, std::move(owner));
  sequence.state = SequenceState::kRunning;
  if (sequence.slot > 0) {
    adapters_.note_start(*sequence.request().adapter, sequence.started_ms == 0);
  }
  if (sequence.started_ms == 0 && sequence.adapter_wanted_ms > 0) {
    sequence.result.adapter_wait_ms = now - sequence.adapter_wanted_ms;
  }
  if (sequence.swap.num_pages > 0) {
    swap_in(sequence, batch);
  }
  if (sequence.num_outputs() == 0 && sequence.result.preemptions == 0) {
    sequence.result.cached_tokens = sequence.kv->length;
  }
  if (const int32_t count = rows_that_fit(batch, sequence); count > 0) {
    add_entry(batch, sequence, count);
  }
}

void Scheduler::admit_waiting(Batch& batch, double now) {
  bool is_held = false;  // by one before whom nobody starts any more
  order_.begin(waiting_);
  while (Sequence* next = order_.next(waiting_)) {
    Sequence& sequence = *next;
    if (is_held) {
      note_blocked(sequence);
      continue;
    }
    if (is_paused(sequence) || waits_for_pins(sequence)) {  // those behind may have what it cannot
      continue;
    }
    if (rows_that_fit(batch, sequence) <= 0) {
      return;
    }
    const Residency tried = free_rows_.empty() ? Residency::kShort : try_start(sequence);
    if (tried == Residency::kResident) {
      start(sequence, batch, now);
    } else if (tried == Residency::kLoading) {
      if (sequence.adapter_wanted_ms == 0) {
        sequence.adapter_wanted_ms = now;
      }
      // Each time it was there others had taken the pages: those behind wait with it now.
      is_held = sequence.num_uploads > kUploadsMax;
      is_short_ = is_short_ || is_held;
    } else if (preempt_paused(batch)) {
      order_.begin(waiting_);  // who does not read waits; the list has changed
      is_short_ = false;
    } else if (free_rows_.empty()) {
      return;
    } else {
      is_short_ = true;
      is_held = note_blocked(sequence) >= limits_.num_overtaking_steps_max;
    }
  }
}

void Scheduler::schedule(Batch& batch, double now) {
  batch.entries.clear();
  batch.num_rows = batch.num_prefill_rows = batch.num_logit_rows = 0;
  batch.swaps_out.clear();
  batch.swaps_in.clear();
  for (Swap& swap : swapped_in_) {
    swap_space_->release(swap);
  }
  swapped_in_.clear();
  is_short_ = is_swapping_out_ = false;
  num_loads_ = 0;
  pinned_ = adapters_.pinned();
  adopt_running();
  schedule_running(batch, true);
  schedule_running(batch, false);
  // What preemption or a given-up upload frees is for those who run; who lost it must not take it back at once.
  if (!is_short_) {
    admit_waiting(batch, now);
  }
  prefetch_waiting();
  num_steps_ += batch.entries.empty() ? 0 : 1;
}

void Scheduler::finish(Sequence& sequence) {
  std::vector<std::shared_ptr<Sequence>>& list = sequence.state == SequenceState::kRunning ? running_ : waiting_;
  const auto at = std::find_if(list.begin(), list.end(), [&](const auto& held) { return held.get() == &sequence; });
  MOELORA_ASSERT(at != list.end());
  const std::shared_ptr<Sequence> owner = std::move(*at);
  list.erase(at);
  if (sequence.state == SequenceState::kWaiting) {
    order_.note_leave(sequence);
  }
  if (swap_space_ != nullptr) {
    swap_space_->release(sequence.swap);
  }
  sequence.state = SequenceState::kFinished;
  give_back(sequence);
  if (sequence.request().session != nullptr) {
    sequence.request().session->last_used = ++session_clock_;
  } else {
    sequence.kv->truncate(geometry_, 0);
  }
  if (sequence.space != nullptr) {
    prefix_->close_space(sequence.space);
    sequence.space = nullptr;
  }
}

}  // namespace moelora
