// SPDX-License-Identifier: Apache-2.0
// Names seen in public files, in all their spellings, and names that must be refused.
#include "runtime/adapter/adapter_names.h"

#include "kernels/lora/adapter_layout.h"
#include "tests/adapter/adapter_files.h"
#include "tests/support/catch.h"

namespace moelora::test {
namespace {

struct Found {
  NameVerdict verdict;
  AdapterTarget target;
  TensorPart part;
  bool operator==(const Found&) const = default;
};

Found find(const std::string& name, const ModelConfig& config) {
  const NameMatch match = match_tensor_name(name, config);
  return {match.verdict, match.target, match.part};
}

Found dense(int32_t layer, LoraModule module, TensorPart part = TensorPart::kA) {
  return {NameVerdict::kTarget, {layer, TargetKind::kDense, -1, static_cast<int32_t>(module)}, part};
}
Found expert(int32_t layer, int32_t index, ExpertModule module, TensorPart part = TensorPart::kA) {
  return {NameVerdict::kTarget, {layer, TargetKind::kExpert, index, static_cast<int32_t>(module)}, part};
}
Found group(int32_t layer, TargetKind kind, int32_t index = -1) {
  return {NameVerdict::kTarget, {layer, kind, -1, index}, TensorPart::kA};
}

}  // namespace

TEST_CASE("spellings of one name are one target") {
  const ModelConfig moe = tiny_moe();
  const Found q = dense(1, LoraModule::kQ);
  for (const char* name :
       {"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.layers.1.self_attn.q_proj.lora_A.weight", "layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.my-adapter.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A",
        "module.base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model._orig_mod.model.layers.1._fsdp_wrapped_module.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.language_model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.language_model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.attn.q_proj.lora_A.weight"}) {
    INFO(name);
    CHECK(find(name, moe) == q);
  }
  CHECK(find("model.layers.1.self_attn.q_proj.lora_B.weight", moe) == dense(1, LoraModule::kQ, TensorPart::kB));
  CHECK(find("model.layers.1.self_attn.q_proj.lora_B.bias", moe) == dense(1, LoraModule::kQ, TensorPart::kBias));
  CHECK(find("model.layers.1.self_attn.q_proj.lora_B.default.bias", moe) ==
        dense(1, LoraModule::kQ, TensorPart::kBias));
}

TEST_CASE("the path for patterns is the stored one without wrappers and suffix") {
  const NameMatch match =
      match_tensor_name("base_model.model.model.layers.0.block_sparse_moe.experts.3.w2.lora_A.default.weight",
                        tiny_moe(Family::kMixtral));
  CHECK(match.path == "model.layers.0.block_sparse_moe.experts.3.w2");
}

TEST_CASE("modules of each family") {
  const ModelConfig moe = tiny_moe();
  const std::string layer = "base_model.model.model.layers.0.";
  CHECK(find(layer + "self_attn.k_proj.lora_A.weight", moe) == dense(0, LoraModule::kK));
  CHECK(find(layer + "self_attn.v_proj.lora_A.weight", moe) == dense(0, LoraModule::kV));
  CHECK(find(layer + "self_attn.o_proj.lora_A.weight", moe) == dense(0, LoraModule::kO));
  CHECK(find(layer + "mlp.gate.lora_A.weight", moe) == dense(0, LoraModule::kRouter));
  CHECK(find(layer + "mlp.experts.3.gate_proj.lora_A.weight", moe) == expert(0, 3, ExpertModule::kGate));
  CHECK(find(layer + "mlp.experts.0.up_proj.lora_B.weight", moe) == expert(0, 0, ExpertModule::kUp, TensorPart::kB));
  CHECK(find(layer + "mlp.experts.1.down_proj.lora_A.weight", moe) == expert(0, 1, ExpertModule::kDown));
  CHECK(find(layer + "mlp.experts.1.w1.lora_A.weight", moe) == expert(0, 1, ExpertModule::kGate));
  CHECK(find(layer + "mlp.experts.1.w3.lora_A.weight", moe) == expert(0, 1, ExpertModule::kUp));
  CHECK(find(layer + "mlp.experts.1.w2.lora_A.weight", moe) == expert(0, 1, ExpertModule::kDown));
  CHECK(find(layer + "mlp.experts.lora_A.weight", moe) == group(0, TargetKind::kExpertsOuter));
  CHECK(find(layer + "mlp.experts.base_layer.lora_A.weight", moe) == group(0, TargetKind::kExpertsInner));
  CHECK(find(layer + "mlp.experts.w3.lora_A.weight", moe) == group(0, TargetKind::kStacked, 1));
  CHECK(find(layer + "mlp.experts.w2.lora_A", moe) == group(0, TargetKind::kStacked, 2));
  CHECK(find(layer + "mlp.experts.down_proj.lora_A", moe) == group(0, TargetKind::kStacked, 2));
  CHECK(find(layer + "mlp.experts.gate_up_proj.lora_A.weight", moe) == group(0, TargetKind::kStackedGateUp));

  const ModelConfig mixtral = tiny_moe(Family::kMixtral);
  CHECK(find(layer + "block_sparse_moe.gate.lora_A.weight", mixtral) == dense(0, LoraModule::kRouter));
  CHECK(find(layer + "block_sparse_moe.experts.2.w1.lora_A.weight", mixtral) == expert(0, 2, ExpertModule::kGate));
  CHECK(find(layer + "block_sparse_moe.gate.lora_A.weight", moe).verdict == NameVerdict::kUnknown);

  const ModelConfig qwen2 = tiny_moe(Family::kQwen2Moe);
  CHECK(find(layer + "mlp.shared_expert.gate_proj.lora_A.weight", qwen2) == dense(0, LoraModule::kSharedGate));
  CHECK(find(layer + "mlp.shared_expert.up_proj.lora_A.weight", qwen2) == dense(0, LoraModule::kSharedUp));
  CHECK(find(layer + "mlp.shared_expert.down_proj.lora_A.weight", qwen2) == dense(0, LoraModule::kSharedDown));
  CHECK(find(layer + "mlp.shared_expert_gate.lora_A.weight", qwen2) == dense(0, LoraModule::kSharedExpertGate));
  CHECK(find(layer + "mlp.shared_expert_gate.lora_A.weight", moe).verdict == NameVerdict::kUnknown);

  const ModelConfig gpt_oss = tiny_moe(Family::kGptOss);
  CHECK(find(layer + "mlp.router.lora_A.weight", gpt_oss) == dense(0, LoraModule::kRouter));
  CHECK(find(layer + "mlp.gate.lora_A.weight", gpt_oss).verdict == NameVerdict::kUnknown);
  CHECK(find(layer + "mlp.router.lora_A.weight", moe).verdict == NameVerdict::kUnknown);
  CHECK(find(layer + "attn.q_proj.lora_A.weight", gpt_oss) == dense(0, LoraModule::kQ));
  CHECK(find(layer + "mlp.experts.base_layer.lora_A.weight", gpt_oss) == group(0, TargetKind::kExpertsInner));
  CHECK(find(layer + "mlp.router.weight", gpt_oss).verdict == NameVerdict::kUnsupported);
  CHECK(find(layer + "mlp.router.bias", gpt_oss).verdict == NameVerdict::kUnsupported);
  CHECK(find(layer + "mlp.experts.gate_up_projs.3.lora_A.weight", gpt_oss).verdict == NameVerdict::kUnsupported);

  const ModelConfig plain = tiny_dense();
  CHECK(find(layer + "mlp.gate_proj.lora_A.weight", plain) == dense(0, LoraModule::kGate));
  CHECK(find(layer + "mlp.up_proj.lora_A.weight", plain) == dense(0, LoraModule::kUp));
  CHECK(find(layer + "mlp.down_proj.lora_A.weight", plain) == dense(0, LoraModule::kDown));
  CHECK(find(layer + "mlp.gate.lora_A.weight", plain).verdict == NameVerdict::kUnknown);
  CHECK(find(layer + "mlp.experts.lora_A.weight", plain).verdict == NameVerdict::kUnknown);
  CHECK(find(layer + "mlp.gate_proj.lora_A.weight", moe).verdict == NameVerdict::kUnknown);
}

TEST_CASE("what is understood and not implemented is unsupported, with a reason") {
  const ModelConfig moe = tiny_moe();
  const struct {
    const char* name;
    const char* reason;
  } cases[] = {
      {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"},
      {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight", "DoRA"},
      {"base_model.model.model.embed_tokens.lora_embedding_A", "lora_embedding_A"},
      {"base_model.model.model.embed_tokens.lora_embedding_B.default", "lora_embedding_A"},
      {"base_model.model.lm_head.lora_A.weight", "lm_head"},
      {"base_model.model.unembed_tokens.lora_A.weight", "lm_head"},
      {"base_model.model.model.embed_tokens.lora_A.weight", "embed_tokens"},
      {"base_model.model.lm_head.base_layer.weight", "lm_head"},
      {"base_model.model.model.embed_tokens.base_layer.weight", "embed_tokens"},
      {"base_model.model.lm_head.weight", "modules_to_save"},
      {"base_model.model.lm_head.modules_to_save.default.weight", "modules_to_save"},
      {"base_model.model.model.embed_tokens.weight", "modules_to_save"},
      {"base_model.model.model.norm.weight", "modules_to_save"},
      {"base_model.model.model.layers.0.input_layernorm.weight", "modules_to_save"},
      {"base_model.model.model.layers.0.mlp.gate.weight", "modules_to_save"},
      {"base_model.model.model.layers.0.self_attn.q_proj.bias", "bias"},
      {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias", "bias"},
      {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_token_indices"},
      {"base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", "qkv_proj"},
      {"base_model.model.model.layers.0.mlp.gate_up_proj.lora_B.weight", "gate_up_proj"},
      {"base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.lora_A.weight", "three or more"},
      {"base_model.model.model.layers.0.mlp.experts.shared.lora_A.weight", "experts.shared"},
      {"base_model.model.model.layers.0.mlp.experts.gate_up_projs.0.lora_A.weight", "4-bit"},
      {"lora_unet_down_blocks_0.lora_down.weight", "lora_down"},
      {"base_model.model.model.layers.0.self_attn.q_proj.hada_w1_a", "hada_"},
      {"base_model.model.model.layers.0.self_attn.q_proj.lora_diag", "lora_diag"},
  };
  for (const auto& one : cases) {
    const NameMatch match = match_tensor_name(one.name, moe);
    INFO(one.name << ": " << match.reason);
    CHECK(match.verdict == NameVerdict::kUnsupported);
    CHECK(match.reason.find(one.reason) != std::string::npos);
  }
}

TEST_CASE("what is not understood is unknown, with the limit where there is one") {
  const ModelConfig moe = tiny_moe();
  const struct {
    const char* name;
    const char* reason;
  } cases[] = {
      {"model.layers.2.self_attn.q_proj.lora_A.weight", "layer index 2, but the model has 2 layers"},
      {"model.layers.99999999999.self_attn.q_proj.lora_A.weight", "not a layer index"},
      {"model.layers.01.self_attn.q_proj.lora_A.weight", "not a layer index"},
      {"model.layers.-1.self_attn.q_proj.lora_A.weight", "not a layer index"},
      {"model.layers.0.mlp.experts.4.up_proj.lora_A.weight", "expert index 4, but the model has 4 experts"},
      {"model.layers.0.mlp.experts.x.up_proj.lora_A.weight", "experts"},
      {"model.layers.0.self_attn.qq_proj.lora_A.weight", "attention"},
      {"model.layers.0.self_attn.q_proj.lora_C.weight", "LoRA"},
      {"model.layers.0.self_attn.q_proj.lora_A.bias", "LoRA"},
      {"model.layers.0.self_attn.q_proj.lora_A.a.b.weight", "LoRA"},
      {"model.layers.0.self_attn.lora_A.weight", ""},
      {"model.layers.0.lora_A.weight", ""},
      {"lora_A.weight", ""},
      {"model.layers.0.mlp.lora_A.weight", ""},
      {"model.layers.0.mlp.experts.1.lora_A.weight", "experts"},
      {"transformer.h.0.attn.c_attn.lora_A.weight", "no such module"},
      {"something", "neither"},
      {"a.weight", "no such module"},
      {"", ""},
      {".", ""},
      {"..lora_A..", ""},
  };
  for (const auto& one : cases) {
    const NameMatch match = match_tensor_name(one.name, moe);
    INFO(one.name << ": " << match.reason);
    CHECK(match.verdict == NameVerdict::kUnknown);
    CHECK(match.reason.find(one.reason) != std::string::npos);
  }
  CHECK(find("model.layers.0.self_attn.q_proj.lora_velora_embed", moe).verdict == NameVerdict::kIgnored);
}

}  // namespace moelora::test
