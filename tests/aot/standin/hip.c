/* Stands in for libamdhip64.so, and for the libgalaxyhip.so that DTK calls it: exports what the runtime does,
 * records each call, fails on demand. */
#define INIT hipInit
#define DRIVER_VERSION hipDriverGetVersion
#define DEVICE_COUNT hipGetDeviceCount
#define DEVICE_CURRENT hipGetDevice
#define DEVICE_CHOOSE hipSetDevice
#define MODULE_LOAD hipModuleLoadData
#define MODULE_UNLOAD hipModuleUnload
#define MODULE_FUNCTION hipModuleGetFunction
#define LAUNCH hipModuleLaunchKernel
#define ALLOC hipMallocAsync
#define FREE hipFreeAsync
#define ERROR_NAME hipGetErrorName
#define ERROR_STRING hipGetErrorString
#define OUT_OF_MEMORY "hipErrorOutOfMemory"
#define ILLEGAL_ADDRESS "hipErrorIllegalAddress"
#include "devices.h"

EXPORT int hipDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 88 ? setting("KVB_STANDIN_POOLS", 1) : 0;
  return 0;
}

EXPORT int hipMemPoolCreate(void **pool, const int *properties) {
  FAIL_ON_DEMAND("hipMemPoolCreate");
  *pool = (void *)(uintptr_t)(0x70 + properties[3]);
  record("hipMemPoolCreate", ",\"kind\":%d,\"place\":%d,\"device\":%d", properties[0], properties[2], properties[3]);
  return 0;
}

EXPORT int hipMemPoolSetAttribute(void *pool, int attribute, void *value) {
  record("hipMemPoolSetAttribute", ",\"pool\":%zu,\"attribute\":%d,\"value\":%llu", (size_t)pool, attribute,
         (unsigned long long)*(uint64_t *)value);
  return 0;
}

EXPORT int hipMemPoolDestroy(void *pool) {
  record("hipMemPoolDestroy", ",\"pool\":%zu", (size_t)pool);
  return 0;
}

EXPORT int hipMallocFromPoolAsync(void **address, size_t bytes, void *pool, void *stream) {
  FAIL_ON_DEMAND("hipMallocFromPoolAsync");
  *address = (void *)(uintptr_t)0x5c0000;
  record("hipMallocFromPoolAsync", ",\"bytes\":%zu,\"pool\":%zu,\"stream\":%zu", bytes, (size_t)pool, (size_t)stream);
  return 0;
}
