// SPDX-License-Identifier: Apache-2.0
// A conversation with kept KV. Adapter and scale are fixed for life, because they are part of what the KV means.
// `tokens` is the truth; the KV may be dropped under pressure and is computed again on the next turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/adapter/adapter.h"
#include "runtime/memory/kv_cache.h"

namespace moelora {

struct Session {
  uint64_t id = 0;
  std::shared_ptr<Adapter> adapter;  // null = base
  float scale = 1.0f;
  std::atomic<bool> busy{false};  // one running request at a time
  std::atomic<bool> closed{false};
  // Under the engine's lock while not busy; the running sequence's otherwise.
  std::vector<int32_t> tokens;  // capacity for the context is reserved
  std::shared_ptr<KvSequence> kv;
  uint64_t last_used = 0;
};

}  // namespace moelora
