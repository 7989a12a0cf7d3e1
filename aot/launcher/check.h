/* A call's arguments as they came, and the checks that turn them into kvb_operands. */
#ifndef KVB_CHECK_H
#define KVB_CHECK_H

#include <dlpack/dlpack.h>

#include "operands.h"

enum {
  KVB_STATE_CACHE,
  KVB_TOKEN_TO_REQ,
  KVB_POSITIONS,
  KVB_BOUNDARY_TOKEN_INDICES,
  KVB_BLOCK_TABLE,
  KVB_RMS_NORM_WEIGHT,
  KVB_COS_SIN_CACHE,
  KVB_KV_SLOT_MAPPING,
  KVB_KV_CACHE,
  KVB_NUM_TENSORS
};

enum { KVB_NUM_FIXED = 5, KVB_NUM_VARYING = 4, KVB_MAX_RANK = 3 };

extern const char *const KVB_TENSOR_NAMES[KVB_NUM_TENSORS];
extern const int KVB_FIXED[KVB_NUM_FIXED];     /* what `bind` takes */
extern const int KVB_VARYING[KVB_NUM_VARYING]; /* what a step takes */

typedef struct kvb_arguments {
  const DLTensor *tensors[KVB_NUM_TENSORS];
  int64_t block_size;
  int64_t compress_ratio;
  double rms_norm_eps;
} kvb_arguments;

/* Refuse, by name, whatever the operator's contract does not allow; else fill their part of `operands`, and
 * `scratch` with NULL. The first looks at the fixed tensors and the scalars, the second at the varying tensors.
 * Strides of extents 0 and 1 say nothing and become 0. */
int kvb_check_fixed(const kvb_arguments *arguments, DLDevice device, kvb_operands *operands);
int kvb_check_varying(const kvb_arguments *arguments, DLDevice device, kvb_operands *operands);

/* A device as people write it, such as cuda:0. */
const char *kvb_device_text(DLDevice device, char *text, int size);

#endif
