// SPDX-License-Identifier: Apache-2.0
#include "runtime/api/handles.h"

#include <utility>

#include <fmt/format.h>

namespace moelora::api {
namespace {

const char* type_name(ObjectType type) {
  switch (type) {
    case ObjectType::kEngine:
      return "engine";
    case ObjectType::kConfig:
      return "config";
    case ObjectType::kQueue:
      return "queue";
    case ObjectType::kAdapter:
      return "adapter";
    case ObjectType::kSession:
      return "session";
    case ObjectType::kRequest:
      return "request";
    case ObjectType::kTokenizer:
      return "tokenizer";
  }
  return "object";
}

// What the host's opaque pointers point to. A token is never given twice, so its memory is never returned; 16 bytes
// an engine, config, queue or tokenizer.
struct alignas(16) Token {
  char unused;
};
constexpr size_t kTokensInBlock = 256;
struct TokenBlock {
  TokenBlock* previous;
  Token tokens[kTokensInBlock];
};

struct Object {
  ObjectType type;
  std::shared_ptr<void> object;
};

class Registry {
 public:
  std::mutex mutex;
  std::condition_variable left;  // some engine's active_calls became 0

  void* add(ObjectType type, std::shared_ptr<void> object) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (used_ == kTokensInBlock || blocks_ == nullptr) {
      blocks_ = new TokenBlock{blocks_, {}};
      used_ = 0;
    }
    void* token = &blocks_->tokens[used_];
    objects_.emplace(token, Object{type, std::move(object)});
    ++used_;
    return token;
  }
  // Null if unknown or of another type. The lock is held by the caller.
  std::shared_ptr<void> find_locked(ObjectType type, const void* token) const {
    const auto found = objects_.find(token);
    return found != objects_.end() && found->second.type == type ? found->second.object : nullptr;
  }
  void remove_locked(const void* token) { objects_.erase(token); }

  std::shared_ptr<void> find(ObjectType type, const void* token) {
    std::shared_ptr<void> object;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      object = find_locked(type, token);
    }
    if (token == nullptr) {
      throw Error(Status::kInvalid, fmt::format("{} is NULL", type_name(type)));
    }
    if (object == nullptr) {
      throw Error(Status::kHandle, fmt::format("{} is no live {}", fmt::ptr(token), type_name(type)));
    }
    return object;
  }
  std::shared_ptr<void> remove(ObjectType type, const void* token) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<void> object = find_locked(type, token);
    if (object) {
      remove_locked(token);
    }
    return object;
  }

 private:
  std::unordered_map<const void*, Object> objects_;
  TokenBlock* blocks_ = nullptr;
  size_t used_ = 0;
};

Registry& registry() {
  static Registry* const instance = new Registry;  // never destroyed: threads may outlive main
  return *instance;
}

constinit std::atomic<uint64_t> generation{0};

}  // namespace

uint64_t next_generation() {
  const uint64_t next = generation.fetch_add(1, std::memory_order_relaxed) + 1;
  if (next >> kGenerationBits != 0) {
    throw Error(Status::kNomem, "handles of this process are used up");
  }
  return next;
}

void fail_handle(ObjectType type, uint64_t handle) {
  if (handle == 0) {
    throw Error(Status::kHandle, fmt::format("{} handle is 0", type_name(type)));
  }
  const uint64_t given = handle >> (kIndexBits + kGenerationBits);
  const bool known = given >= static_cast<uint64_t>(ObjectType::kAdapter) &&
                     given <= static_cast<uint64_t>(ObjectType::kRequest) && given != static_cast<uint64_t>(type);
  if (known) {
    throw Error(Status::kHandle, fmt::format("handle {:#x} is of type {}, not {}", handle,
                                             type_name(static_cast<ObjectType>(given)), type_name(type)));
  }
  throw Error(Status::kHandle,
              fmt::format("{} handle {:#x} is closed, of another engine or invalid", type_name(type), handle));
}

std::shared_ptr<const Tokenizer> EngineObject::model_tokenizer() {
  const std::lock_guard<std::mutex> lock(tokenizer_mutex);
  if (!tokenizer) {
    tokenizer = Tokenizer::open(model_dir);
  }
  return tokenizer;
}

