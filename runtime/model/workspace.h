// SPDX-License-Identifier: Apache-2.0
// Scratch of one forward pass, taken once at open for the largest step. Every buffer is named after what it holds;
// shapes in the comments with T = rows of a step, P = T * top-k pairs, S = rows whose logits are wanted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/base/tensor.h"
#include "kernels/moe/moe_sort.h"
#include "runtime/memory/device_memory.h"
#include "runtime/model/config.h"

namespace moelora {

struct WorkspaceLimits {
  int32_t num_rows_max = 0;        // T
  int32_t num_logit_rows_max = 0;  // S
  int32_t lora_rank_max = 0;
};

class Workspace {
 public:
  // Throws Error{kDeviceNomem} with the size. `device` must outlive the workspace.
  Workspace(const ModelConfig& config, const WorkspaceLimits& limits, Device& device);
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  static size_t bytes_needed(const ModelConfig& config, const WorkspaceLimits& limits, Dtype activation);

  // a: in the device's activation dtype; the rest fp32.
  Rows hidden;                      // [T, H] residual stream
  Rows normed;                      // [T, H] a
  Rows q, k, v;                     // [T, Nq*D] [T, Nkv*D] [T, Nkv*D]
  Rows attention;                   // [T, Nq*D] a
  Rows router_logits;               // [T, E]
  int32_t* expert_ids = nullptr;    // [T, K]
  float* expert_weights = nullptr;  // [T, K]
  MoeOrder order;
  Rows expert_act;   // [P, I] a
  Rows expert_out;   // [P, H] a
  Rows gate, up;     // [T, widest dense or shared MLP]
  Rows mlp_act;      // [T, the same] a; the memory of gate where types agree
  Rows shared;       // [T, H]
  Rows shared_gate;  // [T, 1]
  Rows logits_in;    // [S, H] a
  Rows logits;       // [S, V]
  std::byte* scratch = nullptr;
  size_t scratch_bytes = 0;

  [[nodiscard]] size_t bytes() const { return memory_.bytes(); }
  // What moe_sort has counted so far, as of the last pull of it.
  [[nodiscard]] const MirrorMemory& totals() const { return *totals_; }

 private:
  Workspace() = default;
  template <class Take>
  void lay_out(const ModelConfig& config, const WorkspaceLimits& limits, Dtype activation, const Take& take);
  DeviceMemory memory_;
  std::unique_ptr<MirrorMemory> totals_;  // uint32 [2]
};

}  // namespace moelora
