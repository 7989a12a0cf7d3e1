#if defined(__x86_64__)
#include <immintrin.h>

#define KVB_LANES 8
#define KVB_TARGET __attribute__((target("avx2")))
#define KVB_MAX(a, b) _mm256_max_ps(a, b)
#define KVB_LEVEL kvb_level_avx2
#define KVB_LEVEL_NAME "avx2"
#include "fold.h"
#else
typedef int kvb_no_such_level; /* a translation unit may not be empty */
#endif
