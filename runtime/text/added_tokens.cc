// SPDX-License-Identifier: Apache-2.0
#include "runtime/text/added_tokens.h"

#include <utf8proc.h>

#include "runtime/io/utf8.h"

namespace moelora {
namespace {

bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// \w of regular expressions: letters, marks, decimal digits and connectors.
bool is_word(uint32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

size_t code_point_before(std::string_view text, size_t at) {
  do {
    --at;
  } while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

bool stands_alone(std::string_view text, size_t begin, size_t end) {
  size_t length = 0;
  const bool before = begin > 0 && is_word(utf8_code_point(text, code_point_before(text, begin), &length));
  const bool behind = end < text.size() && is_word(utf8_code_point(text, end, &length));
  return !before && !behind;
}

}  // namespace

void AddedTokenFinder::add(size_t index, std::string_view pattern) {
  if (pattern.empty()) {
    return;
  }
  if (nodes_.empty()) {
    nodes_.emplace_back();  // 0 is no node, so that first_ can say "none"
  }
  uint32_t node = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const auto byte = static_cast<unsigned char>(pattern[i]);
    uint32_t next = i == 0 ? (first_[byte] != 0 ? first_[byte] : kNone) : child(node, byte);
    if (next == kNone) {
      next = static_cast<uint32_t>(nodes_.size());
      nodes_.emplace_back();
      if (i == 0) {
        first_[byte] = next;
      } else {
        nodes_[node].next.emplace_back(byte, next);
      }
    }
    node = next;
  }
  nodes_[node].index = static_cast<int32_t>(index);
}

uint32_t AddedTokenFinder::child(uint32_t node, unsigned char byte) const {
  for (const auto& [key, next] : nodes_[node].next) {
    if (key == byte) {
      return next;
    }
  }
  return kNone;
}

AddedTokenFinder::Match AddedTokenFinder::longest(std::string_view text, size_t at, bool special_too) const {
  Match match{at, at, nullptr};
  uint32_t node = first_[static_cast<unsigned char>(text[at])];
  for (size_t i = at + 1; node != kNone; ++i) {
    if (nodes_[node].index >= 0) {
      const AddedToken& token = (*tokens_)[static_cast<size_t>(nodes_[node].index)];
      if (special_too || !token.special) {
        match = {at, i, &token};
      }
    }
    if (i == text.size()) {
      break;
    }
    node = child(node, static_cast<unsigned char>(text[i]));
  }
  return match;
}

AddedTokenFinder::Match AddedTokenFinder::find(std::string_view text, size_t from, bool special_too) const {
  for (size_t at = from; at < text.size(); ++at) {
    if (first_[static_cast<unsigned char>(text[at])] == 0) {
      continue;
    }
    Match match = longest(text, at, special_too);
    if (match.token == nullptr) {
      continue;
    }
    if (match.token->single_word && !stands_alone(text, match.begin, match.end)) {
      at = match.end - 1;  // the text of a refused match is plain text
      continue;
    }
    size_t length = 0;
    while (match.token->lstrip && match.begin > from) {
      const size_t before = code_point_before(text, match.begin);
      if (!is_white_space(utf8_code_point(text, before, &length))) {
        break;
      }
      match.begin = before;
    }
    while (match.token->rstrip && match.end < text.size() &&
           is_white_space(utf8_code_point(text, match.end, &length))) {
      match.end += length;
    }
    return match;
  }
  return {text.size(), text.size(), nullptr};
}

}  // namespace moelora
