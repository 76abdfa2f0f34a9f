// SPDX-License-Identifier: Apache-2.0
// See adapter_packer.h. First a plan (which granule is whose), then the elements. Matrices whose stored elements are
// interleaved by expert are written together, block of columns by block of columns, so that each cache line of the
// stored tensor is read from memory once.
#include "runtime/adapter/adapter_packer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <tuple>

#include "kernels/base/error.h"
#include "runtime/adapter/adapter_tiles.h"
#include "runtime/io/json.h"
#include "runtime/memory/host_memory.h"

namespace moelora {
namespace {

constexpr size_t kNameBytesMax = 512;  // of a tensor's name in a message

struct Placement {
  const MatrixView* view;
  int32_t rank;
  Dtype dtype;
  bool is_a;
  int32_t granule;
};

struct BiasPlacement {
  const StoredTensor* tensor;
  int32_t granule;
};

struct StreamPlan {
  HostBytes stream;  // directory, records and zeros; matrices whose tiles are full are still what the memory held
  std::vector<Placement> matrices;
  std::vector<BiasPlacement> biases;
};

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
    plan.stream.resize(static_cast<size_t>(granules_) * kGranuleBytes);
    clear_what_is_not_filled(plan.stream);
    std::memcpy(plan.stream.data(), directory_.data(), directory_.size() * sizeof(int32_t));
    for (const auto& [byte, record] : records_) {
      std::memcpy(plan.stream.data() + byte, &record, sizeof record);
    }
    plan.matrices = std::move(matrices_);
    plan.biases = std::move(biases_);
    return plan;
  }

 private:
  // Matrices are placed in the order of their granules.
  void clear_what_is_not_filled(HostBytes& stream) const {
    int64_t done = 0;
    const auto clear_until = [&](int64_t granule) {
      std::memset(stream.data() + done * static_cast<int64_t>(kGranuleBytes), 0,
                  static_cast<size_t>(granule - done) * kGranuleBytes);
    };
    for (const Placement& matrix : matrices_) {
      if (matrix.rank % kTileRanks != 0 || matrix.view->columns % kTileColumns != 0) {
        continue;
      }
      clear_until(matrix.granule);
      done = matrix.granule + matrix_granules(matrix.rank, matrix.view->columns, matrix.dtype);
    }
    clear_until(granules_);
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
    matrices_.push_back({&view, record.rank, record.dtype, is_a, granule});
    if (view.tensor != nullptr) {
      shared_.emplace(key, granule);
    }
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
  std::vector<Placement> matrices_;
  std::vector<BiasPlacement> biases_;
  std::vector<std::pair<int64_t, LoraRecord>> records_;
};

// The plan borrows the records: they must outlive it and keep their place.
StreamPlan plan_stream(const ModelConfig& config, const std::vector<AdapterRecord>& records) {
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

bool interleaved(const MatrixView& view) {
  return view.rank_stride != 1 && view.column_stride != 1;
}

// Orders placements so that interleaved ones of one tensor are neighbours; `end_of_group` gives their extent.
void group_by_tensor(std::vector<Placement>& matrices) {
  std::stable_sort(matrices.begin(), matrices.end(),
                   [](const Placement& x, const Placement& y) { return x.view->tensor->data < y.view->tensor->data; });
}

size_t end_of_group(const std::vector<Placement>& matrices, size_t begin) {
  size_t end = begin + 1;
  if (interleaved(*matrices[begin].view)) {
    while (end < matrices.size() && matrices[end].view->tensor == matrices[begin].view->tensor &&
           interleaved(*matrices[end].view)) {
      ++end;
    }
  }
  return end;
}

[[noreturn]] void refuse_value(const StoredTensor& tensor, const std::string& file) {
  throw Error{Status::kAdapterMismatch, file + ": tensor " + quoted(tensor) + " holds a NaN or infinite value"};
}

// Null, or a tensor with a value that is not finite.
const StoredTensor* fill_group(const std::vector<Placement>& matrices, size_t begin, size_t end, std::byte* stream) {
  int32_t blocks = 0;
  for (size_t i = begin; i < end; ++i) {
    blocks = std::max(blocks, ceil_div(matrices[i].view->columns, kTileColumns));
  }
  for (int32_t block = 0; block < blocks; ++block) {
    for (size_t i = begin; i < end; ++i) {
      const Placement& m = matrices[i];
      if (block * kTileColumns >= m.view->columns) {
        continue;
      }
      std::byte* out = stream + static_cast<size_t>(m.granule) * kGranuleBytes;
      if (!pack_column_block(*m.view, m.rank, m.dtype, m.is_a, block, out)) {
        return m.view->tensor;
      }
    }
  }
  return nullptr;
}

}  // namespace

std::string quoted(const StoredTensor& tensor) {
  return "'" + printable(tensor.name, kNameBytesMax) + "'";
}

HostBytes pack_adapter(const ModelConfig& config, std::vector<AdapterRecord>& records, const std::string& file,
                       Stream& workers) {
  sort_records(records, file);
  StreamPlan plan = plan_stream(config, records);
  group_by_tensor(plan.matrices);
  std::vector<size_t> groups;  // where each begins, and the end of the last
  for (size_t begin = 0; begin < plan.matrices.size(); begin = end_of_group(plan.matrices, begin)) {
    groups.push_back(begin);
  }
  groups.push_back(plan.matrices.size());
  std::vector<const StoredTensor*> refused(groups.size(), nullptr);
  workers.parallel_for(groups.size() - 1, [&](size_t i, int) {
    refused[i] = fill_group(plan.matrices, groups[i], groups[i + 1], plan.stream.data());
  });
  for (const StoredTensor* tensor : refused) {
    if (tensor != nullptr) {
      refuse_value(*tensor, file);
    }
  }
  for (const BiasPlacement& bias : plan.biases) {
    if (!pack_bias(*bias.tensor, plan.stream.data() + static_cast<size_t>(bias.granule) * kGranuleBytes)) {
      refuse_value(*bias.tensor, file);
    }
  }
  return std::move(plan.stream);
}

HostBytes pack_random_adapter(const ModelConfig& config, std::vector<AdapterRecord>& records, uint64_t seed) {
  sort_records(records, "random adapter");
  StreamPlan plan = plan_stream(config, records);
  TileRandom random(seed);
  for (const Placement& m : plan.matrices) {
    random.fill_matrix(m.rank, m.view->columns, m.is_a,
                       plan.stream.data() + static_cast<size_t>(m.granule) * kGranuleBytes);
  }
  return std::move(plan.stream);
}

}  // namespace moelora
