// SPDX-License-Identifier: Apache-2.0
// Expert products of many tokens an expert on sm_90a: a grouped GEMM over (expert, 128 rows of the weight operand, up
// to 256 tokens). Two warpgroups of 64 rows multiply (wgmma), with the weights as the operand in registers, so that
// MXFP4 is expanded between load and product; a third fills shared memory with tokens. Each multiplying warp copies its
// own 16 rows of weights into shared memory, kWeightStages blocks of 64 inputs ahead, and fetches them from there. An
// expert's tokens are cut into tiles of equal size, a multiple of 32, so that experts of a few more than 256 tokens do
// not pay for 512. The order of k is that of kernels/cuda/mma_tile.cuh: step (c, h) of a block takes words 2h and 2h +
// 1 of chunks 4c .. 4c + 3. In shared memory a token's 16-byte piece 4c + w therefore holds words w of these four
// chunks. Limited by the tensor cores and by reading tokens and weights from L2.
#pragma once

#include <algorithm>

#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/expert_prefill.cuh"

namespace moelora {
namespace sm90 {

constexpr int kMultiplyThreads = 256;  // two warpgroups
constexpr int kFillThreads = 128;
constexpr int kThreads = kMultiplyThreads + kFillThreads;
constexpr int kMultiplyRegisters = 208;  // a thread
constexpr int kFillRegisters = 96;
constexpr int kMultiplyWarps = kMultiplyThreads / 32;
constexpr int kRowTiles = kMultiplyWarps;  // of 16 rows, of a block
constexpr int kTokens = 256;               // largest token tile
constexpr int kWidthStep = 32;             // widths of tiles are its multiples
constexpr int kTokenStages = 4;
constexpr int kWeightStages = 4;
constexpr int kTokenStageBytes = kTokens * 128;
constexpr int kStageAlignment = 1024;

// What a block must know about the tokens of a tile.
struct TileTokens {
  int32_t first_chunk[kTokens];  // of the token's row in x; tokens past the end repeat the last
  int32_t slot[kTokens];         // adapter, 0 = none; with adapters only
  float scale[kTokens];
};

struct Shared {
  ExpertTiles tiles;
  TileTokens tokens[2];  // of this item and of the one that is filled ahead
  uint64_t full[kTokenStages];
  uint64_t empty[kTokenStages];
  uint64_t tokens_empty[2];
};

// One work item: a tile of an expert.
struct Work {
  int expert;
  int row_block;
  int pair;   // first sorted pair of the token tile
  int count;  // tokens, > 0
  int width;  // count rounded up to kWidthStep
};

__device__ __forceinline__ Work find_tile(const ExpertGemm& p, const ExpertTiles& tiles, int active, int row_blocks,
                                          int item) {
  const PrefillWork found = find_work(p, tiles, active, row_blocks, item);
  const int pairs = found.end - found.begin;
  const int size = ((pairs + found.token_tiles - 1) / found.token_tiles + kWidthStep - 1) / kWidthStep * kWidthStep;
  Work work;
  work.expert = found.expert;
  work.row_block = found.row_block;
  work.pair = found.begin + found.token_tile * size;
  work.count = min(found.end - work.pair, size);
  work.width = (work.count + kWidthStep - 1) / kWidthStep * kWidthStep;
  return work;
}

// Number of a stage and parity of its use, for the n-th block of all that pass.
__device__ __forceinline__ int stage_of(uint32_t n) {
  return static_cast<int>(n % kTokenStages);
}
__device__ __forceinline__ uint32_t parity_of(uint32_t n) {
  return n / kTokenStages % 2;
}

// --- The warpgroup that fills.

// A unit of its work: 64 tokens of a block, four chunks a thread: chunk threadIdx % 8 of tokens threadIdx / 8 + 16 i.
// kAhead units are on their way in registers.
constexpr int kUnitTokens = 64;
constexpr int kUnitChunks = 4;
constexpr int kAhead = 4;

struct UnitPosition {
  int block = 0;
  int token = 0;  // first
  __device__ __forceinline__ void advance(int width) {
    token += kUnitTokens;
    if (token >= width) {
      token = 0;
      ++block;
    }
  }
};

__device__ __forceinline__ void describe_tokens(const ExpertGemm& p, const Work& work, TileTokens& tokens, int thread) {
  for (int i = thread; i < work.width; i += kFillThreads) {
    const int pair = work.pair + min(i, work.count - 1);
    const int row = p.x_by_pair && p.lora.row_slot == nullptr ? 0 : __ldg(p.order.pair_row + pair);
    tokens.first_chunk[i] = (p.x_by_pair ? pair : row) * static_cast<int>(p.x_stride / 8);
    if (p.lora.row_slot != nullptr) {
      const int slot = i < work.count ? __ldg(p.lora.row_slot + row) : 0;
      const float scale = slot != 0 ? __ldg(p.lora.row_scale + row) : 0.0f;
      tokens.slot[i] = scale != 0.0f ? slot : 0;  // a scale of zero counts as no adapter
      tokens.scale[i] = scale;
    }
  }
}

struct TokenFiller {
  const uint4* x;
  const int32_t* first_chunk;
  int thread;
  int chunks;  // of a row
  int width;

