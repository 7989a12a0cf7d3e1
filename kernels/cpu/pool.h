/* A persistent pool of worker threads that runs one job at a time. */
#ifndef KVB_CPU_POOL_H
#define KVB_CPU_POOL_H

#include <stddef.h>

#pragma GCC visibility push(hidden)

/* How many processors the affinity mask of this process allows; at least 1. */
int kvb_pool_processors(void);

/* Work that any number of threads may do together: each call takes what is left until nothing is. */
typedef struct kvb_job {
  void (*work)(struct kvb_job *job);
  /* 1 while there is something left to take; decides whether to wake one more worker. */
  int (*remains)(struct kvb_job *job);
} kvb_job;

typedef struct kvb_pool kvb_pool;

/* This process's pool, with `scratch_size` bytes of scratch; made at the first call, and anew in a
 * child of fork. NULL where there is none to be had: the caller then does the work alone. Pair each
 * call that returned a pool with kvb_pool_release. */
kvb_pool *kvb_pool_acquire(size_t scratch_size);
void kvb_pool_release(void);

/* Takes the pool for this caller. 0: another caller has it, and `wait` is 0. */
int kvb_pool_enter(kvb_pool *pool, int wait);
void kvb_pool_leave(kvb_pool *pool);

/* The memory that whoever has entered the pool may use; aligned to 64 bytes. */
void *kvb_pool_scratch(kvb_pool *pool);

/* Runs the job on this thread and at most `helpers` workers (fewer, if the system refuses threads);
 * returns when nothing of it runs any more. Only for whoever has entered the pool. */
void kvb_pool_run(kvb_pool *pool, kvb_job *job, int helpers);

#pragma GCC visibility pop

#endif
