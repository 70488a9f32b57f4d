/* reads.c — what a value that is read in the middle of a step leaves for the next run of that step.
 *
 * A read is a run of its own: of a part of what is recorded by now. Its results are kept (Note
 * [Kept] in capture/kept.c), so that the next read and the backward begin where it ended:
 *
 *   all     While everything fits in three quarters of the room, each result that somebody can
 *           still ask for is kept: what plain PyTorch holds at that line. One that nobody can ask
 *           for any more goes once a run has read it.
 *   tight   Where it does not fit, or the step runs in slices, only what variables of the program
 *           hold is kept, the newest first: the next layer starts there. The backward runs in
 *           slices from the beginning, as without reads. The first read of a step leaves nothing
 *           then, so a step of one read runs as if nothing were ever kept.
 *
 * What is kept gives way to any plan that needs its memory (request.c), and never decides whether
 * something can run: without it the part is longer, and all else is the same.
 */
#include "run/run.h"

/* Of the room, what kept values may take: a quarter is left for what the program does meanwhile. */
enum { KEPT_QUARTERS = 3 };

/* ---- sets of memory, and of values */

static int compare_addresses(const void *a, const void *b)
{
    const uintptr_t x = (uintptr_t)*(const void *const *)a;
    const uintptr_t y = (uintptr_t)*(const void *const *)b;
    return (x > y) - (x < y);
}

static void sort_shown(koila__keeping *k)
{
    if (k->n_shown)
        qsort(k->shown, k->n_shown, sizeof *k->shown, compare_addresses);
}

static bool is_shown(const koila__keeping *k, const void *storage)
{
    return k->n_shown &&
           bsearch(&storage, k->shown, k->n_shown, sizeof *k->shown, compare_addresses);
}

static bool is_variable(const koila__wanted *w, koila_value v)
{
    for (uint32_t i = 0; w && i < w->n_variables; i++)
        if (w->variables[i] == v)
            return true;
    return false;
}

void koila__keeping_free(koila__keeping *k)
{
    PyMem_Free(k->at);
    PyMem_Free(k->shown);
    PyMem_Free(k->memory);
    *k = (koila__keeping){ 0 };
}

/* ---- dropping */

typedef struct needs {
    const koila__part *part;    /* its leaves are needed; NULL: none is */
    const koila__wanted *asked; /* NULL: nobody asks */
} needs;

static bool is_needed_by(const needs *x, koila_value v)
{
    return x->part && koila__part_value(x->part, v) != KOILA_NONE;
}

static bool no_variable_holds(const koila__tape *t, koila_value v, void *user)
{
    (void)t;
    return !is_needed_by(user, v) && !is_variable(((const needs *)user)->asked, v);
}

static bool nobody_can_ask_for(const koila__tape *t, koila_value v, void *user)
{
    return !is_needed_by(user, v) && !t->values[v].n_handles;
}

void koila__reads_tighten(koila__tape *t, const koila__wanted *w)
{
    needs none = { NULL, w };
    t->kept.tight = true;
    koila__unkeep_those(t, no_variable_holds, &none);
}

static bool is_only_whole(const koila__tape *t, koila_value v, void *user)
{
    return koila__kept_of(t, v)->only_whole && is_needed_by(user, v);
}

void koila__reads_drop_only_whole(koila__tape *t, const koila__part *p)
{
    needs part = { p, NULL };
    koila__unkeep_those(t, is_only_whole, &part);
}

/* Drops all of the open step, where no other thread is in it. */
void koila__reads_drop_open(void)
{
    koila__tape *t = koila__tape_open();
    if (!t || !t->kept.n || koila__tape_is_busy(t))
        return;
    Py_INCREF(t);
    koila__unkeep_all(t);
    Py_DECREF(t);
}

