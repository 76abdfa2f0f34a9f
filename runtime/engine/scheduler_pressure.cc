// SPDX-License-Identifier: Apache-2.0
// Who gives way when slots or pages are short: idle adapters and cached blocks, idle sessions, sequences of lower rank,
// readers who do not read. The rest of the scheduler is in scheduler.cc.
#include <algorithm>

#include "kernels/base/error.h"
#include "runtime/engine/scheduler.h"
#include "runtime/memory/prefix_cache.h"

namespace moelora {
namespace {

// What it takes to compute a page of KV again, where uploading a page of an adapter takes 1. Of gpt-oss-20b an H200
// computes 58,000 prompt tokens or 2.9 GB of KV a second and takes up 25 GB of adapters; on CPUs it is up to 100.
constexpr double kComputePerUpload = 16.0;

// Cached blocks leave before the next idle adapter as long as they are worth less: what has not been used for an age
// comes back about once in that age, blocks less often by their reuse rate, and costs what getting it again takes.
bool evict_blocks(PrefixCache& prefix, AdapterCache& adapters, const PagePool& pool, Evict evict, int32_t pages) {
  const int32_t free_before = pool.num_free();
  if (prefix.num_idle_pages() == 0) {
    return false;
  }
  const auto now = static_cast<double>(adapters.tick());
  const std::optional<uint64_t> adapter_since = adapters.idle_since(evict);
  while (prefix.num_idle_pages() > 0 && pool.num_free() - free_before < std::max(1, pages)) {
    const double worth = kComputePerUpload * prefix.reuse_rate();
    if (adapter_since &&
        now - static_cast<double>(prefix.idle_since()) < worth * (now - static_cast<double>(*adapter_since))) {
      break;
    }
    prefix.evict();
  }
  return pool.num_free() > free_before;
}

}  // namespace

bool Scheduler::reclaim_idle(Evict evict, int32_t pages) {
  if (prefix_ != nullptr && evict_blocks(*prefix_, adapters_, pool_, evict, pages)) {
    return true;
  }
  if (adapters_.evict_idle(evict)) {
    return true;
  }
  Session* oldest = nullptr;
  for (const auto& session : sessions_) {
    if (session->busy || session->kv->pages.size() == 0) {
      continue;
    }
    if (oldest == nullptr || session->last_used < oldest->last_used) {
      oldest = session.get();
    }
  }
  if (oldest == nullptr) {
    return false;
  }
  oldest->kv->truncate(geometry_, 0);
  ++counters_.sessions_evicted;
  return true;
}

// Shared blocks are full, so that none counts twice.
int64_t Scheduler::num_unfilled_positions() const {
  const auto unfilled = [&](const KvSequence& kv) {
    return int64_t{kv.pages.size() / geometry_.layout.num_groups} * geometry_.layout.block_tokens - kv.length;
  };
  int64_t positions = 0;
  for (const auto& sequence : running_) {
    positions += sequence->request().session == nullptr ? unfilled(*sequence->kv) : 0;
  }
  for (const auto& session : sessions_) {
    positions += unfilled(*session->kv);
  }
  return positions;
}

// Drops the KV that a session has kept for the last of those who wait behind `wants` (null, or by adapter: of all), or
// before it for the host to unpin what keeps them out.
bool Scheduler::reclaim_waiting(const Sequence* wants) {
  bool is_before = false;
  for (size_t i = waiting_.size(); i-- > 0;) {
    const Sequence& held = *waiting_[i];
    if (&held == wants) {
      is_before = !limits_.is_fair_by_adapter;
    } else if (held.kv->pages.size() > 0 && (!is_before || waits_for_pins(held))) {
      held.kv->truncate(geometry_, 0);
      ++counters_.sessions_evicted;
      return true;
    }
  }
  return false;
}

Sequence* Scheduler::preemption_victim(const Sequence& wants, const Batch& batch) const {
  for (size_t i = running_.size(); i-- > 0;) {
    Sequence* candidate = running_[i].get();
    if (!ranks_before(wants, *candidate)) {
      return nullptr;
    }
    const bool in_batch = std::any_of(batch.entries.begin(), batch.entries.end(),
                                      [&](const BatchEntry& entry) { return entry.sequence == candidate; });
    if (!in_batch && candidate->kv->pages.size() > 0) {
      return candidate;
    }
  }
  return nullptr;
}

Room Scheduler::ensure_pages(Sequence& sequence, int32_t tokens, Batch& batch) {
  while (!sequence.kv->try_extend(geometry_, tokens)) {
    const int32_t lacking = geometry_.pages(tokens) - sequence.kv->pages.size() - pool_.num_free();
    if (reclaim_idle(Evict::kAny, lacking) || reclaim_waiting(nullptr)) {
      continue;
    }
    is_short_ = true;
    if (adapters_.give_up_newest_upload()) {
      return Room::kSoon;
    }
    Sequence* victim = preemption_victim(sequence, batch);
    if (victim == nullptr) {
      return Room::kNone;
    }
    preempt(*victim, batch);
  }
  return Room::kTaken;
}

void Scheduler::give_back(Sequence& sequence) {
  if (sequence.slot > 0) {
    adapters_.release(sequence.slot);
  }
  sequence.slot = 0;
  if (sequence.batch_row >= 0) {
    free_rows_.push_back(sequence.batch_row);
  }
  sequence.batch_row = -1;
  sequence.token_state_ready = false;
}

void Scheduler::preempt(Sequence& sequence, Batch& batch) {
  const auto at =
      std::find_if(running_.begin(), running_.end(), [&](const auto& held) { return held.get() == &sequence; });
  MOELORA_ASSERT(at != running_.end());
  std::shared_ptr<Sequence> owner = *at;
  running_.erase(at);
  swap_out(sequence, batch);
  sequence.kv->truncate(geometry_, 0);
  give_back(sequence);
  sequence.state = SequenceState::kWaiting;
  order_.note_wait(sequence);
  ++sequence.result.preemptions;
  ++counters_.preemptions;
  insert_waiting(std::move(owner));
}

// A running sequence whose reader is behind gives up everything for those who wait.
bool Scheduler::preempt_paused(Batch& batch) {
  for (size_t i = running_.size(); i-- > 0;) {
    if (is_paused(*running_[i])) {
      preempt(*running_[i], batch);
      return true;
    }
  }
  return false;
}

int64_t Scheduler::note_blocked(Sequence& sequence) const {
  sequence.blocked_at = sequence.blocked_at < 0 ? num_steps_ : sequence.blocked_at;
  return num_steps_ - sequence.blocked_at;
}

// What the host has pinned leaves no slot or too few pages for it, whoever else gives way.
bool Scheduler::waits_for_pins(const Sequence& sequence) const {
  if (pinned_.slots == 0) {
    return false;
  }
  const Adapter* adapter = sequence.row_scale != 0.0f ? sequence.request().adapter.get() : nullptr;
  int32_t pages = pinned_.pages + geometry_.pages(sequence.num_tokens());
  if (adapter != nullptr && !adapters_.is_pinned(*adapter)) {
    pages += adapters_.pages_of(*adapter->image);
  }
  return pages > pool_.num_pages() || (adapter != nullptr && !adapters_.can_place(*adapter));
}

}  // namespace moelora
