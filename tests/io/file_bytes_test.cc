// SPDX-License-Identifier: Apache-2.0
// Files read whole: their bytes, their stamps, and refusals that name the path.
#include "runtime/io/file_bytes.h"

#include <sys/stat.h>

#include <random>

#include "kernels/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/model_files.h"

namespace moelora::test {

TEST_CASE("a file of several slices is read as it is, by one thread or more") {
  const TempDir dir;
  std::string text((9 << 20) + 17, '\0');
  std::mt19937 random(1);
  for (size_t i = 0; i < text.size(); i += 3) {
    text[i] = static_cast<char>(random());
  }
  write_file(dir.file("large"), text);
  write_file(dir.file("empty"), "");
  for (const int threads : {1, 3}) {
    Stream readers(threads, 0);
    const FileBytes large(dir.file("large"), readers);
    REQUIRE(large.bytes() == text.size());
    CHECK(std::memcmp(large.data(), text.data(), text.size()) == 0);
    CHECK(large.stamp() == stamp_of(dir.file("large")));
    const FileBytes empty(dir.file("empty"), readers);
    CHECK(empty.bytes() == 0);
    CHECK(empty.data() == nullptr);
  }
}

TEST_CASE("the bytes stay what they were when the file is overwritten or cut short") {
  const TempDir dir;
  const std::string path = dir.file("a");
  write_file(path, std::string(100000, 'x'));
  Stream readers(1, 0);
  const FileBytes file(path, readers);
  write_file(path, "y");
  CHECK(file.bytes() == 100000);
  CHECK(std::memcmp(file.data(), std::string(100000, 'x').data(), 100000) == 0);
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
  Stream readers(1, 0);
  CHECK_ERROR(Status::kIo, ({dir.file("none"), "cannot open"}), FileBytes(dir.file("none"), readers));
  CHECK_ERROR(Status::kIo, ({dir.path(), "not a regular file"}), FileBytes(dir.path(), readers));
  REQUIRE(::mkfifo(dir.file("fifo").c_str(), 0600) == 0);
  CHECK_ERROR(Status::kIo, ({dir.file("fifo"), "not a regular file"}), FileBytes(dir.file("fifo"), readers));
}

}  // namespace moelora::test
