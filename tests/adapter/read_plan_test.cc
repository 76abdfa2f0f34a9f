// SPDX-License-Identifier: Apache-2.0
// The pieces that a file is read in: every byte once, every block of every matrix once, in the stream's order.
#include "runtime/adapter/read_plan.h"

#include <algorithm>
#include <map>

#include "runtime/adapter/adapter_plan.h"
#include "tests/adapter/expert_forms.h"
#include "tests/support/catch.h"

namespace moelora::test {
namespace {

struct Planned {
  std::string text;
  std::shared_ptr<const AdapterPlan> plan;
  [[nodiscard]] uint64_t data_offset() const { return 8 + plan->header.size(); }
};

Planned plan_of(const Json& config, const SafetensorsWriter& writer, const ModelConfig& model) {
  Planned planned;
  planned.text = writer.text();
  const ByteSource source(reinterpret_cast<const std::byte*>(planned.text.data()), planned.text.size(), "weights");
  planned.plan = plan_adapter(config.dump(), "config", SafetensorsFile::read_header(source), source, model, {});
  return planned;
}

void check_blocks(const ReadPlan& plan) {
  std::map<std::pair<size_t, int32_t>, int32_t> seen;  // (matrix, block)
  for (const ReadPart& part : plan.parts) {
    for (size_t i = part.begin; i < part.end; ++i) {
      const TiledMatrix& matrix = plan.matrices[i].matrix;
      REQUIRE(plan.matrices[i].granule >= part.granule);
      for (int32_t block = part.first_block; block < part.end_block; ++block) {
        if (block * kTileColumns >= matrix.view.columns) {
          continue;
        }
        ++seen[{i, block}];
        const uint64_t first = block_offset(matrix, block);
        const int32_t columns = std::min(kTileColumns, matrix.view.columns - block * kTileColumns);
        const int64_t last = (matrix.rank - 1) * matrix.view.rank_stride + (columns - 1) * matrix.view.column_stride;
        REQUIRE(first >= part.offset);
        REQUIRE(first + static_cast<uint64_t>(last + 1) * dtype_bytes(matrix.stored) <= part.end_offset);
      }
    }
  }
  size_t blocks = 0;
  for (const MatrixPlace& place : plan.matrices) {
    blocks += static_cast<size_t>(ceil_div(place.matrix.view.columns, kTileColumns));
  }
  CHECK(seen.size() == blocks);
  CHECK(std::all_of(seen.begin(), seen.end(), [](const auto& entry) { return entry.second == 1; }));
}

// Bytes of the file by how often they are read.
std::map<int32_t, size_t> counts_of(const Planned& planned) {
  std::vector<int32_t> reads(planned.text.size());
  for (const ReadUnit& unit : planned.plan->reads.units) {
    for (uint64_t at = unit.offset; at < unit.end_offset; ++at) {
      ++reads[at];
    }
  }
  std::map<int32_t, size_t> counts;
  for (size_t at = planned.data_offset(); at < reads.size(); ++at) {
    ++counts[reads[at]];
  }
  CHECK(std::all_of(reads.begin(), reads.begin() + static_cast<std::ptrdiff_t>(planned.data_offset()),
                    [](int32_t count) { return count == 0; }));
  return counts;
}

void check_units(const ReadPlan& plan) {
  size_t next = 0;
  size_t largest = 0;
  int32_t granule = 0;
  for (const ReadUnit& unit : plan.units) {
    REQUIRE(unit.begin == next);
    REQUIRE(unit.end > unit.begin);
    REQUIRE(unit.granule >= granule);
    REQUIRE(plan.parts[unit.begin].offset == unit.offset);
    REQUIRE(plan.parts[unit.end - 1].end_offset == unit.end_offset);
    for (size_t i = unit.begin; i < unit.end; ++i) {
      REQUIRE(plan.parts[i].granule >= unit.granule);  // so no later unit writes before it
      REQUIRE((i == unit.begin || plan.parts[i].offset == plan.parts[i - 1].end_offset));
    }
    REQUIRE((unit.end == unit.begin + 1 || unit.bytes() <= size_t{512} << 10));
    largest = std::max(largest, unit.bytes());
    granule = unit.granule;
    next = unit.end;
  }
  CHECK(next == plan.parts.size());
  CHECK(plan.largest_unit == largest);
}

}  // namespace

TEST_CASE("every form of experts is read once, in pieces of a cache's size") {
  ModelConfig model = tiny_moe(Family::kQwen3Moe, 200, 150);
  model.num_experts = 64;
  const Json config = lora_config(kFormRank, kFormAlpha);
  const Truth shared = draw_truth(model, {true, false}, 3);
  for (const Family family : {Family::kQwen3Moe, Family::kGptOss}) {
    ModelConfig of_family = model;
    of_family.family = family;
    const ParameterOf gate_up = in_family_order(of_family, gate_up_shared_a);
    for (const bool grouped : {false, true}) {
      INFO("family " << static_cast<int>(family) << " grouped " << grouped);
      Json config_of_form = config;
      if (grouped) {
        config_of_form["lora_B_layout"] = "grouped_by_expert";
      }
      const SafetensorsWriter writer = write_each(shared, [&](SafetensorsWriter& out, int32_t layer) {
        write_wrapper(out, experts_name(layer) + ".base_layer", shared.layers[static_cast<size_t>(layer)], gate_up,
                      {false, grouped});
        write_wrapper(out, experts_name(layer), shared.layers[static_cast<size_t>(layer)], down_parameter,
                      {false, grouped});
      });
      const Planned planned = plan_of(config_of_form, writer, of_family);
      check_blocks(planned.plan->reads);
      check_units(planned.plan->reads);
      CHECK(counts_of(planned) == std::map<int32_t, size_t>{{1, planned.text.size() - planned.data_offset()}});
      CHECK(planned.plan->reads.largest_unit <= size_t{512} << 10);
      // B of gate_up: 300 outputs of 64 experts' 3 ranks in fp32, and no block of a matrix is as large.
      CHECK(planned.plan->reads.units.size() < planned.plan->reads.matrices.size());
    }
  }
}

TEST_CASE("pairs that follow each other are read together, reversed ones are read whole") {
  const ModelConfig model = tiny_moe(Family::kQwen3Moe, 256, 128);
  const Truth truth = draw_truth(model, {true, false}, 4);
  const Planned pairs = plan_of(lora_config(kFormRank, kFormAlpha), per_expert_file(truth), model);
  check_blocks(pairs.plan->reads);
  check_units(pairs.plan->reads);
  CHECK(counts_of(pairs) == std::map<int32_t, size_t>{{1, pairs.text.size() - pairs.data_offset()}});
  CHECK(pairs.plan->reads.units.size() * 3 < pairs.plan->reads.matrices.size());

  const SafetensorsWriter writer = write_each(truth, [&](SafetensorsWriter& out, int32_t layer) {
    const auto& experts = truth.layers[static_cast<size_t>(layer)];
    write_wrapper(out, experts_name(layer) + ".base_layer", experts, gate_up_shared_a, {true, false});
    write_wrapper(out, experts_name(layer), experts, down_parameter, {true, false});
  });
  const Planned reversed = plan_of(lora_config(kFormRank, kFormAlpha), writer, model);
  check_blocks(reversed.plan->reads);
  check_units(reversed.plan->reads);
  CHECK(counts_of(reversed).begin()->first >= 1);
}

}  // namespace moelora::test
