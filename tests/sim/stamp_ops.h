// SPDX-License-Identifier: Apache-2.0
// The simulator's model is a chain of hashes. An op leaves a stamp in the KV page of each token: of the stamp before,
// of one earlier stamp, of the token and of a word of the adapter's pages; a sampled token is a hash of its row's
// stamp. So a token is right only if the pages of its sequence hold what its tokens say and the pages of its slot
// hold its adapter, and what is right can be computed from the request alone.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/adapter/adapter_image.h"
#include "runtime/engine/request.h"

namespace moelora::sim {

using Stamp = uint64_t;

constexpr int32_t kVocabSize = 256;
constexpr int32_t kEosToken = 1;

constexpr Stamp mix(Stamp a, Stamp b) {
  Stamp x = a ^ (b + 0x9e3779b97f4a7c15ull + (a << 6) + (a >> 2));
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The adapter of a row as its tokens show it. `image` 0 = none.
struct AdapterKey {
  uint64_t image = 0;
  int32_t num_pages = 0;
  float scale = 0.0f;
};

// Of `granules` KiB; every page begins with a word of its own, the first one goes on with the number of pages.
// With a folder it can be made again.
std::shared_ptr<AdapterImage> make_image(uint64_t image, int32_t granules, int64_t page_bytes, bool has_folder);

// The stamp of the token behind those of `before`.
Stamp next_stamp(const std::vector<Stamp>& before, int32_t token, const AdapterKey& adapter);
// The token that the sampler gives behind `tokens`, of which the first num_prompt are no output.
int32_t next_token(Stamp last, const std::vector<int32_t>& tokens, size_t num_prompt, const Request& request,
                   uint64_t seed);

}  // namespace moelora::sim
