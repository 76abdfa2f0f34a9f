// SPDX-License-Identifier: Apache-2.0
// moe_gate_up against both activations of G x and U x with adapters merged by hand in double: gate-only and up-only
// adapters, shared A, a rank for each expert, all rows on one expert, an adapter for each row, rows whose bits must be
// their own; MXFP4, rows that gate and up share by turns, biases.
#include "kernels/moe/moe_gate_up.h"

#include "tests/kernels/moe_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kPageGranules = 4;

// Sorted order, [P, I].
std::vector<float> run(MoeCase& test, const Kernels& kernels, Stream& stream) {
  const auto count = static_cast<int32_t>(test.used.size());
  std::vector<float> values;
  for (const int32_t t : test.used) {
    values.insert(values.end(), test.x.row(t), test.x.row(t) + test.hidden);
  }
  const PoisonedRows x(count, test.hidden, values);
  const PoisonedRows act(int64_t{count} * test.top_k, test.intermediate);
  const PoisonedBytes scratch = test.scratch(count, test.hidden);
  MoeGateUpArgs args;
  args.x = x.view();
  args.gate = test.gate.view;
  args.up = test.up.view;
  args.order = test.order.view();
  args.num_rows = count;
  args.top_k = test.top_k;
  args.num_experts = test.num_experts;
  args.layer = MoeCase::kLayer;
  args.lora = test.lora;
  args.compute = test.compute;
  args.activation = test.activation;
  args.limit = test.limit;
  args.act = act.view();
  args.scratch = scratch.data();
  args.scratch_bytes = scratch.size();
  kernels.moe_gate_up(args, stream);
  test.intact = test.intact && act.padding_intact() && x.padding_intact() && scratch.guard_intact();
  return act.values();
}

double activate(const MoeCase& test, double g, double u) {
  if (test.activation == MoeActivation::kSilu) {
    return g / (1.0 + std::exp(-g)) * u;
  }
  const auto limit = static_cast<double>(test.limit);
  const double gate = std::min(g, limit);
  return (std::clamp(u, -limit, limit) + 1.0) * gate / (1.0 + std::exp(-1.702 * gate));
}

std::vector<double> expected(const MoeCase& test) {
  std::vector<double> result;
  for (size_t i = 0; i < test.pair_expert.size(); ++i) {
    const float* in = test.x.row(test.used[static_cast<size_t>(test.order.pair_row[i])]);
    for (int32_t n = 0; n < test.intermediate; ++n) {
      const double g = test.project(test.gate, ExpertModule::kGate, i, n, in);
      const double u = test.project(test.up, ExpertModule::kUp, i, n, in);
      result.push_back(activate(test, g, u));
    }
  }
  return result;
}

std::vector<TestAdapter> all_kinds(MoeCase& test) {
  return {test.draw_adapter({1, 4, 5}, 1, Dtype::kBf16, false, false),   // gate only
          test.draw_adapter({8, 12}, 2, Dtype::kF32, true, false),       // up only
          test.draw_adapter({33, 64, 8}, 7, Dtype::kBf16, false, true),  // gate and up share A
          test.draw_adapter({16, 3, 2, 9}, 3, Dtype::kF32, true, true),  //
          test.draw_adapter({7}, 4, Dtype::kBf16, false, false)};        // down only: nothing here
}

}  // namespace

TEST_CASE("moe_gate_up equals the formula without adapters") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const int32_t width : {8, 33, 64, 130}) {
        for (const int32_t num_rows : {0, 1, 2, 23}) {
          INFO(kernels->name << " " << dtype_name(dtype) << " H=" << width << " T=" << num_rows);
          MoeCase test(dtype, width, 70, 5, 2, num_rows, 71);
          test.use_all(nullptr, {}, {});
          CHECK(relative_error(run(test, *kernels, stream), expected(test)) <= 2e-5);
          CHECK(test.intact);
        }
      }
    }
  }
}

