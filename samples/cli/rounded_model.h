// SPDX-License-Identifier: Apache-2.0
// A copy of a model whose F16 and F32 matrices have values of bf16, as a GPU keeps them. Their types stay, so that the
// CPU engine opens it as it opens the model itself. Only models with such matrices are copied, so a large one in bf16
// never is.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace moelora_cli {

class RoundedModel {
 public:
  // Null where no matrix changes: many a model in F16 was made from one in bf16.
  static std::unique_ptr<RoundedModel> of(const std::string& model_dir);
  RoundedModel(const RoundedModel&) = delete;
  RoundedModel& operator=(const RoundedModel&) = delete;
  ~RoundedModel();  // removes the copy
  [[nodiscard]] const std::filesystem::path& dir() const { return dir_; }

 private:
  RoundedModel();
  bool fill(const std::string& model_dir);

  std::filesystem::path dir_;
};

}  // namespace moelora_cli
