// SPDX-License-Identifier: Apache-2.0
// Which adapters an engine knows and which of them are on the device. An image takes a slot of the adapter table and
// as many pool pages as its stream needs, is copied beside the steps (AdapterUploader) from its host copy, which is
// read first if it was dropped (HostTier), and is resident from the first `poll` after its last byte has arrived; idle
// images stay until their pages or slot are wanted and leave by cost and last use (reload_cost.h). Callers hold the
// engine's lock; poll, place, acquire and publish are for the engine thread. Nothing here depends on how many are
// registered. Invariants (audit): an image in use is resident; a slot's page row names its lease, from `place` on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/adapter/adapter.h"
#include "runtime/adapter/adapter_uploader.h"
#include "runtime/adapter/host_tier.h"
#include "runtime/memory/page_pool.h"

namespace moelora {

// kLoading: on its way from disk or host memory, or next for a loader; ask again. kShort: slots or pages are short now.
enum class Residency : uint8_t { kResident, kLoading, kShort };

// Of images on the device, or on their way there.
struct PinnedShare {
  int32_t slots = 0, pages = 0;
};

struct AdapterCacheLimits {
  int32_t num_resident_max = 0;
  int32_t num_layers = 0;
  int32_t num_experts = 0;
  int64_t upload_bytes_per_second = 0;  // of reading, and of copying to the device; 0 = no bound
  uint64_t host_bytes_max = 0;          // of host copies; 0 = no bound
  const ModelConfig* config = nullptr;  // of images with a folder
};

class AdapterCache {
 public:
  // `on_load` is called on other threads whenever there is something to poll.
  AdapterCache(const AdapterCacheLimits& limits, PagePool& pool, const Kernels& kernels, Device& device,
               std::function<void()> on_load);
  ~AdapterCache();
  AdapterCache(const AdapterCache&) = delete;
  AdapterCache& operator=(const AdapterCache&) = delete;

  // Registry.
  // The name is taken over from an older one. Throws Error{kDeviceNomem, kNomem} if it can never be loaded.
  void add(const std::shared_ptr<Adapter>& adapter);
  void remove(const Adapter& adapter);
  [[nodiscard]] std::shared_ptr<Adapter> find(const std::string& name) const;
  [[nodiscard]] std::vector<std::shared_ptr<Adapter>> list() const;
  [[nodiscard]] size_t num_registered() const { return adapters_.size(); }
  [[nodiscard]] const HostTierStats& host() const { return host_.stats(); }

  [[nodiscard]] int32_t pages_of(const AdapterFacts& image) const;
  [[nodiscard]] bool is_placed(const Adapter& adapter) const { return adapter.image->slot > 0; }
  // Begins the upload of the adapter's image if it has no slot, or the read of its files if there is no host copy;
  // `pages_beside` must stay free.
  [[nodiscard]] Residency place(Adapter& adapter, int32_t pages_beside, Evict evict = Evict::kAny);
  // What has a slot now is wanted from `mark_wanted` to the next `forget_wanted`. False if it has none and is not being
  // read either.
  void forget_wanted() { ++wanted_epoch_; }
  bool mark_wanted(const Adapter& adapter);
  // Pages of the images that evict_idle would free one by one.
  [[nodiscard]] int32_t num_idle_pages(Evict evict) const;
  // Of the image that evict_idle would free first, when it was used last, by the clock of `tick`.
  [[nodiscard]] std::optional<uint64_t> idle_since(Evict evict) const;
  uint64_t tick() { return ++clock_; }
  [[nodiscard]] bool has_free_slot() const { return !free_slots_.empty(); }
  // True if pages of an upload come back soon, by a later `poll`: the newest was given up, or one before.
  bool give_up_newest_upload();
  // Counts one user of a resident image: its slot.
  [[nodiscard]] int32_t acquire(Adapter& adapter);
  // A request starts with the adapter that it has acquired, for the first time or again after it was preempted. One
  // that finds what others used before is a hit.
  void note_start(Adapter& adapter, bool is_first);
  void release(int32_t slot);
  // False if every slot is held by another adapter that the host has pinned.
  [[nodiscard]] bool can_place(const Adapter& adapter) const;
  // What cannot leave because the host has pinned it; whether the adapter's image is part of that.
  [[nodiscard]] PinnedShare pinned() const;
  [[nodiscard]] bool is_pinned(const Adapter& adapter) const { return is_placed(adapter) && is_pinned(*adapter.image); }
  // Frees an idle and unpinned image, the one that is worth least, wanted ones last: true if one was freed.
  bool evict_idle(Evict evict = Evict::kAny);
  // An Adapter has the image: one that is registered, or has requests in flight.
  [[nodiscard]] bool is_held(const TieredImage& image) const;
  // Frees images, and their host copies, that no Adapter holds any more: it is registered or has requests in flight.
  // Gives up their uploads.
  void collect();
  // Takes what has arrived; appends what failed. Failed and given-up images have left their slots again, but one whose
  // read failed while it was uploaded leaves it at a later poll.
  void poll(std::vector<FailedLoad>& failed);
  // Queues, before the step that may use them, what tells the ops of newly resident images.
  void publish(Stream& stream);
  // `told` is called in poll for each image that has arrived, with one of its adapters and the upload's milliseconds.
  void tell_uploads(std::function<void(const Adapter&, double)> told) { told_ = std::move(told); }
  [[nodiscard]] int32_t num_uploading() const { return uploader_.num_begun(); }
  [[nodiscard]] bool is_loading() const { return !uploader_.is_empty() || host_.is_reading(); }
  // Some upload, some read from disk has not ended yet.
  [[nodiscard]] bool is_uploader_working() { return uploader_.is_working(); }
  [[nodiscard]] bool is_reader_working() { return host_.is_reader_working(); }
  void stop_loading();

