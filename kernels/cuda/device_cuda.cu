// SPDX-License-Identifier: Apache-2.0
// An NVIDIA GPU as a device: plain allocations on its primary context, one non-blocking stream, page-locked mirrors,
// steps recorded by stream capture. Runs on threads of the engine only, so that the host's threads keep their device
// and their last error.
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <cstring>

#include "kernels/base/device.h"
#include "kernels/cuda/dense_gemm.cuh"
#include "kernels/cuda/launch.cuh"

namespace moelora {
namespace {

constexpr size_t kPinnedBytes = size_t{8} << 20;       // results of the sampler, logits that it takes to the host
constexpr size_t kHostScratchBytes = size_t{7} << 20;  // of a vocabulary of half a million; touched as far as needed
constexpr size_t kCounterBytes = 4 * sizeof(uint32_t);
constexpr size_t kStagingBytes = size_t{16} << 20;  // half of what copy_to_device keeps in flight

class GraphCuda final : public Graph {
 public:
  explicit GraphCuda(cudaGraphExec_t exec) : exec_(exec) {}
  ~GraphCuda() override { cudaGraphExecDestroy(exec_); }
  [[nodiscard]] cudaGraphExec_t exec() const { return exec_; }

 private:
  cudaGraphExec_t exec_;
};

// Owns what CudaStream points to.
class StreamCuda final : public Stream {
 public:
  explicit StreamCuda(std::unique_ptr<CudaStream> state) : Stream(state.get()), state_(std::move(state)) {}
  ~StreamCuda() {
    if (state_->stream != nullptr) {  // null: the default stream, which is the host's
      cudaStreamSynchronize(state_->stream);
    }
    delete state_->dense_gemm;
    cudaFree(state_->counters);
    cudaFreeHost(state_->pinned);
    std::free(state_->host_scratch);
    if (state_->stream != nullptr) {
      cudaStreamDestroy(state_->stream);
    }
  }
  // Without a profiler NVTX tests a pointer and returns.
  void begin_range(const char* name, int64_t number) override {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
    attributes.payload.llValue = number;
    nvtxRangePushEx(&attributes);
  }
  void end_range() override { nvtxRangePop(); }

 private:
  std::unique_ptr<CudaStream> state_;
};

class FenceCuda final : public Fence {
 public:
  // A waiting thread sleeps: the engine's own needs the core more.
  FenceCuda() {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate");
  }
  ~FenceCuda() override { cudaEventDestroy(event_); }
  void record(Stream& stream) override { check_cuda(cudaEventRecord(event_, cuda_stream(stream)), "cudaEventRecord"); }
  void wait() override { check_cuda(cudaEventSynchronize(event_), "a copy to the device"); }

 private:
  cudaEvent_t event_ = nullptr;
};

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

class DeviceCuda final : public Device {
 public:
  explicit DeviceCuda(int index) : index_(index) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver) {
      int driver = 0;
      int runtime = 0;
      cudaDriverGetVersion(&driver);
      cudaRuntimeGetVersion(&runtime);
      cudaGetLastError();
      throw Error(Status::kNoDevice, driver == 0 ? std::string("device 'cuda': no NVIDIA driver is installed")
                                                 : "device 'cuda': the driver serves CUDA " + version_text(driver) +
                                                       ", this library needs " + version_text(runtime));
    }
    if (error != cudaSuccess || count == 0) {
      cudaGetLastError();
      throw Error(Status::kNoDevice, std::string("device 'cuda': ") +
                                         (error == cudaSuccess ? "no NVIDIA GPU" : cudaGetErrorString(error)));
    }
    if (index >= count) {
      throw Error(Status::kNoDevice, "device 'cuda:" + std::to_string(index) + "': there are " + std::to_string(count) +
                                         " GPUs, numbered from 0");
    }
    check_cuda(cudaSetDevice(index), "cudaSetDevice");
    check_cuda(cudaGetDeviceProperties(&properties_, index), "cudaGetDeviceProperties");
    if (properties_.major < 8) {
      throw Error(Status::kNoDevice, std::string("device '") + properties_.name + "': compute capability " +
                                         std::to_string(properties_.major) + "." + std::to_string(properties_.minor) +
                                         ", the kernels need 8.0 or newer");
    }
    for (auto& half : staging_) {
      check_cuda(cudaMallocHost(&half.memory, kStagingBytes), "page-locked staging");
      check_cuda(cudaEventCreateWithFlags(&half.done, cudaEventDisableTiming), "cudaEventCreate");
    }
  }
  ~DeviceCuda() override {
    for (const auto& half : staging_) {
      cudaFreeHost(half.memory);
      cudaEventDestroy(half.done);
    }
  }

