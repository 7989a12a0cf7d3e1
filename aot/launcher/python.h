/* What Python asks of a launcher, beside the TVM-FFI functions. */
#ifndef KVB_PYTHON_H
#define KVB_PYTHON_H

#include <dlpack/dlpack.h>
#include <stdint.h>

#include "torch.h"

#define KVB_DEFAULT_EPS 1.0e-6

typedef struct PyObject PyObject;

typedef struct kvb_python_given {
  const DLPackExchangeAPI *exchange; /* torch's */
  const void *types[2];              /* torch's types whose tensors `exchange` may describe */
  PyObject *plain;                   /* called instead, with the same arguments, where these are of another kind */
  PyObject *refuse;                  /* refuse(code, words, arguments) raises */
  PyObject *keep;                    /* kept alive as long as the function: what the next ones are part of */
  const int32_t *closed;             /* not 0: the operator is closed, which `plain` has words for */
  int64_t device_id;                 /* kv_cache's */
  kvb_torch torch;                   /* all zero where tensors are not to be read in place */
  PyObject *usual;                   /* usual(tensor) raises where `exchange` would describe it untruly */
} kvb_python_given;

#endif
