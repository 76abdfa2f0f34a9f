// SPDX-License-Identifier: Apache-2.0
// Device memory for op tests: poisoned with 0xFF bytes (NaN in every float type, absurd as an index), followed by a
// guard. And the device itself, or a visible skip where there is none.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/poison.h"

namespace moelora::test {

// The GPU and a stream on it, opened once a process; null without a GPU, and then the test says that it was skipped.
struct Gpu {
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> stream;
};
inline Gpu* gpu() {
  static const std::unique_ptr<Gpu> opened = [] {
    auto result = std::make_unique<Gpu>();
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      result.reset();
      return result;
    }
    result->device = open_device_cuda(0);
    result->stream = result->device->create_stream(1, 0);
    return result;
  }();
  if (opened == nullptr) {
    WARN("skipped: no CUDA device");
  }
  return opened.get();
}

class DeviceBuffer {
 public:
  static constexpr size_t kGuard = 256;

  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    REQUIRE(cudaMalloc(&data_, bytes + kGuard) == cudaSuccess);
    REQUIRE(cudaMemset(data_, 0xFF, bytes + kGuard) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);  // the tests' streams do not wait for the default one
  }
  DeviceBuffer(const void* host, size_t bytes) : DeviceBuffer(bytes) { write(host, bytes); }
  template <class T>
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.data(), values.size() * sizeof(T)) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void write(const void* host, size_t bytes) {
    REQUIRE(bytes <= bytes_);
    REQUIRE(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);  // a copy from pageable memory may return before it arrived
  }
  // Waits for all work of the device.
  template <class T>
  [[nodiscard]] std::vector<T> read() const {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    std::vector<T> host(bytes_ / sizeof(T));
    REQUIRE(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return host;
  }
  [[nodiscard]] bool guard_intact() const {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    std::vector<char> guard(kGuard);
    REQUIRE(cudaMemcpy(guard.data(), static_cast<char*>(data_) + bytes_, kGuard, cudaMemcpyDeviceToHost) ==
            cudaSuccess);
    return PoisonedBytes::untouched(guard.data(), kGuard);
  }
  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// fp32 values as stored in `dtype` (kF32 or kBf16, rounded to nearest even).
inline DeviceBuffer device_rows(const std::vector<float>& values, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    return DeviceBuffer(values);
  }
  std::vector<uint16_t> halves;
  halves.reserve(values.size());
  for (const float value : values) {
    halves.push_back(f32_to_bf16(value));
  }
  return DeviceBuffer(halves);
}
// All elements of a buffer of kF32 or kBf16 values.
inline std::vector<float> read_rows(const DeviceBuffer& buffer, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    return buffer.read<float>();
  }
  std::vector<float> values;
  for (const uint16_t half : buffer.read<uint16_t>()) {
    values.push_back(bf16_to_f32(half));
  }
  return values;
}
// What a bf16 kernel sees of fp32 values.
inline std::vector<float> rounded_to_bf16(std::vector<float> values) {
  for (float& value : values) {
    value = bf16_to_f32(f32_to_bf16(value));
  }
  return values;
}

}  // namespace moelora::test
