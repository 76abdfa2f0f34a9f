// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/adapter_uploader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/thread.h"

namespace moelora {
namespace {

// A chunk takes about 0.15 ms on the bus of a GPU; on the CPU it should stay in a core's cache.
constexpr int64_t kChunkBytesGpu = int64_t{8} << 20;
constexpr int64_t kChunkBytesHost = int64_t{1} << 20;
// One core copies slower than the bus. On the CPU the steps need the cores.
constexpr int kNumCopiersGpu = 4;
constexpr int64_t kSliceBytes = int64_t{1} << 20;

int64_t chunk_bytes_of(int64_t page_bytes, bool is_host) {
  const int64_t wanted = is_host ? kChunkBytesHost : kChunkBytesGpu;
  return std::max<int64_t>(1, wanted / page_bytes) * page_bytes;
}

}  // namespace

uint64_t AdapterUploader::staging_bytes(int64_t page_bytes, bool is_host) {
  return kNumChunks * static_cast<uint64_t>(chunk_bytes_of(page_bytes, is_host));
}

AdapterUploader::AdapterUploader(const PagePool& pool, Device& device, const Kernels& kernels,
                                 std::function<void()> wake, int64_t bytes_per_second)
    : pool_(pool),
      device_(device),
      kernels_(kernels),
      wake_(std::move(wake)),
      chunk_bytes_(chunk_bytes_of(pool.page_bytes(), device.is_host())),
      bytes_per_second_(bytes_per_second),
      stream_(device.create_copy_stream()),
      copiers_(device.is_host() ? 1 : kNumCopiersGpu, 0) {
  for (Chunk& chunk : chunks_) {
    chunk.fence = device.create_fence();
  }
  staging_ = device.allocate_staging(kNumChunks * static_cast<size_t>(chunk_bytes_), "staging of adapters");
  for (size_t i = 0; i < kNumChunks; ++i) {
    chunks_[i].memory = staging_ + i * static_cast<size_t>(chunk_bytes_);
  }
  try {
    thread_ = start_thread([this] { run(); });
  } catch (...) {
    device.release_staging(staging_, kNumChunks * static_cast<size_t>(chunk_bytes_));
    throw;
  }
}

AdapterUploader::~AdapterUploader() {
  stop();
  device_.release_staging(staging_, kNumChunks * static_cast<size_t>(chunk_bytes_));
}

void AdapterUploader::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void AdapterUploader::add(int32_t slot, std::shared_ptr<const AdapterImage> image, const PageId* pages,
                          std::atomic<uint64_t>* bytes) {
  MOELORA_ASSERT(!is_full());
  if (bytes != nullptr) {
    bytes->store(0);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Upload& upload = ring_[num_added_ % kMaxUploads];
    upload.slot = slot;
    upload.image = std::move(image);
    upload.pages = pages;
    upload.bytes = bytes;
    upload.status = Status::kOk;
    cancelled_[num_added_ % kMaxUploads] = false;
    ++num_added_;
  }
  work_.notify_all();
}

bool AdapterUploader::is_working() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_done_ < num_added_;
}

bool AdapterUploader::take(Upload* out) {
  if (num_taken_ == num_added_) {
    return false;
  }
  Upload done;  // the ring keeps no image alive, and none goes under the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (num_taken_ == num_done_) {
      return false;
    }
    done = std::move(ring_[num_taken_++ % kMaxUploads]);
  }
  *out = std::move(done);
  return true;
}

void AdapterUploader::cancel(int32_t slot) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t i = num_done_; i < num_added_; ++i) {
      if (ring_[i % kMaxUploads].slot == slot) {
        cancelled_[i % kMaxUploads] = true;
      }
    }
  }
  work_.notify_all();
}

void AdapterUploader::run() {
  bool entered = false;
  for (;;) {
    size_t index = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [&] { return stopping_ || num_done_ < num_added_; });
      if (stopping_) {
        return;
      }
      index = num_done_ % kMaxUploads;
    }
    Upload& upload = ring_[index];
    Status status = Status::kOk;
    std::string message;
    const auto begun = std::chrono::steady_clock::now();
    try {
      if (!entered) {
        device_.enter_thread();
        entered = true;
      }
      copy(upload, cancelled_[index]);
    } catch (const Error& error) {
      status = error.status();
      message = error.what();
    } catch (const std::exception& error) {
      status = Status::kInternal;
      message = error.what();
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      upload.status = status;
      upload.message = std::move(message);
      upload.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
      ++num_done_;
    }
    if (wake_) {
      wake_();
    }
  }
}

void AdapterUploader::wait_for_turn(const std::atomic<bool>& cancelled) {
  if (bytes_per_second_ > 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_.wait_until(lock, next_chunk_, [&] { return stopping_ || cancelled; });
  }
  if (stopping_) {
    throw Error(Status::kClosed, "the engine was released");
  }
  if (cancelled) {
    throw Error(Status::kCancelled, "the upload was given up");
  }
}

void AdapterUploader::copy(const Upload& upload, const std::atomic<bool>& cancelled) {
  const auto bytes = static_cast<int64_t>(upload.image->stream.size());
  try {
    int64_t turn = 0;
    for (int64_t at = 0; at < bytes; at += chunk_bytes_) {
      wait_for_turn(cancelled);
      const auto begun = std::chrono::steady_clock::now();
      const Chunk& chunk = chunks_[static_cast<size_t>(turn++) % kNumChunks];
      chunk.fence->wait();
      const int64_t count = std::min(chunk_bytes_, bytes - at);
      fill(chunk.memory, upload.image->stream.data() + at, count);
      const PageId* pages = upload.pages + at / pool_.page_bytes();
      kernels_.write_pages({pool_.base(), pool_.page_bytes(), chunk.memory, count, pages}, *stream_);
      chunk.fence->record(*stream_);
      if (upload.bytes != nullptr) {
        upload.bytes->fetch_add(static_cast<uint64_t>(count));
      }
      if (bytes_per_second_ > 0) {  // an idle time before earns nothing
        const std::chrono::duration<double> share(static_cast<double>(count) / static_cast<double>(bytes_per_second_));
        next_chunk_ = std::max(next_chunk_, begun) + std::chrono::duration_cast<std::chrono::nanoseconds>(share);
      }
    }
    for (const Chunk& chunk : chunks_) {
      chunk.fence->wait();
    }
  } catch (...) {
    // What is on its way arrives before the pages may be given away.
    try {
      device_.synchronize(*stream_);
    } catch (const Error&) {  // then nothing is on its way; the first error says more
    }
    throw;
  }
}

void AdapterUploader::fill(std::byte* to, const std::byte* from, int64_t bytes) {
  const auto slices = static_cast<size_t>((bytes + kSliceBytes - 1) / kSliceBytes);
  copiers_.parallel_for(slices, [&](size_t i, int) {
    const int64_t at = static_cast<int64_t>(i) * kSliceBytes;
    std::memcpy(to + at, from + at, static_cast<size_t>(std::min(kSliceBytes, bytes - at)));
  });
}

}  // namespace moelora
