// SPDX-License-Identifier: Apache-2.0
// moelora tokenize and detokenize: text on standard input to token ids and back. No engine is opened.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "samples/cli/command.h"

namespace moelora_cli {
namespace {

struct TokenizeFlags {
  std::string model;
  bool no_special = false;
  bool plain_text = false;
  bool skip_special = false;
  bool json = false;
};

std::string standard_input() {
  return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

void write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

int tokenize(const TokenizeFlags& flags) {
  uint32_t bits = 0;
  bits |= flags.no_special ? static_cast<uint32_t>(MOELORA_TOKENIZE_NO_SPECIAL) : 0u;
  bits |= flags.plain_text ? static_cast<uint32_t>(MOELORA_TOKENIZE_PLAIN_TEXT) : 0u;
  const std::vector<int32_t> ids = Tokenizer(flags.model).tokenize(standard_input(), bits);
  if (flags.json) {
    write(nlohmann::json{{"ids", ids}}.dump() + "\n");
    return 0;
  }
  std::string line;
  for (const int32_t id : ids) {
    line += (line.empty() ? "" : " ") + std::to_string(id);
  }
  write(line + "\n");
  return 0;
}

// The text and nothing else, so that `tokenize | detokenize` gives back what came in.
int detokenize(const TokenizeFlags& flags) {
  const std::string text =
      Tokenizer(flags.model)
          .detokenize(parse_tokens(standard_input(), "standard input"),
                      flags.skip_special ? static_cast<uint32_t>(MOELORA_DETOKENIZE_SKIP_SPECIAL) : 0u);
  write(flags.json ? nlohmann::json{{"text", text}}.dump() + "\n" : text);
  return 0;
}

}  // namespace

void add_tokenize(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<TokenizeFlags>();
  CLI::App* command = app.add_subcommand("tokenize", "Token ids of the text on standard input");
  command->add_option("--model", flags->model, "model folder (tokenizer.json)")->required();
  command->add_flag("--no-special", flags->no_special, "nothing around the text, such as BOS");
  command->add_flag("--plain-text", flags->plain_text, "names of special tokens in the text are text");
  command->add_flag("--json", flags->json, "one object, {\"ids\": [...]}");
  command->callback([flags, exit_code] { *exit_code = tokenize(*flags); });
}

void add_detokenize(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<TokenizeFlags>();
  CLI::App* command = app.add_subcommand("detokenize", "Text of the token ids on standard input");
  command->add_option("--model", flags->model, "model folder (tokenizer.json)")->required();
  command->add_flag("--skip-special", flags->skip_special, "special tokens give no text");
  command->add_flag("--json", flags->json, "one object, {\"text\": \"...\"}");
  command->callback([flags, exit_code] { *exit_code = detokenize(*flags); });
}

}  // namespace moelora_cli
