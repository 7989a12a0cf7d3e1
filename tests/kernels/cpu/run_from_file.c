/* Runs the kernel on operands from a file: the struct, the sizes of its nine arrays, kv_cache's offset
 * in the last of them, the arrays. Writes that last array to the second file. Given a third argument,
 * it ends while threads of its own are still calling the kernel. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "compress.h"

static kvb_operands ops;

static void *call_for_ever(void *unused) {
  char error[256];
  while (kvb_cpu_compress(&ops, error, sizeof error) == 0) continue;
  puts(error);
  _exit(1);
  return unused;
}

static int read_operands(const char *path, int64_t sizes[9], char *arrays[9]) {
  int64_t kv_offset;
  FILE *in = fopen(path, "rb");
  if (!in || fread(&ops, sizeof ops, 1, in) != 1 || fread(sizes, 8 * 9, 1, in) != 1) return -1;
  if (fread(&kv_offset, sizeof kv_offset, 1, in) != 1) return -1;
  for (int i = 0; i < 9; ++i) {
    arrays[i] = malloc((size_t)sizes[i] + 1);
    if (fread(arrays[i], 1, (size_t)sizes[i], in) != (size_t)sizes[i]) return -1;
    ((void **)&ops)[i] = arrays[i];
  }
  ops.kv_cache += kv_offset;
  return fclose(in);
}

int main(int argc, char **argv) {
  int64_t sizes[9];
  char *arrays[9], error[256];
  if (argc < 3 || read_operands(argv[1], sizes, arrays) != 0) return 2;
  if (kvb_cpu_compress(&ops, error, sizeof error) != 0) return puts(error), 1;
  FILE *out = fopen(argv[2], "wb");
  if (!out || fwrite(arrays[8], 1, (size_t)sizes[8], out) != (size_t)sizes[8] || fclose(out)) return 2;
  if (argc == 3) return 0;
  for (int i = 0; i < 4; ++i) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, call_for_ever, NULL) != 0) return 2;
  }
  usleep(100000);
  return 0;
}
