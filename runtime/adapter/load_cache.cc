// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/load_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/adapter/adapter_plan.h"

namespace moelora {
namespace {

constexpr size_t kMaxHeaderBytes = size_t{16} << 20;

// Whether a header means the same under both.
bool mean_the_same(const AdapterLoadOptions& x, const AdapterLoadOptions& y) {
  return x.max_rank == y.max_rank && x.lenient == y.lenient && x.compute == y.compute &&
         x.orientation == y.orientation && x.b_layout == y.b_layout;
}

}  // namespace

std::shared_ptr<const AdapterPlan> LoadCache::find_plan(const std::string& config_json, const std::string& header,
                                                        size_t file_bytes, const AdapterLoadOptions& options) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const auto& plan) {
    return plan->facts.file_bytes == file_bytes && mean_the_same(plan->options, options) && plan->header == header &&
           plan->config_json == config_json;
  });
  if (found == plans_.end()) {
    return nullptr;
  }
  std::rotate(found, found + 1, plans_.end());
  return plans_.back();
}

void LoadCache::keep_plan(std::shared_ptr<const AdapterPlan> plan) {
  if (!plan->warnings.empty() || plan->header.size() > kMaxHeaderBytes ||
      find_plan(plan->config_json, plan->header, plan->facts.file_bytes, plan->options) != nullptr) {
    return;
  }
  std::shared_ptr<const AdapterPlan> oldest;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  if (plans_.size() == kMaxPlans) {
    oldest = std::move(plans_.front());
    plans_.erase(plans_.begin());
  }
  plans_.push_back(std::move(plan));
}

void LoadCache::keep_memory(HostBytes memory, uint64_t bytes_awaited) {
  std::vector<HostBytes> surplus;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto place = std::upper_bound(memories_.begin(), memories_.end(), memory.capacity(),
                                      [](size_t room, const HostBytes& other) { return room < other.capacity(); });
  memories_.insert(place, std::move(memory));
  surplus = take_surplus(bytes_awaited);
}

void LoadCache::bound_memory(uint64_t bytes_awaited) {
  std::vector<HostBytes> surplus;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  surplus = take_surplus(bytes_awaited);
}

std::vector<HostBytes> LoadCache::take_surplus(uint64_t bytes_awaited) {
  uint64_t bytes = 0;
  for (const HostBytes& memory : memories_) {
    bytes += memory.capacity();
  }
  auto kept = memories_.begin();
  while (memories_.end() - kept > 1 && bytes > bytes_awaited) {
    bytes -= kept->capacity();
    ++kept;
  }
  std::vector<HostBytes> surplus(std::make_move_iterator(memories_.begin()), std::make_move_iterator(kept));
  memories_.erase(memories_.begin(), kept);
  return surplus;
}

HostBytes LoadCache::take_memory(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(memories_.begin(), memories_.end(),
                                  [&](const HostBytes& memory) { return memory.capacity() >= bytes; });
  if (found == memories_.end() || found->capacity() - bytes > bytes / 8) {
    return {};
  }
  HostBytes memory = std::move(*found);
  memories_.erase(found);
  return memory;
}

void LoadCache::free_memory() {
  std::vector<HostBytes> memories;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(memories, memories_);
}

void LoadCache::clear() {
  free_memory();
  std::vector<std::shared_ptr<const AdapterPlan>> plans;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(plans, plans_);
}

}  // namespace moelora
