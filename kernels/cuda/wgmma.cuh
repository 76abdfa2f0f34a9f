// SPDX-License-Identifier: Apache-2.0
// What sm_90a adds for products of large tiles: wgmma with both operands in shared memory, 64 rows of A by up to 256
// rows ("tokens") of B, 64 inputs of bf16 a row; and registers handed from the warps that fill shared memory to those
// that multiply.
//
// A row's 64 inputs are 128 bytes, eight pieces of 16 bytes, piece u of row r at place u ^ (r % 8) of its row (the
// 128-byte swizzle); rows lie one after the other, from a multiple of 1 KiB on. Accumulators 4j .. 4j+3 of a warp,
// which has 16 rows of A, are those of mma.sync m16n8k16 of tokens 8j .. 8j+7 (kernels/cuda/mma_tile.cuh).
//
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
// Counts for it without waiting; by whole warps.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

// clang-format off
#define MOELORA_EIGHT_SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                              "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOELORA_SUMS16 MOELORA_EIGHT_SUMS(0)
#define MOELORA_SUMS32 MOELORA_SUMS16, MOELORA_EIGHT_SUMS(8)
#define MOELORA_SUMS48 MOELORA_SUMS32, MOELORA_EIGHT_SUMS(16)
#define MOELORA_SUMS64 MOELORA_SUMS48, MOELORA_EIGHT_SUMS(24)
#define MOELORA_SUMS80 MOELORA_SUMS64, MOELORA_EIGHT_SUMS(32)
#define MOELORA_SUMS96 MOELORA_SUMS80, MOELORA_EIGHT_SUMS(40)
#define MOELORA_SUMS112 MOELORA_SUMS96, MOELORA_EIGHT_SUMS(48)
#define MOELORA_SUMS128 MOELORA_SUMS112, MOELORA_EIGHT_SUMS(56)
#define MOELORA_SUMS144 MOELORA_SUMS128, MOELORA_EIGHT_SUMS(64)
#define MOELORA_SUMS160 MOELORA_SUMS144, MOELORA_EIGHT_SUMS(72)
#define MOELORA_SUMS176 MOELORA_SUMS160, MOELORA_EIGHT_SUMS(80)
#define MOELORA_SUMS192 MOELORA_SUMS176, MOELORA_EIGHT_SUMS(88)
#define MOELORA_SUMS208 MOELORA_SUMS192, MOELORA_EIGHT_SUMS(96)
#define MOELORA_SUMS224 MOELORA_SUMS208, MOELORA_EIGHT_SUMS(104)
#define MOELORA_SUMS240 MOELORA_SUMS224, MOELORA_EIGHT_SUMS(112)
#define MOELORA_SUMS256 MOELORA_SUMS240, MOELORA_EIGHT_SUMS(120)
#define MOELORA_NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MOELORA_NAMES32 MOELORA_NAMES16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MOELORA_NAMES48 MOELORA_NAMES32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MOELORA_NAMES64 MOELORA_NAMES48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define MOELORA_NAMES80 MOELORA_NAMES64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define MOELORA_NAMES96 MOELORA_NAMES80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define MOELORA_NAMES112 MOELORA_NAMES96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define MOELORA_NAMES128 MOELORA_NAMES112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define MOELORA_NAMES144 MOELORA_NAMES128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define MOELORA_NAMES160 MOELORA_NAMES144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define MOELORA_NAMES176 MOELORA_NAMES160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define MOELORA_NAMES192 MOELORA_NAMES176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define MOELORA_NAMES208 MOELORA_NAMES192 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define MOELORA_NAMES224 MOELORA_NAMES208 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define MOELORA_NAMES240 MOELORA_NAMES224 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define MOELORA_NAMES256 MOELORA_NAMES240 ",%120,%121,%122,%123,%124,%125,%126,%127"
// The numbers of the operands after the accumulators: the descriptors of A and B.
#define MOELORA_WGMMA(n, a0, b0)                                                                     \
  if constexpr (N == n) {                                                                            \
    asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0;"                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" MOELORA_NAMES##n "}, " \
                 "%" #a0 ", %" #b0 ", add, 1, 1, 0, 0;}"                                             \
                 : MOELORA_SUMS##n                                                                   \
                 : "l"(a), "l"(b));                                                                  \
  }
// clang-format on

// d += A[64 x 16] B[16 x N], of N / 2 accumulators a thread, the first ones of d: one array can serve several widths.
template <int N, int COUNT>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[COUNT], uint64_t a, uint64_t b) {
  static_assert(N / 2 <= COUNT && (N == 32 || N == 64 || N == 96 || (N >= 128 && N <= 256 && N % 16 == 0)));
#ifdef MOELORA_SM90A
  MOELORA_WGMMA(32, 16, 17)
  MOELORA_WGMMA(64, 32, 33)
  MOELORA_WGMMA(96, 48, 49)
  MOELORA_WGMMA(128, 64, 65)
  MOELORA_WGMMA(144, 72, 73)
  MOELORA_WGMMA(160, 80, 81)
  MOELORA_WGMMA(176, 88, 89)
  MOELORA_WGMMA(192, 96, 97)
  MOELORA_WGMMA(208, 104, 105)
  MOELORA_WGMMA(224, 112, 113)
  MOELORA_WGMMA(240, 120, 121)
  MOELORA_WGMMA(256, 128, 129)
#endif
}
#undef MOELORA_WGMMA

// An 8 x 8 matrix of bf16, two of a row a lane, transposed.
__device__ __forceinline__ uint32_t transpose8(uint32_t row) {
  uint32_t column;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

}  // namespace moelora
