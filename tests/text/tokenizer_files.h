// SPDX-License-Identifier: Apache-2.0
// Small tokenizer.json files for tests, built from the parts that a test cares about.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "runtime/io/json.h"
#include "runtime/io/utf8.h"
#include "runtime/text/tokenizer.h"
#include "tests/support/model_files.h"

namespace moelora::test {

// Byte-level: the 256 bytes of the alphabet as ids 0 to 255 in order of code points, "!" being 0, then merges; one
// added token "<s>", special.
inline Json byte_level_file() {
  Json vocab = Json::object();
  const auto add = [&](uint32_t point) {
    std::string text;
    utf8_append(point, text);
    vocab[text] = vocab.size();
  };
  for (uint32_t point = 0x21; point < 0x144; ++point) {
    if (point <= 0x7E || (point >= 0xA1 && point != 0xAD)) {
      add(point);
    }
  }
  Json merges = Json::array();
  for (const auto& [left, right] : {std::pair{"a", "b"}, std::pair{"b", "c"}, std::pair{"ab", "c"},
                                    std::pair{"a", "bc"}, std::pair{"a", "a"}, std::pair{"aa", "a"}}) {
    const std::string whole = std::string(left) + right;
    if (!vocab.contains(whole)) {
      vocab[whole] = vocab.size();
    }
    merges.push_back(Json::array({left, right}));
  }
  Json file;
  file["added_tokens"] = Json::array({{{"id", vocab.size()}, {"content", "<s>"}, {"special", true}}});
  file["normalizer"] = nullptr;
  file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  file["post_processor"] = nullptr;
  file["decoder"] = {{"type", "ByteLevel"}};
  file["model"] = {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}};
  return file;
}

// Llama-2 style: "<unk>", the 256 byte tokens, U+2581, then letters and merges.
inline Json mark_file() {
  Json vocab = Json::object();
  vocab["<unk>"] = 0;
  for (int byte = 0; byte < 256; ++byte) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", byte);
    vocab[text] = vocab.size();
  }
  for (const char* text : {"\xE2\x96\x81", "a", "b", "c", "ab",
                           "\xE2\x96\x81"
                           "a",
                           "\xE2\x96\x81"
                           "ab"}) {
    vocab[text] = vocab.size();
  }
  const Json merges = Json::array({"a b", "\xE2\x96\x81 a", "\xE2\x96\x81 ab"});
  const Json to_mark = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\xE2\x96\x81"}};
  const Json from_mark = {{"type", "Replace"}, {"pattern", {{"String", "\xE2\x96\x81"}}}, {"content", " "}};
  Json file;
  file["added_tokens"] = Json::array({{{"id", 0}, {"content", "<unk>"}, {"special", true}}});
  file["normalizer"] = {{"type", "Sequence"},
                        {"normalizers", {{{"type", "Prepend"}, {"prepend", "\xE2\x96\x81"}}, to_mark}}};
  file["pre_tokenizer"] = nullptr;
  file["decoder"] = {{"type", "Sequence"},
                     {"decoders",
                      {from_mark,
                       {{"type", "ByteFallback"}},
                       {{"type", "Fuse"}},
                       {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  file["model"] = {{"type", "BPE"},        {"vocab", vocab},        {"merges", merges},
                   {"unk_token", "<unk>"}, {"byte_fallback", true}, {"fuse_unk", true}};
  return file;
}

// Writes the text as DIR/tokenizer.json and opens it.
inline std::shared_ptr<const Tokenizer> open_text(const std::string& text, const std::string& config = "") {
  const TempDir dir;
  write_file(dir.file("tokenizer.json"), text);
  if (!config.empty()) {
    write_file(dir.file("tokenizer_config.json"), config);
  }
  return Tokenizer::open(dir.path());
}

inline std::shared_ptr<const Tokenizer> open_file(const Json& file, const std::string& config = "") {
  return open_text(file.dump(), config);
}

}  // namespace moelora::test
