// SPDX-License-Identifier: Apache-2.0
// The rules of `moelora verify` on made-up logits: each bound holds just inside and fails just outside, and a lost
// delta does not hide in the base's size. In bf16 a yardstick widens bounds, a router near-tie excuses a row, and what
// is wrong fails nevertheless. Bounds are those of the project's conventions, written here as numbers.
#include "samples/cli/verify_rules.h"

#include <cmath>
#include <limits>
#include <utility>

#include "tests/support/catch.h"

using moelora_cli::Case;
using moelora_cli::Evidence;
using moelora_cli::judge;
using moelora_cli::judge_bf16;
using moelora_cli::Outcome;
using moelora_cli::Precision;
using moelora_cli::tolerances_of;
using moelora_cli::Verdict;
using moelora_cli::Yardstick;

namespace {

Case make_case(std::vector<float> logits, std::vector<int32_t> greedy, std::vector<double> margin) {
  Case made;
  made.name = "made.0";
  made.prompt = {1, 2, 3};
  made.first_position = 2;
  made.rows = 1;
  made.vocab = static_cast<int64_t>(logits.size());
  made.logits = std::move(logits);
  made.greedy = std::move(greedy);
  made.greedy_margin = std::move(margin);
  return made;
}

// A case in bf16 with prompt rows 0 to 7, all kept, and three rows after it; each row is {10, 0, 1, x}, and its errors
// are set as fractions of the largest logit.
constexpr size_t kKept = 8, kGreedy = 4, kRows = kKept + kGreedy - 1;

struct Made {
  Case reference;
  Outcome outcome;
  Yardstick yardstick;

  explicit Made(float x = 2.0f) {
    reference.name = "made.0";
    reference.prompt.assign(kKept, 1);
    reference.rows = kKept;
    reference.vocab = 4;
    for (size_t row = 0; row < kRows; ++row) {
      yardstick.exact.insert(yardstick.exact.end(), {10.0f, 0.0f, 1.0f, x});
    }
    reference.logits.assign(yardstick.exact.begin(), yardstick.exact.begin() + kKept * 4);
    reference.greedy.assign(kGreedy, 0);
    reference.greedy_margin.assign(kGreedy, 8.0);
    yardstick.rounded = {yardstick.exact};
    yardstick.router_gaps.assign(kRows, 0.5);
    outcome = {yardstick.exact, reference.greedy};
  }
  void set_error(size_t row, double error) { outcome.logits[4 * row + 2] = 1.0f + 10.0f * static_cast<float>(error); }
  void set_yardstick(size_t row, double error, size_t run = 0) {
    yardstick.rounded[run][4 * row + 2] = 1.0f + 10.0f * static_cast<float>(error);
  }
  [[nodiscard]] Evidence evidence() const { return {&reference, &outcome, &yardstick}; }
  [[nodiscard]] Verdict verdict(const Made* base = nullptr) const {
    const Evidence of_base = base == nullptr ? Evidence{} : base->evidence();
    return judge_bf16(evidence(), base == nullptr ? nullptr : &of_base, tolerances_of(Precision::kBf16));
  }
};

}  // namespace

TEST_CASE("logits are judged against the largest of the row") {
  const Case reference = make_case({-10.0f, 1.0f, 2.0f, 3.0f}, {3}, {1.0});
  Outcome outcome{{-10.0f, 1.0f, 2.0f + 0.0009f, 3.0f}, {3}};
  CHECK(judge(reference, outcome, nullptr, nullptr, tolerances_of(Precision::kExact)).passed);
  outcome.logits[2] = 2.0f + 0.0011f;
  const auto verdict = judge(reference, outcome, nullptr, nullptr, tolerances_of(Precision::kExact));
  CHECK_FALSE(verdict.passed);
  CHECK(verdict.token == 2);
  CHECK(verdict.position == 2);
  CHECK(std::abs(verdict.logits_error - 1.1e-4) < 1e-6);
  CHECK(judge(reference, outcome, nullptr, nullptr, tolerances_of(Precision::kQuantised)).passed);
}

