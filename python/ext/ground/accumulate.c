/* accumulate.c — see accumulate.h.
 *
 * What torch's engine does with the gradient of a leaf is decided by its node for that leaf
 * (AccumulateGrad, torch/csrc/autograd/functions/accumulate_grad.h). Where the leaf has no gradient
 * yet, and the new one has the leaf's strides and nobody else owns it, the node makes it the
 * leaf's `.grad` as it is. Where nobody watches either, that is all, and setting `.grad` does the
 * same for an eighth of what a run of the engine costs. In any other case the engine is asked.
 *
 * All leaves are looked at before the first one is set.
 */
#include "ground/accumulate.h"

#include "ground/backward_form.h"
#include "ground/helpers.h"
#include "ground/real.h"

static PyTypeObject *parameter_class; /* torch.nn.Parameter; owned */
static PyObject *use_count;           /* TensorBase._use_count; owned */
static getter get_grad;
static setter set_grad;
static void *grad_closure;
static bool is_known;

static bool has_hooks(PyObject *leaf)
{
    const void *const *hooks = koila__shim.hooks(koila__tensor_handle(leaf));
    return hooks[0] != hooks[1] || *koila__shim.later_hooks(koila__tensor_handle(leaf));
}

bool koila__leaf_has_hooks(PyObject *leaf) { return !is_known || has_hooks(leaf); }

/* Has the leaf no gradient yet? */
static bool is_empty(PyObject *leaf)
{
    PyObject *grad = get_grad(leaf, grad_closure);
    Py_XDECREF(grad);
    return grad == Py_None;
}

/* Does only the list own `gradient`? */
static bool is_alone(PyObject *gradient)
{
    PyObject *n = Py_REFCNT(gradient) == 1 ? PyObject_CallOneArg(use_count, gradient) : NULL;
    const bool alone = n && PyLong_AsLong(n) == 1;
    Py_XDECREF(n);
    return alone;
}

/* Has a gradient of meta b the strides that the node wants of a leaf's of meta a? It takes one with
 * a stride of 0 for a view. */
static bool lies_as_leaf(koila_meta a, koila_meta b)
{
    const koila_meta_info *m = koila_meta_get(koila__table, b);
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (m->size[d] == 1 && !m->stride[d])
            return false;
    return koila__lie_alike(a, b) && koila_meta_is_dense(m);
}

/* Would the engine take `gradient` for `leaf` as it is, and do nothing else? May leave an
 * exception: no. */
static bool is_taken(PyObject *leaf, PyObject *gradient)
{
    PyTypeObject *plain = parameter_class->tp_base;
    koila_meta a, b;
    if ((!Py_IS_TYPE(leaf, plain) && !Py_IS_TYPE(leaf, parameter_class)) ||
        !Py_IS_TYPE(gradient, plain) || !koila__requires_grad(leaf) ||
        koila__requires_grad(gradient) || has_hooks(leaf) || !is_empty(leaf))
        return false;
    return koila__meta_of(leaf, &a) == 0 && koila__meta_of(gradient, &b) == 0 &&
           lies_as_leaf(a, b) && is_alone(gradient);
}

/* Are all leaves among these nodes, which nobody watches? */
static bool are_ends(const koila__nodes *nodes, PyObject *leaves)
{
    const Py_ssize_t n = PyList_GET_SIZE(leaves);
    Py_ssize_t n_found = 0;
    for (uint32_t i = 0; i < nodes->n; i++) {
        koila__node node = nodes->at[i];
        if (!koila__node_is_leaf(node))
            continue;
        bool found = false;
        for (Py_ssize_t k = 0; k < n && !found; k++) {
            /* most often in the same order */
            PyObject *leaf = PyList_GET_ITEM(leaves, (n_found + k) % n);
            found = *(void **)koila__tensor_handle(leaf) == koila__node_variable(node);
        }
        if (found && koila__form_has_hooks(node))
            return false;
        n_found += found;
    }
    return n_found == n;
}

