// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "engine": opening, asking, draining, releasing.
#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/api/request_flow.h"
#include "runtime/engine/log.h"

using namespace moelora;
using namespace moelora::api;

namespace {

// Shows the host's other threads the progress of a creation, and counts it while it runs.
class Creation {
 public:
  explicit Creation(std::shared_ptr<ConfigObject> config) : config_(std::move(config)) {
    const std::lock_guard<std::mutex> lock(config_->mutex);
    options = config_->options;
    options.progress = std::make_shared<LoadProgress>();
    config_->progress = options.progress;
    ++config_->creating;
  }
  ~Creation() {
    const std::lock_guard<std::mutex> lock(config_->mutex);
    --config_->creating;
  }
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

  EngineOptions options;

 private:
  std::shared_ptr<ConfigObject> config_;
};

moelora_engine_info engine_info(const EngineInfo& info) {
  const ModelConfig& config = info.config;
  moelora_engine_info out = {};
  out.num_layers = config.num_layers;
  out.num_experts = config.num_experts;
  out.num_experts_active = config.num_experts > 0 ? config.top_k : 0;
  out.hidden_size = config.hidden_size;
  out.num_heads = config.num_heads;
  out.num_kv_heads = config.num_kv_heads;
  out.head_dim = config.head_dim;
  out.intermediate_size = config.num_experts > 0 ? config.moe_intermediate_size : config.intermediate_size;
  out.vocab_size = config.vocab_size;
  out.max_context_tokens = info.max_context_tokens;
  out.max_num_sequences = info.max_num_sequences;
  out.max_batch_tokens = info.max_batch_tokens;
  out.max_adapters_resident = info.max_adapters_resident;
  out.max_lora_rank = info.max_lora_rank;
  out.kv_block_tokens = info.kv_block_tokens;
  out.num_threads = info.num_threads;
  out.device_kind = info.is_cuda ? MOELORA_DEVICE_CUDA : MOELORA_DEVICE_CPU;
  out.bos_token = config.bos_token_id;
  out.eos_token = config.eos_token_ids.empty() ? -1 : config.eos_token_ids.front();
  out.weight_bytes = info.weight_bytes;
  out.pool_bytes = info.pool_bytes;
  out.page_bytes = static_cast<uint64_t>(info.page_bytes);
  out.workspace_bytes = info.workspace_bytes;
  copy_text(out.architecture, sizeof out.architecture, config.architecture);
  copy_text(out.dtype, sizeof out.dtype, dtype_name(config.dtype));
  copy_text(out.device_name, sizeof out.device_name, info.device_name);
  return out;
}

}  // namespace

moelora_status moelora_engine_create(const moelora_config* config, const char* model_dir, size_t model_dir_len,
                                     moelora_engine** out, moelora_error* err) {
  return guard(err, [&] {
    required(out, "out");
    const std::string dir = path_argument("model_dir", model_dir, model_dir_len);
    const Creation creation(find_config(config));
    ProcessClaim claim;
    auto object = std::make_shared<EngineObject>();
    object->engine = Engine::create(creation.options, dir);
    object->model_dir = dir;
    creation.options.progress->report(1.0);
    *out = add_engine(object);
    claim.keep();
    log_message(LogLevel::kInfo, fmt::format("opened {} ({}, {} bytes of weights) on {}", dir,
                                             object->engine->info().config.architecture,
                                             object->engine->info().weight_bytes, object->engine->info().device_name));
    return Status::kOk;
  });
}

moelora_status moelora_engine_progress(const moelora_config* config, double* fraction, moelora_error* err) {
  return guard(err, [&] {
    const auto object = find_config(config);
    const std::lock_guard<std::mutex> lock(object->mutex);
    required(fraction, "fraction") = object->progress ? object->progress->fraction.load() : 0.0;
    return Status::kOk;
  });
}

moelora_status moelora_engine_abort_load(const moelora_config* config, moelora_error* err) {
  return guard(err, [&] {
    const auto object = find_config(config);
    const std::lock_guard<std::mutex> lock(object->mutex);
    if (object->creating == 0) {
      return Status::kAlreadyDone;
    }
    object->progress->abort = true;
    return Status::kOk;
  });
}

void moelora_engine_retain(moelora_engine* engine) {
  guard(nullptr, [&] {
    retain_engine(engine);
    return Status::kOk;
  });
}

void moelora_engine_release(moelora_engine* engine) {
  guard(nullptr, [&] {
    const std::shared_ptr<EngineObject> object = release_engine(engine);
    if (!object) {
      return Status::kOk;
    }
    close_all_requests(*object);
    wait_for_calls(*object);
    object->engine.reset();
    return Status::kOk;
  });
}

moelora_status moelora_engine_info_get(moelora_engine* engine, moelora_engine_info* info, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    check_struct(info, "info");
    write_struct(info, engine_info(call->engine->info()));
    return Status::kOk;
  });
}

moelora_status moelora_engine_health(moelora_engine* engine, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    std::string message;
    const Status status = call->engine->health(&message);
    if (status != Status::kOk) {
      throw Error(status, message);
    }
    return Status::kOk;
  });
}

moelora_status moelora_engine_drain(moelora_engine* engine, int32_t timeout_ms, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    return call->engine->drain(timeout_ms);
  });
}

moelora_status moelora_engine_trim(moelora_engine* engine, uint64_t device_bytes_target, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    call->engine->trim(device_bytes_target);
    return Status::kOk;
  });
}

moelora_status moelora_step_records(moelora_engine* engine, moelora_step_record* buf, size_t cap, size_t* n,
                                    moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(n, "n");
    if (cap > 0) {
      required(buf, "buf");
    }
    const std::vector<StepRecord> records = call->engine->step_records(cap);
    for (size_t i = 0; i < records.size(); ++i) {
      const StepRecord& from = records[i];
      buf[i] = {from.start_ms, from.ms,           from.active_experts, from.lora_bytes, from.kv_bytes,
                from.rows,     from.prefill_rows, from.sequences,      from.adapters};
    }
    *n = records.size();
    return Status::kOk;
  });
}

moelora_status moelora_measure_read_bandwidth(moelora_engine* engine, double* bytes_per_second, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(bytes_per_second, "bytes_per_second") = call->engine->measure_read_bandwidth();
    return Status::kOk;
  });
}

moelora_status moelora_weight_bytes(moelora_engine* engine, double active_experts, double* bytes, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (!(active_experts >= 0)) {
      throw Error(Status::kInvalid, fmt::format("active_experts is {}", active_experts));
    }
    required(bytes, "bytes") = call->engine->weight_bytes(active_experts);
    return Status::kOk;
  });
}
