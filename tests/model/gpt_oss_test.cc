// SPDX-License-Identifier: Apache-2.0
// gpt-oss: config.json as published, both stored forms of the experts against the files' bytes read by definition, and
// each refusal.
#include "kernels/base/error.h"
#include "tests/model/gpt_oss_files.h"
#include "tests/model/weight_views.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"

using namespace moelora;
using namespace moelora::test;

namespace {

// config.json of openai/gpt-oss-20b, in the spelling of its release.
const char* const kPublished = R"({"architectures": ["GptOssForCausalLM"], "attention_bias": true,
  "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
  "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
  "num_hidden_layers": 4, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
  "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn",
  "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
  "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
  "rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
  "swiglu_limit": 7.0, "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088})";

// The published config with some keys replaced; null removes a key.
ModelConfig parse_with(const std::string& changes, const std::string& generation = "") {
  Json config = parse_json(kPublished, "published");
  const Json patch = parse_json(changes, "patch");
  for (const auto& item : patch.items()) {
    if (item.value() == "remove") {
      config.erase(item.key());
    } else {
      config[item.key()] = item.value();
    }
  }
  return parse_model_config(config.dump(), generation, "dir/config.json");
}

double at(const ExpertWeights& weights, int32_t e, int64_t n, int64_t k) {
  const int64_t row = n * weights.row_step;
  if (weights.format == ExpertFormat::kRows) {
    return static_cast<double>(
        load_element(weights.data[e], weights.dtype, static_cast<size_t>(row * weights.cols + k)));
  }
  const auto byte = static_cast<const uint8_t*>(weights.data[e])[(row * weights.cols + k) / 2];
  const uint8_t scale = weights.scales[e][row * weights.cols / 32 + k / 32];
  return e2m1_number(k % 2 == 0 ? byte & 15 : byte >> 4) * std::exp2(scale - 127);
}

std::unique_ptr<Weights> load_tensors(const RawTensors& tensors, int64_t width, bool mxfp4 = true) {
  const TempDir dir;
  write_file(dir.file("config.json"), gpt_oss_config(width, mxfp4));
  write_tensors(dir, tensors);
  return load(dir.path());
}

std::unique_ptr<Weights> load_edited(const std::function<void(RawTensors&)>& change, bool mxfp4 = true) {
  RawTensors tensors = read_tensors(case_model("gpt_oss_mxfp4"));
  change(tensors);
  return load_tensors(tensors, 96, mxfp4);
}

const std::string kGateUp = experts_path(1) + "gate_up_proj";
const std::string kDown = experts_path(1) + "down_proj";

}  // namespace

TEST_CASE("gpt-oss config: the published file") {
  const ModelConfig config = parse_with("{}", R"({"eos_token_id": [200002, 199999, 200012], "bos_token_id": 199998})");
  CHECK(config.family == Family::kGptOss);
  CHECK(config.dtype == Dtype::kBf16);
  CHECK(config.mxfp4_experts);
  CHECK(config.num_experts == 32);
  CHECK(config.top_k == 4);
  CHECK(config.norm_topk_prob);
  CHECK(config.moe_intermediate_size == 2880);
  CHECK(config.intermediate_size == 0);
  CHECK(config.swiglu_limit == 7.0f);
  CHECK(config.head_dim == 64);
  CHECK(config.qkv_bias);
  CHECK(config.o_bias);
  CHECK(config.qk_norm == QkNorm::kNone);
  CHECK(config.layer_window == std::vector<int32_t>{128, 0, 128, 0});
  CHECK(config.layer_is_moe == std::vector<uint8_t>{1, 1, 1, 1});
  CHECK(config.eos_token_ids == std::vector<int32_t>{200002, 199999, 200012});
  CHECK(config.bos_token_id == 199998);
  CHECK(config.rope_scale == 1.3465735902799727f);
  const std::vector<std::pair<size_t, double>> frequencies = {{0, 1.0},
                                                              {1, 0.6890443058881632},
                                                              {8, 0.050813274815461475},
                                                              {10, 0.01933500112654036},
                                                              {13, 0.0038603593171920685},
                                                              {17, 1.293187012450632e-4},
                                                              {18, 3.8308812373753384e-5},
                                                              {31, 3.0235114281192144e-7}};
  for (const auto& [i, value] : frequencies) {
    CHECK(std::abs(static_cast<double>(config.inv_freq[i]) - value) <= 1e-7 * value);
  }
}

