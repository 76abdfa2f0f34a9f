// SPDX-License-Identifier: Apache-2.0
// moe_gate_up_cuda against the formula in double: both kernels, all storages, both activations, adapters of every kind
// in one batch, skewed and sparse choices; and the promises about bits: a token's result depends on its own row and
// adapter. Without a GPU it says that it was skipped.
#include "kernels/cuda/cuda_stream.cuh"
#include "tests/kernels/moe_device_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr MoeActivation kActivations[] = {MoeActivation::kSilu, MoeActivation::kClampedSwiglu};

void check_formula(const MoeShape& shape, Store store, uint32_t seed) {
  DeviceMoe moe(shape, store, seed % 2 == 0, seed);
  for (const ExpertPath path : kPaths) {
    for (const MoeActivation activation : kActivations) {
      const Dtype dtype = activation == MoeActivation::kSilu ? Dtype::kBf16 : Dtype::kF32;
      INFO(describe(shape, store, path) << " activation " << static_cast<int>(activation));
      const std::vector<float> out = moe.run_gate_up(path, activation, dtype);
      CHECK(moe.error_gate_up(out, activation) <= moe_tolerance(dtype));
      CHECK(same_bits(out, moe.run_gate_up(path, activation, dtype)));
      CHECK(moe.intact);
    }
  }
}

// The largest ranks in small layers only: oracles take their time.
std::vector<TestAdapter> all_kinds(DeviceMoe& moe) {
  const bool small = moe.shape.experts * moe.shape.hidden <= 1024;
  return {moe.draw_adapter({{1, 5, 8}, kGateBit}), moe.draw_adapter({{12, small ? 64 : 20}, kUpBit, true}),
          moe.draw_adapter({{33, 16, 8}, kGateBit | kUpBit | kDownBit, false, true, true}),
          moe.draw_adapter({{small ? 256 : 40, 3}, kGateBit | kUpBit, true, true}),
          moe.draw_adapter({{7}, kDownBit})};  // nothing here
}

void check_adapters(const MoeShape& shape, Store store, uint32_t seed) {
  DeviceMoe moe(shape, store, seed % 2 == 0, seed);
  moe.set_adapters(all_kinds(moe), seed);
  moe.use(slots_modulo(shape.rows, 5), moe.draw.floats(static_cast<size_t>(shape.rows)));
  for (const ExpertPath path : kPaths) {
    for (const MoeActivation activation : kActivations) {
      const Dtype dtype = activation == MoeActivation::kSilu ? Dtype::kF32 : Dtype::kBf16;
      INFO(describe(shape, store, path) << " activation " << static_cast<int>(activation));
      const std::vector<float> out = moe.run_gate_up(path, activation, dtype);
      CHECK(moe.error_gate_up(out, activation) <= moe_tolerance(dtype));
      CHECK(same_bits(out, moe.run_gate_up(path, activation, dtype)));
      CHECK(moe.intact);
    }
  }
}

// Bits of one row, all choices.
bool same_row(const DeviceMoe& moe, const std::vector<float>& a, const std::vector<float>& b, int32_t t) {
  const int64_t width = int64_t{moe.shape.top_k} * moe.shape.intermediate;
  return same_bits(a.data() + t * width, b.data() + t * width, static_cast<size_t>(width));
}

}  // namespace

TEST_CASE("moe_gate_up_cuda equals the formula without adapters") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 100;
  for (const MoeShape& shape :
       {MoeShape{0, 2, 8, 64, 48}, MoeShape{1, 1, 1, 64, 48}, MoeShape{1, 4, 8, 2880, 96}, MoeShape{5, 2, 8, 200, 48},
        MoeShape{5, 4, 60, 48, 768}, MoeShape{64, 4, 8, 64, 96}, MoeShape{64, 8, 512, 48, 48},
        MoeShape{21, 1, 3, 2880, 64, true}, MoeShape{300, 2, 8, 200, 64}, MoeShape{300, 1, 2, 64, 96, true},
        MoeShape{2048, 2, 8, 64, 48}, MoeShape{8, 4, 32, 2880, 96}, MoeShape{30, 4, 8, 2880, 64},
        MoeShape{8, 8, 16, 2048, 768}, MoeShape{60, 2, 40, 2496, 48}}) {
    for (const Store store : kStores) {
      if (store == Store::kTiles && shape.hidden % 32 != 0) {
        continue;
      }
      check_formula(shape, store, ++seed);
    }
  }
}

