// SPDX-License-Identifier: Apache-2.0
// Expert products of few tokens an expert from MXFP4 tiles on sm_90a: a stream of weights past the tensor cores. One
// block an SM takes a contiguous share of all (active expert, 64 rows of the weight operand). Its four warpgroups work
// on up to four neighbouring such row blocks of an expert at once, each warp on one row tile over all of k, so that no
// sums have to meet; up to 32 of the expert's tokens pass at a time (wgmma of 8, 16 or 32 tokens, one width a launch),
// so that a weight is expanded once whatever their number. One warp fills a ring of stages of 4 blocks of 64 inputs
// with weights (bulk copies, which cost no instruction a lane), three warps a ring of tokens, in which the words of a
// token's row lie in the order of the weights' registers. Both run ahead across row blocks and experts. Weights that
// the routing has named are on their way before the kernel ahead has ended where that wrote the tokens (moe_down). The
// same bits for a token whatever else is in the batch. Limited by reading the weights, and by expanding them: about 70
// instructions a row tile and block of 64 inputs.
#pragma once

#include <algorithm>

#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/expert_decode.cuh"

namespace moelora {
namespace stream {

constexpr int kWarpgroups = 4;  // that multiply
constexpr int kMultiplyThreads = 128 * kWarpgroups;
constexpr int kMultiplyWarps = kMultiplyThreads / 32;
constexpr int kWeightWarps = 2;
constexpr int kTokenWarps = 2;
constexpr int kThreads = kMultiplyThreads + 32 * (kWeightWarps + kTokenWarps);
constexpr int kRowTiles = 4;  // of a warpgroup

constexpr int kStageBlocks = 4;  // as many share a group of scales
constexpr int kTileStageBytes = kStageBlocks * kMxfp4TileBytes;
constexpr int kStageTiles = kWarpgroups * kRowTiles;
constexpr int kScalesBegin = kStageTiles * kTileStageBytes;
constexpr int kStageBytes = kScalesBegin + kStageTiles * kMxfp4ScaleGroupBytes;
constexpr int kStages = 4;

// A slot holds the tokens of kStageBlocks blocks.
constexpr int kMaxWidth = 32;
constexpr int kSlotBytes = kStageBlocks * kMaxWidth * 128;
constexpr int kSlots = 4;
constexpr int kSlotLag = 2;  // slots whose copies are on their way before one is published
constexpr int kSlotAlignment = 1024;
constexpr int kSharedBytes = kSlotAlignment + kSlots * kSlotBytes + kStages * kStageBytes;

struct Shared {
  uint64_t weights_full[kStages];
  uint64_t weights_empty[kStages];
  uint64_t tokens_full[kSlots];
  uint64_t tokens_empty[kSlots];
};

template <int COUNT>
struct RingPlace {
  int at = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++at == COUNT) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Up to four row blocks of one expert, and up to WIDTH of its tokens.
struct Group {
  int expert;
  int row_block;  // the first
  int count;      // row blocks
  int pair;       // first sorted pair
  int end;        // end of the expert's pairs
};

// The share of this block, group by group.
template <int WIDTH>
struct Walk {
  int item;
  int end;
  int row_blocks;
  Group group;