  [[nodiscard]] DeviceInfo info() const override {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return {properties_.name, total_bytes, free_bytes, properties_.multiProcessorCount,
            properties_.major * 10 + properties_.minor};
  }
  [[nodiscard]] bool is_host() const override { return false; }
  [[nodiscard]] Dtype activation_dtype() const override { return Dtype::kBf16; }

  [[nodiscard]] std::unique_ptr<Stream> create_stream(int, size_t) override {
    auto stream = std::make_unique<StreamCuda>(std::make_unique<CudaStream>());  // releases what it has if one fails
    CudaStream* const state = &cuda_state(*stream);
    state->num_sms = properties_.multiProcessorCount;
    state->compute_capability = properties_.major * 10 + properties_.minor;
    check_cuda(cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check_cuda(cudaMallocHost(&state->pinned, kPinnedBytes), "page-locked results");
    state->pinned_bytes = kPinnedBytes;
    state->host_scratch = static_cast<std::byte*>(std::aligned_alloc(64, kHostScratchBytes));
    state->host_scratch_bytes = state->host_scratch != nullptr ? kHostScratchBytes : 0;
    state->dense_gemm = DenseGemm::create().release();
    check_cuda(cudaMalloc(&state->counters, kCounterBytes), "counters");
    check_cuda(cudaMemset(state->counters, 0, kCounterBytes), "counters");
    check_cuda(cudaStreamSynchronize(nullptr), "counters");
    state->x_ready = state->counters + 2;
    return stream;
  }

  void enter_thread() override { check_cuda(cudaSetDevice(index_), "cudaSetDevice"); }
  [[nodiscard]] std::unique_ptr<Stream> create_copy_stream() override {
    auto stream = std::make_unique<StreamCuda>(std::make_unique<CudaStream>());
    check_cuda(cudaStreamCreateWithFlags(&cuda_state(*stream).stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }
  [[nodiscard]] std::unique_ptr<Fence> create_fence() override { return std::make_unique<FenceCuda>(); }
  [[nodiscard]] std::byte* allocate_staging(size_t bytes, const char* what) override {
    void* memory = nullptr;
    check_cuda(cudaMallocHost(&memory, bytes), what);
    return static_cast<std::byte*>(memory);
  }
  void release_staging(std::byte* memory, size_t) noexcept override { cudaFreeHost(memory); }

  [[nodiscard]] std::byte* allocate(size_t bytes, const char* what) override {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      const DeviceInfo now = info();
      throw Error(Status::kDeviceNomem, std::string(what) + ": " + std::to_string(bytes) + " bytes wanted on " +
                                            now.name + ", " + std::to_string(now.memory_free_bytes) + " of " +
                                            std::to_string(now.memory_bytes) + " are free");
    }
    check_cuda(error, what);
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory, size_t) noexcept override { cudaFree(memory); }

  [[nodiscard]] Mirror allocate_mirror(size_t bytes, const char* what) override {
    Mirror mirror;
    mirror.bytes = bytes;
    void* host = nullptr;
    check_cuda(cudaMallocHost(&host, bytes), what);
    mirror.host = static_cast<std::byte*>(host);
    std::memset(host, 0, bytes);
    try {
      mirror.device = allocate(bytes, what);
    } catch (...) {
      cudaFreeHost(host);
      throw;
    }
    check_cuda(cudaMemset(mirror.device, 0, bytes), what);
    check_cuda(cudaStreamSynchronize(nullptr), what);
    return mirror;
  }
  void release_mirror(const Mirror& mirror) noexcept override {
    cudaFree(mirror.device);
    cudaFreeHost(mirror.host);
  }

  void push(const Mirror& mirror, size_t offset, size_t bytes, Stream& stream) override {
    check_cuda(cudaMemcpyAsync(mirror.device + offset, mirror.host + offset, bytes, cudaMemcpyHostToDevice,
                               cuda_stream(stream)),
               "copy to the device");
  }

  void push_rows(const Mirror& mirror, size_t offset, size_t pitch, size_t width, size_t height,
                 Stream& stream) override {
    check_cuda(cudaMemcpy2DAsync(mirror.device + offset, pitch, mirror.host + offset, pitch, width, height,
                                 cudaMemcpyHostToDevice, cuda_stream(stream)),
               "copy to the device");
  }
  void pull(const Mirror& mirror, size_t offset, size_t bytes, Stream& stream) override {
    check_cuda(cudaMemcpyAsync(mirror.host + offset, mirror.device + offset, bytes, cudaMemcpyDeviceToHost,
                               cuda_stream(stream)),
               "copy to the host");
  }

  // Through two page-locked halves: pageable memory, a mapped file above all, is read by the CPU while the other half
  // is on its way.
  void copy_to_device(void* to, const void* from, size_t bytes, Stream& stream) override {
    size_t done = 0;
    for (size_t turn = 0; done < bytes; ++turn) {
      const Staging& half = staging_[turn % 2];
      const size_t count = bytes - done < kStagingBytes ? bytes - done : kStagingBytes;
      check_cuda(cudaEventSynchronize(half.done), "copy to the device");
      std::memcpy(half.memory, static_cast<const std::byte*>(from) + done, count);
      check_cuda(cudaMemcpyAsync(static_cast<std::byte*>(to) + done, half.memory, count, cudaMemcpyHostToDevice,
                                 cuda_stream(stream)),
                 "copy to the device");
      check_cuda(cudaEventRecord(half.done, cuda_stream(stream)), "copy to the device");
      done += count;
    }
  }
  void copy_to_host(void* to, const void* from, size_t bytes, Stream& stream) override {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cuda_stream(stream)), "copy to the host");
    synchronize(stream);
  }
  void synchronize(Stream& stream) override {
    check_cuda(cudaStreamSynchronize(cuda_stream(stream)), "a step on the device");
  }

