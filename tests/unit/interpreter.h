/* interpreter.h — runs recorded graphs and plans on small tensors, for the schedule oracle. Slow
 * and simple on purpose, and it shares nothing with the planner but the list of instructions.
 *
 * Elements are integers modulo a prime, so every linear operator is exact whatever the order of a
 * sum, and mean() is a multiplication by an inverse. A tensor is a view of a store with a count of
 * its users, so a write in place that should not have happened is seen by the others. Bytes are
 * counted by the dtype recorded; stores of leaves are not counted: they were there before. */
#ifndef KOILA_TEST_INTERPRETER_H
#define KOILA_TEST_INTERPRETER_H

#include "harness.h"
#include "engine/live.h"
#include "engine/plan_inside.h"
#include "engine/retold.h"
#include "graph/table.h"

#define PRIME UINT64_C(2147483647)

typedef struct heap {
    uint64_t live, peak;
    uint32_t n_stores; /* all, leaves too */
} heap;

typedef struct store {
    heap *h;
    uint32_t n_users;
    uint64_t n_bytes; /* counted */
    uint64_t at[];
} store;

typedef struct tensor {
    store *s;
    uint32_t n_dims, n_element_bytes;
    int64_t size[3], stride[3], offset;
} tensor;

static int64_t n_elements(const tensor *t)
{
    int64_t n = 1;
    for (uint32_t d = 0; d < t->n_dims; d++)
        n *= t->size[d];
    return n;
}
/* A fresh contiguous tensor of zeros. */
static tensor *make(heap *h, bool counted, uint32_t n_element_bytes, uint32_t n_dims,
                    const int64_t *size)
{
    tensor *t = calloc(1, sizeof *t);
    t->n_dims = n_dims;
    t->n_element_bytes = n_element_bytes;
    int64_t step = 1;
    for (uint32_t d = n_dims; d-- > 0;) {
        t->size[d] = size[d];
        t->stride[d] = step;
        step *= size[d];
    }
    const size_t n = (size_t)n_elements(t);
    t->s = calloc(1, sizeof *t->s + n * sizeof t->s->at[0]);
    t->s->h = h;
    t->s->n_users = 1;
    t->s->n_bytes = counted ? n * n_element_bytes : 0;
    h->live += t->s->n_bytes;
    h->n_stores++;
    if (h->live > h->peak)
        h->peak = h->live;
    return t;
}
static tensor *view_of(const tensor *t)
{
    tensor *v = malloc(sizeof *v);
    *v = *t;
    v->s->n_users++;
    return v;
}
static void drop(tensor **slot)
{
    tensor *t = *slot;
    *slot = NULL;
    if (!t)
        return;
    if (--t->s->n_users == 0) {
        t->s->h->live -= t->s->n_bytes;
        t->s->h->n_stores--;
        free(t->s);
    }
    free(t);
}
/* The k-th element in order of indices. */
static uint64_t *element(const tensor *t, int64_t k)
{
    int64_t at = t->offset;
    for (uint32_t d = t->n_dims; d-- > 0;) {
        at += k % t->size[d] * t->stride[d];
        k /= t->size[d];
    }
    return &t->s->at[at];
}
/* The element that broadcasts to the k-th of `of`. */
static uint64_t spread(const tensor *t, const tensor *of, int64_t k)
{
    int64_t at = t->offset;
    for (uint32_t d = of->n_dims; d-- > 0;) {
        const int64_t i = k % of->size[d];
        k /= of->size[d];
        const int64_t x = (int64_t)d - (int64_t)(of->n_dims - t->n_dims);
        if (x >= 0 && t->size[x] != 1)
            at += i * t->stride[x];
    }
    return t->s->at[at];
}
static void copy_elements(const tensor *to, const tensor *from)
{
    for (int64_t k = 0; k < n_elements(to); k++)
        *element(to, k) = *element(from, k);
}
static tensor *narrow(const tensor *t, uint32_t dim, int64_t at, int64_t n)
{
    tensor *v = view_of(t);
    v->offset += at * v->stride[dim];
    v->size[dim] = n;
    return v;
}
static uint64_t mod_power(uint64_t x, uint64_t n)
{
    uint64_t y = 1;
    for (x %= PRIME; n; n >>= 1, x = x * x % PRIME)
        if (n & 1)
            y = y * x % PRIME;
    return y;
}
static uint64_t mod_ratio(int64_t a, int64_t b)
{
    return b ? (uint64_t)a % PRIME * mod_power((uint64_t)b, PRIME - 2) % PRIME : 0;
}
static uint64_t relu(uint64_t x) { return x < PRIME / 2 ? x : 0; }

/* ---- operators */

enum { MOST_INPUTS = 16 }; /* of a call */