TEST_CASE("moe_gate_up equals merged experts for every kind of adapter in one batch") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Dtype dtype : kAllDtypes) {
      for (const int32_t width : {64, 100}) {
        for (const int32_t num_rows : {1, 5, 31}) {
          INFO(kernels->name << " " << dtype_name(dtype) << " H=" << width << " T=" << num_rows);
          MoeCase test(dtype, width, 72, 8, 3, num_rows, 72);
          AdapterFixture adapters(all_kinds(test), MoeCase::kLayers, 8, kPageGranules, 3);
          test.use_all(&adapters, slots_in_turn(num_rows, 5), test.draw.floats(static_cast<size_t>(num_rows)));
          const std::vector<float> out = run(test, *kernels, stream);
          CHECK(relative_error(out, expected(test)) <= 2e-5);
          CHECK(same_bits(out, run(test, *kernels, stream)));
          CHECK(test.intact);
        }
      }
    }
  }
}

TEST_CASE("moe_gate_up with all rows on one expert, each with an adapter of its own") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Compute compute : {Compute::kExact, Compute::kBf16}) {
      INFO(kernels->name << " bf16=" << static_cast<int>(compute));
      MoeCase test(Dtype::kBf16, 64, 64, 2, 1, 12, 73);
      test.compute = compute;
      test.choice.assign(12, 1);
      std::vector<TestAdapter> adapters;
      std::vector<int32_t> slots;
      for (int32_t i = 0; i < 12; ++i) {
        adapters.push_back(test.draw_adapter({1 + i * 3}, 3, Dtype::kBf16, false, false));
        slots.push_back(12 - i);
      }
      AdapterFixture fixture(adapters, MoeCase::kLayers, 2, kPageGranules, 4);
      test.use_all(&fixture, slots, {});
      CHECK(relative_error(run(test, *kernels, stream), expected(test)) <= (compute == Compute::kExact ? 2e-5 : 2e-2));
    }
  }
}

TEST_CASE("moe_gate_up leaves base rows and rows of scale 0 bit-equal to a batch without adapters") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    constexpr int32_t kRows = 21;
    MoeCase test(Dtype::kBf16, 100, 40, 6, 2, kRows, 74);
    AdapterFixture adapters({test.draw_adapter({8, 5}, 3, Dtype::kBf16, true, false)}, MoeCase::kLayers, 6,
                            kPageGranules, 5);
    test.use_all(nullptr, {}, {});
    const std::vector<float> base = test.by_choice(run(test, *kernels, stream), 40);
    std::vector<int32_t> slots;
    std::vector<float> scales;
    for (int32_t t = 0; t < kRows; ++t) {
      slots.push_back(t % 3 == 0 ? 0 : 1);
      scales.push_back(t % 3 == 1 ? 0.0f : 1.0f);
    }
    test.use_all(&adapters, slots, scales);
    const std::vector<float> mixed = test.by_choice(run(test, *kernels, stream), 40);
    int32_t changed = 0;
    for (int32_t t = 0; t < kRows; ++t) {
      const bool same = same_bits(base.data() + t * 80, mixed.data() + t * 80, 80);
      CHECK((same || t % 3 == 2));
      changed += same ? 0 : 1;
    }
    CHECK(changed > 0);
  }
}

TEST_CASE("a pair of moe_gate_up has the same bits whatever runs beside its row") {
  Stream one(1, kTestScratchBytes);
  Stream many(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Compute compute : {Compute::kExact, Compute::kBf16}) {
      for (const Dtype dtype : kAllDtypes) {
        INFO(kernels->name << " " << dtype_name(dtype) << " bf16=" << static_cast<int>(compute));
        constexpr int32_t kRows = 40;
        MoeCase test(dtype, 100, 70, 4, 2, kRows, 75);
        test.compute = compute;
        AdapterFixture adapters(all_kinds(test), MoeCase::kLayers, 4, kPageGranules, 6);
        const std::vector<int32_t> slots = slots_in_turn(kRows, 5);
        const std::vector<float> scales = test.draw.floats(kRows);
        test.use_all(&adapters, slots, scales);
        const std::vector<float> all = test.by_choice(run(test, *kernels, many), 70);
        CHECK(same_bits(all, test.by_choice(run(test, *kernels, one), 70)));
        for (int32_t t = 0; t < kRows; ++t) {
          test.use(&adapters, {t}, slots, scales);
          const std::vector<float> alone = test.by_choice(run(test, *kernels, many), 70);
          CHECK(same_bits(alone.data(), all.data() + t * 140, 140));
        }
        test.use(&adapters, {39, 3, 17, 20, 21, 22, 23}, slots, scales);
        const std::vector<float> few = test.by_choice(run(test, *kernels, many), 70);
        CHECK(same_bits(few.data() + 140, all.data() + 3 * 140, 140));
      }
    }
  }
}