TEST_CASE("NaN and missing rows fail") {
  const Case reference = make_case({-10.0f, 1.0f}, {1}, {1.0});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto exact = tolerances_of(Precision::kExact);
  CHECK_FALSE(judge(reference, {{nan, 1.0f}, {1}}, nullptr, nullptr, exact).passed);
  CHECK_FALSE(judge(reference, {{-10.0f, nan}, {1}}, nullptr, nullptr, exact).passed);
  CHECK_FALSE(judge(reference, {{-10.0f}, {1}}, nullptr, nullptr, exact).passed);
}

TEST_CASE("a lost delta does not hide in the base's size") {
  // ||dref|| = 0.02 of ||ref|| 100: the bound on logits does not see its loss at all in bf16, the delta's does.
  const Case base = make_case({100.0f, 1.0f}, {0}, {1.0});
  const Case reference = make_case({100.0f, 1.009f}, {0}, {1.0});
  const Outcome base_outcome{base.logits, {0}};
  const auto exact = tolerances_of(Precision::kExact);
  const auto lost = judge(reference, base_outcome, &base, &base_outcome, exact);
  CHECK(lost.logits_error < 1e-4);
  CHECK_FALSE(lost.passed);
  CHECK(std::abs(lost.delta_error - 1.0) < 1e-3);
  CHECK(judge(reference, {reference.logits, {0}}, &base, &base_outcome, exact).passed);
  // Small deltas have 5e-3 instead of 1e-3.
  CHECK(judge(reference, {{100.0f, 1.009f + 0.004f * 0.009f}, {0}}, &base, &base_outcome, exact).passed);
  CHECK_FALSE(judge(reference, {{100.0f, 1.009f + 0.007f * 0.009f}, {0}}, &base, &base_outcome, exact).passed);
}

TEST_CASE("a large delta has the tighter bound, and in bf16 a small one is not judged") {
  const Case base = make_case({100.0f, 1.0f}, {0}, {1.0});
  const Case reference = make_case({60.0f, 1.0f}, {0}, {1.0});
  const Outcome base_outcome{{100.0f + 0.09f * 0.1f, 1.0f}, {0}};
  const auto exact = tolerances_of(Precision::kExact);
  CHECK(judge(reference, {reference.logits, {0}}, &base, &base_outcome, exact).passed);  // 2.2e-4 of 40
  const Outcome off{{100.0f - 0.09f, 1.0f}, {0}};
  CHECK_FALSE(judge(reference, {reference.logits, {0}}, &base, &off, exact).passed);  // 2.2e-3 of 40
  const Case close = make_case({90.0f, 1.0f}, {0}, {1.0});
  const auto bf16 = judge(close, {{91.0f, 1.0f}, {0}}, &base, &base_outcome, tolerances_of(Precision::kBf16));
  CHECK(bf16.passed);
  CHECK(bf16.delta_error < 0);
}

TEST_CASE("greedy tokens may differ only at a near tie, and only from there on") {
  const Case reference = make_case({-10.0f, 1.0f}, {5, 6, 7}, {0.5, 0.0009, 0.5});
  const auto exact = tolerances_of(Precision::kExact);
  CHECK(judge(reference, {reference.logits, {5, 6, 7}}, nullptr, nullptr, exact).passed);
  const auto tie = judge(reference, {reference.logits, {5, 9, 9}}, nullptr, nullptr, exact);
  CHECK(tie.passed);
  CHECK(tie.near_tie);
  CHECK(tie.tokens_equal == 1);
  CHECK_FALSE(judge(reference, {reference.logits, {5, 6, 9}}, nullptr, nullptr, exact).passed);
  CHECK_FALSE(judge(reference, {reference.logits, {9, 6, 7}}, nullptr, nullptr, exact).passed);
  CHECK_FALSE(judge(reference, {reference.logits, {5, 6}}, nullptr, nullptr, exact).passed);
  // bf16: 4e-2 of the largest logit, here 0.4.
  const auto bf16 = tolerances_of(Precision::kBf16);
  CHECK_FALSE(judge(reference, {reference.logits, {9, 6, 7}}, nullptr, nullptr, bf16).passed);
}