static int64_t int_arg(const koila_sig_info *s, uint32_t pos)
{
    const koila_arg *a = &s->tokens[s->start[pos]];
    return a->kind == KOILA_ARG_LIST ? a[1].u.i : a->u.i;
}
static int64_t number_arg(const koila_sig_info *s, uint32_t pos)
{
    const koila_arg *a = &s->tokens[s->start[pos]];
    return a->kind == KOILA_ARG_FLOAT ? (int64_t)a->u.f : a->u.i;
}
static bool reduced(const koila_sig_info *s, uint32_t d)
{
    const koila_arg *a = &s->tokens[s->start[1]];
    for (uint32_t i = 1; i <= a->n; i++)
        if (a[i].u.i == (int64_t)d || a[i].u.i == (int64_t)d - 2)
            return true;
    return false;
}

/* A view call; NULL when the operator is none. `size`: of the result. */
static tensor *run_view(const char *name, const koila_sig_info *s, const tensor *in,
                        const int64_t *size)
{
    tensor *v;
    if (!strcmp(name, "aten::t")) {
        v = view_of(in);
        v->size[0] = in->size[1];
        v->size[1] = in->size[0];
        v->stride[0] = in->stride[1];
        v->stride[1] = in->stride[0];
        return v;
    }
    if (!strcmp(name, "aten::alias"))
        return view_of(in);
    if (!strcmp(name, "aten::expand")) {
        v = view_of(in);
        for (uint32_t d = 0; d < 2; d++)
            if (v->size[d] != size[d]) {
                v->size[d] = size[d];
                v->stride[d] = 0;
            }
        return v;
    }
    if (!strcmp(name, "aten::view")) {
        v = view_of(in);
        int64_t step = 1;
        for (uint32_t d = 2; d-- > 0; step *= size[d]) {
            v->size[d] = size[d];
            v->stride[d] = step;
        }
        return v;
    }
    if (!strcmp(name, "aten::select.int")) {
        v = narrow(in, (uint32_t)int_arg(s, 1), int_arg(s, 2), 1);
        v->n_dims = 1; /* of dimension 1 of 2 */
        return v;
    }
    if (!strcmp(name, "aten::slice.Tensor"))
        return narrow(in, (uint32_t)int_arg(s, 1), int_arg(s, 2), int_arg(s, 3) - int_arg(s, 2));
    return NULL;
}

static bool broadcasts(const tensor *t, uint32_t n_dims, const int64_t *size)
{
    if (t->n_dims > n_dims)
        return false;
    for (uint32_t d = 0; d < t->n_dims; d++)
        if (t->size[d] != 1 && t->size[d] != size[n_dims - t->n_dims + d])
            return false;
    return true;
}
/* Would torch take these inputs and give a result of this size? */
static bool shapes_agree(const char *name, const koila_sig_info *s, tensor *const *in,
                         uint32_t n_dims, const int64_t *size)
{
    if (!strcmp(name, "aten::mm"))
        return in[0]->size[0] == size[0] && in[0]->size[1] == in[1]->size[0] &&
               in[1]->size[1] == size[1];
    if (!strcmp(name, "aten::sum.dim_IntList") || !strcmp(name, "aten::mean.dim") ||
        !strcmp(name, "aten::amax")) {
        for (uint32_t d = 0; d < 2; d++)
            if (size[d] != (reduced(s, d) ? 1 : in[0]->size[d]))
                return false;
        return true;
    }
    if (!strcmp(name, "aten::select_backward"))
        return in[0]->size[0] == size[1 - int_arg(s, 2)] && int_arg(s, 3) < size[int_arg(s, 2)];
    if (!strcmp(name, "aten::stack"))
        return s->n_inputs == size[int_arg(s, 1)] && in[0]->size[0] == size[1 - int_arg(s, 1)];
    if (!strcmp(name, "aten::slice_backward")) {
        const uint32_t dim = (uint32_t)int_arg(s, 2);
        return in[0]->size[dim] == int_arg(s, 4) - int_arg(s, 3) && int_arg(s, 4) <= size[dim] &&
               in[0]->size[1 - dim] == size[1 - dim];
    }
    if (!strcmp(name, "aten::flip") || !strcmp(name, "aten::cumsum"))
        return memcmp(in[0]->size, size, 2 * sizeof *size) == 0;
    bool full[3] = { 0 };
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        if (!broadcasts(in[i], n_dims, size))
            return false;
        for (uint32_t d = 0; d < in[i]->n_dims; d++)
            full[n_dims - in[i]->n_dims + d] |= in[i]->size[d] == size[n_dims - in[i]->n_dims + d];
    }
    for (uint32_t d = 0; d < n_dims && s->n_inputs; d++)
        if (!full[d])
            return false;
    return true;
}

/* What a written view becomes. False when the operator is unknown. */
static bool run_write(const char *name, const tensor *to, tensor *const *in)
{
    const bool add = !strcmp(name, "aten::add_.Tensor");
    const bool mul = !strcmp(name, "aten::mul_.Tensor");
    if (in[1] && !broadcasts(in[1], to->n_dims, to->size))
        return false;
    for (int64_t k = 0; k < n_elements(to); k++) {
        uint64_t *x = element(to, k);
        if (add)
            *x = (*x + spread(in[1], to, k)) % PRIME;
        else if (mul)
            *x = *x * spread(in[1], to, k) % PRIME;
        else if (!strcmp(name, "aten::relu_"))
            *x = relu(*x);
        else if (!strcmp(name, "aten::copy_"))
            *x = spread(in[1], to, k);
        else
            return false;
    }
    return true;
}

