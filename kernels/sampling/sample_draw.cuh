// SPDX-License-Identifier: Apache-2.0
// Temperature, top-k, min-p, top-p and the draw of one row by one block, without sorting and with the same result in
// every run: masses are integers (weights in units of 2^-44), so sums do not depend on the order of the threads.
//
// A cut (top-k, top-p) keeps a prefix of the order (logit falling, id rising). Where it ends is found in two histograms
// over the distance from the largest logit in units of the temperature, the second inside the bin of the first; what
// falls into the last bin, nearly always a token or two, is ranked directly. A row with more than LIST_SIZE tokens
// there is given back to the host. Distances of 32 and more have no mass in these units: such tokens are never drawn
// (their probability is below 2^-44 of the best one's) and not looked at.
#pragma once

#include <cstdint>

namespace moelora::sampling {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2 * THREADS;  // of a histogram; tiles of the ordered walk
constexpr float BINS_PER_UNIT = 64.0f;
constexpr int TILE = 128;  // neighbouring ids whose mass is one item of the ordered walk
constexpr int MAX_VOCAB = BINS * TILE;
constexpr int LIST_SIZE = 1024;
constexpr unsigned ALL = 0xffffffffu;

enum RowStatus : int32_t { kDrawn = 0, kUnusable = 1, kGivenBack = 2 };

struct DrawRow {
  int32_t row;
  float temperature;
  int32_t top_k;  // 0 = off
  float top_p;
  float min_p;
  double uniform;
};
struct DrawResult {
  int32_t token;
  int32_t status;
};

// Tokens with a larger logit than `logit`, and those with an equal one up to `last_id`.
struct Cut {
  float logit;
  int32_t last_id;
  __device__ bool keeps(float value, int32_t id) const { return value > logit || (value == logit && id <= last_id); }
};

struct Shared {
  unsigned long long items[BINS];
  unsigned long long warp_sum[WARPS];
  float list_logit[LIST_SIZE];
  int32_t list_id[LIST_SIZE];
  unsigned long long list_mass[LIST_SIZE];
  int list_count;
  // Where a running sum crosses its target: the item, and the sum before it.
  int crossing;
  unsigned long long before;
  unsigned long long total;
  float warp_max[WARPS];
  Cut cut;
  int32_t token;
};

// exp_fast of exp_block.h, operation by operation: the same bits.
__device__ __forceinline__ float exp_fast_device(float x) {
  constexpr float kRound = 12582912.0f;
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504f), kRound);
  const float n = __fsub_rn(shifted, kRound);
  const float r = __fadd_rn(__fsub_rn(clamped, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, 2.12194440e-4f));
  float poly = 1.0f / 5040.0f;
  poly = __fadd_rn(__fmul_rn(poly, r), 1.0f / 720.0f);
  poly = __fadd_rn(__fmul_rn(poly, r), 1.0f / 120.0f);
  poly = __fadd_rn(__fmul_rn(poly, r), 1.0f / 24.0f);
  poly = __fadd_rn(__fmul_rn(poly, r), 1.0f / 6.0f);
  poly = __fadd_rn(__fmul_rn(poly, r), 0.5f);
  poly = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(poly, r), r), r), 1.0f);
  const uint32_t power = (__float_as_uint(shifted) + 127u) << 23;
  return x < -87.0f ? 0.0f : __fmul_rn(poly, __uint_as_float(power));
}

// What the passes over a row share.
struct Row {
  const float* logits;
  int vocab;
  float largest;
  float temperature;
  float min_p;

  // (logit - largest) / temperature, at most 0.
  __device__ float scaled(float logit) const { return __fdiv_rn(__fsub_rn(logit, largest), temperature); }
  // In units of 2^-44; 0 where min-p refuses.
  __device__ unsigned long long mass(float scaled_logit) const {
    const float weight = exp_fast_device(scaled_logit);
    return weight >= min_p ? __float2ull_rn(weight * 0x1p44f) : 0ull;
  }
};

// Calls visit(logit, id) for all tokens, four loads in flight; ids of a thread rise.
template <class Visit>
__device__ __forceinline__ void for_each_token(const Row& row, const Visit& visit) {
  constexpr int UNROLL = 8;
  for (int base = threadIdx.x; base < row.vocab; base += THREADS * UNROLL) {
    float kept[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int id = base + i * THREADS;
      kept[i] = id < row.vocab ? row.logits[id] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int id = base + i * THREADS;
      if (id < row.vocab) {
        visit(kept[i], id);
      }
    }
  }
}

__device__ __forceinline__ void clear_items(Shared& s) {
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    s.items[i] = 0;
  }
  __syncthreads();  // the items are zero
}

