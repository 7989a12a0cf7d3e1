/* Stands in for libcuda.so.1: exports what the driver does, records each call, fails on demand. Handles
 * are small numbers: context 0xc0 + device, library 0x1000 + n, kernel and function 0x2000 + n. */
#include <stdint.h>

#include "record.h"

typedef struct {
  unsigned gx, gy, gz, bx, by, bz, shared;
  void *stream;
  struct {
    int id, pad;
    union {
      char size[64];
      unsigned numbers[3];
    } value;
  } *attributes;
  unsigned num_attributes;
} config;

static _Thread_local uintptr_t stack[16];
static _Thread_local int depth;
static int libraries, kernels;
static char entries[256][64];

static uintptr_t current(void) { return depth > 0 ? stack[depth - 1] : 0; }

EXPORT int cuInit(unsigned flags) {
  FAIL_ON_DEMAND("cuInit");
  record("cuInit", ",\"flags\":%u", flags);
  return 0;
}

EXPORT int cuDriverGetVersion(int *version) {
  *version = setting("KVB_STANDIN_VERSION", 13000);
  return 0;
}

EXPORT int cuDeviceGetCount(int *count) {
  FAIL_ON_DEMAND("cuDeviceGetCount");
  *count = setting("KVB_STANDIN_DEVICES", 2);
  return 0;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
  FAIL_ON_DEMAND("cuDeviceGet");
  *device = ordinal;
  return 0;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 115 ? setting("KVB_STANDIN_POOLS", 1) : 0;
  return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
  FAIL_ON_DEMAND("cuDevicePrimaryCtxRetain");
  *context = (void *)(uintptr_t)(0xc0 + device);
  record("cuDevicePrimaryCtxRetain", ",\"device\":%d", device);
  return 0;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  record("cuDevicePrimaryCtxRelease", ",\"device\":%d", device);
  return 0;
}

EXPORT int cuCtxGetCurrent(void **context) {
  COUNT("cuCtxGetCurrent");
  *context = (void *)current();
  return 0;
}

EXPORT int cuCtxPushCurrent_v2(void *context) {
  FAIL_ON_DEMAND("cuCtxPushCurrent");
  stack[depth++] = (uintptr_t)context;
  record("cuCtxPushCurrent", ",\"context\":%zu", (size_t)context);
  return 0;
}

EXPORT int cuCtxPopCurrent_v2(void **context) {
  COUNT("cuCtxPopCurrent");
  *context = (void *)stack[--depth];
  record("cuCtxPopCurrent", ",\"context\":%zu", (size_t)*context);
  return 0;
}

EXPORT int cuLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d, void *e,
    unsigned f) {
  FAIL_ON_DEMAND("cuLibraryLoadData");
  if (a != 0 || b != 0 || c != 0 || d != 0 || e != 0 || f != 0) return 1;
  *library = (void *)(uintptr_t)(0x1000 + ++libraries);
  record("cuLibraryLoadData", ",\"library\":%zu,\"magic\":%d,\"tag\":%d", (size_t)*library,
      ((const unsigned char *)image)[0],
         ((const unsigned char *)image)[63]);
  return 0;
}

EXPORT int cuLibraryUnload(void *library) {
  record("cuLibraryUnload", ",\"library\":%zu", (size_t)library);
  return 0;
}

EXPORT int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  FAIL_ON_DEMAND("cuLibraryGetKernel");
  snprintf(entries[++kernels % 256], sizeof entries[0], "%s", name);
  *kernel = (void *)(uintptr_t)(0x2000 + kernels);
  record("cuLibraryGetKernel", ",\"library\":%zu,\"name\":\"%s\"", (size_t)library, name);
  return 0;
}

EXPORT int cuKernelGetFunction(void **function, void *kernel) {
  FAIL_ON_DEMAND("cuKernelGetFunction");
  *function = kernel;
  record("cuKernelGetFunction", ",\"context\":%zu,\"name\":\"%s\"", (size_t)current(),
      entries[((uintptr_t)kernel - 0x2000) % 256]);
  return 0;
}

