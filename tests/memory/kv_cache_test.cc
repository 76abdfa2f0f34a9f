// SPDX-License-Identifier: Apache-2.0
#include "runtime/memory/kv_cache.h"

#include "tests/support/catch.h"

namespace moelora::test {

TEST_CASE("page geometry of real shapes wastes nothing", "[kv_cache]") {
  struct Shape {
    const char* name;
    int32_t layers, kv_heads, head_dim;
    Dtype dtype;
  };
  for (const Shape& shape : {Shape{"Qwen3-30B-A3B", 48, 4, 128, Dtype::kBf16},
                             Shape{"gpt-oss-20b", 24, 8, 64, Dtype::kBf16}, Shape{"OLMoE", 16, 16, 128, Dtype::kF32},
                             Shape{"SmolLM2", 30, 3, 64, Dtype::kF32}, Shape{"Mixtral", 32, 8, 128, Dtype::kBf16}}) {
    INFO(shape.name);
    const KvGeometry geometry = choose_kv_geometry(shape.layers, shape.kv_heads, shape.head_dim, 16, shape.dtype);
    const int64_t used = int64_t{2} * shape.layers * shape.kv_heads * shape.head_dim * 16 *
                         static_cast<int64_t>(dtype_bytes(shape.dtype));
    CHECK(geometry.layout.num_groups * geometry.page_bytes == used);
    CHECK(geometry.page_bytes % 2048 == 0);  // an even number of granules
    CHECK(geometry.layout.layers_per_page * geometry.layout.num_groups >= shape.layers);
  }
  // 16 tokens x 1 layer of Qwen3-30B-A3B in bf16 are 32 KiB; four of them make 128 KiB.
  const KvGeometry qwen = choose_kv_geometry(48, 4, 128, 16, Dtype::kBf16);
  CHECK(qwen.page_bytes == 128 << 10);
  CHECK(qwen.layout.layers_per_page == 4);
}

TEST_CASE("layers and blocks of a sequence never overlap", "[kv_cache]") {
  const KvGeometry geometry = choose_kv_geometry(5, 3, 20, 16, Dtype::kF32);
  const auto device = open_device_cpu();
  PagePool pool(64, geometry.page_bytes, *device);
  KvSequence sequence(pool, geometry, 100);
  REQUIRE(sequence.try_extend(geometry, 40));
  KvView view;
  view.layout = geometry.layout;
  view.pool = pool.base();
  view.page_bytes = geometry.page_bytes;
  view.block_tables = sequence.pages.data();
  view.max_blocks = 3;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int32_t position : {0, 16, 32}) {
    for (int32_t layer = 0; layer < 5; ++layer) {
      const int64_t begin = view.block(0, position, layer) - pool.base();
      ranges.emplace_back(begin, begin + 2 * view.elements() * 4);
    }
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 0; i + 1 < ranges.size(); ++i) {
    CHECK(ranges[i].second <= ranges[i + 1].first);
  }
  CHECK(ranges.back().second <= pool.num_pages() * geometry.page_bytes);
}

TEST_CASE("fork shares full blocks, and only a private block is written", "[kv_cache]") {
  const KvGeometry geometry = choose_kv_geometry(2, 2, 16, 16, Dtype::kF32);
  const auto device = open_device_cpu();
  PagePool pool(64, geometry.page_bytes, *device);
  KvSequence parent(pool, geometry, 200);
  REQUIRE(parent.try_extend(geometry, 40));
  parent.length = 40;
  const int32_t free_before = pool.num_free();
  KvSequence fork(pool, geometry, 200);
  fork.fork_from(geometry, parent);
  CHECK(fork.length == 32);
  CHECK(pool.num_free() == free_before);
  // Rolled back into a shared block: the block is given up, not written.
  fork.truncate(geometry, 20);
  CHECK(fork.length == 20);
  fork.make_tail_private(geometry, pool);
  CHECK(fork.length == 16);
  CHECK(fork.pages.size() == geometry.layout.num_groups);
  CHECK(parent.length == 40);
  // The parent's own tail is private and stays.
  parent.make_tail_private(geometry, pool);
  CHECK(parent.length == 40);
  pool.audit();
}

}  // namespace moelora::test
