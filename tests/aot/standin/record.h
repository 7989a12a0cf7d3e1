/* What both stand-ins share: the log of calls, errors on demand, and the bytes of a launch's arguments.
 *
 * KVB_STANDIN_LOG      file that each call is appended to, one JSON object a line
 * KVB_STANDIN_FAIL     "function=code" or "function@n=code" (the n-th call only), separated by spaces
 * KVB_STANDIN_ARGS     bytes of each kernel argument, separated by commas
 * KVB_STANDIN_DEVICES  how many devices there are (2)
 * KVB_STANDIN_POOLS    0: devices without memory pools
 * KVB_STANDIN_GATE     a launch waits until this file exists
 * KVB_STANDIN_VERSION  what the driver says its version is
 *
 * Compiled with COUNTING it reads no environment and writes no log: each call costs next to nothing and is
 * counted by name, for kvb_standin_counts. */
#ifndef RECORD_H
#define RECORD_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#ifdef COUNTING

typedef struct tally {
  const char *name;
  long count;
} tally;

static tally tallies[64];

static tally *tally_of(const char *name) {
  tally *at = tallies;
  while (at->name != NULL && strcmp(at->name, name) != 0) ++at;
  at->name = name;
  return at;
}

/* Every function that was called since the last time, as a JSON object of counts. */
EXPORT const char *kvb_standin_counts(void) {
  static char text[4096];
  int at = snprintf(text, sizeof text, "{");
  for (tally *each = tallies; each->name != NULL; ++each) {
    if (each->count > 0)
      at += snprintf(text + at, sizeof text - (size_t)at, "%s\"%s\":%ld", at > 1 ? "," : "", each->name, each->count);
    each->count = 0;
  }
  snprintf(text + at, sizeof text - (size_t)at, "}");
  return text;
}

#define COUNT(function)                                   \
  do {                                                    \
    static tally *own;                                    \
    if (own == NULL) own = tally_of(function);            \
    ++own->count;                                         \
  } while (0)
#define FAIL_ON_DEMAND(function) COUNT(function)
#define record(...) ((void)0)
#define setting(name, otherwise) (otherwise)
#define wait_at_gate(function) ((void)0)

#else

#define COUNT(function) ((void)0)

static int setting(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text != NULL && *text != 0 ? atoi(text) : otherwise;
}

__attribute__((format(printf, 2, 3))) static void record(const char *function, const char *format, ...) {
  const char *path = getenv("KVB_STANDIN_LOG");
  FILE *file = path != NULL ? fopen(path, "a") : NULL;
  if (file == NULL) return;
  char line[8192];
  int at = snprintf(line, sizeof line, "{\"call\":\"%s\"", function);
  va_list values;
  va_start(values, format);
  at += vsnprintf(line + at, sizeof line - (size_t)at, format, values);
  va_end(values);
  snprintf(line + at, sizeof line - (size_t)at, "}\n");
  fputs(line, file);
  fclose(file);
}

/* The error that the environment asks for from this call of `function`; `count` is its own. */
static int demanded(const char *function, int *count) {
  const char *at = getenv("KVB_STANDIN_FAIL");
  size_t length = strlen(function);
  ++*count;
  for (; at != NULL && *at != 0; at = strchr(at, ' ') != NULL ? strchr(at, ' ') + 1 : NULL) {
    if (strncmp(at, function, length) != 0) continue;
    const char *rest = at + length;
    if (*rest == '@') {
      char *end;
      if (strtol(rest + 1, &end, 10) != *count) continue;
      rest = end;
    }
    if (*rest == '=') return atoi(rest + 1);
  }
  return 0;
}

static void wait_at_gate(const char *function) {
  const char *path = getenv("KVB_STANDIN_GATE");
  if (path == NULL) return;
  record(function, ",\"waits\":1");
  while (access(path, F_OK) != 0) usleep(1000);
}

#define FAIL_ON_DEMAND(function)                     \
  do {                                               \
    static int count;                                \
    int code = demanded(function, &count);           \
    if (code != 0) {                                 \
      record(function, ",\"failed\":%d", code);      \
      return code;                                   \
    }                                                \
  } while (0)

/* The arguments as hexadecimal strings in a JSON array. */
static const char *argument_bytes(void **parameters, char *text, size_t size) {
  const char *sizes = getenv("KVB_STANDIN_ARGS");
  size_t at = (size_t)snprintf(text, size, "[");
  for (int i = 0; sizes != NULL && *sizes != 0; ++i) {
    char *end;
    long bytes = strtol(sizes, &end, 10);
    at += (size_t)snprintf(text + at, size - at, "%s\"", i == 0 ? "" : ",");
    for (long j = 0; j < bytes; ++j)
      at += (size_t)snprintf(text + at, size - at, "%02x", ((unsigned char *)parameters[i])[j]);
    at += (size_t)snprintf(text + at, size - at, "\"");
    sizes = *end == ',' ? end + 1 : NULL;
  }
  snprintf(text + at, size - at, "]");
  return text;
}

#endif
#endif