  [[nodiscard]] AdapterTable table() const;
  [[nodiscard]] const AdapterFacts& image(int32_t slot) const { return *slots_[static_cast<size_t>(slot)].image; }
  [[nodiscard]] int32_t num_resident() const { return num_resident_; }
  // Of the last pages of all images that have some.
  [[nodiscard]] int64_t wasted_bytes() const {
    return pool_.num_used(PageUse::kAdapter) * pool_.page_bytes() - stream_bytes_;
  }
  [[nodiscard]] uint64_t num_loads() const { return num_loads_; }
  [[nodiscard]] uint64_t num_evictions() const { return num_evictions_; }
  [[nodiscard]] uint64_t num_hits() const { return num_hits_; }
  [[nodiscard]] double upload_ms() const { return upload_ms_; }  // of all uploads
  void audit() const;

 private:
  struct Slot {
    std::shared_ptr<TieredImage> image;
    int32_t num_pages = 0;  // leased; their ids are the slot's row of page_table_
    int32_t users = 0;
    bool is_loading = false;  // the uploader has it
    bool is_given_up = false;
    bool is_fresh = false;  // resident and not used yet
    uint64_t wanted_epoch = 0;
    double level = 0;  // reload_cost.h
    uint64_t last_used = 0;
  };
  [[nodiscard]] PageId* page_row(int32_t slot) const {
    return reinterpret_cast<PageId*>(page_table_->host()) + static_cast<int64_t>(slot) * pages_per_slot_;
  }
  [[nodiscard]] Slot& slot_of(const Adapter& adapter) { return slots_[static_cast<size_t>(adapter.image->slot)]; }
  [[nodiscard]] static bool is_pinned(const TieredImage& image);
  [[nodiscard]] bool is_wanted(const Slot& slot) const { return slot.wanted_epoch == wanted_epoch_; }
  [[nodiscard]] bool may_leave(const Slot& slot, Evict evict) const;
  [[nodiscard]] double value(const Slot& slot) const;
  [[nodiscard]] int32_t find_idle(Evict evict) const;
  void note_use(Slot& slot);
  void free_slot(int32_t slot);
  void give_up(int32_t slot);
  [[nodiscard]] bool try_forget(TieredImage& image);
  static void note_slot(const TieredImage& image, int32_t slot);

  PagePool& pool_;
  int32_t num_layers_;
  int32_t num_experts_;
  int32_t pages_per_slot_;
  std::vector<Slot> slots_;  // [0] is "no adapter"
  std::vector<int32_t> free_slots_;
  Device& device_;
  std::unique_ptr<MirrorMemory> page_table_;  // int32 [slots, pages_per_slot]
  DeviceMemory resolved_;                     // ResolvedLora of all slots; empty where records are read in place
  const Kernels& kernels_;
  HostTier host_;
  AdapterUploader uploader_;
  std::vector<int32_t> unpublished_;  // resident slots that the device has not been told of
  std::unordered_map<const Adapter*, std::shared_ptr<Adapter>> adapters_;
  std::unordered_map<std::string, std::shared_ptr<Adapter>> names_;
  std::vector<std::shared_ptr<Adapter>> leaving_;           // removed, with requests in flight then
  std::vector<std::shared_ptr<TieredImage>> unregistered_;  // that `collect` must look at
  std::function<void(const Adapter&, double)> told_;
  uint64_t clock_ = 0;
  uint64_t wanted_epoch_ = 1;
  double level_ = 0;
  int32_t num_resident_ = 0;
  int64_t stream_bytes_ = 0;  // of images that have pages
  uint64_t num_loads_ = 0, num_evictions_ = 0, num_hits_ = 0;
  double upload_ms_ = 0;
};

}  // namespace moelora
