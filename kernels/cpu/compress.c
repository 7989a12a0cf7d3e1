/* The host kernel's entry. Outputs are handed out by tickets: most as a whole, the last few part
 * by part, so that a call of one output keeps several threads busy and a large one ends evenly. Who
 * computes what cannot change a byte: a part is folded by one thread in one order, and the parts
 * are combined in a fixed tree. */
#include "compress.h"

#include <stdatomic.h>
#include <stdio.h>

#include "pool.h"

enum {
  /* Outputs that may be computed in parts at once; each needs a kvb_split. */
  MAX_SPLIT = 64,
  /* A part of fewer rows than this many whole ones is not worth a thread of its own. */
  MIN_TASK_ROWS = 8,
  MAX_DIM_GROUPS = 4,
  /* Below this many window rows (1 MiB) one thread is done sooner than it can wake another: measured
   * on a virtual machine, 128 rows take 54 us alone and 67 us shared by two. */
  MIN_SHARED_ROWS = 256,
  /* Window rows from which a caller waits for a busy pool and does not go on alone. */
  WAIT_ROWS = 2048,
  /* Up to this many outputs, those to be skipped are sorted out first: a decode step is mostly
   * padding, and its few real outputs are what has to be divided among the threads. */
  MAX_SORTED = 256,
};

/* One output that is computed in parts. */
typedef struct kvb_split {
  kvb_part parts[KVB_WINDOW_PARTS];
  atomic_int remaining; /* tasks not yet done */
  atomic_int live;      /* rows that are not masked */
} kvb_split;

typedef struct compress_job {
  kvb_job base;
  const kvb_operands *ops;
  const kvb_level *level;
  const kvb_window *windows; /* of all outputs; NULL: not resolved yet */
  int64_t outputs;
  kvb_split *splits;
  int64_t whole;  /* outputs 0..whole-1 are one ticket each */
  int dim_groups; /* each output after them has KVB_WINDOW_PARTS * dim_groups tickets */
  int64_t tickets;
  atomic_llong next;
} compress_job;

