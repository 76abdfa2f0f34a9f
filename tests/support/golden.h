// SPDX-License-Identifier: Apache-2.0
// Reference cases of transformers + PEFT under tests/data/cases: prompts, logits and greedy continuations.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/io/json.h"
#include "runtime/io/safetensors.h"

namespace moelora::test {

struct GoldenCase {
  std::string adapter;  // empty = base
  std::vector<int32_t> prompt;
  int32_t first_position = 0;
  std::vector<int64_t> shape;  // [positions, V]
  const float* logits = nullptr;
  std::vector<int32_t> greedy;
  std::vector<double> greedy_margin;
};

struct GoldenFolder {
  std::string dir;
  std::unique_ptr<SafetensorsFile> file;
  std::vector<GoldenCase> cases;
};

inline std::string case_dir(const std::string& name) {
  return std::string(MOELORA_SOURCE_DIR) + "/tests/data/cases/" + name;
}

inline GoldenFolder load_golden(const std::string& name) {
  GoldenFolder folder;
  folder.dir = case_dir(name);
  folder.file = SafetensorsFile::open(folder.dir + "/expected.safetensors");
  const Json json = read_json(folder.dir + "/expected.json");
  for (const Json& entry : json.at("cases")) {
    GoldenCase one;
    if (!entry.at("adapter").is_null()) {
      one.adapter = entry.at("adapter").get<std::string>();
    }
    one.prompt = entry.at("prompt").get<std::vector<int32_t>>();
    one.first_position = entry.at("first_position").get<int32_t>();
    const StoredTensor* tensor = folder.file->find(entry.at("logits").get<std::string>());
    one.shape = tensor->shape;
    one.logits = reinterpret_cast<const float*>(tensor->data);
    one.greedy = entry.at("greedy").get<std::vector<int32_t>>();
    one.greedy_margin = entry.at("greedy_margin").get<std::vector<double>>();
    folder.cases.push_back(std::move(one));
  }
  return folder;
}

}  // namespace moelora::test
