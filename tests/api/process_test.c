/* SPDX-License-Identifier: Apache-2.0 */
/* What a process around the library must be able to do: fork, exit while streams run, keep its signal handling,
 * unload, bring its own allocator, call on a small stack. One mode a run; 0 = good, the reason goes to stderr.
 * Everything comes through dlopen, as bindings load the library. Usage: process_test MODE LIBRARY MODEL_DIR */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <moelora.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
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

static const char *library_path, *model_dir;
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

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void wait_for_child(pid_t child, int wanted) {
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != wanted) FAIL("the child ended with %#x", (unsigned)status);
}

/* Before the first engine a child may do everything; after it nothing, at once, and the parent does not notice. */
static void test_fork(void) {
  int32_t before[16], after[16];
  moelora_engine *engine;
  moelora_queue *queue = NULL;
  moelora_request request;
  pid_t child;
  int i, done = 0;
  load();
  CHECK(moelora_version_() == MOELORA_VERSION);
  child = fork();
  if (child == 0) {
    int32_t tokens[16];
    moelora_engine *own = open_engine();
    answer(own, tokens);
    moelora_engine_release_(own);
    _exit(7);
  }
  wait_for_child(child, 7);

  engine = open_engine();
  CHECK(moelora_queue_create_(&queue, NULL) == MOELORA_OK);
  answer(engine, before);
  request = start(engine, 400);
  for (i = 0; i < 20; i++) { /* at different moments of the engine's work */
    child = fork();
    if (child == 0) {
      const double begin = seconds();
      int32_t token;
      size_t n;
      moelora_event event;
      moelora_config *config;
      moelora_engine *own;
      moelora_error err;
      alarm(5);
      moelora_struct_init_(&err, sizeof err);
      CHECK(moelora_engine_health_(engine, &err) == MOELORA_E_FORKED);
      CHECK(strstr(err.message, "fork") != NULL);
      CHECK(moelora_request_read_(engine, request, -1, &token, 1, NULL, 0, NULL, NULL) == MOELORA_E_FORKED);
      CHECK(moelora_generate_tokens_(engine, 0, 1.0f, prompt, 7, NULL, &token, 1, &n, NULL, NULL) == MOELORA_E_FORKED);
      CHECK(moelora_queue_wait_(queue, -1, &event, 1, &n, NULL) == MOELORA_E_FORKED);
      CHECK(moelora_config_create_(MOELORA_ABI_VERSION, &config, NULL) == MOELORA_E_FORKED);
      CHECK(moelora_engine_create_(NULL, "x", 1, &own, NULL) == MOELORA_E_FORKED);
      CHECK(moelora_device_count_(&token, NULL) == MOELORA_E_FORKED);
      moelora_engine_release_(engine);
      moelora_queue_destroy_(queue);
      CHECK(moelora_version_() == MOELORA_VERSION);
      CHECK(strcmp(moelora_status_name_(MOELORA_E_FORKED), "E_FORKED") == 0);
      CHECK(seconds() - begin < 1.0);
      _exit(9);
    }
    wait_for_child(child, 9);
  }
  child = fork();
  if (child == 0) {
    execl("/bin/true", "true", (char *)NULL);
    _exit(1);
  }
  wait_for_child(child, 0);
  while (!done) {
    int32_t token;
    const moelora_status status = moelora_request_read_(engine, request, 60000, &token, 1, NULL, 0, NULL, NULL);
    CHECK(status == MOELORA_OK || status == MOELORA_END);
    done = status == MOELORA_END;
  }
  answer(engine, after);
  CHECK(memcmp(before, after, sizeof before) == 0);
  moelora_engine_release_(engine);
  moelora_queue_destroy_(queue);
}

static volatile sig_atomic_t signals_seen = 0;
static void on_signal(int number) {
  (void)number;
  signals_seen++;
}

/* Library threads block every signal; the host's handlers, mask and calls stay as they were. */
static void test_signals(void) {
  struct sigaction before[NSIG], after;
  struct sigaction action;
  sigset_t mask_before, mask_after;
  moelora_engine *engine;
  int32_t tokens[16];
  DIR *tasks;
  struct dirent *entry;
  int number, threads = 0, i;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGUSR1, &action, NULL);
  sigaction(SIGURG, &action, NULL); /* no SA_RESTART: calls are interrupted */
  sigemptyset(&mask_before);
  sigaddset(&mask_before, SIGUSR2);
  pthread_sigmask(SIG_SETMASK, &mask_before, NULL);
  for (number = 1; number < NSIG; number++) sigaction(number, NULL, &before[number]);

  load();
  engine = open_engine();
  answer(engine, tokens);
  pthread_sigmask(SIG_SETMASK, NULL, &mask_after);
  CHECK(sigismember(&mask_after, SIGUSR2) == 1 && sigismember(&mask_after, SIGUSR1) == 0);
  for (number = 1; number < NSIG; number++) {
    memset(&after, 0, sizeof after);
    if (sigaction(number, NULL, &after) != 0) continue;
    if (after.sa_handler != before[number].sa_handler) FAIL("the handler of signal %d changed", number);
  }

  tasks = opendir("/proc/self/task");
  CHECK(tasks != NULL);
  while ((entry = readdir(tasks)) != NULL) {
    char path[300], line[256];
    unsigned long long blocked = 0;
    FILE *file;
    if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid()) continue;
    snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
    file = fopen(path, "r");
    if (file == NULL) continue;
    while (fgets(line, sizeof line, file) != NULL) {
      if (strncmp(line, "SigBlk:", 7) == 0) blocked = strtoull(line + 7, NULL, 16);
    }
    fclose(file);
    for (number = 1; number < 32; number++) {
      if (number == SIGKILL || number == SIGSTOP) continue;
      if ((blocked >> (number - 1) & 1) == 0) FAIL("thread %s takes signal %d", entry->d_name, number);
    }
    threads++;
  }
  closedir(tasks);
  CHECK(threads >= 2); /* the engine's and a worker */

  /* A storm while a call waits: no failed call. */
  for (i = 0; i < 5; i++) {
    const pid_t host = getpid();
    const pid_t child = fork();
    if (child == 0) {
      int k;
      for (k = 0; k < 2000; k++) kill(host, k % 2 ? SIGURG : SIGUSR1);
      _exit(0);
    }
    answer(engine, tokens);
    while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
    }
  }
  CHECK(signals_seen > 0);
  moelora_engine_release_(engine);
}

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
