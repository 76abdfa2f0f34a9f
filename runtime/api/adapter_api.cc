// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "adapters": loading under a name, residency wishes, unloading, asking.
#include "runtime/adapter/adapter_image.h"
#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/engine/log.h"

using namespace moelora;
using namespace moelora::api;

namespace {

constexpr uint32_t kLoadFlags = MOELORA_ADAPTER_LENIENT | MOELORA_ADAPTER_REPLACE | MOELORA_ADAPTER_EXPERTS_NATURAL |
                                MOELORA_ADAPTER_EXPERTS_REVERSED | MOELORA_ADAPTER_B_RANK_MAJOR |
                                MOELORA_ADAPTER_B_GROUPED | MOELORA_ADAPTER_LAZY;

bool both(uint32_t flags, uint32_t a, uint32_t b) {
  return (flags & a) != 0 && (flags & b) != 0;
}

AdapterLoadOptions load_options(const Engine& engine, uint32_t flags) {
  known_flags(flags, kLoadFlags);
  if (both(flags, MOELORA_ADAPTER_EXPERTS_NATURAL, MOELORA_ADAPTER_EXPERTS_REVERSED) ||
      both(flags, MOELORA_ADAPTER_B_RANK_MAJOR, MOELORA_ADAPTER_B_GROUPED)) {
    throw Error(Status::kInvalid, fmt::format("flags {:#x} contradict each other", flags));
  }
  AdapterLoadOptions options = engine.adapter_load_options();
  options.lenient = (flags & MOELORA_ADAPTER_LENIENT) != 0;
  if ((flags & MOELORA_ADAPTER_EXPERTS_NATURAL) != 0) {
    options.orientation = ExpertOrientation::kNatural;
  }
  if ((flags & MOELORA_ADAPTER_EXPERTS_REVERSED) != 0) {
    options.orientation = ExpertOrientation::kReversed;
  }
  if ((flags & MOELORA_ADAPTER_B_RANK_MAJOR) != 0) {
    options.b_layout = ExpertBLayout::kRankMajor;
  }
  if ((flags & MOELORA_ADAPTER_B_GROUPED) != 0) {
    options.b_layout = ExpertBLayout::kGroupedByExpert;
  }
  return options;
}

// A taken name is refused before the work of loading; registering checks again.
void check_free_name(const Engine& engine, const std::string& name, uint32_t flags) {
  if ((flags & MOELORA_ADAPTER_REPLACE) == 0 && engine.find_adapter(name) != nullptr) {
    throw Error(Status::kExists, fmt::format("an adapter named \"{}\" is loaded already", name));
  }
}

void log_warnings(const std::string& name, const AdapterImage& image) {
  for (const std::string& warning : image.warnings) {
    log_message(LogLevel::kWarning, fmt::format("adapter {}: {}", name, warning));
  }
}

// A new image, or that of another adapter.
template <class Image>
moelora_adapter add_adapter(EngineObject& object, const std::string& name, std::shared_ptr<Image> image, float scale,
                            bool replace) {
  const std::lock_guard<std::mutex> lock(object.mutex);
  std::shared_ptr<Adapter> adapter = object.engine->register_adapter(name, std::move(image), scale, replace);
  const moelora_adapter handle = object.adapters.add(adapter);
  object.adapter_handles.emplace(adapter->id, handle);
  return handle;
}

}  // namespace

