// SPDX-License-Identifier: Apache-2.0
// `added_tokens` of tokenizer.json: texts that are cut out before anything else happens and are one token each. The
// search is leftmost, then longest, over a trie of bytes; those with `normalized` are found in normalised text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moelora {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;
  bool single_word = false;  // only with no letter, digit or mark next to it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and behind it
};

class AddedTokenFinder {
 public:
  // `tokens` is borrowed for life. Index i is found where `pattern` stands; empty patterns are ignored.
  explicit AddedTokenFinder(const std::vector<AddedToken>& tokens) : tokens_(&tokens) {}
  void add(size_t index, std::string_view pattern);
  [[nodiscard]] bool empty() const { return nodes_.empty(); }

  struct Match {
    size_t begin;
    size_t end;
    const AddedToken* token;  // null: none up to the end of the text
  };
  // The first match in `text` at or behind `from`, with the white space it takes, never before `from`.
  [[nodiscard]] Match find(std::string_view text, size_t from, bool special_too) const;

 private:
  struct Node {
    int32_t index = -1;  // of the token that ends here
    std::vector<std::pair<unsigned char, uint32_t>> next;
  };
  static constexpr uint32_t kNone = UINT32_MAX;
  [[nodiscard]] uint32_t child(uint32_t node, unsigned char byte) const;
  [[nodiscard]] Match longest(std::string_view text, size_t at, bool special_too) const;

  const std::vector<AddedToken>* tokens_;
  std::vector<Node> nodes_;
  uint32_t first_[256] = {};  // the root's children; 0 = none
};

}  // namespace moelora
