// SPDX-License-Identifier: Apache-2.0
// paged_attention_cuda that rotates and writes K and V itself, against rope_kv_write_cuda followed by
// paged_attention_cuda: the same pool bit for bit and the same outputs, in one kernel and where that is not possible.
// The one is recorded behind a norm that writes q, and may begin before that has ended; the others wait for each other.
// The rows' own places in the pages are NaN before. Without a GPU it says that it was skipped.
#include <cmath>

#include "kernels/attention/paged_attention.h"
#include "kernels/cuda/cuda_stream.cuh"
#include "kernels/dense/rms_norm.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kLayer = 3;

struct Shape {
  int32_t heads, kv_heads, head_dim;
};

struct Result {
  std::vector<float> out;
  std::vector<char> pool;
};

// Every sequence has one new row, its last position, but for those of `rows_of` others.
struct RotatedCase {
  RotatedCase(const Shape& shape_in, std::vector<int32_t> lengths_in, int32_t block_tokens = 16)
      : shape(shape_in),
        layout{block_tokens, shape.kv_heads, shape.head_dim, 2, 2, Dtype::kBf16},
        lengths(std::move(lengths_in)),
        rows_of(lengths.size(), 1) {}

  [[nodiscard]] Result run(bool together) const {
    Draw draw(31);
    const KvFixture kv(layout, lengths, 17);
    KvFixture filled(layout, lengths, 17);
    std::vector<int32_t> begin{0}, positions, sequences;
    for (size_t s = 0; s < lengths.size(); ++s) {
      filled.fill(static_cast<int32_t>(s), lengths[s] - rows_of[s], kLayer, draw);
      for (int32_t i = 0; i < rows_of[s]; ++i) {
        positions.push_back(lengths[s] - rows_of[s] + i);
        sequences.push_back(static_cast<int32_t>(s));
      }
      begin.push_back(static_cast<int32_t>(positions.size()));
    }
    const auto rows = static_cast<int64_t>(positions.size());
    const int64_t q_width = int64_t{shape.heads} * shape.head_dim;
    const int64_t kv_width = int64_t{shape.kv_heads} * shape.head_dim;
    const auto values = [&](int64_t width) { return draw.floats(static_cast<size_t>(rows * width), 2.0f); };
    const DeviceRows x(rows, q_width, Dtype::kF32, values(q_width));
    const DeviceRows q(rows, q_width, Dtype::kF32, q_width + extra_stride);
    const DeviceRows k(rows, kv_width, Dtype::kF32, values(kv_width), kv_width + extra_stride);
    const DeviceRows v(rows, kv_width, Dtype::kF32, values(kv_width), kv_width + extra_stride);
    const DeviceRows out(rows, q_width, Dtype::kF32);
    const DeviceKv device_kv(filled);
    std::vector<float> frequencies;
    for (int32_t i = 0; i < shape.head_dim / 2; ++i) {
      frequencies.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / shape.head_dim)));
    }
    const StoredMatrix q_norm(1, shape.head_dim, Dtype::kBf16, draw);
    const StoredMatrix k_norm(1, shape.head_dim, Dtype::kBf16, draw);
    const DeviceBuffer q_weight(q_norm.data(), static_cast<size_t>(shape.head_dim) * 2);
    const DeviceBuffer k_weight(k_norm.data(), static_cast<size_t>(shape.head_dim) * 2);
    const DeviceBuffer sink(draw.floats(static_cast<size_t>(shape.heads), 3.0f));
    const DeviceBuffer inv_freq(frequencies), begins(begin), places(positions), owners(sequences);
    const DeviceBuffer scratch(paged_attention_scratch_bytes(lengths.size(), static_cast<size_t>(shape.heads),
                                                             static_cast<size_t>(shape.head_dim)));
    const DeviceBuffer ones(std::vector<float>(static_cast<size_t>(q_width), 1.0f));
    RmsNormArgs before;
    before.x = x.view();
    before.weight = {ones.data(), Dtype::kF32, 1, static_cast<int32_t>(q_width)};
    before.num_rows = static_cast<int32_t>(rows);
    before.width = static_cast<int32_t>(q_width);
    before.out = q.view();
    RopeKvWriteArgs rope;
    rope.q = q.view();
    rope.k = k.view();
    rope.v = v.view();
    rope.num_rows = static_cast<int32_t>(rows);
    rope.num_heads = shape.heads;
    rope.clip = clip;
    if (norm) {
      rope.q_norm = {q_weight.data(), Dtype::kBf16, 1, shape.head_dim};
      rope.k_norm = {k_weight.data(), Dtype::kBf16, 1, shape.head_dim};
    }
    rope.eps = 1e-6f;
    rope.inv_freq = inv_freq.as<float>();
    rope.rope_scale = 1.25f;
    rope.positions = places.as<int32_t>();
    rope.row_sequence = owners.as<int32_t>();
    rope.kv = device_kv.view();
    rope.layer = kLayer;
    PagedAttentionArgs args;
    args.q = q.view();
    args.out = out.view();
    args.num_sequences = static_cast<int32_t>(lengths.size());
    args.num_heads = shape.heads;
    args.row_begin = begins.as<int32_t>();
    args.positions = places.as<int32_t>();
    args.scale = 0.3f;
    args.window = window;
    args.sinks = window > 0 ? sink.as<float>() : nullptr;
    args.kv = device_kv.view();
    args.layer = kLayer;
    args.rope = together ? &rope : nullptr;
    args.num_rows = static_cast<int32_t>(rows);
    args.scratch = scratch.as<std::byte>();
    args.scratch_bytes = scratch.size();
    CudaStream& state = cuda_state(*gpu()->stream);
    const int capability = state.compute_capability;
    state.compute_capability = without_clusters ? 80 : capability;
    if (together) {
      run_recorded(before, args);
    } else {
      rms_norm_cuda(before, *gpu()->stream);
      gpu()->device->synchronize(*gpu()->stream);
      rope_kv_write_cuda(rope, *gpu()->stream);
      gpu()->device->synchronize(*gpu()->stream);
      paged_attention_cuda(args, *gpu()->stream);
    }
    state.compute_capability = capability;
    device_kv.pull(kv);
    CHECK((out.padding_intact() && q.padding_intact() && k.padding_intact() && v.padding_intact()));
    CHECK((scratch.guard_intact() && device_kv.guard_intact()));
    const auto* pool = reinterpret_cast<const char*>(kv.pool().data());
    return {out.values(), {pool, pool + kv.pool().size()}};
  }

  // Twice: K and V are written anew, q too.
  static void run_recorded(const RmsNormArgs& before, const PagedAttentionArgs& args) {
    Stream& stream = *gpu()->stream;
    gpu()->device->begin_recording(stream);
    for (int i = 0; i < 2; ++i) {
      rms_norm_cuda(before, stream);
      paged_attention_cuda(args, stream);
    }
    const std::unique_ptr<Graph> graph = gpu()->device->end_recording(stream);
    gpu()->device->launch(*graph, stream);
    gpu()->device->synchronize(stream);
  }

  void check() const {
    const Result apart = run(false);
    const Result together = run(true);
    CHECK(apart.pool == together.pool);
    CHECK(relative_error(together.out, {apart.out.begin(), apart.out.end()}) <= 1e-6);
    const Result again = run(true);
    CHECK((again.pool == together.pool && same_bits(again.out, together.out)));
  }

  Shape shape;
  KvLayout layout;
  std::vector<int32_t> lengths;
  std::vector<int32_t> rows_of;
  int32_t window = 0;
  int64_t extra_stride = 16;
  float clip = 0.0f;
  bool norm = false;
  bool without_clusters = false;
};

}  // namespace

