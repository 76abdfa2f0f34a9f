// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/adapter_cache.h"

#include <algorithm>

#include "kernels/base/error.h"

namespace moelora {

AdapterCache::AdapterCache(const AdapterCacheLimits& limits, PagePool& pool, const Kernels& kernels, Device& device,
                           std::function<void()> on_upload)
    : pool_(pool),
      num_layers_(limits.num_layers),
      num_experts_(limits.num_experts),
      pages_per_slot_(pool.num_pages()),
      slots_(static_cast<size_t>(limits.num_resident_max) + 1),
      device_(device),
      kernels_(kernels),
      uploader_(pool, device, kernels, std::move(on_upload), limits.upload_bytes_per_second) {
  // A row as wide as the pool serves every adapter that fits at all; beyond 16 M entries the widest adapter is
  // bounded instead (register_adapter checks).
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
}

AdapterCache::~AdapterCache() {
  stop_uploads();
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    pool_.release(page_row(static_cast<int32_t>(slot)), slots_[slot].num_pages);
  }
}

void AdapterCache::add(const std::shared_ptr<Adapter>& adapter) {
  const int32_t pages = pages_of(*adapter->image);
  if (pages > pages_per_slot_) {
    throw Error(Status::kDeviceNomem, "adapter '" + adapter->name + "' needs " + std::to_string(pages) +
                                          " pages; an adapter can have at most " + std::to_string(pages_per_slot_) +
                                          " (raise device_memory_bytes or lower max_adapters_resident)");
  }
  if (!is_registered(adapter->image.get())) {
    host_bytes_ += adapter->image->stream.size();
  }
  const int32_t slot = find_slot(adapter->image.get());  // a clone's image may be there
  adapter->slot.store(slots_[static_cast<size_t>(slot)].is_loading ? 0 : slot);
  for (const auto& other : adapters_) {
    if (other->image == adapter->image) {
      adapter->upload_ms.store(other->upload_ms.load());
    }
  }
  adapters_.push_back(adapter);
  names_[adapter->name] = adapter;
}

void AdapterCache::remove(const Adapter& adapter) {
  const auto named = names_.find(adapter.name);
  if (named != names_.end() && named->second.get() == &adapter) {
    names_.erase(named);
  }
  const AdapterImage* image = adapter.image.get();
  const auto at =
      std::find_if(adapters_.begin(), adapters_.end(), [&](const auto& held) { return held.get() == &adapter; });
  if (at == adapters_.end()) {
    return;
  }
  if (adapter.in_flight.load() > 0) {
    leaving_.push_back(*at);
  }
  adapters_.erase(at);
  if (!is_registered(image)) {
    host_bytes_ -= image->stream.size();
  }
}

std::shared_ptr<Adapter> AdapterCache::find(const std::string& name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Adapter>> AdapterCache::list() const {
  return adapters_;
}

int32_t AdapterCache::pages_of(const AdapterImage& image) const {
  const auto bytes = static_cast<int64_t>(image.stream.size());
  return static_cast<int32_t>((bytes + pool_.page_bytes() - 1) / pool_.page_bytes());
}

int32_t AdapterCache::find_slot(const AdapterImage* image) const {
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    if (slots_[slot].image.get() == image) {
      return static_cast<int32_t>(slot);
    }
  }
  return 0;
}

bool AdapterCache::is_pinned(const AdapterImage* image) const {
  return std::any_of(adapters_.begin(), adapters_.end(),
                     [&](const auto& adapter) { return adapter->image.get() == image && adapter->pins.load() > 0; });
}

bool AdapterCache::is_registered(const AdapterImage* image) const {
  return std::any_of(adapters_.begin(), adapters_.end(),
                     [&](const auto& adapter) { return adapter->image.get() == image; });
}

bool AdapterCache::is_held(const AdapterImage* image) const {
  return is_registered(image) || std::any_of(leaving_.begin(), leaving_.end(), [&](const auto& adapter) {
           return adapter->image.get() == image && adapter->in_flight.load() > 0;
         });
}

void AdapterCache::note_slot(const AdapterImage* image, int32_t slot) {
  for (const auto& adapter : adapters_) {
    if (adapter->image.get() == image) {
      adapter->slot.store(slot);
    }
  }
}

Residency AdapterCache::place(Adapter& adapter, int32_t pages_beside, Evict evict) {
  int32_t slot = find_slot(adapter.image.get());
  if (slot > 0) {
    return slots_[static_cast<size_t>(slot)].is_loading ? Residency::kLoading : Residency::kResident;
  }
  if (uploader_.is_full()) {
    return Residency::kLoading;
  }
  slot = find_slot(nullptr);
  while (slot == 0 && evict_idle(evict)) {
    slot = find_slot(nullptr);
  }
  const int32_t count = pages_of(*adapter.image);
  if (slot == 0 || pool_.num_free() - count < pages_beside ||
      !pool_.try_reserve(PageUse::kAdapter, page_row(slot), count)) {
    return Residency::kShort;
  }
  Slot& entry = slots_[static_cast<size_t>(slot)];
  entry.image = adapter.image;
  entry.num_pages = count;
  entry.users = 0;
  entry.is_loading = true;
  entry.is_given_up = entry.is_wanted = false;
  entry.last_used = ++clock_;
  ++num_loads_;
  ++adapter.loads;
  uploader_.add(slot, adapter.image, page_row(slot));
  return Residency::kLoading;
}

