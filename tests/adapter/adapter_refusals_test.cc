// SPDX-License-Identifier: Apache-2.0
// Adapters that must not load: each gives a status of its own and a message that names the tensor, key or limit.
#include "tests/adapter/expert_forms.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"

namespace moelora::test {
namespace {

const std::string kQ0 = std::string(kLayerPrefix) + "0.self_attn.q_proj";

struct Pair {
  int64_t rank = 3;
  int64_t in = 24;
  int64_t out = 32;
};

SafetensorsWriter one_pair(const std::string& name, const Pair& pair, const std::string& dtype = "F32") {
  Draw draw(1);
  SafetensorsWriter writer;
  add_pair(writer, name, static_cast<int32_t>(pair.rank), static_cast<int32_t>(pair.in), static_cast<int32_t>(pair.out),
           draw, dtype);
  return writer;
}

}  // namespace

TEST_CASE("shapes, ranks and widths that do not fit are named with what was expected") {
  const ModelConfig model = tiny_moe();
  CHECK_ERROR(Status::kAdapterMismatch, ({"q_proj.lora_A.weight", "[3, 25]", "[r, 24]"}),
              load(lora_config(), one_pair(kQ0, {3, 25, 32}), model));
  CHECK_ERROR(Status::kAdapterMismatch, ({"q_proj.lora_B.weight", "[31, 3]", "[32, r]"}),
              load(lora_config(), one_pair(kQ0, {3, 24, 31}), model));
  CHECK_ERROR(Status::kAdapterMismatch, ({"q_proj.lora_A.weight", "rank 3", "rank 8"}),
              load(lora_config(8), one_pair(kQ0, {3, 24, 32}), model));
  AdapterLoadOptions options;
  options.max_rank = 2;
  CHECK_ERROR(Status::kAdapterMismatch, ({"q_proj.lora_A.weight", "rank 3", "maximum is 2", "max_lora_rank"}),
              load(lora_config(), one_pair(kQ0, {3, 24, 32}), model, options));
  options.max_rank = 3;
  CHECK(load(lora_config(), one_pair(kQ0, {3, 24, 32}), model, options)->max_rank == 3);
  Draw draw(2);
  SafetensorsWriter ranks;
  ranks.add(kQ0 + ".lora_A.weight", {3, 24}, draw.floats(72));
  ranks.add(kQ0 + ".lora_B.weight", {32, 4}, draw.floats(128));
  CHECK_ERROR(Status::kAdapterMismatch, ({"q_proj.lora_B.weight", "[32, 4]", "[32, 3]"}),
              load(lora_config(), ranks, model));
  SafetensorsWriter dims;
  dims.add(kQ0 + ".lora_A.weight", {72}, draw.floats(72));
  dims.add(kQ0 + ".lora_B.weight", {32, 3}, draw.floats(96));
  CHECK_ERROR(Status::kAdapterMismatch, ({"q_proj.lora_A.weight", "[72]"}), load(lora_config(), dims, model));
  SafetensorsWriter zero;
  zero.add(kQ0 + ".lora_A.weight", {0, 24}, {});
  zero.add(kQ0 + ".lora_B.weight", {32, 0}, {});
  CHECK_ERROR(Status::kAdapterMismatch, ({"q_proj.lora_A.weight", "rank 0"}), load(lora_config(), zero, model));
  Json bias_config = lora_config();
  bias_config["lora_bias"] = true;
  SafetensorsWriter bias = one_pair(kQ0, {});
  bias.add(kQ0 + ".lora_B.bias", {31}, draw.floats(31));
  CHECK_ERROR(Status::kAdapterMismatch, ({"q_proj.lora_B.bias", "[31]", "[32]"}), load(bias_config, bias, model));
}

TEST_CASE("halves without the other half are named") {
  const ModelConfig model = tiny_moe();
  Draw draw(3);
  SafetensorsWriter only_a = one_pair(std::string(kLayerPrefix) + "1.self_attn.q_proj", {});
  only_a.add(kQ0 + ".lora_A.weight", {3, 24}, draw.floats(72));
  CHECK_ERROR(Status::kAdapterMismatch, ({"layers.0.self_attn.q_proj.lora_A.weight", "lora_B"}),
              load(lora_config(), only_a, model));
  SafetensorsWriter only_b;
  only_b.add(kQ0 + ".lora_B.weight", {32, 3}, draw.floats(96));
  CHECK_ERROR(Status::kAdapterMismatch, ({"layers.0.self_attn.q_proj.lora_B.weight", "lora_A"}),
              load(lora_config(), only_b, model));
  SafetensorsWriter only_bias;
  only_bias.add(kQ0 + ".lora_B.bias", {32}, draw.floats(32));
  CHECK_ERROR(Status::kAdapterMismatch, ({"layers.0.self_attn.q_proj.lora_B.bias"}),
              load(lora_config(), only_bias, model));
}

TEST_CASE("tensors that reach no module are named and counted") {
  const ModelConfig model = tiny_moe();
  Draw draw(4);
  const auto beside = [&](const std::string& name) {
    SafetensorsWriter writer = one_pair(kQ0, {});
    add_pair(writer, name, 3, 24, 32, draw);
    return writer;
  };
  const std::string layer = kLayerPrefix;
  CHECK_ERROR(Status::kAdapterMismatch,
              (std::vector<std::string>{layer + "0.self_attn.qq_proj.lora_A.weight", "and 1 further tensor"}),
              load(lora_config(), beside(layer + "0.self_attn.qq_proj"), model));
  CHECK_ERROR(Status::kAdapterMismatch, ({"layers.2.", "2 layers"}),
              load(lora_config(), beside(layer + "2.self_attn.q_proj"), model));
  CHECK_ERROR(Status::kAdapterMismatch, ({"layers.99.", "2 layers"}),
              load(lora_config(), one_pair(layer + "99.self_attn.q_proj", {}), model));
  CHECK_ERROR(Status::kAdapterMismatch, ({"experts.4.up_proj", "4 experts"}),
              load(lora_config(), beside(layer + "0.mlp.experts.4.up_proj"), model));
  CHECK_ERROR(Status::kAdapterMismatch, ({"mlp.experts.nonsense.lora_A.weight"}),
              load(lora_config(), beside(layer + "0.mlp.experts.nonsense"), model));
  CHECK_ERROR(Status::kAdapterMismatch, ({"mlp.experts.0.up_proj"}),
              load(lora_config(), beside(layer + "0.mlp.experts.0.up_proj"), tiny_dense()));
  CHECK_ERROR(Status::kAdapterMismatch, ({"no tensors"}), load(lora_config(), SafetensorsWriter(), model));
}

TEST_CASE("whole tensors, embeddings and merged modules are refused by name") {
  const ModelConfig model = tiny_moe();
  Draw draw(5);
  const auto beside = [&](const std::string& name, const std::vector<int64_t>& shape) {
    SafetensorsWriter writer = one_pair(kQ0, {});
    int64_t count = 1;
    for (const int64_t dim : shape) {
      count *= dim;
    }
    writer.add(name, shape, draw.floats(static_cast<size_t>(count)));
    return writer;
  };
  const std::string layer = kLayerPrefix;
  const std::string root = "base_model.model.";
  const auto refused = [&](const std::string& name, const std::vector<int64_t>& shape, const std::string& part) {
    for (const bool lenient : {false, true}) {
      AdapterLoadOptions options;
      options.lenient = lenient;
      CHECK_ERROR(Status::kUnsupported, (std::vector<std::string>{name, part}),
                  load(lora_config(), beside(name, shape), model, options));
    }
  };
  refused(root + "lm_head.weight", {50, 24}, "modules_to_save");
  refused(root + "model.norm.weight", {24}, "modules_to_save");
  refused(root + "lm_head.lora_A.weight", {3, 24}, "lm_head");
  refused(root + "model.embed_tokens.lora_embedding_A", {3, 50}, "embedding");
  refused(root + "model.embed_tokens.token_adapter.trainable_tokens_delta", {2, 24}, "trainable_token_indices");
  refused(layer + "0.self_attn.q_proj.bias", {32}, "bias");
  refused(layer + "0.self_attn.q_proj.lora_magnitude_vector", {32}, "DoRA");
  refused(layer + "0.self_attn.qkv_proj.lora_B.weight", {64, 3}, "qkv_proj");
  Json saved = lora_config();
  saved["modules_to_save"] = {"lm_head"};
  CHECK_ERROR(Status::kUnsupported, ({"modules_to_save", "lm_head"}), load(saved, one_pair(kQ0, {}), model));
  saved["modules_to_save"] = Json::array();
  CHECK(load(saved, one_pair(kQ0, {}), model)->num_tensors == 2);
}

TEST_CASE("two names of one target, or two forms of one expert, are refused naming both") {
  const ModelConfig model = tiny_moe();
  Draw draw(6);
  SafetensorsWriter twice = one_pair(kQ0, {});
  add_pair(twice, "model.layers.0.self_attn.q_proj", 3, 24, 32, draw);
  CHECK_ERROR(
      Status::kAdapterMismatch,
      (std::vector<std::string>{"'" + kQ0 + ".lora_A.weight'", "'model.layers.0.self_attn.q_proj.lora_A.weight'"}),
      load(lora_config(), twice, model));
  const Truth truth = draw_truth(model, {true, false}, 7);
  SafetensorsWriter forms;
  write_wrapper(forms, experts_name(0) + ".base_layer", truth.layers[0], gate_up_shared_a, {});
  write_wrapper(forms, experts_name(0), truth.layers[0], down_parameter, {});
  add_pair(forms, experts_name(0) + ".2.up_proj", kFormRank, 24, 20, draw);
  CHECK_ERROR(Status::kAdapterMismatch, ({"experts.base_layer.lora_A.weight", "experts.2.up_proj.lora_A.weight"}),
              load(lora_config(kFormRank), forms, model));
}

TEST_CASE("values that are not finite are refused, wherever they are") {
  const ModelConfig model = tiny_moe();
  for (const char* dtype : {"F32", "F16", "BF16"}) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      for (const char* part : {".lora_A.weight", ".lora_B.weight"}) {
        for (const size_t at : {size_t{0}, size_t{50}, size_t{71}}) {
          Draw draw(8);
          std::vector<float> a = draw.floats(72);
          std::vector<float> b = draw.floats(96);
          (part[6] == 'A' ? a : b)[at] = bad;
          SafetensorsWriter writer;
          writer.add(kQ0 + ".lora_A.weight", {3, 24}, a, dtype);
          writer.add(kQ0 + ".lora_B.weight", {32, 3}, b, dtype);
          CHECK_ERROR(Status::kAdapterMismatch, ({part, "NaN"}), load(lora_config(), writer, model));
        }
      }
    }
  }
  Draw draw(9);
  Json config = lora_config();
  config["lora_bias"] = true;
  SafetensorsWriter bias = one_pair(kQ0, {});
  std::vector<float> values = draw.floats(32);
  values[31] = NAN;
  bias.add(kQ0 + ".lora_B.bias", {32}, values);
  CHECK_ERROR(Status::kAdapterMismatch, ({"lora_B.bias", "NaN"}), load(config, bias, model));
  // Finite in F32, infinite once it is rounded to bf16.
  SafetensorsWriter large;
  std::vector<float> a = draw.floats(72);
  a[3] = 3.4028235e38f;
  large.add(kQ0 + ".lora_A.weight", {3, 24}, a);
  large.add(kQ0 + ".lora_B.weight", {32, 3}, draw.floats(96));
  AdapterLoadOptions bf16;
  bf16.compute = Compute::kBf16;
  CHECK_ERROR(Status::kAdapterMismatch, ({"lora_A.weight"}), load(lora_config(), large, model, bf16));
  CHECK(load(lora_config(), large, model)->num_tensors == 2);
  SafetensorsWriter large_b;
  std::vector<float> b = draw.floats(96);
  b[95] = -3.4028235e38f;
  large_b.add(kQ0 + ".lora_A.weight", {3, 24}, draw.floats(72));
  large_b.add(kQ0 + ".lora_B.weight", {32, 3}, b);
  CHECK_ERROR(Status::kAdapterMismatch, ({"lora_B.weight"}), load(lora_config(), large_b, model, bf16));
}

