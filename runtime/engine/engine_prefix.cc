// SPDX-License-Identifier: Apache-2.0
// The prefix cache as the engine feeds it: who may share with whom, what enters after a step, what nobody can ask for
// again. Under the lock.
#include <bit>
#include <new>

#include "runtime/engine/engine_parts.h"

namespace moelora {

// On a thread of the host. Without an adapter that acts, a request shares with those of the base.
void Engine::Parts::open_prefix(Sequence& sequence) {
  if (prefix == nullptr) {
    return;
  }
  const Request& request = sequence.request();
  try {
    PrefixKey key{0, 0, request.cache_salt};
    if (sequence.row_scale != 0.0f) {
      key.generation = request.adapter->generation;
      key.scale_bits = std::bit_cast<uint32_t>(sequence.row_scale);
    }
    sequence.space = prefix->open_space(key);
  } catch (const std::bad_alloc&) {
    throw Error(Status::kNomem, "out of host memory for a request");
  }
}

// What the step has filled, of all rows but those whose logits are not finite.
void Engine::Parts::cache_blocks() {
  if (prefix == nullptr) {
    return;
  }
  size_t sampled = 0;
  for (const BatchEntry& entry : batch_.entries) {
    const bool is_broken = entry.samples && outputs_[sampled++].status != 0;
    if (!is_broken) {
      prefix->insert(*entry.sequence->kv, entry.sequence->space, entry.sequence->tokens.data());
    }
  }
}

// After a request of it has finished, or it was unloaded. Clones compute the same.
void Engine::Parts::drop_prefix(const Adapter& adapter) {
  if (prefix != nullptr && adapter.unloaded.load() && !adapters->is_held(*adapter.image)) {
    prefix->drop(adapter.generation);
  }
}

}  // namespace moelora
