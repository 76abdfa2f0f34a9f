// SPDX-License-Identifier: Apache-2.0
// Adapters that no reference case holds, through the engine, against the same model with the deltas merged by hand.
#include "tests/engine/merged_model.h"

namespace moelora::test {
namespace {

std::vector<float> logits_of(Engine& engine, const std::shared_ptr<Adapter>& adapter) {
  Request request;
  std::mt19937 random(99);
  for (int i = 0; i < 24; ++i) {
    request.prompt.push_back(static_cast<int32_t>(random() % 320));
  }
  request.adapter = adapter;
  request.capture_from = 0;
  return test::logits_of(engine, request);
}

void check(const MergedModel& base, const MergedModel& merged, const AdapterFiles& files) {
  const auto engine = base.open();
  const auto oracle = merged.open();
  const std::vector<float> expected = logits_of(*oracle, nullptr);
  CHECK(difference(logits_of(*engine, files.load(*engine)), expected) <= 1e-4);
  CHECK(difference(logits_of(*engine, nullptr), expected) >= 1e-2);  // the adapter matters
}

std::string layer_path(int64_t layer) {
  return "model.layers." + std::to_string(layer) + ".";
}

// A ParamWrapper pair of all experts in PEFT's element order, and its deltas per expert as [out, in].
void add_parameter(AdapterFiles& files, MergedModel& model, const std::string& name, int64_t out, int64_t in,
                   bool reversed, std::vector<std::vector<double>>* deltas) {
  constexpr int64_t kRank = 4;
  constexpr double kScale = 2.0;
  const int64_t c_in = reversed ? out : in;
  const int64_t c_out = reversed ? in : out;
  const Matrix a = random_matrix(model.random(), MergedModel::kExperts * kRank, c_in, 0.3);
  const Matrix b = random_matrix(model.random(), c_out, kRank * MergedModel::kExperts, 0.3);
  files.weights.add("base_model.model." + name + ".lora_A.weight", {a.rows, a.cols}, a.values);
  files.weights.add("base_model.model." + name + ".lora_B.weight", {b.rows, b.cols}, b.values);
  for (int64_t e = 0; e < MergedModel::kExperts; ++e) {
    std::vector<double> delta(static_cast<size_t>(out * in), 0.0);
    for (int64_t n = 0; n < out; ++n) {
      for (int64_t k = 0; k < in; ++k) {
        for (int64_t r = 0; r < kRank; ++r) {
          const double left =
              reversed ? b.at(k, r * MergedModel::kExperts + e) : b.at(n, r * MergedModel::kExperts + e);
          const double right = reversed ? a.at(e * kRank + r, n) : a.at(e * kRank + r, k);
          delta[static_cast<size_t>(n * in + k)] += kScale * left * right;
        }
      }
    }
    deltas->push_back(std::move(delta));
  }
}

}  // namespace

TEST_CASE("LoRA on the router moves the choice of experts", "[engine][merge]") {
  const MergedModel base(48, 1);
  MergedModel merged = base;
  AdapterFiles files;
  for (int64_t layer = 0; layer < MergedModel::kLayers; ++layer) {
    files.add_module(merged, layer_path(layer) + "mlp.gate", MergedModel::kExperts, MergedModel::kHidden, 4, 2.0);
  }
  check(base, merged, files);
}

TEST_CASE("LoRA on shared_expert_gate, a linear with one output", "[engine][merge]") {
  const MergedModel base(48, 2);
  MergedModel merged = base;
  AdapterFiles files;
  files.add_module(merged, layer_path(0) + "mlp.shared_expert_gate", 1, MergedModel::kHidden, 4, 2.0);
  files.add_module(merged, layer_path(1) + "mlp.shared_expert_gate", 1, MergedModel::kHidden, 4, 2.0);
  check(base, merged, files);
}

TEST_CASE("gate alone, up alone, down alone", "[engine][merge]") {
  for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
    INFO(projection);
    const MergedModel base(48, 3);
    MergedModel merged = base;
    AdapterFiles files;
    const bool is_down = std::string(projection) == "down_proj";
    for (int64_t layer = 0; layer < MergedModel::kLayers; ++layer) {
      for (int64_t e = 0; e < MergedModel::kExperts; ++e) {
        files.add_module(merged, layer_path(layer) + "mlp.experts." + std::to_string(e) + "." + projection,
                         is_down ? 64 : 48, is_down ? 48 : 64, 4, 2.0);
      }
    }
    check(base, merged, files);
  }
}

TEST_CASE("some experts of one layer, each of its own rank", "[engine][merge]") {
  const MergedModel base(48, 4);
  MergedModel merged = base;
  AdapterFiles files;
  int64_t rank = 1;
  for (const int64_t e : {0, 2, 3, 6, 7}) {
    const std::string path = layer_path(1) + "mlp.experts." + std::to_string(e) + ".";
    files.config["rank_pattern"]["experts\\." + std::to_string(e) + "\\.[a-z]*_proj"] = rank;
    files.add_module(merged, path + "gate_proj", 48, 64, rank, 8.0 / static_cast<double>(rank));
    if (e != 3) {
      files.add_module(merged, path + "down_proj", 64, 48, rank, 8.0 / static_cast<double>(rank));
    }
    rank += 4;  // 1, 5, 9, 13, 17
  }
  check(base, merged, files);
}

TEST_CASE("3-D expert pairs in both orientations, also where sizes coincide", "[engine][merge]") {
  for (const int64_t width : {48, 32, 64}) {  // all sizes differ; 2I = H; I = H
    for (const bool reversed : {false, true}) {
      INFO("I = " << width << (reversed ? ", reversed" : ", natural"));
      const MergedModel base(width, 5);
      MergedModel merged = base;
      AdapterFiles files;
      files.config["target_parameters"] = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"};
      files.config["peft_version"] = reversed ? "0.18.1" : "0.21.0";
      for (int64_t layer = 0; layer < MergedModel::kLayers; ++layer) {
        const std::string path = layer_path(layer) + "mlp.experts";
        std::vector<std::vector<double>> gate_up;
        std::vector<std::vector<double>> down;
        add_parameter(files, merged, path + ".base_layer", 2 * width, 64, reversed, &gate_up);
        add_parameter(files, merged, path, 64, width, reversed, &down);
        for (size_t e = 0; e < gate_up.size(); ++e) {
          const std::string expert = path + "." + std::to_string(e) + ".";
          merged.add_delta(expert + "gate_proj.weight", gate_up[e], 0);
          merged.add_delta(expert + "up_proj.weight", gate_up[e], static_cast<size_t>(width * 64));
          merged.add_delta(expert + "down_proj.weight", down[e]);
        }
      }
      check(base, merged, files);
    }
  }
}

TEST_CASE("the older spelling of config.json alone opens the same model", "[engine][merge]") {
  const MergedModel base(48, 6);
  MergedModel older = base;
  Json& config = older.config();
  config["rope_theta"] = config["rope_parameters"]["rope_theta"];
  config["rope_scaling"] = nullptr;
  config.erase("rope_parameters");
  config["torch_dtype"] = config["dtype"];
  config.erase("dtype");
  config.erase("layer_types");
  CHECK(logits_of(*older.open(), nullptr) == logits_of(*base.open(), nullptr));
}

}  // namespace moelora::test
