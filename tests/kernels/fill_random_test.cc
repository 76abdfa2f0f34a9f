// SPDX-License-Identifier: Apache-2.0
// fill_random: a pure function of seed and index, of the promised range and moments, the same in every dtype but for
// rounding, and never a byte beyond the count.
#include "kernels/memory/fill_random.h"

#include <cmath>

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/poison.h"

using namespace moelora;
using namespace moelora::test;

namespace {

std::vector<double> filled(const Kernels& kernels, Stream& stream, Dtype dtype, int64_t count, float scale,
                           uint64_t seed) {
  const PoisonedBytes memory(static_cast<size_t>(count) * dtype_bytes(dtype));
  kernels.fill_random({memory.data(), dtype, count, scale, seed}, stream);
  REQUIRE(memory.guard_intact());
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<double>(load_element(memory.data(), dtype, static_cast<size_t>(i))));
  }
  return values;
}

}  // namespace

TEST_CASE("fill_random depends on seed and index alone") {
  Stream one(1, kTestScratchBytes);
  Stream many(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const std::vector<double> all = filled(*kernels, many, Dtype::kF32, 300000, 0.5f, 77);
    CHECK(all == filled(*kernels, one, Dtype::kF32, 300000, 0.5f, 77));
    CHECK(all == filled(kernels_reference(), one, Dtype::kF32, 300000, 0.5f, 77));
    const std::vector<double> few = filled(*kernels, many, Dtype::kF32, 1001, 0.5f, 77);
    CHECK(std::equal(few.begin(), few.end(), all.begin()));
    CHECK(few != filled(*kernels, many, Dtype::kF32, 1001, 0.5f, 78));
    CHECK(few != filled(*kernels, many, Dtype::kF32, 1001, 0.5f, 77 + (uint64_t{1} << 32)));
    for (const Dtype dtype : {Dtype::kF16, Dtype::kBf16}) {
      const std::vector<double> rounded = filled(*kernels, many, dtype, 1001, 0.5f, 77);
      const double unit = dtype == Dtype::kF16 ? 0x1p-12 : 0x1p-9;
      for (size_t i = 0; i < few.size(); ++i) {
        REQUIRE(std::abs(rounded[i] - few[i]) <= unit);
      }
    }
    CHECK(filled(*kernels, many, Dtype::kBf16, 0, 0.5f, 77).empty());
  }
}

TEST_CASE("fill_random is uniform, centred and uncorrelated") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{0xffffffffffffffff}}) {
      INFO(kernels->name << " seed=" << seed);
      constexpr int64_t kCount = 400000;
      const std::vector<double> values = filled(*kernels, stream, Dtype::kF32, kCount, 2.0f, seed);
      double sum = 0.0;
      double squares = 0.0;
      double products = 0.0;
      for (size_t i = 0; i < values.size(); ++i) {
        REQUIRE(values[i] >= -2.0);
        REQUIRE(values[i] < 2.0);
        sum += values[i];
        squares += values[i] * values[i];
        if (i > 0) {
          products += values[i] * values[i - 1];
        }
      }
      // Uniform in [-2, 2): mean 0, variance 4/3; six standard errors.
      CHECK(std::abs(sum / kCount) <= 6.0 * std::sqrt(4.0 / 3.0 / kCount));
      CHECK(std::abs(squares / kCount - 4.0 / 3.0) <= 6.0 * std::sqrt(64.0 / 45.0 / kCount));
      CHECK(std::abs(products / kCount) <= 6.0 * (4.0 / 3.0) / std::sqrt(static_cast<double>(kCount)));
    }
  }
}