/* An operator of host memory: a copy that is not counted there, a counted one back. A copy is
 * complete at once: what is checked is when its value may die. NULL when the operator is none. */
static tensor *run_offload(heap *h, const char *name, tensor *const *in)
{
    if (!strcmp(name, "koila::offloaded") || !strcmp(name, "koila::fetched"))
        return view_of(in[0]);
    const bool back = !strcmp(name, "koila::fetch");
    if (!back && strcmp(name, "koila::offload") != 0)
        return NULL;
    tensor *copy = make(h, back, in[0]->n_element_bytes, in[0]->n_dims, in[0]->size);
    copy_elements(copy, in[0]);
    return copy;
}

/* A fresh result; NULL when the operator is unknown. `scale`: what a mean over a slice is
 * multiplied with. */
static tensor *run_fresh(heap *h, const char *name, const koila_sig_info *s, tensor *const *in,
                         uint32_t n_bytes, uint32_t n_dims, const int64_t *size, uint64_t scale)
{
    tensor *out = make(h, true, n_bytes, n_dims, size);
    const int64_t n = n_elements(out);
    if (!strcmp(name, "aten::mm")) {
        for (int64_t i = 0; i < size[0]; i++)
            for (int64_t j = 0; j < size[1]; j++) {
                uint64_t sum = 0;
                for (int64_t k = 0; k < in[0]->size[1]; k++)
                    sum += *element(in[0], i * in[0]->size[1] + k) *
                           *element(in[1], k * in[1]->size[1] + j) % PRIME;
                *element(out, i * size[1] + j) = sum % PRIME;
            }
        return out;
    }
    if (!strcmp(name, "aten::zeros") || !strcmp(name, "aten::zeros_like"))
        return out;
    if (!strcmp(name, "aten::stack") || !strcmp(name, "aten::select_backward")) {
        const bool is_stack = !strcmp(name, "aten::stack");
        const uint32_t dim = (uint32_t)int_arg(s, is_stack ? 1 : 2);
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            tensor *part = narrow(out, dim, is_stack ? i : int_arg(s, 3), 1);
            copy_elements(part, in[i]);
            drop(&part);
        }
        return out;
    }
    if (!strcmp(name, "aten::slice_backward")) {
        const uint32_t dim = (uint32_t)int_arg(s, 2);
        tensor *part = narrow(out, dim, int_arg(s, 3), in[0]->size[dim]);
        copy_elements(part, in[0]);
        drop(&part);
        return out;
    }
    for (int64_t k = 0; k < n; k++) {
        uint64_t *x = element(out, k);
        if (!strcmp(name, "aten::add.Tensor"))
            *x = (spread(in[0], out, k) + spread(in[1], out, k)) % PRIME;
        else if (!strcmp(name, "aten::sub.Tensor"))
            *x = (spread(in[0], out, k) + PRIME - spread(in[1], out, k)) % PRIME;
        else if (!strcmp(name, "aten::mul.Tensor"))
            *x = spread(in[0], out, k) * spread(in[1], out, k) % PRIME;
        else if (!strcmp(name, "aten::div.Tensor") && s->n_inputs == 1)
            *x = spread(in[0], out, k) * mod_ratio(1, number_arg(s, 1)) % PRIME;
        else if (!strcmp(name, "aten::relu"))
            *x = relu(spread(in[0], out, k));
        else if (!strcmp(name, "aten::neg"))
            *x = (PRIME - spread(in[0], out, k)) % PRIME;
        else if (!strcmp(name, "aten::clone"))
            *x = spread(in[0], out, k);
        else if (!strcmp(name, "aten::flip")) {
            const int64_t i = k / size[1];
            const int64_t j = k % size[1];
            *x = *element(in[0], int_arg(s, 1) == 0 ? (size[0] - 1 - i) * size[1] + j
                                                    : i * size[1] + size[1] - 1 - j);
        } else if (!strcmp(name, "aten::cumsum")) {
            const int64_t d = int_arg(s, 1);
            const int64_t step = d == 0 ? size[1] : 1;
            const int64_t i = d == 0 ? k / size[1] : k % size[1];
            *x = (*element(in[0], k) + (i ? *element(out, k - step) : 0)) % PRIME;
        } else {
            const bool max = !strcmp(name, "aten::amax");
            const bool mean = !strcmp(name, "aten::mean.dim");
            if (!max && !mean && strcmp(name, "aten::sum.dim_IntList") != 0) {
                drop(&out);
                return NULL;
            }
            const int64_t rows = reduced(s, 0) ? in[0]->size[0] : 1;
            const int64_t cols = reduced(s, 1) ? in[0]->size[1] : 1;
            uint64_t y = 0;
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < cols; j++) {
                    const uint64_t e =
                        *element(in[0], (k / size[1] + i) * in[0]->size[1] + k % size[1] + j);
                    y = max ? (e > y ? e : y) : (y + e) % PRIME;
                }
            *x = mean ? y * mod_ratio(1, rows * cols) % PRIME * scale % PRIME : y;
        }
    }
    return out;
}

