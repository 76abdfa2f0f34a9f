// SPDX-License-Identifier: Apache-2.0
// Ownership of memory on a device. Move-only; the device must outlive it.
#pragma once

#include <utility>

#include "kernels/base/device.h"

namespace moelora {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device& device, size_t bytes, const char* what)
      : device_(&device), data_(device.allocate(bytes, what)), bytes_(bytes) {}
  DeviceMemory(DeviceMemory&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), data_(other.data_), bytes_(other.bytes_) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    if (device_ != nullptr) {
      device_->release(data_, bytes_);
    }
  }
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// A Mirror that is released with its owner.
class MirrorMemory {
 public:
  MirrorMemory(Device& device, size_t bytes, const char* what)
      : device_(device), mirror_(device.allocate_mirror(bytes, what)) {}
  ~MirrorMemory() { device_.release_mirror(mirror_); }
  MirrorMemory(const MirrorMemory&) = delete;
  MirrorMemory& operator=(const MirrorMemory&) = delete;
  [[nodiscard]] const Mirror& mirror() const { return mirror_; }
  [[nodiscard]] std::byte* host() const { return mirror_.host; }
  [[nodiscard]] std::byte* device() const { return mirror_.device; }
  [[nodiscard]] size_t bytes() const { return mirror_.bytes; }

 private:
  Device& device_;
  Mirror mirror_;
};

}  // namespace moelora
