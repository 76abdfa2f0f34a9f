// SPDX-License-Identifier: Apache-2.0
// config.json of every reference case in the newer and the older spelling, the layer rules of each family, and each
// refusal with the key at fault.
#include "runtime/model/config.h"

#include <random>

#include "kernels/base/error.h"
#include "runtime/io/json.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/model_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

const std::vector<std::string> kCases = {"qwen3_moe",     "qwen3_moe_mixed", "qwen3_moe_sharded",
                                         "qwen3_moe_f32", "mixtral",         "mixtral_f16_window",
                                         "olmoe",         "qwen2_moe",       "llama3",
                                         "qwen3",         "gpt_oss",         "gpt_oss_mxfp4"};

Json case_config(const std::string& name) {
  return read_json(case_model(name) + "/config.json");
}

ModelConfig parse(const Json& config, const std::string& generation = "") {
  return parse_model_config(config.dump(), generation, "dir/config.json");
}

// A reference config with some keys replaced; null removes a key.
ModelConfig parse_with(const std::string& name, const std::string& changes) {
  Json config = case_config(name);
  const Json patch = parse_json(changes, "patch");
  for (const auto& item : patch.items()) {
    if (item.value().is_null()) {
      config.erase(item.key());
    } else {
      config[item.key()] = item.value();
    }
  }
  return parse(config);
}

// The same config as transformers before v5 wrote it.
Json older_spelling(Json config) {
  config["torch_dtype"] = config["dtype"];
  config.erase("dtype");
  Json rope = config["rope_parameters"];
  config.erase("rope_parameters");
  config["rope_theta"] = rope["rope_theta"];
  rope.erase("rope_theta");
  if (rope["rope_type"] == "default") {
    config["rope_scaling"] = nullptr;
  } else {
    rope["type"] = rope["rope_type"];
    rope.erase("rope_type");
    config["rope_scaling"] = rope;
  }
  if (config["model_type"] == "qwen3_moe") {
    config["num_experts"] = config["num_local_experts"];
    config.erase("num_local_experts");
  }
  return config;
}

}  // namespace

TEST_CASE("config: numbers of the reference cases") {
  const ModelConfig moe = load_model_config(case_model("qwen3_moe"));
  CHECK(moe.architecture == "Qwen3MoeForCausalLM");
  CHECK(moe.family == Family::kQwen3Moe);
  CHECK(moe.dtype == Dtype::kBf16);
  CHECK(moe.hidden_size == 64);
  CHECK(moe.num_layers == 2);
  CHECK(moe.num_heads == 4);
  CHECK(moe.num_kv_heads == 2);
  CHECK(moe.head_dim == 16);
  CHECK(moe.vocab_size == 320);
  CHECK(moe.num_experts == 8);
  CHECK(moe.top_k == 2);
  CHECK(moe.moe_intermediate_size == 48);
  CHECK(moe.norm_topk_prob);
  CHECK(moe.rms_norm_eps == 1e-6f);
  CHECK(moe.max_position == 512);
  CHECK(moe.qk_norm == QkNorm::kPerHead);
  CHECK(moe.rope_theta == 1e6);
  CHECK(moe.layer_is_moe == std::vector<uint8_t>{1, 1});
  CHECK(moe.bos_token_id == 1);
  CHECK(moe.eos_token_ids == std::vector<int32_t>{2});
  CHECK_FALSE(moe.tie_embeddings);

  const ModelConfig mixed = load_model_config(case_model("qwen3_moe_mixed"));
  CHECK(mixed.layer_is_moe == std::vector<uint8_t>{0, 1, 0});
  CHECK(mixed.intermediate_size == 96);
  CHECK(mixed.tie_embeddings);
  CHECK_FALSE(mixed.norm_topk_prob);

  CHECK(load_model_config(case_model("qwen3_moe_f32")).dtype == Dtype::kF32);
  const ModelConfig window = load_model_config(case_model("mixtral_f16_window"));
  CHECK(window.dtype == Dtype::kF16);
  CHECK(window.layer_window == std::vector<int32_t>{16, 16});
  CHECK(window.moe_intermediate_size == 48);
  CHECK(window.intermediate_size == 0);
  CHECK(window.norm_topk_prob);
  CHECK(load_model_config(case_model("mixtral")).layer_window == std::vector<int32_t>{0, 0});

  const ModelConfig olmoe = load_model_config(case_model("olmoe"));
  CHECK(olmoe.qk_norm == QkNorm::kFull);
  CHECK(olmoe.clip_qkv == 0.0f);
  CHECK_FALSE(olmoe.norm_topk_prob);

  const ModelConfig shared = load_model_config(case_model("qwen2_moe"));
  CHECK(shared.shared_intermediate_size == 96);
  CHECK(shared.qkv_bias);
  CHECK_FALSE(shared.o_bias);
  CHECK(shared.qk_norm == QkNorm::kNone);

  const ModelConfig llama = load_model_config(case_model("llama3"));
  CHECK(llama.num_experts == 0);
  CHECK(llama.intermediate_size == 96);
  CHECK(llama.rope_type == "llama3");
  CHECK_FALSE(llama.qkv_bias);
  CHECK(load_model_config(case_model("qwen3")).tie_embeddings);
}