/* Rounding to nearest and subnormals as IEEE has them, whatever the caller's thread was set to. */
#if defined(__x86_64__)
typedef unsigned float_mode;
static float_mode standard_float_mode(void) {
  const float_mode before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(0x1f80);
  return before;
}
static void restore_float_mode(float_mode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t float_mode;
static float_mode standard_float_mode(void) {
  float_mode before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"((float_mode)0) : "memory");
  return before;
}
static void restore_float_mode(float_mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#endif

static int window_at(const compress_job *job, int64_t output, kvb_window *window) {
  if (job->windows == NULL) return kvb_window_resolve(job->ops, output, window);
  *window = job->windows[output];
  return 1;
}

static void finish_output(const compress_job *job, const kvb_window *window, const kvb_part *parts) {
  float compressed[KVB_HEAD_DIM] __attribute__((aligned(64)));
  job->level->merge(parts, compressed);
  kvb_store_output(job->ops, window, compressed);
}

static void compress_whole(const compress_job *job, int64_t output) {
  const kvb_operands *ops = job->ops;
  const int ratio = ops->compress_ratio, part_rows = ratio / KVB_WINDOW_PARTS;
  kvb_part parts[KVB_WINDOW_PARTS] __attribute__((aligned(64)));
  const float *rows[KVB_MAX_WINDOW + KVB_LEAF_ROWS];
  kvb_window window;
  if (!window_at(job, output, &window)) return;
  if (kvb_window_rows(ops, &window, 0, ratio, rows) == 0) return;
  for (int i = 0; i < KVB_LEAF_ROWS; ++i) rows[ratio + i] = rows[i];
  for (int k = 0; k < KVB_WINDOW_PARTS; ++k)
    job->level->fold(rows + k * part_rows, part_rows, 0, KVB_HEAD_DIM, &parts[k]);
  finish_output(job, &window, parts);
}

static void compress_task(compress_job *job, int64_t ticket) {
  const kvb_operands *ops = job->ops;
  const int tasks = KVB_WINDOW_PARTS * job->dim_groups, part_rows = ops->compress_ratio / KVB_WINDOW_PARTS;
  const int64_t index = ticket / tasks;
  const int task = (int)(ticket % tasks), k = task / job->dim_groups;
  const int dims = KVB_HEAD_DIM / job->dim_groups, begin = task % job->dim_groups * dims;
  kvb_split *split = &job->splits[index];
  const float *rows[KVB_MAX_WINDOW / KVB_WINDOW_PARTS + KVB_LEAF_ROWS];
  kvb_window window;
  if (!window_at(job, job->whole + index, &window)) return;
  const int live = kvb_window_rows(ops, &window, k * part_rows, part_rows, rows);
  for (int i = 0; i < KVB_LEAF_ROWS; ++i) rows[part_rows + i] = rows[i];
  job->level->fold(rows, part_rows, begin, begin + dims, &split->parts[k]);
  atomic_fetch_add_explicit(&split->live, live, memory_order_relaxed);
  if (atomic_fetch_sub_explicit(&split->remaining, 1, memory_order_acq_rel) == 1 &&
      atomic_load_explicit(&split->live, memory_order_relaxed) != 0)
    finish_output(job, &window, split->parts);
}

static void work(kvb_job *base) {
  compress_job *job = (compress_job *)base;
  const float_mode mode = standard_float_mode();
  for (;;) {
    const int64_t ticket = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (ticket >= job->tickets) break;
    if (ticket < job->whole)
      compress_whole(job, ticket);
    else
      compress_task(job, ticket - job->whole);
  }
  restore_float_mode(mode);
}

static int remains(kvb_job *base) {
  compress_job *job = (compress_job *)base;
  return atomic_load_explicit(&job->next, memory_order_relaxed) < job->tickets;
}

/* Divides the job for `threads` threads. */
static void divide(compress_job *job, int threads) {
  const int most = threads < MAX_SPLIT ? threads : MAX_SPLIT;
  const int splits = job->outputs < most ? (int)job->outputs : most;
  const int part_rows = job->ops->compress_ratio / KVB_WINDOW_PARTS;
  while (job->dim_groups < MAX_DIM_GROUPS && splits * KVB_WINDOW_PARTS * job->dim_groups < threads &&
         part_rows / (2 * job->dim_groups) >= MIN_TASK_ROWS)
    job->dim_groups *= 2;
  const int tasks = KVB_WINDOW_PARTS * job->dim_groups;
  for (int i = 0; i < splits; ++i) {
    atomic_init(&job->splits[i].remaining, tasks);
    atomic_init(&job->splits[i].live, 0);
  }
  job->whole = job->outputs - splits;
  job->tickets = job->whole + (int64_t)splits * tasks;
}

static void run(compress_job *job, int threads) {
  const int ratio = job->ops->compress_ratio;
  const int shared = threads > 1 && job->outputs >= MIN_SHARED_ROWS / ratio;
  const int wait = job->outputs >= WAIT_ROWS / ratio;
  kvb_pool *pool = shared ? kvb_pool_acquire(sizeof(kvb_split) * MAX_SPLIT) : NULL;
  if (pool != NULL && kvb_pool_enter(pool, wait)) {
    job->splits = kvb_pool_scratch(pool);
    divide(job, threads);
    kvb_pool_run(pool, &job->base, (int)(threads < job->tickets ? threads : job->tickets) - 1);
    kvb_pool_leave(pool);
  } else {
    job->whole = job->tickets = job->outputs;
    work(&job->base);
  }
  if (pool != NULL) kvb_pool_release();
}

static void run_sorted(compress_job *job, int threads) {
  kvb_window windows[MAX_SORTED];
  int64_t kept = 0;
  for (int64_t i = 0; i < job->outputs; ++i) kept += kvb_window_resolve(job->ops, i, &windows[kept]);
  job->windows = windows;
  job->outputs = kept;
  if (kept > 0) run(job, threads);
}

int kvb_cpu_compress(const kvb_operands *ops, char *error, size_t error_len) {
  kvb_settings settings;
  const int ratio = ops->compress_ratio;
  if (ratio != 128 && ratio != 256 && ratio != 512) {
    snprintf(error, error_len, "compress_ratio: wanted 128, 256 or 512, found %d", ratio);
    return -1;
  }
  if (ops->block_size < 1) {
    snprintf(error, error_len, "block_size: wanted at least 1, found %lld", (long long)ops->block_size);
    return -1;
  }
  if (kvb_settings_read(&settings, error, error_len) != 0) return -1;
  compress_job job = {.base = {work, remains},
                      .ops = ops,
                      .level = settings.level,
                      .outputs = ops->num_outputs,
                      .dim_groups = 1};
  if (job.outputs <= MAX_SORTED)
    run_sorted(&job, settings.threads);
  else
    run(&job, settings.threads);
  return 0;
}
