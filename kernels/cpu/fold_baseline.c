/* SSE2 on x86-64, NEON on aarch64: what every processor of the architecture has. */
#if defined(__x86_64__)
#include <emmintrin.h>
#define KVB_MAX(a, b) _mm_max_ps(a, b)
#else
#include <arm_neon.h>
#define KVB_MAX(a, b) vmaxq_f32(a, b)
#endif

#define KVB_LANES 4
#define KVB_TARGET
#define KVB_LEVEL kvb_level_baseline
#define KVB_LEVEL_NAME "baseline"
#include "fold.h"
