// SPDX-License-Identifier: Apache-2.0
// Packs test adapters; see adapter_builder.h.
#include "tests/support/adapter_builder.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace moelora::test {
namespace {

constexpr size_t kNumSpare = 5;  // pages of the pool that no adapter has

size_t index2(int32_t row, int32_t col, int32_t cols) {
  return static_cast<size_t>(row) * static_cast<size_t>(cols) + static_cast<size_t>(col);
}

class Packer {
 public:
  int32_t granules() const { return static_cast<int32_t>(stream_.size() / kGranuleBytes); }
  int32_t take(int32_t granules, bool even) {
    if (even && this->granules() % 2 != 0) {
      grow(1);
    }
    const int32_t at = this->granules();
    grow(granules);
    return at;
  }
  void put(int32_t granule, size_t index, Dtype dtype, float value) {
    std::byte* base = stream_.data() + static_cast<size_t>(granule) * kGranuleBytes + index * dtype_bytes(dtype);
    if (dtype == Dtype::kF32) {
      std::memcpy(base, &value, sizeof value);
    } else {
      const uint16_t bits = f32_to_bf16(value);
      std::memcpy(base, &bits, sizeof bits);
    }
  }
  template <class T>
  void put_at(int32_t granule, size_t index, const T& value) {
    std::memcpy(stream_.data() + static_cast<size_t>(granule) * kGranuleBytes + index * sizeof(T), &value, sizeof(T));
  }

  // A: tiles [rank panel][k block].
  int32_t put_a(const LoraPair& pair) {
    const int32_t blocks = (pair.k + 63) / 64;
    const int32_t per_tile = pair.dtype == Dtype::kF32 ? 2 : 1;
    const int32_t at = take((pair.rank + 7) / 8 * blocks * per_tile, per_tile == 2);
    for (int32_t r = 0; r < pair.rank; ++r) {
      for (int32_t k = 0; k < pair.k; ++k) {
        const int32_t tile = r / 8 * blocks + k / 64;
        const int32_t core = k % 64 / 8;
        put(at + tile * per_tile, static_cast<size_t>(core * 64 + r % 8 * 8 + k % 8), pair.dtype,
            pair.a[index2(r, k, pair.k)]);
      }
    }
    return at;
  }
  // B: tiles [output block][rank panel].
  int32_t put_b(const LoraPair& pair) {
    const int32_t panels = (pair.rank + 7) / 8;
    const int32_t per_tile = pair.dtype == Dtype::kF32 ? 2 : 1;
    const int32_t at = take((pair.n + 63) / 64 * panels * per_tile, per_tile == 2);
    for (int32_t n = 0; n < pair.n; ++n) {
      for (int32_t r = 0; r < pair.rank; ++r) {
        const int32_t tile = n / 64 * panels + r / 8;
        const int32_t core = n % 64 / 8;
        put(at + tile * per_tile, static_cast<size_t>(core * 64 + n % 8 * 8 + r % 8), pair.dtype,
            pair.b[index2(n, r, pair.rank)]);
      }
    }
    return at;
  }
  // `shared_a`: granule of an A already there, or -1.
  LoraRecord put_pair(const LoraPair& pair, int32_t shared_a) {
    LoraRecord record;
    record.a = shared_a >= 0 ? shared_a : put_a(pair);
    record.b = put_b(pair);
    if (!pair.bias.empty()) {
      record.bias = take((pair.n + 255) / 256, false);
      for (int32_t n = 0; n < pair.n; ++n) {
        put(record.bias, static_cast<size_t>(n), Dtype::kF32, pair.bias[static_cast<size_t>(n)]);
      }
    }
    record.rank = pair.rank;
    record.scale = pair.scale;
    record.dtype = static_cast<int32_t>(pair.dtype);
    return record;
  }
  std::vector<std::byte> finish() {
    if (granules() % 2 != 0) {
      grow(1);
    }
    return std::move(stream_);
  }

