/* Ties a launcher to the manifest that it was built with. */
#ifndef KVB_MANIFEST_H
#define KVB_MANIFEST_H

#include <stddef.h>

/* Refuses a manifest that does not name this launcher's launch table. */
int kvb_check_manifest(const void *manifest, size_t size);

#endif
