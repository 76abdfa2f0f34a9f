// SPDX-License-Identifier: Apache-2.0
// See verify_rules.h.
#include "samples/cli/verify_rules.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
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

struct Delta {
  double error = 0;  // ||d - dref|| / ||dref||
  double ratio = 0;  // ||dref|| / ||ref||
};

// Of the reference's rows, but not those that are `left_out` (empty: none is).
Delta delta_of(const Case& reference, const float* ours, const Case& base, const float* base_ours,
               const std::vector<bool>& left_out) {
  double difference = 0, delta = 0, whole = 0;
  for (size_t i = 0; i < reference.logits.size(); ++i) {
    if (!left_out.empty() && left_out[i / static_cast<size_t>(reference.vocab)]) {
      continue;
    }
    const double theirs = static_cast<double>(reference.logits[i]) - base.logits[i];
    const double found = static_cast<double>(ours[i]) - base_ours[i];
    difference += (found - theirs) * (found - theirs);
    delta += theirs * theirs;
    whole += static_cast<double>(reference.logits[i]) * reference.logits[i];
  }
  return delta == 0 ? Delta{} : Delta{std::sqrt(difference / delta), std::sqrt(delta / whole)};
}

// A delta too small to be judged passes.
void judge_delta(const Delta& delta, double allowed, const Tolerances& tolerances, Verdict& verdict) {
  if (delta.ratio == 0 || delta.ratio < tolerances.min_delta_ratio) {
    return;
  }
  verdict.delta_error = delta.error;
  if (!(delta.error <= allowed)) {
    fail(verdict, text("the adapter's delta differs by %.2e, at most %.0e is allowed", delta.error, allowed));
  }
}

size_t count_equal_tokens(const Case& reference, const Outcome& outcome) {
  const size_t common = std::min(reference.greedy.size(), outcome.tokens.size());
  const auto end = reference.greedy.begin() + static_cast<std::ptrdiff_t>(common);
  return static_cast<size_t>(std::mismatch(reference.greedy.begin(), end, outcome.tokens.begin()).first -
                             reference.greedy.begin());
}

// `row_allows`: a margin that the error of the row before the first difference explains.
void judge_greedy(const Case& reference, const Outcome& outcome, const Tolerances& tolerances, double row_allows,
                  Verdict& verdict) {
  const size_t equal = count_equal_tokens(reference, outcome);
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
  const double allowed = std::max({tolerances.margin, tolerances.margin_relative * largest, row_allows});
  verdict.near_tie = reference.greedy_margin[equal] <= allowed;
  if (!verdict.near_tie) {
    fail(verdict, "greedy token " + std::to_string(equal) + " is " + std::to_string(outcome.tokens[equal]) + ", not " +
                      std::to_string(reference.greedy[equal]) + " (margin " +
                      text("%.2e, a difference is allowed up to %.0e)", reference.greedy_margin[equal], allowed));
  }
}

// The rows of a case that can be compared, those up to the first difference of greedy tokens.
struct Bf16Rows {
  std::vector<double> errors;                  // of the engine under test
  std::vector<std::vector<double>> yardstick;  // of the yardstick's runs; empty without one
  std::vector<double> bounds;
  std::vector<bool> excused;  // over their bound by a router near-tie
  std::vector<bool> behind;   // excused or after such a row, whose keys and values they read

  [[nodiscard]] bool allowed(size_t row) const { return errors[row] <= bounds[row] || excused[row]; }
};

