/* backward_form.c — see backward_form.h.
 *
 * The form lists the nodes in the order of a walk. Of each: its class; the number that torch gave
 * it, counted from the first (nodes are numbered as they are made, so the k-th call of a forward
 * pass made the node that the k-th call of another one did); where its edges lead. What a node has
 * saved is not looked at: the calls and their arguments decide it, and whoever compares forms
 * compares those. Of a torch.autograd.Function that is koila's own (learn_function), the function
 * tells what the calls do not decide.
 *
 * Where a node keeps its number and its hooks, and which of its functions lets go of what it saved,
 * is learnt from a few nodes (learn_forms).
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include "ground/backward_form.h"

#include <dlfcn.h>
#include <string.h>

#include "ground/real.h"

enum { N_HOOK_WORDS = 4, NOT_FOUND = 0 };
static struct {
    bool known;
    uint32_t number_at;              /* word of a node: its number */
    uint32_t hooks_at[N_HOOK_WORDS]; /* words of a node that are 0 while it has no hook */
    uint32_t release_at;             /* word of a class: the function that lets go */
} layout;

bool koila__forms_known(void) { return layout.known; }

/* koila's own torch.autograd.Function: the class of its nodes' Python objects, and what tells of
 * such an object the number that decides its backward, beside the calls. Owned; NULL: none. */
static PyObject *own_class, *own_number;

/* ---- classes */

typedef enum class_kind { FOREIGN, TORCHS, TRANSPOSE } class_kind;

/* TORCHS: made from torch's table of derivatives, or one that copies. What such a node does is
 * decided by the call that made it. */
static class_kind look_up(const void *class)
{
    static const struct {
        const char *begin;
        class_kind kind;
    } names[] = { { "_ZTVN5torch8autograd9generated10TBackward0E", TRANSPOSE },
                  { "_ZTVN5torch8autograd9generated", TORCHS },
                  { "_ZTVN5torch8autograd10CopySlicesE", TORCHS },
                  { "_ZTVN5torch8autograd13CopyBackwardsE", TORCHS } };
    Dl_info info;
    if (!dladdr(class, &info) || !info.dli_sname)
        return FOREIGN;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(info.dli_sname, names[i].begin, strlen(names[i].begin)) == 0)
            return names[i].kind;
    return FOREIGN;
}

/* The kind of a node's class, remembered: a process meets few. */
static class_kind kind_of(koila__node node)
{
    enum { N_SLOTS = 512 };
    static struct {
        const void *class;
        class_kind kind;
    } known[N_SLOTS];
    const void *class = node[0];
    const size_t i = ((uintptr_t)class >> 3) % N_SLOTS;
    if (known[i].class != class) {
        known[i].class = class;
        known[i].kind = look_up(class);
    }
    return known[i].kind;
}

bool koila__form_is_transpose(PyObject *object)
{
    koila__node node = koila__node_of(object);
    if (!layout.known || !node || kind_of(node) != TRANSPOSE || koila__node_n_edges(node) != 1)
        return false;
    koila__node of = koila__node_edge(node, 0).node;
    return of && koila__node_is_leaf(of);
}

/* ---- the form */

static bool push(koila__form *f, uint64_t word)
{
    if (f->n_words == f->n_alloc) {
        const uint32_t n = f->n_alloc ? f->n_alloc * 2 : 256;
        uint64_t *more = PyMem_Realloc(f->word, n * sizeof *more);
        if (!more) {
            PyErr_NoMemory();
            return false;
        }
        f->word = more;
        f->n_alloc = n;
    }
    f->word[f->n_words++] = word;
    return true;
}

static uint64_t number_of(koila__node node) { return (uint64_t)(uintptr_t)node[layout.number_at]; }

bool koila__form_has_hooks(koila__node node)
{
    for (uint32_t i = 0; i < N_HOOK_WORDS; i++)
        if (node[layout.hooks_at[i]])
            return true;
    return false;
}

static bool is_own_function(koila__node node)
{
    PyObject *object = koila__node_function(node);
    return object && (PyObject *)Py_TYPE(object) == own_class;
}

