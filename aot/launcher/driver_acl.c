/* Ascend's runtime (ACL), CANN 8.5 and later. Only what is used is declared, so that no CANN header is needed. */
#include <stdint.h>

#include "acl.h"
#include "error.h"
#include "library.h"
#include "stages.h"
#include "workspace.h"

static const char *const NAMES[] = {"libascendcl.so"};
static const char ADVICE[] = "Install CANN 8.5 or later on this host and source its set_env.sh, or choose a target "
                             "that this host has a device for";

typedef int result;

enum {
  ACL_SUCCESS = 0,
  ACL_REPEAT_INITIALIZE = 100002,
  BINARY_LOAD_OPTION_MAGIC = 2,
  BINARY_MAGIC_VECTOR_CORE = 0x41415246,
  DEVICE_VECTOR_CORES = 201,
  MALLOC_HUGE_FIRST = 0,
  EVENT_SYNC = 1,
  EVENT_COMPLETE = 1,
  CAPTURE_NONE = 0,
  CAPTURE_MODE_RELAXED = 2,
  MAX_DEVICES = 64
};

typedef struct load_option {
  int type;
  uint32_t value[4];
} load_option;

typedef struct load_options {
  load_option *options;
  size_t count;
} load_options;

static struct {
  result (*init)(const char *);
  result (*device_count)(uint32_t *);
  result (*device_get)(int32_t *);
  result (*device_set)(int32_t);
  result (*device_info)(uint32_t, int, int64_t *);
  result (*context_get)(void **);
  result (*context_set)(void *);
  result (*binary_load)(const void *, size_t, const load_options *, void **);
  result (*binary_unload)(void *);
  result (*binary_function)(const void *, const char *, void **);
  result (*launch)(void *, uint32_t, void *, void *, void *, size_t, void *, size_t);
  result (*sync_address)(void **);
  result (*memory_make)(void **, size_t, int);
  result (*memory_free)(void *);
  result (*event_make)(void **, uint32_t);
  result (*event_end)(void *);
  result (*event_record)(void *, void *);
  result (*event_status)(void *, int *);
  result (*stream_wait)(void *);
  result (*capture_info)(void *, int *, void **);
  result (*capture_mode)(int *);
  const char *(*recent)(void);
} acl;

#define SYMBOL(name, member) {name, (void **)&acl.member, 0}
static const kvb_symbol SYMBOLS[] = {
    SYMBOL("aclInit", init),
    SYMBOL("aclrtGetDeviceCount", device_count),
    SYMBOL("aclrtGetDevice", device_get),
    SYMBOL("aclrtSetDevice", device_set),
    SYMBOL("aclrtGetDeviceInfo", device_info),
    SYMBOL("aclrtGetCurrentContext", context_get),
    SYMBOL("aclrtSetCurrentContext", context_set),
    SYMBOL("aclrtBinaryLoadFromData", binary_load),
    SYMBOL("aclrtBinaryUnLoad", binary_unload),
    SYMBOL("aclrtBinaryGetFunction", binary_function),
    SYMBOL("aclrtLaunchKernelWithHostArgs", launch),
    SYMBOL("aclrtGetHardwareSyncAddr", sync_address),
    SYMBOL("aclrtMalloc", memory_make),
    SYMBOL("aclrtFree", memory_free),
    SYMBOL("aclrtCreateEventExWithFlag", event_make),
    SYMBOL("aclrtDestroyEvent", event_end),
    SYMBOL("aclrtRecordEvent", event_record),
    SYMBOL("aclrtQueryEventStatus", event_status),
    SYMBOL("aclrtSynchronizeStream", stream_wait),
    /* Without these two a CANN captures no streams. */
    {"aclmdlRICaptureGetInfo", (void **)&acl.capture_info, 1},
    {"aclmdlRICaptureThreadExchangeMode", (void **)&acl.capture_mode, 1},
    SYMBOL("aclGetRecentErrMsg", recent),
};

static kvb_npu npus[MAX_DEVICES]; /* written by open, under its lock */

int kvb_acl_check(const char *function, const char *of, int code) {
  if (code == ACL_SUCCESS) return KVB_OK;
  const char *words = acl.recent();
  const char *said = words != NULL && *words != '\0' ? words : "ACL has no words for it";
  return kvb_fail(KVB_DEVICE_ERROR, "%s%s%s%s: error %d: %s", function, of != NULL ? " (" : "", of != NULL ? of : "",
                  of != NULL ? ")" : "", code, said);
}

static int check(const char *function, result code) { return kvb_acl_check(function, NULL, code); }

int kvb_driver_start(void) {
  static void *library;
  if (library != NULL) return KVB_OK;
  void *opened;
  int code = kvb_library_open(NAMES, sizeof NAMES / sizeof NAMES[0], ADVICE, &opened);
  if (code == KVB_OK) code = kvb_library_find(opened, NAMES[0], SYMBOLS, sizeof SYMBOLS / sizeof SYMBOLS[0]);
  if (code != KVB_OK) return code;
  result began = acl.init(NULL);
  /* A framework in this process has usually begun already; ACL takes one beginning only. */
  if (began != ACL_REPEAT_INITIALIZE && (code = check("aclInit", began)) != KVB_OK) return code;
  if (KVB_STAGES.needs_gather && (code = kvb_gather_start()) != KVB_OK) return code;
  library = opened;
  return KVB_OK;
}

