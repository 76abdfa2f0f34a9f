// SPDX-License-Identifier: Apache-2.0
// The CPU engines that stand beside an engine in bf16 (verify_rules.h says why) and have no kernel in common with it:
// one in fp32, and a few that round. How far rounding moves a row is chance, and one run is a single draw of it, so the
// yardstick is a small sample: roundings of activations, of keys and values, of both and, where the model's matrices
// are F16 or F32, of those too; with an adapter also two runs whose scale differs by 2^-9, which is itself far below
// the roundings' effect but draws them anew. Other chunks of the prompt would not: on the CPU they give the same bits.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "samples/cli/host.h"
#include "samples/cli/reference_case.h"
#include "samples/cli/rounded_model.h"
#include "samples/cli/verify_rules.h"

namespace moelora_cli {

// An engine that is fed a case's prompt and greedy tokens, so that its rows do not depend on what it would have chosen.
class FedEngine {
 public:
  FedEngine(EngineFlags flags, const std::string& compute, const std::string& kv_dtype, const ReferenceCase& folder);
  // Logits of all positions but that of the last greedy token; router gaps too, if asked.
  std::vector<float> answer(const Case& reference, float scale, std::vector<double>* router_gaps);

 private:
  const ReferenceCase& folder_;
  Engine engine_;
  std::map<std::string, moelora_adapter> adapters_;
};

class YardstickEngines {
 public:
  // `with_rounded`: those that round too.
  YardstickEngines(const EngineFlags& flags, const ReferenceCase& folder, bool with_rounded);
  // Of case `index` of the folder; measured once.
  const Yardstick& of(size_t index);

 private:
  const ReferenceCase& folder_;
  FedEngine exact_;
  std::unique_ptr<RoundedModel> rounded_model_;
  std::deque<FedEngine> rounded_;  // bf16 with keys and values in bf16 first
  std::map<size_t, Yardstick> measured_;
};

}  // namespace moelora_cli
