// SPDX-License-Identifier: Apache-2.0
// rope_kv_write against clamp, norm and rotation in double, and against a worked example; K and V must land in their
// own place of their own page and nothing else may be written.
#include "kernels/attention/rope_kv_write.h"

#include <cmath>

#include "tests/kernels/rope_case.h"
#include "tests/support/backends.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/kv_fixture.h"
#include "tests/support/stored_matrix.h"

using namespace moelora;
using namespace moelora::test;

namespace {

constexpr int32_t kLayer = 1;
constexpr float kEps = 1e-6f;

struct RopeCase {
  RopeCase(int32_t heads, int32_t kv_heads, int32_t head_dim, Dtype kv_dtype, int32_t rows, uint32_t seed)
      : num_heads(heads),
        layout{16, kv_heads, head_dim, 1, 3, kv_dtype},
        draw(seed),
        kv(layout, {40, 21, 64}, seed),
        q_in(draw.floats(static_cast<size_t>(rows * heads * head_dim), 3.0f)),
        k_in(draw.floats(static_cast<size_t>(rows * kv_heads * head_dim), 3.0f)),
        v_in(draw.floats(static_cast<size_t>(rows * kv_heads * head_dim), 3.0f)),
        q_norm(1, head_dim, Dtype::kBf16, draw),
        k_norm(1, head_dim, Dtype::kF16, draw) {
    for (int32_t i = 0; i < head_dim / 2; ++i) {
      inv_freq.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / head_dim)));
    }
    // Distinct (sequence, position) pairs: rows walk through the sequences.
    const int32_t lengths[] = {40, 21, 64};
    for (int32_t t = 0; t < rows; ++t) {
      sequences.push_back(t % 3);
      positions.push_back(lengths[t % 3] - 1 - t / 3);
    }
  }

  // q after the op; K and V are in the fixture.
  std::vector<float> run(const Kernels& kernels, Stream& stream, int32_t first, int32_t count) {
    const PoisonedRows q(num_rows(), num_heads * layout.head_dim, q_in);
    const PoisonedRows k(num_rows(), layout.num_kv_heads * layout.head_dim, k_in);
    const PoisonedRows v(num_rows(), layout.num_kv_heads * layout.head_dim, v_in);
    RopeKvWriteArgs args;
    args.q = q.view_from(first);
    args.k = k.view_from(first);
    args.v = v.view_from(first);
    args.num_rows = count;
    args.num_heads = num_heads;
    args.clip = clip;
    if (norm) {
      args.q_norm = q_norm.view();
      args.k_norm = k_norm.view();
    }
    args.eps = kEps;
    args.inv_freq = inv_freq.data();
    args.rope_scale = rope_scale;
    args.positions = positions.data() + first;
    args.row_sequence = sequences.data() + first;
    args.kv = kv.view();
    args.layer = kLayer;
    kernels.rope_kv_write(args, stream);
    intact = intact && q.padding_intact() && k.padding_intact() && v.padding_intact() && kv.guard_intact();
    return {q.row(first), q.row(first) + count * q.view().stride};
  }

  [[nodiscard]] int32_t num_rows() const { return static_cast<int32_t>(positions.size()); }

  // Head `h` of row t: clamp, norm, rotate.
  [[nodiscard]] std::vector<double> head(const std::vector<float>& in, int32_t heads, int32_t t, int32_t h,
                                         const StoredMatrix& weight, bool value) const {
    const float* from = in.data() + static_cast<size_t>((t * heads + h) * layout.head_dim);
    return rope_head({layout.head_dim, clip, norm, kEps, rope_scale, inv_freq}, from, positions[static_cast<size_t>(t)],
                     weight, value);
  }

  int32_t num_heads;
  KvLayout layout;
  Draw draw;
  KvFixture kv;
  std::vector<float> q_in, k_in, v_in;
  StoredMatrix q_norm, k_norm;
  std::vector<float> inv_freq;
  std::vector<int32_t> positions, sequences;
  float clip = 0.0f;
  float rope_scale = 1.0f;
  bool norm = false;
  bool intact = true;
};

