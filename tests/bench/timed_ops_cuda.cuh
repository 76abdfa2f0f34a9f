// SPDX-License-Identifier: Apache-2.0
// The table of ops of step_bench: every op between two events, or with some kinds left out.
#pragma once

#include <cuda_runtime.h>

#include <set>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "tests/bench/delay_cuda.h"
#include "tests/bench/step_variants_cuda.h"

namespace moelora {

constexpr const char* kRouting = "moe_router";  // with its norm

// Events of one forward pass. The table of ops is plain functions, so the recorder is reached through a pointer.
struct Recorder {
  std::vector<cudaEvent_t> events;
  std::vector<std::string> names;
  size_t used = 0;
  bool recording_graph = false;    // no events then
  std::set<std::string> left_out;  // kinds of ops
  StepPaths paths;

  Recorder() : events(8192) {
    for (cudaEvent_t& event : events) {
      cudaEventCreate(&event);
    }
  }
  void begin() { used = 0, names.clear(); }
  template <class Args>
  void around(const std::string& name, void (*op)(const Args&, Stream&), const Args& args, Stream& stream) {
    if (recording_graph) {
      if (!left_out.contains(name)) {
        op(args, stream);
      }
      return;
    }
    record_event(events[used++], stream);
    op(args, stream);
    record_event(events[used++], stream);
    names.push_back(name);
  }
};
inline Recorder* recorder = nullptr;

// By shape: ops are not told of modules that no adapter has.
inline std::string linear_name(const LinearArgs& args) {
  if (args.num_parts == 3) {
    return "linear q, k, v";
  }
  if (args.num_parts == 2) {
    return "linear of the MLP";
  }
  return args.accumulate ? "linear o" : "linear lm_head";
}

inline Kernels timed_kernels() {
  Kernels table = kernels_cuda();
  table.embedding = [](const EmbeddingArgs& a, Stream& s) { recorder->around("embedding", embedding_cuda, a, s); };
  table.rms_norm = [](const RmsNormArgs& a, Stream& s) { recorder->around("rms_norm", rms_norm_cuda, a, s); };
  table.linear = [](const LinearArgs& a, Stream& s) {
    recorder->around(
        linear_name(a),
        +[](const LinearArgs& args, Stream& stream) { linear_cuda_by(recorder->paths.linear, args, stream); }, a, s);
  };
  table.swiglu = [](const SwigluArgs& a, Stream& s) { recorder->around("swiglu", swiglu_cuda, a, s); };
  table.rope_kv_write = [](const RopeKvWriteArgs& a, Stream& s) {
    recorder->around("rope_kv_write", rope_kv_write_cuda, a, s);
  };
  table.paged_attention = [](const PagedAttentionArgs& a, Stream& s) {
    recorder->around("paged_attention", paged_attention_cuda, a, s);
  };
  table.router_topk = [](const RouterTopkArgs& a, Stream& s) {
    recorder->around("router_topk", router_topk_cuda, a, s);
  };
  table.moe_sort = [](const MoeSortArgs& a, Stream& s) { recorder->around("moe_sort", moe_sort_cuda, a, s); };
  table.moe_route = [](const MoeRouteArgs& a, Stream& s) { recorder->around("moe_route", moe_route_cuda, a, s); };
  table.moe_router = [](const MoeRouterArgs& a, Stream& s) {
    recorder->around(
        kRouting,
        +[](const MoeRouterArgs& args, Stream& stream) { moe_router_cuda_by(recorder->paths.router, args, stream); }, a,
        s);
  };
  table.moe_gate_up = [](const MoeGateUpArgs& a, Stream& s) {
    recorder->around(
        "moe_gate_up",
        +[](const MoeGateUpArgs& args, Stream& stream) { moe_gate_up_cuda_by(recorder->paths.gate_up, args, stream); },
        a, s);
  };
  table.moe_down = [](const MoeDownArgs& a, Stream& s) {
    recorder->around(
        "moe_down",
        +[](const MoeDownArgs& args, Stream& stream) { moe_down_cuda_by(recorder->paths.down, args, stream); }, a, s);
  };
  table.moe_combine = [](const MoeCombineArgs& a, Stream& s) {
    recorder->around("moe_combine", moe_combine_cuda, a, s);
  };
  return table;
}

}  // namespace moelora
