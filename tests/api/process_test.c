/* SPDX-License-Identifier: Apache-2.0 */
/* What a process around the library must be able to do: fork, exit while streams run, keep its signal handling,
 * unload, bring its own allocator, call on a small stack. One mode a run; 0 = good, the reason goes to stderr.
 * Everything comes through dlopen, as bindings load the library. Usage: process_test MODE LIBRARY MODEL_DIR */
#define _GNU_SOURCE
#include "process_host.h"

const char *library_path, *model_dir;

/* Exit from main while streams run, with nothing released: the exit code is the host's, nothing on stderr. */
static void test_exit(void) {
  int i;
  moelora_engine *engine;
  load();
  engine = open_engine();
  for (i = 0; i < 8; i++) start(engine, 480);
  poll(NULL, 0, 20);
}

static void *exit_from_thread(void *unused) {
  (void)unused;
  poll(NULL, 0, 20);
  exit(0);
}

/* The same with exit() called on another thread, while main waits inside the library. */
static void test_exit_thread(void) {
  moelora_engine *engine;
  moelora_queue *queue = NULL;
  moelora_event event;
  size_t n;
  pthread_t thread;
  load();
  engine = open_engine();
  CHECK(moelora_queue_create_(&queue, NULL) == MOELORA_OK);
  start(engine, 480);
  pthread_create(&thread, NULL, exit_from_thread, NULL);
  moelora_queue_wait_(queue, -1, &event, 1, &n, NULL);
  FAIL("queue_wait returned");
}

static void *use_once(void *unused) {
  void *library = load();
  int32_t tokens[16];
  moelora_engine *engine = open_engine();
  (void)unused;
  answer(engine, tokens);
  moelora_engine_release_(engine);
  CHECK(dlclose(library) == 0);
  return NULL; /* the thread ends after the unload: its exit hooks must still be there */
}

static void test_unload(void) {
  int i;
  for (i = 0; i < 100; i++) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use_once, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
  }
}

static long allocated = 0;
static size_t allocated_bytes = 0;
static void *count_allocate(void *user, size_t size, size_t alignment) {
  void *memory = NULL;
  if (alignment < sizeof(void *)) alignment = sizeof(void *);
  if (posix_memalign(&memory, alignment, size) != 0) return NULL;
  __atomic_add_fetch((long *)user, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&allocated_bytes, size, __ATOMIC_SEQ_CST);
  return memory;
}
static void count_deallocate(void *user, void *memory, size_t size, size_t alignment) {
  (void)size, (void)alignment;
  __atomic_sub_fetch((long *)user, 1, __ATOMIC_SEQ_CST);
  free(memory);
}

static void test_allocator(void) {
  moelora_allocator allocator;
  moelora_error err;
  moelora_engine *engine;
  int32_t tokens[16];
  load();
  moelora_struct_init_(&err, sizeof err);
  moelora_struct_init_(&allocator, sizeof allocator);
  CHECK(moelora_set_allocator_(NULL, &err) == MOELORA_E_INVALID);
  CHECK(moelora_set_allocator_(&allocator, &err) == MOELORA_E_INVALID);
  allocator.allocate = count_allocate;
  allocator.deallocate = count_deallocate;
  allocator.user = &allocated;
  allocator.struct_size = 4;
  CHECK(moelora_set_allocator_(&allocator, &err) == MOELORA_E_STRUCT_SIZE);
  allocator.struct_size = sizeof allocator;
  CHECK(moelora_set_allocator_(&allocator, &err) == MOELORA_OK);
  CHECK(moelora_set_allocator_(&allocator, &err) == MOELORA_E_BUSY);
  engine = open_engine();
  answer(engine, tokens);
  CHECK(allocated_bytes > 0);
  moelora_engine_release_(engine);
  CHECK(allocated == 0);
}

/* Loading and using the library does not change whose malloc and free the process calls. */
static void test_symbols(void) {
  Dl_info before, after;
  moelora_engine *engine;
  int32_t tokens[16];
  CHECK(dladdr(dlsym(RTLD_DEFAULT, "malloc"), &before) != 0);
  load();
  engine = open_engine();
  answer(engine, tokens);
  CHECK(dladdr(dlsym(RTLD_DEFAULT, "malloc"), &after) != 0);
  CHECK(strcmp(before.dli_fname, after.dli_fname) == 0);
  CHECK(dlsym(RTLD_DEFAULT, "mi_malloc") == NULL);
  CHECK(dlsym(RTLD_DEFAULT, "moelora_version") == NULL);
  moelora_engine_release_(engine);
}

static void *on_small_stack(void *result) {
  moelora_engine *engine = open_engine();
  int32_t tokens[16];
  moelora_config *config = NULL;
  answer(engine, tokens);
  moelora_engine_release_(engine);
  CHECK(moelora_config_create_(MOELORA_ABI_VERSION, &config, NULL) == MOELORA_OK);
  CHECK(moelora_config_set_int_(config, "num_thread", MOELORA_STRLEN, 2, NULL) == MOELORA_E_INVALID);
  moelora_config_destroy_(config);
  *(int *)result = 1;
  return NULL;
}

static void test_small_stack(void) {
  pthread_attr_t attributes;
  pthread_t thread;
  int done = 0;
  load();
  pthread_attr_init(&attributes);
  CHECK(pthread_attr_setstacksize(&attributes, 64 * 1024) == 0);
  CHECK(pthread_create(&thread, &attributes, on_small_stack, &done) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(done == 1);
}

static void *read_for_ever(void *engine) {
  int32_t token;
  const moelora_request request = start((moelora_engine *)engine, 1);
  while (moelora_request_read_((moelora_engine *)engine, request, -1, &token, 1, NULL, 0, NULL, NULL) == MOELORA_OK) {
  }
  moelora_log_read_(-1, NULL, 0, NULL, NULL, NULL); /* refused: n is NULL */
  for (;;) {
    size_t n;
    moelora_event event;
    moelora_queue *queue = NULL;
    moelora_queue_create_(&queue, NULL);
    moelora_queue_wait_(queue, -1, &event, 1, &n, NULL);
  }
  return NULL;
}

/* A host thread that is cancelled while it waits in the library goes, and the engine goes on. */
static void test_cancel_thread(void) {
  pthread_t thread;
  void *result = NULL;
  int32_t tokens[16];
  moelora_engine *engine;
  load();
  engine = open_engine();
  CHECK(pthread_create(&thread, NULL, read_for_ever, engine) == 0);
  poll(NULL, 0, 100);
  CHECK(pthread_cancel(thread) == 0);
  CHECK(pthread_join(thread, &result) == 0);
  CHECK(result == PTHREAD_CANCELED);
  answer(engine, tokens);
  moelora_engine_release_(engine);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*run)(void);
  } modes[] = {{"fork", test_fork},         {"signals", test_signals},         {"exit", test_exit},
               {"exit_thread", test_exit_thread}, {"unload", test_unload},     {"allocator", test_allocator},
               {"symbols", test_symbols},   {"small_stack", test_small_stack}, {"cancel_thread", test_cancel_thread}};
  size_t i;
  if (argc != 4) return 2;
  library_path = argv[2];
  model_dir = argv[3];
  for (i = 0; i < sizeof modes / sizeof modes[0]; i++) {
    if (strcmp(argv[1], modes[i].name) == 0) {
      modes[i].run();
      return 0; /* from main: with exit mode, everything still runs */
    }
  }
  return 2;
}
