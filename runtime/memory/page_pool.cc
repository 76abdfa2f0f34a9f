// SPDX-License-Identifier: Apache-2.0
#include "runtime/memory/page_pool.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels/base/error.h"

namespace moelora {

PagePool::PagePool(int32_t num_pages, int64_t page_bytes, Device& device)
    : num_pages_(num_pages), page_bytes_(page_bytes) {
  MOELORA_ASSERT(num_pages > 0 && page_bytes > 0);
  memory_ = DeviceMemory(device, static_cast<size_t>(num_pages) * static_cast<size_t>(page_bytes),
                         "page pool (device_memory_bytes)");
  leases_.assign(static_cast<size_t>(num_pages), 0);
  use_.assign(static_cast<size_t>(num_pages), PageUse::kFree);
  free_.resize(static_cast<size_t>(num_pages));
  // The lowest ids leave first, so that a lightly used pool touches little memory.
  for (int32_t page = 0; page < num_pages; ++page) {
    free_[static_cast<size_t>(num_pages - 1 - page)] = page;
  }
  used_[0] = num_pages;
}

bool PagePool::try_reserve(PageUse use, PageId* out, int32_t count) {
  MOELORA_ASSERT(use != PageUse::kFree && count >= 0);
  if (count > num_free()) {
    return false;
  }
  for (int32_t i = 0; i < count; ++i) {
    const PageId page = free_.back();
    free_.pop_back();
    leases_[static_cast<size_t>(page)] = 1;
    use_[static_cast<size_t>(page)] = use;
    out[i] = page;
  }
  used_[0] -= count;
  used_[static_cast<size_t>(use)] += count;
  num_leases_ += count;
  return true;
}

void PagePool::share(const PageId* pages, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    int32_t& leases = leases_[static_cast<size_t>(pages[i])];
    MOELORA_ASSERT(leases > 0);
    ++leases;
  }
  num_leases_ += count;
}

void PagePool::release(const PageId* pages, int32_t count) {
  for (int32_t i = count; i-- > 0;) {
    const auto page = static_cast<size_t>(pages[i]);
    MOELORA_ASSERT(pages[i] >= 0 && pages[i] < num_pages_ && leases_[page] > 0);
    --num_leases_;
    if (--leases_[page] > 0) {
      continue;
    }
    --used_[static_cast<size_t>(use_[page])];
    use_[page] = PageUse::kFree;
    ++used_[0];
    free_.push_back(pages[i]);  // capacity is num_pages: never allocates
  }
}

void PagePool::audit() const {
  int32_t counted[3] = {0, 0, 0};
  int64_t leases = 0;
  for (int32_t page = 0; page < num_pages_; ++page) {
    const auto index = static_cast<size_t>(page);
    MOELORA_ASSERT((leases_[index] == 0) == (use_[index] == PageUse::kFree));
    ++counted[static_cast<size_t>(use_[index])];
    leases += leases_[index];
  }
  for (int use = 0; use < 3; ++use) {
    MOELORA_ASSERT(counted[use] == used_[use]);
  }
  MOELORA_ASSERT(counted[0] == num_free() && leases == num_leases_);
  std::vector<bool> seen(static_cast<size_t>(num_pages_));
  for (const PageId page : free_) {
    MOELORA_ASSERT(leases_[static_cast<size_t>(page)] == 0 && !seen[static_cast<size_t>(page)]);
    seen[static_cast<size_t>(page)] = true;
  }
}

uint64_t PageLease::next_epoch() {
  static std::atomic<uint64_t> last{0};  // leases of several engines are made on several threads
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

PageLease::PageLease(PagePool& pool, PageUse use, int32_t capacity)
    : pool_(&pool), use_(use), pages_(static_cast<size_t>(capacity)) {}

PageLease::PageLease(PageLease&& other) noexcept
    : pool_(other.pool_), use_(other.use_), pages_(std::move(other.pages_)), size_(std::exchange(other.size_, 0)) {}

PageLease& PageLease::operator=(PageLease&& other) noexcept {
  if (this != &other) {
    resize_down(0);
    pool_ = other.pool_;
    use_ = other.use_;
    pages_ = std::move(other.pages_);
    size_ = std::exchange(other.size_, 0);
    epoch_ = next_epoch();
  }
  return *this;
}

bool PageLease::try_grow(int32_t count) {
  MOELORA_ASSERT(pool_ != nullptr && size_ + count <= capacity());
  if (!pool_->try_reserve(use_, pages_.data() + size_, count)) {
    return false;
  }
  size_ += count;
  return true;
}

void PageLease::resize_down(int32_t size) {
  if (size >= size_) {
    return;
  }
  pool_->release(pages_.data() + size, size_ - size);
  size_ = size;
  epoch_ = next_epoch();
}

void PageLease::share_from(const PageLease& other, int32_t count) {
  MOELORA_ASSERT(size_ == 0 && count <= other.size_ && count <= capacity());
  std::copy_n(other.pages_.data(), count, pages_.data());
  if (count > 0) {
    pool_->share(pages_.data(), count);
  }
  size_ = count;
}

void PageLease::share_at(int32_t first, const PageId* pages, int32_t count) {
  MOELORA_ASSERT(first <= size_ && first + count <= capacity());
  pool_->share(pages, count);
  const int32_t replaced = std::min(count, size_ - first);
  if (replaced > 0) {
    pool_->release(pages_.data() + first, replaced);
    epoch_ = next_epoch();
  }
  std::copy_n(pages, count, pages_.data() + first);
  size_ = std::max(size_, first + count);
}

}  // namespace moelora