// Finds the first item at which the running sum of s.items exceeds `target`: s.crossing, s.before; s.total is the sum
// of all. Without one s.crossing is -1. Begins and ends with a barrier.
__device__ __forceinline__ void find_crossing(Shared& s, unsigned long long target) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  __syncthreads();  // the items are there
  const unsigned long long first = s.items[2 * threadIdx.x];
  const unsigned long long own = first + s.items[2 * threadIdx.x + 1];
  unsigned long long upto = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned long long lower = __shfl_up_sync(ALL, upto, offset);
    upto += lane >= offset ? lower : 0ull;
  }
  if (lane == 31) {
    s.warp_sum[warp] = upto;
  }
  if (threadIdx.x == 0) {
    s.crossing = -1;
  }
  __syncthreads();  // the sums of all warps are there
  unsigned long long lower = 0;
  for (int w = 0; w < warp; ++w) {
    lower += s.warp_sum[w];
  }
  upto += lower;
  const unsigned long long before = upto - own;
  if (before <= target && upto > target) {
    const bool in_first = before + first > target;
    s.crossing = 2 * static_cast<int>(threadIdx.x) + (in_first ? 0 : 1);
    s.before = in_first ? before : before + first;
  }
  if (threadIdx.x == THREADS - 1) {
    s.total = upto;
  }
  __syncthreads();  // the crossing is there
}

__device__ __forceinline__ int bin_of(float scaled_logit) {
  return static_cast<int>(-scaled_logit * BINS_PER_UNIT);  // below BINS for scaled_logit > -32
}
// Inside its bin; the differences are exact.
__device__ __forceinline__ int sub_bin_of(float scaled_logit) {
  const float place = -scaled_logit * BINS_PER_UNIT;
  return static_cast<int>((place - static_cast<float>(static_cast<int>(place))) * static_cast<float>(BINS));
}
__device__ __forceinline__ bool has_mass(float scaled_logit) {
  return scaled_logit > -static_cast<float>(BINS) / BINS_PER_UNIT;
}

// The token of the list at which the sum in order exceeds the target is the last one kept; `better` is the mass of what
// comes before the list. Its order in memory does not matter. Ends with a barrier.
__device__ __forceinline__ void cut_in_list(Shared& s, unsigned long long better, unsigned long long target) {
  const int i = threadIdx.x;
  if (i < s.list_count) {
    const Cut own{s.list_logit[i], s.list_id[i]};
    unsigned long long upto = better;
    for (int j = 0; j < s.list_count; ++j) {
      upto += own.keeps(s.list_logit[j], s.list_id[j]) ? s.list_mass[j] : 0ull;
    }
    if (upto > target && upto - s.list_mass[i] <= target) {
      s.cut = own;
    }
  }
  __syncthreads();  // the cut is there
}

// Shortens s.cut to the smallest prefix of what it keeps whose masses exceed `target` or, if `fraction` is not
// negative, reach that part of the whole. False: too many tokens look alike.
template <class Mass>
__device__ __forceinline__ bool shorten(const Row& row, Shared& s, unsigned long long target, double fraction,
                                        const Mass& mass_of) {
  const Cut cut = s.cut;
  clear_items(s);
  for_each_token(row, [&](float logit, int id) {
    const float scaled = row.scaled(logit);
    if (has_mass(scaled) && cut.keeps(logit, id)) {
      const unsigned long long mass = mass_of(scaled);
      if (mass != 0) {
        atomicAdd(&s.items[bin_of(scaled)], mass);
      }
    }
  });
  if (fraction >= 0.0) {
    // The total is known after one scan; the prefix must reach its part, and hold one token at least.
    find_crossing(s, 0);
    const auto part = static_cast<unsigned long long>(ceil(fraction * static_cast<double>(s.total)));
    target = part > 0 ? part - 1 : 0;
    target = target < s.total ? target : s.total - 1;
    __syncthreads();  // s.total is read
  }
  find_crossing(s, target);
  const int bin = s.crossing;
  if (bin < 0) {
    return true;  // everything with mass is kept
  }
  const unsigned long long above = s.before;
  __syncthreads();  // s.crossing is read
  clear_items(s);
  for_each_token(row, [&](float logit, int id) {
    const float scaled = row.scaled(logit);
    if (has_mass(scaled) && bin_of(scaled) == bin && cut.keeps(logit, id)) {
      const unsigned long long mass = mass_of(scaled);
      if (mass != 0) {
        atomicAdd(&s.items[sub_bin_of(scaled)], mass);
      }
    }
  });
  find_crossing(s, target - above);
  const int sub_bin = s.crossing;
  const unsigned long long better = above + s.before;
  if (threadIdx.x == 0) {
    s.list_count = 0;
  }
  __syncthreads();  // s.crossing is read, the list is empty
  for_each_token(row, [&](float logit, int id) {
    const float scaled = row.scaled(logit);
    if (has_mass(scaled) && bin_of(scaled) == bin && sub_bin_of(scaled) == sub_bin && cut.keeps(logit, id)) {
      const int at = atomicAdd(&s.list_count, 1);
      if (at < LIST_SIZE) {
        s.list_logit[at] = logit;
        s.list_id[at] = id;
        s.list_mass[at] = mass_of(scaled);
      }
    }
  });
  __syncthreads();  // the list is there
  if (s.list_count > LIST_SIZE) {
    return false;
  }
  cut_in_list(s, better, target);
  return true;
}

