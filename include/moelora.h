/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moelora.h
 * moelora: many LoRA adapters at once on one frozen language model, inside your process. This header is the whole
 * stable API and its manual; what is not here is not API. It compiles as C89 and C++98 and is read by the Go, Rust,
 * Java and Python bindings. A complete program:
 *
 *     #include <stdio.h>
 *     #include <moelora.h>
 *
 *     static moelora_error err;
 *     #define CHECK(call) if ((call) < 0) { fprintf(stderr, "%s\n", err.message); return 1; }
 *
 *     int main(int argc, char **argv) {
 *       static const int32_t prompt[] = {1, 17, 42, 7};
 *       int32_t tokens[64];
 *       size_t i, n = 0;
 *       moelora_config *config;
 *       moelora_engine *engine;
 *       moelora_adapter adapter = 0;
 *       moelora_sampling sampling;
 *       if (argc < 2) return 2;
 *       moelora_error_init(&err);
 *       moelora_sampling_init(&sampling);
 *       sampling.max_tokens = 64;
 *       CHECK(moelora_config_create(MOELORA_ABI_VERSION, &config, &err));
 *       CHECK(moelora_config_set_int(config, "max_adapters_resident", MOELORA_STRLEN, 8, &err));
 *       CHECK(moelora_engine_create(config, argv[1], MOELORA_STRLEN, &engine, &err));
 *       moelora_config_destroy(config);
 *       if (argc > 2) CHECK(moelora_adapter_load_dir(engine, "mine", MOELORA_STRLEN, argv[2], MOELORA_STRLEN, 0,
 *                                                    &adapter, &err));
 *       CHECK(moelora_generate_tokens(engine, adapter, 1.0f, prompt, 4, &sampling, tokens, 64, &n, NULL, &err));
 *       for (i = 0; i < n; i++) printf("%d ", (int)tokens[i]);
 *       printf("\n");
 *       moelora_engine_release(engine);
 *       return 0;
 *     }
 *
 * The life of a host: (allocator, log) -> config -> (plan) -> engine -> adapters -> queue -> loop { submit with a tag,
 * wait, read until END, result, close } -> drain -> release. Nothing must be called at exit.
 *
 * **Status and errors.** Every function that can fail returns a moelora_status: 0 is success, positive is not an
 * error (TIMEOUT, END, ALREADY_DONE, MORE), negative is an error. Details go to the caller-owned moelora_error that
 * is passed last; it may be NULL, and success leaves it untouched. There is no last-error state anywhere. Outputs are
 * written only when the status is >= 0. Any function may return E_INVALID (NULL or bad argument), E_HANDLE (stale,
 * closed or foreign handle or pointer), E_STRUCT_SIZE, E_NOMEM, E_FORKED, E_REENTRANT or E_INTERNAL; the *Errors*
 * lines list what comes on top.
 *
 * **Structs.** Call the init macro first: it sets struct_size, and a struct whose size is 0 or absurd is refused.
 * The library reads and writes min(your size, its size), so a host and a library of different minor versions work
 * together. Fields are only ever appended. Elements of arrays (events, logprobs) have no struct_size and never grow.
 *
 * **Strings** are bytes with a length, UTF-8 where they are text, NUL allowed in text; pass MOELORA_STRLEN for
 * NUL-terminated ones. NULL with length 0 is the empty string. *Two-step outputs* (buf, cap, n): n gets the needed
 * count; the status is MORE, and nothing is copied, if cap is smaller.
 *
 * **Ownership.** What you create you destroy; nothing else is yours. No memory crosses the boundary: inputs are
 * *borrowed for the call* (copied where kept), outputs go to buffers that the *caller owns*, static texts live for
 * ever. Adapters, sessions and requests are 64-bit handles, 0 means none (for an adapter: the base model); handles
 * are never reused within a process. Freeing twice or using after freeing gives E_HANDLE, never a crash. Void
 * functions ignore NULL and stale pointers.
 *
 * **Threads.** Any function may be called from any thread at any time, except that one config builder and one
 * request still being built belong to one thread at a time. Functions marked *blocks* wait; all others return without
 * waiting for the device. The library starts its own threads (all signals blocked), never touches signal handlers,
 * locale, working directory, stdout or stderr of the host, and does no device work on the host's threads.
 *
 * **Fork.** Before the first engine everything may be used in a child. Once a process has created an engine, every
 * call in a forked child returns E_FORKED; the parent goes on, and exec in the child is fine.
 *
 * **Time** is in milliseconds of the monotonic clock. Timeouts: 0 polls, negative waits for ever.
 *
 * Words: *engine* one opened model on its device; *adapter* one LoRA for it; *request* one generation; *session* a
 * conversation whose attention state (KV) is kept; *queue* where completions of many requests arrive; *token* an
 * int32 id below the vocabulary size. Each entry names the version that it exists since.
 */
#ifndef MOELORA_H_
#define MOELORA_H_

#include <stddef.h>
#include <stdint.h>

#ifndef MOELORA_API
#if defined(__GNUC__) || defined(__clang__)
#define MOELORA_API __attribute__((visibility("default")))
#else
#define MOELORA_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------- version, status */

#define MOELORA_VERSION_MAJOR 0
#define MOELORA_VERSION_MINOR 1
#define MOELORA_VERSION_PATCH 0
#define MOELORA_VERSION (MOELORA_VERSION_MAJOR * 10000 + MOELORA_VERSION_MINOR * 100 + MOELORA_VERSION_PATCH)
/** Given to moelora_config_create. Changes only when binaries built against this header would break. */
#define MOELORA_ABI_VERSION 1u
/** As a length: the string is NUL-terminated. */
#define MOELORA_STRLEN ((size_t)-1)

typedef int32_t moelora_status;
/** Numbers are frozen. since 0.1 */
enum {
  MOELORA_OK = 0,
  MOELORA_TIMEOUT = 1,               /* nothing happened in the given time */
  MOELORA_END = 2,                   /* the request is finished and all of it was read */
  MOELORA_ALREADY_DONE = 3,          /* cancel: it had finished */
  MOELORA_MORE = 4,                  /* the buffer is too small; the needed count was returned */
  MOELORA_E_INVALID = -1,            /* argument, token id, option value */
  MOELORA_E_HANDLE = -2,             /* stale, closed, of another type or engine */
  MOELORA_E_STRUCT_SIZE = -3,        /* struct not initialised by its macro */
  MOELORA_E_ABI = -4,                /* host and library do not fit; the message names both versions */
  MOELORA_E_NOT_FOUND = -5,
  MOELORA_E_EXISTS = -6,             /* the name is taken */
  MOELORA_E_BUSY = -7,               /* in use: session with a running request, second reader, adapter in flight */
  MOELORA_E_CLOSED = -8,             /* closed while waiting, or draining */
  MOELORA_E_CANCELLED = -9,
  MOELORA_E_DEADLINE = -10,
  MOELORA_E_OVERLOADED = -11,        /* queue of requests full; retriable */
  MOELORA_E_NOMEM = -12,             /* host memory */
  MOELORA_E_DEVICE_NOMEM = -13,      /* over the engine's memory budget */
  MOELORA_E_CONTEXT_LENGTH = -14,    /* prompt and max_tokens exceed the context */
  MOELORA_E_UNSUPPORTED = -15,       /* model, dtype or feature; refused by name */
  MOELORA_E_CORRUPT = -16,           /* a file contradicts itself or its format */
  MOELORA_E_IO = -17,
  MOELORA_E_ADAPTER_MISMATCH = -18,  /* shape, rank, target or base of an adapter */
  MOELORA_E_CUDA = -19,
  MOELORA_E_DEVICE_LOST = -20,       /* fatal for the engine */
  MOELORA_E_NO_DEVICE = -21,
  MOELORA_E_FORKED = -22,            /* called in a child of the process that created the engine */
  MOELORA_E_REENTRANT = -23,         /* called from inside the log callback */
  MOELORA_E_OVERRUN = -24,           /* nobody read, and the option overrun = fail */
  MOELORA_E_INTERNAL = -25           /* a bug of the library */
};

