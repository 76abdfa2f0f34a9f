// SPDX-License-Identifier: Apache-2.0
// Requests in text through the public API. The tokenizer is made for the answer that the model gives: each of its
// tokens is one byte, chosen so that characters are cut by the borders of tokens.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "tests/api/host.h"

using namespace moelora_host;
using nlohmann::json;

namespace {

constexpr int32_t kVocabulary = 320;
constexpr int32_t kLength = 24;
const std::vector<int32_t> kPrompt = {3, 1, 4, 1, 5};

void append(uint32_t point, std::string& text) {
  if (point < 0x80) {
    text += static_cast<char>(point);
  } else {
    text += static_cast<char>(0xC0 | point >> 6);
    text += static_cast<char>(0x80 | (point & 0x3F));
  }
}

// The character that stands for a byte in a byte-level vocabulary.
std::string letter_of(uint32_t byte) {
  uint32_t others = 0;
  const auto is_itself = [](uint32_t b) { return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD); };
  for (uint32_t before = 0; before < byte; ++before) {
    others += is_itself(before) ? 0 : 1;
  }
  std::string text;
  append(is_itself(byte) ? byte : 256 + others, text);
  return text;
}

class TextHost {
 public:
  TextHost() {
    namespace fs = std::filesystem;
    std::string pattern = (fs::temp_directory_path() / "moelora_test_XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path = pattern;
    for (const auto& entry : fs::directory_iterator(model_dir())) {
      fs::create_symlink(entry.path(), fs::path(path) / entry.path().filename());
    }
    host = std::make_unique<Host>(Options{}, path);
    free_run = host->answer(kPrompt, kLength);
    write_tokenizer();
    REQUIRE(moelora_tokenizer_from_engine(host->engine, &tokenizer, nullptr) == MOELORA_OK);
  }
  ~TextHost() {
    moelora_tokenizer_release(tokenizer);
    host.reset();
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }

  [[nodiscard]] std::string text_of(const std::vector<int32_t>& tokens) const {
    std::string text(1024, '\0');
    size_t n = 0;
    REQUIRE(moelora_detokenize(tokenizer, tokens.data(), tokens.size(), MOELORA_DETOKENIZE_SKIP_SPECIAL, text.data(),
                               text.size(), &n, nullptr) == MOELORA_OK);
    text.resize(n);
    return text;
  }
  [[nodiscard]] moelora_request build(const std::vector<std::string>& stops) const {
    const moelora_request request = host->build(kPrompt, kLength);
    for (const std::string& stop : stops) {
      REQUIRE(moelora_request_add_stop(host->engine, request, stop.data(), stop.size(), nullptr) == MOELORA_OK);
    }
    return request;
  }
  struct Answer {
    std::string text;
    std::vector<int32_t> tokens;
    moelora_result result;
  };
  // Reads with buffers of these sizes; each read gives whole characters.
  Answer finish(moelora_request request, size_t token_cap, size_t text_cap) const {
    Err err;
    INFO(err.message());
    REQUIRE(moelora_request_submit(host->engine, request, err) == MOELORA_OK);
    Answer answer;
    std::vector<int32_t> tokens(token_cap);
    std::string text(text_cap, '\0');
    for (moelora_status status = MOELORA_OK; status != MOELORA_END;) {
      moelora_chunk chunk;
      moelora_chunk_init(&chunk);
      status = moelora_request_read(host->engine, request, 60000, token_cap == 0 ? nullptr : tokens.data(), token_cap,
                                    text.data(), text_cap, &chunk, err);
      REQUIRE((status == MOELORA_OK || status == MOELORA_END));
      CHECK((status == MOELORA_END) == (chunk.num_tokens + chunk.num_text_bytes == 0));
      const bool whole = chunk.num_text_bytes == 0 || (static_cast<unsigned char>(text[0]) & 0xC0) != 0x80;
      CHECK(whole);
      answer.text.append(text, 0, chunk.num_text_bytes);
      answer.tokens.insert(answer.tokens.end(), tokens.begin(), tokens.begin() + chunk.num_tokens);
    }
    moelora_result_init(&answer.result);
    REQUIRE(moelora_request_result(host->engine, request, &answer.result, err) == MOELORA_OK);
    REQUIRE(moelora_request_close(host->engine, request, err) == MOELORA_OK);
    return answer;
  }
  Answer stopped_by(const std::vector<std::string>& stops) const { return finish(build(stops), 16, 64); }

  std::string path;
  std::unique_ptr<Host> host;
  std::vector<int32_t> free_run;
  int32_t bos = -1;
  moelora_tokenizer* tokenizer = nullptr;

 private:
  void write_tokenizer() {
    std::vector<int32_t> ids;  // the answer's first, in its order
    for (const int32_t id : free_run) {
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) {
        ids.push_back(id);
      }
    }
    REQUIRE(ids.size() >= 6);
    for (int32_t id = 0; id < kVocabulary; ++id) {
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) {
        ids.push_back(id);
      }
    }
    bos = ids.back();
    std::vector<uint32_t> bytes = {'h', 0xF0, 0x9F, 0x98, 0x80, 0, 'i', 0xC3, 0xA9, 'j', 'k', 'l', 'm', 'n', 'o'};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      if (std::find(bytes.begin(), bytes.end(), byte) == bytes.end()) {
        bytes.push_back(byte);
      }
    }
    json vocab = json::object();
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      vocab[i < 256 ? letter_of(bytes[i]) : "x" + std::to_string(i)] = ids[i];
    }
    const json file = {{"added_tokens", {{{"id", bos}, {"content", "<s>"}, {"special", true}}}},
                       {"normalizer", nullptr},
                       {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
                       {"post_processor",
                        {{"type", "TemplateProcessing"},
                         {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
                         {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {bos}}}}}}}},
                       {"decoder", {{"type", "ByteLevel"}}},
                       {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}}}};
    std::ofstream(path + "/tokenizer.json") << file.dump();
  }
};

}  // namespace

