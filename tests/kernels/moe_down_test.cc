// SPDX-License-Identifier: Apache-2.0
// moe_down against D act with adapters merged by hand in double, in sorted order, with the promises and the
// stored forms of moe_gate_up_test.
#include "kernels/moe/moe_down.h"

#include "tests/kernels/moe_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kPageGranules = 4;

// Activation of choice j of row t, the same wherever the pair is sorted to.
std::vector<float> activation(const MoeCase& test, int32_t t, int32_t j) {
  Draw draw(1000u + static_cast<uint32_t>(t * 16 + j));
  return draw.floats(static_cast<size_t>(test.intermediate));
}

PoisonedRows activations(const MoeCase& test) {
  PoisonedRows act(static_cast<int64_t>(test.pair_expert.size()), test.intermediate);
  for (size_t p = 0; p < test.order.pair_position.size(); ++p) {
    const int32_t t = test.used[p / static_cast<size_t>(test.top_k)];
    const std::vector<float> values = activation(test, t, static_cast<int32_t>(p) % test.top_k);
    std::copy(values.begin(), values.end(), act.row(test.order.pair_position[p]));
  }
  return act;
}

// Sorted order, [P, H].
std::vector<float> run(MoeCase& test, const Kernels& kernels, Stream& stream) {
  const auto count = static_cast<int32_t>(test.used.size());
  const PoisonedRows act = activations(test);
  const PoisonedRows out(act.num_rows(), test.hidden);
  const PoisonedBytes scratch = test.scratch(count * test.top_k, test.intermediate);
  MoeDownArgs args;
  args.act = act.view();
  args.down = test.down.view;
  args.order = test.order.view();
  args.num_rows = count;
  args.top_k = test.top_k;
  args.num_experts = test.num_experts;
  args.layer = MoeCase::kLayer;
  args.lora = test.lora;
  args.compute = test.compute;
  args.out = out.view();
  args.scratch = scratch.data();
  args.scratch_bytes = scratch.size();
  kernels.moe_down(args, stream);
  test.intact = test.intact && out.padding_intact() && act.padding_intact() && scratch.guard_intact();
  return out.values();
}

std::vector<double> expected(const MoeCase& test) {
  std::vector<double> result;
  const PoisonedRows act = activations(test);
  for (size_t i = 0; i < test.pair_expert.size(); ++i) {
    for (int32_t n = 0; n < test.hidden; ++n) {
      result.push_back(test.project(test.down, ExpertModule::kDown, i, n, act.row(static_cast<int64_t>(i))));
    }
  }
  return result;
}

std::vector<TestAdapter> all_kinds(MoeCase& test) {
  return {test.draw_adapter({1, 4, 5}, 4, Dtype::kBf16, false, false),
          test.draw_adapter({8, 12}, 4, Dtype::kF32, true, false),
          test.draw_adapter({33, 64, 8}, 7, Dtype::kBf16, true, true),
          test.draw_adapter({6}, 3, Dtype::kBf16, false, false)};
}

}  // namespace

TEST_CASE("moe_down equals the formula with and without adapters") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const int32_t intermediate : {8, 33, 64, 130}) {
        for (const int32_t num_rows : {0, 1, 23}) {
          for (const bool adapted : {false, true}) {
            INFO(kernels->name << " " << dtype_name(dtype) << " I=" << intermediate << " T=" << num_rows << " "
                               << adapted);
            MoeCase test(dtype, 70, intermediate, 5, 2, num_rows, 81);
            AdapterFixture adapters(all_kinds(test), MoeCase::kLayers, 5, kPageGranules, 3);
            test.use_all(adapted ? &adapters : nullptr, slots_in_turn(num_rows, 4),
                         test.draw.floats(static_cast<size_t>(num_rows)));
            const std::vector<float> out = run(test, *kernels, stream);
            CHECK(relative_error(out, expected(test)) <= 2e-5);
            CHECK(same_bits(out, run(test, *kernels, stream)));
            CHECK(test.intact);
          }
        }
      }
    }
  }
}

TEST_CASE("moe_down in bf16 compute stays within its bound, all rows on one expert") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    MoeCase test(Dtype::kBf16, 64, 96, 2, 1, 30, 82);
    test.choice.assign(30, 0);
    AdapterFixture adapters(all_kinds(test), MoeCase::kLayers, 2, kPageGranules, 3);
    test.use_all(&adapters, slots_in_turn(30, 4), {});
    test.compute = Compute::kBf16;
    CHECK(relative_error(run(test, *kernels, stream), expected(test)) <= 2e-2);
  }
}

