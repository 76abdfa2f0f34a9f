// SPDX-License-Identifier: Apache-2.0
// swiglu against z / (1 + exp(-z)) * u in double, over the whole range of z, and invariant to neighbours.
#include "kernels/dense/swiglu.h"

#include <cmath>

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/draw.h"
#include "tests/support/poison.h"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("swiglu equals the formula element by element") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int32_t width : {1, 17, 64, 100}) {
      for (const int32_t num_rows : {0, 1, 5}) {
        INFO(kernels->name << " width=" << width << " T=" << num_rows);
        Draw draw(9);
        const auto count = static_cast<size_t>(num_rows * width);
        const std::vector<float> gate = draw.floats(count, 12.0f);
        const std::vector<float> up = draw.floats(count, 2.0f);
        const PoisonedRows out(num_rows, width, gate);
        const PoisonedRows factor(num_rows, width, up);
        kernels->swiglu({out.view(), factor.view(), num_rows, width, {}}, stream);
        const std::vector<float> values = out.values();
        for (size_t i = 0; i < count; ++i) {
          const double z = static_cast<double>(gate[i]);
          const double expected = z / (1.0 + std::exp(-z)) * static_cast<double>(up[i]);
          CHECK(std::abs(static_cast<double>(values[i]) - expected) <= 1e-6 * std::abs(expected) + 1e-9);
        }
        CHECK(out.padding_intact());
      }
    }
  }
}

TEST_CASE("swiglu at the ends of the range stays finite") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const PoisonedRows gate(1, 6, {-1000.0f, -88.0f, -0.0f, 0.0f, 88.0f, 1000.0f});
    const PoisonedRows up(1, 6, {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f});
    kernels->swiglu({gate.view(), up.view(), 1, 6, {}}, stream);
    CHECK(relative_error(gate.values(), {0.0, 0.0, 0.0, 0.0, 88.0, 1000.0}) <= 1e-6);
  }
}

TEST_CASE("a row of swiglu has the same bits alone") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    Draw draw(10);
    const std::vector<float> gate = draw.floats(7 * 45, 5.0f);
    const PoisonedRows all(7, 45, gate);
    const PoisonedRows again(7, 45, gate);
    const PoisonedRows up(7, 45, draw.floats(7 * 45));
    kernels->swiglu({all.view(), up.view(), 7, 45, {}}, stream);
    for (int64_t t = 0; t < 7; ++t) {
      kernels->swiglu({again.view_from(t), up.view_from(t), 1, 45, {}}, stream);
    }
    CHECK(same_bits(all.values(), again.values()));
  }
}
