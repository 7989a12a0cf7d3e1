/* A call: with all of its arguments, or with those that a binding has not checked before. */
#ifndef KVB_CALL_H
#define KVB_CALL_H

#include "check.h"
#include "kvbuild.h"

/* One fixed tensor as it was when it was bound; strides of extents 0 and 1 are 0. */
typedef struct kvb_fixed {
  const char *data;
  DLDevice device;
  DLDataType dtype;
  int32_t rank;
  int64_t shape[KVB_MAX_RANK], stride[KVB_MAX_RANK];
} kvb_fixed;

/* Never changes once made, so that threads may share it. It belongs to no device's opening: a step borrows the
 * device like any call, and is refused where it has been closed. */
struct kvb_binding {
  kvb_operands operands; /* the varying fields are unset */
  kvb_fixed fixed[KVB_NUM_FIXED];
  kvb_watch watch;
};

/* `pause` and `resume` are those of kvb_watch: around the launches, once the arguments have been read. */
int kvb_call(const kvb_arguments *arguments, void *(*pause)(void), void (*resume)(void *), void *stream);

/* The varying tensors of `arguments` are ignored; `watch` may be NULL. */
int kvb_call_bind(const kvb_arguments *arguments, const kvb_watch *watch, kvb_binding **out);

/* Of `arguments` only tensors count. Where `again`, its fixed tensors are those of the binding as they are now, and
 * are compared with it; else the binding's watch looks at them. */
int kvb_call_step(const kvb_binding *binding, const kvb_arguments *arguments, int again, void *stream);

#endif
