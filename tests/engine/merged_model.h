// SPDX-License-Identifier: Apache-2.0
// A small checkpoint of random fp32 weights whose adapters can be merged by hand: the same model with W + scale * B A
// in place of W is the oracle for what no reference case holds. Plain loops in double; shares nothing with the loader.
#pragma once

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "runtime/io/json.h"
#include "tests/engine/engine_support.h"
#include "tests/support/safetensors_writer.h"

namespace moelora::test {

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> values;
  [[nodiscard]] float at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * cols + c)]; }
};

inline Matrix random_matrix(std::mt19937& random, int64_t rows, int64_t cols, double deviation) {
  std::normal_distribution<double> draw(0.0, deviation);
  Matrix matrix{rows, cols, std::vector<float>(static_cast<size_t>(rows * cols))};
  for (float& value : matrix.values) {
    value = static_cast<float>(draw(random));
  }
  return matrix;
}

// scale * B A of B [out, r] and A [r, in].
inline std::vector<double> product(const Matrix& b, const Matrix& a, double scale) {
  std::vector<double> delta(static_cast<size_t>(b.rows * a.cols), 0.0);
  for (int64_t n = 0; n < b.rows; ++n) {
    for (int64_t k = 0; k < a.cols; ++k) {
      for (int64_t r = 0; r < a.rows; ++r) {
        delta[static_cast<size_t>(n * a.cols + k)] +=
            scale * static_cast<double>(b.at(n, r)) * static_cast<double>(a.at(r, k));
      }
    }
  }
  return delta;
}

// Qwen2-MoE: attention biases, router, routed experts, shared expert and its gate.
class MergedModel {
 public:
  static constexpr int64_t kHidden = 64, kExperts = 8, kLayers = 2;

  MergedModel(int64_t expert_width, unsigned seed) : width_(expert_width), random_(seed) {
    config_ = read_json(case_dir("qwen2_moe") + "/model/config.json");
    config_["moe_intermediate_size"] = expert_width;
    config_["dtype"] = "float32";
    add("model.embed_tokens.weight", 320, kHidden, 1.0);
    add("lm_head.weight", 320, kHidden, 0.2);
    add("model.norm.weight", 0, kHidden, 0.3);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      add_layer("model.layers." + std::to_string(layer) + ".");
    }
  }

  [[nodiscard]] int64_t width() const { return width_; }
  Json& config() { return config_; }
  std::mt19937& random() { return random_; }
  void add_delta(const std::string& name, const std::vector<double>& delta, size_t first = 0) {
    Matrix& weight = tensors_.at(name);
    REQUIRE(first + weight.values.size() <= delta.size());
    for (size_t i = 0; i < weight.values.size(); ++i) {
      weight.values[i] = static_cast<float>(static_cast<double>(weight.values[i]) + delta[first + i]);
    }
  }
  [[nodiscard]] std::shared_ptr<Engine> open() const {
    const TempDir dir;
    SafetensorsWriter writer;
    for (const auto& [name, matrix] : tensors_) {
      const auto shape =
          matrix.rows == 0 ? std::vector<int64_t>{matrix.cols} : std::vector<int64_t>{matrix.rows, matrix.cols};
      writer.add(name, shape, matrix.values);
    }
    write_file(dir.file("config.json"), config_.dump());
    write_file(dir.file("model.safetensors"), writer.text());
    EngineOptions options;
    options.num_threads = 2;
    return Engine::create(options, dir.path());
  }

 private:
  void add(const std::string& name, int64_t rows, int64_t cols, double deviation) {
    Matrix matrix = random_matrix(random_, rows == 0 ? 1 : rows, cols, deviation);
    if (rows == 0) {  // a norm: around 1
      for (float& value : matrix.values) {
        value += 1.0f;
      }
      matrix.rows = 0;
    }
    tensors_[name] = std::move(matrix);
  }
  void add_bias(const std::string& name, int64_t cols) {
    tensors_[name] = random_matrix(random_, 1, cols, 0.1);
    tensors_[name].rows = 0;
  }
  void add_layer(const std::string& prefix) {
    add(prefix + "input_layernorm.weight", 0, kHidden, 0.2);
    add(prefix + "post_attention_layernorm.weight", 0, kHidden, 0.2);
    for (const auto& [name, rows] : std::map<std::string, int64_t>{{"q", 64}, {"k", 32}, {"v", 32}}) {
      add(prefix + "self_attn." + name + "_proj.weight", rows, kHidden, 0.12);
      add_bias(prefix + "self_attn." + name + "_proj.bias", rows);
    }
    add(prefix + "self_attn.o_proj.weight", kHidden, 64, 0.12);
    add(prefix + "mlp.gate.weight", kExperts, kHidden, 0.2);
    add(prefix + "mlp.shared_expert_gate.weight", 1, kHidden, 0.2);
    const auto mlp = [&](const std::string& name, int64_t width) {
      add(prefix + name + ".gate_proj.weight", width, kHidden, 0.12);
      add(prefix + name + ".up_proj.weight", width, kHidden, 0.12);
      add(prefix + name + ".down_proj.weight", kHidden, width, 0.12);
    };
    mlp("mlp.shared_expert", 96);
    for (int64_t e = 0; e < kExperts; ++e) {
      mlp("mlp.experts." + std::to_string(e), width_);
    }
  }

  int64_t width_;
  std::mt19937 random_;
  Json config_;
  std::map<std::string, Matrix> tensors_;
};

// An adapter under construction and the deltas that it stands for.
struct AdapterFiles {
  Json config =
      Json::parse(R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "peft_version": "0.21.0", "target_modules": []})");
  SafetensorsWriter weights;

  // 2-D pair of a module; the delta goes into `model`.
  void add_module(MergedModel& model, const std::string& module, int64_t out, int64_t in, int64_t rank, double scale) {
    const Matrix a = random_matrix(model.random(), rank, in, 0.3);
    const Matrix b = random_matrix(model.random(), out, rank, 0.3);
    weights.add("base_model.model." + module + ".lora_A.weight", {rank, in}, a.values);
    weights.add("base_model.model." + module + ".lora_B.weight", {out, rank}, b.values);
    model.add_delta(module + ".weight", product(b, a, scale));
  }
  [[nodiscard]] std::shared_ptr<Adapter> load(Engine& engine) const {
    const std::string text = weights.text();
    const auto image = load_adapter_memory(config.dump(), reinterpret_cast<const std::byte*>(text.data()), text.size(),
                                           engine.info().config, engine.adapter_load_options());
    return engine.register_adapter("made", image, 1.0f, false);
  }
};

}  // namespace moelora::test