TEST_CASE("moe_gate_up equals the formula in every stored form, with biases and the clamped activation") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const ExpertForm& form : all_forms()) {
      for (const int32_t width : {32, 96, 160, 1120}) {
        for (const int32_t num_rows : {1, 5, 31}) {
          for (const bool adapted : {false, true}) {
            INFO(kernels->name << " " << form_name(form) << " H=" << width << " T=" << num_rows << " " << adapted);
            MoeCase test(form, width, width > 1000 ? 6 : 70, 4, 2, num_rows, 76);
            test.activation = num_rows == 5 ? MoeActivation::kSilu : MoeActivation::kClampedSwiglu;
            test.limit = 1.5f;  // some of the sums are beyond it, and some are not
            AdapterFixture adapters(all_kinds(test), MoeCase::kLayers, 4, kPageGranules, 3);
            test.use_all(adapted ? &adapters : nullptr, slots_in_turn(num_rows, 5), {});
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

TEST_CASE("a pair of moe_gate_up on MXFP4 has the bits of the same weights in bf16, and its own in any batch") {
  Stream one(1, kTestScratchBytes);
  Stream many(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const Compute compute : {Compute::kExact, Compute::kBf16}) {
      for (const int32_t num_rows : {9, 60, 230}) {  // few rows, widened tiles, rows by classes
        INFO(kernels->name << " bf16=" << static_cast<int>(compute) << " T=" << num_rows);
        MoeCase test(ExpertForm(true, true, true), 1120, 20, 1, 1, num_rows, 77);
        test.compute = compute;
        test.activation = MoeActivation::kClampedSwiglu;
        test.limit = 7.0f;
        test.use_all(nullptr, {}, {});
        const std::vector<float> all = run(test, *kernels, many);
        CHECK(same_bits(all, run(test, *kernels, one)));
        for (const int32_t t : {0, 4, 7, num_rows - 1}) {
          test.use(nullptr, {t}, {}, {});
          CHECK(same_bits(run(test, *kernels, many).data(), all.data() + t * 20, 20));
        }
        test.gate.unpack(Dtype::kBf16);
        test.up.unpack(Dtype::kBf16);
        test.use_all(nullptr, {}, {});
        CHECK(same_bits(all, run(test, *kernels, many)));
      }
    }
  }
}

TEST_CASE("the clamped activation of moe_gate_up (worked examples), which keeps a NaN") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    MoeCase test(ExpertForm(true, true, true), 32, 5, 1, 1, 1, 78);
    test.activation = MoeActivation::kClampedSwiglu;
    test.limit = 7.0f;
    for (int32_t n = 0; n < 10; ++n) {
      std::fill_n(test.gate.packed[0].nibbles(n), 16, uint8_t{0x80});  // zeros of either sign
      std::fill_n(test.up.packed[0].nibbles(n), 16, uint8_t{0x08});
      std::fill_n(test.gate.packed[0].scales(n), 1, uint8_t{127});
      std::fill_n(test.up.packed[0].scales(n), 1, uint8_t{127});
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> gate = {1.0f, 10.0f, -10.0f, nan, -200.0f};
    const std::vector<float> up = {0.5f, -9.0f, 3.0f, 2.0f, 1.0f};
    std::copy(gate.begin(), gate.end(), test.gate.bias.begin());
    std::copy(up.begin(), up.end(), test.up.bias.begin());
    test.use_all(nullptr, {}, {});
    std::vector<float> out = run(test, *kernels, stream);
    CHECK(std::abs(out[0] - 1.268693648899232) <= 1e-6);
    CHECK(std::abs(out[1] + 41.99971876981991) <= 2e-5);
    CHECK(std::abs(out[2] + 1.6231845179421247e-6) <= 1e-11);
    CHECK(std::isnan(out[3]));
    CHECK(std::abs(out[4]) <= 1e-30);
    test.up.bias[0] = nan;
    CHECK(std::isnan(run(test, *kernels, stream)[0]));
  }
}
