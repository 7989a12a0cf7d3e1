#define _GNU_SOURCE
#include "manifest.h"

#include <stdio.h>
#include <string.h>

#include "error.h"
#include "table.h"

int kvb_check_manifest(const void *manifest, size_t size) {
  char wanted[128];
  /* Canonical JSON has no spaces, so the member's text is exact. */
  int length = snprintf(wanted, sizeof wanted, "\"launch_table\":\"%s\"", KVB_TABLE.digest);
  if (manifest != NULL && memmem(manifest, size, wanted, (size_t)length) != NULL) return KVB_OK;
  return kvb_fail(KVB_VALUE_ERROR,
                  "manifest: wanted one that holds launch table %s, as this launcher for %s does; found %zu bytes "
                  "without it. Take launcher and manifest from the same bundle",
                  KVB_TABLE.digest, KVB_TABLE.target, size);
}
