// SPDX-License-Identifier: Apache-2.0
// What sm_90a adds for products of large tiles: wgmma with the 64-row operand in registers and the other, up to 256
// rows ("tokens") by 64 inputs of bf16, in shared memory; mbarriers between the warps that fill shared memory and those
// that multiply; and registers handed from the former to the latter.
// Registers of A are those of mma.sync m16n8k16, 16 rows a warp; accumulators 4j .. 4j+3 are its accumulators of tokens
// 8j .. 8j+7 (kernels/cuda/mma_tile.cuh). A token's 64 inputs are 128 bytes, eight pieces of 16 bytes, piece u of token
// r at place u ^ (r % 8) of its row (the 128-byte swizzle); rows lie one after the other, from a multiple of 1 KiB on.
// Every function is empty where the architecture is not sm_90a: the caller asks has_code() of its kernel first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/shared_tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MOELORA_SM90A 1
#endif

namespace moelora {

// --- Shared memory and barriers.

// What this thread wrote to shared memory becomes visible to wgmma of threads that it signals afterwards.
__device__ __forceinline__ void fence_for_wgmma() {
#ifdef MOELORA_SM90A
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Barrier `id` (not 0) of `threads` threads of the block.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- Registers a thread, by all warps of a warpgroup.

template <int N>
__device__ __forceinline__ void take_registers() {
#ifdef MOELORA_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N>
__device__ __forceinline__ void give_registers() {
#ifdef MOELORA_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

// --- wgmma. The calling thread's registers belong to products from the fence before them to the wait after them.

__device__ __forceinline__ void wgmma_fence() {
#ifdef MOELORA_SM90A
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#ifdef MOELORA_SM90A
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until at most N of the latest groups are running.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
#ifdef MOELORA_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}
// Keeps the compiler from moving uses of accumulators across a wait.
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");
  }
}

// Of the operand in shared memory at a byte address; 32 bytes further are the next 16 inputs.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kBetweenEightRows = uint64_t{1024 / 16} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kBetweenEightRows | kUnused | (address >> 4 & 0x3FFFu);
}

// d += A[64 x 16] B[16 x TOKENS], of TOKENS / 2 accumulators a thread.
template <int TOKENS>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[TOKENS / 2], const uint32_t* a, uint64_t b);
// The same with A in shared memory, 64 rows as B's.
template <int TOKENS>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[TOKENS / 2], uint64_t a, uint64_t b);

// clang-format off
#define MOELORA_D16(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                       "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]),          \
                       "+f"(d[i + 11]), "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define MOELORA_D8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MOELORA_D32 MOELORA_D16(0)
#define MOELORA_D64 MOELORA_D32, MOELORA_D16(16)
#define MOELORA_D96 MOELORA_D64, MOELORA_D16(32)
#define MOELORA_D144 MOELORA_D96, MOELORA_D16(48), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), \
                     "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define MOELORA_D192 MOELORA_D96, MOELORA_D16(48), MOELORA_D16(64), MOELORA_D16(80)
#define MOELORA_R8 "%0,%1,%2,%3"
#define MOELORA_R32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MOELORA_R64 MOELORA_R32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MOELORA_R96 MOELORA_R64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define MOELORA_R144 MOELORA_R96 \
                     ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71"
#define MOELORA_R192 MOELORA_R144 \
                     ",%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
// Operands after the accumulators: four registers of A, the descriptor of B.
#ifdef MOELORA_SM90A
#define MOELORA_WGMMA(n, a0, a1, a2, a3, b0)                                                          \
  template <>                                                                                         \
  __device__ __forceinline__ void wgmma_m64k16<n>(float (&d)[n / 2], const uint32_t* a, uint64_t b) { \
    asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0;"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" MOELORA_R##n "}, "      \
                 "{%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b0 ", add, 1, 1, 0;}"                    \
                 : MOELORA_D##n                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                               \
  }
#else
#define MOELORA_WGMMA(n, a0, a1, a2, a3, b0) \
  template <>                                \
  __device__ __forceinline__ void wgmma_m64k16<n>(float (&)[n / 2], const uint32_t*, uint64_t) {}
#endif
MOELORA_WGMMA(32, 16, 17, 18, 19, 20)
MOELORA_WGMMA(64, 32, 33, 34, 35, 36)
MOELORA_WGMMA(96, 48, 49, 50, 51, 52)
MOELORA_WGMMA(144, 72, 73, 74, 75, 76)
MOELORA_WGMMA(192, 96, 97, 98, 99, 100)
#undef MOELORA_WGMMA
// Operands after the accumulators: the descriptors of A and B.
#ifdef MOELORA_SM90A
#define MOELORA_WGMMA(n, a0, b0)                                                                  \
  template <>                                                                                     \
  __device__ __forceinline__ void wgmma_m64k16<n>(float (&d)[n / 2], uint64_t a, uint64_t b) {    \
    asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0;"                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" MOELORA_R##n "}, " \
                 "%" #a0 ", %" #b0 ", add, 1, 1, 0, 0;}"                                          \
                 : MOELORA_D##n                                                                   \
                 : "l"(a), "l"(b));                                                               \
  }
#else
#define MOELORA_WGMMA(n, a0, b0) \
  template <>                    \
  __device__ __forceinline__ void wgmma_m64k16<n>(float (&)[n / 2], uint64_t, uint64_t) {}
#endif
MOELORA_WGMMA(8, 4, 5)
MOELORA_WGMMA(32, 16, 17)
MOELORA_WGMMA(64, 32, 33)
#undef MOELORA_WGMMA
// clang-format on

// An 8 x 8 matrix of bf16, two of a row a lane, transposed.
__device__ __forceinline__ uint32_t transpose8(uint32_t row) {
  uint32_t column;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

}  // namespace moelora
