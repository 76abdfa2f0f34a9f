// SPDX-License-Identifier: Apache-2.0
// Text to token ids and back, as a model folder's tokenizer.json says. Encoding: added tokens are cut out, the rest is
// normalised, cut into pieces and merged, and special tokens are put around. Immutable and shared; any number of
// threads may call, each in a scratch of its own that is kept for the next call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/text/added_tokens.h"
#include "runtime/text/bpe.h"
#include "runtime/text/decoder.h"
#include "runtime/text/normalizer.h"
#include "runtime/text/post_processor.h"
#include "runtime/text/pre_tokenizer.h"

namespace moelora {

struct EncodeOptions {
  bool add_special = true;    // what the model wants around a text: BOS
  bool parse_special = true;  // special tokens written in the text are those tokens; false for text of strangers
};

class Tokenizer {
 public:
  // Reads tokenizer.json and, if present, tokenizer_config.json of a folder. Throws kNotFound without the former,
  // kIo, kCorrupt, kUnsupported; messages name file and field.
  static std::shared_ptr<const Tokenizer> open(const std::string& model_dir);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Throws kInvalid for text that is not UTF-8, naming the byte. NUL is a character like others.
  [[nodiscard]] std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options) const;
  // Valid UTF-8; what is ill-formed becomes U+FFFD. Ids without a token give nothing. Throws kInvalid for id < 0.
  [[nodiscard]] std::string decode(const int32_t* ids, size_t count, bool skip_special) const;
  // The bytes of one token, perhaps a part of a code point; empty for an id without one. Throws kInvalid for id < 0.
  [[nodiscard]] std::string token_bytes(int32_t id) const;
  // Token by token; lives no longer than the tokenizer.
  [[nodiscard]] TextStream stream(bool skip_special) const { return {decoder_, skip_special}; }
  // The text behind a prompt, without special tokens.
  [[nodiscard]] TextStream continuation() const { return {decoder_, true, decoder_.continuation()}; }
  // What `add_special` puts before a text.
  [[nodiscard]] const std::vector<int32_t>& opening() const { return post_processor_.before(); }
  [[nodiscard]] size_t max_token_bytes() const { return decoder_.max_token_bytes(); }
  // The largest id plus one.
  [[nodiscard]] size_t num_ids() const { return decoder_.num_ids(); }

 private:
  struct Scratch;
  class Borrowed;
  Tokenizer(const JsonField& file, const std::string& model_dir);
  void read_added(const JsonField& field);
  void check_holes(const JsonField& model) const;
  void index_added();
  void read_config(const std::string& path);
  [[nodiscard]] int32_t configured_token(const JsonField& field) const;
  void encode_text(std::string_view text, bool special, Scratch& scratch, std::vector<int32_t>& ids) const;
  void encode_normal(std::string& text, bool at_start, bool special, Scratch& scratch, std::vector<int32_t>& ids) const;
  void encode_pieces(std::string_view text, bool at_start, Scratch& scratch, std::vector<int32_t>& ids) const;

  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  Vocabulary vocabulary_;
  Bpe bpe_;
  PostProcessor post_processor_;
  Decoder decoder_;
  std::vector<AddedToken> added_;
  AddedTokenFinder raw_finder_;         // in the text as given
  AddedTokenFinder normalized_finder_;  // in normalised text
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

}  // namespace moelora
