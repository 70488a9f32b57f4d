/* emit.c — the instructions and memory events of a step under one keep policy.
 *
 * The order inside a loop is the recorded order, so at an in-place write the old version is dead
 * unless a later node really needs it. One exception: a view that is only a target (the `t` of a
 * weight gradient, recorded at the end of backward) runs right behind its producer.
 *
 * Note [Steal]. A write happens in place when the base dies there, is the only value alive on its
 * storage (or on its part of it, when unsafe_split cut the storage and no uncut value is alive),
 * and the storage belongs to this scope: it is no piece, no leaf, no accumulator and no slice of a
 * whole value. Any other write goes to a copy, which is always right. A write that overwrites
 * without reading does not use its base: its result is new memory, and the base may have been freed
 * long before.
 *
 * A sum of two terms is written over one that dies there under the same conditions, as torch's
 * autograd adds gradients up. Not in a step with calls that may keep tensors unseen.
 *
 * Note [Shared terms]. A sum whose other term is absent (Note [Pieces] in place.h) is the same
 * tensor as its term. The bytes are planned as if it were a copy; but neither storage is written in
 * place any more, or handed to an accumulator.
 *
 * Note [Addends]. Where addends.c found addends of a result, and all calls that make them run in
 * the loop that makes it whole, they go into the accumulator at once. Their sums and views are
 * still written down (KOILA_INSTR_TOLD), and so are the ends of all these values: the instructions
 * mean the same to who does not know of it. Their memory is told as it is: s[v] has no such value,
 * except an addend that is made first (KOILA__ADDEND), while its call runs.
 *
 * Note [Second terms]. A sum outside loops of two terms, of which this loop makes one, and the
 * other is there already, on storage that may be written: the loop's accumulator is the other term,
 * and becomes the sum. There is no second term; the sum is only written down. So it is where a call
 * outside loops makes the second term and can add it to the first, but not in a step that runs as
 * it was recorded: its gradients are eager's to the bit.
 *
 * Equation: alive[r] == number of values here[v] with root[v] == r. koila_plan_check() replays the
 * instructions and checks that every local value is made before it is used and freed exactly once
 * per slice. */
#include "engine/schedule.h"
#include "engine/schedule_state.h"

#include "engine/addends.h"
#include "engine/share.h"
#include "graph/table.h"

/* Reserves room, so that the next emissions cannot fail. */
static bool room(work_state *w, uint32_t n_instrs, uint32_t n_events)
{
    return koila__vec_reserve(&w->mem, &w->instrs, n_instrs) &&
           koila__vec_reserve(&w->mem, &w->events, n_events);
}
static void emit(work_state *w, koila_instr i)
{
    koila_assert(w->instrs.n < w->instrs.cap);
    w->instrs.at[w->instrs.n++] = i;
}
static void event(work_state *w, koila__event_kind kind, uint32_t value)
{
    koila_assert(w->events.n < w->events.cap);
    w->events.at[w->events.n++] = (koila__event){ kind, value };
}

static void begin_value(scope s, koila_value v, owner o)
{
    koila_assert(!s[v].here && !s[v].alive);
    s[v].here = 1;
    s[v].root = v;
    s[v].alive = 1;
    s[v].made = v;
    s[v].owned = (uint16_t)o;
    s[v].shared = false;
    s[v].region = v;
    s[v].touching = 1;
}

/* v lives on the storage of `on`: on the same part of it, or (disjoint) on a part that no other
 * result of the same call touches. */
static void join_value(scope s, koila_value v, koila_value on, bool disjoint)
{
    koila_assert(!s[v].here && s[on].here);
    koila_assert(s[s[on].root].alive > 0);
    s[v].here = 1;
    s[v].root = s[on].root;
    s[s[v].root].alive++;
    s[v].region = disjoint ? v : s[on].region;
    if (disjoint)
        s[v].touching = 0;
    s[s[v].region].touching++;
}

/* Ends the value, and its storage if this was the last value on it. `own`: the event that ends a
 * storage owned by the scope. */
static void release_value(work_state *w, koila_value v, koila__event_kind own)
{
    const scope s = w->s;
    const koila_value r = s[v].root;
    const koila_value made = s[r].made;
    koila_assert(s[v].here && s[r].alive > 0);
    koila_assert(s[s[v].region].touching > 0);
    s[v].here = 0;
    s[s[v].region].touching--;
    if (--s[r].alive)
        return;
    switch ((owner)s[r].owned) {
    case OWNER_NONE:
        return;
    case OWNER_SCOPE:
        event(w, own, made);
        return;
    case OWNER_PIECE:
        event(w, KOILA__KEPT_FREE, made);
        return;
    case OWNER_SLICE:
        event(w, KOILA__SLICE_FREE, made);
        return;
    case OWNER_CUT:
        event(w, KOILA__CUT_FREE, made);
        return;
    case OWNER_COLLECTED:
        event(w, KOILA__COLLECTED_FREE, made);
        return;
    }
}

/* v, a slice cut for node `user`, was freed and is cut again. Views of the first slice may still
 * live: its storage passes to one of them, so that v can name the next. They are all made between
 * the two cuts. */
