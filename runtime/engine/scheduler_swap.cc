// SPDX-License-Identifier: Apache-2.0
// Preempted sequences whose KV goes to host memory and comes back. The pages are leased to others at once: all that
// writes to them in this step comes behind the copies in the order of the stream, but uploads, none of which begins in
// such a step. The rest of the scheduler is in scheduler.cc.
#include "kernels/base/error.h"
#include "runtime/engine/scheduler.h"

namespace moelora {
namespace {

void append(PageMoves& moves, const SwapSpace& space, const Swap& swap, const PageId* pages) {
  int32_t place = swap.first;
  for (int32_t i = 0; i < swap.num_pages; ++i, place = space.next(place)) {
    moves.pages.push_back(pages[i]);
    moves.places.push_back(place);
  }
}

}  // namespace

void Scheduler::swap_out(Sequence& sequence, Batch& batch) {
  const int32_t tokens = sequence.kv->length;
  const int32_t pages = geometry_.pages(tokens);
  if (swap_space_ == nullptr || pages == 0) {
    return;
  }
  // There and back against computing them; what is not known yet costs nothing in a copy and much in computing.
  if (rates_.swap_bytes_per_ms > 0 && rates_.prefill_rows_per_ms > 0) {
    const double bytes = 2.0 * pages * static_cast<double>(geometry_.page_bytes);
    if (bytes / rates_.swap_bytes_per_ms >= tokens / rates_.prefill_rows_per_ms) {
      return;
    }
  }
  if (!swap_space_->try_take(pages, tokens, &sequence.swap)) {
    return;
  }
  append(batch.swaps_out, *swap_space_, sequence.swap, sequence.kv->pages.data());
  is_swapping_out_ = true;
  ++counters_.swaps;
}

void Scheduler::swap_in(Sequence& sequence, Batch& batch) {
  MOELORA_ASSERT(sequence.kv->length == 0 && sequence.kv->pages.size() >= sequence.swap.num_pages);
  append(batch.swaps_in, *swap_space_, sequence.swap, sequence.kv->pages.data());
  sequence.kv->length = sequence.swap.num_tokens;
  swapped_in_.push_back(sequence.swap);
  sequence.swap = {};
}

}  // namespace moelora
