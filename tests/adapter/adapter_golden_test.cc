// SPDX-License-Identifier: Apache-2.0
// Every adapter of the reference cases: what the loader packed, read back through AdapterTable, against scale * B A
// built in double from the file by rules written out here for PEFT 0.21 (natural orientation) and per-expert names.
#include <filesystem>
#include <map>

#include "tests/adapter/adapter_files.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/model_files.h"
#include "tests/support/unpacked_image.h"

namespace moelora::test {
namespace {

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<double> values;
};

// A reader of its own: header by the JSON library, elements by shifting bits.
std::map<std::string, Tensor> read_tensors(const std::string& path) {
  const std::string file = read_file(path);
  uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  const auto json = nlohmann::json::parse(file.substr(8, header));
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") {
      continue;
    }
    Tensor tensor;
    tensor.shape = entry["shape"].get<std::vector<int64_t>>();
    const size_t begin = 8 + header + entry["data_offsets"][0].get<size_t>();
    const size_t end = 8 + header + entry["data_offsets"][1].get<size_t>();
    const size_t width = entry["dtype"] == "F32" ? 4 : 2;
    REQUIRE((entry["dtype"] == "F32" || entry["dtype"] == "BF16"));
    for (size_t at = begin; at < end; at += width) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 4 - width, file.data() + at, width);
      float value;
      std::memcpy(&value, &bits, sizeof value);
      tensor.values.push_back(static_cast<double>(value));
    }
    tensors[name] = std::move(tensor);
  }
  return tensors;
}

// scale * B A over the given elements of A and B.
template <class A, class B>
Delta product(double scale, int32_t rank, int32_t in, int32_t out, const A& a, const B& b) {
  Delta delta{true, out, in, rank, std::vector<double>(static_cast<size_t>(in) * static_cast<size_t>(out)), {}};
  for (int32_t n = 0; n < out; ++n) {
    for (int32_t k = 0; k < in; ++k) {
      double sum = 0.0;
      for (int32_t r = 0; r < rank; ++r) {
        sum += b(n, r) * a(r, k);
      }
      delta.values[static_cast<size_t>(n * in + k)] = scale * sum;
    }
  }
  return delta;
}

using DenseKey = std::pair<int32_t, LoraModule>;
using ExpertKey = std::tuple<int32_t, int32_t, ExpertModule>;
struct Expected {
  std::map<DenseKey, Delta> dense;
  std::map<ExpertKey, Delta> experts;
};

// The reference cases' patterns are plain: a key is the end of a path, with escaped dots and perhaps ".*" before it.
double pattern_value(const Json& config, const char* key, const std::string& path, double fallback) {
  const Json patterns = config.value(key, Json::object());
  for (const auto& [pattern, value] : patterns.items()) {
    std::string suffix;
    for (const char c : pattern.starts_with(".*\\.") ? pattern.substr(4) : pattern) {
      if (c != '\\') {
        suffix += c;
      }
    }
    if (path.ends_with("." + suffix)) {
      return value.get<double>();
    }
  }
  return fallback;
}

double scale_of(const Json& config, const std::string& path, int32_t rank) {
  const double alpha = pattern_value(config, "alpha_pattern", path, config["lora_alpha"].get<double>());
  CHECK(pattern_value(config, "rank_pattern", path, config["r"].get<double>()) == rank);
  return config["use_rslora"].get<bool>() ? alpha / std::sqrt(rank) : alpha / rank;
}

const std::map<std::string, LoraModule> kDenseNames = {{"self_attn.q_proj", LoraModule::kQ},
                                                       {"self_attn.k_proj", LoraModule::kK},
                                                       {"self_attn.v_proj", LoraModule::kV},
                                                       {"self_attn.o_proj", LoraModule::kO},
                                                       {"mlp.gate_proj", LoraModule::kGate},
                                                       {"mlp.up_proj", LoraModule::kUp},
                                                       {"mlp.down_proj", LoraModule::kDown},
                                                       {"mlp.shared_expert.gate_proj", LoraModule::kSharedGate},
                                                       {"mlp.shared_expert.up_proj", LoraModule::kSharedUp},
                                                       {"mlp.shared_expert.down_proj", LoraModule::kSharedDown}};
