/* rules_custom.c — rules that users give: koila.register_rule("mylib::op", "S0,R->S0; R,S1->S1"),
 * and koila.opaque().
 *
 * A user's rule is a list of alternatives. Each names, in order, the placement of every tensor
 * argument and every result: R whole, S<d> sliced along dimension d, P partial sum. The first
 * alternative that accepts every sliced or partial input as it is applies. The algebra is the
 * user's responsibility; everything else (sizes, axes, free slices of whole inputs) is checked as
 * for any rule.
 *
 *   rule  := alternative (";" alternative)*       alternative := items "->" items
 *   items := item ("," item)*                     item        := "R" | "S" digit+ | "P"
 */
#include "placement/rules.h"
#include "graph/table.h"

typedef struct item {
    char kind; /* R, S, P; 0: the text is malformed */
    uint32_t dim;
} item;

static const char *skip(const char *s)
{
    while (*s == ' ')
        s++;
    return s;
}

static const char *read_item(const char *s, item *out)
{
    s = skip(s);
    *out = (item){ *s, 0 };
    if (*s == 'R' || *s == 'P')
        return skip(s + 1);
    if (*s != 'S' || s[1] < '0' || s[1] > '9') {
        out->kind = 0;
        return s;
    }
    for (s++; *s >= '0' && *s <= '9'; s++) {
        out->dim = out->dim * 10 + (uint32_t)(*s - '0');
        if (out->dim >= KOILA_MAX_DIMS) {
            out->kind = 0;
            return s;
        }
    }
    return skip(s);
}

/* One side of an alternative into list[cap]; *n may become larger than cap. NULL when malformed. */
static const char *read_items(const char *s, item *list, uint32_t cap, uint32_t *n)
{
    *n = 0;
    for (;;) {
        item x;
        s = read_item(s, &x);
        if (!x.kind)
            return NULL;
        if (*n < cap)
            list[*n] = x;
        ++*n;
        if (*s != ',')
            return s;
        s++;
    }
}

enum { MAX_ITEMS = 64 };

koila_status koila_table_rule(koila_table *t, const char *op, const char *rule, koila_error *err)
{
    item list[MAX_ITEMS];
    uint32_t n;
    for (const char *s = rule;;) {
        const char *at = read_items(s, list, MAX_ITEMS, &n);
        if (!at || n > MAX_ITEMS || at[0] != '-' || at[1] != '>')
            return koila__fail(
                err, KOILA_BAD_INPUT, (uint64_t)((at ? at : s) - rule),
                "rule \"%s\": expected items R, S<dim> or P, separated by commas, then \"->\"",
                rule);
        s = at + 2;
        at = read_items(s, list, MAX_ITEMS, &n);
        if (!at || n > MAX_ITEMS || (*at && *at != ';'))
            return koila__fail(err, KOILA_BAD_INPUT, (uint64_t)((at ? at : s) - rule),
                               "rule \"%s\": expected results R, S<dim> or P, separated by commas",
                               rule);
        if (!*at)
            break;
        s = at + 1;
    }
    koila__user_rule entry = { 0 };
    koila_status status = koila_table_text(t, op, &entry.op);
    if (status == KOILA_OK)
        status = koila_table_text(t, rule, &entry.text);
    if (status != KOILA_OK)
        return koila__fail(err, status, 0, "%s", koila_status_text(status));
    for (uint32_t i = 0; i < t->user_rules.n; i++)
        if (t->user_rules.at[i].op == entry.op) {
            t->user_rules.at[i] = entry;
            return KOILA_OK;
        }
    return koila__vec_push(&t->mem, &t->user_rules, entry)
               ? KOILA_OK
               : koila__fail(err, KOILA_NO_MEMORY, 0, "the host is out of memory");
}

const char *koila__user_rule_of(const koila_table *t, koila_op op)
{
    for (uint32_t i = 0; i < t->user_rules.n; i++)
        if (strcmp(koila_text(t, t->user_rules.at[i].op), t->ops.at[op].twin) == 0)
            return koila_text(t, t->user_rules.at[i].text);
    return NULL;
}

