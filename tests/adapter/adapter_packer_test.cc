// SPDX-License-Identifier: Apache-2.0
// The byte stream itself: no tile crosses a page of even granules, padding is zero, nothing overlaps, and random
// adapters have the same layout.
#include "runtime/adapter/adapter_packer.h"

#include <algorithm>
#include <set>

#include "tests/adapter/adapter_files.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/unpacked_image.h"

namespace moelora::test {
namespace {

// A granule range of one matrix or bias.
struct Range {
  int32_t begin;
  int32_t end;
  bool operator<(const Range& other) const { return begin < other.begin; }
};

void add_ranges(const LoraRecord& record, int32_t in, int32_t out, std::set<Range>& ranges) {
  const auto dtype = static_cast<Dtype>(record.dtype);
  ranges.insert({record.a, record.a + matrix_granules(record.rank, in, dtype)});
  ranges.insert({record.b, record.b + matrix_granules(record.rank, out, dtype)});
  if (record.bias >= 0) {
    ranges.insert({record.bias, record.bias + ceil_div(out * 4, static_cast<int32_t>(kGranuleBytes))});
  }
}

void check_padding(const UnpackedImage& unpacked, const LoraRecord& record, int32_t in, int32_t out) {
  const auto dtype = static_cast<Dtype>(record.dtype);
  const int32_t ranks = ceil_div(record.rank, 8) * 8;
  for (const bool is_a : {true, false}) {
    const int32_t columns = is_a ? in : out;
    for (int32_t r = 0; r < ranks; ++r) {
      for (int32_t c = 0; c < ceil_div(columns, 64) * 64; ++c) {
        if (r >= record.rank || c >= columns) {
          const double value = unpacked.element(is_a ? record.a : record.b, dtype, is_a, record.rank, columns, r, c);
          REQUIRE(value == 0.0);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("matrices do not overlap, fp32 tiles start at even granules, padding is zero") {
  ModelConfig model = tiny_moe(Family::kQwen2Moe, 72, 20);
  Draw draw(31);
  SafetensorsWriter writer;
  Json config = lora_config(11, 6);
  config["lora_bias"] = true;
  const std::string layer = std::string(kLayerPrefix) + "1.";
  add_pair(writer, layer + "self_attn.q_proj", 11, 72, 32, draw, "BF16");  // leaves an odd number of granules
  writer.add(layer + "self_attn.q_proj.lora_B.bias", {32}, draw.floats(32));
  add_pair(writer, layer + "self_attn.o_proj", 11, 32, 72, draw, "F32");
  add_pair(writer, layer + "mlp.gate", 11, 72, 4, draw, "BF16");
  add_pair(writer, layer + "mlp.shared_expert_gate", 11, 72, 1, draw, "F16");
  for (int32_t e = 0; e < 4; ++e) {
    add_pair(writer, layer + "mlp.experts." + std::to_string(e) + ".up_proj", 11, 72, 20, draw,
             e % 2 == 0 ? "BF16" : "F32");
  }
  const auto image = load(config, writer, model);
  CHECK(image->stream.size() % kGranuleBytes == 0);
  const UnpackedImage unpacked(*image, model, 2, 5);
  const AdapterTable& table = unpacked.table();
  CHECK(table.directory(1, 0, 0) == -1);
  CHECK(table.directory(1, 0, 1) == -1);
  std::set<Range> ranges{{0, 1},
                         {table.directory(1, 1, 0), table.directory(1, 1, 0) + 1},
                         {table.directory(1, 1, 1), table.directory(1, 1, 1) + 1}};
  size_t expected = 3;
  const auto visit = [&](const LoraRecord* record, int32_t in, int32_t out) {
    REQUIRE(record != nullptr);
    add_ranges(*record, in, out, ranges);
    check_padding(unpacked, *record, in, out);
    expected += record->bias >= 0 ? 3 : 2;
    if (static_cast<Dtype>(record->dtype) == Dtype::kF32) {
      CHECK(record->a % 2 == 0);
      CHECK(record->b % 2 == 0);
    }
    CHECK(record->magnitude == -1);
    CHECK(record->reserved == 0);
  };
  visit(table.dense(1, 1, LoraModule::kQ), 72, 32);
  visit(table.dense(1, 1, LoraModule::kO), 32, 72);
  visit(table.dense(1, 1, LoraModule::kRouter), 72, 4);
  visit(table.dense(1, 1, LoraModule::kSharedExpertGate), 72, 1);
  for (int32_t e = 0; e < 4; ++e) {
    visit(table.expert(1, 1, e, ExpertModule::kUp), 72, 20);
  }
  CHECK(ranges.size() == expected);
  int32_t last = 0;
  for (const Range& range : ranges) {
    CHECK(range.begin >= last);
    last = range.end;
  }
  CHECK(static_cast<size_t>(last) * kGranuleBytes == image->stream.size());
}

TEST_CASE("a directory of many layers and records of many experts take several granules") {
  ModelConfig model = tiny_moe();
  model.num_layers = 200;
  model.layer_is_moe.assign(200, 1);
  model.num_experts = 100;
  Draw draw(32);
  SafetensorsWriter writer;
  add_pair(writer, std::string(kLayerPrefix) + "199.mlp.experts.99.down_proj", 3, 20, 24, draw);
  add_pair(writer, std::string(kLayerPrefix) + "130.mlp.experts.57.gate_proj", 3, 24, 20, draw);
  const auto image = load(lora_config(), writer, model);
  const UnpackedImage unpacked(*image, model, 2, 5);
  int32_t present = 0;
  for (int32_t layer = 0; layer < 200; ++layer) {
    for (int32_t e = 0; e < 100; ++e) {
      for (int32_t m = 0; m < 3; ++m) {
        present += unpacked.table().expert(1, layer, e, static_cast<ExpertModule>(m)) != nullptr;
      }
    }
  }
  CHECK(present == 2);
  CHECK(unpacked.table().expert(1, 199, 99, ExpertModule::kDown) != nullptr);
  CHECK(unpacked.table().expert(1, 130, 57, ExpertModule::kGate) != nullptr);
}

TEST_CASE("random adapters are finite, of either sign, zero in the padding and of the wanted modules") {
  const ModelConfig model = tiny_moe(Family::kQwen3Moe, 72, 20);
  const auto image = random_adapter(model, 11, true, true, 1);
  const UnpackedImage unpacked(*image, model, 4, 5);
  const LoraRecord* gate = unpacked.table().expert(1, 1, 3, ExpertModule::kGate);
  const LoraRecord* up = unpacked.table().expert(1, 1, 3, ExpertModule::kUp);
  REQUIRE(gate != nullptr);
  REQUIRE(up != nullptr);
  CHECK(gate->a != up->a);
  check_padding(unpacked, *gate, 72, 20);
  check_padding(unpacked, *unpacked.table().dense(1, 0, LoraModule::kO), 32, 72);
  int32_t negative = 0;
  for (int32_t r = 0; r < 11; ++r) {
    for (int32_t k = 0; k < 72; ++k) {
      const double value = unpacked.element(gate->a, Dtype::kBf16, true, 11, 72, r, k);
      REQUIRE(std::fabs(value) >= 0x1p-11);
      REQUIRE(std::fabs(value) < 0x1p-7);
      negative += value < 0.0;
    }
  }
  CHECK(negative > 11 * 72 / 3);
  CHECK(negative < 11 * 72 * 2 / 3);
  CHECK(image->modules == 0x7000fu);
  CHECK(image->max_rank == 11);
  CHECK(image->num_layers == 2);
  CHECK(image->num_experts == 4);
  CHECK(random_adapter(model, 11, true, true, 1)->stream == image->stream);
  CHECK(random_adapter(model, 11, true, true, 2)->stream != image->stream);
  CHECK(random_adapter(model, 11, true, false, 1)->modules == 0xfu);
  CHECK(random_adapter(model, 11, false, true, 1)->modules == 0x70000u);
  CHECK(random_adapter(tiny_dense(), 4, true, true, 1)->modules == 0xefu);
  CHECK_ERROR(Status::kInvalid, ({"rank"}), random_adapter(model, 0, true, true, 1));
}

}  // namespace moelora::test
