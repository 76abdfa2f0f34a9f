// SPDX-License-Identifier: Apache-2.0
// The prefix cache in an engine: who reads whose blocks, and that answers are those of an engine without one.
#include <random>

#include "tests/engine/upload_support.h"

namespace moelora::test {
namespace {

const std::string kModel = "qwen3_moe";

std::shared_ptr<Engine> open(EngineOptions options = {}) {
  options.num_threads = 2;
  options.audit = 2;
  return Engine::create(test_options(options), case_dir(kModel) + "/model");
}

std::shared_ptr<Engine> open_without() {
  EngineOptions options;
  options.prefix_cache = false;
  return open(options);
}

struct Outcome {
  Answer answer;
  int32_t cached = -1;
};

Outcome run(Engine& engine, const Request& request) {
  const auto submission = make_submission(engine, request);
  engine.submit(submission);
  Outcome outcome;
  RequestResult result;
  outcome.answer.tokens = read_all(*submission, &result);
  CHECK(result.status == Status::kOk);
  outcome.answer.logits = captured(*submission, engine.info().config.vocab_size);
  outcome.cached = result.cached_tokens;
  return outcome;
}

// Its logits are kept from the last token of the prompt on.
Request asking(const std::vector<int32_t>& prompt, const std::shared_ptr<Adapter>& adapter = nullptr,
               float scale = 1.0f) {
  Request request = batch_request(prompt, adapter, scale);
  request.capture_from = static_cast<int32_t>(prompt.size()) - 1;
  return request;
}

std::vector<int32_t> prompt_of(unsigned seed, size_t length) {
  std::mt19937 random(seed);
  return random_prompt(random, length, 320);
}

// Everything that requests and sessions held is back.
void check_nothing_held(const Engine& engine) {
  const EngineStats stats = engine.stats();
  CHECK(stats.pages_kv == stats.pages_cached);
  CHECK(stats.pages_cached == stats.prefix_blocks * engine.info().pages_per_block);
}

}  // namespace

TEST_CASE("the second request with one adapter and prompt reads the blocks of the first", "[engine][prefix]") {
  const auto prompt = prompt_of(1, 50);
  for (const bool deterministic : {false, true}) {
    EngineOptions options;
    options.deterministic = deterministic;
    const auto engine = open(options);
    const auto cold = open_without();
    const auto load = [](Engine& of, const char* name) {
      return load_adapter(of, case_dir(kModel) + "/adapters/" + name, name);
    };
    const auto adapter = load(*engine, "attn_experts");
    const Outcome expected = run(*cold, asking(prompt, load(*cold, "attn_experts")));
    CHECK(expected.cached == 0);
    CHECK(run(*cold, asking(prompt, cold->find_adapter("attn_experts"))).cached == 0);
    CHECK(cold->stats().prefix_queries == 0);
    CHECK(cold->stats().pages_kv == 0);

    const Outcome first = run(*engine, asking(prompt, adapter));
    const Outcome second = run(*engine, asking(prompt, adapter));
    CHECK(first.cached == 0);
    CHECK(second.cached == 48);
    CHECK(first.answer == expected.answer);
    CHECK(second.answer == expected.answer);
    const EngineStats stats = engine->stats();
    CHECK(stats.prefix_queries == 2);
    CHECK(stats.prefix_query_tokens == 100);
    CHECK(stats.prefix_hit_tokens == 48);
    CHECK(stats.cached_tokens == 48);
    CHECK(stats.prompt_tokens == 52);
    CHECK(stats.prefix_blocks == 3);  // 50 + 8 tokens computed
    check_nothing_held(*engine);
    // One token is always computed, and so are those whose logits are kept.
    CHECK(run(*engine, asking({prompt.begin(), prompt.begin() + 32}, adapter)).cached == 16);
    Request all = asking(prompt, adapter);
    all.capture_from = 20;
    CHECK(run(*engine, all).cached == 16);
    // Longer ones go on behind, through what was output.
    std::vector<int32_t> longer = prompt;
    longer.insert(longer.end(), first.answer.tokens.begin(), first.answer.tokens.end());
    longer.resize(70, 7);
    const Outcome third = run(*engine, asking(longer, adapter));
    CHECK(third.cached == 48);
    CHECK(third.answer == run(*cold, asking(longer, cold->find_adapter("attn_experts"))).answer);
    CHECK(run(*engine, asking(longer, adapter)).cached == 64);
  }
}

TEST_CASE("another adapter, scale or salt reads none of them", "[engine][prefix]") {
  const auto prompt = prompt_of(2, 40);
  const auto engine = open();
  const auto cold = open_without();
  std::vector<Request> requests[2];
  for (const int side : {0, 1}) {
    Engine& of = side == 0 ? *engine : *cold;
    const auto a = load_adapter(of, case_dir(kModel) + "/adapters/attn", "a");
    const auto b = load_adapter(of, case_dir(kModel) + "/adapters/experts", "b");
    const auto clone = of.register_adapter("clone", a->image, 0.5f, false);
    const auto again = load_adapter(of, case_dir(kModel) + "/adapters/attn", "again");
    requests[side] = {asking(prompt),          asking(prompt, a),     asking(prompt, a, 0.5f), asking(prompt, a, -1.0f),
                      asking(prompt, b),       asking(prompt, again), asking(prompt),          asking(prompt, a),
                      asking(prompt, a, 0.0f), asking(prompt, clone), asking(prompt, clone)};
    requests[side][6].cache_salt = requests[side][7].cache_salt = "tenant";
    requests[side][10].scale = 2.0f;
  }
  for (size_t i = 0; i < requests[0].size(); ++i) {
    INFO("request " << i);
    const Outcome outcome = run(*engine, requests[0][i]);
    CHECK(outcome.answer == run(*cold, requests[1][i]).answer);
    // Scale 0 is the base; a clone at half the scale is the adapter at half the scale.
    CHECK(outcome.cached == (i < 8 ? 0 : 32));
  }
  for (const Request& request : requests[0]) {
    CHECK(run(*engine, request).cached == 32);
  }
  check_nothing_held(*engine);
}

TEST_CASE("what was computed with an adapter outlives its place on the device, not the adapter", "[engine][prefix]") {
  const auto prompt = prompt_of(3, 40);
  EngineOptions options;
  options.max_adapters_resident = 1;
  const auto engine = open(options);
  const auto image = [&](uint64_t seed) { return random_adapter(engine->info().config, 8, true, true, seed); };
  const auto first = engine->register_adapter("a", image(1), 1.0f, false);
  const auto other = engine->register_adapter("b", image(2), 1.0f, false);
  const Outcome expected = run(*engine, asking(prompt, first));
  CHECK(run(*engine, asking(prompt, other)).cached == 0);
  CHECK(engine->stats().adapter_evictions == 1);
  const Outcome back = run(*engine, asking(prompt, first));
  CHECK(back.cached == 32);
  CHECK(back.answer == expected.answer);

  // Reloaded under the same name with other weights: the old one's blocks are not read, and go with it.
  const auto reloaded = engine->register_adapter("a", image(3), 1.0f, true);
  const Outcome changed = run(*engine, asking(prompt, reloaded));
  CHECK(changed.cached == 0);
  CHECK(changed.answer.logits != expected.answer.logits);
  const auto cold = open_without();
  const auto same = cold->register_adapter("a", image(3), 1.0f, false);
  CHECK(changed.answer == run(*cold, asking(prompt, same)).answer);

  const int64_t blocks = engine->stats().prefix_blocks;
  const auto clone = engine->register_adapter("clone", first->image, 1.0f, false);
  engine->unload_adapter(first, true);
  CHECK(engine->stats().prefix_blocks == blocks);  // the clone may ask for them
  CHECK(run(*engine, asking(prompt, clone)).cached == 32);
  Request unread = asking(prompt, clone);
  unread.sampling.max_tokens = 60;
  const auto in_flight = make_submission(*engine, unread);
  engine->submit(in_flight);
  engine->unload_adapter(clone, false);
  CHECK(read_all(*in_flight).size() == 60);
  CHECK(comes_true([&] { return engine->stats().prefix_blocks == blocks - 3; }));
  CHECK(engine->stats().prefix_evictions == 0);
  CHECK(run(*engine, asking(prompt, other)).cached == 32);
  check_nothing_held(*engine);
}

TEST_CASE("blocks are read while those who computed them run", "[engine][prefix]") {
  EngineOptions options;
  options.output_buffer_tokens = 4;
  options.max_batch_tokens = 20;  // chunks end inside blocks
  options.max_num_sequences = 4;
  const auto engine = open(options);
  const auto cold = open_without();
  const auto prompt = prompt_of(4, 100);
  const auto expected = run(*cold, asking(prompt)).answer;
  Request request = asking(prompt);
  request.sampling.max_tokens = 30;
  const auto running = make_submission(*engine, request);
  engine->submit(running);
  CHECK(comes_true([&] { return running->stream->unread() == 4; }));
  const Outcome beside = run(*engine, asking(prompt));
  CHECK(beside.cached == 96);
  CHECK(beside.answer == expected);
  CHECK(read_all(*running).size() == 30);
  check_nothing_held(*engine);
}

TEST_CASE("a prompt goes on behind another that has come further", "[engine][prefix]") {
  EngineOptions options;
  options.max_batch_tokens = 150;
  const auto engine = open(options);
  const auto cold = open_without();
  const auto prompt = prompt_of(5, 100);
  const auto expected = run(*cold, asking(prompt)).answer;
  std::vector<std::shared_ptr<Submission>> submissions;
  for (int i = 0; i < 3; ++i) {
    submissions.push_back(make_submission(*engine, asking(prompt)));
  }
  std::vector<Error> errors;
  engine->submit_batch(submissions, &errors);
  // In the first step the first computes 100 and the second 50, up to the middle of a block.
  const int32_t cached[] = {0, 46, 96};
  for (size_t i = 0; i < 3; ++i) {
    RequestResult result;
    Answer answer;
    answer.tokens = read_all(*submissions[i], &result);
    answer.logits = captured(*submissions[i], engine->info().config.vocab_size);
    CHECK(answer == expected);
    CHECK(result.cached_tokens == cached[i]);
  }
  CHECK(engine->stats().prompt_tokens == 100 + 54 + 4);
  check_nothing_held(*engine);
}

TEST_CASE("sessions read and leave cached blocks, turns of different salts do not mix", "[engine][prefix][session]") {
  const auto engine = open();
  const auto cold = open_without();
  const auto prompt = prompt_of(6, 40);
  const auto more = prompt_of(7, 30);
  std::vector<Outcome> outcomes[2];
  for (const int side : {0, 1}) {
    Engine& of = side == 0 ? *engine : *cold;
    const auto turn = [&](const std::shared_ptr<Session>& session, const std::vector<int32_t>& tokens,
                          const char* salt) {
      Request request = asking(tokens);
      request.session = session;
      request.cache_salt = salt;
      outcomes[side].push_back(run(of, request));
    };
    outcomes[side].push_back(run(of, asking(prompt)));
    const auto session = of.create_session(nullptr, 1.0f);
    turn(session, prompt, "");
    const auto fork = of.fork_session(session);
    turn(session, more, "secret");
    turn(fork, more, "");
    of.close_session(session);
    of.close_session(fork);
    std::vector<int32_t> whole = prompt;
    const auto& said = outcomes[side][1].answer.tokens;
    whole.insert(whole.end(), said.begin(), said.end());
    whole.insert(whole.end(), more.begin(), more.end());
    outcomes[side].push_back(run(of, asking(whole)));
  }
  for (size_t i = 0; i < outcomes[0].size(); ++i) {
    INFO("outcome " << i);
    CHECK(outcomes[0][i].answer == outcomes[1][i].answer);
  }
  CHECK(outcomes[0][1].cached == 32);
  CHECK(outcomes[0][2].cached == 48);  // its own
  CHECK(outcomes[0][3].cached == 48);  // not what the salted turn computed
  CHECK(outcomes[0][4].cached == 64);  // what the fork did
  CHECK(outcomes[1][3].cached == 48);
  CHECK(outcomes[1][4].cached == 0);
  check_nothing_held(*engine);
}

TEST_CASE("cached blocks refuse and preempt nobody", "[engine][prefix]") {
  const auto roomy = open();
  EngineOptions options;
  options.device_memory_bytes = 12 * roomy->info().pages_per_block * roomy->info().page_bytes;
  const auto engine = open(options);
  for (unsigned i = 0; i < 20; ++i) {  // 3 blocks stay of each
    CHECK(run(*engine, asking(prompt_of(100 + i, 44))).cached == 0);
  }
  CHECK(engine->stats().pages_free < 3 * engine->info().pages_per_block);
  // The whole pool is there for one who wants it.
  const auto prompt = prompt_of(8, 150);
  Request request = asking(prompt);
  request.sampling.max_tokens = 12 * 16 - 150;
  CHECK(run(*engine, request).answer.tokens == run(*roomy, request).answer.tokens);
  CHECK(engine->stats().preemptions == 0);
  engine->trim(0);
  CHECK(comes_true([&] { return engine->stats().pages_kv == 0; }));
  CHECK(engine->stats().prefix_blocks == 0);
}

TEST_CASE("blocks that nobody asks for again leave before older idle adapters", "[engine][prefix]") {
  const auto roomy = open();
  const auto image = [&](uint64_t seed) { return random_adapter(roomy->info().config, 8, true, true, seed); };
  const auto page_bytes = roomy->info().page_bytes;
  const auto image_pages = (static_cast<int64_t>(image(1)->stream.size()) + page_bytes - 1) / page_bytes;
  EngineOptions options;
  options.device_memory_bytes = (2 * image_pages + 20 * roomy->info().pages_per_block) * page_bytes;
  const auto engine = open(options);
  const auto a = engine->register_adapter("a", image(1), 1.0f, false);
  const auto b = engine->register_adapter("b", image(2), 1.0f, false);
  CHECK(run(*engine, asking(prompt_of(11, 5), a)).cached == 0);
  CHECK(run(*engine, asking(prompt_of(11, 5), b)).cached == 0);
  for (unsigned i = 0; i < 60; ++i) {
    CHECK(run(*engine, asking(prompt_of(200 + i, 44))).cached == 0);
  }
  CHECK(engine->stats().prefix_evictions > 100);
  CHECK(engine->stats().adapter_evictions == 0);
  CHECK(engine->stats().adapters_resident == 2);
}

TEST_CASE("a preempted request finds its own blocks again", "[engine][prefix]") {
  EngineOptions options;
  options.max_num_sequences = 1;
  options.output_buffer_tokens = 4;
  const auto engine = open(options);
  const auto cold = open_without();
  const auto prompt = prompt_of(9, 100);
  Request request = asking(prompt);
  request.sampling.max_tokens = 40;
  request.capture_from = -1;
  const auto expected = run(*cold, request).answer.tokens;
  const auto unread = make_submission(*engine, request);
  engine->submit(unread);
  CHECK(comes_true([&] { return unread->stream->unread() == 4; }));
  CHECK(run(*engine, asking(prompt_of(10, 5))).cached == 0);  // takes its only row
  RequestResult result;
  CHECK(read_all(*unread, &result) == expected);
  CHECK(result.preemptions == 1);
  CHECK(result.cached_tokens == 0);
  CHECK(engine->stats().prefix_hit_tokens == 96);
  CHECK(engine->stats().prompt_tokens == 105 + 4);
}

TEST_CASE("any mix of prompts, adapters, scales and salts in a tight pool answers as without a cache",
          "[engine][prefix]") {
  const auto cold = open_without();
  EngineOptions options;
  options.max_num_sequences = 6;
  options.max_batch_tokens = 48;
  options.max_adapters_resident = 2;
  options.device_memory_bytes = 40 * cold->info().page_bytes;
  const auto engine = open(options);
  const auto load = [](Engine& of) {
    std::vector<std::shared_ptr<Adapter>> adapters = {nullptr};
    for (const char* name : {"attn", "experts", "rslora"}) {
      adapters.push_back(load_adapter(of, case_dir(kModel) + "/adapters/" + name, name));
    }
    return adapters;
  };
  const auto adapters = load(*engine);
  const auto cold_adapters = load(*cold);
  std::mt19937 random(12);
  std::vector<std::vector<int32_t>> openings;
  for (unsigned i = 0; i < 4; ++i) {
    openings.push_back(prompt_of(50 + i, 20 + 30 * (i % 3)));
  }
  for (int wave = 0; wave < 6; ++wave) {
    std::vector<Request> requests;
    std::vector<Request> cold_requests;
    for (int i = 0; i < 14; ++i) {
      Request request = asking(openings[random() % openings.size()]);
      const auto rest = random_prompt(random, random() % 30, 320);
      request.prompt.insert(request.prompt.end(), rest.begin(), rest.end());
      request.capture_from = random() % 4 == 0 ? static_cast<int32_t>(random() % request.prompt.size()) : -1;
      request.sampling.max_tokens = 1 + static_cast<int32_t>(random() % 80);
      request.scale = random() % 3 == 0 ? 0.5f : 1.0f;
      request.cache_salt = random() % 4 == 0 ? "salt" : "";
      request.priority = static_cast<int32_t>(random() % 2);
      const size_t adapter = random() % adapters.size();
      request.adapter = cold_adapters[adapter];
      cold_requests.push_back(request);
      request.adapter = adapters[adapter];
      requests.push_back(std::move(request));
    }
    const auto expected = answers(*cold, cold_requests);
    const auto got = answers(*engine, requests);
    for (size_t i = 0; i < got.size(); ++i) {
      INFO("wave " << wave << " request " << i);
      CHECK(got[i] == expected[i]);
    }
  }
  const EngineStats stats = engine->stats();
  CHECK(stats.prefix_hit_tokens > 500);
  CHECK(stats.prefix_evictions > 50);
  CHECK(stats.adapter_evictions > 5);
  CHECK(stats.preemptions > 0);
  check_nothing_held(*engine);
}

}  // namespace moelora::test
