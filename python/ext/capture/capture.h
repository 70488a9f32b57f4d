/* capture.h — the types behind a lazy tensor, for all of capture. Files that record calls include
 * record.h too.
 *
 *   class LazyTensor(torch.Tensor): __slots__ = ("_v",)
 *         # _v: a Value (koila__handle), made here, never seen by the user
 *
 *   group    one storage: `cur` is the newest value of the whole base, `gen` counts writes;
 *            see Note [Groups] in alias.c
 *   chain    the view calls from the base to a view; links share their prefix
 *   handle   what one wrapper stands for: (group, chain), and its value at `gen`; without a group
 *            the wrapper is a plain tensor, see Note [Settling] in factories.c
 */
#ifndef KOILA_EXT_CAPTURE_H
#define KOILA_EXT_CAPTURE_H

#include "ground/errors.h"
#include "ground/helpers.h"
#include "capture/tape.h"

typedef struct koila__chain {
    uint32_t refs;
    uint32_t n_links;
    struct koila__chain *parent; /* owned; NULL: the base */
    koila_link link;
    koila_meta meta;   /* of the result */
    int64_t offset;    /* of the result in the base's storage, elements */
    uint32_t memo_gen; /* group's gen when `memo` was recorded */
    koila_value memo;
    uint32_t kept; /* the number of the forgetting that has seen it: see bounds.c */
} koila__chain;

typedef struct koila__group {
    uint32_t refs;     /* handles */
    uint32_t n_bases;  /* those of them that are no views */
    uint32_t gen;      /* number of writes and of moves to another tape */
    koila__tape *tape; /* owned */
    koila_value cur;
    koila_meta meta; /* of the base */
    /* made by torch.zeros and its like, or from such tensors alone: may settle, see factories.c */
    bool factory;
    /* `factory` is set, and nothing lazy was written into it yet */
    bool no_lazy_data;
    bool begins_within;   /* the base is a leaf that begins in the middle of its memory */
    bool has_plain_views; /* made when it was concrete; perhaps they are gone */
    /* where the memory begins of the tensor that lazy() was given as the base; 0: another base, or
     * not known */
    uint64_t given_at;
    struct koila__handle *handles; /* list, linked by next_in_group */
    /* those that have a value, the base's and the views read since the last write: a write takes
     * them theirs, and does not walk the others. Linked by next_with_value. */
    struct koila__handle *with_value;
} koila__group;

typedef struct koila__handle {
    PyObject_HEAD
    koila__group *group; /* owned */
    koila__chain *chain; /* owned; NULL: the base itself */
    koila_value value;   /* at `gen`; KOILA_NONE if not read since a write */
    uint32_t gen;
    koila_meta meta;
    int64_t offset;
    /* borrowed: the LazyTensor whose slot holds this. Once settled (group NULL): the plain tensor,
     * owned */
    PyObject *wrapper;
    bool is_unheld;    /* no variable of the user reaches the wrapper: it is not saved for one */
    bool is_inference; /* the wrapper is an inference tensor, and so are its views */
    bool is_data;      /* x.data, or a view of it: a write counts no version of x */
    struct koila__handle *next_in_tape, *prev_in_tape;
    struct koila__handle *next_in_group, *prev_in_group;
    struct koila__handle *next_with_value, *prev_with_value; /* while it has one, in the group */
} koila__handle;

extern PyTypeObject koila__tape_type, koila__handle_type;

/* ---- wrapper.c */
/* Learns the offset of the slot `_v`, and how to make wrappers. */
int koila__wrapper_setup(PyObject *torch, PyObject *lazy_class);
extern PyTypeObject *koila__lazy_class;
extern Py_ssize_t koila__slot;
PyObject *koila__wrapper_alone(koila_meta meta, int64_t offset); /* new; its slot is empty */
/* New: a copy of plain tensor `real`, torch's own `real.clone()`. */
PyObject *koila__copy_of(PyObject *real, koila_meta meta);
/* The torch.Tensor of a handle of the C shim, which stays the caller's, to be dropped, but may hold
 * no tensor any more; None for an undefined one. NULL without an exception: no memory. Only where
 * torch has what the shim's `wrap` names. */
