/* This thread's last failure. Written only when something failed. */
#ifndef KVB_ERROR_H
#define KVB_ERROR_H

#include "kvbuild.h"

/* Records the words of a failure and returns `code`. A KVB_DEVICE_ERROR gets its prefix here. Cold: what leads here
 * is moved out of the way of calls that succeed. */
__attribute__((cold, format(printf, 2, 3))) int kvb_fail(int code, const char *format, ...);

/* While held, later failures of this thread keep the words of the first: what cleaning up runs into says
 * less than what it cleans up after. */
void kvb_hold_error(int held);

#endif
