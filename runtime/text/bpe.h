// SPDX-License-Identifier: Apache-2.0
// `model` of tokenizer.json: byte-pair encoding of one piece. Its characters (bytes, under the byte alphabet) become
// tokens, then the adjacent pair of lowest rank, the leftmost among equals, is merged until none is left. Immutable;
// what one thread needs is in BpeScratch, with a cache of whole pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/text/json_field.h"

namespace moelora {

constexpr int32_t kTokenIdMax = (1 << 24) - 1;

// Tokens by id as the file writes them; `present` tells holes from empty tokens.
struct Vocabulary {
  std::vector<std::string> texts;
  std::vector<bool> present;
  void set(int32_t id, const std::string& text);
};

// Direct-mapped: a piece has one place, and the last one there stays. A slot is one cache line.
struct alignas(64) CachedPiece {
  static constexpr size_t kBytesMax = 30;
  static constexpr size_t kTokensMax = 8;
  uint8_t num_bytes = 0;  // 0: empty
  uint8_t num_tokens = 0;
  char bytes[kBytesMax] = {};
  int32_t tokens[kTokensMax] = {};
};

struct BpeScratch {
  struct Symbol {
    int32_t id;
    int32_t rank;    // of the merge with the next one; kNoMerge if there is none
    int32_t merged;  // what that merge gives
  };
  struct Link {
    int32_t previous;
    int32_t next;  // -1 = none
  };
  std::vector<CachedPiece> cache;
  std::vector<Symbol> symbols;
  std::vector<Link> links;
  std::vector<uint64_t> heap;  // rank << 32 | position
};

class Bpe {
 public:
  // `model` is the file's field; fills `vocabulary`. Throws kCorrupt or kUnsupported, naming the field.
  Bpe(const JsonField& model, bool byte_level, Vocabulary& vocabulary);

  // Appends the tokens of `piece` (well-formed UTF-8 unless byte-level) to `ids`. Linear for pieces of ordinary words;
  // n log n for long ones.
  void encode(std::string_view piece, BpeScratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Merge {
    uint64_t pair = UINT64_MAX;  // left << 32 | right
    int32_t rank = 0;
    int32_t id = 0;
  };
  struct BytesHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  using TextIds = std::unordered_map<std::string_view, int32_t>;

  void read_settings(const JsonField& model);
  static TextIds read_vocabulary(const JsonField& field, Vocabulary& vocabulary);
  void read_merges(const JsonField& field, const TextIds& ids);
  void read_start_symbols(const TextIds& ids);
  void read_unknown(const JsonField& field, const TextIds& ids);
  void insert_merge(const Merge& merge);
  [[nodiscard]] const Merge* find_merge(int32_t left, int32_t right) const;
  void rank(BpeScratch::Symbol& left, const BpeScratch::Symbol& right) const;

  void encode_part(std::string_view part, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  void merge_part(std::string_view part, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  void start_symbols(std::string_view part, std::vector<BpeScratch::Symbol>& symbols) const;
  bool append_fallback(std::string_view character, std::vector<BpeScratch::Symbol>& symbols) const;
  void merge_few(std::vector<BpeScratch::Symbol>& symbols) const;
  void merge_many(BpeScratch& scratch) const;

  bool byte_level_;
  bool byte_fallback_ = false;
  bool fuse_unknown_ = false;
  bool ignore_merges_ = false;
  bool cut_at_marks_ = false;      // no merge spans the border before a U+2581 that follows another character
  int32_t unknown_ = -1;           // -1: what is in no vocabulary is dropped
  int32_t byte_ids_[256];          // byte-level: of the byte; else of its <0xHH>; -1 = none
  std::vector<int32_t> char_ids_;  // by code point; -1 = none
  std::vector<Merge> merges_;      // hash table, a power of two
  int merge_shift_ = 0;
  std::unordered_map<std::string, int32_t, BytesHash, std::equal_to<>> whole_;  // only with ignore_merges
};

}  // namespace moelora
