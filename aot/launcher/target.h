/* What a target does; device.c and dispatch.c implement it for drivers, host.c for the host kernel. */
#ifndef KVB_TARGET_H
#define KVB_TARGET_H

#include "kvbuild.h"

struct kvb_arguments;

/* Where blobs come from. `copy` gives a copy made with malloc, or a failure that names the blob. */
typedef struct kvb_source {
  int (*copy)(const void *self, const char *sha256, void **data, size_t *size);
  const void *self;
} kvb_source;

int kvb_target_open(int device_id, const void *manifest, size_t manifest_size, const kvb_source *source);
int kvb_target_compress(const struct kvb_arguments *arguments, void *stream);
int kvb_target_close(int device_id);
int kvb_target_counters(int device_id, int64_t *values, size_t capacity, size_t *count);
int kvb_target_pin(int device_id, int64_t variant);

#endif
