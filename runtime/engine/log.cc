// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/log.h"

#include <cxxabi.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

namespace moelora {
namespace {

constexpr size_t kKeptMessages = 1024;

struct Message {
  LogLevel level;
  std::string text;
};

struct Log {
  std::mutex calling;  // held while the host's function runs, so that set_log can wait for it; taken before `mutex`
  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<Message> kept;
  LogFunction function = nullptr;
  void* user = nullptr;
  std::atomic<LogLevel> level{LogLevel::kWarning};
};

Log& the_log() {
  static Log* const instance = new Log;  // never destroyed: threads may outlive main
  return *instance;
}

thread_local bool inside_callback = false;

void call_host(Log& log, LogLevel level, const std::string& text) {
  const std::lock_guard<std::mutex> calling(log.calling);
  LogFunction function;
  void* user;
  {
    const std::lock_guard<std::mutex> lock(log.mutex);
    function = log.function;
    user = log.user;
  }
  if (function == nullptr) {
    return;
  }
  struct Inside {
    Inside() { inside_callback = true; }
    ~Inside() { inside_callback = false; }
  } const inside;
  try {
    function(user, static_cast<int32_t>(level), text.c_str());
  } catch (...) {
    if (abi::__cxa_current_exception_type() == nullptr) {
      throw;  // the thread is being cancelled
    }
    // A host's exception ends here: it must not unwind the engine.
  }
}

}  // namespace

bool in_log_callback() {
  return inside_callback;
}

void log_message(LogLevel level, const std::string& text) {
  Log& log = the_log();
  if (level > log.level.load() || inside_callback) {
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(log.mutex);
    if (log.kept.size() == kKeptMessages) {
      log.kept.pop_front();
    }
    log.kept.push_back({level, text});
    log.arrived.notify_one();
  }
  call_host(log, level, text);
}

void set_log(LogLevel level, LogFunction function, void* user) {
  Log& log = the_log();
  const std::lock_guard<std::mutex> calling(log.calling);
  const std::lock_guard<std::mutex> lock(log.mutex);
  log.level = level;
  log.function = function;
  log.user = user;
}

Status read_log(int32_t timeout_ms, char* buffer, size_t capacity, size_t* n, int32_t* level) {
  Log& log = the_log();
  std::unique_lock<std::mutex> lock(log.mutex);
  const auto some = [&] { return !log.kept.empty(); };
  if (timeout_ms < 0) {
    log.arrived.wait(lock, some);
  } else {
    log.arrived.wait_until(lock, std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms), some);
  }
  *n = 0;
  if (!some()) {
    return Status::kTimeout;
  }
  const Message& message = log.kept.front();
  *n = message.text.size();
  *level = static_cast<int32_t>(message.level);
  if (*n > capacity) {
    return Status::kMore;
  }
  if (*n > 0) {
    std::memcpy(buffer, message.text.data(), *n);
  }
  log.kept.pop_front();
  return Status::kOk;
}

}  // namespace moelora
