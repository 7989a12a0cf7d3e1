/* Calls from Python that hand torch's tensors over as they are: read in place, or described by torch's DLPack
 * exchange API; converted by nobody, and held by the caller alone. What is called is an ordinary built-in function.
 *
 * No Python header is used: these are functions of CPython's stable ABI, the same from 3.10 on. They are weak, so
 * that the object also loads where there is no interpreter. Builds without a global lock are not served. */
#include <dlpack/dlpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "call.h"
#include "error.h"
#include "python.h"
#include "table.h"

#pragma weak PyCFunction_NewEx
#pragma weak PyCapsule_GetPointer
#pragma weak PyCapsule_New
#pragma weak PyDict_New
#pragma weak PyDict_SetItem
#pragma weak PyErr_Clear
#pragma weak PyErr_Occurred
#pragma weak PyEval_RestoreThread
#pragma weak PyEval_SaveThread
#pragma weak PyFloat_AsDouble
#pragma weak PyFloat_Type
#pragma weak PyLong_AsLongLong
#pragma weak PyLong_FromLong
#pragma weak PyLong_Type
#pragma weak PyObject_Call
#pragma weak PyTuple_GetItem
#pragma weak PyTuple_New
#pragma weak PyTuple_SetItem
#pragma weak PyTuple_Size
#pragma weak PyUnicode_CompareWithASCIIString
#pragma weak PyUnicode_DecodeUTF8
#pragma weak Py_DecRef
#pragma weak Py_IncRef
#pragma weak _Py_NoneStruct

#define EXPORT __attribute__((visibility("default")))

/* The two members of PyObject are part of the stable ABI. */
struct PyObject {
  ssize_t references;
  void *type;
};

typedef struct method {
  const char *name;
  PyObject *(*function)(PyObject *self, PyObject *const *args, ssize_t count, PyObject *names);
  int flags;
  const char *doc;
} method;

enum { METH_KEYWORDS = 0x0002, METH_FASTCALL = 0x0080 };

extern char PyFloat_Type, PyLong_Type, _Py_NoneStruct;
PyObject *PyCFunction_NewEx(const method *definition, PyObject *self, PyObject *module);
void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
PyObject *PyCapsule_New(void *pointer, const char *name, void (*destructor)(PyObject *));
PyObject *PyDict_New(void);
int PyDict_SetItem(PyObject *dict, PyObject *key, PyObject *value);
void PyErr_Clear(void);
PyObject *PyErr_Occurred(void);
void PyEval_RestoreThread(void *state);
void *PyEval_SaveThread(void);
double PyFloat_AsDouble(PyObject *object);
long long PyLong_AsLongLong(PyObject *object);
PyObject *PyLong_FromLong(long value);
PyObject *PyObject_Call(PyObject *function, PyObject *args, PyObject *keywords);
PyObject *PyTuple_GetItem(PyObject *tuple, ssize_t index);
PyObject *PyTuple_New(ssize_t size);
int PyTuple_SetItem(PyObject *tuple, ssize_t index, PyObject *value);
ssize_t PyTuple_Size(PyObject *tuple);
int PyUnicode_CompareWithASCIIString(PyObject *text, const char *other);
PyObject *PyUnicode_DecodeUTF8(const char *text, ssize_t size, const char *errors);
void Py_DecRef(PyObject *object);
void Py_IncRef(PyObject *object);

typedef struct entry entry;

/* A bound tensor, and by whom it is looked at. */
typedef struct watched {
  const entry *held;
  PyObject *object;
} watched;

/* What a built-in function holds, in the capsule that is its `self`. The last two are a step's. */
struct entry {
  kvb_python_given given;
  kvb_binding *binding;
  watched fixed[KVB_NUM_FIXED];
};

