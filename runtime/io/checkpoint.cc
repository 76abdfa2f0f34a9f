// SPDX-License-Identifier: Apache-2.0
// A model folder's safetensors as one set of named tensors. model.safetensors.index.json alone decides which
// shards are opened (their names follow no rule that holds for all publishers); without it model.safetensors is
// read. Folders in a vendor's original layout or with pickle files only are refused, saying what they are.
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/json.h"
#include "runtime/io/safetensors.h"

namespace moelora {
namespace {

namespace fs = std::filesystem;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";
constexpr char kOriginalLayout[] = "this is the original layout; use the Hugging Face layout";

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Names that only the publishers' own layouts use (gpt-oss `original/`, Mistral and Meta `consolidated*`).
bool is_original_name(const std::string& name) {
  return name.rfind("block.0.", 0) == 0 || name.rfind("layers.0.attention.w", 0) == 0 ||
         name == "tok_embeddings.weight";
}

// Says what the folder holds in place of a checkpoint.
[[noreturn]] void refuse_folder(const std::string& dir) {
  bool pickle = false;
  bool original = exists(dir + "/original");
  bool shards = false;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    pickle = pickle || ends_with(name, ".bin") || ends_with(name, ".pt") || ends_with(name, ".pth");
    if (!ends_with(name, ".safetensors")) {
      continue;
    }
    (name.rfind("consolidated", 0) == 0 ? original : shards) = true;
  }
  if (error) {
    throw Error(Status::kIo, fmt::format("{}: cannot read the folder: {}", dir, error.message()));
  }
  if (shards) {
    throw Error(Status::kIo, fmt::format("{}: safetensors shards without {}", dir, kIndexName));
  }
  if (original) {
    throw Error(Status::kUnsupported, fmt::format("{}: {}", dir, kOriginalLayout));
  }
  if (pickle) {
    throw Error(Status::kUnsupported,
                fmt::format("{}: holds pickle weights only (*.bin, *.pt, *.pth); convert them to safetensors", dir));
  }
  throw Error(Status::kIo, fmt::format("{}: neither {} nor {} is there", dir, kIndexName, kSingleName));
}

// weight_map: tensor -> file. A shard's name must stay inside the folder.
std::map<std::string, std::string> read_weight_map(const std::string& path) {
  const Json index = read_json(path);
  const auto found = index.is_object() ? index.find("weight_map") : index.end();
  if (found == index.end() || !found->is_object()) {
    throw Error(Status::kCorrupt, fmt::format("{}: key 'weight_map' is missing or not an object", path));
  }
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : found->get_ref<const Json::object_t&>()) {
    if (!file.is_string()) {
      throw Error(Status::kCorrupt, fmt::format("{}: weight_map '{}' is not a string", path, printable(tensor)));
    }
    const std::string name = file.get<std::string>();
    if (name.find('/') != std::string::npos || !ends_with(name, ".safetensors")) {
      throw Error(Status::kCorrupt, fmt::format("{}: weight_map '{}': '{}' is not the name of a safetensors file of "
                                                "this folder",
                                                path, printable(tensor), printable(name)));
    }
    files.emplace(tensor, name);
  }
  if (files.empty()) {
    throw Error(Status::kCorrupt, fmt::format("{}: 'weight_map' is empty", path));
  }
  return files;
}

}  // namespace

std::unique_ptr<Checkpoint> Checkpoint::open(const std::string& dir) {
  std::error_code error;
  if (!fs::is_directory(dir, error)) {
    throw Error(Status::kIo, fmt::format("{}: no such folder", dir));
  }
  auto result = std::make_unique<Checkpoint>();
  const std::string index_path = dir + "/" + kIndexName;
  std::map<std::string, std::string> weight_map;
  std::map<std::string, SafetensorsFile*> by_name;
  if (exists(index_path)) {
    weight_map = read_weight_map(index_path);
    for (const auto& [tensor, file] : weight_map) {
      by_name.emplace(file, nullptr);
    }
  } else if (exists(dir + "/" + kSingleName)) {
    by_name.emplace(kSingleName, nullptr);
  } else {
    refuse_folder(dir);
  }
  for (auto& [name, file] : by_name) {
    const std::string path = dir + "/" + name;
    if (!exists(path)) {
      throw Error(Status::kIo, fmt::format("{}: missing, though {} names it", path, kIndexName));
    }
    result->files_.push_back(SafetensorsFile::open(path));
    file = result->files_.back().get();
  }
  for (const auto& [tensor, file] : weight_map) {
    const StoredTensor* stored = by_name.at(file)->find(tensor);
    if (stored == nullptr) {
      throw Error(Status::kCorrupt, fmt::format("{}: tensor '{}' is not in {}", index_path, printable(tensor), file));
    }
    result->tensors_.emplace(tensor, stored);
  }
  // What the index does not list still counts, so that an unexpected tensor cannot hide in a shard.
  for (const auto& file : result->files_) {
    for (const StoredTensor& stored : file->tensors()) {
      if (is_original_name(stored.name)) {
        throw Error(Status::kUnsupported,
                    fmt::format("{}: tensor '{}': {}", file->path(), printable(stored.name), kOriginalLayout));
      }
      if (weight_map.count(stored.name) != 0) {
        continue;
      }
      if (!result->tensors_.emplace(stored.name, &stored).second) {
        throw Error(Status::kCorrupt, fmt::format("{}: tensor '{}' is also in another shard, and the index lists "
                                                  "neither",
                                                  file->path(), printable(stored.name)));
      }
    }
  }
  return result;
}

const StoredTensor* Checkpoint::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

}  // namespace moelora
