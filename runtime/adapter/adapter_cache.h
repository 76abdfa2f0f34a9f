// SPDX-License-Identifier: Apache-2.0
// Which adapters an engine knows and which of them are on the device. An image takes a slot of the adapter table and
// as many pool pages as its stream needs, is copied beside the steps (AdapterUploader) and is resident from the first
// `poll` after its last byte has arrived; idle images stay until their pages or slot are wanted and leave least
// recently used first. Callers hold the engine's lock; poll, place, acquire and publish are for the engine thread.
// Invariants (audit): an image in use is resident; a slot's page row names its lease, from `place` on.
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
#include "runtime/memory/page_pool.h"

namespace moelora {

// kLoading: on its way, or next for the loader; ask again. kShort: slots or pages are short now.
enum class Residency : uint8_t { kResident, kLoading, kShort };
// Which idle images may leave. kUnwanted: those that the next requests of the queue will need stay.
enum class Evict : uint8_t { kUnwanted, kAny };

struct AdapterCacheLimits {
  int32_t num_resident_max = 0;
  int32_t num_layers = 0;
  int32_t num_experts = 0;
  int64_t upload_bytes_per_second = 0;  // 0 = no bound
};

struct FailedUpload {
  std::shared_ptr<const AdapterImage> image;
  Status status = Status::kOk;
  std::string message;
};

class AdapterCache {
 public:
  // `on_upload` is called on another thread whenever there is something to poll.
  AdapterCache(const AdapterCacheLimits& limits, PagePool& pool, const Kernels& kernels, Device& device,
               std::function<void()> on_upload);
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
  [[nodiscard]] bool is_placed(const Adapter& adapter) const { return find_slot(adapter.image.get()) > 0; }
  // Begins the upload of the adapter's image if it has no slot; `pages_beside` must stay free.
  [[nodiscard]] Residency place(Adapter& adapter, int32_t pages_beside, Evict evict = Evict::kAny);
  // What has a slot now is wanted from `mark_wanted` (false: it has none) to the next `forget_wanted`.
  void forget_wanted();
  bool mark_wanted(const Adapter& adapter);
  // Pages of the images that evict_idle would free one by one.
  [[nodiscard]] int32_t num_idle_pages(Evict evict) const;
  // Of the image that evict_idle would free first, when it was used last, by the clock of `tick`.
  [[nodiscard]] std::optional<uint64_t> idle_since(Evict evict) const;
  uint64_t tick() { return ++clock_; }
  [[nodiscard]] bool has_free_slot() const { return find_slot(nullptr) > 0; }
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
  // Frees the least recently used idle and unpinned image, wanted ones last: true if one was freed.
  bool evict_idle(Evict evict = Evict::kAny);
  // An Adapter holds it: one that is registered, or has requests in flight.
  [[nodiscard]] bool is_held(const AdapterImage* image) const;
  // Frees images that no Adapter holds any more: it is registered or has requests in flight. Gives up their uploads.
  void collect();
  // Takes what has arrived; appends what failed. Failed and given-up images have left their slots again.
  void poll(std::vector<FailedUpload>& failed);
  // Queues, before the step that may use them, what tells the ops of newly resident images.
  void publish(Stream& stream);
  [[nodiscard]] bool is_uploading() const { return !uploader_.is_empty(); }
  void stop_uploads() { uploader_.stop(); }

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
    bool is_loading = false;  // the uploader has it
    bool is_given_up = false;
    bool is_fresh = false;  // resident and not used yet
    bool is_wanted = false;
    uint64_t last_used = 0;
  };
  [[nodiscard]] PageId* page_row(int32_t slot) const {
    return reinterpret_cast<PageId*>(page_table_->host()) + static_cast<int64_t>(slot) * pages_per_slot_;
  }
  [[nodiscard]] int32_t find_slot(const AdapterImage* image) const;
  [[nodiscard]] bool is_pinned(const AdapterImage* image) const;
  [[nodiscard]] bool is_registered(const AdapterImage* image) const;
  [[nodiscard]] bool may_leave(const Slot& slot, Evict evict) const;
  [[nodiscard]] int32_t find_idle(Evict evict) const;  // 0 = none
  void free_slot(int32_t slot);
  void give_up(int32_t slot);
  void note_slot(const AdapterImage* image, int32_t slot);

  PagePool& pool_;
  int32_t num_layers_;
  int32_t num_experts_;
  int32_t pages_per_slot_;
  std::vector<Slot> slots_;  // [0] is "no adapter"
  Device& device_;
  std::unique_ptr<MirrorMemory> page_table_;  // int32 [slots, pages_per_slot]
  DeviceMemory resolved_;                     // ResolvedLora of all slots; empty where records are read in place
  const Kernels& kernels_;
  AdapterUploader uploader_;
  std::vector<int32_t> unpublished_;  // resident slots that the device has not been told of
  std::vector<std::shared_ptr<Adapter>> adapters_;
  std::vector<std::shared_ptr<Adapter>> leaving_;  // removed, with requests in flight then
  std::unordered_map<std::string, std::shared_ptr<Adapter>> names_;
  uint64_t clock_ = 0;
  uint64_t host_bytes_ = 0;
  uint64_t num_loads_ = 0, num_evictions_ = 0, num_hits_ = 0;
};

}  // namespace moelora
