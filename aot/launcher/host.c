/* The cpu target: the same surface over the host kernel; nothing to load, nothing to queue on. */
#include <stdatomic.h>
#include <stdbool.h>

#include "check.h"
#include "error.h"
#include "manifest.h"
#include "table.h"
#include "target.h"

int kvb_cpu_compress(const kvb_operands *operands, char *error, size_t error_len);

static _Atomic int64_t opened;
static _Atomic int64_t calls;

static int check_device(int device_id) {
  if (device_id == 0) return KVB_OK;
  return kvb_fail(KVB_VALUE_ERROR, "device_id: wanted 0, the only device of a cpu target; found %d", device_id);
}

static int not_open(const char *function) {
  return kvb_fail(KVB_DEVICE_ERROR, "%s: cpu is not open in this launcher. Call open first", function);
}

int kvb_target_open(int device_id, const void *manifest, size_t manifest_size, const kvb_source *source) {
  (void)source;
  int code = check_device(device_id);
  if (code == KVB_OK) code = kvb_check_manifest(manifest, manifest_size);
  if (code == KVB_OK) atomic_fetch_add(&opened, 1);
  return code;
}

int kvb_target_close(int device_id) {
  int code = check_device(device_id);
  if (code != KVB_OK) return code;
  int64_t count = atomic_load(&opened);
  while (count > 0)
    if (atomic_compare_exchange_weak(&opened, &count, count - 1)) return KVB_OK;
  return not_open("close");
}

int kvb_target_begin(DLDevice place, const char *function, void **lent) {
  *lent = NULL;
  if (atomic_load_explicit(&opened, memory_order_acquire) == 0) return not_open(function);
  if (place.device_type == kDLCPU && place.device_id == 0) return KVB_OK;
  char there[64];
  return kvb_fail(KVB_VALUE_ERROR, "%s: wanted a tensor on cpu, found one on %s. Move it there", KVB_TENSOR_NAMES[0],
                  kvb_device_text(place, there, sizeof there));
}

void kvb_target_end(DLDevice place) { (void)place; }

int kvb_target_run(void *lent, kvb_operands *operands, void *stream) {
  (void)lent, (void)stream;
  char words[512] = "";
  atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
  if (operands->num_outputs == 0) return KVB_OK;
  if (kvb_cpu_compress(operands, words, sizeof words) != 0)
    return kvb_fail(KVB_VALUE_ERROR, "%s", words);
  return KVB_OK;
}

int kvb_target_pin(int device_id, int64_t variant) {
  (void)variant;
  int code = check_device(device_id);
  if (code != KVB_OK) return code;
  return kvb_fail(KVB_VALUE_ERROR, "variant: a cpu target has one kernel and nothing to choose");
}

int kvb_target_counters(int device_id, int64_t *values, size_t capacity, size_t *count) {
  int code = check_device(device_id);
  if (code != KVB_OK) return code;
  if (atomic_load(&opened) == 0) return not_open("counters");
  int64_t all[2] = {atomic_load_explicit(&calls, memory_order_relaxed), 0};
  for (size_t i = 0; i < 2 && i < capacity; ++i) values[i] = all[i];
  *count = 2;
  return KVB_OK;
}
