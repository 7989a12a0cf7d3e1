/* What a call does on a device whose operator is a pipeline of stages: the choice of a pipeline, the cut into
 * chunks, and each stage's launch. It takes the place of dispatch.c. */
#include <dlpack/dlpack.h>
#include <stdbool.h>
#include <string.h>

#include "acl.h"
#include "aligned.h"
#include "device.h"
#include "error.h"
#include "stages.h"
#include "stream.h"
#include "target.h"
#include "workspace.h"

/* What every vector kernel's arguments lie between: sync address, lock and workspace before, the grid behind. */
enum { HIDDEN_BYTES = 24, GRID_BYTES = 12, BLOCK_BYTES = HIDDEN_BYTES + 8 * KVB_MAX_PARAMETERS + GRID_BYTES + 4 };

/* Whether state_cache is rows without a gap, so few that an int32 names each. Strides of extents 1 are 0. */
static bool is_dense(const kvb_operands *operands) {
  int64_t rows;
  if (operands->num_blocks < 1 || __builtin_mul_overflow(operands->num_blocks, operands->block_size, &rows)) return false;
  if (rows > INT32_MAX) return false;
  bool row = operands->block_size == 1 || operands->state_row_stride == KVB_GATHER_WIDTH;
  bool page = operands->num_blocks == 1 || operands->state_page_stride == operands->block_size * KVB_GATHER_WIDTH;
  return row && page;
}

static bool fits(const kvb_operands *operands, uint32_t layout) {
  return layout == KVB_GENERAL || (layout == KVB_DENSE ? is_dense(operands) : kvb_is_aligned(operands));
}

/* Every ratio's last variant takes any call, so one is always found for a ratio that passed its check. */
static size_t choose(const kvb_operands *operands) {
  size_t i = 0;
  for (; i + 1 < KVB_TABLE.num_variants; ++i) {
    const kvb_variant *variant = &KVB_TABLE.variants[i];
    if (variant->ratio == operands->compress_ratio && operands->num_outputs <= variant->max_outputs &&
        fits(operands, KVB_STAGES.pipelines[i].layout))
      break;
  }
  return i;
}

/* What a pinned device launches, whatever the number of outputs; what it asks of the operands still holds. */
static int choose_pinned(int64_t pinned, const kvb_operands *operands, size_t *chosen) {
  static const char *const LAYOUTS[] = {"aligned", "dense", "general"};
  const kvb_variant *variant = &KVB_TABLE.variants[pinned];
  uint32_t layout = KVB_STAGES.pipelines[pinned].layout;
  if (variant->ratio != operands->compress_ratio || !fits(operands, layout))
    return kvb_fail(KVB_VALUE_ERROR,
                    "compress: variant %lld is pinned, which is for ratio %lld and the %s layout; found a call of "
                    "ratio %lld and %s operands. Pin another one, or -1",
                    (long long)pinned, (long long)variant->ratio, LAYOUTS[layout],
                    (long long)operands->compress_ratio, fits(operands, layout) ? "such" : "other");
  *chosen = (size_t)pinned;
  return KVB_OK;
}

/* One call in the making. */
typedef struct run {
  const kvb_device *device;
  const kvb_pipeline *pipeline;
  void *stream;
  char *buffers[KVB_MAX_BUFFERS];
  kvb_workspace *operator_memory; /* of index_select */
} run;

static void *buffer_or(const run *run, const kvb_stage_argument *argument, const kvb_operands *operands) {
  if (argument->size == 0) return run->buffers[argument->buffer];
  void *value;
  memcpy(&value, (const char *)operands + argument->from, sizeof value);
  return value;
}

static int gather(run *run, const kvb_stage *stage, const kvb_operands *operands) {
  kvb_gather plan;
  int device_id = run->device->context.device_id;
  const void *table = buffer_or(run, &stage->arguments[0], operands);
  const void *indices = buffer_or(run, &stage->arguments[1], operands);
  void *out = buffer_or(run, &stage->arguments[2], operands);
  int64_t rows = operands->num_blocks * operands->block_size;
  int code = kvb_gather_plan(&plan, table, rows, indices, operands->num_outputs * operands->compress_ratio, out);
  if (code != KVB_OK) return code;
  if (plan.workspace > 0 && run->operator_memory != NULL &&
      kvb_workspace_bytes(run->operator_memory) < plan.workspace) {
    code = kvb_workspace_give(run->operator_memory, run->stream);
    run->operator_memory = NULL;
  }
  if (code == KVB_OK && plan.workspace > 0 && run->operator_memory == NULL)
    code = kvb_workspace_take(device_id, run->stream, plan.workspace, &run->operator_memory);
  if (code != KVB_OK) {
    kvb_gather_drop(&plan);
    return code;
  }
  return kvb_gather_run(&plan, plan.workspace > 0 ? kvb_workspace_memory(run->operator_memory) : NULL, run->stream);
}

static void put(char *block, size_t *at, const void *value, size_t size) {
  *at = (*at + size - 1) / size * size;
  memcpy(block + *at, value, size);
  *at += size;
}

