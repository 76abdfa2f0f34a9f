// SPDX-License-Identifier: Apache-2.0
// One drawn linear op for linear_test_cuda: runs it on the device between poison, and what it must give in double from
// the stored values (the delta as B (A x), so that large shapes stay cheap).
#pragma once

#include <functional>
#include <vector>

#include "kernels/dense/linear_path.h"
#include "tests/support/compare.h"
#include "tests/support/device_adapters.h"
#include "tests/support/launch_count.cuh"
#include "tests/support/stored_matrix.h"

namespace moelora::test {

struct CudaLinearCase {
  static constexpr int32_t kLayer = 1;

  // Odd parts have a bias.
  CudaLinearCase(int32_t num_rows, int32_t width, std::vector<int32_t> widths, uint32_t seed,
                 Dtype weight_dtype = Dtype::kBf16, Dtype out = Dtype::kF32, Dtype bias_dtype = Dtype::kBf16)
      : rows(num_rows),
        k(width),
        outputs(std::move(widths)),
        out_dtype(out),
        draw(seed),
        x(rounded_to_bf16(draw.floats(static_cast<size_t>(num_rows) * static_cast<size_t>(width)))),
        x_device(padded(x, width, x_stride(), Dtype::kBf16)) {
    for (const int32_t n : outputs) {
      weights.emplace_back(n, width, weight_dtype, draw);
      weights_device.emplace_back(weights.back().data(), bytes_of(n, width, weight_dtype));
      biases.emplace_back(1, n, bias_dtype, draw);
      biases_device.emplace_back(biases.back().data(), bytes_of(1, n, bias_dtype));
      before.push_back(draw.floats(static_cast<size_t>(num_rows) * static_cast<size_t>(n)));
      if (out == Dtype::kBf16) {
        before.back() = rounded_to_bf16(before.back());
      }
      modules.push_back(LoraModule::kNone);
    }
  }

  // Values of part p are result[p], [rows, N].
  std::vector<std::vector<float>> run(const LoraBatch* lora, size_t scratch_bytes) {
    std::vector<DeviceBuffer> outs;
    LinearArgs args;
    args.x = {x_device.data(), Dtype::kBf16, x_stride()};
    args.num_rows = rows;
    args.k = k;
    args.num_parts = static_cast<int32_t>(outputs.size());
    args.accumulate = accumulate;
    args.layer = kLayer;
    args.lora = lora;
    for (size_t p = 0; p < outputs.size(); ++p) {
      const int32_t n = outputs[p];
      const std::vector<float> nothing(before[p].size(), bf16_to_f32(0xFFFF));
      outs.emplace_back(padded(accumulate ? before[p] : nothing, n, out_stride(p), out_dtype));
      args.parts[p] = {weights[p].view(), biases[p].view(), {outs.back().data(), out_dtype, out_stride(p)}, modules[p]};
      args.parts[p].weight.data = weights_device[p].data();
      args.parts[p].bias.data = p % 2 == 1 ? biases_device[p].data() : nullptr;
    }
    const DeviceBuffer scratch(scratch_bytes);
    args.scratch = scratch.as<std::byte>();
    args.scratch_bytes = scratch_bytes;
    launches = counts ? launches_of([&] { linear_cuda_by(path, args, *gpu()->stream); }) : 0;
    for (int32_t i = 0; i < repeats; ++i) {
      if (ahead) {
        ahead();
      }
      linear_cuda_by(path, args, *gpu()->stream);
    }
    std::vector<std::vector<float>> result;
    CHECK(scratch.guard_intact());
    for (size_t p = 0; p < outputs.size(); ++p) {
      CHECK(outs[p].guard_intact());
      const std::vector<float> all = read_rows(outs[p], out_dtype);
      result.push_back(unpadded(all, outputs[p], out_stride(p)));
    }
    return result;
  }
  std::vector<std::vector<float>> run() { return run(nullptr, 64); }

