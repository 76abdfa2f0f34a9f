// SPDX-License-Identifier: Apache-2.0
// A device as the runtime sees it: memory, the order of copies and ops, and recorded steps. Ops themselves are in
// struct Kernels. Nothing above asks which device it is; what differs is answered here. Throws Error{kDeviceNomem} with
// the numbers, {kCuda}, {kDeviceLost} (after which every call throws it), {kNoDevice}. One thread at a time, except
// info() and failed allocations, which change nothing, and a copy stream with its fences, which are a second thread's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"

namespace moelora {

struct DeviceInfo {
  std::string name;
  uint64_t memory_bytes = 0;
  uint64_t memory_free_bytes = 0;
  int32_t num_units = 0;           // multiprocessors
  int32_t compute_capability = 0;  // 10 * major + minor
};

// Host memory and device memory of one size, both zero at first: written on the host, pushed, read by ops; or written
// by ops and pulled. One memory on the CPU.
struct Mirror {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  size_t bytes = 0;
};

// A recorded sequence of ops that can be launched again; bound to the addresses it was recorded with.
class Graph {
 public:
  Graph() = default;
  virtual ~Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
};

// A point in the order of a stream, marked again and again.
class Fence {
 public:
  Fence() = default;
  virtual ~Fence() = default;
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  virtual void record(Stream& stream) = 0;
  // Sleeps until all that was queued before the last record is done; returns at once where none was recorded.
  virtual void wait() = 0;
};

class Device {
 public:
  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] virtual DeviceInfo info() const = 0;
  // True where ops read host memory: weights may stay in the mapped checkpoint.
  [[nodiscard]] virtual bool is_host() const = 0;
  // True where ops may still run when they return, so that the host has time beside a step.
  [[nodiscard]] virtual bool is_asynchronous() const { return !is_host(); }
  // Type of activations between ops; the residual stream, q, k, v and logits are fp32 everywhere.
  [[nodiscard]] virtual Dtype activation_dtype() const = 0;
  // Queue of ops; `num_threads` and `scratch_bytes` (a worker) are for the CPU.
  [[nodiscard]] virtual std::unique_ptr<Stream> create_stream(int num_threads, size_t scratch_bytes) = 0;

  // Each thread that works with the device says so once, before its first other call.
  virtual void enter_thread() = 0;
  // Queue of copies that run beside the ops of the other stream.
  [[nodiscard]] virtual std::unique_ptr<Stream> create_copy_stream() = 0;
  [[nodiscard]] virtual std::unique_ptr<Fence> create_fence() = 0;
  // Host memory that copies read without the host's help: page-locked on a GPU.
  [[nodiscard]] virtual std::byte* allocate_staging(size_t bytes, const char* what) = 0;
  virtual void release_staging(std::byte* memory, size_t bytes) noexcept = 0;

  // `what` names the memory in messages. 256-byte aligned; contents undefined, zero on the CPU.
  [[nodiscard]] virtual std::byte* allocate(size_t bytes, const char* what) = 0;
  virtual void release(std::byte* memory, size_t bytes) noexcept = 0;
  [[nodiscard]] virtual Mirror allocate_mirror(size_t bytes, const char* what) = 0;
  virtual void release_mirror(const Mirror& mirror) noexcept = 0;

  // Ordered with the stream's ops. The host side of a mirror must not change before the stream was synchronised.
  virtual void push(const Mirror& mirror, size_t offset, size_t bytes, Stream& stream) = 0;
  // `height` pieces of `width` bytes, `pitch` apart.
  virtual void push_rows(const Mirror& mirror, size_t offset, size_t pitch, size_t width, size_t height,
                         Stream& stream) = 0;
  // Device side to host side, complete once the stream was synchronised.
  virtual void pull(const Mirror& mirror, size_t offset, size_t bytes, Stream& stream) = 0;
  // Any host memory; both return when the copy is done.
  virtual void copy_to_device(void* to, const void* from, size_t bytes, Stream& stream) = 0;
  virtual void copy_to_host(void* to, const void* from, size_t bytes, Stream& stream) = 0;
  virtual void synchronize(Stream& stream) = 0;

  // Between begin and end ops are recorded, not run. Null: this device does not record.
  [[nodiscard]] virtual bool can_record() const = 0;
  virtual void begin_recording(Stream& stream) = 0;
  [[nodiscard]] virtual std::unique_ptr<Graph> end_recording(Stream& stream) = 0;
  virtual void launch(Graph& graph, Stream& stream) = 0;
};

std::unique_ptr<Device> open_device_cpu();
// In builds with CUDA. The calling thread's current device and last error may change: the caller uses a thread of its
// own. Throws Error{kNoDevice} (none, driver too old: with the versions).
std::unique_ptr<Device> open_device_cuda(int index);
// The GPUs of this machine; none without a driver. Throws nothing of its own.
std::vector<DeviceInfo> list_devices_cuda();

}  // namespace moelora