/* The same of the graph behind `outputs`. -1 with an exception. */
static int are_ends_behind(PyObject *outputs, PyObject *leaves)
{
    koila__nodes nodes = { 0 };
    const Py_ssize_t n = PyTuple_GET_SIZE(outputs);
    PyObject *roots = PyTuple_New(n);
    int rc = roots ? 1 : -1;
    for (Py_ssize_t i = 0; i < n && rc > 0; i++) {
        PyObject *node = koila__is_tensor(PyTuple_GET_ITEM(outputs, i))
                             ? koila__attribute(PyTuple_GET_ITEM(outputs, i), "grad_fn")
                             : Py_NewRef(Py_None);
        rc = node ? node != Py_None : -1;
        if (node)
            PyTuple_SET_ITEM(roots, i, node);
    }
    if (rc > 0)
        rc = koila__nodes_behind(PySequence_Fast_ITEMS(roots), n, &nodes);
    if (rc > 0)
        rc = are_ends(&nodes, leaves);
    koila__nodes_free(&nodes);
    Py_XDECREF(roots);
    return rc;
}

/* Sets all of them, or none. */
static bool set_all(PyObject *leaves, PyObject *gradients)
{
    const Py_ssize_t n = PyList_GET_SIZE(leaves);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (set_grad(PyList_GET_ITEM(leaves, i), PyList_GET_ITEM(gradients, i), grad_closure) == 0)
            continue;
        PyErr_Clear(); /* the engine says it better */
        while (i-- > 0)
            set_grad(PyList_GET_ITEM(leaves, i), Py_None, grad_closure);
        return false;
    }
    return true;
}

/* accumulate((output, ...), [leaf, ...], [gradient, ...]) → did it? */
static PyObject *py_accumulate(PyObject *module, PyObject *args)
{
    PyObject *outputs, *leaves, *gradients;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &outputs, &PyList_Type, &leaves,
                          &PyList_Type, &gradients))
        return NULL;
    const Py_ssize_t n = PyList_GET_SIZE(leaves);
    bool all = is_known && koila__forms_known() && !koila__maybe_inference() && n &&
               PyList_GET_SIZE(gradients) == n;
    for (Py_ssize_t i = 0; i < n && all; i++)
        all = is_taken(PyList_GET_ITEM(leaves, i), PyList_GET_ITEM(gradients, i));
    PyErr_Clear();
    const int ends = all ? are_ends_behind(outputs, leaves) : 0;
    if (ends < 0)
        return NULL;
    return PyBool_FromLong(ends && set_all(leaves, gradients));
}

/* learn_accumulation(torch.nn.Parameter, a leaf, one with a hook, one with a hook for afterwards) →
 * is it known what watches a leaf? */
static PyObject *py_learn(PyObject *module, PyObject *args)
{
    PyObject *class, *leaf, *hooked, *later;
    (void)module;
    is_known = false;
    if (!PyArg_ParseTuple(args, "O!OOO", &PyType_Type, &class, &leaf, &hooked, &later))
        return NULL;
    if (!koila__cdata || !koila__is_tensor(leaf) || !koila__is_tensor(hooked) ||
        !koila__is_tensor(later))
        Py_RETURN_FALSE;
    PyTypeObject *base = Py_TYPE(leaf)->tp_base;
    PyObject *grad = PyDict_GetItemString(base->tp_dict, "grad");
    PyObject *counts = PyDict_GetItemString(base->tp_dict, "_use_count");
    if (!koila__shim.hooks || !koila__shim.later_hooks || !counts || !grad ||
        !Py_IS_TYPE(grad, &PyGetSetDescr_Type))
        Py_RETURN_FALSE;
    const PyGetSetDef *def = ((PyGetSetDescrObject *)grad)->d_getset;
    get_grad = def->get;
    set_grad = def->set;
    grad_closure = def->closure;
    Py_XSETREF(use_count, Py_NewRef(counts));
    Py_XSETREF(parameter_class, (PyTypeObject *)Py_NewRef(class));
    is_known = ((PyTypeObject *)class)->tp_base == Py_TYPE(leaf) && !has_hooks(leaf) &&
               has_hooks(hooked) && has_hooks(later);
    return PyBool_FromLong(is_known);
}

static PyMethodDef methods[] = {
    { "learn_accumulation", py_learn, METH_VARARGS,
      "learn_accumulation(torch.nn.Parameter, a leaf, one with a hook, one with a hook for "
      "afterwards) -> is it known what watches a leaf?" },
    { "accumulate", py_accumulate, METH_VARARGS,
      "accumulate((output, ...), [leaf, ...], [gradient, ...]): sets `.grad` of the leaves, if "
      "that is all that torch's engine would do; else False." },
    { 0 },
};

int koila__accumulate_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
