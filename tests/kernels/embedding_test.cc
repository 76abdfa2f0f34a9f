// SPDX-License-Identifier: Apache-2.0
// embedding: each row is the exact widened table row, also from an unaligned table and for no rows at all.
#include "kernels/dense/embedding.h"

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/poison.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("embedding copies rows of the table exactly") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const int32_t width : {1, 33, 64}) {
        INFO(kernels->name << " " << dtype_name(dtype) << " H=" << width);
        Draw draw(3);
        const StoredMatrix table(50, width, dtype, draw);
        const std::vector<int32_t> ids = {49, 0, 7, 7, 31};
        for (const size_t count : {size_t{0}, size_t{1}, ids.size()}) {
          const PoisonedRows out(static_cast<int64_t>(count), width);
          kernels->embedding({table.view(), ids.data(), static_cast<int32_t>(count), out.view()}, stream);
          for (size_t t = 0; t < count; ++t) {
            for (int32_t i = 0; i < width; ++i) {
              REQUIRE(static_cast<double>(out.row(static_cast<int64_t>(t))[i]) == table.at(ids[t], i));
            }
          }
          CHECK(out.padding_intact());
        }
      }
    }
  }
}
