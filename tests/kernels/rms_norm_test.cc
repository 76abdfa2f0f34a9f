// SPDX-License-Identifier: Apache-2.0
// rms_norm against the formula in double: gathered rows, in place, odd widths, and bits that do not depend on
// neighbours.
#include "kernels/dense/rms_norm.h"

#include <cmath>

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/poison.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr float kEps = 1e-5f;

std::vector<double> normed(const float* x, const StoredMatrix& weight, int32_t width) {
  double squares = 0.0;
  for (int32_t i = 0; i < width; ++i) {
    squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  const double root = std::sqrt(squares / width + static_cast<double>(kEps));
  std::vector<double> result;
  for (int32_t i = 0; i < width; ++i) {
    result.push_back(static_cast<double>(x[i]) / root * weight.at(0, i));
  }
  return result;
}

}  // namespace

TEST_CASE("rms_norm equals the formula, gathered or not") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const int32_t width : {1, 7, 32, 65, 2048}) {
        INFO(kernels->name << " " << dtype_name(dtype) << " width=" << width);
        Draw draw(5);
        const PoisonedRows x(6, width, draw.floats(static_cast<size_t>(6 * width), 3.0f));
        const StoredMatrix weight(1, width, dtype, draw);
        const std::vector<int32_t> index = {5, 0, 0, 3};
        for (const bool gather : {false, true}) {
          const int32_t count = gather ? 4 : 6;
          const PoisonedRows out(count, width);
          kernels->rms_norm({x.view(), gather ? index.data() : nullptr, weight.view(), kEps, count, width, out.view()},
                            stream);
          for (int32_t t = 0; t < count; ++t) {
            const float* from = x.row(gather ? index[static_cast<size_t>(t)] : t);
            CHECK(relative_error({out.row(t), out.row(t) + width}, normed(from, weight, width)) <= 1e-6);
          }
          CHECK(out.padding_intact());
        }
      }
    }
  }
}

TEST_CASE("rms_norm in place, of no rows, and of one row alone") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    constexpr int32_t kWidth = 100;
    Draw draw(6);
    const PoisonedRows x(9, kWidth, draw.floats(9 * kWidth));
    const StoredMatrix weight(1, kWidth, Dtype::kBf16, draw);
    const PoisonedRows out(9, kWidth);
    kernels->rms_norm({x.view(), nullptr, weight.view(), kEps, 0, kWidth, out.view()}, stream);
    CHECK(PoisonedBytes::untouched(out.row(0), kWidth * sizeof(float)));
    kernels->rms_norm({x.view(), nullptr, weight.view(), kEps, 9, kWidth, out.view()}, stream);
    const PoisonedRows alone(1, kWidth);
    kernels->rms_norm({x.view_from(4), nullptr, weight.view(), kEps, 1, kWidth, alone.view()}, stream);
    CHECK(same_bits(alone.row(0), out.row(4), kWidth));
    kernels->rms_norm({x.view(), nullptr, weight.view(), kEps, 9, kWidth, x.view()}, stream);
    CHECK(same_bits(x.values(), out.values()));
    CHECK(x.padding_intact());
  }
}

TEST_CASE("rms_norm of a zero row is zero, not NaN") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    Draw draw(7);
    const PoisonedRows x(1, 40, std::vector<float>(40, 0.0f));
    const StoredMatrix weight(1, 40, Dtype::kF32, draw);
    kernels->rms_norm({x.view(), nullptr, weight.view(), kEps, 1, 40, x.view()}, stream);
    CHECK(relative_error(x.values(), std::vector<double>(40, 0.0)) == 0.0);
  }
}
