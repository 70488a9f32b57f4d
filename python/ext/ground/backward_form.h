/* backward_form.h — the form of a backward graph: what torch's engine would do with it.
 *
 * Two graphs of one form, behind values that were computed by the same calls from the same leaves,
 * call the same operators in the same order.
 */
#ifndef KOILA_EXT_BACKWARD_FORM_H
#define KOILA_EXT_BACKWARD_FORM_H

#include "ground/autograd_nodes.h"

typedef struct koila__form {
    uint64_t *word; /* [n_words] owned; forms are equal when these are */
    uint32_t n_words, n_alloc;
    uint32_t n_functions; /* nodes of the torch.autograd.Function of learn_function() */
} koila__form;

/* The form of the graph of `nodes` into *out, which is empty and to be freed in any case. `leaves`:
 * the tensors of its leaves, all of them, in the order of the nodes. 1; 0: somebody else takes part
 * in it (another torch.autograd.Function than ours, a hook, a class that is not torch's own), so
 * that its form does not say what it does, or other leaves are meant; -1 with an exception. */
int koila__form_of(const koila__nodes *nodes, PyObject *leaves, koila__form *out);
bool koila__form_has_hooks(koila__node node); /* of its own; forms are known */
/* Is the node (its Python object) the transpose of a leaf of two dimensions or fewer? */
bool koila__form_is_transpose(PyObject *node);
bool koila__form_equal(const koila__form *a, const koila__form *b);
void koila__form_free(koila__form *f);
/* The graph has been gone through: torch lets go of what its nodes saved, and refuses to go through
 * it again. */
void koila__form_release(const koila__nodes *nodes);
bool koila__forms_known(void); /* false: this torch's nodes are not understood: none has a form */
/* Adds learn_forms() and learn_function() to the module. */
int koila__backward_form_add(PyObject *m);

#endif