EXPORT int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
  FAIL_ON_DEMAND("cuKernelSetAttribute");
  record("cuKernelSetAttribute", ",\"attribute\":%d,\"value\":%d,\"name\":\"%s\",\"device\":%d", attribute, value,
         entries[((uintptr_t)kernel - 0x2000) % 256], device);
  return 0;
}

EXPORT int cuFuncLoad(void *function) {
  FAIL_ON_DEMAND("cuFuncLoad");
  record("cuFuncLoad", ",\"context\":%zu,\"name\":\"%s\"", (size_t)current(),
      entries[((uintptr_t)function - 0x2000) % 256]);
  return 0;
}

#ifdef COUNTING
#define record_launch(c, function, parameters) ((void)(c), (void)(function), (void)(parameters))
#else
static void record_launch(const config *c, void *function, void **parameters) {
  char arguments[4096], attributes[256] = "";
  for (unsigned i = 0; i < c->num_attributes; ++i) {
    size_t at = strlen(attributes);
    const unsigned *n = c->attributes[i].value.numbers;
    snprintf(attributes + at, sizeof attributes - at, "%s[%d,%u,%u,%u]", i == 0 ? "" : ",",
        c->attributes[i].id, n[0], n[1], n[2]);
  }
  record("launch",
         ",\"name\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%u,\"stream\":%zu,\"context\":%zu,"
         "\"attributes\":[%s],\"arguments\":%s",
         entries[((uintptr_t)function - 0x2000) % 256], c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared,
         (size_t)c->stream, (size_t)current(), attributes, argument_bytes(parameters, arguments, sizeof arguments));
}
#endif

EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
    unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
  FAIL_ON_DEMAND("cuLaunchKernel");
  wait_at_gate("cuLaunchKernel");
  if (extra != NULL) return 1;
  config c = {gx, gy, gz, bx, by, bz, shared, stream, NULL, 0};
  record_launch(&c, function, parameters);
  return 0;
}

#ifndef WITHOUT_LAUNCH_EX
EXPORT int cuLaunchKernelEx(const config *c, void *function, void **parameters, void **extra) {
  FAIL_ON_DEMAND("cuLaunchKernelEx");
  if (extra != NULL) return 1;
  record_launch(c, function, parameters);
  return 0;
}
#endif

EXPORT int cuMemPoolCreate(void **pool, const int *properties) {
  FAIL_ON_DEMAND("cuMemPoolCreate");
  *pool = (void *)(uintptr_t)(0x70 + properties[3]);
  record("cuMemPoolCreate", ",\"kind\":%d,\"handles\":%d,\"place\":%d,\"device\":%d", properties[0], properties[1],
         properties[2], properties[3]);
  return 0;
}

EXPORT int cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
  FAIL_ON_DEMAND("cuMemPoolSetAttribute");
  record("cuMemPoolSetAttribute", ",\"pool\":%zu,\"attribute\":%d,\"value\":%llu", (size_t)pool, attribute,
         (unsigned long long)*(uint64_t *)value);
  return 0;
}

EXPORT int cuMemPoolDestroy(void *pool) {
  record("cuMemPoolDestroy", ",\"pool\":%zu", (size_t)pool);
  return 0;
}

EXPORT int cuMemAllocFromPoolAsync(uint64_t *address, size_t bytes, void *pool, void *stream) {
  FAIL_ON_DEMAND("cuMemAllocFromPoolAsync");
  *address = 0x5c0000;
  record("cuMemAllocFromPoolAsync", ",\"bytes\":%zu,\"pool\":%zu,\"stream\":%zu", bytes, (size_t)pool,
      (size_t)stream);
  return 0;
}

EXPORT int cuMemFreeAsync(uint64_t address, void *stream) {
  FAIL_ON_DEMAND("cuMemFreeAsync");
  record("cuMemFreeAsync", ",\"address\":%llu,\"stream\":%zu", (unsigned long long)address, (size_t)stream);
  return 0;
}

EXPORT int cuGetErrorName(int code, const char **name) {
  *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
  return *name != NULL ? 0 : 1;
}

EXPORT int cuGetErrorString(int code, const char **words) {
  *words = code == 2 ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : NULL;
  return *words != NULL ? 0 : 1;
}
