// SPDX-License-Identifier: Apache-2.0
// What `moelora verify` prints of verdicts, and the counts that decide about a whole folder.
#pragma once

#include <set>
#include <string>

#include "samples/cli/reference_case.h"
#include "samples/cli/verify_rules.h"

namespace moelora_cli {

class VerifyReport {
 public:
  VerifyReport(std::string dir, bool is_bf16, bool verbose)
      : dir_(std::move(dir)), is_bf16_(is_bf16), verbose_(verbose) {}
  void skip(const std::string& adapter);  // once a case
  void print_skipped() const;
  void note(const Case& reference, const Verdict& verdict);
  void fail(const Case& reference, const std::string& why);
  // Of all rows only few may be ill-conditioned or excused.
  void judge_shares();
  // Prints the last line; whether all passed, and at least one did.
  [[nodiscard]] bool finish() const;

 private:
  void note_rounding(const Case& reference, const Verdict& verdict);
  [[nodiscard]] std::string rounding_text(const Verdict& verdict) const;

  std::string dir_;
  bool is_bf16_;
  bool verbose_;
  std::set<std::string> skipped_names_;
  int passed_ = 0, failed_ = 0, skipped_ = 0, near_ties_ = 0;
  int positions_ = 0, ill_conditioned_ = 0;
  int rounding_limited_ = 0, near_tie_rows_ = 0;  // bf16
  double worst_logits_ = 0, worst_delta_ = 0;
  double worst_ratio_ = -1;  // to the yardstick
  std::string worst_ratio_case_;
  std::string worst_logits_case_, worst_delta_case_ = "-";
};

}  // namespace moelora_cli