/* What decides the backward of such a node. 1; 0: it does not tell; -1 with an exception. */
static int push_function(koila__form *f, koila__node node)
{
    PyObject *told = PyObject_CallOneArg(own_number, koila__node_function(node));
    const bool tells = told && told != Py_None;
    const uint64_t number = tells ? PyLong_AsUnsignedLongLong(told) : 0;
    Py_XDECREF(told);
    if (PyErr_Occurred() || (tells && !push(f, number)))
        return -1;
    f->n_functions += tells;
    return tells;
}

static bool push_node(koila__form *f, const koila__nodes *nodes, koila__node node, uint64_t first)
{
    const uint32_t n_edges = koila__node_n_edges(node);
    bool ok = push(f, (uintptr_t)node[0]) && push(f, number_of(node) - first) && push(f, n_edges);
    for (uint32_t i = 0; i < n_edges && ok; i++) {
        const koila__edge e = koila__node_edge(node, i);
        const uint64_t to = e.node ? koila__nodes_place(nodes, e.node) : UINT32_MAX;
        ok = push(f, to << 32 | e.result);
    }
    return ok;
}

int koila__form_of(const koila__nodes *nodes, PyObject *leaves, koila__form *out)
{
    Py_ssize_t n_leaves = 0;
    uint64_t first = UINT64_MAX; /* the least number */
    if (!layout.known || !PyList_Check(leaves))
        return 0;
    for (uint32_t i = 0; i < nodes->n; i++) {
        koila__node node = nodes->at[i];
        if (koila__node_is_leaf(node)) {
            if (n_leaves == PyList_GET_SIZE(leaves) ||
                *(void **)koila__tensor_handle(PyList_GET_ITEM(leaves, n_leaves)) !=
                    koila__node_variable(node))
                return 0;
            n_leaves++;
            continue;
        }
        const bool own = is_own_function(node);
        if ((!own && kind_of(node) == FOREIGN) || koila__form_has_hooks(node))
            return 0;
        const int told = own ? push_function(out, node) : 1;
        if (told <= 0)
            return told;
        if (number_of(node) < first)
            first = number_of(node);
    }
    if (n_leaves != PyList_GET_SIZE(leaves))
        return 0;
    for (uint32_t i = 0; i < nodes->n; i++) {
        koila__node node = nodes->at[i];
        const bool ok =
            koila__node_is_leaf(node) ? push(out, 0) : push_node(out, nodes, node, first);
        if (!ok)
            return -1;
    }
    return 1;
}

bool koila__form_equal(const koila__form *a, const koila__form *b)
{
    return a->n_words == b->n_words && a->n_functions == b->n_functions &&
           (!a->n_words || memcmp(a->word, b->word, a->n_words * sizeof *a->word) == 0);
}

void koila__form_free(koila__form *f)
{
    PyMem_Free(f->word);
    *f = (koila__form){ 0 };
}

typedef void release_fn(const void *const *node);

static release_fn *release_of(koila__node node)
{
    return *(release_fn *const *)((const char *)node[0] + layout.release_at * sizeof(void *));
}

void koila__form_release(const koila__nodes *nodes)
{
    for (uint32_t i = 0; i < nodes->n; i++)
        if (!koila__node_is_leaf(nodes->at[i]))
            release_of(nodes->at[i])(nodes->at[i]);
}

/* ---- learning */

/* The one word that holds the number of each of nodes[n], which `numbers` tells. */
static uint32_t find_number(PyObject *nodes, PyObject *numbers)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(nodes);
    uint32_t found = NOT_FOUND;
    for (uint32_t w = 1; w < koila__node_n_words(koila__node_of(PyTuple_GET_ITEM(nodes, 0))); w++) {
        bool all = true;
        for (Py_ssize_t i = 0; i < n && all; i++) {
            koila__node node = koila__node_of(PyTuple_GET_ITEM(nodes, i));
            const uint64_t number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(numbers, i));
            all = w < koila__node_n_words(node) && (uint64_t)(uintptr_t)node[w] == number;
        }
        if (all && found != NOT_FOUND)
            return NOT_FOUND;
        if (all)
            found = w;
    }
    return found;
}

