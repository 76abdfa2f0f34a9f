// SPDX-License-Identifier: Apache-2.0
// The adapters of an AdapterFixture and batches of rows that use them, in device memory:
//
//   AdapterFixture adapters({...}, num_layers, num_experts, page_granules, seed);
//   DeviceAdapters device(adapters);
//   args.lora = device.batch(row_slot, row_scale);   // also the fixture's batch, for the oracle
// The host copies of the counts, which CUDA ops must not use, are absurd in these batches.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/lora/lora_resolve.h"
#include "tests/support/adapter_builder.h"
#include "tests/support/device_buffer.cuh"

namespace moelora::test {

class DeviceAdapters {
 public:
  // `adapters` must outlive this object.
  explicit DeviceAdapters(AdapterFixture& adapters)
      : adapters_(adapters), pool_(adapters.table().pool, adapters.pool_bytes()), page_table_(adapters.page_table()) {
    int32_t rank = 0;
    for (const TestAdapter& adapter : adapters.adapters()) {
      for (const auto& entry : adapter.dense) {
        rank = std::max(rank, entry.second.rank);
      }
      for (const auto& entry : adapter.experts) {
        rank = std::max(rank, entry.second.rank);
      }
    }
    rank_stride_ = (rank + 7) / 8 * 8 + 8;
    resolve();
  }

  // Row t uses slot row_slot[t] at row_scale[t]. The view lives as long as this object or the next call.
  const LoraBatch* batch(const std::vector<int32_t>& row_slot, const std::vector<float>& row_scale) {
    const LoraBatch& host = *adapters_.batch(row_slot, row_scale);
    const auto rows = static_cast<size_t>(host.num_rows);
    const auto segments = static_cast<size_t>(host.num_segments);
    arrays_.clear();
    batch_ = host;
    batch_.table.pool = pool_.as<std::byte>();
    batch_.table.page_table = page_table_.as<int32_t>();
    batch_.table.resolved = resolved_->as<ResolvedLora>();
    batch_.row_slot = upload(row_slot.data(), row_slot.size());
    batch_.row_scale = upload(row_scale.data(), row_scale.size());
    batch_.sorted_rows = upload(host.sorted_rows, rows);
    batch_.segment_begin = upload(host.segment_begin, segments + 1, row_slot.size() + 1);
    batch_.segment_slot = upload(host.segment_slot, segments, row_slot.size());
    const int32_t counts[3] = {host.num_rows, host.num_segments, host.max_rank};
    batch_.counts = upload(counts, 3);
    batch_.num_rows = -1;
    batch_.num_segments = -1;
    batch_.max_rank = -1;
    batch_.rank_stride = rank_stride_;
    return &batch_;
  }
  // Of all slots; slot 0 is poison.
  [[nodiscard]] std::vector<ResolvedLora> resolved() const { return resolved_->read<ResolvedLora>(); }
  [[nodiscard]] int32_t rank_stride() const { return rank_stride_; }
  // Scratch that linear, moe_gate_up and moe_down need for `rows` shrunk rows (pairs for the experts) of width k.
  [[nodiscard]] size_t scratch_bytes(size_t rows, size_t k) const {
    return linear_scratch_bytes(rows, k, rows, static_cast<size_t>(rank_stride_));
  }

 private:
  void resolve() {
    AdapterTable table = adapters_.table();
    table.pool = pool_.as<std::byte>();
    table.page_table = page_table_.as<int32_t>();
    const auto slots = static_cast<int32_t>(adapters_.adapters().size());
    const int32_t records = table.num_layers * table.modules_per_layer();
    resolved_ = std::make_unique<DeviceBuffer>(static_cast<size_t>(slots + 1) * static_cast<size_t>(records) *
                                               sizeof(ResolvedLora));
    for (int32_t slot = 1; slot <= slots; ++slot) {
      lora_resolve_cuda({table, slot, resolved_->as<ResolvedLora>() + int64_t{slot} * records}, *gpu()->stream);
    }
  }

  // In `room` entries, the rest poison.
  template <class T>
  const T* upload(const T* values, size_t count, size_t room = 0) {
    arrays_.push_back(std::make_unique<DeviceBuffer>(std::max(count, room) * sizeof(T)));
    arrays_.back()->write(values, count * sizeof(T));
    return arrays_.back()->as<T>();
  }

  AdapterFixture& adapters_;
  DeviceBuffer pool_;
  DeviceBuffer page_table_;
  std::unique_ptr<DeviceBuffer> resolved_;
  std::vector<std::unique_ptr<DeviceBuffer>> arrays_;
  int32_t rank_stride_ = 0;
  LoraBatch batch_;
};

}  // namespace moelora::test
