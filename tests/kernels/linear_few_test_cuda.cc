// SPDX-License-Identifier: Apache-2.0
// linear_cuda of at most 8 rows with adapters by the paths of kernels/dense/linear_path.h: the formula in double, what
// they fall back to, and their promises about bits. And of more rows right behind the linear that writes their x.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/cuda_stream.cuh"
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

constexpr LinearPath kPaths[] = {LinearPath::kShrinkBeside, LinearPath::kShrinkFirst};

std::string describe(LinearPath path, const LinearShape& shape) {
  return std::string(path == LinearPath::kShrinkBeside ? "shrink beside, " : "shrink before it, ") + text(shape);
}

// Of the op: one where the shrink's blocks, eight at least, run beside all tiles of 16 outputs.
size_t launches(LinearPath path, const LinearShape& shape) {
  const int sms = cuda_state(*gpu()->stream).num_sms;
  int tiles = 8;
  for (const int32_t n : shape.outputs) {
    tiles += (n + 15) / 16;
  }
  return path == LinearPath::kShrinkBeside && (tiles <= sms || (tiles - 8 > sms && tiles <= 3 * sms)) ? 1 : 2;
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

// Rows of slot 0 or scale 0 have the base's bits; others keep theirs when their neighbours take other adapters, one of
// them full of NaN.
void check_neighbours(const LinearShape& shape, LinearPath path) {
  INFO(describe(path, shape));
  Draw draw(320);
  std::vector<TestAdapter> list = draw_adapters(draw, {8, 33, 12, 16}, shape);
  for (auto& entry : list[3].dense) {
    std::fill(entry.second.a.begin(), entry.second.a.end(), std::numeric_limits<float>::quiet_NaN());
    std::fill(entry.second.b.begin(), entry.second.b.end(), std::numeric_limits<float>::infinity());
  }
  AdapterFixture adapters(std::move(list), 2, 1, 3, 321);
  DeviceAdapters device(adapters);
  CudaLinearCase linear(shape.rows, shape.k, shape.outputs, 322);
  adapt_all(linear);
  const auto base = linear.run();
  linear.path = path;
  const size_t scratch = device.scratch_bytes(static_cast<size_t>(shape.rows), static_cast<size_t>(shape.k));
  std::vector<int32_t> slots = draw_slots(draw, shape.rows, 3);
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
      const bool kept = same_bits(before[p].data() + t * n, after[p].data() + t * n, n);
      const bool is_base = same_bits(base[p].data() + t * n, after[p].data() + t * n, n);
      CHECK((t % 2 == 0 || kept));
      CHECK(((slots[t] != 0 && scales[t] != 0.0f) || is_base));
    }
  }
}

}  // namespace

TEST_CASE("linear_cuda of few rows by each path equals the formula") {
  if (gpu() == nullptr) {
    return;
  }
  for (const LinearShape& shape : shapes()) {
    for (const Dtype out : {Dtype::kF32, Dtype::kBf16}) {
      LoraCase lora(shape, kRanks, Dtype::kBf16, out, static_cast<uint32_t>(300 + shape.rows));
      lora.linear.counts = true;
      lora.linear.accumulate = shape.rows % 3 == 0;
      lora.linear.odd_stride = shape.rows % 5 == 0;
      const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(kRanks.size()));
      const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
      for (const LinearPath path : kPaths) {
        INFO(describe(path, shape) << " out " << dtype_name(out));
        lora.linear.path = path;
        const auto result = lora.run(slots, scales);
        CHECK(lora.linear.launches == launches(path, shape));
        check_values(lora.linear, result, lora.adapters);
        CHECK(result == lora.run(slots, scales));
      }
    }
  }
}

TEST_CASE("linear_cuda of few rows by each path: a batch of one adapter, of none, every row its own; ranks up to 256") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {1, 2, 3, 8}) {
    const LinearShape shape{rows, 1032, {2130, 60}};
    LoraCase lora(shape, {256, 64, 1, 40, 8, 9, 16, 33}, Dtype::kBf16, Dtype::kF32, 310);
    lora.linear.counts = true;
    const std::vector<float> scales(static_cast<size_t>(rows), 0.75f);
    std::vector<std::vector<int32_t>> batches;
    for (const int32_t slot : {0, 1, 2, 3}) {
      batches.emplace_back(static_cast<size_t>(rows), slot);
    }
    batches.emplace_back();
    for (int32_t t = 0; t < rows; ++t) {
      batches.back().push_back(rows - t);
    }
    for (const std::vector<int32_t>& slots : batches) {
      for (const LinearPath path : kPaths) {
        INFO(describe(path, shape) << " first slot " << slots.front() << " last " << slots.back());
        lora.linear.path = path;
        check_values(lora.linear, lora.run(slots, scales), lora.adapters);
        CHECK(lora.linear.launches == launches(path, shape));
      }
    }
  }
}