/** Flags of moelora_error. since 0.1 */
enum {
  MOELORA_ERROR_RETRIABLE = 1,     /* the same call may succeed later */
  MOELORA_ERROR_FATAL_REQUEST = 2, /* the request ended */
  MOELORA_ERROR_FATAL_ENGINE = 4   /* the engine is lost; release it */
};

/** What went wrong. Caller owns; may be reused. The message is UTF-8, NUL-terminated. since 0.1 */
typedef struct moelora_error {
  uint32_t struct_size;
  int32_t status;
  int32_t cuda_code; /* cudaError_t of E_CUDA and E_DEVICE_LOST, else 0 */
  uint32_t flags;    /* MOELORA_ERROR_* */
  char message[496];
} moelora_error;
#define moelora_error_init(p) moelora_struct_init((p), sizeof *(p))

/** MOELORA_VERSION of the library in use. since 0.1. Threads: any, also in a forked child. */
MOELORA_API uint32_t moelora_version(void);
/** "0.1.0". Static text. since 0.1. Threads: any, also in a forked child. */
MOELORA_API const char *moelora_version_string(void);
/** MOELORA_ABI_VERSION of the library. since 0.1. Threads: any, also in a forked child. */
MOELORA_API uint32_t moelora_abi_version(void);
/** Version, compiler, backends. Static text. since 0.1. Threads: any, also in a forked child. */
MOELORA_API const char *moelora_build_info(void);
/** "E_INVALID" and so on; "unknown" for other numbers. Static text. since 0.1. Threads: any, also in a child. */
MOELORA_API const char *moelora_status_name(moelora_status status);
/** Zeroes a struct and sets its struct_size; what the init macros of output structs call. since 0.1. Threads: any. */
MOELORA_API void moelora_struct_init(void *object, size_t size);

/* ------------------------------------------------------------------------------------------- process-wide hooks */

/** Where the library takes host memory for its large objects (adapters, caches). The one public struct with
    pointers. allocate returns NULL when there is no memory; alignment is a power of two. Both functions may be called
    from any thread and must not call the library. since 0.1 */
typedef struct moelora_allocator {
  uint32_t struct_size;
  uint32_t reserved;
  void *(*allocate)(void *user, size_t size, size_t alignment);
  void (*deallocate)(void *user, void *memory, size_t size, size_t alignment);
  void *user;
} moelora_allocator;
#define moelora_allocator_init(p) moelora_struct_init((p), sizeof *(p))

/** Sets the allocator, once, before anything else was created. The C++ library's own small objects and the device
    driver do not go through it. since 0.1.
    Errors: E_BUSY if the library has taken memory already. Ownership: copied; `user` stays the caller's and must
    live as long as the process. Threads: any. */
MOELORA_API moelora_status moelora_set_allocator(const moelora_allocator *allocator, moelora_error *err);

enum {
  MOELORA_LOG_NONE = 0,
  MOELORA_LOG_ERROR = 1,
  MOELORA_LOG_WARNING = 2,
  MOELORA_LOG_INFO = 3,
  MOELORA_LOG_DEBUG = 4
};
/** Called on any library or host thread; the text is NUL-terminated and valid during the callback. Calls into the
    library from inside give E_REENTRANT. since 0.1 */
typedef void (*moelora_log_fn)(void *user, int32_t level, const char *text);

/** Log messages up to `level` go to `fn` (NULL: only to moelora_log_read). No call of the previous function is in
    flight after this returns. Silent by default. since 0.1.
    Errors: none of its own. Ownership: `user` must stay valid until the next log_set. Threads: any; blocks while the
    previous function is running. */
MOELORA_API moelora_status moelora_log_set(int32_t level, moelora_log_fn fn, void *user, moelora_error *err);
/** The pull alternative for bindings: takes the oldest of at most 1024 kept messages (two-step, without the NUL).
    A message stays when the status is MORE. since 0.1.
    Errors: TIMEOUT if there is none. Ownership: caller owns buf. Threads: any; blocks up to timeout_ms. */
MOELORA_API moelora_status moelora_log_read(int32_t timeout_ms, char *buf, size_t cap, size_t *n, int32_t *level,
                                            moelora_error *err);

/* ----------------------------------------------------------------------------------------------------- devices */

enum { MOELORA_DEVICE_CPU = 0, MOELORA_DEVICE_CUDA = 1 };
/** since 0.1 */
typedef struct moelora_device_info {
  uint32_t struct_size;
  int32_t kind;                /* MOELORA_DEVICE_* */
  uint64_t memory_bytes;
  uint64_t memory_free_bytes;
  int32_t num_units;           /* CPU: cores that this process may use; CUDA: multiprocessors */
  int32_t compute_capability;  /* CUDA: major * 10 + minor; CPU: 0 */
  char name[96];
} moelora_device_info;
#define moelora_device_info_init(p) moelora_struct_init((p), sizeof *(p))

/** Number of devices; device 0 is the CPU. The first function that may touch the CUDA driver. since 0.1.
    Errors: none of its own. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_device_count(int32_t *count, moelora_error *err);
/** since 0.1. Errors: E_NO_DEVICE for an index that does not exist. Ownership: caller owns info. Threads: any. */
MOELORA_API moelora_status moelora_device_info_get(int32_t device, moelora_device_info *info, moelora_error *err);

/* ------------------------------------------------------------------------------------------------ configuration */

/** A builder of engine options. The keys, with type, default and help, are enumerable; they are stable names. */
typedef struct moelora_config moelora_config;
enum { MOELORA_TYPE_STRING = 0, MOELORA_TYPE_INT = 1, MOELORA_TYPE_NUMBER = 2, MOELORA_TYPE_BOOL = 3 };

/** Starts a configuration of defaults. Pass MOELORA_ABI_VERSION. since 0.1.
    Errors: E_ABI naming both versions. Ownership: caller owns *out, moelora_config_destroy. Threads: any. */
