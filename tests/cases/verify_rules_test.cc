// SPDX-License-Identifier: Apache-2.0
// The rules of `moelora verify` on made-up logits: each bound holds just inside and fails just outside, and a lost
// delta does not hide in the base's size. Bounds are those of the project's conventions, written here as numbers.
#include "samples/cli/verify_rules.h"

#include <cmath>
#include <limits>

#include "tests/support/catch.h"

using moelora_cli::Case;
using moelora_cli::judge;
using moelora_cli::Outcome;
using moelora_cli::Precision;
using moelora_cli::tolerances_of;

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
