// SPDX-License-Identifier: Apache-2.0
// lora_resolve on CUDA: a thread a record. Runs once an upload, after the stream's pages are written.
#include "kernels/cuda/launch.cuh"
#include "kernels/lora/lora_resolve.h"

namespace moelora {
namespace {

constexpr int THREADS = 128;

// Sizes are not in a record: a page past the matrix's end may be named, never read.
__device__ void copy_page_ids(const AdapterTable& table, int slot, int first, int32_t (&pages)[ResolvedLora::kPages]) {
  const int begin = first / table.page_granules;
  for (int i = 0; i < ResolvedLora::kPages; ++i) {
    const int page = begin + i < table.pages_per_slot ? begin + i : begin;
    pages[i] = table.page_table[static_cast<int64_t>(slot) * table.pages_per_slot + page];
  }
}

__global__ void resolve(const LoraResolveArgs args) {
  const AdapterTable& table = args.table;
  const int modules = table.modules_per_layer();
  const int index = blockIdx.x * THREADS + threadIdx.x;
  if (index >= table.num_layers * modules) {
    return;
  }
  const int layer = index / modules;
  const int nth = index % modules;
  const LoraRecord* record =
      nth < kNumDenseModules ? table.dense(args.slot, layer, static_cast<LoraModule>(nth))
                             : table.expert(args.slot, layer, (nth - kNumDenseModules) / kNumExpertModules,
                                            static_cast<ExpertModule>((nth - kNumDenseModules) % kNumExpertModules));
  ResolvedLora out;
  if (record != nullptr) {
    out.rank = record->rank;
    out.scale = record->scale;
    out.a = record->a;
    out.b = record->b;
    out.bias = record->bias;
    copy_page_ids(table, args.slot, record->a, out.a_pages);
    copy_page_ids(table, args.slot, record->b, out.b_pages);
  }
  args.out[index] = out;
}

}  // namespace

void lora_resolve_cuda(const LoraResolveArgs& args, Stream& stream) {
  const int count = args.table.num_layers * args.table.modules_per_layer();
  resolve<<<(count + THREADS - 1) / THREADS, THREADS, 0, cuda_stream(stream)>>>(args);
  check_launch("lora_resolve");
}

}  // namespace moelora