TEST_CASE("gpt-oss config: keys that may be absent, and spellings") {
  CHECK(parse_with(R"({"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]})")
            .layer_window == std::vector<int32_t>{0, 0, 128, 0});
  CHECK(parse_with(R"({"sliding_window": "remove"})").layer_window[0] == 128);
  CHECK(parse_with(R"({"sliding_window": 64})").layer_window[2] == 64);
  CHECK(parse_with(R"({"experts_per_token": "remove"})").top_k == 4);
  CHECK(parse_with(R"({"num_experts_per_tok": "remove"})").top_k == 4);
  CHECK(parse_with(R"({"swiglu_limit": "remove"})").swiglu_limit == 7.0f);
  CHECK(parse_with(R"({"swiglu_limit": 5.5})").swiglu_limit == 5.5f);
  CHECK(parse_with(R"({"attention_bias": "remove"})").o_bias);
  CHECK_FALSE(parse_with(R"({"attention_bias": false})").qkv_bias);
  CHECK(parse_with(R"({"rope_theta": "remove"})").rope_theta == 150000.0);
  CHECK_FALSE(parse_with(R"({"quantization_config": "remove"})").mxfp4_experts);
  const std::string rope = R"({"rope_theta": 150000.0, "rope_type": "yarn", "factor": 32.0, "truncate": false,
      "original_max_position_embeddings": 4096})";
  const ModelConfig nested = parse_with(R"({"rope_scaling": "remove", "rope_theta": "remove", "rope_parameters":
      {"full_attention": )" + rope + R"(, "sliding_attention": )" +
                                        rope + "}}");
  CHECK(nested.inv_freq == parse_with("{}").inv_freq);
}

TEST_CASE("gpt-oss config: refusals") {
  for (const char* method : {"bitsandbytes", "fp8", "gptq"}) {
    CHECK_ERROR(Status::kUnsupported, ({"dir/config.json", "quantization_config", method}),
                parse_with(std::string(R"({"quantization_config": {"quant_method": ")") + method + "\"}}"));
  }
  CHECK_ERROR(Status::kUnsupported, ({"compression_config", "mxfp4"}),
              parse_with(R"({"compression_config": {"quant_method": "mxfp4"}})"));
  CHECK_ERROR(Status::kUnsupported, ({"layer_types", "chunked_attention", "sliding_attention, full_attention"}),
              parse_with(R"({"layer_types": ["full_attention", "chunked_attention", "full_attention",
                             "full_attention"]})"));
  CHECK_ERROR(Status::kCorrupt, ({"layer_types", "4"}), parse_with(R"({"layer_types": ["full_attention"]})"));
  CHECK_ERROR(Status::kUnsupported, ({"sliding_window"}), parse_with(R"({"sliding_window": null})"));
  CHECK_ERROR(Status::kCorrupt, ({"sliding_window"}), parse_with(R"({"sliding_window": 0})"));
  CHECK_ERROR(Status::kCorrupt, ({"experts_per_token is 2", "num_experts_per_tok is 4"}),
              parse_with(R"({"experts_per_token": 2})"));
  CHECK_ERROR(Status::kCorrupt, ({"num_experts_per_tok"}),
              parse_with(R"({"experts_per_token": "remove", "num_experts_per_tok": "remove"})"));
  CHECK_ERROR(Status::kCorrupt, ({"swiglu_limit"}), parse_with(R"({"swiglu_limit": 0})"));
  CHECK_ERROR(Status::kUnsupported, ({"mxfp4", "2881", "32"}), parse_with(R"({"hidden_size": 2881})"));
  CHECK_ERROR(Status::kUnsupported, ({"mxfp4", "1000", "32"}), parse_with(R"({"intermediate_size": 1000})"));
  CHECK(parse_with(R"({"intermediate_size": 1000, "quantization_config": "remove"})").moe_intermediate_size == 1000);
  const std::string yarn = R"("rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096)";
  CHECK_ERROR(Status::kUnsupported, ({"rope_parameters", "differ by layer type"}),
              parse_with(R"({"rope_scaling": "remove", "rope_parameters": {"full_attention": {)" + yarn +
                         R"(}, "sliding_attention": {"rope_type": "default"}}})"));
}

