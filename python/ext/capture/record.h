/* record.h — how one call becomes a node: shared by operators.c, arguments.c, memo.c, node.c and
 * dispatch.c.
 *
 *   op_info      what is known of an operator                      operators.c
 *   call_walk    the call's arguments: tokens and tensors          arguments.c
 *   memo_entry   its signature and what its results look like      memo.c
 *
 * Note [Kinds]. Python decides the kind of each operator once (_capture.describe):
 *   PLAIN     fresh results
 *   VIEW      results in the group of the argument
 *   SAME      detach, alias: the same value in another wrapper
 *   WRITE     in-place and out=
 *   SPECIAL   a Python function decides (data-dependent, composite, random, ...)
 *   STRIDED   as_strided: its chain restarts at the base
 *   FACTORY   reads only metadata of its arguments: rewritten into a call without tensors
 *   INDEX     PLAIN, unless indexed by a mask or by row numbers
 */
#ifndef KOILA_EXT_RECORD_H
#define KOILA_EXT_RECORD_H

#include "capture/capture.h"

enum { PLAIN, VIEW, SAME, WRITE, SPECIAL, STRIDED, FACTORY, INDEX };
/* What a call returns: result_kind of koila_sig_info. */
enum { RESULT_ONE, RESULT_TUPLE, RESULT_LIST, RESULT_NONE, RESULT_ENDS_IN_LIST };

/* ---- operators.c */
typedef struct op_info {
    PyObject *func; /* owned OpOverload; the key */
    koila_op id;
    uint8_t kind, result_kind, overwrites;
    bool is_view; /* also set for a SPECIAL operator whose handler records a view */
    /* each written element depends only on the same element of each argument */
    bool elementwise;
    uint64_t written;     /* bit i: positional argument i is written */
    PyObject *written_kw; /* owned tuple of names */
    /* result j is argument source[j]; -1: fresh; -2 - k: keyword written_kw[k] */
    int8_t source[8];
    uint8_t n_results;    /* of the schema; a list counts as one */
    PyObject *handler;    /* owned; SPECIAL and INDEX */
    PyObject *rules;      /* owned dict class → function, or None: see koila__find_rule() */
    struct op_info *next; /* with the same hash */
} op_info;

#define KOILA__OP_SLOTS 4096
extern op_info *koila__op_slots[KOILA__OP_SLOTS];
op_info *koila__op_describe(PyObject *func); /* asks Python, once; NULL + error */
static inline op_info *koila__op_find(const PyObject *func)
{
    op_info *op = koila__op_slots[(uint32_t)((uintptr_t)func >> 4) & (KOILA__OP_SLOTS - 1)];
    while (op && op->func != func)
        op = op->next;
    return op;
}

static inline op_info *koila__op_of(PyObject *func)
{
    op_info *op = koila__op_find(func);
    return op ? op : koila__op_describe(func);
}

/* a function of the module, as koila__find_rules */
PyObject *koila__find_rule(PyObject *module, PyObject *const *a, Py_ssize_t n);
PyObject *koila__find_rules(PyObject *module, PyObject *f);

/* ---- arguments.c */
#define KOILA__N_TOKENS 192
#define KOILA__N_INPUTS 64
#define KOILA__N_KEYWORDS 32

typedef struct call_input {
    PyObject *object; /* borrowed from the arguments */
    koila__handle *h; /* if it is lazy, else NULL */
    koila_value value;
    uint32_t token;
    bool written;
} call_input;

typedef struct call_walk {
    koila_arg *tok;
    call_input *in;
    uint32_t n_tok, cap_tok, n_in, cap_in, n_lazy, n_pos, n_kw, n_written, n_written_real;
    bool writing; /* the argument being walked is written */
    bool again;   /* its inputs have changed: nothing was recorded, walk the call once more */
    koila__tape *tape;
    /* owned, or NULL: call this instead of recording; no exception is set then */
    PyObject *instead;
    /* Left uninitialised until used: clearing it on every call would cost more than the rest of the
     * walk. */
    uint32_t kw[KOILA__N_KEYWORDS];
    koila_arg tok_inline[KOILA__N_TOKENS];
    call_input in_inline[KOILA__N_INPUTS];
} call_walk;

void koila__walk_init(call_walk *w);
void koila__walk_deinit(call_walk *w);
/* Appends a token, all zero except its kind. NULL + error. */
koila_arg *koila__walk_push(call_walk *w, uint8_t kind);
int koila__walk_call(call_walk *w, const op_info *op, PyObject *args, PyObject *kwargs);
/* Are the lazy inputs what they were when they were resolved? */
bool koila__walk_holds(const call_walk *w);
int koila__arguments_init(void);
/* The objects of opaque arguments that the table has forgotten go to the list `gone`, and then
 * koila__opaques_drop() takes them out of the dict that finds them, which may run Python. */
void koila__opaques_forget(PyObject *gone);
void koila__opaques_drop(void);

/* ---- memo.c */
typedef struct memo_result {
    koila_meta meta;    /* KOILA_NONE: not a tensor */
    int64_t offset;     /* view: added to its argument's offset; as_strided: in the storage */
    PyObject *constant; /* owned; a result that is not a tensor */
} memo_result;

typedef struct memo_entry {
    uint64_t hash;
    uint32_t n_key, n_results;
    uint32_t made, used; /* koila__n_steps when it was made, and when it was found last */
    koila_sig sig;
    uint8_t result_kind;
    bool no_inputs; /* a factory: the node reads nothing */
    bool no_node;   /* every result is a constant */
    /* owned (func, args after self, kwargs) that fills a fresh factory, or NULL */
    PyObject *fill;
    memo_result *results; /* fresh ones only */
    koila_arg key[];
} memo_entry;

/* Builds the key: tokens, keyword names, chains of written arguments, operator and mode. Call
 * it when all inputs have their values. Appends to w->tok; w->n_tok stays. */
int koila__memo_key(call_walk *w, const op_info *op, uint8_t mode, uint32_t *n_key);
uint64_t koila__memo_hash(const koila_arg *key, uint32_t n);
/* Borrowed, and valid until Python runs, which may clear the memo. */
memo_entry *koila__memo_find(const koila_arg *key, uint32_t n, uint64_t hash);
/* Asks Python for the results of a new call. Owned by the memo. NULL with an error; or NULL without
 * one, and w->instead is set. */
memo_entry *koila__memo_miss(call_walk *w, const op_info *op, PyObject *args, PyObject *kwargs,
                             uint8_t mode, uint32_t n_key, uint64_t hash);
uint32_t koila__memo_n(void);
void koila__memo_clear(void);
/* Keeps the ids of the calls that more than one step has made, the last of them since `since`. */
void koila__memo_keep(koila_keeper *k, uint32_t since);
/* Drops the calls of which an id was forgotten, or that were made without a node in one step only.
 * Objects go to the list `gone`; runs no Python. */
void koila__memo_forget(PyObject *gone, uint32_t since);

/* ---- source_line.c */
extern int koila__lines_on;
int koila__source_line_init(void);

/* ---- node.c */
/* Records one call as a node, or runs it now. The results, or NULL + error. */
PyObject *koila__record_call(const op_info *op, PyObject *args, PyObject *kwargs);
/* The same for a view, whose result may have to be made outside inference mode. */
PyObject *koila__record_view(const op_info *op, PyObject *args, PyObject *kwargs);

/* ---- dispatch.c */
/* a function of the module, as koila__py_record */
PyObject *koila__dispatch(PyObject *module, PyObject *const *a, Py_ssize_t n);
PyObject *koila__py_record(PyObject *module, PyObject *const *a, Py_ssize_t n);

#endif
