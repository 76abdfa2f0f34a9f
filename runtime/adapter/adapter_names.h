// SPDX-License-Identifier: Apache-2.0
// Tensor names of adapter files: brings every spelling seen in public files to one, and says which linear of the
// base model a tensor belongs to. Pure functions of name and ModelConfig; shapes are looked at by adapter_pairs.
// A name is never guessed at: what is not understood is kUnknown, what is understood and not implemented is
// kUnsupported, each with a reason for the message.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "runtime/model/config.h"

namespace moelora {

// Which linear or group of linears a pair adapts.
enum class TargetKind : uint8_t {
  kDense,         // one 2-D linear of the layer; index is a LoraModule
  kExpert,        // one 2-D linear of one expert; index is an ExpertModule
  kExpertsInner,  // ...mlp.experts.base_layer: first of two targeted 3-D parameters
  kExpertsOuter,  // ...mlp.experts: the last or only targeted 3-D parameter
  kStacked,       // 3-D tensors ...mlp.experts.{w1,w3,w2,down_proj}; index is an ExpertModule
  kStackedGateUp  // 3-D tensors ...mlp.experts.gate_up_proj
};

struct AdapterTarget {
  int32_t layer = -1;
  TargetKind kind = TargetKind::kDense;
  int32_t expert = -1;
  int32_t index = -1;
  auto operator<=>(const AdapterTarget&) const = default;
};

enum class TensorPart : uint8_t { kA, kB, kBias };
enum class NameVerdict : uint8_t { kTarget, kIgnored, kUnsupported, kUnknown };

struct NameMatch {
  NameVerdict verdict = NameVerdict::kUnknown;
  AdapterTarget target;
  TensorPart part = TensorPart::kA;
  std::string path;    // module path as stored, without wrappers and suffix: what rank_pattern is matched against
  std::string reason;  // kUnsupported, kUnknown
};

NameMatch match_tensor_name(const std::string& stored, const ModelConfig& config);

}  // namespace moelora