__attribute__((unused)) static bool same_elements(const tensor *a, const tensor *b)
{
    if (!a || !b || a->n_dims != b->n_dims ||
        memcmp(a->size, b->size, a->n_dims * sizeof *a->size) != 0)
        return false;
    for (int64_t k = 0; k < n_elements(a); k++)
        if (*element(a, k) != *element(b, k))
            return false;
    return true;
}

/* A leaf's elements depend on its name alone. */
static tensor *leaf_tensor(heap *h, const koila_graph *g, koila_value v, uint64_t seed)
{
    const koila_meta_info *m = koila__value_meta(g, v);
    tensor *t = make(h, false, koila_dtype_bytes(m->dtype), m->n_dims, m->size);
    for (int64_t k = 0; k < n_elements(t); k++)
        *element(t, k) = koila__mix(seed, (uint64_t)k) % PRIME;
    return t;
}

/* ---- a recorded graph, whole, every value its own store: the truth. Leaves that value[] has
 * already stay. */

__attribute__((unused)) static bool run_recorded(heap *h, const koila_graph *g, tensor **value)
{
    for (uint32_t v = 0; v < g->values.n; v++)
        if (g->values.at[v].node == KOILA_NONE && !value[v])
            value[v] = leaf_tensor(h, g, v, v);
    for (uint32_t n = 0; n < g->nodes.n; n++) {
        const koila_sig_info *s = koila__node_sig(g, n);
        const char *name = koila_op_name(g->table, s->op);
        tensor *in[MOST_INPUTS] = { 0 }, *out;
        for (uint32_t i = 0; i < s->n_inputs; i++)
            in[i] = value[g->inputs.at[g->nodes.at[n].first_input + i]];
        const koila_meta_info *m = koila__meta(g->table, s->outputs[0]);
        if (s->n_writes) {
            out = make(h, false, koila_dtype_bytes(m->dtype), m->n_dims, m->size);
            copy_elements(out, in[0]);
            tensor *to = view_of(out);
            for (uint32_t l = 0; l < s->writes[0].n_links; l++) {
                const koila_sig_info *view = koila__sig(g->table, s->writes[0].links[l].sig);
                tensor *next = run_view(koila_op_name(g->table, view->op), view, to,
                                        koila__meta(g->table, view->outputs[0])->size);
                drop(&to);
                to = next;
            }
            const bool known = run_write(name, to, in);
            drop(&to);
            if (!known)
                return false;
        } else {
            tensor *view = s->n_inputs ? run_view(name, s, in[0], m->size) : NULL;
            out = view ? make(h, false, koila_dtype_bytes(m->dtype), m->n_dims, m->size)
                       : run_fresh(h, name, s, in, koila_dtype_bytes(m->dtype), m->n_dims, m->size,
                                   1);
            if (view)
                copy_elements(out, view);
            drop(&view);
        }
        if (!out)
            return false;
        value[g->nodes.at[n].first_output] = out;
    }
    return true;
}

/* The truth of all of g: truth_free(). */
__attribute__((unused)) static tensor **truth_of(heap *h, const koila_graph *g)
{
    tensor **value = calloc(g->values.n + 1, sizeof *value);
    CHECK(run_recorded(h, g, value));
    return value;
}

__attribute__((unused)) static void truth_free(const koila_graph *g, tensor **value)
{
    for (koila_value v = 0; v < g->values.n; v++)
        drop(&value[v]);
    free(value);
}

/* ---- a schedule */

typedef struct interpreter {
    const koila__placed *p;
    const koila__schedule *s;
    const int64_t *rows;
    heap h;
    tensor **whole, **local, **acc;
    tensor ***kept; /* [value][slice] */
    int64_t begin, end, batch, slice;
    char why[160]; /* what went wrong, "" */
} interpreter;

#define WRONG(x, ...)                                                                              \
    do {                                                                                           \
        snprintf((x)->why, sizeof(x)->why, __VA_ARGS__);                                           \
        return false;                                                                              \
    } while (0)

static const koila_meta_info *meta_in(const interpreter *x, koila_value v)
{
    return koila__value_meta(x->p->graph, v);
}
static bool dense(const koila_meta_info *m) { return m->n_storage_bytes == m->n_bytes; }

/* Rows [begin, end) of whole t: a view; with outer > 1 of one dimension more. */
static tensor *rows_of(const tensor *t, koila_placement s, int64_t batch, int64_t begin,
                       int64_t end)
{
    if (s.outer == 1)
        return narrow(t, s.dim, begin * s.inner, (end - begin) * s.inner);
    tensor *v = view_of(t);
    for (uint32_t d = v->n_dims++; d > s.dim; d--) {
        v->size[d] = v->size[d - 1];
        v->stride[d] = v->stride[d - 1];
    }
    v->size[s.dim] = s.outer;
    v->stride[s.dim] = t->stride[s.dim] * batch * s.inner;
    v->size[s.dim + 1] = (end - begin) * s.inner;
    v->stride[s.dim + 1] = t->stride[s.dim];
    v->offset += begin * s.inner * v->stride[s.dim + 1];
    return v;
}

