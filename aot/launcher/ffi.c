/* The TVM-FFI interface. Its symbols are weak, so that the object also loads where libtvm_ffi is absent. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "call.h"
#include "error.h"
#include "table.h"
#include "target.h"

#pragma weak TVMFFIErrorSetRaisedFromCStr
#pragma weak TVMFFIEnvGetStream
#pragma weak TVMFFIFunctionGetGlobal
#pragma weak TVMFFIFunctionCall
#pragma weak TVMFFIFunctionCreate
#pragma weak TVMFFIObjectIncRef
#pragma weak TVMFFIObjectDecRef
#pragma weak TVMFFIBytesFromByteArray

#define EXPORT __attribute__((visibility("default")))

enum { MAX_DEVICE_ID = 1023 };

static int raise_error(int code) {
  static const char *const KINDS[] = {
      [KVB_TYPE_ERROR] = "TypeError",
      [KVB_VALUE_ERROR] = "ValueError",
      [KVB_DEVICE_ERROR] = "RuntimeError",
      [KVB_MEMORY_ERROR] = "MemoryError",
  };
  if (code == KVB_OK) return 0;
  if (TVMFFIErrorSetRaisedFromCStr != NULL) TVMFFIErrorSetRaisedFromCStr(KINDS[code], kvb_last_error());
  return -1;
}

static const char *type_text(int32_t type, char *text, size_t size) {
  switch (type) {
    case kTVMFFINone: return "None";
    case kTVMFFIInt: return "an int";
    case kTVMFFIBigInt: return "an int beyond 64 bits";
    case kTVMFFIBool: return "a bool";
    case kTVMFFIFloat: return "a float";
    case kTVMFFIDataType: return "a dtype";
    case kTVMFFIDevice: return "a device";
    case kTVMFFIRawStr:
    case kTVMFFISmallStr:
    case kTVMFFIStr: return "a str";
    case kTVMFFIByteArrayPtr:
    case kTVMFFISmallBytes:
    case kTVMFFIBytes: return "bytes";
    case kTVMFFIFunction: return "a function";
    case kTVMFFIShape: return "a shape";
    case kTVMFFIDLTensorPtr:
    case kTVMFFITensor: return "a tensor";
    case kTVMFFIArray:
    case kTVMFFIList: return "a list or tuple";
    case kTVMFFIMap:
    case kTVMFFIDict: return "a dict";
    case kTVMFFIOpaquePyObject: return "a Python object that is no tensor";
    default: snprintf(text, size, "TVM-FFI type %" PRId32, type); return text;
  }
}

static int wrong_type(const char *name, const char *wanted, int32_t found) {
  char text[48];
  return kvb_fail(KVB_TYPE_ERROR, "%s: wanted %s, found %s", name, wanted, type_text(found, text, sizeof text));
}

static int check_count(const char *function, int32_t wanted, int32_t found) {
  if (found == wanted) return KVB_OK;
  return kvb_fail(KVB_TYPE_ERROR, "%s: wanted %d arguments, found %d", function, (int)wanted, (int)found);
}

static int get_int(const TVMFFIAny *any, const char *name, int64_t *out) {
  if (any->type_index != kTVMFFIInt) return wrong_type(name, "an int", any->type_index);
  *out = any->v_int64;
  return KVB_OK;
}

static int get_device_id(const TVMFFIAny *any, int *out) {
  int64_t id;
  int code = get_int(any, "device_id", &id);
  if (code != KVB_OK) return code;
  if (id < 0 || id > MAX_DEVICE_ID)
    return kvb_fail(KVB_VALUE_ERROR, "device_id: wanted 0 to %d, found %" PRId64, MAX_DEVICE_ID, id);
  *out = (int)id;
  return KVB_OK;
}

static int get_bytes(const TVMFFIAny *any, const char *name, TVMFFIByteArray *out) {
  switch (any->type_index) {
    case kTVMFFISmallBytes:
      *out = (TVMFFIByteArray){any->v_bytes, any->small_str_len};
      return KVB_OK;
    case kTVMFFIBytes:
      *out = *(const TVMFFIByteArray *)((const char *)any->v_ptr + sizeof(TVMFFIObject));
      return KVB_OK;
    case kTVMFFIByteArrayPtr:
      *out = *(const TVMFFIByteArray *)any->v_ptr;
      return KVB_OK;
    default:
      return wrong_type(name, "bytes", any->type_index);
  }
}

static int get_tensor(const TVMFFIAny *any, const char *name, const DLTensor **out) {
  if (any->type_index == kTVMFFITensor)
    *out = (const DLTensor *)((const char *)any->v_ptr + sizeof(TVMFFIObject));
  else if (any->type_index == kTVMFFIDLTensorPtr)
    *out = any->v_ptr;
  else
    return wrong_type(name, "a tensor", any->type_index);
  return KVB_OK;
}

static int call_global(const char *name, TVMFFIAny *arguments, int32_t count, TVMFFIAny *result) {
  TVMFFIByteArray text = {name, strlen(name)};
  TVMFFIObjectHandle function = NULL;
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  if (TVMFFIFunctionGetGlobal == NULL || TVMFFIFunctionGetGlobal(&text, &function) != 0 || function == NULL)
    return -1;
  int failed = TVMFFIFunctionCall(function, arguments, count, result);
  TVMFFIObjectDecRef(function);
  return failed;
}

static int copy_from_map(const void *self, const char *sha256, void **data, size_t *size) {
  TVMFFIAny arguments[2] = {*(const TVMFFIAny *)self, {.type_index = kTVMFFIRawStr, .v_c_str = sha256}};
  TVMFFIAny found;
  if (call_global("ffi.MapCount", arguments, 2, &found) != 0 || found.v_int64 == 0)
    return kvb_fail(KVB_VALUE_ERROR, "blobs: wanted %s among them, found it missing. Pass all of the target's blobs",
                    sha256);
  TVMFFIByteArray bytes;
  if (call_global("ffi.MapGetItem", arguments, 2, &found) != 0)
    return kvb_fail(KVB_VALUE_ERROR, "blobs: %s could not be read from the map", sha256);
  int code = get_bytes(&found, "blobs", &bytes);
  if (code == KVB_OK) {
    *data = malloc(bytes.size > 0 ? bytes.size : 1);
    if (*data == NULL) {
      code = kvb_fail(KVB_MEMORY_ERROR, "no memory for the %zu bytes of blob %s", bytes.size, sha256);
    } else {
      memcpy(*data, bytes.data, bytes.size);
      *size = bytes.size;
    }
  }
  if (found.type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(found.v_obj);
  return code;
}

EXPORT int __tvm_ffi_open(void *handle, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)handle;
  int device_id;
  TVMFFIByteArray manifest;
  int code = check_count("open", 3, num_args);
  if (code == KVB_OK) code = get_device_id(&args[0], &device_id);
  if (code == KVB_OK) code = get_bytes(&args[1], "manifest", &manifest);
  if (code == KVB_OK && args[2].type_index != kTVMFFIMap)
    code = wrong_type("blobs", "a dict of str to bytes", args[2].type_index);
  if (code == KVB_OK) {
    kvb_source source = {copy_from_map, &args[2]};
    code = kvb_target_open(device_id, manifest.data, manifest.size, &source);
  }
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  return raise_error(code);
}

static int get_tensors(const TVMFFIAny *args, const int *which, int count, kvb_arguments *arguments) {
  for (int i = 0; i < count; ++i) {
    int code = get_tensor(&args[i], KVB_TENSOR_NAMES[which[i]], &arguments->tensors[which[i]]);
    if (code != KVB_OK) return code;
  }
  return KVB_OK;
}

static int get_scalars(const TVMFFIAny *scalars, kvb_arguments *arguments) {
  int code = get_int(&scalars[0], "block_size", &arguments->block_size);
  if (code == KVB_OK) code = get_int(&scalars[1], "compress_ratio", &arguments->compress_ratio);
  if (code != KVB_OK) return code;
  if (scalars[2].type_index == kTVMFFIFloat)
    arguments->rms_norm_eps = scalars[2].v_float64;
  else if (scalars[2].type_index == kTVMFFIInt)
    arguments->rms_norm_eps = (double)scalars[2].v_int64;
  else
    return wrong_type("rms_norm_eps", "a float", scalars[2].type_index);
  return KVB_OK;
}

/* The environment keeps a table by device, which must not grow by a number that nobody has checked. */
static void *current_stream(DLDevice device) {
  bool ours = (int)device.device_type == KVB_TABLE.device_type;
  if (!ours || device.device_type == kDLCPU || device.device_id < 0 || device.device_id > MAX_DEVICE_ID) return NULL;
  return TVMFFIEnvGetStream != NULL ? TVMFFIEnvGetStream(device.device_type, device.device_id) : NULL;
}

