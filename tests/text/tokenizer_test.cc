// SPDX-License-Identifier: Apache-2.0
// A tokenizer's whole way, on small files worked by hand: merges, added tokens, BOS, marks, bytes, odd input.
#include "runtime/text/tokenizer.h"

#include <atomic>
#include <thread>

#include "kernels/base/error.h"
#include "runtime/io/utf8.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/text/tokenizer_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

using Ids = std::vector<int32_t>;

std::string decode(const Tokenizer& tokenizer, const Ids& ids, bool skip_special = false) {
  return tokenizer.decode(ids.data(), ids.size(), skip_special);
}

int32_t id_of(const Json& file, const std::string& token) {
  return file["model"]["vocab"][token].get<int32_t>();
}

}  // namespace

TEST_CASE("tokenizer: merges by rank, then from the left") {
  const Json file = byte_level_file();
  const auto tokenizer = open_file(file);
  const int32_t a = id_of(file, "a");
  const int32_t aa = id_of(file, "aa");
  const int32_t aaa = id_of(file, "aaa");
  const int32_t abc = id_of(file, "abc");
  CHECK(tokenizer->encode("abc", {}) == Ids{abc});
  CHECK(tokenizer->encode("bc", {}) == Ids{id_of(file, "bc")});
  CHECK(tokenizer->encode("a", {}) == Ids{a});
  CHECK(tokenizer->encode("aaa", {}) == Ids{aaa});
  CHECK(tokenizer->encode("aaaa", {}) == Ids{aa, aa});    // both pairs before any triple
  CHECK(tokenizer->encode("aaaaa", {}) == Ids{aa, aaa});  // aa aa a: the last two merge
  CHECK(tokenizer->encode("aab", {}) == Ids{a, id_of(file, "ab")});
  CHECK(tokenizer->encode("", {}).empty());
  // Each again, from the cache.
  CHECK(tokenizer->encode("abc", {}) == Ids{abc});
  CHECK(tokenizer->encode("aaaaa", {}) == Ids{aa, aaa});
}

TEST_CASE("tokenizer: long pieces give what short ones do") {
  const Json file = byte_level_file();
  const auto tokenizer = open_file(file);
  const int32_t aa = id_of(file, "aa");
  for (const size_t length : {90u, 96u, 97u, 98u, 200u, 100'000u}) {
    CAPTURE(length);
    CHECK(tokenizer->encode(std::string(length, 'a'), {}) == (length % 2 == 0 ? Ids(length / 2, aa) : [&] {
            Ids ids(length / 2, aa);
            ids.back() = id_of(file, "aaa");
            return ids;
          }()));
  }
  // A mixture: cut anywhere where no merge can be, the parts' tokens make the whole's.
  std::string whole;
  Ids parts;
  uint32_t random = 12345;
  for (int i = 0; i < 300; ++i) {
    std::string part = "x";
    for (random = random * 1664525 + 1013904223; random >> 28 != 0; random = random * 1664525 + 1013904223) {
      part += static_cast<char>('a' + (random >> 20) % 3);
    }
    whole += part;
    const Ids ids = tokenizer->encode(part, {});
    parts.insert(parts.end(), ids.begin(), ids.end());
  }
  CHECK(tokenizer->encode(whole, {}) == parts);
}

TEST_CASE("tokenizer: bytes of all kinds come back, NUL among them") {
  const auto tokenizer = open_file(byte_level_file());
  const auto marked = open_file(mark_file());
  std::string text("\0a\0", 3);
  for (const uint32_t point :
       {0x1u, 0x7Fu, 0x80u, 0x7FFu, 0x800u, 0x2581u, 0xD7FFu, 0xE000u, 0xFFFDu, 0xFFFFu, 0x10000u, 0x10FFFFu}) {
    utf8_append(point, text);
  }
  CHECK(decode(*tokenizer, tokenizer->encode(text, {})) == text);
  std::string spaces = text;  // there the mark is a space for ever
  spaces.replace(spaces.find("\xE2\x96\x81"), 3, " ");
  CHECK(decode(*marked, marked->encode(text, {})) == spaces);
}

TEST_CASE("tokenizer: input that is refused or ignored") {
  const auto tokenizer = open_file(byte_level_file());
  CHECK_ERROR(Status::kInvalid, ({"UTF-8", "byte 2"}), (void)tokenizer->encode("ab\x80", {}));
  CHECK_ERROR(Status::kInvalid, ({"UTF-8", "byte 0"}), (void)tokenizer->encode("\xED\xA0\x80", {}));
  CHECK_ERROR(Status::kInvalid, ({"UTF-8", "byte 1"}), (void)tokenizer->encode("a\xE2\x82", {}));
  CHECK_ERROR(Status::kInvalid, ({"-1"}), decode(*tokenizer, {-1}));
  CHECK_ERROR(Status::kInvalid, ({"-7"}), (void)tokenizer->token_bytes(-7));
  CHECK(decode(*tokenizer, {0, 999'999, INT32_MAX, 0}) == "!!");
  CHECK(tokenizer->token_bytes(999'999).empty());
}

TEST_CASE("tokenizer: special tokens in text and around it") {
  Json file = byte_level_file();
  const int32_t bos = file["added_tokens"][0]["id"].get<int32_t>();
  const auto plain = open_file(file);
  CHECK(plain->encode("<s>a", {}) == Ids{bos, id_of(file, "a")});
  CHECK(plain->encode("<s>a", {true, false}).size() == 4);
  CHECK(decode(*plain, plain->encode("<s>a", {true, false})) == "<s>a");
  CHECK(decode(*plain, {bos, 0, bos}) == "<s>!<s>");
  CHECK(decode(*plain, {bos, 0, bos}, true) == "!");

  const std::string config = R"({"add_bos_token": true, "bos_token": {"content": "<s>"}, "add_eos_token": true,
                                 "eos_token": "<s>"})";
  const auto configured = open_file(file, config);
  CHECK(configured->encode("!", {}) == Ids{bos, 0, bos});
  CHECK(configured->encode("!", {false, true}) == Ids{0});
  CHECK(configured->encode("", {}) == Ids{bos, bos});
  // A template in the file wins over the configuration.
  file["post_processor"] = Json::parse(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
      {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}, {"Sequence": {"id": "A"}}],
       "special_tokens": {"x": {"ids": [0, 1]}}}]})");
  CHECK(open_file(file, config)->encode("#", {}) == Ids{0, 1, 2});
}

