/* The `aligned` layout: what its kernels were compiled to rely on. */
#ifndef KVB_ALIGNED_H
#define KVB_ALIGNED_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "table.h"

static inline bool kvb_is_aligned(const kvb_operands *operands) {
  uint64_t bits = 0;
  for (size_t i = 0; i < KVB_TABLE.num_aligned_fields; ++i) {
    uint64_t value;
    memcpy(&value, (const char *)operands + KVB_TABLE.aligned_fields[i], sizeof value);
    bits |= value;
  }
  return operands->block_size == KVB_TABLE.aligned_block_size && !operands->weight_is_fp32 &&
         (bits & KVB_TABLE.aligned_mask) == 0;
}

#endif
