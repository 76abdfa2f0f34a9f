// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_model.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <random>

namespace moelora {
namespace {

constexpr int32_t kPageGranules = 256;
constexpr size_t kHeader = 4096;  // holds the size of the mapping before the bytes

}  // namespace

void FreeBytes::operator()(std::byte* memory) const {
  size_t bytes;
  std::memcpy(&bytes, memory - kHeader, sizeof bytes);
  munmap(memory - kHeader, bytes);
}

Bytes map_bytes(size_t bytes) {
  const size_t total = (bytes + kHeader + 4095) / 4096 * 4096;
  void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::bad_alloc();
  }
  madvise(memory, total, MADV_NOHUGEPAGE);
  std::memcpy(memory, &total, sizeof total);
  return Bytes(static_cast<std::byte*>(memory) + kHeader);
}

BenchModel::BenchModel(const BenchShape& bench_shape, Stream& stream) : shape(bench_shape) {
  place_weights();
  fill_random_cpu({weights.get(), Dtype::kBf16, static_cast<int64_t>(weight_bytes / 2), 0.02f, 1}, stream);
  if (shape.mxfp4) {
    std::memset(weights.get() + scale_begin, 119, weight_bytes - scale_begin);
  }
  place_adapters(stream);
}

void BenchModel::place_weights() {
  const auto hidden = static_cast<size_t>(shape.hidden);
  const size_t square = hidden * hidden * 2;
  const size_t elements = hidden * static_cast<size_t>(shape.intermediate);
  const size_t expert = shape.mxfp4 ? elements / 2 : elements * 2;
  const size_t scales = shape.mxfp4 ? elements / 32 : 0;
  const size_t router = hidden * static_cast<size_t>(shape.num_experts) * 2;
  weight_bytes = static_cast<size_t>(shape.layers) * (4 * square + router + 3 * expert * shape.num_experts) +
                 hidden * static_cast<size_t>(shape.vocab) * 2;
  scale_begin = weight_bytes;
  weight_bytes += static_cast<size_t>(shape.layers) * 3 * scales * shape.num_experts;
  weights = map_bytes(weight_bytes);
  std::byte* at = weights.get();
  const auto take = [&](size_t bytes) {
    std::byte* from = at;
    at += bytes;
    return from;
  };
  for (int32_t l = 0; l < shape.layers; ++l) {
    BenchLayer layer;
    for (Weight* weight : {&layer.q, &layer.k, &layer.v, &layer.o}) {
      *weight = {take(square), Dtype::kBf16, shape.hidden, shape.hidden};
    }
    layer.router = {take(router), Dtype::kBf16, shape.num_experts, shape.hidden};
    if (shape.mxfp4) {
      place_mxfp4(layer, take(3 * expert * shape.num_experts),
                  weights.get() + scale_begin + static_cast<size_t>(l) * 3 * scales * shape.num_experts);
    }
    for (int32_t e = 0; e < shape.num_experts && !shape.mxfp4; ++e) {
      layer.gate.push_back(take(expert));
      layer.up.push_back(take(expert));
      layer.down.push_back(take(expert));
    }
    layers.push_back(layer);
  }
  lm_head = {take(hidden * static_cast<size_t>(shape.vocab) * 2), Dtype::kBf16, shape.vocab, shape.hidden};
}

// As in a file: gate_up of all experts, then down; scales likewise.
void BenchModel::place_mxfp4(BenchLayer& layer, std::byte* data, std::byte* scales) const {
  const int64_t row = shape.hidden / 2;
  const int64_t elements = int64_t{shape.hidden} * shape.intermediate;
  const auto* scale = reinterpret_cast<const uint8_t*>(scales);
  for (int32_t e = 0; e < shape.num_experts; ++e) {
    layer.gate.push_back(data + e * elements);
    layer.up.push_back(data + e * elements + row);
    layer.down.push_back(data + (shape.num_experts * 2 + e) * (elements / 2));
    layer.gate_scales.push_back(scale + e * (elements / 16));
    layer.up_scales.push_back(scale + e * (elements / 16) + shape.hidden / 32);
    layer.down_scales.push_back(scale + (shape.num_experts * 2 + e) * (elements / 32));
  }
}