// Written K or V of row t's head, from the pool.
std::vector<float> stored(const RopeCase& test, int32_t t, int32_t h, bool value) {
  std::vector<float> result;
  for (int32_t d = 0; d < test.layout.head_dim; ++d) {
    const auto at = static_cast<size_t>(t);
    result.push_back(test.kv.get(test.sequences[at], test.positions[at], kLayer, value, h, d));
  }
  return result;
}

}  // namespace

TEST_CASE("rope_kv_write clamps, norms, rotates and stores") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int32_t head_dim : {2, 12, 64, 128}) {
      for (const bool norm : {false, true}) {
        for (const float clip : {0.0f, 1.5f}) {
          for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
            INFO(kernels->name << " D=" << head_dim << " norm=" << norm << " clip=" << clip << " "
                               << dtype_name(dtype));
            RopeCase test(6, 2, head_dim, dtype, 20, 41);
            test.norm = norm;
            test.clip = clip;
            test.rope_scale = norm ? 1.25f : 1.0f;
            const std::vector<float> q = test.run(*kernels, stream, 0, 20);
            const size_t stride = q.size() / 20;
            const double kv_tolerance = dtype == Dtype::kF32 ? 2e-6 : 4e-3;
            for (int32_t t = 0; t < 20; ++t) {
              for (int32_t h = 0; h < 6; ++h) {
                const auto at = q.begin() + static_cast<int64_t>(static_cast<size_t>(t) * stride) + h * head_dim;
                CHECK(relative_error({at, at + head_dim}, test.head(test.q_in, 6, t, h, test.q_norm, false)) <= 2e-6);
              }
              for (int32_t h = 0; h < 2; ++h) {
                CHECK(relative_error(stored(test, t, h, false), test.head(test.k_in, 2, t, h, test.k_norm, false)) <=
                      kv_tolerance);
                CHECK(relative_error(stored(test, t, h, true), test.head(test.v_in, 2, t, h, test.k_norm, true)) <=
                      kv_tolerance);
              }
            }
            CHECK(test.intact);
            CHECK(test.kv.written() == 20 * 2 * 2 * head_dim);
          }
        }
      }
    }
  }
}

TEST_CASE("rope_kv_write turns a pair by position times frequency") {
  // D = 2, one head, frequency 1, position 39 of sequence 0: (1, 0) becomes (cos 39, sin 39).
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    RopeCase test(1, 1, 2, Dtype::kF32, 1, 1);
    test.q_in = {1.0f, 0.0f};
    const std::vector<float> q = test.run(*kernels, stream, 0, 1);
    CHECK(std::abs(static_cast<double>(q[0]) - 0.26664293235993725) <= 1e-6);
    CHECK(std::abs(static_cast<double>(q[1]) - 0.9637953862840878) <= 1e-6);
  }
}

TEST_CASE("a row of rope_kv_write has the same bits alone, and no rows write nothing") {
  Stream stream(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    RopeCase together(4, 2, 64, Dtype::kF32, 9, 8);
    RopeCase alone(4, 2, 64, Dtype::kF32, 9, 8);
    together.norm = alone.norm = true;
    alone.run(*kernels, stream, 0, 0);
    CHECK(alone.kv.written() == 0);
    const std::vector<float> all = together.run(*kernels, stream, 0, 9);
    const size_t stride = all.size() / 9;
    for (int32_t t = 0; t < 9; ++t) {
      const std::vector<float> one = alone.run(*kernels, stream, t, 1);
      CHECK(same_bits(one.data(), all.data() + static_cast<size_t>(t) * stride, 4 * 64));
      for (int32_t h = 0; h < 2; ++h) {
        CHECK(same_bits(stored(alone, t, h, false), stored(together, t, h, false)));
      }
    }
  }
}
