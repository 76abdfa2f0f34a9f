// SPDX-License-Identifier: Apache-2.0
// The CPU as a device: anonymous mappings in huge-page friendly memory, copies that are memcpy, nothing recorded.
#include "kernels/base/device.h"

#include <sys/mman.h>

#include <cstring>

#include "kernels/base/error.h"

namespace moelora {
namespace {

// Copies are done when they return.
class FenceCpu final : public Fence {
 public:
  void record(Stream&) override {}
  void wait() override {}
};

class DeviceCpu final : public Device {
 public:
  [[nodiscard]] DeviceInfo info() const override { return {"cpu"}; }  // runtime/memory/host_resources.h knows
  [[nodiscard]] bool is_host() const override { return true; }
  [[nodiscard]] Dtype activation_dtype() const override { return Dtype::kF32; }
  [[nodiscard]] std::unique_ptr<Stream> create_stream(int num_threads, size_t scratch_bytes) override {
    return std::make_unique<Stream>(num_threads, scratch_bytes);
  }

  void enter_thread() override {}
  [[nodiscard]] std::unique_ptr<Stream> create_copy_stream() override { return std::make_unique<Stream>(1, 0); }
  [[nodiscard]] std::unique_ptr<Fence> create_fence() override { return std::make_unique<FenceCpu>(); }
  [[nodiscard]] std::byte* allocate_staging(size_t bytes, const char* what) override { return allocate(bytes, what); }
  void release_staging(std::byte* memory, size_t bytes) noexcept override { release(memory, bytes); }

  [[nodiscard]] std::byte* allocate(size_t bytes, const char* what) override {
    // The system backs a page when it is first written.
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw Error(Status::kDeviceNomem, std::string(what) + ": cannot take " + std::to_string(bytes) + " bytes");
    }
    ::madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory, size_t bytes) noexcept override { ::munmap(memory, bytes); }
  [[nodiscard]] Mirror allocate_mirror(size_t bytes, const char* what) override {
    std::byte* memory = allocate(bytes, what);
    return {memory, memory, bytes};
  }
  void release_mirror(const Mirror& mirror) noexcept override { release(mirror.host, mirror.bytes); }

  void push(const Mirror&, size_t, size_t, Stream&) override {}
  void push_rows(const Mirror&, size_t, size_t, size_t, size_t, Stream&) override {}
  void pull(const Mirror&, size_t, size_t, Stream&) override {}
  void copy_to_device(void* to, const void* from, size_t bytes, Stream&) override { std::memcpy(to, from, bytes); }
  void copy_to_host(void* to, const void* from, size_t bytes, Stream&) override { std::memcpy(to, from, bytes); }
  void synchronize(Stream&) override {}

  [[nodiscard]] bool can_record() const override { return false; }
  void begin_recording(Stream&) override { throw Error(Status::kInternal, "the CPU records no graphs"); }
  [[nodiscard]] std::unique_ptr<Graph> end_recording(Stream&) override { return nullptr; }
  void launch(Graph&, Stream&) override { throw Error(Status::kInternal, "the CPU launches no graphs"); }
};

}  // namespace

std::unique_ptr<Device> open_device_cpu() {
  return std::make_unique<DeviceCpu>();
}

}  // namespace moelora
