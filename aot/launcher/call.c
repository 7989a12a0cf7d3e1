#include "call.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "target.h"

static int begin(const DLTensor *first, const char *function, void **lent) {
  if (first == NULL) return kvb_fail(KVB_TYPE_ERROR, "%s: wanted a tensor, found NULL", KVB_TENSOR_NAMES[0]);
  return kvb_target_begin(first->device, function, lent);
}

static int run(void *lent, kvb_operands *operands, void *(*pause)(void), void (*resume)(void *), void *stream) {
  void *paused = pause != NULL ? pause() : NULL;
  int code = kvb_target_run(lent, operands, stream);
  if (resume != NULL) resume(paused);
  return code;
}

int kvb_call(const kvb_arguments *arguments, void *(*pause)(void), void (*resume)(void *), void *stream) {
  const DLTensor *first = arguments->tensors[KVB_STATE_CACHE];
  kvb_operands operands;
  void *lent;
  int code = begin(first, "compress", &lent);
  if (code != KVB_OK) return code;
  code = kvb_check_fixed(arguments, first->device, &operands);
  if (code == KVB_OK) code = kvb_check_varying(arguments, first->device, &operands);
  if (code == KVB_OK) code = run(lent, &operands, pause, resume, stream);
  kvb_target_end(first->device);
  return code;
}

static kvb_fixed describe(const DLTensor *tensor) {
  kvb_fixed fixed = {(const char *)tensor->data + tensor->byte_offset, tensor->device, tensor->dtype, tensor->ndim,
                     {0}, {0}};
  int64_t packed = 1;
  for (int i = tensor->ndim - 1; i >= 0; --i) {
    fixed.shape[i] = tensor->shape[i];
    if (tensor->shape[i] > 1) fixed.stride[i] = tensor->strides != NULL ? tensor->strides[i] : packed;
    packed *= tensor->shape[i];
  }
  return fixed;
}

int kvb_call_bind(const kvb_arguments *arguments, const kvb_watch *watch, kvb_binding **out) {
  const DLTensor *first = arguments->tensors[KVB_STATE_CACHE];
  kvb_operands operands = {0};
  void *lent;
  int code = begin(first, "bind", &lent);
  if (code != KVB_OK) return code;
  code = kvb_check_fixed(arguments, first->device, &operands);
  kvb_target_end(first->device);
  if (code != KVB_OK) return code;
  kvb_binding *binding = calloc(1, sizeof *binding);
  if (binding == NULL) return kvb_fail(KVB_MEMORY_ERROR, "no memory for a binding");
  binding->operands = operands;
  for (int i = 0; i < KVB_NUM_FIXED; ++i) binding->fixed[i] = describe(arguments->tensors[KVB_FIXED[i]]);
  if (watch != NULL) binding->watch = *watch;
  *out = binding;
  return KVB_OK;
}

static int fail_changed(int which, const char *what) {
  return kvb_fail(KVB_VALUE_ERROR, "%s: wanted the tensor as it was bound, found %s. Bind again after resizing or "
                                   "replacing a bound tensor's memory",
                  KVB_TENSOR_NAMES[KVB_FIXED[which]], what);
}

static int compare(int which, const kvb_fixed *bound, const DLTensor *now) {
  if (now->ndim != bound->rank) return fail_changed(which, "another number of dimensions");
  if ((const char *)now->data + now->byte_offset != bound->data) return fail_changed(which, "other memory");
  if (memcmp(&now->dtype, &bound->dtype, sizeof now->dtype) != 0) return fail_changed(which, "another dtype");
  if (now->device.device_type != bound->device.device_type || now->device.device_id != bound->device.device_id)
    return fail_changed(which, "another device");
  int64_t packed = 1;
  for (int i = now->ndim - 1; i >= 0; --i) {
    if (now->shape[i] != bound->shape[i]) return fail_changed(which, "another shape");
    if (now->shape[i] > 1 && (now->strides != NULL ? now->strides[i] : packed) != bound->stride[i])
      return fail_changed(which, "other strides");
    packed *= now->shape[i];
  }
  return KVB_OK;
}

static int look(const kvb_binding *binding) {
  const kvb_watch *watch = &binding->watch;
  if (watch->look == NULL) return KVB_OK;
  for (int i = 0; i < KVB_NUM_FIXED; ++i) {
    DLTensor now;
    if (watch->look(watch->owners[i], &now) != 0) {
      if (watch->failed != NULL) watch->failed();
      return fail_changed(i, "one that can no longer be looked at");
    }
    int code = compare(i, &binding->fixed[i], &now);
    if (code != KVB_OK) return code;
  }
  return KVB_OK;
}

static int compare_all(const kvb_binding *binding, const kvb_arguments *arguments) {
  for (int i = 0; i < KVB_NUM_FIXED; ++i) {
    int code = compare(i, &binding->fixed[i], arguments->tensors[KVB_FIXED[i]]);
    if (code != KVB_OK) return code;
  }
  return KVB_OK;
}

int kvb_call_step(const kvb_binding *binding, const kvb_arguments *arguments, int again, void *stream) {
  DLDevice place = binding->fixed[0].device;
  const kvb_watch *watch = &binding->watch;
  kvb_operands operands = binding->operands;
  void *lent;
  int code = kvb_target_begin(place, "step", &lent);
  if (code != KVB_OK) return code;
  code = again ? compare_all(binding, arguments) : look(binding);
  if (code == KVB_OK) code = kvb_check_varying(arguments, place, &operands);
  if (code == KVB_OK) code = run(lent, &operands, watch->pause, watch->resume, stream);
  kvb_target_end(place);
  return code;
}
