// SPDX-License-Identifier: Apache-2.0
// Ops allocate nothing: every op of both tables runs on a stream of several threads while the program's allocations are
// counted, once it has run before (the first call may choose a CPU target).
#include "tests/kernels/moe_case.h"
#include "tests/support/allocation_counter.h"
#include "tests/support/catch.h"
#include "tests/support/kv_fixture.h"

using namespace moelora;
using namespace moelora::test;

namespace {

template <class Op>
int second_run(const Op& op) {
  op();
  return allocations_of(op);
}

constexpr int32_t kRows = 9;
constexpr int32_t kHidden = 96;
constexpr int32_t kExperts = 6;
constexpr int32_t kTopK = 2;

// All arguments of one layer's ops, drawn and allocated before anything is counted.
struct Layer {
  Layer()
      : moe(Dtype::kBf16, kHidden, 64, kExperts, kTopK, kRows, 5),
        adapters(make_adapters(), MoeCase::kLayers, kExperts, 4, 6),
        weight(kHidden, kHidden, Dtype::kBf16, moe.draw),
        kv({16, 1, 32, 1, 2, Dtype::kBf16}, {40}, 8) {
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < kRows; ++t) {
      slots.push_back(t % 3 == 0 ? 1 : 0);
    }
    moe.use_all(&adapters, slots, {});
    for (int32_t t = 0; t < kRows; ++t) {
      positions.push_back(t);
    }
    for (int32_t i = 0; i < 16; ++i) {
      inv_freq.push_back(1.0f / static_cast<float>(i + 1));
    }
  }
  std::vector<TestAdapter> make_adapters() {
    TestAdapter adapter = moe.draw_adapter({8, 5}, 7, Dtype::kBf16, true, false);
    adapter.dense[{MoeCase::kLayer, LoraModule::kQ}] = draw_pair(moe.draw, 12, kHidden, kHidden, Dtype::kBf16, true);
    return {adapter};
  }

  LinearArgs linear() {
    LinearArgs args;
    args.x = moe.x.view();
    args.num_rows = kRows;
    args.k = kHidden;
    args.parts[0] = {weight.view(), {}, q.view(), LoraModule::kQ};
    args.num_parts = 1;
    args.layer = MoeCase::kLayer;
    args.lora = moe.lora;
    args.scratch = scratch.data();
    args.scratch_bytes = scratch.size();
    return args;
  }
  MoeGateUpArgs gate_up() {
    MoeGateUpArgs args;
    args.x = moe.x.view();
    args.gate = moe.gate.view;
    args.up = moe.up.view;
    args.order = moe.order.view();
    args.num_rows = kRows;
    args.top_k = kTopK;
    args.num_experts = kExperts;
    args.layer = MoeCase::kLayer;
    args.lora = moe.lora;
    args.act = act.view();
    args.scratch = scratch.data();
    args.scratch_bytes = scratch.size();
    return args;
  }
  MoeDownArgs down() {
    return {act.view(),      moe.down.view, moe.order.view(), kRows,      kTopK,          kExperts,
            MoeCase::kLayer, moe.lora,      Compute::kExact,  out.view(), scratch.data(), scratch.size()};
  }
  RopeKvWriteArgs rope() {
    RopeKvWriteArgs args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.num_rows = kRows;
    args.num_heads = 3;
    args.inv_freq = inv_freq.data();
    args.positions = positions.data();
    args.row_sequence = sequence.data();
    args.kv = kv.view();
    return args;
  }
  PagedAttentionArgs attention() {
    PagedAttentionArgs args;
    args.q = q.view();
    args.out = hidden.view();
    args.num_sequences = 1;
    args.num_heads = 3;
    args.row_begin = row_begin.data();
    args.positions = positions.data();
    args.scale = 0.2f;
    args.kv = kv.view();
    return args;
  }

