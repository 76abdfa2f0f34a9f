// SPDX-License-Identifier: Apache-2.0
// linear_cuda against the formula in double: widths and rows that fit no tile, three parts, all stored types, LoRA of
// mixed ranks, with and without cuBLASLt; and its promises about bits: base rows keep the base's, neighbours' adapters
// change nothing, twice is the same.
#include <cmath>
#include <limits>
#include <string>

#include "kernels/cuda/cuda_stream.cuh"
#include "tests/kernels/linear_lora_case_cuda.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr double kTolerance = 1e-4;       // fp32 out: sums of up to 2880 products on tensor cores
constexpr double kTolerance16 = 4e-3;     // bf16 out
constexpr double kToleranceTwice = 1e-2;  // bf16 out, rounded before LoRA and bias and after

using Shape = LinearShape;

double tolerance(const CudaLinearCase& linear, size_t part) {
  if (linear.out_dtype == Dtype::kF32) {
    return kTolerance;
  }
  const bool one_launch = linear.rows <= 64 && linear.weights[part].view().dtype == Dtype::kBf16;
  return one_launch ? kTolerance16 : kToleranceTwice;
}

void check_values(CudaLinearCase& linear, const std::vector<std::vector<float>>& result,
                  const AdapterFixture* adapters = nullptr) {
  for (size_t p = 0; p < result.size(); ++p) {
    INFO("part " << p);
    CHECK(relative_error(result[p], linear.expected(p, adapters)) <= tolerance(linear, p));
  }
}

// While it lives, the stream has no cuBLASLt.
class WithoutGemm {
 public:
  WithoutGemm() : gemm_(cuda_state(*gpu()->stream).dense_gemm) { cuda_state(*gpu()->stream).dense_gemm = nullptr; }
  ~WithoutGemm() { cuda_state(*gpu()->stream).dense_gemm = gemm_; }
  WithoutGemm(const WithoutGemm&) = delete;
  WithoutGemm& operator=(const WithoutGemm&) = delete;

 private:
  DenseGemm* gemm_;
};

}  // namespace

TEST_CASE("linear_cuda of the base equals the formula") {
  if (gpu() == nullptr) {
    return;
  }
  std::vector<Shape> shapes;
  for (int32_t rows = 1; rows <= 40; ++rows) {
    shapes.push_back({rows, rows % 2 == 0 ? 96 : 200, {60, 1, 64}});
  }
  for (const int32_t rows : {1, 8, 17, 40}) {
    for (const int32_t k : {8, 48, 64, 576}) {
      shapes.push_back({rows, k, {130, 8, 60}});
    }
  }
  for (const Shape& shape : {Shape{3, 2880, {2880, 60, 1}}, Shape{64, 2880, {64, 130}}, Shape{300, 200, {130, 8}},
                             Shape{301, 200, {132, 64, 8}}, Shape{33, 64, {2880}}, Shape{65, 4096, {60}},
                             Shape{1, 2880, {2200, 60}}, Shape{8, 4096, {2150}}, Shape{2, 72, {2200}}}) {
    shapes.push_back(shape);
  }
  for (const Shape& shape : shapes) {
    for (const Dtype weight : {Dtype::kBf16, Dtype::kF32}) {
      for (const Dtype out : {Dtype::kF32, Dtype::kBf16}) {
        INFO(text(shape) << " weights " << dtype_name(weight) << " out " << dtype_name(out));
        CudaLinearCase linear(shape.rows, shape.k, shape.outputs, 1, weight, out,
                              shape.rows % 2 == 0 ? Dtype::kBf16 : Dtype::kF32);
        linear.accumulate = shape.rows % 3 == 0;
        const auto result = linear.run();
        check_values(linear, result);
        CHECK(result == linear.run());
      }
    }
  }
}

TEST_CASE("linear_cuda of many outputs takes wide tiles") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {1, 9, 20}) {
    INFO("T " << rows);
    const Shape shape{rows, 72, {33001}};
    LoraCase lora(shape, {5, 12}, Dtype::kBf16, Dtype::kF32, 2);
    check_values(lora.linear, lora.linear.run());
    const std::vector<int32_t> slots = draw_slots(lora.draw, rows, 2);
    check_values(lora.linear, lora.run(slots, draw_scales(lora.draw, rows)), &lora.adapters);
  }
}

