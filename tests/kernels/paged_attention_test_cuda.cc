// SPDX-License-Identifier: Apache-2.0
// paged_attention_cuda against a softmax in double: decode, prefill and both in one batch, every width of head, group
// and kind of context, splits through clusters and through scratch, NaN wherever nothing was written; the same bits
// however a prompt was cut. The oracle rounds q as prefill does and is exact otherwise. Without a GPU it says that it
// was skipped.
#include "kernels/attention/paged_attention.h"

#include <cmath>

#include "kernels/cuda/cuda_stream.cuh"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kLayer = 3;

struct AttentionCase {
  // Sequence s has `lengths[s]` positions, of which the last `new_rows[s]` are rows of the batch.
  AttentionCase(int32_t heads, int32_t kv_heads, int32_t head_dim, std::vector<int32_t> lengths_in,
                std::vector<int32_t> new_rows_in, int32_t block_tokens = 16)
      : num_heads(heads),
        layout{block_tokens, kv_heads, head_dim, 2, 2, Dtype::kBf16},
        lengths(std::move(lengths_in)),
        new_rows(std::move(new_rows_in)),
        draw(31),
        kv(layout, lengths, 17),
        q(draw.floats(static_cast<size_t>(total_rows() * heads * head_dim), 2.0f)),
        sinks(draw.floats(static_cast<size_t>(heads), 3.0f)) {
    for (size_t s = 0; s < lengths.size(); ++s) {
      kv.fill(static_cast<int32_t>(s), lengths[s], kLayer, draw);
    }
  }
  [[nodiscard]] int32_t total_rows() const { return std::accumulate(new_rows.begin(), new_rows.end(), 0); }
  [[nodiscard]] int64_t width() const { return int64_t{num_heads} * layout.head_dim; }

  // Rows [from, to) of the new rows of sequence 0 alone, or all sequences if to < 0.
  std::vector<float> run(int32_t from = 0, int32_t to = -1) const {
    std::vector<int32_t> begin = {0};
    std::vector<int32_t> positions;
    for (size_t s = 0; s < lengths.size() && (to < 0 || s == 0); ++s) {
      const int32_t last = to >= 0 ? to : new_rows[s];
      for (int32_t i = to >= 0 ? from : 0; i < last; ++i) {
        positions.push_back(lengths[s] - new_rows[s] + i);
      }
      begin.push_back(static_cast<int32_t>(positions.size()));
    }
    const auto num_sequences = static_cast<int32_t>(begin.size()) - 1;
    const DeviceKv device_kv(kv);
    const DeviceRows q_device(total_rows(), width(), Dtype::kF32, q);
    const DeviceRows out(static_cast<int64_t>(positions.size()), width(), out_dtype);
    const DeviceBuffer begin_device(begin);
    const DeviceBuffer position_device(positions);
    const DeviceBuffer sink_device(sinks);
    const DeviceBuffer scratch(paged_attention_scratch_bytes(
        static_cast<size_t>(num_sequences), static_cast<size_t>(num_heads), static_cast<size_t>(layout.head_dim)));
    PagedAttentionArgs args;
    args.q = q_device.view_from(from);
    args.out = out.view();
    args.num_sequences = num_sequences;
    args.num_heads = num_heads;
    args.row_begin = begin_device.as<int32_t>();
    args.positions = position_device.as<int32_t>();
    args.scale = scale;
    args.window = window;
    args.sinks = use_sinks ? sink_device.as<float>() : nullptr;
    args.kv = device_kv.view();
    args.layer = kLayer;
    args.num_rows = static_cast<int32_t>(positions.size());
    args.scratch = scratch.as<std::byte>();
    args.scratch_bytes = scratch.size();
    CudaStream& state = cuda_state(*gpu()->stream);
    const int capability = state.compute_capability;
    state.compute_capability = without_clusters ? 80 : capability;
    paged_attention_cuda(args, *gpu()->stream);
    state.compute_capability = capability;
    CHECK((out.padding_intact() && scratch.guard_intact()));
    return out.values();
  }

