// SPDX-License-Identifier: Apache-2.0
// Adapters that requests find on the device: which count as hits, and those that the queue brings there ahead of need.
#include "tests/engine/upload_support.h"

namespace moelora::test {
namespace {

int64_t pages_of(const Setup& setup, const Adapter& adapter) {
  const int64_t page_bytes = setup.engine->info().page_bytes;
  return (static_cast<int64_t>(adapter.image->stream.size()) + page_bytes - 1) / page_bytes;
}

int64_t kv_pages(const Setup& setup, int64_t tokens) {
  return (tokens + 15) / 16 * setup.engine->info().pages_per_block;
}

}  // namespace

TEST_CASE("a request counts one hit however often it could not start", "[engine]") {
  const Setup quiet;
  const auto sample = quiet.adapter(1);
  EngineOptions options;
  options.device_memory_bytes =
      (pages_of(quiet, *sample) + kv_pages(quiet, 300) + kv_pages(quiet, 100)) * quiet.engine->info().page_bytes;
  options.output_buffer_tokens = 30;
  const Setup setup(options);
  const auto adapter = setup.adapter(1);
  const auto running = setup.submit(request_of({5, 6, 7}, 290, adapter));
  CHECK(comes_true([&] { return running->stream->unread() > 0; }));
  CHECK(adapter->loads == 1);
  CHECK(adapter->hits == 0);
  std::vector<std::shared_ptr<Submission>> waiting;
  for (int32_t i = 0; i < 4; ++i) {  // the adapter is there, pages for their prompts are not
    waiting.push_back(setup.submit(request_of(std::vector<int32_t>(250, i), 4, adapter)));
  }
  CHECK(read_all(*running).size() == 290);
  for (const auto& submission : waiting) {
    CHECK(read_all(*submission).size() == 4);
  }
  CHECK(adapter->loads == 1);
  CHECK(adapter->hits == 4);
  CHECK(setup.engine->stats().adapter_hits == 4);
  // A prefetch is no request.
  const auto queue = std::make_shared<CompletionQueue>();
  queue->expect(1);
  setup.engine->prefetch_adapter(adapter, queue, 1, 1);
  CHECK(ready_status(*queue) == Status::kOk);
  CHECK(adapter->hits == 4);
}

}  // namespace moelora::test
