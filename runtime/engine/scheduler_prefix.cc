// SPDX-License-Identifier: Apache-2.0
// What the prefix cache does for those who start and run. The rest of the scheduler is in scheduler.cc.
#include <algorithm>

#include "runtime/engine/scheduler.h"
#include "runtime/memory/prefix_cache.h"

namespace moelora {
namespace {

// A waiting sequence that found too little looks again after so many tries: others may have computed more of it.
constexpr int32_t kTriesPerLook = 16;

// Takes what is cached of the tokens still to be computed. One row must remain, and those whose logits are kept.
int32_t adopt(PrefixCache* prefix, Sequence& sequence) {
  if (sequence.space == nullptr || sequence.swap.num_pages > 0) {  // what was swapped out comes back as a whole
    return 0;
  }
  int32_t limit = sequence.num_tokens() - 1;
  if (sequence.request().capture_from >= 0) {
    limit = std::min(limit, sequence.num_history + sequence.request().capture_from);
  }
  return prefix->adopt(*sequence.kv, sequence.space, sequence.tokens.data(), limit);
}

}  // namespace

// What reclaim_idle can free. Pages that two sessions share count twice.
int32_t Scheduler::num_reclaimable(Evict evict) const {
  int32_t pages = adapters_.num_idle_pages(evict) + (prefix_ == nullptr ? 0 : prefix_->num_idle_pages());
  for (const auto& session : sessions_) {
    pages += session->busy ? 0 : session->kv->pages.size();
  }
  return pages;
}

// The pages of all tokens of a sequence that starts, and a block of headroom for each running one, or admitting it now
// would preempt one soon. Nothing leaves for it unless there is enough.
bool Scheduler::take_pages(Sequence& sequence) {
  KvSequence& kv = *sequence.kv;
  kv.make_tail_private(geometry_, pool_);
  const int32_t held = kv.length;
  const auto can_fit = [&](int32_t num_found) {
    const int32_t lacking =
        geometry_.pages(sequence.num_tokens()) - std::max(kv.pages.size(), geometry_.pages(num_found));
    // With nobody running, sessions that wait give up what they keep, too.
    return running_.empty() || lacking + headroom() <= pool_.num_free() + num_reclaimable(Evict::kAny);
  };
  if (sequence.num_tries % kTriesPerLook != 0 && !can_fit(sequence.num_cached_seen)) {
    ++sequence.num_tries;
    return false;
  }
  const int32_t found = adopt(prefix_, sequence);
  bool fits = can_fit(0);
  const auto is_done = [&] {
    return kv.try_extend(geometry_, sequence.num_tokens()) && pool_.num_free() >= headroom();
  };
  while (fits && !is_done()) {
    const int32_t lacking = geometry_.pages(sequence.num_tokens()) - kv.pages.size() + headroom() - pool_.num_free();
    fits = reclaim_idle(Evict::kAny, lacking) || (running_.empty() && reclaim_waiting(&sequence));
  }
  if (!fits) {
    ++sequence.num_tries;
    sequence.num_cached_seen = held + found;
    kv.truncate(geometry_, held);
    return false;
  }
  if (prefix_ != nullptr) {
    ++prefix_->counters.queries;
    prefix_->counters.query_tokens += static_cast<uint64_t>(sequence.num_tokens() - held);
    prefix_->counters.hit_tokens += static_cast<uint64_t>(found);
  }
  return true;
}

// Prompts go on behind others that have computed the same since.
void Scheduler::adopt_running() {
  if (prefix_ == nullptr) {
    return;
  }
  prefix_->set_now(adapters_.tick());
  for (const auto& sequence : running_) {
    if (sequence->num_pending() <= 1) {
      continue;
    }
    const int32_t found = adopt(prefix_, *sequence);
    prefix_->counters.hit_tokens += static_cast<uint64_t>(found);
    if (sequence->num_outputs() == 0 && sequence->result.preemptions == 0) {
      sequence->result.cached_tokens += found;
    }
  }
}

}  // namespace moelora
