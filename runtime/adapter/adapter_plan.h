// SPDX-License-Identifier: Apache-2.0
// All that an adapter's config and the header of its weights say, before any value is read: checked, bound to the model
// and laid out. Adapters of one training recipe have the same, so that their loads can share one (LoadCache).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/adapter/adapter_image.h"
#include "runtime/adapter/adapter_packer.h"
#include "runtime/adapter/read_plan.h"
#include "runtime/adapter/stream_plan.h"
#include "runtime/io/byte_source.h"
#include "runtime/io/safetensors.h"

namespace moelora {

// Immutable. The plans point into `file`.
struct AdapterPlan {
  std::string config_json;
  std::string header;          // JSON text
  AdapterLoadOptions options;  // without a cache
  std::unique_ptr<SafetensorsFile> file;
  StreamPlan stream;  // its matrices are in `reads`
  ReadPlan reads;
  AdapterFacts facts;  // but fingerprints, times and where it came from
  std::vector<std::string> warnings;
};

// Config, pairs, records, places, in that order. Throws Error as load_adapter_dir does, but for values.
std::shared_ptr<const AdapterPlan> plan_adapter(const std::string& config_json, const std::string& config_source,
                                                std::string header, const ByteSource& weights, const ModelConfig& model,
                                                const AdapterLoadOptions& options);

// Numbers about the records, which must be sorted by layer.
void describe_records(const std::vector<AdapterRecord>& records, AdapterFacts& facts);

}  // namespace moelora
