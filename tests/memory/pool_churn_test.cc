// SPDX-License-Identifier: Apache-2.0
// The pool under the sizes of two real models: leases of KV and of adapters of mixed ranks come and go at random, and
// nearly every leased byte holds something. Nothing is written, so the pages take no memory.
#include <random>
#include <vector>

#include "runtime/engine/memory_plan.h"
#include "runtime/memory/kv_cache.h"
#include "tests/support/catch.h"

namespace moelora::test {
namespace {

struct Shape {
  const char* name;
  int32_t layers, hidden, heads, kv_heads, head_dim, experts, intermediate;
};
constexpr Shape kShapes[] = {{"Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 128, 768},
                             {"gpt-oss-20b", 24, 2880, 64, 8, 64, 32, 2880}};

ModelConfig config_of(const Shape& shape) {
  ModelConfig config;
  config.num_layers = shape.layers;
  config.hidden_size = shape.hidden;
  config.num_heads = shape.heads;
  config.num_kv_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.num_experts = shape.experts;
  config.moe_intermediate_size = shape.intermediate;
  config.layer_is_moe.assign(static_cast<size_t>(shape.layers), 1);
  return config;
}

// What a random adapter may be: all linears, or attention alone (the same model without experts or an MLP).
int64_t draw_stream_bytes(ModelConfig config, std::mt19937& random) {
  constexpr int32_t kRanks[] = {4, 8, 8, 8, 16, 16, 20, 32, 64};
  const int32_t rank = kRanks[random() % std::size(kRanks)];
  if (random() % 16 != 0) {
    config.layer_is_moe.assign(config.layer_is_moe.size(), 0);
    config.intermediate_size = 0;
  }
  return static_cast<int64_t>(adapter_stream_bytes(config, rank));
}

struct Held {
  PageLease lease;
  int64_t bytes = 0;     // of a stream, or of full blocks
  int64_t unfilled = 0;  // of them, positions without a token
  bool is_adapter = false;
};

class Churn {
 public:
  explicit Churn(const Shape& shape)
      : config_(config_of(shape)),
        geometry_(choose_kv_geometry(shape.layers, shape.kv_heads, shape.head_dim, 16, Dtype::kBf16)),
        pool_(static_cast<int32_t>((int64_t{32} << 30) / geometry_.page_bytes), geometry_.page_bytes, *device_) {}

  void step() {
    const bool is_adapter = random_() % 10 == 0;
    Held held;
    int32_t pages = 0;
    if (is_adapter) {
      held.bytes = draw_stream_bytes(config_, random_);
      pages = static_cast<int32_t>((held.bytes + geometry_.page_bytes - 1) / geometry_.page_bytes);
    } else {
      const auto tokens = static_cast<int64_t>(1 + random_() % 8192);
      pages = geometry_.pages(tokens);
      const int64_t room = int64_t{geometry_.blocks(tokens)} * geometry_.layout.block_tokens;
      held.bytes = room * geometry_.token_bytes();
      held.unfilled = (room - tokens) * geometry_.token_bytes();
    }
    held.lease = PageLease(pool_, is_adapter ? PageUse::kAdapter : PageUse::kKv, pages);
    for (int32_t before = pool_.num_free(); !held.lease.try_grow(pages); before = pool_.num_free()) {
      REQUIRE(before < pages);
      REQUIRE(pool_.num_free() == before);  // all or nothing
      drop(random_() % held_.size());
    }
    used_ += held.bytes;
    unfilled_ += held.unfilled;
    leased_ += pages;
    adapters_used_ += is_adapter ? held.bytes : 0;
    adapters_leased_ += is_adapter ? pages : 0;
    held.is_adapter = is_adapter;
    held_.push_back(std::move(held));
    if (random_() % 3 == 0) {
      drop(random_() % held_.size());
    }
  }
  void drop(size_t index) {
    used_ -= held_[index].bytes;
    unfilled_ -= held_[index].unfilled;
    leased_ -= held_[index].lease.size();
    adapters_used_ -= held_[index].is_adapter ? held_[index].bytes : 0;
    adapters_leased_ -= held_[index].is_adapter ? held_[index].lease.size() : 0;
    std::swap(held_[index], held_.back());
    held_.pop_back();
  }
  void drop_all() {
    while (!held_.empty()) {
      drop(held_.size() - 1);
    }
  }
  // Whatever the history: every free page serves one request for all of them.
  void take_all_free() {
    PageLease all(pool_, PageUse::kAdapter, pool_.num_free());
    REQUIRE(all.try_grow(pool_.num_free()));
    REQUIRE(pool_.num_free() == 0);
  }
  [[nodiscard]] double used_share() const {
    return static_cast<double>(used_) / (static_cast<double>(leased_) * static_cast<double>(geometry_.page_bytes));
  }
  [[nodiscard]] double unfilled_share() const {
    return static_cast<double>(unfilled_) / (static_cast<double>(leased_) * static_cast<double>(geometry_.page_bytes));
  }
  [[nodiscard]] double used_share_of_adapters() const {
    return static_cast<double>(adapters_used_) /
           (static_cast<double>(adapters_leased_) * static_cast<double>(geometry_.page_bytes));
  }
  [[nodiscard]] int64_t num_leased() const { return leased_; }
  [[nodiscard]] const PagePool& pool() const { return pool_; }
  [[nodiscard]] const KvGeometry& geometry() const { return geometry_; }

 private:
  ModelConfig config_;
  KvGeometry geometry_;
  std::unique_ptr<Device> device_ = open_device_cpu();
  PagePool pool_;
  std::vector<Held> held_;
  std::mt19937 random_{17};
  int64_t used_ = 0, unfilled_ = 0, leased_ = 0;  // leased in pages, the others in bytes
  int64_t adapters_used_ = 0, adapters_leased_ = 0;
};

}  // namespace

TEST_CASE("churn of KV and adapters at the sizes of real models: 98 % of the leased bytes are in use", "[page_pool]") {
  for (const Shape& shape : kShapes) {
    Churn churn(shape);
    const int32_t total = churn.pool().num_pages();
    double worst = 1;
    double worst_of_adapters = 1;
    double unfilled = 0;
    int64_t fullest = 0;
    for (int step = 0; step < 100000; ++step) {
      churn.step();
      REQUIRE(churn.pool().num_free() == total - churn.num_leased());
      fullest = std::max(fullest, churn.num_leased());
      if (step > 100) {
        worst = std::min(worst, churn.used_share());
        worst_of_adapters = std::min(worst_of_adapters, churn.used_share_of_adapters());
        unfilled = std::max(unfilled, churn.unfilled_share());
      }
      if (step % 1000 == 0) {
        churn.take_all_free();
        churn.pool().audit();
      }
    }
    INFO(shape.name << ": pages of " << churn.geometry().page_bytes << " bytes, at worst " << 100 * worst
                    << " (adapters alone " << 100 * worst_of_adapters << ")"
                    << " % of the leased bytes in use, of which partly filled blocks lack at most " << 100 * unfilled
                    << " %");
    CHECK(worst >= 0.98);
    CHECK(worst_of_adapters >= 0.98);
    CHECK(unfilled < 0.05);
    CHECK(static_cast<double>(fullest) > 0.99 * total);  // it was a matter of space
    churn.drop_all();
    CHECK(churn.pool().num_free() == total);
    CHECK(churn.pool().num_leases() == 0);
    churn.take_all_free();
    churn.pool().audit();
  }
}

TEST_CASE("the page size wastes at most 2 % of a block's bytes whatever the number of layers", "[kv_cache]") {
  for (int32_t layers = 8; layers <= 128; ++layers) {
    for (const auto [kv_heads, head_dim] : {std::pair{4, 128}, std::pair{8, 64}, std::pair{8, 128}, std::pair{2, 64}}) {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
        const KvGeometry geometry = choose_kv_geometry(layers, kv_heads, head_dim, 16, dtype);
        INFO(layers << " layers, " << kv_heads << " x " << head_dim << ": " << geometry.reason);
        const int64_t used = int64_t{2} * layers * kv_heads * head_dim * 16 * static_cast<int64_t>(dtype_bytes(dtype));
        const int64_t taken = geometry.layout.num_groups * geometry.page_bytes;
        CHECK(geometry.wasted_block_bytes() == taken - used);
        CHECK(static_cast<double>(taken - used) <= 0.02 * static_cast<double>(taken));
        CHECK(geometry.page_bytes >= 16 << 10);
      }
    }
  }
}

}  // namespace moelora::test