  // Largest error of a row relative to the row's largest value.
  [[nodiscard]] double error(const std::vector<float>& out) const {
    double worst = 0.0;
    int64_t row = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const std::vector<std::vector<float>> heads = key_values(static_cast<int32_t>(s));
      for (int32_t i = 0; i < new_rows[s]; ++i, ++row) {
        std::vector<double> expected;
        for (int32_t h = 0; h < num_heads; ++h) {
          append_head(heads, lengths[s] - new_rows[s] + i, h, row, new_rows[s] > 1, expected);
        }
        worst =
            std::max(worst, relative_error({out.begin() + row * width(), out.begin() + (row + 1) * width()}, expected));
      }
    }
    return worst;
  }
  // K then V of each KV head, [2 * Nkv][length * D].
  [[nodiscard]] std::vector<std::vector<float>> key_values(int32_t sequence) const {
    std::vector<std::vector<float>> result;
    for (int32_t h = 0; h < 2 * layout.num_kv_heads; ++h) {
      std::vector<float>& head = result.emplace_back();
      for (int32_t j = 0; j < lengths[static_cast<size_t>(sequence)]; ++j) {
        for (int32_t d = 0; d < layout.head_dim; ++d) {
          head.push_back(kv.get(sequence, j, kLayer, h % 2 == 1, h / 2, d));
        }
      }
    }
    return result;
  }
  void append_head(const std::vector<std::vector<float>>& key_value, int32_t position, int32_t head, int64_t row,
                   bool rounded, std::vector<double>& result) const {
    const auto dims = static_cast<size_t>(layout.head_dim);
    const auto kv_head = static_cast<size_t>(head / (num_heads / layout.num_kv_heads));
    const std::vector<float>& keys = key_value[2 * kv_head];
    const std::vector<float>& values = key_value[2 * kv_head + 1];
    const float scale_log2e = scale * 1.4426950408889634f;
    std::vector<double> query;
    for (size_t d = 0; d < dims; ++d) {
      const float number = q[static_cast<size_t>(row * width()) + static_cast<size_t>(head) * dims + d] * scale_log2e;
      query.push_back(static_cast<double>(rounded ? bf16_to_f32(f32_to_bf16(number)) : number));
    }
    const auto begin = static_cast<size_t>(window > 0 ? std::max(0, position - window + 1) : 0);
    const double sink = static_cast<double>(sinks[static_cast<size_t>(head)]) / std::log(2.0);
    double largest = use_sinks ? sink : -1e300;
    std::vector<double> scores;
    for (size_t j = begin; j <= static_cast<size_t>(position); ++j) {
      double dot = 0.0;
      for (size_t d = 0; d < dims; ++d) {
        dot += query[d] * static_cast<double>(keys[j * dims + d]);
      }
      scores.push_back(dot);
      largest = std::max(largest, dot);
    }
    double total = use_sinks ? std::exp2(sink - largest) : 0.0;
    std::vector<double> sum(dims, 0.0);
    for (size_t j = 0; j < scores.size(); ++j) {
      const double weight = std::exp2(scores[j] - largest);
      total += weight;
      for (size_t d = 0; d < dims; ++d) {
        sum[d] += weight * static_cast<double>(values[(begin + j) * dims + d]);
      }
    }
    for (const double number : sum) {
      result.push_back(number / total);
    }
  }

  int32_t num_heads;
  KvLayout layout;
  std::vector<int32_t> lengths;
  std::vector<int32_t> new_rows;
  Draw draw;
  KvFixture kv;
  std::vector<float> q;
  std::vector<float> sinks;
  Dtype out_dtype = Dtype::kF32;
  float scale = 0.3f;
  int32_t window = 0;
  bool use_sinks = false;
  bool without_clusters = false;
};

