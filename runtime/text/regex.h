// SPDX-License-Identifier: Apache-2.0
// The expressions of tokenizer.json (Oniguruma's dialect) over PCRE2, compiled to machine code where the system allows
// it. They come from strangers: what means something else in PCRE2 is rewritten or refused, and match limits bound what
// a hostile expression can cost.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace moelora {

// What one thread needs for matching, whatever the expression. About 32 KiB, at most 1 MiB more while matching.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(RegexScratch&&) noexcept;
  RegexScratch& operator=(RegexScratch&&) noexcept;

 private:
  friend class Regex;
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Immutable once compiled; any number of threads may match, each with its own scratch.
class Regex {
 public:
  // `name` is the file and field for messages. Throws kCorrupt for an expression that does not compile, kUnsupported
  // for one whose meaning differs between the two dialects.
  Regex(const std::string& expression, std::string name);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  // The first match in `text` at or behind byte `from` that is not empty, as bytes [*begin, *end); false if there is
  // none. `text` must be well-formed UTF-8 and `from` the start of a code point. Throws kInvalid if the limits end it.
  bool find(std::string_view text, size_t from, RegexScratch& scratch, size_t* begin, size_t* end) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
  std::string name_;
};

// The expression with \s and \S as the White_Space property, which is what Oniguruma takes them for; PCRE2 adds
// U+180E. Throws kUnsupported, naming `name`, for nested classes and intersections.
std::string to_pcre2(const std::string& expression, const std::string& name);
// An expression that matches `text` literally.
std::string quoted(const std::string& text);

}  // namespace moelora
