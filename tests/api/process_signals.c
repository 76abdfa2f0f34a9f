/* SPDX-License-Identifier: Apache-2.0 */
/* Modes of process_test: fork and signals. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "process_host.h"

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
void test_fork(void) {
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
void test_signals(void) {
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
