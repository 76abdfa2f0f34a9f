// SPDX-License-Identifier: Apache-2.0
// What it costs to bring an image back to a tier that it left, in bytes of a copy to the device that would take as
// long. A model and no measurement: what leaves is the same in every run.
//
// Tiers evict by cost-aware least recently used (GreedyDual-Size): a tier has a level, an image that is used gets the
// level of that moment, and the image with the smallest level + cost / bytes leaves and raises the tier's level to that
// sum. Where all images cost the same a byte this is least recently used; one that is dear for its size stays longer,
// but not for ever.
#pragma once

#include "runtime/adapter/adapter_image.h"

namespace moelora {

// An upload takes a turn of the loader and some of its chunks are not full.
constexpr double kUploadFixedBytes = 1 << 20;
// Reading and packing run at a fraction of the bus; opening files and each tensor's header entry come on top.
constexpr double kReadSlowness = 8;
constexpr double kReadFixedBytes = 4 << 20;
constexpr double kReadTensorBytes = 4 << 10;

inline double read_cost(const AdapterFacts& image) {
  return kReadSlowness *
         (kReadFixedBytes + static_cast<double>(image.file_bytes) + kReadTensorBytes * image.num_tensors);
}
inline double upload_cost(const AdapterFacts& image) {
  return kUploadFixedBytes + static_cast<double>(image.stream_bytes);
}

}  // namespace moelora
