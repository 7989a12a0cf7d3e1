#include "workspace.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "acl.h"
#include "error.h"

enum { MAX_DEVICES = 64, SMALLEST = 1 << 20 };

/* Whoever sets `taken` owns the rest, until it clears it. */
struct kvb_workspace {
  _Atomic bool taken;
  void *memory;
  size_t bytes;
  void *stream; /* of its last work */
  void *graph;  /* that its work was captured into; NULL: none */
  void *event;  /* done when its last work is; unused where a graph holds it */
  kvb_workspace *next;
};

static _Atomic(kvb_workspace *) lists[MAX_DEVICES];

/* Sizes double, so that calls that grow one by one do not each leave memory behind. */
static size_t rounded(size_t bytes) {
  size_t size = SMALLEST;
  while (size < bytes && size <= SIZE_MAX / 2) size *= 2;
  return size < bytes ? bytes : size;
}

static bool claim(kvb_workspace *at) { return !atomic_load(&at->taken) && !atomic_exchange(&at->taken, true); }

static void release(kvb_workspace *at) { atomic_store(&at->taken, false); }

/* Whether its memory may be used by work on `stream` from now on. */
static int is_free_for(const kvb_workspace *at, void *stream, void *graph, int *ready) {
  *ready = at->graph == graph && (at->memory == NULL || at->stream == stream);
  if (*ready || at->graph != NULL || graph != NULL) return KVB_OK;
  return kvb_acl_event_done(at->event, ready);
}

/* The first that is large enough; or one whose memory is too small, which is then freed. NULL: none. */
static int find(int device_id, void *stream, void *graph, size_t bytes, kvb_workspace **found) {
  kvb_workspace *small = NULL;
  for (kvb_workspace *at = atomic_load(&lists[device_id]); at != NULL; at = at->next) {
    int ready;
    if (!claim(at)) continue;
    int code = is_free_for(at, stream, graph, &ready);
    if (code == KVB_OK && ready && at->bytes >= bytes) {
      if (small != NULL) release(small);
      *found = at;
      return KVB_OK;
    }
    /* Memory that this stream may still be working on can be used again, but not freed. */
    int done = code == KVB_OK && ready && graph == NULL && small == NULL;
    if (done && at->memory != NULL) code = kvb_acl_event_done(at->event, &done);
    if (code == KVB_OK && done)
      small = at;
    else
      release(at);
    if (code != KVB_OK) {
      if (small != NULL) release(small);
      return code;
    }
  }
  if (small != NULL && small->memory != NULL) kvb_acl_free(small->memory);
  if (small != NULL) small->memory = NULL, small->bytes = 0;
  *found = small;
  return KVB_OK;
}

static int make(int device_id, kvb_workspace **made) {
  kvb_workspace *at = calloc(1, sizeof *at);
  if (at == NULL) return kvb_fail(KVB_MEMORY_ERROR, "no memory for a workspace");
  atomic_store(&at->taken, true);
  at->next = atomic_load(&lists[device_id]);
  while (!atomic_compare_exchange_weak(&lists[device_id], &at->next, at)) continue;
  *made = at;
  return KVB_OK;
}

static int fill(kvb_workspace *at, void *graph, size_t bytes) {
  int code = kvb_acl_alloc(bytes, &at->memory);
  if (code != KVB_OK) return at->memory = NULL, code;
  if (at->event == NULL && graph == NULL) code = kvb_acl_event_make(&at->event);
  if (code != KVB_OK) {
    kvb_acl_free(at->memory);
    at->memory = at->event = NULL;
    return code;
  }
  at->bytes = bytes;
  return KVB_OK;
}

int kvb_workspace_take(int device_id, void *stream, size_t bytes, kvb_workspace **workspace) {
  void *graph;
  kvb_workspace *at = NULL;
  int code = kvb_acl_capturing(stream, &graph);
  if (code == KVB_OK) code = find(device_id, stream, graph, bytes, &at);
  if (code == KVB_OK && at == NULL) code = make(device_id, &at);
  if (code == KVB_OK && at->memory == NULL) {
    code = fill(at, graph, rounded(bytes));
    if (code != KVB_OK) release(at);
  }
  if (code != KVB_OK) return code;
  at->stream = stream;
  at->graph = graph;
  *workspace = at;
  return KVB_OK;
}

void *kvb_workspace_memory(const kvb_workspace *workspace) { return workspace->memory; }

size_t kvb_workspace_bytes(const kvb_workspace *workspace) { return workspace->bytes; }

int kvb_workspace_give(kvb_workspace *at, void *stream) {
  int code = KVB_OK;
  if (at->graph == NULL && (code = kvb_acl_event_record(at->event, stream)) != KVB_OK) {
    /* Nothing will say when the work on it is done, so it is waited for here. */
    kvb_hold_error(1);
    kvb_acl_wait(stream);
    kvb_hold_error(0);
    kvb_acl_free(at->memory);
    at->memory = NULL;
    at->bytes = 0;
  }
  release(at);
  return code;
}

void kvb_workspaces_end(int device_id) {
  kvb_workspace *at = atomic_exchange(&lists[device_id], NULL);
  while (at != NULL) {
    kvb_workspace *next = at->next;
    if (at->memory != NULL) kvb_acl_free(at->memory);
    if (at->event != NULL) kvb_acl_event_end(at->event);
    free(at);
    at = next;
  }
}