TEST_CASE("config: the older spelling gives the same numbers") {
  for (const std::string& name : kCases) {
    INFO(name);
    const Json config = case_config(name);
    CHECK(parse(older_spelling(config)) == parse(config));
  }
  // The comparison sees a difference.
  CHECK_FALSE(parse_with("llama3", R"({"rope_parameters": {"rope_theta": 500000.0}})") == parse(case_config("llama3")));
}

TEST_CASE("config: keys that may be absent") {
  CHECK(parse_with("qwen3", R"({"head_dim": null})").head_dim == 16);
  CHECK(parse_with("qwen3", R"({"num_key_value_heads": null})").num_kv_heads == 4);
  CHECK(parse_with("qwen3", R"({"dtype": null})").dtype == Dtype::kBf16);
  CHECK_FALSE(parse_with("qwen3", R"({"tie_word_embeddings": null})").tie_embeddings);
  CHECK(parse_with("mixtral", R"({"rope_parameters": null})").rope_theta == 1e6);
  CHECK(parse_with("llama3", R"({"rope_parameters": null})").rope_theta == 1e4);
  CHECK(parse_with("qwen2_moe", R"({"qkv_bias": null})").qkv_bias);
  CHECK_FALSE(parse_with("qwen2_moe", R"({"qkv_bias": false})").qkv_bias);
  CHECK(parse_with("qwen3", R"({"architectures": null})").architecture == "Qwen3ForCausalLM");
  CHECK(parse_with("qwen3_moe", R"({"intermediate_size": null})").intermediate_size == 0);
  CHECK(parse_with("llama3", R"({"attention_bias": true, "mlp_bias": true})").o_bias);
  CHECK(parse_with("llama3", R"({"mlp_bias": true})").mlp_bias);
  CHECK(parse_with("olmoe", R"({"clip_qkv": 8})").clip_qkv == 8.0f);
  for (const char* key : {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps",
                          "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size"}) {
    CHECK_ERROR(Status::kCorrupt, ({"dir/config.json", key, "missing"}),
                parse_with("qwen3_moe", std::string("{\"") + key + "\": null}"));
  }
  CHECK_ERROR(Status::kCorrupt, ({"num_experts", "num_local_experts", "missing"}),
              parse_with("qwen3_moe", R"({"num_local_experts": null})"));
  CHECK_ERROR(Status::kCorrupt, ({"intermediate_size", "missing"}),
              parse_with("olmoe", R"({"intermediate_size": null})"));
  CHECK_ERROR(Status::kCorrupt, ({"intermediate_size", "missing"}),
              parse_with("qwen3_moe_mixed", R"({"intermediate_size": null})"));
}

TEST_CASE("config: which layers are MoE") {
  const auto layers = [](const std::string& changes) { return parse_with("qwen3_moe_mixed", changes).layer_is_moe; };
  using Flags = std::vector<uint8_t>;
  CHECK(layers(R"({"num_hidden_layers": 6, "decoder_sparse_step": 3})") == Flags{0, 0, 1, 0, 0, 1});
  CHECK(layers(R"({"num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0, 2]})") ==
        Flags{0, 1, 0, 1});
  CHECK(layers(R"({"decoder_sparse_step": null})") == Flags{1, 1, 1});
  const ModelConfig dense = parse_with("qwen3_moe_mixed", R"({"mlp_only_layers": [0, 1, 2]})");
  CHECK(dense.layer_is_moe == Flags{0, 0, 0});
  CHECK(dense.num_experts == 0);
  CHECK(parse_with("qwen3_moe_mixed", R"({"num_local_experts": 0})").layer_is_moe == Flags{0, 0, 0});
  CHECK_ERROR(Status::kCorrupt, ({"decoder_sparse_step"}), layers(R"({"decoder_sparse_step": 0})"));
  CHECK_ERROR(Status::kCorrupt, ({"mlp_only_layers"}), layers(R"({"mlp_only_layers": [0.5]})"));
}

