// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/adapter_plan.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/adapter/adapter_experts.h"
#include "runtime/adapter/adapter_pairs.h"

namespace moelora {
namespace {

std::string stored_dtype(const std::vector<AdapterPair>& pairs) {
  std::set<std::string> seen;
  for (const AdapterPair& pair : pairs) {
    for (const StoredTensor* tensor : {pair.a, pair.b, pair.bias}) {
      if (tensor != nullptr) {
        seen.insert(tensor->dtype);
      }
    }
  }
  return seen.size() == 1 ? *seen.begin() : "mixed";
}

// Paths of the modules and parameters that a pair may adapt, for comparison with the config's targets.
void add_paths(const AdapterPair& pair, std::vector<std::string>& paths) {
  const bool wrapper = pair.target.kind == TargetKind::kExpertsInner || pair.target.kind == TargetKind::kExpertsOuter;
  for (const char* suffix : {"", ".gate_up_proj", ".down_proj", ".weight"}) {
    const bool parameter = suffix[0] != '\0' && std::strcmp(suffix, ".weight") != 0;
    if (!parameter || wrapper) {
      for (std::string& path : pattern_paths(pair.path, suffix)) {
        paths.push_back(std::move(path));
      }
    }
  }
}

// Targets of the config that no tensor belongs to: the training meant more than the file holds.
void warn_unused_targets(const std::vector<AdapterPair>& pairs, const LoadContext& context) {
  std::vector<std::string> paths;
  bool experts = false;
  for (const AdapterPair& pair : pairs) {
    add_paths(pair, paths);
    experts |= pair.target.kind != TargetKind::kDense;
  }
  const auto warn = [&](const char* key, const std::string& entry) {
    const bool used =
        std::any_of(paths.begin(), paths.end(), [&](const std::string& path) { return path_has_suffix(path, entry); });
    if (!used) {
      context.warnings.push_back(std::string("adapter_config.json: no tensor for the entry '") + entry + "' of " + key +
                                 (context.model.num_experts > 0 && !experts ? "; no expert tensors exist" : ""));
    }
  };
  for (const std::string& entry : context.adapter.target_modules) {
    warn("target_modules", entry);
  }
  for (const std::string& entry : context.adapter.target_parameters) {
    warn("target_parameters", entry);
  }
}

void refuse_saved_modules(const LoadContext& context) {
  if (!context.adapter.modules_to_save.empty()) {
    throw Error{Status::kUnsupported, "adapter_config.json: modules_to_save names '" +
                                          context.adapter.modules_to_save.front() +
                                          "': whole tensors in adapters are not implemented"};
  }
}

std::vector<AdapterRecord> make_records(const AdapterPairs& found, const LoadContext& context) {
  std::vector<AdapterRecord> records;
  for (const AdapterPair& pair : found.pairs) {
    if (pair.target.kind == TargetKind::kDense || pair.target.kind == TargetKind::kExpert) {
      append_linear_record(pair, context, records);
    }
  }
  append_expert_records(found.pairs, context, records);
  return records;
}

}  // namespace

void describe_records(const std::vector<AdapterRecord>& records, AdapterFacts& facts) {
  std::set<int32_t> layers;
  std::set<std::pair<int32_t, int32_t>> experts;
  for (const AdapterRecord& record : records) {
    facts.max_rank = std::max(facts.max_rank, record.rank);
    facts.modules |= 1u << (record.expert < 0 ? record.module : kExpertModuleBit + record.module);
    layers.insert(record.layer);
    const auto bytes = static_cast<uint64_t>(matrix_granules(record.rank, record.a.columns, record.dtype) +
                                             matrix_granules(record.rank, record.b.columns, record.dtype)) *
                       kGranuleBytes;
    (record.expert < 0 ? facts.dense_matrix_bytes : facts.expert_matrix_bytes) += bytes;
    if (record.expert >= 0) {
      experts.emplace(record.layer, record.expert);
    }
  }
  facts.num_layers = static_cast<int32_t>(layers.size());
  for (const int32_t layer : layers) {
    const auto begin = experts.lower_bound({layer, 0});
    const auto end = experts.lower_bound({layer + 1, 0});
    facts.num_experts = std::max(facts.num_experts, static_cast<int32_t>(std::distance(begin, end)));
  }
}

std::shared_ptr<const AdapterPlan> plan_adapter(const std::string& config_json, const std::string& config_source,
                                                std::string header, const ByteSource& weights, const ModelConfig& model,
                                                const AdapterLoadOptions& options) {
  auto plan = std::make_shared<AdapterPlan>();
  plan->config_json = config_json;
  plan->header = std::move(header);
  plan->options = options;
  plan->options.cache = nullptr;
  plan->file = SafetensorsFile::from_header(plan->header, weights);
  const AdapterConfig config = parse_adapter_config(config_json, config_source);
  plan->warnings = config.warnings;
  const LoadContext context{model, config, options, weights.label(), plan->warnings};
  const AdapterPairs found = collect_pairs(*plan->file, context);
  refuse_saved_modules(context);
  std::vector<AdapterRecord> records = make_records(found, context);
  warn_unused_targets(found.pairs, context);
  plan->stream = plan_stream(model, records, weights.label());
  plan->reads = plan_reads(std::move(plan->stream.matrices));
  AdapterFacts& facts = plan->facts;
  describe_records(records, facts);
  facts.stream_bytes = plan->stream.bytes();
  facts.alpha = static_cast<float>(config.alpha);
  facts.rank = config.rank;
  facts.num_tensors = found.num_tensors - found.num_unmatched;
  facts.num_tensors_unmatched = found.num_unmatched;
  facts.dtype = stored_dtype(found.pairs);
  facts.file_bytes = weights.bytes();
  return plan;
}

}  // namespace moelora
