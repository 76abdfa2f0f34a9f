// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/stream_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <tuple>

#include "kernels/base/error.h"

namespace moelora {
namespace {

auto order_of(const AdapterRecord& record) {
  return std::tuple(record.layer, record.expert, record.module);
}

void sort_records(std::vector<AdapterRecord>& records, const std::string& file) {
  std::sort(records.begin(), records.end(),
            [](const AdapterRecord& x, const AdapterRecord& y) { return order_of(x) < order_of(y); });
  for (size_t i = 1; i < records.size(); ++i) {
    if (order_of(records[i - 1]) == order_of(records[i])) {
      throw Error{Status::kAdapterMismatch, file + ": tensors " + quoted(*records[i - 1].a.tensor) + " and " +
                                                quoted(*records[i].a.tensor) + " adapt the same module"};
    }
  }
}

class Planner {
 public:
  explicit Planner(const ModelConfig& config) : config_(config) {
    directory_.assign(static_cast<size_t>(config.num_layers) * 2, -1);
    take(static_cast<int64_t>(directory_.size()) * 4);
  }

  void add_layer(const std::vector<AdapterRecord>& records, size_t begin, size_t end) {
    const auto layer = static_cast<size_t>(records[begin].layer);
    size_t first_expert = begin;
    while (first_expert < end && records[first_expert].expert < 0) {
      ++first_expert;
    }
    if (first_expert > begin) {
      directory_[layer * 2] = take(kNumDenseModules * static_cast<int64_t>(sizeof(LoraRecord)));
    }
    if (first_expert < end) {
      directory_[layer * 2 + 1] = take(static_cast<int64_t>(config_.num_experts) * kNumExpertModules *
                                       static_cast<int64_t>(sizeof(LoraRecord)));
    }
    shared_.clear();
    for (size_t i = begin; i < end; ++i) {
      add_record(records[i]);
    }
  }

  StreamPlan finish() {
    StreamPlan plan;
    plan.gaps = find_gaps();
    plan.num_granules = granules_;
    plan.directory = std::move(directory_);
    plan.records = std::move(records_);
    plan.matrices = std::move(matrices_);
    plan.biases = std::move(biases_);
    return plan;
  }

 private:
  // Matrices are placed in the order of their granules.
  [[nodiscard]] std::vector<std::pair<int64_t, int64_t>> find_gaps() const {
    std::vector<std::pair<int64_t, int64_t>> gaps;
    int64_t done = 0;
    const auto add_until = [&](int64_t granule) {
      if (granule > done) {
        gaps.emplace_back(done, granule);
      }
    };
    for (const MatrixPlace& place : matrices_) {
      const TiledMatrix& matrix = place.matrix;
      if (matrix.rank % kTileRanks == 0 && matrix.view.columns % kTileColumns == 0) {
        add_until(place.granule);
        done = place.granule + matrix_granules(matrix.rank, matrix.view.columns, matrix.dtype);
      }
    }
    add_until(granules_);
    return gaps;
  }

  int32_t take(int64_t bytes) {
    const int64_t first = granules_;
    granules_ += (bytes + static_cast<int64_t>(kGranuleBytes) - 1) / static_cast<int64_t>(kGranuleBytes);
    if (granules_ > std::numeric_limits<int32_t>::max()) {
      throw Error{Status::kUnsupported, "an adapter of more than 2^31 KiB is not supported"};
    }
    return static_cast<int32_t>(first);
  }

  int32_t place(const AdapterRecord& record, const MatrixView& view, bool is_a) {
    const auto key = std::tuple(view.tensor, view.offset, view.rank_stride, view.column_stride, view.columns, is_a);
    if (view.tensor != nullptr) {
      if (const auto it = shared_.find(key); it != shared_.end()) {
        return it->second;
      }
    }
    if (record.dtype == Dtype::kF32 && granules_ % 2 != 0) {
      ++granules_;  // tiles of two granules start at even granules, so that none crosses a page
    }
    const int32_t granule =
        take(int64_t{matrix_granules(record.rank, view.columns, record.dtype)} * static_cast<int64_t>(kGranuleBytes));
    MatrixPlace place{{view, Dtype::kBf16, record.rank, record.dtype, is_a}, granule};
    if (view.tensor != nullptr) {
      MOELORA_ASSERT(parse_dtype(view.tensor->dtype, place.matrix.stored));
      shared_.emplace(key, granule);
    }
    matrices_.push_back(place);
    return granule;
  }

  void add_record(const AdapterRecord& record) {
    LoraRecord out;
    out.rank = record.rank;
    out.scale = record.scale;
    out.dtype = static_cast<int32_t>(record.dtype);
    out.a = place(record, record.a, true);
    out.b = place(record, record.b, false);
    if (record.bias != nullptr) {
      out.bias = take(int64_t{record.b.columns} * static_cast<int64_t>(sizeof(float)));
      biases_.push_back({record.bias, out.bias});
    }
    const bool dense = record.expert < 0;
    const int64_t base = directory_[static_cast<size_t>(record.layer) * 2 + (dense ? 0 : 1)];
    const int64_t index = dense ? record.module : int64_t{record.expert} * kNumExpertModules + record.module;
    records_.emplace_back(base * static_cast<int64_t>(kGranuleBytes) + index * static_cast<int64_t>(sizeof(LoraRecord)),
                          out);
  }

  using ViewKey = std::tuple<const StoredTensor*, int64_t, int64_t, int64_t, int32_t, bool>;

  const ModelConfig& config_;
  std::vector<int32_t> directory_;
  int64_t granules_ = 0;
  std::map<ViewKey, int32_t> shared_;  // of one layer
  std::vector<MatrixPlace> matrices_;
  std::vector<BiasPlace> biases_;
  std::vector<std::pair<int64_t, LoraRecord>> records_;
};

}  // namespace

HostBytes StreamPlan::make_stream(HostBytes memory) const {
  const bool is_new = memory.capacity() < bytes();
  if (is_new) {
    memory = {};
  }
  memory.resize(bytes());
  if (is_new) {
    advise_huge_pages(memory.data(), memory.size());
  }
  for (const auto& [first, end] : gaps) {
    std::memset(memory.data() + static_cast<size_t>(first) * kGranuleBytes, 0,
                static_cast<size_t>(end - first) * kGranuleBytes);
  }
  std::memcpy(memory.data(), directory.data(), directory.size() * sizeof(int32_t));
  for (const auto& [byte, record] : records) {
    std::memcpy(memory.data() + byte, &record, sizeof record);
  }
  return memory;
}

StreamPlan plan_stream(const ModelConfig& config, std::vector<AdapterRecord>& records, const std::string& file) {
  sort_records(records, file);
  Planner planner(config);
  for (size_t begin = 0; begin < records.size();) {
    size_t end = begin;
    while (end < records.size() && records[end].layer == records[begin].layer) {
      ++end;
    }
    planner.add_layer(records, begin, end);
    begin = end;
  }
  return planner.finish();
}

}  // namespace moelora