void BenchModel::place_adapters(Stream& stream) {
  const int32_t attention = matrix_granules(shape.rank, shape.hidden, Dtype::kBf16);
  const int32_t narrow = matrix_granules(shape.rank, shape.intermediate, Dtype::kBf16);
  const int32_t record_granules = ceil_div(shape.num_experts * kNumExpertModules, 32);
  const int32_t layer_granules =
      1 + record_granules + 4 * 2 * attention + shape.num_experts * kNumExpertModules * (attention + narrow);
  const int32_t pages = ceil_div(1 + shape.layers * layer_granules, kPageGranules);
  const size_t slot_bytes = static_cast<size_t>(pages) * kPageGranules * kGranuleBytes;
  adapters = map_bytes(slot_bytes * static_cast<size_t>(shape.adapters));
  fill_random_cpu({adapters.get(), Dtype::kBf16, static_cast<int64_t>(slot_bytes / 2) * shape.adapters, 0.02f, 2},
                  stream);
  page_table.assign(static_cast<size_t>(pages) * (shape.adapters + 1), 0);
  std::iota(page_table.begin() + pages, page_table.end(), 0);
  table = {adapters.get(), page_table.data(), pages, kPageGranules, shape.num_experts};
  for (int32_t a = 0; a < shape.adapters; ++a) {
    std::byte* base = adapters.get() + static_cast<size_t>(a) * slot_bytes;
    const auto granule = [&](int32_t index) { return base + static_cast<size_t>(index) * kGranuleBytes; };
    std::memset(base, 0, kGranuleBytes);
    int32_t at = 1;
    const auto record = [&](int32_t columns, int32_t outputs) {
      LoraRecord lora;
      lora.a = at;
      lora.b = at + columns;
      lora.rank = shape.rank;
      lora.scale = 1.0f;
      at += columns + outputs;
      return lora;
    };
    for (int32_t l = 0; l < shape.layers; ++l) {
      const int32_t directory[2] = {at, at + 1};
      std::memcpy(base + l * 8, directory, sizeof directory);
      auto* dense = reinterpret_cast<LoraRecord*>(granule(at));
      auto* experts = reinterpret_cast<LoraRecord*>(granule(at + 1));
      std::fill_n(dense, 32, LoraRecord());
      at += 1 + record_granules;
      for (int32_t m = 0; m < 4; ++m) {
        dense[m] = record(attention, attention);
      }
      for (int32_t e = 0; e < shape.num_experts; ++e) {
        experts[e * 3] = record(attention, narrow);
        experts[e * 3 + 1] = record(attention, narrow);
        experts[e * 3 + 2] = record(narrow, attention);
      }
    }
  }
}

BenchStep::BenchStep(const BenchModel& model, int32_t num_rows, bool lora_on, uint32_t seed)
    : rows(num_rows), with_lora(lora_on) {
  const BenchShape& shape = model.shape;
  const int32_t pairs = rows * shape.top_k;
  std::mt19937 random(seed);
  slots.assign(static_cast<size_t>(rows), 0);
  scales.assign(static_cast<size_t>(rows), 1.0f);
  for (int32_t t = 0; t < rows && with_lora; ++t) {
    slots[static_cast<size_t>(t)] = 1 + t % shape.adapters;
  }
  for (int32_t slot = 1; slot <= shape.adapters; ++slot) {
    for (int32_t t = 0; t < rows; ++t) {
      if (slots[static_cast<size_t>(t)] != slot) {
        continue;
      }
      if (segment_slot.empty() || segment_slot.back() != slot) {
        segment_begin.push_back(static_cast<int32_t>(sorted_rows.size()));
        segment_slot.push_back(slot);
      }
      sorted_rows.push_back(t);
    }
  }
  segment_begin.push_back(static_cast<int32_t>(sorted_rows.size()));
  batch = {model.table,
           slots.data(),
           scales.data(),
           sorted_rows.data(),
           segment_begin.data(),
           segment_slot.data(),
           static_cast<int32_t>(sorted_rows.size()),
           static_cast<int32_t>(segment_slot.size()),
           (shape.rank + 7) / 8 * 8};
  std::vector<int32_t> experts(static_cast<size_t>(shape.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (int32_t t = 0; t < rows; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    ids.insert(ids.end(), experts.begin(), experts.begin() + shape.top_k);
  }
  router_weights.assign(static_cast<size_t>(pairs), 1.0f / static_cast<float>(shape.top_k));
  for (auto* array : {&pair_row, &pair_position, &segments, &segment_experts, &segment_slots}) {
    array->assign(static_cast<size_t>(pairs) + 1, 0);
  }
  expert_begin.assign(static_cast<size_t>(shape.num_experts) + 1, 0);
  num_segments.assign(1, 0);
  order = {pair_row.data(),        pair_position.data(), expert_begin.data(), segments.data(),
           segment_experts.data(), segment_slots.data(), num_segments.data()};

  const auto wide = static_cast<size_t>(pairs);
  const auto lora_pairs = with_lora ? wide : 0;
  scratch_bytes =
      std::max(linear_scratch_bytes(wide, static_cast<size_t>(shape.intermediate), lora_pairs, 64),
               linear_scratch_bytes(static_cast<size_t>(rows), static_cast<size_t>(shape.hidden), lora_pairs, 64));
  const auto t = static_cast<size_t>(rows);
  const auto hidden_floats = static_cast<size_t>(shape.hidden);
  arena = map_bytes(scratch_bytes + 4 * (5 * t * hidden_floats + t * static_cast<size_t>(shape.num_experts + 16) +
                                         wide * (hidden_floats + static_cast<size_t>(shape.intermediate)) +
                                         64 * static_cast<size_t>(shape.vocab)));
  std::byte* at = arena.get() + scratch_bytes;
  scratch = arena.get();
  const auto take = [&](int64_t count, int32_t width) {
    const Rows taken{at, Dtype::kF32, width};
    at += count * width * 4;
    return taken;
  };
  for (Rows* matrix : {&x, &q, &k, &v, &hidden}) {
    *matrix = take(rows, shape.hidden);
  }
  logits = take(rows, shape.num_experts);
  act = take(pairs, shape.intermediate);
  down = take(pairs, shape.hidden);
  vocab_logits = take(std::min(rows, 64), shape.vocab);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < static_cast<int64_t>(rows) * shape.hidden; ++i) {
    x.f32()[i] = normal(random);
  }
}

}  // namespace moelora