void koila__reads_fit(void)
{
    const koila__tape *t = koila__tape_open();
    const koila__settings set = koila__settings_now();
    if (!t || !t->kept.n || set.cpu_budget == UINT64_MAX)
        return;
    const uint64_t held = koila__cpu_bytes_current();
    const uint64_t others = held > t->kept.n_bytes ? held - t->kept.n_bytes : 0;
    const uint64_t room = set.cpu_budget > others ? set.cpu_budget - others : 0;
    if (set.resident || t->kept.n_bytes > room / 4 * KEPT_QUARTERS)
        koila__reads_drop_open();
}

/* ---- choosing */

typedef struct choice {
    koila__tape *t;
    const koila__part *p;
    const koila_graph *g; /* of the part */
    koila_value *root;    /* [values of the part] whose memory each has; KOILA_NONE: not known */
    bool *is_target;      /* [values of the part] */
    bool *is_batched;     /* [values of the part] they depend on a batch */
    bool *has_leaf;       /* [values of the part] they depend on some tensor */
    bool *is_counted;     /* [values of the part] roots */
    uint64_t n_bytes;     /* of what is chosen */
    koila__keeping *k;
} choice;

static bool choice_new(choice *x)
{
    const uint32_t n = koila_graph_n_values(x->g);
    x->root = PyMem_Malloc((n + 1) * sizeof *x->root);
    x->is_target = PyMem_Calloc(n + 1, sizeof *x->is_target);
    x->is_batched = PyMem_Calloc(n + 1, sizeof *x->is_batched);
    x->has_leaf = PyMem_Calloc(n + 1, sizeof *x->has_leaf);
    x->is_counted = PyMem_Calloc(n + 1, sizeof *x->is_counted);
    x->k->at = PyMem_Malloc((n + 1) * sizeof *x->k->at);
    return x->root && x->is_target && x->is_batched && x->has_leaf && x->is_counted && x->k->at;
}

static void choice_free(choice *x)
{
    PyMem_Free(x->root);
    PyMem_Free(x->is_target);
    PyMem_Free(x->is_batched);
    PyMem_Free(x->has_leaf);
    PyMem_Free(x->is_counted);
}

/* Memory that is not the run's own is that of a tensor outside: of a leaf, or of whatever a module
 * that runs as it is gives. Kept leaves are the tape's own. */
static void find_roots(const choice *x)
{
    for (koila_value leaf = 0; leaf < x->p->n_leaves; leaf++)
        x->root[leaf] = x->p->kept && x->p->kept[leaf] ? leaf : KOILA_NONE;
    for (koila_node n = 0; n < koila_graph_n_nodes(x->g); n++) {
        const koila_node_info info = koila_node_get(x->g, n);
        const koila_sig_info *s = koila_sig_get(koila__table, info.sig);
        const uint32_t flags = koila_op_flags(koila__table, s->op);
        for (uint32_t o = 0; o < s->n_outputs; o++) {
            const koila_value v = info.first_output + o;
            x->root[v] = flags & KOILA_OP_OPAQUE ? KOILA_NONE : v;
            if (flags & KOILA_OP_VIEW)
                x->root[v] = s->n_inputs ? x->root[koila_node_inputs(x->g, n)[0]] : KOILA_NONE;
        }
    }
}

/* is_batched[values of g]: they depend on a batch. */
static void find_batched(const koila_graph *g, bool *is_batched)
{
    for (koila_value v = 0; v < koila_graph_n_values(g); v++) {
        const koila_value_info info = koila_value_get(g, v);
        is_batched[v] = info.node == KOILA_NONE && info.leaf_kind == KOILA_LEAF_BATCH;
    }
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        const koila_node_info info = koila_node_get(g, n);
        const koila_sig_info *s = koila_sig_get(koila__table, info.sig);
        for (uint32_t i = 0; i < s->n_inputs; i++)
            for (uint32_t o = 0; o < s->n_outputs; o++)
                is_batched[info.first_output + o] |= is_batched[koila_node_inputs(g, n)[i]];
    }
}

