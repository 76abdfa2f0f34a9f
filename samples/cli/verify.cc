// SPDX-License-Identifier: Apache-2.0
// moelora verify: answers the cases of a reference folder through the ordinary engine and batch path, one at a time or
// all in one batch (--mixed), and judges logits, the adapters' deltas and greedy tokens (verify_rules.h), in bf16
// beside engines on the CPU (verify_yardstick.h). With --mixed --deterministic the batch must also give the very bits
// of one at a time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "samples/cli/command.h"
#include "samples/cli/verify_report.h"
#include "samples/cli/verify_rules.h"
#include "samples/cli/verify_yardstick.h"

namespace moelora_cli {
namespace {

constexpr int kSkipped = 77;  // as ctest's SKIP_RETURN_CODE has it

struct VerifyFlags {
  EngineFlags engine;
  std::string dir, skip, only;
  bool mixed = false;
  bool verbose = false;
  bool skip_without_device = false;
  bool yardstick_always = false;
};

const char* label(const std::string& adapter) {
  return adapter.empty() ? "base" : adapter.c_str();
}

class Verifier {
 public:
  explicit Verifier(const VerifyFlags& flags) : flags_(flags), folder_(read_reference_case(flags.dir)) {
    EngineFlags engine_flags = flags.engine;
    if (engine_flags.model.empty()) {
      engine_flags.model = folder_.model_dir();
    }
    precision_ = precision_of(engine_flags);
    report_.emplace(flags.dir, precision_ == Precision::kBf16, flags.verbose);
    choose();
    engine_.emplace(engine_flags);
    load_adapters();
  }

  int run() {
    const moelora_engine_info info = engine_->info();
    std::printf("%s: %s, %s, %s%s\n", flags_.dir.c_str(), info.architecture,
                info.device_kind == MOELORA_DEVICE_CUDA ? "cuda" : "cpu", flags_.mixed ? "one batch" : "one at a time",
                flags_.engine.deterministic ? ", deterministic" : "");
    std::map<size_t, Outcome> outcomes = flags_.mixed ? answer_together() : answer_singly();
    judge_all(outcomes);
    report_->judge_shares();
    if (flags_.mixed && flags_.engine.deterministic) {
      compare_bits(outcomes, answer_singly());
    }
    return report_->finish() ? 0 : 1;
  }

 private:
  static Precision precision_of(const EngineFlags& flags) {
    if (flags.compute == "bf16" || flags.device.starts_with("cuda")) {
      return Precision::kBf16;
    }
    const std::string path = flags.model + "/config.json";
    const auto config = nlohmann::json::parse(read_file(path), nullptr, false);
    return config.is_object() && config.contains("quantization_config") ? Precision::kQuantised : Precision::kExact;
  }

  // Cases to run; the base's are run also where only their adapters were asked for, as the deltas need them.
  void choose() {
    const auto list = [](const std::string& text) {
      const auto parts = split(text, ',');
      return std::set<std::string>(parts.begin(), parts.end());
    };
    const std::set<std::string> skip = list(flags_.skip), only = list(flags_.only);
    std::set<std::string> known;
    for (size_t i = 0; i < folder_.cases.size(); ++i) {
      const std::string name = label(folder_.cases[i].adapter);
      known.insert(name);
      if (skip.contains(name)) {
        report_->skip(name);
      } else if (only.empty() || only.contains(name)) {
        judged_.insert(i);
        chosen_.insert(i);
      } else if (name == "base") {
        chosen_.insert(i);
      }
    }
    for (const std::string& name : only) {
      if (!known.contains(name)) {
        throw Failure(MOELORA_E_NOT_FOUND, "--only: " + flags_.dir + " has no cases of '" + name + "'");
      }
    }
    report_->print_skipped();
  }

  void load_adapters() {
    for (const size_t i : chosen_) {
      const std::string& name = folder_.cases[i].adapter;
      if (name.empty() || adapters_.contains(name) || refused_.contains(name)) {
        continue;
      }
      try {
        adapters_[name] = engine_->load({name, folder_.adapter_dir(name)});
      } catch (const Failure& failure) {
        refused_[name] = failure.what();
      }
    }
  }

  [[nodiscard]] bool runnable(size_t i) const { return !refused_.contains(folder_.cases[i].adapter); }