 private:
  void grow(int32_t granules) { stream_.resize(stream_.size() + static_cast<size_t>(granules) * kGranuleBytes); }
  std::vector<std::byte> stream_;
};

bool has_dense(const TestAdapter& adapter, int32_t layer) {
  return std::any_of(adapter.dense.begin(), adapter.dense.end(),
                     [layer](const auto& entry) { return entry.first.first == layer; });
}

bool has_experts(const TestAdapter& adapter, int32_t layer) {
  return std::any_of(adapter.experts.begin(), adapter.experts.end(),
                     [layer](const auto& entry) { return std::get<0>(entry.first) == layer; });
}

void pack_experts(const TestAdapter& adapter, int32_t layer, int32_t num_experts, int32_t at, Packer& packer) {
  for (int32_t e = 0; e < num_experts; ++e) {
    int32_t gate_a = -1;
    for (int32_t m = 0; m < kNumExpertModules; ++m) {
      LoraRecord record;
      const LoraPair* pair = adapter.find(layer, e, static_cast<ExpertModule>(m));
      if (pair != nullptr) {
        const bool shares = adapter.share_a && m == static_cast<int32_t>(ExpertModule::kUp);
        record = packer.put_pair(*pair, shares ? gate_a : -1);
        if (m == static_cast<int32_t>(ExpertModule::kGate)) {
          gate_a = record.a;
        }
      }
      packer.put_at(at, static_cast<size_t>(e * kNumExpertModules + m), record);
    }
  }
}

}  // namespace

double LoraPair::delta(int32_t row, int32_t col, double factor) const {
  double sum = 0.0;
  for (int32_t r = 0; r < rank; ++r) {
    sum += static_cast<double>(b[index2(row, r, rank)]) * static_cast<double>(a[index2(r, col, k)]);
  }
  return factor * sum;
}

LoraPair draw_pair(Draw& draw, int32_t rank, int32_t k, int32_t n, Dtype dtype, bool with_bias) {
  LoraPair pair;
  pair.rank = rank;
  pair.k = k;
  pair.n = n;
  pair.dtype = dtype;
  pair.scale = 0.25f + 0.5f * (draw.signed_unit() + 1.0f);
  pair.a = draw.floats(static_cast<size_t>(rank) * static_cast<size_t>(k));
  pair.b = draw.floats(static_cast<size_t>(n) * static_cast<size_t>(rank));
  if (with_bias) {
    pair.bias = draw.floats(static_cast<size_t>(n));
  }
  if (dtype == Dtype::kBf16) {
    for (float& value : pair.a) {
      value = bf16_to_f32(f32_to_bf16(value));
    }
    for (float& value : pair.b) {
      value = bf16_to_f32(f32_to_bf16(value));
    }
  }
  return pair;
}

const LoraPair* TestAdapter::find(int32_t layer, LoraModule module) const {
  const auto found = dense.find({layer, module});
  return found == dense.end() ? nullptr : &found->second;
}

const LoraPair* TestAdapter::find(int32_t layer, int32_t expert, ExpertModule module) const {
  const auto found = experts.find({layer, expert, module});
  return found == experts.end() ? nullptr : &found->second;
}

std::vector<std::byte> pack_adapter(const TestAdapter& adapter, int32_t num_layers, int32_t num_experts) {
  Packer packer;
  const int32_t directory_bytes = num_layers * 2 * static_cast<int32_t>(sizeof(int32_t));
  packer.take(ceil_div(directory_bytes, static_cast<int32_t>(kGranuleBytes)), false);
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    int32_t dense_at = -1;
    int32_t experts_at = -1;
    if (has_dense(adapter, layer)) {
      dense_at = packer.take(1, false);
    }
    if (has_experts(adapter, layer)) {
      const int32_t bytes = num_experts * kNumExpertModules * static_cast<int32_t>(sizeof(LoraRecord));
      experts_at = packer.take(ceil_div(bytes, static_cast<int32_t>(kGranuleBytes)), false);
    }
    packer.put_at(0, static_cast<size_t>(layer * 2), dense_at);
    packer.put_at(0, static_cast<size_t>(layer * 2 + 1), experts_at);
    for (int32_t m = 0; dense_at >= 0 && m < kNumDenseModules; ++m) {
      const LoraPair* pair = adapter.find(layer, static_cast<LoraModule>(m));
      packer.put_at(dense_at, static_cast<size_t>(m), pair != nullptr ? packer.put_pair(*pair, -1) : LoraRecord{});
    }
    if (experts_at >= 0) {
      pack_experts(adapter, layer, num_experts, experts_at, packer);
    }
  }
  return packer.finish();
}

