// SPDX-License-Identifier: Apache-2.0
// MOELORA_EVENT_ENGINE_FAILED: each completion queue that the engine knows gets it once, behind all other events.
#include "tests/engine/upload_support.h"

namespace moelora::test {
namespace {

std::shared_ptr<Submission> submit_to(const Engine& engine, const std::shared_ptr<CompletionQueue>& queue,
                                      int32_t max_tokens) {
  auto submission = std::make_shared<Submission>();
  submission->request = request_of({1, 2, 3}, max_tokens);
  submission->stream = std::make_unique<TokenStream>(submission->request, engine.info().config.vocab_size, queue, 1, 0);
  return submission;
}

// All events up to the failure of the engine, and those that come right after.
std::vector<Event> events_of(CompletionQueue& queue, bool fails) {
  std::vector<Event> events;
  Event event;
  bool closed = false;
  while (queue.wait(fails ? 20000 : 50, &event, 1, &closed) == 1) {
    events.push_back(event);
    fails = fails && event.kind != EventKind::kEngineFailed;
  }
  return events;
}

int64_t count_failed(const std::vector<Event>& events) {
  return std::count_if(events.begin(), events.end(),
                       [](const Event& event) { return event.kind == EventKind::kEngineFailed; });
}

}  // namespace

TEST_CASE("an engine that fails tells each queue that it knows, once and last", "[engine]") {
  for (const bool of_upload : {false, true}) {
    INFO("the failure shows in an upload: " << of_upload);
    const Setup setup({}, false);
    if (of_upload) {
      setup.plan->chunk_queued = [&, gate = setup.gate] {
        gate->pass();
        throw Error(Status::kDeviceLost, "a copy: made to fail");
      };
    }
    std::vector<std::shared_ptr<CompletionQueue>> queues;
    for (int i = 0; i < 3; ++i) {
      queues.push_back(std::make_shared<CompletionQueue>());
    }
    const auto gone = std::make_shared<CompletionQueue>();
    const auto stranger = std::make_shared<CompletionQueue>();
    std::vector<std::shared_ptr<Submission>> submissions;
    for (int i = 0; i < 6; ++i) {  // two queues, each of three requests
      submissions.push_back(submit_to(*setup.engine, queues[static_cast<size_t>(i % 2)], 2000));
    }
    submissions.push_back(submit_to(*setup.engine, nullptr, 2000));
    const auto finished = submit_to(*setup.engine, gone, 1);
    setup.engine->submit(finished);
    CHECK(read_all(*finished).size() == 1);
    gone->close();
    std::vector<Error> errors;
    setup.engine->submit_batch(submissions, &errors);
    const auto adapter = setup.adapter(1);
    for (int i = 0; i < 2; ++i) {
      queues[2]->expect(1);
      setup.engine->prefetch_adapter(adapter, queues[2], 5, 6);
    }
    setup.gate->wait_for_upload();
    if (of_upload) {
      setup.gate->open();
    } else {
      setup.plan->lost = true;
    }
    for (const auto& queue : queues) {
      const std::vector<Event> events = events_of(*queue, true);
      REQUIRE(!events.empty());
      CHECK(count_failed(events) == 1);
      CHECK(events.back().kind == EventKind::kEngineFailed);
      CHECK(events.back().status == Status::kDeviceLost);
      CHECK(events.back().handle == 0);
    }
    setup.gate->open();
    CHECK(setup.engine->health(nullptr) == Status::kDeviceLost);
    // Who comes later hears it from the call.
    CHECK_THROWS_AS(setup.engine->submit(submit_to(*setup.engine, stranger, 1)), Error);
    Event event;
    bool closed = false;
    CHECK(stranger->wait(20, &event, 1, &closed) == 0);
    for (const auto& submission : submissions) {
      read_all(*submission);
    }
  }
}

TEST_CASE("a released engine tells no queue that it failed, and keeps none alive", "[engine]") {
  Setup setup;
  const auto queue = std::make_shared<CompletionQueue>();
  const auto running = submit_to(*setup.engine, queue, 2000);
  setup.engine->submit(running);
  std::vector<std::weak_ptr<CompletionQueue>> dead;
  for (int i = 0; i < 200; ++i) {  // one a request, as some hosts have it
    const auto own = std::make_shared<CompletionQueue>();
    const auto submission = submit_to(*setup.engine, own, 1);
    setup.engine->submit(submission);
    read_all(*submission);
    dead.push_back(own);
  }
  CHECK(comes_true(
      [&] { return std::all_of(dead.begin(), dead.end(), [](const auto& held) { return held.expired(); }); }));
  setup.engine.reset();
  CHECK(count_failed(events_of(*queue, false)) == 0);
}

}  // namespace moelora::test
