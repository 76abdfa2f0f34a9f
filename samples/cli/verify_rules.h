// SPDX-License-Identifier: Apache-2.0
// When logits and tokens count as equal to the reference. The numbers are part of the project's conventions; the
// rules know no engine, so that they can be tested with made-up logits.
#pragma once

#include <string>
#include <vector>

#include "samples/cli/reference_case.h"

namespace moelora_cli {

// What an engine answered to one case: the reference's rows of logits, and its greedy tokens.
struct Outcome {
  std::vector<float> logits;  // [rows, vocab] of the case
  std::vector<int32_t> tokens;
};

struct Tolerances {
  double logits;       // max |a - ref| / max |ref|, over a row
  double delta;        // ||d - dref|| / ||dref||
  double small_delta;  // the same where ||dref|| < small_delta_ratio ||ref||
  double small_delta_ratio;
  double min_delta_ratio;                  // below, the delta is not judged
  double margin;                           // greedy tokens may differ where the reference's margin is at most this ...
  double margin_relative;                  // ... or this times max |logit|
  std::vector<double> logits_of_row = {};  // in place of `logits`, where bounds_of_condition measured them; else empty
};
enum class Precision { kExact, kQuantised, kBf16 };
Tolerances tolerances_of(Precision precision);

struct Verdict {
  bool passed = true;
  double logits_error = 0;      // of the worst row
  int32_t position = 0;         // of that row
  int32_t token = 0;            // vocabulary entry with the largest difference
  double delta_error = -1;      // -1: not judged
  int32_t tokens_equal = 0;     // greedy, up to the first difference
  bool near_tie = false;        // a difference that the margin allows
  int32_t ill_conditioned = 0;  // rows over `logits` that their own bound allows
  std::string why;              // of a failure
};

// `base` and `base_outcome` belong to the same prompt; both null for a case of the base model.
Verdict judge(const Case& reference, const Outcome& outcome, const Case* base, const Outcome* base_outcome,
              const Tolerances& tolerances);

// Bounds for rows where fp32 does not determine the logits to `bound`. The references are fp32 themselves: over all
// cases their error is that of a relative error of up to 4e-6 in the inputs. How far such an error moves a row is its
// condition number, measured with the adapter's scale: `outcome` at scale 1, `changed` at scale 1 + `change`.
std::vector<double> bounds_of_condition(const Case& reference, const Outcome& outcome, const Outcome& changed,
                                        double change, double bound);

}  // namespace moelora_cli