// Of the rows that are not `left_out`; 0 of none.
double median_of(const std::vector<double>& of_rows, const std::vector<bool>& left_out) {
  std::vector<double> values;
  for (size_t row = 0; row < of_rows.size(); ++row) {
    if (!left_out[row]) {
      values.push_back(of_rows[row]);
    }
  }
  if (values.empty()) {
    return 0;
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Row of the reference: what is kept of it, then what the fp32 engine says.
const float* reference_row(const Evidence& of, size_t row) {
  const auto vocab = static_cast<size_t>(of.reference->vocab);
  return row < static_cast<size_t>(of.reference->rows)
             ? of.reference->logits.data() + row * vocab
             : of.yardstick->exact.data() + (static_cast<size_t>(of.reference->first_position) + row) * vocab;
}

// What is wrong with the sizes; empty: nothing.
std::string fault_of_sizes(const Evidence& of) {
  const auto vocab = static_cast<size_t>(of.reference->vocab);
  const size_t positions = of.reference->prompt.size() + of.reference->greedy.size() - 1;
  const Yardstick& yardstick = *of.yardstick;
  const auto rows = static_cast<size_t>(num_rows_to_last_token(*of.reference));
  if (of.outcome->logits.size() != rows * vocab) {
    return text("%.0f logits instead of %.0f", static_cast<double>(of.outcome->logits.size()),
                static_cast<double>(rows * vocab));
  }
  const bool fit = yardstick.exact.size() == positions * vocab && yardstick.router_gaps.size() == positions &&
                   std::all_of(yardstick.rounded.begin(), yardstick.rounded.end(),
                               [&](const auto& run) { return run.size() == positions * vocab; });
  return fit ? "" : "the CPU engines gave other rows";
}

// The fp32 engine must deserve its part: its rows are the reference's where there are any, and its best token after the
// prompt is the reference's.
void judge_exact(const Evidence& of, Verdict& verdict) {
  const Case& reference = *of.reference;
  const auto vocab = static_cast<size_t>(reference.vocab);
  for (size_t row = 0; row < static_cast<size_t>(reference.rows); ++row) {
    const float* exact = of.yardstick->exact.data() + (static_cast<size_t>(reference.first_position) + row) * vocab;
    const double error = row_error(exact, reference.logits.data() + row * vocab, vocab).error;
    if (!(error <= kExactErrorMax)) {
      fail(verdict,
           text("the CPU engine in fp32 differs by %.2e itself, at most %.0e is allowed", error, kExactErrorMax));
    }
  }
  for (size_t i = 0; i < reference.greedy.size(); ++i) {
    const float* exact = of.yardstick->exact.data() + (reference.prompt.size() - 1 + i) * vocab;
    const auto [least, most] = std::minmax_element(exact, exact + vocab);
    const double largest = std::max({1.0, std::abs(static_cast<double>(*least)), std::abs(static_cast<double>(*most))});
    if (!(*most - exact[reference.greedy[i]] <= 1e-3 * largest)) {
      fail(verdict, "the CPU engine in fp32 has another greedy token " + std::to_string(i) + " itself");
    }
  }
}

Bf16Rows measure_rows(const Evidence& of, const Tolerances& tolerances) {
  const Case& reference = *of.reference;
  const auto vocab = static_cast<size_t>(reference.vocab);
  const auto first = static_cast<size_t>(reference.first_position);
  const size_t count = std::min(static_cast<size_t>(num_rows_to_last_token(reference)),
                                reference.prompt.size() + count_equal_tokens(reference, *of.outcome) - first);
  const std::vector<std::vector<float>>& runs = of.yardstick->rounded;
  Bf16Rows rows;
  rows.yardstick.resize(runs.size());
  // Of the kept rows and of those after the prompt, which are farther off: they do not widen the bound of the kept.
  double bounds[2] = {tolerances.logits, tolerances.logits};
  const auto is_after = [&](size_t row) { return row >= static_cast<size_t>(reference.rows) ? 1 : 0; };
  for (size_t row = 0; row < count; ++row) {
    const float* theirs = reference_row(of, row);
    rows.errors.push_back(row_error(of.outcome->logits.data() + row * vocab, theirs, vocab).error);
    for (size_t run = 0; run < runs.size(); ++run) {
      const double error = row_error(runs[run].data() + (first + row) * vocab, theirs, vocab).error;
      rows.yardstick[run].push_back(error);
      double& bound = bounds[is_after(row)];
      bound = std::max(bound, kYardstickFactor * error);
    }
  }
  bounds[1] = std::max(bounds[1], bounds[0]);
  const std::vector<double>& gaps = of.yardstick->router_gaps;
  double gap = INFINITY;  // the smallest so far
  for (size_t position = 0; position < first + count; ++position) {
    gap = std::min(gap, gaps[position]);
    if (position >= first) {
      const double error = rows.errors[position - first];
      rows.bounds.push_back(bounds[is_after(position - first)]);
      rows.excused.push_back(std::isfinite(error) && error > rows.bounds.back() && gap <= kRouterNearTie);
      rows.behind.push_back(rows.excused.back() || (position > first && rows.behind.back()));
    }
  }
  return rows;
}

void judge_rows(const Evidence& of, const Bf16Rows& rows, const Tolerances& tolerances, Verdict& verdict) {
  const auto vocab = static_cast<size_t>(of.reference->vocab);
  verdict.rows = static_cast<int32_t>(rows.errors.size());
  for (size_t row = 0; row < rows.errors.size(); ++row) {
    const double error = rows.errors[row];
    const int32_t position = of.reference->first_position + static_cast<int32_t>(row);
    if (row == 0 || error > verdict.logits_error) {
      verdict.logits_error = error;
      verdict.position = position;
      verdict.token =
          static_cast<int32_t>(row_error(of.outcome->logits.data() + row * vocab, reference_row(of, row), vocab).at);
    }
    if (rows.excused[row]) {
      ++verdict.near_tie_rows;
      if (error > verdict.near_tie_error) {
        verdict.near_tie_error = error;
        verdict.near_tie_position = position;
      }
      continue;
    }
    if (!(error <= rows.bounds[row])) {
      fail(verdict, text("logits differ by %.2e, at most %.1e is allowed", error, rows.bounds[row]));
    } else if (error > tolerances.logits) {
      ++verdict.rounding_limited;
    }
    if (!rows.yardstick.empty()) {
      verdict.yardstick_ratio = std::max(verdict.yardstick_ratio, kYardstickFactor * error / rows.bounds[row]);
    }
  }
  if (rows.yardstick.empty()) {
    return;
  }
  double allowed = tolerances.logits;
  for (const std::vector<double>& run : rows.yardstick) {
    if (!std::isfinite(*std::max_element(run.begin(), run.end()))) {
      fail(verdict, "the CPU engine in bf16 has logits that are not finite");
    }
    allowed = std::max(allowed, kYardstickFactor * median_of(run, rows.behind));
  }
  const double median = median_of(rows.errors, rows.behind);
  if (!(median <= allowed)) {
    fail(verdict, text("the median row differs by %.2e, at most %.1e is allowed", median, allowed));
  }
}

// Without the rows that a near-tie excused, in the case or in its base.
void judge_delta_bf16(const Evidence& own, const Bf16Rows& rows, const Evidence& base, const Tolerances& tolerances,
                      Verdict& verdict) {
  const Case& reference = *own.reference;
  if (base.reference->logits.size() != reference.logits.size() ||
      base.reference->first_position != reference.first_position || !fault_of_sizes(base).empty()) {
    fail(verdict, "the base has other logits kept than the adapter");
    return;
  }
  std::vector<bool> left_out(rows.excused.begin(), rows.excused.begin() + reference.rows);
  const Bf16Rows base_rows = measure_rows(base, tolerances);
  for (size_t row = 0; row < left_out.size(); ++row) {
    left_out[row] = left_out[row] || base_rows.excused[row];
  }
  double allowed = tolerances.delta;
  const std::vector<std::vector<float>>&runs = own.yardstick->rounded, &base_runs = base.yardstick->rounded;
  for (size_t run = 0; run < runs.size() && !base_runs.empty(); ++run) {
    const size_t first = static_cast<size_t>(reference.first_position) * static_cast<size_t>(reference.vocab);
    const std::vector<float>& of_base = base_runs[run < base_runs.size() ? run : 0];
    const Delta yardstick =
        delta_of(reference, runs[run].data() + first, *base.reference, of_base.data() + first, left_out);
    allowed = std::max(allowed, std::min(kDeltaBoundMax, kYardstickFactor * yardstick.error));
  }
  judge_delta(delta_of(reference, own.outcome->logits.data(), *base.reference, base.outcome->logits.data(), left_out),
              allowed, tolerances, verdict);
}

// A row with error e that was allowed to have it may choose another token where the margin is at most 2 e of its
// largest logit; a row that failed explains nothing.
double margin_explained(const Evidence& of, const Bf16Rows& rows) {
  const Case& reference = *of.reference;
  const size_t row = reference.prompt.size() - 1 + count_equal_tokens(reference, *of.outcome) -
                     static_cast<size_t>(reference.first_position);
  if (row >= rows.errors.size() || !rows.allowed(row)) {
    return 0;
  }
  const float* theirs = reference_row(of, row);
  const auto [least, most] = std::minmax_element(theirs, theirs + reference.vocab);
  return 2 * rows.errors[row] * std::max(std::abs(static_cast<double>(*least)), std::abs(static_cast<double>(*most)));
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
    if (base->logits.size() != reference.logits.size() || base_outcome->logits.size() != outcome.logits.size() ||
        outcome.logits.size() != reference.logits.size()) {
      fail(verdict, "the base has other logits kept than the adapter");
    } else {
      const Delta delta = delta_of(reference, outcome.logits.data(), *base, base_outcome->logits.data(), {});
      const bool is_small = delta.ratio < tolerances.small_delta_ratio;
      judge_delta(delta, is_small ? tolerances.small_delta : tolerances.delta, tolerances, verdict);
    }
  }
  judge_greedy(reference, outcome, tolerances, 0, verdict);
  return verdict;
}

Verdict judge_bf16(const Evidence& own, const Evidence* base, const Tolerances& tolerances) {
  Verdict verdict;
  if (const std::string fault = fault_of_sizes(own); !fault.empty()) {
    fail(verdict, fault);
    return verdict;
  }
  judge_exact(own, verdict);
  const Bf16Rows rows = measure_rows(own, tolerances);
  judge_rows(own, rows, tolerances, verdict);
  if (base != nullptr) {
    judge_delta_bf16(own, rows, *base, tolerances, verdict);
  }
  judge_greedy(*own.reference, *own.outcome, tolerances, margin_explained(own, rows), verdict);
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
