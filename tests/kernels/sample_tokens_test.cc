// SPDX-License-Identifier: Apache-2.0
// sample_tokens against full sorts in double: greedy with ties and penalties, the kept sets of min-p, top-k and top-p
// by which tokens ever come out, the draw by its frequencies, logprobs and ranks of the raw logits, and unusable rows.
#include "kernels/sampling/sample_tokens.h"

#include <map>

#include "kernels/sampling/philox.h"
#include "tests/kernels/sample_case.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

// Draws 0 .. count-1 of `row` on the same logits.
std::vector<int32_t> draws(const Kernels& kernels, Stream& stream, const std::vector<float>& logits, SampleRow row,
                           int32_t count) {
  const auto vocab = static_cast<int64_t>(logits.size());
  PoisonedRows rows(count, vocab);
  for (int32_t i = 0; i < count; ++i) {
    std::copy(logits.begin(), logits.end(), rows.row(i));
  }
  std::vector<SampleRow> options(static_cast<size_t>(count), row);
  for (int32_t i = 0; i < count; ++i) {
    options[static_cast<size_t>(i)].draw_index = static_cast<uint64_t>(i);
  }
  std::vector<int32_t> tokens;
  for (const SampleOutput& output : sample(kernels, stream, rows, options)) {
    tokens.push_back(output.token);
  }
  return tokens;
}

}  // namespace

TEST_CASE("greedy takes the largest logit, the lowest id of equals, at every length and place") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int32_t vocab : {1, 3, 255, 256, 257, 1000}) {
      INFO(kernels->name << " V=" << vocab);
      Draw draw(101);
      for (int round = 0; round < 20; ++round) {
        PoisonedRows logits(1, vocab, draw.floats(static_cast<size_t>(vocab), 5.0f));
        const int32_t winner = draw.below(vocab);
        const int32_t second = draw.below(vocab);
        logits.row(0)[winner] = logits.row(0)[second] = 6.0f;
        CHECK(sample(*kernels, stream, logits, {SampleRow{}})[0].token == std::min(winner, second));
      }
    }
    const PoisonedRows zeros(1, 3, {-0.0f, 0.0f, -0.0f});
    CHECK(sample(*kernels, stream, zeros, {SampleRow{}})[0].token == 0);
  }
}

TEST_CASE("penalties and suppression act in their order before greedy") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    //                           0      1      2      3      4
    const PoisonedRows logits(1, 5, {4.0f, 3.0f, 2.5f, -1.0f, 9.0f});
    const int32_t suppressed[] = {4};
    // 0 in the prompt, 1 twice in the output, 2 unseen, 3 in both.
    const uint16_t state[] = {0x8000, 2, 0, 0x8001, 0};
    SampleRow row;
    row.suppressed = suppressed;
    row.num_suppressed = 1;
    CHECK(sample(*kernels, stream, logits, {row})[0].token == 0);
    row.token_state = state;
    CHECK(sample(*kernels, stream, logits, {row})[0].token == 0);  // neutral penalties change nothing
    row.repetition_penalty = 1.5f;                                 // 2.67, 2, 2.5
    CHECK(sample(*kernels, stream, logits, {row})[0].token == 0);
    row.repetition_penalty = 2.0f;  // 2, 1.5, 2.5
    CHECK(sample(*kernels, stream, logits, {row})[0].token == 2);
    row.repetition_penalty = 1.0f;
    row.presence_penalty = -1.5f;  // the prompt alone does not count: 4, 4.5, 2.5
    CHECK(sample(*kernels, stream, logits, {row})[0].token == 1);
    row.presence_penalty = 0.0f;
    row.frequency_penalty = -0.75f;  // times two: 4, 4.5, 2.5
    CHECK(sample(*kernels, stream, logits, {row})[0].token == 1);
    row.repetition_penalty = 0.2f;  // negative logits are multiplied: 20, 15 + 1.5, 2.5, -0.2 + 0.75
    CHECK(sample(*kernels, stream, logits, {row})[0].token == 0);
    CHECK(logits.values() == std::vector<float>{4.0f, 3.0f, 2.5f, -1.0f, 9.0f});
  }
}

