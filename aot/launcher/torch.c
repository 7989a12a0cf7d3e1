#include "torch.h"

#include "table.h"

static const DLDataType DTYPES[KVB_TORCH_DTYPES] = {
    {kDLFloat, 32, 1}, {kDLInt, 32, 1}, {kDLInt, 64, 1}, {kDLBfloat, 16, 1}, {kDLUInt, 8, 1}};

int kvb_torch_describe(const kvb_torch *torch, void *object, DLTensor *out) {
  void *tensor = (char *)object + torch->offset;
  const void *const *pointed = *(const void *const **)tensor;
  if (pointed == NULL || *pointed != torch->plain) return 0;
  void *data;
  int64_t dimensions, *shape, *strides;
  int32_t dtype, type, index;
  int32_t failed = torch->device_type(tensor, &type) | torch->device_index(tensor, &index) |
                   torch->dtype(tensor, &dtype) | torch->dimensions(tensor, &dimensions) |
                   torch->shape(tensor, &shape) | torch->strides(tensor, &strides);
  int at = 0;
  while (at < KVB_TORCH_DTYPES && torch->dtypes[at] != dtype) ++at;
  if (failed != 0 || at == KVB_TORCH_DTYPES || type != torch->place || torch->data(tensor, &data) != 0) return 0;
  DLDevice device = {(DLDeviceType)KVB_TABLE.device_type, index < 0 ? 0 : index}; /* the cpu has no index */
  *out = (DLTensor){data, device, (int32_t)dimensions, DTYPES[at], shape, strides, 0};
  return 1;
}
