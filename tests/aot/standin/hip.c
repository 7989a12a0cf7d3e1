/* Stands in for libamdhip64.so: exports what the runtime does, records each call, fails on demand. */
#include <stdint.h>

#include "record.h"

static _Thread_local int current;
static int modules, functions;
static char entries[256][64];

EXPORT int hipInit(unsigned flags) {
  FAIL_ON_DEMAND("hipInit");
  record("hipInit", ",\"flags\":%u", flags);
  return 0;
}

EXPORT int hipDriverGetVersion(int *version) {
  *version = setting("KVB_STANDIN_VERSION", 60443482);
  return 0;
}

EXPORT int hipGetDeviceCount(int *count) {
  FAIL_ON_DEMAND("hipGetDeviceCount");
  *count = setting("KVB_STANDIN_DEVICES", 2);
  return 0;
}

EXPORT int hipGetDevice(int *device) {
  FAIL_ON_DEMAND("hipGetDevice");
  *device = current;
  return 0;
}

EXPORT int hipSetDevice(int device) {
  FAIL_ON_DEMAND("hipSetDevice");
  current = device;
  record("hipSetDevice", ",\"device\":%d", device);
  return 0;
}

EXPORT int hipDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 88 ? setting("KVB_STANDIN_POOLS", 1) : 0;
  return 0;
}

EXPORT int hipModuleLoadData(void **module, const void *image) {
  FAIL_ON_DEMAND("hipModuleLoadData");
  *module = (void *)(uintptr_t)(0x1000 + ++modules);
  record("hipModuleLoadData", ",\"module\":%zu,\"magic\":%d,\"device\":%d", (size_t)*module,
         ((const unsigned char *)image)[0], current);
  return 0;
}

EXPORT int hipModuleUnload(void *module) {
  record("hipModuleUnload", ",\"module\":%zu,\"device\":%d", (size_t)module, current);
  return 0;
}

EXPORT int hipModuleGetFunction(void **function, void *module, const char *name) {
  FAIL_ON_DEMAND("hipModuleGetFunction");
  snprintf(entries[++functions % 256], sizeof entries[0], "%s", name);
  *function = (void *)(uintptr_t)(0x2000 + functions);
  record("hipModuleGetFunction", ",\"module\":%zu,\"name\":\"%s\"", (size_t)module, name);
  return 0;
}

EXPORT int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                 unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
  FAIL_ON_DEMAND("hipModuleLaunchKernel");
  wait_at_gate("hipModuleLaunchKernel");
  char arguments[4096];
  if (extra != NULL) return 1;
  record("launch",
         ",\"name\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%u,\"stream\":%zu,\"device\":%d,"
         "\"arguments\":%s",
         entries[((uintptr_t)function - 0x2000) % 256], gx, gy, gz, bx, by, bz, shared, (size_t)stream, current,
         argument_bytes(parameters, arguments, sizeof arguments));
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

EXPORT int hipFreeAsync(void *address, void *stream) {
  FAIL_ON_DEMAND("hipFreeAsync");
  record("hipFreeAsync", ",\"address\":%zu,\"stream\":%zu", (size_t)address, (size_t)stream);
  return 0;
}

EXPORT const char *hipGetErrorName(int code) {
  return code == 2 ? "hipErrorOutOfMemory" : code == 700 ? "hipErrorIllegalAddress" : NULL;
}

EXPORT const char *hipGetErrorString(int code) {
  return code == 2 ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : NULL;
}
