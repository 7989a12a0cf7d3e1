/* Opened devices: what `open` makes and what a call borrows. */
#ifndef KVB_DEVICE_H
#define KVB_DEVICE_H

#include <stdatomic.h>
#include <stdint.h>

#include "driver.h"

typedef struct kvb_device {
  kvb_context context;
  void **images;           /* by blob; the driver may read them until it has unloaded the module */
  size_t *sizes;           /* of the images, in bytes */
  void **modules;          /* by blob */
  kvb_function *functions; /* by kernel */
  _Atomic int64_t pinned;  /* the variant of every call, counted from 1; 0: each call's own choice */
  _Atomic int64_t calls;
  _Atomic int64_t general_calls;
  _Atomic int64_t *launches; /* by variant */
} kvb_device;

/* Borrows an open device for one call, without a lock, or fails where it is not open. Undone by
 * kvb_device_return, which close waits for. A failure names `function`; or `operand`, where that is not NULL
 * and the operand merely lies on another device than those that are open. */
int kvb_device_borrow(int device_id, const char *function, const char *operand, kvb_device **out);
void kvb_device_return(int device_id);

#endif