static void pass_on(work_state *w, koila_value v, koila_node user)
{
    const life first = w->s[v];
    koila_value heir = KOILA_NONE;
    uint32_t n_left = first.alive;
    koila_assert(!first.here);
    w->s[v].alive = 0;
    /* a slice is never written in place: its parts need not be told apart any more */
    for (koila_value x = w->span[user].out; n_left; x++) {
        koila_assert(x < w->n_values);
        life *const l = &w->s[x];
        if (!l->here || l->root != v)
            continue;
        if (heir == KOILA_NONE) {
            koila_assert(!l->alive);
            heir = x;
        }
        l->root = heir;
        l->region = heir;
        n_left--;
    }
    if (heir == KOILA_NONE)
        return;
    w->s[heir].alive = first.alive;
    w->s[heir].touching = first.alive;
    w->s[heir].made = first.made;
    w->s[heir].owned = first.owned;
}

/* The owner of the storage of a slice of whole v. */
static owner slice_owner(const work_state *w, koila_value v, koila_placement placement)
{
    const koila_meta_info *m = koila__value_meta(w->g, v);
    const koila_share cut = koila__share_of(placement);
    if (koila_slice_form(m, cut, true) == KOILA_SLICE_COPY)
        return OWNER_CUT;
    return koila_slice_form(m, cut, false) == KOILA_SLICE_COPY ? OWNER_SLICE : OWNER_NONE;
}

/* Makes input i of node n of loop j, which is missing: a slice of a whole value, or a piece of an
 * earlier loop. */
static koila_status emit_input(work_state *w, koila_node n, uint32_t i, uint32_t j)
{
    const use *const u = &w->uses[w->span[n].in + i];
    const koila_value v = u->value;
    const bool local = u->local;
    const koila_placement need = need_of(w, n, i);
    if (w->s[v].here) {
        const slice_of cut = w->sliced[v];
        if (cut.user == KOILA_NONE ? local
                                   : koila__placement_equal(need_of(w, cut.user, cut.input), need))
            return KOILA_OK;
        /* one node needs two cuts of one value: there is room for one only */
        if (cut.user == n || cut.user == KOILA_NONE)
            return KOILA_UNSUPPORTED;
        /* cut along another dimension: cut again */
        emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
        release_value(w, v, KOILA__LOCAL_FREE);
        pass_on(w, v, cut.user);
    }
    const bool fetch = local && w->kept[v];
    koila_assert(fetch || need.kind == KOILA_S);
    /* was not made: a broken invariant */
    if (!fetch && local && !sliced_in(w, v, j))
        return KOILA_BAD_ARGUMENT;
    koila_instr in = { .kind = KOILA_DO_SLICE, .steal = (uint16_t)i, .id = v, .user = n };
    w->sliced[v] = (slice_of){ fetch ? KOILA_NONE : n, i };
    if (fetch) {
        in.kind = KOILA_DO_FETCH;
        in.flags = koila__keeps(w, v, j) ? 0 : KOILA_INSTR_LAST;
        w->given_up[v] = in.flags;
        begin_value(w->s, v, in.flags ? OWNER_PIECE : OWNER_NONE);
    } else {
        const owner o = slice_owner(w, v, need);
        if (u->from != KOILA_NONE)
            w->whole_seen[v] = w->stage;
        begin_value(w->s, v, o);
        if (o == OWNER_SLICE)
            event(w, KOILA__SLICE_ALLOC, v);
        if (o == OWNER_CUT)
            event(w, KOILA__CUT_ALLOC, v);
    }
    emit(w, in);
    return KOILA_OK;
}

/* Does the storage belong to this scope, and to no other sum? See Note [Steal]. */
static bool may_be_written(const life *root)
{
    return (root->owned == OWNER_SCOPE || root->owned == OWNER_COLLECTED) && !root->shared;
}

enum { MAX_STEALS = 16 }; /* bits of koila_instr.steal */
/* May write k of node n happen in place? See Note [Steal]. */
static bool steals(const work_state *w, koila_node n, uint32_t number, uint32_t k)
{
    const koila_sig_info *s = sig_of(w, n);
    const koila_value b = input_of(w, n, s->writes[k].input);
    const koila_value result = w->g->nodes.at[n].first_output + s->n_fresh + k;
    if (!koila__placement_equal(w->p->value[result], w->p->value[b]))
        return false;
    if (k >= MAX_STEALS || s->writes[k].overwrites || !w->s[b].here || w->last_use[b] != number ||
        w->sliced[b].user != KOILA_NONE)
        return false;
    const koila_value r = w->s[b].root;
    const koila_value part = w->s[b].region;
    if (!may_be_written(&w->s[r]) || w->s[part].touching != 1)
        return false;
    if (part == r ? w->s[r].alive != 1 : w->s[r].touching != 0)
        return false;
    for (uint32_t h = 0; h < k; h++)
        if (input_of(w, n, s->writes[h].input) == b)
            return false;
    return true;
}

/* Does nothing but v, whose last use is `number`, use its dense storage? */
static bool has_storage_alone(const work_state *w, koila_value v, uint32_t number)
{
    const life *root = &w->s[w->s[v].root];
    const koila_meta_info *m = koila__value_meta(w->g, v);
    const koila_meta_info *storage = koila__value_meta(w->g, root->made);
    return w->last_use[v] == number && root->alive == 1 && !root->shared &&
           m->n_bytes == storage->n_bytes && koila_meta_is_dense(m) && koila_meta_is_dense(storage);
}