PyObject *koila__wrap_plain(tensor_handle h);
/* An empty tensor made both ways, for comparison: (by arguments, by parts or None). */
PyObject *koila__wrapper_pair(koila_meta meta, int64_t offset);
/* Learns the place of the dispatch keys from such a pair, whose keys torch reports. */
bool koila__learn_keys(PyObject *lazy, uint64_t lazy_keys, PyObject *made, uint64_t made_keys);
/* make wrappers by parts where torch has the functions for it */
extern bool koila__by_parts;

/* Arguments of metas that are forgotten: their objects go to the list `gone`. Runs no Python. */
void koila__wraps_forget(PyObject *gone);

/* ---- bounds.c */
/* What a table holds at most beside what was in use when it last forgot. Tests make it smaller. */
extern uint32_t koila__forget_after;
extern uint32_t koila__n_forgotten; /* so many times */
/* At the start of a step, where no id is held: forgets what is not used any more, if that is much.
 * Runs Python code. */
void koila__forget_when_due(void);

/* ---- factory_switch.c */
enum { KOILA__MAX_WRITES = 64 };     /* tensors that one operator writes; more is refused */
enum { KOILA__N_FACTORY_KINDS = 5 }; /* zeros, ones, full, empty, arange: see factories.c */
/* `replacement` may replace the vectorcall entry of torch's function `f` of this kind. */
void koila__switch_add(int kind, PyObject *f, vectorcallfunc replacement);
PyObject *koila__switch_function(int kind); /* borrowed; NULL: left alone */
/* That many more open tapes have a batch: 1, 0 or -1. */
void koila__switch_batch(int n_more);

/* `replacement` may replace the entry of f, a function of torch that may write. */
void koila__writers_add(PyObject *f, vectorcallfunc replacement);
void koila__writers_begin(void); /* a step begins: they are replaced */
void koila__writers_idle(void);  /* one of them was called while there is no step */

/* ---- tape.c */
/* Borrowed: the tape that lazy() joins here, never a closed one. NULL: the next one opens one. */
koila__tape *koila__tape_open(void);
/* The one writer of a context's open tape; t is a tape of c, or NULL. It takes a reference. */
void koila__tape_set_open(koila__context *c, koila__tape *t);
bool koila__tape_is_open(const koila__tape *t); /* in its context */
/* The step of `t` has run. The caller holds a reference to `t`. */
void koila__tape_close(koila__tape *t);
koila__tape *koila__tape_new(koila__context *c);
/* Live tapes with has_exit; koila__tape_has_exit() sets that. */
extern uint32_t koila__n_exits;
extern uint32_t koila__n_steps; /* so many times a tape was opened; it wraps */
void koila__tape_has_exit(koila__tape *t);
/* Hooks that are entered for all that autograd saves, in whatever thread. */
extern uint32_t koila__n_saved_hooks;
int koila__tape_reserve(koila__tape *t); /* makes values[] cover every value of the graph */
/* KOILA_NONE + error */
koila_value koila__tape_leaf_real(koila__tape *t, PyObject *real, koila_meta *meta);
/* The value of leaf `real` as it is now; KOILA_NONE: it is none, or was written since. */
koila_value koila__tape_leaf_known(const koila__tape *t, PyObject *real);
koila_value koila__tape_leaf_new(koila__tape *t, PyObject *real, koila_meta meta,
                                 koila_leaf_kind kind, uint16_t axis, uint32_t dim);
