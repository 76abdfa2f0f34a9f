// SPDX-License-Identifier: Apache-2.0
// Who runs in the next step. Continuous batching: every running sequence in decode gets its row, prefills share the
// rest of the token budget in chunks, waiting requests are admitted in order of (priority, arrival) while rows,
// slots and pages last; one whose adapter is on its way to the device waits for it while those behind it go first.
// Pure logic: no clock, no device; callers hold the engine's lock.
//
// Pages: a sequence takes those of its prompt when it is admitted, cached blocks first, and grows by a block in decode.
// When the pool is short, idle adapters and cached blocks leave, then KV of idle sessions, then uploads are given up
// (pages come back some steps later), then the running sequence of lowest rank that is not in the batch is preempted:
// it gives up its pages and computes them anew. The highest rank can always run; submit refuses what cannot fit alone.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/adapter/adapter_cache.h"
#include "runtime/engine/batch.h"
#include "runtime/engine/sequence.h"

namespace moelora {

struct SchedulerLimits {
  int32_t num_sequences_max = 0, num_rows_max = 0, num_logit_rows_max = 0;
  int32_t num_waiting_max = 0;
  int32_t num_prefetched_max = 0, output_buffer_tokens = 0;  // prefetched: of those who wait
};

constexpr int32_t kOvertakenMax = 256, kUploadsMax = 4;  // uploads: begun for one waiting request
enum class Room : uint8_t { kTaken, kSoon, kNone };      // kSoon: an upload gives way. kNone: nobody does

class Scheduler {
 public:
  Scheduler(const SchedulerLimits& limits, const KvGeometry& geometry, PagePool& pool, AdapterCache& adapters,
            PrefixCache* prefix);
  [[nodiscard]] bool is_full() const { return waiting_.size() >= static_cast<size_t>(limits_.num_waiting_max); }
  void add(std::shared_ptr<Sequence> sequence);
  void add_session(std::shared_ptr<Session> session) { sessions_.push_back(std::move(session)); }
  void remove_session(const Session& session);
  void drop_all_pages();  // of sessions, before the pool goes

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
  [[nodiscard]] uint64_t num_preemptions() const { return num_preemptions_; }
  [[nodiscard]] uint64_t num_sessions_evicted() const { return num_sessions_evicted_; }
  // Re-derives page and row counts from the sequences; throws Error{kInternal}.
  void audit() const;

 private:
  static bool ranks_before(const Sequence& a, const Sequence& b);
  void insert_waiting(std::shared_ptr<Sequence> sequence);
  void schedule_running(Batch& batch, bool decode);
  void admit_waiting(Batch& batch, double now);
  void prefetch_waiting();
  // kResident: the sequence has all that it needs.
  [[nodiscard]] Residency try_start(Sequence& sequence);
  [[nodiscard]] bool take_pages(Sequence& sequence);
  void adopt_running();
  [[nodiscard]] int32_t num_reclaimable(Evict evict) const;
  void start(size_t index, Batch& batch, double now);
  // A running sequence whose reader is behind gives up everything for those who wait.
  bool preempt_paused();
  // Those behind a sequence that lacks a slot or pages go first, but not for ever: after kOvertakenMax tries they wait
  // with it, unless only the host's own pins stand in its way.
  [[nodiscard]] bool may_be_overtaken(Sequence& sequence) const;
  [[nodiscard]] Room ensure_pages(Sequence& sequence, int32_t tokens, const Batch& batch);
  [[nodiscard]] Sequence* preemption_victim(const Sequence& wants, const Batch& batch) const;
  void preempt(Sequence& sequence);
  void give_back(Sequence& sequence);
  [[nodiscard]] bool is_paused(const Sequence& sequence) const;
  void add_entry(Batch& batch, Sequence& sequence, int32_t count);
  [[nodiscard]] int32_t rows_that_fit(const Batch& batch, const Sequence& sequence) const;

  SchedulerLimits limits_;
  const KvGeometry& geometry_;
  PagePool& pool_;
  AdapterCache& adapters_;
  PrefixCache* prefix_;                             // may be null
  std::vector<std::shared_ptr<Sequence>> running_;  // in order of rank
  std::vector<std::shared_ptr<Sequence>> waiting_;  // in order of rank
  std::vector<std::shared_ptr<Session>> sessions_;
  std::vector<int32_t> free_rows_;
  bool is_short_ = false;
  uint64_t session_clock_ = 0, num_preemptions_ = 0, num_sessions_evicted_ = 0;
};

}  // namespace moelora