TEST_CASE("linear_cuda of many rows without cuBLASLt, and with strides that it may refuse") {
  if (gpu() == nullptr) {
    return;
  }
  const Shape shape{77, 200, {130, 60, 8}};
  for (const Dtype out : {Dtype::kF32, Dtype::kBf16}) {
    LoraCase lora(shape, {8, 33, 5}, Dtype::kBf16, out, 3);
    const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, 3);
    const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
    for (const bool accumulate : {false, true}) {
      for (const bool odd : {false, true}) {
        INFO(dtype_name(out) << " accumulate " << accumulate << " odd stride " << odd);
        lora.linear.accumulate = accumulate;
        lora.linear.odd_stride = odd;
        check_values(lora.linear, lora.run(slots, scales), &lora.adapters);
        const WithoutGemm none;
        check_values(lora.linear, lora.run(slots, scales), &lora.adapters);
        check_values(lora.linear, lora.linear.run());
      }
    }
  }
}

TEST_CASE("linear_cuda with LoRA equals the formula") {
  if (gpu() == nullptr) {
    return;
  }
  const std::vector<int32_t> ranks = {1, 5, 8, 12, 33, 64};
  std::vector<Shape> shapes;
  for (int32_t rows = 1; rows <= 40; ++rows) {
    shapes.push_back({rows, rows % 2 == 0 ? 96 : 200, {60, 1, 64}});
  }
  shapes.push_back({8, 48, {130, 8, 60}});
  shapes.push_back({24, 64, {130, 8, 60}});
  shapes.push_back({6, 2880, {130, 64, 8}});
  shapes.push_back({64, 200, {130, 60, 8}});
  shapes.push_back({300, 96, {64, 130, 60}});
  for (const Shape& shape : shapes) {
    for (const Dtype out : {Dtype::kF32, Dtype::kBf16}) {
      const Dtype weight = out == Dtype::kF32 && shape.rows % 5 == 0 ? Dtype::kF32 : Dtype::kBf16;
      INFO(text(shape) << " weights " << dtype_name(weight) << " out " << dtype_name(out));
      LoraCase lora(shape, ranks, weight, out, static_cast<uint32_t>(shape.rows));
      lora.linear.accumulate = shape.rows % 3 == 0;
      const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(ranks.size()));
      const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
      const auto result = lora.run(slots, scales);
      check_values(lora.linear, result, &lora.adapters);
      CHECK(result == lora.run(slots, scales));
    }
  }
}

TEST_CASE("linear_cuda: ranks up to 256, a batch of one adapter, of none, and every row its own") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {1, 7, 32, 70}) {
    const Shape shape{rows, 200, {130, 60}};
    LoraCase lora(shape, {256, 64, 1}, Dtype::kBf16, Dtype::kF32, 4);
    const std::vector<float> scales(static_cast<size_t>(rows), 0.75f);
    for (const int32_t slot : {0, 1, 2, 3}) {
      INFO(text(shape) << " all in slot " << slot);
      const std::vector<int32_t> slots(static_cast<size_t>(rows), slot);
      check_values(lora.linear, lora.run(slots, scales), &lora.adapters);
    }
  }
  for (const int32_t rows : {8, 30, 64}) {
    const Shape shape{rows, 96, {64, 60, 1}};
    INFO(text(shape) << " every row its own adapter");
    std::vector<int32_t> ranks;
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < rows; ++t) {
      ranks.push_back(1 + t % 17);
      slots.push_back(rows - t);
    }
    LoraCase lora(shape, ranks, Dtype::kBf16, Dtype::kF32, 5);
    check_values(lora.linear, lora.run(slots, draw_scales(lora.draw, rows)), &lora.adapters);
  }
}

TEST_CASE("linear_cuda: rows without a delta keep the bits of a batch without LoRA") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {1, 5, 16, 31, 40, 130}) {
    for (const Dtype out : {Dtype::kF32, Dtype::kBf16}) {
      const Shape shape{rows, 200, {130, 60, 1}};
      INFO(text(shape) << " out " << dtype_name(out));
      LoraCase lora(shape, {8, 33, 12}, Dtype::kBf16, out, 6);
      const auto base = lora.linear.run();
      const std::vector<int32_t> slots = draw_slots(lora.draw, rows, 3);
      const std::vector<float> scales = draw_scales(lora.draw, rows);
      const auto mixed = lora.run(slots, scales);
      for (size_t p = 0; p < 3; ++p) {
        for (int32_t t = 0; t < rows; ++t) {
          const auto index = static_cast<size_t>(t);
          double factor = 0.0;
          const bool adapted =
              lora.adapters.dense(t, CudaLinearCase::kLayer, static_cast<LoraModule>(p), &factor) != nullptr;
          INFO("part " << p << " row " << t << " slot " << slots[index] << " scale " << scales[index]);
          if (!adapted || scales[index] == 0.0f) {
            CHECK(lora.same_row(base, mixed, p, t));
          } else if (shape.outputs[p] > 1) {
            CHECK_FALSE(lora.same_row(base, mixed, p, t));
          }
        }
      }
    }
  }
}

