/* What the staged dispatch needs of Ascend's runtime beyond driver.h. Every function that returns an int returns
 * KVB_OK or a failure with ACL's words. All but the first are called inside kvb_driver_enter and kvb_driver_leave. */
#ifndef KVB_ACL_H
#define KVB_ACL_H

#include <stddef.h>
#include <stdint.h>

#include "driver.h"

/* What is the same for every launch on one device. */
typedef struct kvb_npu {
  void *sync;           /* the address that cores synchronise through */
  int64_t vector_cores; /* how many blocks of a vector kernel run at once */
} kvb_npu;

const kvb_npu *kvb_acl_npu(int device_id);

/* Launches `blocks` blocks of a vector kernel; `arguments` are copied before this returns. */
int kvb_acl_launch(const char *name, kvb_function function, uint32_t blocks, void *arguments, size_t size,
                   void *stream);

int kvb_acl_alloc(size_t bytes, void **memory);
void kvb_acl_free(void *memory);

/* The graph that the stream's work is being captured into, to run any number of times later; NULL where it is not. */
int kvb_acl_capturing(void *stream, void **graph);

int kvb_acl_event_make(void **event);
void kvb_acl_event_end(void *event);
int kvb_acl_event_record(void *event, void *stream);
int kvb_acl_event_done(void *event, int *done);
int kvb_acl_wait(void *stream);

/* CANN's index_select over rows of KVB_GATHER_WIDTH floats, out[i] = table[indices[i]], in its two steps: plan says
 * how much memory run needs, and run uses the plan up. A plan that is not run is dropped. */
enum { KVB_GATHER_WIDTH = 1024 };

typedef struct kvb_gather {
  void *tensors[3];
  void *executor;
  uint64_t workspace; /* bytes */
} kvb_gather;

int kvb_gather_start(void); /* loads the library; called once, by kvb_driver_start */
int kvb_gather_plan(kvb_gather *plan, const void *table, int64_t rows, const void *indices, int64_t count,
                    void *out);
int kvb_gather_run(kvb_gather *plan, void *workspace, void *stream);
void kvb_gather_drop(kvb_gather *plan);

/* KVB_OK, or a failure of `function` with ACL's words; `of`, which may be NULL, says what for. */
int kvb_acl_check(const char *function, const char *of, int code);

#endif
