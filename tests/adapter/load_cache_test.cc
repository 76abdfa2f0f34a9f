// SPDX-License-Identifier: Apache-2.0
// LoadCache: a plan serves exactly the files it is of, memory that was used before changes nothing.
#include "runtime/adapter/load_cache.h"

#include <cstring>

#include "runtime/adapter/adapter_plan.h"
#include "tests/adapter/adapter_files.h"
#include "tests/support/adapter_folder.h"
#include "tests/support/catch.h"

namespace moelora::test {
namespace {

std::shared_ptr<AdapterPlan> plan_named(const std::string& header) {
  auto plan = std::make_shared<AdapterPlan>();
  plan->config_json = "config";
  plan->header = header;
  plan->facts.file_bytes = 100;
  return plan;
}

HostBytes memory_of(size_t bytes) {
  HostBytes memory;
  memory.resize(bytes);
  std::memset(memory.data(), 0xff, bytes);
  return memory;
}

}  // namespace

TEST_CASE("a plan is found for the same texts, size and meaning only") {
  LoadCache cache;
  const auto plan = plan_named("header");
  cache.keep_plan(plan);
  AdapterLoadOptions options;
  CHECK(cache.find_plan("config", "header", 100, options) == plan);
  CHECK(cache.find_plan("config ", "header", 100, options) == nullptr);
  CHECK(cache.find_plan("config", "header2", 100, options) == nullptr);
  CHECK(cache.find_plan("config", "header", 101, options) == nullptr);
  options.num_threads = 7;
  options.cache = std::make_shared<LoadCache>();
  CHECK(cache.find_plan("config", "header", 100, options) == plan);
  const auto with = [&](auto change) {
    AdapterLoadOptions other;
    change(other);
    return cache.find_plan("config", "header", 100, other);
  };
  CHECK(with([](AdapterLoadOptions& o) { o.max_rank = 8; }) == nullptr);
  CHECK(with([](AdapterLoadOptions& o) { o.lenient = true; }) == nullptr);
  CHECK(with([](AdapterLoadOptions& o) { o.compute = Compute::kBf16; }) == nullptr);
  CHECK(with([](AdapterLoadOptions& o) { o.orientation = ExpertOrientation::kReversed; }) == nullptr);
  CHECK(with([](AdapterLoadOptions& o) { o.b_layout = ExpertBLayout::kRankMajor; }) == nullptr);
}

TEST_CASE("few plans are kept, those asked for last, and none with warnings") {
  LoadCache cache;
  const AdapterLoadOptions options;
  const auto is_here = [&](int i) { return cache.find_plan("config", std::to_string(i), 100, options) != nullptr; };
  const auto warned = plan_named("warned");
  warned->warnings.emplace_back("of this file");
  cache.keep_plan(warned);
  CHECK(cache.find_plan("config", "warned", 100, options) == nullptr);
  for (int i = 0; i < 4; ++i) {
    cache.keep_plan(plan_named(std::to_string(i)));
    cache.keep_plan(plan_named(std::to_string(i)));  // of another thread, at the same time: one of them is kept
  }
  CHECK(is_here(0));
  cache.keep_plan(plan_named("4"));
  CHECK(!is_here(1));
  CHECK((is_here(0) && is_here(2) && is_here(3) && is_here(4)));
}

TEST_CASE("one memory is kept, and given to what needs most of it") {
  LoadCache cache;
  CHECK(cache.take_memory(1).empty());
  cache.keep_memory(memory_of(1000));
  cache.keep_memory(memory_of(500));
  CHECK(cache.take_memory(1001).empty());
  CHECK(cache.take_memory(880).empty());
  HostBytes taken = cache.take_memory(900);
  CHECK(taken.size() == 1000);
  CHECK(cache.take_memory(900).empty());
  taken.resize(10);  // its room counts, not what is used of it
  cache.keep_memory(std::move(taken));
  CHECK(cache.take_memory(10).empty());
  CHECK(cache.take_memory(1000).capacity() == 1000);
  cache.keep_memory(memory_of(1000));
  cache.free_memory();
  CHECK(cache.take_memory(1000).empty());
  const AdapterLoadOptions options;
  cache.keep_plan(plan_named("header"));
  cache.keep_memory(memory_of(1000));
  cache.clear();
  CHECK(cache.take_memory(1000).empty());
  CHECK(cache.find_plan("config", "header", 100, options) == nullptr);
}

TEST_CASE("as much memory is kept as the next loads will take, and of those that fit the smallest is given") {
  LoadCache cache;
  cache.keep_memory(memory_of(1000), 2100);
  cache.keep_memory(memory_of(1100), 2100);
  CHECK(cache.take_memory(995).capacity() == 1000);
  CHECK(cache.take_memory(995).capacity() == 1100);
  CHECK(cache.take_memory(995).empty());
  for (const size_t bytes : {1100, 500, 1000, 1050}) {
    cache.keep_memory(memory_of(bytes), 2150);  // the last two alone
  }
  CHECK(cache.take_memory(500).empty());
  CHECK(cache.take_memory(900).empty());
  CHECK(cache.take_memory(1050).capacity() == 1050);
  CHECK(cache.take_memory(1050).capacity() == 1100);
  cache.keep_memory(memory_of(1000), 3000);
  cache.keep_memory(memory_of(1050), 3000);
  cache.bound_memory(2050);
  cache.bound_memory(2049);
  CHECK(cache.take_memory(1000).capacity() == 1050);
  CHECK(cache.take_memory(1000).empty());
}

TEST_CASE("loads that share a plan and memory give what loads by themselves give") {
  const TempDir dir;
  const ModelConfig model = tiny_moe();
  AdapterLoadOptions shared;
  shared.cache = std::make_shared<LoadCache>();
  for (uint32_t seed = 0; seed < 3; ++seed) {
    const int32_t rank = seed < 2 ? 5 : 8;  // the second has the header of the first
    const std::string folder = write_adapter_folder(dir.file(std::to_string(seed)), model, rank, seed);
    const auto alone = load_adapter_dir(folder, model, {});
    shared.cache->keep_memory(memory_of(alone->stream.size() + 1024));
    const auto together = load_adapter_dir(folder, model, shared);
    CHECK(together->stream == alone->stream);
    CHECK(together->stream_bytes == alone->stream.size());
    CHECK(together->fingerprint == alone->fingerprint);
    CHECK(together->config_fingerprint == alone->config_fingerprint);
    CHECK(together->dir == alone->dir);
    CHECK(together->max_rank == rank);
    CHECK(together->num_tensors == alone->num_tensors);
    CHECK(together->dense_matrix_bytes == alone->dense_matrix_bytes);
    CHECK(together->dtype == alone->dtype);
    CHECK(together->alpha == alone->alpha);
    CHECK(shared.cache->take_memory(alone->stream.size()).empty());  // it was used
    shared.cache->keep_memory(memory_of(alone->stream.size() + 1024));
    const auto again = reload_adapter(*together, model, {});
    CHECK(again->stream == alone->stream);
    CHECK(again->fingerprint == alone->fingerprint);
  }
}

}  // namespace moelora::test