/* The same, of a storage that may be handed on? */
static bool owns_storage(const work_state *w, koila_value v, uint32_t number)
{
    return w->s[w->s[v].root].owned == OWNER_SCOPE && has_storage_alone(w, v, number);
}

/* Which term of the sum that node n makes is written over: its bit of koila_instr.steal; 0: none.
 * See Note [Steal]. */
static uint16_t term_written_over(const work_state *w, koila_node n, uint32_t number)
{
    const koila_sig_info *s = sig_of(w, n);
    const koila_value sum = w->span[n].out;
    const koila_value terms[2] = { input_of(w, n, 0), input_of(w, n, 1) };
    if (w->any_foreign || terms[0] == terms[1])
        return 0;
    for (uint32_t i = 0; i < 2; i++) {
        const koila_value v = terms[i];
        const bool is_alike = s->inputs[i] == s->outputs[0] &&
                              koila__placement_equal(w->p->value[sum], w->p->value[v]);
        if (is_alike && w->s[v].here && w->sliced[v].user == KOILA_NONE &&
            may_be_written(&w->s[w->s[v].root]) && has_storage_alone(w, v, number))
            return (uint16_t)(1u << i);
    }
    return 0;
}

/* Collects a local result: into the whole value, and as a piece for later loops. `number` as in
 * emit_node. Returns the event that ends its storage. */
static koila__event_kind emit_collect(work_state *w, koila_value v, uint32_t number, uint32_t j)
{
    koila__event_kind how = KOILA__LOCAL_FREE;
    const koila_value r = w->s[v].root;
    koila_assert(w->s[v].here && w->s == w->slice);
    const koila_meta_info *m = koila__value_meta(w->g, v);
    const koila_value made = w->s[r].made;
    const koila_meta_info *storage = koila__value_meta(w->g, made);
    if (w->made_whole[v] == j && w->first_term[v] != KOILA_NONE) {
        emit(w, (koila_instr){ .kind = KOILA_DO_ADD,
                               .flags = KOILA_INSTR_SECOND,
                               .id = v,
                               .user = w->first_term[v] });
    } else if (w->made_whole[v] == j) {
        /* what is added to earlier rows' sum must not become the accumulator */
        const bool own = owns_storage(w, v, number) && !koila__adds_on(w->p, v);
        const koila_placement x = w->p->value[v];
        const bool wide = koila__accumulates_wider(w->p, v);
        if (x.kind == KOILA_S) {
            emit(w, (koila_instr){
                        .kind = KOILA_DO_PUT, .flags = own ? KOILA_INSTR_OWNED : 0, .id = v });
            event(w, own ? KOILA__PUT_OWNED : KOILA__PUT, v);
            if (own)
                how = KOILA__LOCAL_FREE_IF_CUT;
        } else {
            emit(w, (koila_instr){
                        .kind = KOILA_DO_ADD, .flags = own ? KOILA_INSTR_OWNED : 0, .id = v });
            koila__event_kind add = KOILA__ADD_CLONE;
            if (own) {
                add = wide ? KOILA__ADD_OWNED_WIDE : KOILA__ADD_OWNED;
                how = wide ? KOILA__LOCAL_FREE_IF_CUT : KOILA__LOCAL_FREE_LATER;
            }
            event(w, add, v);
            w->any_wide |= wide;
        }
        begin_value(w->whole, v, OWNER_COLLECTED);
    }
    if (!w->kept[v] && m->n_bytes == storage->n_bytes && koila__keeps(w, v, j)) {
        emit(w, (koila_instr){ .kind = KOILA_DO_KEEP, .id = v });
        if (v != made) {
            event(w, KOILA__KEPT, v);
            event(w, KOILA__KEPT_FROM, made);
        }
        koila__keep_until_next(w, v, j);
        w->n_keeps++;
        /* the piece owns the storage now: not freed with the slice, not written in place */
        w->s[r].owned = OWNER_NONE;
    }
    return how;
}

/* A node that is emitted: in loop j, or in a whole stage (KOILA_NONE). `number` is its place in the
 * emission order, which last_use refers to. */
typedef struct emission {
    koila_node n;
    koila__addend_kind addend; /* its result: Note [Addends] */
    uint32_t number;
    uint32_t j;
    uint32_t rare; /* of n */
    const koila_sig_info *s;
    uint16_t steal;               /* bits: see koila_instr */
    koila__event_kind free_event; /* ends a storage of this scope */
    koila_value no_graph; /* the graph of a module that nothing reads; KOILA_NONE: no such */
} emission;

/* The graph of a module that runs as it is, where no backward in this scope reads it. */
static koila_value unread_graph(const work_state *w, const emission *x)
{
    if (!(x->rare & IS_MODULE))
        return KOILA_NONE;
    const koila_value graph = w->span[x->n].out_end - 1;
    return exists(w, graph) && w->last_use[graph] == x->number ? graph : KOILA_NONE;
}

/* Makes the missing inputs that a node of a loop reads. */
static koila_status emit_inputs(work_state *w, const emission *x)
{
    const use *const in = w->uses + w->span[x->n].in;
    const use *const end = w->uses + w->span[x->n].in_end;
    const slice_of *const sliced = w->sliced;
    const scope s = w->s;
    for (const use *u = in; u < end; u++) {
        if (u->reads && u->is_whole && u->from != KOILA_NONE)
            w->whole_seen[u->value] = w->stage;
        if (!u->reads || u->is_whole)
            continue;
        const bool there = u->local && s[u->value].here && sliced[u->value].user == KOILA_NONE;
        if (!there) /* usually it is there */
            KOILA_TRY(emit_input(w, x->n, (uint32_t)(u - in), x->j));
    }
    return KOILA_OK;
}

