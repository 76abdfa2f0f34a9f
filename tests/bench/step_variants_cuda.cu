// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/step_variants_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "kernels/cuda/launch.cuh"

namespace moelora {
namespace {

constexpr int kRounds = 5;  // over all ways, so that a drift of the clock meets all of them
constexpr int kLaunches = 15;

// A recorded step.
class StepGraph {
 public:
  explicit StepGraph(const RecordedStep& step) : stream_(cuda_stream(step.stream)) {
    step.queue();  // all kernels are loaded then
    step.device.synchronize(step.stream);
    step.device.begin_recording(step.stream);
    step.queue();
    check_cuda(cudaStreamEndCapture(stream_, &graph_), "recording a step");
    for (cudaEvent_t& event : events_) {
      check_cuda(cudaEventCreate(&event), "cudaEventCreate");
    }
    count_kernels();
  }
  ~StepGraph() {
    if (exec_ != nullptr) {
      cudaGraphExecDestroy(exec_);
    }
    cudaGraphDestroy(graph_);
    for (const cudaEvent_t event : events_) {
      cudaEventDestroy(event);
    }
  }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  [[nodiscard]] size_t launches() const { return launches_; }

  void instantiate() { check_cuda(cudaGraphInstantiate(&exec_, graph_, 0), "recording a step"); }
  // Median, us.
  double time() {
    std::vector<double> times;
    for (int i = 0; i < kLaunches; ++i) {
      check_cuda(cudaEventRecord(events_[0], stream_), "cudaEventRecord");
      check_cuda(cudaGraphLaunch(exec_, stream_), "launching a step");
      check_cuda(cudaEventRecord(events_[1], stream_), "cudaEventRecord");
      check_cuda(cudaStreamSynchronize(stream_), "a step");
      float ms = 0;
      cudaEventElapsedTime(&ms, events_[0], events_[1]);
      times.push_back(static_cast<double>(ms) * 1e3);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  void count_kernels() {
    size_t count = 0;
    check_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "nodes of a step");
    std::vector<cudaGraphNode_t> nodes(count);
    check_cuda(cudaGraphGetNodes(graph_, nodes.data(), &count), "nodes of a step");
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      check_cuda(cudaGraphNodeGetType(node, &type), "nodes of a step");
      launches_ += type == cudaGraphNodeTypeKernel ? 1 : 0;
    }
  }

  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  cudaEvent_t events_[2] = {};
  size_t launches_ = 0;
};

struct NamedPaths {
  const char* name;
  StepPaths paths;
};
constexpr ExpertPath kAny = ExpertPath::kAuto;
constexpr ExpertPath kApart = ExpertPath::kFewTokensApart;
constexpr ExpertPath kBeside = ExpertPath::kFewRowsBeside;
constexpr ExpertPath kStream = ExpertPath::kFewTokens;
constexpr ExpertPath kBlocks = ExpertPath::kFewTokensBlocks;
constexpr NamedPaths kWays[] = {
    {"as it is", {}},
    {"experts: shrink and expand apart", {LinearPath::kAuto, kApart, kApart}},
    {"gate_up: shrink beside", {LinearPath::kAuto, kBeside, kAny}},
    {"down: shrink beside", {LinearPath::kAuto, kAny, kBeside}},
    {"experts: shrink beside", {LinearPath::kAuto, kBeside, kBeside}},
    {"experts: stream, deltas by clusters", {LinearPath::kAuto, kStream, kStream}},
    {"gate_up: stream, no clusters", {LinearPath::kAuto, kBlocks, kAny}},
    {"down: stream, no clusters", {LinearPath::kAuto, kAny, kBlocks}},
    {"experts: stream, no clusters", {LinearPath::kAuto, kBlocks, kBlocks}},
    {"linear: shrink before", {LinearPath::kShrinkFirst, kAny, kAny}},
    {"linear: shrink beside", {LinearPath::kShrinkBeside, kAny, kAny}},
    {"experts: tokens gathered", {LinearPath::kAuto, ExpertPath::kManyTokensGather, ExpertPath::kManyTokensGather}},
    {"experts: tokens in bulk", {LinearPath::kAuto, ExpertPath::kManyTokensBulk, ExpertPath::kManyTokensBulk}},
    {"experts: tokens for pairs", {LinearPath::kAuto, ExpertPath::kManyTokensPairs, ExpertPath::kManyTokensPairs}},
    {"linear and experts beside", {LinearPath::kShrinkBeside, kBeside, kBeside}},
    {"router: three launches", {.router = RouterPath::kApart}},
    {"router: one launch", {.router = RouterPath::kOne}},
};

}  // namespace

void compare_paths(const RecordedStep& step) {
  const StepPaths chosen = step.paths;
  std::vector<std::unique_ptr<StepGraph>> graphs;
  std::vector<std::vector<double>> times;
  for (const NamedPaths& way : kWays) {
    step.paths = way.paths;
    graphs.push_back(std::make_unique<StepGraph>(step));
    graphs.back()->instantiate();
    times.emplace_back();
  }
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < graphs.size(); ++i) {
      times[i].push_back(graphs[i]->time());
    }
  }
  size_t best = 0;
  std::printf("%-36s %8s %9s   (%s)\n", "way", "kernels", "us", "lowest to highest of the rounds' medians");
  for (size_t i = 0; i < graphs.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    const double us = times[i][kRounds / 2];
    best = us < times[best][kRounds / 2] ? i : best;
    std::printf("%-36s %8zu %9.1f   (%.1f to %.1f)\n", kWays[i].name, graphs[i]->launches(), us, times[i].front(),
                times[i].back());
  }
  std::printf("fastest: %s\n", kWays[best].name);
  step.paths = chosen;
}

}  // namespace moelora
