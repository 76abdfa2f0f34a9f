// SPDX-License-Identifier: Apache-2.0
// See reference_case.h.
#include "samples/cli/reference_case.h"

#include <bit>
#include <fstream>
#include <nlohmann/json.hpp>

#include "samples/cli/host.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace moelora_cli {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

nlohmann::json parse_json(const std::string& text, const std::string& path) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    throw Failure(MOELORA_E_CORRUPT, path + ": " + error.what());
  }
}

void read_logits(std::ifstream& file, const TensorFile& tensors, Case& reference) {
  const auto found = tensors.tensors.find(reference.name);
  if (found == tensors.tensors.end()) {
    throw Failure(MOELORA_E_CORRUPT, tensors.path + ": no tensor " + reference.name);
  }
  const TensorEntry& entry = found->second;
  if (entry.dtype != "F32" || entry.shape.size() != 2 || entry.shape[0] < 1 || entry.shape[1] < 1 ||
      entry.end - entry.begin != static_cast<uint64_t>(entry.shape[0] * entry.shape[1]) * sizeof(float)) {
    throw Failure(MOELORA_E_CORRUPT, tensors.path + ": " + reference.name + " is not a float32 matrix");
  }
  reference.rows = entry.shape[0];
  reference.vocab = entry.shape[1];
  reference.logits.resize(static_cast<size_t>(reference.rows * reference.vocab));
  file.seekg(static_cast<std::streamoff>(tensors.data_begin + entry.begin));
  file.read(reinterpret_cast<char*>(reference.logits.data()), static_cast<std::streamsize>(entry.end - entry.begin));
  if (!file) {
    throw Failure(MOELORA_E_CORRUPT, tensors.path + ": " + reference.name + " lies outside the file");
  }
}

}  // namespace

TensorFile read_tensor_header(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Failure(MOELORA_E_IO, "cannot open " + path);
  }
  uint64_t size = 0;
  file.read(reinterpret_cast<char*>(&size), sizeof(size));
  if (!file || size > kMaxHeaderBytes) {
    throw Failure(MOELORA_E_CORRUPT, path + ": no safetensors header");
  }
  std::string text(size, '\0');
  file.read(text.data(), static_cast<std::streamsize>(size));
  if (!file) {
    throw Failure(MOELORA_E_CORRUPT, path + ": the header is longer than the file");
  }
  const nlohmann::json header = parse_json(text, path);
  TensorFile result{path, sizeof(size) + size, {}};
  try {
    for (const auto& [name, value] : header.items()) {
      if (name != "__metadata__") {
        const auto offsets = value.at("data_offsets").get<std::array<uint64_t, 2>>();
        result.tensors[name] = {value.at("dtype"), value.at("shape"), offsets[0], offsets[1]};
      }
    }
  } catch (const nlohmann::json::exception& error) {
    throw Failure(MOELORA_E_CORRUPT, path + ": header: " + error.what());
  }
  return result;
}

ReferenceCase read_reference_case(const std::string& dir) {
  const std::string path = dir + "/expected.json";
  const nlohmann::json expected = parse_json(read_file(path), path);
  const TensorFile tensors = read_tensor_header(dir + "/expected.safetensors");
  std::ifstream file(tensors.path, std::ios::binary);
  ReferenceCase result{dir, {}};
  try {
    for (const auto& entry : expected.at("cases")) {
      Case reference;
      reference.adapter = entry.at("adapter").is_null() ? "" : entry.at("adapter").get<std::string>();
      reference.name = entry.at("logits");
      reference.prompt = entry.at("prompt").get<std::vector<int32_t>>();
      reference.first_position = entry.at("first_position");
      reference.greedy = entry.at("greedy").get<std::vector<int32_t>>();
      reference.greedy_margin = entry.at("greedy_margin").get<std::vector<double>>();
      read_logits(file, tensors, reference);
      if (reference.greedy.empty() || reference.greedy_margin.size() != reference.greedy.size() ||
          reference.first_position + reference.rows > static_cast<int64_t>(reference.prompt.size())) {
        throw Failure(MOELORA_E_CORRUPT, path + ": " + reference.name + ": lengths do not fit together");
      }
      result.cases.push_back(std::move(reference));
    }
  } catch (const nlohmann::json::exception& error) {
    throw Failure(MOELORA_E_CORRUPT, path + ": " + error.what());
  }
  return result;
}

}  // namespace moelora_cli