  __device__ __forceinline__ void load(uint4 (&unit)[kUnitChunks], const UnitPosition& at) const {
    const int chunk = 8 * at.block + thread % 8;
#pragma unroll
    for (int i = 0; i < kUnitChunks; ++i) {
      const int group = at.token + 16 * i;
      unit[i] =
          group < width && chunk < chunks ? load_streaming(x + first_chunk[group + thread / 8] + chunk) : zero_chunk();
    }
  }
  // A warp's stores of one word cover all banks: four rows of one half of the swizzle, both halves of a block.
  __device__ __forceinline__ void store(const uint4 (&unit)[kUnitChunks], const UnitPosition& at,
                                        std::byte* stage) const {
    const int row = thread / 8;
    const int first_piece = thread % 8 / 4 * 4 ^ row % 8;  // of word 0
#pragma unroll
    for (int i = 0; i < kUnitChunks; ++i) {
      const int group = at.token + 16 * i;
      if (group < width) {
        auto* to = reinterpret_cast<uint32_t*>(stage + (group + row) * 128) + thread % 4;
        to[(first_piece ^ 0) * 4] = unit[i].x;
        to[(first_piece ^ 1) * 4] = unit[i].y;
        to[(first_piece ^ 2) * 4] = unit[i].z;
        to[(first_piece ^ 3) * 4] = unit[i].w;
      }
    }
  }
};

// All blocks of one item; n is the number of its first block.
__device__ __forceinline__ void fill_item(const TokenFiller& filler, int k_blocks, uint32_t n, Shared& shared,
                                          std::byte* stages) {
  UnitPosition loaded;
  UnitPosition stored;
  uint4 units[kAhead][kUnitChunks];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (loaded.block < k_blocks) {
      filler.load(units[i], loaded);
      loaded.advance(filler.width);
    }
  }
  while (stored.block < k_blocks) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (stored.block < k_blocks) {
        const uint32_t block = n + static_cast<uint32_t>(stored.block);
        const int stage = stage_of(block);
        if (stored.token == 0) {
          mbarrier_wait(&shared.empty[stage], parity_of(block) ^ 1);
        }
        filler.store(units[i], stored, stages + stage * kTokenStageBytes);
        if (stored.token + kUnitTokens >= filler.width) {
          fence_for_wgmma();
          mbarrier_arrive(&shared.full[stage]);
        }
        stored.advance(filler.width);
      }
      if (loaded.block < k_blocks) {
        filler.load(units[i], loaded);
        loaded.advance(filler.width);
      }
    }
  }
}

__device__ __forceinline__ void fill_all(const ExpertGemm& p, int active, int row_blocks, Shared& shared,
                                         std::byte* stages) {
  const int items = shared.tiles.begin[active] * row_blocks;
  uint32_t n = 0;
  uint32_t nth = 0;  // item of this block
  TokenFiller filler;
  filler.x = reinterpret_cast<const uint4*>(p.x);
  filler.thread = static_cast<int>(threadIdx.x) - kMultiplyThreads;
  filler.chunks = p.k / 8;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x), ++nth) {
    const Work work = find_tile(p, shared.tiles, active, row_blocks, item);
    TileTokens& tokens = shared.tokens[nth % 2];
    mbarrier_wait(&shared.tokens_empty[nth % 2], nth / 2 % 2 ^ 1);
    describe_tokens(p, work, tokens, filler.thread);
    barrier_sync(1, kFillThreads);  // tokens are described
    filler.first_chunk = tokens.first_chunk;
    filler.width = work.width;
    fill_item(filler, p.k_blocks, n, shared, stages);
    n += static_cast<uint32_t>(p.k_blocks);
  }
}

