// SPDX-License-Identifier: Apache-2.0
// lora_shrink_dense_cuda and lora_shrink_experts_cuda against the formula in double: mixed ranks and segments of any
// length, modules and experts that an adapter lacks, widths that fill no block; what no adapter covers stays unwritten.
#include <cmath>
#include <string>

#include "kernels/lora/lora_shrink_cuda.h"
#include "tests/support/compare.h"
#include "tests/support/device_adapters.h"
#include "tests/support/moe_order.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kLayer = 1;
constexpr int32_t kOutputs = 24;  // of the adapted linears; B is not read here

// x [rows, k] in bf16, NaN between the rows.
struct DeviceRows {
  DeviceRows(Draw& draw, int32_t rows, int32_t width)
      : k(width),
        stride(width + 8),
        values(rounded_to_bf16(draw.floats(static_cast<size_t>(rows) * static_cast<size_t>(width)))),
        device(device_rows(padded(rows), Dtype::kBf16)) {}
  [[nodiscard]] Rows view() const { return {device.data(), Dtype::kBf16, stride}; }
  [[nodiscard]] const float* row(int32_t t) const { return values.data() + static_cast<int64_t>(t) * k; }

  int32_t k;
  int64_t stride;
  std::vector<float> values;
  DeviceBuffer device;

 private:
  [[nodiscard]] std::vector<float> padded(int32_t rows) const {
    std::vector<float> result(static_cast<size_t>(rows * stride), bf16_to_f32(0xFFFF));
    for (int32_t t = 0; t < rows; ++t) {
      std::copy_n(row(t), k, result.begin() + t * stride);
    }
    return result;
  }
};

// The shrunk row of one module: `actual` has `stride` values, `pair` may be null.
void check_row(const float* actual, int32_t stride, const LoraPair* pair, double factor, const float* x) {
  const int32_t rank = pair != nullptr ? pair->rank : 0;
  std::vector<double> expected;
  for (int32_t r = 0; r < rank; ++r) {
    double sum = 0.0;
    for (int32_t i = 0; i < pair->k; ++i) {
      sum += static_cast<double>(pair->a[static_cast<size_t>(r * pair->k + i)]) * static_cast<double>(x[i]);
    }
    expected.push_back(factor * sum);
  }
  const int32_t padded = (rank + 7) / 8 * 8;
  expected.resize(static_cast<size_t>(padded), 0.0);
  CHECK(relative_error({actual, actual + padded}, expected) <= 5e-5);
  for (int32_t r = rank; r < padded; ++r) {
    CHECK(actual[r] == 0.0f);
  }
  CHECK(PoisonedBytes::untouched(actual + padded, static_cast<size_t>(stride - padded) * sizeof(float)));
}

struct DenseCase {
  const char* name;
  std::vector<int32_t> ranks;
  std::vector<int32_t> slots;
  int32_t k;
};

// Every third adapter lacks k, v has half the rank, o is adapted by none.
std::vector<TestAdapter> draw_dense(Draw& draw, const std::vector<int32_t>& ranks, int32_t k) {
  std::vector<TestAdapter> adapters;
  for (size_t i = 0; i < ranks.size(); ++i) {
    TestAdapter adapter;
    for (const LoraModule module : {LoraModule::kQ, LoraModule::kK, LoraModule::kV}) {
      if (i % 3 == 2 && module == LoraModule::kK) {
        continue;
      }
      const int32_t rank = module == LoraModule::kV ? (ranks[i] + 1) / 2 : ranks[i];
      adapter.dense.emplace(std::pair(kLayer, module), draw_pair(draw, rank, k, kOutputs, Dtype::kBf16, false));
    }
    adapters.push_back(std::move(adapter));
  }
  return adapters;
}

