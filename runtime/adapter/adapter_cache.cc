// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/adapter_cache.h"

#include <algorithm>
#include <tuple>

#include "kernels/base/error.h"
#include "runtime/adapter/reload_cost.h"

namespace moelora {

AdapterCache::AdapterCache(const AdapterCacheLimits& limits, PagePool& pool, const Kernels& kernels, Device& device,
                           std::function<void()> on_load)
    : pool_(pool),
      num_layers_(limits.num_layers),
      num_experts_(limits.num_experts),
      pages_per_slot_(pool.num_pages()),
      slots_(static_cast<size_t>(limits.num_resident_max) + 1),
      device_(device),
      kernels_(kernels),
      host_(limits.host_bytes_max, limits.config, on_load, limits.upload_bytes_per_second),
      uploader_(pool, device, kernels, on_load, limits.upload_bytes_per_second) {
  // A row as wide as the pool serves every adapter that fits at all; beyond 16 M entries the widest adapter is
  // bounded instead (`add` checks).
  const int64_t entries_max = int64_t{16} << 20;
  pages_per_slot_ = static_cast<int32_t>(
      std::min<int64_t>(pages_per_slot_, std::max<int64_t>(1, entries_max / static_cast<int64_t>(slots_.size()))));
  page_table_ = std::make_unique<MirrorMemory>(
      device, slots_.size() * static_cast<size_t>(pages_per_slot_) * sizeof(PageId), "page table of adapters");
  if (!device.is_host()) {
    resolved_ = DeviceMemory(device,
                             slots_.size() * static_cast<size_t>(num_layers_) *
                                 static_cast<size_t>(table().modules_per_layer()) * sizeof(ResolvedLora),
                             "records of adapters (max_adapters_resident)");
  }
  unpublished_.reserve(slots_.size());
  free_slots_.reserve(slots_.size());
  for (auto slot = static_cast<int32_t>(slots_.size()); --slot > 0;) {
    free_slots_.push_back(slot);
  }
}

AdapterCache::~AdapterCache() {
  stop_loading();
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    pool_.release(page_row(static_cast<int32_t>(slot)), slots_[slot].num_pages);
  }
}

void AdapterCache::stop_loading() {
  uploader_.stop();
  host_.stop();
}

int32_t AdapterCache::pages_of(const AdapterFacts& image) const {
  const auto bytes = static_cast<int64_t>(image.stream_bytes);
  return static_cast<int32_t>((bytes + pool_.page_bytes() - 1) / pool_.page_bytes());
}

bool AdapterCache::is_pinned(const TieredImage& image) {
  return std::any_of(image.adapters.begin(), image.adapters.end(),
                     [](const Adapter* adapter) { return adapter->pins.load() > 0; });
}

void AdapterCache::note_slot(const TieredImage& image, int32_t slot) {
  for (Adapter* adapter : image.adapters) {
    adapter->slot.store(slot);
  }
}

void AdapterCache::note_use(Slot& slot) {
  slot.last_used = ++clock_;
  slot.level = level_;
}

Residency AdapterCache::place(Adapter& adapter, int32_t pages_beside, Evict evict) {
  const std::shared_ptr<TieredImage>& image = adapter.image;
  if (image->slot > 0) {
    return slot_of(adapter).is_loading ? Residency::kLoading : Residency::kResident;
  }
  if (uploader_.is_full()) {
    return Residency::kLoading;
  }
  const std::shared_ptr<const AdapterImage> copy = host_.fetch(image, evict);
  if (copy == nullptr) {
    return Residency::kLoading;
  }
  while (free_slots_.empty() && evict_idle(evict)) {
  }
  const int32_t count = pages_of(*image);
  if (free_slots_.empty() || pool_.num_free() - count < pages_beside ||
      !pool_.try_reserve(PageUse::kAdapter, page_row(free_slots_.back()), count)) {
    return Residency::kShort;
  }
  const int32_t slot = free_slots_.back();
  free_slots_.pop_back();
  Slot& entry = slots_[static_cast<size_t>(slot)];
  entry.image = image;
  entry.num_pages = count;
  entry.users = 0;
  entry.is_loading = true;
  entry.is_given_up = false;
  entry.wanted_epoch = 0;
  note_use(entry);
  image->slot = slot;
  stream_bytes_ += static_cast<int64_t>(image->stream_bytes);
  ++num_loads_;
  ++adapter.loads;
  host_.begin_upload(*image);
  uploader_.add(slot, copy, page_row(slot), &image->bytes_uploaded);
  return Residency::kLoading;
}

