// SPDX-License-Identifier: Apache-2.0
// One set of expert deltas written in every stored form: the images must hold the same deltas, whatever the family and
// also where the parameters are square (2I = H, I = H), so that no shape check can tell orientations apart.
#include "tests/adapter/expert_forms.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/unpacked_image.h"

namespace moelora::test {
namespace {

Json config_of(const std::string& peft_version) {
  Json config = lora_config(kFormRank, kFormAlpha);
  config["peft_version"] = peft_version;
  return config;
}

void check_truth(const AdapterImage& image, const Truth& truth) {
  const UnpackedImage unpacked(image, truth.model, 2, 11);
  for (int32_t layer = 0; layer < truth.model.num_layers; ++layer) {
    for (int32_t e = 0; e < truth.model.num_experts; ++e) {
      for (int32_t m = 0; m < 3; ++m) {
        const Delta want = true_delta(truth, layer, e, m);
        INFO("layer " << layer << " expert " << e << " module " << m);
        CHECK(delta_distance(unpacked.expert(layer, e, static_cast<ExpertModule>(m), want.in, want.out), want) < 1e-6);
      }
    }
  }
  CHECK(image.modules == 0x70000u);
  CHECK(image.num_experts == truth.model.num_experts);
  CHECK(image.num_layers == truth.model.num_layers);
}

struct Sizes {
  int32_t hidden;
  int32_t intermediate;
};
constexpr Sizes kAllSizes[] = {{72, 20}, {40, 20}, {24, 24}};  // all different; 2I = H; I = H
constexpr Family kFamilies[] = {Family::kQwen3Moe, Family::kQwen2Moe, Family::kMixtral, Family::kOlmoe,
                                Family::kGptOss};

}  // namespace

TEST_CASE("all forms of an expert adapter with a common A give the same deltas") {
  for (const Family family : kFamilies) {
    for (const Sizes& sizes : kAllSizes) {
      INFO("family " << static_cast<int>(family) << " H " << sizes.hidden << " I " << sizes.intermediate);
      const Truth truth = draw_truth(tiny_moe(family, sizes.hidden, sizes.intermediate), {true, false}, 5);
      check_truth(*load(config_of("0.21.0"), per_expert_file(truth), truth.model), truth);
      check_truth(*load(config_of("0.21.0"), wrapper_file(truth, gate_up_shared_a, {false, false}), truth.model),
                  truth);
      check_truth(*load(config_of("0.18.1"), wrapper_file(truth, gate_up_shared_a, {true, false}), truth.model), truth);
      // Files that were re-saved carry any version: sizes come first.
      check_truth(*load(config_of("0.21.0"), wrapper_file(truth, gate_up_shared_a, {true, false}), truth.model), truth);
      check_truth(*load(config_of("0.18.1"), wrapper_file(truth, gate_up_shared_a, {false, false}), truth.model),
                  truth);
      check_truth(*load(config_of("0.21.0"), stacked_gate_up_file(truth, false), truth.model), truth);
      check_truth(*load(config_of("0.21.0"), w123_file(truth, false), truth.model), truth);
      Json grouped = config_of("0.21.0");
      grouped["lora_B_layout"] = "grouped_by_expert";
      check_truth(*load(grouped, wrapper_file(truth, gate_up_shared_a, {false, true}), truth.model), truth);
      check_truth(*load(grouped, wrapper_file(truth, gate_up_shared_a, {true, true}), truth.model), truth);
    }
  }
}

TEST_CASE("forms with an A for gate and one for up give the same deltas") {
  for (const Family family : kFamilies) {
    for (const Sizes& sizes : kAllSizes) {
      INFO("family " << static_cast<int>(family) << " H " << sizes.hidden << " I " << sizes.intermediate);
      const Truth truth = draw_truth(tiny_moe(family, sizes.hidden, sizes.intermediate), {false, false}, 6);
      check_truth(*load(config_of("0.21.0"), per_expert_file(truth), truth.model), truth);
      check_truth(*load(config_of("0.21.0"), stacked_gate_up_file(truth, true), truth.model), truth);
      check_truth(*load(config_of("0.21.0"), w123_file(truth, false), truth.model), truth);
      Json fused = config_of("0.21.0");
      fused["rank_pattern"][".*\\.gate_up_proj"] = 2 * kFormRank;
      fused["alpha_pattern"][".*\\.gate_up_proj"] = 2 * kFormAlpha;
      check_truth(*load(fused, wrapper_file(truth, gate_up_fused, {false, false}), truth.model), truth);
      check_truth(*load(fused, wrapper_file(truth, gate_up_fused, {true, false}), truth.model), truth);
      // Read with the wrong order of B's columns, the same file gives something else.
      AdapterLoadOptions wrong;
      wrong.b_layout = ExpertBLayout::kGroupedByExpert;
      const auto image = load(fused, wrapper_file(truth, gate_up_fused, {false, false}), truth.model, wrong);
      const Delta want = true_delta(truth, 0, 1, 2);
      CHECK(delta_distance(
                UnpackedImage(*image, truth.model, 2, 3).expert(0, 1, ExpertModule::kDown, want.in, want.out), want) >
            0.1);
    }
  }
}

TEST_CASE("matrices shared by all experts are read once and packed once") {
  for (const Sizes& sizes : kAllSizes) {
    const Truth truth = draw_truth(tiny_moe(Family::kQwen3Moe, sizes.hidden, sizes.intermediate), {false, true}, 8);
    const auto own = load(config_of("0.21.0"), w123_file(truth, false), truth.model);
    const auto shared = load(config_of("0.21.0"), w123_file(truth, true), truth.model);
    check_truth(*own, truth);
    check_truth(*shared, truth);
    CHECK(shared->stream.size() < own->stream.size());
    const UnpackedImage unpacked(*shared, truth.model, 2, 3);
    CHECK(unpacked.table().expert(1, 1, 0, ExpertModule::kGate)->a ==
          unpacked.table().expert(1, 1, 3, ExpertModule::kGate)->a);
  }
}

TEST_CASE("gate and up of a 3-D adapter name the same A") {
  const Truth truth = draw_truth(tiny_moe(), {true, false}, 9);
  const auto image = load(config_of("0.21.0"), wrapper_file(truth, gate_up_shared_a, {false, false}), truth.model);
  const UnpackedImage unpacked(*image, truth.model, 2, 3);
  const LoraRecord* gate = unpacked.table().expert(1, 0, 2, ExpertModule::kGate);
  const LoraRecord* up = unpacked.table().expert(1, 0, 2, ExpertModule::kUp);
  CHECK(gate->a == up->a);
  CHECK(gate->b != up->b);
}

TEST_CASE("expert order of B is the fastest index (worked example)") {
  // E 2, r 2, c_in 3, c_out 2; the other parameter's sizes do not occur.
  ModelConfig model = tiny_moe(Family::kQwen3Moe, 2, 3);
  model.num_experts = 2;
  SafetensorsWriter writer;
  writer.add(experts_name(0) + ".lora_A.weight", {4, 3}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  writer.add(experts_name(0) + ".lora_B.weight", {2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  Json config = lora_config(2, 2);
  config["target_parameters"] = {"mlp.experts.down_proj"};
  const auto delta = [&](const AdapterLoadOptions& options, int32_t e) {
    return UnpackedImage(*load(config, writer, model, options), model, 2, 1)
        .expert(0, e, ExpertModule::kDown, 3, 2)
        .values;
  };
  CHECK(delta({}, 0) == std::vector<double>{13, 17, 21, 33, 45, 57});
  CHECK(delta({}, 1) == std::vector<double>{54, 60, 66, 122, 136, 150});
  AdapterLoadOptions grouped;
  grouped.b_layout = ExpertBLayout::kGroupedByExpert;
  CHECK(delta(grouped, 0) == std::vector<double>{9, 12, 15, 29, 40, 51});
  config["lora_B_layout"] = "grouped_by_expert";
  CHECK(delta({}, 0) == std::vector<double>{9, 12, 15, 29, 40, 51});
  AdapterLoadOptions rank_major;  // the option wins over the marker
  rank_major.b_layout = ExpertBLayout::kRankMajor;
  CHECK(delta(rank_major, 0) == std::vector<double>{13, 17, 21, 33, 45, 57});
}

TEST_CASE("an adapter of a square parameter alone follows PEFT's version or the option") {
  // 2I = H, only gate_up_proj targeted: nothing in the file tells the orientation.
  const ModelConfig model = tiny_moe(Family::kOlmoe, 40, 20);
  const Truth truth = draw_truth(model, {true, false}, 12);
  const auto file = [&](bool reversed) {
    return write_each(truth, [&](SafetensorsWriter& writer, int32_t layer) {
      write_wrapper(writer, experts_name(layer), truth.layers[static_cast<size_t>(layer)], gate_up_shared_a,
                    {reversed, false});
    });
  };
  const auto distance = [&](const std::shared_ptr<const AdapterImage>& image) {
    const Delta want = true_delta(truth, 1, 2, 1);
    return delta_distance(UnpackedImage(*image, model, 2, 3).expert(1, 2, ExpertModule::kUp, want.in, want.out), want);
  };
  const auto config = [&](const char* version) {
    Json json = lora_config(kFormRank, kFormAlpha);
    json["target_parameters"] = {"experts.gate_up_proj"};
    if (version != nullptr) {
      json["peft_version"] = version;
    }
    return json;
  };
  for (const char* version : {"0.19.1", "0.20.0@abc123", "1.0.0"}) {
    INFO(version);
    CHECK(distance(load(config(version), file(false), model)) < 1e-6);
    CHECK(distance(load(config(version), file(true), model)) > 0.1);
  }
  for (const char* version : {"0.17.0", "0.18.1", "0.19.0", "0.19.0.dev0", static_cast<const char*>(nullptr)}) {
    INFO((version == nullptr ? "no version" : version));
    CHECK(distance(load(config(version), file(true), model)) < 1e-6);
    CHECK(distance(load(config(version), file(false), model)) > 0.1);
  }
  const auto image = load(config("0.19.1"), file(false), model);
  REQUIRE(image->warnings.size() == 1);
  CHECK(image->warnings[0].find("expert_orientation") != std::string::npos);
  for (const char* version : {"main", "0.19.1.dev0"}) {
    CHECK_ERROR(Status::kAdapterMismatch, ({"expert_orientation", "lora_A.weight"}),
                load(config(version), file(false), model));
  }
  AdapterLoadOptions natural;
  natural.orientation = ExpertOrientation::kNatural;
  CHECK(distance(load(config("main"), file(false), model, natural)) < 1e-6);
  AdapterLoadOptions reversed;
  reversed.orientation = ExpertOrientation::kReversed;
  CHECK(distance(load(config("0.21.0"), file(true), model, reversed)) < 1e-6);
}

TEST_CASE("gpt-oss: a square down_proj follows its sibling, alone PEFT's version") {
  const ModelConfig model = tiny_moe(Family::kGptOss, 24, 24);
  const Truth truth = draw_truth(model, {true, false}, 14);
  const auto distance = [&](const std::shared_ptr<const AdapterImage>& image) {
    const Delta want = true_delta(truth, 1, 2, 2);
    return delta_distance(UnpackedImage(*image, model, 2, 3).expert(1, 2, ExpertModule::kDown, want.in, want.out),
                          want);
  };
  // Beside gate_up_proj the version does not matter.
  for (const bool reversed : {false, true}) {
    for (const char* version : {"0.17.0", "0.18.1", "0.19.0", "0.19.1", "0.21.0"}) {
      CHECK(distance(load(config_of(version), wrapper_file(truth, gate_up_shared_a, {reversed, false}), model)) < 1e-6);
    }
  }
  const auto alone = [&](bool reversed) {
    return write_each(truth, [&](SafetensorsWriter& writer, int32_t layer) {
      write_wrapper(writer, experts_name(layer), truth.layers[static_cast<size_t>(layer)], down_parameter,
                    {reversed, false});
    });
  };
  const auto config = [&](const std::string& version) {
    Json json = config_of(version);
    json["target_parameters"] = {"mlp.experts.down_proj"};
    if (version.empty()) {
      json.erase("peft_version");
    }
    return json;
  };
  for (const char* version : {"", "0.17.0", "0.18.1", "0.19.0", "0.19.1", "0.21.0"}) {
    INFO("peft_version '" << version << "'");
    const bool reversed = std::string(version) == "0.19.0";
    const auto image = load(config(version), alone(reversed), model);
    CHECK(distance(image) < 1e-6);
    CHECK(distance(load(config(version), alone(!reversed), model)) > 0.1);
    REQUIRE(image->warnings.size() == 1);
    const bool doubtful = std::string(version) >= "0.19";
    CHECK((image->warnings[0].find("transformers 4") != std::string::npos) == doubtful);
  }
  for (const char* version : {"main", "0.19.0.dev0", "0.19.1.dev0"}) {
    CHECK_ERROR(Status::kAdapterMismatch, ({"expert_orientation", "lora_A.weight"}),
                load(config(version), alone(false), model));
  }
  // Two layers whose gate_up_proj disagree: the square ones have no answer.
  SafetensorsWriter mixed;
  for (int32_t layer = 0; layer < 2; ++layer) {
    write_wrapper(mixed, experts_name(layer) + ".base_layer", truth.layers[static_cast<size_t>(layer)],
                  in_family_order(model, gate_up_shared_a), {layer == 1, false});
    write_wrapper(mixed, experts_name(layer), truth.layers[static_cast<size_t>(layer)], down_parameter, {false, false});
  }
  CHECK_ERROR(Status::kAdapterMismatch, ({"opposite orientations", "layers.1.mlp.experts.base_layer"}),
              load(config_of("0.21.0"), mixed, model));
}

TEST_CASE("gpt-oss: gate takes the even and up the odd outputs (worked example)") {
  ModelConfig model = tiny_moe(Family::kGptOss, 2, 2);
  model.num_experts = 1;
  SafetensorsWriter writer;
  writer.add(experts_name(0) + ".base_layer.lora_A.weight", {1, 2}, {1, 10});
  writer.add(experts_name(0) + ".base_layer.lora_B.weight", {4, 1}, {1, 2, 3, 4});
  writer.add(experts_name(0) + ".lora_A.weight", {1, 2}, {1, 0});
  writer.add(experts_name(0) + ".lora_B.weight", {2, 1}, {5, 6});
  Json config = lora_config(1, 1);
  config["peft_version"] = "0.21.0";
  config["target_parameters"] = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"};
  const UnpackedImage unpacked(*load(config, writer, model), model, 2, 1);
  CHECK(unpacked.expert(0, 0, ExpertModule::kGate, 2, 2).values == std::vector<double>{1, 10, 3, 30});
  CHECK(unpacked.expert(0, 0, ExpertModule::kUp, 2, 2).values == std::vector<double>{2, 20, 4, 40});
  CHECK(unpacked.expert(0, 0, ExpertModule::kDown, 2, 2).values == std::vector<double>{5, 0, 6, 0});
}

TEST_CASE("orientations that contradict each other or the option are refused") {
  const ModelConfig model = tiny_moe(Family::kQwen3Moe, 72, 20);
  const Truth truth = draw_truth(model, {true, false}, 13);
  SafetensorsWriter mixed;
  write_wrapper(mixed, experts_name(0) + ".base_layer", truth.layers[0], gate_up_shared_a, {true, false});
  write_wrapper(mixed, experts_name(0), truth.layers[0], down_parameter, {false, false});
  CHECK_ERROR(Status::kAdapterMismatch, ({"expert_orientation", "layers.0.mlp.experts.base_layer.lora_A", "[12, 40]"}),
              load(config_of("0.21.0"), mixed, model));
  AdapterLoadOptions reversed;
  reversed.orientation = ExpertOrientation::kReversed;
  CHECK_ERROR(Status::kAdapterMismatch, ({"expert_orientation"}),
              load(config_of("0.21.0"), wrapper_file(truth, gate_up_shared_a, {false, false}), model, reversed));
}

TEST_CASE("the shapes of two PEFT versions load to the same deltas") {
  // E 2, H 8, I 3, r 2. 0.18.1: base_layer A (4,6), B (8,4); outer A (4,8), B (3,4). 0.20.0: A (4,8), B (6,4); A (4,3),
  // B (8,4).
  ModelConfig model = tiny_moe(Family::kQwen3Moe, 8, 3);
  model.num_experts = 2;
  Draw draw(3);
  std::vector<ExpertPairs> experts(2);
  for (ExpertPairs& pairs : experts) {
    pairs.a[0] = draw_matrix(draw, 2, 8);
    pairs.b[0] = draw_matrix(draw, 3, 2);
    pairs.b[1] = draw_matrix(draw, 3, 2);
    pairs.a[2] = draw_matrix(draw, 2, 3);
    pairs.b[2] = draw_matrix(draw, 8, 2);
  }
  const auto load_as = [&](const char* version, bool reversed) {
    SafetensorsWriter writer;
    write_wrapper(writer, experts_name(0) + ".base_layer", experts, gate_up_shared_a, {reversed, false});
    write_wrapper(writer, experts_name(0), experts, down_parameter, {reversed, false});
    Json config = lora_config(2, 4);
    config["peft_version"] = version;
    return load(config, writer, model);
  };
  const auto older = load_as("0.18.1", true);
  const auto newer = load_as("0.20.0", false);
  const UnpackedImage x(*older, model, 2, 1);
  const UnpackedImage y(*newer, model, 2, 2);
  for (int32_t e = 0; e < 2; ++e) {
    CHECK(delta_distance(x.expert(0, e, ExpertModule::kGate, 8, 3), y.expert(0, e, ExpertModule::kGate, 8, 3)) == 0.0);
    CHECK(delta_distance(x.expert(0, e, ExpertModule::kUp, 8, 3), y.expert(0, e, ExpertModule::kUp, 8, 3)) == 0.0);
    CHECK(delta_distance(x.expert(0, e, ExpertModule::kDown, 3, 8), y.expert(0, e, ExpertModule::kDown, 3, 8)) == 0.0);
  }
}

}  // namespace moelora::test