/* The S along dimension dim with the block structure of the largest sliced input. */
static koila_placement rows_along(const koila__case *c, uint32_t dim)
{
    const uint32_t lead = koila__lead(c);
    return lead == KOILA_NONE ? koila__s(c, dim, 1, 1) : koila__moved(c->in[lead], dim);
}

static bool try_alternative(koila__case *c, const item *in, const item *out)
{
    bool sharded = false;
    for (uint32_t i = 0; i < c->n_in; i++) {
        const koila_placement now = c->in[i];
        if (in[i].kind == 'R') {
            if (!koila__is_r(now))
                return false;
            koila__need_r(c, i);
        } else if (in[i].kind == 'P') {
            if (!koila__is_sum(now))
                return false;
            sharded = true;
        } else {
            if (koila__is_p(now) || (koila__is_s(now) && now.dim != in[i].dim))
                return false;
            if (!koila__need(c, i, koila__is_s(now) ? now : rows_along(c, in[i].dim)))
                return false;
            sharded |= koila__is_s(now);
        }
    }
    for (uint32_t j = 0; sharded && j < c->n_out; j++) {
        if (!c->out_meta[j])
            continue;
        /* a result of a call in a loop is sharded or partial */
        if (out[j].kind == 'R')
            return false;
        c->out[j] = out[j].kind == 'P' ? koila__p(c, KOILA_SUM) : rows_along(c, out[j].dim);
        if (koila__is_s(c->out[j]) && !koila__fits(c, c->out[j], c->out_meta[j]))
            return false;
    }
    return sharded;
}

bool koila__rule_user(koila__case *c)
{
    item in[MAX_ITEMS], out[MAX_ITEMS];
    uint32_t n_in, n_out;
    for (const char *s = c->user_rule; s; s = *s == ';' ? s + 1 : NULL) {
        s = read_items(s, in, MAX_ITEMS, &n_in);
        koila_assert(s); /* koila_table_rule has read it */
        s = read_items(s + strlen("->"), out, MAX_ITEMS, &n_out);
        koila_assert(s);
        if (n_in == c->n_in && n_out == c->n_out && try_alternative(c, in, out))
            return true;
    }
    return false;
}

/* koila::opaque(inputs, parameters, kinds, id) -> results
 * koila::opaque_kept(inputs, parameters, kinds, held, id) -> results, graph
 * koila::opaque_backward(grads, inputs, parameters, kept, given, wanted, kinds, laid, id)
 *     -> gradients
 *
 * A module or function that runs as it is. Rows are independent along dimension 0 of what is
 * batched, and parameters are whole.
 *   kinds   says of each input what it is: ROWS of the batch, WHOLE, or EITHER, as it comes;
 *           EACH entry of dimension 0 is a row, also where that is a dimension of tokens beside one
 *           of the batch
 *   graph   stands for the autograd graph of one slice: `held` bytes a row that wait for its
 *           backward; it is opaque, Note [Opaque]
 *   kept    results that share memory with the graph, then the graph; an empty list: the backward
 *           runs the module again
 *   given   the results that have a gradient, in the order of `grads`
 *   wanted  the inputs and parameters, counted together, whose gradients are made: those of rows
 *           are rows, all others are sums
 *   laid    strides of gradients that do not lie as their parameters do
 */
enum { EITHER, ROWS, WHOLE, EACH };

/* Entry i of the list of ints at position pos; -1: there is none. */
static int64_t entry(const koila__case *c, uint32_t pos, uint32_t i)
{
    const koila_arg *a = koila__arg(c, pos);
    if (!a || a->kind != KOILA_ARG_LIST || i >= a->n || a[1 + i].kind != KOILA_ARG_INT)
        return -1;
    return a[1 + i].u.i;
}

/* Is the input of this kind rows, in any case? */
static bool is_rows(int64_t kind) { return kind == ROWS || kind == EACH; }

