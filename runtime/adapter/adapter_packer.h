// SPDX-License-Identifier: Apache-2.0
// Reads what an adapter's file holds and writes the byte stream of kernels/lora/adapter_layout.h, in one pass: a piece
// of the file is read, hashed and packed while it is in a core's cache. Called by the loader with checked records and
// by random_adapter. Whatever the stored form was (2-D, 3-D, transposed, interleaved by expert), a record describes its
// A and B as strided views, so this is the only place that moves elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/base/stream.h"
#include "kernels/lora/adapter_layout.h"
#include "runtime/adapter/stream_progress.h"
#include "runtime/io/byte_source.h"
#include "runtime/io/safetensors.h"
#include "runtime/memory/host_memory.h"
#include "runtime/model/config.h"

namespace moelora {

struct ReadPlan;
struct StreamPlan;

// One A or B inside a stored tensor: element (rank i, column j) is data[i * rank_stride + j * column_stride], in
// elements. Columns are k of A and outputs of B.
struct MatrixView {
  const StoredTensor* tensor = nullptr;
  int64_t offset = 0;  // in elements
  int64_t rank_stride = 0;
  int64_t column_stride = 0;
  int32_t columns = 0;
};

// One adapted linear. Views of the same elements share their granules in the stream.
struct AdapterRecord {
  int32_t layer = 0;
  int32_t expert = -1;  // -1 = a dense module
  int32_t module = 0;   // LoraModule or ExpertModule
  int32_t rank = 0;
  float scale = 0.0f;
  Dtype dtype = Dtype::kBf16;  // of A and B in the stream: kBf16 or kF32
  MatrixView a;
  MatrixView b;
  const StoredTensor* bias = nullptr;
};

struct PackedAdapter {
  uint64_t hash = 0;                      // of every byte that was read, and `seed`
  const StoredTensor* refused = nullptr;  // holds a value that is NaN or infinite, also after rounding
};

// Fills a stream of StreamPlan::make_stream. `workers` do it side by side, from the stream's start to its end; the
// bytes, the hash and which fault is named do not depend on them. Publishes what is done to `progress`, if not null,
// but the last byte. Throws Error{kIo}.
PackedAdapter pack_adapter(const StreamPlan& stream_plan, const ReadPlan& read_plan, const ByteSource& source,
                           HostBytes& stream, uint64_t seed, Stream& workers, StreamProgress* progress);

// The same stream with random bf16 values of either sign, of magnitude 2^-11 to 2^-7; views need only columns.
HostBytes pack_random_adapter(const ModelConfig& config, std::vector<AdapterRecord>& records, uint64_t seed);

// The name of a tensor, in quotes and fit for a message.
std::string quoted(const StoredTensor& tensor);

}  // namespace moelora
