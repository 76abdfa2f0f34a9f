// SPDX-License-Identifier: Apache-2.0
// Expert products of many tokens an expert on sm_90a: a grouped GEMM over (expert, 128 rows of the weight operand, up
// to 256 tokens) with both operands in shared memory, so that the warps that multiply do nothing else. A ring of stages
// of 64 inputs, each the weights as bf16 and the tokens in the order of wgmma (kernels/cuda/wgmma.cuh), is filled far
// ahead, across items, so that the end of one item runs beside the loads of the next. By warpgroup:
//   0, 1  multiply 64 rows each and finish them: bias, activation, store.
//   2     warps 0 and 1 bring weights: MXFP4 comes through registers, blocks ahead, and is expanded on its way into the
//         stage; bf16 rows are copied asynchronously. Warp 2 brings the tokens: a bulk copy a block, after a launch
//         that arranges them (kernels/moe/expert_tokens.cuh), and then it expands weights, too
//         (kernels/moe/expert_prefill_tiles_sm90.cuh); without scratch for that it gathers them (asynchronous copies).
//         Warp 3 says which tokens and adapters the next item has, and asks its weights into the L2.
// With MXFP4 two blocks, a cluster, take neighbouring rows and the same tokens: each brings half of them to both, so
// that the L2 delivers them once. A stage is empty when both have read it. A fourth warpgroup would leave too few
// registers for products of 256 tokens: ptxas refuses an instruction that does not fit into the registers that the
// block is started with. An expert's tokens are cut into tiles of nearly equal widths: as few tiles as 256 tokens
// allow, and products of as many tokens as the tile has, since wgmma costs time by that number in steps of 16. A tile's
// LoRA is further blocks (kernels/moe/expert_prefill_tile.cuh), copied asynchronously by the same warps, as far ahead
// as all others; a tile without adapted tokens has none of them. Limited by the tensor cores, then by shared memory: a
// block of 128 x 256 x 64 takes 1,024 cycles of the former, and moves 128 KB at 128 bytes a cycle. Measured (H200, 4096
// rows, with the launch that arranges tokens): gate_up of gpt-oss's shape 1,106 us = 491 TFLOP/s, down 612 us; with
// gathered tokens 1,246 us (tensor cores 47 % busy, issue slots 26 %, the L2 at 4.9 TB/s) and 668. Two layers of a
// step, tokens gathered, in bulk, in bulk for pairs of blocks: 5,767, 5,598 and 5,490 us; of Qwen3-30B-A3B's shape
// 3,992, 3,593 and 3,643, hence no pairs for bf16 rows. Tried: weights as the operand in registers, copied and expanded
// by the warps that multiply, tiles of 96, 144 or 192 tokens of one width a launch: gate_up 1,398 us = 389 TFLOP/s, of
// Qwen3-30B-A3B's shape 667 us (535 now). Such a warp took about 1,500 cycles a block for 176 instructions, of which
// 192 tokens need 768 of the tensor cores. So built: tiles of 256 tokens with 224 registers a thread 1,457 and 733 us;
// all products of a block started before the next weights are expanded 331 TFLOP/s, tensor cores 38 % busy; one launch
// for all widths, by parts of 128, 64, 32 and 32 tokens, the same; tokens through registers, their words put into the
// order of the weights' chunks on the way to shared memory, 870 instructions a block and warp, 138 TFLOP/s (2048 rows).
// LoRA through registers, a step for every adapter, module and 32 ranks, fp32 values split into a high and a low part
// on the way to shared memory: the ring ran dry at the end of every item, gate_up with one adapter of rank 32 1,502 us
// with its shrink of 75. A last step with fewer products: with a branch between the products of a block ptxas makes
// each wait for the one before.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/moe/expert_prefill_fill_sm90.cuh"
#include "kernels/moe/expert_prefill_store.cuh"
#include "kernels/moe/expert_prefill_tiles_sm90.cuh"