/* A slice of a whole value: a view where the rows lie together or the value is not dense anyway,
 * else a dense copy. */
static tensor *slice_of_whole(interpreter *x, koila_value v, koila_placement s)
{
    const koila_meta_info *m = meta_in(x, v);
    tensor *rows = rows_of(x->whole[v], s, x->batch, x->begin, x->end), *copy;
    if (x->begin == 0 && x->end == x->batch && s.outer == 1)
        return rows;
    bool outermost = s.outer == 1 && dense(m);
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (d != s.dim && m->size[d] > 1 && m->stride[d] > m->stride[s.dim])
            outermost = false;
    if (outermost || (s.outer == 1 && !dense(m)))
        return rows;
    int64_t size[3];
    for (uint32_t d = 0; d < m->n_dims; d++)
        size[d] = m->size[d];
    size[s.dim] = s.outer * s.inner * (x->end - x->begin);
    copy = make(&x->h, true, koila_dtype_bytes(m->dtype), m->n_dims, size);
    copy_elements(copy, rows); /* the same order of indices, split or not */
    if (dense(m) && m->n_dims == 2 && m->stride[0] < m->stride[1]) { /* laid out as the value was */
        const int64_t old[2] = { copy->stride[0], copy->stride[1] };
        (void)old;
        tensor *from = view_of(copy);
        uint64_t *at = malloc((size_t)n_elements(copy) * sizeof *at);
        for (int64_t k = 0; k < n_elements(copy); k++)
            at[k] = *element(from, k);
        copy->stride[0] = 1;
        copy->stride[1] = size[0];
        for (int64_t k = 0; k < n_elements(copy); k++)
            *element(copy, k) = at[k];
        free(at);
        drop(&from);
    }
    drop(&rows);
    return copy;
}

static uint32_t accumulator_element(const interpreter *x, koila_value v)
{
    const koila_dtype t = meta_in(x, v)->dtype;
    const koila_placement s = x->p->value[v];
    const bool wide = (t == KOILA_DTYPE_F16 || t == KOILA_DTYPE_BF16) && s.kind == KOILA_P &&
                      s.combine == KOILA_SUM && x->end - x->begin != x->batch;
    return wide ? 4 : koila_dtype_bytes(t);
}
static tensor *clone_of(interpreter *x, const tensor *t, uint32_t n_element_bytes)
{
    tensor *c = make(&x->h, true, n_element_bytes, t->n_dims, t->size);
    copy_elements(c, t);
    return c;
}

static bool do_add(interpreter *x, const koila_instr *in)
{
    const koila_value v = in->id;
    const koila_placement s = x->p->value[v];
    tensor *mine = x->local[v];
    if (!mine)
        WRONG(x, "ADD of %%%u, which is not there", v);
    if (!x->acc[v]) {
        if (accumulator_element(x, v) != mine->n_element_bytes || !(in->flags & KOILA_INSTR_OWNED))
            x->acc[v] = clone_of(x, mine, accumulator_element(x, v));
        else
            x->acc[v] = view_of(mine);
        return true;
    }
    if (s.kind != KOILA_P)
        WRONG(x, "ADD of %%%u, which is not partial", v);
    tensor *next =
        s.combine == KOILA_SUM ? NULL : clone_of(x, x->acc[v], x->acc[v]->n_element_bytes);
    tensor *to = next ? next : x->acc[v];
    for (int64_t k = 0; k < n_elements(to); k++) {
        uint64_t *y = element(to, k);
        const uint64_t e = *element(mine, k);
        *y = s.combine == KOILA_SUM                 ? (*y + e) % PRIME
             : (e > *y) == (s.combine == KOILA_MAX) ? e
                                                    : *y;
    }
    if (next) {
        drop(&x->acc[v]);
        x->acc[v] = next;
    }
    return true;
}

static bool do_put(interpreter *x, const koila_instr *in)
{
    const koila_value v = in->id;
    const koila_meta_info *m = meta_in(x, v);
    if (!x->local[v])
        WRONG(x, "PUT of %%%u, which is not there", v);
    if (!x->acc[v]) {
        if (in->flags & KOILA_INSTR_OWNED && x->begin == 0 && x->end == x->batch) {
            x->acc[v] = view_of(x->local[v]);
            return true;
        }
        x->acc[v] = make(&x->h, true, koila_dtype_bytes(m->dtype), m->n_dims, m->size);
        if (dense(m) && m->n_dims == 2 && m->stride[0] < m->stride[1]) {
            x->acc[v]->stride[0] = 1;
            x->acc[v]->stride[1] = m->size[0];
        }
    }
    tensor *rows = rows_of(x->acc[v], x->p->value[v], x->batch, x->begin, x->end);
    if (n_elements(rows) != n_elements(x->local[v])) {
        drop(&rows);
        WRONG(x, "PUT of %%%u: not the rows of the slice", v);
    }
    copy_elements(rows, x->local[v]);
    drop(&rows);
    return true;
}

