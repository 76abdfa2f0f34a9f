// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/load_cache.h"

#include <algorithm>
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

void LoadCache::keep_memory(HostBytes memory) {
  // The smaller one is freed as the caller's argument, without the lock.
  const std::lock_guard<std::mutex> lock(mutex_);
  if (memory.capacity() > memory_.capacity()) {
    std::swap(memory, memory_);
  }
}

HostBytes LoadCache::take_memory(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t room = memory_.capacity();
  return room < bytes || room - bytes > bytes / 8 ? HostBytes{} : std::exchange(memory_, {});
}

void LoadCache::free_memory() {
  HostBytes memory;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(memory, memory_);
}

void LoadCache::clear() {
  free_memory();
  std::vector<std::shared_ptr<const AdapterPlan>> plans;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(plans, plans_);
}

}  // namespace moelora
