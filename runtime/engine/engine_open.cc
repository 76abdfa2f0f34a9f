// SPDX-License-Identifier: Apache-2.0
// Opening a model: sizes are settled here, all device memory is taken here, and the thread starts last.
#include <algorithm>
#include <iterator>

#include "kernels/base/thread.h"
#include "runtime/engine/apart.h"
#include "runtime/engine/engine_parts.h"
#include "runtime/engine/log.h"
#include "runtime/engine/memory_plan.h"
#include "runtime/memory/host_resources.h"

namespace moelora {
namespace {

constexpr size_t kNumRecords = 65536;
constexpr int32_t kGraphRows = 64;                       // wider steps hide their launches behind their work
constexpr size_t kWorkerScratchBytes = size_t{2} << 20;  // the tiles of the CPU kernels

// No adapters, those of attention alone, those that leave the router as it is, if there is one, all.
std::vector<uint32_t> graph_sets(const ModelConfig& config) {
  const auto bit = [](LoraModule module) { return 1u << static_cast<int>(module); };
  std::vector<uint32_t> sets = {0u,
                                bit(LoraModule::kQ) | bit(LoraModule::kK) | bit(LoraModule::kV) | bit(LoraModule::kO)};
  if (config.num_experts > 0) {
    sets.push_back(~bit(LoraModule::kRouter));
  }
  sets.push_back(~0u);
  return sets;
}

}  // namespace

void Engine::Parts::open_device() {
  if (!is_cuda(options)) {
    device = open_device_cpu();
    kernels = options.kernels == "reference" ? &kernels_reference() : &kernels_cpu();
    return;
  }
#ifdef MOELORA_HAVE_CUDA
  device = open_device_cuda(static_cast<int>(cuda_index(options)));
  kernels = &kernels_cuda();
  if (options.deterministic) {
    throw Error(Status::kUnsupported, "deterministic = true is not available on device '" + options.device + "'");
  }
  options.compute = Compute::kBf16;
#else
  throw Error(Status::kNoDevice, "device '" + options.device + "': this build has the cpu backend only");
#endif
}

void Engine::Parts::open_weights(const std::string& model_dir) {
  const bool random = options.random_weights;
  const auto seed = static_cast<uint64_t>(options.seed);
  if (options.random_routing != "random" && !random) {
    throw Error(Status::kInvalid, "random_routing = " + options.random_routing + " needs random_weights = true");
  }
  if (random) {
    weights = device->is_host() ? Weights::random(config, seed) : Weights::shapes(config);
    const RoutingKind kind = options.random_routing == "zipf"  ? RoutingKind::kZipf
                             : options.random_routing == "one" ? RoutingKind::kOne
                                                               : RoutingKind::kRandom;
    weights->choose_routing(config, {kind, options.random_routing_exponent}, seed);
  } else {
    weights = Weights::load(model_dir, config);
  }
  if (device->is_host()) {
    return;
  }
  weights->move_to(*device, *stream, *kernels, config, random, seed);
}

void Engine::Parts::size_up() {
  info.config = config;
  info.device_name = device->is_host() ? std::string("cpu (") + kernels->name + ")" : device->info().name;
  info.is_cuda = !device->is_host();
  info.num_threads = options.num_threads > 0 ? static_cast<int32_t>(options.num_threads) : host_resources().num_cores;
  info.max_context_tokens = plan_context_tokens(options, config);
  info.max_num_sequences = static_cast<int32_t>(options.max_num_sequences);
  info.max_batch_tokens = plan_batch_tokens(options);
  info.kv_block_tokens = static_cast<int32_t>(options.kv_block_tokens);
  info.max_adapters_resident = plan_adapter_slots(options);
  info.max_lora_rank = static_cast<int32_t>(options.max_lora_rank);
  info.weight_bytes = weights->bytes();

  geometry = choose_kv_geometry(config.num_layers, config.num_kv_heads, config.head_dim, info.kv_block_tokens,
                                plan_kv_dtype(options));
  info.page_bytes = geometry.page_bytes;
  info.pages_per_block = geometry.layout.num_groups;
  info.page_reason = geometry.reason;
}

// Decode steps of every number of rows up to kGraphRows, for each set. One step runs first, on zeros: it loads the
// kernels and lets libraries choose theirs.
void Engine::Parts::record_graphs() {
  if (!device->can_record() || !options.graphs) {
    return;
  }
  graph_sets_ = graph_sets(config);
  const int32_t rows_max = std::min(kGraphRows, info.max_num_sequences);
  for (int32_t rows = 1; rows <= rows_max; ++rows) {
    for (const uint32_t modules : graph_sets_) {
      const ForwardInput input = step_input->decode_input(rows, modules, *pool, *adapters);
      if (rows == 1) {
        model->forward(input, *workspace, *stream);
        device->synchronize(*stream);
      }
      device->begin_recording(*stream);
      model->forward(input, *workspace, *stream);
      graphs_.push_back(device->end_recording(*stream));
    }
  }
}

Graph* Engine::Parts::graph_of_batch() const {
  const ForwardInput& input = step_input->forward_input();
  const uint32_t modules = input.lora != nullptr ? input.lora->modules : 0;
  const auto smallest =
      std::find_if(graph_sets_.begin(), graph_sets_.end(), [&](uint32_t set) { return (modules & ~set) == 0; });
  const size_t index = graph_sets_.size() * static_cast<size_t>(input.num_rows - 1) +
                       static_cast<size_t>(std::distance(graph_sets_.begin(), smallest));
  return step_input->is_decode() && index < graphs_.size() ? graphs_[index].get() : nullptr;
}

void Engine::Parts::open_swap_space() {
  if (options.swap_memory_bytes == 0) {
    return;
  }
  swap_space = std::make_unique<SwapSpace>(options.swap_memory_bytes, info.page_bytes, *device);
  for (PageMoves* moves : {&batch_.swaps_out, &batch_.swaps_in}) {
    moves->pages.reserve(static_cast<size_t>(swap_space->num_places()));
    moves->places.reserve(static_cast<size_t>(swap_space->num_places()));
  }
}

Engine::Parts::Parts(const EngineOptions& given, const std::string& model_dir) : options(given) {
  const auto report = [&](double done) {
    if (options.progress != nullptr) {
      options.progress->report(done);
    }
  };
  config = load_model_config(model_dir);
  open_device();
  check_batch_tokens(config, plan_batch_tokens(options), kernels->max_pairs);
  if (options.wrap_device) {
    device = options.wrap_device(std::move(device));
  }
  report(0.05);
  stream = device->create_stream(
      options.num_threads > 0 ? static_cast<int32_t>(options.num_threads) : host_resources().num_cores,
      std::max(kWorkerScratchBytes, sample_tokens_scratch_bytes(static_cast<size_t>(config.vocab_size))));
  open_weights(model_dir);
  report(0.8);
  size_up();
  const int32_t logit_rows = info.max_num_sequences;
  const int32_t rank_limit = (info.max_lora_rank + kTileRanks - 1) / kTileRanks * kTileRanks;
  workspace =
      std::make_unique<Workspace>(config, WorkspaceLimits{info.max_batch_tokens, logit_rows, rank_limit}, *device);
  info.workspace_bytes = workspace->bytes();
  const uint64_t free_bytes = device->is_host() ? host_resources().memory_free_bytes : device->info().memory_free_bytes;
  info.num_pages = plan_pool_pages(options, geometry, info.max_context_tokens, free_bytes);
  info.pool_bytes = static_cast<uint64_t>(info.num_pages * info.page_bytes);
  log_message(LogLevel::kInfo, "page pool: " + std::to_string(info.num_pages) + " pages of " +
                                   std::to_string(info.page_bytes) + " bytes: " + info.page_reason);
  pool = std::make_unique<PagePool>(static_cast<int32_t>(info.num_pages), info.page_bytes, *device);
  if (options.prefix_cache) {
    prefix = std::make_unique<PrefixCache>(*pool, geometry);
  }
  adapters = std::make_unique<AdapterCache>(
      AdapterCacheLimits{info.max_adapters_resident, config.num_layers, config.num_experts,
                         options.upload_bytes_per_second, static_cast<uint64_t>(options.host_memory_bytes), &config},
      *pool, *kernels, *device, [this] { wake(); });
  const SchedulerLimits limits{info.max_num_sequences,
                               info.max_batch_tokens,
                               logit_rows,
                               static_cast<int32_t>(options.max_queued_requests),
                               static_cast<int32_t>(options.prefetch_requests),
                               static_cast<int32_t>(options.output_buffer_tokens),
                               static_cast<int32_t>(options.max_overtaking_steps),
                               static_cast<int32_t>(options.max_loads_per_step),
                               options.fairness == "adapter",
                               options.early_refusal};
  open_swap_space();
  scheduler = std::make_unique<Scheduler>(limits, geometry, *pool, *adapters, swap_space.get(), prefix.get());
  step_input = std::make_unique<StepInput>(
      StepInputLimits{info.max_batch_tokens, info.max_num_sequences, logit_rows,
                      geometry.blocks(info.max_context_tokens), config.vocab_size, rank_limit},
      geometry, *device);
  model = std::make_unique<Model>(config, *weights, *kernels, options.compute);
  record_graphs();

  report(0.95);
  captured_.resize(static_cast<size_t>(config.vocab_size));
  batch_.entries.reserve(static_cast<size_t>(info.max_num_sequences));
  outputs_.resize(static_cast<size_t>(logit_rows));
  emissions_.resize(static_cast<size_t>(2 * info.max_num_sequences + options.max_queued_requests) + 1);
  inbox.reserve(static_cast<size_t>(options.max_queued_requests));
  records.resize(kNumRecords);
  timeline = Timeline(static_cast<size_t>(options.timeline_events));
  adapters->tell_uploads([this](const Adapter& adapter, double ms) { record_upload(adapter, ms); });
}

Engine::Parts::~Parts() {
  stop();
  adapters->stop_loading();  // it wakes the engine, which needs the lock
  const std::lock_guard<std::mutex> lock(mutex);
  // Hosts may still hold sessions; their leases must not outlive the pool.
  scheduler->drop_all_pages();
}

void Engine::Parts::start() {
  thread_ = start_thread([this] { run(); });
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
  if (failure == Status::kOk && options.audit >= 1) {
    const std::lock_guard<std::mutex> lock(mutex);
    try {
      audit_parts();
    } catch (const Error& error) {  // an engine that closes has nobody else to tell
      log_message(LogLevel::kError, std::string("audit at close: ") + error.what());
    }
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
Engine::~Engine() {
  if (parts_ == nullptr) {
    return;
  }
  parts_->stop();
  run_apart([&] { parts_.reset(); });
}

std::shared_ptr<Engine> Engine::create(const EngineOptions& options, const std::string& model_dir) {
  std::shared_ptr<Engine> engine(new Engine());
  // Opening a GPU changes the calling thread's device and last error.
  run_apart([&] { engine->parts_ = std::make_unique<Parts>(options, model_dir); });
  engine->parts_->start();
  return engine;
}

}  // namespace moelora
