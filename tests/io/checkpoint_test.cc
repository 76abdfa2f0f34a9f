// SPDX-License-Identifier: Apache-2.0
// Which files of a model folder are opened, and what a folder without a readable checkpoint is called.
#include <filesystem>

#include "kernels/base/error.h"
#include "runtime/io/safetensors.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/model_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

std::string file_of(std::initializer_list<const char*> names, const std::string& bytes) {
  SafetensorsBuilder builder;
  for (const char* name : names) {
    builder.add(name, "U8", {static_cast<int64_t>(bytes.size())}, bytes);
  }
  return builder.text();
}

}  // namespace

TEST_CASE("checkpoint: a single file") {
  const TempDir dir;
  write_file(dir.file("model.safetensors"), file_of({"a", "b"}, "x"));
  write_file(dir.file("consolidated.safetensors"), "never opened");
  const auto checkpoint = Checkpoint::open(dir.path());
  CHECK(checkpoint->tensors().size() == 2);
  CHECK(checkpoint->files().size() == 1);
  CHECK(checkpoint->find("a") != nullptr);
  CHECK(checkpoint->find("c") == nullptr);
}

TEST_CASE("checkpoint: the index decides, whatever shards are called") {
  const TempDir dir;
  write_file(dir.file("model-00000-of-00002.safetensors"), file_of({"a"}, "first"));
  write_file(dir.file("weird.safetensors"), file_of({"b", "a"}, "second"));
  write_file(dir.file("model.safetensors"), "not listed, so not opened");
  write_file(dir.file("model.safetensors.index.json"),
             R"({"metadata": {}, "weight_map": {"a": "model-00000-of-00002.safetensors", "b": "weird.safetensors"}})");
  const auto checkpoint = Checkpoint::open(dir.path());
  CHECK(checkpoint->files().size() == 2);
  REQUIRE(checkpoint->find("a") != nullptr);
  CHECK(std::string(reinterpret_cast<const char*>(checkpoint->find("a")->data), 5) == "first");
  CHECK(checkpoint->find("b")->bytes == 6);
}

TEST_CASE("checkpoint: a tensor that no index lists is still seen") {
  const TempDir dir;
  write_file(dir.file("s1.safetensors"), file_of({"a", "extra"}, "x"));
  write_file(dir.file("s2.safetensors"), file_of({"b"}, "x"));
  write_file(dir.file("model.safetensors.index.json"),
             R"({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}})");
  CHECK(Checkpoint::open(dir.path())->find("extra") != nullptr);
  write_file(dir.file("s2.safetensors"), file_of({"b", "extra"}, "x"));
  CHECK_ERROR(Status::kCorrupt, ({"s2.safetensors", "'extra'"}), Checkpoint::open(dir.path()));
}

TEST_CASE("checkpoint: faults of the index") {
  const TempDir dir;
  write_file(dir.file("s1.safetensors"), file_of({"a"}, "x"));
  const auto open_with = [&](const std::string& index) {
    write_file(dir.file("model.safetensors.index.json"), index);
    return Checkpoint::open(dir.path());
  };
  const std::string index = "model.safetensors.index.json";
  CHECK_ERROR(Status::kIo, ({"s2.safetensors", "missing", index}),
              open_with(R"({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}})"));
  CHECK_ERROR(Status::kCorrupt, ({index, "'b'", "s1.safetensors"}),
              open_with(R"({"weight_map": {"a": "s1.safetensors", "b": "s1.safetensors"}})"));
  CHECK_ERROR(Status::kCorrupt, ({index, "weight_map"}), open_with("{}"));
  CHECK_ERROR(Status::kCorrupt, ({index, "weight_map"}), open_with("[]"));
  CHECK_ERROR(Status::kCorrupt, ({index, "empty"}), open_with(R"({"weight_map": {}})"));
  CHECK_ERROR(Status::kCorrupt, ({index, "'a'", "string"}), open_with(R"({"weight_map": {"a": 1}})"));
  CHECK_ERROR(Status::kCorrupt, ({index, "'a'", "../s1.safetensors"}),
              open_with(R"({"weight_map": {"a": "../s1.safetensors"}})"));
  CHECK_ERROR(Status::kCorrupt, ({index, "'a'", "m.bin"}), open_with(R"({"weight_map": {"a": "m.bin"}})"));
  CHECK_ERROR(Status::kCorrupt, ({index, "twice", "a"}),
              open_with(R"({"weight_map": {"a": "s1.safetensors", "a": "s1.safetensors"}})"));
  CHECK_ERROR(Status::kCorrupt, ({index, "JSON"}), open_with("{"));
  write_file(dir.file("s1.safetensors"), "version https://git-lfs.github.com/spec/v1\n");
  CHECK_ERROR(Status::kCorrupt, ({"s1.safetensors", "Git-LFS"}),
              open_with(R"({"weight_map": {"a": "s1.safetensors"}})"));
}

TEST_CASE("checkpoint: folders without one") {
  const TempDir dir;
  CHECK_ERROR(Status::kIo, ({"/nowhere", "no such folder"}), Checkpoint::open(dir.file("nowhere")));
  CHECK_ERROR(Status::kIo, ({dir.path(), "model.safetensors"}), Checkpoint::open(dir.path()));
  write_file(dir.file("pytorch_model.bin"), "x");
  CHECK_ERROR(Status::kUnsupported, ({dir.path(), "pickle"}), Checkpoint::open(dir.path()));
  write_file(dir.file("consolidated.00.safetensors"), "x");
  CHECK_ERROR(Status::kUnsupported, ({dir.path(), "original layout"}), Checkpoint::open(dir.path()));
  write_file(dir.file("model-00001-of-00002.safetensors"), "x");
  CHECK_ERROR(Status::kIo, ({dir.path(), "without model.safetensors.index.json"}), Checkpoint::open(dir.path()));
  write_file(dir.file("model.safetensors"), file_of({"block.0.attn.qkv.weight", "norm.scale"}, "x"));
  CHECK_ERROR(Status::kUnsupported, ({"model.safetensors", "block.0.attn.qkv.weight", "original layout"}),
              Checkpoint::open(dir.path()));
  const TempDir other;
  std::filesystem::create_directory(other.file("original"));
  CHECK_ERROR(Status::kUnsupported, ({other.path(), "original layout"}), Checkpoint::open(other.path()));
}