  [[nodiscard]] bool can_record() const override { return true; }
  void begin_recording(Stream& stream) override {
    check_cuda(cudaStreamBeginCapture(cuda_stream(stream), cudaStreamCaptureModeRelaxed), "recording a step");
  }
  [[nodiscard]] std::unique_ptr<Graph> end_recording(Stream& stream) override {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(cuda_stream(stream), &graph), "recording a step");
    cudaGraphExec_t exec = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(error, "recording a step");
    return std::make_unique<GraphCuda>(exec);
  }
  void launch(Graph& graph, Stream& stream) override {
    check_cuda(cudaGraphLaunch(static_cast<GraphCuda&>(graph).exec(), cuda_stream(stream)), "launching a step");
  }

 private:
  struct Staging {
    void* memory = nullptr;
    cudaEvent_t done = nullptr;
  };
  int index_;
  cudaDeviceProp properties_{};
  Staging staging_[2];
};

}  // namespace

std::vector<DeviceInfo> list_devices_cuda() {
  std::vector<DeviceInfo> found;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return found;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    DeviceInfo info{properties.name, properties.totalGlobalMem, 0, properties.multiProcessorCount,
                    properties.major * 10 + properties.minor};
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    if (cudaSetDevice(i) == cudaSuccess && cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
      info.memory_free_bytes = free_bytes;
    }
    cudaGetLastError();
    found.push_back(info);
  }
  return found;
}

std::unique_ptr<Device> open_device_cuda(int index) {
  return std::make_unique<DeviceCuda>(index);
}

}  // namespace moelora
