// SPDX-License-Identifier: Apache-2.0
// Early refusal: requests that would only run into their deadline do not take time from those that can meet theirs
// (S-LoRA's early abort). The rest of the scheduler is in scheduler.cc.
#include <algorithm>

#include "runtime/engine/scheduler.h"

namespace moelora {
namespace {

// Output tokens without which it does not end; one that stops where it likes may do so at its first.
int32_t outputs_needed(const Sequence& sequence) {
  const Request& request = sequence.request();
  if (request.sampling.ignore_eos && request.stop_tokens.empty() && request.stop_strings.empty()) {
    return static_cast<int32_t>(sequence.tokens_max) - sequence.num_tokens();
  }
  return std::max(1, request.sampling.min_tokens - sequence.num_outputs());
}

}  // namespace

// Kind to the request: rates are the best that were seen, of the rows before it only prompts that nothing blocks count,
// and rows, slots and pages are there at once.
void Scheduler::mark_late(double now) {
  if (!limits_.refuses_early) {
    return;
  }
  const double row_ms = rates_.prefill_rows_per_ms > 0 ? 1.0 / rates_.prefill_rows_per_ms : 0.0;
  double rows_before = 0;
  size_t running = 0;
  for (const auto& held : waiting_) {
    Sequence& sequence = *held;
    for (; running < running_.size() && ranks_before(*running_[running], sequence); ++running) {
      const Sequence& before = *running_[running];
      rows_before += before.num_pending() > 1 && !is_paused(before) ? before.num_pending() : 0;
    }
    const int32_t rows = sequence.swap.num_pages > 0 ? 1 : sequence.num_pending();
    const double deadline = sequence.submission->deadline_at_ms;
    const double before = limits_.is_fair_by_adapter ? 0.0 : rows_before;
    const double least_ms = (before + rows) * row_ms + (outputs_needed(sequence) - 1) * rates_.decode_step_ms;
    sequence.is_late = deadline > 0 && now + least_ms > deadline;
    const Adapter* adapter = sequence.request().adapter.get();
    const bool is_there = adapter == nullptr || sequence.row_scale == 0.0f || adapter->slot.load() > 0;
    if (is_there && !sequence.is_late && sequence.blocked_at < 0 && !is_paused(sequence)) {
      rows_before += rows;
    }
  }
}

}  // namespace moelora