static int launch(run *run, const kvb_stage *stage, const kvb_operands *operands) {
  const kvb_kernel *kernel = &KVB_TABLE.kernels[stage->kernel];
  const kvb_npu *npu = kvb_acl_npu(run->device->context.device_id);
  char block[BLOCK_BYTES] = {0};
  size_t at = 0;
  put(block, &at, &npu->sync, 8);
  at = HIDDEN_BYTES; /* none of these kernels locks or has a workspace of its own */
  for (uint32_t i = 0; i < stage->num_arguments; ++i) {
    const kvb_stage_argument *argument = &stage->arguments[i];
    if (argument->size == 0)
      put(block, &at, &run->buffers[argument->buffer], 8);
    else
      put(block, &at, (const char *)operands + argument->from, argument->size);
  }
  int64_t blocks = operands->num_outputs * stage->per_output;
  if (blocks > npu->vector_cores) blocks = npu->vector_cores;
  if (blocks > KVB_STAGES.max_blocks) blocks = KVB_STAGES.max_blocks;
  int32_t grid[3] = {(int32_t)blocks, 1, 1};
  for (int i = 0; i < 3; ++i) put(block, &at, &grid[i], 4);
  at = (at + 7) / 8 * 8;
  return kvb_acl_launch(kernel->name, run->device->functions[stage->kernel], (uint32_t)blocks, block, at, run->stream);
}

static int run_chunks(run *run, const kvb_operands *operands, int64_t chunk) {
  kvb_operands part = *operands;
  for (int64_t first = 0; first < operands->num_outputs; first += chunk) {
    int64_t left = operands->num_outputs - first;
    part.boundary_token_indices = operands->boundary_token_indices + first;
    part.num_outputs = left < chunk ? left : chunk;
    for (uint32_t i = 0; i < run->pipeline->num_stages; ++i) {
      const kvb_stage *stage = &run->pipeline->stages[i];
      int code = stage->kernel == KVB_GATHER ? gather(run, stage, &part) : launch(run, stage, &part);
      if (code != KVB_OK) return code;
    }
  }
  return KVB_OK;
}

static int run_pipeline(const kvb_device *device, const kvb_pipeline *pipeline, const kvb_operands *operands,
                        void *stream) {
  run run = {.device = device, .pipeline = pipeline, .stream = stream};
  int64_t chunk = operands->num_outputs < pipeline->chunk_outputs ? operands->num_outputs : pipeline->chunk_outputs;
  int64_t align = KVB_STAGES.buffer_alignment, bytes = 0, offsets[KVB_MAX_BUFFERS];
  for (uint32_t i = 0; i < pipeline->num_buffers; ++i) {
    offsets[i] = bytes;
    bytes += (pipeline->buffers[i] * chunk + align - 1) / align * align;
  }
  kvb_workspace *memory;
  int code = kvb_workspace_take(device->context.device_id, stream, (size_t)bytes, &memory);
  if (code != KVB_OK) return code;
  for (uint32_t i = 0; i < pipeline->num_buffers; ++i)
    run.buffers[i] = (char *)kvb_workspace_memory(memory) + offsets[i];
  code = run_chunks(&run, operands, chunk);
  kvb_hold_error(code != KVB_OK);
  int given = run.operator_memory != NULL ? kvb_workspace_give(run.operator_memory, stream) : KVB_OK;
  kvb_hold_error(code != KVB_OK || given != KVB_OK);
  int last = kvb_workspace_give(memory, stream);
  kvb_hold_error(0);
  return code != KVB_OK ? code : given != KVB_OK ? given : last;
}

int kvb_target_run(void *lent, kvb_operands *operands, void *stream) {
  kvb_device *device = lent;
  atomic_fetch_add_explicit(&device->calls, 1, memory_order_relaxed);
  if (operands->num_outputs == 0) return KVB_OK;
  size_t chosen;
  int code = KVB_OK;
  int64_t pinned = atomic_load_explicit(&device->pinned, memory_order_relaxed);
  if (pinned == 0)
    chosen = choose(operands);
  else if ((code = choose_pinned(pinned - 1, operands, &chosen)) != KVB_OK)
    return code;
  const kvb_pipeline *pipeline = &KVB_STAGES.pipelines[chosen];
  kvb_scope scope;
  code = kvb_driver_enter(&device->context, &scope);
  if (code != KVB_OK) return code;
  code = run_pipeline(device, pipeline, operands, kvb_stream_or_told(stream, device->context.device_id));
  kvb_hold_error(code != KVB_OK);
  int left = kvb_driver_leave(&scope);
  kvb_hold_error(0);
  if (code == KVB_OK) code = left;
  if (code == KVB_OK) {
    atomic_fetch_add_explicit(&device->launches[chosen], 1, memory_order_relaxed);
    if (pipeline->layout == KVB_GENERAL) atomic_fetch_add_explicit(&device->general_calls, 1, memory_order_relaxed);
  }
  return code;
}
