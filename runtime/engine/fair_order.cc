// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/fair_order.h"

#include <algorithm>
#include <limits>

#include "runtime/adapter/adapter.h"

namespace moelora {

FairOrder::FairOrder(bool is_by_adapter, size_t num_waiting_max) : is_by_adapter_(is_by_adapter) {
  heads_.reserve(is_by_adapter ? num_waiting_max : 0);
}

FairShare& FairOrder::share_of(const Sequence& sequence) {
  Adapter* adapter = sequence.request().adapter.get();
  return adapter == nullptr ? base_ : adapter->share;
}

// Lower priority, larger counter, later arrival.
bool FairOrder::goes_after(const Sequence* a, const Sequence* b) {
  const int32_t priority_a = a->request().priority;
  const int32_t priority_b = b->request().priority;
  if (priority_a != priority_b) {
    return priority_a < priority_b;
  }
  return a->fair_key != b->fair_key ? a->fair_key > b->fair_key : a->arrival > b->arrival;
}

void FairOrder::push(Sequence* sequence) {
  const FairShare& share = share_of(*sequence);
  sequence->fair_key = share.served + share.ahead;
  heads_.push_back(sequence);
  std::push_heap(heads_.begin(), heads_.end(), goes_after);
}

void FairOrder::begin(const Waiting& waiting) {
  index_ = 0;
  passed_ = nullptr;
  if (!is_by_adapter_) {
    return;
  }
  heads_.clear();
  ++walk_;
  for (const auto& held : waiting) {
    FairShare& share = share_of(*held);
    held->next_of_adapter = nullptr;
    if (share.walk == walk_) {
      share.last->next_of_adapter = held.get();
    } else {
      share.walk = walk_;
      share.ahead = 0;
      push(held.get());
    }
    share.last = held.get();
  }
}

Sequence* FairOrder::next(const Waiting& waiting, double passed) {
  if (!is_by_adapter_) {
    return index_ < waiting.size() ? waiting[index_++].get() : nullptr;
  }
  if (passed_ != nullptr) {
    FairShare& share = share_of(*passed_);
    share.ahead += passed / share.weight;
    if (passed_->next_of_adapter != nullptr) {
      push(passed_->next_of_adapter);
    }
    passed_ = nullptr;
  }
  if (heads_.empty()) {
    return nullptr;
  }
  std::pop_heap(heads_.begin(), heads_.end(), goes_after);
  passed_ = heads_.back();
  heads_.pop_back();
  return passed_;
}

void FairOrder::note_start(Sequence& sequence) {
  index_ -= is_by_adapter_ ? 0 : 1;
  FairShare& share = share_of(sequence);
  if (!sequence.has_paid) {
    sequence.has_paid = true;
    share.served += prompt_price(sequence) / share.weight;
  }
  note_leave(sequence);
}

void FairOrder::note_leave(const Sequence& sequence) {
  FairShare& share = share_of(sequence);
  if (--share.num_waiting == 0) {
    last_left_ = share.served;
  }
}

void FairOrder::note_output(const Sequence& sequence) {
  FairShare& share = share_of(sequence);
  share.served += kOutputPrice / share.weight;
}

void FairOrder::note_arrival(const Sequence& sequence, const Waiting& waiting) {
  FairShare& share = share_of(sequence);
  if (is_by_adapter_ && share.num_waiting == 0) {
    double least = waiting.empty() ? last_left_ : std::numeric_limits<double>::infinity();
    for (const auto& held : waiting) {
      least = std::min(least, share_of(*held).served);
    }
    share.served = std::max(share.served, least);
  }
  ++share.num_waiting;
}

}  // namespace moelora
