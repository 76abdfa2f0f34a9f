// SPDX-License-Identifier: Apache-2.0
// rms_norm_cuda against the formula in double on the device: both activation types, all weight types, gathered rows,
// widths that fit no vector, in place, and the same bits alone and among others. Without a GPU it says that it was
// skipped.
#include <cmath>

#include "kernels/dense/rms_norm.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/device_buffer.cuh"
#include "tests/support/poison.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr float kEps = 1e-5f;

struct Shape {
  int32_t rows;
  int32_t width;
  int32_t stride;
};

// Stored values of x, [rows, stride], padding poisoned.
std::vector<char> draw_rows(Draw& draw, const Shape& shape, Dtype dtype) {
  std::vector<char> bytes(static_cast<size_t>(shape.rows * shape.stride) * dtype_bytes(dtype), '\xff');
  for (int32_t t = 0; t < shape.rows; ++t) {
    for (int32_t i = 0; i < shape.width; ++i) {
      const float value = draw.signed_unit() * 3.0f;
      const uint16_t half = f32_to_bf16(value);
      const void* from = dtype == Dtype::kF32 ? static_cast<const void*>(&value) : &half;
      std::memcpy(bytes.data() + static_cast<size_t>(t * shape.stride + i) * dtype_bytes(dtype), from,
                  dtype_bytes(dtype));
    }
  }
  return bytes;
}

void check_rows(const std::vector<char>& x, Dtype x_dtype, const std::vector<char>& out, Dtype out_dtype,
                const std::vector<int32_t>& source, const StoredMatrix& weight, const Shape& shape) {
  for (size_t t = 0; t < source.size(); ++t) {
    const size_t from = static_cast<size_t>(source[t] * shape.stride);
    double squares = 0.0;
    for (int32_t i = 0; i < shape.width; ++i) {
      const double value = static_cast<double>(load_element(x.data(), x_dtype, from + static_cast<size_t>(i)));
      squares += value * value;
    }
    const double root = std::sqrt(squares / shape.width + static_cast<double>(kEps));
    std::vector<double> expected;
    std::vector<float> actual;
    for (int32_t i = 0; i < shape.width; ++i) {
      const double value = static_cast<double>(load_element(x.data(), x_dtype, from + static_cast<size_t>(i)));
      expected.push_back(value / root * weight.at(0, i));
      actual.push_back(
          load_element(out.data(), out_dtype, t * static_cast<size_t>(shape.stride) + static_cast<size_t>(i)));
    }
    CHECK(relative_error(actual, expected) <= (out_dtype == Dtype::kF32 ? 2e-6 : 4e-3));
    const size_t end =
        (t * static_cast<size_t>(shape.stride) + static_cast<size_t>(shape.width)) * dtype_bytes(out_dtype);
    CHECK(PoisonedBytes::untouched(out.data() + end,
                                   static_cast<size_t>(shape.stride - shape.width) * dtype_bytes(out_dtype)));
  }
}

}  // namespace

TEST_CASE("rms_norm_cuda equals the formula") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Dtype x_dtype : {Dtype::kF32, Dtype::kBf16}) {
    for (const Dtype out_dtype : {Dtype::kF32, Dtype::kBf16}) {
      for (const Dtype weight_dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
        for (const Shape shape : {Shape{5, 2880, 2880}, Shape{3, 7, 9}, Shape{9, 128, 132}, Shape{2, 9000, 9008},
                                  Shape{4, 1000, 1001}, Shape{1, 1, 1}}) {
          INFO(dtype_name(x_dtype) << " " << dtype_name(out_dtype) << " " << dtype_name(weight_dtype) << " "
                                   << shape.width);
          Draw draw(5);
          const std::vector<char> x = draw_rows(draw, shape, x_dtype);
          const StoredMatrix weight(1, shape.width, weight_dtype, draw);
          const DeviceBuffer x_device(x.data(), x.size());
          const DeviceBuffer weight_device(weight.data(), static_cast<size_t>(shape.width) * dtype_bytes(weight_dtype));
          const std::vector<int32_t> index = {shape.rows - 1, 0, 0};
          const DeviceBuffer index_device(index.data(), index.size() * sizeof(int32_t));
          std::vector<int32_t> all(static_cast<size_t>(shape.rows));
          std::iota(all.begin(), all.end(), 0);
          for (const bool gather : {false, true}) {
            const std::vector<int32_t>& source = gather ? index : all;
            const DeviceBuffer out(source.size() * static_cast<size_t>(shape.stride) * dtype_bytes(out_dtype));
            RmsNormArgs args;
            args.x = {x_device.data(), x_dtype, shape.stride};
            args.row_index = gather ? static_cast<const int32_t*>(index_device.data()) : nullptr;
            args.weight = {weight_device.data(), weight_dtype, 1, shape.width};
            args.eps = kEps;
            args.num_rows = static_cast<int32_t>(source.size());
            args.width = shape.width;
            args.out = {out.data(), out_dtype, shape.stride};
            rms_norm_cuda(args, *gpu()->stream);
            const std::vector<char> result = out.read<char>();
            check_rows(x, x_dtype, result, out_dtype, source, weight, shape);
            CHECK(out.guard_intact());
          }
        }
      }
    }
  }
}

TEST_CASE("rms_norm_cuda in place, of no rows, and of a row alone") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t width : {64, 5000}) {
    const Shape shape{6, width, width};
    Draw draw(6);
    const std::vector<char> x = draw_rows(draw, shape, Dtype::kF32);
    const StoredMatrix weight(1, width, Dtype::kBf16, draw);
    const DeviceBuffer weight_device(weight.data(), static_cast<size_t>(width) * 2);
    const DeviceBuffer x_device(x.data(), x.size());
    const DeviceBuffer out(x.size());
    RmsNormArgs args{
        {x_device.data(), Dtype::kF32, width}, nullptr, {weight_device.data(), Dtype::kBf16, 1, width}, kEps, 0, width,
        {out.data(), Dtype::kF32, width}};
    rms_norm_cuda(args, *gpu()->stream);
    CHECK(PoisonedBytes::untouched(out.read<char>().data(), out.size()));
    args.num_rows = 6;
    rms_norm_cuda(args, *gpu()->stream);
    const std::vector<char> all = out.read<char>();
    const DeviceBuffer alone(static_cast<size_t>(width) * 4);
    RmsNormArgs one = args;
    one.num_rows = 1;
    one.x.data = static_cast<float*>(x_device.data()) + 4 * width;
    one.out.data = alone.data();
    rms_norm_cuda(one, *gpu()->stream);
    CHECK(std::memcmp(alone.read<char>().data(), all.data() + 4 * width * 4, static_cast<size_t>(width) * 4) == 0);
    args.out = args.x;
    rms_norm_cuda(args, *gpu()->stream);
    CHECK(std::memcmp(x_device.read<char>().data(), all.data(), x.size()) == 0);
  }
}

TEST_CASE("rms_norm_cuda refuses what it cannot do before launching") {
  if (gpu() == nullptr) {
    return;
  }
  RmsNormArgs args;
  args.x.dtype = Dtype::kF16;
  CHECK_THROWS_AS(rms_norm_cuda(args, *gpu()->stream), Error);
}