MOELORA_API moelora_status moelora_config_create(uint32_t abi_version, moelora_config **out, moelora_error *err);
/** since 0.1. Errors: none. Ownership: ends the caller's; an engine made from it is independent. Threads: any. */
MOELORA_API void moelora_config_destroy(moelora_config *config);
/** Sets an option; a string is also accepted for options of other types ("true", "0.5"). since 0.1.
    Errors: E_INVALID naming the key and its range; an unknown key names near matches. Ownership: copied. Threads:
    one at a time for a config. */
MOELORA_API moelora_status moelora_config_set_str(moelora_config *config, const char *key, size_t key_len,
                                                  const char *value, size_t value_len, moelora_error *err);
/** As moelora_config_set_str; booleans take 0 and 1. since 0.1 */
MOELORA_API moelora_status moelora_config_set_int(moelora_config *config, const char *key, size_t key_len,
                                                  int64_t value, moelora_error *err);
/** As moelora_config_set_str. since 0.1 */
MOELORA_API moelora_status moelora_config_set_num(moelora_config *config, const char *key, size_t key_len,
                                                  double value, moelora_error *err);
/** Sets every key of a TOML file; all or nothing. since 0.1.
    Errors: E_IO; E_CORRUPT with the line of a syntax error; E_INVALID with line and key. Ownership: borrowed for the
    call. Threads: one at a time for a config. */
MOELORA_API moelora_status moelora_config_load_toml(moelora_config *config, const char *path, size_t path_len,
                                                    moelora_error *err);
/** The same from memory. since 0.1 */
MOELORA_API moelora_status moelora_config_load_toml_mem(moelora_config *config, const char *text, size_t text_len,
                                                        moelora_error *err);
/** Number of option keys. since 0.1. Threads: any. */
MOELORA_API size_t moelora_config_key_count(void);
/** Name, type (MOELORA_TYPE_*), default and help of key `index`; each pointer may be NULL. since 0.1.
    Errors: E_NOT_FOUND past the end. Ownership: static texts. Threads: any. */
MOELORA_API moelora_status moelora_config_key_at(size_t index, const char **name, int32_t *type,
                                                 const char **default_text, const char **help, moelora_error *err);

/** What an engine would take, from config.json alone. Bytes. since 0.1 */
typedef struct moelora_memory_plan {
  uint32_t struct_size;
  int32_t fits;                    /* 1: weights, workspace and pool fit in what is free now, and the pool holds
                                      the adapters and one sequence of full context */
  uint64_t weight_bytes;
  uint64_t workspace_bytes;
  uint64_t pool_bytes;             /* shared by KV and adapters */
  uint64_t kv_bytes_per_token;
  uint64_t kv_bytes_full_context;  /* one sequence of max_context_tokens */
  uint64_t adapter_bytes;          /* one adapter of the rank asked, bf16, on q, k, v, o and on all experts or MLPs */
  uint64_t adapters_bytes;         /* of all adapters asked */
  uint64_t total_bytes;            /* weights + workspace + pool */
  uint64_t available_bytes;        /* free on the device now */
  int64_t kv_tokens_with_adapters; /* KV tokens that the pool still holds beside the adapters */
  int64_t adapters_fit;            /* adapters of that rank that the pool holds beside one full context */
  int32_t max_context_tokens;
  int32_t lora_rank;
} moelora_memory_plan;
#define moelora_memory_plan_init(p) moelora_struct_init((p), sizeof *(p))

/** Plans memory for `num_adapters` adapters of `lora_rank`. Opens no weights, needs no GPU. since 0.1.
    Errors: as moelora_engine_create has for config.json. Ownership: caller owns plan. Threads: any. */
MOELORA_API moelora_status moelora_plan_memory(const moelora_config *config, const char *model_dir,
                                               size_t model_dir_len, int32_t num_adapters, int32_t lora_rank,
                                               moelora_memory_plan *plan, moelora_error *err);

/* ------------------------------------------------------------------------------------------------------- engine */

typedef struct moelora_engine moelora_engine; /* opaque, reference-counted */
typedef uint64_t moelora_adapter;             /* 0 = the base model */
typedef uint64_t moelora_session;
typedef uint64_t moelora_request;
typedef struct moelora_queue moelora_queue;
typedef struct moelora_tokenizer moelora_tokenizer;

/** What you got, which may differ from what you asked for. Texts are NUL-terminated. since 0.1 */
typedef struct moelora_engine_info {
  uint32_t struct_size;
  int32_t num_layers;
  int32_t num_experts;        /* 0 = dense model */
  int32_t num_experts_active; /* a token and layer */
  int32_t hidden_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t intermediate_size;  /* of an expert; dense models: of the MLP */
  int32_t vocab_size;
  int32_t max_context_tokens;
  int32_t max_num_sequences;
  int32_t max_batch_tokens;
  int32_t max_adapters_resident;
  int32_t max_lora_rank;
  int32_t kv_block_tokens;
  int32_t num_threads;
  int32_t device_kind;        /* MOELORA_DEVICE_* */
  int32_t bos_token;          /* -1 = none */
  int32_t eos_token;          /* the first; -1 = none */
  uint64_t weight_bytes;
  uint64_t pool_bytes;
  uint64_t page_bytes;
  uint64_t workspace_bytes;
  char architecture[64];      /* as config.json names it */
  char dtype[16];             /* of the weights: BF16, F16, F32 */
  char device_name[96];
} moelora_engine_info;
#define moelora_engine_info_init(p) moelora_struct_init((p), sizeof *(p))

/** Opens a model folder (config.json, safetensors) with the options of `config`. since 0.1.
    Errors: E_IO, E_CORRUPT, E_UNSUPPORTED naming file and key or tensor; E_NO_DEVICE; E_DEVICE_NOMEM with numbers;
    E_CANCELLED after moelora_engine_abort_load. Ownership: caller owns a reference, moelora_engine_release; config
    stays the caller's. Threads: any; blocks. */
MOELORA_API moelora_status moelora_engine_create(const moelora_config *config, const char *model_dir,
                                                 size_t model_dir_len, moelora_engine **out, moelora_error *err);
/** How far a moelora_engine_create that runs on another thread with this config is: 0 to 1. since 0.1.
    Errors: none of its own. Ownership: caller owns fraction. Threads: any, also beside the creating thread. */
MOELORA_API moelora_status moelora_engine_progress(const moelora_config *config, double *fraction, moelora_error *err);
/** Makes that moelora_engine_create return E_CANCELLED soon; later creations are not affected. since 0.1.
    Errors: ALREADY_DONE if none is running. Ownership: -. Threads: any, also beside the creating thread. */
MOELORA_API moelora_status moelora_engine_abort_load(const moelora_config *config, moelora_error *err);
/** One more reference. since 0.1. Threads: any. */
MOELORA_API void moelora_engine_retain(moelora_engine *engine);
/** Gives one reference back. The last one cancels everything, wakes every waiting call (E_CLOSED), closes all handles,
    stops the threads and frees. Process exit without it is legal and silent. since 0.1. Errors: none; does nothing
    inside the log callback or in a forked child. Threads: any; blocks on the last reference. */
