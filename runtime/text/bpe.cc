// SPDX-License-Identifier: Apache-2.0
// Encoding; bpe_file.cc reads the model.
#include "runtime/text/bpe.h"

#include <algorithm>
#include <cstring>

#include "runtime/io/utf8.h"

namespace moelora {
namespace {

using Symbol = BpeScratch::Symbol;
using Symbols = std::vector<Symbol>;

constexpr int32_t kNoMerge = INT32_MAX;
constexpr size_t kCacheSlots = 1 << 15;  // 2 MiB
// Up to here looking at every pair for each merge is faster than keeping a heap.
constexpr size_t kFewSymbols = 96;
constexpr std::string_view kMark = "\xE2\x96\x81";

// Slot of a piece of 1 to CachedPiece::kBytesMax bytes.
size_t slot_of(std::string_view piece) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  uint64_t hash = piece.size() * kOdd;
  size_t at = 0;
  for (; at + 8 <= piece.size(); at += 8) {
    uint64_t part;
    std::memcpy(&part, piece.data() + at, 8);
    hash = (hash ^ part) * kOdd;
    hash ^= hash >> 29;
  }
  uint64_t rest = 0;
  std::memcpy(&rest, piece.data() + at, piece.size() - at);
  hash = (hash ^ rest) * kOdd;
  hash ^= hash >> 32;
  return (hash * kOdd) >> (64 - 15);
}
static_assert(kCacheSlots == size_t{1} << 15);

}  // namespace

const Bpe::Merge* Bpe::find_merge(int32_t left, int32_t right) const {
  if (merges_.empty()) {
    return nullptr;
  }
  const uint64_t pair = static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  const size_t mask = merges_.size() - 1;
  for (size_t at = (pair * 0x9E3779B97F4A7C15) >> merge_shift_;; ++at) {
    const Merge& merge = merges_[at & mask];
    if (merge.pair == pair) {
      return &merge;
    }
    if (merge.pair == UINT64_MAX) {
      return nullptr;
    }
  }
}

void Bpe::rank(Symbol& left, const Symbol& right) const {
  const Merge* merge = find_merge(left.id, right.id);
  left.rank = merge == nullptr ? kNoMerge : merge->rank;
  left.merged = merge == nullptr ? -1 : merge->id;
}

void Bpe::encode(std::string_view piece, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (!cut_at_marks_) {
    encode_part(piece, scratch, ids);
    return;
  }
  // The parts' merges do not meet, so their order among each other does not matter.
  size_t start = 0;
  for (size_t at = piece.find(kMark); at != std::string_view::npos; at = piece.find(kMark, at + kMark.size())) {
    const bool after_mark = at >= kMark.size() && piece.substr(at - kMark.size(), kMark.size()) == kMark;
    if (at > start && !after_mark) {
      encode_part(piece.substr(start, at - start), scratch, ids);
      start = at;
    }
  }
  encode_part(piece.substr(start), scratch, ids);
}

void Bpe::encode_part(std::string_view part, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (part.empty() || part.size() > CachedPiece::kBytesMax) {
    merge_part(part, scratch, ids);
    return;
  }
  if (scratch.cache.empty()) {
    scratch.cache.resize(kCacheSlots);
  }
  CachedPiece& slot = scratch.cache[slot_of(part)];
  if (slot.num_bytes == part.size() && std::memcmp(slot.bytes, part.data(), part.size()) == 0) {
    ids.insert(ids.end(), slot.tokens, slot.tokens + slot.num_tokens);
    return;
  }
  const size_t before = ids.size();
  merge_part(part, scratch, ids);
  const size_t count = ids.size() - before;
  if (count <= CachedPiece::kTokensMax) {
    slot.num_bytes = static_cast<uint8_t>(part.size());
    slot.num_tokens = static_cast<uint8_t>(count);
    std::memcpy(slot.bytes, part.data(), part.size());
    std::copy(ids.begin() + static_cast<std::ptrdiff_t>(before), ids.end(), slot.tokens);
  }
}

void Bpe::merge_part(std::string_view part, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (ignore_merges_) {
    if (const auto found = whole_.find(part); found != whole_.end()) {
      ids.push_back(found->second);
      return;
    }
  }
  Symbols& symbols = scratch.symbols;
  symbols.clear();
  start_symbols(part, symbols);
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    rank(symbols[i], symbols[i + 1]);
  }
  if (symbols.size() <= kFewSymbols) {
    merge_few(symbols);
  } else {
    merge_many(scratch);
  }
  for (const Symbol& symbol : symbols) {
    ids.push_back(symbol.id);
  }
}

