// SPDX-License-Identifier: Apache-2.0
// Adapters of the next requests of the queue come to the device while those still wait, for a row or for others. The
// rest of the scheduler is in scheduler.cc.
#include <algorithm>

#include "runtime/engine/scheduler.h"

namespace moelora {

// After admit_waiting. What is there already is marked first, so that none of it leaves for another; then the rest is
// placed in the order of admission. All of it is ahead of need: nothing leaves unless it makes room enough, and the
// pages that those before will take stay free.
void Scheduler::prefetch_waiting() {
  adapters_.forget_wanted();
  const auto walk = [&](const auto& visit) {
    int32_t left = limits_.num_prefetched_max;
    order_.begin(waiting_);
    double passed = 0;
    while (Sequence* next = left > 0 ? order_.next(waiting_, passed) : nullptr) {
      Sequence& sequence = *next;
      passed = 0;
      if (is_paused(sequence)) {
        continue;
      }
      passed = FairOrder::prompt_price(sequence);
      --left;
      if (!visit(sequence, sequence.row_scale != 0.0f ? sequence.request().adapter.get() : nullptr)) {
        return;
      }
    }
  };
  walk([&](const Sequence&, const Adapter* adapter) {
    if (adapter != nullptr) {
      adapters_.mark_wanted(*adapter);
    }
    return true;
  });
  if (is_short_) {
    return;
  }
  int32_t pages_beside = headroom();
  walk([&](Sequence& sequence, Adapter* adapter) {
    pages_beside += std::max(0, geometry_.pages(sequence.num_tokens()) - sequence.kv->pages.size());
    if (adapter == nullptr || adapters_.is_placed(*adapter)) {
      return true;
    }
    const int32_t lacking = pages_beside + adapters_.pages_of(*adapter->image) - pool_.num_free();
    if ((lacking > 0 && num_reclaimable(Evict::kUnwanted) < lacking) ||
        place(*adapter, pages_beside, Evict::kUnwanted) == Residency::kShort || !adapters_.mark_wanted(*adapter)) {
      return false;
    }
    sequence.num_uploads += adapters_.is_placed(*adapter) ? 1 : 0;  // 0 while it is read from the disk
    return true;
  });
}

}  // namespace moelora
