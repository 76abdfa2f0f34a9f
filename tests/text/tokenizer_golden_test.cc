// SPDX-License-Identifier: Apache-2.0
// Ids and both decoded forms of the reference cases that Hugging Face's tokenizers computed, for each family; and the
// same text from a stream, whatever the borders of tokens.
#include <cstdlib>
#include <filesystem>

#include "runtime/io/json.h"
#include "runtime/text/tokenizer.h"
#include "tests/support/catch.h"

using namespace moelora;

namespace {

std::string folder(const std::string& family) {
  return std::string(MOELORA_SOURCE_DIR) + "/tests/data/tokenizers/" + family;
}

std::string streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip_special) {
  TextStream stream = tokenizer.stream(skip_special);
  std::string text;
  for (const int32_t id : ids) {
    std::string part;
    stream.push(id, part);
    if (!is_valid_utf8(part)) {
      return "a part that is not UTF-8";
    }
    text += part;
  }
  stream.finish(text);
  return text;
}

void check_cases(const Tokenizer& tokenizer, const std::string& family, size_t count) {
  const Json cases = read_json(folder(family) + "/expected.json");
  REQUIRE(cases.size() == count);
  for (const Json& one : cases) {
    const auto text = one.at("text").get<std::string>();
    CAPTURE(family, text);
    const bool special = one.at("add_special_tokens").get<bool>();
    const auto ids = one.at("ids").get<std::vector<int32_t>>();
    CHECK(tokenizer.encode(text, {special, true}) == ids);
    for (const bool skip : {false, true}) {
      const auto decoded = one.at(skip ? "decoded_skip_special" : "decoded").get<std::string>();
      CHECK(tokenizer.decode(ids.data(), ids.size(), skip) == decoded);
      CHECK(streamed(tokenizer, ids, skip) == decoded);
    }
  }
}

}  // namespace

TEST_CASE("golden: every family's ids and texts") {
  for (const char* family : {"qwen", "llama3", "o200k", "deepseek", "mixtral"}) {
    check_cases(*Tokenizer::open(folder(family)), family, 56);
  }
}

// Its vocabulary of 49,152 tokens comes with the model: tests/text/smollm2_test.sh names the folder.
TEST_CASE("golden: SmolLM2", "[.smollm2]") {
  const char* model = std::getenv("MOELORA_SMOLLM2");
  REQUIRE(model != nullptr);
  check_cases(*Tokenizer::open(model), "smollm2", 66);
}
