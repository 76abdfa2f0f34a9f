// SPDX-License-Identifier: Apache-2.0
// copy_pages, write_pages and read_pages: exact bytes to the right pages, the tail of the last page and all others
// untouched.
#include "kernels/memory/page_copy.h"

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/draw.h"
#include "tests/support/poison.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int64_t kPageBytes = 4096;

std::vector<std::byte> random_bytes(Draw& draw, size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& value : bytes) {
    value = static_cast<std::byte>(draw.below(255));  // never 0xFF, the poison
  }
  return bytes;
}

}  // namespace

TEST_CASE("write_pages spreads a byte stream over pages and leaves the rest") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, kPageBytes, 3 * kPageBytes - 1000}) {
      INFO(kernels->name << " bytes=" << bytes);
      Draw draw(2);
      const std::vector<std::byte> source = random_bytes(draw, static_cast<size_t>(bytes));
      const PoisonedBytes pool(6 * kPageBytes);
      const std::vector<int32_t> pages = {4, 0, 3};
      kernels->write_pages({pool.data(), kPageBytes, source.data(), bytes, pages.data()}, stream);
      int64_t poison = 0;
      for (size_t at = 0; at < pool.size(); ++at) {
        poison += pool.data()[at] == std::byte{0xFF} ? 1 : 0;
      }
      CHECK(poison == 6 * kPageBytes - bytes);
      for (int64_t at = 0; at < bytes; ++at) {
        REQUIRE(pool.data()[pages[static_cast<size_t>(at / kPageBytes)] * kPageBytes + at % kPageBytes] ==
                source[static_cast<size_t>(at)]);
      }
      CHECK(pool.guard_intact());
    }
  }
}

TEST_CASE("read_pages gathers pages to a byte stream and writes no more") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, kPageBytes, 3 * kPageBytes - 1000}) {
      INFO(kernels->name << " bytes=" << bytes);
      Draw draw(5);
      const std::vector<std::byte> pool = random_bytes(draw, 6 * kPageBytes);
      const PoisonedBytes target(3 * kPageBytes);
      const std::vector<int32_t> pages = {4, 0, 3};
      kernels->read_pages({pool.data(), kPageBytes, target.data(), bytes, pages.data()}, stream);
      for (int64_t at = 0; at < 3 * kPageBytes; ++at) {
        const auto from =
            static_cast<size_t>(pages[static_cast<size_t>(at / kPageBytes)] * kPageBytes + at % kPageBytes);
        REQUIRE(target.data()[at] == (at < bytes ? pool[from] : std::byte{0xFF}));
      }
      CHECK(target.guard_intact());
    }
  }
}

TEST_CASE("copy_pages copies whole pages and nothing else") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    Draw draw(3);
    const std::vector<std::byte> before = random_bytes(draw, 8 * kPageBytes);
    const PoisonedBytes pool(8 * kPageBytes);
    std::memcpy(pool.data(), before.data(), before.size());
    const std::vector<int32_t> from = {0, 5, 2};
    const std::vector<int32_t> to = {7, 1, 4};
    kernels->copy_pages({pool.data(), kPageBytes, from.data(), to.data(), 0}, stream);
    CHECK(std::memcmp(pool.data(), before.data(), before.size()) == 0);
    kernels->copy_pages({pool.data(), kPageBytes, from.data(), to.data(), 3}, stream);
    const int32_t origin[] = {0, 5, 2, 3, 2, 5, 6, 0};
    for (int64_t page = 0; page < 8; ++page) {
      CHECK(std::memcmp(pool.data() + page * kPageBytes, before.data() + origin[page] * kPageBytes, kPageBytes) == 0);
    }
    CHECK(pool.guard_intact());
  }
}