  [[nodiscard]] Request make_request(const Case& reference, float scale = 1.0f) const {
    Request request(engine_->get());
    moelora_sampling sampling;
    moelora_sampling_init(&sampling);
    sampling.max_tokens = static_cast<int32_t>(reference.greedy.size());
    sampling.flags = MOELORA_SAMPLING_IGNORE_EOS;
    request.set_tokens(reference.prompt);
    request.set_sampling(sampling);
    if (!reference.adapter.empty()) {
      request.set_adapter(adapters_.at(reference.adapter), scale);
    }
    must(moelora_request_capture_logits, engine_->get(), request.handle(), reference.first_position);
    return request;
  }

  // In bf16 the rows after the prompt are compared too, with the CPU's.
  [[nodiscard]] Outcome take(Request& request, const Case& reference) const {
    const int32_t wanted =
        precision_ == Precision::kBf16 ? num_rows_to_last_token(reference) : static_cast<int32_t>(reference.rows);
    request.read_to_end();
    Outcome outcome{{}, request.tokens()};
    int32_t first = -1;
    const int32_t rows = request.captured(&first);
    if (first != reference.first_position || rows < wanted) {
      throw Failure(MOELORA_E_INTERNAL, reference.name + ": captured " + std::to_string(rows) + " rows from position " +
                                            std::to_string(first));
    }
    for (int32_t row = 0; row < wanted; ++row) {
      const std::vector<float> logits = request.captured_row(row);
      outcome.logits.insert(outcome.logits.end(), logits.begin(), logits.end());
    }
    return outcome;
  }

  std::map<size_t, Outcome> answer_singly() {
    std::map<size_t, Outcome> outcomes;
    for (const size_t i : chosen_) {
      if (runnable(i)) {
        Request request = make_request(folder_.cases[i]);
        request.submit();
        outcomes[i] = take(request, folder_.cases[i]);
      }
    }
    return outcomes;
  }

  // All cases in one submission, prompt by prompt, so that neighbours in the batch have different adapters.
  std::map<size_t, Outcome> answer_together() {
    std::map<std::vector<int32_t>, std::vector<size_t>> by_prompt;
    for (const size_t i : chosen_) {
      if (runnable(i)) {
        by_prompt[folder_.cases[i].prompt].push_back(i);
      }
    }
    std::vector<std::pair<size_t, Request>> requests;
    std::vector<moelora_request> handles;
    for (const auto& [prompt, indices] : by_prompt) {
      for (const size_t i : indices) {
        requests.emplace_back(i, make_request(folder_.cases[i]));
        handles.push_back(requests.back().second.handle());
      }
    }
    must(moelora_submit_batch, engine_->get(), handles.data(), handles.size(), static_cast<moelora_status*>(nullptr));
    std::map<size_t, Outcome> outcomes;
    for (auto& [i, request] : requests) {
      outcomes[i] = take(request, folder_.cases[i]);
    }
    return outcomes;
  }

  void judge_all(const std::map<size_t, Outcome>& outcomes) {
    for (const size_t i : judged_) {
      const Case& reference = folder_.cases[i];
      if (!runnable(i)) {
        report_->fail(reference, "adapter refused: " + refused_[reference.adapter]);
        continue;
      }
      if (precision_ == Precision::kBf16) {
        report_->note(reference, judge_rounded(i, outcomes));
        continue;
      }
      const auto base = reference.adapter.empty() ? outcomes.end() : find_base(outcomes, reference);
      const bool has_base = base != outcomes.end();
      const Case* base_case = has_base ? &folder_.cases[base->first] : nullptr;
      const Outcome* base_outcome = has_base ? &base->second : nullptr;
      Tolerances tolerances = tolerances_of(precision_);
      Verdict verdict = judge(reference, outcomes.at(i), base_case, base_outcome, tolerances);
      if (!verdict.passed && precision_ == Precision::kExact && !reference.adapter.empty()) {
        tolerances.logits_of_row = conditioned_bounds(reference, tolerances.logits);
        verdict = judge(reference, outcomes.at(i), base_case, base_outcome, tolerances);
      }
      report_->note(reference, verdict);
    }
  }

