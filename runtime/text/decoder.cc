// SPDX-License-Identifier: Apache-2.0
#include "runtime/text/decoder.h"

#include <algorithm>
#include <utility>

#include "runtime/io/utf8.h"
#include "runtime/text/byte_alphabet.h"
#include "runtime/text/normalizer.h"

namespace moelora {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// The byte of "<0xHH>", -1 if the text is another one.
int byte_of(const std::string& text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') {
    return -1;
  }
  int value = 0;
  for (const char c : {text[3], text[4]}) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                             : -1;
    if (digit < 0) {
      return -1;
    }
    value = value * 16 + digit;
  }
  return value;
}

}  // namespace

Decoder::Decoder(const JsonField& field) {
  if (!field.is_null()) {
    int stage = 0;
    add(field, &stage);
  }
}

// Stages are accepted in the one order that all families have; `stage` is the number of the last one.
void Decoder::add(const JsonField& field, int* stage) {
  const std::string& type = field.type();
  const auto enter = [&](int number) {
    if (number < *stage || kind_ == Kind::kByteLevel || (number == 0 && *stage > 0)) {
      field.fail(Status::kUnsupported, "'" + printable(type) + "' is not supported at this place of the sequence");
    }
    *stage = number;
    kind_ = number == 0 ? Kind::kByteLevel : Kind::kChain;
  };
  if (type == "Sequence") {
    const JsonField parts = field.member("decoders");
    for (size_t i = 0; i < parts.size(); ++i) {
      add(parts.element(i), stage);
    }
  } else if (type == "ByteLevel") {
    enter(0);
  } else if (type == "Replace") {
    enter(1);
    const JsonField pattern = field.member("pattern").member("String");
    if (pattern.text().empty()) {
      pattern.fail(Status::kCorrupt, "an empty pattern");
    }
    replacements_.push_back({pattern.text(), field.member("content").text()});
  } else if (type == "ByteFallback") {
    enter(2);
    byte_fallback_ = true;
  } else if (type == "Metaspace") {
    enter(3);
    mark_ = field.member("replacement").text();
    const JsonField scheme = field.member("prepend_scheme");
    drop_first_ = scheme.is_null() ? field.member("add_prefix_space").flag_or(true) : scheme.text() != "never";
  } else if (type == "Fuse") {
    enter(4);
    fuse_ = true;
  } else if (type == "Strip") {
    enter(5);
    add_strip(field);
  } else {
    field.member("type").fail_unsupported(type);
  }
}

void Decoder::add_strip(const JsonField& field) {
  // Without Fuse it would work on each token; with `stop` nothing could be emitted before the end.
  if (!fuse_) {
    field.fail(Status::kUnsupported, "Strip without a Fuse before it is not supported");
  }
  if (const JsonField stop = field.member("stop"); stop.integer(0, INT32_MAX) != 0) {
    stop.fail(Status::kUnsupported, "only 0 is supported");
  }
  const JsonField content = field.member("content");
  strip_ = content.text();
  if (strip_.empty() || utf8_sequence(strip_, 0) != strip_.size()) {
    content.fail(Status::kCorrupt, "must be one character");
  }
  strip_start_ = static_cast<size_t>(field.member("start").integer(0, INT32_MAX));
}

void Decoder::set_token(int32_t id, const std::string& text, bool added, bool special) {
  const auto index = static_cast<size_t>(id);
  if (index >= tokens_.size()) {
    tokens_.resize(index + 1);
  }
  std::string bytes;
  bool is_byte = false;
  if (kind_ == Kind::kByteLevel) {
    // Added tokens are no words of the byte alphabet: they are what they say.
    if (added || !from_byte_alphabet(text, bytes)) {
      bytes = text;
    }
  } else {
    bytes = text;
    for (const Replacement& replacement : replacements_) {
      replace_all(bytes, replacement.pattern, replacement.content);
    }
    if (const int byte = byte_fallback_ ? byte_of(bytes) : -1; byte >= 0) {
      bytes.assign(1, static_cast<char>(byte));
      is_byte = true;
    }
  }
  tokens_[index] = {static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(bytes.size()), true, special, is_byte};
  bytes_ += bytes;
  max_token_bytes_ = std::max(max_token_bytes_, bytes.size());
}

