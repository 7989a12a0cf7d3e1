/* Stands in for libascendcl.so and libopapi.so: exports what they do, records each call, fails on demand.
 *
 * Device memory is this process's own. A loaded binary that is a shared object of this host (with its ELF machine
 * changed) is run: its kvb_run takes the argument block. Other binaries are launched without effect, and where
 * there are only such, addresses mean nothing.
 *
 * KVB_STANDIN_DEFER    work waits in its stream until that is synchronised, as on a chip; an event is done when the
 *                      work before it is
 * KVB_STANDIN_SOC      what the chip calls itself (Ascend910B2)
 * KVB_STANDIN_CORES    vector cores of a device (40)
 * KVB_STANDIN_CAPTURE  the stream whose work is being captured
 * KVB_STANDIN_SPACE    bytes of workspace that index_select asks for (64)
 * KVB_STANDIN_SILENT   record launches only, without their arguments */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>

#include "record.h"

enum { REPEAT_INITIALIZE = 100002, NO_CONTEXT = 107002, WIDTH = 1024, GUARD = 64, HOST_MACHINE_AT = 18 };

typedef int (*run_function)(const void *, size_t, uint32_t);

typedef struct binary {
  int device;
  run_function run;
} binary;

typedef struct function {
  binary *of;
  char name[96];
} function;

typedef struct tensor {
  int64_t shape[2];
  uint64_t rank;
  int dtype;
  void *data;
} tensor;

typedef struct executor {
  tensor *self, *index, *out;
} executor;

/* One piece of work in a stream: a launch, a gather or an event. */
typedef struct work {
  void *stream;
  function *kernel;
  executor *gather;
  int64_t *event; /* a count of records that are still to come */
  uint32_t blocks;
  size_t size;
  struct work *next;
  char block[1024];
} work;

typedef struct allocation {
  char *base;
  size_t bytes;
  struct allocation *next;
} allocation;

static _Thread_local int current = -1;
static _Thread_local void *context;
static int initialised;
static int runs; /* whether any kernel does, so that addresses are real */
static work *first, **last = &first;
static allocation *allocations;
static char words[256];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of streams, events and memory */

static int device_of(const void *which) { return (int)((uintptr_t)which - 0xc0); }

static int deferred(void) { return setting("KVB_STANDIN_DEFER", 0); }

static int loud(void) { return !setting("KVB_STANDIN_SILENT", 0); }

EXPORT const char *aclGetRecentErrMsg(void) {
  snprintf(words, sizeof words, "%s", setting("KVB_STANDIN_WORDLESS", 0) ? "" : "EZ9999: the stand-in was told to fail");
  return words;
}

EXPORT int aclInit(const char *path) {
  FAIL_ON_DEMAND("aclInit");
  record("aclInit", ",\"path\":%d", path != NULL);
  return initialised++ ? REPEAT_INITIALIZE : 0;
}

EXPORT const char *aclrtGetSocName(void) {
  const char *name = getenv("KVB_STANDIN_SOC");
  return name != NULL ? name : "Ascend910B2";
}

EXPORT int aclrtGetDeviceCount(uint32_t *count) {
  FAIL_ON_DEMAND("aclrtGetDeviceCount");
  *count = (uint32_t)setting("KVB_STANDIN_DEVICES", 2);
  return 0;
}

EXPORT int aclrtGetDevice(int32_t *device) {
  if (current < 0) return NO_CONTEXT;
  *device = current;
  return 0;
}

EXPORT int aclrtSetDevice(int32_t device) {
  FAIL_ON_DEMAND("aclrtSetDevice");
  current = device;
  context = (void *)(uintptr_t)(0xc0 + device);
  record("aclrtSetDevice", ",\"device\":%d", device);
  return 0;
}

EXPORT int aclrtGetCurrentContext(void **out) {
  FAIL_ON_DEMAND("aclrtGetCurrentContext");
  if (context == NULL) return NO_CONTEXT;
  *out = context;
  return 0;
}

EXPORT int aclrtSetCurrentContext(void *wanted) {
  FAIL_ON_DEMAND("aclrtSetCurrentContext");
  context = wanted;
  current = device_of(wanted);
  record("aclrtSetCurrentContext", ",\"device\":%d", current);
  return 0;
}

