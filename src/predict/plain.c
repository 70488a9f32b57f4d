/* plain.c — a step as plain PyTorch runs it, on the simulated cache: the recorded operators in
 * their order, on the whole batch.
 *
 * A plan gives a value up after its last use. Plain PyTorch keeps it while a variable of the
 * program, a module or a node of autograd holds it: until it is dropped (koila_graph_drop()). A
 * value that nobody ever held lives until its last use. Values that are written in place share the
 * storage of what they overwrite.
 */
#include "predict/simulation.h"

#include "graph/table.h"

#include <stdlib.h>

/* Every write happens in place. */
enum { ALL_WRITES = UINT16_MAX };

/* Note [Gradients that are added up]. What several operators read has a gradient from each. Torch's
 * engine adds each to those before it, in place where it alone holds their sum [read:
 * input_buffer.cpp, accumulate]. Recorded is a sum like any other, into new memory. It is one of
 * the engine's if it is made in the backward, of two results of it, the first of which nobody reads
 * again; and if it has the source line of the backward as a whole, for functions that are written
 * in Python have lines of their own. */

bool koila__is_cast(const koila__sim *s, koila_value v)
{
    const koila_meta_info *m = koila__sim_meta(s, v);
    return s->is_plain && s->o.autocast && koila__is_real_leaf(s, v) && koila__is_half(m->dtype);
}

/* Does v end before the step does? */
static bool ends_in_step(const koila__sim *s, koila_value v)
{
    if (koila_value_get(s->g, v).node == KOILA_NONE)
        return koila__is_cast(s, v) && s->twin[v] == v;
    return !s->is_target[v];
}

static int by_time(const void *a, const void *b)
{
    const koila__ending *x = a;
    const koila__ending *y = b;
    if (x->n_nodes != y->n_nodes)
        return x->n_nodes < y->n_nodes ? -1 : 1;
    if (x->order != y->order)
        return x->order < y->order ? -1 : 1;
    return x->value < y->value ? -1 : x->value > y->value;
}

/* s->ends[v], by value: the last use of v, or the time when it is dropped. */
static void find_ends(koila__sim *s)
{
    const uint32_t n_drops = koila_graph_n_drops(s->g);
    for (koila_value v = 0; v < s->n_values; v++)
        s->ends[v] = (koila__ending){ .value = v, .order = n_drops };
    for (koila_node n = 0; n < koila_graph_n_nodes(s->g); n++) {
        const koila_node_info node = koila_node_get(s->g, n);
        const koila_sig_info *sig = koila_sig_get(s->t, node.sig);
        for (uint32_t o = 0; o < sig->n_outputs; o++)
            s->ends[node.first_output + o].n_nodes = n + 1;
        for (uint32_t i = 0; i < sig->n_inputs; i++)
            s->ends[koila_node_inputs(s->g, n)[i]].n_nodes = n + 1;
    }
    for (uint32_t i = 0; i < n_drops; i++) {
        const koila_drop drop = koila_graph_drop_get(s->g, i);
        koila__ending *const end = &s->ends[drop.value];
        if (drop.n_nodes >= end->n_nodes) {
            end->n_nodes = drop.n_nodes;
            end->order = i;
        }
    }
}

static bool is_forward(const koila__sim *s, koila_node n)
{
    return koila_sig_get(s->t, koila_node_get(s->g, n).sig)->grad_mode & 1;
}

/* Is v a result of the forward with memory of its own? */
static bool is_saved(const koila__sim *s, koila_value v)
{
    const koila_node n = koila_value_get(s->g, v).node;
    if (n == KOILA_NONE || !is_forward(s, n))
        return false;
    const koila_op op = koila_sig_get(s->t, koila_node_get(s->g, n).sig)->op;
    return op < s->n_ops && s->kinds[op] != KOILA__INSIDE_VIEW;
}

/* Sets at[n], of n_nodes + 1, to the time after n nodes when a node of autograd next gives up what
 * it saved. */
static void find_releases(const koila__sim *s, uint32_t *at)
{
    const uint32_t n_nodes = koila_graph_n_nodes(s->g);
    for (uint32_t n = 0; n <= n_nodes; n++)
        at[n] = n_nodes;
    for (uint32_t i = 0; i < koila_graph_n_drops(s->g); i++) {
        const koila_drop drop = koila_graph_drop_get(s->g, i);
        if (is_saved(s, drop.value))
            at[drop.n_nodes] = drop.n_nodes;
    }
    for (uint32_t n = n_nodes; n-- > 0;)
        if (at[n + 1] < at[n])
            at[n] = at[n + 1];
}

/* Autocast holds its casts until it ends, with the forward; a node of autograd until all its
 * operators have run. A checkpoint makes its casts anew when it runs again, in the backward. Leaves
 * of one storage are one cast, told by the first. */
