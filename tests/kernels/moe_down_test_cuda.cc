// SPDX-License-Identifier: Apache-2.0
// moe_down_cuda against the formula in double, with the promises of moe_gate_up_test_cuda.
#include "kernels/cuda/cuda_stream.cuh"
#include "tests/kernels/moe_device_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

void check(DeviceMoe& moe) {
  for (const ExpertPath path : kPaths) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
      INFO(describe(moe.shape, moe.store, path) << " " << dtype_name(dtype));
      const std::vector<float> out = moe.run_down(path, dtype);
      CHECK(moe.error_down(out) <= moe_tolerance(dtype));
      CHECK(same_bits(out, moe.run_down(path, dtype)));
      CHECK(moe.intact);
    }
  }
}

// The largest ranks in small layers only: oracles take their time.
std::vector<TestAdapter> all_kinds(DeviceMoe& moe) {
  const bool small = moe.shape.experts * (moe.shape.hidden + moe.shape.intermediate) <= 2048;
  return {moe.draw_adapter({{1, 5, 8}, kDownBit}), moe.draw_adapter({{12, small ? 64 : 20}, kDownBit, true}),
          moe.draw_adapter({{33, 16, 8}, kGateBit | kUpBit | kDownBit, true, true, true}),
          moe.draw_adapter({{small ? 256 : 40, 3}, kDownBit}), moe.draw_adapter({{6}, kGateBit | kUpBit})};
}

bool same_row(const DeviceMoe& moe, const std::vector<float>& a, const std::vector<float>& b, int32_t t) {
  const int64_t width = int64_t{moe.shape.top_k} * moe.shape.hidden;
  return same_bits(a.data() + t * width, b.data() + t * width, static_cast<size_t>(width));
}

}  // namespace

TEST_CASE("moe_down_cuda equals the formula with and without adapters") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 800;
  for (const MoeShape& shape :
       {MoeShape{0, 2, 8, 64, 48}, MoeShape{1, 1, 1, 48, 64}, MoeShape{1, 4, 8, 2880, 96}, MoeShape{5, 2, 8, 200, 48},
        MoeShape{5, 4, 60, 64, 768}, MoeShape{64, 4, 8, 64, 96}, MoeShape{64, 8, 512, 48, 64},
        MoeShape{21, 1, 3, 64, 2880, true}, MoeShape{300, 2, 8, 200, 64}, MoeShape{300, 1, 2, 64, 96, true},
        MoeShape{2048, 2, 8, 48, 64}, MoeShape{2, 2, 3, 64, 4800}, MoeShape{8, 4, 32, 96, 2880},
        MoeShape{30, 4, 8, 64, 2880}, MoeShape{8, 8, 16, 2048, 768}, MoeShape{60, 2, 40, 48, 2496}}) {
    for (const Store store : {Store::kRows, Store::kTiles}) {
      if (store == Store::kTiles && shape.intermediate % 32 != 0) {
        continue;
      }
      ++seed;
      DeviceMoe moe(shape, store, seed % 4 < 2, seed);
      check(moe);
      if (shape.experts <= 60) {
        moe.set_adapters(all_kinds(moe), seed);
        moe.use(slots_modulo(shape.rows, 5), moe.draw.floats(static_cast<size_t>(shape.rows)));
        check(moe);
      }
    }
  }
}

// As in moe_gate_up_test_cuda.
TEST_CASE("moe_down_cuda of MXFP4 tiles in wide layers") {
  if (gpu() == nullptr) {
    return;
  }
  for (const MoeShape& shape : {MoeShape{24, 2, 8, 6408, 320}, MoeShape{70, 2, 8, 6408, 96}}) {
    DeviceMoe moe(shape, Store::kTiles, true, 895);
    check(moe);
    moe.set_adapters(all_kinds(moe), 895);
    moe.use(slots_modulo(shape.rows, 5), moe.draw.floats(static_cast<size_t>(shape.rows)));
    check(moe);
  }
}

// As in moe_gate_up_test_cuda.
TEST_CASE("moe_down_cuda of every number of tokens an expert") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 1000;
  for (const int32_t rows : {1, 8, 16, 30, 31, 65, 95, 128, 130, 143, 160, 176, 191, 200, 224, 240, 255, 257, 513}) {
    for (const Store store : {Store::kTiles, Store::kRows}) {
      DeviceMoe moe({rows, 1, 2, 200, 96, true}, store, true, ++seed);
      check(moe);
    }
  }
  for (const Store store : {Store::kTiles, Store::kRows}) {
    DeviceMoe moe({600, 2, 4, 2096, 224}, store, true, ++seed);
    check(moe);
    moe.set_adapters(all_kinds(moe), seed);
    moe.use(slots_modulo(moe.shape.rows, 5), moe.draw.floats(static_cast<size_t>(moe.shape.rows)));
    check(moe);
  }
}

