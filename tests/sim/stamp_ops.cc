// SPDX-License-Identifier: Apache-2.0
// Ops and what they must give, side by side: the ops go through pool, block tables and the adapters' page table, the
// other way round goes through none of it. The table stands in the place of the library's reference ops: this binary
// links it under their name, and its engines ask for kernels = "reference".
#include "tests/sim/stamp_ops.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/kernels.h"
#include "runtime/engine/step_input.h"
#include "tests/sim/simulated_engine.h"

namespace moelora {
namespace sim {
namespace {

constexpr Stamp kStart = 0x243f6a8885a308d3ull;

// What the ops of a step tell each other. One engine at a time, one thread.
struct Step {
  const int32_t* token_ids = nullptr;
  const LoraBatch* lora = nullptr;
  const int32_t* logit_rows = nullptr;
  int32_t num_rows = 0;
  std::vector<Stamp> stamps;  // of rows
};
Step step;

Stamp load(const std::byte* at) {
  Stamp value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

Stamp page_word(uint64_t image, uint64_t page) {
  return mix(mix(image, 0x13198a2e03707344ull), page);
}

uint64_t chosen_page(int32_t token, size_t position, uint64_t num_pages) {
  return (static_cast<uint64_t>(token) * 31 + position) % num_pages;
}

size_t earlier_position(int32_t token, size_t position) {
  return mix(static_cast<Stamp>(token), position) % position;
}

Stamp chain(Stamp before, Stamp earlier, int32_t token, Stamp word, float scale) {
  const Stamp adapter = word == 0 ? 0 : word ^ std::bit_cast<uint32_t>(scale);
  return mix(mix(before, earlier), static_cast<Stamp>(token) ^ adapter);
}

// A word of the adapter in the row's slot, read as the ops of a model read it; 0 without one.
Stamp word_of_row(int32_t row, int32_t token, int32_t position) {
  const int32_t slot = step.lora == nullptr ? 0 : step.lora->row_slot[row];
  if (slot == 0) {
    return 0;
  }
  const AdapterTable& table = step.lora->table;
  const auto page = [&](uint64_t index) {
    return table.granule(slot, static_cast<int32_t>(index) * table.page_granules);
  };
  const uint64_t num_pages = load(page(0) + sizeof(Stamp));
  if (num_pages == 0 || num_pages > static_cast<uint64_t>(table.pages_per_slot)) {
    return ~Stamp{0};  // no adapter is there
  }
  return load(page(chosen_page(token, static_cast<size_t>(position), num_pages)));
}

void attention(const PagedAttentionArgs& args, Stream&) {
  const KvLayout& layout = args.kv.layout;
  if (args.layer % layout.layers_per_page != 0) {
    return;  // a stamp a page
  }
  const Stamp salt = mix(static_cast<Stamp>(args.layer), 0xa4093822299f31d0ull);
  for (int32_t sequence = 0; sequence < args.num_sequences; ++sequence) {
    const auto at = [&](int32_t position) {
      return args.kv.block(sequence, position, args.layer) +
             static_cast<size_t>(position % layout.block_tokens) * sizeof(Stamp);
    };
    for (int32_t row = args.row_begin[sequence]; row < args.row_begin[sequence + 1]; ++row) {
      const int32_t position = args.positions[row];
      const int32_t token = step.token_ids[row];
      Stamp before = kStart;
      Stamp earlier = kStart;
      if (position > 0) {
        before = load(at(position - 1)) ^ salt;
        earlier = load(at(static_cast<int32_t>(earlier_position(token, static_cast<size_t>(position))))) ^ salt;
      }
      const Stamp word = word_of_row(row, token, position);
      const Stamp stamp = chain(before, earlier, token, word, word == 0 ? 0.0f : step.lora->row_scale[row]);
      const Stamp stored = stamp ^ salt;
      std::memcpy(at(position), &stored, sizeof stored);
      Stamp& of_row = step.stamps[static_cast<size_t>(row)];
      of_row = args.layer == 0 || of_row == stamp ? stamp : ~stamp;  // all groups of layers say the same
    }
  }
}

int32_t sample(Stamp stamp, bool with_temperature, uint64_t seed, uint64_t draw, const uint16_t* state,
               const int32_t* suppressed, int32_t num_suppressed) {
  if (with_temperature) {
    stamp = mix(mix(stamp, seed), draw);
  }
  if (state != nullptr) {
    stamp = mix(stamp, state[stamp % kVocabSize]);
  }
  auto token = static_cast<int32_t>(mix(stamp, 0x082efa98ec4e6c89ull) % kVocabSize);
  while (std::find(suppressed, suppressed + num_suppressed, token) != suppressed + num_suppressed) {
    token = (token + 1) % kVocabSize;
  }
  return token;
}

// A step takes the longer the more rows it has; pages go to the host now fast, now slowly.
void sample_tokens(const SampleTokensArgs& args, Stream&) {
  pass_time(0.1 + 0.01 * step.num_rows);
  for (int32_t i = 0; i < args.num_rows; ++i) {
    const SampleRow& row = args.rows[i];
    SampleOutput& output = args.outputs[i];
    output.status = 0;
    output.token = sample(step.stamps[static_cast<size_t>(step.logit_rows[i])], row.temperature > 0.0f, row.seed,
                          row.draw_index, row.token_state, row.suppressed, row.num_suppressed);
  }
}

void read_pages(const ReadPagesArgs& args, Stream& stream) {
  pass_time(1e-6 * static_cast<double>(args.bytes) * static_cast<double>(1 + step.num_rows % 4));
  read_pages_cpu(args, stream);
}

void embedding(const EmbeddingArgs& args, Stream&) {
  step.num_rows = args.num_rows;
  step.token_ids = args.token_ids;
  step.stamps.resize(std::max(step.stamps.size(), static_cast<size_t>(args.num_rows)));
}

void rms_norm(const RmsNormArgs& args, Stream&) {
  step.logit_rows = args.row_index;  // the last one of a step has it
}

void linear(const LinearArgs& args, Stream&) {
  if (args.num_parts == 3) {  // q, k, v
    step.lora = args.parts[0].module == LoraModule::kQ ? args.lora : nullptr;
  }
}

}  // namespace

std::shared_ptr<AdapterImage> make_image(uint64_t image, int32_t granules, int64_t page_bytes, bool has_folder) {
  auto made = std::make_shared<AdapterImage>();
  made->stream.resize(static_cast<size_t>(granules) * kGranuleBytes);
  made->stream_bytes = made->stream.size();
  made->file_bytes = made->stream.size();
  made->fingerprint = image;
  made->dir = has_folder ? "image " + std::to_string(image) : "";
  made->max_rank = kTileRanks;
  made->modules = 1u << static_cast<int>(LoraModule::kQ);
  const auto stride = static_cast<size_t>(page_bytes);
  const uint64_t num_pages = (made->stream.size() + stride - 1) / stride;
  for (uint64_t page = 0; page < num_pages; ++page) {
    const Stamp word = page_word(image, page);
    std::memcpy(made->stream.data() + page * stride, &word, sizeof word);
  }
  std::memcpy(made->stream.data() + sizeof(Stamp), &num_pages, sizeof num_pages);
  return made;
}

Stamp next_stamp(const std::vector<Stamp>& before, int32_t token, const AdapterKey& adapter) {
  const size_t position = before.size();
  const bool adapted = adapter.image != 0 && adapter.scale != 0.0f;
  const Stamp word =
      adapted ? page_word(adapter.image, chosen_page(token, position, static_cast<uint64_t>(adapter.num_pages))) : 0;
  const float scale = adapted ? adapter.scale : 0.0f;
  return position == 0 ? chain(kStart, kStart, token, word, scale)
                       : chain(before.back(), before[earlier_position(token, position)], token, word, scale);
}

int32_t next_token(Stamp last, const std::vector<int32_t>& tokens, size_t num_prompt, const Request& request,
                   uint64_t seed) {
  const size_t num_outputs = tokens.size() - num_prompt;
  std::vector<uint16_t> counts;
  if (needs_token_state(request.sampling)) {
    counts.resize(kVocabSize);
    for (size_t i = 0; i < tokens.size(); ++i) {
      uint16_t& count = counts[static_cast<size_t>(tokens[i])];
      count = i < num_prompt ? 0x8000 : static_cast<uint16_t>(count + 1);
    }
  }
  std::vector<int32_t> suppressed;
  if (num_outputs < static_cast<size_t>(request.sampling.min_tokens)) {
    suppressed = request.stop_tokens;
    suppressed.push_back(kEosToken);
  }
  return sample(last, request.sampling.temperature > 0.0f, seed, num_outputs, counts.empty() ? nullptr : counts.data(),
                suppressed.data(), static_cast<int32_t>(suppressed.size()));
}

}  // namespace sim

const Kernels& kernels_reference() {
  const auto nothing = [](const auto&, Stream&) {};
  static const Kernels table = {
      .name = "stamps",
      .embedding = sim::embedding,
      .rms_norm = sim::rms_norm,
      .linear = sim::linear,
      .swiglu = nothing,
      .rope_kv_write = nothing,
      .paged_attention = sim::attention,
      .router_topk = nothing,
      .moe_sort = nothing,
      .moe_route = nothing,
      .moe_router = nothing,
      .moe_gate_up = nothing,
      .moe_down = nothing,
      .moe_combine = nothing,
      .sample_tokens = sim::sample_tokens,
      .copy_pages = copy_pages_cpu,
      .write_pages = write_pages_cpu,
      .read_pages = sim::read_pages,
      .fill_random = nothing,
      .read_memory = nothing,
      .lora_resolve = nullptr,
      .pack_mxfp4 = nullptr,
  };
  return table;
}

}  // namespace moelora
