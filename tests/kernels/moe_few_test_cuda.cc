// SPDX-License-Identifier: Apache-2.0
// The expert products of at most 8 rows with LoRA inside them (kernels/moe/expert_few_lora.cuh): launches, shapes in
// which blocks have many or no row tiles beside the shrink, and ops one behind the other. What holds for every path is
// tested in moe_gate_up_test_cuda and moe_down_test_cuda.
#include "tests/kernels/moe_device_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr ExpertPath kPath = ExpertPath::kFewRowsBeside;

// Rows 0, 3, ... without an adapter, the others with one of `count`.
std::vector<int32_t> some_slots(int32_t rows, int32_t count, bool all) {
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < rows; ++t) {
    slots.push_back(t % 3 == 0 && !all ? 0 : t % count + 1);
  }
  return slots;
}

void check(const MoeShape& shape, Store store, const std::vector<int32_t>& ranks, bool all, uint32_t seed) {
  DeviceMoe moe(shape, store, true, seed);
  moe.counts = true;
  std::vector<TestAdapter> adapters;
  for (size_t i = 0; i < ranks.size(); ++i) {
    adapters.push_back(moe.draw_adapter(
        {{ranks[i], ranks[(i + 1) % ranks.size()]}, kGateBit | kUpBit | kDownBit, i % 2 == 1, false, i % 3 == 1}));
  }
  moe.set_adapters(adapters, seed);
  moe.use(some_slots(shape.rows, static_cast<int32_t>(ranks.size()), all), {});
  INFO(describe(shape, store, kPath) << " all adapted " << all);
  moe.repeats = 1;
  const std::vector<float> act = moe.run_gate_up(kPath, MoeActivation::kClampedSwiglu, Dtype::kF32);
  CHECK(moe.launches == 1);
  CHECK(moe.error_gate_up(act, MoeActivation::kClampedSwiglu) <= moe_tolerance(Dtype::kF32));
  const std::vector<float> out = moe.run_down(kPath, Dtype::kF32);
  CHECK(moe.launches == 1);
  CHECK(moe.error_down(out) <= moe_tolerance(Dtype::kF32));
  moe.repeats = 100;
  CHECK(same_bits(act, moe.run_gate_up(kPath, MoeActivation::kClampedSwiglu, Dtype::kF32)));
  CHECK(same_bits(out, moe.run_down(kPath, Dtype::kF32)));
  CHECK(moe.intact);
}

}  // namespace

TEST_CASE("expert products of few rows with LoRA inside: every number of rows") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 800;
  for (int32_t rows = 1; rows <= 8; ++rows) {
    for (const Store store : {Store::kRows, Store::kTiles}) {
      check({rows, 4, 8, rows % 2 == 0 ? 64 : 192, 128}, store, {32, 8, 5, 17}, rows % 2 == 1, ++seed);
    }
  }
}

// Wide layers: inputs that fill what a warp holds, outputs of several groups of row tiles a block.
TEST_CASE("expert products of few rows with LoRA inside: wide layers") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 830;
  check({1, 4, 8, 2880, 640}, Store::kTiles, {32}, true, ++seed);
  check({8, 4, 8, 2880, 320}, Store::kTiles, {32, 8, 64, 1, 40, 32, 16, 24}, true, ++seed);
  check({8, 4, 8, 320, 2880}, Store::kTiles, {32, 8, 64, 1, 40, 32, 16, 24}, false, ++seed);
  check({8, 8, 16, 2048, 768}, Store::kRows, {32, 8, 64, 1, 40, 32, 16, 24}, true, ++seed);
  check({1, 8, 16, 2048, 768}, Store::kRows, {32}, true, ++seed);
}

// Fewer row tiles than items of the shrink, and one block for all.
TEST_CASE("expert products of few rows with LoRA inside: more shrink than weights") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 840;
  check({8, 2, 3, 320, 32}, Store::kTiles, {256, 100, 8}, true, ++seed);
  check({8, 1, 2, 64, 64, true}, Store::kRows, {256, 64, 3}, true, ++seed);
  check({1, 1, 1, 64, 32}, Store::kTiles, {200}, true, ++seed);
  check({8, 8, 8, 64, 32}, Store::kTiles, {64, 8, 3}, false, ++seed);
}

TEST_CASE("expert products of few rows with LoRA inside: no row has an adapter") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Store store : {Store::kRows, Store::kTiles}) {
    DeviceMoe moe({5, 2, 6, 64, 64}, store, true, 850);
    moe.counts = true;
    INFO(describe(moe.shape, store, kPath));
    moe.use({}, {});
    const std::vector<float> act = moe.run_gate_up(kPath, MoeActivation::kSilu, Dtype::kBf16);
    CHECK(moe.launches == 1);
    const std::vector<float> out = moe.run_down(kPath, Dtype::kBf16);
    moe.set_adapters({moe.draw_adapter({{8, 5}})}, 851);
    moe.use({0, 0, 0, 0, 0}, {});
    CHECK(same_bits(act, moe.run_gate_up(kPath, MoeActivation::kSilu, Dtype::kBf16)));
    CHECK(same_bits(out, moe.run_down(kPath, Dtype::kBf16)));
    moe.use({1, 1, 1, 1, 1}, {0.0f, 0.0f, 0.0f, 0.0f, 0.0f});
    CHECK(same_bits(act, moe.run_gate_up(kPath, MoeActivation::kSilu, Dtype::kBf16)));
    CHECK(same_bits(out, moe.run_down(kPath, Dtype::kBf16)));
    CHECK(moe.intact);
  }
}
