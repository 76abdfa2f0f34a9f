// SPDX-License-Identifier: Apache-2.0
// All matrices of Weights as lists, so that two sets of weights can be compared byte for byte. Used by the tests of
// loaded and of random weights.
#pragma once

#include <string>
#include <vector>

#include "runtime/model/weights.h"

namespace moelora::test {

inline float at(const Weight& weight, size_t index) {
  return load_element(weight.data, weight.dtype, index);
}

inline std::string bytes_of(const Weight& weight) {
  if (weight.empty()) {
    return "";
  }
  return {static_cast<const char*>(weight.data),
          static_cast<size_t>(weight.rows) * static_cast<size_t>(weight.cols) * dtype_bytes(weight.dtype)};
}

inline std::vector<const Weight*> views(const Weights& weights) {
  std::vector<const Weight*> all = {&weights.embedding, &weights.final_norm, &weights.lm_head};
  for (const LayerWeights& l : weights.layers) {
    all.insert(all.end(), {&l.input_norm,
                           &l.q,
                           &l.k,
                           &l.v,
                           &l.o,
                           &l.q_bias,
                           &l.k_bias,
                           &l.v_bias,
                           &l.o_bias,
                           &l.q_norm,
                           &l.k_norm,
                           &l.post_norm,
                           &l.gate,
                           &l.up,
                           &l.down,
                           &l.gate_bias,
                           &l.up_bias,
                           &l.down_bias,
                           &l.router,
                           &l.router_bias,
                           &l.stored_sinks,
                           &l.stored_gate_up_bias,
                           &l.stored_down_bias,
                           &l.shared_gate,
                           &l.shared_up,
                           &l.shared_down,
                           &l.shared_expert_gate});
  }
  return all;
}

inline std::vector<Weight> expert_views(const Weights& weights, int32_t num_experts) {
  std::vector<Weight> all;
  for (const LayerWeights& l : weights.layers) {
    for (const ExpertWeights* e : {&l.expert_gate, &l.expert_up, &l.expert_down}) {
      for (int32_t i = 0; e->data != nullptr && i < num_experts; ++i) {
        all.push_back({e->data[i], e->dtype, e->rows, e->cols});
      }
    }
  }
  return all;
}

// Every matrix of both, byte for byte.
inline bool same_weights(const Weights& a, const Weights& b, int32_t num_experts) {
  const auto one = views(a);
  const auto two = views(b);
  if (one.size() != two.size()) {
    return false;
  }
  for (size_t i = 0; i < one.size(); ++i) {
    if (one[i]->rows != two[i]->rows || one[i]->cols != two[i]->cols || bytes_of(*one[i]) != bytes_of(*two[i])) {
      return false;
    }
  }
  const auto e1 = expert_views(a, num_experts);
  const auto e2 = expert_views(b, num_experts);
  if (e1.size() != e2.size()) {
    return false;
  }
  for (size_t i = 0; i < e1.size(); ++i) {
    if (e1[i].rows != e2[i].rows || e1[i].cols != e2[i].cols || bytes_of(e1[i]) != bytes_of(e2[i])) {
      return false;
    }
  }
  return true;
}

}  // namespace moelora::test
