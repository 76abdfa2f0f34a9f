// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/host_tier.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/adapter/adapter.h"
#include "runtime/adapter/adapter_uploader.h"
#include "runtime/adapter/reload_cost.h"

namespace moelora {
namespace {

bool is_pinned(const TieredImage& image) {
  return std::any_of(image.adapters.begin(), image.adapters.end(),
                     [](const Adapter* adapter) { return adapter->pins.load() > 0; });
}

}  // namespace

HostTier::HostTier(uint64_t bytes_max, const ModelConfig* config, std::function<void()> on_read,
                   int64_t bytes_per_second)
    : bytes_max_(bytes_max), reader_(config, std::move(on_read), bytes_per_second) {}

void HostTier::add(const std::shared_ptr<TieredImage>& image) {
  const uint64_t bytes = image->stream_bytes;
  const bool is_reloadable = image->is_reloadable();
  const uint64_t undroppable = bytes_undroppable_ + (is_reloadable ? 0 : bytes);
  const uint64_t largest =
      std::max(is_reloadable ? bytes : 0, droppable_sizes_.empty() ? 0 : *droppable_sizes_.rbegin());
  if (bytes_max_ > 0 && undroppable + largest > bytes_max_) {
    throw Error(Status::kNomem, std::to_string(bytes) + " bytes are over host_memory_bytes = " +
                                    std::to_string(bytes_max_) + ": " + std::to_string(bytes_undroppable_) +
                                    " hold adapters that were not loaded from folders and cannot be dropped, and the "
                                    "largest of the others needs " +
                                    std::to_string(largest));
  }
  // Each image may be evicted and removed before the reader looks; reads and uploads that failed come on top.
  reader_.reserve(2 * (images_.size() + 1) + AdapterReader::kMaxReads + AdapterUploader::kMaxUploads);
  if (is_reloadable) {
    droppable_sizes_.insert(bytes);
  } else {
    bytes_undroppable_ = undroppable;
  }
  image->host_index = images_.size();
  image->is_known = image->was_known = true;
  images_.push_back(image);
  copies_.reserve(images_.capacity());
  if (image->host == nullptr) {
    ++stats_.images_on_disk;
    return;
  }
  if (!is_reloadable) {
    make_room(bytes, Evict::kAny);
  }
  stats_.bytes += bytes;
  note_copy(*image);
  if (is_reloadable && !has_room(0)) {
    drop(*image, AdapterReader::Keep::kMemory);  // what others have used is worth more than what nobody has
  }
}

void HostTier::remove(TieredImage& image) {
  MOELORA_ASSERT(!image.is_reading && !image.is_copied_from);
  if (image.is_reloadable()) {
    droppable_sizes_.erase(droppable_sizes_.find(image.stream_bytes));
  } else {
    bytes_undroppable_ -= image.stream_bytes;
  }
  const auto keep = images_.size() > 1 ? AdapterReader::Keep::kPlans : AdapterReader::Keep::kNothing;
  if (image.host != nullptr) {
    drop(image, keep);
  } else {
    reader_.discard(nullptr, image.options.cache, keep);
  }
  --stats_.images_on_disk;
  const size_t index = image.host_index;
  const std::shared_ptr<TieredImage> owner = std::move(images_[index]);
  if (index + 1 < images_.size()) {
    images_[index] = std::move(images_.back());
    images_[index]->host_index = index;
  }
  images_.pop_back();
  owner->is_known = false;
}

void HostTier::note_use(TieredImage& image) {
  image.host_level = level_;
  image.last_used = ++clock_;
}

double HostTier::value(const TieredImage& image) const {
  return image.host_level + read_cost(image) / static_cast<double>(std::max<uint64_t>(image.stream_bytes, 1));
}

// Pins keep an image on the device; those that are not there yet are kept here as long as others can leave.
TieredImage* HostTier::coldest(Evict evict) const {
  TieredImage* best = nullptr;
  std::tuple<bool, bool, double, uint64_t> best_key;
  for (TieredImage* image : copies_) {
    if (image->is_copied_from || (image->is_fresh && evict == Evict::kUnwanted)) {
      continue;
    }
    const std::tuple<bool, bool, double, uint64_t> key{image->slot == 0 && is_pinned(*image), image->is_fresh,
                                                       value(*image), image->last_used};
    if (best == nullptr || key < best_key) {
      best = image;
      best_key = key;
    }
  }
  return best;
}

bool HostTier::make_room(uint64_t bytes, Evict evict) {
  while (!has_room(bytes)) {
    TieredImage* image = coldest(evict);
    if (image == nullptr) {
      return false;
    }
    level_ = std::max(level_, value(*image));
    drop(*image, AdapterReader::Keep::kMemory);
    ++stats_.evictions;
  }
  return true;
}

void HostTier::note_copy(TieredImage& image) {
  if (image.is_reloadable()) {
    image.copy_index = copies_.size();
    copies_.push_back(&image);
  }
  ++stats_.images;
  note_use(image);
}

void HostTier::drop(TieredImage& image, AdapterReader::Keep keep) {
  if (image.is_reloadable()) {
    copies_[image.copy_index] = copies_.back();
    copies_[image.copy_index]->copy_index = image.copy_index;
    copies_.pop_back();
  }
  reader_.discard(std::move(image.host), image.options.cache, keep);
  image.host.reset();
  image.is_fresh = false;
  stats_.bytes -= image.stream_bytes;
  --stats_.images;
  ++stats_.images_on_disk;
}

std::shared_ptr<const AdapterImage> HostTier::fetch(const std::shared_ptr<TieredImage>& image, Evict evict) {
  if (image->host != nullptr) {
    return image->host;
  }
  if (image->is_reading) {
    return image->growing;
  }
  if (!reader_.is_full() && make_room(image->stream_bytes, evict)) {
    image->is_reading = true;
    stats_.bytes += image->stream_bytes;
    reader_.add(image);
  }
  return nullptr;
}

void HostTier::begin_upload(TieredImage& image) {
  MOELORA_ASSERT((image.host != nullptr || image.is_reading) && !image.is_copied_from);
  image.is_copied_from = true;
  image.is_fresh = false;
  note_use(image);
}

void HostTier::end_upload(TieredImage& image, std::vector<FailedLoad>& failed) {
  image.is_copied_from = false;
  if (image.is_reading) {
    poll(failed);
  }
  make_room(0, Evict::kAny);
}

void HostTier::poll(std::vector<FailedLoad>& failed) {
  for (AdapterRead read; reader_.take(&read);) {
    TieredImage& image = *read.image;
    image.is_reading = false;
    if (read.loaded == nullptr && image.growing != nullptr) {
      discard(std::move(image.growing));
    }
    image.growing.reset();
    if (read.loaded != nullptr) {
      stats_.read_ms += read.loaded->read_ms;
      stats_.pack_ms += read.loaded->pack_ms;
      ++stats_.loads;
      if (image.fingerprint == 0) {  // the first time that its values are read
        image.fingerprint = read.loaded->fingerprint;
        image.pack_ms = read.loaded->pack_ms;
      }
      image.host = std::move(read.loaded);
      image.is_fresh = !image.is_copied_from && image.slot == 0;
      --stats_.images_on_disk;
      note_copy(image);
      make_room(0, Evict::kAny);  // a copy that cannot be dropped may have come meanwhile
      continue;
    }
    stats_.bytes -= image.stream_bytes;
    if (read.status != Status::kCancelled) {
      failed.push_back({std::move(read.image), read.status, std::move(read.message)});
    }
  }
  reader_.show_growing();
}

void HostTier::audit() const {
  uint64_t bytes = 0;
  uint64_t undroppable = 0;
  uint64_t busy = 0;
  int64_t copies = 0;
  size_t droppable = 0;
  size_t droppable_copies = 0;
  for (size_t i = 0; i < images_.size(); ++i) {
    const TieredImage& image = *images_[i];
    MOELORA_ASSERT(image.host_index == i && (image.host == nullptr || !image.is_reading));
    MOELORA_ASSERT(image.growing == nullptr || image.is_reading);
    MOELORA_ASSERT(image.is_reloadable() || image.host != nullptr);
    MOELORA_ASSERT(image.host == nullptr || image.host->stream.size() == image.stream_bytes);
    copies += image.host != nullptr ? 1 : 0;
    if (image.host != nullptr && image.is_reloadable()) {
      ++droppable_copies;
      MOELORA_ASSERT(copies_[image.copy_index] == &image);
    }
    bytes += image.host != nullptr || image.is_reading ? image.stream_bytes : 0;
    busy += image.is_copied_from || image.is_reading ? image.stream_bytes : 0;
    undroppable += image.is_reloadable() ? 0 : image.stream_bytes;
    droppable += image.is_reloadable() ? 1 : 0;
    MOELORA_ASSERT(!image.is_reloadable() || droppable_sizes_.contains(image.stream_bytes));
  }
  MOELORA_ASSERT(bytes == stats_.bytes && undroppable == bytes_undroppable_ && droppable == droppable_sizes_.size());
  MOELORA_ASSERT(droppable_copies == copies_.size());
  MOELORA_ASSERT(copies == stats_.images && copies + stats_.images_on_disk == static_cast<int64_t>(images_.size()));
  MOELORA_ASSERT(bytes_max_ == 0 || bytes <= bytes_max_ || busy > 0);
}

}  // namespace moelora
