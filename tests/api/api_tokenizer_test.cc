// SPDX-License-Identifier: Apache-2.0
// Tokenizers through the public API: two-step sizes, flags, lifetimes, and that none of it needs an engine.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "tests/api/host.h"

using namespace moelora_host;

namespace {

std::string tokenizer_dir(const std::string& family) {
  return std::string(MOELORA_SOURCE_DIR) + "/tests/data/tokenizers/" + family;
}

moelora_tokenizer* open(const std::string& family) {
  const std::string dir = tokenizer_dir(family);
  moelora_tokenizer* tokenizer = nullptr;
  Err err;
  if (moelora_tokenizer_open(dir.data(), dir.size(), &tokenizer, err) != MOELORA_OK) {
    FAIL(err.message());
  }
  return tokenizer;
}

std::vector<int32_t> tokenize(moelora_tokenizer* tokenizer, const std::string& text, uint32_t flags) {
  size_t n = 0;
  std::vector<int32_t> ids;
  while (moelora_tokenize(tokenizer, text.data(), text.size(), flags, ids.data(), ids.size(), &n, nullptr) ==
         MOELORA_MORE) {
    ids.resize(n);
  }
  ids.resize(n);
  return ids;
}

std::string detokenize(moelora_tokenizer* tokenizer, const std::vector<int32_t>& ids, uint32_t flags) {
  size_t n = 0;
  std::string text;
  while (moelora_detokenize(tokenizer, ids.data(), ids.size(), flags, text.data(), text.size(), &n, nullptr) ==
         MOELORA_MORE) {
    text.resize(n);
  }
  text.resize(n);
  return text;
}

// The reference case's model with a family's tokenizer beside it.
class TempModel {
 public:
  explicit TempModel(const std::string& family) {
    namespace fs = std::filesystem;
    std::string pattern = (fs::temp_directory_path() / "moelora_test_XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
    for (const auto& entry : fs::directory_iterator(model_dir())) {
      fs::create_symlink(entry.path(), fs::path(path_) / entry.path().filename());
    }
    fs::create_symlink(tokenizer_dir(family) + "/tokenizer.json", fs::path(path_) / "tokenizer.json");
  }
  ~TempModel() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempModel(const TempModel&) = delete;
  TempModel& operator=(const TempModel&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace

TEST_CASE("tokenizer: there and back") {
  moelora_tokenizer* tokenizer = open("mixtral");
  CHECK(tokenize(tokenizer, "a", 0) == std::vector<int32_t>{1, 369, 320});
  CHECK(tokenize(tokenizer, "a", MOELORA_TOKENIZE_NO_SPECIAL) == std::vector<int32_t>{369, 320});
  CHECK(tokenize(tokenizer, "<s>", MOELORA_TOKENIZE_NO_SPECIAL) == std::vector<int32_t>{1});
  CHECK(tokenize(tokenizer, "<s>", MOELORA_TOKENIZE_NO_SPECIAL | MOELORA_TOKENIZE_PLAIN_TEXT).size() > 1);
  CHECK(detokenize(tokenizer, {1, 369, 320}, 0) == "<s> a");
  CHECK(detokenize(tokenizer, {1, 369, 320}, MOELORA_DETOKENIZE_SKIP_SPECIAL) == "a");
  CHECK(detokenize(tokenizer, {}, 0).empty());
  const std::string nul("x\0y", 3);
  CHECK(detokenize(tokenizer, tokenize(tokenizer, nul, MOELORA_TOKENIZE_NO_SPECIAL), 0) == nul);
  char buf[8];
  size_t n = 0;
  CHECK(moelora_token_text(tokenizer, 369, buf, 8, &n, nullptr) == MOELORA_OK);
  CHECK(std::string(buf, n) == " ");
  CHECK(moelora_token_text(tokenizer, 1, buf, 2, &n, nullptr) == MOELORA_MORE);
  CHECK(n == 3);
  CHECK(moelora_token_text(tokenizer, 1'000'000, buf, 8, &n, nullptr) == MOELORA_OK);
  CHECK(n == 0);
  moelora_tokenizer_release(tokenizer);
}

TEST_CASE("tokenizer: arguments and lifetimes") {
  moelora_tokenizer* tokenizer = open("qwen");
  Err err;
  size_t n = 0;
  int32_t ids[8];
  char text[8];
  CHECK(moelora_tokenize(tokenizer, "hi", MOELORA_STRLEN, 0, ids, 8, &n, err) == MOELORA_OK);
  CHECK(n > 0);
  CHECK(moelora_tokenize(tokenizer, nullptr, 0, 0, nullptr, 0, &n, err) == MOELORA_OK);
  CHECK(n == 0);
  CHECK(moelora_tokenize(tokenizer, nullptr, 3, 0, ids, 8, &n, err) == MOELORA_E_INVALID);
  CHECK(moelora_tokenize(tokenizer, "hi", 2, 4, ids, 8, &n, err) == MOELORA_E_INVALID);
  CHECK(err.names("flags"));
  CHECK(moelora_tokenize(tokenizer, "hi", 2, 0, ids, 8, nullptr, err) == MOELORA_E_INVALID);
  CHECK(moelora_tokenize(tokenizer, "a\xff", 2, 0, ids, 8, &n, err) == MOELORA_E_INVALID);
  CHECK(err.names("byte 1"));
  ids[0] = -5;
  CHECK(moelora_detokenize(tokenizer, ids, 1, 0, text, 8, &n, err) == MOELORA_E_INVALID);
  CHECK(err.names("-5"));
  CHECK(moelora_detokenize(tokenizer, nullptr, 1, 0, text, 8, &n, err) == MOELORA_E_INVALID);
  CHECK(moelora_detokenize(tokenizer, ids, 0, 2, text, 8, &n, err) == MOELORA_E_INVALID);
  CHECK(moelora_token_text(tokenizer, -1, text, 8, &n, err) == MOELORA_E_INVALID);
  CHECK(moelora_tokenize(nullptr, "hi", 2, 0, ids, 8, &n, err) == MOELORA_E_INVALID);
  moelora_tokenizer_release(tokenizer);
  moelora_tokenizer_release(tokenizer);
  moelora_tokenizer_release(nullptr);
  CHECK(moelora_tokenize(tokenizer, "hi", 2, 0, ids, 8, &n, err) == MOELORA_E_HANDLE);
  CHECK(err.names("tokenizer"));
  CHECK(moelora_tokenizer_open("/no/such", MOELORA_STRLEN, &tokenizer, err) == MOELORA_E_IO);
  CHECK(err.names("/no/such/tokenizer.json"));
  CHECK(moelora_tokenizer_open("/tmp", MOELORA_STRLEN, nullptr, err) == MOELORA_E_INVALID);
}

TEST_CASE("tokenizer: an engine whose folder has none says so") {
  const Host host;
  Err err;
  moelora_tokenizer* tokenizer = nullptr;
  CHECK(moelora_tokenizer_from_engine(host.engine, &tokenizer, err) == MOELORA_E_NOT_FOUND);
  CHECK(err.names("tokenizer.json"));
  CHECK(moelora_tokenizer_from_engine(nullptr, &tokenizer, err) == MOELORA_E_INVALID);
}

TEST_CASE("tokenizer: outlives its engine, and goes while others use it") {
  const TempModel model("llama3");
  moelora_tokenizer* tokenizer = nullptr;
  {
    const Host host({}, model.path());
    Err err;
    moelora_tokenizer* other = nullptr;
    REQUIRE(moelora_tokenizer_from_engine(host.engine, &tokenizer, err) == MOELORA_OK);
    REQUIRE(moelora_tokenizer_from_engine(host.engine, &other, err) == MOELORA_OK);
    moelora_tokenizer_release(other);
  }
  const std::vector<int32_t> wanted = tokenize(tokenizer, "Hello world", 0);
  CHECK(detokenize(tokenizer, wanted, 0) == "Hello world");
  std::thread user([&] {
    for (int i = 0; i < 1000; ++i) {
      int32_t ids[64];
      size_t n = 0;
      if (moelora_tokenize(tokenizer, "Hello world", 11, 0, ids, 64, &n, nullptr) != MOELORA_OK) {
        return;
      }
    }
  });
  moelora_tokenizer_release(tokenizer);
  user.join();
}
