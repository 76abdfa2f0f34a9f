// SPDX-License-Identifier: Apache-2.0
// UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF. Used by the JSON reader and by
// the tokenizers, which work on code points but never copy a text into another encoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace moelora {

// Bytes of the well-formed start of a sequence at `text[at]`, at least 1. `complete` tells whether they are a whole
// code point. If not, and the text ends behind them, more bytes could still complete it, unless the first byte already
// cannot begin a sequence; `open` tells that apart. An ill-formed part of this length is replaced by one U+FFFD.
struct Utf8Part {
  size_t length;
  bool complete;
  bool open;
};

inline Utf8Part utf8_part(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(at);
  if (first < 0x80) {
    return {1, true, false};
  }
  const size_t length = first >= 0xC2 && first <= 0xDF   ? 2
                        : first >= 0xE0 && first <= 0xEF ? 3
                        : first >= 0xF0 && first <= 0xF4 ? 4
                                                         : 0;
  if (length == 0) {
    return {1, false, false};
  }
  // The second byte excludes overlong forms, surrogates and values above U+10FFFF.
  unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < length; ++i) {
    if (at + i == text.size()) {
      return {i, false, true};
    }
    if (byte(at + i) < low || byte(at + i) > high) {
      return {i, false, false};
    }
    low = 0x80;
    high = 0xBF;
  }
  return {length, true, false};
}

// Length of the well-formed sequence at `text[at]`, 0 if there is none.
inline size_t utf8_sequence(std::string_view text, size_t at) {
  const Utf8Part part = utf8_part(text, at);
  return part.complete ? part.length : 0;
}

// The code point at `text[at]` and its length; the text must be well-formed there.
inline uint32_t utf8_code_point(std::string_view text, size_t at, size_t* length) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[at + i])); };
  const uint32_t first = byte(0);
  if (first < 0x80) {
    *length = 1;
    return first;
  }
  if (first < 0xE0) {
    *length = 2;
    return (first & 0x1F) << 6 | (byte(1) & 0x3F);
  }
  if (first < 0xF0) {
    *length = 3;
    return (first & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
  }
  *length = 4;
  return (first & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
}

inline void utf8_append(uint32_t code_point, std::string& out) {
  const auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

// The most bytes of a well-formed text, at most `room`, that are whole code points.
inline size_t whole_code_points(std::string_view text, size_t room) {
  if (text.size() <= room) {
    return text.size();
  }
  while (room > 0 && (static_cast<unsigned char>(text[room]) & 0xC0) == 0x80) {
    --room;
  }
  return room;
}

}  // namespace moelora