// Outputs in whole groups of four, of eight and of neither, more than a warp takes, with the bias in cuBLASLt's product
// and after it.
TEST_CASE("linear_cuda of many rows: LoRA after a product with and without its bias") {
  if (gpu() == nullptr) {
    return;
  }
  struct Case {
    std::vector<int32_t> outputs;
    Dtype out;
    Dtype bias;
  };
  const std::vector<Case> cases = {
      {{260, 132, 64}, Dtype::kF32, Dtype::kBf16},  {{33, 260, 130}, Dtype::kF32, Dtype::kBf16},
      {{260, 132, 64}, Dtype::kF32, Dtype::kF32},   {{33, 260, 130}, Dtype::kF32, Dtype::kF32},
      {{520, 264, 64}, Dtype::kBf16, Dtype::kBf16}, {{520, 264, 64}, Dtype::kBf16, Dtype::kF32},
      {{296, 8, 256}, Dtype::kBf16, Dtype::kBf16},  {{260, 33, 64}, Dtype::kBf16, Dtype::kBf16},
  };
  for (const auto& [outputs, out, bias] : cases) {
    const Shape shape{197, 200, outputs};
    LoraCase lora(shape, {8, 33, 32, 70}, Dtype::kBf16, out, 10, bias);
    const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, 4);
    const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
    for (const bool accumulate : {false, true}) {
      INFO(text(shape) << " out " << dtype_name(out) << " bias " << dtype_name(bias) << " accumulate " << accumulate);
      lora.linear.accumulate = accumulate;
      const auto result = lora.run(slots, scales);
      check_values(lora.linear, result, &lora.adapters);
      CHECK(result == lora.run(slots, scales));
      const auto base = lora.run(std::vector<int32_t>(slots.size(), 0), scales);
      CHECK(base == lora.linear.run());
      for (size_t p = 0; p < outputs.size(); ++p) {
        for (int32_t t = 0; t < shape.rows; ++t) {
          if (slots[static_cast<size_t>(t)] == 0) {
            INFO("part " << p << " row " << t);
            CHECK(lora.same_row(base, result, p, t));
          }
        }
      }
    }
  }
}

TEST_CASE("linear_cuda: neighbours' adapters do not change a row, not even with NaN in them") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t rows : {6, 16, 32, 90}) {
    const Shape shape{rows, 136, {130, 60, 8}};
    INFO(text(shape));
    Draw draw(7);
    std::vector<TestAdapter> list = draw_adapters(draw, {8, 33, 12, 16}, shape);
    for (auto& entry : list[3].dense) {
      std::fill(entry.second.a.begin(), entry.second.a.end(), std::numeric_limits<float>::quiet_NaN());
      std::fill(entry.second.b.begin(), entry.second.b.end(), std::numeric_limits<float>::infinity());
    }
    AdapterFixture adapters(std::move(list), 2, 1, 3, 8);
    DeviceAdapters device(adapters);
    CudaLinearCase linear(rows, shape.k, shape.outputs, 9);
    adapt_all(linear);
    const size_t scratch = device.scratch_bytes(static_cast<size_t>(rows), static_cast<size_t>(shape.k));
    std::vector<int32_t> slots = draw_slots(draw, rows, 3);
    const std::vector<float> scales(slots.size(), 1.25f);
    const auto before = linear.run(device.batch(slots, scales), scratch);
    for (size_t t = 0; t < slots.size(); t += 2) {
      slots[t] = t % 4 == 0 ? 4 : (slots[t] + 1) % 4;
    }
    const auto after = linear.run(device.batch(slots, scales), scratch);
    for (size_t p = 0; p < 3; ++p) {
      const auto n = static_cast<size_t>(shape.outputs[p]);
      for (size_t t = 1; t < slots.size(); t += 2) {
        INFO("part " << p << " row " << t << " slot " << slots[t]);
        CHECK(same_bits(before[p].data() + t * n, after[p].data() + t * n, n));
      }
    }
  }
}