TEST_CASE("config: both names of the number of experts") {
  for (const char* name : {"qwen3_moe", "mixtral", "olmoe", "qwen2_moe"}) {
    INFO(name);
    CHECK(parse_with(name, R"({"num_experts": 8, "num_local_experts": null})").num_experts == 8);
    CHECK(parse_with(name, R"({"num_experts": null, "num_local_experts": 8})").num_experts == 8);
    CHECK(parse_with(name, R"({"num_experts": 8, "num_local_experts": 8})").num_experts == 8);
    CHECK_ERROR(Status::kCorrupt, ({"num_experts is 8", "num_local_experts is 4"}),
                parse_with(name, R"({"num_experts": 8, "num_local_experts": 4})"));
  }
}

TEST_CASE("config: what is not implemented is refused by name") {
  for (const char* architecture :
       {"DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Llama4ForConditionalGeneration", "MistralForCausalLM"}) {
    CHECK_ERROR(Status::kUnsupported,
                ({"dir/config.json", std::string("architecture ") + architecture + " is not supported; supported: ",
                  "Qwen3MoeForCausalLM", "LlamaForCausalLM"}),
                parse_with("qwen3", std::string("{\"architectures\": [\"") + architecture + "\"]}"));
  }
  CHECK_ERROR(Status::kUnsupported, ({"model_type deepseek_v3", "supported: ", "qwen3_moe"}),
              parse_with("qwen3", R"({"architectures": [], "model_type": "deepseek_v3"})"));
  CHECK_ERROR(Status::kCorrupt, ({"architectures", "model_type"}),
              parse_with("qwen3", R"({"architectures": null, "model_type": null})"));
  for (const char* method : {"fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4"}) {
    CHECK_ERROR(
        Status::kUnsupported, ({"quantization_config", method}),
        parse_with("qwen3_moe", std::string(R"({"quantization_config": {"quant_method": ")") + method + "\"}}"));
  }
  CHECK_ERROR(Status::kUnsupported, ({"rope_type", "longrope"}),
              parse_with("qwen3", R"({"rope_parameters": {"rope_type": "longrope", "factor": 2}})"));
  CHECK_ERROR(Status::kUnsupported, ({"use_sliding_window"}), parse_with("qwen3", R"({"use_sliding_window": true})"));
  CHECK_ERROR(Status::kUnsupported, ({"layer_types", "sliding_attention"}),
              parse_with("qwen3", R"({"layer_types": ["full_attention", "sliding_attention"]})"));
  CHECK_ERROR(Status::kUnsupported, ({"hidden_act", "gelu"}), parse_with("llama3", R"({"hidden_act": "gelu"})"));
  CHECK_ERROR(Status::kUnsupported, ({"dtype", "float8_e4m3fn"}),
              parse_with("llama3", R"({"dtype": "float8_e4m3fn"})"));
}

TEST_CASE("config: values that make no sense name their key") {
  const std::vector<std::pair<const char*, const char*>> bad = {{"hidden_size", "0"},
                                                                {"hidden_size", "-64"},
                                                                {"hidden_size", "64.0"},
                                                                {"hidden_size", "\"64\""},
                                                                {"hidden_size", "9223372036854775807"},
                                                                {"hidden_size", "18446744073709551615"},
                                                                {"num_hidden_layers", "0"},
                                                                {"num_hidden_layers", "1000000000"},
                                                                {"num_attention_heads", "0"},
                                                                {"num_attention_heads", "[4]"},
                                                                {"num_key_value_heads", "3"},
                                                                {"num_key_value_heads", "0"},
                                                                {"head_dim", "15"},
                                                                {"head_dim", "0"},
                                                                {"vocab_size", "0"},
                                                                {"moe_intermediate_size", "0"},
                                                                {"num_experts_per_tok", "0"},
                                                                {"num_experts_per_tok", "9"},
                                                                {"num_local_experts", "-1"},
                                                                {"num_local_experts", "100000"},
                                                                {"rms_norm_eps", "0"},
                                                                {"rms_norm_eps", "\"x\""},
                                                                {"max_position_embeddings", "0"},
                                                                {"norm_topk_prob", "1"},
                                                                {"tie_word_embeddings", "\"yes\""},
                                                                {"rope_parameters", "[]"},
                                                                {"mlp_only_layers", "1"},
                                                                {"layer_types", "[]"},
                                                                {"architectures", "[1]"},
                                                                {"architectures", "\"x\""},
                                                                {"bos_token_id", "\"x\""},
                                                                {"eos_token_id", "[1, \"x\"]"},
                                                                {"eos_token_id", "-5"}};
  for (const auto& [key, value] : bad) {
    INFO(key << " = " << value);
    CHECK_ERROR(Status::kCorrupt, ({"dir/config.json", key}),
                parse_with("qwen3_moe", std::string("{\"") + key + "\": " + value + "}"));
  }
  CHECK_ERROR(Status::kCorrupt, ({"clip_qkv"}), parse_with("olmoe", R"({"clip_qkv": -1})"));
  CHECK_ERROR(Status::kCorrupt, ({"sliding_window"}), parse_with("mixtral", R"({"sliding_window": 0})"));
  CHECK_ERROR(Status::kCorrupt, ({"head_dim", "hidden_size 66"}),
              parse_with("qwen3", R"({"head_dim": null, "hidden_size": 66})"));
  CHECK_ERROR(Status::kCorrupt, ({"c.json", "rms_norm_eps", "NaN"}),
              parse_model_config("{\"architectures\": [\"LlamaForCausalLM\"], \"rms_norm_eps\": NaN}", "", "c.json"));
  CHECK_ERROR(Status::kCorrupt, ({"c.json", "object"}), parse_model_config("[]", "", "c.json"));
}

