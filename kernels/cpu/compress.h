/* Declarations shared by the host kernel's files: sizes, the window that one output reads, the
 * per-level inner loops, and what the environment asked for. */
#ifndef KVB_CPU_COMPRESS_H
#define KVB_CPU_COMPRESS_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>

#include "operands.h"

#define KVB_EXPORT __attribute__((visibility("default")))

#pragma GCC visibility push(hidden)

enum {
  KVB_HEAD_DIM = 512,
  KVB_NOPE_HEAD_DIM = 448,
  KVB_ROPE_PAIRS = 32,
  KVB_QUANT_GROUP = 64,
  KVB_NUM_GROUPS = KVB_NOPE_HEAD_DIM / KVB_QUANT_GROUP,
  KVB_KV_BLOCK_SIZE = 64,
  KVB_TOKEN_STRIDE = 576,
  KVB_SCALE_DIM = 8,
  KVB_SCALE_OFFSET = KVB_KV_BLOCK_SIZE * KVB_TOKEN_STRIDE,
  KVB_MAX_WINDOW = 512,
  KVB_WINDOW_PARTS = 8,
  KVB_LEAF_ROWS = 4,
};

/* The running softmax of one part of a window, per dimension: the maximum, the sum of the weights
 * and the weighted sum of the values. The maximum of an empty part is -FLT_MAX and not -inf: a
 * score minus it is then never -inf minus -inf, and a score of -inf still weighs exactly 0. */
typedef struct kvb_part {
  float max[KVB_HEAD_DIM];
  float weight[KVB_HEAD_DIM];
  float value[KVB_HEAD_DIM];
} kvb_part;

/* Everything that one output needs besides its rows; made by kvb_window_resolve. */
typedef struct kvb_window {
  const int32_t *block_row; /* the request's row of the block table */
  int64_t first_position;   /* of the window; may be negative */
  const float *cos_sin;     /* 32 cosines, then 32 sines */
  uint8_t *payload;         /* 576 bytes */
  uint8_t *scales;          /* 8 bytes */
} kvb_window;

/* Checks every index of output `output`. 1: `window` is filled; 0: the output is to be skipped. */
int kvb_window_resolve(const kvb_operands *ops, int64_t output, kvb_window *window);

/* Fills rows[0..count) with the addresses of window rows first..first+count-1; a masked row gets
 * the address of a constant row of value 0 and score -inf. Returns how many are not masked. */
int kvb_window_rows(const kvb_operands *ops, const kvb_window *window, int first, int count,
                    const float **rows);

/* RMS norm, quantisation and RoPE of the 512 compressed values, and the store of the slot. */
void kvb_store_output(const kvb_operands *ops, const kvb_window *window, const float *compressed);

/* The inner loops, one set per instruction set level. All give the same bytes. */
typedef struct kvb_level {
  const char *name;
  /* Folds rows[0..count) (count > 0, a multiple of 4) into `part`, dimensions begin..end-1
   * (multiples of 64). Rows rows[count..count+4) must be valid addresses: they are prefetched. */
  void (*fold)(const float *const *rows, int count, int begin, int end, kvb_part *part);
  /* Combines the eight parts into the 512 compressed values. */
  void (*merge)(const kvb_part *parts, float *compressed);
} kvb_level;

extern const kvb_level kvb_level_baseline;
#if defined(__x86_64__)
extern const kvb_level kvb_level_avx2;
extern const kvb_level kvb_level_avx512;
#endif

/* The level and the number of threads that this processor, the affinity mask and the environment
 * variables KVBUILD_CPU_ISA and KVBUILD_NUM_THREADS allow. */
typedef struct kvb_settings {
  const kvb_level *level;
  int threads;
} kvb_settings;

/* 0, or -1 with a text in `error`. */
int kvb_settings_read(kvb_settings *settings, char *error, size_t error_len);

#pragma GCC visibility pop

/* Compresses every output of `ops` into ops->kv_cache, in place. Pointers, shapes, strides and
 * dtypes must have been checked; the indices inside the tensors are checked here. May be called
 * from several threads at once, and in the child of a fork. Returns 0, or -1 with a text that ends
 * in a NUL in error[0..error_len). */
KVB_EXPORT int kvb_cpu_compress(const kvb_operands *ops, char *error, size_t error_len);

#endif
