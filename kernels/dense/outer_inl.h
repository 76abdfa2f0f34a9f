// SPDX-License-Identifier: Apache-2.0
// The matrix-matrix way to the bits of dot_inl.h, for hundreds of rows. There a (row, output) has one sum for
// each lane; here lanes are outputs, and each lane class of k (the elements that one lane would have summed) is
// run through on its own: register tiles of outputs x rows, far fewer loads for each product, no sums across
// lanes. The classes' results are added in the order of reduce4's tree with a small stack. Weights are
// transposed for that, a slice of k at a time, rows come packed by classes (pack_row_classes).
#if defined(MOELORA_KERNELS_DENSE_OUTER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_DENSE_OUTER_INL_H_
#undef MOELORA_KERNELS_DENSE_OUTER_INL_H_
#else
#define MOELORA_KERNELS_DENSE_OUTER_INL_H_
#endif

#include "kernels/dense/dot_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

constexpr int kOuterVectors = kLanes == 16 ? 4 : 2;  // of outputs
constexpr int kOuterOutputs = kOuterVectors * kLanes;
constexpr int kOuterRows = 6;   // 24 (12) accumulators
constexpr int kStackRows = 24;  // rows that meet a class while it is in L1, with their stacks
constexpr int kLevels = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;
constexpr int kSliceBlocks = static_cast<int>(kSlice) / kBlock;
constexpr int64_t kStackFloats = int64_t{kLevels} * kStackRows * kOuterOutputs;
// A class of a transposed slice; the odd line keeps classes off each other's cache sets.
constexpr int64_t kClassFloats = int64_t{2} * kSliceBlocks * kOuterOutputs + 16;
constexpr int64_t kOuterFloats = kStackFloats + kLanes * kClassFloats;

// The class that comes i-th, so that a balanced tree over this order is the tree of reduce4: inside a 128-bit block
// lanes 0, 2, 1, 3, and of four blocks 0, 2, 1, 3.
constexpr int class_at(int i) {
  const int block = i / 4;
  const int lane = (i & 1) << 1 | (i >> 1 & 1);
  return (kLanes == 16 ? (block & 1) << 1 | block >> 1 : block) * 4 + lane;
}

// Reorders a row made by pack_row: each slice as [class][step], step 2 b and 2 b + 1 from block b.
inline void order_by_classes(const float* packed, int32_t k, float* ordered) {
  for (int64_t at = 0; at < k; at += kSlice) {
    const int64_t blocks = (std::min<int64_t>(k - at, kSlice) + kBlock - 1) / kBlock;
    for (int64_t b = 0; b < blocks; ++b) {
      const float* from = packed + at + b * kBlock;
      float* to = ordered + at + 2 * b;
      for (int l = 0; l < kLanes; ++l) {
        to[l * 2 * blocks] = from[l];
        to[l * 2 * blocks + 1] = from[kLanes + l];
      }
    }
  }
}

using WordTag = hn::RebindToUnsigned<FloatTag>;
using WordVec = hn::Vec<WordTag>;

// out[c][r] = in[r][c] for L x L words.
HWY_INLINE void transpose(const WordVec* in, WordVec* out) {
  const WordTag d;
  const hn::Repartition<uint64_t, WordTag> d64;
  WordVec quad[kLanes];  // [group of four rows][lane inside a block]
#pragma GCC unroll 4
  for (int g = 0; g < kLanes; g += 4) {
    const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, in[g], in[g + 1]));
    const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, in[g], in[g + 1]));
    const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, in[g + 2], in[g + 3]));
    const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, in[g + 2], in[g + 3]));
    quad[g] = hn::BitCast(d, hn::InterleaveLower(d64, low01, low23));
    quad[g + 1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23));
    quad[g + 2] = hn::BitCast(d, hn::InterleaveLower(d64, high01, high23));
    quad[g + 3] = hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23));
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
#if HWY_MAX_BYTES == 64
    const auto even = hn::ConcatLowerLower(d, quad[8 + j], quad[j]);
    const auto odd = hn::ConcatLowerLower(d, quad[12 + j], quad[4 + j]);
    const auto even_up = hn::ConcatUpperUpper(d, quad[8 + j], quad[j]);
    const auto odd_up = hn::ConcatUpperUpper(d, quad[12 + j], quad[4 + j]);
    out[j] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(odd), even);
    out[4 + j] = hn::OddEvenBlocks(odd, hn::SwapAdjacentBlocks(even));
    out[8 + j] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(odd_up), even_up);
    out[12 + j] = hn::OddEvenBlocks(odd_up, hn::SwapAdjacentBlocks(even_up));
#elif HWY_MAX_BYTES == 32
    out[j] = hn::ConcatLowerLower(d, quad[4 + j], quad[j]);
    out[4 + j] = hn::ConcatUpperUpper(d, quad[4 + j], quad[j]);
#else
    out[j] = quad[j];
#endif
  }
}

