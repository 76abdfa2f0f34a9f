// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/simulated_engine.h"

#include <set>

#include "tests/sim/stamp_ops.h"

namespace moelora {
namespace {

double clock_ms = 1000;

}  // namespace

// In the place of the library's (runtime/engine/clock.cc), which this binary therefore does not link.
double now_ms() {
  return clock_ms;
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

void SimulatedEngine::Gate::pass(const std::function<void()>& arrived) {
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
  if (fails_) {
    throw Error(kUploadFailure, "made to fail");
  }
}

void SimulatedEngine::Gate::open_once(bool fails) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    passes_ = true;
    waiting_ = false;
    fails_ = fails;
  }
  change_.notify_all();
}

void SimulatedEngine::Gate::open() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    fails_ = false;
  }
  change_.notify_all();
}

SimulatedEngine::SimulatedEngine(const Shape& shape, int64_t audit, const std::string& model_dir) {
  auto plan = std::make_shared<test::TestDevice::Plan>();
  plan->asynchronous = shape.asynchronous;
  plan->chunk_queued = [gate = gate_, this] { gate->pass([this] { notify(); }); };
  EngineOptions options = options_of(shape, audit);
  options.wrap_device = test::TestDevice::wrapper(plan);
  const ModelConfig config = load_model_config(model_dir);
  const KvGeometry geometry = choose_kv_geometry(config.num_layers, config.num_kv_heads, config.head_dim,
                                                 static_cast<int32_t>(options.kv_block_tokens), Dtype::kF32);
  options.device_memory_bytes = shape.num_pages * geometry.page_bytes;
  parts_ = std::make_unique<Parts>(options, model_dir);
}

SimulatedEngine::~SimulatedEngine() {
  gate_->open();
}

bool SimulatedEngine::step() {
  const bool ran = parts_->step();
  settle_loader();
  return ran;
}

void SimulatedEngine::let_upload_pass(bool fails) {
  gate_->open_once(fails);
  settle_loader();
}

void SimulatedEngine::settle_loader() {
  std::unique_lock<std::mutex> lock(parts_->mutex);
  parts_->work.wait(lock,
                    [&] { return gate_->is_waiting() || parts_->uploads_ended == parts_->adapters->num_loads(); });
}

void SimulatedEngine::audit_all(const std::vector<std::shared_ptr<Session>>& sessions) {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  parts_->pool->audit();
  parts_->adapters->audit();
  parts_->scheduler->audit();
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
  int32_t used = 0;
  for (const KvSequence* kv : holders) {
    for (int32_t i = 0; i < kv->pages.size(); ++i) {
      used += leases[static_cast<size_t>(kv->pages.data()[i])]++ == 0 ? 1 : 0;
    }
  }
  MOELORA_ASSERT(used == pool.num_used(PageUse::kKv));
  for (PageId page = 0; page < pool.num_pages(); ++page) {
    const int32_t of_kv = leases[static_cast<size_t>(page)];
    MOELORA_ASSERT(of_kv == 0 || of_kv == pool.leases(page));
  }
}

}  // namespace sim
}  // namespace moelora