AdapterFixture::AdapterFixture(std::vector<TestAdapter> adapters, int32_t num_layers, int32_t num_experts,
                               int32_t page_granules, uint32_t seed)
    : adapters_(std::move(adapters)), pool_(0) {
  std::vector<std::vector<std::byte>> streams;
  const size_t page_bytes = static_cast<size_t>(page_granules) * kGranuleBytes;
  size_t pages = kNumSpare;
  size_t pages_per_slot = 1;
  for (const TestAdapter& adapter : adapters_) {
    streams.push_back(pack_adapter(adapter, num_layers, num_experts));
    const size_t needed = (streams.back().size() + page_bytes - 1) / page_bytes;
    pages += needed;
    pages_per_slot = std::max(pages_per_slot, needed);
  }
  pool_ = PoisonedBytes(pages * page_bytes);
  Draw draw(seed);
  const std::vector<int32_t> order = draw.permutation(static_cast<int32_t>(pages));
  page_table_.assign((streams.size() + 1) * pages_per_slot, 0x7ffffff0);
  size_t next = 0;
  for (size_t s = 0; s < streams.size(); ++s) {
    for (size_t at = 0; at < streams[s].size(); at += page_bytes) {
      const int32_t page = order[next++];
      page_table_[(s + 1) * pages_per_slot + at / page_bytes] = page;
      std::memcpy(pool_.data() + static_cast<size_t>(page) * page_bytes, streams[s].data() + at,
                  std::min(page_bytes, streams[s].size() - at));
    }
  }
  batch_.table = {pool_.data(), page_table_.data(), static_cast<int32_t>(pages_per_slot), page_granules, num_experts};
  batch_.table.num_layers = num_layers;
}

const LoraBatch* AdapterFixture::batch(std::vector<int32_t> row_slot, std::vector<float> row_scale) {
  row_slot_ = std::move(row_slot);
  row_scale_ = std::move(row_scale);
  sorted_rows_.clear();
  segment_begin_.clear();
  segment_slot_.clear();
  batch_.max_rank = 0;
  const auto use_rank = [this](int32_t rank) { batch_.max_rank = std::max(batch_.max_rank, (rank + 7) / 8 * 8); };
  for (int32_t slot = 1; slot <= static_cast<int32_t>(adapters_.size()); ++slot) {
    const size_t before = sorted_rows_.size();
    for (size_t t = 0; t < row_slot_.size(); ++t) {
      if (row_slot_[t] == slot) {
        sorted_rows_.push_back(static_cast<int32_t>(t));
      }
    }
    if (sorted_rows_.size() == before) {
      continue;
    }
    segment_begin_.push_back(static_cast<int32_t>(before));
    segment_slot_.push_back(slot);
    for (const auto& entry : adapter(slot).dense) {
      use_rank(entry.second.rank);
    }
    for (const auto& entry : adapter(slot).experts) {
      use_rank(entry.second.rank);
    }
  }
  segment_begin_.push_back(static_cast<int32_t>(sorted_rows_.size()));
  batch_.row_slot = row_slot_.data();
  batch_.row_scale = row_scale_.data();
  batch_.sorted_rows = sorted_rows_.data();
  batch_.segment_begin = segment_begin_.data();
  batch_.segment_slot = segment_slot_.data();
  batch_.num_rows = static_cast<int32_t>(sorted_rows_.size());
  batch_.num_segments = static_cast<int32_t>(segment_slot_.size());
  return &batch_;
}

const LoraPair* AdapterFixture::dense(int32_t t, int32_t layer, LoraModule module, double* factor) const {
  const int32_t slot = row_slot_[static_cast<size_t>(t)];
  const LoraPair* pair = slot == 0 ? nullptr : adapter(slot).find(layer, module);
  if (pair != nullptr) {
    *factor = static_cast<double>(row_scale_[static_cast<size_t>(t)]) * static_cast<double>(pair->scale);
  }
  return pair;
}

const LoraPair* AdapterFixture::expert(int32_t t, int32_t layer, int32_t expert, ExpertModule module,
                                       double* factor) const {
  const int32_t slot = row_slot_[static_cast<size_t>(t)];
  const LoraPair* pair = slot == 0 ? nullptr : adapter(slot).find(layer, expert, module);
  if (pair != nullptr) {
    *factor = static_cast<double>(row_scale_[static_cast<size_t>(t)]) * static_cast<double>(pair->scale);
  }
  return pair;
}

}  // namespace moelora::test