TEST_CASE("moe_down_cuda of MXFP4 scales at both ends of their range") {
  if (gpu() == nullptr) {
    return;
  }
  for (const auto& [low, high] : {std::pair<int32_t, int32_t>{0, 40}, {100, kMxfp4ScaleMax}, {127, 127}}) {
    INFO("scales " << low << " to " << high);
    DeviceMoe moe({20, 2, 4, 40, 160}, Store::kTiles, false, 900, low, high);
    check(moe);
  }
}

TEST_CASE("moe_down_cuda with all rows on one expert, each with an adapter of its own") {
  if (gpu() == nullptr) {
    return;
  }
  const MoeShape shape{40, 1, 2, 72, 64, true};
  DeviceMoe moe(shape, Store::kTiles, true, 910);
  std::vector<TestAdapter> adapters;
  std::vector<int32_t> slots;
  for (int32_t i = 0; i < shape.rows; ++i) {
    adapters.push_back(moe.draw_adapter({{1 + i * 3}, kDownBit, i % 2 == 0}));
    slots.push_back(shape.rows - i);
  }
  moe.set_adapters(adapters, 4);
  moe.use(slots, {});
  check(moe);
}

TEST_CASE("moe_down_cuda: base rows keep their bits, and a neighbour's adapter changes none") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {7, 28, 70}) {
    const MoeShape shape{rows, 2, 4, 72, 64};
    for (const Store store : {Store::kRows, Store::kTiles}) {
      for (const ExpertPath path : kPaths) {
        INFO(describe(shape, store, path));
        DeviceMoe moe(shape, store, true, 920);
        const auto run = [&] { return moe.by_choice(moe.run_down(path, Dtype::kF32), shape.hidden); };
        const std::vector<float> base = run();
        std::vector<TestAdapter> adapters = {moe.draw_adapter({{8, 33}, kDownBit, true}),
                                             moe.draw_adapter({{16}, kDownBit}), moe.draw_adapter({{24}, kDownBit})};
        for (auto& [key, pair] : adapters[2].experts) {
          std::fill(pair.b.begin(), pair.b.end(), moe.largest_b(path));
        }
        moe.set_adapters(adapters, 6);
        std::vector<int32_t> slots = slots_modulo(shape.rows, 2);
        std::vector<float> scales(static_cast<size_t>(shape.rows), 1.0f);
        scales[2] = 0.0f;
        moe.use(slots, scales);
        const std::vector<float> before = run();
        for (int32_t t = 0; t < shape.rows; ++t) {
          CHECK(same_row(moe, base, before, t) == (slots[static_cast<size_t>(t)] == 0 || t == 2));
        }
        for (size_t t = 0; t < slots.size(); t += 5) {
          slots[t] = slots[t] == 1 ? 3 : 1;
        }
        moe.use(slots, scales);
        const std::vector<float> after = run();
        for (int32_t t = 0; t < shape.rows; ++t) {
          CHECK(same_row(moe, before, after, t) == (t % 5 != 0));
        }
      }
    }
  }
}

// As in moe_gate_up_test_cuda.
TEST_CASE("moe_down_cuda: how many tokens a stream of MXFP4 tiles passes changes no bit of a row") {
  if (gpu() == nullptr || cuda_state(*gpu()->stream).compute_capability / 10 != 9) {
    return;
  }
  DeviceMoe moe({70, 4, 8, 6408, 544}, Store::kTiles, true, 930);
  const auto run = [&] { return moe.by_choice(moe.run_down(ExpertPath::kFewTokens, Dtype::kF32), moe.shape.hidden); };
  const std::vector<float> all = run();
  for (const int32_t rows : {53, 30, 14, 3}) {
    moe.shape.rows = rows;
    moe.choice.resize(static_cast<size_t>(rows * moe.shape.top_k));
    moe.use({}, {});
    const std::vector<float> fewer = run();
    INFO(describe(moe.shape, moe.store, ExpertPath::kFewTokens));
    for (int32_t t = 0; t < rows; ++t) {
      CHECK(same_row(moe, all, fewer, t));
    }
    CHECK(moe.intact);
  }
}
