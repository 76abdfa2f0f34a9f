// SPDX-License-Identifier: Apache-2.0
// What the host's handles and opaque pointers mean. Adapters, sessions and requests are numbers (type, slot,
// generation) in a table of their engine; engines, configs, queues and tokenizers are pointers to tokens that are never
// used again, looked up in a registry of live objects. So a stale, foreign or invented value is always recognised.
// Every lookup takes a shared reference for the length of the call: closing an object never pulls it away from a call
// that is inside.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "include/moelora.h"
#include "runtime/engine/engine.h"
#include "runtime/text/tokenizer.h"

namespace moelora::api {

enum class ObjectType : uint8_t {
  kEngine = 1,
  kConfig = 2,
  kQueue = 3,
  kAdapter = 4,
  kSession = 5,
  kRequest = 6,
  kTokenizer = 7
};

// A number never given before in this process.
uint64_t next_generation();
[[noreturn]] void fail_handle(ObjectType type, uint64_t handle);
constexpr uint64_t kIndexBits = 24;       // 16 million live objects of a type in an engine
constexpr uint64_t kGenerationBits = 36;  // 68 billion objects in a process; more are refused

template <class T>
class SlotTable {
 public:
  explicit SlotTable(ObjectType type) : type_(type) {}

  uint64_t add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      if (slots_.size() >> kIndexBits != 0) {
        throw Error(Status::kNomem, "too many live handles");
      }
      slots_.emplace_back();
      free_.reserve(slots_.size());
      free_.push_back(static_cast<uint32_t>(slots_.size() - 1));
    }
    const uint32_t index = free_.back();
    const uint64_t handle =
        static_cast<uint64_t>(type_) << (kIndexBits + kGenerationBits) | next_generation() << kIndexBits | index;
    slots_[index] = {handle, std::move(object)};
    free_.pop_back();
    return handle;
  }
  // Throws Error{kHandle}.
  std::shared_ptr<T> find(uint64_t handle) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t index = handle & ((uint64_t{1} << kIndexBits) - 1);
    if (handle == 0 || index >= slots_.size() || slots_[index].handle != handle) {
      fail_handle(type_, handle);
    }
    return slots_[index].object;
  }
  // Throws Error{kHandle}: of two that close, one wins.
  std::shared_ptr<T> remove(uint64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t index = handle & ((uint64_t{1} << kIndexBits) - 1);
    if (handle == 0 || index >= slots_.size() || slots_[index].handle != handle) {
      fail_handle(type_, handle);
    }
    std::shared_ptr<T> object = std::move(slots_[index].object);
    slots_[index] = {};
    free_.push_back(static_cast<uint32_t>(index));
    return object;
  }
  std::vector<std::shared_ptr<T>> all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<T>> objects;
    for (const Slot& slot : slots_) {
      if (slot.handle != 0) {
        objects.push_back(slot.object);
      }
    }
    return objects;
  }

 private:
  struct Slot {
    uint64_t handle = 0;
    std::shared_ptr<T> object;
  };
  const ObjectType type_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
};

struct ConfigObject {
  std::mutex mutex;
  EngineOptions options;
  std::shared_ptr<LoadProgress> progress;  // of the latest engine creation
  int creating = 0;
};

struct SessionObject {
  std::shared_ptr<Session> session;
  moelora_adapter adapter = 0;  // as the host named it
};

// A request from builder to result. `state` goes kBuilding -> kSubmitting -> kSubmitted, or back on a refusal.
struct RequestObject {
  enum class State : uint8_t { kBuilding, kSubmitting, kSubmitted };

  std::mutex mutex;
  std::condition_variable settled;  // state left kSubmitting
  State state = State::kBuilding;
  bool closed = false;
  uint64_t handle = 0;
  Request request;
  std::shared_ptr<CompletionQueue> queue;
  uint64_t tag = 0;
  std::shared_ptr<Submission> submission;
};

struct EngineObject {
  std::shared_ptr<Engine> engine;
  SlotTable<Adapter> adapters{ObjectType::kAdapter};
  SlotTable<SessionObject> sessions{ObjectType::kSession};
  SlotTable<RequestObject> requests{ObjectType::kRequest};
  std::mutex mutex;
  std::map<uint64_t, moelora_adapter> adapter_handles;  // by Adapter::id, in order of loading
  std::atomic<bool> closing{false};
  int64_t references = 1;    // under the registry's lock
  int64_t active_calls = 0;  // likewise

  std::string model_dir;
  std::mutex tokenizer_mutex;
  std::shared_ptr<const Tokenizer> tokenizer;  // null until it is asked for

  // Reads it at the first call; a failed reading is tried again. Throws as Tokenizer::open.
  std::shared_ptr<const Tokenizer> model_tokenizer();
  // Null for 0, the base model. Throws Error{kHandle}.
  std::shared_ptr<Adapter> adapter_or_base(moelora_adapter handle) const;
};

// One call into an engine: keeps it alive, and counted, so that the last release can wait for it.
// Throws Error{kHandle} for a pointer that is no live engine.
class EngineCall {
 public:
  explicit EngineCall(const moelora_engine* engine);
  ~EngineCall();
  EngineCall(const EngineCall&) = delete;
  EngineCall& operator=(const EngineCall&) = delete;
  EngineObject& operator*() const { return *object_; }
  EngineObject* operator->() const { return object_.get(); }

 private:
  std::shared_ptr<EngineObject> object_;
};

moelora_engine* add_engine(std::shared_ptr<EngineObject> object);
void retain_engine(const moelora_engine* engine);
// The object if this was the last reference; it is then unknown to new calls.
std::shared_ptr<EngineObject> release_engine(const moelora_engine* engine);
// Returns when the last call that was inside has left.
void wait_for_calls(const EngineObject& object);

moelora_config* add_config(std::shared_ptr<ConfigObject> object);
std::shared_ptr<ConfigObject> find_config(const moelora_config* config);
void remove_config(const moelora_config* config);

moelora_queue* add_queue(std::shared_ptr<CompletionQueue> queue);
std::shared_ptr<CompletionQueue> find_queue(const moelora_queue* queue);
std::shared_ptr<CompletionQueue> remove_queue(const moelora_queue* queue);  // null if stale

moelora_tokenizer* add_tokenizer(const std::shared_ptr<const Tokenizer>& tokenizer);
std::shared_ptr<const Tokenizer> find_tokenizer(const moelora_tokenizer* tokenizer);
void remove_tokenizer(const moelora_tokenizer* tokenizer);  // calls inside go on

}  // namespace moelora::api