void check_dense(const DenseCase& test) {
  INFO(test.name << " K " << test.k);
  Draw draw(1);
  const auto rows = static_cast<int32_t>(test.slots.size());
  AdapterFixture adapters(draw_dense(draw, test.ranks, test.k), 2, 1, 3, 2);
  DeviceAdapters device(adapters);
  const DeviceRows x(draw, rows, test.k);
  std::vector<float> scales;
  for (int32_t t = 0; t < rows; ++t) {
    scales.push_back(t % 5 == 4 ? 0.0f : 1.0f + 0.5f * draw.signed_unit());
  }
  for (const std::vector<LoraModule>& modules :
       {std::vector{LoraModule::kQ, LoraModule::kK, LoraModule::kV}, std::vector{LoraModule::kK},
        std::vector{LoraModule::kO, LoraModule::kV}}) {
    DenseShrinkArgs args;
    args.x = x.view();
    args.num_rows = rows;
    args.k = test.k;
    args.layer = kLayer;
    args.num_modules = static_cast<int32_t>(modules.size());
    std::copy(modules.begin(), modules.end(), args.modules);
    args.lora = device.batch(test.slots, scales);
    args.rank_stride = device.rank_stride();
    const auto count = static_cast<size_t>(rows * args.num_modules * args.rank_stride);
    const DeviceBuffer out(count * sizeof(float));
    args.out = out.as<float>();
    lora_shrink_dense_cuda(args, *gpu()->stream);
    const std::vector<float> result = out.read<float>();
    CHECK(out.guard_intact());
    for (int32_t t = 0; t < rows; ++t) {
      for (int32_t m = 0; m < args.num_modules; ++m) {
        INFO("row " << t << " slot " << test.slots[static_cast<size_t>(t)] << " module " << m);
        double factor = 0.0;
        const LoraPair* pair = adapters.dense(t, kLayer, modules[static_cast<size_t>(m)], &factor);
        check_row(result.data() + (t * args.num_modules + m) * args.rank_stride, args.rank_stride, pair, factor,
                  x.row(t));
      }
    }
    const DeviceBuffer again(count * sizeof(float));
    args.out = again.as<float>();
    lora_shrink_dense_cuda(args, *gpu()->stream);
    CHECK(same_bits(result.data(), again.read<float>().data(), count));
  }
}

// Rows of the slots in turn: `counts[s]` of slot s, mixed.
std::vector<int32_t> mixed_slots(const std::vector<int32_t>& counts) {
  std::vector<int32_t> slots;
  for (size_t s = 0; s < counts.size(); ++s) {
    slots.insert(slots.end(), static_cast<size_t>(counts[s]), static_cast<int32_t>(s));
  }
  Draw draw(3);
  std::vector<int32_t> result;
  for (const int32_t index : draw.permutation(static_cast<int32_t>(slots.size()))) {
    result.push_back(slots[static_cast<size_t>(index)]);
  }
  return result;
}

struct ExpertCase {
  int32_t rows;
  int32_t top_k;
  int32_t num_experts;
  int32_t k;
  std::vector<int32_t> ranks;
  bool x_sorted;
};

// Every adapter lacks some experts, and up of others; all share gate's A with up where `share_a`.
std::vector<TestAdapter> draw_experts(Draw& draw, const ExpertCase& test) {
  std::vector<TestAdapter> adapters;
  for (size_t i = 0; i < test.ranks.size(); ++i) {
    TestAdapter adapter;
    for (int32_t e = 0; e < test.num_experts; ++e) {
      if ((e + static_cast<int32_t>(i)) % 4 == 3) {
        continue;
      }
      LoraPair gate = draw_pair(draw, test.ranks[i], test.k, kOutputs, Dtype::kBf16, false);
      LoraPair up = draw_pair(draw, test.ranks[i], test.k, kOutputs, Dtype::kBf16, false);
      adapter.share_a = i % 2 == 1;
      if (adapter.share_a) {
        up.a = gate.a;
      }
      adapter.experts.emplace(std::tuple(kLayer, e, ExpertModule::kGate), std::move(gate));
      if ((e + static_cast<int32_t>(i)) % 4 != 1) {
        adapter.experts.emplace(std::tuple(kLayer, e, ExpertModule::kUp), std::move(up));
      }
    }
    adapters.push_back(std::move(adapter));
  }
  return adapters;
}

