// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/simulated_engine.h"

#include <set>

#include "tests/sim/stamp_ops.h"

namespace moelora {
namespace {

double clock_ms = 1000;
// Of the engine that there is.
std::function<void()> wait_for_disk;
int64_t page_bytes = 0;

}  // namespace

// In the place of the library's (runtime/engine/clock.cc), which this binary therefore does not link.
double now_ms() {
  return clock_ms;
}

// In the place of the one that reads PEFT folders: what Simulation::load has said of the image is all there is.
// Every second image can be copied to the device while it is read.
std::shared_ptr<const AdapterImage> reload_adapter(const AdapterFacts& facts, const ModelConfig&,
                                                   const AdapterBegun& begun) {
  const auto image =
      sim::make_image(facts.fingerprint, static_cast<int32_t>(facts.stream_bytes / kGranuleBytes), page_bytes, true);
  if (facts.fingerprint % 2 == 0) {
    image->progress.begin();
    begun(image);
  }
  wait_for_disk();
  return image;
}

namespace sim {
namespace {

EngineOptions options_of(const Shape& shape, int64_t audit) {
  EngineOptions options;
  options.num_threads = 1;
  options.kernels = "reference";  // stamp_ops.cc
  options.random_weights = true;
  options.max_adapters_resident = shape.slots;
  options.max_num_sequences = shape.sequences;
  options.max_batch_tokens = shape.batch_tokens;
  options.max_queued_requests = shape.queue;
  options.max_context_tokens = shape.context;
  options.output_buffer_tokens = shape.buffer;
  options.prefetch_requests = shape.prefetched;
  options.overrun = shape.fails_on_overrun ? "fail" : "pause";
  options.prefix_cache = shape.prefix_cache;
  options.fairness = shape.is_fair ? "adapter" : "arrival";
  options.early_refusal = shape.refuses_early;
  options.max_overtaking_steps = 32;
  options.max_loads_per_step = 2;
  options.audit = audit;
  return options;
}

}  // namespace

double simulated_ms() {
  return clock_ms;
}

void pass_time(double ms) {
  clock_ms += ms;
}

void Gate::pass(const std::function<void()>& arrived) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_) {
      return;
    }
    waiting_ = true;
  }
  arrived();
  std::unique_lock<std::mutex> lock(mutex_);
  change_.wait(lock, [&] { return passes_ || open_; });
  passes_ = waiting_ = false;
  if (status_ != Status::kOk) {
    throw Error(status_, "made to fail");
  }
}

void Gate::open_once(Status status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    passes_ = true;
    waiting_ = false;
    status_ = status;
  }
  change_.notify_all();
}

void Gate::open() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    status_ = Status::kOk;
  }
  change_.notify_all();
}

SimulatedEngine::SimulatedEngine(const Shape& shape, int64_t audit, const std::string& model_dir) {
  auto plan = std::make_shared<test::TestDevice::Plan>();
  plan->asynchronous = shape.asynchronous;
  plan->chunk_queued = [gate = device_, this] { gate->pass([this] { notify(); }); };
  wait_for_disk = [gate = disk_, this] { gate->pass([this] { notify(); }); };
  EngineOptions options = options_of(shape, audit);
  options.wrap_device = test::TestDevice::wrapper(plan);
  const ModelConfig config = load_model_config(model_dir);
  const KvGeometry geometry = choose_kv_geometry(config.num_layers, config.num_kv_heads, config.head_dim,
                                                 static_cast<int32_t>(options.kv_block_tokens), Dtype::kF32);
  page_bytes = geometry.page_bytes;
  options.device_memory_bytes = shape.num_pages * geometry.page_bytes;
  options.swap_memory_bytes = shape.swap_pages * geometry.page_bytes;
  options.host_memory_bytes = shape.host_granules * static_cast<int64_t>(kGranuleBytes);
  parts_ = std::make_unique<Parts>(options, model_dir);
}

SimulatedEngine::~SimulatedEngine() {
  device_->open();
  disk_->open();
}

bool SimulatedEngine::step() {
  const bool ran = parts_->step();
  settle_loaders();
  return ran;
}

void SimulatedEngine::let_upload_pass(bool fails) {
  device_->open_once(fails ? kLoadFailure : Status::kOk);
  settle_loaders();
}

void SimulatedEngine::let_read_pass(bool fails) {
  disk_->open_once(fails ? kLoadFailure : Status::kOk);
  settle_loaders();
}

void SimulatedEngine::settle_loaders() {
  std::unique_lock<std::mutex> lock(parts_->mutex);
  AdapterCache& adapters = *parts_->adapters;
  parts_->work.wait(lock, [&] {
    return (has_upload() || !adapters.is_uploader_working()) && (has_read() || !adapters.is_reader_working());
  });
}

void SimulatedEngine::audit_all(const std::vector<std::shared_ptr<Session>>& sessions) {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  parts_->audit_parts();
  std::set<const KvSequence*> holders;
  const std::vector<std::shared_ptr<Sequence>>& inbox = parts_->inbox;
  for (const auto* list : {&inbox, &parts_->scheduler->running(), &parts_->scheduler->waiting()}) {
    for (const auto& sequence : *list) {
      holders.insert(sequence->kv.get());
    }
  }
  for (const auto& session : sessions) {
    holders.insert(session->kv.get());
  }
  const PagePool& pool = *parts_->pool;
  std::vector<int32_t> leases(static_cast<size_t>(pool.num_pages()));
  for (const KvSequence* kv : holders) {
    for (int32_t i = 0; i < kv->pages.size(); ++i) {
      ++leases[static_cast<size_t>(kv->pages.data()[i])];
    }
  }
  int32_t num_others = 0;
  for (PageId page = 0; page < pool.num_pages(); ++page) {
    const int32_t others = pool.leases(page) - leases[static_cast<size_t>(page)];
    MOELORA_ASSERT(others == 0 || others == 1);  // the adapter's, or the prefix cache's
    num_others += others;
  }
  const PrefixCache* prefix = parts_->prefix.get();
  const int32_t num_cached = prefix == nullptr ? 0 : prefix->num_blocks() * info().pages_per_block;
  MOELORA_ASSERT(num_others == num_cached + pool.num_used(PageUse::kAdapter));
}

}  // namespace sim
}  // namespace moelora