// --- The warpgroups that multiply.

// Weights of one warp: 16 rows, a block of 64 inputs as the four steps' registers of wgmma.
template <class Source>
struct WeightPipe {
  Source source;
  std::byte* stages;

  __device__ __forceinline__ std::byte* stage(int b) const { return stages + b % kWeightStages * Source::kStageBytes; }
  __device__ __forceinline__ void copy(int b, int k_blocks) const {
    if (b < k_blocks) {
      source.copy(stage(b), b);
    }
    async_commit();  // always, so that groups count blocks
  }
  __device__ __forceinline__ void begin(int k_blocks) const {
#pragma unroll
    for (int b = 0; b < kWeightStages - 1; ++b) {
      copy(b, k_blocks);
    }
  }
  // Past the end of k it fetches what nobody uses.
  __device__ __forceinline__ void fetch(uint32_t (&a)[16], int b, int k_blocks) const {
    async_wait<kWeightStages - 2>();
    typename Source::Block block;
    Source::fetch(block, stage(b));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint4 low;
      uint4 high;
      Source::chunk(block, c, low, high);
      a[8 * c + 0] = low.x;
      a[8 * c + 1] = high.x;
      a[8 * c + 2] = low.y;
      a[8 * c + 3] = high.y;
      a[8 * c + 4] = low.z;
      a[8 * c + 5] = high.z;
      a[8 * c + 6] = low.w;
      a[8 * c + 7] = high.w;
    }
    copy(b + kWeightStages - 1, k_blocks);  // where block b - 1 was
  }
};

// The accumulators of a tile: of 128, 64, 32 and 32 tokens, of which a tile uses those that add up to its width. With
// one product of fixed width each, they all have their registers to themselves; products of many widths on the same
// registers would be run one after the other.
struct Accumulators {
  float part0[64];
  float part1[32];
  float part2[16];
  float part3[16];
};
// First tokens of the parts, -1 = not used.
struct Parts {
  int begin0, begin1, begin2, begin3;
  __device__ __forceinline__ explicit Parts(int width) {
    begin0 = width >= 128 ? 0 : -1;
    int at = width >= 128 ? 128 : 0;
    begin1 = width - at >= 64 ? at : -1;
    at += width - at >= 64 ? 64 : 0;
    begin2 = width - at >= 32 ? at : -1;
    at += 32;
    begin3 = width - at >= 32 ? at : -1;
  }
};

// Always closes a group, so that a block is four of them: with fewer groups than branches the compiler would close some
// of its own, and waits would count those.
template <int TOKENS>
__device__ __forceinline__ void multiply_part(float (&acc)[TOKENS / 2], const uint32_t (&a)[16], uint64_t tokens,
                                              int begin) {
  if (begin >= 0) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      wgmma_m64k16<TOKENS>(acc, a + 4 * step, tokens + static_cast<uint64_t>(begin * 128 / 16 + 2 * step));
    }
    wgmma_commit();
  } else {
    wgmma_fence();
    wgmma_commit();
  }
}

// Block b, the n-th of all: `now` are its weights, `next` becomes those of the block after it.
template <class Source>
__device__ __forceinline__ void multiply_block(Accumulators& acc, const uint32_t (&now)[16], uint32_t (&next)[16],
                                               const Parts& parts, const WeightPipe<Source>& weights, int b,
                                               int k_blocks, uint32_t n, Shared& shared, uint32_t stages) {
  const int stage = stage_of(n);
  mbarrier_wait(&shared.full[stage], parity_of(n));
  const uint64_t tokens = wgmma_descriptor(stages + static_cast<uint32_t>(stage * kTokenStageBytes));
  multiply_part<128>(acc.part0, now, tokens, parts.begin0);
  multiply_part<64>(acc.part1, now, tokens, parts.begin1);
  multiply_part<32>(acc.part2, now, tokens, parts.begin2);
  multiply_part<32>(acc.part3, now, tokens, parts.begin3);
  wgmma_wait<4>();  // the block before has left its registers and its stage
  if (b > 0 && threadIdx.x % 32 == 0) {
    mbarrier_arrive(&shared.empty[stage_of(n - 1)]);
  }
  weights.fetch(next, b + 1, k_blocks);
}

