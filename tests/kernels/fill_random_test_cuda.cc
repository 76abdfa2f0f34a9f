// SPDX-License-Identifier: Apache-2.0
// fill_random_cuda: the bits of the CPU op in every dtype, for counts and addresses that fit no vector, and not a byte
// beyond the count. Without a GPU it says that it was skipped.
#include "kernels/memory/fill_random.h"

#include "tests/support/device_buffer.cuh"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("fill_random_cuda writes the bits of the CPU op") {
  if (gpu() == nullptr) {
    return;
  }
  Stream host(1, 64);
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{255}, int64_t{1026}, int64_t{2000003}}) {
      for (const size_t offset : {size_t{0}, size_t{1}}) {  // elements
        for (const uint64_t seed : {uint64_t{0}, uint64_t{0x123456789abcdef0}}) {
          for (const float scale : {0.5f, -3e-6f}) {
            INFO(dtype_name(dtype) << " count=" << count << " offset=" << offset << " seed=" << seed << " " << scale);
            const size_t bytes = static_cast<size_t>(count) * dtype_bytes(dtype);
            std::vector<char> expected(bytes);
            fill_random_cpu({expected.data(), dtype, count, scale, seed}, host);
            const DeviceBuffer memory(bytes + offset * dtype_bytes(dtype));
            char* const data = memory.as<char>() + offset * dtype_bytes(dtype);
            fill_random_cuda({data, dtype, count, scale, seed}, *gpu()->stream);
            const std::vector<char> actual = memory.read<char>();
            CHECK(std::equal(expected.begin(), expected.end(),
                             actual.begin() + static_cast<int64_t>(offset * dtype_bytes(dtype))));
            CHECK(memory.guard_intact());
          }
        }
      }
    }
  }
}
