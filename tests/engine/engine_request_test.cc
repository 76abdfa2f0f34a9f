// SPDX-License-Identifier: Apache-2.0
// Requests: stops, limits, cancel, deadlines, sessions, refusals, and what the engine keeps doing meanwhile.
#include "tests/engine/engine_support.h"

namespace moelora::test {
namespace {

std::shared_ptr<Engine> open(EngineOptions options = {}) {
  options.num_threads = 2;
  options.audit = 2;
  return Engine::create(test_options(options), case_dir("qwen3_moe") + "/model");
}

std::vector<int32_t> run(Engine& engine, const Request& request, RequestResult* result = nullptr) {
  const auto submission = make_submission(engine, request);
  engine.submit(submission);
  return read_all(*submission, result);
}

Status refusal(Engine& engine, const Request& request, std::string* message) {
  try {
    engine.submit(make_submission(engine, request));
  } catch (const Error& error) {
    *message = error.what();
    return error.status();
  }
  return Status::kOk;
}

}  // namespace

TEST_CASE("stop tokens end a request and are in the ids", "[engine]") {
  const auto engine = open();
  RequestResult result;
  const auto free_run = run(*engine, greedy_request({5, 6, 7}, 12), &result);
  CHECK(result.finish == FinishReason::kLength);
  CHECK(result.prompt_tokens == 3);
  CHECK(result.output_tokens == 12);
  Request request = greedy_request({5, 6, 7}, 12);
  request.stop_tokens = {300, free_run[4]};
  const auto stopped = run(*engine, request, &result);
  const auto first = std::find(free_run.begin(), free_run.end(), free_run[4]) - free_run.begin();
  CHECK(stopped == std::vector<int32_t>(free_run.begin(), free_run.begin() + first + 1));
  CHECK(result.finish == FinishReason::kStop);
  CHECK(result.stop_index == 1);
  request.sampling.min_tokens = 12;  // the stop token may not be drawn before
  const auto held = run(*engine, request, &result);
  CHECK(held.size() == 12);
  CHECK(std::find(held.begin(), held.end() - 1, free_run[4]) == held.end() - 1);
}

TEST_CASE("a seed decides a sampled text, whatever runs beside it", "[engine]") {
  const auto engine = open();
  Request request = greedy_request({9, 8, 7, 6}, 20);
  request.sampling.temperature = 1.3f;
  request.sampling.top_p = 0.95f;
  request.sampling.seed = 1234;
  const auto alone = run(*engine, request);
  std::vector<std::shared_ptr<Submission>> beside;
  for (int i = 0; i < 5; ++i) {
    beside.push_back(make_submission(*engine, greedy_request({i + 1, 2, 3}, 40)));
    engine->submit(beside.back());
  }
  CHECK(run(*engine, request) == alone);
  for (const auto& submission : beside) {
    read_all(*submission);
  }
  request.sampling.seed = 1235;
  CHECK(run(*engine, request) != alone);
  request.sampling.seed = 0;
  RequestResult result;
  const auto chosen = run(*engine, request, &result);
  CHECK(result.seed != 0);
  request.sampling.seed = result.seed;
  CHECK(run(*engine, request) == chosen);
}

TEST_CASE("cancel and deadline end a request, the others go on", "[engine]") {
  const auto engine = open();
  const auto expected = run(*engine, greedy_request({1, 2, 3}, 300));
  const auto victim = make_submission(*engine, greedy_request({4, 5, 6}, 450));
  const auto other = make_submission(*engine, greedy_request({1, 2, 3}, 300));
  engine->submit(victim);
  engine->submit(other);
  int32_t buffer[8];
  size_t count = 0;
  REQUIRE(victim->stream->read(5000, buffer, 8, &count) == Status::kOk);
  engine->cancel(victim, false);
  RequestResult result;
  const auto partial = read_all(*victim, &result);
  CHECK(result.finish == FinishReason::kCancelled);
  CHECK(result.status == Status::kCancelled);
  CHECK(partial.size() < 450);
  CHECK(read_all(*other) == expected);

  Request late = greedy_request({4, 5, 6}, 450);
  late.deadline_ms = 1;
  const auto overdue = make_submission(*engine, late);
  engine->submit(overdue);
  read_all(*overdue, &result);
  CHECK(result.finish == FinishReason::kDeadline);
  CHECK(result.status == Status::kDeadline);
  CHECK(engine->stats().pages_kv == engine->stats().pages_cached);
}

TEST_CASE("a reader who does not read pauses its own request only", "[engine]") {
  EngineOptions options;
  options.output_buffer_tokens = 10;
  const auto engine = open(options);
  const auto slow = make_submission(*engine, greedy_request({1, 2, 3}, 100));
  engine->submit(slow);
  CHECK(comes_true([&] { return slow->stream->unread() == 10; }));
  CHECK(run(*engine, greedy_request({7, 8}, 50)).size() == 50);
  CHECK(slow->stream->unread() == 10);
  CHECK(read_all(*slow).size() == 100);

  options.overrun = "fail";
  const auto strict = open(options);
  const auto dropped = make_submission(*strict, greedy_request({1, 2, 3}, 100));
  strict->submit(dropped);
  CHECK(comes_true([&] { return dropped->stream->finished(); }));
  CHECK(dropped->stream->result().status == Status::kOverrun);
}

TEST_CASE("a request that waits for a slot or a slow reader does not hold up the others", "[engine]") {
  EngineOptions options;
  options.max_adapters_resident = 1;
  const auto engine = open(options);
  const auto pinned = load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/attn", "pinned");
  const auto other = load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/rslora", "other");
  ++pinned->pins;
  Request request = greedy_request({1, 2}, 4);
  request.adapter = pinned;
  const auto expected = run(*engine, request);
  request.adapter = other;
  const auto blocked = make_submission(*engine, request);
  engine->submit(blocked);
  CHECK(run(*engine, greedy_request({1, 2}, 4)).size() == 4);  // the base overtakes it
  request.adapter = pinned;
  CHECK(run(*engine, request) == expected);  // and so does the adapter that is there
  const auto queue = std::make_shared<CompletionQueue>();
  queue->expect(1);
  engine->prefetch_adapter(other, queue, 5, 6);
  Event event;
  bool closed = false;
  REQUIRE(queue->wait(5000, &event, 1, &closed) == 1);
  CHECK(event.status == Status::kDeviceNomem);
  --pinned->pins;
  engine->notify();
  CHECK(read_all(*blocked).size() == 4);

  EngineOptions narrow;
  narrow.max_num_sequences = 1;
  narrow.output_buffer_tokens = 4;
  const auto one = open(narrow);
  const auto unread = make_submission(*one, greedy_request({1, 2, 3}, 40));
  one->submit(unread);
  CHECK(comes_true([&] { return unread->stream->unread() == 4; }));
  CHECK(run(*one, greedy_request({7, 8}, 4)).size() == 4);
  CHECK(read_all(*unread) == run(*engine, greedy_request({1, 2, 3}, 40)));
}

TEST_CASE("a session continues where it stopped, forks and rolls back", "[engine][session]") {
  const auto engine = open();
  const auto adapter = load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/attn_experts", "x");
  const std::vector<int32_t> first = {11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30};
  const std::vector<int32_t> second = {31, 32, 33};
  // The same conversation in one piece.
  Request whole = greedy_request(first, 7);
  whole.adapter = adapter;
  const auto answer_one = run(*engine, whole);
  whole.prompt.insert(whole.prompt.end(), answer_one.begin(), answer_one.end());
  whole.prompt.insert(whole.prompt.end(), second.begin(), second.end());
  const auto answer_two = run(*engine, whole);

  const auto session = engine->create_session(adapter, 1.0f);
  Request turn = greedy_request(first, 7);
  turn.adapter = adapter;
  turn.session = session;
  CHECK(run(*engine, turn) == answer_one);
  CHECK(engine->session_info(session).num_tokens == 27);
  const auto fork = engine->fork_session(session);
  turn.prompt = second;
  RequestResult result;
  CHECK(run(*engine, turn, &result) == answer_two);
  CHECK(result.cached_tokens == 26);
  turn.session = fork;
  CHECK(run(*engine, turn, &result) == answer_two);
  CHECK(result.cached_tokens == 16);  // full blocks are shared, the tail is computed again

  engine->rollback_session(session, 27);
  turn.session = session;
  CHECK(run(*engine, turn) == answer_two);
  engine->rollback_session(session, 5);
  turn.prompt.assign(first.begin() + 5, first.end());
  CHECK(run(*engine, turn) == answer_one);

  // Dropped KV is computed again without a word.
  engine->trim(0);
  CHECK(comes_true([&] { return engine->session_info(session).num_computed == 0; }));
  turn.prompt = second;
  CHECK(run(*engine, turn, &result) == answer_two);
  CHECK(result.cached_tokens == 0);
  engine->close_session(session);
  engine->close_session(fork);
  CHECK(engine->stats().pages_kv == engine->stats().pages_cached);
}

TEST_CASE("cancel keeps or drops the turn of a session", "[engine][session]") {
  const auto engine = open();
  const auto session = engine->create_session(nullptr, 1.0f);
  Request turn = greedy_request({1, 2, 3, 4}, 5);
  turn.session = session;
  run(*engine, turn);
  REQUIRE(engine->session_info(session).num_tokens == 9);
  turn = greedy_request({5, 6}, 400);
  turn.session = session;
  std::string message;
  for (const bool drop : {true, false}) {
    const auto submission = make_submission(*engine, turn);
    engine->submit(submission);
    CHECK(refusal(*engine, turn, &message) == Status::kBusy);
    int32_t buffer[4];
    size_t count = 0;
    REQUIRE(submission->stream->read(5000, buffer, 4, &count) == Status::kOk);
    engine->cancel(submission, drop);
    RequestResult result;
    const size_t outputs = count + read_all(*submission, &result).size();
    CHECK(engine->session_info(session).num_tokens == (drop ? 9 : static_cast<int64_t>(11 + outputs)));
    engine->rollback_session(session, 9);
  }
}

TEST_CASE("bad requests are refused with their reason, the engine serves on", "[engine]") {
  EngineOptions options;
  options.max_queued_requests = 2;
  options.device_memory_bytes = 1 << 20;
  const auto engine = open(options);
  const auto expected = run(*engine, greedy_request({1, 2, 3}, 8));
  std::string message;
  CHECK(refusal(*engine, greedy_request({}, 8), &message) == Status::kInvalid);
  CHECK(message.find("empty") != std::string::npos);
  CHECK(refusal(*engine, greedy_request({1, 320}, 8), &message) == Status::kInvalid);
  CHECK(message.find("token 1") != std::string::npos);
  CHECK(message.find("320") != std::string::npos);
  CHECK(refusal(*engine, greedy_request({1, -1}, 8), &message) == Status::kInvalid);
  CHECK(refusal(*engine, greedy_request(std::vector<int32_t>(512, 1), 8), &message) == Status::kContextLength);
  CHECK(message.find("512") != std::string::npos);
  Request request = greedy_request({1}, 8);
  request.sampling.temperature = -1;
  CHECK(refusal(*engine, request, &message) == Status::kInvalid);
  CHECK(message.find("temperature") != std::string::npos);
  request.sampling.temperature = std::nanf("");
  CHECK(refusal(*engine, request, &message) == Status::kInvalid);
  request = greedy_request({1}, 0);
  CHECK(refusal(*engine, request, &message) == Status::kInvalid);
  CHECK(message.find("max_tokens") != std::string::npos);

  const auto adapter = load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/attn", "a");
  CHECK_THROWS_AS(load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/attn", "a"), Error);
  engine->unload_adapter(adapter, true);
  request = greedy_request({1}, 8);
  request.adapter = adapter;
  CHECK(refusal(*engine, request, &message) == Status::kNotFound);
  CHECK(run(*engine, greedy_request({1, 2, 3}, 8)) == expected);
  CHECK(engine->health(&message) == Status::kOk);
  CHECK(engine->drain(1000) == Status::kOk);
  CHECK(refusal(*engine, greedy_request({1}, 8), &message) == Status::kClosed);
}

TEST_CASE("what can never fit is refused at submit", "[engine]") {
  EngineOptions options;
  const auto roomy = open(options);
  options.device_memory_bytes = 4 * roomy->info().page_bytes;
  const auto tight = open(options);
  std::string message;
  CHECK(refusal(*tight, greedy_request(std::vector<int32_t>(50, 1), 100), &message) == Status::kDeviceNomem);
  CHECK(message.find("device_memory_bytes") != std::string::npos);
  CHECK(run(*tight, greedy_request({1, 2}, 8)).size() == 8);
  options.device_memory_bytes = 100;
  CHECK_THROWS_AS(open(options), Error);
}

TEST_CASE("releasing an engine ends what is running", "[engine]") {
  auto engine = open();
  const auto submission = make_submission(*engine, greedy_request({1, 2, 3}, 450));
  const auto session = engine->create_session(nullptr, 1.0f);
  engine->submit(submission);
  engine.reset();
  RequestResult result;
  read_all(*submission, &result);
  CHECK((result.status == Status::kClosed || result.finish == FinishReason::kLength));
}

}  // namespace moelora::test
