// SPDX-License-Identifier: Apache-2.0
// Expert products of many tokens an expert on sm_90a: a grouped GEMM over (expert, 128 rows of the weight operand, up
// to 192 tokens). Two warpgroups of 64 rows multiply (wgmma), with the weights as the operand in registers, so that
// MXFP4 is expanded between load and product; a third fills shared memory with tokens. Each multiplying warp copies its
// own 16 rows of weights into shared memory, kWeightStages blocks of 64 inputs ahead, and fetches them from there. An
// expert's tokens are cut into tiles of one width, chosen for the whole launch. Tokens lie in shared memory as in
// global memory, so that they are copied asynchronously, 16 bytes at a time; the weights' fragments are put in the
// order of wgmma when they are fetched (an instruction or two more a register, once for 192 tokens). The steps of
// adapters, whose B comes in chunks of 8 ranks a lane, keep the order of kernels/cuda/mma_tile.cuh: a token's 16-byte
// piece 4c + w holds words w of chunks 4c .. 4c + 3. Limited by the tensor cores and by reading tokens and weights from
// L2. Tried: tokens through registers, their words put into the order of the weights' chunks on the way to shared
// memory: 870 instructions a block and warp, 138 TFLOP/s (gpt-oss shape, 2048 rows, H200).
// Tried: all products of a block started before the next weights are expanded (331 TFLOP/s, tensor cores 38 % busy);
// four parts of 128, 64, 32 and 32 tokens so that one launch serves all widths (the same); tiles of 256 tokens with 224
// registers (4096 rows: gate_up 1457 us against 1398, Qwen3-30B-A3B 733 against 667). A multiplying warp takes about
// 1,500 cycles a block for 176 instructions, of which 192 tokens need 768 of the tensor cores.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/moe/expert_prefill_tile.cuh"

namespace moelora {
namespace sm90 {

// Registers a thread. They are dealt out from those that the block was started with, 168 a thread; a warpgroup that
// asks for more than the others have given back waits for ever.
constexpr int kMultiplyRegisters = 216;
constexpr int kFillRegisters = 72;
constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;
static_assert(kMultiplyRegisters * kMultiplyThreads + kFillRegisters * kFillThreads <= kStartRegisters * kThreads);
constexpr int kTokenStages = 5;
constexpr int kWeightStages = 4;
constexpr int kTokenStageBytes = 192 * 128;
constexpr int kStageAlignment = 1024;

struct Shared {
  ExpertTiles tiles;
  TileTokens tokens[2];  // of this item and of the one that is filled ahead
  uint64_t full[kTokenStages];
  uint64_t empty[kTokenStages];
  uint64_t tokens_empty[2];
};

using RingPlace = RingPlaceOf<kTokenStages>;

// --- The warpgroup that fills.

// A block is published kFillLag blocks after its copies were started, when they have arrived. Whoever waits for a block
// has released the one before the previous one, so that the filler can always go on by kFillLag; a stage more lets it
// do that before the release.
constexpr int kFillLag = 2;
static_assert(kTokenStages > kFillLag + 2);
constexpr int kRowsTogether = kFillThreads / 8;

template <bool GATE_UP, int W>
struct Filler {
  const ExpertGemm& p;
  Shared& shared;
  std::byte* stages;
  int active;
  int row_blocks;
  RingPlace at;         // of the next block to fill
  RingPlace published;  // of the next block to publish
  int unpublished = 0;  // blocks between them
  uint32_t nth = 0;     // items filled

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x) - kMultiplyThreads; }
  __device__ __forceinline__ std::byte* wait_empty() {
    mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
    return stages + at.stage * kTokenStageBytes;
  }
  __device__ __forceinline__ void arrive_full() {
    mbarrier_arrive(&shared.full[published.stage]);
    published.advance();
    --unpublished;
  }
  // Ends a block that this thread has written its part of, or has started to copy.
  __device__ __forceinline__ void publish() {
    async_commit();
    at.advance();
    ++unpublished;
    async_wait<kFillLag>();
    fence_for_wgmma();
    if (unpublished > kFillLag) {
      arrive_full();
    }
  }
  __device__ __forceinline__ void publish_rest() {
    async_wait<0>();
    fence_for_wgmma();
    while (unpublished > 0) {
      arrive_full();
    }
  }
  // The blocks of k: this thread copies one piece of every 16th token.
  __device__ __forceinline__ void fill_tokens(const Work& work) {
    const int row = thread() / 8;
    const int piece = thread() % 8;
    const auto* const x = reinterpret_cast<const uint4*>(p.x) + piece;
    const int32_t* const first_chunk = shared.tokens[nth % 2].first_chunk;
    constexpr int kCopies = W / kRowsTogether;
    int32_t first[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      first[i] = first_chunk[kRowsTogether * i + row];
    }
    const int place = row * 128 + (piece ^ row % 8) * 16;
    for (int b = 0; b < p.k_blocks; ++b) {
      std::byte* const stage = wait_empty() + place;
      const bool inside = 8 * b + piece < p.k / 8;
      const uint4* const from = inside ? x + 8 * b : x;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        async_copy16(stage + kRowsTogether * 128 * i, from + first[i], inside);
      }
      publish();
    }
  }
  // The steps of the adapters.
  __device__ __forceinline__ void fill_steps(const Work& work) {
    const TileTokens& tokens = shared.tokens[nth % 2];
    for (int entry = 0; entry < tokens.num_entries; ++entry) {
      const int steps = tokens.first_step[entry + 1] - tokens.first_step[entry];
      for (int step = 0; step < steps; ++step) {
        fill_step<GATE_UP, W>(p, work, tokens, entry, step, thread(), wait_empty());
        publish();
      }
    }
  }
  __device__ __forceinline__ void fill_all() {
    const int items = shared.tiles.begin[active] * row_blocks;
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
      const Work work = find_tile<W>(p, shared.tiles, active, row_blocks, item);
      mbarrier_wait(&shared.tokens_empty[nth % 2], nth / 2 % 2 ^ 1);
      describe_tokens<GATE_UP, W>(p, work, shared.tokens[nth % 2], thread());
      fill_tokens(work);
      if (p.lora.row_slot != nullptr) {
        fill_steps(work);
      }
      ++nth;
      if (p.k_blocks < kFillLag) {  // or the item after the next would wait for blocks of this one
        publish_rest();
      }
    }
    publish_rest();
  }
};