// The same in bf16: each value rounded once, nothing else written.
void check_rounded(ExpertShrinkArgs args, const std::vector<float>& expected) {
  const DeviceBuffer out(expected.size() * sizeof(uint16_t));
  args.out = out.as<float>();
  args.out_bf16 = true;
  lora_shrink_experts_cuda(args, *gpu()->stream);
  const std::vector<uint16_t> actual = out.read<uint16_t>();
  CHECK(out.guard_intact());
  size_t different = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const bool written = !PoisonedBytes::untouched(expected.data() + i, sizeof(float));
    different += actual[i] != (written ? f32_to_bf16(expected[i]) : 0xFFFF) ? 1 : 0;
  }
  CHECK(different == 0);
}

void check_experts(const ExpertCase& test) {
  INFO("T " << test.rows << " top_k " << test.top_k << " experts " << test.num_experts << " K " << test.k << " sorted "
            << test.x_sorted);
  Draw draw(4);
  AdapterFixture adapters(draw_experts(draw, test), 2, test.num_experts, 3, 5);
  DeviceAdapters device(adapters);
  const int32_t pairs = test.rows * test.top_k;
  const DeviceRows x(draw, test.x_sorted ? pairs : test.rows, test.k);
  std::vector<int32_t> slots;
  std::vector<float> scales;
  for (int32_t t = 0; t < test.rows; ++t) {
    slots.push_back(draw.below(static_cast<int32_t>(test.ranks.size()) + 1));
    scales.push_back(1.0f + 0.5f * draw.signed_unit());
  }
  MoeOrderArrays host(static_cast<size_t>(pairs), static_cast<size_t>(test.num_experts));
  host.fill(draw_choices(draw, test.rows, test.top_k, test.num_experts), slots, test.top_k);
  const DeviceBuffer pair_row(host.pair_row);
  const DeviceBuffer expert_begin(host.expert_begin);
  const DeviceBuffer segment_begin(host.segment_begin);
  const DeviceBuffer segment_expert(host.segment_expert);
  const DeviceBuffer segment_slot(host.segment_slot);
  const DeviceBuffer num_segments(host.num_segments);
  ExpertShrinkArgs args;
  args.x = x.view();
  args.x_sorted = test.x_sorted;
  args.order.pair_row = pair_row.as<int32_t>();
  args.order.expert_begin = expert_begin.as<int32_t>();
  args.order.segment_begin = segment_begin.as<int32_t>();
  args.order.segment_expert = segment_expert.as<int32_t>();
  args.order.segment_slot = segment_slot.as<int32_t>();
  args.order.num_segments = num_segments.as<int32_t>();
  args.num_rows = test.rows;
  args.top_k = test.top_k;
  args.num_experts = test.num_experts;
  args.k = test.k;
  args.layer = kLayer;
  args.num_modules = 2;
  args.lora = device.batch(slots, scales);
  args.rank_stride = device.rank_stride();
  const DeviceBuffer out(static_cast<size_t>(pairs * 2 * args.rank_stride) * sizeof(float));
  args.out = out.as<float>();
  lora_shrink_experts_cuda(args, *gpu()->stream);
  const std::vector<float> result = out.read<float>();
  CHECK(out.guard_intact());
  check_rounded(args, result);
  for (int32_t i = 0; i < pairs; ++i) {
    const int32_t t = host.pair_row[static_cast<size_t>(i)];
    int32_t expert = 0;
    while (host.expert_begin[static_cast<size_t>(expert) + 1] <= i) {
      ++expert;
    }
    for (int32_t m = 0; m < 2; ++m) {
      INFO("pair " << i << " row " << t << " slot " << slots[static_cast<size_t>(t)] << " expert " << expert
                   << " module " << m);
      double factor = 0.0;
      const LoraPair* pair = adapters.expert(t, kLayer, expert, static_cast<ExpertModule>(m), &factor);
      check_row(result.data() + (i * 2 + m) * args.rank_stride, args.rank_stride, pair, factor,
                x.row(test.x_sorted ? i : t));
    }
  }
}

}  // namespace

