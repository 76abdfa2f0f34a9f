// SPDX-License-Identifier: Apache-2.0
// See host.h. Nothing in here knows a command.
#include "samples/cli/host.h"

#include <array>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace moelora_cli {
namespace {

constexpr int kTimelineEvents = 262144;  // 24 MB

void set_option(moelora_config* config, const std::string& key, const std::string& value) {
  must(moelora_config_set_str, config, key.data(), key.size(), value.data(), value.size());
}

}  // namespace

ConfigPtr make_config(const EngineFlags& flags) {
  moelora_config* raw = nullptr;
  must(moelora_config_create, MOELORA_ABI_VERSION, &raw);
  ConfigPtr config(raw, moelora_config_destroy);
  if (!flags.options_file.empty()) {
    must(moelora_config_load_toml, raw, flags.options_file.data(), flags.options_file.size());
  }
  if (!flags.device.empty()) {
    set_option(raw, "device", flags.device);
  }
  if (!flags.compute.empty()) {
    set_option(raw, "compute", flags.compute);
  }
  if (flags.threads >= 0) {
    set_option(raw, "num_threads", std::to_string(flags.threads));
  }
  if (flags.random_weights) {
    set_option(raw, "random_weights", "true");
  }
  if (flags.deterministic) {
    set_option(raw, "deterministic", "true");
  }
  if (!flags.timeline.empty()) {
    set_option(raw, "timeline_events", std::to_string(kTimelineEvents));
  }
  for (const std::string& setting : flags.settings) {
    const size_t equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw Failure(MOELORA_E_INVALID, "--set takes KEY=VALUE, not '" + setting + "'");
    }
    set_option(raw, setting.substr(0, equals), setting.substr(equals + 1));
  }
  return config;
}

AdapterFlag parse_adapter(const std::string& text) {
  AdapterFlag adapter;
  const size_t equals = text.find('=');
  if (equals == std::string::npos) {
    std::filesystem::path path(text);
    adapter = {(path.has_filename() ? path : path.parent_path()).filename().string(), text};
  } else {
    adapter = {text.substr(0, equals), text.substr(equals + 1)};
  }
  if (adapter.name.empty() || adapter.dir.empty()) {
    throw Failure(MOELORA_E_INVALID, "--adapter takes NAME=DIR, not '" + text + "'");
  }
  return adapter;
}

Engine::Engine(const EngineFlags& flags) : Engine(make_config(flags).get(), flags.model) {}

Engine::Engine(const moelora_config* config, const std::string& model) {
  must(moelora_engine_create, config, model.data(), model.size(), &engine_);
}

moelora_engine_info Engine::info() const {
  moelora_engine_info info;
  moelora_engine_info_init(&info);
  must(moelora_engine_info_get, engine_, &info);
  return info;
}

moelora_adapter Engine::load(const AdapterFlag& adapter, uint32_t flags) const {
  moelora_adapter handle = 0;
  must(moelora_adapter_load_dir, engine_, adapter.name.data(), adapter.name.size(), adapter.dir.data(),
       adapter.dir.size(), flags, &handle);
  return handle;
}

bool Engine::has_tokenizer() const {
  moelora_tokenizer* tokenizer = nullptr;
  moelora_error error;
  moelora_error_init(&error);
  const moelora_status status = moelora_tokenizer_from_engine(engine_, &tokenizer, &error);
  moelora_tokenizer_release(tokenizer);
  if (status != MOELORA_OK && status != MOELORA_E_NOT_FOUND) {
    std::fprintf(stderr, "no text: %s: %s\n", moelora_status_name(status), error.message);
  }
  return status == MOELORA_OK;
}

void Engine::write_timeline(const std::string& path) const {
  must(moelora_timeline_write, engine_, path.data(), path.size());
}

void must_live(const moelora_event& event) {
  if (event.kind == MOELORA_EVENT_ENGINE_FAILED) {
    throw Failure(event.status, std::string("the engine failed: ") + moelora_status_name(event.status));
  }
}

std::vector<moelora_event> Queue::wait(int32_t timeout_ms) const {
  std::vector<moelora_event> events(64);
  size_t count = 0;
  must(moelora_queue_wait, queue_, timeout_ms, events.data(), events.size(), &count);
  events.resize(count);
  return events;
}

Request::Request(moelora_engine* engine) : engine_(engine) {
  must(moelora_request_create, engine_, &handle_);
}

Request::~Request() {
  if (handle_ != 0) {
    moelora_request_close(engine_, handle_, nullptr);
  }
}

Request::Request(Request&& other) noexcept
    : engine_(other.engine_),
      handle_(std::exchange(other.handle_, 0)),
      finished_(other.finished_),
      wants_text_(other.wants_text_),
      tokens_(std::move(other.tokens_)),
      text_(std::move(other.text_)) {}

Request& Request::operator=(Request&& other) noexcept {
  std::swap(engine_, other.engine_);
  std::swap(handle_, other.handle_);
  std::swap(finished_, other.finished_);
  std::swap(wants_text_, other.wants_text_);
  std::swap(tokens_, other.tokens_);
  std::swap(text_, other.text_);
  return *this;
}

void Request::set_tokens(const std::vector<int32_t>& prompt) {
  must(moelora_request_set_tokens, engine_, handle_, prompt.data(), prompt.size());
}

void Request::set_text(const std::string& prompt) {
  must(moelora_request_set_text, engine_, handle_, prompt.data(), prompt.size());
}

