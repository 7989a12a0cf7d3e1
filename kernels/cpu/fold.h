/* The inner loops, included once per instruction set level by a file that defines
 *   KVB_LANES   floats in one vector
 *   KVB_TARGET  the function attribute that turns the level on
 *   KVB_MAX     the larger of two vectors of floats, lane by lane
 *   KVB_LEVEL   the kvb_level object to define, and KVB_LEVEL_NAME its name
 * Every operation is elementwise and IEEE-exact or an addition of two terms in the canonical
 * order, and none is a fused multiply-add: the width of a vector cannot change a byte. */
#include "compress.h"

typedef float vfloat __attribute__((vector_size(KVB_LANES * 4), may_alias));
typedef int32_t vint __attribute__((vector_size(KVB_LANES * 4), may_alias));
typedef float vfloat_u __attribute__((vector_size(KVB_LANES * 4), aligned(4), may_alias));

#define KVB_INLINE KVB_TARGET static inline __attribute__((always_inline))

#define LOAD(pointer) (*(const vfloat_u *)(pointer))
#define STORE(pointer, vector) (*(vfloat_u *)(pointer) = (vector))
#define SPLAT(x) ((vfloat){0} + (x))

/* exp2((score - max) * log2 e) for score <= max, within 1.3 units in the last place of the exp2.
 * The integer part of x is read off the bits of x + 1.5 * 2^23; the fraction, at most 1/2 in
 * magnitude, goes through a minimax polynomial that is exactly 1 at 0. A weight below 2^-125 is 0
 * (-inf gives exactly that): fp32 could not hold it to full precision, and arithmetic on subnormal
 * numbers is ten times slower. */
KVB_INLINE vfloat weight_of(vfloat score, vfloat max) {
  const vfloat shift = SPLAT(12582912.0f);
  vfloat x = (score - max) * 0x1.715476p+0f;
  vfloat shifted = x + shift;
  vfloat f = x - (shifted - shift);
  vfloat p = f * 0x1.41fbbcp-13f + 0x1.5f3e54p-10f;
  p = p * f + 0x1.3b2d4cp-7f;
  p = p * f + 0x1.c6aee8p-5f;
  p = p * f + 0x1.ebfbdcp-3f;
  p = p * f + 0x1.62e430p-1f;
  p = p * f + 1.0f;
  return (vfloat)(((vint)p + ((vint)shifted << 23)) & (vint)(x > -125.0f));
}

KVB_TARGET static void fold(const float *const *rows, int count, int begin, int end, kvb_part *part) {
  for (int leaf = 0; leaf < count; leaf += KVB_LEAF_ROWS) {
    const float *r0 = rows[leaf], *r1 = rows[leaf + 1], *r2 = rows[leaf + 2], *r3 = rows[leaf + 3];
    const float *n0 = rows[leaf + 4], *n1 = rows[leaf + 5], *n2 = rows[leaf + 6], *n3 = rows[leaf + 7];
    for (int line = begin; line < end; line += 16) {
      /* A row is one memory page long, and hardware prefetchers stop at its end. */
      __builtin_prefetch(n0 + line), __builtin_prefetch(n0 + KVB_HEAD_DIM + line);
      __builtin_prefetch(n1 + line), __builtin_prefetch(n1 + KVB_HEAD_DIM + line);
      __builtin_prefetch(n2 + line), __builtin_prefetch(n2 + KVB_HEAD_DIM + line);
      __builtin_prefetch(n3 + line), __builtin_prefetch(n3 + KVB_HEAD_DIM + line);
      for (int d = line; d < line + 16; d += KVB_LANES) {
        vfloat s0 = LOAD(r0 + KVB_HEAD_DIM + d), s1 = LOAD(r1 + KVB_HEAD_DIM + d);
        vfloat s2 = LOAD(r2 + KVB_HEAD_DIM + d), s3 = LOAD(r3 + KVB_HEAD_DIM + d);
        vfloat before = leaf ? LOAD(part->max + d) : SPLAT(-FLT_MAX);
        vfloat max = KVB_MAX(KVB_MAX(s0, s1), KVB_MAX(KVB_MAX(s2, s3), before));
        vfloat w0 = weight_of(s0, max), w1 = weight_of(s1, max);
        vfloat w2 = weight_of(s2, max), w3 = weight_of(s3, max);
        vfloat weight = (w0 + w1) + (w2 + w3);
        vfloat value = (w0 * LOAD(r0 + d) + w1 * LOAD(r1 + d)) + (w2 * LOAD(r2 + d) + w3 * LOAD(r3 + d));
        vfloat weight_before = SPLAT(0.0f), value_before = SPLAT(0.0f);
        if (leaf) {
          vfloat scale = weight_of(before, max);
          weight_before = LOAD(part->weight + d) * scale;
          value_before = LOAD(part->value + d) * scale;
        }
        STORE(part->max + d, max);
        STORE(part->weight + d, weight_before + weight);
        STORE(part->value + d, value_before + value);
      }
    }
  }
}

KVB_TARGET static void merge(const kvb_part *parts, float *compressed) {
  for (int d = 0; d < KVB_HEAD_DIM; d += KVB_LANES) {
    vfloat max = LOAD(parts[0].max + d);
    for (int k = 1; k < KVB_WINDOW_PARTS; ++k) max = KVB_MAX(max, LOAD(parts[k].max + d));
    vfloat weight[KVB_WINDOW_PARTS], value[KVB_WINDOW_PARTS];
    for (int k = 0; k < KVB_WINDOW_PARTS; ++k) {
      vfloat scale = weight_of(LOAD(parts[k].max + d), max);
      weight[k] = LOAD(parts[k].weight + d) * scale;
      value[k] = LOAD(parts[k].value + d) * scale;
    }
    vfloat total = ((weight[0] + weight[1]) + (weight[2] + weight[3])) +
                   ((weight[4] + weight[5]) + (weight[6] + weight[7]));
    vfloat sum = ((value[0] + value[1]) + (value[2] + value[3])) +
                 ((value[4] + value[5]) + (value[6] + value[7]));
    STORE(compressed + d, sum / total);
  }
}

const kvb_level KVB_LEVEL = {KVB_LEVEL_NAME, fold, merge};
