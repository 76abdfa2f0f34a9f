// SPDX-License-Identifier: Apache-2.0
// What the loads of one engine leave for the next ones: plans of headers that were read, and the memory of host copies
// that were dropped, whose pages need no clearing by the system. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/adapter/adapter_image.h"

namespace moelora {

struct AdapterPlan;

class LoadCache {
 public:
  // A plan of a large model's adapter takes tens of megabytes.
  static constexpr size_t kMaxPlans = 4;

  // The plan of exactly these texts, of a weights file of as many bytes, loaded with the same meaning. Null if it is
  // not here.
  [[nodiscard]] std::shared_ptr<const AdapterPlan> find_plan(const std::string& config_json, const std::string& header,
                                                             size_t file_bytes, const AdapterLoadOptions& options);
  // The plan that was asked for least recently goes for it. Not kept are one that is here, one with warnings, which
  // name its files, and one of a very long header.
  void keep_plan(std::shared_ptr<const AdapterPlan> plan);

  // The smaller ones are freed until all have at most `bytes_awaited` together, what the next loads will take, or one
  // is left.
  void keep_memory(HostBytes memory, uint64_t bytes_awaited = 0);
  void bound_memory(uint64_t bytes_awaited);
  // With room for at least `bytes`, and at most an eighth more; or empty.
  [[nodiscard]] HostBytes take_memory(size_t bytes);
  void free_memory();
  void clear();  // plans too

 private:
  // What must go, to be freed without the lock.
  [[nodiscard]] std::vector<HostBytes> take_surplus(uint64_t bytes_awaited);

  std::mutex mutex_;
  std::vector<std::shared_ptr<const AdapterPlan>> plans_;  // under the lock; the one asked for last is at the end
  std::vector<HostBytes> memories_;                        // under the lock; the smallest room first
};

}  // namespace moelora