TEST_CASE("dtypes that adapters do not use are refused by name") {
  SafetensorsBuilder builder;
  builder.add(kQ0 + ".lora_A.weight", "F64", {3, 24}, std::string(3 * 24 * 8, '\0'));
  builder.add(kQ0 + ".lora_B.weight", "F32", {32, 3}, std::string(32 * 3 * 4, '\0'));
  const std::string text = builder.text();
  CHECK_ERROR(Status::kUnsupported, ({"lora_A.weight", "F64"}),
              load_adapter_memory(lora_config().dump(), reinterpret_cast<const std::byte*>(text.data()), text.size(),
                                  tiny_moe(), {}));
}

TEST_CASE("3-D expert adapters that do not fit are refused with both shapes") {
  const ModelConfig model = tiny_moe();
  const Truth truth = draw_truth(model, {true, false}, 10);
  const auto experts = truth.layers[0];
  SafetensorsWriter inner_only;
  write_wrapper(inner_only, experts_name(0) + ".base_layer", experts, gate_up_shared_a, {});
  CHECK_ERROR(Status::kAdapterMismatch, ({"base_layer.lora_A.weight", "second"}),
              load(lora_config(kFormRank), inner_only, model));

  SafetensorsWriter two;
  write_wrapper(two, experts_name(0) + ".base_layer", experts, gate_up_shared_a, {});
  write_wrapper(two, experts_name(0), experts, down_parameter, {});
  CHECK_ERROR(Status::kAdapterMismatch, ({"base_layer.lora_A.weight", "rank 3", "rank 5"}),
              load(lora_config(5), two, model));
  Json pattern = lora_config(kFormRank);
  pattern["rank_pattern"]["gate_up_proj"] = 6;
  CHECK_ERROR(Status::kAdapterMismatch, ({"base_layer.lora_A.weight", "rank 3", "rank 6"}), load(pattern, two, model));
  Json bias = lora_config(kFormRank);
  bias["lora_bias"] = true;
  CHECK_ERROR(Status::kUnsupported, ({"lora_bias"}), load(bias, two, model));

  ModelConfig other = model;
  other.moe_intermediate_size = 16;
  CHECK_ERROR(Status::kAdapterMismatch, ({"base_layer.lora_A.weight", "[12, 24]", "[40, 12]"}),
              load(lora_config(kFormRank), two, other));
  other = model;
  other.num_experts = 5;
  CHECK_ERROR(Status::kAdapterMismatch, ({"base_layer.lora_A.weight", "5 experts"}),
              load(lora_config(kFormRank), two, other));

  Draw draw(11);
  SafetensorsWriter neither;
  neither.add(experts_name(0) + ".lora_A.weight", {12, 7}, draw.floats(84));
  neither.add(experts_name(0) + ".lora_B.weight", {9, 12}, draw.floats(108));
  CHECK_ERROR(Status::kAdapterMismatch, ({"[12, 7]", "[9, 12]", "gate_up_proj", "down_proj"}),
              load(lora_config(kFormRank), neither, model));

  SafetensorsWriter stacked;
  stacked.add(experts_name(0) + ".w1.lora_A.weight", {2, 3, 24}, draw.floats(2 * 72));
  stacked.add(experts_name(0) + ".w1.lora_B.weight", {4, 20, 3}, draw.floats(240));
  CHECK_ERROR(Status::kAdapterMismatch, ({"w1.lora_A.weight", "[2, 3, 24]", "[4, 20, 3]"}),
              load(lora_config(3), stacked, model));
  SafetensorsWriter flat;
  flat.add(experts_name(0) + ".w1.lora_A.weight", {3, 24}, draw.floats(72));
  flat.add(experts_name(0) + ".w1.lora_B.weight", {20, 3}, draw.floats(60));
  CHECK_ERROR(Status::kAdapterMismatch, ({"w1.lora_A.weight", "[3, 24]"}), load(lora_config(3), flat, model));
}

