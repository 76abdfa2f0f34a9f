// SPDX-License-Identifier: Apache-2.0
// The safetensors container: good files read back, and each fault of formats with its status and the name at fault.
#include "runtime/io/safetensors.h"

#include <chrono>
#include <cstring>
#include <filesystem>

#include "kernels/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/model_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

std::unique_ptr<SafetensorsFile> parse(const std::string& text) {
  const ByteSource source(reinterpret_cast<const std::byte*>(text.data()), text.size(), "w.safetensors");
  return SafetensorsFile::from_header(SafetensorsFile::read_header(source), source);
}

std::unique_ptr<SafetensorsFile> parse(const std::string& header, const std::string& data) {
  return parse(safetensors_text(header, data));
}

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("safetensors: tensors come back with dtype, shape and bytes") {
  SafetensorsBuilder builder;
  builder.add("b", "BF16", {2, 3}, "abcdefghijkl");
  builder.add("scalar", "U8", {}, "s");  // what follows is not aligned to its dtype
  builder.add("f", "F32", {1}, "1234");
  builder.add("none", "F32", {0, 7}, "");
  builder.add("odd", "F4_NEW", {3}, "xy");  // unknown dtypes are carried, their size is not judged
  const TempDir dir;
  write_file(dir.file("w.safetensors"), builder.text());
  const size_t before = open_descriptors();
  const auto file = SafetensorsFile::open(dir.file("w.safetensors"));
  CHECK(open_descriptors() == before);
  std::filesystem::remove(dir.file("w.safetensors"));  // the mapping does not need the name

  REQUIRE(file->tensors().size() == 5);
  CHECK(file->tensors()[0].name == "b");
  CHECK(file->tensors()[4].name == "odd");
  const StoredTensor* b = file->find("b");
  REQUIRE(b != nullptr);
  CHECK(b->dtype == "BF16");
  CHECK(b->shape == std::vector<int64_t>{2, 3});
  CHECK(b->shape_text() == "[2, 3]");
  CHECK(b->elements() == 6);
  CHECK(std::string(reinterpret_cast<const char*>(b->data), b->bytes) == "abcdefghijkl");
  CHECK(file->find("scalar")->elements() == 1);
  CHECK(std::string(reinterpret_cast<const char*>(file->find("f")->data), 4) == "1234");
  CHECK(file->find("none")->elements() == 0);
  CHECK(file->find("none")->bytes == 0);
  CHECK(file->find("absent") == nullptr);
  CHECK(file->path() == dir.file("w.safetensors"));
  CHECK(file->bytes() == builder.text().size());
}

TEST_CASE("safetensors: padded header, metadata and no tensors") {
  CHECK(
      parse("{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}    ",
            "x")
          ->tensors()
          .size() == 1);
  CHECK(parse("{}", "")->tensors().empty());
  CHECK_ERROR(Status::kCorrupt, ({"__metadata__", "key 'k'"}), parse("{\"__metadata__\":{\"k\":1}}", ""));
  CHECK_ERROR(Status::kCorrupt, ({"__metadata__"}), parse("{\"__metadata__\":[]}", ""));
}

TEST_CASE("safetensors: faults of the file") {
  const std::string name = "w.safetensors";
  CHECK_ERROR(Status::kCorrupt, ({name, "empty"}), parse(""));
  CHECK_ERROR(Status::kCorrupt, ({name, "Git-LFS"}),
              parse("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"));
  CHECK_ERROR(Status::kCorrupt, ({name, "too few"}), parse(std::string("\2\0\0\0\0\0\0", 7)));
  CHECK_ERROR(Status::kCorrupt, ({name, "claims 3 bytes", "only 2"}), parse(std::string("\3\0\0\0\0\0\0\0{}", 10)));
  CHECK_ERROR(Status::kCorrupt, ({name, "claims 18446744073709551615 bytes"}), parse(std::string(8, '\xFF') + "{}"));
  std::string huge = safetensors_text("", "") + std::string((size_t{100} << 20) + 1, ' ');
  const uint64_t length = huge.size() - 8;
  std::memcpy(huge.data(), &length, 8);
  CHECK_ERROR(Status::kCorrupt, ({name, "over the limit"}), parse(huge));
  CHECK_ERROR(Status::kCorrupt, ({name, "header", "JSON"}), parse("{\"a\":", ""));
  CHECK_ERROR(Status::kCorrupt, ({name, "not a JSON object"}), parse("[]", ""));
  CHECK_ERROR(Status::kCorrupt, ({name, "UTF-8"}), parse("{\"\xC3\x28\":1}", ""));
  CHECK_ERROR(Status::kCorrupt, ({name, "twice", "'t'"}),
              parse("{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                    "\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
                    "xx"));
  const TempDir dir;
  CHECK_ERROR(Status::kIo, ({"absent.safetensors"}), SafetensorsFile::open(dir.file("absent.safetensors")));
  CHECK_ERROR(Status::kIo, ({dir.path(), "regular file"}), SafetensorsFile::open(dir.path()));
  write_file(dir.file("empty.safetensors"), "");
  CHECK_ERROR(Status::kCorrupt, ({"empty.safetensors", "empty"}), SafetensorsFile::open(dir.file("empty.safetensors")));
}

