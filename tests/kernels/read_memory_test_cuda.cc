// SPDX-License-Identifier: Apache-2.0
// read_memory_cuda: the sum of all whole 8-byte words, which no implementation gets right without reading them all.
// Without a GPU it says that it was skipped.
#include "kernels/memory/read_memory.h"

#include "tests/support/device_buffer.cuh"
#include "tests/support/draw.h"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("read_memory_cuda reads every whole word once") {
  if (gpu() == nullptr) {
    return;
  }
  Draw draw(7);
  std::vector<uint64_t> words((size_t{33} << 20) / 8 + 5);  // more than one round of any likely grid, and a tail
  for (uint64_t& word : words) {
    word = (static_cast<uint64_t>(static_cast<uint32_t>(draw.below(0x7fffffff))) << 33) +
           static_cast<uint64_t>(draw.below(1000));
  }
  const DeviceBuffer data(words);
  for (const size_t bytes : {size_t{0}, size_t{7}, size_t{8}, size_t{31}, size_t{65536}, size_t{65544}, size_t{200003},
                             words.size() * 8 - 8, words.size() * 8}) {
    INFO("bytes=" << bytes);
    uint64_t expected = 0;
    for (size_t i = 0; i < bytes / 8; ++i) {
      expected += words[i];
    }
    uint64_t sum = 1;
    read_memory_cuda({data.as<std::byte>(), bytes, &sum}, *gpu()->stream);
    CHECK(sum == expected);
  }
  read_memory_cuda({data.as<std::byte>(), 64, nullptr}, *gpu()->stream);
}