MOELORA_API void moelora_engine_release(moelora_engine *engine);
/** since 0.1. Errors: none of its own. Ownership: caller owns info. Threads: any. */
MOELORA_API moelora_status moelora_engine_info_get(moelora_engine *engine, moelora_engine_info *info,
                                                   moelora_error *err);
/** OK, or the fatal status with its text. since 0.1. Threads: any. */
MOELORA_API moelora_status moelora_engine_health(moelora_engine *engine, moelora_error *err);
/** From here on submits get E_CLOSED; waits until all requests are finished. since 0.1.
    Errors: TIMEOUT with requests still running. Ownership: -. Threads: any; blocks up to timeout_ms. */
MOELORA_API moelora_status moelora_engine_drain(moelora_engine *engine, int32_t timeout_ms, moelora_error *err);
/** Drops idle adapters and idle KV from the device until the pool uses at most `device_bytes_target`, as far as
    possible without stopping anything. since 0.1. Errors: none of its own. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_engine_trim(moelora_engine *engine, uint64_t device_bytes_target,
                                               moelora_error *err);

/* ----------------------------------------------------------------------------------------------------- adapters */

/** Flags of loading. since 0.1 */
enum {
  MOELORA_ADAPTER_LENIENT = 1,           /* count tensors that match nothing instead of refusing them */
  MOELORA_ADAPTER_REPLACE = 2,           /* take the name over; the old handle keeps working without a name */
  MOELORA_ADAPTER_EXPERTS_NATURAL = 4,   /* 3-D expert tensors: orientation, where it cannot be told from shapes */
  MOELORA_ADAPTER_EXPERTS_REVERSED = 8,
  MOELORA_ADAPTER_B_RANK_MAJOR = 16,     /* 3-D expert tensors: how B is laid out, where it cannot be told */
  MOELORA_ADAPTER_B_GROUPED = 32,
  MOELORA_ADAPTER_LAZY = 64              /* a folder: its values are read when a request or a prefetch wants them */
};
/** Flags of unloading. since 0.1 */
enum { MOELORA_UNLOAD_IF_IDLE = 1 };

/** Bits of moelora_adapter_info.targets. since 0.1 */
enum {
  MOELORA_TARGET_Q = 1 << 0,
  MOELORA_TARGET_K = 1 << 1,
  MOELORA_TARGET_V = 1 << 2,
  MOELORA_TARGET_O = 1 << 3,
  MOELORA_TARGET_ROUTER = 1 << 4,
  MOELORA_TARGET_GATE = 1 << 5, /* dense MLP */
  MOELORA_TARGET_UP = 1 << 6,
  MOELORA_TARGET_DOWN = 1 << 7,
  MOELORA_TARGET_SHARED_GATE = 1 << 8, /* shared expert */
  MOELORA_TARGET_SHARED_UP = 1 << 9,
  MOELORA_TARGET_SHARED_DOWN = 1 << 10,
  MOELORA_TARGET_SHARED_EXPERT_GATE = 1 << 11,
  MOELORA_TARGET_EXPERT_GATE = 1 << 16, /* routed experts */
  MOELORA_TARGET_EXPERT_UP = 1 << 17,
  MOELORA_TARGET_EXPERT_DOWN = 1 << 18
};

/** since 0.1 */
typedef struct moelora_adapter_info {
  uint32_t struct_size;
  int32_t rank;              /* r of the adapter's config */
  int32_t max_rank;          /* the largest of any module */
  float alpha;
  float scale;               /* the handle's own factor; 1 unless cloned */
  uint32_t targets;          /* MOELORA_TARGET_* */
  int32_t num_layers;        /* layers with any adapted module */
  int32_t num_experts;       /* most experts adapted in a layer */
  int32_t tensors_matched;
  int32_t tensors_unmatched; /* lenient loads only */
  int32_t resident;          /* 1: on the device */
  int32_t pins;
  int32_t in_flight;         /* requests submitted and not finished */
  int32_t reserved;
  uint64_t host_bytes;       /* of its packed form, in host memory or not */
  uint64_t file_bytes;
  uint64_t fingerprint;      /* of the contents; 0: a lazily loaded one whose values were not read yet */
  char dtype[16];            /* as stored: BF16, F16, F32, mixed */
  double read_ms;            /* opening its files, reading and checking their headers; 0 of a random one */
  double pack_ms;            /* reading and checking the values, packing them in host memory */
  double upload_ms;          /* its last copy to the device, without the wait for its turn; 0 before the first */
  uint64_t uploaded_bytes;   /* by its last copy to the device, so far; of host_bytes */
  int32_t in_host_memory;    /* 0: on disk, and read again when it is wanted (option host_memory_bytes) */
  int32_t reserved2;
} moelora_adapter_info;
#define moelora_adapter_info_init(p) moelora_struct_init((p), sizeof *(p))

/** Loads a PEFT folder (adapter_config.json, adapter_model.safetensors) under a name. Strict: every tensor is used or
    the load fails, naming it. A handle is an identity: loading a folder again gives another. since 0.1.
    With the option host_memory_bytes an adapter that is not in use may leave host memory and is then read from the
    folder again when a request wants it; if its contents are others by then, such requests end with E_IO naming the
    file. E_NOMEM if the option is too small to hold the adapter beside those that cannot be read again.
    With MOELORA_ADAPTER_LAZY config and header alone are read and checked now, so that thousands are registered in
    seconds; requests that want an adapter whose values are at fault end with the error that loading would have given.
    Errors: E_EXISTS, E_IO, E_CORRUPT, E_UNSUPPORTED, E_ADAPTER_MISMATCH, E_NOMEM, naming file and tensor or key.
    Ownership: caller owns the handle, moelora_adapter_unload. Threads: any; blocks. */
MOELORA_API moelora_status moelora_adapter_load_dir(moelora_engine *engine, const char *name, size_t name_len,
                                                    const char *dir, size_t dir_len, uint32_t flags,
                                                    moelora_adapter *out, moelora_error *err);
/** The same from the contents of the two files; both are copied before return, and stay in host memory. since 0.1 */
MOELORA_API moelora_status moelora_adapter_load_mem(moelora_engine *engine, const char *name, size_t name_len,
                                                    const char *config_json, size_t config_json_len,
                                                    const void *weights, size_t weights_len, uint32_t flags,
                                                    moelora_adapter *out, moelora_error *err);
/** Another adapter that shares the weights of `source` and has its own name, scale and KV identity. since 0.1.
    Errors: E_EXISTS. Ownership: caller owns the handle. Threads: any. */
MOELORA_API moelora_status moelora_adapter_clone(moelora_engine *engine, moelora_adapter source, const char *name,
                                                 size_t name_len, float scale, moelora_adapter *out,
                                                 moelora_error *err);