/* The input on whose storage result o of a call begins; KOILA_NONE: on one of its own, or of what
 * is not in this scope. */
static uint32_t begins_on(const work_state *w, const emission *x, uint32_t o)
{
    if (o >= x->s->n_fresh) {
        const uint32_t write = o - x->s->n_fresh;
        const bool is_stolen = write < MAX_STEALS && x->steal >> write & 1;
        return is_stolen ? x->s->writes[write].input : KOILA_NONE;
    }
    if (x->rare & ADDS && x->steal)
        return koila_term_written_over(x->steal);
    return w->aliases[x->n] && w->s[input_of(w, x->n, 0)].here ? 0 : KOILA_NONE;
}

/* Begins the results: on storage of their own, or on that of an input. */
static void begin_results(work_state *w, const emission *x)
{
    const koila_sig_info *s = x->s;
    const koila_value first = w->span[x->n].out;
    const uint32_t n_outputs = s->n_outputs;
    const bool alias = w->aliases[x->n];
    koila__event_kind alloc = x->j != KOILA_NONE ? KOILA__LOCAL_ALLOC : KOILA__WHOLE_ALLOC;
    if (x->j != KOILA_NONE && x->rare & IS_MODULE_BACKWARD)
        alloc = KOILA__LOCAL_MADE;
    for (uint32_t o = 0; o < n_outputs; o++) {
        const koila_value v = first + o;
        if (s->outputs[o] == KOILA_NONE)
            continue;
        const uint32_t input = begins_on(w, x, o);
        const bool of_input = o < s->n_fresh && alias;
        w->sliced[v].user = KOILA_NONE;
        if (input != KOILA_NONE) {
            join_value(w->s, v, input_of(w, x->n, input), of_input && x->rare & SPLITS_UNSAFELY);
            continue;
        }
        /* a view of a leaf or of a whole value owns nothing */
        const bool is_none = of_input || v == x->no_graph;
        begin_value(w->s, v, is_none ? OWNER_NONE : OWNER_SCOPE);
        w->s[v].shared = x->rare & SUMS;
        if (!is_none)
            event(w, alloc, v);
    }
}

/* Note [Shared terms] */
static void share_terms(work_state *w, const emission *x)
{
    const use *const end = w->uses + w->span[x->n].in_end;
    for (const use *u = w->uses + w->span[x->n].in; u < end; u++)
        if (w->s[u->value].here)
            w->s[w->s[u->value].root].shared = true;
}

/* Frees the inputs whose last use this was. */
static void end_inputs(work_state *w, const emission *x)
{
    const use *const end = w->uses + w->span[x->n].in_end;
    const uint32_t *const last_use = w->last_use;
    const scope s = w->s;
    for (const use *u = w->uses + w->span[x->n].in; u < end; u++) {
        const koila_value v = u->value;
        /* last_use is set only for inputs that are read */
        if (last_use[v] != x->number || !u->reads || !s[v].here)
            continue;
        emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
        release_value(w, v, x->free_event);
    }
}

/* Collects the results into accumulators and pieces; those that nobody reads are freed. */
static void end_results(work_state *w, const emission *x)
{
    const koila_value end = w->span[x->n].out_end;
    for (koila_value v = w->span[x->n].out; v < end; v++) {
        koila__event_kind how = x->free_event;
        if (!exists(w, v))
            continue;
        /* most are not collected */
        if (x->j != KOILA_NONE && (w->made_whole[v] == x->j || w->use[v] != KOILA_NONE))
            how = emit_collect(w, v, x->number, x->j);
        if (w->last_use[v] != x->number)
            continue;
        emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
        release_value(w, v, how);
    }
}

/* Note [Addends]: how v, which is one or a sum of some, is made in loop j. */
static koila__addend_kind addend_kind_of(const work_state *w, koila_value v, uint32_t j)
{
    const koila__addend *const all = w->p->addends;
    if (w->any_foreign)
        return KOILA__ADDEND_NOT;
    const koila_value to = all[v].to;
    const bool is_whole = w->made_whole[to] == j && w->n_addends[to] == all[to].n_addends;
    return is_whole ? (koila__addend_kind)all[v].kind : KOILA__ADDEND_NOT;
}

static bool is_made_of_addends(const work_state *w, koila_node n)
{
    const span at = w->span[n];
    return at.out_end - at.out == 1 && koila__is_addend(w->p, at.out);
}

/* Counts the calls of a loop that make addends. */
static void count_addends(work_state *w, const koila_node *order, uint32_t n_order)
{
    const koila__addend *const all = w->p->addends;
    for (uint32_t k = 0; k < n_order && all; k++)
        if (is_made_of_addends(w, order[k]))
            w->n_addends[all[w->span[order[k]].out].to] = 0;
    for (uint32_t k = 0; k < n_order && all; k++) {
        const koila__addend *a = &all[w->span[order[k]].out];
        if (is_made_of_addends(w, order[k]) && a->kind != KOILA__ADDEND_TOLD)
            w->n_addends_left[a->to] = ++w->n_addends[a->to];
    }
}

