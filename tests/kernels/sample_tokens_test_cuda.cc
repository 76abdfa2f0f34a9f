// SPDX-License-Identifier: Apache-2.0
// sample_tokens_cuda against the CPU op: the same greedy tokens, the same draws for the same seeds, the same penalties,
// logprobs and ranks, the same rows refused; ties, flat rows, whole vocabularies, rows of all kinds in one batch.
// Without a GPU it says that it was skipped.
#include "kernels/sampling/sample_tokens.h"

#include "tests/kernels/sample_case.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"

using namespace moelora;
using namespace moelora::test;

namespace {

struct Logits {
  int64_t rows;
  int64_t vocab;
  std::vector<float> values;
};

std::vector<SampleOutput> on_device(const Logits& logits, const std::vector<SampleRow>& rows, int64_t stride = 0) {
  const DeviceRows device(logits.rows, logits.vocab, Dtype::kF32, logits.values, stride);
  std::vector<SampleOutput> outputs(rows.size());
  SampleTokensArgs args;
  args.logits = device.view();
  args.num_rows = static_cast<int32_t>(rows.size());
  args.vocab_size = static_cast<int32_t>(logits.vocab);
  args.rows = rows.data();
  args.outputs = outputs.data();
  sample_tokens_cuda(args, *gpu()->stream);
  CHECK(same_bits(device.values(), logits.values));
  CHECK(device.padding_intact());
  return outputs;
}

std::vector<SampleOutput> on_host(const Logits& logits, const std::vector<SampleRow>& rows) {
  Stream stream(2, kTestScratchBytes);
  return sample(kernels_reference(), stream, PoisonedRows(logits.rows, logits.vocab, logits.values), rows);
}

void check_same(const Logits& logits, const std::vector<SampleRow>& rows, int64_t stride = 0) {
  const std::vector<SampleOutput> actual = on_device(logits, rows, stride);
  const std::vector<SampleOutput> expected = on_host(logits, rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    INFO("row " << i << " temperature=" << rows[i].temperature << " top_k=" << rows[i].top_k
                << " top_p=" << rows[i].top_p << " min_p=" << rows[i].min_p << " draw " << rows[i].draw_index);
    CHECK(actual[i].token == expected[i].token);
    CHECK(actual[i].status == expected[i].status);
    if (rows[i].num_top_logprobs >= 0 && expected[i].status == 0) {
      CHECK(actual[i].rank == expected[i].rank);
      CHECK(actual[i].logprob == expected[i].logprob);
      const auto count = std::min<int64_t>(rows[i].num_top_logprobs, logits.vocab);
      CHECK(std::equal(actual[i].top_ids, actual[i].top_ids + count, expected[i].top_ids));
      CHECK(same_bits(actual[i].top_logprobs, expected[i].top_logprobs, static_cast<size_t>(count)));
    }
  }
}

// `count` draws of one row of logits.
void check_draws(const std::vector<float>& logits, const SampleRow& row, size_t count) {
  Logits all{static_cast<int64_t>(count), static_cast<int64_t>(logits.size()), {}};
  std::vector<SampleRow> rows(count, row);
  for (size_t i = 0; i < count; ++i) {
    all.values.insert(all.values.end(), logits.begin(), logits.end());
    rows[i].draw_index = i;
  }
  check_same(all, rows);
}

}  // namespace

TEST_CASE("sample_tokens_cuda is greedy as the CPU op, at every length and place, for any number of rows") {
  if (gpu() == nullptr) {
    return;
  }
  for (const int64_t vocab : {1, 3, 255, 1000, 16384, 16385, 40000, 201088}) {
    for (const int64_t rows : {0, 1, 7, 64}) {
      if (rows * vocab > 7 * 201088) {
        continue;
      }
      INFO("V=" << vocab << " rows=" << rows);
      Draw draw(101);
      Logits logits{rows, vocab, draw.floats(static_cast<size_t>(rows * vocab), 5.0f)};
      for (int64_t t = 0; t < rows; ++t) {  // a tie of two winners, anywhere
        for (int i = 0; i < 2; ++i) {
          logits.values[static_cast<size_t>(t * vocab + draw.below(static_cast<int32_t>(vocab)))] = 6.0f;
        }
      }
      const std::vector<SampleRow> greedy(static_cast<size_t>(rows));
      check_same(logits, greedy);
      check_same(logits, greedy, vocab + 1);
    }
  }
  check_same({1, 3, {-0.0f, 0.0f, -0.0f}}, {SampleRow{}});
  check_same({1, 5, {-kInf, -3.0f, -kInf, -3.0f, -kInf}}, {SampleRow{}});
}

