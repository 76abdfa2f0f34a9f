// SPDX-License-Identifier: Apache-2.0
// From a file's tensors to pairs of A and B, each bound to a linear of the base model: every tensor is used, or the
// load fails naming it. Also the records of 2-D pairs; 3-D expert parameters are adapter_experts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/adapter/adapter_config.h"
#include "runtime/adapter/adapter_names.h"
#include "runtime/adapter/adapter_packer.h"
#include "runtime/io/safetensors.h"

namespace moelora {

struct AdapterPair {
  AdapterTarget target;
  std::string path;  // as stored, of A
  const StoredTensor* a = nullptr;
  const StoredTensor* b = nullptr;
  const StoredTensor* bias = nullptr;
};

struct AdapterPairs {
  std::vector<AdapterPair> pairs;  // sorted by target
  int32_t num_tensors = 0;
  int32_t num_unmatched = 0;  // lenient only
};

// What the steps of a load share.
struct LoadContext {
  const ModelConfig& model;
  const AdapterConfig& adapter;
  const AdapterLoadOptions& options;
  std::string file;  // of the tensors
  std::vector<std::string>& warnings;

  [[noreturn]] void mismatch(const std::string& message) const;
  // Throws unless `rank` (of `tensor`) is what the config says for the module and within max_lora_rank.
  void check_rank(int64_t rank, int32_t expected, const StoredTensor& tensor) const;
};

// Widths of a linear of the base model.
struct LinearShape {
  int32_t in = 0;
  int32_t out = 0;
};
LinearShape dense_shape(const ModelConfig& config, LoraModule module);
LinearShape expert_shape(const ModelConfig& config, ExpertModule module);

AdapterPairs collect_pairs(const SafetensorsFile& file, const LoadContext& context);

// Appends the record of a pair of target kind kDense or kExpert.
void append_linear_record(const AdapterPair& pair, const LoadContext& context, std::vector<AdapterRecord>& records);

// Dtype in the stream of a pair that is stored as `a` and `b`.
Dtype packed_dtype(const StoredTensor& a, const StoredTensor& b, const LoadContext& context);

// Spellings of a module path that a pattern may mean; `suffix` (".gate_up_proj") may be empty.
std::vector<std::string> pattern_paths(const std::string& path, const std::string& suffix);

}  // namespace moelora
