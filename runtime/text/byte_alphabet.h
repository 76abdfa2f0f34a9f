// SPDX-License-Identifier: Apache-2.0
// GPT-2's byte alphabet, in which byte-level vocabularies are written: the bytes 21-7E, A1-AC and AE-FF are the
// characters of the same number, the other 68, ascending, U+0100 to U+0143.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/io/utf8.h"

namespace moelora {

constexpr uint32_t kByteAlphabetEnd = 0x144;

// Byte of each character below kByteAlphabetEnd; -1 for those outside the alphabet.
constexpr std::array<int16_t, kByteAlphabetEnd> byte_alphabet() {
  std::array<int16_t, kByteAlphabetEnd> bytes{};
  bytes.fill(-1);
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool itself = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    bytes[itself ? byte : next++] = static_cast<int16_t>(byte);
  }
  return bytes;
}

// The bytes that `text`, well-formed UTF-8, stands for; false (and `bytes` unspecified) if a character is outside.
inline bool from_byte_alphabet(std::string_view text, std::string& bytes) {
  static constexpr auto kBytes = byte_alphabet();
  bytes.clear();
  for (size_t at = 0, length = 0; at < text.size(); at += length) {
    const uint32_t point = utf8_code_point(text, at, &length);
    if (point >= kByteAlphabetEnd || kBytes[point] < 0) {
      return false;
    }
    bytes.push_back(static_cast<char>(kBytes[point]));
  }
  return true;
}

}  // namespace moelora