/** Asks for residency on the device; `queue` (may be NULL) then gets MOELORA_EVENT_ADAPTER_READY. since 0.1.
    Errors: E_CLOSED for a destroyed queue. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_adapter_prefetch(moelora_engine *engine, moelora_adapter adapter,
                                                    moelora_queue *queue, uint64_t tag, moelora_error *err);
/** A pinned adapter, once on the device, stays there. Pins count. since 0.1. Errors: -. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_adapter_pin(moelora_engine *engine, moelora_adapter adapter, moelora_error *err);
/** since 0.1. Errors: E_INVALID without a pin. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_adapter_unpin(moelora_engine *engine, moelora_adapter adapter, moelora_error *err);
/** Share of the adapter, 0.001 to 1000, initially 1, where option `fairness` is "adapter": twice the weight, twice the
    tokens while all have requests waiting. Adapter 0: the base, all its requests together. A clone has its own.
    since 0.1. Errors: E_INVALID outside the range. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_adapter_set_weight(moelora_engine *engine, moelora_adapter adapter, double weight,
                                                      moelora_error *err);
/** The handle is gone at once; running requests finish, memory goes with the last user. since 0.1.
    Errors: E_BUSY with MOELORA_UNLOAD_IF_IDLE while requests are in flight. Ownership: ends the caller's. Threads:
    any. */
MOELORA_API moelora_status moelora_adapter_unload(moelora_engine *engine, moelora_adapter adapter, uint32_t flags,
                                                  moelora_error *err);
/** since 0.1. Errors: E_NOT_FOUND. Ownership: the handle stays its loader's. Threads: any. */
MOELORA_API moelora_status moelora_adapter_find(moelora_engine *engine, const char *name, size_t name_len,
                                                moelora_adapter *out, moelora_error *err);
/** All loaded adapters, in order of loading; two-step. since 0.1. Errors: MORE. Ownership: caller owns buf. Threads:
    any. */
MOELORA_API moelora_status moelora_adapter_list(moelora_engine *engine, moelora_adapter *buf, size_t cap, size_t *n,
                                                moelora_error *err);
/** since 0.1. Errors: none of its own. Ownership: caller owns info. Threads: any. */
MOELORA_API moelora_status moelora_adapter_info_get(moelora_engine *engine, moelora_adapter adapter,
                                                    moelora_adapter_info *info, moelora_error *err);
/** Name, two-step, without a NUL. since 0.1. Errors: MORE. Ownership: caller owns buf. Threads: any. */
MOELORA_API moelora_status moelora_adapter_name(moelora_engine *engine, moelora_adapter adapter, char *buf, size_t cap,
                                                size_t *n, moelora_error *err);

/* ----------------------------------------------------------------------------------------------------- sessions */

/** since 0.1 */
typedef struct moelora_session_info {
  uint32_t struct_size;
  int32_t num_blocks;      /* KV blocks held */
  int64_t num_tokens;      /* of the history */
  int64_t num_computed;    /* of them with KV at hand; the rest is computed again when needed */
  moelora_adapter adapter; /* as given at creation; 0 = base */
  float scale;
  int32_t resident;        /* 1: KV on the device */
  int32_t busy;            /* 1: a request runs */
  int32_t reserved;
} moelora_session_info;
#define moelora_session_info_init(p) moelora_struct_init((p), sizeof *(p))

/** A conversation whose KV is kept between requests. Adapter and scale are fixed for life: another adapter needs
    another session. An evicted session is computed again from its tokens. since 0.1.
    Errors: none of its own. Ownership: caller owns the handle, moelora_session_close. Threads: any. */
MOELORA_API moelora_status moelora_session_create(moelora_engine *engine, moelora_adapter adapter, float scale,
                                                  moelora_session *out, moelora_error *err);
/** A second session with the same history. since 0.1.
    Errors: E_BUSY while a request runs. Ownership: caller owns the new handle. Threads: any. */
MOELORA_API moelora_status moelora_session_fork(moelora_engine *engine, moelora_session session, moelora_session *out,
                                                moelora_error *err);
/** Shortens the history to num_tokens. since 0.1.
    Errors: E_BUSY while a request runs; E_INVALID beyond the history. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_session_rollback(moelora_engine *engine, moelora_session session,
                                                    int64_t num_tokens, moelora_error *err);
/** since 0.1. Errors: none of its own. Ownership: caller owns info. Threads: any. */
MOELORA_API moelora_status moelora_session_info_get(moelora_engine *engine, moelora_session session,
                                                    moelora_session_info *info, moelora_error *err);
/** A running request of it goes on to its end. Closing 0 is OK. since 0.1. Errors: E_HANDLE the second time.
    Ownership: ends the caller's. Threads: any. */
MOELORA_API moelora_status moelora_session_close(moelora_engine *engine, moelora_session session, moelora_error *err);

/* ----------------------------------------------------------------------------------------------------- requests */

enum { MOELORA_SAMPLING_IGNORE_EOS = 1 };
/** How tokens are chosen; initial values are greedy, 16 tokens. Order: repetition, presence and frequency penalties
    (repetition counts prompt and output, the others output only), temperature, min_p, top_k, top_p, draw. since 0.1 */
typedef struct moelora_sampling {
  uint32_t struct_size;
  float temperature;        /* 0 = greedy */
  int32_t top_k;            /* 0 = off */
  float top_p;              /* 1 = off */
  float min_p;              /* 0 = off */
  float repetition_penalty; /* 1 = off */
  float presence_penalty;   /* 0 = off */
  float frequency_penalty;  /* 0 = off */
  uint64_t seed;            /* 0 = chosen, and reported in the result */
  int32_t max_tokens;       /* >= 1 */
  int32_t min_tokens;       /* no end before */
  int32_t logprobs;         /* -1 none; n >= 0: the sampled token's and the n best, of the raw logits */
  uint32_t flags;           /* MOELORA_SAMPLING_* */
  int32_t n;                /* sequences; only 1 */
  uint32_t reserved;        /* 0 */
} moelora_sampling;
#define moelora_sampling_init(p) moelora_sampling_init_sized((p), sizeof *(p))

/** Fills in the initial values. since 0.1. Threads: any. */
MOELORA_API void moelora_sampling_init_sized(moelora_sampling *sampling, size_t size);
/** Overwrites the fields that the model's generation_config.json recommends. since 0.1.
    Errors: none of its own. Ownership: caller owns sampling. Threads: any. */
MOELORA_API moelora_status moelora_sampling_from_model(moelora_engine *engine, moelora_sampling *sampling,
                                                       moelora_error *err);

/** Finish reasons. since 0.1 */
enum {
  MOELORA_FINISH_NONE = 0,
  MOELORA_FINISH_STOP = 1,      /* eos, a stop token or a stop string; result.stop_index tells */
  MOELORA_FINISH_LENGTH = 2,    /* max_tokens or the context */
  MOELORA_FINISH_CANCELLED = 3,
  MOELORA_FINISH_DEADLINE = 4,
  MOELORA_FINISH_ERROR = 5      /* result.status tells */
};

