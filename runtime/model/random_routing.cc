// SPDX-License-Identifier: Apache-2.0
// See random_routing.h.
#include "runtime/model/random_routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace moelora {
namespace {

// Far above what random weights and random adapters give, and small enough for fp32 to keep their differences.
constexpr float kChosen = 1024.0f;

// Chances that expert e is the largest of normal values of variance 1, which is what random routers give, with means
// `offsets`: the integral over x of its density at x times the chance that all others are below x.
std::vector<double> first_choice_chances(const std::vector<double>& offsets) {
  constexpr double kStep = 1.0 / 16;
  const auto [low, high] = std::minmax_element(offsets.begin(), offsets.end());
  std::vector<double> chances(offsets.size(), 0.0);
  for (double x = *low - 6.0; x < *high + 6.0; x += kStep) {
    double all_below = 0;  // log
    for (const double offset : offsets) {
      all_below += std::log(std::max(0.5 * std::erfc((offset - x) / std::sqrt(2.0)), 1e-300));
    }
    for (size_t e = 0; e < offsets.size(); ++e) {
      const double distance = x - offsets[e];
      const double below = std::log(std::max(0.5 * std::erfc(-distance / std::sqrt(2.0)), 1e-300));
      chances[e] += kStep / std::sqrt(2.0 * M_PI) * std::exp(all_below - below - distance * distance / 2);
    }
  }
  return chances;
}

// Offsets, the most popular expert first, whose first choices follow rank^-exponent.
std::vector<double> zipf_offsets(size_t num_experts, double exponent) {
  std::vector<double> law(num_experts);
  for (size_t rank = 0; rank < num_experts; ++rank) {
    law[rank] = std::pow(static_cast<double>(rank + 1), -exponent);
  }
  const double sum = std::accumulate(law.begin(), law.end(), 0.0);
  std::vector<double> offsets(num_experts, 0.0);
  constexpr int kRounds = 60;  // each takes away half of what is missing in the logarithm, more or less
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<double> chances = first_choice_chances(offsets);
    for (size_t rank = 0; rank < num_experts; ++rank) {
      offsets[rank] += 0.5 * std::log(law[rank] / sum / std::max(chances[rank], 1e-12));
    }
    const double first = offsets[0];  // only differences count
    for (double& offset : offsets) {
      offset -= first;
    }
  }
  return offsets;
}

}  // namespace

std::vector<float> ranked_offsets(const RandomRouting& routing, int32_t num_experts, int32_t top_k) {
  std::vector<float> offsets(routing.kind == RoutingKind::kRandom ? 0 : static_cast<size_t>(num_experts), 0.0f);
  if (routing.kind == RoutingKind::kOne) {
    std::fill_n(offsets.begin(), top_k, kChosen);
  }
  if (routing.kind == RoutingKind::kZipf) {
    const std::vector<double> zipf = zipf_offsets(offsets.size(), routing.exponent);
    std::transform(zipf.begin(), zipf.end(), offsets.begin(), [](double offset) { return static_cast<float>(offset); });
  }
  return offsets;
}

std::vector<float> layer_offsets(std::vector<float> ranked, int32_t layer, uint64_t seed) {
  // Fisher-Yates by hand: the draws of std::shuffle differ between libraries.
  std::mt19937_64 random(seed * 1000003u + static_cast<uint64_t>(layer));
  for (size_t i = ranked.size(); i > 1; --i) {
    std::swap(ranked[i - 1], ranked[random() % i]);
  }
  return ranked;
}

}  // namespace moelora
