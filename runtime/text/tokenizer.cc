// SPDX-License-Identifier: Apache-2.0
#include "runtime/text/tokenizer.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/utf8.h"

namespace moelora {
namespace {

constexpr size_t kIdleMax = 16;                        // scratches kept; a busier host makes new ones
constexpr size_t kIdleTextBytesMax = size_t{1} << 20;  // one that served a longer text is given back to the system

void check_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    // Most text is ASCII.
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const size_t length = utf8_sequence(text, at);
    if (length == 0) {
      throw Error(Status::kInvalid, fmt::format("the text is not valid UTF-8 at byte {}", at));
    }
    at += length;
  }
}

void check_id(int32_t id) {
  if (id < 0) {
    throw Error(Status::kInvalid, fmt::format("token id {} is negative", id));
  }
}

}  // namespace

struct Tokenizer::Scratch {
  RegexScratch regex;
  BpeScratch bpe;
  Pieces pieces;
  std::string normal;
};

// A scratch for the length of one call.
class Tokenizer::Borrowed {
 public:
  Borrowed(const Tokenizer& tokenizer, size_t text_bytes) : tokenizer_(tokenizer), text_bytes_(text_bytes) {
    {
      const std::lock_guard<std::mutex> lock(tokenizer.mutex_);
      if (!tokenizer.idle_.empty()) {
        scratch_ = std::move(tokenizer.idle_.back());
        tokenizer.idle_.pop_back();
      }
    }
    if (!scratch_) {
      scratch_ = std::make_unique<Scratch>();
    }
  }
  ~Borrowed() {
    if (text_bytes_ > kIdleTextBytesMax) {
      return;
    }
    const std::lock_guard<std::mutex> lock(tokenizer_.mutex_);
    if (tokenizer_.idle_.size() < kIdleMax) {
      tokenizer_.idle_.push_back(std::move(scratch_));  // reserved: does not throw
    }
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Scratch& operator*() const { return *scratch_; }

 private:
  const Tokenizer& tokenizer_;
  size_t text_bytes_;
  std::unique_ptr<Scratch> scratch_;
};

Tokenizer::Tokenizer(const JsonField& file, const std::string& model_dir)
    : normalizer_(file.member("normalizer")),
      pre_tokenizer_(file.member("pre_tokenizer")),
      bpe_(file.member("model"), pre_tokenizer_.is_byte_level(), vocabulary_),
      post_processor_(file.member("post_processor")),
      decoder_(file.member("decoder")),
      raw_finder_(added_),
      normalized_finder_(added_) {
  idle_.reserve(kIdleMax);
  read_added(file.member("added_tokens"));
  check_holes(file.member("model"));
  index_added();
  if (!post_processor_.has_template()) {
    read_config(model_dir + "/tokenizer_config.json");
  }
  for (const auto* around : {&post_processor_.before(), &post_processor_.behind()}) {
    for (const int32_t id : *around) {
      if (static_cast<size_t>(id) >= decoder_.num_ids()) {
        file.member("post_processor").fail(Status::kCorrupt, fmt::format("names id {}, which no token has", id));
      }
    }
  }
  vocabulary_ = {};  // the decoder has the texts
}

Tokenizer::~Tokenizer() = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  check_utf8(text);
  const Borrowed scratch(*this, text.size());
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 8);
  if (options.add_special) {
    ids = post_processor_.before();
  }
  encode_text(text, options.parse_special, *scratch, ids);
  if (options.add_special) {
    ids.insert(ids.end(), post_processor_.behind().begin(), post_processor_.behind().end());
  }
  return ids;
}

void Tokenizer::encode_text(std::string_view text, bool special, Scratch& scratch, std::vector<int32_t>& ids) const {
  for (size_t at = 0; at < text.size();) {
    const auto match = raw_finder_.find(text, at, special);
    if (match.begin > at) {
      scratch.normal.assign(text, at, match.begin - at);
      encode_normal(scratch.normal, at == 0, special, scratch, ids);
    }
    if (match.token != nullptr) {
      ids.push_back(match.token->id);
    }
    at = match.end;
  }
}

void Tokenizer::encode_normal(std::string& text, bool at_start, bool special, Scratch& scratch,
                              std::vector<int32_t>& ids) const {
  normalizer_.apply(text, scratch.regex);
  for (size_t at = 0; at < text.size();) {
    const auto match = normalized_finder_.find(text, at, special);
    if (match.begin > at) {
      encode_pieces(std::string_view(text).substr(at, match.begin - at), at_start && at == 0, scratch, ids);
    }
    if (match.token != nullptr) {
      ids.push_back(match.token->id);
    }
    at = match.end;
  }
}

void Tokenizer::encode_pieces(std::string_view text, bool at_start, Scratch& scratch, std::vector<int32_t>& ids) const {
  Pieces& pieces = scratch.pieces;
  pieces.text.assign(text);
  pre_tokenizer_.apply(pieces, at_start, scratch.regex);
  size_t start = 0;
  for (const size_t end : pieces.ends) {
    bpe_.encode(std::string_view(pieces.text).substr(start, end - start), scratch.bpe, ids);
    start = end;
  }
}

std::string Tokenizer::decode(const int32_t* ids, size_t count, bool skip_special) const {
  std::string text;
  DecodeState state = decoder_.start(false);
  for (size_t i = 0; i < count; ++i) {
    check_id(ids[i]);
    decoder_.append(ids[i], skip_special, state, text);
  }
  decoder_.finish(state, text);
  return text;
}

std::string Tokenizer::token_bytes(int32_t id) const {
  check_id(id);
  return decoder_.token_bytes(id);
}

}  // namespace moelora
