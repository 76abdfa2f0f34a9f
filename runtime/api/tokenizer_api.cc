// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "tokenizer". This version has none: every function says so, after the checks that hold for all.
#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/api/request_flow.h"

using namespace moelora;
using namespace moelora::api;

namespace {

moelora_status refuse(moelora_error* err) {
  return guard(err, []() -> Status { fail_no_tokenizer(); });
}

}  // namespace

moelora_status moelora_tokenizer_open(const char*, size_t, moelora_tokenizer**, moelora_error* err) {
  return refuse(err);
}

moelora_status moelora_tokenizer_from_engine(moelora_engine* engine, moelora_tokenizer**, moelora_error* err) {
  return guard(err, [&]() -> Status {
    const EngineCall call(engine);
    fail_no_tokenizer();
  });
}

void moelora_tokenizer_release(moelora_tokenizer*) {}

moelora_status moelora_tokenize(moelora_tokenizer*, const char*, size_t, uint32_t, int32_t*, size_t, size_t*,
                                moelora_error* err) {
  return refuse(err);
}

moelora_status moelora_detokenize(moelora_tokenizer*, const int32_t*, size_t, uint32_t, char*, size_t, size_t*,
                                  moelora_error* err) {
  return refuse(err);
}

moelora_status moelora_token_text(moelora_tokenizer*, int32_t, char*, size_t, size_t*, moelora_error* err) {
  return refuse(err);
}