  __device__ __forceinline__ explicit Walk(const ExpertGemm& p)
      : row_blocks((p.row_tiles + kRowTiles - 1) / kRowTiles) {
    const int items = __ldg(p.order.num_active) * row_blocks;
    const int share = static_cast<int>(blockIdx.x);
    const int shares = static_cast<int>(gridDim.x);
    item = static_cast<int>(int64_t{items} * share / shares);
    end = static_cast<int>(int64_t{items} * (share + 1) / shares);
    locate(p);
  }
  [[nodiscard]] __device__ __forceinline__ bool ended() const { return item >= end; }
  __device__ __forceinline__ void advance(const ExpertGemm& p) {
    if (group.pair + WIDTH < group.end) {
      group.pair += WIDTH;
    } else {
      item += group.count;
      locate(p);
    }
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p) {
    if (ended()) {
      return;
    }
    group.expert = __ldg(p.order.active_experts + item / row_blocks);
    group.row_block = item % row_blocks;
    const int rest = min(end - item, row_blocks - group.row_block);
    const int rounds = (rest + kWarpgroups - 1) / kWarpgroups;
    group.count = (rest + rounds - 1) / rounds;  // rounds of about equal size
    group.pair = __ldg(p.order.expert_begin + group.expert);
    group.end = __ldg(p.order.expert_begin + group.expert + 1);
  }
};

// --- The two threads that bring weights, one the data, the other the scales: a copy takes a thread about 16
// instructions, one after the other.

template <int WIDTH, bool DATA>
__device__ __forceinline__ void fill_weights(const ExpertGemm& p, Shared& shared, std::byte* stages) {
  RingPlace<kStages> at;
  const int scale_groups = (p.k_blocks + kStageBlocks - 1) / kStageBlocks;
  const int64_t stride = DATA ? int64_t{p.k_blocks} * kMxfp4TileBytes : int64_t{scale_groups} * kMxfp4ScaleGroupBytes;
  constexpr int kBytes = DATA ? kTileStageBytes : kMxfp4ScaleGroupBytes;
  for (Walk<WIDTH> walk(p); !walk.ended(); walk.advance(p)) {
    const Group& group = walk.group;
    const int tiles = group.count * kRowTiles;
    const auto* from = static_cast<const std::byte*>(DATA ? p.low[group.expert] : p.scales[group.expert]);
    for (int s = 0; s < scale_groups; ++s) {
      const auto bytes = static_cast<uint32_t>(DATA ? min(kStageBlocks, p.k_blocks - s * kStageBlocks) * kMxfp4TileBytes
                                                    : kMxfp4ScaleGroupBytes);
      std::byte* const to = stages + at.at * kStageBytes + (DATA ? 0 : kScalesBegin);
      uint64_t* const full = &shared.weights_full[at.at];
      mbarrier_wait(&shared.weights_empty[at.at], at.parity ^ 1);
      mbarrier_arrive_expect(full, static_cast<uint32_t>(tiles) * bytes);
      for (int t = 0; t < tiles; t += kRowTiles) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const int tile = min(group.row_block * kRowTiles + t + i, p.row_tiles - 1);
          bulk_copy(to + (t + i) * kBytes, from + tile * stride, bytes, full);
        }
      }
      from += kBytes;
      at.advance();
    }
  }
}

// --- The warps that bring tokens. A word is two inputs. Word 16h + 4t + 2s + r of a block is, in the registers of a
// tile's lane t, pair 2s + r of its half h, hence word 4r + t of step 2h + s of wgmma, of which a step has eight.

template <int WIDTH>
struct TokenFiller {
  const ExpertGemm& p;
  Shared& shared;
  std::byte* slots;
  int warp;  // of the token warps
  RingPlace<kSlots> at;
  RingPlace<kSlots> published;
  int unpublished = 0;

  __device__ __forceinline__ void publish_one() {
    __syncwarp();  // the other lanes' copies have arrived and are fenced
    if (lane_index() == 0) {
      mbarrier_arrive(&shared.tokens_full[published.at]);
    }
    published.advance();
    --unpublished;
  }
  __device__ __forceinline__ void publish() {
    async_commit();
    at.advance();
    ++unpublished;
    if (unpublished > kSlotLag) {
      async_wait<kSlotLag>();
      fence_for_wgmma();
      publish_one();
    }
  }
  __device__ __forceinline__ void publish_rest() {
    async_wait<0>();
    fence_for_wgmma();
    while (unpublished > 0) {
      publish_one();
    }
  }
  __device__ __forceinline__ void fill(const Group& group) {
    const int tokens = min(group.end - group.pair, WIDTH);
    const int word = lane_index();
    const int piece = word / 16 * 4 + word / 2 % 2 * 2 + word % 2;
    const int within = word / 4 % 4 * 4;
    const int pair = group.pair + min(lane_index(), tokens - 1);
    const int64_t row = (p.x_by_pair ? pair : __ldg(p.order.pair_row + pair)) * p.x_stride;  // of token lane
    for (int first = 0; first < p.k_blocks; first += kStageBlocks) {
      mbarrier_wait(&shared.tokens_empty[at.at], at.parity ^ 1);
      std::byte* const slot = slots + at.at * kSlotBytes;
      const int count = min(kStageBlocks, p.k_blocks - first);
      for (int token = warp; token < tokens; token += kTokenWarps) {
        const __nv_bfloat16* const x = p.x + __shfl_sync(0xffffffffu, row, token);
        std::byte* to = slot + token * 128 + (piece ^ token % 8) * 16 + within;
        for (int j = 0; j < count; ++j) {
          const int input = 64 * (first + j) + 2 * word;
          async_copy4(to, input < p.k ? x + input : x, input < p.k);
          to += WIDTH * 128;
        }
      }
      publish();
    }
  }
  __device__ __forceinline__ void run(bool wait) {
    if (wait) {
      wait_for_previous();  // the tokens are there
      let_next_start();
    }
    for (Walk<WIDTH> walk(p); !walk.ended(); walk.advance(p)) {
      fill(walk.group);
    }
    publish_rest();
  }
};

// --- The warpgroups that multiply.

