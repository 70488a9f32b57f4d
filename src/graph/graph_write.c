/* graph_write.c — a graph as text, in the grammar of graph_text.h, and the buffered writer that
 * print.c shares. Numbers are not formatted by the C library alone, whose result depends on the
 * locale. */
#include "graph/graph_text.h"

#include <math.h>

void koila__out_init(koila__out *o, koila_write_fn write, void *user)
{
    o->write = write;
    o->user = user;
    o->status = KOILA_OK;
    o->n = 0;
}

static void out_flush(koila__out *o)
{
    if (o->n && o->status == KOILA_OK && o->write(o->user, o->at, o->n) != 0)
        o->status = KOILA_BAD_ARGUMENT;
    o->n = 0;
}

void koila__out_bytes(koila__out *o, const char *s, size_t n)
{
    while (n) {
        koila_assert(o->n < sizeof o->at);
        const size_t room = sizeof o->at - o->n;
        const size_t m = n < room ? n : room;
        memcpy(o->at + o->n, s, m);
        o->n += m;
        s += m;
        n -= m;
        if (o->n == sizeof o->at)
            out_flush(o);
    }
}

void koila__out_fmt(koila__out *o, const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    const int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (n > 0)
        koila__out_bytes(o, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

koila_status koila__out_finish(koila__out *o)
{
    out_flush(o);
    return o->status;
}

void koila__out_quoted(koila__out *o, const char *s)
{
    koila__out_str(o, "\"");
    for (const char *p = s; *p; p++) {
        const unsigned char c = (unsigned char)*p;
        if (c == '"' || c == '\\')
            koila__out_fmt(o, "\\%c", c);
        else if (c == '\n')
            koila__out_str(o, "\\n");
        else if (c == '\t')
            koila__out_str(o, "\\t");
        else if (c < 0x20 || c == 0x7f)
            koila__out_fmt(o, "\\x%02x", c);
        else
            koila__out_bytes(o, p, 1);
    }
    koila__out_str(o, "\"");
}

/* Undoes the locale in the output of "%g": its point becomes '.'. Returns whether it has neither
 * point nor exponent. */
static bool undo_locale(char *text, size_t n)
{
    bool is_int = true;
    for (size_t i = 0; i < n; i++) {
        if (koila__is_digit(text[i]))
            continue;
        is_int = false;
        if (text[i] != 'e' && text[i] != '-' && text[i] != '+')
            text[i] = '.';
    }
    return is_int;
}

/* x as the shortest decimal that reads back to the same bits. False: there is none that
 * koila__read_decimal() reads. */
static bool out_decimal(koila__out *o, double x)
{
    enum { MOST_DIGITS = 17 }; /* of a double */
    for (int digits = 1; digits <= MOST_DIGITS; digits++) {
        char text[64];
        double back;
        const size_t n = (size_t)snprintf(text, sizeof text, "%.*g", digits, x);
        const bool is_int = undo_locale(text, n);
        if (!koila__read_decimal(text, n, &back) || memcmp(&back, &x, sizeof x) != 0)
            continue;
        koila__out_bytes(o, text, n);
        if (is_int)
            koila__out_str(o, ".0");
        return true;
    }
    return false;
}

/* 0x<mantissa>p<exponent>, the mantissa odd. x is finite and above 0. */
static void out_hex(koila__out *o, double x)
{
    enum { MANTISSA_BITS = 52, LEAST_EXPONENT = -1074 };
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    koila_assert(bits && !(bits >> 63));
    const uint64_t hidden = (uint64_t)1 << MANTISSA_BITS;
    const int field = (int)(bits >> MANTISSA_BITS);
    uint64_t m = bits & (hidden - 1);
    int e = LEAST_EXPONENT;
    if (field) { /* not a subnormal number */
        m |= hidden;
        e += field - 1;
    }
    for (; !(m & 1); m >>= 1)
        e++;
    koila__out_fmt(o, "0x%llxp%d", (unsigned long long)m, e);
}

void koila__out_float(koila__out *o, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) {
        if (bits == KOILA__NAN_BITS)
            koila__out_str(o, "nan");
        else
            koila__out_fmt(o, "nan:%016llx", (unsigned long long)bits);
        return;
    }
    if (signbit(x))
        koila__out_str(o, "-");
    x = fabs(x);
    if (isinf(x))
        koila__out_str(o, "inf");
    else if (!out_decimal(o, x))
        out_hex(o, x);
}

static void out_dims(koila__out *o, const char *open, const int64_t *at, uint32_t n,
                     const char *close)
{
    koila__out_str(o, open);
    for (uint32_t d = 0; d < n; d++)
        koila__out_fmt(o, d ? ", %lld" : "%lld", (long long)at[d]);
    koila__out_str(o, close);
}

void koila__out_meta(koila__out *o, const koila_meta_info *m)
{
    koila__out_str(o, koila_dtype_text(m->dtype));
    out_dims(o, "[", m->size, m->n_dims, "]");
    int64_t step = 1;
    bool dense = true;
    for (uint32_t d = m->n_dims; d-- > 0;) {
        dense &= m->stride[d] == step;
        if (m->size[d] > 1)
            step *= m->size[d]; /* as koila_table_meta's: checked there */
    }
    if (!dense)
        out_dims(o, "{", m->stride, m->n_dims, "}");
    if (m->device >> 8 == 1)
        koila__out_fmt(o, " on cuda:%u", m->device & 255u);
    else if (m->device)
        koila__out_fmt(o, " on device:%u", m->device);
}

/* An argument token that is no list and no tensor. */
static void out_token(koila__out *o, const koila_table *t, const koila_arg *a,
                      const uint32_t *opaque_names)
{
    switch ((koila_arg_kind)a->kind) {
    case KOILA_ARG_ABSENT:
        koila__out_str(o, "None");
        break;
    case KOILA_ARG_INT:
        koila__out_fmt(o, "%lld", (long long)a->u.i);
        break;
    case KOILA_ARG_FLOAT:
        koila__out_float(o, a->u.f);
        break;
    case KOILA_ARG_BOOL:
        koila__out_str(o, a->u.i ? "true" : "false");
        break;
    case KOILA_ARG_STR:
        koila__out_quoted(o, koila_text(t, a->u.id));
        break;
    case KOILA_ARG_DTYPE:
        koila__out_str(o, koila_dtype_text((koila_dtype)a->u.id));
        break;
    case KOILA_ARG_OPAQUE:
        if (opaque_names)
            koila__out_fmt(o, "#%u", opaque_names[a->u.id]);
        else
            koila__out_str(o, koila_opaque_label(t, a->u.id));
        break;
    case KOILA_ARG_TENSOR:
    case KOILA_ARG_LIST:
        koila_assert(!"the caller knows more about these two");
        break;
    }
}

/* An operator's or argument's name: bare when it is words joined by '.' and "::". */
static void out_name(koila__out *o, const char *s)
{
    bool bare = koila__is_word_start((unsigned char)*s);
    for (const char *p = s; *p; p++) {
        if (koila__is_word((unsigned char)*p) || (*p == '.' && koila__is_word((unsigned char)p[1])))
            continue;
        if (p[0] == ':' && p[1] == ':' && koila__is_word_start((unsigned char)p[2]))
            p++;
        else
            bare = false;
    }
    if (bare)
        koila__out_str(o, s);
    else
        koila__out_quoted(o, s);
}

void koila__out_arguments(koila__out *o, const koila_table *t, const koila_sig_info *s,
                          const koila_value *inputs, const uint32_t *opaque_names)
{
    uint32_t in = 0;
    for (uint32_t k = 0; k < s->n_pos + s->n_kw; k++) {
        if (k)
            koila__out_str(o, ", ");
        if (k >= s->n_pos) {
            out_name(o, koila_text(t, s->kw_names[k - s->n_pos]));
            koila__out_str(o, "=");
        }
        const koila_arg *a = &s->tokens[s->start[k]];
        const bool list = a->kind == KOILA_ARG_LIST;
        const koila_arg *first = a + list;
        const koila_arg *end = first + (list ? a->n : 1);
        if (list)
            koila__out_str(o, "[");
        for (const koila_arg *x = first; x < end; x++) {
            if (x != first)
                koila__out_str(o, ", ");
            if (x->kind != KOILA_ARG_TENSOR)
                out_token(o, t, x, opaque_names);
            else if (inputs)
                koila__out_fmt(o, "%%%u", inputs[in++]);
            else
                koila__out_meta(o, koila__meta(t, x->u.id));
        }
        if (list)
            koila__out_str(o, "]");
    }
    koila_assert(!inputs || in == s->n_inputs);
}

typedef struct printer {
    koila__out *o;
    const koila_table *t;
    const uint32_t *opaque_names;
} printer;

/* inputs NULL: a link of a chain; its tensor is shown by its meta. */
static void out_call(const printer *p, const koila_sig_info *s, const koila_value *inputs)
{
    static const char *const open[] = { "<", "(", "[", "{", "([" };
    static const char *const close[] = { ">", ")", "]", "}", "])" };
    koila__out *o = p->o;
    koila_assert(s->result_kind < KOILA_COUNT(open));
    out_name(o, koila_op_name(p->t, s->op));
    koila__out_str(o, "(");
    koila__out_arguments(o, p->t, s, inputs, p->opaque_names);
    koila__out_str(o, ") -> ");
    const bool one = s->result_kind == 0 && s->n_fresh == 1 && s->outputs[0] != KOILA_NONE;
    if (!one)
        koila__out_str(o, open[s->result_kind]);
    for (uint32_t i = 0; i < s->n_fresh; i++) {
        if (i)
            koila__out_str(o, ", ");
        if (s->outputs[i] == KOILA_NONE)
            koila__out_str(o, "None");
        else
            koila__out_meta(o, koila__meta(p->t, s->outputs[i]));
    }
    if (!one)
        koila__out_str(o, close[s->result_kind]);
    if (s->grad_mode == 1)
        koila__out_str(o, " grad");
    else if (s->grad_mode)
        koila__out_fmt(o, " grad=%u", s->grad_mode);
}

static void out_node(const printer *p, const koila_graph *g, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(g, n);
    const koila_node_info *info = &g->nodes.at[n];
    for (uint32_t i = 0; i < s->n_outputs; i++)
        koila__out_fmt(p->o, "%%%u ", info->first_output + i);
    koila__out_str(p->o, "= ");
    out_call(p, s, koila_node_inputs(g, n));
    for (uint32_t w = 0; w < s->n_writes; w++) {
        koila__out_fmt(p->o, s->writes[w].overwrites ? " overwrites %u" : " writes %u",
                       s->writes[w].input);
        for (uint32_t l = 0; l < s->writes[w].n_links; l++) {
            koila__out_str(p->o, " via ");
            out_call(p, koila__sig(p->t, s->writes[w].links[l].sig), NULL);
            koila__out_fmt(p->o, " :%u", s->writes[w].links[l].output);
        }
    }
    if (info->line != KOILA_NONE)
        koila__out_fmt(p->o, " @%u", info->line);
    koila__out_str(p->o, "\n");
}

static void out_leaf(const printer *p, const koila_graph *g, koila_value v)
{
    const koila_value_info *info = &g->values.at[v];
    koila__out_fmt(p->o, "%%%u = ", v);
    if (info->leaf_kind == KOILA_LEAF_BATCH)
        koila__out_fmt(p->o, "batch axis %u dim %u ", info->axis, info->dim);
    else
        koila__out_str(p->o, "real ");
    koila__out_meta(p->o, koila__value_meta(g, v));
    if (*koila_graph_leaf_name(g, v)) {
        koila__out_str(p->o, " ");
        koila__out_quoted(p->o, koila_graph_leaf_name(g, v));
    }
    koila__out_str(p->o, "\n");
}

const koila__op_flag koila__op_flags[KOILA__N_OP_FLAGS] = { { "view", KOILA_OP_VIEW },
                                                            { "inplace", KOILA_OP_INPLACE },
                                                            { "random", KOILA_OP_RANDOM },
                                                            { "factory", KOILA_OP_FACTORY },
                                                            { "opaque", KOILA_OP_OPAQUE } };

/* The declarations written so far. */
typedef struct declared {
    uint8_t *ops;     /* [ops of the table] */
    uint8_t *sigs;    /* [signatures of the table] */
    uint32_t *opaque; /* [opaques of the table] its number in the text, or KOILA_NONE */
    uint32_t n_opaques;
} declared;

/* "op aten::t view" */
static void out_op(koila__out *o, const koila__op *op)
{
    uint32_t rest = op->flags;
    koila__out_str(o, "op ");
    out_name(o, op->name);
    for (size_t i = 0; i < KOILA__N_OP_FLAGS; i++) {
        if (!(rest & koila__op_flags[i].flag))
            continue;
        koila__out_fmt(o, " %s", koila__op_flags[i].word);
        rest &= ~koila__op_flags[i].flag;
    }
    if (rest)
        koila__out_fmt(o, " %u", rest);
    koila__out_str(o, "\n");
}

/* The lines that a signature needs before it is used: its operator and its opaques, unless they are
 * declared. */
static void declare(koila__out *o, const koila_table *t, const koila_sig_info *s, declared *d)
{
    if (!d->ops[s->op] && t->ops.at[s->op].flags)
        out_op(o, &t->ops.at[s->op]);
    d->ops[s->op] = 1;
    for (uint32_t i = 0; i < s->n_tokens; i++) {
        const uint32_t id = s->tokens[i].u.id;
        if (s->tokens[i].kind != KOILA_ARG_OPAQUE || d->opaque[id] != KOILA_NONE)
            continue;
        koila__out_fmt(o, "opaque #%u ", d->n_opaques);
        koila__out_quoted(o, koila_opaque_label(t, id));
        koila__out_str(o, "\n");
        d->opaque[id] = d->n_opaques++;
    }
}

static void declare_all(koila__out *o, const koila_graph *g, declared *d)
{
    const koila_table *t = g->table;
    for (uint32_t n = 0; n < g->nodes.n; n++) {
        const koila_sig_info *s = koila__node_sig(g, n);
        if (d->sigs[g->nodes.at[n].sig])
            continue;
        d->sigs[g->nodes.at[n].sig] = 1;
        declare(o, t, s, d);
        for (uint32_t w = 0; w < s->n_writes; w++)
            for (uint32_t l = 0; l < s->writes[w].n_links; l++)
                declare(o, t, koila__sig(t, s->writes[w].links[l].sig), d);
    }
}

/* Leaves and nodes, in the order of their values. */
static void out_values(const printer *p, const koila_graph *g)
{
    koila_value v = 0;
    for (uint32_t n = 0; n < g->nodes.n; n++) {
        for (; v < g->nodes.at[n].first_output; v++)
            out_leaf(p, g, v);
        out_node(p, g, n);
        v += koila__node_sig(g, n)->n_outputs;
    }
    for (; v < g->values.n; v++)
        out_leaf(p, g, v);
}

koila_status koila_graph_print(const koila_graph *g, koila_write_fn write, void *user)
{
    const koila_table *t = g->table;
    koila__arena tmp;
    koila__out o;
    koila__arena_init(&tmp, &g->mem);
    koila__out_init(&o, write, user);
    declared d = { .ops = koila__arena_array(&tmp, t->ops.n, sizeof *d.ops),
                   .sigs = koila__arena_array(&tmp, t->sigs.n, sizeof *d.sigs),
                   .opaque = koila__arena_array(&tmp, t->opaques.n, sizeof *d.opaque) };
    if (!d.ops || !d.sigs || !d.opaque) {
        koila__arena_deinit(&tmp);
        return KOILA_NO_MEMORY;
    }
    memset(d.opaque, 0xff, t->opaques.n * sizeof *d.opaque);
    koila__out_str(&o, "koila graph 2\n");
    for (uint32_t a = 0; a < g->axes.n; a++)
        koila__out_fmt(&o, "axis %lld\n", (long long)g->axes.at[a]);
    declare_all(&o, g, &d);
    for (uint32_t l = 0; l < g->lines.n; l++) {
        koila__out_fmt(&o, "line @%u ", l);
        koila__out_quoted(&o, koila_graph_line_file(g, l));
        koila__out_fmt(&o, " %u\n", g->lines.at[l].number);
    }
    const printer p = { &o, t, d.opaque };
    out_values(&p, g);
    koila__out_fmt(&o, "end %u %u\n", g->values.n, g->nodes.n);
    koila__arena_deinit(&tmp);
    return koila__out_finish(&o);
}
