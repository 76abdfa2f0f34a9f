// SPDX-License-Identifier: Apache-2.0
// From a model folder to a Tokenizer: tokenizer.json, added tokens, and what only tokenizer_config.json says.
#include <unistd.h>

#include <fmt/format.h>

#include "runtime/text/tokenizer.h"

namespace moelora {

std::shared_ptr<const Tokenizer> Tokenizer::open(const std::string& model_dir) {
  const std::string path = model_dir + "/tokenizer.json";
  if (::access(model_dir.c_str(), X_OK) == 0 && ::access(path.c_str(), F_OK) != 0) {
    throw Error(Status::kNotFound,
                fmt::format("{}: no tokenizer.json, the one form of tokenizer that is read", printable(model_dir)));
  }
  const Json json = read_json(path);
  return std::shared_ptr<const Tokenizer>(new Tokenizer(JsonField(json, path), model_dir));
}

void Tokenizer::read_added(const JsonField& field) {
  for (size_t i = 0; i < vocabulary_.texts.size(); ++i) {
    if (vocabulary_.present[i]) {
      decoder_.set_token(static_cast<int32_t>(i), vocabulary_.texts[i], false, false);
    }
  }
  const size_t count = field.is_null() ? 0 : field.size();
  added_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const JsonField entry = field.element(i);
    AddedToken token;
    token.id = entry.member("id").integer(0, kTokenIdMax);
    token.content = entry.member("content").text();
    token.special = entry.member("special").flag_or(false);
    token.normalized = entry.member("normalized").flag_or(!token.special);
    token.single_word = entry.member("single_word").flag_or(false);
    token.lstrip = entry.member("lstrip").flag_or(false);
    token.rstrip = entry.member("rstrip").flag_or(false);
    decoder_.set_token(token.id, token.content, true, token.special);
    added_.push_back(std::move(token));
  }
}

// Every id up to the largest of the vocabulary is a token's, of the vocabulary or an added one. Added tokens behind it
// may leave gaps: files list only those of the reserved ids that have a name.
void Tokenizer::check_holes(const JsonField& model) const {
  std::vector<bool> present = vocabulary_.present;
  for (const AddedToken& token : added_) {
    if (static_cast<size_t>(token.id) < present.size()) {
      present[static_cast<size_t>(token.id)] = true;
    }
  }
  for (size_t id = 0; id < present.size(); ++id) {
    if (!present[id]) {
      model.member("vocab").fail(Status::kCorrupt,
                                 fmt::format("no token has id {}, but ids go on to {}", id, present.size() - 1));
    }
  }
}

void Tokenizer::index_added() {
  RegexScratch scratch;
  for (size_t i = 0; i < added_.size(); ++i) {
    if (!added_[i].normalized) {
      raw_finder_.add(i, added_[i].content);
      continue;
    }
    // They are looked for in normalised text, so they are normalised alike.
    std::string content = added_[i].content;
    normalizer_.apply(content, scratch);
    normalized_finder_.add(i, content);
  }
}

void Tokenizer::read_config(const std::string& path) {
  if (::access(path.c_str(), F_OK) != 0) {
    return;
  }
  const Json json = read_json(path);
  const JsonField file(json, path);
  std::vector<int32_t> before;
  std::vector<int32_t> behind;
  if (file.member("add_bos_token").flag_or(false)) {
    before.push_back(configured_token(file.member("bos_token")));
  }
  if (file.member("add_eos_token").flag_or(false)) {
    behind.push_back(configured_token(file.member("eos_token")));
  }
  post_processor_.set_around(std::move(before), std::move(behind));
}

// The id of a token that is given by its text, or by an object with `content`.
int32_t Tokenizer::configured_token(const JsonField& field) const {
  const std::string& content = field.is_text() ? field.text() : field.member("content").text();
  for (const AddedToken& token : added_) {
    if (token.content == content) {
      return token.id;
    }
  }
  for (size_t id = 0; id < vocabulary_.texts.size(); ++id) {
    if (vocabulary_.present[id] && vocabulary_.texts[id] == content) {
      return static_cast<int32_t>(id);
    }
  }
  field.fail(Status::kCorrupt, fmt::format("'{}' is no token of tokenizer.json", printable(content)));
}

}  // namespace moelora
