#include "torch.h"

#include <stdbool.h>
#include <string.h>

#include "table.h"

static const DLDataType DTYPES[KVB_TORCH_DTYPES] = {
    {kDLFloat, 32, 1}, {kDLInt, 32, 1}, {kDLInt, 64, 1}, {kDLBfloat, 16, 1}, {kDLUInt, 8, 1}};

/* Where there is no memory, an address is a view's offset, which is less than any machine's memory. */
static const uintptr_t LOWEST_ADDRESS = (uintptr_t)1 << 40;

static bool has_elements(const int64_t *shape, int64_t dimensions) {
  for (int64_t i = 0; i < dimensions; ++i)
    if (shape[i] == 0) return false;
  return true;
}

int kvb_torch_describe(const kvb_torch *torch, void *object, DLTensor *out) {
  void *tensor = (char *)object + torch->offset;
  const void *const *pointed = *(const void *const **)tensor;
  if (pointed == NULL || *pointed != torch->plain) return 0;
  uint64_t keys;
  memcpy(&keys, (const char *)pointed + torch->keys, sizeof keys);
  if ((keys & torch->odd_keys) != 0) return 0;
  void *data;
  int64_t dimensions, memory, *shape, *strides;
  int32_t dtype, type, index;
  int32_t failed = torch->device_type(tensor, &type) | torch->device_index(tensor, &index) |
                   torch->dtype(tensor, &dtype) | torch->dimensions(tensor, &dimensions) |
                   torch->shape(tensor, &shape) | torch->strides(tensor, &strides);
  int at = 0;
  while (at < KVB_TORCH_DTYPES && torch->dtypes[at] != dtype) ++at;
  if (failed != 0 || at == KVB_TORCH_DTYPES || type != torch->place || torch->data(tensor, &data) != 0) return 0;
  bool low = (uintptr_t)data < LOWEST_ADDRESS && has_elements(shape, dimensions);
  if (low && (torch->memory(tensor, &memory) != 0 || memory == 0)) return 0;
  DLDevice device = {(DLDeviceType)KVB_TABLE.device_type, index < 0 ? 0 : index}; /* the cpu has no index */
  *out = (DLTensor){data, device, (int32_t)dimensions, DTYPES[at], shape, strides, 0};
  return 1;
}
