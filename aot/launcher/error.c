#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char words[2048];
static _Thread_local int holding;

int kvb_fail(int code, const char *format, ...) {
  if (holding) return code;
  int at = 0;
  if (code == KVB_DEVICE_ERROR) at = snprintf(words, sizeof words, "DeviceError: ");
  va_list values;
  va_start(values, format);
  vsnprintf(words + at, sizeof words - (size_t)at, format, values);
  va_end(values);
  return code;
}

void kvb_hold_error(int held) { holding = held; }

__attribute__((visibility("default"))) const char *kvb_last_error(void) { return words; }