namespace moelora {
namespace sm90 {

// --- The warpgroups that multiply.

constexpr int kAccumulators = kMaxTokens / 2;  // a thread
static_assert(sizeof(Shared) + kSharedBytes <= 227 * 1024);

// To all blocks that bring tokens into the stage.
template <int BLOCKS>
__device__ __forceinline__ void release(Shared& shared, int stage) {
  if (lane_index() == 0) {
    mbarrier_arrive(&shared.empty[stage]);
  } else if (BLOCKS > 1 && lane_index() < BLOCKS) {
    mbarrier_arrive_at(&shared.empty[stage], (cluster_block() + lane_index()) % BLOCKS);
  }
}

// All blocks of an item, of up to N tokens; `stages`: this warpgroup's rows of the first stage. A block's products run
// while the next block is waited for.
template <int N, int BLOCKS>
__device__ __forceinline__ void multiply(float (&acc)[kAccumulators], int blocks, Place& at, Shared& shared,
                                         uint32_t weights, uint32_t tokens) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    acc[i] = 0.0f;
  }
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    mbarrier_wait(&shared.full[at.stage], at.parity);
    fence_for_wgmma();
    const auto stage = static_cast<uint32_t>(at.stage * kStageBytes);
    const uint64_t rows = wgmma_descriptor(weights + stage);
    const uint64_t columns = wgmma_descriptor(tokens + stage);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const auto at_step = static_cast<uint64_t>(2 * step);
      wgmma_m64k16<N>(acc, rows + at_step, columns + at_step);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the block before has been read
    if (b > 0) {
      release<BLOCKS>(shared, at.previous());
    }
    at.advance();
  }
  wgmma_wait<0>();
  wgmma_hold(acc);
  release<BLOCKS>(shared, at.previous());
}
// By the narrowest product that holds `count` tokens.
template <int BLOCKS, int... WIDTHS>
__device__ __forceinline__ void multiply_tokens(int count, float (&acc)[kAccumulators], int blocks, Place& at,
                                                Shared& shared, uint32_t weights, uint32_t tokens) {
  const auto fits = [&](auto width) {
    constexpr int N = decltype(width)::value;
    if (count > N) {
      return false;
    }
    multiply<N, BLOCKS>(acc, blocks, at, shared, weights, tokens);
    return true;
  };
  static_cast<void>((fits(std::integral_constant<int, WIDTHS>{}) || ...));
}
// A warpgroup without rows only keeps the ring going.
template <int BLOCKS>
__device__ __forceinline__ void pass(int blocks, Place& at, Shared& shared) {
  for (int b = 0; b < blocks; ++b) {
    mbarrier_wait(&shared.full[at.stage], at.parity);
    release<BLOCKS>(shared, at.stage);
    at.advance();
  }
}

template <bool GATE_UP, int BLOCKS>
__device__ __forceinline__ void multiply_items(const ExpertGemm& p, Shared& shared, uint32_t stages) {
  const int group = warp_index() / 4;
  const uint32_t weights = stages + static_cast<uint32_t>(group * 64 * kRowBytes);
  const uint32_t tokens = stages + kWeightBytes;
  Place at;
  uint32_t nth = 0;
  for (int item = first_item<BLOCKS>(); item < shared.items; item += item_step<BLOCKS>()) {
    const Work& next = wait_described(shared, nth);
    const TileTokens& described = shared.tokens[nth % 2];
    const bool adapters = p.lora.row_slot != nullptr;
    const int blocks = p.k_blocks + (adapters ? described.num_steps : 0);
    const int first_tile = next.row_block * kRowTiles;
    if (first_tile + 4 * group < p.row_tiles) {
      float acc[kAccumulators];
      multiply_tokens<BLOCKS, 32, 64, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256>(next.count, acc, blocks, at,
                                                                                       shared, weights, tokens);
      const Work work = next;  // only now: products leave no registers for it
      const int tile = work.row_block * kRowTiles + warp_index();
      if (tile < p.row_tiles) {
        if (adapters && described.has_bias != 0) {
          add_lora_bias<GATE_UP>(acc, p, described, work, tile);
        }
        finish_rows<GATE_UP>(acc, p, work, tile);
      }
    } else {
      pass<BLOCKS>(blocks, at, shared);
    }
    arrive_done(shared, nth);
    ++nth;
  }
}

template <bool GATE_UP, class Source, int BLOCKS>
__device__ __forceinline__ void fill_stages(const ExpertGemm& p, Shared& shared, std::byte* stages) {
  if (warp_index() > kGatherWarp) {
    describe_items<GATE_UP, Source, BLOCKS>(p, shared);
    return;
  }
  if constexpr (std::is_same_v<Source, TilesSource<GATE_UP>>) {
    if (BLOCKS > 1 || p.tokens != nullptr) {
      fill_tiles<GATE_UP, BLOCKS>(p, shared, stages);
      return;
    }
  }
  if (warp_index() < kGatherWarp) {
    WeightWarps<GATE_UP, Source, BLOCKS> weights{p, shared, RingWriter{shared, stages}};
    weights.fill_all();
  } else {
    GatherWarp<GATE_UP, BLOCKS> gather{p, shared, RingWriter{shared, stages}};
    gather.fill_all();
  }
}

