// SPDX-License-Identifier: Apache-2.0
// The text of an output while its tokens come: whole code points whatever the borders of tokens, and an end where a
// stop string is complete. Stop strings are matched on bytes; what may still become one is held back, so that no part
// of the one that ends the output is ever given out. Engine and reader each run one over the same tokens and come to
// the same end: the engine to stop, without an allocation in a step, the reader to have the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/text/tokenizer.h"

namespace moelora {

struct StopString {
  std::string text;    // well-formed UTF-8, not empty
  int32_t number = 0;  // its name for the host
};

class OutputText {
 public:
  // Takes all the memory that pushing and taking by turns needs. Stop strings that are complete before min_tokens
  // tokens are there count as text.
  OutputText(std::shared_ptr<const Tokenizer> tokenizer, const std::vector<StopString>& stops, int32_t min_tokens);
  OutputText(const OutputText&) = delete;
  OutputText& operator=(const OutputText&) = delete;

  // The next token. Returns the number of the stop string that has ended the text, -1 if none has. Of several, the one
  // that is complete first; of those complete at the same byte the longest.
  int32_t push(int32_t token);
  // No token follows: an unfinished code point becomes U+FFFD, and nothing is held back any more.
  void finish();

  // What can be given out.
  [[nodiscard]] std::string_view ready() const { return std::string_view(text_).substr(0, text_.size() - held_); }
  // Drops the first bytes of ready(), at most its size.
  void take(size_t bytes) { text_.erase(0, bytes); }
  [[nodiscard]] size_t num_tokens() const { return num_tokens_; }  // pushed
  [[nodiscard]] bool finished() const { return finished_; }

 private:
  struct Stop {
    std::string text;
    int32_t number;
    std::vector<uint32_t> borders;  // [i]: length of the longest proper prefix of text that ends its first i bytes
    uint32_t matched = 0;           // bytes of text that end the output so far
  };
  void match(size_t from);

  std::shared_ptr<const Tokenizer> tokenizer_;
  TextStream stream_;
  std::vector<Stop> stops_;
  size_t min_tokens_;
  size_t num_tokens_ = 0;
  int32_t ended_by_ = -1;
  bool finished_ = false;
  std::string text_;  // not taken yet
  size_t held_ = 0;   // bytes at its end that may become a stop string
};

// Where a reader wants text: whole code points, `n` bytes of them.
struct TextTarget {
  OutputText& source;
  char* buffer;
  size_t capacity;  // 4 at least: a code point fits
  size_t n = 0;
};

}  // namespace moelora
