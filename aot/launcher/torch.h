/* Reads torch's tensors where they are, through the C functions that torch keeps stable for compiled models. */
#ifndef KVB_TORCH_H
#define KVB_TORCH_H

#include <dlpack/dlpack.h>
#include <stdint.h>

enum { KVB_TORCH_DTYPES = 5 };

/* What is known of the torch of this process. Each function is aoti_torch_get_*, and returns 0. */
typedef struct kvb_torch {
  int32_t (*data)(void *tensor, void **out);
  int32_t (*dimensions)(void *tensor, int64_t *out);
  int32_t (*shape)(void *tensor, int64_t **out);
  int32_t (*strides)(void *tensor, int64_t **out);
  int32_t (*dtype)(void *tensor, int32_t *out);
  int32_t (*device_type)(void *tensor, int32_t *out);
  int32_t (*device_index)(void *tensor, int32_t *out);
  int64_t offset;                   /* of the tensor, which is one pointer, in its Python object */
  const void *plain;                /* how what that points to begins, where it is a tensor of the usual kind */
  int32_t dtypes[KVB_TORCH_DTYPES]; /* torch's numbers for float32, int32, int64, bfloat16, uint8 */
  int32_t place;                    /* torch's number for the launcher's kind of device */
  int32_t (*memory)(void *tensor, int64_t *out); /* the bytes of its storage: 0 once they are freed */
  int64_t keys;                     /* where, in what a tensor points to, the set of its dispatch keys lies */
  uint64_t odd_keys;                /* those of a tensor whose memory is not what it stands for: negated when read */
} kvb_torch;

/* Describes the tensor in a Python object of torch's own type; its shape and strides stay torch's. 0: `out` was left
 * alone, because the tensor is of an unusual kind, dtype or device. */
int kvb_torch_describe(const kvb_torch *torch, void *object, DLTensor *out);

#endif
