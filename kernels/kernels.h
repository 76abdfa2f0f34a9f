// SPDX-License-Identifier: Apache-2.0
// The complete list of device work, filled once per device. Nothing above asks which backend it is.
// An op is the contract (its header); a kernel is one implementation. See README.md beside this file.
#pragma once

#include "kernels/attention/paged_attention.h"
#include "kernels/attention/rope_kv_write.h"
#include "kernels/dense/embedding.h"
#include "kernels/dense/linear.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/swiglu.h"
#include "kernels/lora/lora_resolve.h"
#include "kernels/memory/fill_random.h"
#include "kernels/memory/page_copy.h"
#include "kernels/memory/read_memory.h"
#include "kernels/moe/moe_combine.h"
#include "kernels/moe/moe_down.h"
#include "kernels/moe/moe_gate_up.h"
#include "kernels/moe/moe_route.h"
#include "kernels/moe/moe_router.h"
#include "kernels/moe/moe_sort.h"
#include "kernels/moe/mxfp4_tiles.h"
#include "kernels/moe/router_topk.h"
#include "kernels/sampling/sample_tokens.h"

namespace moelora {

struct Kernels {
  const char* name;
  void (*embedding)(const EmbeddingArgs&, Stream&);
  void (*rms_norm)(const RmsNormArgs&, Stream&);
  void (*linear)(const LinearArgs&, Stream&);
  void (*swiglu)(const SwigluArgs&, Stream&);
  void (*rope_kv_write)(const RopeKvWriteArgs&, Stream&);
  void (*paged_attention)(const PagedAttentionArgs&, Stream&);
  void (*router_topk)(const RouterTopkArgs&, Stream&);
  void (*moe_sort)(const MoeSortArgs&, Stream&);
  void (*moe_route)(const MoeRouteArgs&, Stream&);    // both of these
  void (*moe_router)(const MoeRouterArgs&, Stream&);  // rms_norm, linear and moe_route
  void (*moe_gate_up)(const MoeGateUpArgs&, Stream&);
  void (*moe_down)(const MoeDownArgs&, Stream&);
  void (*moe_combine)(const MoeCombineArgs&, Stream&);
  void (*sample_tokens)(const SampleTokensArgs&, Stream&);
  void (*copy_pages)(const CopyPagesArgs&, Stream&);
  void (*write_pages)(const WritePagesArgs&, Stream&);
  void (*read_pages)(const ReadPagesArgs&, Stream&);
  void (*fill_random)(const FillRandomArgs&, Stream&);
  void (*read_memory)(const ReadMemoryArgs&, Stream&);
  void (*lora_resolve)(const LoraResolveArgs&, Stream&);  // null where records are read in place
  void (*pack_mxfp4)(const PackMxfp4Args&, Stream&);      // null where experts are read as they are stored
  int64_t max_pairs = 0;  // of row and expert that moe_sort, moe_route and moe_router take at once; 0: any number
};

const Kernels& kernels_reference();  // loops a reader can check; the oracle of the tests
const Kernels& kernels_cpu();        // SIMD where it pays, the reference elsewhere
const Kernels& kernels_cuda();       // NVIDIA GPUs; in builds with CUDA

}  // namespace moelora
