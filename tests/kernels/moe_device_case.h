// SPDX-License-Identifier: Apache-2.0
// One drawn MoE layer in device memory for moe_gate_up_test_cuda and moe_down_test_cuda: experts in any storage;
// choices and their order by definition; adapters. Inputs are exact in bf16.
// Oracles are in double and go through rank space, since merging experts of rank 256 would take too long. Where a way
// rounds the shrunk values to bf16, the oracle goes on with those that it has made, once they are the formula's but for
// that rounding.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "tests/kernels/device_experts.h"
#include "tests/kernels/moe_device_order.h"
#include "tests/kernels/moe_shape.h"
#include "tests/support/compare.h"
#include "tests/support/device_adapters.h"
#include "tests/support/device_buffer.cuh"
#include "tests/support/draw.h"
#include "tests/support/launch_count.cuh"

namespace moelora::test {

// Which modules an adapter has, as bits.
constexpr int32_t kGateBit = 1;
constexpr int32_t kUpBit = 2;
constexpr int32_t kDownBit = 4;

struct AdapterKind {
  std::vector<int32_t> ranks;  // in turn by expert
  int32_t modules = kGateBit | kUpBit | kDownBit;
  bool bias = false;
  bool share_a = false;
  bool leave_out = false;  // every third expert has nothing
};

class DeviceMoe {
 public:
  static constexpr int32_t kLayer = 1;
  static constexpr int32_t kLayers = 2;
  static constexpr int32_t kPageGranules = 4;

  DeviceMoe(const MoeShape& moe_shape, Store expert_store, bool with_bias, uint32_t seed, int32_t scale_min = 110,
            int32_t scale_max = 125)
      : shape(moe_shape),
        store(expert_store),
        draw(seed),
        gate_up(shape.experts, shape.intermediate, shape.hidden, true, store, scale_min, scale_max, draw),
        down(shape.experts, shape.hidden, shape.intermediate, false, store, scale_min, scale_max, draw),
        x(rounded_to_bf16(draw.floats(static_cast<size_t>(shape.rows * shape.hidden)))),
        act(rounded_to_bf16(draw.floats(static_cast<size_t>(shape.rows * shape.top_k * shape.intermediate)))),
        choice(shape.one_expert ? std::vector<int32_t>(static_cast<size_t>(shape.rows), shape.experts - 1)
                                : draw_choices(draw, shape.rows, shape.top_k, shape.experts)) {
    if (with_bias) {
      for (const int32_t width : {shape.intermediate, shape.intermediate, shape.hidden}) {
        bias.push_back(draw.floats(static_cast<size_t>(shape.experts * width), 2.0f));
        bias_device.emplace_back(bias.back());
      }
    }
    use({}, {});
  }

  TestAdapter draw_adapter(const AdapterKind& kind) {
    TestAdapter adapter;
    adapter.share_a = kind.share_a;
    for (int32_t e = 0; e < shape.experts; ++e) {
      const int32_t rank = kind.ranks[static_cast<size_t>(e) % kind.ranks.size()];
      for (int32_t m = 0; m < kNumExpertModules; ++m) {
        if ((kind.modules >> m & 1) == 0 || (kind.leave_out && e % 3 == 2)) {
          continue;
        }
        const bool is_down = m == 2;
        LoraPair pair = draw_pair(draw, rank, is_down ? shape.intermediate : shape.hidden,
                                  is_down ? shape.hidden : shape.intermediate, Dtype::kBf16, kind.bias);
        pair.scale *= 0.25f;
        const LoraPair* gate = adapter.find(kLayer, e, ExpertModule::kGate);
        if (kind.share_a && m == 1 && gate != nullptr) {
          pair.a = gate->a;
        }
        adapter.experts[{kLayer, e, static_cast<ExpertModule>(m)}] = pair;
        if (e == 0) {  // another layer's record must not be taken
          adapter.experts[{0, e, static_cast<ExpertModule>(m)}] =
              draw_pair(draw, rank, pair.k, pair.n, Dtype::kBf16, false);
        }
      }
    }
    return adapter;
  }
  void set_adapters(const std::vector<TestAdapter>& list, uint32_t seed) {
    device_adapters.reset();
    fixture.emplace(list, kLayers, shape.experts, kPageGranules, seed);
    device_adapters.emplace(*fixture);
  }

