// SPDX-License-Identifier: Apache-2.0
// Random weights: sizes as config.json implies, the promised spread, and values that depend on nothing but the seed.
#include <cmath>

#include "kernels/base/error.h"
#include "runtime/model/weights.h"
#include "tests/model/weight_views.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/model_files.h"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("weights: random values have the promised size and spread") {
  for (const char* name : {"qwen3_moe", "qwen2_moe", "qwen3_moe_mixed", "qwen3_moe_f32", "mixtral_f16_window"}) {
    INFO(name);
    const ModelConfig config = load_model_config(case_model(name));
    const auto weights = Weights::random(config, 7);
    CHECK(weights->bytes() == weight_bytes_of_config(config));
    REQUIRE(weights->areas().size() == 1);
    CHECK(weights->areas()[0].bytes >= weights->bytes());
    const auto stored = Weights::load(case_model(name), config);
    for (size_t i = 0; i < views(*stored).size(); ++i) {
      CHECK(views(*stored)[i]->rows == views(*weights)[i]->rows);
      CHECK(views(*stored)[i]->cols == views(*weights)[i]->cols);
    }
    double sum = 0.0;
    double square = 0.0;
    const Weight& q = weights->layers[1].q;
    CHECK(q.dtype == config.dtype);
    for (size_t i = 0; i < 64 * 64; ++i) {
      const double value = static_cast<double>(at(q, i));
      sum += value;
      square += value * value;
    }
    CHECK(std::abs(std::sqrt(square / 4096) - 1.0 / 8.0) < 0.01);  // 1 / sqrt(64)
    CHECK(std::abs(sum / 4096) < 0.01);
    for (size_t i = 0; i < 64; ++i) {
      const float value = at(weights->layers[0].input_norm, i);
      CHECK(value >= 1.0f);
      CHECK(value < 1.125f);
    }
  }
}

TEST_CASE("weights: random values depend on the seed and the tensor alone") {
  const ModelConfig config = load_model_config(case_model("qwen3_moe"));
  const auto one = Weights::random(config, 1);
  CHECK(same_weights(*one, *Weights::random(config, 1), 8));
  CHECK_FALSE(same_weights(*one, *Weights::random(config, 2), 8));
  CHECK(bytes_of(one->layers[0].q) != bytes_of(one->layers[1].q));
  CHECK(bytes_of(one->layers[0].k) != bytes_of(one->layers[0].v));
  const auto experts = expert_views(*one, 8);
  REQUIRE(experts.size() == 48);
  for (size_t i = 1; i < experts.size(); ++i) {
    CHECK(bytes_of(experts[i]) != bytes_of(experts[0]));
  }
  const ModelConfig tied = load_model_config(case_model("qwen3"));
  const auto with_head = Weights::random(tied, 1);
  CHECK(with_head->lm_head.data == with_head->embedding.data);
}

TEST_CASE("weights: random weights that no memory can hold are an error") {
  ModelConfig config = load_model_config(case_model("qwen3_moe"));
  config.num_experts = 4096;
  config.hidden_size = config.moe_intermediate_size = 1 << 24;
  CHECK_ERROR(Status::kNomem, ({"random weights", "bytes"}), Weights::random(config, 1));
}
