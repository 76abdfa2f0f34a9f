// SPDX-License-Identifier: Apache-2.0
// paged_attention against a softmax in double: grouped heads, windows, sinks, several sequences in shuffled pages with
// NaN wherever nothing was written; and the promise that cuts of a prompt leave no trace in the bits.
#include "kernels/attention/paged_attention.h"

#include <cmath>

#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/kv_fixture.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kLayer = 3;

struct AttentionCase {
  // Sequence s has `lengths[s]` positions, of which the last `new_rows[s]` are rows of the batch.
  AttentionCase(int32_t heads, int32_t kv_heads, int32_t head_dim, Dtype dtype, std::vector<int32_t> lengths_in,
                std::vector<int32_t> new_rows_in)
      : num_heads(heads),
        layout{16, kv_heads, head_dim, 2, 2, dtype},
        lengths(std::move(lengths_in)),
        new_rows(std::move(new_rows_in)),
        draw(31),
        kv(layout, lengths, 17),
        q(total_rows(), heads * head_dim, draw.floats(static_cast<size_t>(total_rows() * heads * head_dim), 2.0f)),
        sinks(draw.floats(static_cast<size_t>(heads))) {
    for (size_t s = 0; s < lengths.size(); ++s) {
      kv.fill(static_cast<int32_t>(s), lengths[s], kLayer, draw);
    }
  }
  [[nodiscard]] int32_t total_rows() const { return std::accumulate(new_rows.begin(), new_rows.end(), 0); }

  // Runs rows [from, to) of sequence 0 alone, or all sequences if to < 0.
  std::vector<float> run(const Kernels& kernels, Stream& stream, int32_t from = 0, int32_t to = -1) const {
    std::vector<int32_t> begin = {0};
    std::vector<int32_t> positions;
    for (size_t s = 0; s < lengths.size(); ++s) {
      if (to >= 0 && s > 0) {
        break;
      }
      const int32_t first = to >= 0 ? from : 0;
      const int32_t last = to >= 0 ? to : new_rows[s];
      for (int32_t i = first; i < last; ++i) {
        positions.push_back(lengths[s] - new_rows[s] + i);
      }
      begin.push_back(static_cast<int32_t>(positions.size()));
    }
    const PoisonedRows out(static_cast<int64_t>(positions.size()), q.width());
    PagedAttentionArgs args;
    args.q = q.view_from(from);
    args.out = out.view();
    args.num_sequences = static_cast<int32_t>(begin.size()) - 1;
    args.num_heads = num_heads;
    args.row_begin = begin.data();
    args.positions = positions.data();
    args.scale = scale;
    args.window = window;
    args.sinks = use_sinks ? sinks.data() : nullptr;
    args.kv = kv.view();
    args.layer = kLayer;
    kernels.paged_attention(args, stream);
    intact = intact && out.padding_intact() && q.padding_intact() && kv.guard_intact();
    return out.values();
  }

  [[nodiscard]] std::vector<double> expected() const {
    std::vector<double> result;
    int64_t row = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (int32_t i = 0; i < new_rows[s]; ++i, ++row) {
        const int32_t position = lengths[s] - new_rows[s] + i;
        for (int32_t h = 0; h < num_heads; ++h) {
          append_head(static_cast<int32_t>(s), position, h, q.row(row), result);
        }
      }
    }
    return result;
  }
  void append_head(int32_t sequence, int32_t position, int32_t head, const float* row,
                   std::vector<double>& result) const {
    const int32_t dims = layout.head_dim;
    const int32_t kv_head = head / (num_heads / layout.num_kv_heads);
    const int32_t begin = window > 0 ? std::max(0, position - window + 1) : 0;
    std::vector<double> scores;
    for (int32_t j = begin; j <= position; ++j) {
      double dot = 0.0;
      for (int32_t d = 0; d < dims; ++d) {
        dot += static_cast<double>(row[head * dims + d]) *
               static_cast<double>(kv.get(sequence, j, kLayer, false, kv_head, d));
      }
      scores.push_back(dot * static_cast<double>(scale));
    }
    double largest = *std::max_element(scores.begin(), scores.end());
    const double sink = static_cast<double>(sinks[static_cast<size_t>(head)]);
    if (use_sinks) {
      largest = std::max(largest, sink);
    }
    double total = use_sinks ? std::exp(sink - largest) : 0.0;
    for (const double score : scores) {
      total += std::exp(score - largest);
    }
    for (int32_t d = 0; d < dims; ++d) {
      double sum = 0.0;
      for (int32_t j = begin; j <= position; ++j) {
        sum += std::exp(scores[static_cast<size_t>(j - begin)] - largest) *
               static_cast<double>(kv.get(sequence, j, kLayer, true, kv_head, d));
      }
      result.push_back(sum / total);
    }
  }

  int32_t num_heads;
  KvLayout layout;
  std::vector<int32_t> lengths;
  std::vector<int32_t> new_rows;
  Draw draw;
  KvFixture kv;
  PoisonedRows q;
  std::vector<float> sinks;
  float scale = 0.3f;
  int32_t window = 0;
  bool use_sinks = false;
  mutable bool intact = true;
};

}  // namespace

