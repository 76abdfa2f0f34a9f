/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moelora_experimental.h
 * Functions without an ABI promise, exported under their own version node: what `moelora verify` and `moelora bench`
 * need to see of an engine. The conventions of moelora.h hold; everything here is unstable since 0.1.
 */
#ifndef MOELORA_EXPERIMENTAL_H_
#define MOELORA_EXPERIMENTAL_H_

#include "moelora.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Keeps the logits of every position from first_position on (0 = first token of the sequence) that is computed for
    this request, prompt and output; -1 = none. Row i predicts the token after position first + i. Takes
    4 * vocabulary bytes a position. unstable.
    Errors: E_INVALID once submitted. Ownership: -. Threads: one at a time while building. */
MOELORA_API moelora_status moelora_request_capture_logits(moelora_engine *engine, moelora_request request,
                                                          int32_t first_position, moelora_error *err);
/** Rows kept so far, position of the first one (-1 without rows) and floats in a row; each may be NULL. unstable.
    Errors: E_INVALID before submit. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_request_captured(moelora_engine *engine, moelora_request request, int32_t *num_rows,
                                                    int32_t *first_position, int32_t *vocab_size, moelora_error *err);
/** Copies row `row` (vocab_size floats). unstable.
    Errors: E_INVALID for a row that does not exist; MORE if cap is too small. Ownership: caller owns logits. Threads:
    any. */
MOELORA_API moelora_status moelora_request_read_captured(moelora_engine *engine, moelora_request request, int32_t row,
                                                         float *logits, size_t cap, moelora_error *err);

/** How nearly the routers would have chosen other experts for captured row `row`: the smallest gap over the MoE layers
    between the last chosen and the next router logit, relative to the largest |logit| of that router's row. Infinity
    without MoE layers; -1 where the backend does not tell (CUDA). unstable.
    Errors: E_INVALID for a row that does not exist. Ownership: caller owns gap. Threads: any. */
MOELORA_API moelora_status moelora_request_router_gap(moelora_engine *engine, moelora_request request, int32_t row,
                                                      float *gap, moelora_error *err);

/** Module groups of moelora_adapter_load_random. */
enum { MOELORA_RANDOM_ATTENTION = 1, MOELORA_RANDOM_EXPERTS = 2 }; /* experts: the MLP of dense models */

/** An adapter of random bf16 values for benchmarks. unstable.
    Errors: E_EXISTS; E_ADAPTER_MISMATCH for a rank above the limit. Ownership: caller owns the handle. Threads: any;
    blocks. */
MOELORA_API moelora_status moelora_adapter_load_random(moelora_engine *engine, const char *name, size_t name_len,
                                                       int32_t rank, uint32_t targets, uint64_t seed,
                                                       moelora_adapter *out, moelora_error *err);

/** One engine step. */
typedef struct moelora_step_record {
  double start_ms;       /* monotonic */
  double ms;
  double active_experts; /* mean a MoE layer */
  double lora_bytes;     /* read by the step */
  double kv_bytes;       /* read by the step */
  int32_t rows;          /* tokens computed */
  int32_t prefill_rows;  /* of them, of prompts; 0 = a pure decode step */
  int32_t sequences;
  int32_t adapters;      /* different ones used */
} moelora_step_record;

/** The newest records, oldest of them first: up to cap; n gets the count copied. unstable.
    Errors: none of its own. Ownership: caller owns buf. Threads: any. */
MOELORA_API moelora_status moelora_step_records(moelora_engine *engine, moelora_step_record *buf, size_t cap, size_t *n,
                                                moelora_error *err);
/** Reads the engine's weights with the engine's threads and returns bytes/s: the ceiling of decoding. unstable.
    Errors: none of its own. Ownership: -. Threads: any; blocks, steps wait meanwhile. */
MOELORA_API moelora_status moelora_measure_read_bandwidth(moelora_engine *engine, double *bytes_per_second,
                                                          moelora_error *err);
/** Weight bytes that a decode step reads when `active_experts` experts of each MoE layer are used. unstable.
    Errors: none of its own. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_weight_bytes(moelora_engine *engine, double active_experts, double *bytes,
                                                moelora_error *err);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MOELORA_EXPERIMENTAL_H_ */