  // Slots and scales of the rows; empty slots: a batch without adapters.
  void use(const std::vector<int32_t>& slots, const std::vector<float>& scales) {
    for (int32_t m = 0; m < kNumExpertModules; ++m) {
      expected_[m].clear();
      base_[m].clear();
    }
    rounded_.clear();
    order = MoeOrderArrays(choice.size(), static_cast<size_t>(shape.experts));
    order.fill(choice, slots, shape.top_k);
    device_order.emplace(order);
    pair_of.assign(choice.size(), 0);
    for (size_t p = 0; p < choice.size(); ++p) {
      pair_of[static_cast<size_t>(order.pair_position[p])] = static_cast<int32_t>(p);
    }
    lora = slots.empty()
               ? nullptr
               : device_adapters->batch(slots, scales.empty() ? std::vector<float>(slots.size(), 1.0f) : scales);
  }
  [[nodiscard]] size_t pairs() const { return choice.size(); }

  // Sorted order, [P, I].
  std::vector<float> run_gate_up(ExpertPath path, MoeActivation activation, Dtype dtype) {
    const int64_t stride = padded(shape.intermediate);
    const DeviceBuffer in = device_rows(with_padding(x, shape.hidden, padded(shape.hidden)), Dtype::kBf16);
    const DeviceBuffer out(pairs() * static_cast<size_t>(stride) * dtype_bytes(dtype));
    const DeviceBuffer scratch(scratch_bytes(2));
    MoeGateUpArgs args;
    args.x = {in.data(), Dtype::kBf16, padded(shape.hidden)};
    args.gate = gate_up.view(0, bias_device.empty() ? nullptr : bias_device[0].as<float>());
    args.up = gate_up.view(1, bias_device.empty() ? nullptr : bias_device[1].as<float>());
    args.order = device_order->view();
    args.num_rows = shape.rows;
    args.top_k = shape.top_k;
    args.num_experts = shape.experts;
    args.layer = kLayer;
    args.lora = lora;
    args.activation = activation;
    args.limit = 7.0f;
    args.act = {out.data(), dtype, stride};
    args.scratch = scratch.as<std::byte>();
    args.scratch_bytes = scratch.size();
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    launches = counts ? launches_of([&] { moe_gate_up_cuda_by(path, args, *gpu()->stream); }) : 0;
    for (int32_t i = 0; i < repeats; ++i) {
      moe_gate_up_cuda_by(path, args, *gpu()->stream);
    }
    keep_rounded(path, scratch, 2);
    return finish(out, dtype, shape.intermediate, scratch);
  }
  // Sorted order, [P, H].
  std::vector<float> run_down(ExpertPath path, Dtype dtype) {
    const int64_t stride = padded(shape.hidden);
    std::vector<float> sorted;
    for (const int32_t p : pair_of) {
      sorted.insert(sorted.end(), act.begin() + int64_t{p} * shape.intermediate,
                    act.begin() + int64_t{p + 1} * shape.intermediate);
    }
    const DeviceBuffer in =
        device_rows(with_padding(sorted, shape.intermediate, padded(shape.intermediate)), Dtype::kBf16);
    const DeviceBuffer out(pairs() * static_cast<size_t>(stride) * dtype_bytes(dtype));
    const DeviceBuffer scratch(scratch_bytes(1));
    MoeDownArgs args;
    args.act = {in.data(), Dtype::kBf16, padded(shape.intermediate)};
    args.down = down.view(0, bias_device.empty() ? nullptr : bias_device[2].as<float>());
    args.order = device_order->view();
    args.num_rows = shape.rows;
    args.top_k = shape.top_k;
    args.num_experts = shape.experts;
    args.layer = kLayer;
    args.lora = lora;
    args.out = {out.data(), dtype, stride};
    args.scratch = scratch.as<std::byte>();
    args.scratch_bytes = scratch.size();
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    launches = counts ? launches_of([&] { moe_down_cuda_by(path, args, *gpu()->stream); }) : 0;
    for (int32_t i = 0; i < repeats; ++i) {
      moe_down_cuda_by(path, args, *gpu()->stream);
    }
    keep_rounded(path, scratch, 1);
    return finish(out, dtype, shape.hidden, scratch);
  }

