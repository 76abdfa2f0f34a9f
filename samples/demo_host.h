// SPDX-License-Identifier: Apache-2.0
// What a host in C++ needs around the C API, as far as demo.cc does: a status < 0 as an exception, an engine with its
// queue, stories that are requests, and what the engine's steps had in them. Written to be copied from.
#pragma once

#include <moelora.h>
#include <moelora_experimental.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace demo {

struct Failure : std::runtime_error {
  Failure(moelora_status code, const std::string& message) : std::runtime_error(message), status(code) {}
  moelora_status status;
};

// Calls a function of the API with an error struct as its last argument; throws on a status < 0, else returns it.
template <class Function, class... Arguments>
moelora_status must(Function function, Arguments... arguments) {
  moelora_error error;
  moelora_error_init(&error);
  const moelora_status status = function(arguments..., &error);
  if (status < 0) {
    throw Failure(status, std::string(moelora_status_name(status)) + ": " + error.message);
  }
  return status;
}

struct Options {
  std::string model, adapters;  // folders
  std::string device = "cpu";
  int64_t threads = 1;  // for a model as small as the samples' more are slower; 0: one a core
};

// One request and what has come of it.
struct Story {
  std::string name{};
  std::string beginning{};
  moelora_adapter adapter = 0;  // 0: the base model
  float scale = 1.0f;
  moelora_session session = 0;           // given: has its adapter and scale itself
  std::vector<int32_t> prompt_tokens{};  // given: instead of the beginning
  int32_t max_tokens = 160;
  size_t leave_after = 0;     // cancelled by its host after so many tokens; 0: it is not
  bool with_margins = false;  // costs time on a GPU

  moelora_request request = 0;
  std::vector<int32_t> tokens{};
  std::string text{};
  int pieces = 0;  // reads that brought text
  bool finished = false;
  uint64_t first_step = 0, last_step = 0;  // of the engine, from submit to the end
  std::vector<float> margins{};            // asked for: log-probability of each token less that of the next best
  moelora_result result{};
};

// What was in the engine's steps since some moment.
struct Batches {
  size_t steps = 0;
  double rows = 0, adapters = 0;  // means a step; a row is a token computed
  int most_rows = 0, most_sequences = 0, most_adapters = 0;
  double experts = 0;  // mean a layer, of those that a step's rows chose
};

class Host {
 public:
  explicit Host(const Options& options);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  [[nodiscard]] moelora_engine* engine() const { return engine_; }
  [[nodiscard]] moelora_engine_info info() const;
  [[nodiscard]] uint64_t steps() const;  // so far
  [[nodiscard]] size_t running() const { return running_.size(); }
  [[nodiscard]] Batches batches_since(uint64_t step) const;

  [[nodiscard]] moelora_adapter load(const std::string& name, const std::string& dir) const;
  [[nodiscard]] std::vector<int32_t> tokenize(const std::string& text) const;
  [[nodiscard]] std::string detokenize(const std::vector<int32_t>& tokens) const;  // no text for special ones

  // Hands stories to the engine, all at once; they must stay where they are until they are finished.
  void submit(const std::vector<Story*>& stories);
  // Waits for the next events of running stories and reads what they announce.
  void take();
  // Submits them and takes until all are finished; `after_each` is called after each take.
  void run(std::vector<Story>& stories, const std::function<void()>& after_each = [] {});
  // The same request once more, alone.
  [[nodiscard]] Story again(const Story& story, bool with_margins = false);

 private:
  void build(Story& story);
  void read(Story& story);
  void read_margins(Story& story) const;
  void end(Story& story);

  moelora_engine* engine_ = nullptr;
  moelora_queue* queue_ = nullptr;
  moelora_tokenizer* tokenizer_ = nullptr;
  std::vector<Story*> running_;
};

double now_s();

}  // namespace demo
