// SPDX-License-Identifier: Apache-2.0
// The fill_random of every CPU backend: a 32-bit integer hash of (seed, index) an element, in fixed blocks whose
// loops the compiler turns into vector code. On x86-64 the same body is also compiled for AVX2 and chosen at run time,
// since filling a model of several gigabytes should be bound by memory, not by SSE2's missing 32-bit multiply.
#include "kernels/memory/fill_random.h"

#include <algorithm>
#include <bit>

namespace moelora {
namespace {

constexpr int32_t kBlock = 256;
constexpr int64_t kChunk = 1 << 16;  // elements a task; a multiple of kBlock

// The two multiply-xorshift rounds of a 32-bit finaliser with full avalanche.
inline __attribute__((always_inline)) uint32_t mix(uint32_t value) {
  value ^= value >> 16;
  value *= 0x7feb352du;
  value ^= value >> 15;
  value *= 0x846ca68bu;
  value ^= value >> 16;
  return value;
}

inline __attribute__((always_inline)) void fill_block(uint32_t begin, uint32_t key, float scale, float* out) {
  for (int32_t i = 0; i < kBlock; ++i) {
    const uint32_t bits = mix((begin + static_cast<uint32_t>(i)) ^ key);
    // The top 24 bits as a signed number: every value of u is exact in fp32.
    out[i] = static_cast<float>(static_cast<int32_t>(bits) >> 8) * 0x1p-23f * scale;
  }
}

inline __attribute__((always_inline)) void round_bf16(const float* values, uint16_t* out) {
  for (int32_t i = 0; i < kBlock; ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);  // never NaN
    out[i] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

inline __attribute__((always_inline)) void round_f16(const float* values, uint16_t* out) {
  for (int32_t i = 0; i < kBlock; ++i) {
    out[i] = std::bit_cast<uint16_t>(static_cast<_Float16>(values[i]));
  }
}

// Elements [begin, end) of the whole array; begin is a multiple of kBlock.
inline __attribute__((always_inline)) void fill_range(const FillRandomArgs& args, int64_t begin, int64_t end) {
  const size_t width = dtype_bytes(args.dtype);
  for (int64_t at = begin; at < end; at += kBlock) {
    // Indices above 32 bits enter through the key.
    const auto high = static_cast<uint32_t>(static_cast<uint64_t>(at) >> 32);
    const uint32_t key = mix(static_cast<uint32_t>(args.seed) + 0x9e3779b9u * high) ^
                         mix(static_cast<uint32_t>(args.seed >> 32) + 0x85ebca6bu);
    float values[kBlock];
    uint16_t rounded[kBlock];
    fill_block(static_cast<uint32_t>(at), key, args.scale, values);
    const void* from = rounded;
    if (args.dtype == Dtype::kBf16) {
      round_bf16(values, rounded);
    } else if (args.dtype == Dtype::kF16) {
      round_f16(values, rounded);
    } else {
      from = values;
    }
    const auto count = static_cast<size_t>(std::min<int64_t>(kBlock, end - at));
    std::memcpy(static_cast<char*>(args.data) + static_cast<size_t>(at) * width, from, count * width);
  }
}

void fill_portable(const FillRandomArgs& args, int64_t begin, int64_t end) {
  fill_range(args, begin, end);
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) void fill_avx2(const FillRandomArgs& args, int64_t begin, int64_t end) {
  fill_range(args, begin, end);
}
#endif

}  // namespace

void fill_random_cpu(const FillRandomArgs& args, Stream& stream) {
  auto* fill = fill_portable;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    fill = fill_avx2;
  }
#endif
  const int64_t chunks = (args.count + kChunk - 1) / kChunk;
  stream.parallel_for(static_cast<size_t>(chunks), [&](size_t chunk, int) {
    const int64_t begin = static_cast<int64_t>(chunk) * kChunk;
    fill(args, begin, std::min(begin + kChunk, args.count));
  });
}

}  // namespace moelora
