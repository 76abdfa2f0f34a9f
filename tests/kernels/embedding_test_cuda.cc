// SPDX-License-Identifier: Apache-2.0
// embedding_cuda: each row is the exact widened table row, for every stored type, widths and strides that fit no
// vector, tables aligned to one element, and no rows at all. Without a GPU it says that it was skipped.
#include "kernels/dense/embedding.h"

#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("embedding_cuda copies rows of the table exactly") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
    for (const int32_t width : {1, 33, 64, 2880}) {
      for (const size_t offset : {size_t{0}, size_t{1}}) {  // elements
        for (const int32_t count : {0, 1, 7, 300}) {
          INFO(dtype_name(dtype) << " H=" << width << " offset=" << offset << " T=" << count);
          Draw draw(3);
          const StoredMatrix table(50, width, dtype, draw);
          const size_t bytes = 50 * static_cast<size_t>(width) * dtype_bytes(dtype);
          std::vector<char> stored(bytes + offset * dtype_bytes(dtype));
          std::memcpy(stored.data() + offset * dtype_bytes(dtype), table.data(), bytes);
          const DeviceBuffer table_device(stored);
          std::vector<int32_t> ids;
          for (int32_t t = 0; t < count; ++t) {
            ids.push_back(t == 0 ? 49 : draw.below(50));
          }
          const DeviceBuffer ids_device(ids);
          const DeviceRows out(count, width, Dtype::kF32, width == 64 ? width + 1 : 0);
          const Weight weight{table_device.as<char>() + offset * dtype_bytes(dtype), dtype, 50, width};
          embedding_cuda({weight, ids_device.as<int32_t>(), count, out.view()}, *gpu()->stream);
          std::vector<float> expected;
          for (const int32_t id : ids) {
            for (int32_t i = 0; i < width; ++i) {
              expected.push_back(static_cast<float>(table.at(id, i)));
            }
          }
          CHECK(same_bits(out.values(), expected));
          CHECK(out.padding_intact());
        }
      }
    }
  }
}
