/* torch's tensors of the cpu, said to lie on another device: its DLPack exchange API with that one change, so
 * that calls for a device run through Python end to end where there is none. The stream is always 77,
 * or KVB_RELABEL_STREAM. */
#include <stdlib.h>

#include <dlpack/dlpack.h>

#define EXPORT __attribute__((visibility("default")))

static const DLPackExchangeAPI *own;
static DLPackExchangeAPI relabelled;
static DLDevice place;

static int managed_from_object(void *object, DLManagedTensorVersioned **out) {
  int failed = own->managed_tensor_from_py_object_no_sync(object, out);
  if (!failed) (*out)->dl_tensor.device = place;
  return failed;
}

static int tensor_from_object(void *object, DLTensor *out) {
  int failed = own->dltensor_from_py_object_no_sync(object, out);
  if (!failed) out->device = place;
  return failed;
}

static int current_stream(DLDeviceType type, int32_t id, void **out) {
  (void)type, (void)id;
  const char *stream = getenv("KVB_RELABEL_STREAM");
  *out = (void *)(stream != NULL ? atol(stream) : 77);
  return 0;
}

EXPORT const DLPackExchangeAPI *kvb_relabel(const DLPackExchangeAPI *given, int type, int id) {
  own = given;
  place = (DLDevice){(DLDeviceType)type, id};
  relabelled = *given;
  relabelled.managed_tensor_from_py_object_no_sync = managed_from_object;
  relabelled.dltensor_from_py_object_no_sync = tensor_from_object;
  relabelled.current_work_stream = current_stream;
  return &relabelled;
}