  // `adapters` null: the base alone. Part p, [rows, N].
  [[nodiscard]] std::vector<double> expected(size_t p, const AdapterFixture* adapters = nullptr) const {
    const int32_t n_end = outputs[p];
    std::vector<double> weight;
    for (int32_t n = 0; n < n_end; ++n) {
      for (int32_t i = 0; i < k; ++i) {
        weight.push_back(weights[p].at(n, i));
      }
    }
    std::vector<double> result;
    for (int32_t t = 0; t < rows; ++t) {
      const float* row = x.data() + static_cast<size_t>(t) * static_cast<size_t>(k);
      const std::vector<double> delta = delta_of(p, t, row, adapters);
      for (int32_t n = 0; n < n_end; ++n) {
        const auto index = static_cast<size_t>(t) * static_cast<size_t>(n_end) + static_cast<size_t>(n);
        double sum = delta[static_cast<size_t>(n)];
        sum += p % 2 == 1 ? biases[p].at(0, n) : 0.0;
        sum += accumulate ? static_cast<double>(before[p][index]) : 0.0;
        const double* w = weight.data() + static_cast<size_t>(n) * static_cast<size_t>(k);
        for (int32_t i = 0; i < k; ++i) {
          sum += w[i] * static_cast<double>(row[i]);
        }
        result.push_back(sum);
      }
    }
    return result;
  }

  [[nodiscard]] int64_t x_stride() const { return (k + 7) / 8 * 8 + 8; }
  [[nodiscard]] int64_t out_stride(size_t p) const {
    return odd_stride ? outputs[p] + 1 : (outputs[p] + 15) / 16 * 16 + 16;
  }

  int32_t rows;
  int32_t k;
  std::vector<int32_t> outputs;
  Dtype out_dtype;
  Draw draw;
  std::vector<float> x;
  DeviceBuffer x_device;
  std::vector<StoredMatrix> weights;
  std::vector<DeviceBuffer> weights_device;
  std::vector<StoredMatrix> biases;
  std::vector<DeviceBuffer> biases_device;
  std::vector<std::vector<float>> before;
  std::vector<LoraModule> modules;
  bool accumulate = false;
  bool odd_stride = false;
  LinearPath path = LinearPath::kAuto;
  int32_t repeats = 1;          // of the op, one behind the other; without `accumulate`
  std::function<void()> ahead;  // puts kernels on the stream before each of them
  bool counts = false;
  size_t launches = 0;  // of the last run's op, if it counts

 private:
  static size_t bytes_of(int32_t n, int32_t width, Dtype dtype) {
    return static_cast<size_t>(n) * static_cast<size_t>(width) * dtype_bytes(dtype);
  }
  // Rows with NaN between them.
  [[nodiscard]] DeviceBuffer padded(const std::vector<float>& values, int32_t width, int64_t stride,
                                    Dtype dtype) const {
    std::vector<float> result(static_cast<size_t>(rows * stride), bf16_to_f32(0xFFFF));
    for (int32_t t = 0; t < rows; ++t) {
      std::copy_n(values.begin() + static_cast<int64_t>(t) * width, width, result.begin() + t * stride);
    }
    return device_rows(result, dtype);
  }
  [[nodiscard]] std::vector<float> unpadded(const std::vector<float>& values, int32_t width, int64_t stride) const {
    std::vector<float> result;
    for (int32_t t = 0; t < rows; ++t) {
      const auto row = values.begin() + t * stride;
      result.insert(result.end(), row, row + width);
      CHECK(std::all_of(row + width, row + stride, [](float value) { return std::isnan(value); }));
    }
    return result;
  }
  [[nodiscard]] std::vector<double> delta_of(size_t p, int32_t t, const float* row,
                                             const AdapterFixture* adapters) const {
    std::vector<double> result(static_cast<size_t>(outputs[p]), 0.0);
    double factor = 0.0;
    const LoraPair* pair = adapters != nullptr && modules[p] != LoraModule::kNone
                               ? adapters->dense(t, kLayer, modules[p], &factor)
                               : nullptr;
    if (pair == nullptr) {
      return result;
    }
    for (int32_t r = 0; r < pair->rank; ++r) {
      double shrunk = 0.0;
      for (int32_t i = 0; i < k; ++i) {
        shrunk += static_cast<double>(pair->a[static_cast<size_t>(r * k + i)]) * static_cast<double>(row[i]);
      }
      for (int32_t n = 0; n < outputs[p]; ++n) {
        result[static_cast<size_t>(n)] +=
            factor * shrunk * static_cast<double>(pair->b[static_cast<size_t>(n * pair->rank + r)]);
      }
    }
    for (int32_t n = 0; n < outputs[p]; ++n) {
      result[static_cast<size_t>(n)] += factor * pair->bias_at(n);
    }
    return result;
  }
};

}  // namespace moelora::test
