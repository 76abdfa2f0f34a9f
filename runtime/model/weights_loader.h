// SPDX-License-Identifier: Apache-2.0
// From a checkpoint's tensors to Weights, each tensor of the plan once. Private to weights*.cc.
#pragma once

#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "kernels/base/stream.h"
#include "runtime/model/tensor_plan.h"
#include "runtime/model/weights_storage.h"

namespace moelora {

class WeightsLoader {
 public:
  WeightsLoader(const std::string& dir, const ModelConfig& config, Weights::Storage& storage)
      : dir_(dir), config_(config), storage_(storage), checkpoint_(*storage.checkpoint) {}

  // Throws Error naming tensors.
  void load(Weights& weights);
  [[nodiscard]] uint64_t bytes() const { return bytes_; }  // stored bytes of all tensors used

 private:
  // The stored tensor after its checks; null when it is missing, which is reported for all tensors together.
  const StoredTensor* take(const std::string& name, const std::vector<int64_t>& shape, Dtype* dtype);
  void check_shape(const StoredTensor& stored, const std::vector<int64_t>& shape) const;
  void use(const StoredTensor& stored);
  [[noreturn]] void refuse_both(const std::string& one, const std::string& other) const;
  [[nodiscard]] bool may_be_ignored(const std::string& name) const;
  void refuse_unexpected() const;

  void single(const PlannedTensor& planned);
  void experts(int32_t layer, LayerWeights& weights);
  void per_expert(int32_t layer, const PlannedExperts& planned);
  // `stride` and `offset` count elements: expert e's matrix begins at e * stride + offset.
  void fused(const std::string& name, const std::vector<int64_t>& shape, size_t stride, size_t offset,
             const PlannedExperts& planned);

  // In weights_gpt_oss.cc.
  void refuse_repacked() const;
  void gpt_oss_experts(int32_t layer, LayerWeights& weights);
  void mxfp4_experts(int32_t layer, LayerWeights& weights);
  std::vector<Mxfp4Rows> mxfp4_matrices(const std::string& name, int32_t rows, int32_t cols);
  const StoredTensor* take_mxfp4(const std::string& name, const std::vector<int64_t>& shape, bool scales);
  void transposed_experts(int32_t layer, LayerWeights& weights);
  void run_tasks();

  const std::string& dir_;
  const ModelConfig& config_;
  Weights::Storage& storage_;
  const Checkpoint& checkpoint_;
  std::unordered_set<std::string> used_;
  std::vector<std::string> missing_;
  // Work on values, done on all cores after everything else was checked.
  std::vector<std::function<void(Stream&)>> tasks_;
  uint64_t bytes_ = 0;
};

}  // namespace moelora
