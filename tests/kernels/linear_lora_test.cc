// SPDX-License-Identifier: Apache-2.0
// linear with an adapter for each row, against W + s B A merged by hand in double: ranks that fill no tile, both stored
// types, lora bias, partly adapted layers, pages cut small and shuffled among NaN; and what base rows must not notice.
#include "tests/kernels/linear_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kLayers = 2;
constexpr int32_t kPageGranules = 4;
constexpr LoraModule kModules[] = {LoraModule::kQ, LoraModule::kK, LoraModule::kV};

// One adapter a rank; adapter i skips module i % 4 (3 = none), f32 and bf16 in turn.
std::vector<TestAdapter> adapters_of(const LinearCase& test, const std::vector<int32_t>& ranks, Draw& draw) {
  std::vector<TestAdapter> adapters;
  for (size_t i = 0; i < ranks.size(); ++i) {
    TestAdapter adapter;
    const Dtype dtype = i % 2 == 0 ? Dtype::kBf16 : Dtype::kF32;
    for (size_t p = 0; p < test.weights.size(); ++p) {
      const int32_t n = test.weights[p].view().rows;
      // Something in the other layer, so that a wrong layer shows.
      adapter.dense[{0, kModules[p]}] = draw_pair(draw, ranks[i], test.k, n, dtype, false);
      if (i % 4 == p) {
        continue;
      }
      adapter.dense[{LinearCase::kLayer, kModules[p]}] = draw_pair(draw, ranks[i], test.k, n, dtype, i % 3 == 1);
    }
    adapters.push_back(adapter);
  }
  return adapters;
}

// Rows take slots 0, 1, ..., n, 0, ... in turn with different scales.
std::vector<int32_t> slots_in_turn(int32_t num_rows, int32_t num_slots) {
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < num_rows; ++t) {
    slots.push_back(t * 5 % (num_slots + 1));
  }
  return slots;
}

std::vector<float> scales(int32_t num_rows) {
  std::vector<float> result;
  for (int32_t t = 0; t < num_rows; ++t) {
    result.push_back(0.5f + 0.25f * static_cast<float>(t % 4));
  }
  return result;
}

struct LoraCase {
  LoraCase(Dtype dtype, int32_t k, std::vector<int32_t> outputs, int32_t rows, const std::vector<int32_t>& ranks)
      : linear(dtype, k, std::move(outputs), rows, 21),
        adapters(adapters_of(linear, ranks, linear.draw), kLayers, 1, kPageGranules, 5) {
    for (size_t p = 0; p < linear.modules.size(); ++p) {
      linear.modules[p] = kModules[p];
    }
  }
  LinearCase linear;
  AdapterFixture adapters;
};

}  // namespace

TEST_CASE("linear with mixed adapters equals the merged matrices") {
  Stream stream(2, kTestScratchBytes);
  const std::vector<int32_t> ranks = {1, 4, 5, 8, 12, 33, 64};
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const int32_t k : {8, 33, 64, 130}) {
        for (const int32_t num_rows : {1, 3, 19, 48}) {
          INFO(kernels->name << " " << dtype_name(dtype) << " K=" << k << " T=" << num_rows);
          LoraCase test(dtype, k, {70, 1, 136}, num_rows, ranks);
          test.linear.lora = test.adapters.batch(slots_in_turn(num_rows, 7), scales(num_rows));
          const std::vector<float> out = test.linear.run(*kernels, stream);
          CHECK(relative_error(out, test.linear.expected(&test.adapters)) <= 2e-5);
          CHECK(test.linear.memory_intact());
          CHECK(same_bits(out, test.linear.run(*kernels, stream)));
        }
      }
    }
  }
}

TEST_CASE("the order base, delta, lora bias, bias, accumulate holds with adapters in bf16 compute too") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    LoraCase test(Dtype::kBf16, 96, {64, 40}, 12, {16, 8, 3});
    test.linear.accumulate = true;
    test.linear.lora = test.adapters.batch(slots_in_turn(12, 3), scales(12));
    CHECK(relative_error(test.linear.run(*kernels, stream), test.linear.expected(&test.adapters)) <= 2e-5);
    test.linear.compute = Compute::kBf16;
    CHECK(relative_error(test.linear.run(*kernels, stream), test.linear.expected(&test.adapters)) <= 2e-2);
  }
}

TEST_CASE("base rows and rows of scale 0 keep the bits of a batch without adapters") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int32_t num_rows : {4, 33}) {
      INFO(kernels->name << " T=" << num_rows);
      LoraCase test(Dtype::kBf16, 100, {70, 24}, num_rows, {8, 5});
      const std::vector<float> base = test.linear.run(*kernels, stream);
      std::vector<int32_t> slots;
      std::vector<float> factor;
      for (int32_t t = 0; t < num_rows; ++t) {
        slots.push_back(t % 4 < 2 ? 0 : t % 4 - 1);
        factor.push_back(t % 4 == 3 ? 0.0f : 1.0f);
      }
      test.linear.lora = test.adapters.batch(slots, factor);
      const std::vector<float> mixed = test.linear.run(*kernels, stream);
      for (int32_t t = 0; t < num_rows; ++t) {
        const bool same = same_bits(test.linear.rows_of(mixed, t, 1), test.linear.rows_of(base, t, 1));
        CHECK(same == (t % 4 != 2));  // t % 4 == 2 is slot 1 at scale 1
      }
    }
  }
}

TEST_CASE("an adapted row has the same bits whatever runs beside it") {
  Stream stream(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Compute compute : {Compute::kExact, Compute::kBf16}) {
      INFO(kernels->name << " bf16=" << static_cast<int>(compute));
      constexpr int32_t kRows = 40;
      LoraCase test(Dtype::kBf16, 130, {70, 24}, kRows, {8, 5, 33, 64});
      test.linear.compute = compute;
      const std::vector<int32_t> slots = slots_in_turn(kRows, 4);
      const std::vector<float> factors = scales(kRows);
      test.linear.lora = test.adapters.batch(slots, factors);
      const std::vector<float> all = test.linear.run(*kernels, stream);
      for (int32_t t = 0; t < kRows; ++t) {
        const auto at = static_cast<size_t>(t);
        test.linear.lora = test.adapters.batch({slots[at]}, {factors[at]});
        CHECK(same_bits(test.linear.rows_of(all, t, 1), test.linear.run(*kernels, stream, t, 1)));
      }
      // All rows to one adapter: the rows that had it before must not change.
      test.linear.lora = test.adapters.batch(std::vector<int32_t>(kRows, 3), factors);
      const std::vector<float> third = test.linear.run(*kernels, stream);
      for (int32_t t = 0; t < kRows; ++t) {
        if (slots[static_cast<size_t>(t)] != 3) {
          continue;
        }
        CHECK(same_bits(test.linear.rows_of(all, t, 1), test.linear.rows_of(third, t, 1)));
      }
    }
  }
}

TEST_CASE("a module of kind none is never adapted") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    LoraCase test(Dtype::kF32, 64, {16}, 5, {8});
    test.linear.modules[0] = LoraModule::kNone;
    const std::vector<float> base = test.linear.run(*kernels, stream);
    test.linear.lora = test.adapters.batch(std::vector<int32_t>(5, 1), scales(5));
    CHECK(same_bits(base, test.linear.run(*kernels, stream)));
  }
}