static bool do_run(interpreter *x, const koila_instr *instr, bool in_loop)
{
    const koila_graph *g = x->p->graph;
    const koila_node n = instr->id;
    const koila_sig_info *s = koila__node_sig(g, n);
    const char *name = koila_op_name(g->table, s->op);
    const koila__placed_node *pn = &x->p->node[n];
    const koila_value out_v = g->nodes.at[n].first_output;
    tensor **into = in_loop ? x->local : x->whole;
    tensor *in[MOST_INPUTS] = { 0 }, *out = NULL;
    if (into[out_v])
        WRONG(x, "%%%u is made again before it was freed", out_v);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = g->inputs.at[g->nodes.at[n].first_input + i];
        const bool whole = !in_loop || x->p->need[g->nodes.at[n].first_input + i].kind == KOILA_R;
        in[i] = whole ? x->whole[v] ? x->whole[v] : x->local[v] : x->local[v];
        const bool unread = s->n_writes && s->writes[0].overwrites && s->writes[0].input == i &&
                            !(instr->steal & 1);
        if (!in[i] && !unread)
            WRONG(x, "input %u (%%%u) of %s is not there", i, v, name);
    }
    const koila_meta_info *m = koila__meta(g->table, s->outputs[0]);
    int64_t size[3] = { 1, 1, 1 };
    for (uint32_t d = 0; d < m->n_dims; d++)
        size[d] = m->size[d];
    if (in_loop && x->p->value[out_v].kind == KOILA_S)
        size[x->p->value[out_v].dim] = koila__extent(x->p->value[out_v], x->end - x->begin);
    uint64_t scale = 1;
    bool alias = false;
    for (const koila__fix *f = pn->fix; in_loop && f < pn->fix + KOILA__MAX_FIXES && f->kind; f++) {
        if (f->kind == KOILA__FIX_SCALE)
            scale = mod_ratio(x->end - x->begin, x->batch);
        alias |= f->kind == KOILA__FIX_ALIAS;
    }
    if (s->n_writes) {
        const koila_write *w = &s->writes[0];
        if (instr->steal & 1)
            out = view_of(in[0]);
        else {
            out = make(&x->h, true, koila_dtype_bytes(m->dtype), m->n_dims, size);
            if (!w->overwrites)
                copy_elements(out, in[0]);
        }
        tensor *to = view_of(out);
        for (uint32_t l = 0; l < w->n_links; l++) {
            const koila_sig_info *view = koila__sig(g->table, w->links[l].sig);
            tensor *next = run_view(koila_op_name(g->table, view->op), view, to, NULL);
            drop(&to);
            to = next;
        }
        const bool known = run_write(name, to, in);
        drop(&to);
        if (!known) {
            drop(&out);
            WRONG(x, "%s is not known, or its shapes do not agree", name);
        }
    } else if (instr->steal) { /* a sum that is written over a term */
        const uint32_t term = koila_term_written_over(instr->steal);
        tensor *terms[2] = { in[term], in[!term] };
        out = view_of(terms[0]);
        if (!run_write("aten::add_.Tensor", out, terms)) {
            drop(&out);
            WRONG(x, "%s: its terms differ in shape", name);
        }
    } else if (pn->offloads) {
        out = run_offload(&x->h, name, in);
        into[out_v] = out;
        return out != NULL;
    } else if (alias)
        out = view_of(in[0]);
    else if (!(s->n_inputs && (out = run_view(name, s, in[0], size))) &&
             shapes_agree(name, s, in, m->n_dims, size))
        out = run_fresh(&x->h, name, s, in, koila_dtype_bytes(m->dtype), m->n_dims, size, scale);
    if (!out)
        WRONG(x, "%s is not known, or its shapes do not agree", name);
    into[out_v] = out;
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (out->size[d] != size[d])
            WRONG(x, "%s: size[%u] is %lld, placed %lld", name, d, (long long)out->size[d],
                  (long long)size[d]);
    return true;
}

/* RUN with KOILA_INSTR_ADDS. What is added as it is made takes no memory. */
static bool do_addend(interpreter *x, const koila_instr *in)
{
    const koila_value made = x->p->graph->nodes.at[in->id].first_output;
    const koila_value to = in->user;
    const koila_meta_info *m = meta_in(x, to);
    const bool is_all = x->begin == 0 && x->end == x->batch;
    const bool is_onto = in->flags & KOILA_INSTR_ONTO && x->acc[to] && !is_all;
    const uint64_t peak = x->h.peak;
    if (!do_run(x, in, true))
        return false;
    if (is_onto)
        x->h.peak = peak;
    tensor *addend = view_of(x->local[made]);
    addend->n_dims = m->n_dims;
    for (uint32_t d = 0; d < m->n_dims; d++) {
        addend->size[d] = m->size[d];
        addend->stride[d] = m->stride[d];
    }
    drop(&x->local[made]);
    if (!x->acc[to]) {
        const bool is_wide = accumulator_element(x, to) != addend->n_element_bytes;
        x->acc[to] = is_wide ? clone_of(x, addend, accumulator_element(x, to)) : view_of(addend);
    } else
        for (int64_t k = 0; k < n_elements(addend); k++) {
            uint64_t *y = element(x->acc[to], k);
            *y = (*y + *element(addend, k)) % PRIME;
        }
    drop(&addend);
    return true;
}

