#define _GNU_SOURCE
#include "device.h"

#include <dlpack/dlpack.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "error.h"
#include "manifest.h"
#include "target.h"

enum { MAX_DEVICES = 64, ELF_HEADER = 20, ELF_MACHINE_AT = 18 };

/* A caller raises `users` before it reads `device`, and close clears `device` before it reads `users`: one
 * of them sees the other. */
typedef struct slot {
  _Alignas(64) _Atomic(kvb_device *) device;
  _Atomic int64_t users;
  int64_t opened; /* under the lock */
} slot;

static slot slots[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool watching_forks; /* under the lock */
static bool started;        /* under the lock */
static _Atomic bool forked;

/* A driver that was initialised before a fork does not work in the child. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void in_parent(void) { pthread_mutex_unlock(&lock); }
static void in_child(void) {
  atomic_store(&forked, started);
  pthread_mutex_unlock(&lock);
}

static const char *name_of(int device_id, char *text, int size) {
  return kvb_device_text((DLDevice){(DLDeviceType)KVB_TABLE.device_type, device_id}, text, size);
}

static int fail_forked(const char *function) {
  return kvb_fail(KVB_DEVICE_ERROR,
                  "%s: this process was forked from one that had opened a device, and the driver does not work "
                  "here. Start workers with the spawn method, or open devices after the fork only",
                  function);
}

static int fail_not_open(const char *function, int device_id) {
  char text[64];
  return kvb_fail(KVB_DEVICE_ERROR, "%s: %s is not open in this launcher. Call open for it first", function,
                  name_of(device_id, text, sizeof text));
}

static int fail_elsewhere(const char *function, const char *operand, int device_id) {
  char found[64], one[64], open[256] = "";
  for (int i = 0; i < MAX_DEVICES; ++i) {
    if (atomic_load(&slots[i].device) == NULL) continue;
    size_t at = strlen(open);
    snprintf(open + at, sizeof open - at, "%s%s", at == 0 ? "" : ", ", name_of(i, one, sizeof one));
  }
  if (operand == NULL || open[0] == '\0') return fail_not_open(function, device_id);
  return kvb_fail(KVB_VALUE_ERROR, "%s: wanted a tensor on the device that was opened (%s), found one on %s. "
                                   "Move it there, or open that device",
                  operand, open, name_of(device_id, found, sizeof found));
}

int kvb_device_borrow(int device_id, const char *function, const char *operand, kvb_device **out) {
  if (atomic_load_explicit(&forked, memory_order_relaxed)) return fail_forked(function);
  if (device_id < 0 || device_id >= MAX_DEVICES) return fail_elsewhere(function, operand, device_id);
  atomic_fetch_add(&slots[device_id].users, 1);
  *out = atomic_load(&slots[device_id].device);
  if (*out != NULL) return KVB_OK;
  atomic_fetch_sub(&slots[device_id].users, 1);
  return fail_elsewhere(function, operand, device_id);
}

void kvb_device_return(int device_id) { atomic_fetch_sub(&slots[device_id].users, 1); }

int kvb_target_begin(DLDevice place, const char *function, void **lent) {
  if ((int)place.device_type != KVB_TABLE.device_type) {
    char there[64];
    return kvb_fail(KVB_VALUE_ERROR, "%s: wanted a tensor on a device of %s, found one on %s. Move it there",
                    KVB_TENSOR_NAMES[0], KVB_TABLE.target, kvb_device_text(place, there, sizeof there));
  }
  return kvb_device_borrow(place.device_id, function, KVB_TENSOR_NAMES[KVB_STATE_CACHE], (kvb_device **)lent);
}

void kvb_target_end(DLDevice place) { kvb_device_return(place.device_id); }

static void destroy(kvb_device *device) {
  kvb_hold_error(1);
  kvb_scope scope;
  bool entered = device->context.primary != NULL || device->functions != NULL;
  entered = entered && kvb_driver_enter(&device->context, &scope) == KVB_OK;
  for (size_t i = 0; device->modules != NULL && i < KVB_TABLE.num_blobs; ++i)
    if (device->modules[i] != NULL) kvb_driver_unload(device->modules[i]);
  if (entered) kvb_driver_leave(&scope);
  kvb_driver_close(&device->context);
  for (size_t i = 0; device->images != NULL && i < KVB_TABLE.num_blobs; ++i) free(device->images[i]);
  free(device->images);
  free(device->sizes);
  free(device->modules);
  free(device->functions);
  free((void *)device->launches);
  free(device);
  kvb_hold_error(0);
}

/* A machine of 0 in the table: which one the target's own is, no build machine knew. What is known is whose it
 * cannot be: x86-64, AArch64, NVIDIA, AMD. */
static bool is_ours(unsigned machine) {
  if (KVB_TABLE.elf_machine != 0) return machine == KVB_TABLE.elf_machine;
  return machine != 0 && machine != 62 && machine != 183 && machine != 190 && machine != 224;
}

static int check_elf(const char *sha256, const unsigned char *image, size_t size) {
  static const unsigned char MAGIC[] = {0x7f, 'E', 'L', 'F', 2, 1};
  if (size < ELF_HEADER || memcmp(image, MAGIC, sizeof MAGIC) != 0)
    return kvb_fail(KVB_VALUE_ERROR, "blob %s: wanted a 64-bit little-endian ELF image for %s, found %zu bytes "
                                     "of something else",
                    sha256, KVB_TABLE.target, size);
  unsigned machine = image[ELF_MACHINE_AT] | (unsigned)image[ELF_MACHINE_AT + 1] << 8;
  if (!is_ours(machine) && KVB_TABLE.elf_machine != 0)
    return kvb_fail(KVB_VALUE_ERROR, "blob %s: wanted ELF machine %u, which %s runs; found machine %u. It was "
                                     "built for another vendor",
                    sha256, (unsigned)KVB_TABLE.elf_machine, KVB_TABLE.target, machine);
  if (!is_ours(machine))
    return kvb_fail(KVB_VALUE_ERROR, "blob %s: wanted the ELF machine of %s, found machine %u, which is another "
                                     "vendor's or a host's",
                    sha256, KVB_TABLE.target, machine);
  return KVB_OK;
}

static int load_blobs(kvb_device *device, const kvb_source *source) {
  for (size_t i = 0; i < KVB_TABLE.num_blobs; ++i) {
    int code = source->copy(source->self, KVB_TABLE.blobs[i], &device->images[i], &device->sizes[i]);
    if (code == KVB_OK) code = check_elf(KVB_TABLE.blobs[i], device->images[i], device->sizes[i]);
    if (code != KVB_OK) return code;
  }
  return KVB_OK;
}

static int load_kernels(kvb_device *device) {
  for (size_t i = 0; i < KVB_TABLE.num_blobs; ++i) {
    int code = kvb_driver_load(&device->context, device->images[i], device->sizes[i], &device->modules[i]);
    if (code != KVB_OK) return device->modules[i] = NULL, code;
  }
  for (size_t i = 0; i < KVB_TABLE.num_kernels; ++i) {
    const kvb_kernel *kernel = &KVB_TABLE.kernels[i];
    int code = kvb_driver_resolve(&device->context, device->modules[kernel->blob], kernel, &device->functions[i]);
    if (code != KVB_OK) return code;
  }
  return KVB_OK;
}

/* Everything that loads does so here, so that a first call under stream capture finds it done. */
static int create(int device_id, const kvb_source *source, kvb_device **out) {
  kvb_device *device = calloc(1, sizeof *device);
  if (device == NULL) return kvb_fail(KVB_MEMORY_ERROR, "no memory for a device");
  device->images = calloc(KVB_TABLE.num_blobs + 1, sizeof *device->images);
  device->sizes = calloc(KVB_TABLE.num_blobs + 1, sizeof *device->sizes);
  device->modules = calloc(KVB_TABLE.num_blobs + 1, sizeof *device->modules);
  device->launches = calloc(KVB_TABLE.num_variants + 1, sizeof *device->launches);
  kvb_function *functions = calloc(KVB_TABLE.num_kernels + 1, sizeof *functions);
  int code = KVB_OK;
  if (device->images == NULL || device->sizes == NULL || device->modules == NULL || device->launches == NULL ||
      functions == NULL)
    code = kvb_fail(KVB_MEMORY_ERROR, "no memory for a device's kernels");
  if (code == KVB_OK) code = load_blobs(device, source);
  if (code == KVB_OK) code = kvb_driver_start();
  if (code == KVB_OK) started = true;
  if (code == KVB_OK) code = kvb_driver_open(device_id, KVB_TABLE.needs_scratch, &device->context);
  if (code != KVB_OK) {
    free(functions);
    destroy(device);
    return code;
  }
  device->functions = functions;
  kvb_scope scope;
  code = kvb_driver_enter(&device->context, &scope);
  if (code == KVB_OK) {
    code = load_kernels(device);
    int left = kvb_driver_leave(&scope);
    if (code == KVB_OK) code = left;
  }
  if (code == KVB_OK)
    *out = device;
  else
    destroy(device);
  return code;
}

static int open_locked(int device_id, const kvb_source *source) {
  slot *at = &slots[device_id];
  if (at->opened > 0) {
    ++at->opened;
    return KVB_OK;
  }
  if (!watching_forks && pthread_atfork(before_fork, in_parent, in_child) != 0)
    return kvb_fail(KVB_MEMORY_ERROR, "no memory to watch for forks");
  watching_forks = true;
  kvb_device *device = NULL;
  int code = create(device_id, source, &device);
  if (code != KVB_OK) return code;
  at->opened = 1;
  atomic_store(&at->device, device);
  return KVB_OK;
}

int kvb_target_open(int device_id, const void *manifest, size_t manifest_size, const kvb_source *source) {
  if (device_id < 0 || device_id >= MAX_DEVICES)
    return kvb_fail(KVB_VALUE_ERROR, "device_id: wanted 0 to %d, found %d", MAX_DEVICES - 1, device_id);
  int code = kvb_check_manifest(manifest, manifest_size);
  if (code != KVB_OK) return code;
  if (atomic_load(&forked)) return fail_forked("open");
  pthread_mutex_lock(&lock);
  code = open_locked(device_id, source);
  pthread_mutex_unlock(&lock);
  return code;
}

int kvb_target_close(int device_id) {
  if (device_id < 0 || device_id >= MAX_DEVICES) return fail_not_open("close", device_id);
  slot *at = &slots[device_id];
  int code = KVB_OK;
  pthread_mutex_lock(&lock);
  if (at->opened == 0) {
    code = fail_not_open("close", device_id);
  } else if (--at->opened == 0) {
    kvb_device *device = atomic_exchange(&at->device, NULL);
    /* In a forked child nothing of the driver may be called; the parent still owns it all. */
    if (!atomic_load(&forked)) {
      while (atomic_load(&at->users) > 0) sched_yield();
      destroy(device);
    }
  }
  pthread_mutex_unlock(&lock);
  return code;
}

int kvb_target_pin(int device_id, int64_t variant) {
  if (variant < -1 || variant >= (int64_t)KVB_TABLE.num_variants)
    return kvb_fail(KVB_VALUE_ERROR, "variant: wanted -1 (each call's own choice) to %lld, found %lld",
                    (long long)KVB_TABLE.num_variants - 1, (long long)variant);
  kvb_device *device;
  int code = kvb_device_borrow(device_id, "pin", NULL, &device);
  if (code != KVB_OK) return code;
  atomic_store(&device->pinned, variant + 1);
  kvb_device_return(device_id);
  return KVB_OK;
}

int kvb_target_counters(int device_id, int64_t *values, size_t capacity, size_t *count) {
  kvb_device *device;
  int code = kvb_device_borrow(device_id, "counters", NULL, &device);
  if (code != KVB_OK) return code;
  *count = 2 + KVB_TABLE.num_variants;
  for (size_t i = 0; i < *count && i < capacity; ++i) {
    _Atomic int64_t *counter = i == 0 ? &device->calls : i == 1 ? &device->general_calls : &device->launches[i - 2];
    values[i] = atomic_load_explicit(counter, memory_order_relaxed);
  }
  kvb_device_return(device_id);
  return KVB_OK;
}