// --- The warpgroups that multiply.

// Weights of one warp: 16 rows, a block of 64 inputs as the four steps' registers of wgmma. B of the adapters' steps
// comes the same way, behind the blocks.
template <bool GATE_UP, class Source>
struct WeightPipe {
  using Fragments = typename Source::Fragments;
  static constexpr int kStageBytes = Source::kStageBytes > 1024 ? Source::kStageBytes : 1024;
  const ExpertGemm& p;
  std::byte* stages;
  const TileTokens* tokens = nullptr;  // of the item
  Source source;
  int expert = 0;
  int tile = 0;
  int num_steps = 0;

  __device__ __forceinline__ std::byte* stage(int b) const { return stages + b % kWeightStages * kStageBytes; }
  __device__ __forceinline__ void copy(int b) const {
    if (b < p.k_blocks) {
      source.copy_for_warp(stage(b), b);
    } else if (b - p.k_blocks < num_steps) {
      copy_step<GATE_UP>(p, *tokens, expert, tile, b - p.k_blocks, stage(b));
    }
    async_commit();  // always, so that groups count blocks
  }
  // The first blocks of an item, but no steps: its tokens may not be described yet.
  __device__ __forceinline__ void begin(const Work& work) {
    expert = work.expert;
    tile = min(work.row_block * kRowTiles + warp_index(), p.row_tiles - 1);
    source.locate(p, expert, tile);
    num_steps = 0;
    for (int b = 0; b < min(kWeightStages - 1, p.k_blocks); ++b) {
      copy(b);
    }
  }
  // The tokens are described.
  __device__ __forceinline__ void continue_with(const TileTokens& described) {
    tokens = &described;
    num_steps = p.lora.row_slot != nullptr ? described.num_steps : 0;
    for (int b = p.k_blocks; b < kWeightStages - 1; ++b) {
      copy(b);
    }
  }
  __device__ __forceinline__ void wait() const { async_wait<kWeightStages - 2>(); }
};

// 16 inputs of W tokens, as one group; `tokens` describes their operand.
template <int W>
__device__ __forceinline__ void multiply_step(float (&acc)[W / 2], const uint32_t* a, uint64_t tokens) {
  wgmma_fence();
  wgmma_m64k16<W>(acc, a, tokens);
  wgmma_commit();
}
__device__ __forceinline__ uint64_t token_operand(uint32_t stages, int stage) {
  return wgmma_descriptor(stages + static_cast<uint32_t>(stage * kTokenStageBytes));
}

