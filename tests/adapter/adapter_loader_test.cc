// SPDX-License-Identifier: Apache-2.0
// The loader as a whole: dtypes, scales that reach the records, partial adapters, warnings, counts and fingerprints.
#include <functional>

#include "tests/adapter/expert_forms.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"

namespace moelora::test {
namespace {

const std::string kQ0 = std::string(kLayerPrefix) + "0.self_attn.q_proj";
const std::string kV1 = std::string(kLayerPrefix) + "1.self_attn.v_proj";

float record_scale(const AdapterImage& image, const ModelConfig& model, int32_t layer, LoraModule module) {
  return UnpackedImage(image, model, 2, 1).table().dense(1, layer, module)->scale;
}

bool mentions(const std::vector<std::string>& warnings, const std::string& text) {
  for (const std::string& warning : warnings) {
    if (warning.find(text) != std::string::npos) {
      return true;
    }
  }
  return false;
}

// The delta that `values` of A and B (row-major) mean, after storing in `dtype`.
Delta stored_delta(const std::vector<float>& a, const std::vector<float>& b, int32_t rank, int32_t in, int32_t out,
                   double scale, const std::function<float(float)>& stored) {
  Delta delta{true, out, in, rank, std::vector<double>(static_cast<size_t>(in * out)), {}};
  for (int32_t n = 0; n < out; ++n) {
    for (int32_t k = 0; k < in; ++k) {
      for (int32_t r = 0; r < rank; ++r) {
        delta.values[static_cast<size_t>(n * in + k)] +=
            scale * static_cast<double>(stored(b[static_cast<size_t>(n * rank + r)])) *
            static_cast<double>(stored(a[static_cast<size_t>(r * in + k)]));
      }
    }
  }
  return delta;
}

}  // namespace

TEST_CASE("rsLoRA and patterns reach attention and experts in every form") {
  const ModelConfig model = tiny_moe();
  const Truth truth = draw_truth(model, {true, false}, 21);
  for (const bool rslora : {false, true}) {
    Draw draw(2);
    Json config = lora_config(3, 7.5);
    config["use_rslora"] = rslora;
    config["alpha_pattern"][".*\\.experts\\.gate_up_proj"] = 30.0;
    SafetensorsWriter writer;
    add_pair(writer, kQ0, 3, 24, 32, draw);
    write_wrapper(writer, experts_name(0) + ".base_layer", truth.layers[0], gate_up_shared_a, {});
    write_wrapper(writer, experts_name(0), truth.layers[0], down_parameter, {});
    const std::string expert = std::string(kLayerPrefix) + "1.mlp.experts.2.up_proj";
    add_pair(writer, expert, 3, 24, 20, draw);
    const auto image = load(config, writer, model);
    const UnpackedImage unpacked(*image, model, 2, 1);
    const double divisor = rslora ? std::sqrt(3.0) : 3.0;
    const auto near = [](float value, double expected) {
      return std::fabs(static_cast<double>(value) / expected - 1.0) < 1e-6;
    };
    CHECK(near(unpacked.table().dense(1, 0, LoraModule::kQ)->scale, 7.5 / divisor));
    CHECK(near(unpacked.table().expert(1, 0, 3, ExpertModule::kGate)->scale, 30.0 / divisor));
    CHECK(near(unpacked.table().expert(1, 0, 3, ExpertModule::kUp)->scale, 30.0 / divisor));
    CHECK(near(unpacked.table().expert(1, 0, 3, ExpertModule::kDown)->scale, 7.5 / divisor));
    CHECK(near(unpacked.table().expert(1, 1, 2, ExpertModule::kUp)->scale, 7.5 / divisor));
  }
}

TEST_CASE("alphas and ranks of patterns give each module its own scale") {
  const ModelConfig model = tiny_moe();
  Draw draw(3);
  SafetensorsWriter writer;
  add_pair(writer, kQ0, 4, 24, 32, draw);
  add_pair(writer, kV1, 8, 24, 16, draw);
  Json config = lora_config(4, 8);
  config["rank_pattern"]["v_proj"] = 8;
  config["alpha_pattern"]["v_proj"] = 2;
  const auto image = load(config, writer, model);
  CHECK(record_scale(*image, model, 0, LoraModule::kQ) == 2.0f);
  CHECK(record_scale(*image, model, 1, LoraModule::kV) == 0.25f);
  CHECK(image->max_rank == 8);
}

TEST_CASE("bf16 pairs stay bf16, others become fp32, decided pair by pair") {
  const ModelConfig model = tiny_moe();
  const struct {
    const char* a;
    const char* b;
    Dtype packed;
    const char* said;
  } cases[] = {{"BF16", "BF16", Dtype::kBf16, "BF16"},
               {"F32", "F32", Dtype::kF32, "F32"},
               {"F16", "F16", Dtype::kF32, "F16"},
               {"BF16", "F32", Dtype::kF32, "mixed"},
               {"F16", "BF16", Dtype::kF32, "mixed"}};
  for (const auto& one : cases) {
    for (const Compute compute : {Compute::kExact, Compute::kBf16}) {
      INFO(one.a << " " << one.b << " compute " << static_cast<int>(compute));
      Draw draw(4);
      const std::vector<float> a = draw.floats(3 * 24);
      std::vector<float> b = draw.floats(32 * 3);
      b[5] = 3.0517578125e-06f;  // subnormal in F16
      b[6] = -0.0f;
      SafetensorsWriter writer;
      writer.add(kQ0 + ".lora_A.weight", {3, 24}, a, one.a);
      writer.add(kQ0 + ".lora_B.weight", {32, 3}, b, one.b);
      AdapterLoadOptions options;
      options.compute = compute;
      const auto image = load(lora_config(3, 6), writer, model, options);
      const UnpackedImage unpacked(*image, model, 2, 1);
      const Dtype packed = compute == Compute::kBf16 ? Dtype::kBf16 : one.packed;
      CHECK(unpacked.table().dense(1, 0, LoraModule::kQ)->dtype == static_cast<int32_t>(packed));
      CHECK(image->dtype == one.said);
      std::vector<float> a_stored;
      std::vector<float> b_stored;
      const auto twice = [&](const char* dtype, float value) {
        const float stored = stored_value(dtype, value);
        return compute == Compute::kBf16 ? stored_value("BF16", stored) : stored;
      };
      for (const float value : a) {
        a_stored.push_back(twice(one.a, value));
      }
      for (const float value : b) {
        b_stored.push_back(twice(one.b, value));
      }
      const Delta want = stored_delta(a_stored, b_stored, 3, 24, 32, 2.0, [](float value) { return value; });
      CHECK(delta_distance(unpacked.dense(0, LoraModule::kQ, 24, 32), want) < 1e-12);
    }
  }
}

TEST_CASE("any subset of experts, projections and layers, each of its own rank") {
  const ModelConfig model = tiny_moe();
  Draw draw(5);
  SafetensorsWriter writer;
  Json config = lora_config(2, 2);
  const struct {
    int32_t layer, expert, module, rank;
  } pairs[] = {{0, 0, 0, 1}, {0, 3, 2, 9}, {1, 1, 1, 16}, {1, 2, 0, 2}};
  const char* names[] = {"gate_proj", "up_proj", "down_proj"};
  for (const auto& p : pairs) {
    const std::string path =
        "layers." + std::to_string(p.layer) + ".mlp.experts." + std::to_string(p.expert) + "." + names[p.module];
    add_pair(writer, "base_model.model.model." + path, p.rank, p.module == 2 ? 20 : 24, p.module == 2 ? 24 : 20, draw,
             "BF16");
    config["rank_pattern"][path] = p.rank;
  }
  const auto image = load(config, writer, model);
  const UnpackedImage unpacked(*image, model, 2, 6);
  int32_t present = 0;
  for (int32_t layer = 0; layer < 2; ++layer) {
    for (int32_t e = 0; e < 4; ++e) {
      for (int32_t m = 0; m < 3; ++m) {
        const LoraRecord* record = unpacked.table().expert(1, layer, e, static_cast<ExpertModule>(m));
        int32_t rank = 0;
        for (const auto& p : pairs) {
          rank = p.layer == layer && p.expert == e && p.module == m ? p.rank : rank;
        }
        INFO("layer " << layer << " expert " << e << " module " << m);
        CHECK((record == nullptr ? 0 : record->rank) == rank);
        present += record != nullptr;
      }
    }
  }
  CHECK(present == 4);
  CHECK(image->num_experts == 2);
  CHECK(image->num_layers == 2);
  CHECK(image->max_rank == 16);
  CHECK(image->modules == 0x70000u);
  CHECK(unpacked.table().dense(1, 0, LoraModule::kQ) == nullptr);
}

TEST_CASE("router, shared expert and its gate are linears like others") {
  const ModelConfig model = tiny_moe(Family::kQwen2Moe);
  Draw draw(6);
  SafetensorsWriter writer;
  const std::string layer = std::string(kLayerPrefix) + "1.mlp.";
  add_pair(writer, layer + "gate", 3, 24, 4, draw);
  add_pair(writer, layer + "shared_expert.gate_proj", 3, 24, 36, draw);
  add_pair(writer, layer + "shared_expert.up_proj", 3, 24, 36, draw);
  add_pair(writer, layer + "shared_expert.down_proj", 3, 36, 24, draw);
  const std::vector<float> a = draw.floats(3 * 24);
  const std::vector<float> b = draw.floats(3);
  writer.add(layer + "shared_expert_gate.lora_A.weight", {3, 24}, a);
  writer.add(layer + "shared_expert_gate.lora_B.weight", {1, 3}, b);
  Json config = lora_config(3, 6);
  config["alpha_pattern"]["mlp.gate.weight"] = 12;  // the router targeted as a parameter
  const auto image = load(config, writer, model);
  CHECK(image->modules == (1u << 4 | 1u << 8 | 1u << 9 | 1u << 10 | 1u << 11));
  CHECK(record_scale(*image, model, 1, LoraModule::kRouter) == 4.0f);
  const Delta want = stored_delta(a, b, 3, 24, 1, 2.0, [](float value) { return value; });
  CHECK(delta_distance(UnpackedImage(*image, model, 2, 3).dense(1, LoraModule::kSharedExpertGate, 24, 1), want) <
        1e-12);
}

TEST_CASE("lora_bias is kept as fp32 vector of the record, on experts too") {
  const ModelConfig model = tiny_moe();
  Draw draw(7);
  SafetensorsWriter writer;
  Json config = lora_config(3, 6);
  config["lora_bias"] = true;
  add_pair(writer, kQ0, 3, 24, 32, draw, "BF16");
  writer.add(kQ0 + ".lora_B.bias", {32}, draw.floats(32), "BF16");
  const std::string expert = std::string(kLayerPrefix) + "0.mlp.experts.1.down_proj";
  add_pair(writer, expert, 3, 20, 24, draw);
  const std::vector<float> bias = draw.floats(24);
  writer.add(expert + ".lora_B.bias", {24}, bias);
  const auto image = load(config, writer, model);
  const Delta delta = UnpackedImage(*image, model, 2, 3).expert(0, 1, ExpertModule::kDown, 20, 24);
  REQUIRE(delta.bias.size() == 24);
  for (size_t n = 0; n < 24; ++n) {
    CHECK(delta.bias[n] == 2.0 * static_cast<double>(bias[n]));
  }
}

TEST_CASE("the outer pair alone is the parameter that the config targets there, else the one that fits") {
  const ModelConfig model = tiny_moe();
  const Truth truth = draw_truth(model, {true, false}, 22);
  Json config = lora_config(kFormRank, kFormAlpha);
  config["peft_version"] = "0.21.0";
  config["target_parameters"] = {"0.mlp.experts.down_proj", "1.mlp.experts.gate_up_proj"};
  SafetensorsWriter writer;
  write_wrapper(writer, experts_name(0), truth.layers[0], down_parameter, {});
  write_wrapper(writer, experts_name(1), truth.layers[1], gate_up_shared_a, {});
  for (const bool with_targets : {true, false}) {
    if (!with_targets) {
      config.erase("target_parameters");
    }
    const auto image = load(config, writer, model);
    const UnpackedImage unpacked(*image, model, 2, 3);
    CHECK(unpacked.table().expert(1, 0, 0, ExpertModule::kGate) == nullptr);
    CHECK(unpacked.table().expert(1, 1, 0, ExpertModule::kDown) == nullptr);
    CHECK(delta_distance(unpacked.expert(0, 3, ExpertModule::kDown, 20, 24), true_delta(truth, 0, 3, 2)) < 1e-6);
    CHECK(delta_distance(unpacked.expert(1, 3, ExpertModule::kUp, 24, 20), true_delta(truth, 1, 3, 1)) < 1e-6);
    CHECK(image->warnings.empty());
  }
}

TEST_CASE("targets of the config without tensors give warnings") {
  const ModelConfig model = tiny_moe();
  Draw draw(8);
  SafetensorsWriter writer;
  add_pair(writer, kQ0, 3, 24, 32, draw);
  Json config = lora_config();
  config["target_modules"] = {"q_proj", "gate_proj", "up_proj", "down_proj"};
  const auto image = load(config, writer, model);
  CHECK(image->warnings.size() == 3);
  CHECK(mentions(image->warnings, "'gate_proj' of target_modules; no expert tensors exist"));
  CHECK_FALSE(mentions(image->warnings, "'q_proj'"));
}

TEST_CASE("an Unsloth adapter of experts without a marker is warned about") {
  const ModelConfig model = tiny_moe();
  const Truth truth = draw_truth(model, {true, false}, 23);
  SafetensorsWriter writer;
  write_wrapper(writer, experts_name(0) + ".base_layer", truth.layers[0], gate_up_shared_a, {});
  write_wrapper(writer, experts_name(0), truth.layers[0], down_parameter, {});
  Json config = lora_config(kFormRank, kFormAlpha);
  config["auto_mapping"]["unsloth_fixed"] = true;
  CHECK(mentions(load(config, writer, model)->warnings, "grouped_by_expert"));
  AdapterLoadOptions options;
  options.b_layout = ExpertBLayout::kRankMajor;
  CHECK(load(config, writer, model, options)->warnings.empty());
  config["lora_B_layout"] = "rank_major";
  CHECK(load(config, writer, model)->warnings.empty());
}

TEST_CASE("lenient loads count what they leave out, and still refuse an adapter that reaches nothing") {
  const ModelConfig model = tiny_moe();
  Draw draw(9);
  SafetensorsWriter writer;
  add_pair(writer, kQ0, 3, 24, 32, draw);
  add_pair(writer, std::string(kLayerPrefix) + "2.self_attn.q_proj", 3, 24, 32, draw);
  AdapterLoadOptions lenient;
  lenient.lenient = true;
  const auto image = load(lora_config(), writer, model, lenient);
  CHECK(image->num_tensors == 2);
  CHECK(image->num_tensors_unmatched == 2);
  SafetensorsWriter nothing;
  add_pair(nothing, std::string(kLayerPrefix) + "0.self_attn.qq_proj", 3, 24, 32, draw);
  CHECK_ERROR(Status::kAdapterMismatch, ({"qq_proj"}), load(lora_config(), nothing, model, lenient));
}

TEST_CASE("the fingerprint tells config and weights apart") {
  const ModelConfig model = tiny_moe();
  const auto with_value = [&](float value, double alpha) {
    std::vector<float> b(96, 0.0f);  // an all-zero B is a valid adapter
    b[95] = value;
    Draw draw(10);
    SafetensorsWriter writer;
    writer.add(kQ0 + ".lora_A.weight", {3, 24}, draw.floats(72));
    writer.add(kQ0 + ".lora_B.weight", {32, 3}, b);
    return load(lora_config(3, alpha), writer, model)->fingerprint;
  };
  CHECK(with_value(0.0f, 6) == with_value(0.0f, 6));
  CHECK(with_value(0.0f, 6) != with_value(1.0f, 6));
  CHECK(with_value(0.0f, 6) != with_value(0.0f, 7));
}

TEST_CASE("a folder is read like the same bytes in memory") {
  const ModelConfig model = tiny_moe();
  Draw draw(11);
  SafetensorsWriter writer;
  add_pair(writer, kQ0, 3, 24, 32, draw);
  const TempDir dir;
  write_file(dir.file("adapter_config.json"), lora_config().dump());
  write_file(dir.file("adapter_model.safetensors"), writer.text());
  const auto from_dir = load_adapter_dir(dir.path(), model, {});
  const auto from_memory = load(lora_config(), writer, model);
  CHECK(from_dir->stream == from_memory->stream);
  CHECK(from_dir->fingerprint == from_memory->fingerprint);
  CHECK(from_dir->file_bytes == writer.text().size());
  CHECK(from_dir->rank == 3);
  CHECK(from_dir->alpha == 6.0f);
}

}  // namespace moelora::test
