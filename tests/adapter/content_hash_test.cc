// SPDX-License-Identifier: Apache-2.0
// hash_bytes tells apart what differs in any bit, in length, in the order of its words, or in the seed.
#include "runtime/adapter/content_hash.h"

#include <set>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

namespace moelora::test {
namespace {

std::vector<std::byte> bytes_of(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(i * 37 + i / 7);
  }
  return bytes;
}

uint64_t hash_of(const std::vector<std::byte>& bytes, uint64_t seed = 7) {
  return hash_bytes(bytes.data(), bytes.size(), seed);
}

}  // namespace

TEST_CASE("each bit counts") {
  for (const size_t count : {1, 8, 63, 64, 65, 200}) {
    std::vector<std::byte> bytes = bytes_of(count);
    std::set<uint64_t> seen{hash_of(bytes)};
    for (size_t bit = 0; bit < count * 8; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
      seen.insert(hash_of(bytes));
      bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    }
    CHECK(seen.size() == count * 8 + 1);
    CHECK(!seen.contains(hash_of(bytes, 8)));
  }
}

TEST_CASE("lengths and places of zeros count") {
  std::set<uint64_t> seen;
  for (size_t count = 0; count < 300; ++count) {
    seen.insert(hash_of(std::vector<std::byte>(count)));
  }
  CHECK(seen.size() == 300);
}

TEST_CASE("the order of words counts, within a block and between blocks") {
  constexpr size_t kWords = 32;
  const std::vector<std::byte> bytes = bytes_of(kWords * 8);
  std::set<uint64_t> seen{hash_of(bytes)};
  for (size_t i = 0; i < kWords; ++i) {
    for (size_t j = 0; j < i; ++j) {
      std::vector<std::byte> swapped = bytes;
      for (size_t k = 0; k < 8; ++k) {
        std::swap(swapped[i * 8 + k], swapped[j * 8 + k]);
      }
      seen.insert(hash_of(swapped));
    }
  }
  CHECK(seen.size() == kWords * (kWords - 1) / 2 + 1);
}

}  // namespace moelora::test
