// SPDX-License-Identifier: Apache-2.0
// Weights of every family against values read independently from the reference files, the layouts that must be equal
// (sharded, fused), and each refusal of a folder that does not fit its config.
#include "runtime/model/weights.h"

#include "kernels/base/error.h"
#include "tests/model/weight_files.h"
#include "tests/model/weight_views.h"
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

// Per-expert names to the fused 3-D tensors; `modules` are gate, up, down.
void fuse_layer(RawTensors& tensors, const std::string& layer, const std::string& experts,
                const std::vector<std::string>& modules) {
  Raw gate_up{"", {8, 96, 64}, ""};
  Raw down{"", {8, 64, 48}, ""};
  for (int e = 0; e < 8; ++e) {
    const std::string prefix = layer + experts + std::to_string(e) + ".";
    for (size_t m = 0; m < 3; ++m) {
      const auto found = tensors.find(prefix + modules[m] + ".weight");
      REQUIRE(found != tensors.end());
      Raw& target = m < 2 ? gate_up : down;
      target.dtype = found->second.dtype;
      target.bytes += found->second.bytes;
      tensors.erase(found);
    }
  }
  tensors[layer + "mlp.experts.gate_up_proj"] = gate_up;
  tensors[layer + "mlp.experts.down_proj"] = down;
}

const std::vector<std::string> kQwenModules = {"gate_proj", "up_proj", "down_proj"};
const std::string kLayer0 = "model.layers.0.";
const std::string kLayer1 = "model.layers.1.";

}  // namespace

TEST_CASE("weights: values of the reference files") {
  const auto moe = load(case_model("qwen3_moe"));
  CHECK(load_element(moe->layers[1].expert_down.data[5], moe->layers[1].expert_down.dtype, 64 * 48 - 1) ==
        -0.384765625f);
  CHECK(load_element(moe->layers[0].expert_up.data[7], Dtype::kBf16, 100) == 0.078125f);
  CHECK(at(moe->layers[0].k_norm, 3) == 1.3671875f);
  CHECK(at(moe->lm_head, 320 * 64 - 1) == 0.470703125f);
  CHECK(moe->layers[0].expert_gate.rows == 48);
  CHECK(moe->layers[0].expert_gate.cols == 64);
  CHECK(moe->layers[0].expert_down.rows == 64);
  CHECK(moe->layers[0].expert_down.cols == 48);
  CHECK(moe->layers[0].q_bias.empty());
  CHECK(moe->layers[0].gate.empty());

  const auto mixtral = load(case_model("mixtral_f16_window"));
  CHECK(mixtral->layers[1].expert_down.dtype == Dtype::kF16);
  CHECK(load_element(mixtral->layers[1].expert_down.data[5], Dtype::kF16, 64 * 48 - 1) == -0.205078125f);
  CHECK(load_element(mixtral->layers[0].expert_up.data[7], Dtype::kF16, 100) == -0.076171875f);
  CHECK(load_element(mixtral->layers[0].expert_gate.data[7], Dtype::kF16, 100) == -0.048583984375f);
  CHECK(at(mixtral->layers[1].router, 77) == 0.283203125f);

  const auto shared = load(case_model("qwen2_moe"));
  CHECK(at(shared->layers[1].v_bias, 31) == 0.11376953125f);
  CHECK(shared->layers[1].v_bias.cols == 32);
  CHECK(at(shared->layers[0].shared_expert_gate, 5) == -0.0986328125f);
  CHECK(shared->layers[0].shared_gate.rows == 96);
  CHECK(at(load(case_model("qwen3_moe_f32"))->layers[1].router, 100) == -0.35286176204681396f);

  const auto mixed = load(case_model("qwen3_moe_mixed"));
  CHECK(mixed->lm_head.data == mixed->embedding.data);
  CHECK(mixed->layers[0].router.empty());
  CHECK(mixed->layers[0].gate.rows == 96);
  CHECK(mixed->layers[1].expert_gate.data != nullptr);
  CHECK(mixed->layers[1].gate.empty());
}

