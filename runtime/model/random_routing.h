// SPDX-License-Identifier: Apache-2.0
// Who is chosen by the routers of a random model, for benchmarks: offsets on the logits of each layer's experts, in
// the place of the router's bias. What the weights themselves give is close to uniform and costs nothing.
#pragma once

#include <cstdint>
#include <vector>

namespace moelora {

enum class RoutingKind : uint8_t { kRandom, kZipf, kOne };

struct RandomRouting {
  RoutingKind kind = RoutingKind::kRandom;
  double exponent = 1.0;  // of kZipf
};

// Offsets, [num_experts] and the most popular expert first; empty for kRandom. kOne: the first `top_k` are chosen by
// every row. kZipf: a row's first choice is the expert of rank r with a probability in proportion to r^-exponent, as
// far as rows are independent; so the next ones of those left.
std::vector<float> ranked_offsets(const RandomRouting& routing, int32_t num_experts, int32_t top_k);
// The same in an order of the layer's own.
std::vector<float> layer_offsets(std::vector<float> ranked, int32_t layer, uint64_t seed);

}  // namespace moelora
