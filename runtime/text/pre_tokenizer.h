// SPDX-License-Identifier: Apache-2.0
// `pre_tokenizer` of tokenizer.json: cuts a normalised text into the pieces that merges stay within. Split (isolated),
// Digits, ByteLevel and Metaspace, and sequences of them, each working on the pieces of the one before; any other is
// refused by name. ByteLevel's alphabet is not applied to the text: runtime/text/bpe.h works on bytes instead.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/text/json_field.h"
#include "runtime/text/regex.h"

namespace moelora {

// Consecutive pieces of `text`: piece i is the bytes [ends[i - 1], ends[i]).
struct Pieces {
  std::string text;
  std::vector<size_t> ends;
  std::vector<size_t> spare;  // the ends of the stage before
};

class PreTokenizer {
 public:
  // Throws kCorrupt or kUnsupported, naming the field. With a null field a text is one piece.
  explicit PreTokenizer(const JsonField& field);

  // Whether pieces are to be seen through GPT-2's byte alphabet.
  [[nodiscard]] bool is_byte_level() const { return byte_level_; }
  // Cuts pieces.text (well-formed UTF-8, not empty), which Metaspace and a prefix space change. `at_start`: it begins
  // where the whole text begins.
  void apply(Pieces& pieces, bool at_start, RegexScratch& scratch) const;

 private:
  enum class Kind : uint8_t { kSplit, kPrefixSpace, kMetaspace };
  enum class Prepend : uint8_t { kNever, kFirst, kAlways };
  struct Stage {
    Kind kind;
    std::unique_ptr<Regex> regex;  // of kSplit
    std::string mark;              // of kMetaspace: what stands for a space
    Prepend prepend = Prepend::kNever;
    bool split = false;
  };
  void add(const JsonField& field);
  void add_split(const JsonField& field);
  void add_metaspace(const JsonField& field);
  static void split(const Regex& regex, Pieces& pieces, RegexScratch& scratch);
  static void prefix_space(Pieces& pieces);
  static void metaspace(const Stage& stage, Pieces& pieces, bool at_start);

  std::vector<Stage> stages_;
  bool byte_level_ = false;
};

}  // namespace moelora
