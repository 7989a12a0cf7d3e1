/* The pool. Workers that wake too late for a job find it closed and sleep again, so that a caller
 * never waits for a thread that has not started; a small call costs it one wake-up at the most. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { WORKER_STACK = 512 * 1024, SPIN_ROUNDS = 400 };

struct kvb_pool {
  pid_t process;
  void *scratch;
  pthread_mutex_t callers; /* held by whoever has entered; guards the next two */
  pthread_t *threads;
  int workers;
  pthread_mutex_t lock;    /* of the fields below; the atomic ones may be read without it */
  pthread_cond_t wake;
  pthread_cond_t done;
  atomic_uint generation;
  atomic_int active;
  int helpers; /* that may still join the job */
  int sleeping;
  int stop;
  kvb_job *job; /* NULL: closed */
};

static _Atomic(kvb_pool *) current;
static atomic_int users;    /* calls between acquire and release */
static atomic_int unloaded; /* the destructor has run */

/* The processors that the process (its main thread) may use; free() it. NULL: the system won't say. */
static cpu_set_t *affinity_mask(size_t *size) {
  for (int processors = 1024; processors <= 1 << 20; processors *= 2) {
    cpu_set_t *mask = CPU_ALLOC(processors);
    if (mask == NULL) return NULL;
    *size = CPU_ALLOC_SIZE(processors);
    CPU_ZERO_S(*size, mask);
    if (sched_getaffinity(getpid(), *size, mask) == 0) return mask;
    CPU_FREE(mask); /* EINVAL: the kernel's mask is longer */
  }
  return NULL;
}

int kvb_pool_processors(void) {
  size_t size;
  cpu_set_t *mask = affinity_mask(&size);
  const int count = mask != NULL ? CPU_COUNT_S(size, mask) : 1;
  CPU_FREE(mask);
  return count > 0 ? count : 1;
}

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

/* Waking a worker costs a system call. Each worker that comes wakes the next if there is still
 * something to take, so that no caller pays for all of them. */
static void *worker_main(void *argument) {
  kvb_pool *pool = argument;
  unsigned seen = 0;
  for (;;) {
    for (int i = 0; i < SPIN_ROUNDS && atomic_load_explicit(&pool->generation, memory_order_relaxed) == seen;
         ++i)
      relax();
    pthread_mutex_lock(&pool->lock);
    while (pool->generation == seen && !pool->stop) {
      ++pool->sleeping;
      pthread_cond_wait(&pool->wake, &pool->lock);
      --pool->sleeping;
    }
    if (pool->stop) break;
    seen = pool->generation;
    kvb_job *job = pool->job;
    if (job != NULL && pool->helpers > 0) {
      ++pool->active;
      --pool->helpers;
      const int more = pool->helpers > 0 && pool->sleeping > 0 && job->remains(job);
      pthread_mutex_unlock(&pool->lock);
      if (more) pthread_cond_signal(&pool->wake);
      job->work(job);
      pthread_mutex_lock(&pool->lock);
      if (--pool->active == 0) pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

static void start_workers(kvb_pool *pool, int wanted) {
  pthread_attr_t attributes;
  if (pool->workers >= wanted) return;
  pthread_t *threads = realloc(pool->threads, (size_t)wanted * sizeof *threads);
  if (threads == NULL) return;
  pool->threads = threads;
  if (pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setstacksize(&attributes, WORKER_STACK);
  /* A caller may be pinned to one processor; the workers may use all that the process may. */
  size_t size;
  cpu_set_t *processors = affinity_mask(&size);
  if (processors != NULL) pthread_attr_setaffinity_np(&attributes, size, processors);
  /* Signals are for the threads of the program. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool->workers < wanted) {
    if (pthread_create(&pool->threads[pool->workers], &attributes, worker_main, pool) != 0) break;
    ++pool->workers;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  CPU_FREE(processors);
  pthread_attr_destroy(&attributes);
}

static void free_pool(kvb_pool *pool) {
  free(pool->scratch);
  free(pool->threads);
  free(pool);
}

static void stop_workers(kvb_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->stop = 1;
  atomic_fetch_add(&pool->generation, 1);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->lock);
  for (int i = 0; i < pool->workers; ++i) pthread_join(pool->threads[i], NULL);
  pool->workers = 0;
}

static kvb_pool *make_pool(size_t scratch_size, pid_t process) {
  kvb_pool *pool = calloc(1, sizeof *pool);
  if (pool == NULL) return NULL;
  pool->process = process;
  if (posix_memalign(&pool->scratch, 64, scratch_size) != 0) {
    free(pool);
    return NULL;
  }
  pthread_mutex_init(&pool->callers, NULL);
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pthread_cond_init(&pool->done, NULL);
  return pool;
}

kvb_pool *kvb_pool_acquire(size_t scratch_size) {
  const pid_t process = getpid();
  atomic_fetch_add(&users, 1);
  kvb_pool *pool = atomic_load(&current);
  if (!atomic_load(&unloaded)) {
    if (pool != NULL && pool->process == process) return pool;
    /* Threads do not survive a fork, and a lock may have been held during it: the child starts
     * from nothing and leaves its parent's pool untouched. */
    kvb_pool *made = make_pool(scratch_size, process);
    if (made != NULL) {
      if (atomic_compare_exchange_strong(&current, &pool, made)) return made;
      free_pool(made);
      return pool;
    }
  }
  atomic_fetch_sub(&users, 1);
  return NULL;
}

void kvb_pool_release(void) { atomic_fetch_sub(&users, 1); }

int kvb_pool_enter(kvb_pool *pool, int wait) {
  return (wait ? pthread_mutex_lock(&pool->callers) : pthread_mutex_trylock(&pool->callers)) == 0;
}

void kvb_pool_leave(kvb_pool *pool) { pthread_mutex_unlock(&pool->callers); }

void *kvb_pool_scratch(kvb_pool *pool) { return pool->scratch; }

void kvb_pool_run(kvb_pool *pool, kvb_job *job, int helpers) {
  start_workers(pool, helpers);
  pthread_mutex_lock(&pool->lock);
  pool->job = job;
  pool->helpers = helpers;
  atomic_fetch_add(&pool->generation, 1);
  const int wake = helpers > 0 && pool->sleeping > 0;
  pthread_mutex_unlock(&pool->lock);
  if (wake) pthread_cond_signal(&pool->wake);

  job->work(job);

  pthread_mutex_lock(&pool->lock);
  pool->job = NULL;
  pthread_mutex_unlock(&pool->lock);
  for (int i = 0; i < SPIN_ROUNDS && atomic_load(&pool->active) > 0; ++i) relax();
  pthread_mutex_lock(&pool->lock);
  while (pool->active > 0) pthread_cond_wait(&pool->done, &pool->lock);
  pthread_mutex_unlock(&pool->lock);
}

/* On dlclose, and at exit: no thread may be left in code that is about to be unmapped. A call that
 * is still under way in another thread (only at exit) finishes alone, so its pool is not freed. */
__attribute__((destructor)) static void unload(void) {
  atomic_store(&unloaded, 1);
  kvb_pool *pool = atomic_load(&current);
  if (pool == NULL || pool->process != getpid()) return;
  stop_workers(pool);
  if (atomic_load(&users) == 0) free_pool(pool);
}
