/* Linked into a copy of the kernel, it stands before libc's function of that name: a machine of
 * eight processors, whatever this one has. */
#define _GNU_SOURCE
#include <sched.h>

__attribute__((visibility("hidden"))) int sched_getaffinity(pid_t process, size_t size, cpu_set_t *mask) {
  (void)process;
  CPU_ZERO_S(size, mask);
  for (int i = 0; i < 8; ++i) CPU_SET_S(i, size, mask);
  return 0;
}