EXPORT int aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
  (void)device;
  FAIL_ON_DEMAND("aclrtGetDeviceInfo");
  if (attribute != 201) return 1;
  *value = setting("KVB_STANDIN_CORES", 40);
  return 0;
}

EXPORT int aclrtGetHardwareSyncAddr(void **address) {
  FAIL_ON_DEMAND("aclrtGetHardwareSyncAddr");
  *address = (void *)(uintptr_t)(0xff7500 + current);
  return 0;
}

/* What a bundle calls a device binary may be this host's code under the chip's machine number. */
static run_function host_code(const void *data, size_t size) {
  /* glibc 2.17 has no function for it. */
  int file = (int)syscall(SYS_memfd_create, "kernel", 0);
  char path[64], machine[2] = {0, 0};
  if (file < 0 || size < 64 || write(file, data, size) != (ssize_t)size) return NULL;
  int own = open("/proc/self/exe", O_RDONLY);
  if (own < 0 || pread(own, machine, 2, HOST_MACHINE_AT) != 2 || pwrite(file, machine, 2, HOST_MACHINE_AT) != 2)
    return NULL;
  close(own);
  /* Not by the name under which a launcher may have been loaded: the loader would give that one back. */
  snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), file);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return library != NULL ? (run_function)dlsym(library, "kvb_run") : NULL;
}

EXPORT int aclrtBinaryLoadFromData(const void *data, size_t size, const void *options, void **out) {
  FAIL_ON_DEMAND("aclrtBinaryLoadFromData");
  const struct {
    const struct {
      int type;
      uint32_t value[4];
    } *list;
    size_t count;
  } *given = options;
  binary *made = calloc(1, sizeof *made);
  made->device = current;
  made->run = host_code(data, size);
  runs |= made->run != NULL;
  *out = made;
  record("aclrtBinaryLoadFromData", ",\"size\":%zu,\"options\":%zu,\"option\":%d,\"value\":%u,\"device\":%d,\"runs\":%d",
         size, given->count, given->list[0].type, given->list[0].value[0], current, made->run != NULL);
  return 0;
}

EXPORT int aclrtBinaryUnLoad(void *which) {
  record("aclrtBinaryUnLoad", ",\"device\":%d", ((binary *)which)->device);
  free(which);
  return 0;
}

EXPORT int aclrtBinaryGetFunction(const void *which, const char *name, void **out) {
  FAIL_ON_DEMAND("aclrtBinaryGetFunction");
  function *made = calloc(1, sizeof *made);
  made->of = (binary *)which;
  snprintf(made->name, sizeof made->name, "%s", name);
  *out = made;
  record("aclrtBinaryGetFunction", ",\"name\":\"%s\"", name);
  return 0;
}

EXPORT int aclrtMalloc(void **out, size_t bytes, int policy) {
  FAIL_ON_DEMAND("aclrtMalloc");
  allocation *made = calloc(1, sizeof *made);
  made->base = malloc(bytes + 2 * GUARD);
  made->bytes = bytes;
  pthread_mutex_lock(&lock);
  made->next = allocations;
  allocations = made;
  pthread_mutex_unlock(&lock);
  memset(made->base, 0xff, bytes + 2 * GUARD); /* a NaN, should anyone read it */
  *out = made->base + GUARD;
  record("aclrtMalloc", ",\"bytes\":%zu,\"policy\":%d,\"device\":%d,\"memory\":%zu", bytes, policy, current,
         (size_t)*out);
  return 0;
}

static int unharmed(const allocation *which) {
  for (int i = 0; i < GUARD; ++i)
    if ((unsigned char)which->base[i] != 0xff || (unsigned char)which->base[GUARD + which->bytes + i] != 0xff) return 0;
  return 1;
}

/* How much of the work that is still to come would use this memory. */
static int uses(const allocation *which) {
  int found = 0;
  for (const work *at = first; at != NULL; at = at->next) {
    for (size_t i = 0; at->kernel != NULL && i + sizeof(uintptr_t) <= at->size; i += sizeof(uintptr_t)) {
      uintptr_t word;
      memcpy(&word, at->block + i, sizeof word);
      found += word - (uintptr_t)which->base < which->bytes + 2 * GUARD;
    }
  }
  return found;
}