template <class Source>
__device__ __forceinline__ void multiply(Accumulators& acc, const Parts& parts, const WeightPipe<Source>& weights,
                                         int k_blocks, uint32_t n, Shared& shared, uint32_t stages) {
  uint32_t even[16];
  uint32_t odd[16];
  weights.fetch(even, 0, k_blocks);
  int b = 0;
  for (; b + 1 < k_blocks; b += 2) {
    multiply_block(acc, even, odd, parts, weights, b, k_blocks, n + static_cast<uint32_t>(b), shared, stages);
    multiply_block(acc, odd, even, parts, weights, b + 1, k_blocks, n + static_cast<uint32_t>(b + 1), shared, stages);
  }
  if (b < k_blocks) {
    multiply_block(acc, even, odd, parts, weights, b, k_blocks, n + static_cast<uint32_t>(b), shared, stages);
  }
  wgmma_wait<0>();
  wgmma_hold(acc.part0);
  wgmma_hold(acc.part1);
  wgmma_hold(acc.part2);
  wgmma_hold(acc.part3);
  if (threadIdx.x % 32 == 0) {
    mbarrier_arrive(&shared.empty[stage_of(n + static_cast<uint32_t>(k_blocks) - 1)]);
  }
}

template <class Function>
__device__ __forceinline__ void for_each_part(Accumulators& acc, const Parts& parts, const Function& function) {
  if (parts.begin0 >= 0) {
    function(acc.part0, parts.begin0);
  }
  if (parts.begin1 >= 0) {
    function(acc.part1, parts.begin1);
  }
  if (parts.begin2 >= 0) {
    function(acc.part2, parts.begin2);
  }
  if (parts.begin3 >= 0) {
    function(acc.part3, parts.begin3);
  }
}

// --- Adapters.

// One module of one adapter, the tokens of the tile that use it, and the outputs of a warp's rows 0-7 and 8-15 (-1 =
// those rows are not of this module).
struct TileAdapter {
  const ResolvedLora* record;
  int slot;
  int first;  // all of its tokens are in [first, last]
  int last;
  int index;  // of the module in the shrunk values
  int n_low;
  int n_high;

  __device__ __forceinline__ bool has(const TileTokens& tokens, int token) const {
    return token >= first && token <= last && tokens.slot[token] == slot;
  }
};

__device__ __forceinline__ uint4 load_b(const ExpertGemm& p, const TileAdapter& adapter, int panels, int panel, int n) {
  if (panel >= panels || n < 0) {
    return zero_chunk();
  }
  const ResolvedLora& record = *adapter.record;
  const std::byte* tile =
      p.lora.table.resolved_granule(adapter.slot, record.b, record.b_pages, n / kTileColumns * panels + panel);
  return *reinterpret_cast<const uint4*>(tile + n % kTileColumns / 8 * 128 + lane_index() / 4 * 16);
}

// acc += what 32 ranks, this lane's panel of 8 of them and the others of its quad, add to a part; low and high are B.
template <int MODULES, int COUNT>
__device__ __forceinline__ void expand_part(float (&acc)[COUNT], const ExpertGemm& p, const TileTokens& tokens,
                                            const TileAdapter& adapter, int pair, int begin, const uint4& low,
                                            const uint4& high, int panel, bool present) {
  constexpr int kBatch = 2;  // groups of 8 tokens whose values are loaded together
#pragma unroll
  for (int batch = 0; batch < COUNT / 4; batch += kBatch) {
    const int at = begin + 8 * batch;
    if (at > adapter.last || at + 8 * kBatch <= adapter.first) {
      continue;
    }
    float4 values[kBatch][2];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = at + 8 * j + lane_index() / 4;
      const int64_t row = static_cast<int64_t>(pair + token) * MODULES + adapter.index;
      const auto* from = reinterpret_cast<const float4*>(p.lora.shrunk + row * p.lora.rank_stride + 8 * panel);
      const bool own = present && adapter.has(tokens, token);
      values[j][0] = own ? from[0] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      values[j][1] = own ? from[1] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const SplitChunk s = split_chunk(&values[j][0].x);
      float delta[4] = {};
      mma_chunk(delta, low, high, s.high);
      mma_chunk(delta, low, high, s.low);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // By selection: neither an adapter's infinities nor a zero times them get into another token.
        if (adapter.has(tokens, at + 8 * j + lane_index() % 4 * 2 + i)) {
          acc[4 * (batch + j) + i] += delta[i];
          acc[4 * (batch + j) + 2 + i] += delta[2 + i];
        }
      }
    }
  }
}

