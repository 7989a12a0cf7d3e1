/* What a staged call launches: the part of the launch table that only pipelines have. Its one value is generated
 * from the manifest's target. A stage is a kernel of KVB_TABLE, or CANN's index_select. */
#ifndef KVB_STAGES_H
#define KVB_STAGES_H

#include <stddef.h>
#include <stdint.h>

#include "table.h"

enum { KVB_MAX_STAGES = 8, KVB_MAX_BUFFERS = 12, KVB_GATHER = -1 };

/* What a pipeline asks of a call's operands; see kernels/ascend/pipeline.py. */
enum { KVB_ALIGNED, KVB_DENSE, KVB_GENERAL };

/* One argument: `size` bytes of kvb_operands at `from`; or the address of the buffer of that number. */
typedef struct kvb_stage_argument {
  uint16_t from;
  uint8_t size;
  uint8_t buffer;
} kvb_stage_argument;

/* Kernels are launched with per_output work items an output. An index_select has three arguments: the table of
 * rows, the indices (ratio an output) and where to. */
typedef struct kvb_stage {
  int32_t kernel; /* index into KVB_TABLE.kernels, or KVB_GATHER */
  uint32_t per_output;
  uint32_t num_arguments;
  const kvb_stage_argument *arguments;
} kvb_stage;

/* The variant of the same number in KVB_TABLE. A call is cut into chunks of at most chunk_outputs. */
typedef struct kvb_pipeline {
  uint32_t layout;
  uint32_t num_stages;
  uint32_t num_buffers;
  int64_t chunk_outputs;
  kvb_stage stages[KVB_MAX_STAGES];
  int64_t buffers[KVB_MAX_BUFFERS]; /* bytes an output */
} kvb_pipeline;

typedef struct kvb_stages {
  const kvb_pipeline *pipelines; /* by variant */
  int64_t buffer_alignment;
  int64_t max_blocks; /* of one launch */
  int needs_gather;
} kvb_stages;

extern const kvb_stages KVB_STAGES;

#endif