TEST_CASE("gpt-oss weights: MXFP4 is read where it lies in the file") {
  const ModelConfig config = load_model_config(case_model("gpt_oss_mxfp4"));
  const auto weights = load(case_model("gpt_oss_mxfp4"));
  const RawTensors tensors = read_tensors(case_model("gpt_oss_mxfp4"));
  REQUIRE(weights->areas().size() == 1);  // the mapped file, and no memory of ours
  const Weights::Area file = weights->areas()[0];
  for (int layer = 0; layer < 2; ++layer) {
    const LayerWeights& l = weights->layers[static_cast<size_t>(layer)];
    const std::string path = experts_path(layer);
    for (const ExpertWeights* e : {&l.expert_gate, &l.expert_up, &l.expert_down}) {
      CHECK(e->format == ExpertFormat::kMxfp4Rows);
      for (int32_t i = 0; i < 8; ++i) {
        for (const void* data : {e->data[i], static_cast<const void*>(e->scales[i])}) {
          CHECK(static_cast<const std::byte*>(data) >= file.data);
          CHECK(static_cast<const std::byte*>(data) < file.data + file.bytes);
        }
      }
    }
    CHECK(l.expert_gate.row_step == 2);
    CHECK(l.expert_down.row_step == 1);
    CHECK((l.expert_gate.rows == 96 && l.expert_gate.cols == 64));
    CHECK((l.expert_down.rows == 64 && l.expert_down.cols == 96));
    const auto bias = [&](const std::string& name, int64_t index) {
      return load_element(tensors.at(path + name).bytes.data(), Dtype::kBf16, static_cast<size_t>(index));
    };
    for (int32_t e = 0; e < 8; ++e) {
      for (int64_t n = 0; n < 96; ++n) {
        for (int64_t k = 0; k < 64; ++k) {
          REQUIRE(at(l.expert_gate, e, n, k) == mxfp4_number(tensors, path + "gate_up_proj", e, 2 * n, k));
          REQUIRE(at(l.expert_up, e, n, k) == mxfp4_number(tensors, path + "gate_up_proj", e, 2 * n + 1, k));
          REQUIRE(at(l.expert_down, e, k, n) == mxfp4_number(tensors, path + "down_proj", e, k, n));
        }
        CHECK(l.expert_gate.bias[e * 96 + n] == bias("gate_up_proj_bias", e * 192 + 2 * n));
        CHECK(l.expert_up.bias[e * 96 + n] == bias("gate_up_proj_bias", e * 192 + 2 * n + 1));
      }
      CHECK(l.expert_down.bias[e * 64 + 5] == bias("down_proj_bias", e * 64 + 5));
    }
    const Raw& sinks = tensors.at("model.layers." + std::to_string(layer) + ".self_attn.sinks");
    for (size_t h = 0; h < 4; ++h) {
      CHECK(l.sinks[h] == load_element(sinks.bytes.data(), Dtype::kBf16, h));
    }
    CHECK(l.router_bias.cols == 8);
    CHECK(l.o_bias.cols == 64);
  }
  CHECK(weight_bytes_of_config(config) == weights->bytes());
}

TEST_CASE("gpt-oss weights: bf16 re-uploads are transposed, and equal the MXFP4 that they were made from") {
  for (const int64_t width : {96, 32, 64}) {  // all sizes differ; 2I = H; I = H
    const RawTensors packed = draw_gpt_oss(width, 3);
    const auto one = load_tensors(packed, width);
    for (const char* dtype : {"BF16", "F32"}) {
      INFO("I = " << width << " " << dtype);
      RawTensors plain = packed;
      unpack_layer(plain, 0, dtype);
      unpack_layer(plain, 1, dtype);
      const auto two = load_tensors(plain, width, false);
      const LayerWeights& a = one->layers[1];
      const LayerWeights& b = two->layers[1];
      CHECK(b.expert_up.format == ExpertFormat::kRows);
      for (int32_t e = 0; e < 8; ++e) {
        for (int64_t n = 0; n < width; ++n) {
          for (int64_t k = 0; k < 64; ++k) {
            REQUIRE(at(a.expert_gate, e, n, k) == at(b.expert_gate, e, n, k));
            REQUIRE(at(a.expert_up, e, n, k) == at(b.expert_up, e, n, k));
            REQUIRE(at(a.expert_down, e, k, n) == at(b.expert_down, e, k, n));
          }
        }
      }
      CHECK(a.gate_bias_values == b.gate_bias_values);
      CHECK(a.down_bias_values == b.down_bias_values);
      CHECK(two->areas().size() == 5);  // the file and two parameters of two layers
    }
    RawTensors mixed = packed;
    unpack_layer(mixed, 0);  // one layer in either form
    const auto both = load_tensors(mixed, width);
    CHECK(both->layers[0].expert_gate.format == ExpertFormat::kRows);
    CHECK(both->layers[1].expert_gate.format == ExpertFormat::kMxfp4Rows);
  }
  // Sizes that no tile divides, straight from a file.
  const auto golden = load(case_model("gpt_oss"));
  const RawTensors tensors = read_tensors(case_model("gpt_oss"));
  const Raw& gate_up = tensors.at(experts_path(2) + "gate_up_proj");
  for (int64_t n = 0; n < 48; ++n) {
    for (int64_t k = 0; k < 64; ++k) {
      const auto index = static_cast<size_t>((7 * 64 + k) * 96 + 2 * n + 1);
      REQUIRE(at(golden->layers[2].expert_up, 7, n, k) ==
              static_cast<double>(load_element(gate_up.bytes.data(), Dtype::kBf16, index)));
    }
  }
  CHECK(golden->bytes() == weight_bytes_of_config(load_model_config(case_model("gpt_oss"))));
}