/* The result is collected, unless it is a part of one. */
static void end_addend(work_state *w, const emission *x)
{
    const koila_value v = w->span[x->n].out;
    const koila_value first = w->first_term[v];
    if (w->p->addends[v].to != v)
        return;
    w->any_wide |= koila__accumulates_wider(w->p, v);
    koila_instr add = { .kind = KOILA_DO_ADD, .flags = KOILA_INSTR_TOLD, .id = v };
    if (first == KOILA_NONE)
        begin_value(w->whole, v, OWNER_COLLECTED);
    else {
        add.flags |= KOILA_INSTR_SECOND;
        add.user = first;
    }
    emit(w, add);
    emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .flags = KOILA_INSTR_TOLD, .id = v });
}

/* A sum or a view of addends. */
static void emit_told(work_state *w, const emission *x)
{
    emit(w, (koila_instr){ .kind = KOILA_DO_RUN, .flags = KOILA_INSTR_TOLD, .id = x->n });
    for (uint32_t i = 0; i < x->s->n_inputs; i++)
        emit(w, (koila_instr){
                    .kind = KOILA_DO_FREE, .flags = KOILA_INSTR_TOLD, .id = input_of(w, x->n, i) });
    end_addend(w, x);
}

/* The call of an addend has run: its storage becomes the accumulator, or is added and ends. */
static void add_up(work_state *w, const emission *x, bool is_first)
{
    const koila_value v = w->span[x->n].out;
    const koila_value to = w->p->addends[v].to;
    const bool wide = koila__accumulates_wider(w->p, v);
    koila__event_kind how = KOILA__LOCAL_FREE;
    if (is_first && koila__adds_on(w->p, to))
        event(w, KOILA__ADD_CLONE, to);
    else if (is_first) {
        event(w, wide ? KOILA__ADD_OWNED_WIDE : KOILA__ADD_OWNED, to);
        how = wide ? KOILA__LOCAL_FREE_IF_CUT : KOILA__LOCAL_FREE_LATER;
    }
    release_value(w, v, how);
}

/* A call whose result goes into an accumulator at once. */
static koila_status emit_addend(work_state *w, emission *x)
{
    const koila_value v = w->span[x->n].out;
    const koila_value to = w->p->addends[v].to;
    const bool is_onto = x->addend == KOILA__ADDEND_ONTO;
    const bool is_begun = w->first_term[to] != KOILA_NONE;
    const bool is_first = w->n_addends_left[to]-- == w->n_addends[to] && !is_begun;
    const uint8_t onto = is_onto ? KOILA_INSTR_ONTO : 0;
    KOILA_TRY(emit_inputs(w, x));
    if (is_onto)
        event(w, is_first ? KOILA__SUM_MADE : KOILA__ADDEND_ALLOC, to);
    else
        begin_results(w, x);
    event(w, KOILA__RUN, x->n);
    emit(w, (koila_instr){ .kind = KOILA_DO_RUN,
                           .flags = (uint8_t)(KOILA_INSTR_ADDS | onto),
                           .id = x->n,
                           .user = to });
    if (!is_onto)
        add_up(w, x, is_first);
    else if (!is_first)
        event(w, KOILA__ADDEND_FREE, to);
    end_inputs(w, x);
    end_addend(w, x);
    return KOILA_OK;
}

/* Note [Second terms]: sets the first term of v, if it is there. */
static bool find_first_term(work_state *w, koila_value v)
{
    const scope s = w->whole;
    const koila_value first = koila__other_term(w, v);
    if (first == KOILA_NONE || koila__adds_on(w->p, v) || !s[first].here || w->is_result[first])
        return false;
    const use *u = uses_of(w, first);
    const life *root = &s[s[first].root];
    const koila_meta_info *storage = koila__value_meta(w->g, root->made);
    if (next_use_of(w, u) || root->alive != 1 || !may_be_written(root) ||
        storage->n_bytes != koila__value_meta(w->g, first)->n_bytes ||
        !koila_meta_is_dense(storage))
        return false;
    w->first_term[v] = first;
    return true;
}

/* A call outside loops adds its result to the first term. */
static void emit_second_term(work_state *w, const emission *x)
{
    const koila_value v = w->span[x->n].out;
    event(w, KOILA__RUN, x->n);
    emit(w, (koila_instr){ .kind = KOILA_DO_RUN,
                           .flags = KOILA_INSTR_ADDS | KOILA_INSTR_ONTO,
                           .id = x->n,
                           .user = w->first_term[v] });
    end_inputs(w, x);
}

/* Of the sum of two that node n, outside loops, makes: the second term. KOILA_NONE: it is added. */
static koila_value second_term(const work_state *w, koila_node n)
{
    for (uint32_t i = 0; i < 2; i++)
        if (w->first_term[input_of(w, n, i)] == input_of(w, n, !i))
            return input_of(w, n, i);
    return KOILA_NONE;
}

/* The sum is there, where its first term was. */
static void emit_sum_of_terms(work_state *w, const emission *x, koila_value second)
{
    const koila_value first = w->first_term[second];
    join_value(w->whole, w->span[x->n].out, first, false);
    emit(w, (koila_instr){
                .kind = KOILA_DO_RUN, .flags = KOILA_INSTR_TOLD, .id = x->n, .user = second });
    emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = second });
    emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = first });
    release_value(w, first, x->free_event);
}

