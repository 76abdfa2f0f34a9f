// SPDX-License-Identifier: Apache-2.0
// An AdapterImage seen through AdapterTable, as kernels see it: its stream cut into pages that lie in random order in a
// pool of NaN. Gives dense deltas scale * B A in double, element by element from the text of adapter_layout.h.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/lora/adapter_layout.h"
#include "runtime/adapter/adapter_image.h"
#include "tests/support/draw.h"

namespace moelora::test {

// Row-major [out, in], with a bias of [out] or none.
struct Delta {
  bool present = false;
  int32_t out = 0;
  int32_t in = 0;
  int32_t rank = 0;
  std::vector<double> values;
  std::vector<double> bias;
};

// Largest |x - y| relative to the largest |y|; infinity if the two differ in kind.
inline double delta_distance(const Delta& x, const Delta& y) {
  if (x.present != y.present || x.out != y.out || x.in != y.in || x.bias.size() != y.bias.size()) {
    return INFINITY;
  }
  double worst = 0.0;
  double largest = 1e-30;
  const auto compare = [&](const std::vector<double>& p, const std::vector<double>& q) {
    for (size_t i = 0; i < q.size(); ++i) {
      const double distance = std::fabs(p[i] - q[i]);
      worst = std::isnan(distance) ? INFINITY : std::max(worst, distance);
      largest = std::max(largest, std::fabs(q[i]));
    }
  };
  compare(x.values, y.values);
  compare(x.bias, y.bias);
  return worst / largest;
}

class UnpackedImage {
 public:
  UnpackedImage(const AdapterImage& image, const ModelConfig& config, int32_t page_granules, uint32_t seed) {
    Draw draw(seed);
    const size_t page_bytes = static_cast<size_t>(page_granules) * kGranuleBytes;
    const size_t pages = (image.stream.size() + page_bytes - 1) / page_bytes;
    const auto pool_pages = static_cast<int32_t>(pages) + 3;
    pool_.assign(static_cast<size_t>(pool_pages) * page_bytes, std::byte{0xff});
    const std::vector<int32_t> order = draw.permutation(pool_pages);
    page_table_.assign(pages, -1);                                                                      // slot 0
    page_table_.insert(page_table_.end(), order.begin(), order.begin() + static_cast<int64_t>(pages));  // slot 1
    for (size_t page = 0; page < pages; ++page) {
      std::memcpy(pool_.data() + static_cast<size_t>(order[page]) * page_bytes, image.stream.data() + page * page_bytes,
                  std::min(page_bytes, image.stream.size() - page * page_bytes));
    }
    table_ = {pool_.data(), page_table_.data(), static_cast<int32_t>(pages), page_granules, config.num_experts};
  }

  [[nodiscard]] const AdapterTable& table() const { return table_; }

  [[nodiscard]] Delta dense(int32_t layer, LoraModule module, int32_t in, int32_t out) const {
    return delta(table_.dense(1, layer, module), in, out);
  }
  [[nodiscard]] Delta expert(int32_t layer, int32_t index, ExpertModule module, int32_t in, int32_t out) const {
    return delta(table_.expert(1, layer, index, module), in, out);
  }

  // Element of a matrix by the layout's words; also padding ranks and columns.
  [[nodiscard]] double element(int32_t matrix, Dtype dtype, bool is_a, int32_t ranks, int32_t columns, int32_t rank,
                               int32_t column) const {
    const int32_t panels = ceil_div(ranks, 8);
    const int32_t blocks = ceil_div(columns, 64);
    const int32_t tile = is_a ? (rank / 8) * blocks + column / 64 : (column / 64) * panels + rank / 8;
    const int32_t core = (column % 64) / 8;
    const int32_t inside = core * 64 + (is_a ? (rank % 8) * 8 + column % 8 : (column % 8) * 8 + rank % 8);
    const int32_t granule = matrix + tile * (dtype == Dtype::kF32 ? 2 : 1);
    return static_cast<double>(load_element(table_.granule(1, granule), dtype, static_cast<size_t>(inside)));
  }

 private:
  [[nodiscard]] Delta delta(const LoraRecord* record, int32_t in, int32_t out) const {
    Delta result;
    if (record == nullptr) {
      return result;
    }
    result = {true, out, in, record->rank, std::vector<double>(static_cast<size_t>(out) * static_cast<size_t>(in)), {}};
    const auto dtype = static_cast<Dtype>(record->dtype);
    const double scale = static_cast<double>(record->scale);
    for (int32_t r = 0; r < record->rank; ++r) {
      std::vector<double> row(static_cast<size_t>(in));
      for (int32_t k = 0; k < in; ++k) {
        row[static_cast<size_t>(k)] = scale * element(record->a, dtype, true, record->rank, in, r, k);
      }
      for (int32_t n = 0; n < out; ++n) {
        const double factor = element(record->b, dtype, false, record->rank, out, r, n);
        for (int32_t k = 0; k < in; ++k) {
          result.values[static_cast<size_t>(n) * static_cast<size_t>(in) + static_cast<size_t>(k)] +=
              factor * row[static_cast<size_t>(k)];
        }
      }
    }
    for (int32_t n = 0; record->bias >= 0 && n < out; ++n) {
      result.bias.push_back(scale * static_cast<double>(load_element(table_.granule(1, record->bias + n / 256),
                                                                     Dtype::kF32, static_cast<size_t>(n % 256))));
    }
    return result;
  }

  std::vector<std::byte> pool_;
  std::vector<int32_t> page_table_;
  AdapterTable table_;
};

}  // namespace moelora::test
