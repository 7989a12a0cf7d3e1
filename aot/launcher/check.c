#include "check.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "table.h"

enum {
  STATE_WIDTH = 1024,
  HEAD_DIM = 512,
  ROPE_DIM = 64,
  PAGE_BYTES = 64 * 584
};

const char *const KVB_TENSOR_NAMES[KVB_NUM_TENSORS] = {
    "state_cache",     "token_to_req",  "positions",       "boundary_token_indices", "block_table",
    "rms_norm_weight", "cos_sin_cache", "kv_slot_mapping", "kv_cache"};

const int KVB_FIXED[KVB_NUM_FIXED] = {KVB_STATE_CACHE, KVB_BLOCK_TABLE, KVB_RMS_NORM_WEIGHT, KVB_COS_SIN_CACHE,
                                      KVB_KV_CACHE};
const int KVB_VARYING[KVB_NUM_VARYING] = {KVB_TOKEN_TO_REQ, KVB_POSITIONS, KVB_BOUNDARY_TOKEN_INDICES,
                                          KVB_KV_SLOT_MAPPING};

typedef struct rule {
  DLDataType dtype;
  int32_t rank;
} rule;

static const rule RULES[KVB_NUM_TENSORS] = {
    [KVB_STATE_CACHE] = {{kDLFloat, 32, 1}, 3},
    [KVB_TOKEN_TO_REQ] = {{kDLInt, 32, 1}, 1},
    [KVB_POSITIONS] = {{kDLInt, 64, 1}, 1},
    [KVB_BOUNDARY_TOKEN_INDICES] = {{kDLInt, 64, 1}, 1},
    [KVB_BLOCK_TABLE] = {{kDLInt, 32, 1}, 2},
    [KVB_RMS_NORM_WEIGHT] = {{kDLBfloat, 16, 1}, 1},
    [KVB_COS_SIN_CACHE] = {{kDLFloat, 32, 1}, 2},
    [KVB_KV_SLOT_MAPPING] = {{kDLInt, 64, 1}, 1},
    [KVB_KV_CACHE] = {{kDLUInt, 8, 1}, 2},
};

/* Within these, neither the number of bytes nor the address of one can overflow. */
enum { PLAIN_SHAPE = 1 << 20, PLAIN_STRIDE = 1 << 26 };
static const uintptr_t PLAIN_ADDRESS = UINTPTR_MAX >> 2; /* and so its offset */

/* A tensor that has passed its own checks. */
typedef struct view {
  char *data;
  int64_t shape[KVB_MAX_RANK];
  int64_t stride[KVB_MAX_RANK];
} view;

const char *kvb_device_text(DLDevice device, char *text, int size) {
  const char *name = NULL;
  bool numbered = true;
  switch ((int)device.device_type) {
    case kDLCPU: name = "cpu", numbered = false; break;
    case kDLCUDA: name = "cuda"; break;
    case kDLCUDAHost: name = "pinned host memory (CUDA)", numbered = false; break;
    case kDLCUDAManaged: name = "managed memory (CUDA)", numbered = false; break;
    case kDLROCM: name = "rocm"; break;
    case kDLROCMHost: name = "pinned host memory (ROCm)", numbered = false; break;
    case kDLExtDev: name = KVB_TABLE.device_name; break;
    default: break;
  }
  if (name == NULL)
    snprintf(text, (size_t)size, "DLPack device %d:%d", (int)device.device_type, (int)device.device_id);
  else if (numbered)
    snprintf(text, (size_t)size, "%s:%d", name, (int)device.device_id);
  else
    snprintf(text, (size_t)size, "%s", name);
  return text;
}