TEST_CASE("folders without the two files say what is missing") {
  const ModelConfig model = tiny_moe();
  const TempDir dir;
  CHECK_ERROR(Status::kIo, ({"adapter_config.json"}), load_adapter_dir(dir.path(), model, {}));
  write_file(dir.file("adapter_config.json"), lora_config().dump());
  CHECK_ERROR(Status::kIo, ({"adapter_model.safetensors"}), load_adapter_dir(dir.path(), model, {}));
  write_file(dir.file("adapter_model.bin"), "x");
  CHECK_ERROR(Status::kUnsupported, ({"adapter_model.bin", "pickle"}), load_adapter_dir(dir.path(), model, {}));
  write_file(dir.file("adapter_model.safetensors"), "");
  CHECK_ERROR(Status::kCorrupt, ({"adapter_model.safetensors"}), load_adapter_dir(dir.path(), model, {}));
  const std::string text = one_pair(kQ0, {}).text();
  write_file(dir.file("adapter_model.safetensors"), text.substr(0, text.size() - 1));
  CHECK_ERROR(Status::kCorrupt, ({"adapter_model.safetensors"}), load_adapter_dir(dir.path(), model, {}));
  write_file(dir.file("adapter_model.safetensors"), text);
  CHECK(load_adapter_dir(dir.path(), model, {})->num_tensors == 2);
}

TEST_CASE("names that are not UTF-8 are refused") {
  SafetensorsBuilder builder;
  builder.add("model.layers.0.self_attn.\xff_proj.lora_A.weight", "F32", {3, 24}, std::string(288, '\0'));
  const std::string text = builder.text();
  CHECK_ERROR(Status::kCorrupt, ({"adapter_model.safetensors"}),
              load_adapter_memory(lora_config().dump(), reinterpret_cast<const std::byte*>(text.data()), text.size(),
                                  tiny_moe(), {}));
}

TEST_CASE("every truncation of an adapter file is refused") {
  const std::string text = one_pair(kQ0, {1, 24, 32}).text();
  for (size_t bytes = 0; bytes < text.size(); ++bytes) {
    const std::string mismatch = error_mismatch(Status::kCorrupt, {"adapter_model.safetensors"}, [&] {
      load_adapter_memory(lora_config(1).dump(), reinterpret_cast<const std::byte*>(text.data()), bytes, tiny_moe(),
                          {});
    });
    REQUIRE(mismatch == "");
  }
}

}  // namespace moelora::test
