// SPDX-License-Identifier: Apache-2.0
// The registry of an AdapterCache: which adapters there are, and what goes with the last of an image. The rest is in
// adapter_cache.cc.
#include <algorithm>

#include "kernels/base/error.h"
#include "runtime/adapter/adapter_cache.h"

namespace moelora {

void AdapterCache::add(const std::shared_ptr<Adapter>& adapter) {
  const int32_t pages = pages_of(*adapter->image);
  if (pages > pages_per_slot_) {
    throw Error(Status::kDeviceNomem, "adapter '" + adapter->name + "' needs " + std::to_string(pages) +
                                          " pages; an adapter can have at most " + std::to_string(pages_per_slot_) +
                                          " (raise device_memory_bytes or lower max_adapters_resident)");
  }
  TieredImage& image = *adapter->image;
  if (!image.is_known && image.was_known && image.host == nullptr) {
    throw Error(Status::kNotFound, "adapter '" + adapter->name + "': what it shares was unloaded");
  }
  if (!image.is_known) {
    try {
      host_.add(adapter->image);
    } catch (const Error& error) {
      throw Error(error.status(), "adapter '" + adapter->name + "': " + error.what());
    }
  }
  const bool is_resident = image.slot > 0 && !slot_of(*adapter).is_loading;  // a clone's image may be there
  adapter->slot.store(is_resident ? image.slot : 0);
  if (!image.adapters.empty()) {
    adapter->upload_ms.store(image.adapters.front()->upload_ms.load());
  }
  adapters_.emplace(adapter.get(), adapter);
  names_[adapter->name] = adapter;
  image.adapters.push_back(adapter.get());
}

void AdapterCache::remove(const Adapter& adapter) {
  const auto named = names_.find(adapter.name);
  if (named != names_.end() && named->second.get() == &adapter) {
    names_.erase(named);
  }
  const auto held = adapters_.find(&adapter);
  if (held == adapters_.end()) {
    return;
  }
  const std::shared_ptr<Adapter> owner = std::move(held->second);
  adapters_.erase(held);
  const std::shared_ptr<TieredImage>& image = owner->image;
  std::erase(image->adapters, owner.get());
  if (adapter.in_flight.load() > 0) {
    leaving_.push_back(owner);
    ++image->num_leaving;
  }
  if (image->adapters.empty() && !try_forget(*image)) {
    unregistered_.push_back(image);
  }
}

std::shared_ptr<Adapter> AdapterCache::find(const std::string& name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Adapter>> AdapterCache::list() const {
  std::vector<std::shared_ptr<Adapter>> adapters;
  adapters.reserve(adapters_.size());
  for (const auto& [key, adapter] : adapters_) {
    adapters.push_back(adapter);
  }
  std::sort(adapters.begin(), adapters.end(), [](const auto& a, const auto& b) { return a->id < b->id; });
  return adapters;
}

bool AdapterCache::is_held(const TieredImage& image) const {
  return !image.adapters.empty() || std::any_of(leaving_.begin(), leaving_.end(), [&](const auto& adapter) {
    return adapter->image.get() == &image && adapter->in_flight.load() > 0;
  });
}

// True if nothing is left of an image that nobody holds. Slots are the engine thread's, which calls `collect`.
bool AdapterCache::try_forget(TieredImage& image) {
  if (image.is_held() || image.slot > 0 || image.is_reading) {
    return false;
  }
  host_.remove(image);
  return true;
}

void AdapterCache::collect() {
  std::erase_if(leaving_, [](const auto& adapter) {
    const bool is_gone = adapter->in_flight.load() == 0;
    adapter->image->num_leaving -= is_gone ? 1 : 0;
    return is_gone;
  });
  std::erase_if(unregistered_, [&](const std::shared_ptr<TieredImage>& image) {
    if (image->is_held()) {
      return !image->adapters.empty();  // registered once more
    }
    if (image->slot > 0) {
      const Slot& slot = slots_[static_cast<size_t>(image->slot)];
      if (slot.is_loading) {
        give_up(image->slot);
      } else if (slot.users == 0) {
        free_slot(image->slot);
      }
    } else if (image->is_reading) {
      host_.cancel(*image);
    }
    return try_forget(*image);
  });
}

}  // namespace moelora
