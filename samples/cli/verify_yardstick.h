// SPDX-License-Identifier: Apache-2.0
// The CPU engines that stand beside an engine in bf16 (verify_rules.h says why): one in fp32, and one in bf16 with keys
// and values in bf16, which rounds where the engine under test rounds but has no kernel in common with it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "samples/cli/host.h"
#include "samples/cli/reference_case.h"
#include "samples/cli/verify_rules.h"

namespace moelora_cli {

// An engine that is fed a case's prompt and greedy tokens, so that its rows do not depend on what it would have chosen.
class FedEngine {
 public:
  FedEngine(EngineFlags flags, const std::string& compute, const std::string& kv_dtype, const ReferenceCase& folder);
  // Logits of all positions but that of the last greedy token; router gaps too, if asked.
  std::vector<float> answer(const Case& reference, std::vector<double>* router_gaps);

 private:
  const ReferenceCase& folder_;
  Engine engine_;
  std::map<std::string, moelora_adapter> adapters_;
};

class YardstickEngines {
 public:
  // `with_rounded`: the engine in bf16 too.
  YardstickEngines(const EngineFlags& flags, const ReferenceCase& folder, bool with_rounded);
  // Of case `index` of the folder; measured once.
  const Yardstick& of(size_t index);

 private:
  const ReferenceCase& folder_;
  FedEngine exact_;
  std::optional<FedEngine> rounded_;
  std::map<size_t, Yardstick> measured_;
};

}  // namespace moelora_cli