moelora_status moelora_adapter_load_dir(moelora_engine* engine, const char* name, size_t name_len, const char* dir,
                                        size_t dir_len, uint32_t flags, moelora_adapter* out, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    const std::string adapter_name = name_argument("name", name, name_len);
    const std::string folder = path_argument("dir", dir, dir_len);
    const AdapterLoadOptions options = load_options(*call->engine, flags);
    check_free_name(*call->engine, adapter_name, flags);
    const auto load = (flags & MOELORA_ADAPTER_LAZY) != 0 ? describe_adapter_dir : load_adapter_dir;
    auto image = load(folder, call->engine->info().config, options);
    log_warnings(adapter_name, *image);
    *out = add_adapter(*call, adapter_name, std::move(image), 1.0f, (flags & MOELORA_ADAPTER_REPLACE) != 0);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_load_mem(moelora_engine* engine, const char* name, size_t name_len,
                                        const char* config_json, size_t config_json_len, const void* weights,
                                        size_t weights_len, uint32_t flags, moelora_adapter* out, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    const std::string adapter_name = name_argument("name", name, name_len);
    const std::string json = text_argument("config_json", config_json, config_json_len, size_t{1} << 24);
    const AdapterLoadOptions options = load_options(*call->engine, flags);
    if ((flags & MOELORA_ADAPTER_LAZY) != 0) {
      throw Error(Status::kInvalid, "flags: MOELORA_ADAPTER_LAZY is for folders; memory is not read later");
    }
    check_free_name(*call->engine, adapter_name, flags);
    if (weights_len > 0) {
      required(static_cast<const char*>(weights), "weights");
    }
    auto image = load_adapter_memory(json, static_cast<const std::byte*>(weights), weights_len,
                                     call->engine->info().config, options);
    log_warnings(adapter_name, *image);
    *out = add_adapter(*call, adapter_name, std::move(image), 1.0f, (flags & MOELORA_ADAPTER_REPLACE) != 0);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_load_random(moelora_engine* engine, const char* name, size_t name_len, int32_t rank,
                                           uint32_t targets, uint64_t seed, moelora_adapter* out, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    const std::string adapter_name = name_argument("name", name, name_len);
    known_flags(targets, MOELORA_RANDOM_ATTENTION | MOELORA_RANDOM_EXPERTS);
    if (targets == 0) {
      throw Error(Status::kInvalid, "targets is 0: nothing would be adapted");
    }
    check_free_name(*call->engine, adapter_name, 0);
    const int32_t limit = call->engine->info().max_lora_rank;
    if (rank < 1) {
      throw Error(Status::kInvalid, fmt::format("rank is {}", rank));
    }
    if (rank > limit) {
      throw Error(Status::kAdapterMismatch, fmt::format("rank {} is above max_lora_rank = {}", rank, limit));
    }
    auto image = random_adapter(call->engine->info().config, rank, (targets & MOELORA_RANDOM_ATTENTION) != 0,
                                (targets & MOELORA_RANDOM_EXPERTS) != 0, seed);
    *out = add_adapter(*call, adapter_name, std::move(image), 1.0f, false);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_clone(moelora_engine* engine, moelora_adapter source, const char* name, size_t name_len,
                                     float scale, moelora_adapter* out, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    const auto adapter = call->adapters.find(source);
    *out = add_adapter(*call, name_argument("name", name, name_len), adapter->image, finite_scale(scale), false);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_prefetch(moelora_engine* engine, moelora_adapter adapter, moelora_queue* queue,
                                        uint64_t tag, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    const auto found = call->adapters.find(adapter);
    const std::shared_ptr<CompletionQueue> target = queue == nullptr ? nullptr : find_queue(queue);
    if (target) {
      target->expect(1);
    }
    call->engine->prefetch_adapter(found, target, adapter, tag);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_pin(moelora_engine* engine, moelora_adapter adapter, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    call->adapters.find(adapter)->pins.fetch_add(1);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_unpin(moelora_engine* engine, moelora_adapter adapter, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    const auto found = call->adapters.find(adapter);
    int32_t pins = found->pins.load();
    do {
      if (pins <= 0) {
        throw Error(Status::kInvalid, fmt::format("adapter \"{}\" is not pinned", found->name));
      }
    } while (!found->pins.compare_exchange_weak(pins, pins - 1));
    call->engine->notify();
    return Status::kOk;
  });
}

moelora_status moelora_adapter_set_weight(moelora_engine* engine, moelora_adapter adapter, double weight,
                                          moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    call->engine->set_weight(call->adapter_or_base(adapter), weight);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_unload(moelora_engine* engine, moelora_adapter adapter, uint32_t flags,
                                      moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    known_flags(flags, MOELORA_UNLOAD_IF_IDLE);
    const std::lock_guard<std::mutex> lock(call->mutex);  // two unloads: the second sees a closed handle
    const auto found = call->adapters.find(adapter);
    call->engine->unload_adapter(found, (flags & MOELORA_UNLOAD_IF_IDLE) != 0);
    call->adapters.remove(adapter);
    call->adapter_handles.erase(found->id);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_find(moelora_engine* engine, const char* name, size_t name_len, moelora_adapter* out,
                                    moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    const std::string wanted = name_argument("name", name, name_len);
    const std::lock_guard<std::mutex> lock(call->mutex);
    const auto adapter = call->engine->find_adapter(wanted);
    const auto found = adapter ? call->adapter_handles.find(adapter->id) : call->adapter_handles.end();
    if (found == call->adapter_handles.end()) {
      throw Error(Status::kNotFound, fmt::format("no adapter named \"{}\"", wanted));
    }
    *out = found->second;
    return Status::kOk;
  });
}

moelora_status moelora_adapter_list(moelora_engine* engine, moelora_adapter* buf, size_t cap, size_t* n,
                                    moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    std::vector<moelora_adapter> handles;
    {
      const std::lock_guard<std::mutex> lock(call->mutex);
      for (const auto& [id, handle] : call->adapter_handles) {
        handles.push_back(handle);
      }
    }
    return copy_out(handles.data(), handles.size(), buf, cap, n);
  });
}

moelora_status moelora_adapter_info_get(moelora_engine* engine, moelora_adapter adapter, moelora_adapter_info* info,
                                        moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    check_struct(info, "info");
    const auto found = call->adapters.find(adapter);
    const AdapterFacts& image = *found->image;
    const Engine::AdapterPlace place = call->engine->adapter_place(*found);
    moelora_adapter_info out = {};
    out.rank = image.rank;
    out.max_rank = image.max_rank;
    out.alpha = image.alpha;
    out.scale = found->scale;
    out.targets = image.modules;
    out.num_layers = image.num_layers;
    out.num_experts = image.num_experts;
    out.tensors_matched = image.num_tensors;
    out.tensors_unmatched = image.num_tensors_unmatched;
    out.resident = found->slot.load() > 0 ? 1 : 0;
    out.pins = found->pins.load();
    out.in_flight = found->in_flight.load();
    out.host_bytes = image.stream_bytes;
    out.file_bytes = image.file_bytes;
    out.fingerprint = place.fingerprint;
    copy_text(out.dtype, sizeof out.dtype, image.dtype);
    out.read_ms = image.read_ms;
    out.pack_ms = place.pack_ms;
    out.upload_ms = found->upload_ms.load();
    out.uploaded_bytes = place.bytes_uploaded;
    out.in_host_memory = place.in_host_memory ? 1 : 0;
    write_struct(info, out);
    return Status::kOk;
  });
}

moelora_status moelora_adapter_name(moelora_engine* engine, moelora_adapter adapter, char* buf, size_t cap, size_t* n,
                                    moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    const auto found = call->adapters.find(adapter);
    return copy_out(found->name.data(), found->name.size(), buf, cap, n);
  });
}