/** One moelora_request_read. since 0.1 */
typedef struct moelora_chunk {
  uint32_t struct_size;
  int32_t first_position;  /* of the output, of the first token copied */
  uint32_t num_tokens;     /* copied */
  uint32_t num_text_bytes; /* copied: whole characters */
} moelora_chunk;
#define moelora_chunk_init(p) moelora_struct_init((p), sizeof *(p))

/** A finished request. since 0.1 */
typedef struct moelora_result {
  uint32_t struct_size;
  int32_t finish_reason;  /* MOELORA_FINISH_* */
  int32_t status;         /* OK, E_CANCELLED, E_DEADLINE, or the error */
  int32_t prompt_tokens;
  int32_t output_tokens;
  int32_t cached_tokens;  /* prompt and session tokens that were not computed again */
  int32_t stop_index;     /* which stop, strings and tokens counted in order of adding; -1 = eos or none */
  int32_t preemptions;
  uint64_t seed;          /* used */
  double queue_ms;        /* from submit until first scheduled */
  double adapter_wait_ms; /* of that, for the adapter */
  double prefill_ms;
  double decode_ms;
  double first_token_ms;  /* from submit */
} moelora_result;
#define moelora_result_init(p) moelora_struct_init((p), sizeof *(p))

/** One entry of moelora_request_read_logprobs. since 0.1 */
typedef struct moelora_logprob {
  int32_t position; /* of the output token, from 0 */
  int32_t token;
  float logprob;
  int32_t rank;     /* 1 = most likely; at each position the sampled token comes first */
} moelora_logprob;

enum { MOELORA_CANCEL_DROP_TURN = 1 }; /* the session goes back to before the request */

/** Starts building a request. since 0.1.
    Errors: none of its own. Ownership: caller owns the handle, moelora_request_close. Threads: any. */
MOELORA_API moelora_status moelora_request_create(moelora_engine *engine, moelora_request *out, moelora_error *err);
/** The prompt as text: the model's tokenizer makes tokens of it (read at the first use, as
    moelora_tokenizer_from_engine). The BOS, where the model wants one, is put before it unless the text begins with it
    or a session has a history. Names of special tokens are those tokens: for text of strangers, moelora_tokenize with
    PLAIN_TEXT and moelora_request_set_tokens. since 0.1.
    Errors: E_UNSUPPORTED without a tokenizer; E_INVALID for text that is not UTF-8, or once submitted;
    E_CONTEXT_LENGTH. Ownership: copied. Threads: one at a time while building; blocks while the tokenizer is read. */
MOELORA_API moelora_status moelora_request_set_text(moelora_engine *engine, moelora_request request, const char *text,
                                                    size_t text_len, moelora_error *err);
/** The prompt as token ids; with a session, what is appended to its history. since 0.1.
    Errors: E_CONTEXT_LENGTH; E_INVALID once submitted. Ids are checked at submit. Ownership: copied. Threads: one at a
    time while building (as all moelora_request_set_* and _add_*). */
MOELORA_API moelora_status moelora_request_set_tokens(moelora_engine *engine, moelora_request request,
                                                      const int32_t *tokens, size_t num_tokens, moelora_error *err);
/** Adapter (0 = base) and this request's factor on its scale. since 0.1. Errors: E_INVALID with a session (its
    adapter is fixed) or for a factor that is not finite. */
MOELORA_API moelora_status moelora_request_set_adapter(moelora_engine *engine, moelora_request request,
                                                       moelora_adapter adapter, float scale, moelora_error *err);
/** Runs in a session; 0 = one-shot again. since 0.1. Errors: E_INVALID with an adapter set. */
MOELORA_API moelora_status moelora_request_set_session(moelora_engine *engine, moelora_request request,
                                                       moelora_session session, moelora_error *err);
/** since 0.1. Errors: E_UNSUPPORTED for n other than 1; ranges are checked at submit, naming the field. Ownership:
    copied. */
MOELORA_API moelora_status moelora_request_set_sampling(moelora_engine *engine, moelora_request request,
                                                        const moelora_sampling *sampling, moelora_error *err);
/** A text that ends the output, found wherever the borders of tokens are. The output's text ends before it, and no
    part of it is ever given out: what may become one is held back. Its tokens are output, with the whole last one. Of
    several the one that is complete first counts, then the longest. Before min_tokens it is text. At most 64 of at most
    1024 bytes. since 0.1.
    Errors: E_UNSUPPORTED without a tokenizer; E_INVALID if empty or not UTF-8. Ownership: copied. */
MOELORA_API moelora_status moelora_request_add_stop(moelora_engine *engine, moelora_request request, const char *text,
                                                    size_t text_len, moelora_error *err);
/** A token that ends the output; it is delivered as the last one, and is no part of the text. At most 64. since 0.1.
    Errors: E_INVALID. */
MOELORA_API moelora_status moelora_request_add_stop_token(moelora_engine *engine, moelora_request request,
                                                          int32_t token, moelora_error *err);
/** Events of this request go to `queue` (NULL: none) with `tag`. since 0.1. Ownership: the request keeps the queue
    alive; destroying it before only stops the events. */
MOELORA_API moelora_status moelora_request_set_queue(moelora_engine *engine, moelora_request request,
                                                     moelora_queue *queue, uint64_t tag, moelora_error *err);
/** Higher runs first; initially 0. since 0.1 */
MOELORA_API moelora_status moelora_request_set_priority(moelora_engine *engine, moelora_request request,
                                                        int32_t priority, moelora_error *err);
/** Ends the request this long after submit, whatever has been produced; 0 = none. With option `early_refusal` sooner,
    if it waits and cannot end by then. since 0.1 */
MOELORA_API moelora_status moelora_request_set_deadline(moelora_engine *engine, moelora_request request,
                                                        uint64_t milliseconds, moelora_error *err);
/** Keeps prefix caches of tenants apart: shared only among requests of equal salt (and adapter and scale, always). One
    that nobody else has keeps a request from sharing at all. At most 256 bytes. since 0.1 */
MOELORA_API moelora_status moelora_request_set_cache_salt(moelora_engine *engine, moelora_request request,
                                                          const char *salt, size_t salt_len, moelora_error *err);
/** Hands the request to the engine; it cannot be changed afterwards. since 0.1.
    Errors: E_OVERLOADED (may be retried), E_CONTEXT_LENGTH, E_DEVICE_NOMEM (can never fit), E_BUSY (session),
    E_CLOSED (draining), E_NOT_FOUND (adapter unloaded), E_INVALID; on each the request stays as it was. Ownership: -.
    Threads: any. */
MOELORA_API moelora_status moelora_request_submit(moelora_engine *engine, moelora_request request, moelora_error *err);
/** Submits several under one lock, in order; `each` (may be NULL) gets every status, whatever is returned. since 0.1.
    Errors: the first error in order, if any; the others are submitted all the same. Ownership: borrowed for the call.
    Threads: any. */