TEST_CASE("moe_gate_up_cuda of MXFP4 tiles whose last blocks are not full") {
  if (gpu() == nullptr) {
    return;
  }
  check_formula({5, 2, 8, 96, 64}, Store::kTiles, 201);
  check_formula({40, 2, 8, 224, 52}, Store::kTiles, 202);
  check_formula({40, 2, 3, 32, 8}, Store::kTiles, 203);
}

// Many row tiles an SM: the streaming kernel takes two of them at a time. An odd number of tiles; one pass over the
// tokens and several; inputs of several groups of blocks, the last of them full or not.
TEST_CASE("moe_gate_up_cuda of MXFP4 tiles in wide layers") {
  if (gpu() == nullptr) {
    return;
  }
  check_formula({24, 2, 8, 320, 3208}, Store::kTiles, 210);
  check_formula({70, 2, 8, 96, 3208}, Store::kTiles, 211);
  check_formula({9, 4, 8, 544, 3208}, Store::kTiles, 212);
  check_adapters({24, 2, 8, 160, 3208}, Store::kTiles, 213);
}

TEST_CASE("moe_gate_up_cuda equals merged experts for every kind of adapter in one batch") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 300;
  for (const MoeShape& shape :
       {MoeShape{1, 1, 1, 64, 48}, MoeShape{5, 2, 8, 200, 48}, MoeShape{5, 4, 60, 64, 96}, MoeShape{64, 4, 8, 64, 96},
        MoeShape{33, 4, 8, 2880, 48}, MoeShape{300, 2, 8, 64, 48}, MoeShape{140, 1, 2, 64, 48, true},
        MoeShape{3, 2, 4, 4672, 96}, MoeShape{2, 2, 3, 64, 2880}, MoeShape{8, 4, 8, 2880, 96},
        MoeShape{30, 4, 8, 2880, 48}}) {
    for (const Store store : {Store::kRows, Store::kTiles}) {
      if (store == Store::kTiles && shape.hidden % 32 != 0) {
        continue;
      }
      check_adapters(shape, store, ++seed);
    }
  }
  check_adapters({20, 8, 512, 48, 48}, Store::kAlternatingRows, 390);
  // More groups than a cluster of blocks, and than a block, looks up at once.
  check_adapters({300, 8, 512, 48, 48}, Store::kRows, 391);
  check_adapters({700, 8, 512, 48, 48}, Store::kRows, 392);
}

// Tiles of tokens of every width, full, with one token less and one more than a width; several of one expert; blocks
// that work through several items.
TEST_CASE("moe_gate_up_cuda of every number of tokens an expert") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 220;
  for (const int32_t rows :
       {1, 8, 15, 31, 32, 33, 63, 96, 97, 129, 144, 159, 161, 177, 193, 208, 223, 241, 256, 257, 520}) {
    check_formula({rows, 1, 2, 96, 40, true}, Store::kTiles, ++seed);
    check_formula({rows, 1, 2, 72, 76, true}, Store::kRows, ++seed);
  }
  check_formula({600, 2, 4, 224, 1032}, Store::kTiles, ++seed);
  check_adapters({600, 2, 4, 224, 1032}, Store::kTiles, ++seed);
  check_adapters({560, 2, 4, 200, 1032}, Store::kAlternatingRows, ++seed);
}

