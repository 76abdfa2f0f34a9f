// SPDX-License-Identifier: Apache-2.0
// rope_kv_write_cuda against clamp, norm and rotation in double: K and V land in their own place of their own page and
// nothing else is written; angles of the longest contexts; the same bits alone. Without a GPU it says that it was
// skipped.
#include "kernels/attention/rope_kv_write.h"

#include <cmath>

#include "tests/kernels/rope_case.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kLayer = 1;
constexpr float kEps = 1e-6f;
constexpr int32_t kRows = 20;

struct RopeCase {
  RopeCase(int32_t heads, int32_t kv_heads, int32_t head_dim, Dtype kv_dtype, Dtype norm_dtype,
           std::vector<int32_t> lengths = {40, 21, 64})
      : num_heads(heads),
        layout{16, kv_heads, head_dim, 1, 3, kv_dtype},
        draw(41),
        kv(layout, lengths, 41),
        device_kv(kv),
        q_in(draw.floats(static_cast<size_t>(kRows * heads * head_dim), 3.0f)),
        k_in(draw.floats(static_cast<size_t>(kRows * kv_heads * head_dim), 3.0f)),
        v_in(draw.floats(static_cast<size_t>(kRows * kv_heads * head_dim), 3.0f)),
        q_norm(1, head_dim, norm_dtype, draw),
        k_norm(1, head_dim, norm_dtype, draw) {
    for (int32_t i = 0; i < head_dim / 2; ++i) {
      inv_freq.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / head_dim)));
    }
    // Distinct (sequence, position) pairs: rows walk through the sequences.
    const auto count = static_cast<int32_t>(lengths.size());
    for (int32_t t = 0; t < kRows; ++t) {
      sequences.push_back(t % count);
      positions.push_back(lengths[static_cast<size_t>(t % count)] - 1 - t / count);
    }
  }

  // q of rows [first, first + count) after the op; K and V are in the fixture.
  std::vector<float> run(int32_t first, int32_t count, int64_t extra_stride = 0) {
    const int64_t q_width = num_heads * layout.head_dim;
    const int64_t kv_width = layout.num_kv_heads * layout.head_dim;
    const DeviceRows q(kRows, q_width, Dtype::kF32, q_in, extra_stride == 0 ? 0 : q_width + extra_stride);
    const DeviceRows k(kRows, kv_width, Dtype::kF32, k_in);
    const DeviceRows v(kRows, kv_width, Dtype::kF32, v_in, extra_stride == 0 ? 0 : kv_width + extra_stride);
    const size_t norm_bytes = static_cast<size_t>(layout.head_dim) * dtype_bytes(q_norm.view().dtype);
    const DeviceBuffer q_weight(q_norm.data(), norm_bytes);
    const DeviceBuffer k_weight(k_norm.data(), norm_bytes);
    const DeviceBuffer frequencies(inv_freq);
    const DeviceBuffer position_device(positions);
    const DeviceBuffer sequence_device(sequences);
    RopeKvWriteArgs args;
    args.q = q.view_from(first);
    args.k = k.view_from(first);
    args.v = v.view_from(first);
    args.num_rows = count;
    args.num_heads = num_heads;
    args.clip = clip;
    if (norm) {
      args.q_norm = {q_weight.data(), q_norm.view().dtype, 1, layout.head_dim};
      args.k_norm = {k_weight.data(), k_norm.view().dtype, 1, layout.head_dim};
    }
    args.eps = kEps;
    args.inv_freq = frequencies.as<float>();
    args.rope_scale = rope_scale;
    args.positions = position_device.as<int32_t>() + first;
    args.row_sequence = sequence_device.as<int32_t>() + first;
    args.kv = device_kv.view();
    args.layer = kLayer;
    rope_kv_write_cuda(args, *gpu()->stream);
    device_kv.pull(kv);
    intact = intact && q.padding_intact() && k.padding_intact() && v.padding_intact() && device_kv.guard_intact();
    const std::vector<float> all = q.values();
    return {all.begin() + first * q_width, all.begin() + (first + count) * q_width};
  }

  // Head `h` of row t: clamp, norm, rotate.
  [[nodiscard]] std::vector<double> head(const std::vector<float>& in, int32_t heads, int32_t t, int32_t h,
                                         const StoredMatrix& weight, bool value) const {
    const float* from = in.data() + static_cast<size_t>((t * heads + h) * layout.head_dim);
    return rope_head({layout.head_dim, clip, norm, kEps, rope_scale, inv_freq}, from, positions[static_cast<size_t>(t)],
                     weight, value);
  }
  // Written K or V of row t's head, from the pool.
  [[nodiscard]] std::vector<float> stored(int32_t t, int32_t h, bool value) const {
    std::vector<float> result;
    for (int32_t d = 0; d < layout.head_dim; ++d) {
      const auto at = static_cast<size_t>(t);
      result.push_back(kv.get(sequences[at], positions[at], kLayer, value, h, d));
    }
    return result;
  }
  void check(const std::vector<float>& q) const {
    const int32_t dims = layout.head_dim;
    const double kv_tolerance = layout.dtype == Dtype::kF32 ? 2e-6 : 4e-3;
    for (int32_t t = 0; t < kRows; ++t) {
      INFO("row " << t << " position " << positions[static_cast<size_t>(t)]);
      for (int32_t h = 0; h < num_heads; ++h) {
        const auto at = q.begin() + (t * num_heads + h) * dims;
        CHECK(relative_error({at, at + dims}, head(q_in, num_heads, t, h, q_norm, false)) <= 2e-6);
      }
      for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
        CHECK(relative_error(stored(t, h, false), head(k_in, layout.num_kv_heads, t, h, k_norm, false)) <=
              kv_tolerance);
        CHECK(relative_error(stored(t, h, true), head(v_in, layout.num_kv_heads, t, h, k_norm, true)) <= kv_tolerance);
      }
    }
    CHECK(intact);
    CHECK(kv.written() == kRows * 2 * layout.num_kv_heads * dims);
  }

  int32_t num_heads;
  KvLayout layout;
  Draw draw;
  KvFixture kv;
  DeviceKv device_kv;
  std::vector<float> q_in, k_in, v_in;
  StoredMatrix q_norm, k_norm;
  std::vector<float> inv_freq;
  std::vector<int32_t> positions, sequences;
  float clip = 0.0f;
  float rope_scale = 1.0f;
  bool norm = false;
  bool intact = true;
};

}  // namespace

