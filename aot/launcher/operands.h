/* The operator's operands as plain C: what the launcher fills from the caller's tensors, what the
 * host kernel reads, and what every device kernel's argument list is packed from by field offset.
 * Strides and extents are in elements (bytes for kv_cache). */
#ifndef KVB_OPERANDS_H
#define KVB_OPERANDS_H

#include <stdint.h>

typedef struct kvb_operands {
  const float *state_cache;
  const int32_t *token_to_req;
  const int64_t *positions;
  const int64_t *boundary_token_indices;
  const int32_t *block_table;
  const void *rms_norm_weight;
  const float *cos_sin_cache;
  const int64_t *kv_slot_mapping;
  uint8_t *kv_cache;
  void *scratch;
  int64_t num_blocks;
  int64_t state_page_stride;
  int64_t state_row_stride;
  int64_t block_size;
  int64_t num_tokens;
  int64_t num_outputs;
  int64_t num_reqs;
  int64_t blocks_per_req;
  int64_t block_table_stride;
  int64_t max_pos;
  int64_t cos_sin_stride;
  int64_t kv_pages;
  int64_t kv_page_stride;
  int32_t weight_is_fp32;
  int32_t compress_ratio;
  float rms_norm_eps;
} kvb_operands;

#endif
