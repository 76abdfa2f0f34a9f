// SPDX-License-Identifier: Apache-2.0
// A step allocates nothing: the C allocator and mmap of this whole process are counted on every thread that is not
// the test's own, over 1,000 steps in which rows, lengths and adapters change, and adapters and cached blocks come and
// go in the pool.
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <random>

#include "tests/engine/engine_support.h"
#include "tests/text/tokenizer_files.h"

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};
thread_local bool is_host = false;

void note_allocation() {
  if (counting.load(std::memory_order_relaxed) && !is_host) {
    allocations.fetch_add(1);
  }
}

}  // namespace

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t size) {
  note_allocation();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  note_allocation();
  return __libc_calloc(count, size);
}
void* realloc(void* memory, size_t size) {
  note_allocation();
  return __libc_realloc(memory, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  note_allocation();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, size_t alignment, size_t size) {
  note_allocation();
  *memory = __libc_memalign(alignment, size);
  return *memory == nullptr ? 12 : 0;
}
void* mmap(void* address, size_t length, int protection, int flags, int file, off_t offset) {
  note_allocation();
  using Mmap = void* (*)(void*, size_t, int, int, int, off_t);
  static const auto next = reinterpret_cast<Mmap>(dlsym(RTLD_NEXT, "mmap"));
  return next(address, length, protection, flags, file, offset);
}
}

namespace moelora::test {

TEST_CASE("1,000 steps with changing rows, lengths and adapters allocate nothing", "[engine][allocation]") {
  is_host = true;
  EngineOptions options;
  options.num_threads = 2;
  options.max_num_sequences = 8;
  options.max_batch_tokens = 40;
  options.max_adapters_resident = 3;  // five adapters take turns
  options.timeline_events = 500;      // and the oldest leave
  options.device_memory_bytes = 4 << 20;
  const auto engine = Engine::create(test_options(options), case_dir("qwen3_moe") + "/model");
  std::vector<std::shared_ptr<Adapter>> adapters = {nullptr};
  for (const char* name : {"attn", "experts", "patterns", "rslora", "experts_2d"}) {
    adapters.push_back(load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/" + name, name));
  }
  const auto tokenizer = open_file(byte_level_file());
  std::mt19937 random(11);
  const auto queue = std::make_shared<CompletionQueue>();
  const auto wave = [&](size_t count) {
    std::vector<std::shared_ptr<Submission>> submissions;
    for (size_t i = 0; i < count; ++i) {
      Request request;
      request.prompt.resize(1 + random() % 90);
      for (int32_t& token : request.prompt) {
        token = static_cast<int32_t>(random() % 320);
      }
      std::fill_n(request.prompt.begin(), std::min<size_t>(request.prompt.size(), i % 2 == 0 ? 32 : 0), 5);
      request.adapter = adapters[random() % adapters.size()];
      request.sampling.max_tokens = 1 + static_cast<int32_t>(random() % 40);
      request.sampling.ignore_eos = true;
      request.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
      request.sampling.top_k = i % 3 == 0 ? 0 : 20;
      request.sampling.top_p = 0.9f;
      request.sampling.repetition_penalty = i % 4 == 0 ? 1.2f : 1.0f;
      request.sampling.logprobs = i % 5 == 0 ? 3 : -1;
      if (i % 2 == 1) {  // some of them are found
        request.tokenizer = tokenizer;
        request.stop_strings = {{"ab", 0}, {"\xEF\xBF\xBD\xEF\xBF\xBD", 1}, {std::string(300, 'a'), 2}};
      }
      auto submission = std::make_shared<Submission>();
      submission->request = request;
      submission->stream = std::make_unique<TokenStream>(request, 320, i % 2 == 0 ? queue : nullptr, i + 1, i);
      engine->submit(submission);
      submissions.push_back(std::move(submission));
    }
    if (submissions.size() > 3) {
      engine->cancel(submissions[3], false);
    }
    for (const auto& submission : submissions) {
      read_all(*submission);
    }
    Event events[64];
    bool closed = false;
    while (queue->wait(0, events, 64, &closed) > 0) {
    }
  };
  wave(30);
  const uint64_t before = engine->stats().steps;
  const uint64_t loads_before = engine->stats().adapter_loads;
  const EngineStats stats_before = engine->stats();
  allocations = 0;
  counting = true;
  while (engine->stats().steps < before + 1000) {
    wave(12);
  }
  counting = false;
  CHECK(allocations.load() == 0);
  CHECK(engine->stats().adapter_loads > loads_before);
  CHECK(engine->stats().prefix_hit_tokens > stats_before.prefix_hit_tokens + 1000);
  CHECK(engine->stats().prefix_evictions > stats_before.prefix_evictions + 100);

  // The counter counts: a thread that allocates is seen.
  counting = true;
  std::thread([] { std::free(std::malloc(100)); }).join();
  counting = false;
  CHECK(allocations.load() > 0);
}

TEST_CASE("steps that preempt, swap and choose between adapters allocate nothing", "[engine][allocation]") {
  is_host = true;
  for (const bool swaps : {false, true}) {
    EngineOptions options;
    options.num_threads = 2;
    options.max_num_sequences = 4;
    options.fairness = "adapter";
    options.early_refusal = true;
    const auto roomy = Engine::create(test_options(options), case_dir("qwen3_moe") + "/model");
    const int64_t block_bytes = roomy->info().pages_per_block * roomy->info().page_bytes;
    options.swap_memory_bytes = swaps ? 12 * block_bytes : 0;
    const auto sample = load_adapter(*roomy, case_dir("qwen3_moe") + "/adapters/attn", "sample");
    options.device_memory_bytes = static_cast<int64_t>(sample->image->stream_bytes) + 13 * block_bytes;
    const auto engine = Engine::create(test_options(options), case_dir("qwen3_moe") + "/model");
    const auto adapter = load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/attn", "a");
    const auto wave = [&](int32_t count) {
      std::vector<std::shared_ptr<Submission>> submissions;
      for (int32_t i = 0; i < count; ++i) {
        Request request = greedy_request({i, 2, 3, 4, 5}, 60 + i);  // 5 blocks each
        request.adapter = i % 2 == 0 ? nullptr : adapter;
        request.deadline_ms = 600000;
        submissions.push_back(make_submission(*engine, request));
        engine->submit(submissions.back());
      }
      for (const auto& submission : submissions) {
        CHECK(!read_all(*submission).empty());
      }
    };
    wave(8);
    const EngineStats before = engine->stats();
    allocations = 0;
    counting = true;
    wave(10);
    wave(10);
    counting = false;
    const EngineStats after = engine->stats();
    INFO("swap space " << options.swap_memory_bytes);
    CHECK(allocations.load() == 0);
    CHECK(after.preemptions > before.preemptions);
    CHECK((after.swaps > before.swaps) == swaps);
  }
}

}  // namespace moelora::test