/* The same outside loops: it is added to a whole value, which becomes the result too. */
static bool do_second_term(interpreter *x, const koila_instr *in)
{
    const koila_value made = x->p->graph->nodes.at[in->id].first_output;
    const uint64_t peak = x->h.peak;
    if (!do_run(x, in, false))
        return false;
    x->h.peak = peak;
    for (int64_t k = 0; k < n_elements(x->whole[made]); k++) {
        uint64_t *y = element(x->whole[in->user], k);
        *y = (*y + *element(x->whole[made], k)) % PRIME;
    }
    drop(&x->whole[made]);
    x->whole[made] = view_of(x->whole[in->user]);
    return true;
}

static bool do_instrs(interpreter *x, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        const koila_value v = in->id;
        if (in->flags & KOILA_INSTR_TOLD) {
            if (in->kind == KOILA_DO_RUN && !st->is_loop)
                x->whole[x->p->graph->nodes.at[v].first_output] = view_of(x->whole[in->user]);
            continue;
        }
        switch ((koila_instr_kind)in->kind) {
        case KOILA_DO_RUN:
            if (!st->is_loop && in->flags & KOILA_INSTR_ADDS ? !do_second_term(x, in)
                : in->flags & KOILA_INSTR_ADDS               ? !do_addend(x, in)
                                                             : !do_run(x, in, st->is_loop))
                return false;
            break;
        case KOILA_DO_SLICE:
            if (!x->whole[v] || x->local[v])
                WRONG(x, "SLICE of %%%u: %s", v, x->local[v] ? "it is there" : "it is not whole");
            x->local[v] = slice_of_whole(
                x, v, x->p->need[x->p->graph->nodes.at[in->user].first_input + in->steal]);
            break;
        case KOILA_DO_FETCH:
            if (!x->kept[v][x->slice] || x->local[v])
                WRONG(x, "FETCH of %%%u: %s", v, x->local[v] ? "it is there" : "it is not kept");
            x->local[v] = view_of(x->kept[v][x->slice]);
            break;
        case KOILA_DO_KEEP:
            if (!x->local[v] || x->kept[v][x->slice])
                WRONG(x, "KEEP of %%%u: %s", v, x->local[v] ? "it is kept" : "it is not there");
            x->kept[v][x->slice] = view_of(x->local[v]);
            break;
        case KOILA_DO_PUT:
            if (!do_put(x, in))
                return false;
            break;
        case KOILA_DO_ADD:
            if (!do_add(x, in))
                return false;
            break;
        case KOILA_DO_INNER:
            WRONG(x, "a step within a row is not run here (stage %u)", v);
            break;
        case KOILA_DO_FREE: {
            tensor **slot = st->is_loop ? &x->local[v] : &x->whole[v];
            if (!*slot)
                WRONG(x, "FREE of %%%u, which is not there", v);
            drop(slot);
            break;
        }
        }
    }
    return true;
}

static bool do_stage(interpreter *x, const koila_stage *st)
{
    x->begin = x->end = x->batch = x->slice = 0;
    if (!st->is_loop)
        return do_instrs(x, st);
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_ADD && in->flags & KOILA_INSTR_SECOND)
            x->acc[in->id] = view_of(x->whole[in->user]);
    }
    x->batch = x->p->graph->axes.at[st->axis];
    for (int64_t at = 0; at < x->batch; at += x->rows[st->axis], x->slice++) {
        x->begin = at;
        x->end = at + x->rows[st->axis] < x->batch ? at + x->rows[st->axis] : x->batch;
        if (!do_instrs(x, st))
            return false;
        for (uint32_t v = 0; v < x->p->graph->values.n; v++)
            if (x->local[v])
                WRONG(x, "%%%u outlives its slice", v);
        for (uint32_t i = 0; i < st->n_instrs; i++)
            if (st->instrs[i].kind == KOILA_DO_FETCH && st->instrs[i].flags & KOILA_INSTR_LAST)
                drop(&x->kept[st->instrs[i].id][x->slice]);
    }
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_value v = st->instrs[i].id;
        if ((st->instrs[i].kind != KOILA_DO_ADD && st->instrs[i].kind != KOILA_DO_PUT) ||
            !x->acc[v])
            continue;
        if (x->whole[v])
            WRONG(x, "%%%u is made whole twice", v);
        const uint32_t narrow_bytes = koila_dtype_bytes(meta_in(x, v)->dtype);
        if (x->acc[v]->n_element_bytes != narrow_bytes) {
            x->whole[v] = clone_of(x, x->acc[v], narrow_bytes);
            drop(&x->acc[v]);
        } else {
            x->whole[v] = x->acc[v];
            x->acc[v] = NULL;
        }
    }
    return true;
}

/* Runs all stages. x->p, x->s and x->rows are set, the rest is zero; leaf[v] of the lowered graph:
 * its seed. */