static void find_sources(const choice *x)
{
    find_batched(x->g, x->is_batched);
    for (koila_value leaf = 0; leaf < x->p->n_leaves; leaf++)
        x->has_leaf[leaf] = true;
    for (koila_node n = 0; n < koila_graph_n_nodes(x->g); n++) {
        const koila_node_info info = koila_node_get(x->g, n);
        const koila_sig_info *s = koila_sig_get(koila__table, info.sig);
        for (uint32_t i = 0; i < s->n_inputs; i++)
            for (uint32_t o = 0; o < s->n_outputs; o++)
                x->has_leaf[info.first_output + o] |= x->has_leaf[koila_node_inputs(x->g, n)[i]];
    }
}

/* The first dimension of a batch's size is most often the batch; else the first one, where it has
 * as many entries for each row. */
static bool likely_dim(const koila_meta_info *m, int64_t n_rows, uint32_t *dim)
{
    for (*dim = 0; *dim < m->n_dims; (*dim)++)
        if (m->size[*dim] == n_rows)
            return true;
    *dim = 0;
    return m->n_dims > 1 && n_rows > 0 && m->size[0] > 0 && m->size[0] % n_rows == 0;
}

/* A run that is whole, or cut along another axis, does not tell how its results could be sliced by
 * rows of the tape's axes. Any slice of a value that is there is sound. v: of g, and made from a
 * batch. */
static koila_cut likely_cut(const koila__tape *t, const koila_graph *g, koila_value v,
                            bool *only_whole)
{
    const koila_meta_info *m = koila_meta_get(koila__table, koila_value_get(g, v).meta);
    *only_whole = false;
    for (uint16_t a = koila_graph_n_axes(t->graph); a-- > 0;) {
        const int64_t n_rows = koila_graph_axis_size(t->graph, a);
        uint32_t d;
        if (likely_dim(m, n_rows, &d))
            return (koila_cut){ .is_cut = true, .dim = (uint8_t)d, .axis = a };
        *only_whole |= (int64_t)m->n_elements >= n_rows;
    }
    return (koila_cut){ 0 };
}

static uint64_t bytes_of(const choice *x, koila_value of_part)
{
    return koila_meta_get(koila__table, koila_value_get(x->g, of_part).meta)->n_bytes;
}

/* Bytes that live longer if v, of the part, is kept beside what is chosen by now. */
static uint64_t bytes_more(const choice *x, koila_value v)
{
    const koila_value root = x->root[v];
    return root < x->p->n_leaves || x->is_counted[root] ? 0 : bytes_of(x, root);
}

/* What depends on no tensor is not kept: a buffer that the step makes is not sliced until it is
 * used. */
static bool can_keep(const choice *x, koila_value v, koila_value of_tape)
{
    return x->root[v] != KOILA_NONE && x->has_leaf[v] && !x->is_target[v] && bytes_of(x, v) &&
           !x->t->values[of_tape].real && !x->t->values[of_tape].kept;
}

static void choose(choice *x, koila_value v, koila_value of_tape)
{
    x->n_bytes += bytes_more(x, v);
    x->is_counted[x->root[v]] = true;
    x->is_target[v] = true;
    koila__kept *chosen = &x->k->at[x->k->n++];
    *chosen = (koila__kept){ .value = of_tape };
    if (x->is_batched[v])
        chosen->cut = likely_cut(x->t, x->g, v, &chosen->only_whole);
}

static void choose_all(choice *x)
{
    for (koila_node n = 0; n < koila_graph_n_nodes(x->g); n++) {
        const koila_node_info info = koila_node_get(x->g, n);
        const koila_value first = koila_node_get(x->t->graph, x->p->node_from[n]).first_output;
        const koila_sig_info *s = koila_sig_get(koila__table, info.sig);
        for (uint32_t o = 0; o < s->n_outputs; o++) {
            /* a result that is a leaf of the part has a value of its own there */
            const bool is_made = koila__part_value(x->p, first + o) == info.first_output + o;
            if (is_made && s->outputs[o] != KOILA_NONE && x->t->values[first + o].n_handles &&
                can_keep(x, info.first_output + o, first + o))
                choose(x, info.first_output + o, first + o);
        }
    }
}