TEST_CASE("weights: sizes of every case") {
  for (const std::string& name : kCases) {
    INFO(name);
    const ModelConfig config = load_model_config(case_model(name));
    const auto weights = Weights::load(case_model(name), config);
    uint64_t stored = 0;
    for (const auto& [tensor, raw] : read_tensors(case_model(name))) {
      stored += raw.bytes.size();
    }
    CHECK(weights->bytes() == stored);
    CHECK(weight_bytes_of_config(config) == stored);
    uint64_t mapped = 0;
    for (const Weights::Area& area : weights->areas()) {
      mapped += area.bytes;
    }
    CHECK(mapped > stored);
    CHECK(weights->areas().front().bytes >= weights->areas().back().bytes);
  }
}

TEST_CASE("weights: bytes of a decode step") {
  // By hand, bf16. Layer: norms 2*64 + 2*16, q 64*64, k and v 32*64 each, o 64*64, router 8*64, experts 3*48*64 each.
  const ModelConfig config = load_model_config(case_model("qwen3_moe"));
  const auto weights = load(case_model("qwen3_moe"));
  const double layer = 2 * 64 + 2 * 16 + 2 * 64 * 64 + 2 * 32 * 64 + 8 * 64;
  const double expert = 3 * 48 * 64;
  const double head = 320 * 64 + 64;
  CHECK(weight_bytes_of_step(config, *weights, 2.0) == 2 * (2 * (layer + 2 * expert) + head));
  CHECK(weight_bytes_of_step(config, *weights, 3.5) == 2 * (2 * (layer + 3.5 * expert) + head));
  CHECK(weight_bytes_of_step(config, *weights, 99.0) == 2 * (2 * (layer + 8 * expert) + head));
  // Tied: the head is read though the table is not; two layers of dense MLP 96 and one MoE layer.
  const ModelConfig tied = load_model_config(case_model("qwen3_moe_mixed"));
  const double attention = layer - 8 * 64;
  const double expected = 3 * attention + 2 * 3 * 96 * 64 + 8 * 64 + 2 * expert + head;
  CHECK(weight_bytes_of_step(tied, *load(case_model("qwen3_moe_mixed")), 2.0) == 2 * expected);
  // Shared expert 3*96*64 and its gate, biases 64 + 2*32, no q/k norms.
  const ModelConfig shared = load_model_config(case_model("qwen2_moe"));
  const double with_shared = layer - 2 * 16 + 3 * 96 * 64 + 64 + 128 + 2 * expert;
  CHECK(weight_bytes_of_step(shared, *load(case_model("qwen2_moe")), 2.0) == 2 * (2 * with_shared + head));
}

TEST_CASE("weights: shards and one file are equal") {
  const std::string dir = case_model("qwen3_moe_sharded");
  const auto sharded = load(dir);
  CHECK(sharded->areas().size() == 3);
  const auto merged = load_changed("qwen3_moe_sharded", [](RawTensors&) {});
  CHECK(merged->areas().size() == 1);
  CHECK(same_weights(*sharded, *merged, 8));
  CHECK(sharded->bytes() == merged->bytes());
  CHECK_FALSE(same_weights(*sharded, *load(case_model("qwen3_moe")), 8));  // the comparison sees a difference
}

TEST_CASE("weights: fused 3-D experts equal per-expert names, layer by layer") {
  for (const char* name : {"qwen3_moe", "olmoe", "qwen2_moe"}) {
    INFO(name);
    const auto plain = load(case_model(name));
    const auto one = load_changed(name, [](RawTensors& t) { fuse_layer(t, kLayer1, "mlp.experts.", kQwenModules); });
    const auto both = load_changed(name, [](RawTensors& t) {
      fuse_layer(t, kLayer0, "mlp.experts.", kQwenModules);
      fuse_layer(t, kLayer1, "mlp.experts.", kQwenModules);
    });
    CHECK(same_weights(*plain, *one, 8));
    CHECK(same_weights(*plain, *both, 8));
    CHECK(both->bytes() == plain->bytes());
  }
  const auto mixtral = load_changed("mixtral", [](RawTensors& t) {
    fuse_layer(t, kLayer0, "block_sparse_moe.experts.", {"w1", "w3", "w2"});
    t[kLayer0 + "mlp.gate.weight"] = t[kLayer0 + "block_sparse_moe.gate.weight"];
    t.erase(kLayer0 + "block_sparse_moe.gate.weight");
  });
  CHECK(same_weights(*load(case_model("mixtral")), *mixtral, 8));
}

