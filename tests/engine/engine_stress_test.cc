// SPDX-License-Identifier: Apache-2.0
// All that hosts do, at once and from threads of their own: submit, read, cancel, load, replace and unload adapters,
// hold sessions, pin, prefetch, trim, ask for numbers. Every token is that of a quiet engine; under ThreadSanitizer
// nobody races. What comes in which order is up to the machine; tests/sim decides it from a seed.
#include <array>
#include <deque>
#include <random>
#include <thread>

#include "tests/engine/upload_support.h"

namespace moelora::test {
namespace {

constexpr size_t kNumImages = 5;
constexpr size_t kNumPrompts = 3;
constexpr int32_t kTokens = 10;

EngineOptions tight_options() {
  EngineOptions options;
  options.max_adapters_resident = 3;
  options.max_num_sequences = 5;
  options.max_batch_tokens = 16;
  options.device_memory_bytes = 3 << 20;
  options.max_queued_requests = 24;
  options.output_buffer_tokens = 4;
  options.audit = 2;
  return options;
}

std::vector<int32_t> prompt_of(size_t number) {
  std::vector<int32_t> prompt;
  for (size_t i = 0; i < 4 + 11 * number; ++i) {
    prompt.push_back(static_cast<int32_t>((7 * i + 31 * number) % 300 + 3));
  }
  return prompt;
}

// What the threads share.
struct Stress {
  struct Task {
    std::shared_ptr<Submission> submission;
    size_t image = 0;  // kNumImages = base
    size_t prompt = 0;
    bool may_be_cancelled = false;
  };
  explicit Stress(Engine& shared) : engine(shared) {
    for (size_t i = 0; i < kNumImages; ++i) {
      images.push_back(random_adapter(engine.info().config, 8 << (i % 3), true, i % 2 == 0, i));
      adapters[i] = engine.register_adapter("a" + std::to_string(i), images[i], 1.0f, false);
    }
  }
  std::shared_ptr<Adapter> adapter(size_t image) {
    const std::lock_guard<std::mutex> lock(mutex);
    return image == kNumImages ? nullptr : adapters[image];
  }

