// SPDX-License-Identifier: Apache-2.0
// swiglu_cuda against z / (1 + exp(-z)) * u in double, fp32 and bf16 outputs, in place and beside, the ends of the
// range, and the same bits alone. Without a GPU it says that it was skipped.
#include "kernels/dense/swiglu.h"

#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/device_rows.h"

using namespace moelora;
using namespace moelora::test;

namespace {

double silu_times(float gate, float up) {
  const auto z = static_cast<double>(gate);
  return z / (1.0 + std::exp(-z)) * static_cast<double>(up);
}

}  // namespace

TEST_CASE("swiglu_cuda equals the formula element by element") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t width : {1, 17, 64, 100, 2880}) {
    for (const int32_t num_rows : {0, 1, 7, 64, 300}) {
      for (const int form : {0, 1, 2}) {  // in place, fp32 beside, bf16 beside
        INFO("width=" << width << " T=" << num_rows << " form=" << form);
        Draw draw(9);
        const auto count = static_cast<size_t>(num_rows * width);
        const std::vector<float> gate = draw.floats(count, 12.0f);
        const std::vector<float> up = draw.floats(count, 2.0f);
        const DeviceRows z(num_rows, width, Dtype::kF32, gate);
        const DeviceRows u(num_rows, width, Dtype::kF32, up, width == 64 ? 67 : 0);
        const DeviceRows out(num_rows, width, form == 2 ? Dtype::kBf16 : Dtype::kF32);
        swiglu_cuda({z.view(), u.view(), num_rows, width, form == 0 ? Rows{} : out.view()}, *gpu()->stream);
        const std::vector<float> values = form == 0 ? z.values() : out.values();
        const double tolerance = form == 2 ? 4e-3 : 1e-6;
        size_t wrong = 0;
        for (size_t i = 0; i < count; ++i) {
          const double expected = silu_times(gate[i], up[i]);
          const double error = std::abs(static_cast<double>(values[i]) - expected);
          wrong += error <= tolerance * std::abs(expected) + 1e-9 ? 0 : 1;
        }
        CHECK(wrong == 0);
        CHECK((z.padding_intact() && u.padding_intact() && out.padding_intact()));
      }
    }
  }
}

TEST_CASE("swiglu_cuda at the ends of the range stays finite") {
  if (gpu() == nullptr) {
    return;
  }
  const std::vector<float> gate = {-1e4f, -1000.0f, -88.0f, -0.0f, 0.0f, 88.0f, 1000.0f, 1e4f};
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
    const DeviceRows z(1, 8, Dtype::kF32, gate);
    const DeviceRows u(1, 8, Dtype::kF32, std::vector<float>(8, 1.0f));
    const DeviceRows out(1, 8, dtype);
    swiglu_cuda({z.view(), u.view(), 1, 8, out.view()}, *gpu()->stream);
    CHECK(relative_error(out.values(), {0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 1000.0, 1e4}) <=
          (dtype == Dtype::kF32 ? 1e-6 : 4e-3));
  }
}

TEST_CASE("a row of swiglu_cuda has the same bits alone") {
  if (gpu() == nullptr) {
    return;
  }
  Draw draw(10);
  const std::vector<float> gate = draw.floats(7 * 45, 5.0f);
  const DeviceRows all(7, 45, Dtype::kF32, gate);
  const DeviceRows again(7, 45, Dtype::kF32, gate);
  const DeviceRows up(7, 45, Dtype::kF32, draw.floats(7 * 45));
  swiglu_cuda({all.view(), up.view(), 7, 45, {}}, *gpu()->stream);
  for (int64_t t = 0; t < 7; ++t) {
    swiglu_cuda({again.view_from(t), up.view_from(t), 1, 45, {}}, *gpu()->stream);
  }
  CHECK(same_bits(all.values(), again.values()));
}
