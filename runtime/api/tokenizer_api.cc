// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "tokenizer".
#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/api/request_flow.h"

using namespace moelora;
using namespace moelora::api;

moelora_status moelora_tokenizer_open(const char* model_dir, size_t model_dir_len, moelora_tokenizer** out,
                                      moelora_error* err) {
  return guard(err, [&] {
    required(out, "out");
    *out = add_tokenizer(Tokenizer::open(path_argument("model_dir", model_dir, model_dir_len)));
    return Status::kOk;
  });
}

moelora_status moelora_tokenizer_from_engine(moelora_engine* engine, moelora_tokenizer** out, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    *out = add_tokenizer(call->model_tokenizer());
    return Status::kOk;
  });
}

void moelora_tokenizer_release(moelora_tokenizer* tokenizer) {
  guard(nullptr, [&] {
    remove_tokenizer(tokenizer);
    return Status::kOk;
  });
}

moelora_status moelora_tokenize(moelora_tokenizer* tokenizer, const char* text, size_t text_len, uint32_t flags,
                                int32_t* buf, size_t cap, size_t* n, moelora_error* err) {
  return guard(err, [&] {
    const auto found = find_tokenizer(tokenizer);
    required(n, "n");
    known_flags(flags, MOELORA_TOKENIZE_NO_SPECIAL | MOELORA_TOKENIZE_PLAIN_TEXT);
    const std::string bytes = text_argument("text", text, text_len, kTextBytesMax);
    const EncodeOptions options{(flags & MOELORA_TOKENIZE_NO_SPECIAL) == 0, (flags & MOELORA_TOKENIZE_PLAIN_TEXT) == 0};
    const std::vector<int32_t> ids = found->encode(bytes, options);
    return copy_out(ids.data(), ids.size(), buf, cap, n);
  });
}

moelora_status moelora_detokenize(moelora_tokenizer* tokenizer, const int32_t* tokens, size_t num_tokens,
                                  uint32_t flags, char* buf, size_t cap, size_t* n, moelora_error* err) {
  return guard(err, [&] {
    const auto found = find_tokenizer(tokenizer);
    required(n, "n");
    known_flags(flags, MOELORA_DETOKENIZE_SKIP_SPECIAL);
    if (num_tokens > 0) {
      required(tokens, "tokens");
    }
    const std::string text = found->decode(tokens, num_tokens, (flags & MOELORA_DETOKENIZE_SKIP_SPECIAL) != 0);
    return copy_out(text.data(), text.size(), buf, cap, n);
  });
}

moelora_status moelora_token_text(moelora_tokenizer* tokenizer, int32_t token, char* buf, size_t cap, size_t* n,
                                  moelora_error* err) {
  return guard(err, [&] {
    const auto found = find_tokenizer(tokenizer);
    required(n, "n");
    const std::string text = found->token_bytes(token);
    return copy_out(text.data(), text.size(), buf, cap, n);
  });
}
