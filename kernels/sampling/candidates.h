// SPDX-License-Identifier: Apache-2.0
// The tokens of one row that may still be drawn, in order of rising id, and the cuts that shorten the list. top-k and
// top-p both keep a prefix of the order (logit falling, id rising); the prefix is found by radix selection over the
// bits of the logit, three passes at most over what is left, so nothing is sorted and ties come out exactly. Used by
// sample_tokens_cpu.cc alone; the arrays are the worker's scratch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moelora {

struct Candidates {
  float* logits = nullptr;   // after penalties
  float* weights = nullptr;  // exp((logit - largest) / temperature), once known
  int32_t* ids = nullptr;
  int32_t count = 0;
};

// The k best by logit; k >= 1.
void keep_top_k(Candidates& list, int32_t k);
// Those whose weight is at least `least`.
void keep_weight_at_least(Candidates& list, float least);
// The smallest best prefix whose weights sum to top_p of all; at least one.
void keep_top_p(Candidates& list, double top_p);
// Token at `uniform` in [0, 1) of the distribution that the weights give.
int32_t draw_candidate(const Candidates& list, double uniform);

}  // namespace moelora
