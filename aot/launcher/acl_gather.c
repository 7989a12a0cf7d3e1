/* CANN's aclnnIndexSelect. Its library is another than ACL's; only what is used is declared. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#include "acl.h"
#include "error.h"

/* Up to CANN 8.5 one library holds every operator; later ones hold a field each. */
static const char *const NAMES[] = {"libopapi.so", "libopapi_nn.so", "libopapi_math.so"};

enum { NUM_NAMES = 3, FLOAT32 = 0, INT32 = 3, FORMAT_ND = 2, MAX_RANK = 2 };

static struct {
  void *(*create)(const int64_t *, uint64_t, int, const int64_t *, int64_t, int, const int64_t *, uint64_t, void *);
  int (*destroy)(const void *);
  int (*plan)(const void *, int64_t, const void *, void *, uint64_t *, void **);
  int (*run)(void *, uint64_t, void *, void *);
} op;

static const struct {
  const char *name;
  void **address;
} SYMBOLS[] = {
    {"aclCreateTensor", (void **)&op.create},
    {"aclDestroyTensor", (void **)&op.destroy},
    {"aclnnIndexSelectGetWorkspaceSize", (void **)&op.plan},
    {"aclnnIndexSelect", (void **)&op.run},
};

int kvb_gather_start(void) {
  void *libraries[NUM_NAMES];
  char words[512] = "";
  int opened = 0;
  for (int i = 0; i < NUM_NAMES; ++i) {
    opened += (libraries[i] = dlopen(NAMES[i], RTLD_NOW)) != NULL;
    const char *said = libraries[i] == NULL ? dlerror() : NULL;
    if (i == 0 && said != NULL) snprintf(words, sizeof words, "%s", said);
  }
  if (opened == 0)
    return kvb_fail(KVB_DEVICE_ERROR, "%s, which holds CANN's operators: %s. Install CANN's operator package for "
                                      "this chip, and source its set_env.sh",
                    NAMES[0], words);
  for (size_t i = 0; i < sizeof SYMBOLS / sizeof SYMBOLS[0]; ++i) {
    void *found = NULL;
    /* A library's symbols are searched together with those of the libraries that it needs. */
    for (int j = 0; j < NUM_NAMES && found == NULL; ++j)
      if (libraries[j] != NULL) found = dlsym(libraries[j], SYMBOLS[i].name);
    if (found == NULL)
      return kvb_fail(KVB_DEVICE_ERROR, "%s: wanted an operator library with the function %s, found none. Install "
                                        "CANN 8.5 or later",
                      NAMES[0], SYMBOLS[i].name);
    *SYMBOLS[i].address = found;
  }
  return KVB_OK;
}

static void *make(int rank, const int64_t *shape, int dtype, const void *data) {
  int64_t strides[MAX_RANK] = {rank == 2 ? shape[1] : 1, 1};
  return op.create(shape, (uint64_t)rank, dtype, strides, 0, FORMAT_ND, shape, (uint64_t)rank, (void *)data);
}

int kvb_gather_plan(kvb_gather *plan, const void *table, int64_t rows, const void *indices, int64_t count,
                    void *out) {
  int64_t from[] = {rows, KVB_GATHER_WIDTH}, to[] = {count, KVB_GATHER_WIDTH};
  *plan = (kvb_gather){{make(2, from, FLOAT32, table), make(1, &count, INT32, indices), make(2, to, FLOAT32, out)},
                       NULL, 0};
  int code = KVB_OK;
  for (int i = 0; i < 3; ++i)
    if (plan->tensors[i] == NULL) code = kvb_fail(KVB_DEVICE_ERROR, "aclCreateTensor: found no memory for a tensor");
  if (code == KVB_OK)
    code = kvb_acl_check("aclnnIndexSelectGetWorkspaceSize", NULL,
                         op.plan(plan->tensors[0], 0, plan->tensors[1], plan->tensors[2], &plan->workspace,
                                 &plan->executor));
  if (code != KVB_OK) kvb_gather_drop(plan);
  return code;
}

int kvb_gather_run(kvb_gather *plan, void *workspace, void *stream) {
  int code = kvb_acl_check("aclnnIndexSelect", NULL, op.run(workspace, plan->workspace, plan->executor, stream));
  kvb_gather_drop(plan);
  return code;
}

/* An executor belongs to CANN, which keeps it for the next plan of the same shapes. */
void kvb_gather_drop(kvb_gather *plan) {
  for (int i = 0; i < 3; ++i) {
    if (plan->tensors[i] != NULL) op.destroy(plan->tensors[i]);
    plan->tensors[i] = NULL;
  }
}
