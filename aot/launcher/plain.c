/* The plain C interface: arguments into a struct, blobs out of an array. */
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "error.h"
#include "kvbuild.h"
#include "target.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct blob_list {
  const kvb_blob *blobs;
  size_t count;
} blob_list;

static int copy_from_list(const void *self, const char *sha256, void **data, size_t *size) {
  const blob_list *list = self;
  for (size_t i = 0; i < list->count; ++i) {
    const kvb_blob *blob = &list->blobs[i];
    if (blob->sha256 == NULL || blob->data == NULL || strcmp(blob->sha256, sha256) != 0) continue;
    *data = malloc(blob->size > 0 ? blob->size : 1);
    if (*data == NULL) return kvb_fail(KVB_MEMORY_ERROR, "no memory for the %zu bytes of blob %s", blob->size,
        sha256);
    memcpy(*data, blob->data, blob->size);
    *size = blob->size;
    return KVB_OK;
  }
  return kvb_fail(KVB_VALUE_ERROR, "blobs: wanted %s among them, found it missing. Pass all of the target's blobs",
                  sha256);
}

EXPORT int kvb_open(int device_id, const void *manifest, size_t manifest_size, const kvb_blob *blobs,
                    size_t num_blobs) {
  blob_list list = {blobs, blobs == NULL ? 0 : num_blobs};
  kvb_source source = {copy_from_list, &list};
  return kvb_target_open(device_id, manifest, manifest_size, &source);
}

EXPORT int kvb_compress(const DLTensor *state_cache, const DLTensor *token_to_req, const DLTensor *positions,
                        const DLTensor *boundary_token_indices, const DLTensor *block_table,
                        const DLTensor *rms_norm_weight, const DLTensor *cos_sin_cache,
                        const DLTensor *kv_slot_mapping, const DLTensor *kv_cache, int64_t block_size,
                        int64_t compress_ratio, double rms_norm_eps, void *stream) {
  kvb_arguments arguments = {
      .tensors = {state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
                  cos_sin_cache, kv_slot_mapping, kv_cache},
      .block_size = block_size,
      .compress_ratio = compress_ratio,
      .rms_norm_eps = rms_norm_eps,
  };
  return kvb_call(&arguments, NULL, NULL, stream);
}

EXPORT int kvb_bind(const DLTensor *state_cache, const DLTensor *block_table, const DLTensor *rms_norm_weight,
                    const DLTensor *cos_sin_cache, const DLTensor *kv_cache, int64_t block_size,
                    int64_t compress_ratio, double rms_norm_eps, const kvb_watch *watch, kvb_binding **binding) {
  kvb_arguments arguments = {
      .tensors = {[KVB_STATE_CACHE] = state_cache,
                  [KVB_BLOCK_TABLE] = block_table,
                  [KVB_RMS_NORM_WEIGHT] = rms_norm_weight,
                  [KVB_COS_SIN_CACHE] = cos_sin_cache,
                  [KVB_KV_CACHE] = kv_cache},
      .block_size = block_size,
      .compress_ratio = compress_ratio,
      .rms_norm_eps = rms_norm_eps,
  };
  return kvb_call_bind(&arguments, watch, binding);
}

EXPORT int kvb_step(const kvb_binding *binding, const DLTensor *token_to_req, const DLTensor *positions,
                    const DLTensor *boundary_token_indices, const DLTensor *kv_slot_mapping, void *stream) {
  kvb_arguments arguments = {
      .tensors = {[KVB_TOKEN_TO_REQ] = token_to_req,
                  [KVB_POSITIONS] = positions,
                  [KVB_BOUNDARY_TOKEN_INDICES] = boundary_token_indices,
                  [KVB_KV_SLOT_MAPPING] = kv_slot_mapping},
  };
  if (binding == NULL) return kvb_fail(KVB_TYPE_ERROR, "binding: wanted one that kvb_bind made, found NULL");
  return kvb_call_step(binding, &arguments, 0, stream);
}

EXPORT void kvb_unbind(kvb_binding *binding) { free(binding); }

EXPORT int kvb_close(int device_id) { return kvb_target_close(device_id); }

EXPORT int kvb_pin(int device_id, int64_t variant) { return kvb_target_pin(device_id, variant); }

EXPORT int kvb_counters(int device_id, int64_t *values, size_t capacity, size_t *count) {
  return kvb_target_counters(device_id, values, capacity, count);
}
