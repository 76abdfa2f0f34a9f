// SPDX-License-Identifier: Apache-2.0
// Which added token is found where: leftmost, then longest; words, white space, special ones left out.
#include "runtime/text/added_tokens.h"

#include "tests/support/catch.h"

using namespace moelora;

namespace {

std::string found(const std::vector<AddedToken>& tokens, const std::string& text, bool special = true) {
  AddedTokenFinder finder(tokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    finder.add(i, tokens[i].content);
  }
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const auto match = finder.find(text, at, special);
    result += text.substr(at, match.begin - at);
    if (match.token != nullptr) {
      result += "{" + std::to_string(match.token->id) + "}";
    }
    REQUIRE(match.end > at);
    at = match.end;
  }
  return result;
}

AddedToken token(int32_t id, const std::string& content, bool special = false) {
  AddedToken added;
  added.id = id;
  added.content = content;
  added.special = special;
  return added;
}

}  // namespace

TEST_CASE("added tokens: leftmost, then longest") {
  const std::vector<AddedToken> tokens = {token(1, "<a>"), token(2, "<a>b"), token(3, "a>bc"),
                                          token(4, "  "),  token(5, "    "), token(6, "")};
  CHECK(found(tokens, "x<a>y") == "x{1}y");
  CHECK(found(tokens, "x<a>bc") == "x{2}c");
  CHECK(found(tokens, "a>bc<a") == "{3}<a");
  CHECK(found(tokens, std::string(11, ' ')) == "{5}{5}{4} ");
  CHECK(found({}, "abc") == "abc");
}

TEST_CASE("added tokens: special ones can be left as text") {
  const std::vector<AddedToken> tokens = {token(1, "<s>", true), token(2, "<s"), token(3, "<t>")};
  CHECK(found(tokens, "<s><t>") == "{1}{3}");
  CHECK(found(tokens, "<s><t>", false) == "{2}>{3}");
}

TEST_CASE("added tokens: single words and white space") {
  AddedToken word = token(1, "cat");
  word.single_word = true;
  CHECK(found({word},
              "cat cats scat a_cat cat! \u00E9"
              "cat cat") ==
        "{1} cats scat a_cat {1}! \u00E9"
        "cat {1}");
  AddedToken left = token(2, "<l>");
  left.lstrip = true;
  AddedToken right = token(3, "<r>");
  right.rstrip = true;
  CHECK(found({left, right},
              "a \u3000\n<l> b <r> \t\u00A0"
              "c") == "a{2} b {3}c");
  CHECK(found({left, right}, "<r>  <l>") == "{3}{2}");
  CHECK(found({left}, "  <l>") == "{2}");
}
