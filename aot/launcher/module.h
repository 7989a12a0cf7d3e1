/* A driver that loads modules and launches functions, as its vendor names it: one row, generated. */
#ifndef KVB_MODULE_H
#define KVB_MODULE_H

#include <stddef.h>

/* What driver_module.c calls: X(role, result, parameters). A row names the function of each role that its
 * driver has, and leaves the others out. All but the first three texts return 0 for success, else an error.
 *
 * What is current in a thread is either a device (device_current, device_choose) or a context, of which the
 * frameworks share each device's primary one (context_current, context_choose, context_retain,
 * context_release; device_handle gives the driver's number for a device).
 *
 * Scratch is stream-ordered memory: out of a pool of our own where the row has the four pool functions (and
 * `pools`, the device attribute that says whether a device has pools), else by alloc. */
#define KVB_ROLES(X)                                                                                         \
  X(error_name, const char *, (int))                                                                         \
  X(error_string, const char *, (int))                                                                       \
  X(init, int, (unsigned))                                                                                   \
  X(driver_version, int, (int *))                                                                            \
  X(error_name_into, int, (int, const char **))                                                              \
  X(error_string_into, int, (int, const char **))                                                            \
  X(device_count, int, (int *))                                                                              \
  X(device_current, int, (int *))                                                                            \
  X(device_choose, int, (int))                                                                               \
  X(device_handle, int, (int *, int))                                                                        \
  X(context_retain, int, (void **, int))                                                                     \
  X(context_release, int, (int))                                                                             \
  X(context_current, int, (void **))                                                                         \
  X(context_choose, int, (void *))                                                                           \
  X(module_load, int, (void **, const void *))                                                               \
  X(module_unload, int, (void *))                                                                            \
  X(module_function, int, (void **, void *, const char *))                                                   \
  X(launch, int, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,      \
                  void **, void **))

#define KVB_SCRATCH_ROLES(X)                                                                                 \
  X(alloc, int, (void **, size_t, void *))                                                                   \
  X(free, int, (void *, void *))                                                                             \
  X(device_attribute, int, (int *, int, int))                                                                \
  X(pool_create, int, (void **, const void *))                                                               \
  X(pool_set, int, (void *, int, void *))                                                                    \
  X(pool_destroy, int, (void *))                                                                             \
  X(pool_alloc, int, (void **, size_t, void *, void *))

typedef struct kvb_module_driver {
  const char *const *libraries; /* in the order they are looked for */
  size_t num_libraries;
  const char *advice; /* where there is none of them */
  int pools;
#define KVB_NAME(role, result, parameters) const char *role;
  KVB_ROLES(KVB_NAME)
  KVB_SCRATCH_ROLES(KVB_NAME)
#undef KVB_NAME
} kvb_module_driver;

extern const kvb_module_driver KVB_MODULE_DRIVER;

#endif
