// SPDX-License-Identifier: Apache-2.0
// The moe_sort of every CPU backend: rows are first ordered by adapter slot (nearly always they are already),
// then one counting sort by expert places their pairs, so the cost is T * K + E. Runs on the calling thread: at a few
// thousand pairs waking workers would cost more than the work.
#include "kernels/moe/moe_sort.h"

#include <algorithm>

namespace moelora {
namespace {

// Fills rows[0..T) with the row numbers in order of (slot, row).
void order_rows(const MoeSortArgs& args, int32_t* rows) {
  for (int32_t t = 0; t < args.num_rows; ++t) {
    rows[t] = t;
  }
  const int32_t* slot = args.row_slot;
  if (slot == nullptr || std::is_sorted(slot, slot + args.num_rows)) {
    return;
  }
  std::sort(rows, rows + args.num_rows,
            [slot](int32_t a, int32_t b) { return slot[a] != slot[b] ? slot[a] < slot[b] : a < b; });
}

// expert_begin[e] becomes the number of pairs of experts below e.
void count_experts(const MoeSortArgs& args, int32_t pairs) {
  int32_t* begin = args.order.expert_begin;
  std::fill(begin, begin + args.num_experts + 1, 0);
  for (int32_t p = 0; p < pairs; ++p) {
    ++begin[args.ids[p] + 1];
  }
  for (int32_t e = 0; e < args.num_experts; ++e) {
    begin[e + 1] += begin[e];
  }
}

// Leaves expert_begin[e] at the end of expert e, which is the begin of e + 1.
void place_pairs(const MoeSortArgs& args, const int32_t* rows) {
  for (int32_t i = 0; i < args.num_rows; ++i) {
    const int32_t t = rows[i];
    for (int32_t j = 0; j < args.top_k; ++j) {
      const int32_t position = args.order.expert_begin[args.ids[t * args.top_k + j]]++;
      args.order.pair_row[position] = t;
      args.order.pair_position[t * args.top_k + j] = position;
    }
  }
}

void find_segments(const MoeSortArgs& args) {
  const MoeOrder& order = args.order;
  int32_t segments = 0;
  for (int32_t e = 0; e < args.num_experts; ++e) {
    for (int32_t i = order.expert_begin[e]; i < order.expert_begin[e + 1]; ++i) {
      const int32_t slot = args.row_slot != nullptr ? args.row_slot[order.pair_row[i]] : 0;
      if (i != order.expert_begin[e] && slot == order.segment_slot[segments - 1]) {
        continue;
      }
      order.segment_begin[segments] = i;
      order.segment_expert[segments] = e;
      order.segment_slot[segments] = slot;
      ++segments;
    }
  }
  order.segment_begin[segments] = order.expert_begin[args.num_experts];
  *order.num_segments = segments;
}

void count_active(const MoeSortArgs& args) {
  const MoeOrder& order = args.order;
  int32_t active = 0;
  for (int32_t e = 0; order.active_experts != nullptr && e < args.num_experts; ++e) {
    if (order.expert_begin[e + 1] > order.expert_begin[e]) {
      order.active_experts[active++] = e;
    }
  }
  if (order.num_active != nullptr) {
    *order.num_active = active;
  }
  if (order.totals != nullptr) {
    order.totals[0] += static_cast<uint32_t>(active);
    order.totals[1] += static_cast<uint32_t>(std::count_if(order.segment_slot, order.segment_slot + *order.num_segments,
                                                           [](int32_t slot) { return slot > 0; }));
  }
}

}  // namespace

void moe_sort_cpu(const MoeSortArgs& args, Stream&) {
  const int32_t pairs = args.num_rows * args.top_k;
  int32_t* const rows = args.order.segment_expert;  // free until the segments are written; T <= T * K
  order_rows(args, rows);
  count_experts(args, pairs);
  place_pairs(args, rows);
  int32_t* begin = args.order.expert_begin;
  std::copy_backward(begin, begin + args.num_experts, begin + args.num_experts + 1);
  begin[0] = 0;
  find_segments(args);
  count_active(args);
}

}  // namespace moelora