// lora_B.bias of output n, 0 if there is no such output.
__device__ __forceinline__ float load_lora_bias(const ExpertGemm& p, const TileAdapter& adapter, int n_first) {
  constexpr int kPerGranule = kGranuleBytes / sizeof(float);
  const int n = n_first + lane_index() / 4;
  if (n_first < 0 || n >= p.rows) {
    return 0.0f;
  }
  const std::byte* granule = p.lora.table.granule(adapter.slot, adapter.record->bias + n / kPerGranule);
  return reinterpret_cast<const float*>(granule)[n % kPerGranule];
}

template <int MODULES>
__device__ __forceinline__ void add_module(Accumulators& acc, const Parts& parts, const ExpertGemm& p,
                                           const TileTokens& tokens, const TileAdapter& adapter, int pair) {
  const int panels = (adapter.record->rank + kTileRanks - 1) / kTileRanks;
  for (int p0 = 0; p0 < panels; p0 += 4) {
    const int panel = p0 + lane_index() % 4;
    const uint4 low = load_b(p, adapter, panels, panel, adapter.n_low);
    const uint4 high = load_b(p, adapter, panels, panel, adapter.n_high);
    for_each_part(acc, parts, [&](auto& part, int begin) {
      expand_part<MODULES>(part, p, tokens, adapter, pair, begin, low, high, panel, panel < panels);
    });
  }
  if (panels == 0 || adapter.record->bias < 0) {
    return;
  }
  const float record_scale = adapter.record->scale;
  const float low = load_lora_bias(p, adapter, adapter.n_low);
  const float high = load_lora_bias(p, adapter, adapter.n_high);
  for_each_part(acc, parts, [&](auto& part, int begin) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(part) / sizeof(float)); i += 4) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int token = begin + 2 * i + lane_index() % 4 * 2 + side;
        if (adapter.has(tokens, token)) {
          const float scale = tokens.scale[token] * record_scale;
          part[i + side] = fmaf(scale, low, part[i + side]);
          part[i + 2 + side] = fmaf(scale, high, part[i + 2 + side]);
        }
      }
    }
  });
}

// The next slot above `adapter.slot` that tokens of the tile use, and where. False: there is none.
__device__ __forceinline__ bool next_slot(const TileTokens& tokens, int count, TileAdapter& adapter) {
  int next = INT_MAX;
  for (int i = lane_index(); i < count; i += 32) {
    const int slot = tokens.slot[i];
    next = slot > adapter.slot ? min(next, slot) : next;
  }
  adapter.slot = __reduce_min_sync(0xffffffffu, next);
  int first = INT_MAX;
  int last = -1;
  for (int i = lane_index(); i < count; i += 32) {
    if (tokens.slot[i] == adapter.slot) {
      first = min(first, i);
      last = i;
    }
  }
  adapter.first = __reduce_min_sync(0xffffffffu, first);
  adapter.last = __reduce_max_sync(0xffffffffu, last);
  return adapter.slot != INT_MAX;
}