/* id 0: a new axis */
int koila__tape_axis(koila__tape *t, uint64_t id, int64_t size, uint16_t *out);
/* Is one of the sizes that of a batch axis? */
bool koila__tape_has_batch(const koila__tape *t, const int64_t *size, uint32_t n_dims);
/* Is one of the sizes near that of a long dimension of a batch, and of no batch axis? */
bool koila__tape_has_length(const koila__tape *t, const int64_t *size, uint32_t n_dims);
int koila__tape_effect(koila__tape *t, PyObject *real, koila_value v);
/* before effects of an abandoned step; warns; -1 with an exception */
int koila__tape_drop_overwritten(koila__tape *t);
int koila__tape_add_random(koila__tape *t, koila_node n, PyObject *generator, PyObject *state,
                           uint32_t words);

/* ---- group.c */
/* live handles of all tapes; 0: nothing is lazy now */
extern uint64_t koila__n_handles;
extern uint32_t koila__n_factories; /* live groups with `factory` */
/* Made with refs 0: the first wrapper owns it. */
koila__group *koila__group_new(koila__tape *t, koila_value base, koila_meta meta);
/* Operator `func` writes into the memory of g. In eager the write changes nothing but what it
 * names: neither several elements of the tensor that lazy() was given, which lie on each other, nor
 * another tensor that it was given. -1 + UnsupportedError if it may. */
int koila__group_check_write(const koila__group *g, PyObject *func);
void koila__group_free(koila__group *g);
void koila__group_is_factory(koila__group *g, bool no_lazy_data);
/* refs 0 */
koila__chain *koila__chain_new(koila__chain *parent, koila_link link, koila_meta meta,
                               int64_t offset, uint32_t gen, koila_value v);
void koila__chain_release(koila__chain *c);
/* Is this view of a complex base a conjugate one? In torch that is a flag on the tensor, which its
 * views inherit. */
bool koila__chain_conjugated(const koila__chain *c);
/* Appends the wrappers of the group that live to a list, newest first. Runs no Python code. */
int koila__group_wrappers(const koila__group *g, PyObject *list);
/* Adds h to all lists; takes references on group and chain. */
void koila__handle_attach(koila__handle *h, koila__group *g, koila__chain *c, koila_value v,
                          koila_meta meta, int64_t offset);
/* Removes h from all lists. Returns the group to free if h was its last handle, else NULL. Runs no
 * Python code. */
koila__group *koila__handle_detach(koila__handle *h);
void koila__handle_set_value(koila__handle *h, koila_value v);
/* Move `h` to group g and chain c (the slot of a tensor whose contents are replaced). */
void koila__handle_move(koila__handle *h, koila__group *g, koila__chain *c, koila_value v,
                        koila_meta meta, int64_t offset);
/* Puts `h` next after `other` in the group's list, which is sorted by age. */
void koila__handle_stand_beside(koila__handle *h, koila__handle *other);

/* ---- watches.c */
extern uint32_t koila__n_aliases; /* handed out, and perhaps alive */
/* Leaf v of t is new. counted: its version counter sees every write that no alias makes. */
int koila__watch_leaf(koila__tape *t, koila_value v, PyObject *real, bool counted);
bool koila__is_written_behind(koila__tape *t, koila_value v); /* by such an alias, since */
/* Value v of t is about to be `real`: watched like the old one where it has the same memory. */
void koila__watches_follow(koila__tape *t, koila_value v, PyObject *real);
void koila__watches_free(koila__tape *t);
/* `o`, an alias of that storage, exists now. counts: it has a version counter of its own. */
int koila__alias_remember(const void *storage, PyObject *o, bool counts);
/* Adds a watch of value v, whose tensor is `real` now. by: an alias that counts its versions; NULL:
 * none, so the memory is looked at. */
int koila__watch(koila__tape *t, koila_value v, PyObject *real, PyObject *by);
/* Is the memory of v watched? */
bool koila__is_watched(const koila__tape *t, koila_value v, const PyObject *real);

/* ---- back_doors.c: functions of the module */
PyObject *koila__py_data_of(PyObject *module, PyObject *tensor);
PyObject *koila__py_handed_out(PyObject *module, PyObject *args);
PyObject *koila__py_written(PyObject *module, PyObject *args);