TEST_CASE("rope_kv_write_cuda clamps, norms, rotates and stores") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t head_dim : {2, 12, 16, 64, 80, 128, 256}) {
    for (const bool norm : {false, true}) {
      for (const float clip : {0.0f, 1.5f}) {
        for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
          INFO("D=" << head_dim << " norm=" << norm << " clip=" << clip << " " << dtype_name(dtype));
          RopeCase test(6, 2, head_dim, dtype, dtype == Dtype::kF32 ? Dtype::kBf16 : Dtype::kF32);
          test.norm = norm;
          test.clip = clip;
          test.rope_scale = norm ? 1.25f : 1.0f;
          // Rows of a stride that is a multiple of four elements and not.
          test.check(test.run(0, kRows, clip > 0.0f ? 5 : 0));
          RopeCase aligned(6, 2, head_dim, dtype, Dtype::kF16);
          aligned.norm = norm;
          aligned.clip = clip;
          aligned.check(aligned.run(0, kRows, 8));
        }
      }
    }
  }
}

TEST_CASE("rope_kv_write_cuda with many heads, and at the end of the longest context") {
  if (gpu() == nullptr) {
    return;
  }
  RopeCase many(64, 8, 64, Dtype::kBf16, Dtype::kBf16);
  many.norm = true;
  many.check(many.run(0, kRows));
  RopeCase far(2, 1, 16, Dtype::kF32, Dtype::kF32, {131072, 1000});
  far.check(far.run(0, kRows));
}

TEST_CASE("rope_kv_write_cuda of more heads than one round of blocks takes") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int32_t head_dim : {64, 128}) {
    const int32_t heads = 81920 / head_dim - 7;
    INFO("Nq=" << heads << " D=" << head_dim);
    RopeCase together(heads, 5, head_dim, Dtype::kBf16, Dtype::kBf16);
    together.norm = true;
    together.clip = 2.5f;
    const std::vector<float> all = together.run(0, kRows);
    together.check(all);
    // One row is taken in smaller shares.
    RopeCase alone(heads, 5, head_dim, Dtype::kBf16, Dtype::kBf16);
    alone.norm = true;
    alone.clip = 2.5f;
    const auto width = static_cast<size_t>(heads) * static_cast<size_t>(head_dim);
    CHECK(same_bits(alone.run(7, 1).data(), all.data() + 7 * width, width));
    for (int32_t h = 0; h < 5; ++h) {
      CHECK(same_bits(alone.stored(7, h, false), together.stored(7, h, false)));
      CHECK(same_bits(alone.stored(7, h, true), together.stored(7, h, true)));
    }
  }
}

TEST_CASE("a row of rope_kv_write_cuda has the same bits alone, and no rows write nothing") {
  if (gpu() == nullptr) {
    return;
  }
  RopeCase together(4, 2, 64, Dtype::kF32, Dtype::kBf16);
  RopeCase alone(4, 2, 64, Dtype::kF32, Dtype::kBf16);
  together.norm = alone.norm = true;
  alone.run(0, 0);
  CHECK(alone.kv.written() == 0);
  const std::vector<float> all = together.run(0, kRows);
  for (int32_t t = 0; t < kRows; t += 7) {
    const std::vector<float> one = alone.run(t, 1);
    CHECK(same_bits(one.data(), all.data() + t * 4 * 64, 4 * 64));
    for (int32_t h = 0; h < 2; ++h) {
      CHECK(same_bits(alone.stored(t, h, false), together.stored(t, h, false)));
      CHECK(same_bits(alone.stored(t, h, true), together.stored(t, h, true)));
    }
  }
}
