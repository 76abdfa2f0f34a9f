// SPDX-License-Identifier: Apache-2.0
// What keeps the memory of Weights alive: the mapped checkpoint, or one anonymous mapping of random values. Private
// to weights*.cc.
#pragma once

#include <cstddef>
#include <memory>

#include "runtime/io/safetensors.h"
#include "runtime/memory/device_memory.h"
#include "runtime/model/weights.h"

namespace moelora {

// Zero pages in huge-page friendly memory, released with the object.
class AnonymousMemory {
 public:
  explicit AnonymousMemory(size_t bytes);  // throws Error{kNomem}
  ~AnonymousMemory();
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

struct Weights::Storage {
  std::unique_ptr<Checkpoint> checkpoint;
  std::unique_ptr<AnonymousMemory> memory;
  DeviceMemory device;
};

}  // namespace moelora