static void choose_variables(choice *x, const koila__wanted *w, uint64_t most_bytes)
{
    for (uint32_t i = 0; i < w->n_variables; i++) {
        const koila_value v = koila__part_value(x->p, w->variables[i]);
        if (v != KOILA_NONE && v >= x->p->n_leaves && can_keep(x, v, w->variables[i]) &&
            x->n_bytes + bytes_more(x, v) <= most_bytes)
            choose(x, v, w->variables[i]);
    }
}

/* Is the batch larger than the slices that the user wants? */
static bool is_to_be_cut(const koila_graph *g)
{
    const int64_t rows = koila__settings_now().rows;
    for (uint16_t a = 0; rows && a < koila_graph_n_axes(g); a++)
        if (koila_graph_axis_size(g, a) > rows)
            return true;
    return false;
}

/* 1: something was dropped, so look again. */
static int choose_from(choice *x, const koila__room *room, const koila__wanted *w)
{
    koila__tape *t = x->t;
    const uint64_t kept = t->kept.n_bytes;
    const bool is_free = room->bytes > UINT64_MAX / 4; /* no limit is known */
    const uint64_t most = is_free ? UINT64_MAX : room->bytes / 4 * KEPT_QUARTERS;
    needs part = { x->p, w };
    if (!t->kept.tight && is_to_be_cut(x->g)) {
        const uint32_t n_before = t->kept.n;
        koila__reads_tighten(t, w);
        if (t->kept.n < n_before)
            return 1;
    }
    if (t->kept.tight) {
        if (koila__unkeep_those(t, no_variable_holds, &part))
            return 1;
        if (t->kept.n_reads)
            choose_variables(x, w, most);
        return 0;
    }
    choose_all(x);
    if (is_free || x->n_bytes + kept / 4 <= most)
        return 0;
    if (!koila__unkeep_those(t, nobody_can_ask_for, &part))
        koila__reads_tighten(t, w);
    return 1;
}

int koila__reads_choose(koila__tape *t, koila__part *p, const koila_value *targets, uint32_t n,
                        const koila__room *room, const koila__wanted *w, koila__keeping *k)
{
    choice x = { .t = t, .p = p, .g = p->graph, .k = k };
    koila_assert(!k->at && !k->n && p->graph);
    int status = 0;
    if (choice_new(&x)) {
        find_roots(&x);
        find_sources(&x);
        for (uint32_t i = 0; i < n; i++)
            x.is_target[koila__part_value(p, targets[i])] = true;
        status = choose_from(&x, room, w);
    }
    choice_free(&x);
    return status || !k->n ? status : koila__part_add_targets(p, n, k->at, k->n);
}

/* ---- the run */

int koila__reads_begin(koila__tape *t, const koila__part *p, koila__keeping *k)
{
    if (!k->n && !p->kept)
        return 0;
    /* the leaves, and what reads_end adds: the targets, and leaves that are kept no more */
    const size_t most = 2 * (size_t)p->n_leaves + koila_graph_n_values(t->graph) + 1;
    k->shown = PyMem_Malloc(most * sizeof *k->shown);
    k->memory = PyMem_Malloc(((size_t)p->n_leaves + k->n + 1) * sizeof *k->memory);
    if (!k->shown || !k->memory) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < p->n_leaves; i++) {
        PyObject *leaf = koila__part_leaf(t, p, i);
        if (leaf && !(p->kept && p->kept[i]))
            k->shown[k->n_shown++] = koila__storage_of(leaf);
    }
    return 0;
}

