// SPDX-License-Identifier: Apache-2.0
// Who runs in the next step. Continuous batching: every running sequence in decode gets its row, prefills share the
// rest of the token budget in chunks, waiting requests are admitted in order of (priority, arrival) while rows,
// slots and pages last; one whose adapter is on its way to the device waits for it while those behind it go first.
// Pure logic: no clock, no device; callers hold the engine's lock. What it promises is in scheduler_limits.h.
//
// Pages: a sequence takes those of its prompt when it is admitted, cached blocks first, and grows by a block in decode.
// When the pool is short, idle adapters and cached blocks leave, then KV of idle and of waiting sessions, then uploads
// are given up (pages come back some steps later), then the running sequence of lowest rank that is not in the batch is
// preempted: its pages' contents go to host memory and come back, or are computed anew, as is cheaper.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/adapter/adapter_cache.h"
#include "runtime/engine/batch.h"
#include "runtime/engine/fair_order.h"
#include "runtime/engine/scheduler_limits.h"

namespace moelora {

class Scheduler {
 public:
  Scheduler(const SchedulerLimits& limits, const KvGeometry& geometry, PagePool& pool, AdapterCache& adapters,
            SwapSpace* swap_space = nullptr, PrefixCache* prefix = nullptr);
  void add(std::shared_ptr<Sequence> sequence);
  void add_session(std::shared_ptr<Session> session) { sessions_.push_back(std::move(session)); }
  void remove_session(const Session& session);
  void drop_all_pages();  // of sessions, before the pool goes
  [[nodiscard]] SchedulerRates& rates() { return rates_; }
  // With early refusal: sets is_late of those who wait and cannot end in time at these rates. The caller ends them.
  void mark_late(double now);
  [[nodiscard]] FairShare& base_share() { return order_.base_share(); }
  // Fills `batch`; entries point into sequences that stay alive until the next call of schedule or finish.
  void schedule(Batch& batch, double now);
  // What is idle gives way to the adapter; `pages_beside` stay free, of which those who run need `headroom`.
  [[nodiscard]] Residency place(Adapter& adapter, int32_t pages_beside, Evict evict = Evict::kAny);
  [[nodiscard]] int32_t headroom() const;
  // Somebody waits for slots or pages: no adapter may be placed but for those that rank before.
  [[nodiscard]] bool is_short() const { return is_short_; }
  // Takes a running or waiting sequence out: slot and row go back, KV goes to its session or to the pool.
  void finish(Sequence& sequence);
  // Drops idle adapters and cached blocks, then idle sessions' KV: true if anything was, perhaps less than asked.
  bool reclaim_idle(Evict evict = Evict::kAny, int32_t pages = 1);

  [[nodiscard]] const std::vector<std::shared_ptr<Sequence>>& running() const { return running_; }
  [[nodiscard]] const std::vector<std::shared_ptr<Sequence>>& waiting() const { return waiting_; }
  [[nodiscard]] size_t num_sessions() const { return sessions_.size(); }
  [[nodiscard]] int64_t num_unfilled_positions() const;  // of leased blocks
  [[nodiscard]] const SchedulerCounters& counters() const { return counters_; }
  // Re-derives page and row counts from the sequences; throws Error{kInternal}.
  void audit() const;

 private:
  static bool ranks_before(const Sequence& a, const Sequence& b);
  void insert_waiting(std::shared_ptr<Sequence> sequence);
  void schedule_running(Batch& batch, bool decode);
  void admit_waiting(Batch& batch, double now);
  void prefetch_waiting();
  [[nodiscard]] Residency try_start(Sequence& sequence);  // kResident: it has all that it needs
  [[nodiscard]] bool take_pages(Sequence& sequence);
  void adopt_running();
  [[nodiscard]] int32_t num_reclaimable(Evict evict) const;
  void start(Sequence& sequence, Batch& batch, double now);
  int64_t note_blocked(Sequence& sequence) const;  // for how many steps it has been
  bool reclaim_waiting(const Sequence* wants);
  bool preempt_paused(Batch& batch);
  [[nodiscard]] bool waits_for_pins(const Sequence& sequence) const;
  [[nodiscard]] Room ensure_pages(Sequence& sequence, int32_t tokens, Batch& batch);
  [[nodiscard]] Sequence* preemption_victim(const Sequence& wants, const Batch& batch) const;
  void preempt(Sequence& sequence, Batch& batch);
  void swap_out(Sequence& sequence, Batch& batch);  // if it pays and there is room
  void swap_in(Sequence& sequence, Batch& batch);
  void give_back(Sequence& sequence);
  [[nodiscard]] bool is_paused(const Sequence& sequence) const;
  void add_entry(Batch& batch, Sequence& sequence, int32_t count);
  [[nodiscard]] int32_t rows_that_fit(const Batch& batch, const Sequence& sequence) const;

  SchedulerLimits limits_;
  const KvGeometry& geometry_;
  PagePool& pool_;
  AdapterCache& adapters_;
  PinnedShare pinned_;     // in this step
  SwapSpace* swap_space_;  // may be null, as the next
  PrefixCache* prefix_;
  SchedulerRates rates_;
  FairOrder order_;
  std::vector<std::shared_ptr<Sequence>> running_, waiting_;  // in order of rank
  std::vector<std::shared_ptr<Session>> sessions_;
  std::vector<int32_t> free_rows_;
  std::vector<Swap> swapped_in_;                     // their places are read in the step before
  bool is_short_ = false, is_swapping_out_ = false;  // in this step
  int64_t num_steps_ = 0, num_loads_ = 0;            // loads: begun in this step
  uint64_t session_clock_ = 0;
  SchedulerCounters counters_;
};

}  // namespace moelora