// Weights are rounded to bf16, and so may be the outputs.
double tolerance(const AttentionCase& test) {
  return test.out_dtype == Dtype::kF32 ? 3e-3 : 6e-3;
}

void check(const AttentionCase& test) {
  const std::vector<float> out = test.run();
  CHECK(test.error(out) <= tolerance(test));
  CHECK(same_bits(out, test.run()));
}

struct Shape {
  int32_t heads, kv_heads, head_dim;
};

}  // namespace

TEST_CASE("paged_attention_cuda equals a softmax over the keys in sight, in decode, prefill and both") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Shape shape :
       {Shape{4, 2, 64}, Shape{3, 3, 16}, Shape{8, 1, 128}, Shape{4, 2, 80}, Shape{2, 1, 256}, Shape{16, 1, 64},
        Shape{14, 2, 32}, Shape{16, 2, 128}, Shape{40, 2, 64}, Shape{8, 1, 144}, Shape{2, 2, 96}}) {
    for (const int32_t window : {0, 1, 16, 40}) {
      for (const bool sinks : {false, true}) {
        const Dtype out = sinks ? Dtype::kBf16 : Dtype::kF32;
        INFO("Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim << " window=" << window
                   << " sinks=" << sinks << " " << dtype_name(out));
        AttentionCase test(shape.heads, shape.kv_heads, shape.head_dim, {70, 1, 16, 33, 17, 145, 2},
                           {5, 1, 16, 1, 1, 70, 2});
        test.window = window;
        test.use_sinks = sinks;
        test.out_dtype = out;
        check(test);
      }
    }
  }
}

TEST_CASE("paged_attention_cuda in decode at every length, with and without clusters") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Shape shape : {Shape{8, 1, 64}, Shape{16, 2, 128}, Shape{2, 2, 80}, Shape{4, 1, 256}, Shape{32, 1, 64}}) {
    for (const int32_t window : {0, 128, 1000}) {
      for (const bool without_clusters : {false, true}) {
        INFO("Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim << " window=" << window
                   << " without clusters=" << without_clusters);
        AttentionCase test(shape.heads, shape.kv_heads, shape.head_dim, {1, 15, 16, 17, 64, 65, 257, 1025, 3000},
                           {1, 1, 1, 1, 1, 1, 1, 1, 1});
        test.window = window;
        test.use_sinks = window == 128;
        test.without_clusters = without_clusters;
        check(test);
      }
    }
  }
}

TEST_CASE("paged_attention_cuda in decode of 1 and of many sequences") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t count : {1, 7, 64, 300}) {
    for (const Shape shape : {Shape{8, 1, 64}, Shape{4, 4, 128}}) {
      INFO(count << " sequences, Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim);
      Draw draw(5);
      std::vector<int32_t> lengths;
      for (int32_t s = 0; s < count; ++s) {
        lengths.push_back(1 + draw.below(count == 1 ? 2000 : 150));
      }
      const AttentionCase test(shape.heads, shape.kv_heads, shape.head_dim, lengths,
                               std::vector<int32_t>(static_cast<size_t>(count), 1));
      check(test);
    }
  }
}

TEST_CASE("paged_attention_cuda in decode of a long sequence among many short ones") {
  if (gpu() == nullptr) {
    return;
  }
  // A warp has more than twice 32 units, whose pages it looks up 32 at a time.
  for (const Shape shape : {Shape{1, 1, 64}, Shape{2, 1, 128}, Shape{2, 1, 48}, Shape{1, 1, 256}}) {
    for (const int32_t block_tokens : {16, 48}) {
      INFO("Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim << " blocks of "
                 << block_tokens);
      Draw draw(7);
      std::vector<int32_t> lengths;
      for (int32_t s = 0; s < 270; ++s) {
        lengths.push_back(s == 100 ? 9000 : 1 + draw.below(20));
      }
      check(AttentionCase(shape.heads, shape.kv_heads, shape.head_dim, lengths, std::vector<int32_t>(270, 1),
                          block_tokens));
    }
  }
}

