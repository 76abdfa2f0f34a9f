// SPDX-License-Identifier: Apache-2.0
// read_memory: the sum of all whole 8-byte words, which no implementation gets right without reading them all.
#include "kernels/memory/read_memory.h"

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/draw.h"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("read_memory reads every whole word once") {
  Stream one(1, 64);
  Stream many(3, 64);
  Draw draw(7);
  std::vector<uint64_t> words((size_t{9} << 20) / 8 + 5);  // more than two chunks of any likely size, and a tail
  uint64_t expected = 0;
  for (uint64_t& word : words) {
    word = (static_cast<uint64_t>(static_cast<uint32_t>(draw.below(0x7fffffff))) << 33) +
           static_cast<uint64_t>(draw.below(1000));
    expected += word;
  }
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
    uint64_t sum = 0;
    kernels->read_memory({bytes, words.size() * 8, &sum}, one);
    CHECK(sum == expected);
    kernels->read_memory({bytes, words.size() * 8, &sum}, many);
    CHECK(sum == expected);
    kernels->read_memory({bytes, 8 * 3 + 7, &sum}, many);
    CHECK(sum == words[0] + words[1] + words[2]);
    kernels->read_memory({bytes, 0, &sum}, many);
    CHECK(sum == 0);
    kernels->read_memory({bytes, 64, nullptr}, many);
  }
}