// Without scratch for them, tokens are gathered, to the same bits.
TEST_CASE("moe_gate_up_cuda of many tokens without room to arrange them") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Store store : {Store::kRows, Store::kTiles}) {
    DeviceMoe moe({100, 2, 4, 96, 72}, store, true, 250);
    moe.set_adapters(all_kinds(moe), 250);
    moe.use(slots_modulo(moe.shape.rows, 5), {});
    const std::vector<float> gathered =
        moe.run_gate_up(ExpertPath::kManyTokensGather, MoeActivation::kSilu, Dtype::kF32);
    for (const bool room : {true, false}) {
      moe.room_for_tokens = room;
      for (const ExpertPath path :
           {ExpertPath::kManyTokens, ExpertPath::kManyTokensBulk, ExpertPath::kManyTokensPairs}) {
        INFO(describe(moe.shape, store, path) << (room ? " with" : " without") << " room");
        CHECK(same_bits(gathered, moe.run_gate_up(path, MoeActivation::kSilu, Dtype::kF32)));
        CHECK(moe.intact);
      }
    }
  }
}

TEST_CASE("moe_gate_up_cuda with all rows on one expert, each with an adapter of its own") {
  if (gpu() == nullptr) {
    return;
  }
  const MoeShape shape{40, 1, 2, 64, 64, true};
  DeviceMoe moe(shape, Store::kRows, true, 400);
  std::vector<TestAdapter> adapters;
  std::vector<int32_t> slots;
  for (int32_t i = 0; i < shape.rows; ++i) {
    adapters.push_back(moe.draw_adapter({{1 + i * 3}, kGateBit | kUpBit, i % 2 == 0}));
    slots.push_back(shape.rows - i);
  }
  moe.set_adapters(adapters, 4);
  moe.use(slots, {});
  for (const ExpertPath path : kPaths) {
    INFO(describe(shape, Store::kRows, path));
    const std::vector<float> out = moe.run_gate_up(path, MoeActivation::kSilu, Dtype::kF32);
    CHECK(moe.error_gate_up(out, MoeActivation::kSilu) <= moe_tolerance(Dtype::kF32));
    CHECK(moe.intact);
  }
}

TEST_CASE("moe_gate_up_cuda leaves rows without an adapter, or of scale 0, bit-equal to a batch without adapters") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {7, 28, 70}) {
    const MoeShape shape{rows, 2, 6, 96, 40};
    for (const Store store : {Store::kRows, Store::kTiles}) {
      for (const ExpertPath path : kPaths) {
        for (const MoeActivation activation : kActivations) {
          INFO(describe(shape, store, path));
          DeviceMoe moe(shape, store, true, 500);
          const std::vector<float> base =
              moe.by_choice(moe.run_gate_up(path, activation, Dtype::kF32), shape.intermediate);
          moe.set_adapters({moe.draw_adapter({{8, 5}, kGateBit | kUpBit, true})}, 5);
          std::vector<int32_t> slots;
          std::vector<float> scales;
          for (int32_t t = 0; t < shape.rows; ++t) {
            slots.push_back(t % 3 == 0 ? 0 : 1);
            scales.push_back(t % 3 == 1 ? 0.0f : 1.0f);
          }
          moe.use(slots, scales);
          const std::vector<float> mixed =
              moe.by_choice(moe.run_gate_up(path, activation, Dtype::kF32), shape.intermediate);
          for (int32_t t = 0; t < shape.rows; ++t) {
            CHECK(same_row(moe, base, mixed, t) == (t % 3 != 2));
          }
        }
      }
    }
  }
}