__attribute__((unused)) static bool interpret(interpreter *x, const uint64_t *leaf)
{
    const koila_graph *g = x->p->graph;
    const uint32_t V = g->values.n;
    int64_t n_slices = 1;
    for (uint32_t a = 0; a < g->axes.n; a++)
        if (koila__n_slices(g->axes.at[a], x->rows[a]) > n_slices)
            n_slices = koila__n_slices(g->axes.at[a], x->rows[a]);
    x->whole = calloc(V + 1, sizeof *x->whole);
    x->local = calloc(V + 1, sizeof *x->local);
    x->acc = calloc(V + 1, sizeof *x->acc);
    x->kept = calloc(V + 1, sizeof *x->kept);
    for (uint32_t v = 0; v < V; v++) {
        x->kept[v] = calloc((size_t)n_slices, sizeof **x->kept);
        if (g->values.at[v].node == KOILA_NONE)
            x->whole[v] = leaf_tensor(&x->h, g, v, leaf[v]);
    }
    for (uint32_t k = 0; k < x->s->n_stages; k++)
        if (!do_stage(x, &x->s->stages[k].stage))
            return false;
    return true;
}
__attribute__((unused)) static void interpreter_deinit(interpreter *x)
{
    const uint32_t V = x->p->graph->values.n;
    int64_t n_slices = 1;
    for (uint32_t a = 0; a < x->p->graph->axes.n; a++)
        if (koila__n_slices(x->p->graph->axes.at[a], x->rows[a]) > n_slices)
            n_slices = koila__n_slices(x->p->graph->axes.at[a], x->rows[a]);
    for (uint32_t v = 0; v < V; v++) {
        drop(&x->whole[v]);
        drop(&x->local[v]);
        drop(&x->acc[v]);
        for (int64_t i = 0; i < n_slices; i++)
            drop(&x->kept[v][i]);
        free(x->kept[v]);
    }
    free(x->whole);
    free(x->local);
    free(x->acc);
    free(x->kept);
}

/* Does the step that was told anew, run as it is, make the targets of the recorded one, whose
 * values are truth[]? */
__attribute__((unused)) static bool retold_makes_the_truth(const koila__retold *n,
                                                           const koila_graph *recorded,
                                                           tensor *const *truth,
                                                           const koila_value *targets,
                                                           uint32_t n_targets)
{
    tensor **value = calloc(n->graph->values.n + 1, sizeof *value);
    heap h = { 0 };
    for (koila_value v = 0; v < recorded->values.n; v++)
        if (recorded->values.at[v].node == KOILA_NONE)
            value[n->value[v]] = leaf_tensor(&h, recorded, v, v);
    bool same = run_recorded(&h, n->graph, value);
    for (uint32_t i = 0; i < n_targets && same; i++)
        same = same_elements(value[n->targets[i]], truth[targets[i]]);
    for (koila_value v = 0; v < n->graph->values.n; v++)
        drop(&value[v]);
    free(value);
    return same;
}

/* Does the plan give the targets of the recorded graph, whose values are truth[], in the bytes that
 * were predicted? */
__attribute__((unused)) static bool gives_the_truth(const koila_plan *p,
                                                    const koila_graph *recorded,
                                                    tensor *const *truth,
                                                    const koila_value *targets, uint32_t n_targets)
{
    const koila__placed *placed = p->placed;
    uint64_t *leaf = calloc(placed->graph->values.n + 1, sizeof *leaf);
    interpreter run = { .p = placed, .s = &p->schedule, .rows = p->rows };
    for (koila_value v = 0; v < recorded->values.n; v++)
        if (recorded->values.at[v].node == KOILA_NONE && placed->lowered[v] != KOILA_NONE)
            leaf[placed->lowered[v]] = v;
    bool same = interpret(&run, leaf);
    for (uint32_t i = 0; i < n_targets && same; i++)
        same = same_elements(run.whole[p->targets[i]], truth[targets[i]]);
    same = same && run.h.peak == p->info.peak_bytes;
    interpreter_deinit(&run);
    free(leaf);
    return same;
}

/* The recorded step in slices of 1 .. length entries along another axis than its rows: each plan
 * gives the truth. Returns how many plans there are. */
__attribute__((unused)) static uint32_t check_along(const koila_graph *recorded, int64_t length,
                                                    tensor *const *truth,
                                                    const koila_value *targets, uint32_t n_targets)
{
    for (int64_t rows = 1; rows <= length; rows++) {
        const koila_plan_options o = { .struct_size = sizeof o,
                                       .budget_bytes = UINT64_MAX,
                                       .axes = KOILA_AXES_OTHER,
                                       .rows = rows };
        koila_plan *p = NULL;
        CHECK(koila_plan_new(recorded, targets, n_targets, &o, NULL, &p, NULL) == KOILA_OK);
        CHECK(koila_plan_check(p, NULL));
        CHECK(gives_the_truth(p, recorded, truth, targets, n_targets));
        koila_plan_free(p);
    }
    return (uint32_t)length;
}

#endif