/* How a run may slice target i of plan c, which is in slices. */
static koila_cut cut_of(const cached *c, uint32_t i, bool *only_whole)
{
    const koila_graph *lowered = koila_plan_graph(c->plan);
    const koila_value v = koila_plan_target(c->plan, i);
    const koila_share share = koila_plan_share(c->plan, v);
    const koila_meta_info *m = koila_meta_get(koila__table, koila_value_get(lowered, v).meta);
    koila_cut cut = { 0 };
    *only_whole = false;
    if (share.kind != KOILA_SHARE_SLICE)
        return cut;
    const int64_t n_rows = koila_graph_axis_size(lowered, share.axis);
    const bool is_dim = share.outer == 1 && share.inner > 0 && share.dim < m->n_dims &&
                        m->size[share.dim] == n_rows * share.inner;
    *only_whole = !is_dim;
    if (is_dim)
        cut = (koila_cut){ .is_cut = true, .dim = share.dim, .axis = share.axis };
    return cut;
}

void koila__reads_cut(koila__tape *t, const cached *c, const koila_value *targets, uint32_t n)
{
    const koila_graph *g = koila_plan_graph(c->plan);
    const bool is_sliced = c->info.n_slices > 1 && c->info.dim == KOILA_NONE;
    bool *is_batched = is_sliced ? NULL : PyMem_Malloc(koila_graph_n_values(g) + 1);
    if (is_batched)
        find_batched(g, is_batched);
    for (uint32_t i = 0; i < n; i++) {
        const koila_value v = koila_plan_target(c->plan, i);
        koila_cut *cut = &t->values[targets[i]].cut;
        bool only_whole;
        if (is_sliced)
            *cut = cut_of(c, i, &only_whole);
        else if (is_batched && is_batched[v])
            *cut = likely_cut(t, g, v, &only_whole);
    }
    PyMem_Free(is_batched);
}

/* A copy with the same strides. NULL: none can be made, without an exception. */
static PyObject *copy_of(PyObject *tensor)
{
    PyObject *guard = PyObject_CallNoArgs(koila__torch.guards);
    PyObject *copy = guard ? PyObject_CallFunctionObjArgs(koila__torch.clone, tensor, NULL) : NULL;
    Py_XDECREF(guard);
    PyErr_Clear();
    return copy;
}

typedef struct ended {
    koila__tape *t;
    const koila__part *p;
    const cached *c;
    uint32_t n;
    PyObject **results;
    koila__keeping *k;
} ended;

static const koila_meta_info *target_meta(const ended *x, uint32_t i)
{
    const koila_graph *lowered = koila_plan_graph(x->c->plan);
    const koila_value v = koila_plan_target(x->c->plan, i);
    return koila_meta_get(koila__table, koila_value_get(lowered, v).meta);
}

/* By address, the largest value first. */
static int compare_memory(const void *a, const void *b)
{
    const koila__kept_memory *x = a, *y = b;
    const int by_address = compare_addresses(&x->storage, &y->storage);
    return by_address ? by_address : (x->n_bytes < y->n_bytes) - (x->n_bytes > y->n_bytes);
}

static int compare_storage(const void *storage, const void *memory)
{
    return compare_addresses(storage, &((const koila__kept_memory *)memory)->storage);
}

/* NULL: no value is or would be kept in that memory. */
static koila__kept_memory *kept_there(const koila__keeping *k, const void *storage)
{
    return bsearch(&storage, k->memory, k->n_memory, sizeof *k->memory, compare_storage);
}

/* Each memory in which a value is or would be kept, with the most bytes of one. */
static void find_kept_memory(const ended *x)
{
    koila__kept_memory *m = x->k->memory;
    uint32_t n = 0, n_once = 0;
    for (uint32_t i = 0; x->p->kept && i < x->p->n_leaves; i++) {
        if (!x->p->kept[i])
            continue;
        const koila_meta meta = koila_value_get(x->t->graph, x->p->leaf_from[i]).meta;
        m[n++] = (koila__kept_memory){ .storage = koila__storage_of(x->p->kept[i]),
                                       .n_bytes = koila_meta_get(koila__table, meta)->n_bytes };
    }
    for (uint32_t i = x->n; i < x->n + x->k->n; i++)
        m[n++] = (koila__kept_memory){ .storage = koila__storage_of(x->results[i]),
                                       .n_bytes = target_meta(x, i)->n_bytes };
    qsort(m, n, sizeof *m, compare_memory);
    for (uint32_t i = 0; i < n; i++)
        if (!n_once || m[n_once - 1].storage != m[i].storage)
            m[n_once++] = m[i];
    x->k->n_memory = n_once;
    for (uint32_t i = 0; i < x->n; i++) {
        koila__kept_memory *beside = kept_there(x->k, koila__storage_of(x->results[i]));
        if (beside)
            beside->n_results++;
    }
}

