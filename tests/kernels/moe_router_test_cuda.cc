// SPDX-License-Identifier: Apache-2.0
// moe_router_cuda: the bits of its three ops one after the other, on both sides of what it does in one launch, and what
// the reference's ops make of the same values; rows without an adapter keep their bits where the router has some.
// Without a GPU it says that it was skipped.
#include "kernels/moe/moe_router.h"

#include <limits>

#include "kernels/moe/router_path.h"
#include "tests/kernels/device_order.h"
#include "tests/support/compare.h"
#include "tests/support/device_adapters.h"
#include "tests/support/device_rows.h"
#include "tests/support/launch_count.cuh"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr float kEps = 1e-5f;
constexpr int32_t kLayer = 1;

enum class Bias { kNone, kF32, kBf16 };

struct Shape {
  int32_t num_rows, width, num_experts, top_k;
  Dtype norm_dtype = Dtype::kF32;
  Bias bias = Bias::kNone;
  bool renormalize = true;
  [[nodiscard]] size_t pairs() const { return static_cast<size_t>(num_rows * top_k); }
};

std::string text(const Shape& shape) {
  return "T=" + std::to_string(shape.num_rows) + " H=" + std::to_string(shape.width) +
         " E=" + std::to_string(shape.num_experts) + " K=" + std::to_string(shape.top_k) + " norm " +
         dtype_name(shape.norm_dtype) + " bias " + std::to_string(static_cast<int>(shape.bias));
}

size_t bytes_of(int32_t rows, int32_t cols, Dtype dtype) {
  return static_cast<size_t>(rows) * static_cast<size_t>(cols) * dtype_bytes(dtype);
}

struct Inputs {
  explicit Inputs(const Shape& shape, uint32_t seed = 511)
      : draw(seed),
        hidden(draw.floats(static_cast<size_t>(shape.num_rows * shape.width), 3.0f)),
        norm(1, shape.width, shape.norm_dtype, draw),
        router(shape.num_experts, shape.width, Dtype::kBf16, draw, 0.2f),
        bias(1, shape.num_experts, shape.bias == Bias::kBf16 ? Dtype::kBf16 : Dtype::kF32, draw),
        hidden_device(shape.num_rows, shape.width, Dtype::kF32, hidden),
        norm_device(norm.data(), bytes_of(1, shape.width, shape.norm_dtype)),
        router_device(router.data(), bytes_of(shape.num_experts, shape.width, Dtype::kBf16)),
        bias_device(bias.data(), bytes_of(1, shape.num_experts, bias.view().dtype)) {}
  Draw draw;
  std::vector<float> hidden;
  StoredMatrix norm, router, bias;
  DeviceRows hidden_device;
  DeviceBuffer norm_device, router_device, bias_device;
};

struct Outputs {
  explicit Outputs(const Shape& shape)
      : normed(shape.num_rows, shape.width, Dtype::kBf16),
        logits(shape.num_rows, shape.num_experts, Dtype::kF32),
        ids(shape.pairs() * 4),
        weights(shape.pairs() * 4),
        order(shape.pairs(), static_cast<size_t>(shape.num_experts)) {}
  [[nodiscard]] bool intact() const {
    return normed.padding_intact() && logits.padding_intact() && ids.guard_intact() && weights.guard_intact();
  }
  DeviceRows normed, logits;
  DeviceBuffer ids, weights;
  DeviceOrder order;
};

MoeRouterArgs router_args(const Shape& shape, const Inputs& in, const Outputs& out, const int32_t* row_slot) {
  MoeRouterArgs args;
  args.norm.x = in.hidden_device.view();
  args.norm.weight = {in.norm_device.data(), shape.norm_dtype, 1, shape.width};
  args.norm.eps = kEps;
  args.norm.num_rows = shape.num_rows;
  args.norm.width = shape.width;
  args.norm.out = out.normed.view();
  args.router.x = out.normed.view();
  args.router.num_rows = shape.num_rows;
  args.router.k = shape.width;
  args.router.parts[0] = {{in.router_device.data(), Dtype::kBf16, shape.num_experts, shape.width},
                          {in.bias_device.data(), in.bias.view().dtype, 1, shape.num_experts},
                          out.logits.view(),
                          LoraModule::kRouter};
  if (shape.bias == Bias::kNone) {
    args.router.parts[0].bias = {};
  }
  args.router.num_parts = 1;
  args.router.layer = kLayer;
  args.route.topk = {out.logits.view(),     shape.num_rows,    shape.num_experts,     shape.top_k,
                     RouterScore::kSoftmax, shape.renormalize, out.ids.as<int32_t>(), out.weights.as<float>()};
  args.route.row_slot = row_slot;
  args.route.order = out.order.view(true);
  return args;
}

