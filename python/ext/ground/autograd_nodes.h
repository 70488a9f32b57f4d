/* autograd_nodes.h — torch's backward graph, walked without making a Python object for each node.
 *
 * `node.next_functions` gives every node that it names a Python object, which lives as long as the
 * node. Torch frees a chain of nodes one after the other, but nodes with Python objects one inside
 * the other: some ten thousand of them are a stack overflow.
 */
#ifndef KOILA_EXT_AUTOGRAD_NODES_H
#define KOILA_EXT_AUTOGRAD_NODES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds learn_nodes() and leaves_behind() to the module. */
int koila__autograd_nodes_add(PyObject *m);

#endif