TEST_CASE("text: of an answer, whatever the buffers") {
  const TextHost text;
  const std::string whole = text.text_of(text.free_run);
  for (const auto& [token_cap, text_cap] :
       {std::pair<size_t, size_t>{64, 1024}, {1, 4}, {1, 64}, {64, 4}, {0, 4}, {0, 64}}) {
    INFO(token_cap << " tokens, " << text_cap << " bytes");
    const auto answer = text.finish(text.build({}), token_cap, text_cap);
    CHECK(answer.text == whole);
    CHECK(answer.tokens == (token_cap == 0 ? std::vector<int32_t>{} : text.free_run));
    CHECK(answer.result.finish_reason == MOELORA_FINISH_LENGTH);
  }
}

TEST_CASE("text: stop strings end an answer and are not in it") {
  const TextHost text;
  const std::string whole = text.text_of(text.free_run);
  const std::string first3 = text.text_of({text.free_run.begin(), text.free_run.begin() + 6}).substr(1);
  for (const std::string& stop : {whole.substr(0, 1), first3, whole.substr(whole.size() - 1), whole}) {
    const auto answer = text.stopped_by({"no such text", stop});
    INFO(whole << " | " << stop);
    CHECK(answer.text == whole.substr(0, whole.find(stop)));
    CHECK(answer.result.finish_reason == MOELORA_FINISH_STOP);
    CHECK(answer.result.stop_index == 1);
    CHECK(answer.result.output_tokens == static_cast<int32_t>(answer.tokens.size()));
    CHECK(std::equal(answer.tokens.begin(), answer.tokens.end(), text.free_run.begin()));
    CHECK(text.text_of(answer.tokens).find(stop) != std::string::npos);
    const std::vector<int32_t> before(answer.tokens.begin(), answer.tokens.end() - 1);
    CHECK(text.text_of(before).find(stop) == std::string::npos);  // ended at once
  }
  // What only might have become one comes at the end.
  const auto answer = text.stopped_by({whole.substr(whole.size() - 1) + "no such text"});
  CHECK(answer.text == whole);
  CHECK(answer.result.finish_reason == MOELORA_FINISH_LENGTH);
  CHECK(answer.result.stop_index == -1);
}

TEST_CASE("text: a stop token is no text, and counts among the stops") {
  const TextHost text;
  const moelora_request request = text.build({"no such text"});
  REQUIRE(moelora_request_add_stop_token(text.host->engine, request, text.free_run[0], nullptr) == MOELORA_OK);
  const auto answer = text.finish(request, 4, 64);
  CHECK(answer.tokens == std::vector<int32_t>{text.free_run[0]});
  CHECK(answer.text.empty());
  CHECK(answer.result.stop_index == 1);
}