TEST_CASE("paged_attention_cuda with rotation equals the two ops, for one sequence of every length") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Shape shape :
       {Shape{64, 8, 64}, Shape{32, 4, 128}, Shape{3, 3, 64}, Shape{40, 2, 64}, Shape{20, 1, 128}}) {
    for (const int32_t length : {1, 2, 16, 17, 32, 33, 128, 257, 1901}) {
      INFO("Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim << " length=" << length);
      RotatedCase test(shape, {length}, length == 257 ? 48 : 16);
      test.norm = length % 2 == 1;
      test.check();
      test.window = 128;
      test.clip = 1.5f;
      test.check();
    }
  }
}

TEST_CASE("paged_attention_cuda with rotation equals the two ops, for many sequences") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t count : {7, 20, 64, 300}) {
    for (const Shape shape : {Shape{16, 2, 64}, Shape{8, 2, 128}}) {
      for (const bool without_clusters : {false, true}) {
        INFO(count << " sequences, Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim
                   << " without clusters=" << without_clusters);
        Draw draw(5);
        std::vector<int32_t> lengths;
        for (int32_t s = 0; s < count; ++s) {
          lengths.push_back(1 + draw.below(count < 30 ? 900 : 150));
        }
        RotatedCase test(shape, lengths);
        test.norm = shape.head_dim == 128;
        test.without_clusters = without_clusters;
        test.check();
        test.rows_of[2] = test.rows_of[3] = 0;  // not in this batch
        test.check();
      }
    }
  }
}

TEST_CASE("paged_attention_cuda with rotation where it takes two kernels") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Shape shape : {Shape{4, 2, 80}, Shape{2, 1, 256}, Shape{4, 2, 64}}) {
    INFO("Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim);
    RotatedCase test(shape, {70, 1, 33});
    test.norm = true;
    test.check();
    test.extra_stride = 5;
    test.check();
    test.rows_of = {20, 1, 1};
    test.check();
  }
}
