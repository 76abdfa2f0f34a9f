// SPDX-License-Identifier: Apache-2.0
// When logits and tokens count as equal to the reference. The numbers are part of the project's conventions; the
// rules know no engine, so that they can be tested with made-up logits.
//
// bf16 has more rules, because there a fixed bound says little. The reference models are tiny and random: they amplify
// the rounding of activations, up to where two right implementations with the same roundings are 0.7 of the largest
// logit away from fp32 in the same rows. So a case is measured with a yardstick, a few runs of the CPU engine in bf16
// with different roundings (verify_yardstick.h), which shares no kernel with the engine under test: the worst row and
// the delta may be kYardstickFactor times as far from the reference as in the worst of these runs, and so may the
// median row, which no single amplified row can widen. And where fp32 chooses experts by less than kRouterNearTie,
// rounding may choose others: a row at or after such a position may exceed its bound and is then left out of the delta,
// and with those after it, which read its keys and values, of the median. Such rows are counted, and a folder with more
// than 5 % of them fails.
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

  // bf16 only.
  int32_t rows = 0;              // compared: up to the first difference of greedy tokens
  int32_t rounding_limited = 0;  // rows over `logits` that the yardstick allows
  int32_t near_tie_rows = 0;     // rows over that as well, excused by a router near-tie
  double near_tie_error = 0;     // the worst of those, and where
  int32_t near_tie_position = 0;
  double yardstick_ratio = -1;  // worst row that is not excused: kYardstickFactor x error / bound; -1: no yardstick
};

// `base` and `base_outcome` belong to the same prompt; both null for a case of the base model.
Verdict judge(const Case& reference, const Outcome& outcome, const Case* base, const Outcome* base_outcome,
              const Tolerances& tolerances);

constexpr double kYardstickFactor = 3;
constexpr double kDeltaBoundMax = 0.5;        // however far off the yardstick is, half a lost delta fails
constexpr double kRouterNearTie = 2e-2;       // gap of router logits relative to the largest of the row
constexpr double kExactErrorMax = 2e-3;       // of the fp32 engine that stands for the reference after the prompt
constexpr int32_t kNearTieRowsInOneMay = 20;  // one row in so many may be excused

// What CPU engines say of a case when they are fed its prompt and the reference's greedy tokens but the last one.
struct Yardstick {
  std::vector<float> exact;         // [positions, vocab] in fp32: the reference for rows after the prompt
  std::vector<double> router_gaps;  // [positions] of the same engine
  // Runs that round, each [positions, vocab], bf16 with keys and values in bf16 first; empty: the engine under test is
  // that engine. Run i of an adapter's case and of its base's are of one engine; where the base has no such run, its
  // first is.
  std::vector<std::vector<float>> rounded;
};

// One case as the bf16 rules see it; the outcome's rows go from first_position to the last one that predicts a token.
struct Evidence {
  const Case* reference = nullptr;
  const Outcome* outcome = nullptr;
  const Yardstick* yardstick = nullptr;
};
// `base` is null for a case of the base model.
Verdict judge_bf16(const Evidence& own, const Evidence* base, const Tolerances& tolerances);
// Number of rows that such an outcome has.
inline int32_t num_rows_to_last_token(const Case& reference) {
  return static_cast<int32_t>(reference.prompt.size() + reference.greedy.size()) - 1 - reference.first_position;
}

// Bounds for rows where fp32 does not determine the logits to `bound`. The references are fp32 themselves: over all
// cases their error is that of a relative error of up to 4e-6 in the inputs. How far such an error moves a row is its
// condition number, measured with the adapter's scale: `outcome` at scale 1, `changed` at scale 1 + `change`.
std::vector<double> bounds_of_condition(const Case& reference, const Outcome& outcome, const Outcome& changed,
                                        double change, double bound);

}  // namespace moelora_cli
