/* The plain C interface of a kvbuild launcher. One launcher serves one target (such as nvidia:sm_90) on
 * one host platform; the TVM-FFI functions of the same names do the same.
 *
 * Every function may be called from any thread. `kvb_compress` takes no lock. */
#ifndef KVBUILD_H
#define KVBUILD_H

#include <stddef.h>
#include <stdint.h>

#include <dlpack/dlpack.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a function returns; kvb_last_error() has the words. */
enum {
  KVB_OK = 0,
  KVB_TYPE_ERROR = 1,   /* an argument of the wrong type or element type */
  KVB_VALUE_ERROR = 2,  /* an argument of the right type that cannot be used */
  KVB_DEVICE_ERROR = 3, /* the driver said no, or the device is not open; the text begins with "DeviceError: " */
  KVB_MEMORY_ERROR = 4  /* the host has no memory left */
};

/* One blob of the bundle: its name (64 hex digits) and its bytes, which are copied. */
typedef struct kvb_blob {
  const char *sha256;
  const void *data;
  size_t size;
} kvb_blob;

/* Prepares one device (0 for a cpu launcher): loads every kernel, so that nothing loads later. `manifest`
 * is the bundle's manifest.json; `blobs` holds at least the blobs that the target's kernels name. May be
 * called again for an open device; each call is undone by one kvb_close. */
int kvb_open(int device_id, const void *manifest, size_t manifest_size, const kvb_blob *blobs,
             size_t num_blobs);

/* Compresses into kv_cache, on `stream` (a CUstream, hipStream_t, aclrtStream or what else the driver has; NULL is
 * the default stream; ignored by a cpu launcher). Shapes and dtypes:
 *   state_cache             [num_blocks, block_size, 1024]  float32
 *   token_to_req            [num_tokens]                    int32
 *   positions               [num_tokens]                    int64
 *   boundary_token_indices  [num_outputs]                   int64
 *   block_table             [num_reqs, blocks_per_req]      int32
 *   rms_norm_weight         [512]                           bfloat16 or float32
 *   cos_sin_cache           [max_pos, 64]                   float32
 *   kv_slot_mapping         [num_tokens]                    int64
 *   kv_cache                [kv_pages, >= 37376]            uint8
 * All of them on one open device. `block_size` equals state_cache's. */
int kvb_compress(const DLTensor *state_cache, const DLTensor *token_to_req, const DLTensor *positions,
                 const DLTensor *boundary_token_indices, const DLTensor *block_table,
                 const DLTensor *rms_norm_weight, const DLTensor *cos_sin_cache,
                 const DLTensor *kv_slot_mapping, const DLTensor *kv_cache, int64_t block_size,
                 int64_t compress_ratio, double rms_norm_eps, void *stream);

/* How a step sees whether the fixed tensors are still what was bound. Any of it may be NULL.
 *   look    fills in a tensor's present state and returns 0 (DLPack's dltensor_from_py_object_no_sync); called
 *           with each of `owners`, which are in kvb_bind's order, on every step that is given no fixed tensors
 *   failed  called where `look` returned something else
 *   pause, resume  around the launches: PyEval_SaveThread, PyEval_RestoreThread, where `look` needs the
 *           interpreter's lock and steps are called holding it */
typedef struct kvb_watch {
  int (*look)(void *owner, DLTensor *now);
  void *owners[5];
  void (*failed)(void);
  void *(*pause)(void);
  void (*resume)(void *paused);
} kvb_watch;

typedef struct kvb_binding kvb_binding;

/* Checks the operands that stay the same from step to step, once. The tensors' descriptions are copied, and so is
 * `watch` (which may be NULL); their memory has to outlive the binding. Any thread may use a binding. It does
 * not keep its device open: a step on a device that is closed is refused. */
int kvb_bind(const DLTensor *state_cache, const DLTensor *block_table, const DLTensor *rms_norm_weight,
             const DLTensor *cos_sin_cache, const DLTensor *kv_cache, int64_t block_size, int64_t compress_ratio,
             double rms_norm_eps, const kvb_watch *watch, kvb_binding **binding);

/* The same work as kvb_compress with the bound operands and these. */
int kvb_step(const kvb_binding *binding, const DLTensor *token_to_req, const DLTensor *positions,
             const DLTensor *boundary_token_indices, const DLTensor *kv_slot_mapping, void *stream);

/* Ends a binding (NULL is none). No step with it may be in flight on the host. */
void kvb_unbind(kvb_binding *binding);

/* Undoes one kvb_open. The last one waits for calls in flight on the host, then unloads the kernels: what
 * they still do on a stream must be over by then, and graphs that captured them are dead. */
int kvb_close(int device_id);

/* Counters of an open device: calls that passed their checks, calls that took a general variant, then the
 * launches of each variant in the manifest's order. Writes at most `capacity` values; `count` (not NULL) receives how
 * many there are. */
int kvb_counters(int device_id, int64_t *values, size_t capacity, size_t *count);

/* For measuring and tests: every later call on the device launches this variant (its place in the manifest),
 * whatever its number of outputs; -1 gives the choice back. A call that the variant is not for, by its ratio
 * or the layout of its operands, is then refused. A cpu launcher has nothing to pin. */
int kvb_pin(int device_id, int64_t variant);

/* The words of this thread's last failure; never NULL; valid until the thread's next failure. */
const char *kvb_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