  // Projection m (0 gate, 1 up, 2 down) of sorted pair i, all outputs.
  [[nodiscard]] std::vector<double> project(int32_t m, size_t i) const {
    std::vector<double> result = base(m, i);
    double factor = 0.0;
    const LoraPair* pair = pair_at(m, i, &factor);
    if (pair == nullptr) {
      return result;
    }
    const std::vector<double> values = shrunk(m, i, *pair, factor);
    for (size_t n = 0; n < result.size(); ++n) {
      for (size_t r = 0; r < values.size(); ++r) {
        result[n] += values[r] * static_cast<double>(pair->b[n * values.size() + r]);
      }
      result[n] += factor * pair->bias_at(static_cast<int32_t>(n));
    }
    return result;
  }
  [[nodiscard]] std::vector<double> expected_gate_up(size_t i, MoeActivation activation) const {
    const std::vector<double> gate = project(0, i);
    const std::vector<double> up = project(1, i);
    std::vector<double> result;
    for (size_t n = 0; n < gate.size(); ++n) {
      if (activation == MoeActivation::kSilu) {
        result.push_back(gate[n] / (1.0 + std::exp(-gate[n])) * up[n]);
      } else {
        const double g = std::min(gate[n], 7.0);
        const double u = std::min(std::max(up[n], -7.0), 7.0);
        result.push_back((u + 1.0) * g / (1.0 + std::exp(-1.702 * g)));
      }
    }
    return result;
  }
  // Largest relative error of any pair of the last run.
  [[nodiscard]] double error_gate_up(const std::vector<float>& actual, MoeActivation activation) {
    return largest_error(actual, static_cast<size_t>(activation),
                         [&](size_t i) { return expected_gate_up(i, activation); });
  }
  [[nodiscard]] double error_down(const std::vector<float>& actual) {
    return largest_error(actual, 2, [&](size_t i) { return project(2, i); });
  }
  // Whether a run by `path` rounds the shrunk values to bf16, and multiplies B with zeros for the rows of others.
  [[nodiscard]] bool rounds_shrunk(ExpertPath path) const {
    int major = 0;
    REQUIRE(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
    const bool may_choose = path == ExpertPath::kAuto || path == ExpertPath::kFewRowsBeside;
    const bool is_many = pairs() >= static_cast<size_t>(kManyTokensPerExpert) * static_cast<size_t>(shape.experts);
    return major == 9 && (((is_many_tokens(path) && path != ExpertPath::kManyTokensMma) || (may_choose && is_many)));
  }
  // The largest value that an adapter's B may have there: infinity, where rows of others do not see it.
  [[nodiscard]] float largest_b(ExpertPath path) const {
    return rounds_shrunk(path) ? bf16_to_f32(0x7F7F) : std::numeric_limits<float>::infinity();
  }
  // Sorted order into [row][choice][width].
  [[nodiscard]] std::vector<float> by_choice(const std::vector<float>& sorted, int32_t width) const {
    std::vector<float> result;
    for (const int32_t position : order.pair_position) {
      result.insert(result.end(), sorted.begin() + int64_t{position} * width,
                    sorted.begin() + int64_t{position + 1} * width);
    }
    return result;
  }

  MoeShape shape;
  Store store;
  Draw draw;
  DeviceExperts gate_up, down;
  std::vector<float> x;    // [T, H]
  std::vector<float> act;  // [T * K, I] by choice
  std::vector<int32_t> choice;
  std::vector<std::vector<float>> bias;  // gate, up, down; or none
  std::vector<DeviceBuffer> bias_device;
  std::optional<AdapterFixture> fixture;
  std::optional<DeviceAdapters> device_adapters;
  MoeOrderArrays order{0, 0};
  std::optional<DeviceMoeOrder> device_order;
  std::vector<int32_t> pair_of;  // [P] t * K + j of a sorted pair
  const LoraBatch* lora = nullptr;
  bool intact = true;   // nothing outside of the results was written
  int32_t repeats = 1;  // of an op, one behind the other
  bool counts = false;
  bool room_for_tokens = true;  // in scratch, for arranged tokens
  size_t launches = 0;          // of the last run's op, if it counts

 private:
  // What is expected is remembered until the next use(), but for rounded values.
  template <class Expected>
  double largest_error(const std::vector<float>& actual, size_t which, const Expected& expected) {
    double largest = 0.0;
    auto at = actual.begin();
    for (size_t i = 0; i < pairs(); ++i) {
      if (expected_[which].size() <= i && rounded_.empty()) {
        expected_[which].push_back(expected(i));
      }
      const std::vector<double> row = rounded_.empty() ? expected_[which][i] : expected(i);
      const auto end = at + static_cast<int64_t>(row.size());
      largest = std::max(largest, relative_error({at, end}, row));
      at = end;
    }
    return largest;
  }
  [[nodiscard]] const float* input(int32_t m, size_t i) const {
    return m == 2 ? act.data() + int64_t{pair_of[i]} * shape.intermediate
                  : x.data() + int64_t{order.pair_row[i]} * shape.hidden;
  }
  [[nodiscard]] int32_t expert_of(size_t i) const { return choice[static_cast<size_t>(pair_of[i])]; }
  [[nodiscard]] const LoraPair* pair_at(int32_t m, size_t i, double* factor) const {
    return lora == nullptr
               ? nullptr
               : fixture->expert(order.pair_row[i], kLayer, expert_of(i), static_cast<ExpertModule>(m), factor);
  }
  // Without adapters; pairs are asked for in turn.
  [[nodiscard]] const std::vector<double>& base(int32_t m, size_t i) const {
    for (size_t next = base_[m].size(); next <= i; ++next) {
      const int32_t e = expert_of(next);
      const int32_t width = m == 2 ? shape.hidden : shape.intermediate;
      std::vector<double> row;
      for (int32_t n = 0; n < width; ++n) {
        const float* of_expert = bias.empty() ? nullptr : bias[static_cast<size_t>(m)].data() + int64_t{e} * width;
        row.push_back((m == 2 ? down : gate_up).dot(e, m == 1 ? 1 : 0, n, input(m, next)) +
                      (of_expert != nullptr ? static_cast<double>(of_expert[n]) : 0.0));
      }
      base_[m].push_back(row);
    }
    return base_[m][i];
  }
  // Times their scale. NaN where rounded ones are not the formula's.
  [[nodiscard]] std::vector<double> shrunk(int32_t m, size_t i, const LoraPair& pair, double factor) const {
    std::vector<double> result;
    double largest = 0.0;
    for (int32_t r = 0; r < pair.rank; ++r) {
      double sum = 0.0;
      for (int32_t k = 0; k < pair.k; ++k) {
        sum += static_cast<double>(pair.a[static_cast<size_t>(r * pair.k + k)]) * static_cast<double>(input(m, i)[k]);
      }
      result.push_back(factor * sum);
      largest = std::max(largest, std::abs(result.back()));
    }
    const size_t modules = m == 2 ? 1 : 2;
    const size_t first = (i * modules + (m == 1 ? 1 : 0)) * static_cast<size_t>(lora->rank_stride);
    bool right = true;
    for (size_t r = 0; !rounded_.empty() && r < (result.size() + 7) / 8 * 8; ++r) {
      const double value = static_cast<double>(bf16_to_f32(rounded_[first + r]));
      if (r >= result.size()) {
        right = right && value == 0.0;
        continue;
      }
      const double allowed = std::ldexp(std::abs(result[r]), -8) + 5e-5 * largest;
      right = right && std::abs(value - result[r]) <= allowed;
      result[r] = value;
    }
    if (!right) {
      result[0] = std::numeric_limits<double>::quiet_NaN();
    }
    return result;
  }
  void keep_rounded(ExpertPath path, const DeviceBuffer& scratch, size_t modules) {
    rounded_.clear();
    if (lora != nullptr && rounds_shrunk(path)) {
      rounded_ = scratch.read<uint16_t>();
      rounded_.resize(pairs() * modules * static_cast<size_t>(lora->rank_stride));
    }
  }
  static int64_t padded(int32_t width) { return (width + 7) / 8 * 8 + 8; }
  static std::vector<float> with_padding(const std::vector<float>& values, int32_t width, int64_t stride) {
    std::vector<float> result(values.size() / static_cast<size_t>(width) * static_cast<size_t>(stride),
                              std::numeric_limits<float>::quiet_NaN());
    for (size_t i = 0; i < values.size(); ++i) {
      result[i / static_cast<size_t>(width) * static_cast<size_t>(stride) + i % static_cast<size_t>(width)] = values[i];
    }
    return result;
  }
  [[nodiscard]] size_t scratch_bytes(size_t modules) const {
    const auto rows = static_cast<size_t>(modules == 2 ? shape.intermediate : shape.hidden);
    const auto width = static_cast<size_t>(modules == 2 ? shape.hidden : shape.intermediate);
    const size_t rank_stride = lora == nullptr ? 0 : static_cast<size_t>(lora->rank_stride);
    const size_t tokens = expert_token_bytes(pairs(), static_cast<size_t>(shape.experts), width);
    return std::max(lora == nullptr ? 0 : expert_scratch_bytes(pairs(), modules, rank_stride, rows),
                    room_for_tokens ? pairs() * modules * rank_stride * sizeof(float) + tokens : 0);
  }
  std::vector<float> finish(const DeviceBuffer& out, Dtype dtype, int32_t width, const DeviceBuffer& scratch) {
    const std::vector<float> all = read_rows(out, dtype);
    const std::vector<char> raw = out.read<char>();
    const auto stride = static_cast<size_t>(padded(width));
    std::vector<float> values;
    for (size_t i = 0; i < pairs(); ++i) {
      values.insert(values.end(), all.begin() + static_cast<int64_t>(i * stride),
                    all.begin() + static_cast<int64_t>(i * stride) + width);
      const size_t end = (i * stride + static_cast<size_t>(width)) * dtype_bytes(dtype);
      intact = intact &&
               PoisonedBytes::untouched(raw.data() + end, (stride - static_cast<size_t>(width)) * dtype_bytes(dtype));
    }
    intact = intact && out.guard_intact() && scratch.guard_intact();
    return values;
  }

  std::vector<std::vector<double>> expected_[3];      // silu, clamped SwiGLU, down
  mutable std::vector<std::vector<double>> base_[3];  // gate, up, down
  std::vector<uint16_t> rounded_;                     // the last run's shrunk values, if it has rounded them
};

// Of a row: the result's own rounding, and what fp32 sums leave.
constexpr double moe_tolerance(Dtype dtype) {
  return dtype == Dtype::kF32 ? 1e-4 : 4e-3;
}

inline std::vector<int32_t> slots_modulo(int32_t rows, int32_t num_slots) {
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < rows; ++t) {
    slots.push_back((t + 2) * 5 % (num_slots + 1));
  }
  return slots;
}

}  // namespace moelora::test