// BLOCKS: of a cluster, which share the tokens.
template <bool GATE_UP, class Source, int BLOCKS>
__global__ void __launch_bounds__(kThreads, 1) expert_prefill_wgmma(const __grid_constant__ ExpertGemm p) {
#ifdef MOELORA_SM90A
  extern __shared__ uint4 dynamic_shared[];
  __shared__ Shared shared;
  const uint32_t misaligned = shared_address(dynamic_shared) % kStageAlignment;
  std::byte* const stages =
      reinterpret_cast<std::byte*>(dynamic_shared) + (misaligned == 0 ? 0 : kStageAlignment - misaligned);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], kFullArrivals);
      mbarrier_init(&shared.empty[i], BLOCKS * kMultiplyWarps);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&shared.described[i], 32);
      mbarrier_init(&shared.done[i], kMultiplyWarps + kWeightWarps + 1);
    }
    publish_barriers();
  }
  wait_for_previous();
  const int active = count_tiles<kMaxTokens>(p, shared.tiles);
  if (threadIdx.x == 0) {  // kept in no register: the warps that multiply need all of theirs
    shared.active = active;
    shared.items = shared.tiles.begin[active] * row_groups<BLOCKS>(p);
  }
  __syncthreads();  // the barriers are known, too
  if constexpr (BLOCKS > 1) {
    cluster_sync();  // in all blocks
  }
  if (threadIdx.x < kMultiplyThreads) {
    take_registers<kMultiplyRegisters>();
    multiply_items<GATE_UP, BLOCKS>(p, shared, shared_address(stages));
  } else {
    give_registers<kFillRegisters>();
    fill_stages<GATE_UP, Source, BLOCKS>(p, shared, stages);
  }
  if constexpr (BLOCKS > 1) {
    cluster_sync();  // the others may still arrive at this block's barriers
  }
#endif
}

}  // namespace sm90

// By clusters of BLOCKS, one or two.
template <bool GATE_UP, class Source, int BLOCKS>
void launch_expert_prefill_clusters(const ExpertGemm& p, int64_t num_pairs, int num_experts, const CudaStream& state) {
  const auto kernel = sm90::expert_prefill_wgmma<GATE_UP, Source, BLOCKS>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sm90::kSharedBytes),
             "shared memory of the expert product");
  constexpr int kTiles = BLOCKS * sm90::kRowTiles;
  const int64_t row_groups = (p.row_tiles + kTiles - 1) / kTiles;
  const int64_t items = (num_pairs / sm90::kMaxTokens + std::min<int64_t>(num_experts, num_pairs)) * row_groups;
  const auto clusters = static_cast<unsigned>(std::min<int64_t>(items, state.num_sms / BLOCKS));
  launch_dependent_clusters(kernel, dim3(clusters * BLOCKS), BLOCKS == 1 ? 0 : BLOCKS, sm90::kThreads,
                            sm90::kSharedBytes, state, p);
}

// Whether the code for sm_90a is there.
template <bool GATE_UP, class Source>
bool has_expert_prefill_sm90(const CudaStream& state) {
  static const bool usable = has_code(sm90::expert_prefill_wgmma<GATE_UP, Source, 1>);
  return usable && state.compute_capability == 90;
}
// The shrunk values are bf16.
template <bool GATE_UP, class Source>
void launch_expert_prefill_sm90(ExpertGemm p, ExpertPath path, int64_t num_pairs, int num_experts,
                                const CudaStream& state) {
  if (path != ExpertPath::kManyTokensGather && p.token_room != nullptr) {
    launch_arrange_tokens<GATE_UP>(p, num_pairs, num_experts, state);
    p.tokens = p.token_room;
  }
  constexpr bool kTiles = sm90::FillerOf<GATE_UP, Source>::Filler::kAhead;
  const bool pairs = path == ExpertPath::kManyTokensPairs || (kTiles && path != ExpertPath::kManyTokensBulk);
  if (p.tokens != nullptr && pairs) {
    launch_expert_prefill_clusters<GATE_UP, Source, 2>(p, num_pairs, num_experts, state);
  } else {
    launch_expert_prefill_clusters<GATE_UP, Source, 1>(p, num_pairs, num_experts, state);
  }
}

}  // namespace moelora
