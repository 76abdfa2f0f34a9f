// SPDX-License-Identifier: Apache-2.0
// Matrices of activations and paged KV in device memory for op tests: padding and everything unwritten is NaN.
#pragma once

#include "tests/support/device_buffer.cuh"
#include "tests/support/kv_fixture.h"

namespace moelora::test {

// [rows, width] of kF32 or kBf16 with at least 16 elements of padding after each row, or any given stride.
class DeviceRows {
 public:
  DeviceRows(int64_t num_rows, int64_t width, Dtype dtype, int64_t stride = 0)
      : num_rows_(num_rows),
        width_(width),
        stride_(stride != 0 ? stride : (width + 15) / 16 * 16 + 16),
        dtype_(dtype),
        memory_(static_cast<size_t>(num_rows * stride_) * dtype_bytes(dtype)) {}
  DeviceRows(int64_t num_rows, int64_t width, Dtype dtype, const std::vector<float>& values, int64_t stride = 0)
      : DeviceRows(num_rows, width, dtype, stride) {
    REQUIRE(values.size() == static_cast<size_t>(num_rows * width));
    const size_t bytes = dtype_bytes(dtype);
    std::vector<char> host(memory_.size(), '\xff');
    for (int64_t t = 0; t < num_rows; ++t) {
      for (int64_t i = 0; i < width; ++i) {
        const float value = values[static_cast<size_t>(t * width + i)];
        const uint16_t half = f32_to_bf16(value);
        const void* from = dtype == Dtype::kF32 ? static_cast<const void*>(&value) : &half;
        std::memcpy(host.data() + static_cast<size_t>(t * stride_ + i) * bytes, from, bytes);
      }
    }
    memory_.write(host.data(), host.size());
  }

  [[nodiscard]] Rows view() const { return {memory_.data(), dtype_, stride_}; }
  [[nodiscard]] Rows view_from(int64_t first) const {
    return {memory_.as<char>() + static_cast<size_t>(first * stride_) * dtype_bytes(dtype_), dtype_, stride_};
  }
  // All values in order, without padding.
  [[nodiscard]] std::vector<float> values() const {
    const std::vector<char> host = memory_.read<char>();
    std::vector<float> result;
    for (int64_t t = 0; t < num_rows_; ++t) {
      for (int64_t i = 0; i < width_; ++i) {
        result.push_back(load_element(host.data(), dtype_, static_cast<size_t>(t * stride_ + i)));
      }
    }
    return result;
  }
  [[nodiscard]] bool padding_intact() const {
    const std::vector<char> host = memory_.read<char>();
    const size_t bytes = dtype_bytes(dtype_);
    for (int64_t t = 0; t < num_rows_; ++t) {
      if (!PoisonedBytes::untouched(host.data() + static_cast<size_t>(t * stride_ + width_) * bytes,
                                    static_cast<size_t>(stride_ - width_) * bytes)) {
        return false;
      }
    }
    return memory_.guard_intact();
  }

 private:
  int64_t num_rows_;
  int64_t width_;
  int64_t stride_;
  Dtype dtype_;
  DeviceBuffer memory_;
};

// A KvFixture's pool and block tables on the device.
class DeviceKv {
 public:
  explicit DeviceKv(const KvFixture& fixture)
      : host_(fixture.view()), pool_(fixture.pool().data(), fixture.pool().size()), tables_(fixture.tables()) {}
  [[nodiscard]] KvView view() const {
    KvView result = host_;
    result.pool = pool_.as<std::byte>();
    result.block_tables = tables_.as<int32_t>();
    return result;
  }
  // Copies the pool back, so that the fixture's accessors read what the device holds.
  void pull(const KvFixture& fixture) const {
    const std::vector<std::byte> host = pool_.read<std::byte>();
    std::memcpy(fixture.pool().data(), host.data(), host.size());
  }
  [[nodiscard]] bool guard_intact() const { return pool_.guard_intact(); }

 private:
  KvView host_;
  DeviceBuffer pool_;
  DeviceBuffer tables_;
};

}  // namespace moelora::test
