// SPDX-License-Identifier: Apache-2.0
// linear_cuda of at most 8 rows with the shrink in blocks of its own grid: the formula in double, what it falls back
// to, and its promises about bits. kernels/dense/linear_beside.cuh
#include <limits>

#include "tests/kernels/linear_lora_case_cuda.h"

using namespace moelora;
using namespace moelora::test;

namespace {

double tolerance(const CudaLinearCase& linear) {
  return linear.out_dtype == Dtype::kF32 ? 1e-4 : 4e-3;
}
void check_values(CudaLinearCase& linear, const std::vector<std::vector<float>>& result,
                  const AdapterFixture& adapters) {
  for (size_t p = 0; p < result.size(); ++p) {
    INFO("part " << p);
    CHECK(relative_error(result[p], linear.expected(p, &adapters)) <= tolerance(linear));
  }
}

// Of the op: one where the shrink's blocks, eight at least, run beside all tiles of 16 outputs.
size_t launches(const LinearShape& shape) {
  const int sms = cuda_state(*gpu()->stream).num_sms;
  int tiles = 8;
  for (const int32_t n : shape.outputs) {
    tiles += (n + 15) / 16;
  }
  return tiles <= sms || (tiles - 8 > sms && tiles <= 3 * sms) ? 1 : 2;
}

const std::vector<int32_t> kRanks = {1, 5, 8, 12, 33, 64, 32, 7};

// Few tiles, which have a multiprocessor each, many, and as many as leave a few blocks to the shrink.
std::vector<LinearShape> shapes() {
  std::vector<LinearShape> result;
  for (int32_t rows = 1; rows <= 8; ++rows) {
    result.push_back({rows, rows % 2 == 0 ? 96 : 200, {60, 1, 64}});
    result.push_back({rows, rows % 2 == 0 ? 72 : 200, {2100, 300, 130}});
  }
  for (const LinearShape& shape :
       {LinearShape{1, 2880, {32}}, LinearShape{8, 2880, {32}}, LinearShape{1, 2880, {4096, 512, 512}},
        LinearShape{8, 2880, {4096, 512, 512}}, LinearShape{3, 4096, {2880}}, LinearShape{5, 8, {130, 8, 60}},
        LinearShape{8, 48, {2200, 60}}, LinearShape{7, 1032, {2200}}}) {
    result.push_back(shape);
  }
  return result;
}

}  // namespace

TEST_CASE("linear_cuda with the shrink beside equals the formula, in one launch") {
  if (gpu() == nullptr) {
    return;
  }
  for (const LinearShape& shape : shapes()) {
    for (const Dtype out : {Dtype::kF32, Dtype::kBf16}) {
      INFO(text(shape) << " out " << dtype_name(out));
      LoraCase lora(shape, kRanks, Dtype::kBf16, out, static_cast<uint32_t>(300 + shape.rows));
      lora.linear.path = LinearPath::kShrinkBeside;
      lora.linear.counts = true;
      lora.linear.accumulate = shape.rows % 3 == 0;
      lora.linear.odd_stride = shape.rows % 5 == 0;
      const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(kRanks.size()));
      const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
      const auto result = lora.run(slots, scales);
      CHECK(lora.linear.launches == launches(shape));
      check_values(lora.linear, result, lora.adapters);
      CHECK(result == lora.run(slots, scales));
    }
  }
}

TEST_CASE("linear_cuda with the shrink beside: a batch of one adapter, of none, every row its own; ranks up to 256") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {1, 2, 3, 8}) {
    const LinearShape shape{rows, 1032, {2130, 60}};
    LoraCase lora(shape, {256, 64, 1, 40, 8, 9, 16, 33}, Dtype::kBf16, Dtype::kF32, 310);
    lora.linear.path = LinearPath::kShrinkBeside;
    lora.linear.counts = true;
    const std::vector<float> scales(static_cast<size_t>(rows), 0.75f);
    for (const int32_t slot : {0, 1, 2, 3}) {
      INFO(text(shape) << " all in slot " << slot);
      const std::vector<int32_t> slots(static_cast<size_t>(rows), slot);
      check_values(lora.linear, lora.run(slots, scales), lora.adapters);
      CHECK(lora.linear.launches == launches(shape));
    }
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < rows; ++t) {
      slots.push_back(rows - t);
    }
    INFO(text(shape) << " every row its own");
    check_values(lora.linear, lora.run(slots, scales), lora.adapters);
  }
}

