// SPDX-License-Identifier: Apache-2.0
// What must be true between two steps. The rest of the scheduler is in scheduler.cc.
#include <algorithm>

#include "kernels/base/error.h"
#include "runtime/engine/scheduler.h"

namespace moelora {

void Scheduler::audit() const {
  size_t rows = free_rows_.size();
  for (const auto& sequence : running_) {
    MOELORA_ASSERT(sequence->state == SequenceState::kRunning && sequence->batch_row >= 0);
    MOELORA_ASSERT(sequence->kv->pages.size() >= geometry_.pages(sequence->kv->length));
    ++rows;
  }
  MOELORA_ASSERT(rows == static_cast<size_t>(limits_.num_sequences_max));
  int32_t swapped = 0;
  for (const auto& sequence : waiting_) {
    MOELORA_ASSERT(sequence->state == SequenceState::kWaiting && sequence->batch_row < 0 && sequence->slot == 0);
    MOELORA_ASSERT(sequence->swap.num_pages == 0 || sequence->kv->length == 0);
    swapped += sequence->swap.num_pages;
  }
  if (swap_space_ != nullptr) {
    for (const Swap& swap : swapped_in_) {
      swapped += swap.num_pages;
    }
    swap_space_->audit();
    MOELORA_ASSERT(swapped == swap_space_->num_places() - swap_space_->num_free());
  }
  MOELORA_ASSERT(std::is_sorted(running_.begin(), running_.end(),
                                [](const auto& a, const auto& b) { return ranks_before(*a, *b); }));
}

}  // namespace moelora