int32_t AdapterCache::acquire(Adapter& adapter) {
  Slot& entry = slot_of(adapter);
  MOELORA_ASSERT(adapter.image->slot > 0 && !entry.is_loading);
  ++entry.users;
  note_use(entry);
  host_.note_use(*adapter.image);
  return adapter.image->slot;
}

void AdapterCache::note_start(Adapter& adapter, bool is_first) {
  Slot& entry = slot_of(adapter);
  if (is_first && !entry.is_fresh) {
    ++num_hits_;
    ++adapter.hits;
  }
  entry.is_fresh = false;
}

PinnedShare AdapterCache::pinned() const {
  PinnedShare share;
  for (const Slot& slot : slots_) {
    if (slot.image != nullptr && is_pinned(*slot.image)) {
      ++share.slots;
      share.pages += slot.num_pages;
    }
  }
  return share;
}

bool AdapterCache::can_place(const Adapter& adapter) const {
  return adapter.image->slot > 0 || !free_slots_.empty() ||
         std::any_of(slots_.begin() + 1, slots_.end(), [](const Slot& slot) { return !is_pinned(*slot.image); });
}

void AdapterCache::release(int32_t slot) {
  Slot& entry = slots_[static_cast<size_t>(slot)];
  MOELORA_ASSERT(slot > 0 && entry.users > 0);
  --entry.users;
  note_use(entry);
}

void AdapterCache::free_slot(int32_t slot) {
  Slot& entry = slots_[static_cast<size_t>(slot)];
  MOELORA_ASSERT(entry.users == 0 && !entry.is_loading);
  --num_resident_;
  entry.image->slot = 0;
  note_slot(*entry.image, 0);
  std::erase(unpublished_, slot);
  pool_.release(page_row(slot), entry.num_pages);
  stream_bytes_ -= static_cast<int64_t>(entry.image->stream_bytes);
  entry.num_pages = 0;
  entry.image.reset();
  free_slots_.push_back(slot);
}

bool AdapterCache::mark_wanted(const Adapter& adapter) {
  if (adapter.image->slot > 0) {
    slot_of(adapter).wanted_epoch = wanted_epoch_;
  }
  return adapter.image->slot > 0 || adapter.image->is_reading;
}

bool AdapterCache::may_leave(const Slot& slot, Evict evict) const {
  return slot.image != nullptr && slot.users == 0 && !slot.is_loading && (evict == Evict::kAny || !is_wanted(slot)) &&
         !is_pinned(*slot.image);
}

int32_t AdapterCache::num_idle_pages(Evict evict) const {
  int32_t pages = 0;
  for (const Slot& slot : slots_) {
    pages += may_leave(slot, evict) ? slot.num_pages : 0;
  }
  return pages;
}

double AdapterCache::value(const Slot& slot) const {
  const double cost = upload_cost(*slot.image) + (slot.image->host == nullptr ? read_cost(*slot.image) : 0);
  return slot.level + cost / (static_cast<double>(slot.num_pages) * static_cast<double>(pool_.page_bytes()));
}

// The slot of the image that evict_idle frees, 0 if there is none.
int32_t AdapterCache::find_idle(Evict evict) const {
  int32_t best = 0;
  std::tuple<bool, double, uint64_t> best_key;
  for (size_t i = 1; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!may_leave(slot, evict)) {
      continue;
    }
    const std::tuple<bool, double, uint64_t> key{is_wanted(slot), value(slot), slot.last_used};
    if (best == 0 || key < best_key) {
      best = static_cast<int32_t>(i);
      best_key = key;
    }
  }
  return best;
}

std::optional<uint64_t> AdapterCache::idle_since(Evict evict) const {
  const int32_t slot = find_idle(evict);
  return slot == 0 ? std::nullopt : std::optional(slots_[static_cast<size_t>(slot)].last_used);
}

bool AdapterCache::evict_idle(Evict evict) {
  const int32_t slot = find_idle(evict);
  if (slot == 0) {
    return false;
  }
  level_ = std::max(level_, value(slots_[static_cast<size_t>(slot)]));
  free_slot(slot);
  ++num_evictions_;
  return true;
}

void AdapterCache::give_up(int32_t slot) {
  slots_[static_cast<size_t>(slot)].is_given_up = true;
  uploader_.cancel(slot);
}

bool AdapterCache::give_up_newest_upload() {
  int32_t newest = 0;
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    if (slots_[slot].is_loading &&
        (newest == 0 || slots_[slot].last_used > slots_[static_cast<size_t>(newest)].last_used)) {
      newest = static_cast<int32_t>(slot);
    }
    if (slots_[slot].is_loading && slots_[slot].is_given_up) {
      return true;
    }
  }
  if (newest > 0) {
    give_up(newest);
  }
  return newest > 0;
}