TEST_CASE("lora_shrink_dense_cuda equals the formula") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t k : {8, 48, 64, 200, 576}) {
    check_dense({"a row", {12}, {1}, k});
    check_dense({"mixed ranks", {1, 5, 8, 12, 33, 64, 256}, mixed_slots({3, 1, 2, 3, 4, 5, 2, 1}), k});
  }
  check_dense({"wide", {32, 16, 7}, mixed_slots({2, 1, 1, 9}), 2880});
  check_dense({"wider than a block holds", {12, 33}, mixed_slots({1, 9, 20}), 4672});
  check_dense({"base only", {12, 5}, std::vector<int32_t>(9, 0), 64});
  for (int32_t rows = 1; rows <= 40; ++rows) {
    INFO("rows " << rows);
    check_dense({"one adapter", {8, 20}, std::vector<int32_t>(static_cast<size_t>(rows), 2), 72});
  }
  check_dense({"long segments", {8, 20, 3}, mixed_slots({50, 31, 64, 155}), 96});
  for (const int32_t k : {8, 200, 576}) {
    check_dense(
        {"long segments, all ranks", {1, 5, 8, 12, 33, 64, 256}, mixed_slots({30, 1, 160, 3, 140, 5, 20, 128}), k});
  }
}

// 9 to 64 rows: segments of one row to all, more items than run at once, K in any number of ranges, and the kernel
// behind let in early.
TEST_CASE("lora_shrink_dense_cuda of up to 64 rows equals the formula") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t k : {8, 72, 712, 1032, 2880, 4096}) {
    check_dense({"8 segments of 8 rows", {32, 32, 16, 32, 7, 32, 64, 32}, mixed_slots({0, 8, 8, 8, 8, 8, 8, 8, 8}), k});
    check_dense({"segments of any length", {32, 5, 40, 24}, mixed_slots({5, 9, 17, 1, 30}), k});
  }
  check_dense({"one segment", {20}, std::vector<int32_t>(64, 1), 1032});
  check_dense({"K in two turns", {20, 40}, mixed_slots({0, 5, 6}), 16392});
  std::vector<int32_t> ranks;
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < 64; ++t) {
    ranks.push_back(t % 5 == 4 ? 100 : 17 + t % 16);
    slots.push_back(64 - t);
  }
  check_dense({"every row its own adapter", ranks, slots, 520});
}

TEST_CASE("lora_shrink_dense_cuda equals the formula for rows of every size of tile") {
  if (gpu() == nullptr) {
    return;
  }
  check_dense({"small tiles, wide", {32, 16, 7}, mixed_slots({2, 65, 31, 130}), 2880});
  check_dense({"small tiles, one adapter", {32}, std::vector<int32_t>(100, 1), 4096});
  check_dense({"medium tiles", {32, 5}, mixed_slots({100, 1900, 500}), 136});
  check_dense({"large tiles", {40, 3}, mixed_slots({100, 4000, 600}), 72});
}

TEST_CASE("lora_shrink_dense_cuda finds its segment among many") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t count : {31, 32, 33, 64, 65, 200}) {
    INFO(count << " adapters");
    std::vector<int32_t> rows_of_slot = {7};
    std::vector<int32_t> ranks;
    for (int32_t s = 0; s < count; ++s) {
      ranks.push_back(1 + s % 9);
      rows_of_slot.push_back(s % 10 == 9 ? 33 + s % 3 : s % 7 == 6 ? 0 : 1 + s % 3);
    }
    check_dense({"every row its own adapter", ranks, mixed_slots(rows_of_slot), 64});
  }
}

TEST_CASE("lora_shrink_experts_cuda equals the formula") {
  if (gpu() == nullptr) {
    return;
  }
  for (const bool sorted : {false, true}) {
    check_experts({1, 2, 4, 64, {12}, sorted});
    check_experts({20, 4, 8, 96, {1, 8, 33, 5}, sorted});
    check_experts({64, 2, 60, 48, {16, 3}, sorted});
    check_experts({300, 4, 6, 72, {9, 32, 64}, sorted});
    check_experts({900, 2, 4, 136, {9, 32, 64}, sorted});  // large tiles
    check_experts({5, 2, 4, 2880, {32, 8}, sorted});
  }
}

TEST_CASE("lora_shrink_cuda of no rows does nothing") {
  if (gpu() == nullptr) {
    return;
  }
  lora_shrink_dense_cuda(DenseShrinkArgs{}, *gpu()->stream);
  lora_shrink_experts_cuda(ExpertShrinkArgs{}, *gpu()->stream);
}
