/* DLPack's exchange carries the current stream of CUDA and ROCm only: whoever calls for another device says its
 * stream first. */
#include "stream.h"

#include <stddef.h>
#include <stdint.h>

#include <tvm/ffi/c_api.h>

#include "error.h"

#pragma weak TVMFFIErrorSetRaisedFromCStr

static _Thread_local struct {
  void *stream;
  int64_t device_id;
} told = {NULL, -1};

void *kvb_stream_or_told(void *stream, int device_id) {
  return stream == NULL && told.device_id == device_id ? told.stream : stream;
}

/* use_stream(device_id, stream as an int): for this thread's later calls on that device. */
__attribute__((visibility("default"))) int __tvm_ffi_use_stream(void *handle, const TVMFFIAny *args, int32_t num_args,
                                                                TVMFFIAny *result) {
  (void)handle;
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  if (num_args != 2 || args[0].type_index != kTVMFFIInt || args[1].type_index != kTVMFFIInt) {
    kvb_fail(KVB_TYPE_ERROR, "use_stream: wanted device_id and stream, both an int");
    if (TVMFFIErrorSetRaisedFromCStr != NULL) TVMFFIErrorSetRaisedFromCStr("TypeError", kvb_last_error());
    return -1;
  }
  told.device_id = args[0].v_int64;
  told.stream = (void *)(uintptr_t)args[1].v_int64;
  return 0;
}
