// SPDX-License-Identifier: Apache-2.0
// The expert products of many tokens with several adapters in a tile of tokens: ranks that fill a step, share one or
// need several, modules that an adapter lacks, tiles whose tokens have an adapter each, widths that end inside a tile.
// What holds for every path is tested in moe_gate_up_test_cuda and moe_down_test_cuda.
#include "tests/kernels/moe_device_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kAllBits = kGateBit | kUpBit | kDownBit;

void check(DeviceMoe& moe) {
  for (const ExpertPath path : kPaths) {
    if (!is_many_tokens(path)) {
      continue;
    }
    INFO(describe(moe.shape, moe.store, path));
    if (moe.store != Store::kTiles || moe.shape.hidden % 32 == 0) {
      for (const MoeActivation activation : {MoeActivation::kSilu, MoeActivation::kClampedSwiglu}) {
        const Dtype dtype = activation == MoeActivation::kSilu ? Dtype::kF32 : Dtype::kBf16;
        INFO("activation " << static_cast<int>(activation));
        const std::vector<float> act = moe.run_gate_up(path, activation, dtype);
        CHECK(moe.error_gate_up(act, activation) <= moe_tolerance(dtype));
        CHECK(same_bits(act, moe.run_gate_up(path, activation, dtype)));
      }
    }
    if (moe.store == Store::kRows || (moe.store == Store::kTiles && moe.shape.intermediate % 32 == 0)) {
      const std::vector<float> out = moe.run_down(path, Dtype::kF32);
      CHECK(moe.error_down(out) <= moe_tolerance(Dtype::kF32));
      CHECK(same_bits(out, moe.run_down(path, Dtype::kF32)));
    }
    CHECK(moe.intact);
  }
}

// Twelve of them: every rank with every choice of modules in turn.
std::vector<TestAdapter> mixed_adapters(DeviceMoe& moe) {
  constexpr int32_t kRanks[] = {1, 8, 12, 32, 64, 256};
  constexpr int32_t kModules[] = {kGateBit | kDownBit, kUpBit, kAllBits, kAllBits};
  std::vector<TestAdapter> adapters;
  for (int32_t i = 0; i < 12; ++i) {
    adapters.push_back(
        moe.draw_adapter({{kRanks[i % 6], kRanks[(i + 3) % 6]}, kModules[i % 4], i % 3 == 1, i % 4 == 3, i % 5 == 4}));
  }
  return adapters;
}

std::vector<int32_t> drawn_slots(DeviceMoe& moe, int32_t num_slots) {
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < moe.shape.rows; ++t) {
    slots.push_back(moe.draw.below(num_slots + 1));
  }
  return slots;
}

}  // namespace

TEST_CASE("expert products of many tokens equal the formula with mixed adapters in every tile") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 1200;
  for (const MoeShape& shape :
       {MoeShape{13, 1, 1, 64, 64, true}, MoeShape{48, 1, 2, 96, 72, true}, MoeShape{255, 1, 2, 64, 40, true},
        MoeShape{256, 1, 2, 136, 64, true}, MoeShape{257, 1, 2, 64, 136, true}, MoeShape{513, 1, 2, 200, 96, true},
        MoeShape{300, 2, 3, 160, 320}}) {
    for (const Store store : kStores) {
      ++seed;
      DeviceMoe moe(shape, store, seed % 2 == 0, seed);
      moe.set_adapters(mixed_adapters(moe), seed);
      moe.use(drawn_slots(moe, 12), moe.draw.floats(static_cast<size_t>(shape.rows)));
      check(moe);
    }
  }
}

// As many entries as a tile can have.
TEST_CASE("expert products of many tokens equal the formula with an adapter for each of 256 tokens") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 1300;
  for (const Store store : {Store::kRows, Store::kTiles}) {
    const MoeShape shape{256, 1, 1, 64, 64, true};
    DeviceMoe moe(shape, store, false, ++seed);
    std::vector<TestAdapter> adapters;
    std::vector<int32_t> slots;
    for (int32_t i = 0; i < shape.rows; ++i) {
      adapters.push_back(moe.draw_adapter({{1 + i % 35}, kAllBits, i % 7 == 0}));
      slots.push_back(shape.rows - i);
    }
    moe.set_adapters(adapters, seed);
    moe.use(slots, {});
    check(moe);
  }
}

// Several prompts, each with its own adapter: blocks work through many items, with and without adapters in turn.
TEST_CASE("expert products of many tokens equal the formula for runs of rows with an adapter each") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 1400;
  for (const Store store : {Store::kRows, Store::kTiles}) {
    const MoeShape shape{1100, 2, 4, 96, 1032};
    DeviceMoe moe(shape, store, true, ++seed);
    moe.set_adapters({moe.draw_adapter({{32}, kAllBits}), moe.draw_adapter({{32, 16}, kAllBits, true}),
                      moe.draw_adapter({{24}, kAllBits, false, false, true})},
                     seed);
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < shape.rows; ++t) {
      slots.push_back(t / 300);
    }
    moe.use(slots, {});
    check(moe);
  }
}

// A token's shrunk values lie in its own column, whatever becomes of them: an adapter scaled past the largest number,
// and next to it one of other ranks.
TEST_CASE("expert products of many tokens: infinite deltas and other ranks beside it change no bit of a row") {
  if (gpu() == nullptr) {
    return;
  }
  const MoeShape shape{140, 1, 2, 64, 64, true};
  for (const Store store : {Store::kRows, Store::kTiles}) {
    DeviceMoe moe(shape, store, true, 1500);
    std::vector<TestAdapter> adapters;
    for (const int32_t rank : {24, 8, 1, 40, 16}) {
      adapters.push_back(moe.draw_adapter({{rank}, kAllBits}));
    }
    moe.set_adapters(adapters, 8);
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < shape.rows; ++t) {
      slots.push_back(t % 7 < 2 ? 0 : 2 + t % 4);
    }
    std::vector<float> scales(slots.size(), 1.0f);
    const auto run = [&] {
      moe.use(slots, scales);
      std::vector<float> rows = moe.by_choice(
          moe.run_gate_up(ExpertPath::kManyTokens, MoeActivation::kSilu, Dtype::kF32), shape.intermediate);
      const std::vector<float> down = moe.by_choice(moe.run_down(ExpertPath::kManyTokens, Dtype::kF32), shape.hidden);
      rows.insert(rows.end(), down.begin(), down.end());
      return rows;
    };
    const std::vector<float> before = run();
    for (size_t t = 0; t < slots.size(); t += 5) {
      slots[t] = 1;
      scales[t] = t % 2 == 0 ? 3e38f : 1.0f;
    }
    const std::vector<float> after = run();
    for (int64_t t = 0; t < shape.rows; ++t) {
      INFO("row " << t << " store " << static_cast<int>(store));
      const int64_t down = shape.rows * shape.intermediate;
      CHECK(same_bits(before.data() + t * shape.intermediate, after.data() + t * shape.intermediate,
                      static_cast<size_t>(shape.intermediate)) == (t % 5 != 0));
      CHECK(same_bits(before.data() + down + t * shape.hidden, after.data() + down + t * shape.hidden,
                      static_cast<size_t>(shape.hidden)) == (t % 5 != 0));
    }
  }
}
