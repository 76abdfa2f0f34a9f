// SPDX-License-Identifier: Apache-2.0
// An image as an engine keeps it: what there is to say about it, always; its bytes in host memory and on the device
// while they are worth their place there; its files on disk if it was loaded from a folder. Shared by clones. HostTier
// and AdapterCache, under the engine's lock, are the only ones that write to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/adapter/adapter_image.h"

namespace moelora {

struct Adapter;

struct TieredImage : AdapterFacts {
  // An image without a stream is on disk only.
  explicit TieredImage(std::shared_ptr<const AdapterImage> image) : AdapterFacts(*image) {
    if (image->stream.size() > 0) {
      stream_bytes = image->stream.size();
      host = std::move(image);
    }
  }
  // The host copy may be dropped.
  [[nodiscard]] bool is_reloadable() const { return !dir.empty(); }
  // Some adapter that is registered, or was unloaded with requests in flight, has it.
  [[nodiscard]] bool is_held() const { return !adapters.empty() || num_leaving > 0; }

  std::vector<Adapter*> adapters;  // registered
  int32_t num_leaving = 0;
  bool is_known = false;   // to a HostTier
  bool was_known = false;  // now or before
  int32_t slot = 0;        // of the adapter table, from `place` on; 0 = none

  std::shared_ptr<const AdapterImage> host;     // null: on disk only
  std::shared_ptr<const AdapterImage> growing;  // what is there of the copy while it is read
  size_t host_index = 0;                        // in HostTier's images
  size_t copy_index = 0;                        // in its copies
  bool is_reading = false;                      // the host copy is on its way from the disk
  bool is_copied_from = false;                  // the uploader reads the host copy
  bool is_fresh = false;                        // read and no upload has begun since
  double host_level = 0;                        // what the tier's level was when this was last used
  uint64_t last_used = 0;

  std::atomic<uint64_t> bytes_uploaded{0};  // of stream_bytes, of its last upload; grows beside the steps
};

}  // namespace moelora
