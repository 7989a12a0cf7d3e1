/* Index arithmetic: from an output to its window, its rows and its slot. Metadata comes from a
 * scheduler and is not trusted: nothing outside the tensors is ever addressed. */
#include "compress.h"

#define ROW4(x) x, x, x, x
#define ROW64(x) ROW4(ROW4(ROW4(x)))
#define ROW512(x) ROW4(ROW64(x)), ROW4(ROW64(x))

static const float masked_row[2 * KVB_HEAD_DIM] = {
    [KVB_HEAD_DIM] = ROW512(-__builtin_inff()),
};

int kvb_window_resolve(const kvb_operands *ops, int64_t output, kvb_window *window) {
  const int64_t token = ops->boundary_token_indices[output];
  if (token < 0 || token >= ops->num_tokens) return 0;
  const int64_t slot = ops->kv_slot_mapping[token];
  if (slot < 0 || slot / KVB_KV_BLOCK_SIZE >= ops->kv_pages) return 0;
  const int64_t request = ops->token_to_req[token];
  if (request < 0 || request >= ops->num_reqs) return 0;
  const int64_t position = ops->positions[token];
  if (position < 0) return 0;
  const int64_t rope_position = position - position % ops->compress_ratio;
  if (rope_position >= ops->max_pos) return 0;

  uint8_t *page = ops->kv_cache + (slot / KVB_KV_BLOCK_SIZE) * ops->kv_page_stride;
  const int64_t offset = slot % KVB_KV_BLOCK_SIZE;
  window->block_row = ops->block_table + request * ops->block_table_stride;
  window->first_position = position - ops->compress_ratio + 1;
  window->cos_sin = ops->cos_sin_cache + rope_position * ops->cos_sin_stride;
  window->payload = page + offset * KVB_TOKEN_STRIDE;
  window->scales = page + KVB_SCALE_OFFSET + offset * KVB_SCALE_DIM;
  return 1;
}

int kvb_window_rows(const kvb_operands *ops, const kvb_window *window, int first, int count,
                    const float **rows) {
  int64_t position = window->first_position + first;
  int done = 0, live = 0;
  for (; done < count && position < 0; ++done, ++position) rows[done] = masked_row;
  if (done == count) return 0;
  int64_t column = position / ops->block_size, offset = position % ops->block_size;
  while (done < count) {
    const float *page = NULL;
    if (column < ops->blocks_per_req) {
      const int64_t block = window->block_row[column];
      if (block >= 0 && block < ops->num_blocks) page = ops->state_cache + block * ops->state_page_stride;
    }
    for (; done < count && offset < ops->block_size; ++done, ++offset) {
      rows[done] = page ? page + offset * ops->state_row_stride : masked_row;
      live += page != NULL;
    }
    offset = 0;
    ++column;
  }
  return live;
}