TEST_CASE("weights: a layer with both forms of experts, or half of one, is refused") {
  const std::string gate_up = kLayer1 + "mlp.experts.gate_up_proj";
  CHECK_ERROR(Status::kCorrupt, ({gate_up, kLayer1 + "mlp.experts.3.up_proj.weight"}),
              load_changed("qwen3_moe", [&](RawTensors& t) {
                const Raw kept = t[kLayer1 + "mlp.experts.3.up_proj.weight"];
                fuse_layer(t, kLayer1, "mlp.experts.", kQwenModules);
                t[kLayer1 + "mlp.experts.3.up_proj.weight"] = kept;
              }));
  CHECK_ERROR(Status::kCorrupt, ({"missing", kLayer1 + "mlp.experts.down_proj"}),
              load_changed("qwen3_moe", [&](RawTensors& t) {
                fuse_layer(t, kLayer1, "mlp.experts.", kQwenModules);
                t.erase(kLayer1 + "mlp.experts.down_proj");
              }));
  CHECK_ERROR(Status::kCorrupt, ({gate_up, "[8, 64, 96]", "[8, 96, 64]"}),
              load_changed("qwen3_moe", [&](RawTensors& t) {
                fuse_layer(t, kLayer1, "mlp.experts.", kQwenModules);
                t[gate_up].shape = {8, 64, 96};
              }));
  CHECK_ERROR(Status::kCorrupt, ({"block_sparse_moe.gate.weight", "mlp.gate.weight"}),
              load_changed("mixtral", [](RawTensors& t) {
                t[kLayer0 + "mlp.gate.weight"] = t[kLayer0 + "block_sparse_moe.gate.weight"];
              }));
}

TEST_CASE("weights: tied embeddings") {
  // Tied: a stored head is ignored. Not tied: it must be there.
  const auto tied = load_changed("qwen3", [](RawTensors& t) { t["lm_head.weight"] = {"U8", {1}, "x"}; });
  CHECK(tied->lm_head.data == tied->embedding.data);
  CHECK_ERROR(Status::kCorrupt, ({"missing", "lm_head.weight"}),
              load_changed("qwen3_moe", [](RawTensors& t) { t.erase("lm_head.weight"); }));
}

TEST_CASE("weights: missing, unexpected and misshapen tensors are named") {
  CHECK_ERROR(Status::kCorrupt, ({"1 tensor is missing: model.norm.weight"}),
              load_changed("llama3", [](RawTensors& t) { t.erase("model.norm.weight"); }));
  CHECK_ERROR(Status::kCorrupt, ({"4 tensors are missing", "model.layers.0.self_attn.q_proj.weight", ", ..."}),
              load_changed("llama3", [](RawTensors& t) {
                for (const char* p : {"q", "k", "v", "o"}) {
                  t.erase(kLayer0 + "self_attn." + p + "_proj.weight");
                }
              }));
  CHECK_ERROR(Status::kCorrupt, ({"missing", "mlp.experts.7.down_proj.weight"}),
              load_changed("qwen3_moe", [](RawTensors& t) { t.erase(kLayer1 + "mlp.experts.7.down_proj.weight"); }));
  const Raw vector{"BF16", {64}, std::string(128, '\0')};
  for (const std::string& name : {std::string("nonsense"), std::string("model.layers.2.input_layernorm.weight"),
                                  kLayer0 + "self_attn.q_proj.bias", kLayer0 + "self_attn.q_norm.weight",
                                  std::string("model.embed_tokens.weight_scale_inv")}) {
    CHECK_ERROR(Status::kUnsupported, ({name, "not part of this model"}),
                load_changed("llama3", [&](RawTensors& t) { t[name] = vector; }));
  }
  CHECK_ERROR(Status::kUnsupported, ({kLayer0 + "mlp.experts.8.up_proj.weight"}),
              load_changed("qwen3_moe", [](RawTensors& t) {
                t[kLayer0 + "mlp.experts.8.up_proj.weight"] = t[kLayer0 + "mlp.experts.7.up_proj.weight"];
              }));
  CHECK(load_changed("llama3", [&](RawTensors& t) { t[kLayer0 + "self_attn.rotary_emb.inv_freq"] = vector; }) !=
        nullptr);
  CHECK_ERROR(Status::kCorrupt, ({kLayer1 + "self_attn.k_proj.weight", "[64, 32]", "[32, 64]"}),
              load_changed("llama3", [](RawTensors& t) { t[kLayer1 + "self_attn.k_proj.weight"].shape = {64, 32}; }));
  CHECK_ERROR(Status::kCorrupt, ({"model.norm.weight", "[1, 64]", "[64]"}),
              load_changed("llama3", [](RawTensors& t) { t["model.norm.weight"].shape = {1, 64}; }));
}

