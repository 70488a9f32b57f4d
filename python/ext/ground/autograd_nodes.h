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

#include <stdbool.h>
#include <stdint.h>

typedef const void *const
    *koila__node; /* a torch::autograd::Node, as words; the first: its class */

/* Nodes in the order in which a walk has met them. */
typedef struct koila__nodes {
    koila__node *at; /* [n] */
    uint32_t n;
    /* open addressing: 1 + the place in `at`; n_slots is 0 or a power of two, of which `at` has
     * room for half */
    uint32_t *slot, n_slots;
} koila__nodes;

typedef struct koila__edge {
    koila__node node; /* NULL: it leads nowhere */
    uint32_t result;  /* of that node's forward call */
} koila__edge;

/* The node of Python object `o`; NULL: not known. */
koila__node koila__node_of(PyObject *o);
/* All nodes behind the Python objects roots[n], these too, into *out, which is empty and to be
 * freed in any case. 1; 0: torch's nodes lie in memory in an unknown way; -1 with an exception. */
int koila__nodes_behind(PyObject *const *roots, Py_ssize_t n, koila__nodes *out);
uint32_t koila__nodes_place(const koila__nodes *s, koila__node node); /* UINT32_MAX: none */
void koila__nodes_free(koila__nodes *s);
uint32_t koila__node_n_edges(koila__node node);
koila__edge koila__node_edge(koila__node node, uint32_t i);
bool koila__node_is_leaf(koila__node node);         /* does it accumulate into a leaf? */
const void *koila__node_variable(koila__node leaf); /* the TensorImpl of that leaf */
/* The Python object of the node of a torch.autograd.Function, borrowed; NULL: of any other. */
PyObject *koila__node_function(koila__node node);
/* Words of the memory that it lies in, at least those of the object. Nodes whose owners share them
 * (torch before 2.13) know their own address and where they are counted; std::make_shared counts
 * right before the node, in the same block of malloc's. */
uint32_t koila__node_n_words(koila__node node);
/* New list of the tensors of the leaves. NULL + error */
PyObject *koila__leaves_of(const koila__nodes *nodes);

/* Adds learn_nodes() and leaves_behind() to the module. */
int koila__autograd_nodes_add(PyObject *m);

#endif