static bool has_interpreter(void) {
  const void *const needed[] = {
      (void *)PyCFunction_NewEx,    (void *)PyCapsule_GetPointer, (void *)PyCapsule_New,
      (void *)PyDict_New,           (void *)PyDict_SetItem,       (void *)PyErr_Clear,
      (void *)PyErr_Occurred,       (void *)PyEval_RestoreThread, (void *)PyEval_SaveThread,
      (void *)PyFloat_AsDouble,     (void *)&PyFloat_Type,        (void *)PyLong_AsLongLong,
      (void *)PyLong_FromLong,      (void *)&PyLong_Type,         (void *)PyObject_Call,
      (void *)PyTuple_GetItem,      (void *)PyTuple_New,          (void *)PyTuple_SetItem,
      (void *)PyTuple_Size,         (void *)PyUnicode_CompareWithASCIIString,
      (void *)PyUnicode_DecodeUTF8, (void *)Py_DecRef,            (void *)Py_IncRef,
      (void *)&_Py_NoneStruct,
  };
  for (size_t i = 0; i < sizeof needed / sizeof needed[0]; ++i)
    if (needed[i] == NULL) return false;
  return true;
}

static PyObject *new_reference(PyObject *object) {
  Py_IncRef(object);
  return object;
}

static PyObject *pack(PyObject *const *args, ssize_t count) {
  PyObject *tuple = PyTuple_New(count);
  for (ssize_t i = 0; tuple != NULL && i < count; ++i) PyTuple_SetItem(tuple, i, new_reference(args[i]));
  return tuple;
}

static PyObject *call(PyObject *function, PyObject *args, PyObject *keywords) {
  PyObject *result = args != NULL ? PyObject_Call(function, args, keywords) : NULL;
  if (args != NULL) Py_DecRef(args);
  if (keywords != NULL) Py_DecRef(keywords);
  return result;
}

/* The way that takes anything, and has words for what it does not take. */
static PyObject *call_plain(const entry *held, PyObject *const *args, ssize_t count, PyObject *names) {
  ssize_t named = names != NULL ? PyTuple_Size(names) : 0;
  PyObject *keywords = named > 0 ? PyDict_New() : NULL;
  if (named > 0 && keywords == NULL) return NULL;
  for (ssize_t i = 0; i < named; ++i) {
    if (PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[count + i]) == 0) continue;
    Py_DecRef(keywords);
    return NULL;
  }
  return call(held->given.plain, pack(args, count), keywords);
}

/* Has Python raise what the launcher's last failure says: refuse(code, words, arguments). */
static PyObject *refuse(const entry *held, int code, PyObject *const *args, ssize_t count) {
  const char *words = kvb_last_error();
  PyObject *given[3] = {PyLong_FromLong(code), PyUnicode_DecodeUTF8(words, (ssize_t)strlen(words), "replace"),
                        pack(args, count)};
  PyObject *result = NULL;
  if (given[0] != NULL && given[1] != NULL && given[2] != NULL)
    result = call(held->given.refuse, pack(given, 3), NULL);
  for (int i = 0; i < 3; ++i)
    if (given[i] != NULL) Py_DecRef(given[i]);
  return result;
}

/* Keywords that name the arguments after the positional ones in their order lie in memory as if they had been
 * positional. */
static bool in_order(PyObject *names, ssize_t count, const char *const *wanted, ssize_t most, ssize_t *total) {
  ssize_t named = names != NULL ? PyTuple_Size(names) : 0;
  *total = count + named;
  if (*total > most) return false;
  for (ssize_t i = 0; i < named; ++i)
    if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, i), wanted[count + i]) != 0) return false;
  return true;
}

/* Whether it has one of the known types (a subclass may mean something else) and is what its memory holds; one that
 * is read in place tells that as it is read. Asking runs Python, and so comes before any tensor is described. */
static bool is_usual(const entry *held, PyObject *object) {
  if (object->type != held->given.types[0] && object->type != held->given.types[1]) return false;
  if (held->given.torch.plain != NULL) return true;
  PyObject *said = call(held->given.usual, pack(&object, 1), NULL);
  if (said != NULL) Py_DecRef(said);
  return said != NULL;
}

static bool are_usual(const entry *held, PyObject *const *objects, int count) {
  for (int i = 0; i < count; ++i)
    if (!is_usual(held, objects[i])) return false;
  return true;
}