TEST_CASE("moe_gate_up_cuda: a neighbour's adapter, even of the largest values, changes no bit of a row") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {7, 28, 70}) {
    const MoeShape shape{rows, 2, 4, 64, 48};
    for (const Store store : {Store::kRows, Store::kTiles}) {
      for (const ExpertPath path : kPaths) {
        INFO(describe(shape, store, path));
        DeviceMoe moe(shape, store, false, 600);
        std::vector<TestAdapter> adapters = {moe.draw_adapter({{8, 33}, kGateBit | kUpBit}),
                                             moe.draw_adapter({{16}, kGateBit | kUpBit, true}),
                                             moe.draw_adapter({{24}, kGateBit | kUpBit})};
        for (auto& [key, pair] : adapters[2].experts) {
          std::fill(pair.b.begin(), pair.b.end(), moe.largest_b(path));
        }
        moe.set_adapters(adapters, 6);
        std::vector<int32_t> slots = slots_modulo(shape.rows, 2);
        moe.use(slots, {});
        const std::vector<float> before =
            moe.by_choice(moe.run_gate_up(path, MoeActivation::kSilu, Dtype::kF32), shape.intermediate);
        for (size_t t = 0; t < slots.size(); t += 5) {
          slots[t] = slots[t] == 1 ? 3 : 1;
        }
        moe.use(slots, {});
        const std::vector<float> after =
            moe.by_choice(moe.run_gate_up(path, MoeActivation::kSilu, Dtype::kF32), shape.intermediate);
        for (int32_t t = 0; t < shape.rows; ++t) {
          CHECK(same_row(moe, before, after, t) == (t % 5 != 0));
        }
      }
    }
  }
}

// Few groups of pairs are cut among blocks, many are not.
TEST_CASE("moe_gate_up_cuda: how many adapters there are beside its own changes no bit of a row") {
  if (gpu() == nullptr) {
    return;
  }
  const MoeShape shape{24, 4, 16, 96, 320};
  for (const Store store : {Store::kRows, Store::kTiles}) {
    for (const ExpertPath path : kPaths) {
      INFO(describe(shape, store, path));
      DeviceMoe moe(shape, store, true, 650);
      std::vector<TestAdapter> adapters;
      for (int32_t i = 0; i <= shape.rows; ++i) {
        adapters.push_back(moe.draw_adapter({{8 + i, 40}, kGateBit | kUpBit, i % 2 == 0}));
      }
      moe.set_adapters(adapters, 7);
      const auto run = [&] {
        return moe.by_choice(moe.run_gate_up(path, MoeActivation::kSilu, Dtype::kF32), shape.intermediate);
      };
      std::vector<int32_t> slots(static_cast<size_t>(shape.rows), 1);
      moe.use(slots, {});
      const std::vector<float> one = run();
      for (int32_t t = 0; t < shape.rows; ++t) {
        slots[static_cast<size_t>(t)] = t % 3 == 0 ? 1 : t + 2;
      }
      moe.use(slots, {});
      const std::vector<float> many = run();
      for (int32_t t = 0; t < shape.rows; ++t) {
        CHECK(same_row(moe, one, many, t) == (t % 3 == 0));
      }
    }
  }
}

// Rows fall away, and with them tokens of every expert, so that others are the widths of a round, its row tiles and the
// blocks that work on them. Three stages of inputs, so that they fall to other warps from round to round.
TEST_CASE("moe_gate_up_cuda: how many tokens a stream of MXFP4 tiles passes changes no bit of a row") {
  if (gpu() == nullptr || cuda_state(*gpu()->stream).compute_capability / 10 != 9) {
    return;
  }
  DeviceMoe moe({70, 4, 8, 544, 3208}, Store::kTiles, true, 660);
  const auto run = [&] {
    return moe.by_choice(moe.run_gate_up(ExpertPath::kFewTokens, MoeActivation::kSilu, Dtype::kF32),
                         moe.shape.intermediate);
  };
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

TEST_CASE("moe_gate_up_cuda crosses the clamp in both directions in these tests") {
  if (gpu() == nullptr) {
    return;
  }
  const DeviceMoe moe({5, 4, 8, 2880, 64}, Store::kTiles, false, 700);
  double least = 0.0;
  double largest = 0.0;
  for (size_t i = 0; i < moe.pairs(); ++i) {
    for (const double value : moe.project(1, i)) {
      least = std::min(least, value);
      largest = std::max(largest, value);
    }
  }
  CHECK(least < -7.0);
  CHECK(largest > 7.0);
}

TEST_CASE("moe_gate_up_cuda refuses what it cannot do before launching") {
  if (gpu() == nullptr) {
    return;
  }
  MoeGateUpArgs args;
  args.num_rows = 1;
  args.x.dtype = Dtype::kF32;
  CHECK_THROWS_AS(moe_gate_up_cuda(args, *gpu()->stream), Error);
}
