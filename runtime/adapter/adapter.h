// SPDX-License-Identifier: Apache-2.0
// An adapter registered with an engine: a name, a factor and a share of an image. Handle = identity: loading the same
// folder again gives another Adapter. Clones share the image and therefore its residency.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/adapter/adapter_image.h"

namespace moelora {

struct Adapter {
  uint64_t id = 0;  // unique in the process, never reused
  // Of what the adapter computes: equal for clones only. 0 is the base.
  uint64_t generation = 0;
  std::string name;
  float scale = 1.0f;  // the handle's own factor (clone)
  std::shared_ptr<const AdapterImage> image;
  std::atomic<int32_t> slot{0};       // > 0 while resident; written by the engine thread
  std::atomic<int32_t> pins{0};       // by the host; a pinned adapter is not evicted from the device
  std::atomic<int32_t> in_flight{0};  // requests submitted and not finished
  std::atomic<bool> unloaded{false};
  std::atomic<uint64_t> requests{0}, tokens{0}, loads{0}, hits{0};
  std::atomic<double> upload_ms{0};  // of the image's last upload
};

}  // namespace moelora