static bool describe(const entry *held, PyObject *object, DLTensor *out) {
  if (held->given.torch.plain != NULL) return kvb_torch_describe(&held->given.torch, object, out) != 0;
  return held->given.exchange->dltensor_from_py_object_no_sync(object, out) == 0;
}

static int look_again(void *owner, DLTensor *out) {
  const watched *bound = owner;
  return describe(bound->held, bound->object, out) ? 0 : -1;
}

static bool find_stream(const entry *held, DLDevice device, void **stream) {
  *stream = NULL;
  if (device.device_type == kDLCPU) return true;
  return held->given.exchange->current_work_stream(device.device_type, device.device_id, stream) == 0;
}

static const char *const COMPRESS_NAMES[KVB_NUM_TENSORS + 3] = {
    "state_cache",     "token_to_req",  "positions",       "boundary_token_indices", "block_table", "rms_norm_weight",
    "cos_sin_cache",   "kv_slot_mapping", "kv_cache",      "block_size",      "compress_ratio",  "rms_norm_eps"};

static bool take_scalars(PyObject *const *scalars, ssize_t count, kvb_arguments *arguments) {
  if (scalars[0]->type != &PyLong_Type || scalars[1]->type != &PyLong_Type) return false;
  arguments->block_size = PyLong_AsLongLong(scalars[0]);
  arguments->compress_ratio = PyLong_AsLongLong(scalars[1]);
  if ((arguments->block_size == -1 || arguments->compress_ratio == -1) && PyErr_Occurred() != NULL) return false;
  arguments->rms_norm_eps = KVB_DEFAULT_EPS;
  if (count < 3) return true;
  if (scalars[2]->type != &PyFloat_Type) return false;
  arguments->rms_norm_eps = PyFloat_AsDouble(scalars[2]);
  return true;
}

static PyObject *compress(PyObject *self, PyObject *const *args, ssize_t count, PyObject *names) {
  const entry *held = PyCapsule_GetPointer(self, NULL);
  DLTensor tensors[KVB_NUM_TENSORS];
  kvb_arguments arguments;
  void *stream;
  ssize_t total;
  bool plain = !in_order(names, count, COMPRESS_NAMES, KVB_NUM_TENSORS + 3, &total) ||
               total < KVB_NUM_TENSORS + 2 || *held->given.closed;
  plain = plain || !are_usual(held, args, KVB_NUM_TENSORS);
  for (int i = 0; !plain && i < KVB_NUM_TENSORS; ++i) {
    plain = !describe(held, args[i], &tensors[i]);
    arguments.tensors[i] = &tensors[i];
  }
  plain = plain || !take_scalars(args + KVB_NUM_TENSORS, total - KVB_NUM_TENSORS, &arguments);
  plain = plain || tensors[KVB_KV_CACHE].device.device_id != held->given.device_id ||
          !find_stream(held, tensors[KVB_STATE_CACHE].device, &stream);
  if (plain) {
    PyErr_Clear();
    return call_plain(held, args, count, names);
  }
  int code = kvb_call(&arguments, PyEval_SaveThread, PyEval_RestoreThread, stream);
  return code == KVB_OK ? new_reference(args[KVB_KV_CACHE]) : refuse(held, code, args, total);
}

static PyObject *step(PyObject *self, PyObject *const *args, ssize_t count, PyObject *names) {
  static const char *const NAMES[KVB_NUM_VARYING] = {"token_to_req", "positions", "boundary_token_indices",
                                                     "kv_slot_mapping"};
  const entry *held = PyCapsule_GetPointer(self, NULL);
  DLTensor tensors[KVB_NUM_VARYING];
  kvb_arguments arguments;
  void *stream;
  ssize_t total;
  bool plain = !in_order(names, count, NAMES, KVB_NUM_VARYING, &total) || total < KVB_NUM_VARYING ||
               *held->given.closed;
  plain = plain || !are_usual(held, args, KVB_NUM_VARYING);
  for (int i = 0; !plain && i < KVB_NUM_VARYING; ++i) {
    plain = !describe(held, args[i], &tensors[i]);
    arguments.tensors[KVB_VARYING[i]] = &tensors[i];
  }
  plain = plain || !find_stream(held, held->binding->fixed[0].device, &stream);
  if (plain) {
    PyErr_Clear();
    return call_plain(held, args, count, names);
  }
  int code = kvb_call_step(held->binding, &arguments, 0, stream);
  return code == KVB_OK ? new_reference(held->fixed[KVB_NUM_FIXED - 1].object) : refuse(held, code, args, total);
}

