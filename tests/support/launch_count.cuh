// SPDX-License-Identifier: Apache-2.0
// How many kernels an op launches: it is recorded, not run.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_stream.cuh"
#include "tests/support/catch.h"
#include "tests/support/device_buffer.cuh"

namespace moelora::test {

template <class Op>
size_t launches_of(const Op& op) {
  Stream& stream = *gpu()->stream;
  gpu()->device->begin_recording(stream);
  op();
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamEndCapture(cuda_stream(stream), &graph) == cudaSuccess);
  size_t count = 0;
  CHECK(cudaGraphGetNodes(graph, nullptr, &count) == cudaSuccess);
  cudaGraphDestroy(graph);
  return count;
}

}  // namespace moelora::test