TEST_CASE("an ill-conditioned row has its own bound, a well-conditioned one keeps 1e-4") {
  const Case reference = make_case({-10.0f, 1.0f, 2.0f, 3.0f}, {3}, {1.0});
  const Outcome outcome{{-10.0f, 1.0f, 2.0f + 0.0021f, 3.0f}, {3}};  // 2.1e-4
  auto tolerances = tolerances_of(Precision::kExact);
  // The scale changed by 1e-4 moves the row by 1e-2 of its largest: condition 100, bound 4e-4.
  tolerances.logits_of_row = moelora_cli::bounds_of_condition(reference, {{-10.0f, 1.0f, 2.0f, 3.0f}, {3}},
                                                              {{-10.0f, 1.1f, 2.0f, 3.0f}, {3}}, 1e-4, 1e-4);
  CHECK(std::abs(tolerances.logits_of_row.at(0) - 4e-4) < 1e-6);
  const auto verdict = judge(reference, outcome, nullptr, nullptr, tolerances);
  CHECK(verdict.passed);
  CHECK(verdict.ill_conditioned == 1);
  // Condition 10: the bound stays.
  tolerances.logits_of_row = moelora_cli::bounds_of_condition(reference, {{-10.0f, 1.0f, 2.0f, 3.0f}, {3}},
                                                              {{-10.0f, 1.01f, 2.0f, 3.0f}, {3}}, 1e-4, 1e-4);
  CHECK(tolerances.logits_of_row.at(0) == 1e-4);
  CHECK_FALSE(judge(reference, outcome, nullptr, nullptr, tolerances).passed);
}

TEST_CASE("bf16: a row may be three times as far off as the yardstick's worst, and not ten times") {
  Made made;
  CHECK(made.verdict().passed);
  CHECK(made.verdict().rows == kRows);
  made.set_error(5, 0.021);
  CHECK_FALSE(made.verdict().passed);  // the yardstick is exact: the plain bound
  made.set_error(5, 0.019);
  CHECK(made.verdict().passed);
  CHECK(made.verdict().rounding_limited == 0);
  made.set_yardstick(2, 0.05);
  made.set_error(5, 0.14);
  const Verdict limited = made.verdict();
  CHECK(limited.passed);
  CHECK(limited.rounding_limited == 1);
  CHECK(limited.near_tie_rows == 0);
  CHECK(std::abs(limited.yardstick_ratio - 2.8) < 1e-3);
  made.set_error(5, 0.16);
  CHECK_FALSE(made.verdict().passed);
  made.set_error(5, 0.5);
  CHECK_FALSE(made.verdict().passed);
  made.outcome.logits[22] = std::numeric_limits<float>::quiet_NaN();
  made.yardstick.router_gaps[0] = 0;
  CHECK_FALSE(made.verdict().passed);  // a NaN is not excused by anything
}

TEST_CASE("bf16: the yardstick's worst row does not hide that all rows are wrong") {
  Made made;
  made.set_yardstick(3, 0.7);  // bound 2.1
  for (size_t row = 0; row < kRows; ++row) {
    made.set_error(row, 0.1);
  }
  const Verdict verdict = made.verdict();
  CHECK_FALSE(verdict.passed);
  CHECK(verdict.why.find("median") != std::string::npos);
  // Rows after the prompt have a bound of their own, which does not widen that of the kept ones.
  Made after;
  after.set_yardstick(kKept + 1, 0.7);
  after.set_error(kKept, 0.3);
  CHECK(after.verdict().passed);
  after.set_error(1, 0.03);
  CHECK_FALSE(after.verdict().passed);
  after.set_yardstick(2, 0.7);
  after.set_yardstick(kKept + 1, 0);
  CHECK(after.verdict().passed);
}