static void release(entry *held) {
  PyObject *const owned[] = {held->given.plain, held->given.refuse, held->given.usual, held->given.keep};
  for (size_t i = 0; i < sizeof owned / sizeof owned[0]; ++i) Py_DecRef(owned[i]);
  for (int i = 0; i < KVB_NUM_FIXED; ++i)
    if (held->fixed[i].object != NULL) Py_DecRef(held->fixed[i].object);
  free(held->binding);
  free(held);
}

static void destroy(PyObject *capsule) { release(PyCapsule_GetPointer(capsule, NULL)); }

static entry *new_entry(const kvb_python_given *given) {
  const DLPackExchangeAPI *exchange = given->exchange;
  if (!has_interpreter() || exchange->header.version.major != DLPACK_MAJOR_VERSION ||
      exchange->dltensor_from_py_object_no_sync == NULL || exchange->current_work_stream == NULL)
    return NULL;
  entry *held = calloc(1, sizeof *held);
  if (held == NULL) return NULL;
  held->given = *given;
  new_reference(given->plain);
  new_reference(given->refuse);
  new_reference(given->usual);
  new_reference(given->keep);
  return held;
}

static PyObject *new_function(const method *definition, entry *held) {
  PyObject *capsule = PyCapsule_New(held, NULL, destroy);
  PyObject *function = capsule != NULL ? PyCFunction_NewEx(definition, capsule, NULL) : NULL;
  if (capsule != NULL)
    Py_DecRef(capsule);
  else
    release(held);
  return function;
}

static PyObject *none(void) { return new_reference((PyObject *)&_Py_NoneStruct); }

EXPORT PyObject *kvb_python_compress(const kvb_python_given *given) {
  static const method DEFINITION = {
      "compress", compress, METH_FASTCALL | METH_KEYWORDS,
      "compress(state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight, "
      "cos_sin_cache, kv_slot_mapping, kv_cache, block_size, compress_ratio, rms_norm_eps=1e-06)\n--\n\n"
      "What Operator.compress does, which has the details."};
  entry *held = new_entry(given);
  return held != NULL ? new_function(&DEFINITION, held) : none();
}

EXPORT PyObject *kvb_python_step(const kvb_python_given *given, PyObject *const *fixed, int64_t block_size,
                                 int64_t compress_ratio, double rms_norm_eps) {
  static const method DEFINITION = {
      "step", step, METH_FASTCALL | METH_KEYWORDS,
      "step(token_to_req, positions, boundary_token_indices, kv_slot_mapping)\n--\n\n"
      "What Operator.compress does with these and the bound operands; Operator.bind has the details."};
  entry *held = new_entry(given);
  if (held == NULL) return none();
  DLTensor tensors[KVB_NUM_FIXED];
  kvb_arguments arguments = {
      .block_size = block_size, .compress_ratio = compress_ratio, .rms_norm_eps = rms_norm_eps};
  kvb_watch watch = {
      .look = look_again, .failed = PyErr_Clear, .pause = PyEval_SaveThread, .resume = PyEval_RestoreThread};
  bool described = are_usual(held, fixed, KVB_NUM_FIXED);
  for (int i = 0; i < KVB_NUM_FIXED; ++i) {
    held->fixed[i] = (watched){held, new_reference(fixed[i])};
    watch.owners[i] = &held->fixed[i];
    described = described && describe(held, fixed[i], &tensors[i]);
    arguments.tensors[KVB_FIXED[i]] = &tensors[i];
  }
  if (described && kvb_call_bind(&arguments, &watch, &held->binding) == KVB_OK)
    return new_function(&DEFINITION, held);
  PyErr_Clear();
  release(held);
  return none();
}