const std::map<std::string, ExpertModule> kExpertNames = {
    {"gate_proj", ExpertModule::kGate}, {"up_proj", ExpertModule::kUp}, {"down_proj", ExpertModule::kDown},
    {"w1", ExpertModule::kGate},        {"w3", ExpertModule::kUp},      {"w2", ExpertModule::kDown}};

void expect_wrapper(Expected& expected, const Json& config, const std::string& path, int32_t layer, bool gate_up,
                    const Tensor& a, const Tensor& b, const ModelConfig& model) {
  const int32_t experts = model.num_experts;
  const auto rank = static_cast<int32_t>(a.shape[0]) / experts;
  const auto in = static_cast<int32_t>(a.shape[1]);
  const auto out = static_cast<int32_t>(b.shape[0]);
  const double scale = scale_of(config, path + (gate_up ? ".gate_up_proj" : ".down_proj"), rank);
  for (int32_t e = 0; e < experts; ++e) {
    const auto a_at = [&](int32_t r, int32_t k) { return a.values[static_cast<size_t>((e * rank + r) * in + k)]; };
    const auto part = [&](ExpertModule module, int32_t first, int32_t count, int32_t step = 1) {
      expected.experts[{layer, e, module}] = product(scale, rank, in, count, a_at, [&](int32_t n, int32_t r) {
        return b.values[static_cast<size_t>((first + n * step) * rank * experts + r * experts + e)];
      });
    };
    if (gate_up && model.family == Family::kGptOss) {
      part(ExpertModule::kGate, 0, out / 2, 2);
      part(ExpertModule::kUp, 1, out / 2, 2);
    } else if (gate_up) {
      part(ExpertModule::kGate, 0, out / 2);
      part(ExpertModule::kUp, out / 2, out / 2);
    } else {
      part(ExpertModule::kDown, 0, out);
    }
  }
}

Expected expect_adapter(const std::string& dir, const ModelConfig& model) {
  const Json config = Json::parse(read_file(dir + "/adapter_config.json"));
  const auto tensors = read_tensors(dir + "/adapter_model.safetensors");
  Expected expected;
  for (const auto& [name, a] : tensors) {
    if (!name.ends_with(".lora_A.weight")) {
      continue;
    }
    const size_t layer_at = std::string(kLayerPrefix).size();
    REQUIRE(name.starts_with(kLayerPrefix));
    const size_t module_at = name.find('.', layer_at) + 1;
    const int32_t layer = std::stoi(name.substr(layer_at));
    const std::string stem = name.substr(0, name.size() - std::string(".lora_A.weight").size());
    const std::string module = stem.substr(module_at);
    const std::string path = stem.substr(std::string("base_model.model.").size());
    const Tensor& b = tensors.at(stem + ".lora_B.weight");
    if (module == "mlp.experts.base_layer" || module == "mlp.experts") {
      const bool gate_up = module != "mlp.experts";
      const std::string experts = gate_up ? path.substr(0, path.size() - std::string(".base_layer").size()) : path;
      expect_wrapper(expected, config, experts, layer, gate_up, a, b, model);
      continue;
    }
    const auto rank = static_cast<int32_t>(a.shape[0]);
    const auto in = static_cast<int32_t>(a.shape[1]);
    Delta delta = product(
        scale_of(config, path, rank), rank, in, static_cast<int32_t>(b.shape[0]),
        [&](int32_t r, int32_t k) { return a.values[static_cast<size_t>(r * in + k)]; },
        [&](int32_t n, int32_t r) { return b.values[static_cast<size_t>(n * rank + r)]; });
    if (const auto bias = tensors.find(stem + ".lora_B.bias"); bias != tensors.end()) {
      for (const double value : bias->second.values) {
        delta.bias.push_back(scale_of(config, path, rank) * value);
      }
    }
    if (const size_t experts = module.find(".experts."); experts != std::string::npos) {
      const size_t expert_at = experts + std::string(".experts.").size();
      const std::string projection = module.substr(module.find('.', expert_at) + 1);
      expected.experts[{layer, std::stoi(module.substr(expert_at)), kExpertNames.at(projection)}] = std::move(delta);
    } else {
      expected.dense[{layer, kDenseNames.at(module)}] = std::move(delta);
    }
  }
  return expected;
}