/* ---- alias.c */
/* Moves each group of a closed tape whose base is concrete to a tape of its own. */
int koila__compact(koila__tape *t);
/* The current value of `h`; replays its chain after a write. KOILA_NONE + error. */
koila_value koila__value_of(koila__handle *h);
/* Makes h's group a leaf of another tape. */
int koila__move_to(koila__handle *h, koila__tape *to);
void koila__group_written(koila__group *g, koila_value v);

/* ---- concrete.c */
PyObject *koila__concrete(koila__handle *h); /* borrowed real tensor; NULL + error */
/* A new reference to a tensor of its values. While planning, calls that make it run on `device`,
 * for its own has no values (meta). */
PyObject *koila__values_on(koila__handle *h, PyObject *device);
/* The tensors of n lazy ones, in one run for each tape. -1 + error */
int koila__concrete_many(koila__handle *const *h, uint32_t n);

/* ---- turn.c */
/* Until the matching leave no other thread records in `t` or runs it; calls nest. Waits for that,
 * with the GIL released. -1 + error: the wait would never end, or a signal ended it. The caller
 * keeps `t` alive. */
int koila__tape_enter(koila__tape *t);
void koila__tape_leave(koila__tape *t);
bool koila__tape_is_busy(const koila__tape *t); /* is another thread in it? */

/* ---- known_backward.c: functions of the module */
/* What the leaves of a known backward get, in its tape, to be run (run_module.c). */
typedef struct koila__known_gradients {
    PyObject_HEAD
    koila__tape *tape;  /* owned */
    koila_value *value; /* owned [2 * n]: each gradient, and the base of its storage */
    uint32_t n;         /* not 0 */
} koila__known_gradients;
extern PyTypeObject koila__known_gradients_type;
int koila__known_backward_add(PyObject *m);

/* ---- whose.c */
/* May a thread without a context of its own work for that of step `t`? Not where that one records
 * in koila.plan(), and `t` is another step: nothing of it would be computed. */
bool koila__may_work_for(const koila__tape *t);
/* *to: the context that this thread must work for in a call, a new reference; NULL: its own. -1 +
 * error: a plain backward came upon lazy tensors. */
int koila__lend_for_call(PyObject *args, PyObject *kwargs, koila__context **to);
/* A call on lazy tensors gave `result`, which is not lazy: may a backward come back through it? */
void koila__note_exit(PyObject *args, PyObject *kwargs, PyObject *result);
/* The value of `h` is taken: by a torch.autograd.Function, whose result is plain then? */
void koila__note_value_taken(koila__handle *h);
int koila__whose_setup(void); /* learns torch's functions, once */
int koila__whose_add(PyObject *m);

/* ---- step.c */
extern bool koila__owners_show;
/* Borrowed: the open tape; opens one if there is none. NULL + error. */
koila__tape *koila__tape_current(void);
/* The same, for a new lazy() call: may first finish and close the open tape. */
koila__tape *koila__tape_for_lazy(void);
/* A step begins that is not recorded: the open one ends, and what is held of it is made. 1: none is
 * open any more; 0: the open one goes on; -1 with an exception. */
int koila__step_make_way(void);
/* a handle of `t` died, of which the caller holds a reference: was it the last? */
void koila__step_left(koila__tape *t);
/* Did its last run fail, and the program record nothing since? Then it is over, whoever holds its
 * tensors. */
bool koila__step_is_over(const koila__tape *t);
/* In a forked process: the steps of the parent are the parent's. Here their effects do not happen,
 * lazy() joins none of them, and their values can still be asked for. */
void koila__steps_forked(void);