TEST_CASE("bf16: of several roundings the worst decides, for rows, median and delta") {
  Made made;
  made.yardstick.rounded.push_back(made.yardstick.exact);
  for (size_t row = 0; row < kRows; ++row) {
    made.set_error(row, 0.1);
    made.set_yardstick(row, row < 3 || row + 1 == kRows ? 0.05 : 0.0);  // its worst rows are enough, its median is not
  }
  CHECK(made.verdict().why.find("the median") == 0);
  for (size_t row = 0; row < kRows; ++row) {
    made.set_yardstick(row, 0.034, 1);
  }
  CHECK(made.verdict().passed);
  made.set_error(6, 0.14);
  CHECK(made.verdict().passed);
  made.set_error(6, 0.16);
  CHECK_FALSE(made.verdict().passed);
  made.yardstick.rounded[1].pop_back();
  CHECK_FALSE(made.verdict().passed);
  // Deltas: a run beside the base's of the same engine, and beside the first where the base has none.
  Made base(2.0f);
  Made with(12.0f);
  with.reference.greedy.assign(kGreedy, 3);
  with.outcome.tokens = with.reference.greedy;
  const auto set_x = [](std::vector<float>& logits, float x) {
    for (size_t row = 0; row < kRows; ++row) {
      logits[4 * row + 3] = x;
    }
  };
  base.yardstick.rounded.push_back(base.yardstick.exact);
  with.yardstick.rounded.assign(3, with.yardstick.exact);
  set_x(with.outcome.logits, 12.0f - 1.1f);  // 11 % of the delta
  set_x(with.yardstick.rounded[1], 12.5f);
  set_x(base.yardstick.rounded[1], 2.5f);  // moved alike: no error of the delta
  CHECK_FALSE(with.verdict(&base).passed);
  set_x(base.yardstick.rounded[1], 2.1f);  // 4 %
  CHECK(with.verdict(&base).passed);
  set_x(base.yardstick.rounded[1], 2.5f);
  set_x(with.yardstick.rounded[2], 12.4f);
  CHECK(with.verdict(&base).passed);
}

TEST_CASE("bf16: without a yardstick bounds stay plain") {
  Made made;
  made.set_yardstick(2, 0.05);
  made.set_error(5, 0.03);
  CHECK(made.verdict().passed);
  made.yardstick.rounded.clear();
  CHECK_FALSE(made.verdict().passed);
  made.set_error(5, 0.019);
  CHECK(made.verdict().passed);
  CHECK(made.verdict().yardstick_ratio < 0);
}

TEST_CASE("bf16: a router near-tie excuses its own row and later ones, and is counted") {
  Made made;
  made.set_error(4, 0.3);
  made.yardstick.router_gaps[5] = 0.001;
  CHECK_FALSE(made.verdict().passed);  // the tie comes later
  made.yardstick.router_gaps[3] = 0.021;
  CHECK_FALSE(made.verdict().passed);  // not near enough
  made.yardstick.router_gaps[3] = 0.019;
  const Verdict verdict = made.verdict();
  CHECK(verdict.passed);
  CHECK(verdict.near_tie_rows == 1);
  CHECK(verdict.near_tie_position == 4);
  CHECK(std::abs(verdict.near_tie_error - 0.3) < 1e-6);
  CHECK(verdict.rounding_limited == 0);
}

TEST_CASE("bf16: rows that a near-tie excuses are no part of the median, nor are those after them") {
  Made made;
  made.yardstick.router_gaps[3] = 0.001;
  for (size_t row = 6; row < kRows; ++row) {
    made.set_error(row, 0.3);
    made.set_yardstick(row, 0.011);  // nor of the yardstick's
  }
  CHECK(made.verdict().passed);
  CHECK(made.verdict().near_tie_rows == 5);
  made.set_yardstick(0, 0.011);  // allows rows 0.033, and the median of rows 0 to 5 only 0.02
  for (size_t row = 0; row < 6; ++row) {
    made.set_error(row, 0.03);
  }
  CHECK(made.verdict().why.find("the median") == 0);
  // A row over its bound, then rows that the yardstick allows, but not their median.
  Made after;
  after.yardstick.router_gaps[3] = 0.001;
  after.set_yardstick(0, 0.015);  // allows rows 0.045, and the median only 0.02
  after.set_error(4, 0.3);
  for (size_t row = 5; row < kRows; ++row) {
    after.set_error(row, 0.04);
  }
  CHECK(after.verdict().passed);
  CHECK(after.verdict().near_tie_rows == 1);
  after.set_error(10, 0.046);  // over its bound, too: counted
  CHECK(after.verdict().near_tie_rows == 2);
  after.yardstick.router_gaps[3] = 0.021;  // no near-tie: row 4 is wrong
  CHECK_FALSE(after.verdict().passed);
  CHECK(after.verdict().near_tie_rows == 0);
  // Without a row that shows that other experts were chosen the yardstick's rules hold.
  Made none;
  none.yardstick.router_gaps[3] = 0.001;
  none.set_yardstick(0, 0.015);
  for (size_t row = 4; row < kRows; ++row) {
    none.set_error(row, 0.04);
  }
  CHECK(none.verdict().near_tie_rows == 0);
  CHECK(none.verdict().why.find("the median") == 0);
}

