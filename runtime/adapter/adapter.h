// SPDX-License-Identifier: Apache-2.0
// An adapter registered with an engine: a name, a factor and a share of an image. Handle = identity: loading the same
// folder again gives another Adapter. Clones share the image and therefore its residency. What an image holds never
// changes: files that differ when they are read again are refused.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/adapter/fair_share.h"
#include "runtime/adapter/tiered_image.h"

namespace moelora {

struct Adapter {
  uint64_t id = 0;          // unique in the process, never reused
  uint64_t generation = 0;  // of what the adapter computes: equal for clones only. 0 is the base
  std::string name;
  float scale = 1.0f;  // the handle's own factor (clone)
  std::shared_ptr<TieredImage> image;
  std::atomic<int32_t> slot{0};       // > 0 while resident; written by the engine thread
  std::atomic<int32_t> pins{0};       // by the host; a pinned adapter is not evicted from the device
  std::atomic<int32_t> in_flight{0};  // requests submitted and not finished
  std::atomic<bool> unloaded{false};
  std::atomic<uint64_t> requests{0}, prompt_tokens{0}, tokens{0}, loads{0}, hits{0};
  std::atomic<double> upload_ms{0};  // of the image's last upload
  FairShare share;                   // under the engine's lock
};

}  // namespace moelora
