/* What this processor can do and what the environment asks for. */
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compress.h"
#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Which register states the operating system saves; an instruction set without them is unusable. */
static uint64_t enabled_states(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return ((uint64_t)high << 32) | low;
}

enum { STATES_AVX = 0x6, STATES_AVX512 = 0xe6 };

/* The number of levels, counted from the lowest, that this processor runs. The compiler's own
 * __builtin_cpu_supports is not used: it needs an initialiser that some toolchains leave empty. */
static int detect_levels(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX)) return 1;
  const uint64_t states = enabled_states();
  if ((states & STATES_AVX) != STATES_AVX) return 1;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 1;
  if ((states & STATES_AVX512) != STATES_AVX512 || !(b & bit_AVX512F)) return 2;
  return 3;
}

static const kvb_level *const levels[] = {&kvb_level_baseline, &kvb_level_avx2, &kvb_level_avx512};
#define LEVEL_NAMES "baseline, avx2 or avx512"
#else
static int detect_levels(void) { return 1; }

static const kvb_level *const levels[] = {&kvb_level_baseline};
#define LEVEL_NAMES "baseline"
#endif

/* Remembered: under a hypervisor, each cpuid instruction takes more than 10 microseconds. */
static int supported_levels(void) {
  static atomic_int remembered;
  int count = atomic_load_explicit(&remembered, memory_order_relaxed);
  if (count == 0) {
    count = detect_levels();
    atomic_store_explicit(&remembered, count, memory_order_relaxed);
  }
  return count;
}

enum { NUM_LEVELS = sizeof levels / sizeof levels[0] };

static int read_level(kvb_settings *settings, char *error, size_t error_len) {
  const int supported = supported_levels();
  const char *asked = getenv("KVBUILD_CPU_ISA");
  settings->level = levels[supported - 1];
  if (asked == NULL || *asked == '\0') return 0;
  for (int i = 0; i < NUM_LEVELS; ++i) {
    if (strcmp(asked, levels[i]->name) != 0) continue;
    if (i < supported) settings->level = levels[i];
    return 0;
  }
  snprintf(error, error_len, "KVBUILD_CPU_ISA: wanted " LEVEL_NAMES ", found '%.64s'; correct it or unset it",
           asked);
  return -1;
}

static int read_threads(kvb_settings *settings, char *error, size_t error_len) {
  const int processors = kvb_pool_processors();
  const char *asked = getenv("KVBUILD_NUM_THREADS");
  settings->threads = processors;
  if (asked == NULL || *asked == '\0') return 0;
  char *end;
  errno = 0;
  const long most = strtol(asked, &end, 10);
  if (asked[0] < '0' || asked[0] > '9' || *end != '\0' || errno != 0 || most < 1 || most > INT_MAX) {
    snprintf(error, error_len,
             "KVBUILD_NUM_THREADS: wanted a whole number from 1 to %d, found '%.64s'; correct it or unset it",
             INT_MAX, asked);
    return -1;
  }
  if (most < processors) settings->threads = (int)most;
  return 0;
}

int kvb_settings_read(kvb_settings *settings, char *error, size_t error_len) {
  if (read_level(settings, error, error_len) != 0) return -1;
  return read_threads(settings, error, error_len);
}