DecodeState Decoder::continuation() const {
  DecodeState state = {true, false, 0, {}};
  state.bytes.reserve(max_token_bytes_ + 4);  // behind an unfinished code point
  return state;
}

void Decoder::append(int32_t id, bool skip_special, DecodeState& state, std::string& out) const {
  if (id < 0 || static_cast<size_t>(id) >= tokens_.size()) {
    return;
  }
  const Token& token = tokens_[static_cast<size_t>(id)];
  if (!token.present || (skip_special && token.special)) {
    return;
  }
  const bool first = std::exchange(state.first, false);
  if (kind_ == Kind::kByteLevel || token.is_byte) {
    state.bytes += bytes_of(token);
    if (state.streaming) {
      flush(false, state, out);
    }
    return;
  }
  end_run(state, out);
  if (kind_ == Kind::kJoin && !first) {
    out += ' ';
  }
  std::string_view text = bytes_of(token);
  for (size_t at = mark_.empty() ? text.npos : text.find(mark_); at != text.npos; at = text.find(mark_)) {
    emit(text.substr(0, at), state, out);
    emit(first && drop_first_ ? "" : " ", state, out);
    text.remove_prefix(at + mark_.size());
  }
  emit(text, state, out);
}

void Decoder::finish(DecodeState& state, std::string& out) const {
  if (kind_ == Kind::kByteLevel) {
    flush(true, state, out);
  } else {
    end_run(state, out);
  }
}

void Decoder::emit(std::string_view text, DecodeState& state, std::string& out) const {
  while (state.strip_left > 0 && !text.empty()) {
    if (!text.starts_with(strip_)) {
      state.strip_left = 0;
      break;
    }
    text.remove_prefix(strip_.size());
    --state.strip_left;
  }
  out += text;
}

// Emits the whole code points of `bytes`, one U+FFFD for each ill-formed part (for each byte of one, after byte
// tokens, as ByteFallback has it), and keeps an unfinished code point at the end unless `final`.
void Decoder::flush(bool final, DecodeState& state, std::string& out) const {
  const std::string& bytes = state.bytes;
  size_t at = 0;
  size_t start = 0;
  while (at < bytes.size()) {
    const Utf8Part part = utf8_part(bytes, at);
    if (part.complete) {
      at += part.length;
      continue;
    }
    emit(std::string_view(bytes).substr(start, at - start), state, out);
    start = at;
    if (part.open && !final) {
      break;
    }
    for (size_t i = 0; i < (kind_ == Kind::kByteLevel ? 1 : part.length); ++i) {
      emit(kReplacement, state, out);
    }
    start = at += part.length;
  }
  emit(std::string_view(bytes).substr(start, at - start), state, out);
  state.bytes.erase(0, at);
}

// A run of byte tokens is text only as a whole; if it is ill-formed anywhere, each byte is a U+FFFD. A stream has
// emitted the well-formed beginning by then.
void Decoder::end_run(DecodeState& state, std::string& out) const {
  if (!state.streaming && !is_valid_utf8(state.bytes)) {
    for (size_t i = 0; i < state.bytes.size(); ++i) {
      emit(kReplacement, state, out);
    }
    state.bytes.clear();
  }
  flush(true, state, out);
}

std::string Decoder::token_bytes(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= tokens_.size()) {
    return {};
  }
  std::string text(bytes_of(tokens_[static_cast<size_t>(id)]));
  if (!mark_.empty() && !tokens_[static_cast<size_t>(id)].is_byte) {
    replace_all(text, mark_, " ");
  }
  return text;
}

}  // namespace moelora
