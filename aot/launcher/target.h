/* What a target does; device.c and dispatch.c (or staged.c) implement it for drivers, host.c for the host kernel. */
#ifndef KVB_TARGET_H
#define KVB_TARGET_H

#include <dlpack/dlpack.h>

#include "kvbuild.h"
#include "operands.h"

/* Where blobs come from. `copy` gives a copy made with malloc, or a failure that names the blob. */
typedef struct kvb_source {
  int (*copy)(const void *self, const char *sha256, void **data, size_t *size);
  const void *self;
} kvb_source;

int kvb_target_open(int device_id, const void *manifest, size_t manifest_size, const kvb_source *source);
int kvb_target_close(int device_id);
int kvb_target_counters(int device_id, int64_t *values, size_t capacity, size_t *count);
int kvb_target_pin(int device_id, int64_t variant);

/* A call lies between begin and end, and close waits for it. Begin fails, in the name of `function`, where `place`,
 * which is state_cache's, is not open; `lent` is for run. Run counts, chooses and launches what checked operands
 * ask for. */
int kvb_target_begin(DLDevice place, const char *function, void **lent);
int kvb_target_run(void *lent, kvb_operands *operands, void *stream);
void kvb_target_end(DLDevice place);

#endif
