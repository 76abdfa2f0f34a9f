// SPDX-License-Identifier: Apache-2.0
// See rounded_model.h.
#include "samples/cli/rounded_model.h"

#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): mkdtemp is POSIX

#include <cstdint>
#include <fstream>
#include <utility>
#include <vector>

#include "samples/cli/host.h"
#include "samples/cli/reference_case.h"

namespace moelora_cli {
namespace {

namespace fs = std::filesystem;

// A GPU keeps routers that are not in bf16, and vectors, in fp32.
bool is_rounded(const std::string& name, const TensorEntry& entry) {
  const bool is_router = name.ends_with(".gate.weight") || name.find("router") != std::string::npos;
  return entry.shape.size() > 1 && !is_router && (entry.dtype == "F16" || entry.dtype == "F32");
}

// Whether a value changed. To nearest, ties to even, to bf16's 7 bits of fraction. F16 subnormals are left as they are:
// 6e-5 at most.
template <class Bits>
bool round_to_bf16(std::vector<Bits>& values) {
  constexpr bool kIsF16 = sizeof(Bits) == 2;
  constexpr uint32_t kDropped = kIsF16 ? 3 : 16, kExponent = kIsF16 ? 0x7C00 : 0x7F800000;
  bool changed = false;
  for (Bits& value : values) {
    const uint32_t exponent = value & kExponent;
    if (exponent != 0 && exponent != kExponent) {
      const uint32_t half = (1u << (kDropped - 1)) - 1 + ((value >> kDropped) & 1);
      const auto rounded = static_cast<Bits>((value + half) >> kDropped << kDropped);
      changed |= rounded != value;
      value = rounded;
    }
  }
  return changed;
}

template <class Bits>
bool round_tensor(std::fstream& file, uint64_t begin, uint64_t bytes) {
  std::vector<Bits> values(bytes / sizeof(Bits));
  const auto size = static_cast<std::streamsize>(values.size() * sizeof(Bits));
  file.seekg(static_cast<std::streamoff>(begin));
  file.read(reinterpret_cast<char*>(values.data()), size);
  const bool changed = round_to_bf16(values);
  file.seekp(static_cast<std::streamoff>(begin));
  file.write(reinterpret_cast<const char*>(values.data()), size);
  return changed;
}

std::vector<fs::path> tensor_files(const fs::path& dir) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.path().extension() == ".safetensors") {
      files.push_back(entry.path());
    }
  }
  return files;
}

}  // namespace

std::unique_ptr<RoundedModel> RoundedModel::of(const std::string& model_dir) {
  for (const fs::path& path : tensor_files(model_dir)) {
    for (const auto& [name, entry] : read_tensor_header(path.string()).tensors) {
      if (is_rounded(name, entry)) {
        std::unique_ptr<RoundedModel> copy(new RoundedModel);
        return copy->fill(model_dir) ? std::move(copy) : nullptr;
      }
    }
  }
  return nullptr;
}

RoundedModel::RoundedModel() {
  std::string name = (fs::temp_directory_path() / "moelora-rounded-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) {
    throw Failure(MOELORA_E_IO, "cannot create " + name);
  }
  dir_ = name;
}

// Whether a value is another one now.
bool RoundedModel::fill(const std::string& model_dir) {
  for (const auto& entry : fs::directory_iterator(model_dir)) {
    if (entry.is_regular_file()) {
      fs::copy_file(entry.path(), dir_ / entry.path().filename());
      fs::permissions(dir_ / entry.path().filename(), fs::perms::owner_write, fs::perm_options::add);
    }
  }
  bool changed = false;
  for (const fs::path& path : tensor_files(dir_)) {
    const TensorFile tensors = read_tensor_header(path.string());
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    for (const auto& [tensor, entry] : tensors.tensors) {
      if (is_rounded(tensor, entry)) {
        changed |= (entry.dtype == "F16"
                        ? round_tensor<uint16_t>
                        : round_tensor<uint32_t>)(file, tensors.data_begin + entry.begin, entry.end - entry.begin);
      }
    }
    if (!file.flush()) {
      throw Failure(MOELORA_E_IO, "cannot write " + path.string());
    }
  }
  return changed;
}

RoundedModel::~RoundedModel() {
  std::error_code ignored;
  fs::remove_all(dir_, ignored);
}

}  // namespace moelora_cli