TEST_CASE("paged_attention_cuda in a long prefill and in batches of many chunks") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Shape shape : {Shape{8, 1, 64}, Shape{2, 1, 128}, Shape{2, 2, 64}, Shape{4, 1, 256}}) {
    for (const int32_t window : {0, 100}) {
      INFO("Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim << " window=" << window);
      AttentionCase test(shape.heads, shape.kv_heads, shape.head_dim, {3000, 300, 1000}, {20, 200, 1});
      test.window = window;
      check(test);
    }
  }
  Draw draw(6);
  std::vector<int32_t> lengths;
  std::vector<int32_t> new_rows;
  for (int32_t s = 0; s < 75; ++s) {
    lengths.push_back(1 + draw.below(60));
    new_rows.push_back(s % 3 == 0 ? 1 : 1 + draw.below(lengths.back()));
  }
  check(AttentionCase(4, 2, 64, lengths, new_rows));
  check(AttentionCase(4, 2, 64, {50, 40, 90}, {7, 1, 90}, 32));
}

TEST_CASE("paged_attention_cuda of nothing does nothing, and a sequence may have no rows") {
  if (gpu() == nullptr) {
    return;
  }
  const AttentionCase test(2, 1, 64, {20, 20, 20, 40}, {6, 0, 1, 0});
  CHECK(test.error(test.run()) <= 3e-3);
  const AttentionCase none(2, 1, 64, {20}, {0});
  CHECK(none.run().empty());
}

TEST_CASE("paged_attention_cuda survives scores far apart and nearly equal") {
  if (gpu() == nullptr) {
    return;
  }
  for (const float scale : {1e-6f, 40.0f}) {
    for (const int32_t rows : {1, 50}) {
      INFO("scale=" << scale << " rows=" << rows);
      AttentionCase test(2, 1, 64, {50}, {rows});
      test.scale = scale;
      // Scores of hundreds, good to 16 bits: a weight may be off by more than its own rounding.
      CHECK(test.error(test.run()) <= 1e-2);
    }
  }
}

TEST_CASE("a row of paged_attention_cuda has the same bits however its prompt was cut") {
  if (gpu() == nullptr) {
    return;
  }
  for (const Shape shape : {Shape{4, 2, 64}, Shape{14, 2, 128}, Shape{2, 1, 256}, Shape{3, 3, 80}}) {
    for (const int32_t window : {0, 9, 24, 64}) {
      INFO("Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim << " window=" << window);
      AttentionCase test(shape.heads, shape.kv_heads, shape.head_dim, {150, 33, 40}, {150, 1, 12});
      test.window = window;
      test.use_sinks = window == 9;
      const std::vector<float> batch = test.run();
      const std::vector<float> whole(batch.begin(), batch.begin() + 150 * test.width());
      for (const int32_t chunk : {2, 7, 16, 50, 150}) {
        std::vector<float> pieces;
        for (int32_t from = 0; from < 150; from += chunk) {
          const std::vector<float> part = test.run(from, std::min(from + chunk, 150));
          pieces.insert(pieces.end(), part.begin(), part.end());
        }
        INFO("chunk=" << chunk);
        CHECK(same_bits(whole, pieces));
      }
    }
  }
}

TEST_CASE("paged_attention_cuda refuses what it cannot do before launching") {
  if (gpu() == nullptr) {
    return;
  }
  PagedAttentionArgs args;
  args.num_sequences = args.num_rows = args.num_heads = 1;
  args.kv.layout = {16, 1, 64, 1, 1, Dtype::kF32};
  CHECK_THROWS_AS(paged_attention_cuda(args, *gpu()->stream), Error);
  args.kv.layout = {16, 1, 40, 1, 1, Dtype::kBf16};
  CHECK_THROWS_AS(paged_attention_cuda(args, *gpu()->stream), Error);
}
