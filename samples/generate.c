/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest complete program: opens a model folder, loads an adapter if one is named, answers a prompt of token
 * ids and prints the answer's ids. The head of moelora.h shows one like it; the build and a test keep it true.
 * Usage: generate MODEL_DIR [ADAPTER_DIR] */
#include <moelora.h>
#include <stdio.h>

static moelora_error err;
#define CHECK(call)                          \
  if ((call) < 0) {                          \
    fprintf(stderr, "%s\n", err.message);    \
    return 1;                                \
  }

int main(int argc, char **argv) {
  static const int32_t prompt[] = {1, 17, 42, 7};
  int32_t tokens[64];
  size_t i, n = 0;
  moelora_config *config;
  moelora_engine *engine;
  moelora_adapter adapter = 0; /* 0: the base model */
  moelora_sampling sampling;
  if (argc < 2) return 2;
  moelora_error_init(&err);
  moelora_sampling_init(&sampling);
  sampling.max_tokens = 64;
  CHECK(moelora_config_create(MOELORA_ABI_VERSION, &config, &err));
  CHECK(moelora_engine_create(config, argv[1], MOELORA_STRLEN, &engine, &err));
  moelora_config_destroy(config);
  if (argc > 2) CHECK(moelora_adapter_load_dir(engine, "mine", MOELORA_STRLEN, argv[2], MOELORA_STRLEN, 0, &adapter,
                                               &err));
  CHECK(moelora_generate_tokens(engine, adapter, 1.0f, prompt, 4, &sampling, tokens, 64, &n, NULL, &err));
  for (i = 0; i < n; i++) printf("%d ", (int)tokens[i]);
  printf("\n");
  moelora_engine_release(engine);
  return 0;
}
