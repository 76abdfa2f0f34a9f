// SPDX-License-Identifier: Apache-2.0
// A device between the engine and another one: says that it works beside the host, counts the steps, and fails as a
// GPU does after a fault: some call throws Error{kDeviceLost}, and from then on every call that could.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "kernels/base/device.h"
#include "kernels/base/error.h"

namespace moelora::test {

class TestDevice final : public Device {
 public:
  // Shared with the test.
  struct Plan {
    bool asynchronous = true;
    std::atomic<int> steps_until_loss{std::numeric_limits<int>::max()};
    // Where the loss shows in that step: false in a wait for the device, true when something is queued.
    bool lost_when_queued = false;
    std::atomic<bool> lost{false};
    std::atomic<int> steps{0};  // begun
    // Called on the engine thread when a step's work is queued, before it is waited for.
    std::function<void(Stream&)> queued;
    // Called on the loader's thread behind each chunk of an adapter that it has queued; may wait or throw.
    std::function<void()> chunk_queued;
  };
  static std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)> wrapper(std::shared_ptr<Plan> plan) {
    return [plan](std::unique_ptr<Device> inner) { return std::make_unique<TestDevice>(std::move(inner), plan); };
  }

  TestDevice(std::unique_ptr<Device> inner, std::shared_ptr<Plan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  [[nodiscard]] DeviceInfo info() const override { return inner_->info(); }
  [[nodiscard]] bool is_host() const override { return inner_->is_host(); }
  [[nodiscard]] bool is_asynchronous() const override { return plan_->asynchronous; }
  [[nodiscard]] Dtype activation_dtype() const override { return inner_->activation_dtype(); }
  [[nodiscard]] std::unique_ptr<Stream> create_stream(int num_threads, size_t scratch_bytes) override {
    return inner_->create_stream(num_threads, scratch_bytes);
  }
  void enter_thread() override { inner_->enter_thread(); }
  [[nodiscard]] std::unique_ptr<Stream> create_copy_stream() override { return inner_->create_copy_stream(); }
  [[nodiscard]] std::unique_ptr<Fence> create_fence() override {
    return std::make_unique<TestFence>(inner_->create_fence(), *this);
  }
  [[nodiscard]] std::byte* allocate_staging(size_t bytes, const char* what) override {
    return inner_->allocate_staging(bytes, what);
  }
  void release_staging(std::byte* memory, size_t bytes) noexcept override { inner_->release_staging(memory, bytes); }
  [[nodiscard]] std::byte* allocate(size_t bytes, const char* what) override { return inner_->allocate(bytes, what); }
  void release(std::byte* memory, size_t bytes) noexcept override { inner_->release(memory, bytes); }
  [[nodiscard]] Mirror allocate_mirror(size_t bytes, const char* what) override {
    return inner_->allocate_mirror(bytes, what);
  }
  void release_mirror(const Mirror& mirror) noexcept override { inner_->release_mirror(mirror); }

  void push(const Mirror& mirror, size_t offset, size_t bytes, Stream& stream) override {
    check();
    inner_->push(mirror, offset, bytes, stream);
  }
  void push_rows(const Mirror& mirror, size_t offset, size_t pitch, size_t width, size_t height,
                 Stream& stream) override {
    check();
    inner_->push_rows(mirror, offset, pitch, width, height, stream);
  }
  // The engine pulls once a step, behind its work.
  void pull(const Mirror& mirror, size_t offset, size_t bytes, Stream& stream) override {
    check();
    inner_->pull(mirror, offset, bytes, stream);
    if (plan_->queued) {
      plan_->queued(stream);
    }
    ++plan_->steps;
    if (--plan_->steps_until_loss <= 0) {
      plan_->lost = true;
      if (plan_->lost_when_queued) {
        check();
      }
    }
  }
  void copy_to_device(void* to, const void* from, size_t bytes, Stream& stream) override {
    check();
    inner_->copy_to_device(to, from, bytes, stream);
  }
  void copy_to_host(void* to, const void* from, size_t bytes, Stream& stream) override {
    check();
    inner_->copy_to_host(to, from, bytes, stream);
  }
  void synchronize(Stream& stream) override {
    check();
    inner_->synchronize(stream);
  }
  [[nodiscard]] bool can_record() const override { return inner_->can_record(); }
  void begin_recording(Stream& stream) override { inner_->begin_recording(stream); }
  [[nodiscard]] std::unique_ptr<Graph> end_recording(Stream& stream) override { return inner_->end_recording(stream); }
  void launch(Graph& graph, Stream& stream) override {
    check();
    inner_->launch(graph, stream);
  }

 private:
  class TestFence final : public Fence {
   public:
    TestFence(std::unique_ptr<Fence> inner, const TestDevice& device) : inner_(std::move(inner)), device_(device) {}
    void record(Stream& stream) override {
      device_.check();
      inner_->record(stream);
      if (device_.plan_->chunk_queued) {
        device_.plan_->chunk_queued();
      }
    }
    void wait() override {
      device_.check();
      inner_->wait();
    }

   private:
    std::unique_ptr<Fence> inner_;
    const TestDevice& device_;
  };

  void check() const {
    if (plan_->lost) {
      throw Error(Status::kDeviceLost, "a step on the device: made to fail by the test");
    }
  }

  std::unique_ptr<Device> inner_;
  std::shared_ptr<Plan> plan_;
};

}  // namespace moelora::test