/* A node of Note [Addends]. *is_done: it is one. */
static koila_status emit_added_in_loop(work_state *w, emission *x, bool *is_done)
{
    x->addend = is_made_of_addends(w, x->n) ? addend_kind_of(w, w->span[x->n].out, x->j)
                                            : KOILA__ADDEND_NOT;
    *is_done = x->addend != KOILA__ADDEND_NOT;
    if (x->addend == KOILA__ADDEND_TOLD)
        emit_told(w, x);
    else if (x->addend)
        return emit_addend(w, x);
    return KOILA_OK;
}

/* The same of Note [Second terms]. */
static koila_status emit_added_outside(work_state *w, emission *x, bool *is_done)
{
    const koila_value v = w->span[x->n].out;
    const koila_value second = x->rare & ADDS ? second_term(w, x->n) : KOILA_NONE;
    const bool may_be_second = x->s->n_outputs == 1 && koila__is_second_addend(w->p, v);
    *is_done = second != KOILA_NONE || (may_be_second && find_first_term(w, v));
    if (second != KOILA_NONE)
        emit_sum_of_terms(w, x, second);
    else if (*is_done)
        emit_second_term(w, x);
    return KOILA_OK;
}

static koila_status emit_node(work_state *w, koila_node n, uint32_t number, uint32_t j)
{
    const bool in_loop = j != KOILA_NONE;
    emission x = { .n = n, .number = number, .j = j, .rare = w->rare[n], .s = sig_of(w, n) };
    const uint32_t n_in = x.s->n_inputs;
    const uint32_t n_out = x.s->n_outputs;
    x.free_event = in_loop ? KOILA__LOCAL_FREE : KOILA__WHOLE_FREE;
    koila_assert(w->needed[n] && w->p->node[n].in_loop == in_loop);
    if (w->n_emitted + w->instrs.n > w->max_emitted)
        return KOILA_UNSUPPORTED;
    /* per input: cut anew, fetched, freed; per result: collected, kept, freed */
    TRY_ALLOC(room(w, 3 * n_in + 3 * n_out + 1, 3 * n_in + 5 * n_out + 1));
    bool is_done;
    KOILA_TRY((in_loop ? emit_added_in_loop : emit_added_outside)(w, &x, &is_done));
    if (is_done)
        return KOILA_OK;
    if (in_loop)
        KOILA_TRY(emit_inputs(w, &x));
    if (x.rare & SUMS)
        share_terms(w, &x);
    for (uint32_t k = 0; x.rare & WRITES && k < x.s->n_writes; k++)
        if (steals(w, n, number, k))
            x.steal |= (uint16_t)(1u << k);
    if (x.rare & ADDS)
        x.steal = term_written_over(w, n, number);
    x.no_graph = unread_graph(w, &x);
    begin_results(w, &x);
    event(w, KOILA__RUN, n);
    emit(w, (koila_instr){ .kind = KOILA_DO_RUN,
                           .flags = x.no_graph == KOILA_NONE ? 0 : KOILA_INSTR_NO_GRAPH,
                           .id = n,
                           .steal = x.steal });
    end_inputs(w, &x);
    end_results(w, &x);
    return KOILA_OK;
}

static koila_status finish_stage(work_state *w, koila__schedule *out, bool is_loop, uint16_t axis)
{
    koila__stage *stage = &out->stages[out->n_stages];
    koila_assert(out->n_stages < w->n_levels + w->n_loops);
    koila_instr *instrs =
        koila__arena_copy(&out->arena, w->instrs.at, w->instrs.n * sizeof *instrs);
    stage->events =
        koila__arena_copy(&out->arena, w->events.at, w->events.n * sizeof *stage->events);
    if (!instrs || !stage->events)
        return KOILA_NO_MEMORY;
    w->n_emitted += w->instrs.n;
    stage->n_events = w->events.n;
    stage->any_wide = w->any_wide;
    w->any_wide = false;
    stage->stage = (koila_stage){
        .is_loop = is_loop, .axis = axis, .n_instrs = w->instrs.n, .instrs = instrs
    };
    w->instrs.n = w->events.n = 0;
    out->n_stages++;
    return KOILA_OK;
}

/* A node that only views one value of the same loop and whose results are nothing but targets of
 * it: it may run directly after its producer. */
static bool hoistable(const work_state *w, koila_node n, uint32_t j)
{
    if (!w->is_mere_view[n])
        return false;
    for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++) {
        if (w->made_whole[v] != j)
            return false;
        for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
            if (u->local && w->in_loop[u->user] == j + 1)
                return false;
    }
    return true;
}

/* Writes the recorded order into w->stack, with hoisted views directly after their producers. */
static uint32_t find_order(work_state *w, uint32_t j, uint32_t lo, uint32_t hi)
{
    uint32_t n_order = 0;
    koila_node *order = w->stack;
    for (uint32_t k = lo >> 6; k <= hi >> 6; k++) {
        for (uint64_t bits = w->order_bits[k]; bits; bits &= bits - 1) {
            const koila_node n = k * 64 + (uint32_t)__builtin_ctzll(bits);
            /* comes after its producer */
            if (w->is_mere_view[n] && hoistable(w, n, j) && w->uses[w->span[n].in].local &&
                w->in_loop[w->uses[w->span[n].in].from] == j + 1)
                continue;
            order[n_order++] = n;
            for (uint32_t done = n_order - 1; done < n_order; done++) {
                if (!w->is_viewed[order[done]])
                    continue;
                for (koila_value v = w->span[order[done]].out; v < w->span[order[done]].out_end;
                     v++)
                    for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
                        if (w->in_loop[u->user] == j + 1 && hoistable(w, u->user, j) &&
                            w->uses[w->span[u->user].in].local)
                            order[n_order++] = u->user;
            }
        }
        w->order_bits[k] = 0;
    }
    koila_assert(n_order <= w->n_nodes);
    return n_order;
}