TEST_CASE("config: generation_config.json") {
  const Json base = case_config("qwen3");
  const ModelConfig plain = parse(base);
  CHECK(plain.default_temperature == -1.0f);
  CHECK(plain.default_top_k == -1);
  const ModelConfig full = parse(base, R"({"eos_token_id": [5, 2, 7], "bos_token_id": 9, "do_sample": true,
      "temperature": 0.5, "top_p": 0.75, "top_k": 20, "repetition_penalty": 1.25})");
  CHECK(full.eos_token_ids == std::vector<int32_t>{2, 5, 7});
  CHECK(full.bos_token_id == 1);  // config.json has its own
  CHECK(full.default_temperature == 0.5f);
  CHECK(full.default_top_p == 0.75f);
  CHECK(full.default_top_k == 20);
  CHECK(full.default_repetition_penalty == 1.25f);
  CHECK(parse(base, R"({"do_sample": false, "temperature": 0.5})").default_temperature == 0.0f);
  CHECK_ERROR(Status::kCorrupt, ({"dir/generation_config.json", "temperature"}),
              parse(base, R"({"temperature": -0.5})"));
  CHECK_ERROR(Status::kCorrupt, ({"dir/generation_config.json", "top_p", "NaN"}), parse(base, R"({"top_p": NaN})"));
  CHECK_ERROR(Status::kCorrupt, ({"dir/generation_config.json", "eos_token_id"}),
              parse(base, R"({"eos_token_id": "x"})"));
  CHECK_ERROR(Status::kCorrupt, ({"dir/generation_config.json", "object"}), parse(base, "[]"));
  CHECK_ERROR(Status::kIo, ({"/config.json", "cannot open"}), load_model_config("/nonexistent"));
}

TEST_CASE("config fuzz: damaged files give Error or a usable config") {
  std::mt19937 random(99);
  int refused = 0;
  for (const char* name : {"qwen3_moe_mixed", "llama3", "qwen2_moe", "gpt_oss_mxfp4"}) {
    const std::string good = read_file(case_model(name) + "/config.json");
    for (int round = 0; round < 3000; ++round) {
      std::string text = good;
      for (auto edits = 1 + random() % 3; edits > 0; --edits) {
        const size_t at = random() % text.size();
        switch (random() % 3) {
          case 0:
            text[at] = static_cast<char>(random());
            break;
          case 1:
            text.erase(at, 1 + random() % 8);
            break;
          default:
            text.insert(at, std::to_string(static_cast<int32_t>(random())));
            break;
        }
      }
      try {
        const ModelConfig config = parse_model_config(text, "", "fuzz.json");
        REQUIRE(config.inv_freq.size() * 2 == static_cast<size_t>(config.head_dim));
        REQUIRE(config.layer_is_moe.size() == static_cast<size_t>(config.num_layers));
        REQUIRE(config.layer_window.size() == static_cast<size_t>(config.num_layers));
        REQUIRE(config.num_heads % config.num_kv_heads == 0);
      } catch (const Error& error) {
        REQUIRE(std::string(error.what()).find("fuzz.json") != std::string::npos);
        ++refused;
      }
    }
  }
  CHECK(refused > 3000);
}
