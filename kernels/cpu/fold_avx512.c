#if defined(__x86_64__)
#include <immintrin.h>

#define KVB_LANES 16
#define KVB_TARGET __attribute__((target("avx512f")))
#define KVB_MAX(a, b) _mm512_max_ps(a, b)
#define KVB_LEVEL kvb_level_avx512
#define KVB_LEVEL_NAME "avx512"
#include "fold.h"
#else
typedef int kvb_no_such_level; /* a translation unit may not be empty */
#endif
