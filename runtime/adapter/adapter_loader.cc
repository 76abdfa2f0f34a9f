// SPDX-License-Identifier: Apache-2.0
// PEFT adapters from a folder or from memory to an AdapterImage: a plan of what is where, then the values. Each
// file is opened once and each of its bytes is read once, so that what was checked is what is packed.
#include <algorithm>
#include <chrono>
#include <filesystem>

#include "kernels/base/error.h"
#include "kernels/base/stream.h"
#include "runtime/adapter/adapter_image.h"
#include "runtime/adapter/adapter_packer.h"
#include "runtime/adapter/adapter_pairs.h"
#include "runtime/adapter/adapter_plan.h"
#include "runtime/adapter/content_hash.h"
#include "runtime/adapter/load_cache.h"
#include "runtime/io/byte_source.h"
#include "runtime/io/json.h"
#include "runtime/io/safetensors.h"

namespace moelora {
namespace {

constexpr size_t kConfigBytesMax = size_t{16} << 20;

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// The two files of an adapter.
struct AdapterFiles {
  const std::string& config_json;
  std::string config_source;
  const ByteSource& weights;
};

[[noreturn]] void refuse_contents(const std::string& path) {
  throw Error{Status::kIo, path + ": its contents changed since the adapter was loaded; unload it and load it again"};
}

// The header's text. Where it must be as before, whatever it is now is a change, also if it is no header any more.
std::string read_header(const AdapterFiles& files, const AdapterFacts* expected, AdapterFacts& facts) {
  facts.config_fingerprint =
      hash_bytes(reinterpret_cast<const std::byte*>(files.config_json.data()), files.config_json.size(), 0);
  if (expected != nullptr && facts.config_fingerprint != expected->config_fingerprint) {
    refuse_contents(files.config_source);
  }
  if (expected != nullptr && files.weights.bytes() != expected->file_bytes) {
    refuse_contents(files.weights.label());
  }
  std::string header;
  try {
    header = SafetensorsFile::read_header(files.weights);
  } catch (const Error& error) {
    if (expected != nullptr && error.status() == Status::kCorrupt) {
      refuse_contents(files.weights.label());
    }
    throw;
  }
  facts.header_fingerprint =
      hash_bytes(reinterpret_cast<const std::byte*>(header.data()), header.size(), facts.config_fingerprint);
  if (expected != nullptr && facts.header_fingerprint != expected->header_fingerprint) {
    refuse_contents(files.weights.label());
  }
  return header;
}

std::shared_ptr<const AdapterPlan> plan_of(std::string header, const AdapterFiles& files, const ModelConfig& model,
                                           const AdapterLoadOptions& options) {
  LoadCache* cache = options.cache.get();
  std::shared_ptr<const AdapterPlan> plan;
  if (cache != nullptr) {
    plan = cache->find_plan(files.config_json, header, files.weights.bytes(), options);
  }
  if (plan == nullptr) {
    plan = plan_adapter(files.config_json, files.config_source, std::move(header), files.weights, model, options);
    if (cache != nullptr) {
      cache->keep_plan(plan);
    }
  }
  return plan;
}

// How much of the files is read.
enum class Read : uint8_t { kHeader, kAll };

// `expected`, if not null, has the fingerprints that the files must have, as far as they are known. `begun` as in
// reload_adapter.
std::shared_ptr<AdapterImage> build_image(const AdapterFiles& files, const ModelConfig& model,
                                          const AdapterLoadOptions& options, Read read, const AdapterFacts* expected,
                                          Clock::time_point start, const AdapterBegun& begun) {
  auto image = std::make_shared<AdapterImage>();
  AdapterFacts fingerprints;
  std::string header = read_header(files, expected, fingerprints);
  const std::shared_ptr<const AdapterPlan> plan = plan_of(std::move(header), files, model, options);
  if (expected != nullptr && plan->facts.stream_bytes != expected->stream_bytes) {
    refuse_contents(files.weights.label());  // pages are leased for the size that it had
  }
  static_cast<AdapterFacts&>(*image) = plan->facts;
  image->config_fingerprint = fingerprints.config_fingerprint;
  image->header_fingerprint = fingerprints.header_fingerprint;
  image->options = options;
  image->warnings = plan->warnings;
  if (read == Read::kHeader) {
    files.weights.check_unchanged();
    image->read_ms = ms_since(start);
    return image;
  }
  image->stream = plan->stream.make_stream(options.cache == nullptr ? HostBytes{}
                                                                    : options.cache->take_memory(plan->stream.bytes()));
  image->read_ms = ms_since(start);
  if (begun) {
    image->progress.begin();
    begun(image);
  }
  Stream workers(std::max(1, options.num_threads), 0);
  const PackedAdapter packed = pack_adapter(plan->stream, plan->reads, files.weights, image->stream,
                                            image->header_fingerprint, workers, begun ? &image->progress : nullptr);
  files.weights.check_unchanged();
  image->fingerprint = packed.hash;
  if (expected != nullptr && expected->fingerprint != 0 && image->fingerprint != expected->fingerprint) {
    refuse_contents(files.weights.label());
  }
  if (packed.refused != nullptr) {
    throw Error{Status::kAdapterMismatch,
                files.weights.label() + ": tensor " + quoted(*packed.refused) + " holds a NaN or infinite value"};
  }
  image->pack_ms = ms_since(start) - image->read_ms;
  return image;
}

std::shared_ptr<AdapterImage> load_folder(const std::string& dir, const ModelConfig& config,
                                          const AdapterLoadOptions& options, Read read, const AdapterFacts* expected,
                                          const AdapterBegun& begun) {
  const auto start = Clock::now();
  const std::string config_path = dir + "/adapter_config.json";
  const std::string weights_path = dir + "/adapter_model.safetensors";
  const std::string config_json = read_text(config_path, kConfigBytesMax);
  const FileStamp config_stamp = stamp_of(config_path);
  std::error_code fault;
  const std::string pickle_path = dir + "/adapter_model.bin";
  if (!std::filesystem::exists(weights_path, fault) && std::filesystem::exists(pickle_path, fault)) {
    throw Error{Status::kUnsupported, pickle_path + ": a pickle file is not read; save the adapter as safetensors"};
  }
  const ByteSource weights(weights_path);
  check_unchanged(config_path, config_stamp);  // one of before with weights of after would be neither
  return build_image({config_json, config_path, weights}, config, options, read, expected, start, begun);
}

std::shared_ptr<const AdapterImage> load_from(const std::string& dir, const ModelConfig& config,
                                              const AdapterLoadOptions& options, Read read) {
  const auto image = load_folder(dir, config, options, read, nullptr, {});
  image->dir = std::filesystem::absolute(dir).string();  // the host may change its working directory
  return image;
}

}  // namespace

std::shared_ptr<const AdapterImage> load_adapter_dir(const std::string& dir, const ModelConfig& config,
                                                     const AdapterLoadOptions& options) {
  return load_from(dir, config, options, Read::kAll);
}

std::shared_ptr<const AdapterImage> describe_adapter_dir(const std::string& dir, const ModelConfig& config,
                                                         const AdapterLoadOptions& options) {
  return load_from(dir, config, options, Read::kHeader);
}

std::shared_ptr<const AdapterImage> reload_adapter(const AdapterFacts& facts, const ModelConfig& config,
                                                   const AdapterBegun& begun) {
  MOELORA_ASSERT(!facts.dir.empty());
  return load_folder(facts.dir, config, facts.options, Read::kAll, &facts, begun);
}

std::shared_ptr<const AdapterImage> load_adapter_memory(const std::string& config_json, const std::byte* weights,
                                                        size_t weights_bytes, const ModelConfig& config,
                                                        const AdapterLoadOptions& options) {
  const auto start = Clock::now();
  const ByteSource source(weights, weights_bytes, "adapter_model.safetensors");
  return build_image({config_json, "adapter_config.json", source}, config, options, Read::kAll, nullptr, start, {});
}

std::shared_ptr<const AdapterImage> random_adapter(const ModelConfig& config, int32_t rank, bool attention,
                                                   bool experts, uint64_t seed) {
  if (rank < 1 || (!attention && !experts)) {
    throw Error{Status::kInvalid, "a random adapter needs a rank of at least 1 and a target"};
  }
  const auto start = Clock::now();
  std::vector<AdapterRecord> records;
  const auto add = [&](int32_t layer, int32_t expert, int32_t module, LinearShape shape) {
    AdapterRecord record;
    record.layer = layer;
    record.expert = expert;
    record.module = module;
    record.rank = rank;
    record.scale = 1.0f;
    record.a.columns = shape.in;
    record.b.columns = shape.out;
    records.push_back(record);
  };
  const auto add_dense = [&](int32_t layer, std::initializer_list<LoraModule> modules) {
    for (const LoraModule module : modules) {
      add(layer, -1, static_cast<int32_t>(module), dense_shape(config, module));
    }
  };
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (attention) {
      add_dense(layer, {LoraModule::kQ, LoraModule::kK, LoraModule::kV, LoraModule::kO});
    }
    if (experts && config.layer_is_moe[static_cast<size_t>(layer)] == 0) {
      add_dense(layer, {LoraModule::kGate, LoraModule::kUp, LoraModule::kDown});
    }
    const int32_t count = experts && config.layer_is_moe[static_cast<size_t>(layer)] != 0 ? config.num_experts : 0;
    for (int32_t e = 0; e < count; ++e) {
      for (const ExpertModule module : {ExpertModule::kGate, ExpertModule::kUp, ExpertModule::kDown}) {
        add(layer, e, static_cast<int32_t>(module), expert_shape(config, module));
      }
    }
  }
  auto image = std::make_shared<AdapterImage>();
  image->stream = pack_random_adapter(config, records, seed);
  image->stream_bytes = image->stream.size();
  describe_records(records, *image);
  image->rank = rank;
  image->alpha = static_cast<float>(rank);
  image->dtype = "BF16";
  image->fingerprint = hash_bytes(image->stream.data(), image->stream.size(), seed);
  image->pack_ms = ms_since(start);
  return image;
}

}  // namespace moelora