/* ---- handle.c */
extern uint32_t koila__n_settled; /* wrappers that are plain tensors */
static inline bool koila__has_slot(PyObject *o)
{
    return Py_TYPE(o) == koila__lazy_class ||
           (koila__lazy_class && PyType_IsSubtype(Py_TYPE(o), koila__lazy_class));
}
/* borrowed; NULL: half made */
static inline koila__handle *koila__handle_of(PyObject *lazy)
{
    return *(koila__handle **)((char *)lazy + koila__slot);
}
static inline bool koila__is_settled(PyObject *o)
{
    return koila__n_settled && koila__has_slot(o) && koila__handle_of(o) &&
           !koila__handle_of(o)->group;
}
static inline bool koila__is_lazy(PyObject *o)
{
    return koila__has_slot(o) && !koila__is_settled(o);
}
/* Is o a lazy tensor whose memory is that of a leaf, which begins in the middle of it? */
bool koila__begins_within(PyObject *o);
PyObject *koila__moved_meanwhile(void); /* UnsupportedError */
/* A wrapper for (group, chain). Steals nothing; takes references on group and chain. */
PyObject *koila__wrapper_new(koila__group *g, koila__chain *c, koila_value v, koila_meta meta,
                             int64_t offset);
/* From now on its wrapper is the plain tensor `plain`, with its memory and version counter. */
void koila__handle_make_plain(koila__handle *h, PyObject *plain);

/* ---- settle.c */
/* 1: `o` is a plain tensor now; 0: it cannot become one; -1 with an exception */
int koila__settle(PyObject *o);
/* Does the group depend on no data, and has no rows? */
bool koila__is_known(const koila__group *g);
/* 1: some argument is a plain tensor in a wrapper; -1 + error */
int koila__factories_meet(uint64_t written, PyObject *written_kw, PyObject *args, PyObject *kwargs);
void koila__factories_derive(PyObject *args, PyObject *kwargs, PyObject *result);
int koila__settle_add(PyObject *m);

/* ---- factories.c */
void koila__factories_step(koila__tape *t, koila_meta batch); /* a batch went lazy in t */
/* true: off for the running code, until the matching call with false. */
int koila__factories_hold(bool more);
int koila__factories_add(PyObject *m);

/* ---- plain_writes.c, plain_functions.c */
/* `written`, a tensor or lists of them, is about to be written plainly: what the open step has
 * recorded from that memory gets a copy of its own first. False: an exception that is no error, as
 * of a signal. If the copies fail, what was recorded is stale. */
bool koila__keep_contents(PyObject *written);
/* It was written, and no version counter says so: what is still recorded from it is stale. */
void koila__contents_gone(PyObject *written);
/* Does a method or a function of that name write its tensor, or give it other memory or sizes?
 * Those that change flags alone do not. */
bool koila__writes_by_name(const char *name);
/* Functions of torch that write. What is not there is left alone. */
void koila__plain_functions_setup(PyObject *torch);
/* class: torch's, of tensors. Once in a process. -1 with an exception. */
int koila__plain_writes_setup(PyObject *class);
/* `method` of torch's tensors, called with the tensor and its arguments, n in all: a write to
 * memory that a run has made, from which no step has recorded anything. New; NULL + error */
PyObject *koila__write_unseen(PyObject *method, PyObject *const *values, size_t n);

/* ---- operators.c, arguments.c, source_line.c, node.c, capture_module.c */
/* The number of results in the schema. source[j]: -1 for a fresh result, else the written
 * argument. */
int koila__op_sources(koila_op id, const int8_t **source);
uint32_t koila__opaque_id(PyObject *o); /* KOILA_NONE + error */
/* id of the user's line in t's graph, or KOILA_NONE */
uint32_t koila__line_now(koila__tape *t);
/* The user's line now is the one that waits for a backward, until that ends. pre: the GIL */
void koila__line_waits(bool begins);
/* What is recorded on this thread belongs to the module of that name, or to none (None), and its
 * lines say so. Returns what was said before. */
PyObject *koila__module_is(PyObject *name);
/* Records a call that needs no special treatment. */
PyObject *koila__record(PyObject *func, PyObject *args, PyObject *kwargs);
int koila__module_add(PyObject *m);

#endif