TEST_CASE("paged_attention equals a softmax over the keys in sight") {
  Stream stream(2, kTestScratchBytes);
  struct Shape {
    int32_t heads, kv_heads, head_dim;
  };
  for (const Kernels* kernels : backends()) {
    for (const Shape shape : {Shape{4, 2, 64}, Shape{3, 3, 8}, Shape{8, 1, 128}, Shape{2, 1, 20}, Shape{6, 2, 96}}) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
        for (const int32_t window : {0, 1, 5, 16, 40}) {
          for (const bool sinks : {false, true}) {
            INFO(kernels->name << " Nq=" << shape.heads << " Nkv=" << shape.kv_heads << " D=" << shape.head_dim << " "
                               << dtype_name(dtype) << " window=" << window << " sinks=" << sinks);
            AttentionCase test(shape.heads, shape.kv_heads, shape.head_dim, dtype, {70, 1, 16, 33, 17},
                               {5, 1, 16, 1, 1});
            test.window = window;
            test.use_sinks = sinks;
            const std::vector<float> out = test.run(*kernels, stream);
            CHECK(relative_error(out, test.expected()) <= 1e-5);
            CHECK(test.intact);
          }
        }
      }
    }
  }
}

TEST_CASE("paged_attention of nothing does nothing, and a sequence may have no rows") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    AttentionCase test(2, 1, 32, Dtype::kF32, {20, 20, 20}, {3, 0, 2});
    CHECK(relative_error(test.run(*kernels, stream), test.expected()) <= 1e-5);
    AttentionCase none(2, 1, 32, Dtype::kF32, {20}, {0});
    CHECK(none.run(*kernels, stream).empty());
  }
}

TEST_CASE("paged_attention with rotation is rope_kv_write and then paged_attention") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    std::vector<float> outs[2];
    std::vector<char> pools[2];
    for (const bool together : {false, true}) {
      Draw draw(3);
      const std::vector<int32_t> lengths = {20, 33};
      KvFixture kv({16, 2, 32, 2, 2, Dtype::kBf16}, lengths, 17);
      kv.fill(0, 19, kLayer, draw);
      kv.fill(1, 30, kLayer, draw);
      const std::vector<int32_t> positions = {19, 30, 31, 32}, sequences = {0, 1, 1, 1}, begin = {0, 1, 4};
      const std::vector<float> inv_freq = draw.floats(16);
      const PoisonedRows q(4, 128, draw.floats(4 * 128)), k(4, 64, draw.floats(4 * 64)), v(4, 64, draw.floats(4 * 64));
      const PoisonedRows out(4, 128);
      RopeKvWriteArgs rope;
      rope.q = q.view(), rope.k = k.view(), rope.v = v.view();
      rope.num_rows = rope.num_heads = 4;
      rope.inv_freq = inv_freq.data();
      rope.positions = positions.data();
      rope.row_sequence = sequences.data();
      rope.kv = kv.view();
      rope.layer = kLayer;
      PagedAttentionArgs args;
      args.q = q.view(), args.out = out.view();
      args.num_sequences = 2;
      args.num_heads = 4;
      args.row_begin = begin.data();
      args.positions = positions.data();
      args.scale = 0.3f;
      args.kv = kv.view();
      args.layer = kLayer;
      args.rope = together ? &rope : nullptr;
      if (!together) {
        kernels->rope_kv_write(rope, stream);
      }
      kernels->paged_attention(args, stream);
      const auto* pool = reinterpret_cast<const char*>(kv.pool().data());
      pools[together].assign(pool, pool + kv.pool().size());
      outs[together] = out.values();
    }
    CHECK(pools[0] == pools[1]);
    CHECK(same_bits(outs[0], outs[1]));
  }
}

TEST_CASE("a sink joins the softmax of paged_attention unscaled (worked example)") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    AttentionCase test(1, 1, 16, Dtype::kF32, {3}, {1});
    test.use_sinks = true;
    test.sinks = {0.5f};
    test.scale = 0.125f;
    for (int32_t d = 0; d < 16; ++d) {
      test.q.row(0)[d] = d == 0 ? 8.0f : 0.0f;
      for (int32_t j = 0; j < 3; ++j) {
        test.kv.put(0, j, kLayer, false, 0, d, static_cast<float>(1 - j));  // scores 1, 0, -1
        test.kv.put(0, j, kLayer, true, 0, d, d == j ? 1.0f : 0.0f);
      }
    }
    const std::vector<float> out = test.run(*kernels, stream);
    CHECK(std::abs(out[0] - 0.473991f) <= 1e-6f);
    CHECK(std::abs(out[1] - 0.174371f) <= 1e-6f);
    CHECK(std::abs(out[2] - 0.064148f) <= 1e-6f);
  }
}

TEST_CASE("paged_attention survives scores far apart and nearly equal") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const float scale : {1e-6f, 40.0f}) {
      INFO(kernels->name << " scale=" << scale);
      AttentionCase test(2, 1, 32, Dtype::kF32, {50}, {50});
      test.scale = scale;
      CHECK(relative_error(test.run(*kernels, stream), test.expected()) <= 1e-4);
    }
  }
}

TEST_CASE("a row of paged_attention has the same bits however its prompt was cut") {
  Stream one(1, kTestScratchBytes);
  Stream many(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int32_t window : {0, 9, 24}) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
        INFO(kernels->name << " window=" << window << " " << dtype_name(dtype));
        AttentionCase test(4, 2, 64, dtype, {83}, {83});
        test.window = window;
        test.use_sinks = window == 9;
        const std::vector<float> whole = test.run(*kernels, many);
        CHECK(same_bits(whole, test.run(*kernels, one)));
        for (const int32_t chunk : {1, 7, 16, 50}) {
          std::vector<float> pieces;
          for (int32_t from = 0; from < 83; from += chunk) {
            const std::vector<float> part = test.run(*kernels, many, from, std::min(from + chunk, 83));
            pieces.insert(pieces.end(), part.begin(), part.end());
          }
          CHECK(same_bits(whole, pieces));
        }
      }
    }
  }
}
