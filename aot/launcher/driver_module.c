/* Every driver that loads modules and launches functions, by its row KVB_MODULE_DRIVER. Only what is used is
 * declared, so that no vendor's header is needed. */
#include "module.h"

#include <dlpack/dlpack.h>
#include <stdint.h>

#include "check.h"
#include "driver.h"
#include "error.h"
#include "library.h"

enum { SUCCESS = 0, POOL_RELEASE_THRESHOLD = 4, ALLOCATION_PINNED = 1, LOCATION_DEVICE = 1 };

typedef struct pool_properties {
  int allocation, handles;
  struct {
    int type, id;
  } location;
  void *security;
  size_t max_size;
  unsigned char reserved[56];
} pool_properties;

_Static_assert(sizeof(pool_properties) == 88, "the drivers' memory pool properties");

#define ROW KVB_MODULE_DRIVER

static struct {
#define FUNCTION(role, result, parameters) result(*role) parameters;
  KVB_ROLES(FUNCTION)
  KVB_SCRATCH_ROLES(FUNCTION)
#undef FUNCTION
} driver;

/* The driver's own name for an error, and its words. */
static int check(const char *function, int code) {
  if (code == SUCCESS) return KVB_OK;
  const char *name = NULL, *words = NULL;
  if (driver.error_name_into == NULL) {
    name = driver.error_name(code);
    words = driver.error_string(code);
  } else {
    if (driver.error_name_into(code, &name) != SUCCESS) name = NULL;
    if (driver.error_string_into(code, &words) != SUCCESS) words = NULL;
  }
  return kvb_fail(KVB_DEVICE_ERROR, "%s: %s (%d): %s", function, name != NULL ? name : "unknown error", code,
                  words != NULL ? words : "the driver has no words for it");
}

#define CALL(role, ...) check(ROW.role, driver.role(__VA_ARGS__))

static int find_functions(void *library) {
#define SYMBOL(role, result, parameters) {ROW.role, (void **)&driver.role, 0},
  const kvb_symbol symbols[] = {KVB_ROLES(SYMBOL)};
  const kvb_symbol scratch[] = {KVB_SCRATCH_ROLES(SYMBOL)};
#undef SYMBOL
  int code = KVB_OK;
  for (size_t i = 0; code == KVB_OK && i < sizeof symbols / sizeof symbols[0]; ++i)
    if (symbols[i].name != NULL) code = kvb_library_find(library, ROW.libraries[0], &symbols[i], 1);
  for (size_t i = 0; code == KVB_OK && KVB_TABLE.needs_scratch && i < sizeof scratch / sizeof scratch[0]; ++i)
    if (scratch[i].name != NULL) code = kvb_library_find(library, ROW.libraries[0], &scratch[i], 1);
  return code;
}

int kvb_driver_start(void) {
  static void *library;
  if (library != NULL) return KVB_OK;
  void *opened;
  int version = 0;
  int code = kvb_library_open(ROW.libraries, ROW.num_libraries, ROW.advice, &opened);
  if (code == KVB_OK) code = find_functions(opened);
  if (code == KVB_OK) code = CALL(init, 0);
  if (code == KVB_OK) code = CALL(driver_version, &version);
  if (code != KVB_OK) return code;
  if (version < KVB_TABLE.min_driver)
    return kvb_fail(KVB_DEVICE_ERROR, "%s: wanted version %d or later, for the kernels of %s; found %d. Install "
                                      "a newer driver",
                    ROW.libraries[0], KVB_TABLE.min_driver, KVB_TABLE.target, version);
  library = opened;
  return KVB_OK;
}

static const char *name_of(int device_id, char *text, int size) {
  return kvb_device_text((DLDevice){(DLDeviceType)KVB_TABLE.device_type, device_id}, text, size);
}

/* A pool of our own: the device's default pool belongs to the process. It keeps what it got, so that taking
 * scratch again costs no trip to the operating system. */
