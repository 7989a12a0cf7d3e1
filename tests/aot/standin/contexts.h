/* The body of a stand-in for a driver that keeps a current context, as CUDA's does. Whoever includes this has
 * named the functions: INIT, DRIVER_VERSION, DEVICE_COUNT, DEVICE_HANDLE, CONTEXT_RETAIN, CONTEXT_RELEASE,
 * CONTEXT_CURRENT, CONTEXT_CHOOSE, MODULE_LOAD, MODULE_UNLOAD, MODULE_FUNCTION, LAUNCH, ERROR_NAME, ERROR_STRING,
 * and ALLOC and FREE where the driver has them; and ERRORS, what the names of its errors begin with. */
#ifndef CONTEXTS_H
#define CONTEXTS_H

#include <stdint.h>

#include "record.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

enum { NO_CONTEXT = 201, FIRST_HANDLE = 40, FIRST_CONTEXT = 0xc0 };

static _Thread_local void *current;
static int modules, functions;
static char entries[256][64];

EXPORT int INIT(unsigned flags) {
  FAIL_ON_DEMAND(TEXT(INIT));
  record(TEXT(INIT), ",\"flags\":%u", flags);
  return 0;
}

EXPORT int DRIVER_VERSION(int *version) {
  *version = setting("KVB_STANDIN_VERSION", 10020);
  return 0;
}

EXPORT int DEVICE_COUNT(int *count) {
  FAIL_ON_DEMAND(TEXT(DEVICE_COUNT));
  *count = setting("KVB_STANDIN_DEVICES", 2);
  return 0;
}

/* Handles are not ordinals, so that taking one for the other shows. */
EXPORT int DEVICE_HANDLE(int *device, int ordinal) {
  FAIL_ON_DEMAND(TEXT(DEVICE_HANDLE));
  *device = FIRST_HANDLE + ordinal;
  return 0;
}

EXPORT int CONTEXT_RETAIN(void **context, int device) {
  FAIL_ON_DEMAND(TEXT(CONTEXT_RETAIN));
  *context = (void *)(uintptr_t)(FIRST_CONTEXT + device - FIRST_HANDLE);
  record(TEXT(CONTEXT_RETAIN), ",\"context\":%zu", (size_t)*context);
  return 0;
}

EXPORT int CONTEXT_RELEASE(int device) {
  record(TEXT(CONTEXT_RELEASE), ",\"context\":%d", FIRST_CONTEXT + device - FIRST_HANDLE);
  return 0;
}

EXPORT int CONTEXT_CURRENT(void **context) {
  FAIL_ON_DEMAND(TEXT(CONTEXT_CURRENT));
  *context = current;
  return 0;
}

EXPORT int CONTEXT_CHOOSE(void *context) {
  FAIL_ON_DEMAND(TEXT(CONTEXT_CHOOSE));
  current = context;
  record(TEXT(CONTEXT_CHOOSE), ",\"context\":%zu", (size_t)context);
  return 0;
}

EXPORT int MODULE_LOAD(void **module, const void *image) {
  FAIL_ON_DEMAND(TEXT(MODULE_LOAD));
  if (current == NULL) return NO_CONTEXT;
  *module = (void *)(uintptr_t)(0x1000 + ++modules);
  record(TEXT(MODULE_LOAD), ",\"module\":%zu,\"magic\":%d,\"context\":%zu", (size_t)*module,
         ((const unsigned char *)image)[0], (size_t)current);
  return 0;
}

EXPORT int MODULE_UNLOAD(void *module) {
  record(TEXT(MODULE_UNLOAD), ",\"module\":%zu,\"context\":%zu", (size_t)module, (size_t)current);
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
  if (current == NULL) return NO_CONTEXT;
  if (extra != NULL) return 1;
  record("launch",
         ",\"by\":\"%s\",\"name\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%u,\"stream\":%zu,"
         "\"context\":%zu,\"arguments\":%s",
         TEXT(LAUNCH), entries[((uintptr_t)function - 0x2000) % 256], gx, gy, gz, bx, by, bz, shared, (size_t)stream,
         (size_t)current, argument_bytes(parameters, arguments, sizeof arguments));
  return 0;
}

#if defined ALLOC && !defined WITHOUT_ALLOC
EXPORT int ALLOC(uint64_t *address, size_t bytes, void *stream) {
  FAIL_ON_DEMAND(TEXT(ALLOC));
  *address = 0x5c0000;
  record(TEXT(ALLOC), ",\"bytes\":%zu,\"stream\":%zu", bytes, (size_t)stream);
  return 0;
}

EXPORT int FREE(uint64_t address, void *stream) {
  FAIL_ON_DEMAND(TEXT(FREE));
  record(TEXT(FREE), ",\"address\":%zu,\"stream\":%zu", (size_t)address, (size_t)stream);
  return 0;
}
#endif

EXPORT int ERROR_NAME(int code, const char **text) {
  *text = code == 2 ? ERRORS "OUT_OF_MEMORY" : code == 700 ? ERRORS "ILLEGAL_ADDRESS" : NULL;
  return *text != NULL ? 0 : 1;
}

EXPORT int ERROR_STRING(int code, const char **text) {
  *text = code == 2 ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : NULL;
  return *text != NULL ? 0 : 1;
}

#endif
