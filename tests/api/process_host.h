/* SPDX-License-Identifier: Apache-2.0 */
/* A host that gets the library by dlopen, as bindings do: loading it, an engine on the model, one answer. Included by
 * the files of process_test, each of which is a program part with its own copy. */
#ifndef MOELORA_TESTS_API_PROCESS_HOST_H_
#define MOELORA_TESTS_API_PROCESS_HOST_H_

#include <dlfcn.h>
#include <moelora.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FAIL(...)                                   \
  do {                                              \
    fprintf(stderr, "line %d: ", __LINE__);         \
    fprintf(stderr, __VA_ARGS__);                   \
    fprintf(stderr, "\n");                          \
    exit(1);                                        \
  } while (0)
#define CHECK(condition) \
  if (!(condition)) FAIL("%s", #condition)

/* The functions used, resolved by name. */
#define FUNCTIONS(X)                                                                                              \
  X(moelora_struct_init) X(moelora_sampling_init_sized) X(moelora_config_create) X(moelora_config_destroy)        \
  X(moelora_config_set_int) X(moelora_engine_create) X(moelora_engine_release) X(moelora_engine_health)           \
  X(moelora_engine_drain) X(moelora_request_create) X(moelora_request_set_tokens) X(moelora_request_set_sampling) \
  X(moelora_request_submit) X(moelora_request_read) X(moelora_request_close) X(moelora_generate_tokens)           \
  X(moelora_version) X(moelora_status_name) X(moelora_set_allocator) X(moelora_queue_create)                      \
  X(moelora_queue_destroy) X(moelora_queue_wait) X(moelora_device_count) X(moelora_log_read)
#define DECLARE(name) static __typeof__(&name) name##_;
FUNCTIONS(DECLARE)

extern const char *library_path, *model_dir;
static const int32_t prompt[] = {52, 20, 29, 93, 163, 281, 246};

static void *load(void) {
  void *library = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) FAIL("%s", dlerror());
#define RESOLVE(name)                                                   \
  *(void **)&name##_ = dlsym(library, #name);                           \
  if (name##_ == NULL) FAIL("no %s", #name);
  FUNCTIONS(RESOLVE)
  return library;
}

static moelora_engine *open_engine(void) {
  moelora_config *config = NULL;
  moelora_engine *engine = NULL;
  moelora_error err;
  moelora_struct_init_(&err, sizeof err);
  CHECK(moelora_config_create_(MOELORA_ABI_VERSION, &config, &err) == MOELORA_OK);
  CHECK(moelora_config_set_int_(config, "num_threads", MOELORA_STRLEN, 2, &err) == MOELORA_OK);
  CHECK(moelora_config_set_int_(config, "device_memory_bytes", MOELORA_STRLEN, 32 << 20, &err) == MOELORA_OK);
  CHECK(moelora_config_set_int_(config, "max_batch_tokens", MOELORA_STRLEN, 64, &err) == MOELORA_OK);
  CHECK(moelora_config_set_int_(config, "max_num_sequences", MOELORA_STRLEN, 8, &err) == MOELORA_OK);
  if (moelora_engine_create_(config, model_dir, MOELORA_STRLEN, &engine, &err) != MOELORA_OK) FAIL("%s", err.message);
  moelora_config_destroy_(config);
  return engine;
}

static moelora_sampling sampling_of(int32_t max_tokens) {
  moelora_sampling sampling;
  moelora_sampling_init_sized_(&sampling, sizeof sampling);
  sampling.max_tokens = max_tokens;
  sampling.flags = MOELORA_SAMPLING_IGNORE_EOS;
  return sampling;
}

static moelora_request start(moelora_engine *engine, int32_t max_tokens) {
  moelora_request request = 0;
  moelora_sampling sampling = sampling_of(max_tokens);
  CHECK(moelora_request_create_(engine, &request, NULL) == MOELORA_OK);
  CHECK(moelora_request_set_tokens_(engine, request, prompt, 7, NULL) == MOELORA_OK);
  CHECK(moelora_request_set_sampling_(engine, request, &sampling, NULL) == MOELORA_OK);
  CHECK(moelora_request_submit_(engine, request, NULL) == MOELORA_OK);
  return request;
}

static void answer(moelora_engine *engine, int32_t tokens[16]) {
  size_t n = 0;
  moelora_sampling sampling = sampling_of(16);
  moelora_error err;
  moelora_struct_init_(&err, sizeof err);
  if (moelora_generate_tokens_(engine, 0, 1.0f, prompt, 7, &sampling, tokens, 16, &n, NULL, &err) != MOELORA_OK)
    FAIL("%s", err.message);
  CHECK(n == 16);
}

void test_fork(void);
void test_signals(void);

#endif /* MOELORA_TESTS_API_PROCESS_HOST_H_ */