  Engine& engine;
  std::vector<std::shared_ptr<const AdapterImage>> images;
  std::mutex mutex;
  std::array<std::shared_ptr<Adapter>, kNumImages> adapters;  // who has the name now
  std::deque<Task> unread, running;                           // for readers; for cancellers
  std::atomic<int> submitting{0}, wrong{0}, finished{0}, refused{0};
  std::atomic<bool> done{false};
  std::vector<int32_t> expected[kNumImages + 1][kNumPrompts];
};

void submit_some(Stress& stress, unsigned seed, int count) {
  std::mt19937 random(seed);
  while (count > 0) {
    Stress::Task task;
    task.image = random() % (kNumImages + 1);
    task.prompt = random() % kNumPrompts;
    task.may_be_cancelled = random() % 3 == 0;
    task.submission = make_submission(stress.engine, greedy_request(prompt_of(task.prompt), kTokens));
    task.submission->request.adapter = stress.adapter(task.image);
    task.submission->request.priority = static_cast<int32_t>(random() % 3);
    try {
      stress.engine.submit(task.submission);
    } catch (const Error& error) {  // its adapter was unloaded meanwhile, or too many wait
      stress.wrong += error.status() == Status::kNotFound || error.status() == Status::kOverloaded ? 0 : 1;
      ++stress.refused;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    --count;
    const std::lock_guard<std::mutex> lock(stress.mutex);
    if (task.may_be_cancelled) {
      stress.running.push_back(task);
    }
    stress.unread.push_back(std::move(task));
  }
  --stress.submitting;
}

void read_some(Stress& stress, unsigned seed) {
  std::mt19937 random(seed);
  for (;;) {
    Stress::Task task;
    {
      const std::lock_guard<std::mutex> lock(stress.mutex);
      if (stress.unread.empty() && stress.submitting == 0) {
        return;
      }
      if (!stress.unread.empty()) {
        task = std::move(stress.unread.front());
        stress.unread.pop_front();
      }
    }
    if (task.submission == nullptr) {
      std::this_thread::yield();
      continue;
    }
    if (random() % 8 == 0) {  // pauses if it is long enough
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
    }
    std::vector<int32_t> tokens;
    int32_t token = 0;
    size_t count = 0;
    Status status = Status::kOk;
    while ((status = task.submission->stream->read(20000, &token, 1, &count)) == Status::kOk) {
      tokens.push_back(token);
      stress.engine.notify();
    }
    const RequestResult result = task.submission->stream->result();
    const std::vector<int32_t>& expected = stress.expected[task.image][task.prompt];
    const bool is_prefix =
        tokens.size() <= expected.size() && std::equal(tokens.begin(), tokens.end(), expected.begin());
    const bool is_whole = tokens.size() == expected.size() && result.finish == FinishReason::kLength;
    const bool was_cancelled = result.finish == FinishReason::kCancelled && task.may_be_cancelled;
    stress.wrong += status == Status::kEnd && is_prefix && (is_whole || was_cancelled) ? 0 : 1;
    ++stress.finished;
  }
}

void cancel_some(Stress& stress) {
  while (!stress.done) {
    std::shared_ptr<Submission> submission;
    {
      const std::lock_guard<std::mutex> lock(stress.mutex);
      if (!stress.running.empty()) {
        submission = stress.running.front().submission;
        stress.running.pop_front();
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    if (submission != nullptr) {
      stress.engine.cancel(submission, true);
    }
  }
}

// Loads again under the same name, with another image in between; unloads who had it before.
void replace_some(Stress& stress, unsigned seed) {
  std::mt19937 random(seed);
  while (!stress.done) {
    const size_t image = random() % kNumImages;
    const auto fresh = stress.engine.register_adapter("a" + std::to_string(image), stress.images[image], 1.0f, true);
    std::shared_ptr<Adapter> old;
    {
      const std::lock_guard<std::mutex> lock(stress.mutex);
      old = std::exchange(stress.adapters[image], fresh);
    }
    stress.engine.unload_adapter(old, false);
    const auto passing = stress.engine.register_adapter(
        "passing " + std::to_string(seed), random_adapter(stress.engine.info().config, 32, true, false, random()), 1.0f,
        true);
    stress.engine.prefetch_adapter(passing, nullptr, 0, 0);
    if (random() % 4 == 0) {
      ++fresh->pins;
      stress.engine.notify();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      --fresh->pins;
      stress.engine.notify();
    }
    stress.engine.unload_adapter(passing, false);
    stress.engine.trim(random() % 4 == 0 ? 0 : 2 << 20);
    if (stress.engine.stats().pages_free < 0 || stress.engine.health(nullptr) != Status::kOk) {
      ++stress.wrong;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// A turn gives what the whole text gives in one request; forks and rollbacks lead back to it.
void talk(Stress& stress, size_t image, const std::vector<int32_t>& expected) {
  while (!stress.done) {
    std::shared_ptr<Session> session;
    try {
      session = stress.engine.create_session(stress.adapter(image), 1.0f);
    } catch (const Error&) {  // unloaded between the two
      continue;
    }
    for (int turn = 0; turn < 3 && session != nullptr; ++turn) {
      Request request = greedy_request(prompt_of(1), kTokens);
      request.session = session;
      request.adapter = session->adapter;
      const auto submission = make_submission(stress.engine, request);
      try {
        stress.engine.submit(submission);
      } catch (const Error&) {
        break;
      }
      stress.wrong += read_all(*submission) == expected ? 0 : 1;
      std::shared_ptr<Session> fork;
      try {
        fork = stress.engine.fork_session(session);
        stress.engine.rollback_session(fork, 0);
      } catch (const Error&) {
      }
      stress.engine.close_session(session);
      session = fork;
    }
    if (session != nullptr) {
      stress.engine.close_session(session);
    }
  }
}

}  // namespace

TEST_CASE("submitters, readers, cancellers and loaders at once", "[engine][stress]") {
  Setup setup(tight_options());
  Stress stress(*setup.engine);
  for (size_t image = 0; image <= kNumImages; ++image) {
    for (size_t prompt = 0; prompt < kNumPrompts; ++prompt) {
      Request request = greedy_request(prompt_of(prompt), kTokens);
      request.adapter = stress.adapter(image);
      stress.expected[image][prompt] = read_all(*setup.submit(request));
      REQUIRE(stress.expected[image][prompt].size() == kTokens);
    }
  }
  constexpr int kRequests = 60;  // of a submitter
  std::vector<std::thread> work, beside;
  for (unsigned i = 0; i < 2; ++i) {
    ++stress.submitting;
    work.emplace_back([&, i] { submit_some(stress, i, kRequests); });
  }
  for (unsigned i = 0; i < 3; ++i) {
    work.emplace_back([&, i] { read_some(stress, 10 + i); });
  }
  beside.emplace_back([&] { cancel_some(stress); });
  for (unsigned i = 0; i < 2; ++i) {
    beside.emplace_back([&, i] { replace_some(stress, 20 + i); });
  }
  for (const size_t image : {size_t{0}, kNumImages}) {
    beside.emplace_back([&, image] { talk(stress, image, stress.expected[image][1]); });
  }
  for (std::thread& thread : work) {
    thread.join();
  }
  stress.done = true;
  for (std::thread& thread : beside) {
    thread.join();
  }
  CHECK(stress.wrong == 0);
  CHECK(stress.finished == 2 * kRequests);
  for (const auto& adapter : setup.engine->list_adapters()) {
    setup.engine->unload_adapter(adapter, false);
  }
  setup.engine->trim(0);
  CHECK(comes_true([&] { return setup.engine->stats().pages_free == setup.engine->stats().pages_total; }));
  const EngineStats stats = setup.engine->stats();
  CHECK(stats.requests_submitted == stats.requests_finished);
  CHECK(stats.adapter_evictions > 0);
  CHECK(stats.preemptions > 0);
  CHECK(stats.adapter_host_bytes == 0);
}

}  // namespace moelora::test
