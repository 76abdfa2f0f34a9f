// SPDX-License-Identifier: Apache-2.0
// Which instruction sets the fast kernels are compiled for; included before anything of Highway by every
// *_simd.cc. Code paths of a file on x86: AVX-512, AVX2 with FMA, SSE4; the processor decides at run time.
// Where not even SSE4 exists (HWY_SCALAR) the op runs its reference. Sizeless vector targets are left out
// because kernels keep accumulators in arrays.
#pragma once

#if defined(MOELORA_FEW_TARGETS)  // sanitizer builds
#define MOELORA_MORE_DISABLED (HWY_SSE4 | HWY_AVX3)
#else
#define MOELORA_MORE_DISABLED 0
#endif

#define HWY_DISABLED_TARGETS \
  (MOELORA_MORE_DISABLED | HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