// Bits of everything, the order as far as it says something.
void check_same(const Outputs& a, const Outputs& b) {
  CHECK(same_bits(a.normed.values(), b.normed.values()));
  CHECK(same_bits(a.logits.values(), b.logits.values()));
  CHECK(a.ids.read<int32_t>() == b.ids.read<int32_t>());
  CHECK(same_bits(a.weights.read<float>(), b.weights.read<float>()));
  CHECK(a.order.pair_row.read<int32_t>() == b.order.pair_row.read<int32_t>());
  CHECK(a.order.pair_position.read<int32_t>() == b.order.pair_position.read<int32_t>());
}

// What the reference's ops give, each from what the device gave to its own.
void check_reference(const Shape& shape, const Inputs& in, const Outputs& out) {
  const auto rows = static_cast<size_t>(shape.num_rows);
  Stream stream(1, 0);
  PoisonedRows hidden(shape.num_rows, shape.width, in.hidden);
  PoisonedRows normed(shape.num_rows, shape.width);
  rms_norm_cpu({hidden.view(), nullptr, in.norm.view(), kEps, shape.num_rows, shape.width, normed.view()}, stream);
  const std::vector<float> expected_rows = normed.values();
  const std::vector<float> device_rows = out.normed.values();
  for (size_t t = 0; t < rows; ++t) {
    const auto at = static_cast<int64_t>(t) * shape.width;
    const std::vector<float> actual(device_rows.begin() + at, device_rows.begin() + at + shape.width);
    const std::vector<double> expected(expected_rows.begin() + at, expected_rows.begin() + at + shape.width);
    CHECK(relative_error(actual, expected) <= 4e-3);
  }
  const PoisonedRows rounded(shape.num_rows, shape.width, device_rows);
  PoisonedRows logits(shape.num_rows, shape.num_experts);
  LinearArgs linear;
  linear.x = rounded.view();
  linear.num_rows = shape.num_rows;
  linear.k = shape.width;
  linear.parts[0] = {in.router.view(), shape.bias == Bias::kNone ? Weight{} : in.bias.view(), logits.view()};
  linear.num_parts = 1;
  const PoisonedBytes scratch(linear_scratch_bytes(rows, static_cast<size_t>(shape.width), 0, 0));
  linear.scratch = scratch.data();
  linear.scratch_bytes = scratch.size();
  linear_cpu(linear, stream);
  const std::vector<float> expected_logits = logits.values();
  const std::vector<float> device_logits = out.logits.values();
  CHECK(relative_error(device_logits, {expected_logits.begin(), expected_logits.end()}) <= 1e-4);
  PoisonedRows stored(shape.num_rows, shape.num_experts, device_logits);
  std::vector<int32_t> ids(shape.pairs());
  std::vector<float> weights(shape.pairs());
  router_topk_cpu({stored.view(), shape.num_rows, shape.num_experts, shape.top_k, RouterScore::kSoftmax,
                   shape.renormalize, ids.data(), weights.data()},
                  stream);
  CHECK(out.ids.read<int32_t>() == ids);
  CHECK(relative_error(out.weights.read<float>(), {weights.begin(), weights.end()}) <= 1e-5);
}

// Whether a shape is one launch on this GPU.
bool in_one(const Shape& shape) {
  return cuda_state(*gpu()->stream).compute_capability >= 90 && shape.num_rows <= 8 && shape.num_experts <= 128 &&
         shape.width <= 4096 && shape.norm_dtype != Dtype::kF16;
}

void check_router(const Shape& shape, const std::vector<int32_t>& row_slot) {
  INFO(text(shape) << (row_slot.empty() ? "" : " with slots"));
  const Inputs in(shape);
  const DeviceBuffer slots(row_slot);
  const int32_t* const device_slots = row_slot.empty() ? nullptr : slots.as<int32_t>();
  const Outputs apart(shape);
  const MoeRouterArgs three = router_args(shape, in, apart, device_slots);
  rms_norm_cuda(three.norm, *gpu()->stream);
  linear_cuda(three.router, *gpu()->stream);
  moe_route_cuda(three.route, *gpu()->stream);
  for (int run = 0; run < 2; ++run) {
    const Outputs out(shape);
    const MoeRouterArgs args = router_args(shape, in, out, device_slots);
    if (run == 0) {
      const size_t launches = launches_of([&] { moe_router_cuda_by(RouterPath::kOne, args, *gpu()->stream); });
      CHECK((launches == 1) == in_one(shape));
    }
    moe_router_cuda_by(RouterPath::kOne, args, *gpu()->stream);
    check_same(out, apart);
    CHECK(out.intact());
    check_order(out.order, out.ids.read<int32_t>(), row_slot, shape.top_k, shape.num_experts, true);
    if (run == 0) {
      check_reference(shape, in, out);
    }
  }
}

std::vector<int32_t> draw_slots(int32_t num_rows) {
  Draw draw(512);
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < num_rows; ++t) {
    slots.push_back(draw.below(4));
  }
  return slots;
}

}  // namespace

