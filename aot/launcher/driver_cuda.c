/* The CUDA driver, 12.0 and later. Only what is used is declared, so that no CUDA header is needed. */
#include <inttypes.h>
#include <stdint.h>
#include <string.h>

#include "driver.h"
#include "error.h"
#include "library.h"

static const char *const NAMES[] = {"libcuda.so.1"};
static const char ADVICE[] = "Install the NVIDIA driver on this host, or choose a target that this host has a "
                             "device for";

typedef int result;

enum {
  CUDA_SUCCESS = 0,
  DEVICE_MEMORY_POOLS_SUPPORTED = 115,
  FUNCTION_MAX_DYNAMIC_SHARED = 8,
  FUNCTION_NON_PORTABLE_CLUSTER = 14,
  LAUNCH_CLUSTER_DIMENSION = 4,
  LAUNCH_CLUSTER_SCHEDULING = 5,
  CLUSTER_SCHEDULING_SPREAD = 1,
  POOL_RELEASE_THRESHOLD = 4,
  ALLOCATION_PINNED = 1,
  LOCATION_DEVICE = 1,
  DEFAULT_SHARED = 48 * 1024, /* beyond this, dynamic shared memory must be asked for */
  PORTABLE_CLUSTER = 8
};

typedef struct launch_attribute {
  int id;
  int padding;
  union {
    char size[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int scheduling;
  } value;
} launch_attribute;

typedef struct launch_config {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  void *stream;
  launch_attribute *attributes;
  unsigned num_attributes;
} launch_config;

typedef struct pool_properties {
  int allocation, handles;
  struct {
    int type, id;
  } location;
  void *security;
  size_t max_size;
  unsigned char reserved[56];
} pool_properties;

_Static_assert(sizeof(launch_attribute) == 72, "CUlaunchAttribute");
_Static_assert(sizeof(launch_config) == 56, "CUlaunchConfig");
_Static_assert(sizeof(pool_properties) == 88, "CUmemPoolProps");

static struct {
  result (*init)(unsigned);
  result (*driver_version)(int *);
  result (*device_count)(int *);
  result (*device_get)(int32_t *, int);
  result (*device_attribute)(int *, int, int32_t);
  result (*context_retain)(void **, int32_t);
  result (*context_release)(int32_t);
  result (*context_current)(void **);
  result (*context_push)(void *);
  result (*context_pop)(void **);
  result (*library_load)(void **, const void *, void *, void **, unsigned, void *, void **, unsigned);
  result (*library_unload)(void *);
  result (*library_kernel)(void **, void *, const char *);
  result (*kernel_function)(void **, void *);
  result (*kernel_attribute)(int, int, void *, int32_t);
  result (*function_load)(void *);
  result (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
      void **, void **);
  result (*launch_ex)(const launch_config *, void *, void **, void **);
  result (*pool_create)(void **, const pool_properties *);
  result (*pool_set)(void *, int, void *);
  result (*pool_destroy)(void *);
  result (*pool_alloc)(uint64_t *, size_t, void *, void *);
  result (*pool_free)(uint64_t, void *);
  result (*error_name)(result, const char **);
  result (*error_string)(result, const char **);
} cu;

#define SYMBOL(name, member) {name, (void **)&cu.member, 0}
static const kvb_symbol SYMBOLS[] = {
    SYMBOL("cuInit", init),
    SYMBOL("cuDriverGetVersion", driver_version),
    SYMBOL("cuDeviceGetCount", device_count),
    SYMBOL("cuDeviceGet", device_get),
    SYMBOL("cuDeviceGetAttribute", device_attribute),
    SYMBOL("cuDevicePrimaryCtxRetain", context_retain),
    SYMBOL("cuDevicePrimaryCtxRelease_v2", context_release),
    SYMBOL("cuCtxGetCurrent", context_current),
    SYMBOL("cuCtxPushCurrent_v2", context_push),
    SYMBOL("cuCtxPopCurrent_v2", context_pop),
    SYMBOL("cuLibraryLoadData", library_load),
    SYMBOL("cuLibraryUnload", library_unload),
    SYMBOL("cuLibraryGetKernel", library_kernel),
    SYMBOL("cuKernelGetFunction", kernel_function),
    SYMBOL("cuKernelSetAttribute", kernel_attribute),
    {"cuFuncLoad", (void **)&cu.function_load, 1}, /* since 12.4; before, resolving a function loads it */
    SYMBOL("cuLaunchKernel", launch),
    SYMBOL("cuLaunchKernelEx", launch_ex),
    SYMBOL("cuMemPoolCreate", pool_create),
    SYMBOL("cuMemPoolSetAttribute", pool_set),
    SYMBOL("cuMemPoolDestroy", pool_destroy),
    SYMBOL("cuMemAllocFromPoolAsync", pool_alloc),
    SYMBOL("cuMemFreeAsync", pool_free),
    SYMBOL("cuGetErrorName", error_name),
    SYMBOL("cuGetErrorString", error_string),
};

static int check(const char *function, result code) {
  if (code == CUDA_SUCCESS) return KVB_OK;
  const char *name = NULL, *words = NULL;
  if (cu.error_name(code, &name) != CUDA_SUCCESS || name == NULL) name = "unknown error";
  if (cu.error_string(code, &words) != CUDA_SUCCESS || words == NULL) words = "the driver has no words for it";
  return kvb_fail(KVB_DEVICE_ERROR, "%s: %s (%d): %s", function, name, code, words);
}

int kvb_driver_start(void) {
  static void *library;
  if (library != NULL) return KVB_OK;
  void *opened;
  int version = 0;
  int code = kvb_library_open(NAMES, 1, ADVICE, &opened);
  if (code == KVB_OK) code = kvb_library_find(opened, NAMES[0], SYMBOLS, sizeof SYMBOLS / sizeof SYMBOLS[0]);
  if (code == KVB_OK) code = check("cuInit", cu.init(0));
  if (code == KVB_OK) code = check("cuDriverGetVersion", cu.driver_version(&version));
  if (code != KVB_OK) return code;
  if (version < KVB_TABLE.min_driver)
    return kvb_fail(KVB_DEVICE_ERROR, "%s: wanted a driver for CUDA %d.%d or later, which built the kernels of "
                                      "%s; found %d.%d. Install a newer driver",
                    NAMES[0], KVB_TABLE.min_driver / 1000, KVB_TABLE.min_driver % 1000 / 10, KVB_TABLE.target,
                    version / 1000, version % 1000 / 10);
  library = opened;
  return KVB_OK;
}

/* A pool of our own: the device's default pool belongs to the process. It keeps what it got, so that
 * taking scratch again costs no trip to the operating system. */
static int make_pool(kvb_context *context) {
  int supported = 0;
  int code = check("cuDeviceGetAttribute", cu.device_attribute(&supported, DEVICE_MEMORY_POOLS_SUPPORTED,
                   context->device));
  if (code != KVB_OK) return code;
  if (!supported)
    return kvb_fail(KVB_DEVICE_ERROR, "cuda:%d: wanted a device with memory pools, which kernels of %s take "
                                      "scratch from; this one has none. Build tile configs without scratch",
                    context->device_id, KVB_TABLE.target);
  pool_properties properties = {.allocation = ALLOCATION_PINNED, .location = {LOCATION_DEVICE, context->device_id}};
  code = check("cuMemPoolCreate", cu.pool_create(&context->pool, &properties));
  if (code != KVB_OK) return code;
  uint64_t threshold = UINT64_MAX;
  return check("cuMemPoolSetAttribute", cu.pool_set(context->pool, POOL_RELEASE_THRESHOLD, &threshold));
}

int kvb_driver_open(int device_id, int needs_scratch, kvb_context *context) {
  int count = 0;
  *context = (kvb_context){.device_id = device_id};
  int code = check("cuDeviceGetCount", cu.device_count(&count));
  if (code != KVB_OK) return code;
  if (device_id < 0 || device_id >= count)
    return kvb_fail(KVB_DEVICE_ERROR, "cuda:%d: wanted one of the %d devices that this process sees",
                                      device_id, count);
  code = check("cuDeviceGet", cu.device_get(&context->device, device_id));
  if (code == KVB_OK) code = check("cuDevicePrimaryCtxRetain", cu.context_retain(&context->primary, context->device));
  if (code != KVB_OK) {
    context->primary = NULL;
    return code;
  }
  if (needs_scratch) code = make_pool(context);
  if (code != KVB_OK) kvb_driver_close(context);
  return code;
}

void kvb_driver_close(kvb_context *context) {
  if (context->pool != NULL) cu.pool_destroy(context->pool);
  if (context->primary != NULL) cu.context_release(context->device);
  context->pool = context->primary = NULL;
}

/* A stream that is not NULL has a context of its own, but the driver still wants one to be current; the
 * NULL stream means whichever is. */
int kvb_driver_enter(const kvb_context *context, kvb_scope *scope) {
  void *current = NULL;
  scope->changed = 0;
  int code = check("cuCtxGetCurrent", cu.context_current(&current));
  if (code != KVB_OK || current == context->primary) return code;
  code = check("cuCtxPushCurrent", cu.context_push(context->primary));
  scope->changed = code == KVB_OK;
  return code;
}

int kvb_driver_leave(const kvb_scope *scope) {
  void *popped;
  return scope->changed ? check("cuCtxPopCurrent", cu.context_pop(&popped)) : KVB_OK;
}

int kvb_driver_load(const kvb_context *context, const void *image, size_t size, void **module) {
  (void)context, (void)size;
  return check("cuLibraryLoadData", cu.library_load(module, image, NULL, NULL, 0, NULL, NULL, 0));
}

/* The handle that is launched is the context-free one: the driver takes the stream's context, which may be
 * a green context. Its function in the primary context is loaded here, because a launch under stream
 * capture must not load anything. */
int kvb_driver_resolve(const kvb_context *context, void *module, const kvb_kernel *kernel, kvb_function *function) {
  void *resolved;
  int code = check("cuLibraryGetKernel", cu.library_kernel(function, module, kernel->entry));
  if (code == KVB_OK && kernel->shared > DEFAULT_SHARED)
    code = check("cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)",
                 cu.kernel_attribute(FUNCTION_MAX_DYNAMIC_SHARED, (int)kernel->shared, *function, context->device));
  if (code == KVB_OK && kernel->cluster > PORTABLE_CLUSTER)
    code = check("cuKernelSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)",
                 cu.kernel_attribute(FUNCTION_NON_PORTABLE_CLUSTER, 1, *function, context->device));
  if (code == KVB_OK) code = check("cuKernelGetFunction", cu.kernel_function(&resolved, *function));
  if (code == KVB_OK && cu.function_load != NULL) code = check("cuFuncLoad", cu.function_load(resolved));
  return code;
}

void kvb_driver_unload(void *module) { cu.library_unload(module); }

int kvb_driver_alloc(const kvb_context *context, size_t bytes, void *stream, void **memory) {
  uint64_t address = 0;
  int code = check("cuMemAllocFromPoolAsync", cu.pool_alloc(&address, bytes, context->pool, stream));
  *memory = (void *)(uintptr_t)address;
  return code;
}

int kvb_driver_free(void *memory, void *stream) {
  return check("cuMemFreeAsync", cu.pool_free((uint64_t)(uintptr_t)memory, stream));
}

int kvb_driver_launch(const kvb_kernel *kernel, kvb_function function, uint32_t grid_x, void *stream,
                      void **parameters) {
  if (kernel->cluster == 1)
    return check("cuLaunchKernel", cu.launch(function, grid_x, kernel->grid_y, 1, kernel->block, 1, 1, kernel->shared,
                                             stream, parameters, NULL));
  launch_attribute attributes[2] = {
      {.id = LAUNCH_CLUSTER_DIMENSION, .value.cluster = {kernel->cluster, 1, 1}},
      {.id = LAUNCH_CLUSTER_SCHEDULING, .value.scheduling = CLUSTER_SCHEDULING_SPREAD},
  };
  launch_config config = {
      .grid_x = grid_x, .grid_y = kernel->grid_y, .grid_z = 1,
      .block_x = kernel->block, .block_y = 1, .block_z = 1,
      .shared = kernel->shared, .stream = stream,
      .attributes = attributes, .num_attributes = 2,
  };
  return check("cuLaunchKernelEx", cu.launch_ex(&config, function, parameters, NULL));
}

int64_t kvb_driver_max_grid(const kvb_kernel *kernel) {
  (void)kernel;
  return INT32_MAX;
}