TEST_CASE("safetensors: faults of a tensor name it") {
  const auto one = [](const std::string& entry, const std::string& data) {
    return parse("{\"tt\":" + entry + "}", data);
  };
  const std::string u8 = "{\"dtype\":\"U8\",\"shape\":";
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "object"}), one("1", ""));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "dtype"}), one("{\"shape\":[1],\"data_offsets\":[0,1]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "shape"}), one("{\"dtype\":\"U8\",\"data_offsets\":[0,1]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "data_offsets"}), one(u8 + "[1]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "two numbers"}), one(u8 + "[1],\"data_offsets\":[0]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "shape"}), one(u8 + "[-1],\"data_offsets\":[0,1]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "shape"}), one(u8 + "[1.0],\"data_offsets\":[0,1]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "shape"}), one(u8 + "[9223372036854775808],\"data_offsets\":[0,1]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "too large"}),
              one(u8 + "[4294967296,4294967296],\"data_offsets\":[0,0]}", ""));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "[0, 2)", "outside"}), one(u8 + "[2],\"data_offsets\":[0,2]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "outside"}), one(u8 + "[1],\"data_offsets\":[1,0]}", "x"));
  CHECK_ERROR(Status::kCorrupt, ({"'tt'", "F32 [2] needs 8 bytes", "hold 4"}),
              one("{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}", "xxxx"));
  CHECK(one(u8 + "[4294967296,4294967296,0],\"data_offsets\":[0,0]}", "")->tensors()[0].elements() == 0);
}

TEST_CASE("safetensors: overlaps and holes") {
  const auto entry = [](const char* name, int begin, int end) {
    return "\"" + std::string(name) + "\":{\"dtype\":\"U8\",\"shape\":[" + std::to_string(end - begin) +
           "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  };
  const auto two = [&](int b1, int e1, int b2, int e2, const std::string& data) {
    return parse("{" + entry("one", b1, e1) + "," + entry("two", b2, e2) + "}", data);
  };
  CHECK(two(2, 4, 0, 2, "abcd")->tensors()[0].name == "one");  // header order need not be data order
  CHECK(two(0, 4, 4, 4, "abcd")->tensors().size() == 2);
  CHECK_ERROR(Status::kCorrupt, ({"'two'", "overlap", "'one'"}), two(0, 4, 2, 2, "abcd"));
  CHECK_ERROR(Status::kCorrupt, ({"'two'", "overlap", "'one'"}), two(0, 3, 2, 4, "abcd"));
  CHECK_ERROR(Status::kCorrupt, ({"overlap"}), two(0, 4, 0, 4, "abcd"));
  CHECK_ERROR(Status::kCorrupt, ({"'two'", "1 bytes before"}), two(0, 2, 3, 4, "abcd"));
  CHECK_ERROR(Status::kCorrupt, ({"'one'", "1 bytes before"}), two(1, 2, 2, 4, "abcd"));
  CHECK_ERROR(Status::kCorrupt, ({"w.safetensors", "1 bytes at the end"}), two(0, 2, 2, 3, "abcd"));
}

TEST_CASE("safetensors: an adapter's 37,000 tensors open in reasonable time") {
  // A look-up that is linear in the number of keys would take seconds here.
  SafetensorsBuilder builder;
  for (int i = 0; i < 37000; ++i) {
    builder.add("base_model.model.model.layers.7.mlp.experts." + std::to_string(i) + ".gate_proj.lora_A.weight", "U8",
                {1}, "x");
  }
  const std::string text = builder.text();
  const auto start = std::chrono::steady_clock::now();
  CHECK(parse(text)->tensors().size() == 37000);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}