/* Sliced rows along dimension 0 among the first n inputs, of kinds at pos; KOILA_NONE: the call is
 * not cut. */
static uint32_t lead_of_rows(const koila__case *c, uint32_t n, uint32_t pos)
{
    const uint32_t lead = koila__lead_among(c, n);
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim != 0)
        return KOILA_NONE;
    const bool may_be_tokens = entry(c, pos, 0) == EACH && !koila__is_opaque(c->in[lead]);
    return may_be_tokens || c->in[lead].outer == 1 ? lead : KOILA_NONE;
}

/* Inputs [first, first + n) of the module, of which entry i of `kinds` at pos tells input i. */
static bool need_inputs(koila__case *c, uint32_t pos, uint32_t first, uint32_t n, koila_placement p)
{
    for (uint32_t i = 0; i < n; i++) {
        const koila_placement is = c->in[first + i];
        const int64_t kind = entry(c, pos, i);
        if (is_rows(kind) ? !koila__need(c, first + i, p)
                          : !koila__is_r(is) && (kind != EITHER || !koila__placement_equal(is, p)))
            return false;
    }
    return true;
}

static bool are_whole(const koila__case *c, uint32_t first, uint32_t n)
{
    for (uint32_t i = first; i < first + n; i++)
        if (!koila__is_r(c->in[i]))
            return false;
    return true;
}

static bool forward(koila__case *c)
{
    uint32_t at, n_inputs, first, n;
    if (!koila__arg_tensors(c, 0, &at, &n_inputs) || !koila__arg_tensors(c, 1, &first, &n))
        return false;
    const uint32_t lead = lead_of_rows(c, n_inputs, 2);
    return lead != KOILA_NONE && are_whole(c, first, n) &&
           need_inputs(c, 2, at, n_inputs, c->in[lead]) && koila__out_all(c, c->in[lead]);
}

bool koila__rule_opaque(koila__case *c) { return forward(c); }

bool koila__rule_opaque_kept(koila__case *c)
{
    if (!c->n_out || !forward(c))
        return false;
    c->out[c->n_out - 1] = koila__opaque(c);
    return true;
}

/* Results that the graph shares are rows like the gradients, and the graph is that of the slice. */
static bool need_kept(koila__case *c, uint32_t first, uint32_t n, koila_placement p)
{
    for (uint32_t i = first; i + 1 < first + n; i++)
        if (!koila__need(c, i, p))
            return false;
    return !n || koila__is_opaque(c->in[first + n - 1]);
}

bool koila__rule_opaque_backward(koila__case *c)
{
    uint32_t first, at, n_grads, n_inputs, n_kept, n;
    if (!koila__arg_tensors(c, 0, &first, &n_grads) || !koila__arg_tensors(c, 1, &at, &n_inputs))
        return false;
    const uint32_t lead = lead_of_rows(c, n_grads + n_inputs, 6);
    if (lead == KOILA_NONE || !need_inputs(c, 6, at, n_inputs, c->in[lead]) ||
        !koila__arg_tensors(c, 2, &first, &n) || !are_whole(c, first, n) ||
        !koila__arg_tensors(c, 3, &first, &n_kept) || !need_kept(c, first, n_kept, c->in[lead]))
        return false;
    for (uint32_t i = 0; i < n_grads; i++)
        if (!koila__need(c, i, c->in[lead])) /* a whole gradient is sliced like the results */
            return false;
    for (uint32_t j = 0; j < c->n_out; j++) {
        const int64_t of = entry(c, 5, j);
        const bool is_input = of >= 0 && of < (int64_t)n_inputs;
        if (!c->out_meta[j])
            continue;
        const bool of_rows =
            is_input && (koila__is_s(c->in[at + of]) || is_rows(entry(c, 6, (uint32_t)of)));
        c->out[j] = of_rows ? c->in[lead] : koila__p(c, KOILA_SUM);
    }
    return true;
}