static int compress(const TVMFFIAny *args, int32_t num_args) {
  static const int ALL[KVB_NUM_TENSORS] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  kvb_arguments arguments;
  int code = check_count("compress", KVB_NUM_TENSORS + 3, num_args);
  if (code == KVB_OK) code = get_tensors(args, ALL, KVB_NUM_TENSORS, &arguments);
  if (code == KVB_OK) code = get_scalars(args + KVB_NUM_TENSORS, &arguments);
  if (code != KVB_OK) return code;
  const DLTensor *first = arguments.tensors[KVB_STATE_CACHE];
  return kvb_call(&arguments, NULL, NULL, first != NULL ? current_stream(first->device) : NULL);
}

EXPORT int __tvm_ffi_compress(void *handle, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)handle;
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  return raise_error(compress(args, num_args));
}

/* What a bound function holds: the tensors live at least as long as it does. */
typedef struct bound {
  kvb_binding *binding;
  TVMFFIObjectHandle kept[KVB_NUM_FIXED];
} bound;

static void drop(void *self) {
  bound *held = self;
  for (int i = 0; i < KVB_NUM_FIXED; ++i)
    if (held->kept[i] != NULL) TVMFFIObjectDecRef(held->kept[i]);
  kvb_unbind(held->binding);
  free(held);
}