void AdapterCache::poll(std::vector<FailedLoad>& failed) {
  host_.poll(failed);
  for (Upload upload; uploader_.take(&upload);) {
    Slot& entry = slots_[static_cast<size_t>(upload.slot)];
    const std::shared_ptr<TieredImage> image = entry.image;
    entry.is_loading = false;
    entry.is_fresh = true;
    ++num_resident_;
    note_use(entry);
    if (upload.image == image->host || upload.image == image->growing) {
      upload.image.reset();  // before the tier may drop it
    }
    host_.end_upload(*image, failed);
    if (upload.image != nullptr) {
      host_.discard(std::move(upload.image));  // its read failed before: nobody else has it
    }
    if (upload.status != Status::kOk && upload.status != Status::kCancelled) {
      failed.push_back({image, upload.status, upload.message});
    }
    if (upload.status != Status::kOk || !image->is_held()) {
      free_slot(upload.slot);
      continue;
    }
    upload_ms_ += upload.ms;
    for (Adapter* adapter : image->adapters) {
      adapter->upload_ms.store(upload.ms);
    }
    if (told_ && !image->adapters.empty()) {
      told_(*image->adapters.front(), upload.ms);
    }
    unpublished_.push_back(upload.slot);
    note_slot(*image, upload.slot);
  }
  if (!unregistered_.empty()) {
    collect();
  }
}

void AdapterCache::publish(Stream& stream) {
  for (const int32_t slot : unpublished_) {
    const size_t pitch = static_cast<size_t>(pages_per_slot_) * sizeof(PageId);
    device_.push(page_table_->mirror(), static_cast<size_t>(slot) * pitch,
                 static_cast<size_t>(slots_[static_cast<size_t>(slot)].num_pages) * sizeof(PageId), stream);
    if (kernels_.lora_resolve != nullptr) {
      const AdapterTable resolved = table();
      auto* out = reinterpret_cast<ResolvedLora*>(resolved_.data()) +
                  int64_t{slot} * resolved.num_layers * resolved.modules_per_layer();
      kernels_.lora_resolve({resolved, slot, out}, stream);
    }
  }
  unpublished_.clear();
}

AdapterTable AdapterCache::table() const {
  AdapterTable table;
  table.pool = pool_.base();
  table.page_table = reinterpret_cast<const PageId*>(page_table_->device());
  table.pages_per_slot = pages_per_slot_;
  table.page_granules = static_cast<int32_t>(pool_.page_bytes() / static_cast<int64_t>(kGranuleBytes));
  table.num_experts = num_experts_;
  table.num_layers = num_layers_;
  table.resolved = reinterpret_cast<const ResolvedLora*>(resolved_.data());
  return table;
}

void AdapterCache::audit() const {
  int32_t pages = 0;
  int64_t bytes = 0;
  size_t placed = 0;
  int32_t resident = 0;
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    const Slot& entry = slots_[slot];
    MOELORA_ASSERT(entry.users == 0 || (entry.image != nullptr && !entry.is_loading));
    if (entry.image == nullptr) {
      continue;
    }
    MOELORA_ASSERT(entry.num_pages == pages_of(*entry.image) && entry.image->slot == static_cast<int32_t>(slot));
    MOELORA_ASSERT(entry.is_loading == entry.image->is_copied_from);
    const PageId* row = page_row(static_cast<int32_t>(slot));
    for (int32_t i = 0; i < entry.num_pages; ++i) {
      MOELORA_ASSERT(pool_.leases(row[i]) == 1);
    }
    pages += entry.num_pages;
    bytes += static_cast<int64_t>(entry.image->stream_bytes);
    resident += entry.is_loading ? 0 : 1;
    ++placed;
  }
  MOELORA_ASSERT(pages == pool_.num_used(PageUse::kAdapter) && bytes == stream_bytes_ && resident == num_resident_);
  MOELORA_ASSERT(placed + free_slots_.size() + 1 == slots_.size());
  host_.audit();
  size_t registered = 0;
  size_t leaving = 0;
  for (const auto& image : host_.images()) {
    registered += image->adapters.size();
    leaving += static_cast<size_t>(image->num_leaving);
    placed -= image->slot > 0 ? 1 : 0;
    for (const Adapter* adapter : image->adapters) {
      MOELORA_ASSERT(adapters_.contains(adapter) && adapter->image == image);
    }
  }
  MOELORA_ASSERT(registered == adapters_.size() && leaving == leaving_.size() && placed == 0);
}

}  // namespace moelora