std::shared_ptr<Adapter> EngineObject::adapter_or_base(moelora_adapter handle) const {
  return handle == 0 ? nullptr : adapters.find(handle);
}

EngineCall::EngineCall(const moelora_engine* engine) {
  if (engine == nullptr) {
    throw Error(Status::kInvalid, "engine is NULL");
  }
  Registry& live = registry();
  const std::lock_guard<std::mutex> lock(live.mutex);
  object_ = std::static_pointer_cast<EngineObject>(live.find_locked(ObjectType::kEngine, engine));
  if (object_ == nullptr) {
    throw Error(Status::kHandle, fmt::format("{} is no live engine", fmt::ptr(static_cast<const void*>(engine))));
  }
  ++object_->active_calls;
}

EngineCall::~EngineCall() {
  Registry& live = registry();
  {
    const std::lock_guard<std::mutex> lock(live.mutex);
    if (--object_->active_calls > 0 || !object_->closing) {
      return;
    }
  }
  live.left.notify_all();
}

moelora_engine* add_engine(std::shared_ptr<EngineObject> object) {
  return static_cast<moelora_engine*>(registry().add(ObjectType::kEngine, std::move(object)));
}

void retain_engine(const moelora_engine* engine) {
  Registry& live = registry();
  const std::lock_guard<std::mutex> lock(live.mutex);
  const auto object = std::static_pointer_cast<EngineObject>(live.find_locked(ObjectType::kEngine, engine));
  if (object) {
    ++object->references;
  }
}

std::shared_ptr<EngineObject> release_engine(const moelora_engine* engine) {
  Registry& live = registry();
  const std::lock_guard<std::mutex> lock(live.mutex);
  auto object = std::static_pointer_cast<EngineObject>(live.find_locked(ObjectType::kEngine, engine));
  if (!object || --object->references > 0) {
    return nullptr;
  }
  live.remove_locked(engine);
  object->closing = true;
  return object;
}

void wait_for_calls(const EngineObject& object) {
  Registry& live = registry();
  std::unique_lock<std::mutex> lock(live.mutex);
  live.left.wait(lock, [&] { return object.active_calls == 0; });
}

moelora_config* add_config(std::shared_ptr<ConfigObject> object) {
  return static_cast<moelora_config*>(registry().add(ObjectType::kConfig, std::move(object)));
}

std::shared_ptr<ConfigObject> find_config(const moelora_config* config) {
  return std::static_pointer_cast<ConfigObject>(registry().find(ObjectType::kConfig, config));
}

void remove_config(const moelora_config* config) {
  registry().remove(ObjectType::kConfig, config);
}

moelora_queue* add_queue(std::shared_ptr<CompletionQueue> queue) {
  return static_cast<moelora_queue*>(registry().add(ObjectType::kQueue, std::move(queue)));
}

std::shared_ptr<CompletionQueue> find_queue(const moelora_queue* queue) {
  return std::static_pointer_cast<CompletionQueue>(registry().find(ObjectType::kQueue, queue));
}

std::shared_ptr<CompletionQueue> remove_queue(const moelora_queue* queue) {
  return std::static_pointer_cast<CompletionQueue>(registry().remove(ObjectType::kQueue, queue));
}

moelora_tokenizer* add_tokenizer(const std::shared_ptr<const Tokenizer>& tokenizer) {
  // The registry's pointers are to non-const; find gives const back.
  return static_cast<moelora_tokenizer*>(
      registry().add(ObjectType::kTokenizer, std::const_pointer_cast<Tokenizer>(tokenizer)));
}

std::shared_ptr<const Tokenizer> find_tokenizer(const moelora_tokenizer* tokenizer) {
  return std::static_pointer_cast<const Tokenizer>(registry().find(ObjectType::kTokenizer, tokenizer));
}

void remove_tokenizer(const moelora_tokenizer* tokenizer) {
  registry().remove(ObjectType::kTokenizer, tokenizer);
}

}  // namespace moelora::api