TEST_CASE("text: prompts, with the BOS once, and in sessions") {
  const TextHost text;
  moelora_engine* engine = text.host->engine;
  int32_t ids[8];
  size_t n = 0;
  REQUIRE(moelora_tokenize(text.tokenizer, "no", 2, 0, ids, 8, &n, nullptr) == MOELORA_OK);
  const std::vector<int32_t> prompt(ids, ids + n);
  REQUIRE(n == 3);
  CHECK(prompt[0] == text.bos);
  const std::vector<int32_t> wanted = text.host->answer(prompt, 5);
  moelora_session session = 0;
  REQUIRE(moelora_session_create(engine, 0, 1.0f, &session, nullptr) == MOELORA_OK);
  const auto ask = [&](const std::string& words, moelora_session in) {
    const moelora_request request = text.host->build({1}, 5);
    REQUIRE(moelora_request_set_text(engine, request, words.data(), words.size(), nullptr) == MOELORA_OK);
    REQUIRE(moelora_request_set_session(engine, request, in, nullptr) == MOELORA_OK);
    return text.finish(request, 8, 64);
  };
  CHECK(ask("no", 0).tokens == wanted);
  CHECK(ask("<s>no", 0).tokens == wanted);
  CHECK(ask("no", 0).text == text.text_of(wanted));
  CHECK(ask("", 0).result.prompt_tokens == 1);
  CHECK(ask("no", session).tokens == wanted);
  const auto second = ask("no", session);
  CHECK(second.result.prompt_tokens == 2);
  std::vector<int32_t> history = prompt;
  history.insert(history.end(), wanted.begin(), wanted.end());
  history.insert(history.end(), prompt.begin() + 1, prompt.end());
  CHECK(second.tokens == text.host->answer(history, 5));
  CHECK(moelora_session_close(engine, session, nullptr) == MOELORA_OK);
}

TEST_CASE("text: generate") {
  const TextHost text;
  moelora_engine* engine = text.host->engine;
  const moelora_sampling sampling = greedy(5);
  char buf[64];
  size_t n = 0;
  moelora_result result;
  moelora_result_init(&result);
  Err err;
  REQUIRE(moelora_generate(engine, 0, 1.0f, "no", 2, &sampling, buf, 64, &n, &result, err) == MOELORA_OK);
  const std::string whole(buf, n);
  CHECK(result.output_tokens == 5);
  CHECK(result.prompt_tokens == 3);
  CHECK(moelora_generate(engine, 0, 1.0f, "no", 2, &sampling, nullptr, 0, &n, nullptr, err) ==
        (whole.empty() ? MOELORA_OK : MOELORA_MORE));
  CHECK(n == whole.size());
  CHECK(moelora_generate(engine, 0, 1.0f, "n\xFF", 2, &sampling, buf, 64, &n, nullptr, err) == MOELORA_E_INVALID);
  CHECK(err.names("byte 1"));
}

TEST_CASE("text: arguments") {
  const TextHost text;
  moelora_engine* engine = text.host->engine;
  Err err;
  const moelora_request request = text.build({});
  CHECK(moelora_request_set_text(engine, request, "a\xFF", 2, err) == MOELORA_E_INVALID);
  CHECK(err.names("byte 1"));
  CHECK(moelora_request_set_text(engine, request, nullptr, 2, err) == MOELORA_E_INVALID);
  const std::string long_text(20'000, 'a');
  CHECK(moelora_request_set_text(engine, request, long_text.data(), long_text.size(), err) == MOELORA_E_CONTEXT_LENGTH);
  CHECK(moelora_request_add_stop(engine, request, "", 0, err) == MOELORA_E_INVALID);
  CHECK(err.names("empty"));
  CHECK(moelora_request_add_stop(engine, request, "\xFF", 1, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_add_stop(engine, request, long_text.data(), long_text.size(), err) == MOELORA_E_INVALID);
  for (int i = 0; i < 64; ++i) {
    REQUIRE(moelora_request_add_stop(engine, request, "never", 5, err) == MOELORA_OK);
  }
  CHECK(moelora_request_add_stop(engine, request, "never", 5, err) == MOELORA_E_INVALID);
  CHECK(err.names("64"));
  REQUIRE(moelora_request_submit(engine, request, err) == MOELORA_OK);
  CHECK(moelora_request_set_text(engine, request, "a", 1, err) == MOELORA_E_INVALID);
  int32_t tokens[4];
  char buf[8];
  moelora_chunk chunk;
  moelora_chunk_init(&chunk);
  CHECK(moelora_request_read(engine, request, 0, tokens, 4, buf, 3, &chunk, err) == MOELORA_E_INVALID);
  CHECK(err.names("text_cap is 3"));
  CHECK(moelora_request_read(engine, request, 0, tokens, 4, nullptr, 8, &chunk, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_read(engine, request, 0, tokens, 0, nullptr, 0, &chunk, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_close(engine, request, err) == MOELORA_OK);
}