TEST_CASE("moe_down: base rows keep their bits beside adapter rows, and each pair has its own bits") {
  Stream one(1, kTestScratchBytes);
  Stream many(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Compute compute : {Compute::kExact, Compute::kBf16}) {
      INFO(kernels->name << " bf16=" << static_cast<int>(compute));
      constexpr int32_t kRows = 40;
      MoeCase test(Dtype::kBf16, 70, 100, 4, 2, kRows, 83);
      test.compute = compute;
      AdapterFixture adapters(all_kinds(test), MoeCase::kLayers, 4, kPageGranules, 6);
      const std::vector<int32_t> slots = slots_in_turn(kRows, 4);
      std::vector<float> scales = test.draw.floats(kRows);
      for (size_t t = 0; t < kRows; t += 7) {
        scales[t] = 0.0f;
      }
      test.use_all(nullptr, {}, {});
      const std::vector<float> base = test.by_choice(run(test, *kernels, many), 70);
      test.use_all(&adapters, slots, scales);
      const std::vector<float> all = test.by_choice(run(test, *kernels, many), 70);
      CHECK(same_bits(all, test.by_choice(run(test, *kernels, one), 70)));
      for (int32_t t = 0; t < kRows; ++t) {
        const bool is_base = slots[static_cast<size_t>(t)] == 0 || t % 7 == 0;
        if (is_base) {
          CHECK(same_bits(base.data() + t * 140, all.data() + t * 140, 140));
        }
        test.use(&adapters, {t}, slots, scales);
        CHECK(same_bits(test.by_choice(run(test, *kernels, many), 70).data(), all.data() + t * 140, 140));
      }
      CHECK(!same_bits(base, all));
    }
  }
}

TEST_CASE("moe_down equals the formula in every stored form, with biases") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const ExpertForm& form : all_forms()) {
      for (const int32_t intermediate : {32, 96, 160, 1120}) {
        for (const int32_t num_rows : {1, 31}) {
          for (const bool adapted : {false, true}) {
            INFO(kernels->name << " " << form_name(form) << " I=" << intermediate << " T=" << num_rows << " "
                               << adapted);
            MoeCase test(form, intermediate > 1000 ? 6 : 70, intermediate, 4, 2, num_rows, 84);
            AdapterFixture adapters(all_kinds(test), MoeCase::kLayers, 4, kPageGranules, 3);
            test.use_all(adapted ? &adapters : nullptr, slots_in_turn(num_rows, 4), {});
            const std::vector<float> out = run(test, *kernels, stream);
            CHECK(relative_error(out, expected(test)) <= 2e-5);
            CHECK(same_bits(out, run(test, *kernels, stream)));
            CHECK(test.intact);
          }
        }
      }
    }
  }
}

TEST_CASE("a pair of moe_down on MXFP4 has the bits of the same weights in bf16, and its own in any batch") {
  Stream one(1, kTestScratchBytes);
  Stream many(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int32_t num_rows : {9, 60, 230}) {  // few rows, widened tiles, rows by classes
      INFO(kernels->name << " T=" << num_rows);
      MoeCase test(ExpertForm(true, false, true), 21, 1120, 1, 1, num_rows, 85);
      test.use_all(nullptr, {}, {});
      const std::vector<float> all = run(test, *kernels, many);
      CHECK(same_bits(all, run(test, *kernels, one)));
      for (const int32_t t : {0, 4, 7, num_rows - 1}) {
        test.use(nullptr, {t}, {}, {});
        CHECK(same_bits(run(test, *kernels, many).data(), all.data() + t * 21, 21));
      }
      test.down.unpack(Dtype::kBf16);
      test.use_all(nullptr, {}, {});
      CHECK(same_bits(all, run(test, *kernels, many)));
    }
  }
}

TEST_CASE("moe_down reads MXFP4 by its definition (worked example)") {
  // Bytes 21 F7 98 0A: 0.5, 1, 6, -6, -0, -0.5, -1, 0.
  constexpr double kNumbers[8] = {0.5, 1, 6, -6, 0, -0.5, -1, 0};
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int scale : {0, 1, 90, 127, 130, 200}) {
      INFO(kernels->name << " scale=" << scale);
      MoeCase test(ExpertForm(true, false, false), 8, 64, 1, 1, 1, 86);
      // Row n repeats number n in every place of its two groups; the second group's scale is 2^-3 of the first's.
      double expected[8];
      double sum = 0.0;
      for (const float value : activation(test, 0, 0)) {
        sum += static_cast<double>(value);
      }
      double second = 0.0;
      for (size_t k = 32; k < 64; ++k) {
        second += static_cast<double>(activation(test, 0, 0)[k]);
      }
      const uint8_t bytes[4] = {0x21, 0xf7, 0x98, 0x0a};
      for (int32_t n = 0; n < 8; ++n) {
        const int nibble = n % 2 == 0 ? bytes[n / 2] & 15 : bytes[n / 2] >> 4;
        std::fill_n(test.down.packed[0].nibbles(n), 32, static_cast<uint8_t>(nibble | nibble << 4));
        const int small = std::max(scale - 3, 0);
        test.down.packed[0].scales(n)[0] = static_cast<uint8_t>(scale);
        test.down.packed[0].scales(n)[1] = static_cast<uint8_t>(small);
        expected[n] = kNumbers[n] * (std::exp2(scale - 127) * (sum - second) + std::exp2(small - 127) * second);
      }
      test.use_all(nullptr, {}, {});
      const std::vector<float> out = run(test, *kernels, stream);
      for (size_t n = 0; n < 8; ++n) {
        INFO("row " << n << " " << static_cast<double>(out[n]) << " " << expected[n]);
        CHECK(std::abs(static_cast<double>(out[n]) - expected[n]) <= 1e-5 * 32 * 6 * std::exp2(scale - 127));
      }
    }
  }
}
