// SPDX-License-Identifier: Apache-2.0
// linear against double-precision loops over matrices merged by hand, for every table: stored types, widths that fill
// no vector or tile, bias, accumulation, bf16 activations, and the promise that a row's bits are its own.
#include "kernels/dense/linear.h"

#include <cmath>

#include "tests/kernels/linear_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

double tolerance(Compute compute) {
  return compute == Compute::kExact ? 2e-5 : 2e-2;
}

}  // namespace

TEST_CASE("linear without adapters is W x + bias in every stored type and odd shape") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const int32_t k : {1, 8, 33, 64, 100, 257}) {
        for (const int32_t num_rows : {0, 1, 2, 5, 17, 70}) {
          INFO(kernels->name << " " << dtype_name(dtype) << " K=" << k << " T=" << num_rows);
          LinearCase test(dtype, k, {1, 70, 130}, num_rows, 7u + static_cast<uint32_t>(k));
          const std::vector<float> out = test.run(*kernels, stream);
          CHECK(relative_error(out, test.expected()) <= 2e-5);
          CHECK(test.memory_intact());
        }
      }
    }
  }
}

TEST_CASE("linear adds to what is there when asked to accumulate") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    LinearCase test(Dtype::kBf16, 96, {40}, 6, 3);
    test.accumulate = true;
    CHECK(relative_error(test.run(*kernels, stream), test.expected()) <= 2e-5);
  }
}

TEST_CASE("linear rounds activations to bf16 only when compute says so") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    for (const int32_t num_rows : {1, 9, 40}) {
      LinearCase test(Dtype::kBf16, 160, {48}, num_rows, 5);
      const std::vector<double> exact = test.expected();
      test.compute = Compute::kBf16;
      const double error = relative_error(test.run(*kernels, stream), exact);
      CHECK(error <= tolerance(test.compute));
      CHECK(error > 1e-5);  // a rounding of 2^-9 a factor cannot vanish in 160 of them
    }
  }
}

TEST_CASE("a row of linear has the same bits alone and among others, and from run to run") {
  Stream one(1, kTestScratchBytes);
  Stream many(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const Compute compute : {Compute::kExact, Compute::kBf16}) {
        for (const int32_t k : {33, 64, 257}) {
          INFO(kernels->name << " " << dtype_name(dtype) << " K=" << k << " bf16=" << static_cast<int>(compute));
          LinearCase test(dtype, k, {70, 5}, 67, 11);
          test.compute = compute;
          const std::vector<float> all = test.run(*kernels, many);
          CHECK(same_bits(all, test.run(*kernels, many)));
          CHECK(same_bits(all, test.run(*kernels, one)));
          for (const int32_t count : {1, 2, 3, 4, 7, 16, 33}) {
            CHECK(same_bits(test.rows_of(all, 67 - count, count), test.run(*kernels, many, 67 - count, count)));
          }
        }
      }
    }
  }
}

TEST_CASE("linear propagates a NaN of one row and leaves the others alone") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    LinearCase test(Dtype::kBf16, 64, {70}, 20, 13);
    const std::vector<float> clean = test.run(*kernels, stream);
    test.x.row(4)[63] = NAN;
    const std::vector<float> out = test.run(*kernels, stream);
    for (const float value : test.rows_of(out, 4, 1)) {
      CHECK(std::isnan(value));
    }
    CHECK(same_bits(test.rows_of(out, 0, 4), test.rows_of(clean, 0, 4)));
    CHECK(same_bits(test.rows_of(out, 5, 15), test.rows_of(clean, 5, 15)));
  }
}