static int release(void *memory) {
  for (allocation **at = &allocations; *at != NULL; at = &(*at)->next) {
    allocation *which = *at;
    if (which->base + GUARD != memory) continue;
    record("aclrtFree", ",\"memory\":%zu,\"unharmed\":%d,\"uses\":%d", (size_t)memory, unharmed(which),
           uses(which));
    *at = which->next;
    memset(which->base, 0xee, which->bytes + 2 * GUARD);
    free(which->base);
    free(which);
    return 0;
  }
  record("aclrtFree", ",\"memory\":%zu,\"unknown\":1", (size_t)memory);
  return 1;
}

EXPORT int aclrtFree(void *memory) {
  pthread_mutex_lock(&lock);
  int code = release(memory);
  pthread_mutex_unlock(&lock);
  return code;
}

static void gather(const executor *what) {
  const float *from = what->self->data;
  float *to = what->out->data;
  for (int64_t i = 0; i < what->index->shape[0]; ++i) {
    int64_t row = ((const int32_t *)what->index->data)[i];
    if (row < 0 || row >= what->self->shape[0]) {
      record("aclnnIndexSelect", ",\"outside\":%lld,\"rows\":%lld", (long long)row, (long long)what->self->shape[0]);
      abort();
    }
    memcpy(to + i * WIDTH, from + row * WIDTH, WIDTH * sizeof *to);
  }
}

static void perform(work *what) {
  if (what->event != NULL) --*what->event;
  if (what->gather != NULL && runs) gather(what->gather);
  if (what->kernel == NULL || what->kernel->of->run == NULL) return;
  int code = what->kernel->of->run(what->block, what->size, what->blocks);
  if (code == 0) return;
  record("launch", ",\"name\":\"%s\",\"refused\":%d,\"size\":%zu", what->kernel->name, code, what->size);
  abort();
}