bool Bpe::append_fallback(std::string_view character, Symbols& symbols) const {
  for (const char byte : character) {
    if (byte_ids_[static_cast<unsigned char>(byte)] < 0) {
      return false;
    }
  }
  for (const char byte : character) {
    symbols.push_back({byte_ids_[static_cast<unsigned char>(byte)], kNoMerge, -1});
  }
  return true;
}

void Bpe::start_symbols(std::string_view part, Symbols& symbols) const {
  bool after_unknown = false;
  const auto append_unknown = [&] {
    if (unknown_ >= 0 && !(fuse_unknown_ && after_unknown)) {
      symbols.push_back({unknown_, kNoMerge, -1});
    }
    after_unknown = true;
  };
  if (byte_level_) {
    for (const char byte : part) {
      const int32_t id = byte_ids_[static_cast<unsigned char>(byte)];
      if (id >= 0) {
        symbols.push_back({id, kNoMerge, -1});
        after_unknown = false;
      } else {
        append_unknown();
      }
    }
    return;
  }
  for (size_t at = 0, length = 0; at < part.size(); at += length) {
    const uint32_t point = utf8_code_point(part, at, &length);
    const int32_t id = point < char_ids_.size() ? char_ids_[point] : -1;
    if (id >= 0) {
      symbols.push_back({id, kNoMerge, -1});
      after_unknown = false;
    } else if (byte_fallback_ && append_fallback(part.substr(at, length), symbols)) {
      after_unknown = false;
    } else {
      append_unknown();
    }
  }
}

void Bpe::merge_few(Symbols& symbols) const {
  size_t count = symbols.size();
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      best = symbols[i].rank < symbols[best].rank ? i : best;
    }
    if (symbols[best].rank == kNoMerge) {
      break;
    }
    symbols[best].id = symbols[best].merged;
    symbols[best].rank = kNoMerge;
    std::copy(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 2,
              symbols.begin() + static_cast<std::ptrdiff_t>(count),
              symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    --count;
    if (best + 1 < count) {
      rank(symbols[best], symbols[best + 1]);
    }
    if (best > 0) {
      rank(symbols[best - 1], symbols[best]);
    }
  }
  symbols.resize(count);
}

// The same with the pairs in a heap. An entry whose rank is no longer that of its position is out of date: a pair
// never comes back to a place, because its symbols only grow.
void Bpe::merge_many(BpeScratch& scratch) const {
  Symbols& symbols = scratch.symbols;
  auto& links = scratch.links;
  auto& heap = scratch.heap;
  const auto entry = [](int32_t rank, int32_t at) {
    return static_cast<uint64_t>(static_cast<uint32_t>(rank)) << 32 | static_cast<uint32_t>(at);
  };
  const auto count = static_cast<int32_t>(symbols.size());
  links.resize(symbols.size());
  heap.clear();
  for (int32_t i = 0; i < count; ++i) {
    links[static_cast<size_t>(i)] = {i - 1, i + 1 < count ? i + 1 : -1};
    if (symbols[static_cast<size_t>(i)].rank != kNoMerge) {
      heap.push_back(entry(symbols[static_cast<size_t>(i)].rank, i));
    }
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto rank_again = [&](int32_t left) {
    const int32_t right = links[static_cast<size_t>(left)].next;
    Symbol& symbol = symbols[static_cast<size_t>(left)];
    symbol.rank = kNoMerge;
    if (right < 0) {
      return;
    }
    rank(symbol, symbols[static_cast<size_t>(right)]);
    if (symbol.rank != kNoMerge) {
      heap.push_back(entry(symbol.rank, left));
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto at = static_cast<int32_t>(heap.back() & UINT32_MAX);
    const auto wanted = static_cast<int32_t>(heap.back() >> 32);
    heap.pop_back();
    Symbol& symbol = symbols[static_cast<size_t>(at)];
    if (symbol.rank != wanted) {
      continue;
    }
    const int32_t gone = links[static_cast<size_t>(at)].next;
    const int32_t behind = links[static_cast<size_t>(gone)].next;
    symbol.id = symbol.merged;
    symbols[static_cast<size_t>(gone)] = {-1, kNoMerge, -1};
    links[static_cast<size_t>(at)].next = behind;
    if (behind >= 0) {
      links[static_cast<size_t>(behind)].previous = at;
    }
    rank_again(at);
    if (const int32_t before = links[static_cast<size_t>(at)].previous; before >= 0) {
      rank_again(before);
    }
  }
  std::erase_if(symbols, [](const Symbol& symbol) { return symbol.id < 0; });
}

}  // namespace moelora
