// SPDX-License-Identifier: Apache-2.0
// lora_resolve_cuda against the records that the CPU reads through directory and page table, and the pages that
// AdapterTable::granule gives, for every linear of every slot; adapters that lack modules, layers and experts.
#include "kernels/lora/lora_resolve.h"

#include "tests/support/catch.h"
#include "tests/support/device_adapters.h"
#include "tests/support/draw.h"

using namespace moelora;
using namespace moelora::test;

namespace {

void check_matrix(const AdapterTable& host, const ResolvedLora& found, int32_t slot, int32_t first,
                  const int32_t* pages, int32_t granules) {
  for (int32_t i = 0; i < granules; ++i) {
    INFO("slot " << slot << " granule " << i << " of " << granules);
    CHECK(host.resolved_granule(slot, first, pages, i) == host.granule(slot, first + i));
  }
  CHECK(found.rank > 0);
}

void check_record(const AdapterTable& host, const ResolvedLora& found, const LoraRecord* stored, int32_t slot) {
  if (stored == nullptr) {
    CHECK(found.rank == 0);
    return;
  }
  CHECK(found.rank == stored->rank);
  CHECK(found.scale == stored->scale);
  CHECK(found.a == stored->a);
  CHECK(found.b == stored->b);
  CHECK(found.bias == stored->bias);
  // Widths of the test's linears are below 64 times 3.
  const int32_t panels = ceil_div(stored->rank, kTileRanks);
  check_matrix(host, found, slot, found.a, found.a_pages, panels);
  check_matrix(host, found, slot, found.b, found.b_pages, panels);
}

}  // namespace

TEST_CASE("lora_resolve_cuda gives every record with the pages of its matrices") {
  if (gpu() == nullptr) {
    return;
  }
  constexpr int32_t kLayers = 3;
  constexpr int32_t kExperts = 5;
  Draw draw(11);
  std::vector<TestAdapter> adapters(2);
  for (int32_t layer = 0; layer < kLayers; layer += 2) {
    adapters[0].dense[{layer, LoraModule::kQ}] = draw_pair(draw, 8, 64, 128, Dtype::kBf16, layer == 2);
    adapters[0].dense[{layer, LoraModule::kDown}] = draw_pair(draw, 33, 96, 64, Dtype::kBf16, false);
  }
  for (int32_t e = 0; e < kExperts; e += 2) {
    adapters[1].experts[{1, e, ExpertModule::kGate}] = draw_pair(draw, 12 + e, 64, 48, Dtype::kBf16, false);
    adapters[1].experts[{2, e, ExpertModule::kDown}] = draw_pair(draw, 256, 48, 64, Dtype::kBf16, e == 0);
  }
  for (const int32_t page_granules : {4, 32}) {
    AdapterFixture fixture(adapters, kLayers, kExperts, page_granules, 3);
    const DeviceAdapters device(fixture);
    AdapterTable host = fixture.table();
    const std::vector<ResolvedLora> found = device.resolved();
    for (int32_t slot = 1; slot <= 2; ++slot) {
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        host.resolved = found.data();
        for (int32_t m = 0; m < kNumDenseModules; ++m) {
          const auto module_of = static_cast<LoraModule>(m);
          check_record(host, *host.resolved_dense(slot, layer, module_of), host.dense(slot, layer, module_of), slot);
        }
        for (int32_t e = 0; e < kExperts; ++e) {
          for (int32_t m = 0; m < kNumExpertModules; ++m) {
            const auto module_of = static_cast<ExpertModule>(m);
            check_record(host, *host.resolved_expert(slot, layer, e, module_of), host.expert(slot, layer, e, module_of),
                         slot);
          }
        }
      }
    }
  }
}