void Request::add_stop(const std::string& text) {
  must(moelora_request_add_stop, engine_, handle_, text.data(), text.size());
}

void Request::set_sampling(const moelora_sampling& sampling) {
  must(moelora_request_set_sampling, engine_, handle_, &sampling);
}

void Request::set_adapter(moelora_adapter adapter, float scale) {
  must(moelora_request_set_adapter, engine_, handle_, adapter, scale);
}

void Request::set_queue(const Queue& queue, uint64_t tag) {
  must(moelora_request_set_queue, engine_, handle_, queue.get(), tag);
}

void Request::submit() {
  must(moelora_request_submit, engine_, handle_);
}

size_t Request::read(int32_t timeout_ms) {
  std::array<int32_t, 256> buffer;
  std::array<char, 4096> text;
  size_t taken = 0;
  bool first = true;
  while (!finished_) {
    moelora_chunk chunk;
    moelora_chunk_init(&chunk);
    const moelora_status status =
        must(moelora_request_read, engine_, handle_, std::exchange(first, false) ? timeout_ms : 0, buffer.data(),
             buffer.size(), wants_text_ ? text.data() : nullptr, wants_text_ ? text.size() : 0, &chunk);
    if (status == MOELORA_END) {
      finished_ = true;
    } else if (status == MOELORA_TIMEOUT) {
      break;
    } else {
      tokens_.insert(tokens_.end(), buffer.begin(), buffer.begin() + chunk.num_tokens);
      text_.append(text.data(), chunk.num_text_bytes);
      taken += chunk.num_tokens;
    }
  }
  return taken;
}

void Request::read_to_end() {
  while (!finished_) {
    read(-1);
  }
}

moelora_result Request::result() const {
  moelora_result result;
  moelora_result_init(&result);
  must(moelora_request_result, engine_, handle_, &result);
  return result;
}

int32_t Request::captured(int32_t* first_position) const {
  int32_t rows = 0;
  must(moelora_request_captured, engine_, handle_, &rows, first_position, static_cast<int32_t*>(nullptr));
  return rows;
}

std::vector<float> Request::captured_row(int32_t row) const {
  int32_t vocab = 0;
  must(moelora_request_captured, engine_, handle_, static_cast<int32_t*>(nullptr), static_cast<int32_t*>(nullptr),
       &vocab);
  std::vector<float> logits(static_cast<size_t>(vocab));
  must(moelora_request_read_captured, engine_, handle_, row, logits.data(), logits.size());
  return logits;
}

double Request::router_gap(int32_t row) const {
  float gap = -1;
  must(moelora_request_router_gap, engine_, handle_, row, &gap);
  return static_cast<double>(gap);
}

Tokenizer::Tokenizer(const std::string& model) {
  must(moelora_tokenizer_open, model.data(), model.size(), &tokenizer_);
}

std::vector<int32_t> Tokenizer::tokenize(const std::string& text, uint32_t flags) const {
  std::vector<int32_t> tokens(text.size() / 2 + 16);
  size_t size = 0;
  while (must(moelora_tokenize, tokenizer_, text.data(), text.size(), flags, tokens.data(), tokens.size(), &size) ==
         MOELORA_MORE) {
    tokens.resize(size);
  }
  tokens.resize(size);
  return tokens;
}

std::string Tokenizer::detokenize(const std::vector<int32_t>& tokens, uint32_t flags) const {
  std::string text(16 * tokens.size() + 16, '\0');
  size_t size = 0;
  while (must(moelora_detokenize, tokenizer_, tokens.data(), tokens.size(), flags, text.data(), text.size(), &size) ==
         MOELORA_MORE) {
    text.resize(size);
  }
  text.resize(size);
  return text;
}

const char* finish_name(int32_t reason) {
  switch (reason) {
    case MOELORA_FINISH_STOP:
      return "stop";
    case MOELORA_FINISH_LENGTH:
      return "length";
    case MOELORA_FINISH_CANCELLED:
      return "cancelled";
    case MOELORA_FINISH_DEADLINE:
      return "deadline";
    case MOELORA_FINISH_ERROR:
      return "error";
    default:
      return "none";
  }
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<int32_t> parse_tokens(const std::string& text, const std::string& source) {
  std::vector<int32_t> tokens;
  size_t at = 0;
  while (at < text.size()) {
    const auto c = static_cast<unsigned char>(text[at]);
    if (std::isspace(c) != 0 || c == ',' || c == '[' || c == ']') {
      ++at;
      continue;
    }
    const size_t end = std::min(text.find_first_of(" \t\r\n,[]", at), text.size());
    const std::string word = text.substr(at, end - at);
    size_t used = 0;
    long value = -1;
    try {
      value = std::stol(word, &used);
    } catch (const std::logic_error&) {
      used = 0;
    }
    if (used != word.size() || value < 0 || value > INT32_MAX) {
      throw Failure(MOELORA_E_INVALID, source + ": '" + word + "' is no token id");
    }
    tokens.push_back(static_cast<int32_t>(value));
    at = end;
  }
  if (tokens.empty()) {
    throw Failure(MOELORA_E_INVALID, source + ": no token ids");
  }
  return tokens;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Failure(MOELORA_E_IO, "cannot open " + path);
  }
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) {
    throw Failure(MOELORA_E_IO, "cannot read " + path);
  }
  return text.str();
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) {
      parts.push_back(part);
    }
  }
  return parts;
}

}  // namespace moelora_cli
