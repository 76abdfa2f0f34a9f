// SPDX-License-Identifier: Apache-2.0
// See verify_report.h.
#include "samples/cli/verify_report.h"

#include <cstdio>

namespace moelora_cli {
namespace {

std::string formatted(const char* format, double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), format, value);
  return buffer;
}

}  // namespace

void VerifyReport::skip(const std::string& adapter) {
  ++skipped_;
  skipped_names_.insert(adapter);
}

void VerifyReport::print_skipped() const {
  for (const std::string& name : skipped_names_) {
    std::printf("skipped: %s\n", name.c_str());
  }
}

void VerifyReport::note(const Case& reference, const Verdict& verdict) {
  ++(verdict.passed ? passed_ : failed_);
  near_ties_ += verdict.near_tie ? 1 : 0;
  positions_ += is_bf16_ ? verdict.rows : static_cast<int>(reference.rows);
  ill_conditioned_ += verdict.ill_conditioned;
  if (verdict.ill_conditioned > 0) {
    std::printf("ill-conditioned: %s, %d positions, the worst with error %.2e at position %d\n", reference.name.c_str(),
                verdict.ill_conditioned, verdict.logits_error, verdict.position);
  }
  note_rounding(reference, verdict);
  if (verdict.logits_error > worst_logits_ || worst_logits_case_.empty()) {
    worst_logits_ = verdict.logits_error;
    worst_logits_case_ =
        reference.name + " position " + std::to_string(verdict.position) + " token " + std::to_string(verdict.token);
  }
  if (verdict.delta_error > worst_delta_) {
    worst_delta_ = verdict.delta_error;
    worst_delta_case_ = reference.name;
  }
  if (!verdict.passed || verbose_) {
    std::printf("%s %-16s logits %.2e (position %d, token %d), delta %s, greedy %d of %zu%s%s%s%s\n",
                verdict.passed ? "passed" : "FAILED", reference.name.c_str(), verdict.logits_error, verdict.position,
                verdict.token, verdict.delta_error < 0 ? "-" : formatted("%.2e", verdict.delta_error).c_str(),
                verdict.tokens_equal, reference.greedy.size(), verdict.near_tie ? " (near tie)" : "",
                rounding_text(verdict).c_str(), verdict.passed ? "" : ": ", verdict.why.c_str());
  }
}

void VerifyReport::note_rounding(const Case& reference, const Verdict& verdict) {
  rounding_limited_ += verdict.rounding_limited;
  near_tie_rows_ += verdict.near_tie_rows;
  if (verdict.near_tie_rows > 0) {
    std::printf("router near-tie: %s, %d rows, the worst with error %.2e at position %d\n", reference.name.c_str(),
                verdict.near_tie_rows, verdict.near_tie_error, verdict.near_tie_position);
  }
  if (verdict.yardstick_ratio > worst_ratio_) {
    worst_ratio_ = verdict.yardstick_ratio;
    worst_ratio_case_ = reference.name;
  }
}

std::string VerifyReport::rounding_text(const Verdict& verdict) const {
  if (!is_bf16_) {
    return "";
  }
  return ", " + std::to_string(verdict.rows) + " rows, rounding-limited " + std::to_string(verdict.rounding_limited) +
         ", near-tie " + std::to_string(verdict.near_tie_rows) +
         (verdict.yardstick_ratio < 0 ? "" : ", " + formatted("%.2f", verdict.yardstick_ratio) + " x the yardstick");
}

void VerifyReport::fail(const Case& reference, const std::string& why) {
  ++failed_;
  std::printf("FAILED %-16s %s\n", reference.name.c_str(), why.c_str());
}

void VerifyReport::judge_shares() {
  if (ill_conditioned_ * 20 > positions_) {
    ++failed_;
    std::printf("FAILED %d of %d positions are ill-conditioned; at most 5 %% may be\n", ill_conditioned_, positions_);
  }
  if (near_tie_rows_ * kNearTieRowsInOneMay > positions_) {
    ++failed_;
    std::printf("FAILED %d of %d rows are excused by a router near-tie; at most 5 %% may be\n", near_tie_rows_,
                positions_);
  }
}

bool VerifyReport::finish() const {
  std::printf("%s: %d passed, %d failed, %d skipped; worst logits error %.2e (%s), worst delta error %.2e (%s)",
              dir_.c_str(), passed_, failed_, skipped_, worst_logits_, worst_logits_case_.c_str(), worst_delta_,
              worst_delta_case_.c_str());
  if (is_bf16_) {
    std::printf(", %d rows, of them rounding-limited %d, near-tie %d; worst ratio to the yardstick %s", positions_,
                rounding_limited_, near_tie_rows_,
                worst_ratio_ < 0 ? "-" : (formatted("%.2f", worst_ratio_) + " (" + worst_ratio_case_ + ")").c_str());
  }
  std::printf("%s\n", near_ties_ == 0 ? "" : (", near ties " + std::to_string(near_ties_)).c_str());
  return failed_ == 0 && passed_ > 0;
}

}  // namespace moelora_cli