TEST_CASE("linear_cuda with the shrink beside: rows without a delta keep the base's bits, others do not see them") {
  if (gpu() == nullptr) {
    return;
  }
  for (const std::vector<int32_t>& outputs : {std::vector{130, 60, 8}, std::vector{2130, 60, 8}}) {
    for (const int32_t rows : {1, 2, 5, 8}) {
      const LinearShape shape{rows, 136, outputs};
      INFO(text(shape));
      Draw draw(320);
      std::vector<TestAdapter> list = draw_adapters(draw, {8, 33, 12, 16}, shape);
      for (auto& entry : list[3].dense) {
        std::fill(entry.second.a.begin(), entry.second.a.end(), std::numeric_limits<float>::quiet_NaN());
        std::fill(entry.second.b.begin(), entry.second.b.end(), std::numeric_limits<float>::infinity());
      }
      AdapterFixture adapters(std::move(list), 2, 1, 3, 321);
      DeviceAdapters device(adapters);
      CudaLinearCase linear(rows, shape.k, shape.outputs, 322);
      adapt_all(linear);
      const auto base = linear.run();
      linear.path = LinearPath::kShrinkBeside;
      const size_t scratch = device.scratch_bytes(static_cast<size_t>(rows), static_cast<size_t>(shape.k));
      std::vector<int32_t> slots = draw_slots(draw, rows, 3);
      std::vector<float> scales(slots.size(), 1.25f);
      scales.back() = 0.0f;
      const auto before = linear.run(device.batch(slots, scales), scratch);
      for (size_t t = 0; t < slots.size(); t += 2) {
        slots[t] = t % 4 == 0 ? 4 : (slots[t] + 1) % 4;
      }
      const auto after = linear.run(device.batch(slots, scales), scratch);
      for (size_t p = 0; p < shape.outputs.size(); ++p) {
        const auto n = static_cast<size_t>(shape.outputs[p]);
        for (size_t t = 0; t < slots.size(); ++t) {
          INFO("part " << p << " row " << t << " slot " << slots[t]);
          CHECK((t % 2 == 0 || same_bits(before[p].data() + t * n, after[p].data() + t * n, n)));
          CHECK(
              ((slots[t] != 0 && scales[t] != 0.0f) || same_bits(base[p].data() + t * n, after[p].data() + t * n, n)));
        }
      }
    }
  }
}

TEST_CASE("linear_cuda with the shrink beside, one behind the other") {
  if (gpu() == nullptr) {
    return;
  }
  for (const LinearShape& shape : {LinearShape{1, 2880, {4096, 512, 512}}, LinearShape{8, 2880, {4096, 512, 512}},
                                   LinearShape{8, 2880, {32}}, LinearShape{2, 4096, {2880}}}) {
    INFO(text(shape));
    LoraCase lora(shape, kRanks, Dtype::kBf16, Dtype::kF32, 330);
    lora.linear.path = LinearPath::kShrinkBeside;
    lora.linear.counts = true;
    const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(kRanks.size()));
    const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
    const auto once = lora.run(slots, scales);
    lora.linear.repeats = 200;
    CHECK(once == lora.run(slots, scales));
  }
}

TEST_CASE("linear_cuda with the shrink beside falls back where it cannot be") {
  if (gpu() == nullptr) {
    return;
  }
  for (const LinearShape& shape :
       {LinearShape{9, 200, {60, 1, 64}}, LinearShape{4, 72, {9000}}, LinearShape{64, 72, {60}}}) {
    INFO(text(shape));
    LoraCase lora(shape, kRanks, Dtype::kBf16, Dtype::kF32, 340);
    const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(kRanks.size()));
    const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
    const auto expected = lora.run(slots, scales);
    lora.linear.path = LinearPath::kShrinkBeside;
    lora.linear.counts = true;
    CHECK(expected == lora.run(slots, scales));
    CHECK(lora.linear.launches == 2);
  }
}