// Adapter by adapter, ascending. By whole warps.
template <bool GATE_UP>
__device__ __forceinline__ void add_adapters(Accumulators& acc, const Parts& parts, const ExpertGemm& p,
                                             const TileTokens& tokens, const Work& work, int tile) {
  TileAdapter adapter;
  adapter.slot = 0;
  while (next_slot(tokens, work.count, adapter)) {
#pragma unroll 1
    for (int module = 0; module < (GATE_UP ? 2 : 1); ++module) {
      adapter.index = module;
      adapter.record = p.lora.table.resolved_expert(adapter.slot, p.lora.layer, work.expert,
                                                    GATE_UP ? static_cast<ExpertModule>(module) : ExpertModule::kDown);
      if constexpr (GATE_UP) {
        adapter.n_low = module == 0 ? 8 * tile : -1;
        adapter.n_high = module == 0 ? -1 : 8 * tile;
      } else {
        adapter.n_low = 16 * tile;
        adapter.n_high = 16 * tile + 8;
      }
      add_module<GATE_UP ? 2 : 1>(acc, parts, p, tokens, adapter, work.pair);
    }
  }
}

// --- The end of an item.

// Eight outputs from n on of eight tokens from `token` on; values of output g and tokens 2t, 2t + 1. Stored as pairs of
// outputs of token g where the rows allow it.
__device__ __forceinline__ void store_group(const ExpertGemm& p, const Work& work, int token, int n, float first,
                                            float second, bool in_pairs) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  if (in_pairs) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    const uint32_t outputs = transpose8(reinterpret_cast<const uint32_t&>(both));
    if (token + g < work.count) {
      auto* to =
          static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(work.pair + token + g) * p.out_stride + n + 2 * t;
      if (n + 2 * t + 1 < p.rows) {
        *reinterpret_cast<uint32_t*>(to) = outputs;
      } else if (n + 2 * t < p.rows) {
        *to = reinterpret_cast<const __nv_bfloat162&>(outputs).x;
      }
    }
    return;
  }
  if (n + g < p.rows) {
    if (token + 2 * t < work.count) {
      store_output(p, work.pair + token + 2 * t, n + g, first);
    }
    if (token + 2 * t + 1 < work.count) {
      store_output(p, work.pair + token + 2 * t + 1, n + g, second);
    }
  }
}

// Bias, activation and store.
template <bool GATE_UP>
__device__ __forceinline__ void store_tile(Accumulators& acc, const Parts& parts, const ExpertGemm& p, const Work& work,
                                           int tile) {
  const int n_low = (GATE_UP ? 8 : 16) * tile;
  const int n_high = GATE_UP ? n_low : n_low + 8;
  const int g = lane_index() / 4;
  const int64_t bias = int64_t{work.expert} * p.rows;
  const float low_bias = p.low_bias != nullptr && n_low + g < p.rows ? __ldg(p.low_bias + bias + n_low + g) : 0.0f;
  const float high_bias = p.high_bias != nullptr && n_high + g < p.rows ? __ldg(p.high_bias + bias + n_high + g) : 0.0f;
  const bool in_pairs = !p.out_f32 && (reinterpret_cast<uintptr_t>(p.out) % 4 | p.out_stride % 2) == 0;
  for_each_part(acc, parts, [&](auto& part, int begin) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(part) / sizeof(float)); i += 4) {
      const int token = begin + 2 * i;
      if (token >= work.count) {
        continue;
      }
      const float low[2] = {part[i] + low_bias, part[i + 1] + low_bias};
      const float high[2] = {part[i + 2] + high_bias, part[i + 3] + high_bias};
      if constexpr (GATE_UP) {
        store_group(p, work, token, n_low, activate(p.activation, p.limit, low[0], high[0]),
                    activate(p.activation, p.limit, low[1], high[1]), in_pairs);
      } else {
        store_group(p, work, token, n_low, low[0], low[1], in_pairs);
        store_group(p, work, token, n_high, high[0], high[1], in_pairs);
      }
    }
  });
}

template <bool GATE_UP, class Source>
struct Multiplier {
  const ExpertGemm& p;
  Shared& shared;
  uint32_t stages;  // of tokens
  int active;
  int row_blocks;
  WeightPipe<Source> weights;
  int item = 0;
  uint32_t n = 0;    // blocks of tokens used
  uint32_t nth = 0;  // items done

