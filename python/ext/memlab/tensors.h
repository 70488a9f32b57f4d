/* tensors.h — shared by tensor_facts.c, find_tensors.c and report.c: reads tensors without running
 * user code, and finds all tensors. Hold the GIL for every call. References are new unless called
 * borrowed. */
#ifndef KOILA_EXT_TENSORS_H
#define KOILA_EXT_TENSORS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

/* ---- tensor_facts.c. Everything but koila__facts_prepare() needs it to have succeeded, and leaves
 * no exception. */

/* Find torch's descriptors and the layout of its objects, once. -1: a Python error is set. */
int koila__facts_prepare(PyObject *torch);
extern PyTypeObject *koila__tensor_base; /* torch._C.TensorBase; kept for good */
/* Tests the type and not isinstance(), so no user's __class__ runs. Inline, since it tests every
 * object. */
static inline bool koila__facts_is_tensor(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    PyObject *mro = type->tp_flags & Py_TPFLAGS_HEAPTYPE ? type->tp_mro : NULL;
    for (Py_ssize_t i = 0; mro && i < PyTuple_GET_SIZE(mro); i++)
        if (PyTuple_GET_ITEM(mro, i) == (PyObject *)koila__tensor_base)
            return true;
    return false;
}
/* Is its type torch's own, or derived from torch's Tensor directly? */
bool koila__facts_is_plain(PyObject *t);
bool koila__facts_is_on_cpu(PyObject *t);
/* Its torch.device; NULL: it cannot be read. */
PyObject *koila__facts_device(PyObject *t);
PyObject *koila__facts_dtype(PyObject *t);
/* A tuple; () if it cannot be read; NULL: no memory. *numel is 0 in both cases, and for symbolic
 * sizes. */
PyObject *koila__facts_shape(PyObject *t, uint64_t *numel);

typedef enum koila__owner {
    KOILA__OWNER_ALLOCATOR, /* counted since the hook was installed */
    KOILA__OWNER_OLDER,     /* older than the hook */
    KOILA__OWNER_BORROWED   /* not from torch's allocator: NumPy's, mapped, shared, pinned */
} koila__owner;
typedef struct koila__storage {
    void *impl; /* the StorageImpl; not NULL in a storage that was found */
    uint64_t n_bytes;
    uintptr_t data; /* 0: a size without memory, then n_bytes is 0 */
} koila__storage;
bool koila__facts_storage(PyObject *t, koila__storage *s); /* false: t has none */
/* Offset from the beginning of its storage, in elements. */
uint64_t koila__facts_offset(PyObject *t);
/* The owner of a CPU storage that is not in koila's count. */
koila__owner koila__facts_owner_of_unknown(PyObject *t);

/* The tensors inside a sparse or nested tensor; NULL where there is none. Names are static. */
enum { KOILA__PARTS = 3 };
typedef struct koila__parts {
    PyObject *part[KOILA__PARTS];
    const char *name[KOILA__PARTS];
} koila__parts;
void koila__parts_free(koila__parts *p);
bool koila__facts_is_sparse(PyObject *t);
bool koila__facts_sparse_parts(PyObject *t, koila__parts *p); /* false: there are none */
bool koila__facts_is_nested(PyObject *t);
bool koila__facts_nested_parts(PyObject *t, koila__parts *p);
/* Calls fn for each tensor (borrowed) in the instance dictionary of a wrapper, until fn returns
 * false. Returns their number. */
int koila__facts_each_inner(PyObject *t, bool (*fn)(void *user, PyObject *key, PyObject *inner),
                            void *user);

/* The gradient of t if it can be read without a warning, else NULL. */
PyObject *koila__facts_grad(PyObject *t);
/* The autograd node that made t, or NULL. */
PyObject *koila__facts_grad_fn(PyObject *t);
/* Is C++ the only owner of this object? `ours`: references that the caller holds. Always false
 * without both_owners: torch 2.10 and later (see report.c). */
bool koila__facts_only_cxx_owns(PyObject *t, Py_ssize_t ours, bool both_owners);

/* "Tensor7": numbers is {id: (weakref, n)}, counter a list with the next number. NULL with an
 * exception set. */
PyObject *koila__facts_numbered_name(PyObject *numbers, PyObject *counter, PyObject *t);
/* Forgets the numbers of dead tensors. False: an exception is set. */
bool koila__facts_forget_dead(PyObject *numbers);

/* ---- find_tensors.c */

/* A list of all tensor objects, oldest first as far as the collector knows; NULL with an exception
 * set. pre: koila__facts_prepare() */
PyObject *koila__find_tensors(void);

#endif
