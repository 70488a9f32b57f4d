/* autograd_nodes.c — see autograd_nodes.h.
 *
 * A node of torch is a C++ object: the address of its class's functions first, and somewhere in it
 * the list of its edges. Where, is learnt from a few nodes of a graph whose edges Python has told
 * (learn_nodes). Where anything is not found, or found twice, nothing is known, and Python walks.
 */
#include "ground/autograd_nodes.h"

#include <malloc.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/base.h"
#include "ground/real.h"

typedef const void *const *node_ptr; /* a torch::autograd::Node, as words */

static struct layout {
    bool known;
    uint32_t edges_at;    /* word of a node: where its edges begin; the next: where they end */
    uint32_t edge_words;  /* words of one edge, of which the first is the node */
    const void *leaf;     /* first word of the nodes that accumulate into a leaf */
    uint32_t variable_at; /* word of those: the leaf */
    const void *custom;   /* first word of the nodes of torch.autograd.Function */
    uint32_t object_at;   /* word of those: their Python object */
    uint32_t custom_at;   /* word of such an object: its node */
} layout;
/* word of any other node's Python object: the node */
enum { NODE_AT = sizeof(PyObject) / sizeof(void *) };
static PyObject *tensor_class, *function_class; /* torch.Tensor, torch._C._FunctionBase */

/* ---- the walk */

/* nodes that were seen: open addressing, n_slots is a power of two */
typedef struct node_set {
    node_ptr *slot;
    size_t n, n_slots;
} node_set;

static size_t slot_of(const node_set *s, node_ptr node)
{
    size_t i = (size_t)(((uintptr_t)node >> 4) * 0x9e3779b97f4a7c15u >> 20) & (s->n_slots - 1);
    while (s->slot[i] && s->slot[i] != node)
        i = (i + 1) & (s->n_slots - 1);
    return i;
}

static bool has(const node_set *s, node_ptr node)
{
    return s->n_slots && s->slot[slot_of(s, node)] == node;
}

/* 1: added; 0: it was there; -1: no memory. */
static int add(node_set *s, node_ptr node)
{
    if ((s->n + 1) * 2 > s->n_slots) {
        const size_t n_slots = s->n_slots ? s->n_slots * 2 : 256;
        node_set more = { PyMem_Calloc(n_slots, sizeof(node_ptr)), s->n, n_slots };
        if (!more.slot)
            return -1;
        for (size_t i = 0; i < s->n_slots; i++)
            if (s->slot[i])
                more.slot[slot_of(&more, s->slot[i])] = s->slot[i];
        PyMem_Free(s->slot);
        *s = more;
    }
    const size_t i = slot_of(s, node);
    if (s->slot[i])
        return 0;
    s->slot[i] = node;
    s->n++;
    return 1;
}

typedef struct walk {
    node_set seen;
    node_ptr *stack;
    size_t n_stack, n_alloc;
    PyObject *found; /* list of the leaves */
    bool reentrant;
    bool odd; /* a node that the layout does not explain */
} walk;

static int push(walk *w, node_ptr node)
{
    if (w->n_stack == w->n_alloc) {
        const size_t n = w->n_alloc ? w->n_alloc * 2 : 256;
        node_ptr *more = PyMem_Realloc(w->stack, n * sizeof(node_ptr));
        if (!more)
            return -1;
        w->stack = more;
        w->n_alloc = n;
    }
    w->stack[w->n_stack++] = node;
    return 0;
}

/* The class of a reentrant checkpoint, whose backward runs a backward of its own. */
static bool is_checkpoint(const void *object)
{
    const char *name = object ? Py_TYPE(object)->tp_name : "";
    const char *dot = strrchr(name, '.');
    return strcmp(dot ? dot + 1 : name, "CheckpointFunctionBackward") == 0;
}

/* -1 without an exception: no memory; or with one. */
static int visit(walk *w, node_ptr node)
{
    const char *begin = node[layout.edges_at];
    const char *end = node[layout.edges_at + 1];
    const size_t n_bytes = layout.edge_words * sizeof(void *);
    if (node[0] == layout.leaf && begin == end) {
        PyObject *leaf = koila__shim.wrap((tensor_handle)&node[layout.variable_at],
                                          (PyTypeObject *)tensor_class);
        const int rc = leaf ? PyList_Append(w->found, leaf) : -1;
        Py_XDECREF(leaf);
        return rc;
    }
    const bool is_custom = node[0] == layout.custom;
    /* a node that ends here and is neither: its class may be known under another address */
    w->odd |= begin == end && !is_custom;
    if (is_custom)
        w->reentrant |= is_checkpoint(node[layout.object_at]);
    while (end > begin) {
        end -= n_bytes;
        node_ptr up = *(const void *const *)end;
        if (up && !has(&w->seen, up) && push(w, up) < 0)
            return -1;
    }
    return 0;
}

/* The node of Python object `o`; NULL: not known. */
static node_ptr node_of(PyObject *o)
{
    const bool custom = PyObject_TypeCheck(o, (PyTypeObject *)function_class);
    const uint32_t at = custom ? layout.custom_at : NODE_AT;
    node_ptr node = ((void *const *)o)[at];
    return node && (node[0] == layout.custom) == custom ? node : NULL;
}

