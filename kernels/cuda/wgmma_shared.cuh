// SPDX-License-Identifier: Apache-2.0
// wgmma with both operands in shared memory (kernels/cuda/wgmma.cuh): 64 rows of A by N rows of B, both 64 inputs a row
// of 128 bytes with the 128-byte swizzle. One array of accumulators serves all N: a product uses its first N / 2.
// Empty where the architecture is not sm_90a.
#pragma once

#include "kernels/cuda/wgmma.cuh"

namespace moelora {

constexpr int kMaxAccumulators = 128;  // of 256 rows of B

// d = A[64 x 16] B[16 x N], added to what is there if `add` is not 0.
template <int N>
__device__ __forceinline__ void wgmma_shared_m64k16(float (&d)[kMaxAccumulators], uint64_t a, uint64_t b, int add);

// clang-format off
#define MOELORA_ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                        "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOELORA_ACC16 MOELORA_ACC8(0)
#define MOELORA_ACC32 MOELORA_ACC16, MOELORA_ACC8(8)
#define MOELORA_ACC48 MOELORA_ACC32, MOELORA_ACC8(16)
#define MOELORA_ACC64 MOELORA_ACC48, MOELORA_ACC8(24)
#define MOELORA_ACC80 MOELORA_ACC64, MOELORA_ACC8(32)
#define MOELORA_ACC96 MOELORA_ACC80, MOELORA_ACC8(40)
#define MOELORA_ACC112 MOELORA_ACC96, MOELORA_ACC8(48)
#define MOELORA_ACC128 MOELORA_ACC112, MOELORA_ACC8(56)
#define MOELORA_ACC144 MOELORA_ACC128, MOELORA_ACC8(64)
#define MOELORA_ACC160 MOELORA_ACC144, MOELORA_ACC8(72)
#define MOELORA_ACC176 MOELORA_ACC160, MOELORA_ACC8(80)
#define MOELORA_ACC192 MOELORA_ACC176, MOELORA_ACC8(88)
#define MOELORA_ACC208 MOELORA_ACC192, MOELORA_ACC8(96)
#define MOELORA_ACC224 MOELORA_ACC208, MOELORA_ACC8(104)
#define MOELORA_ACC240 MOELORA_ACC224, MOELORA_ACC8(112)
#define MOELORA_ACC256 MOELORA_ACC240, MOELORA_ACC8(120)
#define MOELORA_REG16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MOELORA_REG32 MOELORA_REG16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MOELORA_REG48 MOELORA_REG32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MOELORA_REG64 MOELORA_REG48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define MOELORA_REG80 MOELORA_REG64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define MOELORA_REG96 MOELORA_REG80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define MOELORA_REG112 MOELORA_REG96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define MOELORA_REG128 MOELORA_REG112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define MOELORA_REG144 MOELORA_REG128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define MOELORA_REG160 MOELORA_REG144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define MOELORA_REG176 MOELORA_REG160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define MOELORA_REG192 MOELORA_REG176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define MOELORA_REG208 MOELORA_REG192 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define MOELORA_REG224 MOELORA_REG208 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define MOELORA_REG240 MOELORA_REG224 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define MOELORA_REG256 MOELORA_REG240 ",%120,%121,%122,%123,%124,%125,%126,%127"
// The numbers of the operands after the accumulators: the descriptors of A and B, and `add`.
#ifdef MOELORA_SM90A
#define MOELORA_WGMMA(n, a0, b0, add0)                                                                                \
  template <>                                                                                                         \
  __device__ __forceinline__ void wgmma_shared_m64k16<n>(float (&d)[kMaxAccumulators], uint64_t a, uint64_t b,         \
                                                         int add) {                                                   \
    asm volatile("{.reg .pred add; setp.ne.b32 add, %" #add0 ", 0;"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" MOELORA_REG##n "}, "                    \
                 "%" #a0 ", %" #b0 ", add, 1, 1, 0, 0;}"                                                              \
                 : MOELORA_ACC##n                                                                                     \
                 : "l"(a), "l"(b), "r"(add));                                                                         \
  }
#else
#define MOELORA_WGMMA(n, a0, b0, add0) \
  template <>                          \
  __device__ __forceinline__ void wgmma_shared_m64k16<n>(float (&)[kMaxAccumulators], uint64_t, uint64_t, int) {}
#endif
MOELORA_WGMMA(32, 16, 17, 18)
MOELORA_WGMMA(64, 32, 33, 34)
MOELORA_WGMMA(96, 48, 49, 50)
MOELORA_WGMMA(128, 64, 65, 66)
MOELORA_WGMMA(144, 72, 73, 74)
MOELORA_WGMMA(160, 80, 81, 82)
MOELORA_WGMMA(176, 88, 89, 90)
MOELORA_WGMMA(192, 96, 97, 98)
MOELORA_WGMMA(208, 104, 105, 106)
MOELORA_WGMMA(224, 112, 113, 114)
MOELORA_WGMMA(240, 120, 121, 122)
MOELORA_WGMMA(256, 128, 129, 130)
#undef MOELORA_WGMMA
// clang-format on

}  // namespace moelora