TEST_CASE("linear_cuda of 9 to 64 rows, few and many outputs, K cut into any number of ranges") {
  if (gpu() == nullptr) {
    return;
  }
  const std::vector<Shape> shapes = {
      {9, 8, {60, 1, 64}},   {33, 72, {130, 8, 60}},  {64, 200, {32}},         {40, 448, {128, 60}},
      {63, 520, {30, 65}},   {31, 2880, {32}},        {10, 72, {1100, 60, 1}}, {64, 576, {1100, 60}},
      {17, 2880, {1100, 8}}, {40, 1024, {4096, 512}}, {50, 4096, {1030}},      {32, 200, {33, 2050, 129}},
  };
  const std::vector<int32_t> ranks = {8, 33, 5, 256, 64};
  for (const Shape& shape : shapes) {
    const Dtype out = shape.rows % 2 == 0 ? Dtype::kF32 : Dtype::kBf16;
    INFO(text(shape) << " out " << dtype_name(out));
    LoraCase lora(shape, ranks, Dtype::kBf16, out, static_cast<uint32_t>(100 + shape.rows));
    lora.linear.accumulate = shape.rows % 3 == 0;
    lora.linear.odd_stride = shape.rows % 5 == 0;
    const auto base = lora.linear.run();
    check_values(lora.linear, base);
    CHECK(base == lora.linear.run());
    std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(ranks.size()));
    const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
    const auto mixed = lora.run(slots, scales);
    check_values(lora.linear, mixed, &lora.adapters);
    CHECK(mixed == lora.run(slots, scales));
    lora.linear.repeats = lora.linear.accumulate ? 1 : 4;
    CHECK(mixed == lora.run(slots, scales));
    const std::vector<int32_t> kept = slots;
    for (size_t t = 0; t < slots.size(); t += 2) {
      slots[t] = (slots[t] + 1) % static_cast<int32_t>(ranks.size() + 1);
    }
    const auto others = lora.run(slots, scales);
    for (size_t p = 0; p < shape.outputs.size(); ++p) {
      for (int32_t t = 0; t < shape.rows; ++t) {
        INFO("part " << p << " row " << t << " slot " << kept[static_cast<size_t>(t)]);
        if (kept[static_cast<size_t>(t)] == 0 || scales[static_cast<size_t>(t)] == 0.0f) {
          CHECK(lora.same_row(base, mixed, p, t));
        }
        if (t % 2 == 1) {
          CHECK(lora.same_row(mixed, others, p, t));
        }
      }
    }
  }
}

TEST_CASE("linear_cuda of few rows, more of K than a block holds at once") {
  if (gpu() == nullptr) {
    return;
  }
  const std::vector<int32_t> ranks = {32, 40, 7};
  for (const Shape& shape : {Shape{8, 1032, {8600}}, Shape{20, 1032, {8600}}, Shape{64, 1032, {8600}},
                             Shape{64, 2880, {1900, 1900, 1200}}, Shape{3, 4096, {2880}}}) {
    const Dtype out = shape.rows % 8 == 0 ? Dtype::kF32 : Dtype::kBf16;
    INFO(text(shape) << " out " << dtype_name(out));
    LoraCase lora(shape, ranks, Dtype::kBf16, out, static_cast<uint32_t>(200 + shape.rows));
    const auto base = lora.linear.run();
    check_values(lora.linear, base);
    CHECK(base == lora.linear.run());
    const std::vector<int32_t> slots = draw_slots(lora.draw, shape.rows, static_cast<int32_t>(ranks.size()));
    const std::vector<float> scales = draw_scales(lora.draw, shape.rows);
    const auto mixed = lora.run(slots, scales);
    check_values(lora.linear, mixed, &lora.adapters);
    for (int i = 0; i < 5; ++i) {
      CHECK(mixed == lora.run(slots, scales));
    }
    for (int32_t t = 0; t < shape.rows; ++t) {
      if (slots[static_cast<size_t>(t)] == 0) {
        INFO("row " << t);
        CHECK(lora.same_row(base, mixed, 0, t));
      }
    }
  }
}

TEST_CASE("linear_cuda of no rows does nothing and refuses what it cannot do before launching") {
  if (gpu() == nullptr) {
    return;
  }
  LinearArgs args;
  args.x.dtype = Dtype::kBf16;
  linear_cuda(args, *gpu()->stream);
  args.x.dtype = Dtype::kF32;
  CHECK_THROWS_AS(linear_cuda(args, *gpu()->stream), Error);
}