/* The first word that is 0 in each node without hooks and not in `hooked`. */
static uint32_t find_hook(PyObject *plain, koila__node hooked)
{
    for (uint32_t w = 1; w < koila__node_n_words(hooked); w++) {
        bool all = hooked[w] != NULL;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain) && all; i++) {
            koila__node node = koila__node_of(PyTuple_GET_ITEM(plain, i));
            all = w < koila__node_n_words(node) && !node[w];
        }
        if (all)
            return w;
    }
    return NOT_FOUND;
}

/* The word of class CopySlices, whose functions have names outside of their library, that is its
 * release_variables(). All classes of nodes have it in the same place. */
static uint32_t find_release(koila__node copy_slices)
{
    static const char name[] = "_ZN5torch8autograd10CopySlices17release_variablesEv";
    enum { N_FUNCTIONS = 16 };
    const void *const *class = (const void *const *)copy_slices[0];
    for (uint32_t w = 1; w < N_FUNCTIONS; w++) {
        Dl_info info;
        if (dladdr(class[w], &info) && info.dli_sname && info.dli_saddr == class[w] &&
            strcmp(info.dli_sname, name) == 0)
            return w;
    }
    return NOT_FOUND;
}

/* learn_forms(nodes without hooks, their numbers, nodes with a hook each of another kind, node of
 * class CopySlices, one more node) → are they understood? What the last node saved is let go. */
static PyObject *py_learn_forms(PyObject *module, PyObject *args)
{
    PyObject *plain, *numbers, *hooked, *copy_slices, *spent;
    layout.known = false;
    if (!PyArg_ParseTuple(args, "O!O!O!OO", &PyTuple_Type, &plain, &PyTuple_Type, &numbers,
                          &PyTuple_Type, &hooked, &copy_slices, &spent))
        return NULL;
    koila__node node = koila__node_of(spent), slices = koila__node_of(copy_slices);
    if (!node || !slices || PyTuple_GET_SIZE(hooked) != N_HOOK_WORDS)
        Py_RETURN_FALSE;
    bool known = true;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain); i++)
        known &= koila__node_of(PyTuple_GET_ITEM(plain, i)) != NULL;
    for (Py_ssize_t i = 0; i < N_HOOK_WORDS && known; i++) {
        koila__node with = koila__node_of(PyTuple_GET_ITEM(hooked, i));
        layout.hooks_at[i] = with ? find_hook(plain, with) : NOT_FOUND;
        known = layout.hooks_at[i] != NOT_FOUND;
    }
    layout.number_at = known ? find_number(plain, numbers) : NOT_FOUND;
    layout.release_at = find_release(slices);
    known &= layout.number_at != NOT_FOUND && layout.release_at != NOT_FOUND && !PyErr_Occurred();
    known = known && kind_of(node) == TORCHS && kind_of(slices) == TORCHS;
    if (known)
        release_of(node)(node);
    layout.known = known;
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(known);
}

/* learn_function(class, function): see own_class. function(node's object) → a number, or None: its
 * backward must be recorded. */
static PyObject *py_learn_function(PyObject *module, PyObject *args)
{
    PyObject *class, *number;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &class, &number))
        return NULL;
    Py_XSETREF(own_class, Py_NewRef(class));
    Py_XSETREF(own_number, Py_NewRef(number));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "learn_forms", py_learn_forms, METH_VARARGS,
      "learn_forms(nodes, their numbers, nodes with a hook each, a CopySlices, one more node) -> "
      "are they understood? The last one is spent then" },
    { "learn_function", py_learn_function, METH_VARARGS,
      "learn_function(class of a Function's nodes, function): function(node) -> the number that "
      "decides its backward, beside the recorded calls; None: it must be recorded" },
    { 0 },
};

int koila__backward_form_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
