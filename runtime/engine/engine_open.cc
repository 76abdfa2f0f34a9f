// SPDX-License-Identifier: Apache-2.0
// Opening a model: sizes are settled here, all device memory is taken here, and the thread starts last.
#include <pthread.h>
#include <signal.h>

#include <algorithm>

#include "runtime/engine/engine_parts.h"
#include "runtime/engine/memory_plan.h"
#include "runtime/memory/host_resources.h"

namespace moelora {
namespace {

constexpr size_t kNumRecords = 65536;
constexpr size_t kWorkerScratchBytes = size_t{2} << 20;  // the tiles of the CPU kernels

}  // namespace

Engine::Parts::Parts(const EngineOptions& given, const std::string& model_dir) : options(given) {
  if (options.device != "cpu") {
    throw Error(Status::kNoDevice, "device '" + options.device + "': this build has the cpu backend only");
  }
  const auto report = [&](double done) {
    if (options.progress != nullptr) {
      options.progress->report(done);
    }
  };
  config = load_model_config(model_dir);
  report(0.05);
  weights = options.random_weights ? Weights::random(config, static_cast<uint64_t>(options.seed))
                                   : Weights::load(model_dir, config);
  report(0.8);
  kernels = options.kernels == "reference" ? &kernels_reference() : &kernels_cpu();

  info.config = config;
  info.device_name = std::string("cpu (") + kernels->name + ")";
  info.num_threads = options.num_threads > 0 ? static_cast<int32_t>(options.num_threads) : host_resources().num_cores;
  info.max_context_tokens = plan_context_tokens(options, config);
  info.max_num_sequences = static_cast<int32_t>(options.max_num_sequences);
  // Every running sequence must have its decode row.
  info.max_batch_tokens = static_cast<int32_t>(std::max(options.max_batch_tokens, options.max_num_sequences));
  info.kv_block_tokens = static_cast<int32_t>(options.kv_block_tokens);
  info.max_adapters_resident = static_cast<int32_t>(options.max_adapters_resident);
  info.max_lora_rank = static_cast<int32_t>(options.max_lora_rank);
  info.weight_bytes = weights->bytes();

  geometry = choose_kv_geometry(config.num_layers, config.num_kv_heads, config.head_dim, info.kv_block_tokens,
                                plan_kv_dtype(options));
  info.page_bytes = geometry.page_bytes;
  info.pages_per_block = geometry.layout.num_groups;
  info.num_pages = plan_pool_pages(options, geometry, info.max_context_tokens, host_resources().memory_free_bytes);
  info.pool_bytes = static_cast<uint64_t>(info.num_pages * info.page_bytes);

  stream = std::make_unique<Stream>(
      info.num_threads,
      std::max(kWorkerScratchBytes, sample_tokens_scratch_bytes(static_cast<size_t>(config.vocab_size))));
  pool = std::make_unique<PagePool>(static_cast<int32_t>(info.num_pages), info.page_bytes);
  adapters = std::make_unique<AdapterCache>(*pool, info.max_adapters_resident, config.num_experts);
  const int32_t logit_rows = info.max_num_sequences;
  const SchedulerLimits limits{info.max_num_sequences, info.max_batch_tokens, logit_rows,
                               static_cast<int32_t>(options.max_queued_requests),
                               static_cast<int32_t>(options.output_buffer_tokens)};
  scheduler = std::make_unique<Scheduler>(limits, geometry, *pool, *adapters);
  workspace = std::make_unique<Workspace>(
      config, WorkspaceLimits{info.max_batch_tokens, logit_rows, (info.max_lora_rank + 7) / 8 * 8});
  info.workspace_bytes = workspace->bytes();
  step_input = std::make_unique<StepInput>(StepInputLimits{info.max_batch_tokens, info.max_num_sequences, logit_rows,
                                                           geometry.blocks(info.max_context_tokens), config.vocab_size},
                                           geometry);
  model = std::make_unique<Model>(config, *weights, *kernels, options.compute);

  report(0.95);
  batch_.entries.reserve(static_cast<size_t>(info.max_num_sequences));
  outputs_.resize(static_cast<size_t>(logit_rows));
  emissions_.resize(static_cast<size_t>(2 * info.max_num_sequences + options.max_queued_requests) + 1);
  inbox.reserve(static_cast<size_t>(options.max_queued_requests));
  records.resize(kNumRecords);
}

Engine::Parts::~Parts() {
  stop();
  const std::lock_guard<std::mutex> lock(mutex);
  // Hosts may still hold sessions; their leases must not outlive the pool.
  scheduler->drop_all_pages();
}

void Engine::Parts::start() {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::Parts::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    stopping = true;
  }
  work.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  if (failure == Status::kOk) {
    fail(Status::kClosed, "the engine was released");
  }
}

void Engine::Parts::wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    woken = true;
  }
  work.notify_all();
}

Engine::Engine() = default;
Engine::~Engine() = default;

std::shared_ptr<Engine> Engine::create(const EngineOptions& options, const std::string& model_dir) {
  std::shared_ptr<Engine> engine(new Engine());
  engine->parts_ = std::make_unique<Parts>(options, model_dir);
  engine->parts_->start();
  return engine;
}

}  // namespace moelora