static int make_pool(kvb_context *context) {
  char name[64];
  int supported = 0;
  int code = CALL(device_attribute, &supported, ROW.pools, context->device);
  if (code != KVB_OK) return code;
  if (!supported)
    return kvb_fail(KVB_DEVICE_ERROR, "%s: wanted a device with memory pools, which kernels of %s take scratch "
                                      "from; this one has none. Build tile configs without scratch",
                    name_of(context->device_id, name, sizeof name), KVB_TABLE.target);
  pool_properties properties = {.allocation = ALLOCATION_PINNED, .location = {LOCATION_DEVICE, context->device_id}};
  code = CALL(pool_create, &context->pool, &properties);
  if (code != KVB_OK) return code;
  uint64_t threshold = UINT64_MAX;
  return CALL(pool_set, context->pool, POOL_RELEASE_THRESHOLD, &threshold);
}

int kvb_driver_open(int device_id, int needs_scratch, kvb_context *context) {
  char name[64];
  int count = 0;
  *context = (kvb_context){.device_id = device_id, .device = device_id};
  int code = CALL(device_count, &count);
  if (code != KVB_OK) return code;
  if (device_id < 0 || device_id >= count)
    return kvb_fail(KVB_DEVICE_ERROR, "%s: wanted one of the %d devices that this process sees",
                    name_of(device_id, name, sizeof name), count);
  if (driver.context_retain != NULL) {
    code = CALL(device_handle, &context->device, device_id);
    if (code == KVB_OK) code = CALL(context_retain, &context->primary, context->device);
    if (code != KVB_OK) {
      context->primary = NULL;
      return code;
    }
  }
  if (needs_scratch && driver.pool_create != NULL) code = make_pool(context);
  if (code != KVB_OK) kvb_driver_close(context);
  return code;
}

void kvb_driver_close(kvb_context *context) {
  if (context->pool != NULL) driver.pool_destroy(context->pool);
  if (context->primary != NULL) driver.context_release(context->device);
  context->pool = context->primary = NULL;
}

/* A module and the NULL stream belong to whatever is current in the thread. */
int kvb_driver_enter(const kvb_context *context, kvb_scope *scope) {
  int code;
  *scope = (kvb_scope){0};
  if (driver.context_retain != NULL) {
    code = CALL(context_current, &scope->context);
    if (code != KVB_OK || scope->context == context->primary) return code;
    code = CALL(context_choose, context->primary);
  } else {
    code = CALL(device_current, &scope->previous);
    if (code != KVB_OK || scope->previous == context->device) return code;
    code = CALL(device_choose, context->device);
  }
  scope->changed = code == KVB_OK;
  return code;
}

int kvb_driver_leave(const kvb_scope *scope) {
  if (!scope->changed) return KVB_OK;
  if (driver.context_retain != NULL) return CALL(context_choose, scope->context);
  return CALL(device_choose, scope->previous);
}

int kvb_driver_load(const kvb_context *context, const void *image, size_t size, void **module) {
  (void)context, (void)size;
  return CALL(module_load, module, image);
}

int kvb_driver_resolve(const kvb_context *context, void *module, const kvb_kernel *kernel, kvb_function *function) {
  (void)context;
  return CALL(module_function, function, module, kernel->entry);
}

void kvb_driver_unload(void *module) { driver.module_unload(module); }

int kvb_driver_alloc(const kvb_context *context, size_t bytes, void *stream, void **memory) {
  if (context->pool != NULL) return CALL(pool_alloc, memory, bytes, context->pool, stream);
  return CALL(alloc, memory, bytes, stream);
}

int kvb_driver_free(void *memory, void *stream) { return CALL(free, memory, stream); }

int kvb_driver_launch(const kvb_kernel *kernel, kvb_function function, uint32_t grid_x, void *stream,
                      void **parameters) {
  return CALL(launch, function, grid_x, kernel->grid_y, 1, kernel->block, 1, 1, kernel->shared, stream, parameters,
              NULL);
}

/* HIP counts a launch's threads, not its blocks, in 32 bits; of the others nothing beyond that is known. */
int64_t kvb_driver_max_grid(const kvb_kernel *kernel) {
  int64_t blocks = (int64_t)UINT32_MAX / kernel->block;
  return blocks < INT32_MAX ? blocks : INT32_MAX;
}
