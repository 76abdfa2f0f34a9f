// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/ceilings.h"

#include <atomic>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/kernels.h"

namespace moelora {
namespace {

#if defined(__x86_64__)
constexpr int kChains = 12;  // more than latency x throughput on every core so far

__attribute__((target("avx512f"))) double multiply_add_512(int64_t steps) {
  __m512 sum[kChains];
  for (__m512& chain : sum) {
    chain = _mm512_set1_ps(1.0f);
  }
  const __m512 factor = _mm512_set1_ps(0.999f);
  const __m512 term = _mm512_set1_ps(0.001f);
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      sum[i] = _mm512_fmadd_ps(sum[i], factor, term);
    }
    asm volatile("" : "+v"(sum[0]), "+v"(sum[1]), "+v"(sum[2]), "+v"(sum[3]), "+v"(sum[4]), "+v"(sum[5]));
    asm volatile("" : "+v"(sum[6]), "+v"(sum[7]), "+v"(sum[8]), "+v"(sum[9]), "+v"(sum[10]), "+v"(sum[11]));
  }
  return 2.0 * 16 * kChains * static_cast<double>(steps);
}

__attribute__((target("avx2,fma"))) double multiply_add_256(int64_t steps) {
  __m256 sum[kChains];
  for (__m256& chain : sum) {
    chain = _mm256_set1_ps(1.0f);
  }
  const __m256 factor = _mm256_set1_ps(0.999f);
  const __m256 term = _mm256_set1_ps(0.001f);
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      sum[i] = _mm256_fmadd_ps(sum[i], factor, term);
    }
    asm volatile("" : "+x"(sum[0]), "+x"(sum[1]), "+x"(sum[2]), "+x"(sum[3]), "+x"(sum[4]), "+x"(sum[5]));
    asm volatile("" : "+x"(sum[6]), "+x"(sum[7]), "+x"(sum[8]), "+x"(sum[9]), "+x"(sum[10]), "+x"(sum[11]));
  }
  return 2.0 * 8 * kChains * static_cast<double>(steps);
}
#endif

double multiply_add(int64_t steps) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    return multiply_add_512(steps);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return multiply_add_256(steps);
  }
#endif
  constexpr int kLanes = 32;
  volatile float seed = 1.0f;
  float sum[kLanes];
  for (float& lane : sum) {
    lane = seed;
  }
  for (int64_t step = 0; step < steps; ++step) {
    for (float& lane : sum) {
      lane = lane * 0.999f + 0.001f;
    }
  }
  for (const float lane : sum) {
    seed = seed + lane;
  }
  return 2.0 * kLanes * static_cast<double>(steps);
}

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double read_ceiling(const std::byte* data, size_t bytes, Stream& stream) {
  uint64_t sum = 0;
  const double begin = seconds_now();
  kernels_cpu().read_memory({data, bytes, &sum}, stream);
  return static_cast<double>(bytes) / (seconds_now() - begin) * 1e-9;
}

double fma_ceiling(Stream& stream) {
  constexpr int64_t kSteps = 1000000;
  std::atomic<double> flops{0};
  const double begin = seconds_now();
  stream.parallel([&](int) { flops.fetch_add(multiply_add(kSteps)); });
  return flops.load() / (seconds_now() - begin) * 1e-9;
}

}  // namespace moelora
