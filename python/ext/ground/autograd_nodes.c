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

static size_t slot_of(const koila__nodes *s, koila__node node)
{
    size_t i = (size_t)(((uintptr_t)node >> 4) * 0x9e3779b97f4a7c15u >> 20) & (s->n_slots - 1);
    while (s->slot[i] && s->at[s->slot[i] - 1] != node)
        i = (i + 1) & (s->n_slots - 1);
    return i;
}

uint32_t koila__nodes_place(const koila__nodes *s, koila__node node)
{
    const uint32_t found = s->n_slots ? s->slot[slot_of(s, node)] : 0;
    return found ? found - 1 : UINT32_MAX;
}

static bool grow(koila__nodes *s)
{
    const uint32_t n_slots = s->n_slots ? s->n_slots * 2 : 64;
    koila__node *at = PyMem_Realloc(s->at, n_slots / 2 * sizeof *at);
    if (!at)
        return false;
    s->at = at;
    uint32_t *slot = PyMem_Calloc(n_slots, sizeof *slot);
    if (!slot)
        return false;
    PyMem_Free(s->slot);
    s->slot = slot;
    s->n_slots = n_slots;
    for (uint32_t i = 0; i < s->n; i++)
        s->slot[slot_of(s, s->at[i])] = i + 1;
    return true;
}

/* 1: added; 0: it was there; -1: no memory. */
static int add(koila__nodes *s, koila__node node)
{
    if (s->n + 1 > s->n_slots / 2 && !grow(s))
        return -1;
    const size_t i = slot_of(s, node);
    if (s->slot[i])
        return 0;
    s->at[s->n++] = node;
    s->slot[i] = s->n;
    return 1;
}

void koila__nodes_free(koila__nodes *s)
{
    PyMem_Free(s->at);
    PyMem_Free(s->slot);
    *s = (koila__nodes){ 0 };
}

typedef struct stack {
    koila__node *at;
    size_t n, n_alloc;
} stack;

static bool push(stack *s, koila__node node)
{
    if (s->n == s->n_alloc) {
        const size_t n = s->n_alloc ? s->n_alloc * 2 : 32;
        koila__node *more = PyMem_Realloc(s->at, n * sizeof *more);
        if (!more)
            return false;
        s->at = more;
        s->n_alloc = n;
    }
    s->at[s->n++] = node;
    return true;
}

bool koila__node_is_leaf(koila__node node)
{
    return node[0] == layout.leaf && koila__node_n_edges(node) == 0;
}

uint32_t koila__node_n_edges(koila__node node)
{
    const size_t n_bytes =
        (size_t)((const char *)node[layout.edges_at + 1] - (const char *)node[layout.edges_at]);
    return (uint32_t)(n_bytes / sizeof(void *) / layout.edge_words);
}

koila__edge koila__node_edge(koila__node node, uint32_t i)
{
    const koila__node edge = (koila__node)node[layout.edges_at] + (size_t)i * layout.edge_words;
    /* the node, where shared pointers own it their count, and in the low half of the last word
     * which of its results */
    return (koila__edge){ edge[0], (uint32_t)(uintptr_t)edge[layout.edge_words - 1] };
}

const void *koila__node_variable(koila__node leaf) { return leaf[layout.variable_at]; }

/* Pushes the nodes behind `node`, the last one first. *odd: the layout does not explain it. -1: no
 * memory. */
static int visit(stack *s, const koila__nodes *seen, koila__node node, bool *odd)
{
    const uint32_t n_edges = koila__node_n_edges(node);
    /* a node that ends here and is neither: its class may be known under another address */
    *odd |= !n_edges && node[0] != layout.leaf && node[0] != layout.custom;
    for (uint32_t i = n_edges; i-- > 0;) {
        koila__node up = koila__node_edge(node, i).node;
        if (up && koila__nodes_place(seen, up) == UINT32_MAX && !push(s, up))
            return -1;
    }
    return 0;
}

koila__node koila__node_of(PyObject *o)
{
    if (!layout.known)
        return NULL;
    const bool custom = PyObject_TypeCheck(o, (PyTypeObject *)function_class);
    const uint32_t at = custom ? layout.custom_at : NODE_AT;
    koila__node node = ((void *const *)o)[at];
    return node && (node[0] == layout.custom) == custom ? node : NULL;
}

int koila__nodes_behind(PyObject *const *roots, Py_ssize_t n, koila__nodes *out)
{
    stack s = { 0 };
    bool odd = !layout.known;
    int rc = 0;
    for (Py_ssize_t i = 0; i < n && rc == 0 && !odd; i++) {
        koila__node node = koila__node_of(roots[i]);
        odd |= !node;
        rc = !node || push(&s, node) ? 0 : -1;
    }
    while (s.n && rc >= 0 && !odd) {
        koila__node node = s.at[--s.n];
        rc = add(out, node);
        if (rc > 0)
            rc = visit(&s, out, node, &odd);
    }
    PyMem_Free(s.at);
    if (rc < 0)
        PyErr_NoMemory();
    return rc < 0 ? -1 : !odd;
}

