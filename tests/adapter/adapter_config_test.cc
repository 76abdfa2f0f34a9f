// SPDX-License-Identifier: Apache-2.0
// adapter_config.json: scales and patterns against values worked out by hand, and keys that are refused or ignored.
#include "runtime/adapter/adapter_config.h"

#include "tests/adapter/adapter_files.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"

namespace moelora::test {
namespace {

AdapterConfig parse(const Json& config) {
  return parse_adapter_config(config.dump(), "adapter_config.json");
}

bool near(float value, double expected) {
  return std::fabs(static_cast<double>(value) - expected) <= 1e-6 * std::fabs(expected);
}

int32_t rank_of(const AdapterConfig& config, const std::string& path) {
  return module_scale(config, {path}).rank;
}
float scale_of(const AdapterConfig& config, const std::string& path) {
  return module_scale(config, {path}).scale;
}

}  // namespace

TEST_CASE("scale is alpha over r, or over its root with rsLoRA") {
  Json json = lora_config(16, 16);
  CHECK(near(scale_of(parse(json), "model.layers.0.self_attn.q_proj"), 1.0));
  json["use_rslora"] = true;
  CHECK(near(scale_of(parse(json), "model.layers.0.self_attn.q_proj"), 4.0));
  json["use_rslora"] = nullptr;
  json["lora_alpha"] = 24.5;
  CHECK(near(scale_of(parse(json), "x"), 24.5 / 16.0));
}

TEST_CASE("rank_pattern and alpha_pattern are looked up independently, in file order, at segment borders") {
  Json json = lora_config(8, 16);
  json["alpha_pattern"]["q_proj"] = 4;
  CHECK(near(scale_of(parse(json), "model.layers.0.self_attn.q_proj"), 0.5));
  CHECK(rank_of(parse(json), "model.layers.0.self_attn.q_proj") == 8);
  CHECK(near(scale_of(parse(json), "model.layers.0.self_attn.xq_proj"), 2.0));
  CHECK(near(scale_of(parse(json), "q_proj"), 0.5));

  json = lora_config(8, 16);
  json["rank_pattern"]["layers.1.mlp.gate_proj"] = 2;
  CHECK(rank_of(parse(json), "model.layers.1.mlp.gate_proj") == 2);
  CHECK(rank_of(parse(json), "model.layers.11.mlp.gate_proj") == 8);
  CHECK(rank_of(parse(json), "model.layers.1.mlp.gate_proj.x") == 8);
  CHECK(near(scale_of(parse(json), "model.layers.1.mlp.gate_proj"), 8.0));

  json = lora_config(8, 16);
  json["rank_pattern"]["model.layers.1.*down_proj"] = 4;
  CHECK(rank_of(parse(json), "model.layers.1.mlp.down_proj") == 4);
  CHECK(rank_of(parse(json), "model.layers.17.mlp.down_proj") == 4);
  CHECK(rank_of(parse(json), "model.layers.2.mlp.down_proj") == 8);

  json = lora_config(8, 16);
  json["rank_pattern"]["z_first|q_proj"] = 3;
  json["rank_pattern"]["q_proj"] = 5;
  CHECK(rank_of(parse(json), "a.q_proj") == 3);  // the first in file order, which is not the alphabet's
  json["rank_pattern"] = Json::object();
  json["rank_pattern"]["^model.layers.0.self_attn.q_proj"] = 6;
  CHECK(rank_of(parse(json), "model.layers.0.self_attn.q_proj") == 6);
  json["rank_pattern"] = nullptr;
  json["alpha_pattern"] = nullptr;
  CHECK(rank_of(parse(json), "a.q_proj") == 8);
}

TEST_CASE("every spelling of a path can match a pattern") {
  Json json = lora_config(8, 16);
  json["rank_pattern"]["mlp.experts.0.w1"] = 2;
  const AdapterConfig config = parse(json);
  CHECK(
      module_scale(config, {"model.layers.0.block_sparse_moe.experts.0.w1", "model.layers.0.mlp.experts.0.w1"}).rank ==
      2);
  CHECK(module_scale(config, {"model.layers.0.block_sparse_moe.experts.0.w1"}).rank == 8);
}

TEST_CASE("an expression that is wrong or explodes is refused by name") {
  Json json = lora_config();
  json["rank_pattern"]["q_(proj"] = 2;
  CHECK_ERROR(Status::kCorrupt, ({"adapter_config.json", "rank_pattern", "q_(proj"}), parse(json));
  json = lora_config();
  json["alpha_pattern"]["(a+)+[bc]"] = 2;
  const AdapterConfig config = parse(json);
  CHECK_ERROR(Status::kUnsupported, ({"alpha_pattern", "(a+)+[bc]"}), module_scale(config, {std::string(60, 'a')}));
}

TEST_CASE("ranks and alphas out of range are refused") {
  for (const auto& value : {Json(0), Json(-4), Json(int64_t{1} << 40)}) {
    Json json = lora_config();
    json["r"] = value;
    CHECK_ERROR(Status::kAdapterMismatch, ({"adapter_config.json", "r = "}), parse(json));
    json = lora_config();
    json["rank_pattern"]["q_proj"] = value;
    CHECK_ERROR(Status::kAdapterMismatch, ({"rank_pattern", "q_proj"}), parse(json));
  }
  Json json = lora_config();
  json.erase("r");
  CHECK_ERROR(Status::kCorrupt, ({"'r'"}), parse(json));
  json = lora_config();
  json["r"] = "8";
  CHECK_ERROR(Status::kCorrupt, ({"r"}), parse(json));
  json = lora_config();
  json.erase("lora_alpha");
  CHECK_ERROR(Status::kCorrupt, ({"lora_alpha"}), parse(json));
  for (const char* alpha : {"NaN", "Infinity", "-Infinity", "1e999"}) {
    const std::string text = std::string("{\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": ") + alpha + "}";
    CHECK_ERROR(Status::kCorrupt, ({"adapter_config.json", "lora_alpha"}),
                parse_adapter_config(text, "adapter_config.json"));
  }
  json = lora_config();
  json["lora_alpha"] = 1e300;
  CHECK_ERROR(Status::kAdapterMismatch, ({"lora_alpha"}), parse(json));
}

TEST_CASE("kinds that change the maths are refused by key and value") {
  const auto refused = [](const char* key, const Json& value, const std::string& part) {
    Json json = lora_config();
    json[key] = value;
    INFO(key);
    CHECK_ERROR(Status::kUnsupported, ({"adapter_config.json", key, part}), parse(json));
  };
  refused("peft_type", "IA3", "IA3");
  refused("peft_type", "PREFIX_TUNING", "PREFIX_TUNING");
  refused("use_dora", true, "true");
  refused("init_lora_weights", "pissa", "residual base");
  refused("init_lora_weights", "pissa_niter_16", "path_initial_model_for_weight_conversion");
  refused("init_lora_weights", "olora", "residual base");
  refused("init_lora_weights", "corda", "residual base");
  refused("init_lora_weights", "lora_ga", "residual base");
  refused("init_lora_weights", "loftq", "residual base");
  refused("init_lora_weights", "something_new", "something_new");
  refused("alora_invocation_tokens", {1, 2}, "[1,2]");
  refused("use_bdlora", {{"nblocks", 2}}, "nblocks");
  refused("use_qalora", true, "QA-LoRA");
  refused("layer_replication", {{0, 2}, {1, 3}}, "[0,2]");
  refused("arrow_config", {{"top_k", 2}}, "top_k");
  refused("kasa_config", {{"beta", 1}}, "beta");
  refused("monteclora_config", {{"n", 1}}, "MonteCLoRA");
  refused("megatron_config", {{"x", 1}}, "Megatron");
  refused("trainable_token_indices", {3, 1}, "[3,1]");
  refused("lora_B_layout", "expert_major", "grouped_by_expert");
  refused("use_newlora", true, "unknown key");
  refused("newlora_config", {{"x", 1}}, "unknown key");
}

TEST_CASE("bookkeeping is ignored and unknown plain keys are warned about") {
  Json json = lora_config();
  for (const char* key : {"revision", "megatron_core", "layers_pattern", "exclude_modules", "layers_to_transform",
                          "alora_invocation_tokens", "use_bdlora", "layer_replication", "trainable_token_indices"}) {
    json[key] = nullptr;
  }
  json["loftq_config"] = {{"loftq_bits", 4}};
  json["eva_config"] = {{"rho", 2}};
  json["init_lora_weights"] = "gaussian";
  json["use_dora"] = false;
  json["peft_type"] = "lora";
  json["velora_config"] = {{"n", 1}};
  json["newlora_config"] = nullptr;
  json["use_newlora"] = false;
  const AdapterConfig config = parse(json);
  REQUIRE(config.warnings.size() == 2);
  CHECK(config.warnings[0].find("newlora_config") != std::string::npos);
  CHECK(config.warnings[1].find("use_newlora") != std::string::npos);

  json = lora_config();
  json["some_note"] = "text";
  json["task_type"] = "SEQ_CLS";
  json["fan_in_fan_out"] = true;
  const std::vector<std::string> warnings = parse(json).warnings;
  REQUIRE(warnings.size() == 3);
  CHECK(warnings[0].find("some_note") != std::string::npos);
  CHECK(warnings[1].find("fan_in_fan_out") != std::string::npos);
  CHECK(warnings[2].find("SEQ_CLS") != std::string::npos);
}

TEST_CASE("peft_type may be missing only where r is there") {
  Json json = lora_config();
  json.erase("peft_type");
  CHECK(parse(json).rank == 3);
  json.erase("r");
  CHECK_ERROR(Status::kCorrupt, ({"peft_type"}), parse(json));
  CHECK_ERROR(Status::kCorrupt, ({"adapter_config.json"}), parse_adapter_config("[1]", "adapter_config.json"));
  CHECK_ERROR(Status::kCorrupt, ({"adapter_config.json"}), parse_adapter_config("{\"r\": 8", "adapter_config.json"));
  CHECK_ERROR(Status::kCorrupt, ({"adapter_config.json"}),
              parse_adapter_config("{\"r\": 8, \"x\": \"\xff\"}", "adapter_config.json"));
}

TEST_CASE("types of lists and objects are checked") {
  for (const char* key : {"rank_pattern", "alpha_pattern", "target_parameters", "modules_to_save"}) {
    Json json = lora_config();
    json[key] = 3;
    CHECK_ERROR(Status::kCorrupt, ({key}), parse(json));
  }
  Json json = lora_config();
  json["target_modules"] = {"q_proj", 7};
  CHECK_ERROR(Status::kCorrupt, ({"target_modules"}), parse(json));
  json["target_modules"] = "all-linear";
  CHECK(parse(json).target_modules.empty());
}

}  // namespace moelora::test
