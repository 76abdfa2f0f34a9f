// SPDX-License-Identifier: Apache-2.0
// Normal forms on known pairs of UAX #15, and the other steps.
#include "runtime/text/normalizer.h"

#include <utf8proc.h>

#include <cstdlib>

#include "runtime/io/utf8.h"
#include "tests/support/catch.h"

using namespace moelora;

namespace {

std::string applied(const Json& json, std::string text) {
  const std::string source = "t.json";
  const Json root = {{"normalizer", json}};
  RegexScratch scratch;
  Normalizer(JsonField(root, source).member("normalizer")).apply(text, scratch);
  return text;
}

std::string nfc(const std::string& text) {
  return to_unicode_form(text, UnicodeForm::kNfc);
}

// utf8proc's own way, all at once.
std::string whole_nfc(const std::string& text) {
  utf8proc_uint8_t* out = nullptr;
  const auto length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &out, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  std::string result(reinterpret_cast<char*>(out), length < 0 ? 0 : static_cast<size_t>(length));
  std::free(out);
  return result;
}

}  // namespace

TEST_CASE("normal forms: known pairs") {
  CHECK(nfc("cafe\u0301 x") == "caf\u00E9 x");
  CHECK(nfc("\u0301e") == "\u0301e");            // a mark with nothing before it
  CHECK(nfc("e\u0323\u0302") == "\u1EC7");       // two marks
  CHECK(nfc("e\u0302\u0323") == "\u1EC7");       // in the other order
  CHECK(nfc("\u212B") == "\u00C5");              // a singleton
  CHECK(nfc("\u1100\u1161\u11A8") == "\uAC01");  // Hangul
  CHECK(nfc("\u0958") == "\u0915\u093C");        // excluded from composition
  CHECK(nfc("\u00E9\u4F60a\u0308z") == "\u00E9\u4F60\u00E4z");
  CHECK(nfc(std::string("\0e\u0301\0", 5)) == std::string("\0\u00E9\0", 4));
  CHECK(to_unicode_form("\u00E9", UnicodeForm::kNfd) == "e\u0301");
  CHECK(to_unicode_form("\uFB01\u00BD", UnicodeForm::kNfkc) == "fi1\u20442");
  CHECK(to_unicode_form("\u00C5\uFF21", UnicodeForm::kNfkd) == "A\u030AA");
}

TEST_CASE("normal forms: part by part is as all at once") {
  uint32_t random = 99;
  const auto next = [&](uint32_t below) {
    return (random = random * 1664525 + 1013904223) >> 8 % 25 ? (random >> 8) % below : 0;
  };
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (int i = 0; i < 12; ++i) {
      const uint32_t kind = next(6);
      uint32_t point = kind == 0   ? 'a' + next(26)
                       : kind == 1 ? 0xC0 + next(0x240)
                       : kind == 2 ? 0x300 + next(0x70)
                       : kind == 3 ? 0x1100 + next(0x100)
                       : kind == 4 ? 0x900 + next(0x80)
                                   : next(0x30000);
      point = point >= 0xD800 && point <= 0xDFFF ? 'x' : point;
      utf8_append(point, text);
    }
    REQUIRE(nfc(text) == whole_nfc(text));
  }
}

TEST_CASE("normal forms: a long run of marks takes no square of its length") {
  std::string text = "e";
  for (int i = 0; i < 200'000; ++i) {
    text += i % 2 == 0 ? "\u0302" : "\u0323";
  }
  const std::string form = nfc(text);
  CHECK(form.starts_with("\u1EC7\u0323\u0323"));
  CHECK(form.ends_with("\u0302\u0302"));
}

TEST_CASE("normalizer: steps") {
  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}};
  const Json prepend = {{"type", "Prepend"}, {"prepend", "\u2581"}};
  CHECK(applied(nullptr, "e\u0301") == "e\u0301");
  CHECK(applied({{"type", "NFC"}}, "e\u0301") == "\u00E9");
  CHECK(applied(replace, " a  b") ==
        "\u2581"
        "a\u2581\u2581"
        "b");
  CHECK(applied({{"type", "Sequence"}, {"normalizers", {prepend, replace}}}, "a b") ==
        "\u2581"
        "a\u2581"
        "b");
  CHECK(applied(prepend, "").empty());
  CHECK(applied({{"type", "Replace"}, {"pattern", {{"Regex", "\\p{N}+"}}}, {"content", "#"}}, "a12b3") == "a#b#");
  CHECK(applied({{"type", "Sequence"}, {"normalizers", Json::array()}}, "a") == "a");
}
