// SPDX-License-Identifier: Apache-2.0
// Block tables against the leases themselves, over many steps in which leases grow, shrink, end, and change places. The
// device is one whose mirrors are two memories, so that what was not pushed is not there.
#include "runtime/engine/block_tables.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>

#include "tests/support/catch.h"

namespace moelora::test {
namespace {

// Mirrors with a device side of their own; the rest is the CPU's.
class SplitDevice final : public Device {
 public:
  [[nodiscard]] DeviceInfo info() const override { return cpu_->info(); }
  [[nodiscard]] bool is_host() const override { return true; }
  [[nodiscard]] Dtype activation_dtype() const override { return Dtype::kF32; }
  [[nodiscard]] std::unique_ptr<Stream> create_stream(int threads, size_t scratch) override {
    return cpu_->create_stream(threads, scratch);
  }
  void enter_thread() override {}
  [[nodiscard]] std::unique_ptr<Stream> create_copy_stream() override { return cpu_->create_copy_stream(); }
  [[nodiscard]] std::unique_ptr<Fence> create_fence() override { return cpu_->create_fence(); }
  [[nodiscard]] std::byte* allocate_staging(size_t bytes, const char* what) override { return allocate(bytes, what); }
  void release_staging(std::byte* memory, size_t bytes) noexcept override { release(memory, bytes); }
  [[nodiscard]] std::byte* allocate(size_t bytes, const char* what) override { return cpu_->allocate(bytes, what); }
  void release(std::byte* memory, size_t bytes) noexcept override { cpu_->release(memory, bytes); }
  [[nodiscard]] Mirror allocate_mirror(size_t bytes, const char* what) override {
    return {cpu_->allocate(bytes, what), cpu_->allocate(bytes, what), bytes};
  }
  void release_mirror(const Mirror& mirror) noexcept override {
    cpu_->release(mirror.host, mirror.bytes);
    cpu_->release(mirror.device, mirror.bytes);
  }
  void push(const Mirror& mirror, size_t offset, size_t bytes, Stream&) override {
    std::memcpy(mirror.device + offset, mirror.host + offset, bytes);
  }
  void push_rows(const Mirror& mirror, size_t offset, size_t pitch, size_t width, size_t height,
                 Stream& stream) override {
    for (size_t row = 0; row < height; ++row) {
      push(mirror, offset + row * pitch, width, stream);
      pushed += width;
    }
  }
  void pull(const Mirror&, size_t, size_t, Stream&) override {}
  void copy_to_device(void*, const void*, size_t, Stream&) override {}
  void copy_to_host(void*, const void*, size_t, Stream&) override {}
  void synchronize(Stream&) override {}
  [[nodiscard]] bool can_record() const override { return false; }
  void begin_recording(Stream&) override {}
  [[nodiscard]] std::unique_ptr<Graph> end_recording(Stream&) override { return nullptr; }
  void launch(Graph&, Stream&) override {}

  size_t pushed = 0;  // bytes

 private:
  std::unique_ptr<Device> cpu_ = open_device_cpu();
};

}  // namespace

TEST_CASE("block tables on the device are the pages of the batch's leases", "[engine]") {
  constexpr int32_t kRows = 6;
  constexpr int32_t kWidth = 24;
  SplitDevice device;
  const auto stream = device.create_stream(1, 0);
  PagePool pool(100, 2048, device);
  BlockTables tables(kRows, kWidth, device);
  std::vector<PageLease> leases;
  std::mt19937 random(3);
  for (int step = 0; step < 20000; ++step) {
    // Leases come, grow, shrink and go; some move, as vectors of them do.
    const unsigned turn = random() % 8;
    if (leases.size() < 10 && turn == 0) {
      leases.emplace_back(pool, PageUse::kKv, kWidth);
    } else if (!leases.empty() && turn == 1) {
      leases.erase(leases.begin() + static_cast<std::ptrdiff_t>(random() % leases.size()));
    } else if (!leases.empty()) {
      PageLease& lease = leases[random() % leases.size()];
      if (turn == 2) {
        lease.resize_down(static_cast<int32_t>(random() % kWidth));
      } else {
        (void)lease.try_grow(std::min<int32_t>(kWidth - lease.size(), static_cast<int32_t>(random() % 4)));
      }
    }
    // A batch of some of them, in any order; now and then the same as before.
    if (random() % 3 == 0) {
      std::rotate(leases.begin(), leases.begin() + (leases.empty() ? 0 : 1), leases.end());
    }
    const auto count = std::min<int32_t>(kRows, static_cast<int32_t>(leases.size()));
    for (int32_t row = 0; row < count; ++row) {
      tables.set(row, leases[static_cast<size_t>(row)]);
    }
    tables.push(*stream);
    for (int32_t row = 0; row < count; ++row) {
      const PageLease& lease = leases[static_cast<size_t>(row)];
      REQUIRE(std::equal(lease.data(), lease.data() + lease.size(), tables.device() + int64_t{row} * kWidth));
    }
  }
}

TEST_CASE("block tables push nothing that is there", "[engine]") {
  SplitDevice device;
  const auto stream = device.create_stream(1, 0);
  PagePool pool(100, 2048, device);
  BlockTables tables(4, 24, device);
  PageLease one(pool, PageUse::kKv, 24);
  PageLease two(pool, PageUse::kKv, 24);
  REQUIRE(one.try_grow(10));
  REQUIRE(two.try_grow(12));
  const auto pushed = [&] {
    const size_t before = device.pushed;
    tables.set(0, one);
    tables.set(1, two);
    tables.push(*stream);
    return device.pushed - before;
  };
  CHECK(pushed() == 2 * 12 * sizeof(int32_t));
  CHECK(pushed() == 0);
  REQUIRE(two.try_grow(2));
  CHECK(pushed() == 2 * sizeof(int32_t));
  one.resize_down(9);
  CHECK(pushed() == 9 * sizeof(int32_t));
}

}  // namespace moelora::test