TEST_CASE("sample_tokens_cuda draws the tokens of the CPU op for the same seeds") {
  if (gpu() == nullptr) {
    return;
  }
  Draw draw(102);
  const std::vector<SampleRow> cases = {
      sampled(1.0f, 0, 1.0f, 0.0f),     sampled(0.5f, 0, 1.0f, 0.0f),  sampled(1.0f, 5, 1.0f, 0.0f),
      sampled(1.0f, 0, 0.6f, 0.0f),     sampled(1.0f, 0, 1.0f, 0.2f),  sampled(2.0f, 12, 0.8f, 0.1f),
      sampled(0.8f, 3, 0.95f, 0.0f),    sampled(1.0f, 99, 0.0f, 0.0f), sampled(1e-30f, 0, 0.9f, 0.0f),
      sampled(1e30f, 0, 1.0f, 0.0f),    sampled(1e30f, 7, 0.5f, 0.0f), sampled(0.3f, 1, 1.0f, 0.0f),
      sampled(1.0f, 100000, 1.0f, 1.0f)};
  for (const size_t vocab : {size_t{1}, size_t{40}, size_t{129}, size_t{3000}}) {
    for (const SampleRow& row : cases) {
      INFO("V=" << vocab);
      check_draws(draw.floats(vocab, 3.0f), row, 50);
    }
  }
  const std::vector<float> large = draw.floats(151936, 10.0f);
  for (const SampleRow& row : {sampled(1.0f, 0, 0.9f, 0.0f), sampled(0.7f, 50, 0.9f, 0.0f),
                               sampled(1.0f, 1000, 1.0f, 0.01f), sampled(1.0f, 0, 1.0f, 0.0f)}) {
    check_draws(large, row, 8);
  }
  check_draws(draw.floats(262144, 4.0f), sampled(0.9f, 40, 0.95f, 0.05f), 4);
  check_draws(draw.floats(262145, 4.0f), sampled(0.9f, 40, 0.95f, 0.05f), 2);  // more than the kernel takes
}

TEST_CASE("sample_tokens_cuda cuts ties as the CPU op, few and too many of them") {
  if (gpu() == nullptr) {
    return;
  }
  for (const size_t vocab : {size_t{30}, size_t{1024}, size_t{5000}}) {
    const std::vector<float> flat(vocab, 1.25f);
    check_draws(flat, sampled(1.0f, 4, 1.0f, 0.0f), 30);
    check_draws(flat, sampled(1.0f, 0, 0.21f, 0.0f), 30);
    check_draws(flat, sampled(1.0f, 20, 0.33f, 0.0f), 30);
    std::vector<float> steps(vocab);
    for (size_t i = 0; i < vocab; ++i) {
      steps[i] = static_cast<float>(i % 5);
    }
    check_draws(steps, sampled(1.0f, 9, 1.0f, 0.0f), 30);
    check_draws(steps, sampled(1.0f, 9, 0.7f, 0.0f), 30);
  }
  std::vector<float> zeros(8, -0.0f);
  zeros[5] = 0.0f;
  check_draws(zeros, sampled(1.0f, 3, 1.0f, 0.0f), 30);
}

TEST_CASE("sample_tokens_cuda serves rows of all kinds in one batch") {
  if (gpu() == nullptr) {
    return;
  }
  constexpr int64_t kVocab = 2500;
  Draw draw(103);
  const Logits logits{10, kVocab, draw.floats(10 * kVocab, 8.0f)};
  std::vector<uint16_t> state(kVocab, 0);
  for (size_t v = 0; v < kVocab; v += 3) {
    state[v] = static_cast<uint16_t>(v % 2 == 0 ? 0x8000 : v % 5);
  }
  const int32_t suppressed[] = {7, 20, 2499};
  std::vector<SampleRow> rows(10);
  rows[1] = sampled(1.0f, 0, 0.9f, 0.0f);
  rows[2].token_state = state.data();
  rows[2].repetition_penalty = 1.3f;
  rows[3] = sampled(0.7f, 40, 1.0f, 0.0f);
  rows[3].num_top_logprobs = 5;
  rows[4].num_top_logprobs = 0;
  rows[5] = sampled(1.2f, 0, 0.95f, 0.02f);
  rows[5].suppressed = suppressed;
  rows[5].num_suppressed = 3;
  rows[6].token_state = state.data();  // neutral penalties
  rows[7] = sampled(1.5f, 0, 1.0f, 0.0f);
  rows[8] = sampled(0.9f, 0, 0.8f, 0.0f);
  rows[8].token_state = state.data();
  rows[8].presence_penalty = 0.4f;
  rows[8].frequency_penalty = 0.2f;
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].seed = 77 + i;
    rows[i].draw_index = i * 1000;
  }
  check_same(logits, rows);
  // More rows for the host than page-locked memory holds at once.
  Logits many{40, 100000, draw.floats(40 * 100000, 8.0f)};
  std::vector<SampleRow> wanted(40);
  for (size_t i = 0; i < wanted.size(); ++i) {
    wanted[i].num_top_logprobs = i % 3 == 0 ? -1 : 2;
  }
  check_same(many, wanted);
}

TEST_CASE("sample_tokens_cuda refuses rows without usable logits and serves their neighbours") {
  if (gpu() == nullptr) {
    return;
  }
  for (const float temperature : {0.0f, 1.0f}) {
    for (const int64_t vocab : {300, 20000}) {
      for (const int64_t at : {int64_t{0}, int64_t{17}, vocab - 1}) {
        INFO("temperature=" << temperature << " V=" << vocab << " at " << at);
        Logits logits{4, vocab, std::vector<float>(static_cast<size_t>(4 * vocab), -1.0f)};
        const auto row = [&](int64_t t) { return logits.values.begin() + t * vocab; };
        row(0)[at] = NAN;
        std::fill(row(1), row(2), -kInf);
        row(2)[at] = kInf;
        std::fill(row(3), logits.values.end(), -kInf);
        row(3)[at] = -1e30f;
        const std::vector<SampleOutput> outputs =
            on_device(logits, std::vector<SampleRow>(4, sampled(temperature, 0, 1.0f, 0.0f)));
        for (size_t i = 0; i < 3; ++i) {
          CHECK((outputs[i].status == 1 && outputs[i].token == -1));
        }
        CHECK((outputs[3].status == 0 && outputs[3].token == at));
      }
    }
  }
}