template <int WIDTH>
struct Multiplier {
  const ExpertGemm& p;
  Shared& shared;
  const std::byte* stages;  // this lane's data of its warp's row tile
  const std::byte* scales;  // of its rows
  uint32_t slots;
  RingPlace<kStages> stage;
  RingPlace<kSlots> slot;
  // Of the current stage and slot:
  const std::byte* data;
  uint4 scale;
  uint32_t tokens;  // low half of the descriptor

  __device__ __forceinline__ Multiplier(const ExpertGemm& product, Shared& barriers, const std::byte* stage_memory,
                                        uint32_t slot_memory)
      : p(product),
        shared(barriers),
        stages(stage_memory + warp_index() * kTileStageBytes + lane_index() * 16),
        scales(stage_memory + kScalesBegin + warp_index() * kMxfp4ScaleGroupBytes + lane_index() / 4 * 16),
        slots(slot_memory) {}

  __device__ __forceinline__ void release(uint64_t* barrier) const {
    if (lane_index() == 0) {
      mbarrier_arrive(barrier);
    }
  }
  __device__ __forceinline__ void enter_stage() {
    mbarrier_wait(&shared.weights_full[stage.at], stage.parity);
    data = stages + stage.at * kStageBytes;
    scale = *reinterpret_cast<const uint4*>(scales + stage.at * kStageBytes);
  }
  __device__ __forceinline__ void leave_stage() {
    __syncwarp();
    release(&shared.weights_empty[stage.at]);
    stage.advance();
  }
  __device__ __forceinline__ void enter_slot() {
    mbarrier_wait(&shared.tokens_full[slot.at], slot.parity);
    tokens = static_cast<uint32_t>(wgmma_descriptor(slots + static_cast<uint32_t>(slot.at * kSlotBytes)));
  }
  __device__ __forceinline__ void leave_slot() {
    release(&shared.tokens_empty[slot.at]);
    slot.advance();
  }

  // Registers of block j of the stage, of the four steps of wgmma.
  __device__ __forceinline__ void expand(uint32_t (&a)[16], int j) const {
    const uint4 words = *reinterpret_cast<const uint4*>(data + j * kMxfp4TileBytes);
    const Mxfp4Scales exponents(j == 0 ? scale.x : j == 1 ? scale.y : j == 2 ? scale.z : scale.w);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 low = expand_mxfp4(half == 0 ? words.x : words.z, exponents.pair(half));
      const uint4 high = expand_mxfp4(half == 0 ? words.y : words.w, exponents.pair(2 + half));
      uint32_t* const to = a + 8 * half;
      to[0] = low.x;
      to[1] = high.x;
      to[2] = low.y;
      to[3] = high.y;
      to[4] = low.z;
      to[5] = high.z;
      to[6] = low.w;
      to[7] = high.w;
    }
  }
  // Starts the products of block j of the slot.
  __device__ __forceinline__ void start(float (&acc)[WIDTH / 2], const uint32_t (&a)[16], int j) const {
    constexpr uint64_t kHigh = wgmma_descriptor(0) >> 32 << 32;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t at = tokens + static_cast<uint32_t>((j * (WIDTH * 128) + step * 32) / 16);
      wgmma_m64k16<WIDTH>(acc, a + 4 * step, kHigh | at);
    }
    wgmma_commit();
  }
  // acc += all of k for the tokens of the group.
  __device__ __forceinline__ void multiply(float (&acc)[WIDTH / 2]) {
    uint32_t a[2][16];
    enter_stage();
    expand(a[0], 0);
    for (int left = p.k_blocks; left > 0; left -= kStageBlocks) {
      enter_slot();
#pragma unroll
      for (int j = 0; j < kStageBlocks; ++j) {
        start(acc, a[j % 2], j);
        const bool last = j + 1 == left;
        if (last || j + 1 == kStageBlocks) {
          leave_stage();  // this block was in registers
        }
        if (last) {
          break;
        }
        if (j + 1 == kStageBlocks) {
          enter_stage();
        }
        wgmma_wait<1>();  // the block before it has left its registers
        expand(a[(j + 1) % 2], (j + 1) % kStageBlocks);
      }
      wgmma_wait<0>();
      leave_slot();
    }
    wgmma_hold(acc);
  }
  // What a warpgroup without a row block does in the meantime.
  __device__ __forceinline__ void skip() {
    for (int first = 0; first < p.k_blocks; first += kStageBlocks) {
      mbarrier_wait(&shared.weights_full[stage.at], stage.parity);
      leave_stage();
      mbarrier_wait(&shared.tokens_full[slot.at], slot.parity);
      leave_slot();
    }
  }

  template <bool GATE_UP, bool LORA>
  __device__ __forceinline__ void run(const Group& group) {
    const int warpgroup = warp_index() / kRowTiles;
    if (warpgroup >= group.count) {
      return skip();
    }
    const int tile = group.row_block * kRowTiles + warp_index();
    const float2 bias = tile_bias<GATE_UP>(p, group.expert, tile);
    float acc[WIDTH / 2] = {};
    multiply(acc);
    if (tile >= p.row_tiles) {
      return;
    }
    if (LORA) {
      wait_for_previous();  // the deltas are there
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i) {
      const int pair = group.pair + 8 * i;
      if (pair < group.end) {
        float sum[4] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
        if (LORA) {
          add_deltas<GATE_UP>(sum, p, tile, pair, group.end);
        }
        finish_tile<GATE_UP>(sum, p, bias, tile, pair, group.end);
      }
    }
  }
  template <bool GATE_UP, bool LORA>
  __device__ __forceinline__ void run_all() {
    for (Walk<WIDTH> walk(p); !walk.ended(); walk.advance(p)) {
      run<GATE_UP, LORA>(walk.group);
    }
  }
};

