/* real.h — torch's tensors, dtypes, devices and modes, read from C. Nothing here is lazy.
 *
 * Torch's C shim (aoti_torch_*, found with dlsym and checked at start-up) reads a tensor's
 * properties; where it is missing, torch's Python functions and attributes are used.
 */
#ifndef KOILA_EXT_REAL_H
#define KOILA_EXT_REAL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "koila/koila.h"

extern koila_table *koila__table; /* the table of the process; set by koila__real_setup() */
/* KOILA_FACT_* bits of a recorded call's operator. */
/* Between these two calls, which nest, code may keep ids of the table, and pointers to their
 * entries, that no graph and no lazy tensor names, while Python runs: see Note [Ids] in bounds.c.
 * A run needs none of that: all its ids are those of graphs that it keeps. */
extern uint32_t koila__n_ids_held;
static inline void koila__hold_ids(void) { koila__n_ids_held++; }
static inline void koila__release_ids(void) { koila__n_ids_held--; }

static inline uint32_t koila__facts_of(koila_sig sig)
{
    return koila_op_facts(koila__table, koila_sig_get(koila__table, sig)->op);
}
/* Makes the table and looks up torch's entry points. -1 + error. */
int koila__real_setup(PyObject *torch);

bool koila__is_tensor(PyObject *o);
/* The meta of a plain tensor. -1 with an exception: sparse, or an unknown dtype. */
int koila__meta_of(PyObject *real, koila_meta *out);
/* Bytes of its elements. -1 with an exception, as above. */
int koila__bytes_of(PyObject *real, uint64_t *out);
/* Is that certainly `meta`? Quicker than to ask which it is. False: no, or torch must tell. */
bool koila__is_like(PyObject *real, koila_meta meta);
/* Are tensors of these metas the same but for strides that mean nothing, of dimensions of one
 * entry? */
bool koila__lie_alike(koila_meta a, koila_meta b);
/* Does `real` lie in memory as m says, its dimensions in the same order and without gaps, where it
 * may have fewer rows? True where m has gaps, or torch does not tell. */
bool koila__lies_as(PyObject *real, const koila_meta_info *m);
/* *out: elements from the beginning of its memory. -1 with an exception. */
int koila__storage_offset(PyObject *real, int64_t *out);
/* Bytes of the storage that it is in; 0: none, or torch does not tell. */
uint64_t koila__storage_bytes(PyObject *real);
/* Address of its first element; 0: it has none, or torch does not tell. */
uint64_t koila__memory_of(PyObject *real);
/* *out: `_version`, or KOILA__NO_VERSION for a tensor made in inference mode. */
int koila__version_of(PyObject *real, uint32_t *out);
#define KOILA__NO_VERSION (UINT32_MAX - 1)
/* The StorageImpl of a tensor, only to be compared. NULL: it has none, or nobody knows where torch
 * keeps it. */
const void *koila__storage_of(PyObject *tensor);
/* Is its memory somebody else's (a numpy array's, what DLPack or a buffer handed over), who may
 * write it without a word to torch? False: no, or nobody knows how torch tells. */
bool koila__is_borrowed(PyObject *tensor);
PyObject *koila__data_of(PyObject *tensor); /* new: torch's own `tensor.data` */
/* A number that all elements of a strided tensor decide; on another device than the CPU Python
 * runs. 1; 0: it is no such tensor, or its device cannot be asked now; -1 with an exception. */
int koila__fingerprint(PyObject *real, uint64_t *out);

PyObject *koila__dtype_object(koila_dtype d); /* borrowed */
int koila__dtype_of(PyObject *o);             /* -1 without an exception: unknown */
/* Whole numbers or flags, which have no gradient. Of -1: false. */
bool koila__dtype_is_whole(int dtype);
int koila__dtype_code(koila_dtype d);            /* torch's number of it; -1: not known */
PyObject *koila__device_object(uint16_t device); /* borrowed; NULL + error */
int koila__device_of(PyObject *o, uint16_t *out);
bool koila__is_meta_device(uint16_t device);   /* torch's `meta`: tensors there have no values */
PyObject *koila__meta_object(koila_meta meta); /* new (dtype, device, sizes, strides) */
/* The meta of a tuple (dtype, device, sizes, strides[, offset]). */
int koila__meta_from(PyObject *tuple, koila_meta *out, int64_t *offset);
PyObject *koila__ints_object(const int64_t *v, uint8_t n); /* new tuple */

bool koila__requires_grad(PyObject *tensor);
bool koila__grad_mode(void);
int koila__set_grad_mode(bool on);
/* What of torch's settings decides the result of a recorded call, in one byte: bit 0 autograd, bits
 * 1-2 the default dtype (f32, f64, f16, bf16), bits 3-4 deterministic algorithms (off, on, warn).
 * It is koila_sig_info.grad_mode. */
uint8_t koila__call_mode(void);
/* Sets them. -1 + error, with nothing changed */
int koila__set_call_mode(uint8_t mode);
bool koila__maybe_inference(void); /* false: certainly not in inference mode */

/* ---- for wrapper.c, which makes tensors, and accumulate.c */
typedef void *tensor_handle; /* a TensorImpl ** */
/* A function is NULL where this version of torch lacks it. */
typedef struct koila__shim_tensors {
    int32_t (*reinterpret)(tensor_handle, int64_t, const int64_t *, const int64_t *, int64_t,
                           tensor_handle *);
    int32_t (*drop)(tensor_handle);
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                     tensor_handle *);
    int32_t (*get_dtype)(tensor_handle, int32_t *);
    int32_t (*get_data_ptr)(tensor_handle, void **);
    PyObject *(*wrap)(tensor_handle, PyTypeObject *);
    PyObject *(*wrap_moved)(tensor_handle); /* as torch.Tensor; nothing is left in the handle */
    /* what watches a leaf, as autograd keeps it: a vector, of which the first words are begin and
     * end, and a unique_ptr */
    const void *const *(*hooks)(tensor_handle);
    const void *const *(*later_hooks)(tensor_handle);
} koila__shim_tensors;
extern koila__shim_tensors koila__shim;
/* offset of the TensorImpl * in a tensor object; 0: not known */
extern Py_ssize_t koila__cdata;
extern PyObject *koila__strided; /* torch.strided */
static inline tensor_handle koila__tensor_handle(PyObject *tensor)
{
    return (char *)tensor + koila__cdata;
}

#endif