// A slice of one weight row, with its scales where there are any.
struct StoredRow {
  const uint8_t* data;
  const uint8_t* scales;
};

// Stored weights of block `b` of a slice as fp32 for one vector of outputs; rows[r] is the slice of weight row r. Two
// bf16 of a class share a 32-bit word and are transposed together.
template <Stored kStored>
HWY_INLINE void transpose_block(const StoredRow* rows, int64_t b, int64_t count, float* to) {
  const WordTag d;
  const FloatTag df;
  constexpr int64_t kBytes = stored_bytes(kStored, kBlock);
  constexpr bool kWords = kStored == Stored::kBf16;
  const int64_t rest = count - b * kBlock;
  WordVec in[2][kLanes];
  for (int r = 0; r < kLanes; ++r) {
    const uint8_t* from = rows[r].data + b * kBytes;
    float scale = 1.0f;
    if constexpr (kStored == Stored::kMxfp4) {
      load_scales(rows[r].scales + b * kBlock / 32, 1, &scale);
    }
    alignas(64) uint8_t padded[kBlock * 4];
    if (rest < kBlock) {  // what follows the row in memory may be anything: zeros instead
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, from, static_cast<size_t>(stored_bytes(kStored, rest)));
      from = padded;
    }
    if constexpr (kWords) {
      const hn::Repartition<uint8_t, WordTag> d8;
      in[0][r] = hn::BitCast(d, hn::LoadU(d8, from));
    } else {
      in[0][r] = hn::BitCast(d, load_half<kStored, 0>(from, scale));
      in[1][r] = hn::BitCast(d, load_half<kStored, 1>(from, scale));
    }
  }
  for (int half = 0; half < (kWords ? 1 : 2); ++half) {
    WordVec out[kLanes];
    transpose(in[half], out);
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) {
      float* at = to + l * kClassFloats + 2 * b * kOuterOutputs;
      if constexpr (kWords) {
        hn::Store(hn::BitCast(df, hn::ShiftLeft<16>(out[l])), df, at);
        hn::Store(hn::BitCast(df, hn::And(out[l], hn::Set(d, 0xffff0000u))), df, at + kOuterOutputs);
      } else {
        hn::Store(hn::BitCast(df, out[l]), df, at + half * kOuterOutputs);
      }
    }
  }
}

// A slice of kOuterOutputs weight rows as fp32 [class][step][output].
template <Stored kStored>
HWY_INLINE void transpose_slice(const StoredRow* rows, int64_t at, int64_t count, float* transposed) {
  StoredRow slice[kLanes];
  for (int v = 0; v < kOuterVectors; ++v) {
    for (int r = 0; r < kLanes; ++r) {
      const StoredRow& row = rows[v * kLanes + r];
      slice[r] = {row.data + stored_bytes(kStored, at), scale_of<kStored>(row.scales, at)};
    }
    for (int64_t b = 0; b < (count + kBlock - 1) / kBlock; ++b) {
      transpose_block<kStored>(slice, b, count, transposed + v * kLanes);
    }
  }
}

// Products of one class with kRows rows, joined with the results of earlier classes as the tree says: `merges`
// levels of the stack are added, then the result is pushed, or (last) added to `sums`.
template <int kRows>
HWY_INLINE void run_class(const float* HWY_RESTRICT weights, const float* const* rows, int64_t steps, int merges,
                          bool last, float* HWY_RESTRICT stack, const Sums& to) {
  const FloatTag d;
  constexpr int kCount = kRows * kOuterVectors;
  FloatVec acc[kCount];
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) {
    acc[i] = hn::Zero(d);
  }
  const float* x[kRows];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    x[r] = rows[r];
  }
  for (int64_t pair = 0; pair < steps; pair += 2) {  // steps come in pairs; unrolled for the loop's own cost
#pragma GCC unroll 2
    for (int64_t step = pair; step < pair + 2; ++step, weights += kOuterOutputs) {
      FloatVec w[kOuterVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kOuterVectors; ++v) {
        w[v] = hn::Load(d, weights + v * kLanes);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const FloatVec value = hn::Set(d, x[r][step]);
#pragma GCC unroll 4
        for (int v = 0; v < kOuterVectors; ++v) {
          acc[r * kOuterVectors + v] = hn::MulAdd(w[v], value, acc[r * kOuterVectors + v]);
        }
      }
    }
  }
  constexpr int64_t kLevel = int64_t{kStackRows} * kOuterOutputs;
  for (int level = 0; level < merges; ++level, stack += kLevel) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) {
      acc[i] = hn::Add(hn::Load(d, stack + i * kLanes), acc[i]);
    }
  }
  if (!last) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) {
      hn::Store(acc[i], d, stack + i * kLanes);
    }
    return;
  }
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) {
    float* at = to.sums + i / kOuterVectors * to.stride + i % kOuterVectors * kLanes;
    hn::StoreU(to.first ? acc[i] : hn::Add(hn::LoadU(d, at), acc[i]), d, at);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_DENSE_OUTER_INL_H_
