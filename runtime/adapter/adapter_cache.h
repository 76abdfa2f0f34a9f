// SPDX-License-Identifier: Apache-2.0
// Which adapters an engine knows and which of them are on the device. An image takes a slot of the adapter table and
// as many pool pages as its stream needs; idle images stay until their pages or slot are wanted and leave least
// recently used first. Callers hold the engine's lock; `upload` runs on the engine thread before the step that needs
// it. Invariants (audit): an image in use is resident; a slot's page row names its lease.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/adapter/adapter.h"
#include "runtime/memory/page_pool.h"

namespace moelora {

class AdapterCache {
 public:
  AdapterCache(PagePool& pool, int32_t num_resident_max, int32_t num_layers, int32_t num_experts, Device& device);
  ~AdapterCache();
  AdapterCache(const AdapterCache&) = delete;
  AdapterCache& operator=(const AdapterCache&) = delete;

  // Registry.
  void add(const std::shared_ptr<Adapter>& adapter);  // the name is taken over from an older one
  void remove(const Adapter& adapter);
  [[nodiscard]] std::shared_ptr<Adapter> find(const std::string& name) const;
  [[nodiscard]] std::vector<std::shared_ptr<Adapter>> list() const;
  [[nodiscard]] size_t num_registered() const { return adapters_.size(); }
  [[nodiscard]] uint64_t host_bytes() const { return host_bytes_; }

  [[nodiscard]] int32_t pages_of(const AdapterImage& image) const;
  // Makes the adapter's image resident and counts one user: its slot, or 0 if slots or pages are short now.
  [[nodiscard]] int32_t try_acquire(Adapter& adapter);
  void release(int32_t slot);
  // False if every slot is held by another adapter that the host has pinned.
  [[nodiscard]] bool can_place(const Adapter& adapter) const;
  // Frees the least recently used idle and unpinned image: true if one was freed.
  bool evict_idle();
  // Frees images that no Adapter holds any more and no row uses.
  void collect();
  // Copies what try_acquire placed since the last call into its pages.
  void upload(const Kernels& kernels, Stream& stream);

  [[nodiscard]] AdapterTable table() const;
  [[nodiscard]] const AdapterImage& image(int32_t slot) const { return *slots_[static_cast<size_t>(slot)].image; }
  [[nodiscard]] int32_t num_resident() const;
  [[nodiscard]] uint64_t num_loads() const { return num_loads_; }
  [[nodiscard]] uint64_t num_evictions() const { return num_evictions_; }
  [[nodiscard]] uint64_t num_hits() const { return num_hits_; }
  void audit() const;

 private:
  struct Slot {
    std::shared_ptr<const AdapterImage> image;
    int32_t num_pages = 0;  // leased; their ids are the slot's row of page_table_
    int32_t users = 0;
    uint64_t last_used = 0;
  };
  [[nodiscard]] PageId* page_row(int32_t slot) const {
    return reinterpret_cast<PageId*>(page_table_->host()) + static_cast<int64_t>(slot) * pages_per_slot_;
  }
  [[nodiscard]] int32_t find_slot(const AdapterImage* image) const;
  [[nodiscard]] bool is_pinned(const AdapterImage* image) const;
  [[nodiscard]] bool is_held(const AdapterImage* image) const;
  void free_slot(int32_t slot);
  void note_slot(const AdapterImage* image, int32_t slot);

  PagePool& pool_;
  int32_t num_layers_;
  int32_t num_experts_;
  int32_t pages_per_slot_;
  std::vector<Slot> slots_;  // [0] is "no adapter"
  Device& device_;
  std::unique_ptr<MirrorMemory> page_table_;  // int32 [slots, pages_per_slot]
  DeviceMemory resolved_;                     // ResolvedLora of all slots; empty where records are read in place
  std::vector<int32_t> uploads_;              // slots to fill before the next forward
  std::vector<std::shared_ptr<Adapter>> adapters_;
  std::unordered_map<std::string, std::shared_ptr<Adapter>> names_;
  uint64_t clock_ = 0;
  uint64_t host_bytes_ = 0;
  uint64_t num_loads_ = 0, num_evictions_ = 0, num_hits_ = 0;
};

}  // namespace moelora
