/* The HIP runtime, ROCm 6 and later. Only what is used is declared, so that no HIP header is needed. */
#include <stdint.h>

#include "driver.h"
#include "error.h"
#include "library.h"

static const char *const NAMES[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"};
static const char ADVICE[] = "Install ROCm's HIP runtime on this host, or choose a target that this host has a "
                             "device for";

typedef int result;

enum {
  HIP_SUCCESS = 0,
  DEVICE_MEMORY_POOLS_SUPPORTED = 88,
  POOL_RELEASE_THRESHOLD = 4,
  ALLOCATION_PINNED = 1,
  LOCATION_DEVICE = 1
};

typedef struct pool_properties {
  int allocation, handles;
  struct {
    int type, id;
  } location;
  void *security;
  size_t max_size;
  unsigned char reserved[56];
} pool_properties;

_Static_assert(sizeof(pool_properties) == 88, "hipMemPoolProps");

static struct {
  result (*init)(unsigned);
  result (*driver_version)(int *);
  result (*device_count)(int *);
  result (*device_get)(int *);
  result (*device_set)(int);
  result (*device_attribute)(int *, int, int);
  result (*module_load)(void **, const void *);
  result (*module_unload)(void *);
  result (*module_function)(void **, void *, const char *);
  result (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
      void **, void **);
  result (*pool_create)(void **, const pool_properties *);
  result (*pool_set)(void *, int, void *);
  result (*pool_destroy)(void *);
  result (*pool_alloc)(void **, size_t, void *, void *);
  result (*pool_free)(void *, void *);
  const char *(*error_name)(result);
  const char *(*error_string)(result);
} hip;

#define SYMBOL(name, member) {name, (void **)&hip.member, 0}
static const kvb_symbol SYMBOLS[] = {
    SYMBOL("hipInit", init),
    SYMBOL("hipDriverGetVersion", driver_version),
    SYMBOL("hipGetDeviceCount", device_count),
    SYMBOL("hipGetDevice", device_get),
    SYMBOL("hipSetDevice", device_set),
    SYMBOL("hipDeviceGetAttribute", device_attribute),
    SYMBOL("hipModuleLoadData", module_load),
    SYMBOL("hipModuleUnload", module_unload),
    SYMBOL("hipModuleGetFunction", module_function),
    SYMBOL("hipModuleLaunchKernel", launch),
    SYMBOL("hipMemPoolCreate", pool_create),
    SYMBOL("hipMemPoolSetAttribute", pool_set),
    SYMBOL("hipMemPoolDestroy", pool_destroy),
    SYMBOL("hipMallocFromPoolAsync", pool_alloc),
    SYMBOL("hipFreeAsync", pool_free),
    SYMBOL("hipGetErrorName", error_name),
    SYMBOL("hipGetErrorString", error_string),
};

static int check(const char *function, result code) {
  if (code == HIP_SUCCESS) return KVB_OK;
  const char *name = hip.error_name(code), *words = hip.error_string(code);
  return kvb_fail(KVB_DEVICE_ERROR, "%s: %s (%d): %s", function, name != NULL ? name : "unknown error", code,
                  words != NULL ? words : "the runtime has no words for it");
}

int kvb_driver_start(void) {
  static void *library;
  if (library != NULL) return KVB_OK;
  void *opened;
  int version = 0;
  int code = kvb_library_open(NAMES, sizeof NAMES / sizeof NAMES[0], ADVICE, &opened);
  if (code == KVB_OK) code = kvb_library_find(opened, NAMES[0], SYMBOLS, sizeof SYMBOLS / sizeof SYMBOLS[0]);
  if (code == KVB_OK) code = check("hipInit", hip.init(0));
  if (code == KVB_OK) code = check("hipDriverGetVersion", hip.driver_version(&version));
  if (code != KVB_OK) return code;
  if (version < KVB_TABLE.min_driver)
    return kvb_fail(KVB_DEVICE_ERROR, "%s: wanted version %d or later, for the kernels of %s; found %d. Install "
                                      "a newer ROCm",
                    NAMES[0], KVB_TABLE.min_driver, KVB_TABLE.target, version);
  library = opened;
  return KVB_OK;
}

/* A pool of our own: the device's default pool belongs to the process. */
static int make_pool(kvb_context *context) {
  int supported = 0;
  int code = check("hipDeviceGetAttribute", hip.device_attribute(&supported, DEVICE_MEMORY_POOLS_SUPPORTED,
                   context->device));
  if (code != KVB_OK) return code;
  if (!supported)
    return kvb_fail(KVB_DEVICE_ERROR, "rocm:%d: wanted a device with memory pools, which kernels of %s take "
                                      "scratch from; this one has none. Build tile configs without scratch",
                    context->device_id, KVB_TABLE.target);
  pool_properties properties = {.allocation = ALLOCATION_PINNED, .location = {LOCATION_DEVICE, context->device_id}};
  code = check("hipMemPoolCreate", hip.pool_create(&context->pool, &properties));
  if (code != KVB_OK) return code;
  uint64_t threshold = UINT64_MAX;
  return check("hipMemPoolSetAttribute", hip.pool_set(context->pool, POOL_RELEASE_THRESHOLD, &threshold));
}

int kvb_driver_open(int device_id, int needs_scratch, kvb_context *context) {
  int count = 0;
  *context = (kvb_context){.device_id = device_id, .device = device_id};
  int code = check("hipGetDeviceCount", hip.device_count(&count));
  if (code != KVB_OK) return code;
  if (device_id < 0 || device_id >= count)
    return kvb_fail(KVB_DEVICE_ERROR, "rocm:%d: wanted one of the %d devices that this process sees",
                                      device_id, count);
  if (needs_scratch) code = make_pool(context);
  if (code != KVB_OK) kvb_driver_close(context);
  return code;
}

void kvb_driver_close(kvb_context *context) {
  if (context->pool != NULL) hip.pool_destroy(context->pool);
  context->pool = NULL;
}

/* HIP keeps a current device for each thread; a module and the NULL stream belong to it. */
int kvb_driver_enter(const kvb_context *context, kvb_scope *scope) {
  scope->changed = 0;
  int code = check("hipGetDevice", hip.device_get(&scope->previous));
  if (code != KVB_OK || scope->previous == context->device) return code;
  code = check("hipSetDevice", hip.device_set(context->device));
  scope->changed = code == KVB_OK;
  return code;
}

int kvb_driver_leave(const kvb_scope *scope) {
  return scope->changed ? check("hipSetDevice", hip.device_set(scope->previous)) : KVB_OK;
}

int kvb_driver_load(const kvb_context *context, const void *image, size_t size, void **module) {
  (void)context, (void)size;
  return check("hipModuleLoadData", hip.module_load(module, image));
}

int kvb_driver_resolve(const kvb_context *context, void *module, const kvb_kernel *kernel, kvb_function *function) {
  (void)context;
  return check("hipModuleGetFunction", hip.module_function(function, module, kernel->entry));
}

void kvb_driver_unload(void *module) { hip.module_unload(module); }

int kvb_driver_alloc(const kvb_context *context, size_t bytes, void *stream, void **memory) {
  return check("hipMallocFromPoolAsync", hip.pool_alloc(memory, bytes, context->pool, stream));
}

int kvb_driver_free(void *memory, void *stream) { return check("hipFreeAsync", hip.pool_free(memory, stream)); }

int kvb_driver_launch(const kvb_kernel *kernel, kvb_function function, uint32_t grid_x, void *stream,
                      void **parameters) {
  return check("hipModuleLaunchKernel", hip.launch(function, grid_x, kernel->grid_y, 1, kernel->block, 1, 1,
                                                   kernel->shared, stream, parameters, NULL));
}

/* The runtime counts threads, not blocks, in 32 bits. */
int64_t kvb_driver_max_grid(const kvb_kernel *kernel) {
  int64_t blocks = (int64_t)UINT32_MAX / kernel->block;
  return blocks < INT32_MAX ? blocks : INT32_MAX;
}