TEST_CASE("tokenizer: words on marks, bytes and unknown characters") {
  Json file = mark_file();
  const auto tokenizer = open_file(file);
  const int32_t mark = id_of(file, "\xE2\x96\x81");
  const int32_t mark_ab = id_of(file,
                                "\xE2\x96\x81"
                                "ab");
  const int32_t c = id_of(file, "c");
  CHECK(tokenizer->encode("ab ab  abc", {}) == Ids{mark_ab, mark_ab, mark, mark_ab, c});
  CHECK(tokenizer->encode("\xC3\xA9", {}) == Ids{mark, id_of(file, "<0xC3>"), id_of(file, "<0xA9>")});
  CHECK(decode(*tokenizer, {mark_ab, c, mark_ab}) == "abc ab");
  // Without byte tokens neighbours become one <unk>; without fusing, one each; without one, nothing.
  file["model"]["byte_fallback"] = false;
  CHECK(open_file(file)->encode("x\xC3\xA9"
                                "c",
                                {}) == Ids{mark, 0, c});
  file["model"]["fuse_unk"] = false;
  CHECK(open_file(file)->encode("x\xC3\xA9"
                                "c",
                                {}) == Ids{mark, 0, 0, c});
  file["model"]["unk_token"] = nullptr;
  CHECK(open_file(file)->encode("x\xC3\xA9"
                                "c",
                                {}) == Ids{mark, c});
}

TEST_CASE("tokenizer: a merge across a mark is found, too") {
  Json file = mark_file();
  const auto cut = open_file(file);
  file["model"]["vocab"]["b\xE2\x96\x81"] = file["model"]["vocab"].size();
  file["model"]["merges"].push_back("b \xE2\x96\x81");  // of the last rank
  const auto whole = open_file(file);
  const int32_t mark = id_of(file, "\xE2\x96\x81");
  CHECK(whole->encode("cb c", {}) == Ids{mark, id_of(file, "c"), id_of(file, "b\xE2\x96\x81"), id_of(file, "c")});
  CHECK(whole->encode("c c", {}) == cut->encode("c c", {}));
  std::string text;
  for (int i = 0; i < 2000; ++i) {
    text += i % 7 == 0 ? " ab" : i % 5 == 0 ? "ca" : "  c";
  }
  CHECK(whole->encode(text, {}) == cut->encode(text, {}));
}

TEST_CASE("tokenizer: Metaspace in place of a normaliser") {
  Json file = mark_file();
  file["normalizer"] = nullptr;
  file["added_tokens"].push_back({{"id", file["model"]["vocab"].size()}, {"content", "<t>"}, {"special", false}});
  const int32_t tag = file["added_tokens"][1]["id"].get<int32_t>();
  const int32_t ab = id_of(file, "ab");
  const int32_t mark_ab = id_of(file,
                                "\xE2\x96\x81"
                                "ab");
  for (const bool split : {false, true}) {
    file["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "\xE2\x96\x81"}, {"split", split}};
    file["pre_tokenizer"]["prepend_scheme"] = "first";
    CHECK(open_file(file)->encode("ab ab<t>ab", {}) == Ids{mark_ab, mark_ab, tag, ab});
    file["pre_tokenizer"]["prepend_scheme"] = "always";
    CHECK(open_file(file)->encode("ab ab<t>ab", {}) == Ids{mark_ab, mark_ab, tag, mark_ab});
    file["pre_tokenizer"]["prepend_scheme"] = "never";
    CHECK(open_file(file)->encode("ab ab<t>ab", {}) == Ids{ab, mark_ab, tag, ab});
  }
}

TEST_CASE("tokenizer: a megabyte of one character") {
  const auto tokenizer = open_file(byte_level_file());
  const auto marked = open_file(mark_file());
  for (const char* unit : {"a", " ", "\n", "1", "A", "\xE4\xBD\xA0", "\xCC\x81"}) {
    std::string text;
    while (text.size() < 1'000'000) {
      text += unit;
    }
    CAPTURE(unit);
    CHECK(decode(*tokenizer, tokenizer->encode(text, {})) == text);
    CHECK(decode(*marked, marked->encode(text, {})) == text);
  }
}

TEST_CASE("tokenizer: several threads at once") {
  const auto tokenizer = open_file(byte_level_file());
  const Ids wanted = tokenizer->encode("abc aab cab", {});
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        wrong += tokenizer->encode("abc aab cab", {}) == wanted ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == 0);
}
