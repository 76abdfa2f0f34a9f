// SPDX-License-Identifier: Apache-2.0
// copy_pages_cuda, write_pages_cuda and read_pages_cuda: exact bytes to the right pages, the tail of the last page and
// all others untouched, with pages of a size that no block's share divides. Without a GPU it says that it was skipped.
#include "kernels/memory/page_copy.h"

#include "tests/support/device_buffer.cuh"
#include "tests/support/draw.h"

using namespace moelora;
using namespace moelora::test;

namespace {

std::vector<std::byte> random_bytes(Draw& draw, size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& value : bytes) {
    value = static_cast<std::byte>(draw.below(255));  // never 0xFF, the poison
  }
  return bytes;
}

}  // namespace

TEST_CASE("write_pages_cuda spreads a byte stream over pages and leaves the rest") {
  if (gpu() == nullptr) {
    return;
  }
  constexpr int64_t kPage = 4096;
  for (const std::vector<int32_t>& pages :
       {std::vector<int32_t>{4, 0, 3}, std::vector<int32_t>{2, 3, 4}, std::vector<int32_t>{5, 1, 2}}) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, kPage, 3 * kPage - 1000, 3 * kPage}) {
      INFO("bytes=" << bytes << " first page " << pages[0]);
      Draw draw(2);
      const std::vector<std::byte> source = random_bytes(draw, static_cast<size_t>(bytes));
      const DeviceBuffer pool(6 * kPage);
      std::vector<std::byte> expected(6 * kPage, std::byte{0xFF});
      for (int64_t at = 0; at < bytes; ++at) {
        expected[static_cast<size_t>(pages[static_cast<size_t>(at / kPage)] * kPage + at % kPage)] =
            source[static_cast<size_t>(at)];
      }
      write_pages_cuda({pool.as<std::byte>(), kPage, source.data(), bytes, pages.data()}, *gpu()->stream);
      CHECK(pool.read<std::byte>() == expected);
      CHECK(pool.guard_intact());
    }
  }
}

TEST_CASE("read_pages_cuda gathers pages to a byte stream and writes no more") {
  if (gpu() == nullptr) {
    return;
  }
  constexpr int64_t kPage = 4096;
  for (const std::vector<int32_t>& pages :
       {std::vector<int32_t>{4, 0, 3}, std::vector<int32_t>{2, 3, 4}, std::vector<int32_t>{5, 1, 2}}) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, kPage, 3 * kPage - 1000, 3 * kPage}) {
      INFO("bytes=" << bytes << " first page " << pages[0]);
      Draw draw(5);
      const std::vector<std::byte> before = random_bytes(draw, 6 * kPage);
      const DeviceBuffer pool(before);
      std::vector<std::byte> target(3 * kPage, std::byte{0xFF});
      std::vector<std::byte> expected = target;
      for (int64_t at = 0; at < bytes; ++at) {
        expected[static_cast<size_t>(at)] =
            before[static_cast<size_t>(pages[static_cast<size_t>(at / kPage)] * kPage + at % kPage)];
      }
      read_pages_cuda({pool.as<std::byte>(), kPage, target.data(), bytes, pages.data()}, *gpu()->stream);
      gpu()->device->synchronize(*gpu()->stream);
      CHECK(target == expected);
      CHECK(pool.read<std::byte>() == before);
    }
  }
}

TEST_CASE("copy_pages_cuda copies whole pages and nothing else") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int64_t page_bytes : {int64_t{16}, int64_t{4096}, int64_t{16400}, int64_t{131072}}) {
    INFO("page_bytes=" << page_bytes);
    const auto page = static_cast<size_t>(page_bytes);
    Draw draw(3);
    const std::vector<std::byte> before = random_bytes(draw, 8 * page);
    const DeviceBuffer pool(before);
    const DeviceBuffer from(std::vector<int32_t>{0, 5, 2});
    const DeviceBuffer to(std::vector<int32_t>{7, 1, 4});
    copy_pages_cuda({pool.as<std::byte>(), page_bytes, from.as<int32_t>(), to.as<int32_t>(), 0}, *gpu()->stream);
    CHECK(pool.read<std::byte>() == before);
    copy_pages_cuda({pool.as<std::byte>(), page_bytes, from.as<int32_t>(), to.as<int32_t>(), 3}, *gpu()->stream);
    const std::vector<std::byte> after = pool.read<std::byte>();
    const size_t origin[] = {0, 5, 2, 3, 2, 5, 6, 0};
    for (size_t p = 0; p < 8; ++p) {
      CHECK(std::memcmp(after.data() + p * page, before.data() + origin[p] * page, page) == 0);
    }
    CHECK(pool.guard_intact());
  }
}