static const char *dtype_text(DLDataType dtype, char *text, int size) {
  static const char *const NAMES[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  int count = (int)(sizeof NAMES / sizeof NAMES[0]);
  int at = dtype.code < count
               ? snprintf(text, (size_t)size, "%s%d", NAMES[dtype.code], (int)dtype.bits)
               : snprintf(text, (size_t)size, "DLPack type %d of %d bits", (int)dtype.code, (int)dtype.bits);
  if (dtype.lanes != 1 && at < size) snprintf(text + at, (size_t)(size - at), "x%d", (int)dtype.lanes);
  return text;
}

static bool same_dtype(DLDataType one, DLDataType other) { return memcmp(&one, &other, sizeof one) == 0; }

static bool is_fp32(DLDataType dtype) { return dtype.code == kDLFloat && dtype.bits == 32 && dtype.lanes == 1; }

static int check_kind(int which, const DLTensor *tensor, DLDevice device) {
  const rule *wanted = &RULES[which];
  const char *name = KVB_TENSOR_NAMES[which];
  if (tensor->device.device_type != device.device_type || tensor->device.device_id != device.device_id) {
    char here[64], there[64];
    return kvb_fail(KVB_VALUE_ERROR,
                    "%s: wanted a tensor on %s, the device that was opened and that state_cache lies on; found one "
                    "on %s. Move it there",
                    name, kvb_device_text(device, here, sizeof here),
                    kvb_device_text(tensor->device, there, sizeof there));
  }
  bool either = which == KVB_RMS_NORM_WEIGHT;
  if (!same_dtype(tensor->dtype, wanted->dtype) && !(either && is_fp32(tensor->dtype))) {
    char right[64], found[64];
    return kvb_fail(KVB_TYPE_ERROR, "%s: wanted dtype %s%s, found %s", name,
                    dtype_text(wanted->dtype, right, sizeof right), either ? " or float32" : "",
                    dtype_text(tensor->dtype, found, sizeof found));
  }
  if (tensor->ndim != wanted->rank)
    return kvb_fail(KVB_VALUE_ERROR, "%s: wanted %d dimension%s, found %d", name, wanted->rank,
                    wanted->rank == 1 ? "" : "s", (int)tensor->ndim);
  return KVB_OK;
}

/* Fills the view's shape and strides; what is left of the check is that every element has an address. */
static int check_layout(int which, const DLTensor *tensor, view *out) {
  const char *name = KVB_TENSOR_NAMES[which];
  int rank = RULES[which].rank;
  bool overflow = false;
  int64_t elements = 1;
  for (int i = 0; i < rank; ++i) {
    out->shape[i] = tensor->shape[i];
    if (out->shape[i] < 0)
      return kvb_fail(KVB_VALUE_ERROR, "%s: wanted extents of 0 and more, found shape[%d] = %lld", name, i,
                      (long long)out->shape[i]);
  }
  bool empty = false;
  int64_t packed = 1;
  for (int i = rank - 1; i >= 0; --i) {
    empty |= out->shape[i] == 0;
    out->stride[i] = tensor->strides != NULL ? tensor->strides[i] : packed;
    overflow |= __builtin_mul_overflow(packed, out->shape[i] > 1 ? out->shape[i] : 1, &packed);
  }
  elements = packed;
  int64_t last = 0; /* element offset of the last element */
  for (int i = 0; i < rank; ++i) {
    if (empty || out->shape[i] <= 1) {
      out->stride[i] = 0;
      continue;
    }
    if (out->stride[i] < 0)
      return kvb_fail(KVB_VALUE_ERROR, "%s: wanted strides of 0 and more, found stride(%d) = %lld. Copy it first",
                      name, i, (long long)out->stride[i]);
    if (i == rank - 1 && out->stride[i] != 1)
      return kvb_fail(KVB_VALUE_ERROR, "%s: wanted %s, found stride(%d) = %lld. Make it contiguous first", name,
                      rank == 1 ? "a contiguous tensor" : "a last stride of 1", i, (long long)out->stride[i]);
    int64_t span;
    overflow |= __builtin_mul_overflow(out->shape[i] - 1, out->stride[i], &span);
    overflow |= __builtin_add_overflow(last, span, &last);
  }
  int64_t bytes;
  uintptr_t end;
  uintptr_t begin = (uintptr_t)tensor->data;
  int64_t item = tensor->dtype.bits / 8;
  overflow |= __builtin_mul_overflow(elements, item, &elements);
  overflow |= __builtin_add_overflow(last, 1, &last) || __builtin_mul_overflow(last, item, &bytes);
  overflow |= __builtin_add_overflow(begin, tensor->byte_offset, &begin);
  if (!overflow && !empty) overflow = __builtin_add_overflow(begin, (uintptr_t)bytes, &end);
  if (overflow)
    return kvb_fail(KVB_VALUE_ERROR, "%s: wanted extents that 64-bit addresses can reach, found a shape and strides "
                                     "that pass them", name);
  if (empty) {
    out->data = (char *)begin;
    return KVB_OK;
  }
  if (tensor->data == NULL)
    return kvb_fail(KVB_VALUE_ERROR,
                    "%s: wanted memory behind its elements, found a null data pointer (a meta or fake tensor has "
                    "one). Pass a real tensor", name);
  if (begin % (uintptr_t)item != 0)
    return kvb_fail(KVB_VALUE_ERROR, "%s: wanted an address that is a multiple of its element's %d bytes, found %p",
                    name, (int)item, (void *)begin);
  out->data = (char *)begin;
  return KVB_OK;
}

static int wrong_extent(int which, int dimension, const char *wanted, int64_t expected, int64_t found) {
  return kvb_fail(KVB_VALUE_ERROR, "%s: wanted shape[%d] = %lld%s, found %lld", KVB_TENSOR_NAMES[which], dimension,
                  (long long)expected, wanted, (long long)found);
}

static int check_state(const view *state, int64_t block_size) {
  if (state->shape[2] != STATE_WIDTH)
    return wrong_extent(KVB_STATE_CACHE, 2, " (512 values, 512 scores)", STATE_WIDTH, state->shape[2]);
  if (block_size < 1)
    return kvb_fail(KVB_VALUE_ERROR, "block_size: wanted 1 or more, found %lld", (long long)block_size);
  if (state->shape[1] != block_size)
    return kvb_fail(KVB_VALUE_ERROR, "block_size: wanted %lld, which is state_cache's shape[1]; found %lld",
                    (long long)state->shape[1], (long long)block_size);
  return KVB_OK;
}

static int check_kv_cache(const view *cache) {
  const char *name = KVB_TENSOR_NAMES[KVB_KV_CACHE];
  if (cache->shape[1] < PAGE_BYTES)
    return kvb_fail(KVB_VALUE_ERROR, "%s: wanted shape[1] of at least %d bytes (64 slots of 584), found %lld", name,
                    PAGE_BYTES, (long long)cache->shape[1]);
  if (cache->shape[0] > 1 && cache->stride[0] < PAGE_BYTES)
    return kvb_fail(KVB_VALUE_ERROR, "%s: wanted pages that do not overlap, stride(0) of at least %d; found "
                                     "%lld", name,
                    PAGE_BYTES, (long long)cache->stride[0]);
  if (cache->stride[0] % 2 != 0)
    return kvb_fail(KVB_VALUE_ERROR, "%s: wanted an even stride(0), found %lld", name, (long long)cache->stride[0]);
  if (cache->shape[0] > 0 && (uintptr_t)cache->data % 2 != 0)
    return kvb_fail(KVB_VALUE_ERROR, "%s: wanted an even base address, found %p", name, (void *)cache->data);
  return KVB_OK;
}

static int check_ratio(int64_t ratio) {
  for (size_t i = 0; i < KVB_TABLE.num_ratios; ++i)
    if (KVB_TABLE.ratios[i] == ratio) return KVB_OK;
  char list[256] = "";
  int at = 0;
  for (size_t i = 0; i < KVB_TABLE.num_ratios && at < (int)sizeof list; ++i)
    at += snprintf(list + at, sizeof list - (size_t)at, "%s%lld", i == 0 ? "" : ", ", (long long)KVB_TABLE.ratios[i]);
  return kvb_fail(KVB_VALUE_ERROR, "compress_ratio: wanted one that was compiled (%s), found %lld", list,
                  (long long)ratio);
}

/* Whether a tensor passes by what nearly all do, in a few compares. What does not may still be right: the checks
 * that have words decide, and they accept all of this. */
static bool take_plain(const rule *wanted, const DLTensor *tensor, DLDevice device, view *out) {
  uintptr_t begin = (uintptr_t)tensor->data + tensor->byte_offset;
  uintptr_t misaligned = begin & (uintptr_t)(wanted->dtype.bits / 8 - 1);
  bool plain = memcmp(&tensor->device, &device, sizeof device) == 0 && same_dtype(tensor->dtype, wanted->dtype) &&
               tensor->ndim == wanted->rank && tensor->strides != NULL && tensor->data != NULL && misaligned == 0 &&
               (uintptr_t)tensor->data < PLAIN_ADDRESS && tensor->byte_offset < PLAIN_ADDRESS;
  int64_t stride = 1;
  for (int i = 0; plain && i < wanted->rank; ++i) {
    int64_t shape = out->shape[i] = tensor->shape[i];
    stride = tensor->strides[i];
    plain = shape > 1 && shape <= PLAIN_SHAPE && stride >= 0 && stride <= PLAIN_STRIDE;
    out->stride[i] = stride;
    if (shape == 1) plain = true, out->stride[i] = 0, stride = 1;
  }
  out->data = (char *)begin;
  return plain && stride == 1;
}

static int check_tensor(const kvb_arguments *arguments, int which, DLDevice device, view *out) {
  const DLTensor *tensor = arguments->tensors[which];
  if (tensor == NULL) return kvb_fail(KVB_TYPE_ERROR, "%s: wanted a tensor, found NULL", KVB_TENSOR_NAMES[which]);
  if (take_plain(&RULES[which], tensor, device, out)) return KVB_OK;
  int code = check_kind(which, tensor, device);
  return code == KVB_OK ? check_layout(which, tensor, out) : code;
}

int kvb_check_fixed(const kvb_arguments *arguments, DLDevice device, kvb_operands *operands) {
  view views[KVB_NUM_TENSORS];
  int code;
  for (int i = 0; i < KVB_NUM_FIXED; ++i)
    if ((code = check_tensor(arguments, KVB_FIXED[i], device, &views[KVB_FIXED[i]])) != KVB_OK) return code;
  const view *state = &views[KVB_STATE_CACHE], *table = &views[KVB_BLOCK_TABLE];
  const view *cos_sin = &views[KVB_COS_SIN_CACHE], *cache = &views[KVB_KV_CACHE];
  if ((code = check_state(state, arguments->block_size)) != KVB_OK) return code;
  if (views[KVB_RMS_NORM_WEIGHT].shape[0] != HEAD_DIM)
    return wrong_extent(KVB_RMS_NORM_WEIGHT, 0, "", HEAD_DIM, views[KVB_RMS_NORM_WEIGHT].shape[0]);
  if (cos_sin->shape[1] != ROPE_DIM)
    return wrong_extent(KVB_COS_SIN_CACHE, 1, " (32 cosines, 32 sines)", ROPE_DIM, cos_sin->shape[1]);
  if ((code = check_kv_cache(cache)) != KVB_OK) return code;
  if ((code = check_ratio(arguments->compress_ratio)) != KVB_OK) return code;
  float eps = (float)arguments->rms_norm_eps;
  if (!isfinite(arguments->rms_norm_eps) || !isfinite(eps) || arguments->rms_norm_eps < 0)
    return kvb_fail(KVB_VALUE_ERROR, "rms_norm_eps: wanted a finite float32 of 0 or more, found %g",
                    arguments->rms_norm_eps);

  operands->state_cache = (const float *)state->data;
  operands->block_table = (const int32_t *)table->data;
  operands->rms_norm_weight = views[KVB_RMS_NORM_WEIGHT].data;
  operands->cos_sin_cache = (const float *)cos_sin->data;
  operands->kv_cache = (uint8_t *)cache->data;
  operands->scratch = NULL;
  operands->num_blocks = state->shape[0];
  operands->state_page_stride = state->stride[0];
  operands->state_row_stride = state->stride[1];
  operands->block_size = arguments->block_size;
  operands->num_reqs = table->shape[0];
  operands->blocks_per_req = table->shape[1];
  operands->block_table_stride = table->stride[0];
  operands->max_pos = cos_sin->shape[0];
  operands->cos_sin_stride = cos_sin->stride[0];
  operands->kv_pages = cache->shape[0];
  operands->kv_page_stride = cache->stride[0];
  operands->weight_is_fp32 = is_fp32(arguments->tensors[KVB_RMS_NORM_WEIGHT]->dtype);
  operands->compress_ratio = (int32_t)arguments->compress_ratio;
  operands->rms_norm_eps = eps;
  return KVB_OK;
}

int kvb_check_varying(const kvb_arguments *arguments, DLDevice device, kvb_operands *operands) {
  view views[KVB_NUM_TENSORS];
  int code;
  for (int i = 0; i < KVB_NUM_VARYING; ++i)
    if ((code = check_tensor(arguments, KVB_VARYING[i], device, &views[KVB_VARYING[i]])) != KVB_OK) return code;
  int64_t num_tokens = views[KVB_TOKEN_TO_REQ].shape[0];
  static const int PER_TOKEN[] = {KVB_POSITIONS, KVB_KV_SLOT_MAPPING};
  for (int i = 0; i < 2; ++i) {
    int64_t found = views[PER_TOKEN[i]].shape[0];
    if (found != num_tokens)
      return wrong_extent(PER_TOKEN[i], 0, " (num_tokens, as token_to_req has)", num_tokens, found);
  }
  operands->token_to_req = (const int32_t *)views[KVB_TOKEN_TO_REQ].data;
  operands->positions = (const int64_t *)views[KVB_POSITIONS].data;
  operands->boundary_token_indices = (const int64_t *)views[KVB_BOUNDARY_TOKEN_INDICES].data;
  operands->kv_slot_mapping = (const int64_t *)views[KVB_KV_SLOT_MAPPING].data;
  operands->num_tokens = num_tokens;
  operands->num_outputs = views[KVB_BOUNDARY_TOKEN_INDICES].shape[0];
  return KVB_OK;
}