TEST_CASE("bf16: a lost delta fails, however far off the yardstick is") {
  const Made base(2.0f);
  Made made(12.0f);  // the delta is 10, and the largest logit 12
  made.reference.greedy.assign(kGreedy, 3);
  made.outcome.tokens = made.reference.greedy;
  CHECK(made.verdict(&base).passed);
  CHECK(made.verdict(&base).delta_error < 1e-6);
  // The yardstick loses the whole delta and so allows rows everything; half of the delta is the end for it.
  made.yardstick.rounded = {base.yardstick.exact};
  made.outcome.logits = base.outcome.logits;
  const Verdict lost = made.verdict(&base);
  CHECK_FALSE(lost.passed);
  CHECK(std::abs(lost.delta_error - 1.0) < 1e-6);
  CHECK(lost.why.find("delta") != std::string::npos);
  // Three times the yardstick's error of 4 %: 11 % pass, 13 % do not.
  for (const auto& [error, passes] : {std::pair{0.11f, true}, std::pair{0.13f, false}}) {
    for (size_t row = 0; row < kRows; ++row) {
      made.yardstick.rounded[0][4 * row + 3] = 12.0f - 0.4f;
      made.outcome.logits[4 * row + 3] = 12.0f - 10.0f * error;
      made.yardstick.rounded[0][4 * row] = made.outcome.logits[4 * row] = 10.0f;
    }
    INFO(error << " " << made.verdict(&base).why);
    CHECK((made.verdict(&base).why.find("delta") == std::string::npos) == passes);
  }
}

TEST_CASE("bf16: rows that a near-tie excuses, here or in the base, are no part of the delta") {
  Made base(2.0f);
  Made made(12.0f);
  made.reference.greedy.assign(kGreedy, 3);
  made.outcome.tokens = made.reference.greedy;
  base.set_error(6, 2.0);
  CHECK_FALSE(made.verdict(&base).passed);
  base.yardstick.router_gaps[6] = 0.001;
  CHECK(made.verdict(&base).passed);
  made.set_error(5, 2.0);
  CHECK_FALSE(made.verdict(&base).passed);
  made.yardstick.router_gaps[5] = 0.001;
  CHECK(made.verdict(&base).passed);
}

TEST_CASE("bf16: greedy tokens may differ where the row's error explains it, and rows after that are not compared") {
  Made made;
  made.reference.greedy_margin[1] = 0.5;     // 4e-2 of the largest logit are 0.4
  made.outcome.tokens = {0, 3, 3, 3};        // from the row at position kKept
  made.outcome.logits[4 * (kKept + 1)] = 0;  // another sequence by now
  CHECK_FALSE(made.verdict().passed);
  CHECK(made.verdict().rows == kKept + 1);
  made.set_yardstick(kKept, 0.03);
  made.set_error(kKept, 0.04);  // explains 0.8
  const Verdict verdict = made.verdict();
  CHECK(verdict.passed);
  CHECK(verdict.near_tie);
  CHECK(verdict.tokens_equal == 1);
  made.reference.greedy_margin[1] = 0.9;
  CHECK_FALSE(made.verdict().passed);
  // A row that fails explains nothing.
  made.set_error(kKept, 0.4);
  CHECK(made.verdict().why.find("greedy token 1") != std::string::npos);
}

TEST_CASE("bf16: the CPU engine in fp32 must be right itself") {
  Made made;
  made.yardstick.exact[4 * 3 + 2] += 0.03f;
  CHECK_FALSE(made.verdict().passed);
  Made other;
  other.yardstick.exact[4 * (kKept + 1) + 3] = 10.5f;
  other.outcome.logits = other.yardstick.exact;
  other.yardstick.rounded = {other.yardstick.exact};
  CHECK_FALSE(other.verdict().passed);
  Made short_of_rows;
  short_of_rows.yardstick.router_gaps.pop_back();
  CHECK_FALSE(short_of_rows.verdict().passed);
  Made short_answer;
  short_answer.outcome.logits.resize(kKept * 4);
  CHECK_FALSE(short_answer.verdict().passed);
}