static void end_casts(koila__sim *s)
{
    enum { UNREAD, IN_FORWARD, DECIDED };
    const koila_node middle = s->middle;
    for (koila_node n = 0; n < koila_graph_n_nodes(s->g); n++) {
        const koila_sig_info *sig = koila_sig_get(s->t, koila_node_get(s->g, n).sig);
        for (uint32_t i = 0; i < sig->n_inputs; i++) {
            const koila_value v = s->twin[koila_node_inputs(s->g, n)[i]];
            if (!koila__is_cast(s, v))
                continue;
            s->ends[v].n_nodes = n < middle ? middle : s->release[n + 1];
            if (s->was_read[v] == DECIDED)
                continue;
            if (n > middle && s->was_read[v] == IN_FORWARD && is_forward(s, n))
                s->early_end[v] = middle;
            s->was_read[v] = n < middle ? IN_FORWARD : DECIDED;
        }
    }
}

/* Is v made after node `middle`? */
static bool is_of_backward(const koila__sim *s, koila_value v, koila_node middle)
{
    const koila_node n = koila_value_get(s->g, v).node;
    return n != KOILA_NONE && n > middle;
}

/* s->adds_up: see Note [Gradients that are added up]. */
static void find_sums(koila__sim *s)
{
    const koila_node middle = s->middle;
    for (koila_node n = middle; n < koila_graph_n_nodes(s->g); n++) {
        const koila_node_info node = koila_node_get(s->g, n);
        const koila_sig_info *sig = koila_sig_get(s->t, node.sig);
        if (is_forward(s, n) || !koila__adds_two(s->t, sig) ||
            node.line != koila_node_get(s->g, middle).line)
            continue;
        const koila_value *terms = koila_node_inputs(s->g, n);
        const bool is_read_again = terms[0] == terms[1] || s->ends[terms[0]].n_nodes > n + 1;
        s->adds_up[n] = is_of_backward(s, terms[0], middle) &&
                        is_of_backward(s, terms[1], middle) && !is_read_again &&
                        sig->inputs[0] == sig->outputs[0] &&
                        koila_meta_is_dense(koila__sim_meta(s, terms[0]));
    }
}

koila_status koila__sim_open_plain(koila__sim *s)
{
    s->is_plain = true;
    s->ends = koila__arena_array(&s->arena, 2 * (uint64_t)s->n_values, sizeof *s->ends);
    s->was_read = koila__arena_array(&s->arena, s->n_values, sizeof *s->was_read);
    s->twin = koila__arena_array(&s->arena, s->n_values, sizeof *s->twin);
    s->early_end = koila__arena_array(&s->arena, s->n_values, sizeof *s->early_end);
    s->release = koila__arena_array(&s->arena, koila_graph_n_nodes(s->g) + 1, sizeof *s->release);
    s->adds_up = koila__arena_array(&s->arena, koila_graph_n_nodes(s->g), 1);
    if (!s->ends || !s->was_read || !s->twin || !s->early_end || !s->release || !s->adds_up)
        return s->status = KOILA_NO_MEMORY;
    find_ends(s);
    find_sums(s);
    find_releases(s, s->release);
    for (koila_value v = 0; v < s->n_values; v++)
        s->twin[v] = v;
    return KOILA_OK;
}

void koila__sim_sort_ends(koila__sim *s)
{
    /* a result that nobody uses, but was dropped before the end: a by-product */
    for (koila_value v = 0; v < s->n_values; v++)
        if (s->is_target[v] && s->ends[v].order < koila_graph_n_drops(s->g) &&
            s->ends[v].n_nodes < koila_graph_n_nodes(s->g))
            s->is_target[v] = s->is_grad[v] = 0;
    end_casts(s);
    for (koila_value v = 0; v < s->n_values; v++)
        if (ends_in_step(s, v))
            s->ends[s->n_ends++] = s->ends[v];
    for (koila_value v = 0; v < s->n_values; v++)
        if (s->early_end[v])
            s->ends[s->n_ends++] = (koila__ending){ .n_nodes = s->early_end[v], .value = v };
    qsort(s->ends, s->n_ends, sizeof *s->ends, by_time);
}

/* Autocast's copies of parameters that node n reads, where they are not there yet. */
static void make_casts(koila__sim *s, koila_node n)
{
    const koila_sig_info *sig = koila_sig_get(s->t, koila_node_get(s->g, n).sig);
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_value v = koila_node_inputs(s->g, n)[i];
        const koila_value first = s->twin[v];
        if (s->whole[v] || !koila__is_cast(s, v))
            continue;
        if (!s->whole[first])
            s->whole[first] = koila__storage_new(s, koila__whole_bytes(s, first), first);
        if (v != first)
            s->whole[v] = koila__storage_hold(s, s->whole[first]);
    }
}

/* The end of v, and of all leaves that are the same cast. */
static void end_value(koila__sim *s, koila_value v)
{
    koila__storage_drop(s, &s->whole[v]);
    for (koila_value u = v + 1; u < s->n_values && koila__is_cast(s, v); u++)
        if (s->twin[u] == v)
            koila__storage_drop(s, &s->whole[u]);
}

void koila__sim_run_plain(koila__sim *s)
{
    uint32_t next = 0;
    const koila_node middle = s->middle;
    for (koila_node n = 0; n < koila_graph_n_nodes(s->g) && !s->status; n++) {
        if (n == middle)
            koila__sim_drop_last_outputs(s);
        if (s->o.autocast)
            make_casts(s, n);
        koila__sim_run_node(s, n, ALL_WRITES);
        while (next < s->n_ends && s->ends[next].n_nodes <= n + 1)
            end_value(s, s->ends[next++].value);
    }
}
