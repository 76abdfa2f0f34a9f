// SPDX-License-Identifier: Apache-2.0
// PEFT adapters from a folder or from memory to an AdapterImage: config, pairs, records, stream, in that order. Each
// file is opened once and read into memory, so that what was checked is what is packed.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <set>

#include "kernels/base/error.h"
#include "kernels/base/stream.h"
#include "runtime/adapter/adapter_experts.h"
#include "runtime/adapter/adapter_image.h"
#include "runtime/adapter/adapter_packer.h"
#include "runtime/adapter/adapter_pairs.h"
#include "runtime/io/file_bytes.h"
#include "runtime/io/json.h"
#include "runtime/io/safetensors.h"

namespace moelora {
namespace {

constexpr size_t kConfigBytesMax = size_t{16} << 20;
constexpr size_t kHashedBytes = size_t{4} << 20;

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// 64-bit hash over words in four independent lanes: as fast as memory, where a byte-wise hash would take longer than
// the load. For telling adapters apart, not against an adversary.
uint64_t hash_bytes(const std::byte* data, size_t bytes, uint64_t seed) {
  const auto mix = [](uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * 0x9ddfea08eb382d69u;
    return lane ^ (lane >> 29);
  };
  uint64_t a = seed;
  uint64_t b = mix(a, 1);
  uint64_t c = mix(b, 2);
  uint64_t d = mix(c, 3);
  const auto add = [&](const std::byte* block) {
    uint64_t words[4];
    std::memcpy(words, block, sizeof words);
    a = mix(a, words[0]);
    b = mix(b, words[1]);
    c = mix(c, words[2]);
    d = mix(d, words[3]);
  };
  size_t at = 0;
  for (; at + 32 <= bytes; at += 32) {
    add(data + at);
  }
  std::byte tail[32] = {};
  if (bytes > at) {
    std::memcpy(tail, data + at, bytes - at);
  }
  add(tail);
  return mix(mix(mix(mix(bytes, a), b), c), d);
}

// Of slices, each by itself, so that several threads can do it.
uint64_t hash_slices(const std::byte* data, size_t bytes, uint64_t seed, Stream& workers) {
  std::vector<uint64_t> hashes(1 + bytes / kHashedBytes);
  workers.parallel_for(hashes.size(), [&](size_t slice, int) {
    const size_t at = slice * kHashedBytes;
    hashes[slice] = hash_bytes(data + at, std::min(kHashedBytes, bytes - at), seed);
  });
  return hash_bytes(reinterpret_cast<const std::byte*>(hashes.data()), hashes.size() * sizeof(uint64_t), seed);
}

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

// Numbers about the records; they must be sorted by layer.
void describe(const std::vector<AdapterRecord>& records, AdapterImage& image) {
  std::set<int32_t> layers;
  std::set<std::pair<int32_t, int32_t>> experts;
  for (const AdapterRecord& record : records) {
    image.max_rank = std::max(image.max_rank, record.rank);
    image.modules |= 1u << (record.expert < 0 ? record.module : 16 + record.module);
    layers.insert(record.layer);
    const auto bytes = static_cast<uint64_t>(matrix_granules(record.rank, record.a.columns, record.dtype) +
                                             matrix_granules(record.rank, record.b.columns, record.dtype)) *
                       kGranuleBytes;
    (record.expert < 0 ? image.dense_matrix_bytes : image.expert_matrix_bytes) += bytes;
    if (record.expert >= 0) {
      experts.emplace(record.layer, record.expert);
    }
  }
  image.num_layers = static_cast<int32_t>(layers.size());
  for (const int32_t layer : layers) {
    const auto begin = experts.lower_bound({layer, 0});
    const auto end = experts.lower_bound({layer + 1, 0});
    image.num_experts = std::max(image.num_experts, static_cast<int32_t>(std::distance(begin, end)));
  }
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

// The two files of an adapter in memory.
struct AdapterFiles {
  const std::string& config_json;
  std::string config_source;
  const std::byte* weights = nullptr;
  size_t weights_bytes = 0;
  std::string weights_source;
};

void check_contents(const AdapterFacts& facts, const AdapterFacts& expected, const AdapterFiles& files) {
  if (facts.fingerprint != expected.fingerprint) {
    const bool same_config = facts.config_fingerprint == expected.config_fingerprint;
    throw Error{Status::kIo, (same_config ? files.weights_source : files.config_source) +
                                 ": its contents changed since the adapter was loaded; unload it and load it again"};
  }
}

// `expected`, if not null, has the fingerprint that the files must have.
std::shared_ptr<AdapterImage> build_image(const AdapterFiles& files, const ModelConfig& model,
                                          const AdapterLoadOptions& options, const AdapterFacts* expected,
                                          Stream& workers, Clock::time_point start) {
  auto image = std::make_shared<AdapterImage>();
  // First of all: the hash reads all in order, so that the times of reading and packing can be told apart.
  image->config_fingerprint =
      hash_bytes(reinterpret_cast<const std::byte*>(files.config_json.data()), files.config_json.size(), 0);
  image->fingerprint = hash_slices(files.weights, files.weights_bytes, image->config_fingerprint, workers);
  image->read_ms = ms_since(start);
  if (expected != nullptr) {
    check_contents(*image, *expected, files);
  }
  const auto file = SafetensorsFile::from_memory(files.weights, files.weights_bytes, files.weights_source);
  const AdapterConfig config = parse_adapter_config(files.config_json, files.config_source);
  image->warnings = config.warnings;
  const LoadContext context{model, config, options, file->path(), image->warnings};
  const AdapterPairs found = collect_pairs(*file, context);
  refuse_saved_modules(context);
  std::vector<AdapterRecord> records;
  for (const AdapterPair& pair : found.pairs) {
    if (pair.target.kind == TargetKind::kDense || pair.target.kind == TargetKind::kExpert) {
      append_linear_record(pair, context, records);
    }
  }
  append_expert_records(found.pairs, context, records);
  warn_unused_targets(found.pairs, context);
  image->stream = pack_adapter(model, records, file->path(), workers);
  image->stream_bytes = image->stream.size();
  describe(records, *image);
  image->alpha = static_cast<float>(config.alpha);
  image->rank = config.rank;
  image->num_tensors = found.num_tensors - found.num_unmatched;
  image->num_tensors_unmatched = found.num_unmatched;
  image->dtype = stored_dtype(found.pairs);
  image->file_bytes = file->bytes();
  image->options = options;
  image->pack_ms = ms_since(start) - image->read_ms;
  return image;
}

std::shared_ptr<AdapterImage> load_folder(const std::string& dir, const ModelConfig& config,
                                          const AdapterLoadOptions& options, const AdapterFacts* expected) {
  const auto start = Clock::now();
  Stream workers(std::max(1, options.num_threads), 0);
  const std::string config_path = dir + "/adapter_config.json";
  const std::string weights_path = dir + "/adapter_model.safetensors";
  const std::string config_json = read_text(config_path, kConfigBytesMax);
  const FileStamp config_stamp = stamp_of(config_path);
  std::error_code fault;
  const std::string pickle_path = dir + "/adapter_model.bin";
  if (!std::filesystem::exists(weights_path, fault) && std::filesystem::exists(pickle_path, fault)) {
    throw Error{Status::kUnsupported, pickle_path + ": a pickle file is not read; save the adapter as safetensors"};
  }
  const FileBytes weights(weights_path, workers);
  check_unchanged(config_path, config_stamp);  // one of before with weights of after would be neither
  return build_image({config_json, config_path, weights.data(), weights.bytes(), weights_path}, config, options,
                     expected, workers, start);
}

}  // namespace

std::shared_ptr<const AdapterImage> load_adapter_dir(const std::string& dir, const ModelConfig& config,
                                                     const AdapterLoadOptions& options) {
  const auto image = load_folder(dir, config, options, nullptr);
  image->dir = std::filesystem::absolute(dir).string();  // the host may change its working directory
  return image;
}

std::shared_ptr<const AdapterImage> reload_adapter(const AdapterFacts& facts, const ModelConfig& config) {
  MOELORA_ASSERT(!facts.dir.empty());
  return load_folder(facts.dir, config, facts.options, &facts);
}

std::shared_ptr<const AdapterImage> load_adapter_memory(const std::string& config_json, const std::byte* weights,
                                                        size_t weights_bytes, const ModelConfig& config,
                                                        const AdapterLoadOptions& options) {
  const auto start = Clock::now();
  Stream workers(std::max(1, options.num_threads), 0);
  return build_image({config_json, "adapter_config.json", weights, weights_bytes, "adapter_model.safetensors"}, config,
                     options, nullptr, workers, start);
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
  describe(records, *image);
  image->rank = rank;
  image->alpha = static_cast<float>(rank);
  image->dtype = "BF16";
  image->fingerprint = hash_bytes(image->stream.data(), image->stream.size(), seed);
  image->pack_ms = ms_since(start);
  return image;
}

}  // namespace moelora