  Verdict judge_rounded(size_t i, const std::map<size_t, Outcome>& outcomes) {
    const bool on_cpu = engine_->info().device_kind == MOELORA_DEVICE_CPU;
    if (!yardstick_) {
      yardstick_.emplace(flags_.engine, folder_, !on_cpu || flags_.yardstick_always);
    }
    const Case& reference = folder_.cases[i];
    const Evidence own{&reference, &outcomes.at(i), &yardstick_->of(i)};
    const auto base = reference.adapter.empty() ? outcomes.end() : find_base(outcomes, reference);
    if (base == outcomes.end()) {
      return judge_bf16(own, nullptr, tolerances_of(precision_));
    }
    const Evidence of_base{&folder_.cases[base->first], &base->second, &yardstick_->of(base->first)};
    return judge_bf16(own, &of_base, tolerances_of(precision_));
  }

  // Bounds of the rows of a case that failed: see bounds_of_condition. The first change is far above rounding and far
  // below any curvature; the others find what is about to change close by, such as the key that attention chooses.
  [[nodiscard]] std::vector<double> conditioned_bounds(const Case& reference, double bound) const {
    Request here = make_request(reference);
    here.submit();
    const Outcome outcome = take(here, reference);
    std::vector<double> bounds(static_cast<size_t>(reference.rows), bound);
    for (const float change : {0x1p-14f, 0x1p-10f, -0x1p-10f}) {
      Request there = make_request(reference, 1.0f + change);
      there.submit();
      const std::vector<double> found =
          bounds_of_condition(reference, outcome, take(there, reference), static_cast<double>(change), bound);
      std::transform(bounds.begin(), bounds.end(), found.begin(), bounds.begin(),
                     [](double a, double b) { return std::max(a, b); });
    }
    return bounds;
  }

  [[nodiscard]] std::map<size_t, Outcome>::const_iterator find_base(const std::map<size_t, Outcome>& outcomes,
                                                                    const Case& reference) const {
    return std::find_if(outcomes.begin(), outcomes.end(), [&](const auto& entry) {
      const Case& candidate = folder_.cases[entry.first];
      return candidate.adapter.empty() && candidate.prompt == reference.prompt;
    });
  }

  void compare_bits(const std::map<size_t, Outcome>& together, const std::map<size_t, Outcome>& singly) {
    int different = 0;
    for (const auto& [i, outcome] : together) {
      const Outcome& alone = singly.at(i);
      const bool equal =
          outcome.tokens == alone.tokens && outcome.logits.size() == alone.logits.size() &&
          std::memcmp(outcome.logits.data(), alone.logits.data(), outcome.logits.size() * sizeof(float)) == 0;
      if (!equal) {
        ++different;
        report_->fail(folder_.cases[i], "bits in the batch differ from one at a time");
      }
    }
    std::printf("bits: %zu of %zu cases are equal in the batch and one at a time\n", together.size() - different,
                together.size());
  }

  const VerifyFlags& flags_;
  ReferenceCase folder_;
  Precision precision_ = Precision::kExact;
  std::optional<Engine> engine_;
  std::optional<YardstickEngines> yardstick_;
  std::set<size_t> chosen_, judged_;
  std::map<std::string, moelora_adapter> adapters_;
  std::map<std::string, std::string> refused_;
  std::optional<VerifyReport> report_;
};

}  // namespace

void add_verify(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* command = app.add_subcommand("verify", "Compares with a folder of reference logits and tokens");
  add_engine_flags(*command, flags->engine, false);
  command->add_option("case_dir", flags->dir, "folder with expected.json, expected.safetensors, adapters, model")
      ->required()
      ->check(CLI::ExistingDirectory);
  command->add_option("--skip", flags->skip, "NAME,... adapters not to try; counted as skipped");
  command->add_option("--only", flags->only, "NAME,... adapters to try; 'base' for the base model");
  command->add_flag("--mixed", flags->mixed, "all cases in one batch; with --deterministic also compares bits");
  command->add_flag("--verbose", flags->verbose, "a line for each case, not only for failures");
  command->add_flag("--skip-without-device", flags->skip_without_device, "exit 77 where the device does not exist");
  // Hidden: with a CPU engine under test the yardstick is nearly itself. For tests of verify.
  command->add_flag("--yardstick-always", flags->yardstick_always)->group("");
  command->callback([flags, exit_code] {
    try {
      *exit_code = Verifier(*flags).run();
    } catch (const Failure& failure) {
      if (!flags->skip_without_device || failure.status != MOELORA_E_NO_DEVICE) {
        throw;
      }
      std::printf("skipped: %s\n", failure.what());
      *exit_code = kSkipped;
    }
  });
}

}  // namespace moelora_cli