void check_image(const AdapterImage& image, const ModelConfig& model, const Expected& expected) {
  const UnpackedImage unpacked(image, model, 4, 7);
  for (int32_t layer = 0; layer < model.num_layers; ++layer) {
    for (int32_t m = 0; m < kNumDenseModules; ++m) {
      const auto module = static_cast<LoraModule>(m);
      const auto it = expected.dense.find({layer, module});
      const Delta want = it == expected.dense.end() ? Delta{} : it->second;
      INFO("layer " << layer << " dense module " << m);
      CHECK(delta_distance(unpacked.dense(layer, module, want.in, want.out), want) < 1e-6);
      CHECK((want.present ? image.modules >> m & 1u : 1u) == 1u);
    }
    for (int32_t e = 0; e < model.num_experts; ++e) {
      for (const ExpertModule module : {ExpertModule::kGate, ExpertModule::kUp, ExpertModule::kDown}) {
        const auto it = expected.experts.find({layer, e, module});
        const Delta want = it == expected.experts.end() ? Delta{} : it->second;
        INFO("layer " << layer << " expert " << e << " module " << static_cast<int32_t>(module));
        CHECK(delta_distance(unpacked.expert(layer, e, module, want.in, want.out), want) < 1e-6);
      }
    }
  }
}

// Adapters whose kind is refused, and the word that the message must hold.
const std::map<std::string, std::string> kRefused = {
    {"dora", "use_dora"}, {"embed_head", "lm_head"}, {"save_head", "modules_to_save"}};

void check_case(const std::string& name, const ModelConfig& model) {
  const std::string adapters = std::string(MOELORA_SOURCE_DIR) + "/tests/data/cases/" + name + "/adapters";
  int32_t loaded = 0;
  for (const auto& entry : std::filesystem::directory_iterator(adapters)) {
    const std::string dir = entry.path().string();
    const std::string adapter = entry.path().filename().string();
    INFO(name << " " << adapter);
    if (const auto it = kRefused.find(adapter); it != kRefused.end()) {
      CHECK_ERROR(Status::kUnsupported, ({it->second}), load_adapter_dir(dir, model, {}));
      continue;
    }
    const auto image = load_adapter_dir(dir, model, {});
    const Expected expected = expect_adapter(dir, model);
    CHECK_FALSE((expected.dense.empty() && expected.experts.empty()));
    check_image(*image, model, expected);
    CHECK(image->warnings.empty());
    ++loaded;
  }
  CHECK(loaded > 0);
}

}  // namespace

TEST_CASE("adapters of the reference cases give the deltas of their files") {
  for (const char* name : {"qwen3_moe", "qwen3_moe_mixed", "qwen3_moe_sharded", "qwen3_moe_f32", "mixtral",
                           "mixtral_f16_window", "olmoe", "qwen2_moe", "llama3", "qwen3", "gpt_oss", "gpt_oss_mxfp4"}) {
    check_case(name, load_model_config(case_model(name)));
  }
}

TEST_CASE("adapters of the real model's shapes give the deltas of their files") {
  ModelConfig model = tiny_dense();
  model.hidden_size = 576;
  model.num_layers = 1;  // the other layers' tensors are left out by a lenient load
  model.num_heads = 9;
  model.num_kv_heads = 3;
  model.head_dim = 64;
  model.intermediate_size = 1536;
  model.layer_is_moe = {0};
  AdapterLoadOptions lenient;
  lenient.lenient = true;
  const std::string dir = std::string(MOELORA_SOURCE_DIR) + "/tests/data/cases/smollm2/adapters/all_rslora";
  const auto image = load_adapter_dir(dir, model, lenient);
  CHECK(image->num_tensors == 14);
  CHECK(image->num_tensors_unmatched == 420 - 14);
  Expected expected = expect_adapter(dir, model);
  std::erase_if(expected.dense, [](const auto& item) { return item.first.first != 0; });
  check_image(*image, model, expected);
}

}  // namespace moelora::test
