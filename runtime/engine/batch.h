// SPDX-License-Identifier: Apache-2.0
// Who runs in a step and with how many tokens: what the scheduler decided, what StepInput turns into arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/engine/sequence.h"

namespace moelora {

struct BatchEntry {
  Sequence* sequence = nullptr;
  int32_t first = 0;           // position of the first row
  int32_t count = 0;           // rows
  bool samples = false;        // the last row's logits give the next token
  int32_t capture_first = -1;  // rows from this position on have their logits kept; -1 = none
};

// Pages to copy between the pool and the swap space, in the order of the stream before the step's ops.
struct PageMoves {
  std::vector<PageId> pages;    // capacity: the places of the swap space
  std::vector<int32_t> places;  // of each page
  void clear() {
    pages.clear();
    places.clear();
  }
};

struct Batch {
  std::vector<BatchEntry> entries;  // capacity max_num_sequences
  int32_t num_rows = 0;
  int32_t num_prefill_rows = 0;  // rows of entries that had more than one pending token
  int32_t num_logit_rows = 0;
  PageMoves swaps_out, swaps_in;  // even where there are no entries
};

// A logits row whose values a request wants to keep.
struct CaptureRow {
  Sequence* sequence = nullptr;
  int32_t logit_row = 0;
  int32_t position = 0;  // in the request's own prompt and output
};

}  // namespace moelora