TEST_CASE("gpt-oss weights: F8_E8M0 scales are the same bits; a scale of 255 is refused") {
  const auto plain = load(case_model("gpt_oss_mxfp4"));
  const auto typed = load_edited([](RawTensors& t) { t[kGateUp + "_scales"].dtype = "F8_E8M0"; });
  CHECK(at(plain->layers[1].expert_up, 7, 95, 63) == at(typed->layers[1].expert_up, 7, 95, 63));
  for (const std::string& name : {kGateUp + "_scales", kDown + "_scales"}) {
    CHECK_ERROR(Status::kCorrupt, ({name, "255", "NaN"}),
                load_edited([&](RawTensors& t) { t[name].bytes.back() = static_cast<char>(255); }));
  }
}

TEST_CASE("gpt-oss weights: a layer with both forms, or half of one, is refused by name") {
  const RawTensors packed = read_tensors(case_model("gpt_oss_mxfp4"));
  RawTensors plain = packed;
  unpack_layer(plain, 1);
  for (const std::string& one : {kGateUp, kDown}) {
    for (const std::string& other : {kGateUp + "_blocks", kDown + "_blocks", kDown + "_scales"}) {
      INFO(one << " " << other);
      CHECK_ERROR(Status::kCorrupt, ({"'" + one + "'", "'" + other + "'", "one of them must go"}),
                  load_edited([&](RawTensors& t) {
                    for (const std::string& name : {kGateUp, kDown}) {
                      t.erase(name + "_blocks");
                      t.erase(name + "_scales");
                    }
                    t[one] = plain.at(one);
                    t[other] = packed.at(other);
                  }));
    }
  }
  for (const std::string& name :
       {kGateUp + "_blocks", kGateUp + "_scales", kDown + "_blocks", kDown + "_scales", kDown + "_bias",
        std::string("model.layers.1.self_attn.sinks"), std::string("model.layers.1.mlp.router.bias")}) {
    CHECK_ERROR(Status::kCorrupt, ({"1 tensor is missing", name}), load_edited([&](RawTensors& t) { t.erase(name); }));
  }
  const auto without = [](RawTensors& t) {
    for (const std::string& name : {kGateUp, kDown}) {
      t.erase(name + "_blocks");
      t.erase(name + "_scales");
    }
  };
  CHECK_ERROR(Status::kCorrupt, ({"missing", kGateUp + "_blocks"}), load_edited(without));
  CHECK_ERROR(Status::kCorrupt, ({"2 tensors are missing: " + kGateUp + ", " + kDown}), load_edited(without, false));
}

TEST_CASE("gpt-oss weights: shapes, dtypes and other re-packings are refused by name") {
  CHECK_ERROR(Status::kCorrupt, ({kGateUp + "_blocks", "[8, 2, 192, 16]", "[8, 192, 2, 16]"}),
              load_edited([](RawTensors& t) { t[kGateUp + "_blocks"].shape = {8, 2, 192, 16}; }));
  CHECK_ERROR(Status::kCorrupt, ({kDown + "_bias", "[64, 8]"}),
              load_edited([](RawTensors& t) { t[kDown + "_bias"].shape = {64, 8}; }));
  CHECK_ERROR(Status::kUnsupported, ({kGateUp + "_blocks", "I8", "U8"}),
              load_edited([](RawTensors& t) { t[kGateUp + "_blocks"].dtype = "I8"; }));
  CHECK_ERROR(Status::kUnsupported, ({kDown + "_scales", "F8_E4M3", "U8, F8_E8M0"}),
              load_edited([](RawTensors& t) { t[kDown + "_scales"].dtype = "F8_E4M3"; }));
  // [out, in] in place of [in, out]: sizes tell where they can.
  RawTensors plain = draw_gpt_oss(96, 4);
  unpack_layer(plain, 0);
  unpack_layer(plain, 1);
  plain[kDown].shape = {8, 64, 96};
  CHECK_ERROR(Status::kCorrupt, ({kDown, "[8, 64, 96]", "[8, 96, 64]"}), load_tensors(plain, 96, false));
  CHECK_ERROR(Status::kUnsupported, ({experts_path(0) + "gate_up_projs.0.weight", "bitsandbytes"}),
              load_edited([](RawTensors& t) {
                t[experts_path(0) + "gate_up_projs.0.weight"] = {"U8", {4}, "abcd"};
                t.erase(experts_path(0) + "gate_up_proj_blocks");
              }));
  const Raw raw{"U8", {4}, "abcd"};
  CHECK_ERROR(Status::kUnsupported, ({"block.0.mlp.mlp1_weight.blocks", "original layout", "Hugging Face layout"}),
              load_edited([&](RawTensors& t) { t["block.0.mlp.mlp1_weight.blocks"] = raw; }));
  CHECK_ERROR(Status::kUnsupported, ({"model.layers.0.self_attn.q_proj.weight_blocks", "not part of this model"}),
              load_edited([&](RawTensors& t) { t["model.layers.0.self_attn.q_proj.weight_blocks"] = raw; }));
}

