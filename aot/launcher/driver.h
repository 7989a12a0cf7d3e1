/* What a launcher needs of a driver. Each driver_*.c implements it, driver_module.c for most vendors; a
 * launcher is linked with one of them. Every function returns KVB_OK or a failure with the driver's words. */
#ifndef KVB_DRIVER_H
#define KVB_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "table.h"

typedef struct kvb_context {
  int device_id;
  int32_t device; /* the driver's own number for it */
  void *primary;  /* the context that frameworks use on this device; NULL where the driver has no contexts */
  void *pool;     /* of scratch memory; NULL where the table needs none */
} kvb_context;

/* What kvb_driver_leave has to put back. */
typedef struct kvb_scope {
  int changed;
  int32_t previous; /* the device that was current */
  void *context;    /* or the context, where that is what a driver keeps */
} kvb_scope;

/* One loaded kernel: what is launched. */
typedef void *kvb_function;

/* Loads the library and initialises the driver, once a process. Callers hold the open lock. */
int kvb_driver_start(void);

int kvb_driver_open(int device_id, int needs_scratch, kvb_context *context);
void kvb_driver_close(kvb_context *context);

/* Makes the device's context current in this thread where it is not, and puts back what was there. */
int kvb_driver_enter(const kvb_context *context, kvb_scope *scope);
int kvb_driver_leave(const kvb_scope *scope);

/* These are called inside enter and leave. */
int kvb_driver_load(const kvb_context *context, const void *image, size_t size, void **module);
int kvb_driver_resolve(const kvb_context *context, void *module, const kvb_kernel *kernel, kvb_function *function);
void kvb_driver_unload(void *module);
int kvb_driver_alloc(const kvb_context *context, size_t bytes, void *stream, void **memory);
int kvb_driver_free(void *memory, void *stream);
int kvb_driver_launch(const kvb_kernel *kernel, kvb_function function, uint32_t grid_x, void *stream,
                      void **parameters);

/* The most thread blocks that a launch may have along x. */
int64_t kvb_driver_max_grid(const kvb_kernel *kernel);

#endif