// With LoRA the kernel ahead computes the deltas, and all else was complete before this kernel began. Without, that may
// be so for the routing (order_is_early), but not for the tokens.
template <bool GATE_UP, bool LORA, int WIDTH>
__global__ void __launch_bounds__(kThreads, 1) expert_stream(const __grid_constant__ ExpertGemm p) {
#ifdef MOELORA_SM90A
  extern __shared__ uint4 dynamic_shared[];
  __shared__ Shared shared;
  const bool tokens_are_late = !LORA && p.order_is_early;
  const uint32_t misaligned = shared_address(dynamic_shared) % kSlotAlignment;
  std::byte* const slots =
      reinterpret_cast<std::byte*>(dynamic_shared) + (misaligned == 0 ? 0 : kSlotAlignment - misaligned);
  std::byte* const stages = slots + kSlots * kSlotBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.weights_full[i], kWeightWarps);
      mbarrier_init(&shared.weights_empty[i], kMultiplyWarps);
    }
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(&shared.tokens_full[i], kTokenWarps);
      mbarrier_init(&shared.tokens_empty[i], kMultiplyWarps);
    }
    fence_for_wgmma();  // bulk copies see the barriers
  }
  if (!LORA && !p.order_is_early) {
    wait_for_previous();
  }
  if (!tokens_are_late) {
    let_next_start();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplyThreads) {
    Multiplier<WIDTH> multiplier(p, shared, stages, shared_address(slots));
    multiplier.template run_all<GATE_UP, LORA>();
  } else {
    const int warp = warp_index() - kMultiplyWarps;
    if (warp >= kWeightWarps) {
      TokenFiller<WIDTH> filler{p, shared, slots, warp - kWeightWarps, {}, {}};
      filler.run(tokens_are_late);
    } else if (lane_index() == 0) {
      if (warp == 0) {
        fill_weights<WIDTH, true>(p, shared, stages);
      } else {
        fill_weights<WIDTH, false>(p, shared, stages);
      }
    }
  }
  wait_for_previous();  // in every block: its end must mean that all before it has ended
#endif
}

template <bool GATE_UP, bool LORA, int WIDTH>
bool launch_of(const ExpertGemm& p, const CudaStream& state) {
  constexpr auto kKernel = expert_stream<GATE_UP, LORA, WIDTH>;
  static const bool usable = has_code(kKernel);
  if (!usable) {
    return false;
  }
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of the expert product");
  launch_dependent(kKernel, dim3(static_cast<unsigned>(state.num_sms)), kThreads, kSharedBytes, state, p);
  return true;
}

// An expert has at most as many tokens as there are rows.
template <bool GATE_UP, bool LORA>
bool launch(const ExpertGemm& p, int num_rows, const CudaStream& state) {
  return num_rows <= 8    ? launch_of<GATE_UP, LORA, 8>(p, state)
         : num_rows <= 16 ? launch_of<GATE_UP, LORA, 16>(p, state)
                          : launch_of<GATE_UP, LORA, kMaxWidth>(p, state);
}

}  // namespace stream

// False where the code for sm_90a is not there: nothing was launched.
template <bool GATE_UP>
bool launch_expert_stream(const ExpertGemm& p, int num_rows, const CudaStream& state) {
  if (state.compute_capability != 90) {
    return false;
  }
  return p.lora.row_slot != nullptr ? stream::launch<GATE_UP, true>(p, num_rows, state)
                                    : stream::launch<GATE_UP, false>(p, num_rows, state);
}

}  // namespace moelora