TEST_CASE("gpt-oss weights: bytes of a decode step count MXFP4 as it is stored") {
  const ModelConfig config = load_model_config(case_model("gpt_oss_mxfp4"));
  const auto weights = load(case_model("gpt_oss_mxfp4"));
  // bf16 but for experts and what is fp32 in memory: sinks 4, biases of experts.
  const double attention = 2 * (64 + 2 * 64 * 64 + 2 * 32 * 64 + 64 + 32 + 32 + 64) + 4 * 4;
  const double layer = attention + 2 * (64 + 8 * 64 + 8);
  const double expert = 3 * 96 * 64 * (0.5 + 1.0 / 32) + 4 * (96 + 96 + 64);
  const double head = 2 * (320 * 64 + 64);
  CHECK(weight_bytes_of_step(config, *weights, 2.0) == 2 * (layer + 2 * expert) + head);
}

TEST_CASE("gpt-oss weights: random ones have the form that config.json names") {
  const ModelConfig config = load_model_config(case_model("gpt_oss_mxfp4"));
  const auto weights = Weights::random(config, 7);
  CHECK(weights->bytes() == weight_bytes_of_config(config));
  REQUIRE(weights->areas().size() == 1);
  CHECK(weights->areas()[0].bytes >= weights->bytes());
  const auto again = Weights::random(config, 7);
  const auto other = Weights::random(config, 8);
  const auto stored = load(case_model("gpt_oss_mxfp4"));
  for (size_t i = 0; i < views(*stored).size(); ++i) {
    CHECK((views(*stored)[i]->rows == views(*weights)[i]->rows && views(*stored)[i]->cols == views(*weights)[i]->cols));
  }
  int different = 0;
  for (size_t layer = 0; layer < 2; ++layer) {
    const LayerWeights& l = weights->layers[layer];
    for (const auto& [mine, same, changed] :
         {std::tuple(&l.expert_gate, &again->layers[layer].expert_gate, &other->layers[layer].expert_gate),
          std::tuple(&l.expert_up, &again->layers[layer].expert_up, &other->layers[layer].expert_up),
          std::tuple(&l.expert_down, &again->layers[layer].expert_down, &other->layers[layer].expert_down)}) {
      CHECK(mine->format == ExpertFormat::kMxfp4Rows);
      double square = 0.0;
      for (int32_t n = 0; n < mine->rows; ++n) {
        for (int32_t k = 0; k < mine->cols; ++k) {
          const double value = at(*mine, 3, n, k);
          square += value * value;
          REQUIRE(value == at(*same, 3, n, k));
          different += value != at(*changed, 3, n, k);
        }
      }
      // 1 / sqrt(K) or somewhat more: scales are powers of two. Down is 2^7 below that, see kRandomDownShift.
      const double shift = mine == &l.expert_down ? 128.0 : 1.0;
      const double spread = shift * std::sqrt(square / (mine->rows * mine->cols) * mine->cols);
      CHECK((spread > 1.0 && spread < 2.5));
    }
    CHECK(l.sinks != nullptr);
    CHECK(std::abs(l.expert_up.bias[5]) < 0.003f);
  }
  CHECK(different > 10000);
  const ModelConfig plain = load_model_config(case_model("gpt_oss"));
  const auto rows = Weights::random(plain, 7);
  CHECK(rows->layers[0].expert_gate.format == ExpertFormat::kRows);
  CHECK(rows->bytes() == weight_bytes_of_config(plain));
  CHECK(rows->layers[2].expert_down.bias != nullptr);
}