/* Keeps the pieces that loop j used for the next loop that needs them, or releases them. */
static koila_status end_pieces(work_state *w, uint32_t j)
{
    koila_value next;
    for (koila_value v = w->kept_first[j]; v != KOILA_NONE; v = next) {
        next = w->kept_next[v];
        koila_assert(w->kept[v]);
        w->kept[v] = false;
        if (!w->given_up[v] && koila__keeps(w, v, j)) {
            koila__keep_until_next(w, v, j);
            continue;
        }
        if (!w->given_up[v]) { /* not fetched: its producer ran again for another result */
            begin_value(w->s, v, OWNER_PIECE);
            TRY_ALLOC(room(w, 2, 1));
            emit(w, (koila_instr){ .kind = KOILA_DO_FETCH, .flags = KOILA_INSTR_LAST, .id = v });
            emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
            release_value(w, v, KOILA__LOCAL_FREE);
        }
        w->given_up[v] = false;
    }
    return KOILA_OK;
}

/* Are all values of the running slice dead? */
static bool none_is_here(const work_state *w)
{
    for (koila_value v = 0; v < w->n_values; v++)
        if (w->slice[v].here || w->slice[v].alive)
            return false;
    return true;
}

static koila_status emit_loop(work_state *w, koila__schedule *out, uint32_t j)
{
    w->s = w->slice;
    w->stage = out->n_stages;
    const koila__demanded found = koila__find_demand(w, j, &out->work);
    if (is_too_much(w, out->work))
        return KOILA_UNSUPPORTED;
    const uint32_t n_order = found.lo <= found.hi ? find_order(w, j, found.lo, found.hi) : 0;
    const koila_node *const order = w->stack;
    uint32_t *const last_use = w->last_use;
    for (uint32_t k = 0; k < n_order; k++) {
        const span at = w->span[order[k]];
        for (const use *u = w->uses + at.in, *end = w->uses + at.in_end; u < end; u++)
            if (u->reads)
                last_use[u->value] = k;
        for (koila_value v = at.out; v < at.out_end; v++)
            last_use[v] = k;
    }
    count_addends(w, order, n_order);
    for (koila_value v = w->target_first[j]; v != KOILA_NONE; v = w->target_next[v])
        (void)find_first_term(w, v);
    for (uint32_t k = 0; k < n_order; k++)
        KOILA_TRY(emit_node(w, order[k], k, j));
    KOILA_TRY(end_pieces(w, j));
    koila_check(none_is_here(w));
    return finish_stage(w, out, true, w->loops[j].axis);
}

/* Emits the nodes of one level that run once; before them, ends the whole values whose last reader
 * was an earlier loop. */
static koila_status emit_whole(work_state *w, koila__schedule *out, uint32_t level,
                               uint32_t *next_ending)
{
    const uint32_t stage = out->n_stages;
    w->s = w->whole;
    for (; *next_ending < stage; ++*next_ending)
        for (koila_value v = w->ending_first[*next_ending]; v != KOILA_NONE;
             v = w->ending_next[v]) {
            if (!w->whole[v].here)
                continue; /* it ended in a whole stage */
            TRY_ALLOC(room(w, 1, 1));
            emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
            release_value(w, v, KOILA__WHOLE_FREE);
        }
    uint32_t k = 0;
    for (koila_node n = w->whole_of_level[level]; n != KOILA_NONE; n = w->whole_next[n], k++) {
        out->work += work_of(w, n);
        /* a result, or a value that a later stage reads, does not end here, whatever its last use
         * in this stage */
#define LAST_USE(v_)                                                                               \
    do {                                                                                           \
        const koila_value v = (v_);                                                                \
        w->last_use[v] =                                                                           \
            w->is_result[v] || (w->whole_last[v] != KOILA_NONE && w->whole_last[v] > stage)        \
                ? KOILA_NONE                                                                       \
                : k;                                                                               \
    } while (0)
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++) {
            if (!u->reads)
                continue;
            LAST_USE(u->value);
            if (u->from != KOILA_NONE)
                w->whole_seen[u->value] = stage;
        }
        for (koila_value x = w->span[n].out; x < w->span[n].out_end; x++)
            LAST_USE(x);
#undef LAST_USE
    }
    k = 0;
    for (koila_node n = w->whole_of_level[level]; n != KOILA_NONE; n = w->whole_next[n], k++)
        KOILA_TRY(emit_node(w, n, k, KOILA_NONE));
    return finish_stage(w, out, false, 0);
}

