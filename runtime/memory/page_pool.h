// SPDX-License-Identifier: Apache-2.0
// One pool of equal byte-sized pages per device, taken at open; KV blocks and LoRA weights lease pages from the same
// free list. Nothing is set aside for either use and any free page serves. Not thread-safe: callers hold the
// engine's lock. Invariants (audit): free + leased = total, each free page free once; the leases of all pages add up to
// those that were taken and not given back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/memory/device_memory.h"

namespace moelora {

using PageId = int32_t;
enum class PageUse : uint8_t { kFree = 0, kKv = 1, kAdapter = 2 };

class PagePool {
 public:
  // Takes num_pages * page_bytes of `device`, which must outlive the pool. Throws Error{kDeviceNomem} with the numbers.
  PagePool(int32_t num_pages, int64_t page_bytes, Device& device);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // All or nothing: `count` page ids into `out`, or false and nothing taken.
  [[nodiscard]] bool try_reserve(PageUse use, PageId* out, int32_t count);
  // One more lease on pages already leased (KV blocks that two sequences read).
  void share(const PageId* pages, int32_t count);
  void release(const PageId* pages, int32_t count);
  [[nodiscard]] int32_t leases(PageId page) const { return leases_[static_cast<size_t>(page)]; }

  [[nodiscard]] std::byte* base() const { return memory_.data(); }
  [[nodiscard]] int64_t page_bytes() const { return page_bytes_; }
  [[nodiscard]] int32_t num_pages() const { return num_pages_; }
  [[nodiscard]] int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  [[nodiscard]] int32_t num_used(PageUse use) const { return used_[static_cast<size_t>(use)]; }
  [[nodiscard]] int64_t num_leases() const { return num_leases_; }  // of all pages
  // Re-derives every counter; throws Error{kInternal} where one is off. Takes memory for it.
  void audit() const;

 private:
  int32_t num_pages_;
  int64_t page_bytes_;
  DeviceMemory memory_;
  std::vector<PageId> free_;
  std::vector<int32_t> leases_;
  std::vector<PageUse> use_;
  int32_t used_[3] = {0, 0, 0};
  int64_t num_leases_ = 0;
};

// Move-only ownership of pages, in order. Storage for `capacity` ids is taken at construction, so that growing in a
// step allocates nothing.
class PageLease {
 public:
  PageLease() = default;
  PageLease(PagePool& pool, PageUse use, int32_t capacity);
  PageLease(PageLease&& other) noexcept;
  PageLease& operator=(PageLease&& other) noexcept;
  PageLease(const PageLease&) = delete;
  PageLease& operator=(const PageLease&) = delete;
  ~PageLease() { resize_down(0); }

  [[nodiscard]] bool try_grow(int32_t count);
  void resize_down(int32_t size);
  // Becomes a second lease on the first `count` pages of `other`; this must be empty.
  void share_from(const PageLease& other, int32_t count);
  // From place `first` on, at most the end, `count` further leases on `pages`; what was there goes back.
  void share_at(int32_t first, const PageId* pages, int32_t count);
  // Of no other lease, and another one once a page has left: while it stays the same, pages are only added at the end.
  [[nodiscard]] uint64_t epoch() const { return epoch_; }
  [[nodiscard]] const PageId* data() const { return pages_.data(); }
  [[nodiscard]] int32_t size() const { return size_; }
  [[nodiscard]] int32_t capacity() const { return static_cast<int32_t>(pages_.size()); }

 private:
  static uint64_t next_epoch();
  PagePool* pool_ = nullptr;
  PageUse use_ = PageUse::kKv;
  std::vector<PageId> pages_;
  int32_t size_ = 0;
  uint64_t epoch_ = next_epoch();
};

}  // namespace moelora