PyObject *koila__node_function(koila__node node)
{
    return node[0] == layout.custom ? (PyObject *)node[layout.object_at] : NULL;
}

/* Is it the node of a reentrant checkpoint, whose backward runs a backward of its own? */
static bool is_checkpoint(koila__node node)
{
    PyObject *object = koila__node_function(node);
    const char *name = object ? Py_TYPE(object)->tp_name : "";
    const char *dot = strrchr(name, '.');
    return strcmp(dot ? dot + 1 : name, "CheckpointFunctionBackward") == 0;
}

PyObject *koila__leaves_of(const koila__nodes *nodes)
{
    PyObject *found = PyList_New(0);
    for (uint32_t i = 0; i < nodes->n && found; i++) {
        koila__node node = nodes->at[i];
        if (!koila__node_is_leaf(node))
            continue;
        PyObject *leaf = koila__shim.wrap((tensor_handle)&node[layout.variable_at],
                                          (PyTypeObject *)tensor_class);
        if (!leaf || PyList_Append(found, leaf) < 0)
            Py_CLEAR(found);
        Py_XDECREF(leaf);
    }
    return found;
}

/* leaves_behind([node, ...]) → ([leaf, ...], does a node run a backward of its own?), or None: the
 * nodes' layout is not known */
static PyObject *py_leaves_behind(PyObject *module, PyObject *roots)
{
    if (!PyList_Check(roots)) {
        PyErr_SetString(PyExc_TypeError, "leaves_behind([node, ...])");
        return NULL;
    }
    koila__nodes nodes = { 0 };
    PyObject *const *root = PySequence_Fast_ITEMS(roots);
    const int known = koila__nodes_behind(root, PyList_GET_SIZE(roots), &nodes);
    bool reentrant = false;
    for (uint32_t i = 0; i < nodes.n; i++)
        reentrant |= is_checkpoint(nodes.at[i]);
    PyObject *leaves = known > 0 ? koila__leaves_of(&nodes) : NULL;
    koila__nodes_free(&nodes);
    if (known == 0)
        Py_RETURN_NONE;
    return leaves ? Py_BuildValue("NN", leaves, PyBool_FromLong(reentrant)) : NULL;
}

/* ---- learning the layout */

enum { NOT_FOUND = 0 }; /* word 0 of a node is its class */

uint32_t koila__node_n_words(koila__node node)
{
    enum { OWN_ADDRESS = 1, COUNT = 2, COUNT_WORDS = 2 };
    koila__node block = node;
    if (node[OWN_ADDRESS] == (const void *)node &&
        node[COUNT] == (const void *)(node - COUNT_WORDS))
        block = node - COUNT_WORDS;
    const size_t n_words = malloc_usable_size((void *)block) / sizeof(void *);
    return (uint32_t)(n_words - (size_t)(node - block));
}

/* The one word of `node` that is `what`. */
static uint32_t find_word(koila__node node, const void *what)
{
    uint32_t found = NOT_FOUND;
    for (uint32_t i = 1; i < koila__node_n_words(node); i++) {
        if (node[i] != what)
            continue;
        if (found != NOT_FOUND)
            return NOT_FOUND;
        found = i;
    }
    return found;
}

/* Where do the edges of `node` begin, if they lead to `a` and `b`? */
static uint32_t find_edges(koila__node node, koila__node a, koila__node b, uint32_t *edge_words)
{
    enum { FEWEST_WORDS = 2, MOST_WORDS = 4 };
    for (uint32_t i = 1; i + 2 < koila__node_n_words(node); i++) {
        const uintptr_t begin = (uintptr_t)node[i];
        const uintptr_t end = (uintptr_t)node[i + 1];
        const uintptr_t n_bytes = end - begin;
        const uintptr_t edge = n_bytes / 2;
        if (!begin || begin % sizeof(void *) || end < begin || (uintptr_t)node[i + 2] < end ||
            edge < FEWEST_WORDS * sizeof(void *) || edge > MOST_WORDS * sizeof(void *) ||
            n_bytes % (2 * sizeof(void *)))
            continue;
        koila__node edges = (koila__node)begin;
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
    koila__node leaf = ((void *const *)a)[NODE_AT];
    koila__node other = ((void *const *)b)[NODE_AT];
    l.edges_at = find_edges(((void *const *)product)[NODE_AT], leaf, other, &l.edge_words);
    if (l.edges_at == NOT_FOUND)
        Py_RETURN_FALSE;
    l.leaf = leaf[0];
    l.variable_at = find_word(leaf, *(void **)koila__tensor_handle(tensor));
    koila__node sum_node = ((void *const *)sum)[NODE_AT];
    koila__node function = *(const void *const *)sum_node[l.edges_at];
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
