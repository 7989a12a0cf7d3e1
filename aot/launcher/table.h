/* The launch table: its types. Its one value is generated from the manifest's target. */
#ifndef KVB_TABLE_H
#define KVB_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "operands.h"

enum { KVB_MAX_PARAMETERS = 64, KVB_MAX_KERNELS = 4 };

typedef struct kvb_kernel {
  const char *name;
  const char *entry;
  uint32_t blob;       /* index into kvb_table.blobs */
  uint32_t block;      /* threads of a block */
  uint32_t shared;     /* bytes of dynamic shared memory */
  uint32_t cluster;    /* blocks of a cluster; the launch has this many blocks for each of the grid */
  uint32_t per_output; /* grid.x is the number of outputs times this */
  uint32_t grid_y;
  uint32_t num_arguments;
  uint32_t num_hidden; /* trailing pointers, NULL */
  const uint16_t *arguments; /* offsets into kvb_operands */
} kvb_kernel;

typedef struct kvb_variant {
  int64_t ratio;
  int64_t max_outputs;
  int64_t scratch_per_output; /* bytes */
  uint32_t aligned;
  uint32_t num_kernels;
  uint32_t kernels[KVB_MAX_KERNELS]; /* indices into kvb_table.kernels, in launch order */
} kvb_variant;

typedef struct kvb_table {
  const char *target; /* VENDOR:ARCH */
  const char *digest; /* of the canonical JSON of {kernels, variants} */
  int device_type;    /* DLDeviceType of the operands */
  const char *device_name; /* what torch calls such a device, where that is an extension device; else NULL */
  uint32_t elf_machine;
  int min_driver;
  int needs_scratch;
  int64_t aligned_block_size;
  uint64_t aligned_mask; /* bits that are 0 in every aligned field */
  size_t num_blobs, num_kernels, num_variants, num_ratios, num_aligned_fields;
  const char *const *blobs; /* sha256 */
  const kvb_kernel *kernels;
  const kvb_variant *variants;
  const int64_t *ratios;
  const uint16_t *aligned_fields; /* offsets of 8-byte fields of kvb_operands */
} kvb_table;

extern const kvb_table KVB_TABLE;

#endif