static int step(const bound *held, const TVMFFIAny *args, int32_t num_args) {
  kvb_arguments arguments;
  bool again = num_args == KVB_NUM_TENSORS;
  int code = again ? KVB_OK : check_count("step", KVB_NUM_VARYING, num_args);
  if (code == KVB_OK) code = get_tensors(args, KVB_VARYING, KVB_NUM_VARYING, &arguments);
  if (code == KVB_OK && again) code = get_tensors(args + KVB_NUM_VARYING, KVB_FIXED, KVB_NUM_FIXED, &arguments);
  if (code != KVB_OK) return code;
  return kvb_call_step(held->binding, &arguments, again, current_stream(held->binding->fixed[0].device));
}

static int call_bound(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  return raise_error(step(self, args, num_args));
}

static int bind_tensors(const TVMFFIAny *args, int32_t num_args, bound *held) {
  kvb_arguments arguments;
  const kvb_watch *watch = NULL;
  bool watched = num_args == KVB_NUM_FIXED + 4;
  int code = watched ? KVB_OK : check_count("bind", KVB_NUM_FIXED + 3, num_args);
  if (code == KVB_OK) code = get_tensors(args, KVB_FIXED, KVB_NUM_FIXED, &arguments);
  if (code == KVB_OK) code = get_scalars(args + KVB_NUM_FIXED, &arguments);
  if (code != KVB_OK) return code;
  for (int i = 0; i < KVB_NUM_FIXED; ++i)
    if (args[i].type_index != kTVMFFITensor)
      return kvb_fail(KVB_TYPE_ERROR, "%s: wanted a tensor that can be kept, found a borrowed DLTensor",
                      KVB_TENSOR_NAMES[KVB_FIXED[i]]);
  if (watched) {
    const TVMFFIAny *last = &args[num_args - 1];
    if (last->type_index != kTVMFFIOpaquePtr) return wrong_type("watch", "a pointer", last->type_index);
    watch = last->v_ptr;
  }
  code = kvb_call_bind(&arguments, watch, &held->binding);
  for (int i = 0; code == KVB_OK && i < KVB_NUM_FIXED; ++i) {
    held->kept[i] = args[i].v_obj;
    TVMFFIObjectIncRef(held->kept[i]);
  }
  return code;
}

EXPORT int __tvm_ffi_bind(void *handle, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)handle;
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  bound *held = calloc(1, sizeof *held);
  if (held == NULL) return raise_error(kvb_fail(KVB_MEMORY_ERROR, "no memory for a binding"));
  int code = bind_tensors(args, num_args, held);
  TVMFFIObjectHandle function = NULL;
  if (code == KVB_OK && TVMFFIFunctionCreate(held, call_bound, drop, &function) != 0)
    code = kvb_fail(KVB_MEMORY_ERROR, "TVM-FFI made no function for a binding");
  if (code != KVB_OK) {
    drop(held);
    return raise_error(code);
  }
  *result = (TVMFFIAny){.type_index = kTVMFFIFunction, .v_obj = function};
  return 0;
}

EXPORT int __tvm_ffi_close(void *handle, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)handle;
  int device_id;
  int code = check_count("close", 1, num_args);
  if (code == KVB_OK) code = get_device_id(&args[0], &device_id);
  if (code == KVB_OK) code = kvb_target_close(device_id);
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  return raise_error(code);
}

EXPORT int __tvm_ffi_pin(void *handle, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)handle;
  int device_id;
  int64_t variant;
  int code = check_count("pin", 2, num_args);
  if (code == KVB_OK) code = get_device_id(&args[0], &device_id);
  if (code == KVB_OK) code = get_int(&args[1], "variant", &variant);
  if (code == KVB_OK) code = kvb_target_pin(device_id, variant);
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  return raise_error(code);
}

EXPORT int __tvm_ffi_counters(void *handle, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)handle;
  int device_id;
  size_t count = 0;
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  int code = check_count("counters", 1, num_args);
  if (code == KVB_OK) code = get_device_id(&args[0], &device_id);
  int64_t *values = malloc((2 + KVB_TABLE.num_variants) * sizeof *values);
  if (code == KVB_OK && values == NULL) code = kvb_fail(KVB_MEMORY_ERROR, "no memory for the counters");
  if (code == KVB_OK) code = kvb_target_counters(device_id, values, 2 + KVB_TABLE.num_variants, &count);
  if (code == KVB_OK) {
    TVMFFIByteArray bytes = {(const char *)values, count * sizeof *values};
    if (TVMFFIBytesFromByteArray != NULL) TVMFFIBytesFromByteArray(&bytes, result);
  }
  free(values);
  return raise_error(code);
}
