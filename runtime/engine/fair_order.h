// SPDX-License-Identifier: Apache-2.0
// In which order those who wait are tried: by rank, or fairly between adapters with a virtual token counter for each
// (VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). The adapter with the smallest counter
// goes first, its own requests in order of rank; priorities stand above. A counter grows by the prompt tokens that a
// request computes when it first starts and by each output token at twice the price, over the adapter's weight; what is
// computed again after a preemption costs nothing. An adapter of which nothing waits is lifted, when a request of it
// comes, to the least counter of those that wait: nobody saves up for later. Base requests share one counter.
//
// As long as two adapters always have requests waiting, what they were given, over their weights, differs by at most
// 2 max(longest prompt, 2 x the tokens that all rows hold at once), however long it lasts (theorem 4.4 there).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/engine/sequence.h"

namespace moelora {

class FairOrder {
 public:
  using Waiting = std::vector<std::shared_ptr<Sequence>>;  // in order of rank

  // Without `is_by_adapter` the order is that of rank.
  FairOrder(bool is_by_adapter, size_t num_waiting_max);

  // A walk. Between begin and the last next, sequences leave `waiting` only as `note_start` says; linear in the number
  // waiting by adapter, else free.
  void begin(const Waiting& waiting);
  // Null after the last. By adapter, `passed` counts the one before as served that much, in this walk alone.
  [[nodiscard]] Sequence* next(const Waiting& waiting, double passed = 0);
  // The one before has started: pays for what it computes of its prompt, once. Call before it leaves `waiting`.
  void note_start(Sequence& sequence);

  // A request that has come, before it is among `waiting`.
  void note_arrival(const Sequence& sequence, const Waiting& waiting);
  void note_output(const Sequence& sequence);
  void note_wait(const Sequence& sequence) { ++share_of(sequence).num_waiting; }  // preempted
  void note_leave(const Sequence& sequence);                                      // ended while it waited
  [[nodiscard]] FairShare& base_share() { return base_; }
  [[nodiscard]] static double prompt_price(const Sequence& sequence) { return sequence.num_pending(); }

 private:
  static constexpr double kOutputPrice = 2.0;  // of a prompt token
  [[nodiscard]] FairShare& share_of(const Sequence& sequence);
  [[nodiscard]] static bool goes_after(const Sequence* a, const Sequence* b);
  void push(Sequence* sequence);
  bool is_by_adapter_;
  FairShare base_;
  size_t index_ = 0;  // by rank
  uint64_t walk_ = 0;
  std::vector<Sequence*> heads_;  // a heap: the next of each adapter
  Sequence* passed_ = nullptr;
  double last_left_ = 0;  // counter of the adapter that was the last to have nothing waiting
};

}  // namespace moelora