TEST_CASE("tokens come out with the probabilities of the definition, and no others") {
  Stream stream(2, kTestScratchBytes);
  constexpr int32_t kVocab = 40;
  constexpr int32_t kDraws = 4000;
  Draw draw(102);
  const std::vector<float> logits = draw.floats(kVocab, 3.0f);
  std::vector<uint16_t> state(kVocab, 0);
  for (size_t v = 0; v < kVocab; v += 3) {
    state[v] = static_cast<uint16_t>(v % 2 == 0 ? 0x8000 : v % 5);
  }
  const int32_t suppressed[] = {7, 20};
  std::vector<SampleRow> cases = {sampled(1.0f, 0, 1.0f, 0.0f),  sampled(0.5f, 0, 1.0f, 0.0f),
                                  sampled(1.0f, 5, 1.0f, 0.0f),  sampled(1.0f, 0, 0.6f, 0.0f),
                                  sampled(1.0f, 0, 1.0f, 0.2f),  sampled(2.0f, 12, 0.8f, 0.1f),
                                  sampled(0.8f, 3, 0.95f, 0.0f), sampled(1.0f, 99, 0.0f, 0.0f)};
  cases[5].token_state = state.data();
  cases[5].repetition_penalty = 1.3f;
  cases[5].presence_penalty = 0.4f;
  cases[5].frequency_penalty = 0.2f;
  cases[5].suppressed = suppressed;
  cases[5].num_suppressed = 2;
  for (const Kernels* kernels : backends()) {
    for (size_t c = 0; c < cases.size(); ++c) {
      INFO(kernels->name << " case " << c);
      const std::vector<double> expected = probabilities(cases[c], logits.data(), kVocab);
      std::vector<double> seen(kVocab, 0.0);
      for (const int32_t token : draws(*kernels, stream, logits, cases[c], kDraws)) {
        REQUIRE(token >= 0);
        seen[static_cast<size_t>(token)] += 1.0;
      }
      for (size_t v = 0; v < kVocab; ++v) {
        const double p = expected[v];
        const double deviation = std::sqrt(kDraws * p * (1.0 - p));
        CHECK(std::abs(seen[v] - kDraws * p) <= 5.0 * deviation + (p > 0.0 ? 1.0 : 0.0));
      }
    }
  }
}

TEST_CASE("ties at the border of top-k and top-p go to the lowest ids") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const std::vector<float> flat(30, 1.25f);
    for (const int32_t token : draws(*kernels, stream, flat, sampled(1.0f, 4, 1.0f, 0.0f), 200)) {
      CHECK(token < 4);
    }
    int32_t last = 0;
    for (const int32_t token : draws(*kernels, stream, flat, sampled(1.0f, 0, 0.21f, 0.0f), 400)) {
      last = std::max(last, token);
    }
    CHECK(last == 6);  // 7 of 30 are the first to reach 0.21
    std::vector<float> zeros(8, -0.0f);
    zeros[5] = 0.0f;
    last = 0;
    for (const int32_t token : draws(*kernels, stream, zeros, sampled(1.0f, 3, 1.0f, 0.0f), 200)) {
      last = std::max(last, token);
    }
    CHECK(last == 2);
  }
}

TEST_CASE("a draw depends on seed and draw index alone") {
  Stream one(1, kTestScratchBytes);
  Stream many(3, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    constexpr int32_t kVocab = 300;
    Draw draw(103);
    const PoisonedRows logits(6, kVocab, draw.floats(6 * kVocab, 2.0f));
    std::vector<SampleRow> rows(6, sampled(1.0f, 0, 0.9f, 0.0f));
    for (size_t i = 0; i < 6; ++i) {
      rows[i].seed = 77 + i % 2;
      rows[i].draw_index = i;
    }
    const std::vector<SampleOutput> all = sample(*kernels, many, logits, rows);
    for (size_t i = 0; i < 6; ++i) {
      const PoisonedRows alone(1, kVocab,
                               {logits.row(static_cast<int64_t>(i)), logits.row(static_cast<int64_t>(i)) + kVocab});
      CHECK(sample(*kernels, one, alone, {rows[i]})[0].token == all[i].token);
    }
    const std::vector<float> row(logits.row(0), logits.row(0) + kVocab);
    SampleRow other = rows[0];
    other.seed += uint64_t{1} << 40;
    CHECK(draws(*kernels, many, row, rows[0], 50) != draws(*kernels, many, row, other, 50));
  }
}