__device__ __forceinline__ void release(Shared& shared, int stage) {
  if (lane_index() == 0) {
    mbarrier_arrive(&shared.empty[stage]);
  }
}

// Block b, its tokens at `at`: `now` are its weights, `next` becomes those of the block after it (at the end of k: what
// nobody uses), step by step between the products: few of them can wait for the tensor cores, so that all of a block's
// at once would leave the tensor cores idle while the next weights are expanded.
template <int W, class Pipe>
__device__ __forceinline__ void multiply_block(float (&acc)[W / 2], const uint32_t (&now)[16], uint32_t (&next)[16],
                                               const Pipe& weights, int b, RingPlace& at, Shared& shared,
                                               uint32_t stages) {
  weights.wait();
  __syncwarp();  // the other lanes' copies of block b + 1 have arrived, too, and all lanes have read block b
  const typename Pipe::Fragments fragments(weights.stage(b + 1));
  auto raw = fragments.load(0);
  mbarrier_wait(&shared.full[at.stage], at.parity);
  const uint64_t tokens = token_operand(stages, at.stage);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    multiply_step<W>(acc, now + 4 * step, tokens + static_cast<uint64_t>(2 * step));
    const auto next_raw = fragments.load(step < 3 ? step + 1 : 3);
    wgmma_wait<4>();  // this step of the block before has left its registers
    if (step == 3 && b > 0) {
      release(shared, at.previous());
    }
    fragments.expand(next + 4 * step, raw, step);
    raw = next_raw;
  }
  at.advance();
  weights.copy(b + kWeightStages);  // where block b was
}

// All blocks of k.
template <int W, class Pipe>
__device__ __forceinline__ void multiply(float (&acc)[W / 2], const Pipe& weights, int k_blocks, RingPlace& at,
                                         Shared& shared, uint32_t stages) {
  uint32_t even[16];
  uint32_t odd[16];
  weights.wait();
  __syncwarp();
  const typename Pipe::Fragments fragments(weights.stage(0));
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    fragments.expand(even + 4 * step, fragments.load(step), step);
  }
  weights.copy(kWeightStages - 1);
  int b = 0;
  for (; b + 1 < k_blocks; b += 2) {
    multiply_block<W>(acc, even, odd, weights, b, at, shared, stages);
    multiply_block<W>(acc, odd, even, weights, b + 1, at, shared, stages);
  }
  if (b < k_blocks) {
    multiply_block<W>(acc, even, odd, weights, b, at, shared, stages);
  }
  wgmma_wait<0>();
  wgmma_hold(acc);
  release(shared, at.previous());
}

// The steps of the adapters.
template <int W, class Pipe>
__device__ __forceinline__ void multiply_steps(float (&acc)[W / 2], const Pipe& weights, int k_blocks, RingPlace& at,
                                               Shared& shared, uint32_t stages) {
  for (int step = 0; step < weights.num_steps; ++step) {
    const int b = k_blocks + step;
    if (step > 0) {  // the end of k has waited for the first
      weights.wait();
    }
    uint32_t a[8];
    fetch_step(a, weights.stage(b));
    if (step > 0) {
      weights.copy(b + kWeightStages - 1);
    }
    mbarrier_wait(&shared.full[at.stage], at.parity);
    const uint64_t tokens = token_operand(stages, at.stage);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      multiply_step<W>(acc, a + 4 * (part % 2), tokens + static_cast<uint64_t>(2 * part));
    }
    wgmma_wait<0>();
    wgmma_hold(acc);
    release(shared, at.stage);
    at.advance();
  }
}

template <bool GATE_UP, class Source, int W>
struct Multiplier {
  const ExpertGemm& p;
  Shared& shared;
  uint32_t stages;  // of tokens
  int active;
  int row_blocks;
  WeightPipe<GATE_UP, Source> weights;
  int item = 0;
  RingPlace at;      // of the next block of tokens
  uint32_t nth = 0;  // items done

