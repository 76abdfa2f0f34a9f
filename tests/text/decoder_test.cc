// SPDX-License-Identifier: Apache-2.0
// Streaming: parts are whole code points whatever the borders of tokens, and together they are the text.
#include "runtime/text/decoder.h"

#include "runtime/io/json.h"
#include "runtime/text/byte_alphabet.h"
#include "tests/support/catch.h"
#include "tests/text/tokenizer_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

// Ids of the byte tokens of `text`, in the vocabulary of mark_file() or byte_level_file().
std::vector<int32_t> byte_ids(const Json& file, std::string_view text, bool byte_level) {
  std::vector<int32_t> ids;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (!byte_level) {
      ids.push_back(1 + byte);
      continue;
    }
    for (const auto& [token, id] : file["model"]["vocab"].items()) {
      std::string bytes;
      if (from_byte_alphabet(token, bytes) && bytes == std::string(1, c)) {
        ids.push_back(id.get<int32_t>());
      }
    }
  }
  return ids;
}

std::vector<std::string> parts_of(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  TextStream stream = tokenizer.stream(false);
  std::vector<std::string> parts;
  for (const int32_t id : ids) {
    stream.push(id, parts.emplace_back());
  }
  stream.finish(parts.emplace_back());
  return parts;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) {
    CHECK(is_valid_utf8(part));
    text += part;
  }
  return text;
}

}  // namespace

TEST_CASE("stream: a code point comes with its last byte") {
  for (const bool byte_level : {true, false}) {
    const Json file = byte_level ? byte_level_file() : mark_file();
    const auto tokenizer = open_file(file);
    const std::string text("a\xC3\xA9\0\xE2\x82\xAC\xF0\x9F\x98\x80", 11);
    const std::vector<std::string> wanted = {"a", "", "\xC3\xA9", std::string(1, '\0'), "", "", "\xE2\x82\xAC",
                                             "",  "", "",         "\xF0\x9F\x98\x80",   ""};
    CHECK(parts_of(*tokenizer, byte_ids(file, text, byte_level)) == wanted);
  }
}

TEST_CASE("stream: ill-formed bytes") {
  const Json file = byte_level_file();
  const auto tokenizer = open_file(file);
  const std::string bad = "\xEF\xBF\xBD";
  const auto both = [&](const std::string& bytes) {
    const auto ids = byte_ids(file, bytes, true);
    const std::string whole = tokenizer->decode(ids.data(), ids.size(), false);
    CHECK(joined(parts_of(*tokenizer, ids)) == whole);
    return whole;
  };
  CHECK(both("\x80") == bad);
  CHECK(both("a\xE2\x82") == "a" + bad);  // unfinished at the end: one
  CHECK(both("\xE2\x82z") == bad + "z");  // a part of one code point: one
  CHECK(both("\xF0\x9F\x98\xF0\x9F\x98\x80") == bad + "\xF0\x9F\x98\x80");
  CHECK(both("\xC0\x80") == bad + bad);            // no beginning at all: each
  CHECK(both("\xED\xA0\x80") == bad + bad + bad);  // a surrogate
  CHECK(both("\xFF\xFE") == bad + bad);
}

TEST_CASE("stream: a run of byte tokens is text as a whole or not at all") {
  const Json file = mark_file();
  const auto tokenizer = open_file(file);
  const std::string bad = "\xEF\xBF\xBD";
  const auto ids = byte_ids(file, "\xC3\xA9\x80", false);
  CHECK(tokenizer->decode(ids.data(), ids.size(), false) == bad + bad + bad);
  CHECK(joined(parts_of(*tokenizer, ids)) == "\xC3\xA9" + bad);  // the stream had it out already
  // Another token ends the run.
  std::vector<int32_t> mixed = byte_ids(file, "\xE2\x82", false);
  mixed.push_back(file["model"]["vocab"]["a"].get<int32_t>());
  CHECK(tokenizer->decode(mixed.data(), mixed.size(), false) == bad + bad + "a");
  CHECK(joined(parts_of(*tokenizer, mixed)) == bad + bad + "a");
}

TEST_CASE("decoder: without one, tokens are joined by spaces; Metaspace drops the first mark") {
  Json file = mark_file();
  const auto id = [&](const std::string& token) { return file["model"]["vocab"][token].get<int32_t>(); };
  const std::vector<int32_t> ids = {id("\xE2\x96\x81"
                                       "ab"),
                                    id("c"),
                                    id("\xE2\x96\x81"
                                       "a")};
  file["decoder"] = nullptr;
  CHECK(open_file(file)->decode(ids.data(), 3, false) ==
        "\xE2\x96\x81"
        "ab c \xE2\x96\x81"
        "a");
  file["decoder"] = {{"type", "Metaspace"}, {"replacement", "\xE2\x96\x81"}, {"prepend_scheme", "always"}};
  CHECK(open_file(file)->decode(ids.data(), 3, false) == "abc a");
  CHECK(joined(parts_of(*open_file(file), ids)) == "abc a");
  CHECK(open_file(file)->token_bytes(ids[0]) == " ab");
  file["decoder"]["prepend_scheme"] = "never";
  CHECK(open_file(file)->decode(ids.data(), 3, false) == " abc a");
}
