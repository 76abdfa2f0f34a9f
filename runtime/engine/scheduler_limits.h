// SPDX-License-Identifier: Apache-2.0
// What the scheduler is given, and what it promises for it. The scheduler itself is in scheduler.h.
//
// Rank is (priority, arrival). In these words N = num_sequences_max, W = num_overtaking_steps_max, O = the longest
// output, C = the most steps of a prompt, ceil(tokens / (num_rows_max - N + 1)); a step is one with rows in it.
//
// No deadlock. Whoever runs holds a row, a slot and pages; whoever waits holds nothing (a session's kept KV is idle
// cache to all others). Running ones ask for more pages only, and are served in order of rank: idle adapters and idle
// sessions give way, then uploads, then those of lower rank. submit refuses what would not fit alone, so the first in
// rank of those who run always gets its pages and a row, ends within C + O of its steps, and the rest by induction.
// When none run, all that is left in the pool is idle or an upload that ends by itself, so the first that waits can
// start. Only what a host does not let go of can hold it up: pins, and output that nobody reads.
//
// Bounded waiting. A waiting request that lacks a slot or pages is overtaken for W steps at most: from the first in
// which another could have gone before it, W steps later nobody behind it starts until it has. If at its arrival Q that
// wait rank before it, and the pool holds the KV of N longest requests beside as many adapters, its first token comes
// within
//     W + (Q + 3) D + C steps, D = N C + O,
// those aside in which its own adapter is on its way. For D steps without a start suffice to end all that run, then the
// first in rank starts, Q + 1 times at most; W counts once, as do what ran before the W steps, and those that took the
// rows while its adapter was on its way. The rank is that of arrival: with fairness between adapters (fair_order.h) Q
// are those that the counters put before it. In a smaller pool the bound is finite still (no deadlock, above), not
// this.
//
// Rows are not grouped by adapter in a batch: StepInput hands the kernels the rows sorted by slot and moe_sort the
// pairs by (expert, slot), whatever their order; and as entries stay in order of rank, a row of the block tables keeps
// its sequence from step to step and is not pushed again.
#pragma once

#include <cstdint>

namespace moelora {

struct SchedulerLimits {
  int32_t num_sequences_max = 0, num_rows_max = 0, num_logit_rows_max = 0;
  int32_t num_waiting_max = 0;
  int32_t num_prefetched_max = 0;  // of those who wait
  int32_t output_buffer_tokens = 0;
  int32_t num_overtaking_steps_max = 256;
  int32_t num_loads_max = 16;       // uploads begun in a step
  bool is_fair_by_adapter = false;  // else by arrival
  bool refuses_early = false;       // those whose deadline cannot be met
};

// What was measured so far, at best; 0 = not known.
struct SchedulerRates {
  double prefill_rows_per_ms = 0;
  double decode_step_ms = 0;
  double swap_bytes_per_ms = 0;  // of one copy between pool and host
};

struct SchedulerCounters {
  uint64_t preemptions = 0, swaps = 0 /* of those */, sessions_evicted = 0;
};

enum class Room : uint8_t { kTaken, kSoon, kNone };  // kSoon: an upload gives way. kNone: nobody does

constexpr int32_t kUploadsMax = 4;  // begun for one waiting request; then those behind it wait with it

}  // namespace moelora
