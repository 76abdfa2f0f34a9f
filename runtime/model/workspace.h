// SPDX-License-Identifier: Apache-2.0
// Scratch of one forward pass, taken once at open for the largest step. Every buffer is named after what it holds;
// shapes in the comments with T = rows of a step, P = T * top-k pairs, S = rows whose logits are wanted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/tensor.h"
#include "kernels/moe/moe_sort.h"
#include "runtime/model/config.h"

namespace moelora {

struct WorkspaceLimits {
  int32_t num_rows_max = 0;        // T
  int32_t num_logit_rows_max = 0;  // S
  int32_t lora_rank_max = 0;
};

class Workspace {
 public:
  // Throws Error{kDeviceNomem} with the size.
  Workspace(const ModelConfig& config, const WorkspaceLimits& limits);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  Rows hidden;                      // [T, H] residual stream
  Rows normed;                      // [T, H]
  Rows q, k, v;                     // [T, Nq*D] [T, Nkv*D] [T, Nkv*D]
  Rows attention;                   // [T, Nq*D]
  Rows router_logits;               // [T, E]
  int32_t* expert_ids = nullptr;    // [T, K]
  float* expert_weights = nullptr;  // [T, K]
  MoeOrder order;
  Rows expert_act;   // [P, I]
  Rows expert_out;   // [P, H]
  Rows gate, up;     // [T, widest dense or shared MLP]
  Rows shared;       // [T, H]
  Rows shared_gate;  // [T, 1]
  Rows logits_in;    // [S, H]
  Rows logits;       // [S, V]
  std::byte* scratch = nullptr;
  size_t scratch_bytes = 0;

  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  template <class Take>
  void lay_out(const ModelConfig& config, const WorkspaceLimits& limits, const Take& take);
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace moelora
