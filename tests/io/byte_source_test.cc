// SPDX-License-Identifier: Apache-2.0
// Files and memory read by offset: their bytes, stamps of files, and refusals that name the path.
#include "runtime/io/byte_source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/model_files.h"

namespace moelora::test {

TEST_CASE("any range of a file or of memory is read as it is") {
  const TempDir dir;
  std::string text(100017, '\0');
  std::mt19937 random(1);
  for (char& c : text) {
    c = static_cast<char>(random());
  }
  write_file(dir.file("a"), text);
  write_file(dir.file("empty"), "");
  const ByteSource file(dir.file("a"));
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  const ByteSource memory(bytes, text.size(), "label");
  CHECK(file.bytes() == text.size());
  CHECK(file.label() == dir.file("a"));
  CHECK(memory.bytes() == text.size());
  CHECK(memory.label() == "label");
  for (const auto& [offset, count] :
       std::vector<std::pair<size_t, size_t>>{{0, text.size()}, {1, 1}, {70000, 30017}, {5, 0}, {text.size(), 0}}) {
    std::vector<std::byte> scratch(count + 1, std::byte{0x5a});
    const std::byte* read = file.read(offset, count, scratch.data());
    CHECK(std::memcmp(read, bytes + offset, count) == 0);
    CHECK(scratch[count] == std::byte{0x5a});
    CHECK(memory.read(offset, count, nullptr) == bytes + offset);
  }
  CHECK(ByteSource(dir.file("empty")).bytes() == 0);
  const ByteSource nothing(nullptr, 0, "nothing");
  CHECK(nothing.bytes() == 0);
  CHECK(nothing.is_memory());
  CHECK(nothing.read(0, 0, nullptr) != nullptr);
  memory.check_unchanged();
  file.check_unchanged();
}

TEST_CASE("a file that is cut short or written to while it is read is refused") {
  const TempDir dir;
  const std::string path = dir.file("a");
  write_file(path, std::string(100000, 'x'));
  const ByteSource file(path);
  std::vector<std::byte> scratch(100000);
  REQUIRE(::truncate(path.c_str(), 60000) == 0);
  CHECK(file.read(0, 60000, scratch.data())[59999] == std::byte{'x'});
  CHECK_ERROR(Status::kIo, ({path, "changed while it was read"}), (void)file.read(0, 100000, scratch.data()));
  CHECK_ERROR(Status::kIo, ({path, "changed while it was read"}), (void)file.read(70000, 1, scratch.data()));
  CHECK_ERROR(Status::kIo, ({path, "changed while it was read"}), file.check_unchanged());
  // One that another replaced is read to its end: it is what it was.
  write_file(path, std::string(1000, 'y'));
  const ByteSource replaced(path);
  write_file(dir.file("b"), std::string(1000, 'z'));
  REQUIRE(std::rename(dir.file("b").c_str(), path.c_str()) == 0);
  CHECK(replaced.read(0, 1000, scratch.data())[999] == std::byte{'y'});
}

TEST_CASE("a written or replaced file has another stamp") {
  const TempDir dir;
  const std::string path = dir.file("a");
  write_file(path, "one");
  const FileStamp stamp = stamp_of(path);
  check_unchanged(path, stamp);
  write_file(path, "other");  // another length
  CHECK_ERROR(Status::kIo, ({path, "changed while it was read"}), check_unchanged(path, stamp));
  write_file(dir.file("b"), "one");
  std::filesystem::rename(dir.file("b"), path);  // another inode
  CHECK_ERROR(Status::kIo, ({path, "changed"}), check_unchanged(path, stamp));
  std::filesystem::remove(path);
  CHECK_ERROR(Status::kIo, ({path}), check_unchanged(path, stamp));
}

TEST_CASE("what is no readable regular file is refused by name") {
  const TempDir dir;
  CHECK_ERROR(Status::kIo, ({dir.file("none"), "cannot open"}), ByteSource(dir.file("none")));
  CHECK_ERROR(Status::kIo, ({dir.path(), "not a regular file"}), ByteSource(dir.path()));
  REQUIRE(::mkfifo(dir.file("fifo").c_str(), 0600) == 0);
  CHECK_ERROR(Status::kIo, ({dir.file("fifo"), "not a regular file"}), ByteSource(dir.file("fifo")));
}

}  // namespace moelora::test