static int enqueue(work what) {
  pthread_mutex_lock(&lock);
  work *made = deferred() ? malloc(sizeof *made) : NULL;
  if (what.event != NULL) ++*what.event;
  if (made == NULL) {
    perform(&what);
  } else {
    *made = what;
    made->next = NULL;
    *last = made;
    last = &made->next;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

EXPORT int aclrtSynchronizeStream(void *stream) {
  FAIL_ON_DEMAND("aclrtSynchronizeStream");
  record("aclrtSynchronizeStream", ",\"stream\":%zu", (size_t)stream);
  pthread_mutex_lock(&lock);
  for (work **at = &first; *at != NULL;) {
    work *what = *at;
    if (what->stream != stream) {
      at = &what->next;
      continue;
    }
    *at = what->next;
    if (last == &what->next) last = at;
    perform(what);
    free(what);
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

EXPORT int aclrtLaunchKernelWithHostArgs(void *kernel, uint32_t blocks, void *stream, void *config, void *block,
                                         size_t size, void *holders, size_t num_holders) {
  FAIL_ON_DEMAND("aclrtLaunchKernelWithHostArgs");
  wait_at_gate("aclrtLaunchKernelWithHostArgs");
  const function *which = kernel;
  char text[2 * sizeof((work *)0)->block + 1] = "";
  work what = {.stream = stream, .kernel = kernel, .blocks = blocks, .size = size};
  if (config != NULL || holders != NULL || num_holders != 0 || size > sizeof what.block) return 1;
  memcpy(what.block, block, size);
  for (size_t i = 0; loud() && i < size; ++i) snprintf(text + 2 * i, 3, "%02x", ((unsigned char *)block)[i]);
  record("launch", ",\"name\":\"%s\",\"blocks\":%u,\"stream\":%zu,\"device\":%d,\"arguments\":\"%s\"", which->name,
         blocks, (size_t)stream, current, text);
  return enqueue(what);
}

EXPORT int aclrtCreateEventExWithFlag(void **event, uint32_t flag) {
  FAIL_ON_DEMAND("aclrtCreateEventExWithFlag");
  *event = calloc(1, sizeof(int64_t));
  record("aclrtCreateEventExWithFlag", ",\"flag\":%u", flag);
  return 0;
}

EXPORT int aclrtDestroyEvent(void *event) {
  record("aclrtDestroyEvent", ",\"event\":%d", event != NULL);
  free(event);
  return 0;
}

EXPORT int aclrtRecordEvent(void *event, void *stream) {
  FAIL_ON_DEMAND("aclrtRecordEvent");
  if (loud()) record("aclrtRecordEvent", ",\"stream\":%zu", (size_t)stream);
  return enqueue((work){.stream = stream, .event = event});
}

EXPORT int aclrtQueryEventStatus(void *event, int *status) {
  FAIL_ON_DEMAND("aclrtQueryEventStatus");
  pthread_mutex_lock(&lock);
  *status = *(int64_t *)event == 0;
  pthread_mutex_unlock(&lock);
  return 0;
}

EXPORT int aclmdlRICaptureGetInfo(void *stream, int *status, void **graph) {
  FAIL_ON_DEMAND("aclmdlRICaptureGetInfo");
  int captured = setting("KVB_STANDIN_CAPTURE", 0);
  *status = captured != 0 && (uintptr_t)captured == (uintptr_t)stream;
  *graph = *status ? (void *)(uintptr_t)setting("KVB_STANDIN_GRAPH", 0x9a) : NULL;
  return 0;
}

EXPORT int aclmdlRICaptureThreadExchangeMode(int *mode) {
  static _Thread_local int now;
  int before = now;
  now = *mode;
  *mode = before;
  record("aclmdlRICaptureThreadExchangeMode", ",\"mode\":%d", now);
  return 0;
}

EXPORT void *aclCreateTensor(const int64_t *shape, uint64_t rank, int dtype, const int64_t *strides, int64_t offset,
                             int format, const int64_t *storage, uint64_t storage_rank, void *data) {
  tensor *made = calloc(1, sizeof *made);
  if (rank < 1 || rank > 2 || offset != 0 || format != 2 || storage_rank != rank || strides[rank - 1] != 1) return NULL;
  for (uint64_t i = 0; i < rank; ++i) {
    if (storage[i] != shape[i]) return NULL;
    made->shape[i] = shape[i];
  }
  made->rank = rank;
  made->dtype = dtype;
  made->data = data;
  if (loud()) record("aclCreateTensor", ",\"rank\":%d,\"rows\":%lld,\"dtype\":%d", (int)rank, (long long)shape[0], dtype);
  return made;
}

EXPORT int aclDestroyTensor(const void *which) {
  if (loud()) record("aclDestroyTensor", "%s", "");
  if (!deferred()) free((void *)which);
  return 0;
}

EXPORT int aclnnIndexSelectGetWorkspaceSize(const void *self, int64_t dim, const void *index, void *out,
                                            uint64_t *bytes, void **plan) {
  FAIL_ON_DEMAND("aclnnIndexSelectGetWorkspaceSize");
  const tensor *from = self, *indices = index, *to = out;
  int right = dim == 0 && from->rank == 2 && from->dtype == 0 && from->shape[1] == WIDTH && indices->rank == 1 &&
              indices->dtype == 3 && to->rank == 2 && to->dtype == 0 && to->shape[1] == WIDTH &&
              to->shape[0] == indices->shape[0];
  if (!right) return 161002;
  executor *made = calloc(1, sizeof *made);
  *made = (executor){(tensor *)self, (tensor *)index, out};
  *plan = made;
  *bytes = (uint64_t)setting("KVB_STANDIN_SPACE", 64);
  return 0;
}

EXPORT int aclnnIndexSelect(void *space, uint64_t bytes, void *plan, void *stream) {
  FAIL_ON_DEMAND("aclnnIndexSelect");
  const executor *what = plan;
  if ((bytes > 0) != (space != NULL)) return 1;
  if (space != NULL) memset(space, 0xdd, bytes);
  record("aclnnIndexSelect", ",\"rows\":%lld,\"of\":%lld,\"bytes\":%llu,\"stream\":%zu",
         (long long)what->index->shape[0], (long long)what->self->shape[0], (unsigned long long)bytes, (size_t)stream);
  return enqueue((work){.stream = stream, .gather = plan});
}
