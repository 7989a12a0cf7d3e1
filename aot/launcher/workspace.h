/* Device memory for one call at a time. No two streams, threads or captured graphs ever hold the same memory while
 * work on it may be pending: a stream's next call may have what its last one had, for it comes after it; another
 * stream waits until that work is done; what a graph has captured is that graph's until the device is closed. */
#ifndef KVB_WORKSPACE_H
#define KVB_WORKSPACE_H

#include <stddef.h>

typedef struct kvb_workspace kvb_workspace;

/* Takes at least `bytes` of memory for work that will be put on `stream`. No lock is taken. */
int kvb_workspace_take(int device_id, void *stream, size_t bytes, kvb_workspace **workspace);

void *kvb_workspace_memory(const kvb_workspace *workspace);
size_t kvb_workspace_bytes(const kvb_workspace *workspace);

/* Gives it back, behind all work that has been put on `stream` by now. */
int kvb_workspace_give(kvb_workspace *workspace, void *stream);

/* Frees all of a device's memory, when no call is in flight on the host or the device. */
void kvb_workspaces_end(int device_id);

#endif
