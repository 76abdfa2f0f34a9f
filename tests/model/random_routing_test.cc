// SPDX-License-Identifier: Apache-2.0
// Routing of random models: what rows with independent normal logits choose, counted, against the law
// that was asked for.
#include "runtime/model/random_routing.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "runtime/model/weights.h"
#include "tests/support/catch.h"
#include "tests/support/model_files.h"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("routing: zipf gives first choices in proportion to rank^-exponent") {
  for (const int32_t num_experts : {4, 32, 128}) {
    for (const double exponent : {0.5, 1.0, 1.5}) {
      const std::vector<float> offsets = ranked_offsets({RoutingKind::kZipf, exponent}, num_experts, 4);
      // Routers of random weights give normal values of variance 1.
      constexpr int kRows = 20000;
      std::mt19937_64 random(5);
      std::normal_distribution<double> normal;
      std::vector<int> counts(offsets.size(), 0);
      for (int row = 0; row < kRows; ++row) {
        size_t best = 0;
        double best_logit = -INFINITY;
        for (size_t e = 0; e < offsets.size(); ++e) {
          const double logit = static_cast<double>(offsets[e]) + normal(random);
          best = logit > best_logit ? e : best;
          best_logit = std::max(best_logit, logit);
        }
        ++counts[best];
      }
      double sum = 0;
      for (size_t rank = 1; rank <= counts.size(); ++rank) {
        sum += std::pow(static_cast<double>(rank), -exponent);
      }
      for (size_t rank = 1; rank <= counts.size(); ++rank) {
        const double law = kRows * std::pow(static_cast<double>(rank), -exponent) / sum;
        INFO(num_experts << " experts, exponent " << exponent << ", rank " << rank);
        CHECK(std::abs(counts[rank - 1] - law) < 4.5 * std::sqrt(law) + 0.01 * law);
      }
    }
  }
}

TEST_CASE("routing: the offsets are the bias of routers with and without one of their own") {
  for (const char* name : {"qwen3_moe", "gpt_oss"}) {
    const ModelConfig config = load_model_config(case_model(name));
    const auto weights = Weights::random(config, 3);
    weights->choose_routing(config, {RoutingKind::kZipf, 1.0}, 3);
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      const Weight& bias = weights->layers[static_cast<size_t>(layer)].router_bias;
      const std::vector<float> offsets =
          layer_offsets(ranked_offsets({RoutingKind::kZipf, 1.0}, config.num_experts, config.top_k), layer, 3);
      CHECK(bias.dtype == Dtype::kF32);
      CHECK(bias.cols == config.num_experts);
      CHECK(std::equal(offsets.begin(), offsets.end(), static_cast<const float*>(bias.data)));
    }
  }
}

TEST_CASE("routing: one chooses the same experts for all rows, others in each layer") {
  const std::vector<float> ranked = ranked_offsets({RoutingKind::kOne}, 64, 4);
  const std::vector<float> first = layer_offsets(ranked, 0, 9);
  CHECK(std::count(first.begin(), first.end(), 0.0f) == 60);
  CHECK(std::count_if(first.begin(), first.end(), [](float offset) { return offset > 1000.0f; }) == 4);
  CHECK(first == layer_offsets(ranked, 0, 9));
  CHECK(first != layer_offsets(ranked, 1, 9));
  CHECK(first != layer_offsets(ranked, 0, 10));
}

TEST_CASE("routing: random leaves the weights as they are") {
  const ModelConfig config = load_model_config(case_model("qwen3_moe"));
  const auto weights = Weights::random(config, 3);
  weights->choose_routing(config, {}, 3);
  CHECK(weights->layers[0].router_bias.empty());
  CHECK(weights->layers[0].router_offsets.empty());
}
