/* random.h — torch's generators, and their states as bytes objects. See random.c. */
#ifndef KOILA_EXT_RANDOM_H
#define KOILA_EXT_RANDOM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

/* NULL or -1 comes with an exception; returned objects are new references. */
PyObject *koila__generator_get(PyObject *generator); /* a torch.Generator */
int koila__generator_set(PyObject *generator, PyObject *bytes);
/* The same through `state`, a tensor that lies in bytearray `memory`: no other one is made. */
int koila__generator_set_by(PyObject *generator, PyObject *state, PyObject *memory,
                            PyObject *bytes);
/* The state before a move of n_words, or before a call of op(*args, **kwargs), which draws from the
 * generator. Other threads' draws come before or after: Note [Generators beside threads]. */
PyObject *koila__generator_take(PyObject *generator, uint64_t n_words); /* of the CPU */
PyObject *koila__generator_draw(PyObject *generator, PyObject *op, PyObject *args,
                                PyObject *kwargs);
/* Is it the state of a generator of the CPU? */
bool koila__is_cpu_state(PyObject *bytes);
/* The state after n_words more 32-bit words. */
PyObject *koila__generator_skipped(PyObject *bytes, uint64_t n_words);
int koila__random_add_module(PyObject *m);

#endif