/* Result i will be handed out. Where kept values share its memory, it becomes a copy if it is a
 * small piece of it and no other result lies there, which would see what is written to it; else
 * that memory is shown, and they will be kept no more. */
static void show(const ended *x, uint32_t i)
{
    const void *storage = koila__storage_of(x->results[i]);
    const koila__kept_memory *beside = storage ? kept_there(x->k, storage) : NULL;
    const koila_meta_info *m = target_meta(x, i);
    if (!beside)
        return;
    const bool is_small = koila_meta_is_contiguous(m) && m->n_bytes <= beside->n_bytes / 4;
    PyObject *copy = is_small && beside->n_results == 1 ? copy_of(x->results[i]) : NULL;
    if (copy) {
        Py_SETREF(x->results[i], copy);
        return;
    }
    x->k->shown[x->k->n_shown++] = storage;
}

static bool is_shown_now(const koila__tape *t, koila_value v, void *k)
{
    return is_shown(k, koila__kept_of(t, v)->storage);
}

/* A kept leaf that is kept no more was handed out meanwhile, by Python that ran inside. */
static void show_lost_leaves(const ended *x)
{
    for (uint32_t i = 0; x->p->kept && i < x->p->n_leaves; i++) {
        if (!x->p->kept[i])
            continue;
        const koila__kept *now = koila__kept_of(x->t, x->p->leaf_from[i]);
        if (!now || now->tensor != x->p->kept[i])
            x->k->shown[x->k->n_shown++] = koila__storage_of(x->p->kept[i]);
    }
}

static void keep_results(const ended *x)
{
    for (uint32_t i = 0; i < x->k->n; i++) {
        koila__kept kept = x->k->at[i];
        kept.tensor = x->results[x->n + i];
        x->results[x->n + i] = NULL;
        kept.storage = koila__storage_of(kept.tensor);
        if (x->c->info.n_slices > 1 && x->c->info.dim == KOILA_NONE)
            kept.cut = cut_of(x->c, x->n + i, &kept.only_whole);
        if (kept.storage && !is_shown(x->k, kept.storage))
            koila__keep(x->t, kept);
        else
            Py_DECREF(kept.tensor);
    }
}

/* Of the leaves, those that no run will read again. */
static void drop_leaves(const ended *x, const koila__wanted *w)
{
    for (uint32_t i = 0; x->p->kept && i < x->p->n_leaves; i++) {
        const koila_value v = x->p->leaf_from[i];
        const bool stays = x->t->kept.tight ? is_variable(w, v) : x->t->values[v].n_handles > 0;
        if (x->p->kept[i] && !stays)
            koila__unkeep(x->t, v);
    }
}

void koila__reads_end(koila__tape *t, const koila__part *p, const cached *c, uint32_t n,
                      PyObject **results, const koila__wanted *w, koila__keeping *k)
{
    const ended x = { t, p, c, n, results, k };
    if (!k->n && !p->kept)
        return;
    find_kept_memory(&x);
    const uint32_t n_before = k->n_shown;
    for (uint32_t i = 0; i < n; i++)
        show(&x, i);
    const bool shows_kept = k->n_shown > n_before;
    show_lost_leaves(&x);
    sort_shown(k);
    if (shows_kept)
        koila__unkeep_those(t, is_shown_now, k);
    keep_results(&x);
    drop_leaves(&x, w);
}
