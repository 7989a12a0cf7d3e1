/* From the 512 compressed values of an output to the bytes of its slot. */
#include <string.h>

#include "compress.h"

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Round to nearest even, on the bits; a NaN stays one. */
static uint16_t bf16_of(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

static float float_of_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

/* The sum of 512 terms as a balanced tree of neighbouring pairs; overwrites `terms`. */
static float tree_sum(float *terms) {
  for (int width = KVB_HEAD_DIM / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) terms[i] = terms[2 * i] + terms[2 * i + 1];
  return terms[0];
}

static float reciprocal_rms(const float *compressed, float eps) {
  float squares[KVB_HEAD_DIM];
  for (int d = 0; d < KVB_HEAD_DIM; ++d) squares[d] = compressed[d] * compressed[d];
  const float mean = tree_sum(squares) * (1.0f / KVB_HEAD_DIM);
  /* A vector's square root is the bare instruction; sqrtf may call libm to set errno. */
  typedef float pair __attribute__((vector_size(16)));
  const pair root = __builtin_elementwise_sqrt((pair){mean + eps, 1.0f, 1.0f, 1.0f});
  return 1.0f / root[0];
}

static void normalise(const kvb_operands *ops, const float *compressed, float *y) {
  const float rrms = reciprocal_rms(compressed, ops->rms_norm_eps);
  if (ops->weight_is_fp32) {
    const float *weight = ops->rms_norm_weight;
    for (int d = 0; d < KVB_HEAD_DIM; ++d) y[d] = (compressed[d] * rrms) * weight[d];
  } else {
    const uint16_t *weight = ops->rms_norm_weight;
    for (int d = 0; d < KVB_HEAD_DIM; ++d) y[d] = (compressed[d] * rrms) * float_of_bf16(weight[d]);
  }
}

/* ceil(log2(amax / 127)) without a logarithm: 127 is 1.984375 * 2^6, and amax is a bf16 value or
 * 1e-4. */
static int scale_exponent(float amax) {
  const uint32_t bits = bits_of(amax);
  const int exponent = (int)(bits >> 23) - 127;
  return (bits & 0x7fffffu) <= 0x7e0000u ? exponent - 6 : exponent - 5;
}

/* One group of 64 values; returns the scale byte. */
static uint8_t quantise(const float *y, uint8_t *payload) {
  float z[KVB_QUANT_GROUP];
  float amax = 1.0e-4f;
  for (int i = 0; i < KVB_QUANT_GROUP; ++i) {
    z[i] = float_of_bf16(bf16_of(y[i]));
    const float magnitude = float_of(bits_of(z[i]) & 0x7fffffffu);
    amax = magnitude > amax ? magnitude : amax;
  }
  const int exponent = scale_exponent(amax);
  const float inverse = float_of((uint32_t)(127 - exponent) << 23);
  for (int i = 0; i < KVB_QUANT_GROUP; ++i) {
    float q = z[i] * inverse;
    q = q > -127.0f ? q : -127.0f; /* in this order a NaN becomes a number, which a cast needs */
    q = q < 127.0f ? q : 127.0f;
    payload[i] = (uint8_t)(int8_t)(int32_t)q;
  }
  return (uint8_t)(exponent + 127);
}

static void rotate(const float *y, const float *cos_sin, uint8_t *payload) {
  uint16_t halves[2 * KVB_ROPE_PAIRS];
  for (int i = 0; i < KVB_ROPE_PAIRS; ++i) {
    const float u = y[2 * i], v = y[2 * i + 1];
    const float cosine = cos_sin[i], sine = cos_sin[KVB_ROPE_PAIRS + i];
    halves[2 * i] = bf16_of(u * cosine - v * sine);
    halves[2 * i + 1] = bf16_of(v * cosine + u * sine);
  }
  memcpy(payload, halves, sizeof halves);
}

void kvb_store_output(const kvb_operands *ops, const kvb_window *window, const float *compressed) {
  float y[KVB_HEAD_DIM];
  uint8_t scales[KVB_SCALE_DIM] = {0};
  normalise(ops, compressed, y);
  for (int g = 0; g < KVB_NUM_GROUPS; ++g)
    scales[g] = quantise(y + g * KVB_QUANT_GROUP, window->payload + g * KVB_QUANT_GROUP);
  rotate(y + KVB_NOPE_HEAD_DIM, window->cos_sin, window->payload + KVB_NOPE_HEAD_DIM);
  memcpy(window->scales, scales, sizeof scales);
}