  __device__ __forceinline__ void begin(const Work& work) {
    weights.source.locate(p, work.expert, min(work.row_block * kRowTiles + warp_index(), p.row_tiles - 1));
    weights.begin(p.k_blocks);
  }
  __device__ __forceinline__ void run(Work& work, int items) {
    Accumulators acc = {};
    const Parts parts(work.width);
    multiply(acc, parts, weights, p.k_blocks, n, shared, stages);
    n += static_cast<uint32_t>(p.k_blocks);
    const Work done = work;
    item += static_cast<int>(gridDim.x);
    if (item < items) {  // the weights of the next item come while this one is finished
      work = find_tile(p, shared.tiles, active, row_blocks, item);
      begin(work);
    }
    const int tile = done.row_block * kRowTiles + warp_index();
    if (tile < p.row_tiles) {
      if (p.lora.row_slot != nullptr) {
        add_adapters<GATE_UP>(acc, parts, p, shared.tokens[nth % 2], done, tile);
      }
      store_tile<GATE_UP>(acc, parts, p, done, tile);
    }
  }
  __device__ __forceinline__ void run_all() {
    const int items = shared.tiles.begin[active] * row_blocks;
    item = static_cast<int>(blockIdx.x);
    if (item >= items) {
      return;
    }
    Work work = find_tile(p, shared.tiles, active, row_blocks, item);
    begin(work);
    while (item < items) {
      run(work, items);
      __syncwarp();  // all lanes have read the tokens' adapters
      if (lane_index() == 0) {
        mbarrier_arrive(&shared.tokens_empty[nth % 2]);
      }
      ++nth;
    }
    async_wait<0>();
  }
};

template <class Source>
constexpr int shared_bytes() {
  return kStageAlignment + kTokenStages * kTokenStageBytes + kMultiplyWarps * kWeightStages * Source::kStageBytes;
}

template <bool GATE_UP, class Source>
__global__ void __launch_bounds__(kThreads, 1) expert_prefill_wgmma(const __grid_constant__ ExpertGemm p) {
#ifdef MOELORA_SM90A
  extern __shared__ uint4 dynamic_shared[];
  __shared__ Shared shared;
  const uint32_t misaligned = shared_address(dynamic_shared) % kStageAlignment;
  std::byte* const token_stages =
      reinterpret_cast<std::byte*>(dynamic_shared) + (misaligned == 0 ? 0 : kStageAlignment - misaligned);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTokenStages; ++i) {
      mbarrier_init(&shared.full[i], kFillThreads);
      mbarrier_init(&shared.empty[i], kMultiplyWarps);
    }
    mbarrier_init(&shared.tokens_empty[0], kMultiplyWarps);
    mbarrier_init(&shared.tokens_empty[1], kMultiplyWarps);
  }
  const int row_blocks = (p.row_tiles + kRowTiles - 1) / kRowTiles;
  const int active = count_tiles<kTokens>(p, shared.tiles);  // its barrier makes the mbarriers known, too
  if (threadIdx.x < kMultiplyThreads) {
    take_registers<kMultiplyRegisters>();
    Multiplier<GATE_UP, Source> multiplier{p, shared, shared_address(token_stages), active, row_blocks, {}};
    multiplier.weights.stages =
        token_stages + kTokenStages * kTokenStageBytes + warp_index() * kWeightStages * Source::kStageBytes;
    multiplier.run_all();
  } else {
    give_registers<kFillRegisters>();
    fill_all(p, active, row_blocks, shared, token_stages);
  }
#endif
}

}  // namespace sm90

// False where the code for sm_90a is not there: nothing was launched.
template <bool GATE_UP, class Source>
bool launch_expert_prefill_sm90(const ExpertGemm& p, int64_t num_pairs, int max_active, const CudaStream& state) {
  const auto kernel = sm90::expert_prefill_wgmma<GATE_UP, Source>;
  static const bool usable = has_sm90a(kernel);
  if (state.compute_capability != 90 || !usable) {
    return false;
  }
  constexpr int kSharedBytes = sm90::shared_bytes<Source>();
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of the expert product");
  const int64_t row_blocks = (p.row_tiles + sm90::kRowTiles - 1) / sm90::kRowTiles;
  const int64_t items = (num_pairs / sm90::kTokens + max_active) * row_blocks;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, state.num_sms));
  kernel<<<grid, sm90::kThreads, kSharedBytes, state.stream>>>(p);
  return true;
}

}  // namespace moelora