/* The next emission ends whole values after these stages. */
static void set_whole_last(work_state *w, const uint32_t *last)
{
    memcpy(w->whole_last, last, w->n_values * sizeof *last);
    memset(w->ending_first, 0xff, (w->n_levels + w->n_loops) * sizeof *w->ending_first);
    for (uint32_t v = w->n_values; v-- > 0;) {
        if (w->whole_last[v] == KOILA_NONE || w->is_result[v])
            continue;
        w->ending_next[v] = w->ending_first[w->whole_last[v]];
        w->ending_first[w->whole_last[v]] = v;
    }
}

/* Did the emission read some whole value for the last time in another stage than was told? */
static bool ends_otherwise(const work_state *w)
{
    for (uint32_t v = 0; v < w->n_values; v++)
        if (w->whole_seen[v] != w->whole_last[v] && !w->is_result[v])
            return true;
    return false;
}

static koila_status make_stages(work_state *w, koila__schedule *s)
{
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        if (!w->needed[n])
            continue;
        if (w->p->node[n].is_again || w->p->node[n].offloads)
            continue;
        s->n_needed++;
        s->work_recorded += work_of(w, n);
    }
    w->max_emitted = koila__max_emitted(w);
    s->stages = koila__arena_array(&s->arena, (size_t)w->n_levels + w->n_loops, sizeof *s->stages);
    TRY_ALLOC(s->stages);
    s->n_loops = w->n_loops;
    for (uint32_t level = 0, j = 0, next_ending = 0; level < w->n_levels; level++) {
        KOILA_TRY(emit_whole(w, s, level, &next_ending));
        for (; j < w->n_loops && w->loops[j].level == level; j++)
            KOILA_TRY(emit_loop(w, s, j));
    }
    s->n_keeps = w->n_keeps;
    /* the last stages may be whole ones */
    return is_too_much(w, s->work) ? KOILA_UNSUPPORTED : KOILA_OK;
}

/* Forgets the instructions of an earlier policy. */
static void forget_emission(work_state *w)
{
    const uint32_t V = w->n_values + 1;
    memset(w->given_up, 0, V * sizeof *w->given_up);
    memset(w->last_use, 0, V * sizeof *w->last_use);
    memset(w->whole, 0, V * sizeof *w->whole);
    memset(w->slice, 0, V * sizeof *w->slice);
    memset(w->sliced, 0xff, V * sizeof *w->sliced);
    memset(w->first_term, 0xff, V * sizeof *w->first_term);
    memset(w->whole_seen, 0xff, V * sizeof *w->whole_seen);
    w->instrs.n = w->events.n = w->n_keeps = 0;
    w->n_emitted = 0;
    w->any_wide = false;
}

/* Into the memory of a recycled schedule. */
static koila_status emit_all(work_state *w, koila__schedule *s)
{
    *s = (koila__schedule){ .arena = w->spare };
    koila__arena_init(&w->spare, &w->mem);
    koila__forget_demand(w);
    forget_emission(w);
    return make_stages(w, s);
}

/* What is known of the policy; NULL: nothing. */
static const uint32_t *find_reads(const work_state *w, koila__keep keep)
{
    for (const whole_reads *x = w->reads; x < w->reads + w->n_reads; x++)
        if (x->keep.horizon == keep.horizon && x->keep.spacing == keep.spacing &&
            x->keep.drops_forward == keep.drops_forward)
            return x->until;
    return NULL;
}

/* The last stages that read whole values, as the policy's work tells them. False: it does not. */
static bool tell_whole_last(work_state *w, koila__keep keep)
{
    const koila__kept kept = w->work_kept; /* stays that of the policy that was asked for */
    if (!find_reads(w, keep))
        (void)koila__schedule_work(w, keep);
    w->work_kept = kept;
    const uint32_t *until = find_reads(w, keep);
    for (uint32_t v = 0; until && v < w->n_values; v++) {
        uint32_t last = w->call_until[v];
        if (until[v] && producer(w, v) != KOILA_NONE) {
            const uint32_t stage = w->loop_stage[until[v] - 1];
            last = last == KOILA_NONE || stage > last ? stage : last;
        }
        w->whole_seen[v] = last;
    }
    return until;
}

/* What is kept decides which loops read a whole value, and the emission decides what is kept. So
 * the first emission ends whole values where the policy's work tells, or where any policy could;
 * where that was wrong, a second one ends them after their last reader. Nothing else depends on it.
 */
koila_status koila__schedule_make(koila__scheduler *w, koila__keep keep, koila__schedule *out,
                                  koila_error *err)
{
    koila__schedule s;
    koila_assert(keep.cheap == w->keep.cheap);
    if (!w->last_run && koila__find_whole_until(w) != KOILA_OK)
        return koila__schedule_failed(KOILA_NO_MEMORY, err);
    const bool is_told = w->n_loops > 1 && tell_whole_last(w, keep);
    w->keep = keep;
    set_whole_last(w, is_told ? w->whole_seen : w->whole_until);
    koila_status status = emit_all(w, &s);
    if (status == KOILA_OK && w->n_loops > 1 && ends_otherwise(w)) {
        koila__schedule_recycle(w, &s);
        set_whole_last(w, w->whole_seen);
        status = emit_all(w, &s);
        koila_assert(status != KOILA_OK || !ends_otherwise(w));
    }
    if (status != KOILA_OK) {
        koila__schedule_recycle(w, &s);
        return koila__schedule_failed(status, err);
    }
    koila__arena_pass_on(&s.arena, &w->spare);
    *out = s;
    return KOILA_OK;
}