MOELORA_API moelora_status moelora_submit_batch(moelora_engine *engine, const moelora_request *requests,
                                                size_t num_requests, moelora_status *each, moelora_error *err);
/** Takes what is ready, at least one token or some text, or TIMEOUT. `chunk` may be NULL only if token_cap is 1 and
    text_cap 0. END is sticky: finished (for whatever reason but an error) and all read.
    With text_cap 0 (text may be NULL) no text is made. Else `text` gets that of the tokens read so far, by this call
    and those before, as far as it is known and fits: whole characters in valid UTF-8, without a NUL at the end.
    Unfinished characters and what may become a stop string wait; bytes that are no character become U+FFFD; special
    tokens and the stop token give nothing. Put behind the text of the prompt it continues it. With token_cap 0 the
    tokens are passed over. since 0.1.
    Errors: TIMEOUT, END; the request's own error once all before it was read, sticky; E_BUSY for a second reader;
    E_CLOSED if closed meanwhile; E_INVALID before submit, or for a text_cap of 1 to 3; E_UNSUPPORTED for text without a
    tokenizer. Ownership: caller owns the buffers. Threads: any, one reader a request; blocks up to timeout_ms. */
MOELORA_API moelora_status moelora_request_read(moelora_engine *engine, moelora_request request, int32_t timeout_ms,
                                                int32_t *tokens, size_t token_cap, char *text, size_t text_cap,
                                                moelora_chunk *chunk, moelora_error *err);
/** Logprobs of output positions first .. first + count - 1 as far as produced; two-step. since 0.1.
    Errors: MORE; E_INVALID before submit. Ownership: caller owns buf. Threads: any, also beside a reader. */
MOELORA_API moelora_status moelora_request_read_logprobs(moelora_engine *engine, moelora_request request,
                                                         int32_t first, int32_t count, moelora_logprob *buf, size_t cap,
                                                         size_t *n, moelora_error *err);
/** How it ended. since 0.1. Errors: E_BUSY while it runs; E_INVALID before submit. Ownership: caller owns result.
    Threads: any. */
MOELORA_API moelora_status moelora_request_result(moelora_engine *engine, moelora_request request,
                                                  moelora_result *result, moelora_error *err);
/** Ends it after at most one step; what was produced stays readable. Idempotent, never hits another request.
    since 0.1. Errors: ALREADY_DONE if it had finished or was never submitted. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_request_cancel(moelora_engine *engine, moelora_request request, uint32_t flags,
                                                  moelora_error *err);
/** Cancels it if it runs, wakes its reader (E_CLOSED) and frees; no further events of it are queued. Closing 0 is OK.
    since 0.1. Errors: E_HANDLE the second time. Ownership: ends the caller's. Threads: any. */
MOELORA_API moelora_status moelora_request_close(moelora_engine *engine, moelora_request request, moelora_error *err);

/** One blocking call: a prompt in, the output out. `sampling` NULL: initial values; `result` may be NULL. since 0.1.
    Errors: as moelora_request_submit and _read; E_INVALID if token_cap is less than max_tokens. Ownership: caller owns
    the buffers. Threads: any; blocks. */
MOELORA_API moelora_status moelora_generate_tokens(moelora_engine *engine, moelora_adapter adapter, float scale,
                                                   const int32_t *prompt, size_t num_prompt,
                                                   const moelora_sampling *sampling, int32_t *tokens, size_t token_cap,
                                                   size_t *n, moelora_result *result, moelora_error *err);
/** The same in text, as moelora_request_set_text and _read have it. MORE if the text does not fit into text_cap: n is
    its whole length then, and its beginning was copied. since 0.1. Errors: E_UNSUPPORTED without a tokenizer. */
MOELORA_API moelora_status moelora_generate(moelora_engine *engine, moelora_adapter adapter, float scale,
                                            const char *prompt, size_t prompt_len, const moelora_sampling *sampling,
                                            char *text, size_t text_cap, size_t *n, moelora_result *result,
                                            moelora_error *err);

/* -------------------------------------------------------------------------------------------------------- queue */

/** since 0.1 */
enum {
  MOELORA_EVENT_TOKENS = 1,          /* handle: a request with something to read */
  MOELORA_EVENT_FINISHED = 2,        /* handle: a request; status: how it ended */
  MOELORA_EVENT_ADAPTER_READY = 3,   /* handle: an adapter; status: OK, or why it cannot be resident */
  MOELORA_EVENT_SESSION_EVICTED = 4, /* handle: a session; its KV will be computed again */
  MOELORA_EVENT_ENGINE_FAILED = 5,   /* status: why; once to each queue that a request or a prefetch has named, behind
                                        their own events. A release of the engine is no failure */
  MOELORA_EVENT_WAKE = 6             /* moelora_queue_wake */
};
/** since 0.1 */
typedef struct moelora_event {
  int32_t kind;   /* MOELORA_EVENT_* */
  int32_t status;
  uint64_t handle;
  uint64_t tag;
} moelora_event;

/** since 0.1. Errors: E_IO without file descriptors. Ownership: caller owns *out, moelora_queue_destroy. Threads:
    any. */
MOELORA_API moelora_status moelora_queue_create(moelora_queue **out, moelora_error *err);
/** Wakes its waiters (E_CLOSED); requests that still name it run on without events. since 0.1. Threads: any. */
MOELORA_API void moelora_queue_destroy(moelora_queue *queue);
/** Takes up to cap events in order. At most one TOKENS event a request is queued at a time: read until TIMEOUT.
    since 0.1. Errors: TIMEOUT; E_CLOSED if destroyed meanwhile. Ownership: caller owns events. Threads: any; blocks up
    to timeout_ms. */
MOELORA_API moelora_status moelora_queue_wait(moelora_queue *queue, int32_t timeout_ms, moelora_event *events,
                                              size_t cap, size_t *n, moelora_error *err);
/** An eventfd, close-on-exec and non-blocking, readable while the queue is not empty: for poll and epoll only, do not
    read or close it. since 0.1. Errors: -. Ownership: library's, until moelora_queue_destroy. Threads: any. */
MOELORA_API moelora_status moelora_queue_fd(moelora_queue *queue, int *fd, moelora_error *err);
/** Adds a WAKE event. since 0.1. Errors: -. Ownership: -. Threads: any. */
MOELORA_API moelora_status moelora_queue_wake(moelora_queue *queue, moelora_error *err);

/* ---------------------------------------------------------------------------------------------------- tokenizer */

/** Flags of moelora_tokenize. since 0.1 */
enum {
  MOELORA_TOKENIZE_NO_SPECIAL = 1, /* nothing around the text: no BOS where the model wants one */
  MOELORA_TOKENIZE_PLAIN_TEXT = 2  /* the names of special tokens in the text are text: for text of strangers */
};
/** Flags of moelora_detokenize. since 0.1 */
enum { MOELORA_DETOKENIZE_SKIP_SPECIAL = 1 }; /* special tokens give no text */