TEST_CASE("moe_router_cuda is rms_norm, linear and moe_route") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 64}) {
    for (const auto& [num_experts, top_k] :
         {std::pair(8, 2), std::pair(32, 4), std::pair(60, 4), std::pair(64, 8), std::pair(128, 8)}) {
      for (const int32_t width : {2880, 2048, 64, 72}) {
        Shape shape{num_rows, width, num_experts, top_k};
        shape.norm_dtype = num_rows % 2 == 0 ? Dtype::kBf16 : Dtype::kF32;
        shape.bias = num_experts == 32 ? Bias::kBf16 : (num_experts == 60 ? Bias::kF32 : Bias::kNone);
        shape.renormalize = num_experts != 64;
        check_router(shape, num_rows % 3 == 1 ? std::vector<int32_t>{} : draw_slots(num_rows));
      }
    }
  }
}

TEST_CASE("moe_router_cuda of other widths and types, and of one expert") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t num_rows : {1, 2, 5, 8}) {
    const std::vector<int32_t> slots = draw_slots(num_rows);
    for (const int32_t width : {8, 1024, 1032, 3000, 3072, 3080, 4096, 4104}) {
      for (const auto& [num_experts, top_k] : {std::pair(32, 4), std::pair(40, 8), std::pair(128, 4)}) {
        check_router({num_rows, width, num_experts, top_k}, slots);
      }
    }
    check_router({num_rows, 2880, 32, 4, Dtype::kF16}, slots);
    check_router({num_rows, 512, 1, 1, Dtype::kBf16, Bias::kBf16}, slots);
    check_router({num_rows, 512, 17, 17, Dtype::kBf16, Bias::kF32, false}, {});
    check_router({num_rows, 512, 128, 32}, slots);
    check_router({num_rows, 512, 129, 8}, slots);
    check_router({num_rows, 512, 256, 8}, slots);
  }
}

TEST_CASE("moe_router_cuda: a row keeps its bits beside NaN and beside adapters of the router") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Shape shape : {Shape{3, 2880, 32, 4}, Shape{8, 2048, 128, 8}, Shape{5, 72, 60, 4}}) {
    INFO(text(shape));
    Inputs in(shape);
    const Outputs base(shape);
    moe_router_cuda_by(RouterPath::kOne, router_args(shape, in, base, nullptr), *gpu()->stream);
    const std::vector<float> before = base.logits.values();
    const auto same_row = [&](const Outputs& out, int32_t t) {
      const auto at = static_cast<size_t>(t * shape.num_experts);
      return same_bits(out.logits.values().data() + at, before.data() + at, static_cast<size_t>(shape.num_experts));
    };
    Draw draw(513);
    TestAdapter adapter;
    adapter.dense[{kLayer, LoraModule::kRouter}] =
        draw_pair(draw, 12, shape.width, shape.num_experts, Dtype::kBf16, false);
    AdapterFixture adapters({adapter}, 2, 1, 3, 514);
    DeviceAdapters device(adapters);
    std::vector<int32_t> slots(static_cast<size_t>(shape.num_rows), 0);
    slots[1] = 1;
    const std::vector<float> scales(slots.size(), 1.0f);
    const Outputs mixed(shape);
    const LoraBatch* const lora = device.batch(slots, scales);
    MoeRouterArgs args = router_args(shape, in, mixed, lora->row_slot);
    const DeviceBuffer scratch(device.scratch_bytes(slots.size(), static_cast<size_t>(shape.width)));
    args.router.lora = lora;
    args.router.scratch = scratch.as<std::byte>();
    args.router.scratch_bytes = scratch.size();
    moe_router_cuda_by(RouterPath::kOne, args, *gpu()->stream);
    std::fill_n(in.hidden.begin() + shape.width, shape.width, std::numeric_limits<float>::quiet_NaN());
    const DeviceRows hidden(shape.num_rows, shape.width, Dtype::kF32, in.hidden);
    const Outputs poisoned(shape);
    args = router_args(shape, in, poisoned, nullptr);
    args.norm.x = hidden.view();
    moe_router_cuda_by(RouterPath::kOne, args, *gpu()->stream);
    for (int32_t t = 0; t < shape.num_rows; ++t) {
      INFO("row " << t);
      CHECK(same_row(mixed, t) == (t != 1));
      CHECK(same_row(poisoned, t) == (t != 1));
    }
  }
}

TEST_CASE("moe_router_cuda of no rows writes nothing, and refuses what it cannot do before launching") {
  if (gpu() == nullptr) {
    return;
  }
  const Shape some{1, 64, 8, 2};
  const Inputs in(some);
  const Outputs out(some);
  MoeRouterArgs args = router_args(some, in, out, nullptr);
  args.norm.num_rows = args.router.num_rows = args.route.topk.num_rows = 0;
  moe_router_cuda_by(RouterPath::kOne, args, *gpu()->stream);
  CHECK(out.order.num_segments.read<int32_t>()[0] == -1);
  args = router_args(some, in, out, nullptr);
  args.norm.x.dtype = Dtype::kF16;
  CHECK_THROWS_AS(moe_router_cuda_by(RouterPath::kOne, args, *gpu()->stream), Error);
}