TEST_CASE("logprobs, ranks and the best tokens are of the raw logits") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const int32_t vocab : {3, 500}) {
      for (const int32_t wanted : {0, 5, kMaxTopLogprobs}) {
        INFO(kernels->name << " V=" << vocab << " top " << wanted);
        Draw draw(104);
        PoisonedRows logits(1, vocab, draw.floats(static_cast<size_t>(vocab), 8.0f));
        logits.row(0)[1] = logits.row(0)[2];  // a tie somewhere
        const int32_t suppressed[] = {
            static_cast<int32_t>(std::max_element(logits.row(0), logits.row(0) + vocab) - logits.row(0))};
        SampleRow row = sampled(1.7f, 0, 1.0f, 0.0f);
        row.num_top_logprobs = wanted;
        row.suppressed = suppressed;
        row.num_suppressed = 1;
        const SampleOutput output = sample(*kernels, stream, logits, {row})[0];
        double total = 0.0;
        for (int32_t v = 0; v < vocab; ++v) {
          total += std::exp(static_cast<double>(logits.row(0)[v]));
        }
        const auto logprob = [&](int32_t v) { return static_cast<double>(logits.row(0)[v]) - std::log(total); };
        std::vector<int32_t> order(static_cast<size_t>(vocab));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return logits.row(0)[a] > logits.row(0)[b]; });
        REQUIRE(output.status == 0);
        CHECK(output.token != suppressed[0]);
        CHECK(std::abs(static_cast<double>(output.logprob) - logprob(output.token)) <= 1e-5);
        CHECK(order[static_cast<size_t>(output.rank - 1)] == output.token);
        for (int32_t i = 0; i < std::min(wanted, vocab); ++i) {
          CHECK(output.top_ids[i] == order[static_cast<size_t>(i)]);
          CHECK(std::abs(static_cast<double>(output.top_logprobs[i]) - logprob(output.top_ids[i])) <= 1e-5);
        }
      }
    }
  }
}

TEST_CASE("a row without usable logits says so and its neighbours are served") {
  Stream stream(2, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    for (const float temperature : {0.0f, 1.0f}) {
      INFO(kernels->name << " temperature=" << temperature);
      constexpr int32_t kVocab = 300;
      for (const int32_t at : {0, 17, 299}) {
        PoisonedRows logits(4, kVocab, std::vector<float>(4 * kVocab, -1.0f));
        logits.row(0)[at] = NAN;
        std::fill(logits.row(1), logits.row(1) + kVocab, -kInf);
        logits.row(2)[at] = kInf;
        std::fill(logits.row(3), logits.row(3) + kVocab, -kInf);
        logits.row(3)[at] = -1e30f;
        const std::vector<SampleOutput> outputs =
            sample(*kernels, stream, logits, std::vector<SampleRow>(4, sampled(temperature, 0, 1.0f, 0.0f)));
        for (size_t i = 0; i < 3; ++i) {
          CHECK((outputs[i].status == 1 && outputs[i].token == -1));
        }
        CHECK((outputs[3].status == 0 && outputs[3].token == at));
      }
      const PoisonedRows two(1, 2, {1.0f, 2.0f});
      const int32_t both[] = {0, 1};
      SampleRow row = sampled(temperature, 0, 1.0f, 0.0f);
      row.suppressed = both;
      row.num_suppressed = 2;
      CHECK(sample(*kernels, stream, two, {row})[0].status == 1);
    }
  }
}

TEST_CASE("tiny and huge temperatures stay defined") {
  Stream stream(1, kTestScratchBytes);
  for (const Kernels* kernels : backends()) {
    INFO(kernels->name);
    const std::vector<float> logits = {1.0f, 5.0f, 4.9999f, -20.0f};
    for (const int32_t token : draws(*kernels, stream, logits, sampled(1e-30f, 0, 0.9f, 0.0f), 50)) {
      CHECK(token == 1);
    }
    std::map<int32_t, int32_t> seen;
    for (const int32_t token : draws(*kernels, stream, logits, sampled(1e30f, 0, 1.0f, 0.0f), 400)) {
      ++seen[token];
    }
    CHECK(seen.size() == 4);
  }
}

TEST_CASE("a whole vocabulary is cut and drawn as the definition says") {
  Stream stream(1, kTestScratchBytes);
  constexpr int32_t kVocab = 151936;
  Draw draw(105);
  std::vector<float> logits = draw.floats(kVocab, 10.0f);
  for (const Kernels* kernels : backends()) {
    for (const SampleRow& row :
         {sampled(1.0f, 0, 0.9f, 0.0f), sampled(0.7f, 50, 0.9f, 0.0f), sampled(1.0f, 1000, 1.0f, 0.01f)}) {
      INFO(kernels->name << " top_k=" << row.top_k);
      const std::vector<double> expected = probabilities(row, logits.data(), kVocab);
      const int64_t kept = std::count_if(expected.begin(), expected.end(), [](double p) { return p > 0.0; });
      // The inverse of the distribution, in order of id, at the draw's own uniform.
      const std::vector<int32_t> tokens = draws(*kernels, stream, logits, row, 8);
      for (size_t i = 0; i < tokens.size(); ++i) {
        const double uniform = philox_uniform(row.seed, i);
        const auto at = expected.begin() + tokens[i];
        const double below = std::accumulate(expected.begin(), at, 0.0);
        CHECK(*at > 0.0);
        CHECK((uniform >= below - 1e-5 && uniform <= below + *at + 1e-5));
      }
      CHECK((kept > 8 && kept < kVocab));
    }
  }
}
