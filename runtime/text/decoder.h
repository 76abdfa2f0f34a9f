// SPDX-License-Identifier: Apache-2.0
// `decoder` of tokenizer.json: from tokens back to text. ByteLevel, or Replace, ByteFallback, Metaspace, Fuse and Strip
// in this order, or none; any other is refused by name. Keeps the bytes of every token, so that decoding is appending.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/text/json_field.h"

namespace moelora {

// What decoding carries from one token to the next.
struct DecodeState {
  bool streaming = false;  // emit whole code points as soon as they are there
  bool first = true;       // no token yet
  size_t strip_left = 0;   // leading characters still to be taken away
  std::string bytes;       // not emitted yet: an unfinished code point, or a run of byte tokens
};

class Decoder {
 public:
  // Throws kCorrupt or kUnsupported, naming the field. Without a decoder tokens are joined by spaces.
  explicit Decoder(const JsonField& field);

  // Says what a token is; `text` as the file writes it. A later call for the same id wins.
  void set_token(int32_t id, const std::string& text, bool added, bool special);

  [[nodiscard]] DecodeState start(bool streaming) const { return {streaming, true, strip_start_, {}}; }
  // A stream behind other text: nothing is taken away at its beginning. Appending takes no memory but that of `out`.
  [[nodiscard]] DecodeState continuation() const;
  // Appends to `out` what is known once this token is there. An id without a token adds nothing; a special one neither
  // with `skip_special`. Streaming gives whole code points only; ill-formed bytes become U+FFFD.
  void append(int32_t id, bool skip_special, DecodeState& state, std::string& out) const;
  // What is left at the end: an unfinished code point becomes U+FFFD.
  void finish(DecodeState& state, std::string& out) const;

  // The bytes that a token stands for by itself; empty for an id without one.
  [[nodiscard]] std::string token_bytes(int32_t id) const;
  [[nodiscard]] size_t num_ids() const { return tokens_.size(); }
  [[nodiscard]] size_t max_token_bytes() const { return max_token_bytes_; }

 private:
  enum class Kind : uint8_t { kJoin, kByteLevel, kChain };
  struct Token {
    uint32_t begin = 0;
    uint32_t size = 0;
    bool present = false;
    bool special = false;
    bool is_byte = false;  // one byte of a run, by ByteFallback
  };
  struct Replacement {
    std::string pattern;
    std::string content;
  };
  void add(const JsonField& field, int* stage);
  void add_strip(const JsonField& field);
  [[nodiscard]] std::string_view bytes_of(const Token& token) const {
    return std::string_view(bytes_).substr(token.begin, token.size);
  }
  void emit(std::string_view text, DecodeState& state, std::string& out) const;
  void flush(bool final, DecodeState& state, std::string& out) const;
  void end_run(DecodeState& state, std::string& out) const;

  Kind kind_ = Kind::kJoin;
  std::vector<Replacement> replacements_;
  bool byte_fallback_ = false;
  std::string mark_;         // Metaspace's; empty = none
  bool drop_first_ = false;  // Metaspace: marks of the first token give nothing
  bool fuse_ = false;
  std::string strip_;       // the character that Strip takes away
  size_t strip_start_ = 0;  // at most this many
  std::vector<Token> tokens_;
  std::string bytes_;
  size_t max_token_bytes_ = 0;
};

// Decodes token by token: what `push` and `finish` return, put together, is the whole text, and each part consists of
// whole code points, whatever the borders of tokens. Borrows the decoder.
class TextStream {
 public:
  TextStream(const Decoder& decoder, bool skip_special) : TextStream(decoder, skip_special, decoder.start(true)) {}
  TextStream(const Decoder& decoder, bool skip_special, DecodeState state)
      : decoder_(&decoder), skip_special_(skip_special), state_(std::move(state)) {}
  // Appends to `out`.
  void push(int32_t id, std::string& out) { decoder_->append(id, skip_special_, state_, out); }
  void finish(std::string& out) { decoder_->finish(state_, out); }

 private:
  const Decoder* decoder_;
  bool skip_special_;
  DecodeState state_;
};

}  // namespace moelora
