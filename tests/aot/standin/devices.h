/* The body of a stand-in for a driver that keeps a current device, as HIP does. Whoever includes this has named
 * the functions: INIT, DRIVER_VERSION, DEVICE_COUNT, DEVICE_CURRENT, DEVICE_CHOOSE, MODULE_LOAD, MODULE_UNLOAD,
 * MODULE_FUNCTION, LAUNCH, ALLOC, FREE, ERROR_NAME, ERROR_STRING; and OUT_OF_MEMORY and ILLEGAL_ADDRESS, what the
 * driver calls its errors 2 and 700. */
#ifndef DEVICES_H
#define DEVICES_H

#include <stdint.h>

#include "record.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

static _Thread_local int current;
static int modules, functions;
static char entries[256][64];

EXPORT int INIT(unsigned flags) {
  FAIL_ON_DEMAND(TEXT(INIT));
  record(TEXT(INIT), ",\"flags\":%u", flags);
  return 0;
}

EXPORT int DRIVER_VERSION(int *version) {
  *version = setting("KVB_STANDIN_VERSION", 60443482);
  return 0;
}

EXPORT int DEVICE_COUNT(int *count) {
  FAIL_ON_DEMAND(TEXT(DEVICE_COUNT));
  *count = setting("KVB_STANDIN_DEVICES", 2);
  return 0;
}

EXPORT int DEVICE_CURRENT(int *device) {
  FAIL_ON_DEMAND(TEXT(DEVICE_CURRENT));
  *device = current;
  return 0;
}

EXPORT int DEVICE_CHOOSE(int device) {
  FAIL_ON_DEMAND(TEXT(DEVICE_CHOOSE));
  current = device;
  record(TEXT(DEVICE_CHOOSE), ",\"device\":%d", device);
  return 0;
}

EXPORT int MODULE_LOAD(void **module, const void *image) {
  FAIL_ON_DEMAND(TEXT(MODULE_LOAD));
  *module = (void *)(uintptr_t)(0x1000 + ++modules);
  record(TEXT(MODULE_LOAD), ",\"module\":%zu,\"magic\":%d,\"device\":%d", (size_t)*module,
         ((const unsigned char *)image)[0], current);
  return 0;
}

EXPORT int MODULE_UNLOAD(void *module) {
  record(TEXT(MODULE_UNLOAD), ",\"module\":%zu,\"device\":%d", (size_t)module, current);
  return 0;
}

EXPORT int MODULE_FUNCTION(void **function, void *module, const char *name) {
  FAIL_ON_DEMAND(TEXT(MODULE_FUNCTION));
  snprintf(entries[++functions % 256], sizeof entries[0], "%s", name);
  *function = (void *)(uintptr_t)(0x2000 + functions);
  record(TEXT(MODULE_FUNCTION), ",\"module\":%zu,\"name\":\"%s\"", (size_t)module, name);
  return 0;
}

EXPORT int LAUNCH(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void *stream, void **parameters, void **extra) {
  FAIL_ON_DEMAND(TEXT(LAUNCH));
  wait_at_gate(TEXT(LAUNCH));
  char arguments[4096];
  if (extra != NULL) return 1;
  record("launch",
         ",\"by\":\"%s\",\"name\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%u,\"stream\":%zu,"
         "\"device\":%d,\"arguments\":%s",
         TEXT(LAUNCH), entries[((uintptr_t)function - 0x2000) % 256], gx, gy, gz, bx, by, bz, shared, (size_t)stream,
         current, argument_bytes(parameters, arguments, sizeof arguments));
  return 0;
}

#ifndef WITHOUT_ALLOC
EXPORT int ALLOC(void **address, size_t bytes, void *stream) {
  FAIL_ON_DEMAND(TEXT(ALLOC));
  *address = (void *)(uintptr_t)0x5c0000;
  record(TEXT(ALLOC), ",\"bytes\":%zu,\"stream\":%zu", bytes, (size_t)stream);
  return 0;
}
#endif

EXPORT int FREE(void *address, void *stream) {
  FAIL_ON_DEMAND(TEXT(FREE));
  record(TEXT(FREE), ",\"address\":%zu,\"stream\":%zu", (size_t)address, (size_t)stream);
  return 0;
}

EXPORT const char *ERROR_NAME(int code) {
  return code == 2 ? OUT_OF_MEMORY : code == 700 ? ILLEGAL_ADDRESS : NULL;
}

EXPORT const char *ERROR_STRING(int code) {
  return code == 2 ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : NULL;
}

#endif