  __device__ __forceinline__ void run(Work& work, int items) {
    const TileTokens& tokens = shared.tokens[nth % 2];
    mbarrier_wait(&shared.full[at.stage], at.parity);  // then the tokens are described
    weights.continue_with(tokens);
    float acc[W / 2] = {};
    multiply<W>(acc, weights, p.k_blocks, at, shared, stages);
    if (p.lora.row_slot != nullptr) {
      multiply_steps<W>(acc, weights, p.k_blocks, at, shared, stages);
    }
    const Work done = work;
    item += static_cast<int>(gridDim.x);
    if (item < items) {  // the weights of the next item come while this one is finished
      work = find_tile<W>(p, shared.tiles, active, row_blocks, item);
      weights.begin(work);
    }
    const int tile = done.row_block * kRowTiles + warp_index();
    if (tile < p.row_tiles) {
      if (p.lora.row_slot != nullptr && tokens.has_bias != 0) {
        add_lora_bias<GATE_UP>(acc, p, tokens, done, tile);
      }
      store_tile<GATE_UP>(acc, p, done, tile);
    }
    __syncwarp();  // all lanes have read the tokens' adapters
    if (lane_index() == 0) {
      mbarrier_arrive(&shared.tokens_empty[nth % 2]);
    }
    ++nth;
  }
  __device__ __forceinline__ void run_all() {
    const int items = shared.tiles.begin[active] * row_blocks;
    item = static_cast<int>(blockIdx.x);
    if (item >= items) {
      return;
    }
    Work work = find_tile<W>(p, shared.tiles, active, row_blocks, item);
    weights.begin(work);
    while (item < items) {
      run(work, items);
    }
    async_wait<0>();
  }
};

template <class Source>
constexpr int shared_bytes() {
  return kStageAlignment + kTokenStages * kTokenStageBytes +
         kMultiplyWarps * kWeightStages * WeightPipe<true, Source>::kStageBytes;
}

template <bool GATE_UP, class Source, int W>
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
  const int active = count_tiles<W>(p, shared.tiles);  // its barrier makes the mbarriers known, too
  if (threadIdx.x < kMultiplyThreads) {
    take_registers<kMultiplyRegisters>();
    using Pipe = WeightPipe<GATE_UP, Source>;
    std::byte* const weight_stages =
        token_stages + kTokenStages * kTokenStageBytes + warp_index() * kWeightStages * Pipe::kStageBytes;
    Multiplier<GATE_UP, Source, W> multiplier{p,      shared,     shared_address(token_stages),
                                              active, row_blocks, Pipe{p, weight_stages}};
    multiplier.run_all();
  } else {
    give_registers<kFillRegisters>();
    Filler<GATE_UP, W> filler{p, shared, token_stages, active, row_blocks};
    filler.fill_all();
  }
#endif
}

// The width that wastes the least for experts of as many tokens as an average one and a little more: all tiles of a
// launch have one width, as accumulators for several would not fit.
inline int tile_width(int64_t num_pairs, int num_experts) {
  const double average = static_cast<double>(num_pairs) / num_experts;
  const double most = average + 1.5 * std::sqrt(average);
  int best = 0;
  double least = 0.0;
  for (const int width : {192, 144, 96}) {
    const double padded = std::ceil(most / width) * width * (1.0 + 16.0 / width);  // narrow tiles expand weights again
    if (best == 0 || padded < least) {
      best = width;
      least = padded;
    }
  }
  return best;
}

}  // namespace sm90

// False where the code for sm_90a is not there: nothing was launched.
template <bool GATE_UP, class Source, int W>
bool launch_expert_prefill_of(const ExpertGemm& p, int64_t num_pairs, int max_active, const CudaStream& state) {
  const auto kernel = sm90::expert_prefill_wgmma<GATE_UP, Source, W>;
  static const bool usable = has_code(kernel);
  if (!usable) {
    return false;
  }
  constexpr int kSharedBytes = sm90::shared_bytes<Source>();
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of the expert product");
  const int64_t row_blocks = (p.row_tiles + sm90::kRowTiles - 1) / sm90::kRowTiles;
  const int64_t items = (num_pairs / W + max_active) * row_blocks;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, state.num_sms));
  kernel<<<grid, sm90::kThreads, kSharedBytes, state.stream>>>(p);
  return true;
}
template <bool GATE_UP, class Source>
bool launch_expert_prefill_sm90(const ExpertGemm& p, int64_t num_pairs, int num_experts, const CudaStream& state) {
  if (state.compute_capability != 90) {
    return false;
  }
  const int max_active = static_cast<int>(std::min<int64_t>(num_experts, num_pairs));
  switch (sm90::tile_width(num_pairs, num_experts)) {
    case 96:
      return launch_expert_prefill_of<GATE_UP, Source, 96>(p, num_pairs, max_active, state);
    case 144:
      return launch_expert_prefill_of<GATE_UP, Source, 144>(p, num_pairs, max_active, state);
    default:
      return launch_expert_prefill_of<GATE_UP, Source, 192>(p, num_pairs, max_active, state);
  }
}

}  // namespace moelora