static int describe(int32_t device, kvb_npu *npu) {
  int code = check("aclrtGetHardwareSyncAddr", acl.sync_address(&npu->sync));
  if (code != KVB_OK) return code;
  code = check("aclrtGetDeviceInfo", acl.device_info((uint32_t)device, DEVICE_VECTOR_CORES, &npu->vector_cores));
  if (code == KVB_OK && npu->vector_cores < 1)
    code = kvb_fail(KVB_DEVICE_ERROR, "aclrtGetDeviceInfo: wanted one vector core or more, found %lld",
                    (long long)npu->vector_cores);
  return code;
}

int kvb_driver_open(int device_id, int needs_scratch, kvb_context *context) {
  (void)needs_scratch;
  uint32_t count = 0;
  void *before = NULL;
  *context = (kvb_context){.device_id = device_id, .device = device_id};
  int code = check("aclrtGetDeviceCount", acl.device_count(&count));
  if (code != KVB_OK) return code;
  if (device_id < 0 || (uint32_t)device_id >= count || device_id >= MAX_DEVICES)
    return kvb_fail(KVB_DEVICE_ERROR, "npu:%d: wanted one of the %u devices that this process sees", device_id, count);
  /* A thread that has used no device has no context, which ACL calls an error. */
  if (acl.context_get(&before) != ACL_SUCCESS) before = NULL;
  code = check("aclrtSetDevice", acl.device_set(device_id));
  if (code != KVB_OK) return code;
  code = check("aclrtGetCurrentContext", acl.context_get(&context->primary));
  if (code == KVB_OK) code = describe(device_id, &npus[device_id]);
  if (before != NULL) {
    int back = check("aclrtSetCurrentContext", acl.context_set(before));
    if (code == KVB_OK) code = back;
  }
  return code;
}

/* The device stays set: others in this process may be using it. */
void kvb_driver_close(kvb_context *context) {
  kvb_scope scope;
  if (context->primary == NULL || kvb_driver_enter(context, &scope) != KVB_OK) return;
  kvb_workspaces_end(context->device_id);
  kvb_driver_leave(&scope);
  context->primary = NULL;
}

/* A context of the caller's own on this device is as good as the default one, and its streams belong to it. */
int kvb_driver_enter(const kvb_context *context, kvb_scope *scope) {
  int32_t current = -1;
  *scope = (kvb_scope){0};
  if (acl.device_get(&current) == ACL_SUCCESS && current == context->device) return KVB_OK;
  if (acl.context_get(&scope->context) != ACL_SUCCESS) scope->context = NULL;
  int code = check("aclrtSetCurrentContext", acl.context_set(context->primary));
  scope->changed = code == KVB_OK;
  return code;
}

int kvb_driver_leave(const kvb_scope *scope) {
  if (!scope->changed || scope->context == NULL) return KVB_OK;
  return check("aclrtSetCurrentContext", acl.context_set(scope->context));
}

int kvb_driver_load(const kvb_context *context, const void *image, size_t size, void **module) {
  (void)context;
  load_option magic = {BINARY_LOAD_OPTION_MAGIC, {BINARY_MAGIC_VECTOR_CORE}};
  load_options options = {&magic, 1};
  return check("aclrtBinaryLoadFromData", acl.binary_load(image, size, &options, module));
}

int kvb_driver_resolve(const kvb_context *context, void *module, const kvb_kernel *kernel, kvb_function *function) {
  (void)context;
  return kvb_acl_check("aclrtBinaryGetFunction", kernel->name, acl.binary_function(module, kernel->entry, function));
}

void kvb_driver_unload(void *module) { acl.binary_unload(module); }

const kvb_npu *kvb_acl_npu(int device_id) { return &npus[device_id]; }

int kvb_acl_launch(const char *name, kvb_function function, uint32_t blocks, void *arguments, size_t size,
                   void *stream) {
  return kvb_acl_check("aclrtLaunchKernelWithHostArgs", name,
                       acl.launch(function, blocks, stream, NULL, arguments, size, NULL, 0));
}

/* A thread that captures may not allocate, unless it says that it knows what it does. */
int kvb_acl_alloc(size_t bytes, void **memory) {
  int mode = CAPTURE_MODE_RELAXED;
  int changed = acl.capture_mode != NULL && acl.capture_mode(&mode) == ACL_SUCCESS;
  int code = check("aclrtMalloc", acl.memory_make(memory, bytes, MALLOC_HUGE_FIRST));
  if (changed) acl.capture_mode(&mode);
  return code;
}

void kvb_acl_free(void *memory) { acl.memory_free(memory); }

int kvb_acl_capturing(void *stream, void **graph) {
  int status = CAPTURE_NONE;
  *graph = NULL;
  if (acl.capture_info == NULL) return KVB_OK;
  int code = check("aclmdlRICaptureGetInfo", acl.capture_info(stream, &status, graph));
  if (code != KVB_OK || status == CAPTURE_NONE) *graph = NULL;
  return code;
}

int kvb_acl_event_make(void **event) {
  return check("aclrtCreateEventExWithFlag", acl.event_make(event, EVENT_SYNC));
}

void kvb_acl_event_end(void *event) { acl.event_end(event); }

int kvb_acl_event_record(void *event, void *stream) { return check("aclrtRecordEvent", acl.event_record(event, stream)); }

int kvb_acl_event_done(void *event, int *done) {
  int status = 0;
  int code = check("aclrtQueryEventStatus", acl.event_status(event, &status));
  *done = code == KVB_OK && status == EVENT_COMPLETE;
  return code;
}

int kvb_acl_wait(void *stream) { return check("aclrtSynchronizeStream", acl.stream_wait(stream)); }
