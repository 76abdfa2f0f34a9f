// SPDX-License-Identifier: Apache-2.0
// Adapters on disk, in host memory and on the device: no answer depends on where they were, nobody else waits for one
// that is read, and files that changed end the requests that wanted them.
#include <cmath>
#include <filesystem>
#include <random>

#include "runtime/model/config.h"
#include "tests/engine/upload_support.h"
#include "tests/support/adapter_folder.h"
#include "tests/support/expect_error.h"

namespace moelora::test {
namespace {

constexpr int32_t kRank = 8;

// Folders that engines of one model share.
struct Folders {
  explicit Folders(size_t count) {
    const ModelConfig model = load_model_config(case_dir("qwen3_moe") + "/model");
    for (size_t i = 0; i < count; ++i) {
      paths.push_back(write_adapter_folder(dir.file("a" + std::to_string(i)), model, kRank, static_cast<uint32_t>(i)));
    }
    bytes = load_adapter_dir(paths[0], model, {})->stream.size();
  }
  TempDir dir;
  std::vector<std::string> paths;
  uint64_t bytes = 0;
};

std::shared_ptr<Engine> open(EngineOptions options) {
  options.num_threads = 2;
  options.audit = 2;
  options.device_memory_bytes = 16 << 20;
  return Engine::create(test_options(options), case_dir("qwen3_moe") + "/model");
}

std::vector<std::shared_ptr<Adapter>> load_all(Engine& engine, const Folders& folders) {
  std::vector<std::shared_ptr<Adapter>> adapters;
  for (size_t i = 0; i < folders.paths.size(); ++i) {
    adapters.push_back(load_adapter(engine, folders.paths[i], "a" + std::to_string(i)));
  }
  return adapters;
}

std::shared_ptr<Submission> submit(Engine& engine, const Request& request) {
  auto submission = make_submission(engine, request);
  engine.submit(submission);
  return submission;
}

}  // namespace

TEST_CASE("40 adapters in host memory for 4, Zipf requests: answers as with memory for all", "[engine]") {
  const Folders folders(40);
  struct Draw {
    size_t adapter;
    std::vector<int32_t> prompt;
    int32_t max_tokens;
  };
  std::mt19937 random(5);
  std::vector<double> weights;
  for (size_t i = 0; i < folders.paths.size(); ++i) {
    weights.push_back(1.0 / static_cast<double>(i + 1));
  }
  std::discrete_distribution<size_t> zipf(weights.begin(), weights.end());
  std::vector<Draw> draws;
  for (int i = 0; i < 240; ++i) {
    draws.push_back(
        {zipf(random), random_prompt(random, 1 + random() % 20, 320), 1 + static_cast<int32_t>(random() % 8)});
  }
  const auto run = [&](int64_t host_bytes) {
    EngineOptions options;
    options.host_memory_bytes = host_bytes;
    options.max_adapters_resident = 6;
    options.max_num_sequences = 8;
    const auto engine = open(options);
    const auto adapters = load_all(*engine, folders);
    const auto folder_count = static_cast<int64_t>(folders.paths.size());
    EngineStats stats = engine->stats();
    CHECK(stats.adapters_in_host_memory == (host_bytes == 0 ? folder_count : folder_count / 10));
    CHECK(stats.adapters_in_host_memory + stats.adapters_on_disk_only == folder_count);
    std::vector<std::shared_ptr<Submission>> submissions;
    for (const Draw& draw : draws) {
      Request request = request_of(draw.prompt, draw.max_tokens, adapters[draw.adapter]);
      request.capture_from = 0;
      submissions.push_back(submit(*engine, request));
    }
    std::vector<Answer> answers;
    for (const auto& submission : submissions) {
      RequestResult result;
      Answer answer;
      answer.tokens = read_all(*submission, &result);
      CHECK(result.status == Status::kOk);
      answer.logits = captured(*submission, engine->info().config.vocab_size);
      answers.push_back(std::move(answer));
    }
    stats = engine->stats();
    CHECK((host_bytes == 0 || stats.adapter_host_bytes <= static_cast<uint64_t>(host_bytes)));
    CHECK((stats.adapter_host_loads > 40) == (host_bytes > 0));
    CHECK((stats.adapter_read_ms > 0) == (host_bytes > 0));
    CHECK((stats.adapter_pack_ms > 0) == (host_bytes > 0));
    CHECK(stats.adapter_upload_ms > 0);
    CHECK(stats.adapter_evictions > 0);
    return answers;
  };
  const std::vector<Answer> expected = run(0);
  CHECK(run(static_cast<int64_t>(folders.bytes) * 4) == expected);
  CHECK(run(static_cast<int64_t>(folders.bytes) * 4 + 1) == expected);  // again, in another order of loads
}

TEST_CASE("the smallest budget serves every adapter", "[engine]") {
  const Folders folders(5);
  EngineOptions options;
  options.host_memory_bytes = static_cast<int64_t>(folders.bytes);
  options.max_adapters_resident = 2;
  const auto engine = open(options);
  const auto adapters = load_all(*engine, folders);
  std::vector<std::shared_ptr<Submission>> submissions;
  for (int round = 0; round < 6; ++round) {
    for (const auto& adapter : adapters) {
      submissions.push_back(submit(*engine, request_of({round, 2, 3}, 4, adapter)));
    }
  }
  for (const auto& submission : submissions) {
    RequestResult result;
    CHECK(read_all(*submission, &result).size() == 4);
    CHECK(result.status == Status::kOk);
  }
  // One more byte than fits cannot be registered, and nothing is lost by the try.
  CHECK_ERROR(Status::kNomem, ({"adapter 'r'", "host_memory_bytes"}),
              engine->register_adapter("r", random_adapter(engine->info().config, kRank, true, false, 1), 1.0f, false));
  CHECK(engine->find_adapter("r") == nullptr);
  CHECK(engine->stats().adapters_registered == 5);
}

TEST_CASE("files that changed on disk end the requests that wanted them, naming the file", "[engine]") {
  const Folders folders(3);
  EngineOptions options;
  options.host_memory_bytes = static_cast<int64_t>(folders.bytes);
  options.max_adapters_resident = 1;
  const auto engine = open(options);
  const auto adapters = load_all(*engine, folders);
  const auto expected = read_all(*submit(*engine, request_of({1, 2, 3}, 6, adapters[1])));
  CHECK(read_all(*submit(*engine, request_of({1, 2, 3}, 6, adapters[2]))).size() == 6);  // 1 is on disk only again
  const std::string path = folders.paths[1] + "/adapter_model.safetensors";
  const std::string before = read_file(path);
  write_adapter_folder(folders.paths[1], engine->info().config, kRank, 99);
  const auto base = submit(*engine, request_of({1, 2}, 200));
  const auto first = submit(*engine, request_of({1, 2, 3}, 6, adapters[1]));
  const auto other = submit(*engine, request_of({1, 2, 3}, 6, adapters[0]));
  RequestResult result;
  CHECK(read_all(*first, &result).empty());
  CHECK(result.status == Status::kIo);
  CHECK(result.message.find("adapter 'a1'") != std::string::npos);
  CHECK(result.message.find(path) != std::string::npos);
  CHECK(result.message.find("changed") != std::string::npos);
  CHECK(read_all(*base).size() == 200);
  CHECK(read_all(*other).size() == 6);
  const auto queue = std::make_shared<CompletionQueue>();
  queue->expect(1);
  engine->prefetch_adapter(adapters[1], queue, 1, 1);
  CHECK(ready_status(*queue) == Status::kIo);
  // Loaded again under the name it is another adapter; the old handle works again once its bytes are back.
  const auto again = engine->register_adapter(
      "a1", load_adapter_dir(folders.paths[1], engine->info().config, engine->adapter_load_options()), 1.0f, true);
  CHECK(again->id != adapters[1]->id);
  CHECK(again->image->fingerprint != adapters[1]->image->fingerprint);
  CHECK(read_all(*submit(*engine, request_of({1, 2, 3}, 6, again))).size() == 6);
  write_file(path, before);
  CHECK(read_all(*submit(*engine, request_of({1, 2, 3}, 6, adapters[1]))) == expected);
  CHECK(engine->health(nullptr) == Status::kOk);
}

TEST_CASE("a request waits for files that are read, and nobody else does", "[engine]") {
  const Folders folders(3);
  EngineOptions options;
  options.host_memory_bytes = static_cast<int64_t>(folders.bytes);
  options.upload_bytes_per_second = 1;  // the second read begins after days
  const auto engine = open(options);
  const auto adapters = load_all(*engine, folders);
  CHECK(read_all(*submit(*engine, request_of({1, 2}, 4, adapters[1]))).size() == 4);
  const auto waiting = submit(*engine, request_of({1, 2}, 4, adapters[2]));
  CHECK(comes_true([&] { return engine->stats().waiting == 1; }));
  CHECK(read_all(*submit(*engine, request_of({1, 2}, 400))).size() == 400);
  CHECK(read_all(*submit(*engine, request_of({1, 2}, 400, adapters[1]))).size() == 400);
  CHECK(waiting->stream->unread() == 0);
  CHECK(engine->stats().waiting == 1);
  CHECK(engine->stats().preemptions == 0);
  engine->cancel(waiting, false);
  RequestResult result;
  CHECK(read_all(*waiting, &result).empty());
  CHECK(result.status == Status::kCancelled);
  CHECK(result.adapter_wait_ms > 0);
  engine->unload_adapter(adapters[2], true);
  CHECK(comes_true([&] { return engine->stats().adapters_on_disk_only == 2; }));  // it made the first one go
  CHECK(engine->stats().adapter_host_loads == 1);
}

TEST_CASE("adapters registered by their headers answer as loaded ones do", "[engine]") {
  const Folders folders(3);
  EngineOptions options;
  options.host_memory_bytes = static_cast<int64_t>(2 * folders.bytes);
  const auto engine = open(options);
  const auto eager = open(options);
  const auto loaded = load_all(*eager, folders);
  std::vector<std::shared_ptr<Adapter>> lazy;
  for (size_t i = 0; i < folders.paths.size(); ++i) {
    auto image = describe_adapter_dir(folders.paths[i], engine->info().config, engine->adapter_load_options());
    lazy.push_back(engine->register_adapter("lazy " + std::to_string(i), std::move(image), 1.0f, false));
  }
  CHECK(engine->stats().adapters_on_disk_only == 3);
  CHECK(engine->adapter_place(*lazy[2]).fingerprint == 0);
  for (size_t i = 0; i < lazy.size(); ++i) {
    CHECK(read_all(*submit(*engine, request_of({1, 2, 3}, 6, lazy[i]))) ==
          read_all(*submit(*eager, request_of({1, 2, 3}, 6, loaded[i]))));
    CHECK(engine->adapter_place(*lazy[i]).fingerprint == eager->adapter_place(*loaded[i]).fingerprint);
  }
}

TEST_CASE("prefetch brings an adapter from disk to the device; its place can be asked for", "[engine]") {
  const Folders folders(2);
  EngineOptions options;
  options.host_memory_bytes = static_cast<int64_t>(folders.bytes);
  const auto engine = open(options);
  const auto adapters = load_all(*engine, folders);
  CHECK(engine->adapter_place(*adapters[0]).in_host_memory);
  CHECK(!engine->adapter_place(*adapters[1]).in_host_memory);
  CHECK(engine->adapter_place(*adapters[1]).bytes_uploaded == 0);
  const auto queue = std::make_shared<CompletionQueue>();
  queue->expect(1);
  engine->prefetch_adapter(adapters[1], queue, 1, 1);
  CHECK(ready_status(*queue) == Status::kOk);
  CHECK(adapters[1]->slot.load() > 0);
  CHECK(engine->adapter_place(*adapters[1]).in_host_memory);
  CHECK(engine->adapter_place(*adapters[1]).bytes_uploaded == folders.bytes);
  CHECK(!engine->adapter_place(*adapters[0]).in_host_memory);
  CHECK(engine->stats().adapter_host_evictions == 1);
}

TEST_CASE("loading and unloading from folders beside running requests changes none of their tokens", "[engine]") {
  const Folders folders(12);
  const auto run = [&](bool loading) {
    EngineOptions options;
    options.host_memory_bytes = static_cast<int64_t>(folders.bytes) * 3;
    options.max_adapters_resident = 4;
    const auto engine = open(options);
    const auto own = load_all(*engine, folders);
    std::vector<std::shared_ptr<Submission>> running;
    for (int32_t i = 0; i < 4; ++i) {
      running.push_back(
          submit(*engine, request_of({1 + i, 2, 3}, 300, i == 0 ? nullptr : own[static_cast<size_t>(i)])));
    }
    std::atomic<bool> done{false};
    std::thread loader([&] {
      for (size_t i = 4; loading && !done; ++i) {
        const auto queue = std::make_shared<CompletionQueue>();
        queue->expect(1);
        const auto adapter =
            i % 2 == 0 ? own[4 + i % 8] : load_adapter(*engine, folders.paths[i % 12], "more " + std::to_string(i));
        engine->prefetch_adapter(adapter, i % 3 == 0 ? nullptr : queue, 1, 1);
        if (i % 3 != 0) {
          ready_status(*queue);
        }
        if (i % 2 == 1) {
          engine->unload_adapter(adapter, false);
        }
      }
    });
    std::vector<std::vector<int32_t>> tokens;
    for (const auto& submission : running) {
      tokens.push_back(read_all(*submission));
    }
    done = true;
    loader.join();
    if (loading) {
      CHECK(engine->stats().adapter_host_loads > 3);
    }
    return tokens;
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("closing an engine while adapters are read", "[engine]") {
  const Folders folders(6);
  for (int i = 0; i < 4; ++i) {
    EngineOptions options;
    options.host_memory_bytes = static_cast<int64_t>(folders.bytes) * 4;
    auto engine = open(options);
    const auto adapters = load_all(*engine, folders);
    std::vector<std::shared_ptr<Submission>> submissions;
    for (const auto& adapter : adapters) {
      submissions.push_back(submit(*engine, request_of({1, 2}, 4, adapter)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(i));
    engine.reset();
    check_ended_or_closed(submissions);
  }
}

TEST_CASE("bytes of pages that nothing uses, and positions that no token has yet, are counted", "[engine]") {
  EngineOptions options;
  options.output_buffer_tokens = 5;  // it stands still there
  const auto engine = open(options);
  const EngineInfo& info = engine->info();
  CHECK(info.page_reason.find("tokens") != std::string::npos);
  const auto adapter = engine->register_adapter("r", random_adapter(info.config, kRank, true, true, 1), 1.0f, false);
  const auto held = submit(*engine, request_of({1, 2, 3, 4, 5, 6, 7}, 40, adapter));
  CHECK(comes_true([&] { return held->stream->unread() == 5; }));
  CHECK(comes_true([&] { return engine->stats().pages_kv > 0; }));
  const EngineStats stats = engine->stats();
  const auto& config = info.config;
  const int64_t token_bytes = int64_t{2} * config.num_layers * config.num_kv_heads * config.head_dim * 4;
  const int64_t blocks = stats.pages_kv / info.pages_per_block;
  REQUIRE(blocks == 1);
  const int64_t length = 7 + 5 - 1;  // the last token is not in the KV
  CHECK(stats.kv_bytes_unfilled == (16 - length) * token_bytes);
  const int64_t in_use = static_cast<int64_t>(adapter->image->stream_bytes) + blocks * 16 * token_bytes;
  CHECK(stats.page_bytes_wasted == (stats.pages_kv + stats.pages_adapter) * info.page_bytes - in_use);
  engine->cancel(held, false);
  read_all(*held);
  CHECK(comes_true([&] { return engine->stats().kv_bytes_unfilled == 0; }));
}

}  // namespace moelora::test
