#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>

#include "error.h"

int kvb_library_open(const char *const *names, size_t num_names, const char *advice, void **library) {
  /* Frameworks bring their own copy of a driver library under one of its names: two in one process would
   * not know of each other's streams and memory. */
  for (size_t i = 0; i < num_names; ++i)
    if ((*library = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD)) != NULL) return KVB_OK;
  for (size_t i = 0; i < num_names; ++i)
    if ((*library = dlopen(names[i], RTLD_NOW)) != NULL) return KVB_OK;
  (void)dlopen(names[0], RTLD_NOW);
  const char *words = dlerror();
  return kvb_fail(KVB_DEVICE_ERROR, "%s: %s. %s", names[0], words != NULL ? words : "cannot be loaded", advice);
}

int kvb_library_find(void *library, const char *library_name, const kvb_symbol *symbols, size_t num_symbols) {
  for (size_t i = 0; i < num_symbols; ++i) {
    *symbols[i].address = dlsym(library, symbols[i].name);
    if (*symbols[i].address == NULL && !symbols[i].optional)
      return kvb_fail(KVB_DEVICE_ERROR, "%s: wanted a driver with the function %s, found one without it. "
          "Install a newer driver",
                      library_name, symbols[i].name);
  }
  return KVB_OK;
}
