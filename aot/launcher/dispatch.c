/* What a call does on a device once it is checked: the choice of a variant, and its launches. */
#include <dlpack/dlpack.h>
#include <stdbool.h>
#include <string.h>

#include "aligned.h"
#include "device.h"
#include "error.h"
#include "stream.h"
#include "target.h"

/* Linked where a framework's stream does not come with its tensors. */
#pragma weak kvb_stream_or_told

/* Every ratio's last variant takes any call, so one is always found for a ratio that passed its check. */
static size_t choose(const kvb_operands *operands) {
  bool aligned = kvb_is_aligned(operands);
  size_t i = 0;
  for (; i + 1 < KVB_TABLE.num_variants; ++i) {
    const kvb_variant *variant = &KVB_TABLE.variants[i];
    if (variant->ratio == operands->compress_ratio && (aligned || !variant->aligned) &&
        operands->num_outputs <= variant->max_outputs)
      break;
  }
  return i;
}

/* What a pinned device launches, whatever the number of outputs; its kernels' assumptions still hold. */
static int choose_pinned(int64_t pinned, const kvb_operands *operands, size_t *chosen) {
  const kvb_variant *variant = &KVB_TABLE.variants[pinned];
  if (variant->ratio != operands->compress_ratio || (variant->aligned && !kvb_is_aligned(operands)))
    return kvb_fail(KVB_VALUE_ERROR,
                    "compress: variant %lld is pinned, which is for ratio %lld and the %s layout; found a call of "
                    "ratio %lld and %s operands. Pin another one, or -1",
                    (long long)pinned, (long long)variant->ratio, variant->aligned ? "aligned" : "general",
                    (long long)operands->compress_ratio, kvb_is_aligned(operands) ? "aligned" : "other");
  *chosen = (size_t)pinned;
  return KVB_OK;
}

static int check_grid(const kvb_variant *variant, int64_t num_outputs) {
  for (uint32_t i = 0; i < variant->num_kernels; ++i) {
    const kvb_kernel *kernel = &KVB_TABLE.kernels[variant->kernels[i]];
    int64_t most = kvb_driver_max_grid(kernel) / ((int64_t)kernel->per_output * kernel->cluster);
    if (variant->scratch_per_output > 0 && most > INT64_MAX / variant->scratch_per_output)
      most = INT64_MAX / variant->scratch_per_output;
    if (num_outputs > most)
      return kvb_fail(KVB_VALUE_ERROR,
                      "boundary_token_indices: wanted at most %lld outputs, which is what one launch of %s can hold; "
                      "found %lld. Split the call",
                      (long long)most, kernel->name, (long long)num_outputs);
  }
  return KVB_OK;
}

static int launch_kernels(kvb_device *device, const kvb_variant *variant, kvb_operands *operands, void *stream) {
  static void *const hidden = NULL;
  void *parameters[KVB_MAX_PARAMETERS];
  for (uint32_t i = 0; i < variant->num_kernels; ++i) {
    const kvb_kernel *kernel = &KVB_TABLE.kernels[variant->kernels[i]];
    uint32_t count = 0;
    for (; count < kernel->num_arguments; ++count) parameters[count] = (char *)operands + kernel->arguments[count];
    for (uint32_t j = 0; j < kernel->num_hidden; ++j) parameters[count++] = (void *)&hidden;
    uint32_t grid_x = (uint32_t)(operands->num_outputs * kernel->per_output * kernel->cluster);
    int code = kvb_driver_launch(kernel, device->functions[variant->kernels[i]], grid_x, stream, parameters);
    if (code != KVB_OK) return code;
  }
  return KVB_OK;
}

/* Scratch is taken and given back in the stream's order: it is shared with no other stream, thread or
 * captured graph. */
static int launch_variant(kvb_device *device, const kvb_variant *variant, kvb_operands *operands, void *stream) {
  if (variant->scratch_per_output == 0) return launch_kernels(device, variant, operands, stream);
  size_t bytes = (size_t)(operands->num_outputs * variant->scratch_per_output);
  int code = kvb_driver_alloc(&device->context, bytes, stream, &operands->scratch);
  if (code != KVB_OK) return code;
  code = launch_kernels(device, variant, operands, stream);
  if (code == KVB_OK) return kvb_driver_free(operands->scratch, stream);
  kvb_hold_error(1);
  (void)kvb_driver_free(operands->scratch, stream);
  kvb_hold_error(0);
  return code;
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
  const kvb_variant *variant = &KVB_TABLE.variants[chosen];
  kvb_scope scope;
  code = check_grid(variant, operands->num_outputs);
  if (code == KVB_OK) code = kvb_driver_enter(&device->context, &scope);
  if (code != KVB_OK) return code;
  if (kvb_stream_or_told != NULL) stream = kvb_stream_or_told(stream, device->context.device_id);
  code = launch_variant(device, variant, operands, stream);
  if (code != KVB_OK) {
    kvb_hold_error(1);
    (void)kvb_driver_leave(&scope);
    kvb_hold_error(0);
    return code;
  }
  code = kvb_driver_leave(&scope);
  if (code != KVB_OK) return code;
  atomic_fetch_add_explicit(&device->launches[chosen], 1, memory_order_relaxed);
  if (!variant->aligned) atomic_fetch_add_explicit(&device->general_calls, 1, memory_order_relaxed);
  return KVB_OK;
}
