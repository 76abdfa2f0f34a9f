// SPDX-License-Identifier: Apache-2.0
// A reference case folder: expected.json (prompts, greedy tokens, margins) and expected.safetensors (logits that
// transformers and PEFT computed), adapters/NAME and model/. Read by `moelora verify`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moelora_cli {

struct Case {
  std::string adapter;  // empty: the base model
  std::string name;     // key of its logits, unique in the folder
  std::vector<int32_t> prompt;
  int32_t first_position = 0;  // of the kept logits
  std::vector<int32_t> greedy;
  std::vector<double> greedy_margin;
  int64_t rows = 0, vocab = 0;
  std::vector<float> logits;  // [rows, vocab]
};

struct ReferenceCase {
  std::string dir;
  std::vector<Case> cases;
  [[nodiscard]] std::string model_dir() const { return dir + "/model"; }
  [[nodiscard]] std::string adapter_dir(const std::string& name) const { return dir + "/adapters/" + name; }
};

ReferenceCase read_reference_case(const std::string& dir);

// Header and float32 tensors of a safetensors file, for the tools of this folder.
struct TensorEntry {
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes, from data_begin
};
struct TensorFile {
  std::string path;
  uint64_t data_begin = 0;
  std::map<std::string, TensorEntry> tensors;
};
TensorFile read_tensor_header(const std::string& path);

}  // namespace moelora_cli
