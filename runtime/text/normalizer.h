// SPDX-License-Identifier: Apache-2.0
// `normalizer` of tokenizer.json: what happens to a text before it is cut into pieces. NFC and its relatives, Prepend,
// Replace, and sequences of them; any other is refused by name.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/text/json_field.h"
#include "runtime/text/regex.h"

namespace moelora {

enum class UnicodeForm : uint8_t { kNfc, kNfd, kNfkc, kNfkd };

// `text`, well-formed UTF-8, in a normal form. Linear but for the sorting of runs of combining marks (n log n).
// Throws std::bad_alloc.
std::string to_unicode_form(std::string_view text, UnicodeForm form);

class Normalizer {
 public:
  Normalizer() = default;  // leaves every text as it is
  // Throws kCorrupt or kUnsupported, naming the field. A null field leaves every text as it is.
  explicit Normalizer(const JsonField& field);

  [[nodiscard]] bool is_identity() const { return steps_.empty(); }
  // Normalises `text` in place; an empty one stays empty.
  void apply(std::string& text, RegexScratch& scratch) const;

 private:
  enum class Kind : uint8_t { kForm, kPrepend, kReplaceText, kReplaceRegex };
  struct Step {
    Kind kind;
    UnicodeForm form = UnicodeForm::kNfc;
    std::string pattern;
    std::string content;
    std::unique_ptr<Regex> regex;
  };
  void add(const JsonField& field);
  void add_replace(const JsonField& field);

  std::vector<Step> steps_;
};

// Every `pattern` (not empty) in `text` by `content`, from the left.
void replace_all(std::string& text, std::string_view pattern, std::string_view content);

}  // namespace moelora