TEST_CASE("linear_cuda of few rows by each path: rows without a delta keep the base's bits, neighbours do not show") {
  if (gpu() == nullptr) {
    return;
  }
  for (const std::vector<int32_t>& outputs : {std::vector{130, 60, 8}, std::vector{2130, 60, 8}}) {
    for (const int32_t rows : {1, 2, 5, 8}) {
      for (const LinearPath path : kPaths) {
        check_neighbours({rows, 136, outputs}, path);
      }
    }
  }
}

TEST_CASE("linear_cuda of few rows by each path, one behind the other") {
  if (gpu() == nullptr) {
    return;
  }
  for (const LinearShape& shape : {LinearShape{1, 2880, {4096, 512, 512}}, LinearShape{8, 2880, {4096, 512, 512}},
                                   LinearShape{8, 2880, {32}}, LinearShape{2, 4096, {2880}}}) {
    LoraCase lora(shape, kRanks, Dtype::kBf16, Dtype::kF32, 330);
    const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(kRanks.size()));
    const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
    for (const LinearPath path : kPaths) {
      INFO(describe(path, shape));
      lora.linear.path = path;
      lora.linear.repeats = 1;
      const auto once = lora.run(slots, scales);
      lora.linear.repeats = 200;
      CHECK(once == lora.run(slots, scales));
    }
  }
}

TEST_CASE("linear_cuda of more rows or outputs is the same by each path") {
  if (gpu() == nullptr) {
    return;
  }
  for (const LinearShape& shape :
       {LinearShape{9, 200, {60, 1, 64}}, LinearShape{4, 72, {9000}}, LinearShape{64, 72, {60}}}) {
    LoraCase lora(shape, kRanks, Dtype::kBf16, Dtype::kF32, 340);
    const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(kRanks.size()));
    const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
    const auto expected = lora.run(slots, scales);
    lora.linear.counts = true;
    for (const LinearPath path : kPaths) {
      INFO(describe(path, shape));
      lora.linear.path = path;
      CHECK(expected == lora.run(slots, scales));
      CHECK(lora.linear.launches == 2);
    }
  }
}

// The shrink and the products of the second begin while those of the first run, which writes their x.
TEST_CASE("linear_cuda of 9 to 64 rows with adapters behind one that writes its x") {
  if (gpu() == nullptr) {
    return;
  }
  const std::vector<int32_t> ranks = {32, 8, 64, 7};
  for (const int32_t rows : {9, 40, 64}) {
    const LinearShape narrow{rows, 200, {520}};
    const LinearShape wide{rows, 520, {200, 60, 8}};
    INFO(text(narrow) << " before " << text(wide));
    const auto seed = static_cast<uint32_t>(300 + rows);
    LoraCase first(narrow, ranks, Dtype::kBf16, Dtype::kBf16, seed);
    LoraCase second(wide, ranks, Dtype::kBf16, Dtype::kF32, seed + 10);
    const std::vector<int32_t> slots = draw_slots(first.draw, rows, static_cast<int32_t>(ranks.size()));
    const std::vector<float> scales = draw_scales(first.draw, rows);
    CudaLinearCase& linear = second.linear;
    const std::vector<std::vector<float>> x = first.run(slots, scales);
    std::copy(x[0].begin(), x[0].end(), linear.x.begin());
    const DeviceBuffer poison = device_rows(std::vector<float>(linear.x.size() * 2, NAN), Dtype::kBf16);
    const LoraBatch* batch = first.device.batch(slots, scales);
    const size_t scratch_bytes = first.device.scratch_bytes(static_cast<size_t>(rows), 200);
    const DeviceBuffer scratch(scratch_bytes);
    LinearArgs args;
    args.x = {first.linear.x_device.data(), Dtype::kBf16, first.linear.x_stride()};
    args.num_rows = rows;
    args.k = narrow.k;
    args.num_parts = 1;
    args.layer = CudaLinearCase::kLayer;
    args.lora = batch;
    args.parts[0] = {first.linear.weights[0].view(),
                     {},
                     {linear.x_device.data(), Dtype::kBf16, linear.x_stride()},
                     first.linear.modules[0]};
    args.parts[0].weight.data = first.linear.weights_device[0].data();
    args.scratch = scratch.as<std::byte>();
    args.scratch_bytes = scratch_bytes;
    linear.ahead = [&] {
      cudaMemcpyAsync(linear.x_device.data(), poison.data(), static_cast<size_t>(rows * linear.x_stride()) * 2,
                      cudaMemcpyDeviceToDevice, cuda_stream(*gpu()->stream));
      linear_cuda(args, *gpu()->stream);
    };
    linear.repeats = 20;
    const auto result = second.run(slots, scales);
    check_values(linear, result, second.adapters);
    for (int i = 0; i < 5; ++i) {
      CHECK(result == second.run(slots, scales));
    }
  }
}
