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

/* koila::opaque(inputs, parameters, id) -> results: rows are independent along dim 0 of every
 * batched input and of every result. koila::opaque_backward(grads, inputs, parameters, id) ->
 * gradients of inputs, then of parameters: those of rows are rows, all others are sums. */
static bool rows_of_dim_0(koila__case *c, uint32_t first, uint32_t n, koila_placement lead)
{
    for (uint32_t i = first; i < first + n; i++)
        if (!koila__is_r(c->in[i]) &&
            (!koila__is_s(c->in[i]) || !koila__placement_equal(c->in[i], lead)))
            return false;
    return true;
}

bool koila__rule_opaque(koila__case *c)
{
    const uint32_t lead = koila__lead(c);
    uint32_t first, n;
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim != 0 || c->in[lead].outer != 1)
        return false;
    if (!koila__arg_tensors(c, 0, &first, &n) || !rows_of_dim_0(c, 0, c->n_in, c->in[lead]))
        return false;
    return koila__out_all(c, c->in[lead]);
}

bool koila__rule_opaque_backward(koila__case *c)
{
    const uint32_t lead = koila__lead(c);
    uint32_t n_grads, n_inputs, first;
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim != 0 || c->in[lead].outer != 1)
        return false;
    if (!koila__arg_tensors(c, 0, &first, &n_grads) ||
        !koila__arg_tensors(c, 1, &first, &n_inputs) || !rows_of_dim_0(c, 0, c->n_in, c->in[lead]))
        return false;
    for (uint32_t i = 0; i < n_grads; i++)
        /* a whole gradient is sliced like the results */
        if (!koila__need(c, i, c->in[lead]))
            return false;
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j])
            continue;
        c->out[j] = j < n_inputs && koila__is_s(c->in[n_grads + j]) ? c->in[n_grads + j]
                                                                    : koila__p(c, KOILA_SUM);
    }
    return true;
}
