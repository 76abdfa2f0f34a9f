// SPDX-License-Identifier: Apache-2.0
// The C API as the commands use it: owning objects, and a status < 0 as an exception that carries the library's
// message. Only public headers are behind this file; it is also an example of a C++ host.
#pragma once

#include <moelora.h>
#include <moelora_experimental.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moelora_cli {

class Failure : public std::runtime_error {
 public:
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

struct EngineFlags {
  std::string model;
  std::string device, compute, options_file;
  int64_t threads = -1;
  bool random_weights = false;
  bool deterministic = false;
  std::string timeline;               // file; empty: none
  bool live = true;                   // `moelora top` may look
  std::vector<std::string> settings;  // KEY=VALUE
};

using ConfigPtr = std::unique_ptr<moelora_config, void (*)(moelora_config*)>;
// Options file first, then named flags, then --set: the nearest to the user's hand wins.
ConfigPtr make_config(const EngineFlags& flags);

// NAME=DIR, or DIR, which is then named after its last folder.
struct AdapterFlag {
  std::string name, dir;
};
AdapterFlag parse_adapter(const std::string& text);

class Engine {
 public:
  explicit Engine(const EngineFlags& flags);
  Engine(const moelora_config* config, const std::string& model);
  ~Engine() { moelora_engine_release(engine_); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] moelora_engine* get() const { return engine_; }
  [[nodiscard]] moelora_engine_info info() const;
  // `flags`: MOELORA_ADAPTER_*.
  [[nodiscard]] moelora_adapter load(const AdapterFlag& adapter, uint32_t flags = 0) const;
  [[nodiscard]] bool has_tokenizer() const;
  void write_timeline(const std::string& path) const;

 private:
  moelora_engine* engine_ = nullptr;
};

// Throws what ended the engine if that is what the event says.
void must_live(const moelora_event& event);

class Queue {
 public:
  Queue() { must(moelora_queue_create, &queue_); }
  ~Queue() { moelora_queue_destroy(queue_); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  [[nodiscard]] moelora_queue* get() const { return queue_; }
  // Up to 64 events; empty after the timeout.
  [[nodiscard]] std::vector<moelora_event> wait(int32_t timeout_ms) const;

 private:
  moelora_queue* queue_ = nullptr;
};

// One request and what was read of it so far.
class Request {
 public:
  explicit Request(moelora_engine* engine);
  ~Request();
  Request(Request&& other) noexcept;
  Request& operator=(Request&& other) noexcept;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  [[nodiscard]] moelora_request handle() const { return handle_; }
  void set_tokens(const std::vector<int32_t>& prompt);
  void set_text(const std::string& prompt);
  void add_stop(const std::string& text);
  // Reads text beside the tokens from here on; the model needs a tokenizer.
  void want_text() { wants_text_ = true; }
  void set_sampling(const moelora_sampling& sampling);
  void set_adapter(moelora_adapter adapter, float scale);
  void set_queue(const Queue& queue, uint64_t tag);
  void submit();
  // Takes what is ready, waiting up to timeout_ms for the first of it. Returns the number of new tokens, and sets
  // finished() at the end. Throws the request's own error.
  size_t read(int32_t timeout_ms);
  void read_to_end();
  [[nodiscard]] bool finished() const { return finished_; }
  [[nodiscard]] const std::vector<int32_t>& tokens() const { return tokens_; }
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] bool wants_text() const { return wants_text_; }
  [[nodiscard]] moelora_result result() const;
  // Captured logits (moelora_experimental.h): rows in order of position.
  [[nodiscard]] int32_t captured(int32_t* first_position) const;
  [[nodiscard]] std::vector<float> captured_row(int32_t row) const;
  [[nodiscard]] double router_gap(int32_t row) const;

 private:
  moelora_engine* engine_ = nullptr;
  moelora_request handle_ = 0;
  bool finished_ = false;
  bool wants_text_ = false;
  std::vector<int32_t> tokens_;
  std::string text_;
};

// A model folder's tokenizer.
class Tokenizer {
 public:
  explicit Tokenizer(const std::string& model);
  ~Tokenizer() { moelora_tokenizer_release(tokenizer_); }
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;
  [[nodiscard]] std::vector<int32_t> tokenize(const std::string& text, uint32_t flags) const;
  [[nodiscard]] std::string detokenize(const std::vector<int32_t>& tokens, uint32_t flags) const;

 private:
  moelora_tokenizer* tokenizer_ = nullptr;
};

const char* finish_name(int32_t reason);
double now_ms();  // monotonic

// Token ids from text: numbers separated by spaces or commas, or a JSON list. `source` names them in messages.
std::vector<int32_t> parse_tokens(const std::string& text, const std::string& source);
std::string read_file(const std::string& path);
std::vector<std::string> split(const std::string& text, char separator);  // without empty parts

}  // namespace moelora_cli
