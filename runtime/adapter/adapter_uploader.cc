// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/adapter_uploader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/thread.h"

namespace moelora {
namespace {

// A chunk takes about 0.15 ms on the bus of a GPU; on the CPU it is what an upload that is given up still copies.
constexpr int64_t kChunkBytesGpu = int64_t{8} << 20;
constexpr int64_t kChunkBytesHost = int64_t{1} << 20;
// One core copies slower than the bus. On the CPU the steps need the cores.
constexpr int kNumCopiersGpu = 4;
constexpr int64_t kSliceBytes = int64_t{1} << 20;
// How long an upload waits for its stream before others have their turn, and how often all are looked at when none can
// go on.
constexpr std::chrono::microseconds kStreamPoll{200};

int64_t chunk_bytes_of(int64_t page_bytes, bool is_host) {
  const int64_t wanted = is_host ? kChunkBytesHost : kChunkBytesGpu;
  return std::max<int64_t>(1, wanted / page_bytes) * page_bytes;
}

}  // namespace

uint64_t AdapterUploader::staging_bytes(int64_t page_bytes, bool is_host) {
  return is_host ? 0 : kNumChunks * static_cast<uint64_t>(chunk_bytes_of(page_bytes, is_host));
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
  const uint64_t bytes = staging_bytes(pool.page_bytes(), device.is_host());
  if (bytes > 0) {
    staging_ = device.allocate_staging(bytes, "staging of adapters");
    for (size_t i = 0; i < kNumChunks; ++i) {
      chunks_[i].memory = staging_ + i * static_cast<size_t>(chunk_bytes_);
    }
  }
  for (size_t i = 0; i < kMaxUploads; ++i) {
    ring_[i] = &entries_[i];
  }
  try {
    thread_ = start_thread([this] { run(); });
  } catch (...) {
    release_staging();
    throw;
  }
}

AdapterUploader::~AdapterUploader() {
  stop();
  release_staging();
}

void AdapterUploader::release_staging() {
  if (staging_ != nullptr) {
    device_.release_staging(staging_, kNumChunks * static_cast<size_t>(chunk_bytes_));
  }
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
  num_bytes_ += image->stream.size();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = *ring_[num_added_ % kMaxUploads];
    entry.num_copied = 0;
    entry.cancelled = false;
    entry.upload.slot = slot;
    entry.upload.image = std::move(image);
    entry.upload.pages = pages;
    entry.upload.bytes = bytes;
    entry.upload.status = Status::kOk;
    entry.upload.message.clear();
    entry.upload.ms = 0;
    ++num_added_;
  }
  work_.notify_all();
}

bool AdapterUploader::is_working() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return next() != nullptr;
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
    done = std::move(ring_[num_taken_++ % kMaxUploads]->upload);
  }
  num_bytes_ -= done.image->stream.size();
  *out = std::move(done);
  return true;
}

void AdapterUploader::cancel(int32_t slot) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t i = num_done_; i < num_added_; ++i) {
      Entry& entry = *ring_[i % kMaxUploads];
      entry.cancelled = entry.cancelled || entry.upload.slot == slot;
    }
  }
  work_.notify_all();
}

bool AdapterUploader::can_go_on(const Entry& entry) const {
  const AdapterImage& image = *entry.upload.image;
  const auto bytes = std::min<int64_t>(static_cast<int64_t>(image.stream.size()), entry.num_copied + chunk_bytes_);
  return entry.cancelled || !image.progress.is_growing() ||
         image.progress.wait_for(static_cast<uint64_t>(bytes), std::chrono::microseconds(0));
}

AdapterUploader::Entry* AdapterUploader::next() {
  for (uint64_t i = num_done_; i < num_added_; ++i) {
    if (can_go_on(*ring_[i % kMaxUploads])) {
      return ring_[i % kMaxUploads];
    }
  }
  return nullptr;
}

void AdapterUploader::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    Entry* entry = next();
    if (entry == nullptr && num_done_ == num_added_) {
      work_.wait(lock, [&] { return stopping_ || num_done_ < num_added_; });
    } else if (entry == nullptr) {
      work_.wait_for(lock, kStreamPoll);
    } else {
      lock.unlock();
      if (take_turn(*entry)) {
        end(*entry);
      }
      lock.lock();
    }
  }
}

bool AdapterUploader::take_turn(Entry& entry) {
  const auto begun = std::chrono::steady_clock::now();
  bool has_ended = true;
  try {
    if (!has_entered_) {
      device_.enter_thread();
      has_entered_ = true;
    }
    has_ended = copy(entry);
  } catch (const Error& error) {
    entry.upload.status = error.status();
    entry.upload.message = error.what();
  } catch (const std::exception& error) {
    entry.upload.status = Status::kInternal;
    entry.upload.message = error.what();
  }
  entry.upload.ms += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
  return has_ended;
}

void AdapterUploader::end(Entry& entry) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    uint64_t at = num_done_;
    while (ring_[at % kMaxUploads] != &entry) {
      ++at;
    }
    for (; at > num_done_; --at) {  // the others keep their order
      std::swap(ring_[at % kMaxUploads], ring_[(at - 1) % kMaxUploads]);
    }
    ++num_done_;
  }
  if (wake_) {
    wake_();
  }
}

void AdapterUploader::wait_for_turn(const Entry& entry) {
  if (bytes_per_second_ > 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_.wait_until(lock, next_chunk_, [&] { return stopping_ || entry.cancelled; });
  }
  if (stopping_) {
    throw Error(Status::kClosed, "the engine was released");
  }
  if (entry.cancelled) {
    throw Error(Status::kCancelled, "the upload was given up");
  }
}

bool AdapterUploader::copy(Entry& entry) {
  const Upload& upload = entry.upload;
  const StreamProgress& progress = upload.image->progress;
  const auto bytes = static_cast<int64_t>(upload.image->stream.size());
  try {
    while (entry.num_copied < bytes) {
      const int64_t at = entry.num_copied;
      const int64_t count = std::min(chunk_bytes_, bytes - at);
      wait_for_turn(entry);
      if (!progress.wait_for(static_cast<uint64_t>(at + count), kStreamPoll)) {
        if (progress.is_growing()) {
          return false;
        }
        throw Error(Status::kCancelled, "its stream could not be made");
      }
      const auto begun = std::chrono::steady_clock::now();
      const Chunk& chunk = chunks_[num_chunks_++ % kNumChunks];
      chunk.fence->wait();
      const std::byte* source = upload.image->stream.data() + at;
      if (chunk.memory != nullptr) {
        fill(chunk.memory, source, count);
        source = chunk.memory;
      }
      const PageId* pages = upload.pages + at / pool_.page_bytes();
      kernels_.write_pages({pool_.base(), pool_.page_bytes(), source, count, pages}, *stream_);
      chunk.fence->record(*stream_);
      entry.num_copied += count;
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
  return true;
}

void AdapterUploader::fill(std::byte* to, const std::byte* from, int64_t bytes) {
  const auto slices = static_cast<size_t>((bytes + kSliceBytes - 1) / kSliceBytes);
  copiers_.parallel_for(slices, [&](size_t i, int) {
    const int64_t at = static_cast<int64_t>(i) * kSliceBytes;
    std::memcpy(to + at, from + at, static_cast<size_t>(std::min(kSliceBytes, bytes - at)));
  });
}

}  // namespace moelora