/** Opens a model folder's tokenizer: tokenizer.json, and tokenizer_config.json where that adds BOS. Needs no engine and
    no GPU. since 0.1. Errors: E_NOT_FOUND without tokenizer.json, E_IO, E_CORRUPT, E_UNSUPPORTED, naming file and
    field. Ownership: caller owns *out, moelora_tokenizer_release. Threads: any; blocks. */
MOELORA_API moelora_status moelora_tokenizer_open(const char *model_dir, size_t model_dir_len, moelora_tokenizer **out,
                                                  moelora_error *err);
/** The tokenizer of an engine's model, read at the first call; outlives the engine. since 0.1.
    Errors: as moelora_tokenizer_open. Ownership: caller owns a reference. Threads: any; blocks. */
MOELORA_API moelora_status moelora_tokenizer_from_engine(moelora_engine *engine, moelora_tokenizer **out,
                                                         moelora_error *err);
/** NULL is allowed. since 0.1. Threads: any. */
MOELORA_API void moelora_tokenizer_release(moelora_tokenizer *tokenizer);
/** Text to token ids; two-step. Text is UTF-8, at most 1 GiB, and may have NUL characters. A chat template's text often
    begins with the BOS itself: give NO_SPECIAL then. since 0.1.
    Errors: MORE; E_INVALID for text that is not UTF-8, naming the byte. Ownership: caller owns buf. Threads: any. */
MOELORA_API moelora_status moelora_tokenize(moelora_tokenizer *tokenizer, const char *text, size_t text_len,
                                            uint32_t flags, int32_t *buf, size_t cap, size_t *n, moelora_error *err);
/** Token ids to text, two-step, without a NUL. Always valid UTF-8: bytes that are not become U+FFFD. Ids that no token
    has give nothing. since 0.1. Errors: MORE; E_INVALID below 0. Ownership: caller owns buf. Threads: any. */
MOELORA_API moelora_status moelora_detokenize(moelora_tokenizer *tokenizer, const int32_t *tokens, size_t num_tokens,
                                              uint32_t flags, char *buf, size_t cap, size_t *n, moelora_error *err);
/** Raw bytes of one id, perhaps a part of a character; two-step, without a NUL; none for an id that no token has.
    since 0.1. Errors: MORE; E_INVALID below 0. Ownership: caller owns buf. Threads: any. */
MOELORA_API moelora_status moelora_token_text(moelora_tokenizer *tokenizer, int32_t token, char *buf, size_t cap,
                                              size_t *n, moelora_error *err);

/* ------------------------------------------------------------------------------------------------------ metrics */

/** Counters since creation (never reset) and gauges. since 0.1 */
typedef struct moelora_stats {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t steps;
  uint64_t requests_submitted;
  uint64_t requests_finished;   /* however they ended */
  uint64_t requests_cancelled;
  uint64_t requests_failed;
  uint64_t prompt_tokens;
  uint64_t cached_tokens;
  uint64_t output_tokens;
  uint64_t preemptions;
  uint64_t sessions_evicted;
  uint64_t adapter_loads;       /* host to device */
  uint64_t adapter_evictions;
  uint64_t adapter_hits;        /* requests whose adapter was resident */
  int64_t requests_running;
  int64_t requests_waiting;
  int64_t adapters_registered;
  int64_t adapters_resident;
  int64_t sessions;
  int64_t pages_total;
  int64_t pages_free;
  int64_t pages_kv;
  int64_t pages_adapter;
  uint64_t adapter_host_bytes;
  double active_experts;        /* mean a MoE layer and step, over all steps; 0 for dense models */
  double last_step_ms;
  int64_t page_bytes_wasted;         /* of pages in use: what neither an adapter nor a position of KV can use */
  int64_t kv_bytes_unfilled;         /* of pages in use: positions of blocks that no token has yet */
  int64_t adapters_in_host_memory;   /* clones count once, as in the next */
  int64_t adapters_on_disk_only;
  uint64_t adapter_host_loads;       /* disk to host, after the first */
  uint64_t adapter_host_evictions;
  double adapter_read_ms;            /* of those loads: opening files, headers */
  double adapter_pack_ms;            /* reading, checking and packing values */
  double adapter_upload_ms;          /* of all copies to the device */
  double steps_ms;              /* of all steps together */
  int64_t adapters_loading;     /* on their way to the device */
  uint64_t adapter_load_bytes;  /* that have arrived there */
  uint64_t swaps;               /* of preemptions: the KV went to host memory */
  uint64_t prefix_queries;      /* requests that started, again after preemption too; this and what follows: the */
  uint64_t prefix_query_tokens; /* prefix cache. Tokens whose KV they needed */
  uint64_t prefix_hit_tokens;   /* of them found: hit rate = hit / query */
  uint64_t prefix_evictions;    /* blocks */
  int64_t prefix_blocks;
  int64_t pages_cached;         /* of pages_kv, held by no request or session: as good as free */
} moelora_stats;
#define moelora_stats_init(p) moelora_struct_init((p), sizeof *(p))

/** Counters of one adapter. since 0.1 */
typedef struct moelora_adapter_stats {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t requests;
  uint64_t output_tokens;
  uint64_t loads; /* to the device */
  uint64_t hits;  /* requests that found it there */
  uint64_t prompt_tokens;
  int32_t resident; /* 1: on the device */
  int32_t running;  /* requests now */
  int32_t waiting;
  int32_t reserved2;
} moelora_adapter_stats;
#define moelora_adapter_stats_init(p) moelora_struct_init((p), sizeof *(p))

/** since 0.1. Errors: none of its own. Ownership: caller owns stats. Threads: any. */
MOELORA_API moelora_status moelora_stats_get(moelora_engine *engine, moelora_stats *stats, moelora_error *err);
/** since 0.1. Errors: none of its own. Ownership: caller owns stats. Threads: any. */
MOELORA_API moelora_status moelora_adapter_stats_get(moelora_engine *engine, moelora_adapter adapter,
                                                     moelora_adapter_stats *stats, moelora_error *err);
/** Everything above and histograms of times as Prometheus text (version 0.0.4); two-step, without a NUL. Adapters, by
    name and handle, as many as the option metrics_adapters says, those with the most requests. since 0.1.
    Errors: MORE. Ownership: caller owns buf. Threads: any. */
MOELORA_API moelora_status moelora_metrics_text(moelora_engine *engine, char *buf, size_t cap, size_t *n,
                                                moelora_error *err);
/** Writes the newest steps, uploads of adapters and requests, as many as the option timeline_events says, to a file as
    JSON that Perfetto and chrome://tracing show: steps with rows, adapters, pages and queue. What left before it could
    be written is counted in otherData.dropped_events. An existing file is overwritten. since 0.1.
    Errors: E_INVALID if timeline_events is 0; E_IO naming the file. Ownership: -. Threads: any; blocks, while steps
    go on. */
MOELORA_API moelora_status moelora_timeline_write(moelora_engine *engine, const char *path, size_t path_len,
                                                  moelora_error *err);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MOELORA_H_ */