int32_t AdapterCache::acquire(Adapter& adapter) {
  const int32_t slot = find_slot(adapter.image.get());
  Slot& entry = slots_[static_cast<size_t>(slot)];
  MOELORA_ASSERT(slot > 0 && !entry.is_loading);
  ++entry.users;
  entry.last_used = ++clock_;
  return slot;
}

void AdapterCache::note_start(Adapter& adapter, bool is_first) {
  Slot& entry = slots_[static_cast<size_t>(find_slot(adapter.image.get()))];
  if (is_first && !entry.is_fresh) {
    ++num_hits_;
    ++adapter.hits;
  }
  entry.is_fresh = false;
}

bool AdapterCache::can_place(const Adapter& adapter) const {
  return std::any_of(slots_.begin() + 1, slots_.end(), [&](const Slot& slot) {
    return slot.image == nullptr || slot.image == adapter.image || !is_pinned(slot.image.get());
  });
}

void AdapterCache::release(int32_t slot) {
  Slot& entry = slots_[static_cast<size_t>(slot)];
  MOELORA_ASSERT(slot > 0 && entry.users > 0);
  --entry.users;
  entry.last_used = ++clock_;
}

void AdapterCache::free_slot(int32_t slot) {
  Slot& entry = slots_[static_cast<size_t>(slot)];
  MOELORA_ASSERT(entry.users == 0 && !entry.is_loading);
  note_slot(entry.image.get(), 0);
  std::erase(unpublished_, slot);
  pool_.release(page_row(slot), entry.num_pages);
  entry.num_pages = 0;
  entry.image.reset();
}

void AdapterCache::forget_wanted() {
  for (Slot& slot : slots_) {
    slot.is_wanted = false;
  }
}

bool AdapterCache::mark_wanted(const Adapter& adapter) {
  const int32_t slot = find_slot(adapter.image.get());
  slots_[static_cast<size_t>(slot)].is_wanted = true;
  return slot > 0;
}

bool AdapterCache::may_leave(const Slot& slot, Evict evict) const {
  return slot.image != nullptr && slot.users == 0 && !slot.is_loading && (evict == Evict::kAny || !slot.is_wanted) &&
         !is_pinned(slot.image.get());
}

int32_t AdapterCache::num_idle_pages(Evict evict) const {
  int32_t pages = 0;
  for (const Slot& slot : slots_) {
    pages += may_leave(slot, evict) ? slot.num_pages : 0;
  }
  return pages;
}

int32_t AdapterCache::find_idle(Evict evict) const {
  int32_t oldest = 0;
  const auto leaves_before = [](const Slot& a, const Slot& b) {
    return a.is_wanted != b.is_wanted ? b.is_wanted : a.last_used < b.last_used;
  };
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    if ((oldest == 0 || leaves_before(slots_[slot], slots_[static_cast<size_t>(oldest)])) &&
        may_leave(slots_[slot], evict)) {
      oldest = static_cast<int32_t>(slot);
    }
  }
  return oldest;
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
  free_slot(slot);
  ++num_evictions_;
  return true;
}

void AdapterCache::collect() {
  std::erase_if(leaving_, [](const auto& adapter) { return adapter->in_flight.load() == 0; });
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    const Slot& entry = slots_[slot];
    if (entry.image == nullptr || entry.users > 0 || is_held(entry.image.get())) {
      continue;
    }
    if (entry.is_loading) {
      give_up(static_cast<int32_t>(slot));
    } else {
      free_slot(static_cast<int32_t>(slot));
    }
  }
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

void AdapterCache::poll(std::vector<FailedUpload>& failed) {
  for (Upload upload; uploader_.take(&upload);) {
    Slot& entry = slots_[static_cast<size_t>(upload.slot)];
    entry.is_loading = false;
    entry.is_fresh = true;
    entry.last_used = ++clock_;
    if (upload.status != Status::kOk && upload.status != Status::kCancelled) {
      failed.push_back({upload.image, upload.status, upload.message});
    }
    if (upload.status != Status::kOk || !is_held(upload.image.get())) {
      free_slot(upload.slot);
      continue;
    }
    for (const auto& adapter : adapters_) {
      if (adapter->image == upload.image) {
        adapter->upload_ms.store(upload.ms);
      }
    }
    unpublished_.push_back(upload.slot);
    note_slot(upload.image.get(), upload.slot);
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

int32_t AdapterCache::num_resident() const {
  return static_cast<int32_t>(std::count_if(
      slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.image != nullptr && !slot.is_loading; }));
}

void AdapterCache::audit() const {
  int32_t pages = 0;
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    const Slot& entry = slots_[slot];
    MOELORA_ASSERT(entry.users == 0 || (entry.image != nullptr && !entry.is_loading));
    if (entry.image == nullptr) {
      continue;
    }
    MOELORA_ASSERT(entry.num_pages == pages_of(*entry.image));
    const PageId* row = page_row(static_cast<int32_t>(slot));
    for (int32_t i = 0; i < entry.num_pages; ++i) {
      MOELORA_ASSERT(pool_.leases(row[i]) == 1);
    }
    pages += entry.num_pages;
  }
  MOELORA_ASSERT(pages == pool_.num_used(PageUse::kAdapter));
}

}  // namespace moelora
