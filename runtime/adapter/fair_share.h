// SPDX-License-Identifier: Apache-2.0
// What one adapter has been given of the engine's time, for fairness between adapters (runtime/engine/fair_order.h).
// Under the engine's lock.
#pragma once

#include <cstdint>

namespace moelora {

struct Sequence;

struct FairShare {
  double weight = 1.0;  // twice the weight, twice the tokens
  double served = 0.0;  // the virtual token counter: tokens by their price, over the weight
  int32_t num_waiting = 0;
  // Of a walk of FairOrder.
  uint64_t walk = 0;
  Sequence* last = nullptr;
  double ahead = 0.0;
};

}  // namespace moelora