TEST_CASE("weights: dtypes") {
  CHECK_ERROR(Status::kUnsupported, ({kLayer0 + "self_attn.q_proj.weight", "F8_E4M3", "F32, F16, BF16"}),
              load_changed("llama3", [](RawTensors& t) {
                Raw& raw = t[kLayer0 + "self_attn.q_proj.weight"];
                raw.dtype = "F8_E4M3";
                raw.bytes.resize(64 * 64);
              }));
  CHECK_ERROR(Status::kUnsupported, ({kLayer0 + "mlp.up_proj.weight", "I16"}),
              load_changed("llama3", [](RawTensors& t) { t[kLayer0 + "mlp.up_proj.weight"].dtype = "I16"; }));
  // Tensors of one model may differ in dtype, the experts of one projection may not.
  const auto mixed = load_changed("qwen3_moe", [](RawTensors& t) {
    t["model.norm.weight"] = {"F32", {64}, std::string(256, '\0')};
    for (int e = 0; e < 8; ++e) {
      t[kLayer0 + "mlp.experts." + std::to_string(e) + ".up_proj.weight"].dtype = "F16";
    }
  });
  CHECK(mixed->final_norm.dtype == Dtype::kF32);
  CHECK(mixed->layers[0].expert_up.dtype == Dtype::kF16);
  CHECK(mixed->layers[0].expert_gate.dtype == Dtype::kBf16);
  CHECK_ERROR(
      Status::kUnsupported, ({kLayer1 + "mlp.experts.4.up_proj.weight", "F16", "BF16"}),
      load_changed("qwen3_moe", [](RawTensors& t) { t[kLayer1 + "mlp.experts.4.up_proj.weight"].dtype = "F16"; }));
}

TEST_CASE("weights: optional biases are loaded when config.json promises them") {
  const TempDir dir;
  std::string config = read_file(case_model("llama3") + "/config.json");
  const auto replace = [&](const std::string& from, const std::string& to) {
    const size_t where = config.find(from);
    REQUIRE(where != std::string::npos);
    config.replace(where, from.size(), to);
  };
  replace("\"attention_bias\": false", "\"attention_bias\": true");
  replace("\"mlp_bias\": false", "\"mlp_bias\": true");
  write_file(dir.file("config.json"), config);
  RawTensors tensors = read_tensors(case_model("llama3"));
  const auto add = [&](const std::string& module, int64_t width) {
    for (const std::string& layer : {kLayer0, kLayer1}) {
      tensors[layer + module + ".bias"] = {"BF16", {width}, std::string(static_cast<size_t>(2 * width), 'b')};
    }
  };
  add("self_attn.q_proj", 64);
  add("self_attn.k_proj", 32);
  add("self_attn.v_proj", 32);
  add("self_attn.o_proj", 64);
  add("mlp.gate_proj", 96);
  add("mlp.up_proj", 96);
  write_tensors(dir, tensors);
  CHECK_ERROR(Status::kCorrupt, ({"2 tensors are missing", "mlp.down_proj.bias"}), load(dir.path()));
  add("mlp.down_proj", 64);
  write_tensors(dir, tensors);
  const auto weights = load(dir.path());
  CHECK(weights->layers[1].o_bias.cols == 64);
  CHECK(weights->layers[1].k_bias.cols == 32);
  CHECK(weights->layers[0].gate_bias.cols == 96);
  CHECK(weights->layers[0].down_bias.rows == 1);
}