/* Walks from the nodes of the list `roots`, the last one first. -1 with an exception. */
static int walk_from(walk *w, PyObject *roots)
{
    int rc = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots) && rc == 0; i++) {
        node_ptr node = node_of(PyList_GET_ITEM(roots, i));
        w->odd |= !node;
        rc = node ? push(w, node) : 0;
    }
    while (w->n_stack && rc >= 0 && !w->odd) {
        node_ptr node = w->stack[--w->n_stack];
        rc = add(&w->seen, node);
        if (rc > 0)
            rc = visit(w, node);
    }
    if (rc < 0 && !PyErr_Occurred())
        PyErr_NoMemory();
    return rc < 0 ? -1 : 0;
}

/* leaves_behind([node, ...]) → ([leaf, ...], does a node run a backward of its own?), or None: the
 * nodes' layout is not known */
static PyObject *py_leaves_behind(PyObject *module, PyObject *roots)
{
    if (!PyList_Check(roots)) {
        PyErr_SetString(PyExc_TypeError, "leaves_behind([node, ...])");
        return NULL;
    }
    if (!layout.known)
        Py_RETURN_NONE;
    walk w = { .found = PyList_New(0) };
    PyObject *r = NULL;
    if (!w.found || walk_from(&w, roots) < 0)
        r = NULL;
    else if (w.odd)
        r = Py_NewRef(Py_None);
    else
        r = Py_BuildValue("OO", w.found, w.reentrant ? Py_True : Py_False);
    Py_XDECREF(w.found);
    PyMem_Free(w.seen.slot);
    PyMem_Free(w.stack);
    return r;
}

/* ---- learning the layout */

enum { NOT_FOUND = 0 }; /* word 0 of a node is its class */

static uint32_t words_in(const void *block)
{
    return (uint32_t)(malloc_usable_size((void *)block) / sizeof(void *));
}

/* The one word of `node` that is `what`. */
static uint32_t find_word(node_ptr node, const void *what)
{
    uint32_t found = NOT_FOUND;
    for (uint32_t i = 1; i < words_in(node); i++) {
        if (node[i] != what)
            continue;
        if (found != NOT_FOUND)
            return NOT_FOUND;
        found = i;
    }
    return found;
}

/* Where do the edges of `node` begin, if they lead to `a` and `b`? */
static uint32_t find_edges(node_ptr node, node_ptr a, node_ptr b, uint32_t *edge_words)
{
    enum { FEWEST_WORDS = 2, MOST_WORDS = 4 };
    for (uint32_t i = 1; i + 2 < words_in(node); i++) {
        const uintptr_t begin = (uintptr_t)node[i];
        const uintptr_t end = (uintptr_t)node[i + 1];
        const uintptr_t n_bytes = end - begin;
        const uintptr_t edge = n_bytes / 2;
        if (!begin || begin % sizeof(void *) || end < begin || (uintptr_t)node[i + 2] < end ||
            edge < FEWEST_WORDS * sizeof(void *) || edge > MOST_WORDS * sizeof(void *) ||
            n_bytes % (2 * sizeof(void *)))
            continue;
        node_ptr edges = (node_ptr)begin;
        *edge_words = (uint32_t)(edge / sizeof(void *));
        if (edges[0] == (const void *)a && edges[*edge_words] == (const void *)b)
            return i;
    }
    return NOT_FOUND;
}

/* learn_nodes(leaf a, its node, node of b, node of a * b, object of a Function's node, node of (its
 * result + a)) → is the layout known? */
static PyObject *py_learn_nodes(PyObject *module, PyObject *args)
{
    PyObject *tensor, *a, *b, *product, *custom, *sum;
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &tensor_class, &function_class, &tensor, &a, &b,
                          &product, &custom, &sum))
        return NULL;
    Py_INCREF(tensor_class);
    Py_INCREF(function_class);
    struct layout l = { 0 };
    if (!koila__shim.wrap || !koila__cdata || !koila__is_tensor(tensor))
        Py_RETURN_FALSE;
    node_ptr leaf = ((void *const *)a)[NODE_AT];
    node_ptr other = ((void *const *)b)[NODE_AT];
    l.edges_at = find_edges(((void *const *)product)[NODE_AT], leaf, other, &l.edge_words);
    if (l.edges_at == NOT_FOUND)
        Py_RETURN_FALSE;
    l.leaf = leaf[0];
    l.variable_at = find_word(leaf, *(void **)koila__tensor_handle(tensor));
    node_ptr sum_node = ((void *const *)sum)[NODE_AT];
    node_ptr function = *(const void *const *)sum_node[l.edges_at];
    l.custom = function[0];
    l.object_at = find_word(function, custom);
    const uint32_t n_words = (uint32_t)((size_t)Py_TYPE(custom)->tp_basicsize / sizeof(void *));
    for (uint32_t i = NODE_AT; i < n_words && l.custom_at == NOT_FOUND; i++)
        if (((void *const *)custom)[i] == (void *)function)
            l.custom_at = i;
    l.known = l.variable_at != NOT_FOUND && l.object_at != NOT_FOUND && l.custom_at != NOT_FOUND &&
              l.leaf != l.custom;
    layout = l;
    return PyBool_FromLong(l.known);
}

static PyMethodDef methods[] = {
    { "learn_nodes", py_learn_nodes, METH_VARARGS,
      "learn_nodes(Tensor, _FunctionBase, leaf a, node of a, node of leaf b, node of a * b, node "
      "of a Function, node of its result + a) -> can backward graphs be walked?" },
    { "leaves_behind", py_leaves_behind, METH_O,
      "leaves_behind([node, ...]) -> ([leaf, ...], is a checkpoint reentrant), or None" },
    { 0 },
};

int koila__autograd_nodes_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
