// SPDX-License-Identifier: Apache-2.0
// Marks small functions that CUDA kernels call as well as host code.
#pragma once

#ifdef __CUDACC__
#define MOELORA_HD __host__ __device__
#else
#define MOELORA_HD
#endif