  MoeCase moe;
  AdapterFixture adapters;
  StoredMatrix weight;
  KvFixture kv;
  PoisonedBytes scratch{size_t{1} << 20};
  PoisonedRows q{kRows, kHidden, moe.draw.floats(kRows* kHidden)};
  PoisonedRows k{kRows, 32, moe.draw.floats(kRows * 32)};
  PoisonedRows v{kRows, 32, moe.draw.floats(kRows * 32)};
  PoisonedRows hidden{kRows, kHidden, moe.draw.floats(kRows* kHidden)};
  PoisonedRows act{kRows * kTopK, 64};
  PoisonedRows out{kRows * kTopK, kHidden};
  std::vector<float> inv_freq;
  std::vector<int32_t> positions;
  std::vector<int32_t> sequence = std::vector<int32_t>(kRows, 0);
  std::vector<int32_t> row_begin = {0, kRows};
  std::vector<int32_t> ids = std::vector<int32_t>(kRows * kTopK);
  std::vector<float> weights = std::vector<float>(kRows * kTopK);
};

}  // namespace

TEST_CASE("the counter sees an allocation") {
  std::vector<int> values;
  CHECK(allocations_of([&] { values.resize(100); }) >= 1);
  CHECK(allocations_of([&] { values[3] = 1; }) == 0);
}

TEST_CASE("no op allocates") {
  Stream stream(3, kTestScratchBytes);
  Layer layer;
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const LinearArgs linear = layer.linear();
    CHECK(second_run([&] { kernels->linear(linear, stream); }) == 0);
    const RopeKvWriteArgs rope = layer.rope();
    CHECK(second_run([&] { kernels->rope_kv_write(rope, stream); }) == 0);
    const PagedAttentionArgs attention = layer.attention();
    CHECK(second_run([&] { kernels->paged_attention(attention, stream); }) == 0);
    const RouterTopkArgs router = {layer.moe.x.view(),    kRows, kExperts,         kTopK,
                                   RouterScore::kSoftmax, true,  layer.ids.data(), layer.weights.data()};
    CHECK(second_run([&] { kernels->router_topk(router, stream); }) == 0);
    const MoeSortArgs sort = {layer.moe.choice.data(), layer.moe.lora->row_slot, kRows, kTopK, kExperts,
                              layer.moe.order.view()};
    CHECK(second_run([&] { kernels->moe_sort(sort, stream); }) == 0);
    const MoeRouteArgs route = {router, sort.row_slot, sort.order};
    CHECK(second_run([&] { kernels->moe_route(route, stream); }) == 0);
    const Weight norm = {layer.weight.data(), Dtype::kBf16, 1, kHidden};
    const RmsNormArgs rms_norm = {layer.moe.x.view(), nullptr, norm, 1e-6f, kRows, kHidden, layer.q.view()};
    const MoeRouterArgs moe_router = {rms_norm, linear, route};
    CHECK(second_run([&] { kernels->moe_router(moe_router, stream); }) == 0);
    const MoeGateUpArgs gate_up = layer.gate_up();
    CHECK(second_run([&] { kernels->moe_gate_up(gate_up, stream); }) == 0);
    const MoeDownArgs down = layer.down();
    CHECK(second_run([&] { kernels->moe_down(down, stream); }) == 0);
    const MoeCombineArgs combine = {layer.out.view(),
                                    layer.weights.data(),
                                    sort.order,
                                    kRows,
                                    kTopK,
                                    kHidden,
                                    {},
                                    {},
                                    layer.hidden.view(),
                                    {},
                                    0.0f,
                                    {}};
    CHECK(second_run([&] { kernels->moe_combine(combine, stream); }) == 0);
    CHECK(second_run([&] { kernels->rms_norm(rms_norm, stream); }) == 0);
    CHECK(second_run([&] { kernels->swiglu({layer.q.view(), layer.moe.x.view(), kRows, kHidden}, stream); }) == 0);
    const EmbeddingArgs embedding = {layer.weight.view(), layer.positions.data(), kRows, layer.q.view()};
    CHECK(second_run([&] { kernels->embedding(embedding, stream); }) == 0);
    std::vector<SampleRow> rows(kRows);
    std::vector<SampleOutput> outputs(kRows);
    rows[1].temperature = rows[2].temperature = 1.0f;
    rows[1].top_p = 0.5f;
    rows[2].top_k = 7;
    rows[3].num_top_logprobs = 5;
    const SampleTokensArgs sampling = {layer.hidden.view(), kRows, kHidden, rows.data(), outputs.data()};
    CHECK(second_run([&] { kernels->sample_tokens(sampling, stream); }) == 0);
    CHECK(outputs[0].status == 0);
  }
}
