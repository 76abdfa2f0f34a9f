// SPDX-License-Identifier: Apache-2.0
// How each family cuts a text, as its published expressions say, and where PCRE2 and Oniguruma differ.
#include "runtime/text/pre_tokenizer.h"

#include "kernels/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"

using namespace moelora;
using namespace moelora::test;

namespace {

using Texts = std::vector<std::string>;

constexpr const char* kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
    R"(\s+(?!\S)|\s+)";
constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
    R"(\s+(?!\S)|\s+)";
const Texts kDeepSeekV3 = {R"(\p{N}{1,3})", "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
                           R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|)"
                           R"( ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};

PreTokenizer make(const Json& json) {
  static const std::string source = "t.json";
  static Json root;
  root = {{"pre_tokenizer", json}};
  return PreTokenizer(JsonField(root, source).member("pre_tokenizer"));
}

Json split(const std::string& expression) {
  return {{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}, {"invert", false}};
}

Json sequence(const Texts& expressions) {
  Json parts = Json::array();
  for (const std::string& expression : expressions) {
    parts.push_back(split(expression));
  }
  parts.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  return {{"type", "Sequence"}, {"pretokenizers", parts}};
}

Texts cut(const Json& json, const std::string& text) {
  const PreTokenizer tokenizer = make(json);
  RegexScratch scratch;
  Pieces pieces;
  pieces.text = text;
  tokenizer.apply(pieces, true, scratch);
  Texts result;
  size_t start = 0;
  for (const size_t end : pieces.ends) {
    result.push_back(pieces.text.substr(start, end - start));
    start = end;
  }
  return result;
}

const Json kGpt2 = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};

}  // namespace

TEST_CASE("pieces: numbers") {
  const Texts threes = {"123", "456", "7", " x"};
  CHECK(cut(sequence({kO200k}), "1234567 x") == threes);
  CHECK(cut(sequence({kLlama3}), "1234567 x") == threes);
  CHECK(cut(sequence(kDeepSeekV3), "1234567 x") == threes);
  CHECK(cut(sequence({kQwen2}), "1234567 x") == Texts{"1", "2", "3", "4", "5", "6", "7", " x"});
  CHECK(cut(kGpt2, "1234567 x") == Texts{"1234567", " x"});
}

TEST_CASE("pieces: contractions") {
  CHECK(cut(sequence({kO200k}), "don't DON'T") == Texts{"don't", " DON'T"});
  const Texts apart = {"don", "'t", " DON", "'T"};
  CHECK(cut(sequence({kLlama3}), "don't DON'T") == apart);
  CHECK(cut(sequence({kQwen2}), "don't DON'T") == apart);
  CHECK(cut(sequence(kDeepSeekV3), "don't DON'T") == apart);
  CHECK(cut(kGpt2, "don't DON'T") == Texts{"don", "'t", " DON", "'", "T"});
}

TEST_CASE("pieces: white space and line ends") {
  CHECK(cut(kGpt2, "  \n\n  x") == Texts{"  \n\n ", " x"});
  CHECK(cut(kGpt2, "a/b\n//c\r\n") == Texts{"a", "/", "b", "\n", "//", "c", "\r\n"});
  for (const Json& json : {sequence({kO200k}), sequence({kLlama3}), sequence({kQwen2}), sequence(kDeepSeekV3)}) {
    CHECK(cut(json, "  \n\n  x") == Texts{"  \n\n", " ", " x"});
    CHECK(cut(json, "a/b\n//c\r\n") == Texts{"a", "/b", "\n", "//", "c", "\r\n"});
    CHECK(cut(json, "foo(bar)_baz!!") == Texts{"foo", "(bar", ")_", "baz", "!!"});
  }
  CHECK(cut(sequence({kO200k}), "x;/\n/y") == Texts{"x", ";/\n/", "y"});
  CHECK(cut(sequence({kLlama3}), "x;/\n/y") == Texts{"x", ";/\n", "/y"});
  CHECK(cut(sequence({kO200k}), "HelloWORLDabc") == Texts{"Hello", "WORLDabc"});
  CHECK(cut(sequence({kQwen2}), "HelloWORLDabc") == Texts{"HelloWORLDabc"});
  CHECK(cut(kGpt2, "foo(bar)_baz!!") == Texts{"foo", "(", "bar", ")_", "baz", "!!"});
}

TEST_CASE("pieces: white space is the Unicode property") {
  // U+180E is none, U+0085 and U+3000 are; U+001C to U+001F are none.
  CHECK(cut(split("\\s+"), "a\u180Eb") == Texts{"a\u180Eb"});
  CHECK(cut(split("\\s+"), "a\u0085\u3000\u00A0b") == Texts{"a", "\u0085\u3000\u00A0", "b"});
  CHECK(cut(split("\\s+"),
            "a\x1C\x1F"
            "b") == Texts{"a\x1C\x1F"
                          "b"});
  CHECK(cut(split("[^\\s]+"), "a\u3000b\u180E") == Texts{"a", "\u3000", "b\u180E"});
  CHECK(cut(split("\\S+"), "a\u3000b") == Texts{"a", "\u3000", "b"});
  CHECK(to_pcre2("[]a]", "n") == "[\\]a]");
  CHECK(to_pcre2("[^]a]\\[x]", "n") == "[^\\]a]\\[x]");
  CHECK(to_pcre2("[[:alpha:]x]+", "n") == "[[:alpha:]x]+");
}

TEST_CASE("pieces: each stage sees the pieces of the one before") {
  const Json digits = {{"type", "Digits"}, {"individual_digits", true}};
  const Json both = {{"type", "Sequence"}, {"pretokenizers", {digits, kGpt2}}};
  CHECK(cut(both, "a 12 b") == Texts{"a", " ", "1", "2", " b"});
  CHECK(cut({{"type", "Digits"}, {"individual_digits", false}}, "a12b") == Texts{"a", "12", "b"});
  CHECK(cut({{"type", "Split"}, {"pattern", {{"String", "a.b"}}}, {"behavior", "Isolated"}}, "a.bxab") ==
        Texts{"a.b", "xab"});
  // An expression that can match nothing cuts only where it matches something.
  CHECK(cut(split("x*"), "axxb") == Texts{"a", "xx", "b"});
  CHECK(cut({{"type", "ByteLevel"}, {"add_prefix_space", true}}, "a b") == Texts{" a", " b"});
  CHECK(cut({{"type", "ByteLevel"}, {"add_prefix_space", true}}, " a") == Texts{" a"});
}

TEST_CASE("pieces: an expression that never comes to an end is stopped") {
  CHECK_ERROR(Status::kInvalid, ({"pre_tokenizer.pattern.Regex", "limit"}),
              cut(split("(?:a|aa|aaa|a{4})+[bc]"), std::string(200, 'a')));
}
