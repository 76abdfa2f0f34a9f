// SPDX-License-Identifier: Apache-2.0
// The tensors of a model folder as raw bytes, so that a test can change some of them and load the result.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/io/safetensors.h"
#include "runtime/model/weights.h"
#include "tests/support/model_files.h"

namespace moelora::test {

struct Raw {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using RawTensors = std::map<std::string, Raw>;

inline RawTensors read_tensors(const std::string& dir) {
  RawTensors tensors;
  const auto checkpoint = Checkpoint::open(dir);
  for (const auto& [name, stored] : checkpoint->tensors()) {
    tensors[name] = {stored->dtype, stored->shape,
                     std::string(reinterpret_cast<const char*>(stored->data), stored->bytes)};
  }
  return tensors;
}

inline void write_tensors(const TempDir& dir, const RawTensors& tensors) {
  SafetensorsBuilder builder;
  for (const auto& [name, raw] : tensors) {
    builder.add(name, raw.dtype, raw.shape, raw.bytes);
  }
  write_file(dir.file("model.safetensors"), builder.text());
}

inline std::unique_ptr<Weights> load(const std::string& dir) {
  return Weights::load(dir, load_model_config(dir));
}

// Loads a reference case after `change` has edited its tensors.
inline std::unique_ptr<Weights> load_changed(const std::string& name, const std::function<void(RawTensors&)>& change) {
  const TempDir dir;
  write_file(dir.file("config.json"), read_file(case_model(name) + "/config.json"));
  RawTensors tensors = read_tensors(case_model(name));
  change(tensors);
  write_tensors(dir, tensors);
  return load(dir.path());
}

}  // namespace moelora::test