// The token at which the running sum of masses in order of id exceeds its part `uniform` of the whole.
__device__ __forceinline__ int32_t draw_token(const Row& row, Shared& s, double uniform) {
  const Cut cut = s.cut;
  const int lane = threadIdx.x % 32;
  const auto mass_at = [&](int id) {
    if (id >= row.vocab) {
      return 0ull;
    }
    const float logit = row.logits[id];
    const float scaled = row.scaled(logit);
    return has_mass(scaled) && cut.keeps(logit, id) ? row.mass(scaled) : 0ull;
  };
  const int tiles = (row.vocab + TILE - 1) / TILE;
  for (int tile = threadIdx.x / 32; tile < BINS; tile += WARPS) {
    unsigned long long sum = 0;
    if (tile < tiles) {
#pragma unroll
      for (int i = 0; i < TILE / 32; ++i) {
        sum += mass_at(tile * TILE + 32 * i + lane);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(ALL, sum, offset);
      }
    }
    if (lane == 0) {
      s.items[tile] = sum;
    }
  }
  find_crossing(s, 0);  // for the total, at least the best token's mass
  const unsigned long long total = s.total;
  auto target = static_cast<unsigned long long>(uniform * static_cast<double>(total));
  target = target < total ? target : total - 1;
  __syncthreads();  // s.total is read
  find_crossing(s, target);
  if (s.crossing < 0) {
    return -1;  // nothing has mass: min-p above 1
  }
  if (threadIdx.x < 32) {
    unsigned long long before = s.before;
    int32_t token = -1;
    for (int i = 0; i < TILE / 32; ++i) {
      const int id = s.crossing * TILE + 32 * i + lane;
      unsigned long long upto = mass_at(id);
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned long long lower = __shfl_up_sync(ALL, upto, offset);
        upto += lane >= offset ? lower : 0ull;
      }
      const unsigned hits = __ballot_sync(ALL, before + upto > target);
      if (hits != 0 && token < 0) {
        token = s.crossing * TILE + 32 * i + __ffs(static_cast<int>(hits)) - 1;
      }
      before += __shfl_sync(ALL, upto, 31);
    }
    if (lane == 0) {
      s.token = token;
    }
  }
  __syncthreads();  // the token is there
  return s.token;
}

// Largest logit of the row, to all threads; NaN if there is one.
__device__ __forceinline__ float find_largest(const Row& row, Shared& s) {
  float largest = __uint_as_float(0xff800000u);
  bool nan = false;
  for_each_token(row, [&](float logit, int) {
    largest = fmaxf(largest, logit);
    nan = nan || logit != logit;
  });
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, offset));
  }
  if (threadIdx.x % 32 == 0) {
    s.warp_max[threadIdx.x / 32] = largest;
  }
  if (__syncthreads_or(nan ? 1 : 0) != 0) {
    return __uint_as_float(0x7fc00000u);
  }
  for (int w = 0; w < WARPS; ++w) {
    largest = fmaxf(largest, s.warp_max[w]);
  }
  return largest;
}

// Grid: one block for each of `rows`.
__global__ void __launch_bounds__(THREADS)
    draw_kernel(const float* logits, int64_t stride, int vocab, const DrawRow* rows, DrawResult* results) {
  __shared__ Shared s;
  const DrawRow options = rows[blockIdx.x];
  Row row{logits + options.row * stride, vocab, 0.0f, options.temperature, options.min_p};
  row.largest = find_largest(row, s);
  if (!(fabsf(row.largest) < __uint_as_float(0x7f800000u))) {
    if (threadIdx.x == 0) {
      results[blockIdx.x] = {-1, kUnusable};
    }
    return;
  }
  if (threadIdx.x == 0) {
    s.cut = {__uint_as_float(0xff800000u), INT32_MAX};
  }
  __syncthreads();  // the cut is there
  bool done = true;
  if (options.top_k > 0 && options.top_k < vocab) {
    done = shorten(row, s, static_cast<unsigned long long>(options.top_k - 1), -1.0, [](float) { return 1ull; });
  }
  if (done && options.top_p < 1.0f) {
    done = shorten(row, s, 0, static_cast<double>(options.top_p),
                   [&](float scaled_logit) { return row.mass(scaled_logit); });
  }
  const int32_t token = done ? draw_token(row, s, options.uniform) : -1;
  if (threadIdx.x == 0) {
    results[blockIdx.x] = {token, token >= 0 ? kDrawn : kGivenBack};
  }
}

}  // namespace moelora::sampling
