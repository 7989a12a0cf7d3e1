/* Opens a driver library and finds its functions, so that a launcher loads where there is no driver. */
#ifndef KVB_LIBRARY_H
#define KVB_LIBRARY_H

#include <stddef.h>

typedef struct kvb_symbol {
  const char *name;
  void **address;
  int optional;
} kvb_symbol;

/* Opens the first of `names` that the process has loaded already, else the first that can be loaded. */
int kvb_library_open(const char *const *names, size_t num_names, const char *advice, void **library);

/* Fills in the address of every symbol; a missing one that is not optional is a failure that names it. */
int kvb_library_find(void *library, const char *library_name, const kvb_symbol *symbols, size_t num_symbols);

#endif
