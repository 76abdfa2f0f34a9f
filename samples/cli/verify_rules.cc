// SPDX-License-Identifier: Apache-2.0
// See verify_rules.h.
#include "samples/cli/verify_rules.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace moelora_cli {
namespace {

std::string text(const char* format, double a, double b) {
  char buffer[160];
  std::snprintf(buffer, sizeof(buffer), format, a, b);
  return buffer;
}

void fail(Verdict& verdict, const std::string& why) {
  verdict.passed = false;
  verdict.why += (verdict.why.empty() ? "" : "; ") + why;
}

struct RowError {
  double error = 0;  // max |ours - theirs| / max |theirs|; infinite with a NaN
  size_t at = 0;     // where
};

RowError row_error(const float* ours, const float* theirs, size_t vocab) {
  double largest = 0, worst = -1;
  size_t at = 0;
  for (size_t i = 0; i < vocab; ++i) {
    const double difference = std::abs(static_cast<double>(ours[i]) - theirs[i]);
    largest = std::max(largest, std::abs(static_cast<double>(theirs[i])));
    if (!(difference <= worst)) {
      worst = std::isnan(difference) ? INFINITY : difference;
      at = i;
    }
  }
  return {worst / largest, at};
}

void judge_logits(const Case& reference, const Outcome& outcome, const Tolerances& tolerances, Verdict& verdict) {
  if (outcome.logits.size() != reference.logits.size()) {
    fail(verdict, text("%.0f logits instead of %.0f", static_cast<double>(outcome.logits.size()),
                       static_cast<double>(reference.logits.size())));
    return;
  }
  const auto vocab = static_cast<size_t>(reference.vocab);
  for (size_t row = 0; row < static_cast<size_t>(reference.rows); ++row) {
    const RowError found = row_error(outcome.logits.data() + row * vocab, reference.logits.data() + row * vocab, vocab);
    if (row == 0 || found.error > verdict.logits_error) {
      verdict.logits_error = found.error;
      verdict.position = reference.first_position + static_cast<int32_t>(row);
      verdict.token = static_cast<int32_t>(found.at);
    }
    const double bound = tolerances.logits_of_row.empty() ? tolerances.logits : tolerances.logits_of_row[row];
    if (!(found.error <= bound)) {
      fail(verdict, text("logits differ by %.2e, at most %.0e is allowed", found.error, bound));
    } else if (found.error > tolerances.logits) {
      ++verdict.ill_conditioned;
    }
  }
}

void judge_delta(const Case& reference, const Outcome& outcome, const Case& base, const Outcome& base_outcome,
                 const Tolerances& tolerances, Verdict& verdict) {
  if (base.logits.size() != reference.logits.size() || base_outcome.logits.size() != outcome.logits.size() ||
      outcome.logits.size() != reference.logits.size()) {
    fail(verdict, "the base has other logits kept than the adapter");
    return;
  }
  double difference = 0, delta = 0, whole = 0;
  for (size_t i = 0; i < reference.logits.size(); ++i) {
    const double theirs = static_cast<double>(reference.logits[i]) - base.logits[i];
    const double ours = static_cast<double>(outcome.logits[i]) - base_outcome.logits[i];
    difference += (ours - theirs) * (ours - theirs);
    delta += theirs * theirs;
    whole += static_cast<double>(reference.logits[i]) * reference.logits[i];
  }
  const double ratio = std::sqrt(delta / whole);
  if (delta == 0 || ratio < tolerances.min_delta_ratio) {
    return;
  }
  verdict.delta_error = std::sqrt(difference / delta);
  const double allowed = ratio < tolerances.small_delta_ratio ? tolerances.small_delta : tolerances.delta;
  if (!(verdict.delta_error <= allowed)) {
    fail(verdict, text("the adapter's delta differs by %.2e, at most %.0e is allowed", verdict.delta_error, allowed));
  }
}

void judge_greedy(const Case& reference, const Outcome& outcome, const Tolerances& tolerances, Verdict& verdict) {
  const size_t common = std::min(reference.greedy.size(), outcome.tokens.size());
  size_t equal = 0;
  while (equal < common && reference.greedy[equal] == outcome.tokens[equal]) {
    ++equal;
  }
  verdict.tokens_equal = static_cast<int32_t>(equal);
  if (equal == reference.greedy.size()) {
    return;
  }
  if (equal == outcome.tokens.size()) {
    fail(verdict, text("%.0f greedy tokens instead of %.0f", static_cast<double>(equal),
                       static_cast<double>(reference.greedy.size())));
    return;
  }
  double largest = 0;
  for (const float logit : reference.logits) {
    largest = std::max(largest, std::abs(static_cast<double>(logit)));
  }
  const double allowed = std::max(tolerances.margin, tolerances.margin_relative * largest);
  verdict.near_tie = reference.greedy_margin[equal] <= allowed;
  if (!verdict.near_tie) {
    fail(verdict, "greedy token " + std::to_string(equal) + " is " + std::to_string(outcome.tokens[equal]) + ", not " +
                      std::to_string(reference.greedy[equal]) + " (margin " +
                      text("%.2e, a difference is allowed up to %.0e)", reference.greedy_margin[equal], allowed));
  }
}

}  // namespace

Tolerances tolerances_of(Precision precision) {
  switch (precision) {
    case Precision::kBf16:
      return {2e-2, 5e-2, 5e-2, 0, 0.5, 0, 4e-2};
    case Precision::kQuantised:
      return {1e-3, 1e-3, 5e-3, 0.1, 0, 1e-3, 0};
    default:
      return {1e-4, 1e-3, 5e-3, 0.1, 0, 1e-3, 0};
  }
}

Verdict judge(const Case& reference, const Outcome& outcome, const Case* base, const Outcome* base_outcome,
              const Tolerances& tolerances) {
  Verdict verdict;
  judge_logits(reference, outcome, tolerances, verdict);
  if (base != nullptr && base_outcome != nullptr) {
    judge_delta(reference, outcome, *base, *base_outcome, tolerances, verdict);
  }
  judge_greedy(reference, outcome, tolerances, verdict);
  return verdict;
}

std::vector<double> bounds_of_condition(const Case& reference, const Outcome& outcome, const Outcome& changed,
                                        double change, double bound) {
  constexpr double kReferenceError = 4e-6;
  const auto vocab = static_cast<size_t>(reference.vocab);
  std::vector<double> bounds;
  for (size_t row = 0; row < static_cast<size_t>(reference.rows); ++row) {
    const double moved =
        row_error(changed.logits.data() + row * vocab, outcome.logits.data() + row * vocab, vocab).error;
    bounds.push_back(std::max(bound, moved / std::abs(change) * kReferenceError));
  }
  return bounds;
}

}  // namespace moelora_cli
