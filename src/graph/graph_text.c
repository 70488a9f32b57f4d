/* graph_text.c — a graph as text that reads back to an equal graph. For the command line, fuzzing,
 * bug reports and tests/data.
 *
 *   koila graph 2                                                     first line, always
 *   axis 32                                                           axes, in order: 0, 1, …
 *   op aten::t view
 *         operators that have flags, before their first use
 *   opaque #0 "torch.channels_last"
 *         opaque arguments, numbered by first use
 *   line @0 "train.py" 12                                             source lines, in order
 *   %0 = batch axis 0 dim 0 f32[32, 8] "input 0"
 *         leaves and nodes in recorded order; values are numbered as they come
 *   %1 = real f32[16, 8] "layer.weight"
 *   %2 = aten::t(%1) -> f32[8, 16]{1, 8} grad @0
 *   %3 = aten::mm(%0, %2) -> f32[32, 16] grad @0
 *   %4 %5 = aten::max.dim(%3, 1, keepdim=false) -> (f32[32], i64[32]) @0
 *   %6 = aten::add_.Tensor(%3, 1.5) -> {} writes 0 via aten::select.int(f32[32, 16], 0, 3) ->
 *       f32[16] :0
 *   end 7 4
 *         values and nodes there are: text that was cut is not a shorter graph
 *
 *   file   = "koila graph 2" NL { [ line ] NL } "end" N N { NL }      a line that begins with // is
 *          a comment. "koila graph 1": the same without an end
 *   line   = "axis" INT | "op" NAME { FLAG } | "opaque" "#"N STRING | "line" "@"N STRING N | {
 *          VALUE } "=" ( leaf | call { write } [ "@"N ] )
 *   leaf   = ( "real" | "batch" "axis" N "dim" N ) meta [ STRING ]
 *   call   = NAME "(" [ arg { "," arg } ] ")" "->" result [ "grad" [ "=" N ] ]         arguments
 *          with a name come last
 *   arg    = [ NAME "=" ] ( one | "[" [ one { "," one } ] "]" )
 *   one    = "None" | "true" | "false" | INT | FLOAT | STRING | DTYPE | "#"N | tensor
 *   tensor = VALUE in a node, meta in the link of a chain (its tensor is the previous link's
 *       result)
 *   result = meta | "(" results ")" tuple | "[" results "]" list | "{" results "}" nothing or
 *       self | "<" results ">" one tensor, oddly many;
 *            each of the results is a meta or None
 *   write  = ( "writes" | "overwrites" ) N { "via" call ":"N }        N: index among the node's
 *          tensor inputs; which result
 *   meta   = DTYPE "[" sizes "]" [ "{" strides "}" ] [ "on" ( "cuda:"N | "device:"N ) ]   no
 *          strides: contiguous; no device: cpu
 *   VALUE  = "%"N    STRING = as in C, with \" \\ \n \t \xHH    FLOAT = decimal, or
 *          0x<hex>p<exponent> where decimal would not be exact, inf, nan, nan:<bits>
 *
 * Equal means: parsed into the table it came from, the graph has the same signatures, values,
 * lines, names and hash; parsed into any table, it prints as the same text. (Opaque arguments are
 * found in the table by label. Different ones stay different, but which of several with one label
 * is told by their order alone.)
 *
 * Text may be hostile: every id is checked, every value is written out where it is made (so a graph
 * is never more than a constant times larger than its text), and no step goes back. Numbers are
 * read and written here and not by the C library, whose answer depends on the locale. */
#include "graph/graph_text.h"

#include <math.h>

/* ---- writing */

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

/* m * 10^e, when that is exact but for one rounding: m and 10^|e| are doubles (Clinger 1990, the
 * fast path). */
static bool decimal(uint64_t m, int64_t e, double *out)
{
    static const double power[] = { 1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                    1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                    1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22 };
    if (m >> 53 || e < -22 || e > 22)
        return false;
    *out = e < 0 ? (double)m / power[-e] : (double)m * power[e];
    return true;
}

/* Digits [. digits] [e [+-] digits] of n bytes, without sign. False: not such a number, or one that
 * decimal() cannot give exactly. */
static bool read_decimal(const char *s, size_t n, double *out)
{
    uint64_t m = 0;
    int64_t e = 0, shift = 0;
    size_t i = 0, n_zeros = 0; /* zeros of the fraction that nothing has followed yet */
    bool dot = false, digit = false;
    for (; i < n && ((s[i] >= '0' && s[i] <= '9') || (s[i] == '.' && !dot)); i++) {
        if (s[i] == '.') {
            dot = true;
            continue;
        }
        digit = true;
        if (dot && s[i] == '0') {
            n_zeros++;
            continue;
        }
        for (; n_zeros; n_zeros--, shift--) {
            if (m >> 53)
                return false;
            m *= 10;
        }
        if (m >> 53)
            return false;
        m = m * 10 + (uint64_t)(s[i] - '0');
        shift -= dot;
    }
    if (i < n && s[i] == 'e') {
        const bool minus = ++i < n && s[i] == '-';
        if (i < n && (s[i] == '-' || s[i] == '+'))
            i++;
        if (i == n)
            return false;
        for (; i < n && s[i] >= '0' && s[i] <= '9' && e < 100000; i++)
            e = e * 10 + (s[i] - '0');
        if (minus)
            e = -e;
    }
    return digit && i == n && decimal(m, e + shift, out);
}

void koila__out_float(koila__out *o, double x)
{
    uint64_t bits, back_bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) {
        if (bits == 0x7ff8000000000000u)
            koila__out_str(o, "nan");
        else
            koila__out_fmt(o, "nan:%016llx", (unsigned long long)bits);
        return;
    }
    if (bits >> 63)
        koila__out_str(o, "-");
    bits &= INT64_MAX;
    memcpy(&x, &bits, sizeof x);
    if (isinf(x)) {
        koila__out_str(o, "inf");
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        char text[64];
        double back;
        size_t n = (size_t)snprintf(text, sizeof text - 3, "%.*g", digits, x);
        bool is_int = true;
        for (size_t i = 0; i < n; i++) {
            /* the locale's point */
            if ((text[i] < '0' || text[i] > '9') && text[i] != 'e' && text[i] != '-' &&
                text[i] != '+')
                text[i] = '.';
            if (text[i] < '0' || text[i] > '9')
                is_int = false;
        }
        if (!read_decimal(text, n, &back))
            continue;
        memcpy(&back_bits, &back, sizeof back_bits);
        if (back_bits != bits)
            continue;
        koila__out_bytes(o, text, n);
        if (is_int)
            koila__out_str(o, ".0");
        return;
    }
    const int field = (int)(bits >> 52);
    uint64_t m = (bits & (((uint64_t)1 << 52) - 1)) | (field ? (uint64_t)1 << 52 : 0);
    int e = (field ? field : 1) - 1075;
    for (; !(m & 1); m >>= 1)
        e++;
    koila__out_fmt(o, "0x%llxp%d", (unsigned long long)m, e);
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

void koila__out_token(koila__out *o, const koila_table *t, const koila_arg *a,
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
    case KOILA_ARG_TENSOR: /* the caller knows more about these two */
    case KOILA_ARG_LIST:
        break;
    }
}

static bool is_word_start(int c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
static bool is_word(int c) { return is_word_start(c) || (c >= '0' && c <= '9'); }

/* An operator's or argument's name: bare when it is words joined by '.' and "::". */
static void out_name(koila__out *o, const char *s)
{
    bool bare = is_word_start((unsigned char)*s);
    for (const char *p = s; *p; p++) {
        if (is_word((unsigned char)*p) || (*p == '.' && is_word((unsigned char)p[1])))
            continue;
        if (p[0] == ':' && p[1] == ':' && is_word_start((unsigned char)p[2]))
            p++;
        else
            bare = false;
    }
    if (bare)
        koila__out_str(o, s);
    else
        koila__out_quoted(o, s);
}

typedef struct printer {
    koila__out *o;
    const koila_table *t;
    const uint32_t *opaque_names;
} printer;

/* inputs NULL: a link of a chain; its tensor is shown by its meta. */
static void out_call(const printer *p, const koila_sig_info *s, const koila_value *inputs)
{
    static const char *const open[] = { "<", "(", "[", "{" };
    static const char *const close[] = { ">", ")", "]", "}" };
    koila__out *o = p->o;
    out_name(o, koila_op_name(p->t, s->op));
    koila__out_str(o, "(");
    uint32_t in = 0;
    for (uint32_t k = 0; k < s->n_pos + s->n_kw; k++) {
        if (k)
            koila__out_str(o, ", ");
        if (k >= s->n_pos) {
            out_name(o, koila_text(p->t, s->kw_names[k - s->n_pos]));
            koila__out_str(o, "=");
        }
        const koila_arg *a = &s->tokens[s->start[k]];
        const bool list = a->kind == KOILA_ARG_LIST;
        const koila_arg *end = a + 1 + (list ? a->n : 0);
        const koila_arg *first = a + list;
        if (list)
            koila__out_str(o, "[");
        for (const koila_arg *x = first; x < end; x++) {
            if (x != first)
                koila__out_str(o, ", ");
            if (x->kind != KOILA_ARG_TENSOR)
                koila__out_token(o, p->t, x, p->opaque_names);
            else if (inputs)
                koila__out_fmt(o, "%%%u", inputs[in++]);
            else
                koila__out_meta(o, koila__meta(p->t, x->u.id));
        }
        if (list)
            koila__out_str(o, "]");
    }
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

static const struct {
    const char *word;
    uint32_t flag;
} op_flags[] = { { "view", KOILA_OP_VIEW },
                 { "inplace", KOILA_OP_INPLACE },
                 { "random", KOILA_OP_RANDOM },
                 { "factory", KOILA_OP_FACTORY },
                 { "opaque", KOILA_OP_OPAQUE } };

/* op and opaque lines of one signature, each the first time. seen_op: [ops]; names: [opaques],
 * KOILA_NONE when not yet seen. */
static void out_declarations(koila__out *o, const koila_table *t, const koila_sig_info *s,
                             uint8_t *seen_op, uint32_t *names, uint32_t *n_names)
{
    if (!seen_op[s->op] && t->ops.at[s->op].flags) {
        koila__out_str(o, "op ");
        out_name(o, koila_op_name(t, s->op));
        uint32_t rest = t->ops.at[s->op].flags;
        for (size_t i = 0; i < KOILA_COUNT(op_flags); i++)
            if (rest & op_flags[i].flag) {
                koila__out_fmt(o, " %s", op_flags[i].word);
                rest &= ~op_flags[i].flag;
            }
        if (rest)
            koila__out_fmt(o, " %u", rest);
        koila__out_str(o, "\n");
    }
    seen_op[s->op] = 1;
    for (uint32_t i = 0; i < s->n_tokens; i++) {
        if (s->tokens[i].kind != KOILA_ARG_OPAQUE || names[s->tokens[i].u.id] != KOILA_NONE)
            continue;
        koila__out_fmt(o, "opaque #%u ", *n_names);
        koila__out_quoted(o, koila_opaque_label(t, s->tokens[i].u.id));
        koila__out_str(o, "\n");
        names[s->tokens[i].u.id] = (*n_names)++;
    }
}

koila_status koila_graph_print(const koila_graph *g, koila_write_fn write, void *user)
{
    const koila_table *t = g->table;
    koila__arena tmp;
    koila__out o;
    koila__arena_init(&tmp, &g->mem);
    koila__out_init(&o, write, user);
    uint8_t *seen_op = koila__arena_array(&tmp, t->ops.n, 1);
    uint8_t *seen_sig = koila__arena_array(&tmp, t->sigs.n, 1);
    uint32_t *names = koila__arena_array(&tmp, t->opaques.n, sizeof *names);
    uint32_t n_names = 0;
    if (!seen_op || !seen_sig || !names) {
        koila__arena_deinit(&tmp);
        return KOILA_NO_MEMORY;
    }
    memset(names, 0xff, t->opaques.n * sizeof *names);
    const printer p = { &o, t, names };
    koila__out_str(&o, "koila graph 2\n");
    for (uint32_t a = 0; a < g->axes.n; a++)
        koila__out_fmt(&o, "axis %lld\n", (long long)g->axes.at[a]);
    for (uint32_t n = 0; n < g->nodes.n; n++) {
        const koila_sig_info *s = koila__node_sig(g, n);
        if (seen_sig[g->nodes.at[n].sig])
            continue;
        seen_sig[g->nodes.at[n].sig] = 1;
        out_declarations(&o, t, s, seen_op, names, &n_names);
        for (uint32_t w = 0; w < s->n_writes; w++)
            for (uint32_t l = 0; l < s->writes[w].n_links; l++)
                out_declarations(&o, t, koila__sig(t, s->writes[w].links[l].sig), seen_op, names,
                                 &n_names);
    }
    for (uint32_t l = 0; l < g->lines.n; l++) {
        koila__out_fmt(&o, "line @%u ", l);
        koila__out_quoted(&o, koila_graph_line_file(g, l));
        koila__out_fmt(&o, " %u\n", g->lines.at[l].number);
    }
    uint32_t v = 0;
    for (uint32_t n = 0; n < g->nodes.n; n++) {
        for (; v < g->nodes.at[n].first_output; v++)
            out_leaf(&p, g, v);
        out_node(&p, g, n);
        v += koila__node_sig(g, n)->n_outputs;
    }
    for (; v < g->values.n; v++)
        out_leaf(&p, g, v);
    koila__out_fmt(&o, "end %u %u\n", g->values.n, g->nodes.n);
    koila__arena_deinit(&tmp);
    return koila__out_finish(&o);
}

/* ---- reading. Functions answer koila_status; BAD_INPUT is worded at the byte where reading
 * stopped. */

typedef struct call { /* one call being read */
    VEC(koila_arg) tokens;
    VEC(uint32_t) kw_names;
    VEC(koila_meta) outputs;
    VEC(koila_value) inputs;
    uint32_t n_pos;
    koila_op op;
    uint8_t result_kind, grad_mode;
} call;

typedef struct parser {
    const char *text;
    size_t n, at;
    koila_table *t;
    koila_graph *g;
    koila_error *err;
    const koila_allocator *mem;
    VEC(char) str; /* the last string or name, NUL-terminated */
    call node, link;
    VEC(koila_write) writes;
    VEC(uint32_t) first_link; /* [writes] into links */
    VEC(koila_link) links;
    VEC(uint32_t) opaques; /* opaque of the text -> of the table */
    VEC(uint8_t) declared; /* [op of the table] has an op line in this text; may be shorter */
    /* opaques of the table before this text, by label: chains in order of id */
    koila__arena tmp;
    koila__idset by_label;
    uint32_t *next_same; /* [n_known] */
    uint32_t *next_free; /* [n_known as first of its label] the first not yet taken */
    uint32_t n_known;
    bool indexed;
    bool has_end, ended; /* of this version; the end was read */
} parser;

#define BAD(p, ...) koila__fail((p)->err, KOILA_BAD_INPUT, (p)->at, __VA_ARGS__)
#define NO_MEM(p)                                                                                  \
    koila__fail((p)->err, KOILA_NO_MEMORY, (p)->at, "graph text: the host is out of memory")
#define PUSH(p, v, x)                                                                              \
    do {                                                                                           \
        if (!koila__vec_push((p)->mem, (v), (x)))                                                  \
            return NO_MEM(p);                                                                      \
    } while (0)

/* What a function of the table or graph answered, said of the text. */
static koila_status worded(parser *p, koila_status status, const char *what)
{
    if (status == KOILA_OK)
        return KOILA_OK;
    return status == KOILA_NO_MEMORY ? NO_MEM(p) : BAD(p, "%s", what);
}

static int peek(const parser *p) { return p->at < p->n ? (unsigned char)p->text[p->at] : '\n'; }
static void blanks(parser *p)
{
    while (p->at < p->n &&
           (p->text[p->at] == ' ' || p->text[p->at] == '\t' || p->text[p->at] == '\r'))
        p->at++;
}
/* Skips blanks; then the character, if it is there. */
static bool take(parser *p, char c)
{
    blanks(p);
    if (p->at >= p->n || p->text[p->at] != c)
        return false;
    p->at++;
    return true;
}
static koila_status expect(parser *p, char c)
{
    return take(p, c) ? KOILA_OK : BAD(p, "expected '%c'", c);
}
/* Skips blanks; then the word, if it is there and ends there. */
static bool take_word(parser *p, const char *word)
{
    blanks(p);
    const size_t n = strlen(word);
    if (p->n - p->at < n || memcmp(p->text + p->at, word, n) != 0)
        return false;
    if (p->at + n < p->n && is_word((unsigned char)p->text[p->at + n]))
        return false;
    p->at += n;
    return true;
}

static int hex_digit(int c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static koila_status read_u64(parser *p, uint64_t max, uint64_t *out)
{
    blanks(p);
    if (peek(p) < '0' || peek(p) > '9')
        return BAD(p, "expected a number");
    uint64_t x = 0;
    for (; peek(p) >= '0' && peek(p) <= '9'; p->at++) {
        const uint64_t digit = (uint64_t)(peek(p) - '0');
        if (x > (max - digit) / 10 || digit > max)
            return BAD(p, "a number above %llu", (unsigned long long)max);
        x = x * 10 + digit;
    }
    *out = x;
    return KOILA_OK;
}
static koila_status read_u32(parser *p, uint32_t max, uint32_t *out)
{
    uint64_t x = 0;
    KOILA_TRY(read_u64(p, max, &x));
    *out = (uint32_t)x;
    return KOILA_OK;
}
static koila_status read_i64(parser *p, int64_t *out)
{
    uint64_t x = 0;
    const bool minus = take(p, '-');
    KOILA_TRY(read_u64(p, (uint64_t)INT64_MAX + minus, &x));
    *out = minus ? (int64_t)(0 - x) : (int64_t)x;
    return KOILA_OK;
}

/* An integer or a floating-point number. */
static koila_status read_number(parser *p, koila_arg *out)
{
    blanks(p);
    const size_t begin = p->at;
    const bool minus = take(p, '-');
    double x = 0;
    if (peek(p) == '0' && p->at + 1 < p->n && p->text[p->at + 1] == 'x') {
        uint64_t m = 0, e = 0;
        const size_t first = p->at += 2;
        for (; hex_digit(peek(p)) >= 0; p->at++)
            if ((m = m << 4 | (uint64_t)hex_digit(peek(p))) >> 53)
                return BAD(p, "a mantissa of more than 53 bits");
        if (p->at == first || peek(p) != 'p')
            return BAD(p, "expected a hexadecimal mantissa and p<exponent>");
        p->at++;
        const bool down = peek(p) == '-';
        p->at += down;
        KOILA_TRY(read_u64(p, 4096, &e));
        x = ldexp((double)m, down ? -(int)e : (int)e);
        if (isinf(x))
            return BAD(p, "a number beyond a double");
    } else if (take_word(p, "inf"))
        x = INFINITY;
    else {
        const size_t first = p->at;
        bool integer = true;
        for (; (peek(p) >= '0' && peek(p) <= '9') || peek(p) == '.' || peek(p) == 'e' ||
               ((peek(p) == '-' || peek(p) == '+') && p->text[p->at - 1] == 'e' && p->at > first);
             p->at++)
            integer &= peek(p) >= '0' && peek(p) <= '9';
        const size_t end = p->at;
        if (integer) {
            p->at = begin;
            out->kind = KOILA_ARG_INT;
            return read_i64(p, &out->u.i);
        }
        if (!read_decimal(p->text + first, end - first, &x)) {
            p->at = begin;
            return BAD(
                p,
                "not a decimal number that a double holds exactly: write it as 0x<hex>p<exponent>");
        }
    }
    out->kind = KOILA_ARG_FLOAT;
    out->u.f = minus ? -x : x;
    return KOILA_OK;
}

/* A string in quotes into p->str. */
static koila_status read_string(parser *p)
{
    KOILA_TRY(expect(p, '"'));
    p->str.n = 0;
    while (peek(p) != '"') {
        int c = peek(p);
        if (c == '\n')
            return BAD(p, "a string without its end");
        p->at++;
        if (c == '\\') {
            const int e = peek(p);
            p->at++;
            if (e == '"' || e == '\\')
                c = e;
            else if (e == 'n')
                c = '\n';
            else if (e == 't')
                c = '\t';
            else if (e == 'x' && p->n >= p->at && p->n - p->at >= 2 &&
                     hex_digit((unsigned char)p->text[p->at]) >= 0 &&
                     hex_digit((unsigned char)p->text[p->at + 1]) >= 0) {
                c = hex_digit((unsigned char)p->text[p->at]) << 4 |
                    hex_digit((unsigned char)p->text[p->at + 1]);
                p->at += 2;
            } else {
                p->at = p->at <= p->n ? p->at - 1 : p->n;
                return BAD(p, "an escape that is none of \\\" \\\\ \\n \\t \\xHH");
            }
        }
        if (c == 0)
            return BAD(p, "a zero byte in a string");
        PUSH(p, &p->str, (char)c);
    }
    p->at++;
    PUSH(p, &p->str, 0);
    return KOILA_OK;
}

/* A name into p->str: bare or in quotes. */
static koila_status read_name(parser *p)
{
    blanks(p);
    if (peek(p) == '"')
        return read_string(p);
    if (!is_word_start(peek(p)))
        return BAD(p, "expected a name");
    p->str.n = 0;
    for (;;) {
        const int c = peek(p);
        const int next = p->at + 1 < p->n ? (unsigned char)p->text[p->at + 1] : '\n';
        if (is_word(c) || (c == '.' && is_word(next))) {
            PUSH(p, &p->str, (char)c);
            p->at++;
        } else if (c == ':' && next == ':' && p->at + 2 < p->n &&
                   is_word_start((unsigned char)p->text[p->at + 2])) {
            PUSH(p, &p->str, ':');
            PUSH(p, &p->str, ':');
            p->at += 2;
        } else
            break;
    }
    PUSH(p, &p->str, 0);
    return KOILA_OK;
}

/* A dtype's word, if it is there. Only words that are not names in a longer word are taken. */
static bool take_dtype(parser *p, koila_dtype *out)
{
    blanks(p);
    size_t n = 0;
    while (p->at + n < p->n && n < 8 && is_word((unsigned char)p->text[p->at + n]))
        n++;
    for (uint32_t d = 0; d < KOILA_N_DTYPES; d++) {
        const char *word = koila_dtype_text((koila_dtype)d);
        if (strlen(word) != n || memcmp(word, p->text + p->at, n) != 0)
            continue;
        *out = (koila_dtype)d;
        p->at += n;
        return true;
    }
    return false;
}

/* The numbers up to `close`; at most KOILA_MAX_DIMS. */
static koila_status read_dims(parser *p, char close, int64_t *at, uint32_t *n)
{
    *n = 0;
    if (take(p, close))
        return KOILA_OK;
    do {
        if (*n == KOILA_MAX_DIMS)
            return BAD(p, "more than %d dimensions", KOILA_MAX_DIMS);
        KOILA_TRY(read_i64(p, &at[(*n)++]));
    } while (take(p, ','));
    return expect(p, close);
}

static koila_status read_meta(parser *p, koila_meta *out)
{
    koila_dtype dtype = 0;
    int64_t size[KOILA_MAX_DIMS], stride[KOILA_MAX_DIMS];
    uint32_t n_dims = 0, n_strides = 0, device = 0;
    if (!take_dtype(p, &dtype))
        return BAD(p, "expected a dtype");
    KOILA_TRY(expect(p, '['));
    KOILA_TRY(read_dims(p, ']', size, &n_dims));
    const bool strided = take(p, '{');
    if (strided) {
        KOILA_TRY(read_dims(p, '}', stride, &n_strides));
        if (n_strides != n_dims)
            return BAD(p, "%u strides for %u sizes", n_strides, n_dims);
    }
    if (take_word(p, "on")) {
        const bool cuda = take_word(p, "cuda");
        if (!cuda && !take_word(p, "device"))
            return BAD(p, "expected cuda:<index> or device:<number>");
        KOILA_TRY(expect(p, ':'));
        KOILA_TRY(read_u32(p, cuda ? 255 : UINT16_MAX, &device));
        if (cuda)
            device |= 0x100;
    }
    return worded(
        p,
        koila_table_meta(p->t, dtype, (uint16_t)device, n_dims, size, strided ? stride : NULL, out),
        "sizes or strides that no tensor has");
}

static uint64_t label_hash_of(const void *t, uint32_t id)
{
    uint64_t h = 1469598103934665603u; /* FNV-1a 64 */
    for (const char *s = koila_opaque_label(t, id); *s; s++)
        h = (h ^ (unsigned char)*s) * 1099511628211u;
    return koila__mix(h, 1);
}
static bool label_same(const void *t, uint32_t id, const void *key)
{
    return strcmp(koila_opaque_label(t, id), key) == 0;
}

/* Chains of the table's opaques by label. */
static koila_status index_opaques(parser *p)
{
    p->indexed = true;
    p->n_known = p->t->opaques.n;
    p->next_same = koila__arena_array(&p->tmp, p->n_known, sizeof *p->next_same);
    p->next_free = koila__arena_array(&p->tmp, p->n_known, sizeof *p->next_free);
    /* [first of its label] */
    uint32_t *last = koila__arena_array(&p->tmp, p->n_known, sizeof *last);
    if (!p->next_same || !p->next_free || !last)
        return NO_MEM(p);
    for (uint32_t id = 0; id < p->n_known; id++) {
        const uint64_t hash = label_hash_of(p->t, id);
        const uint32_t first =
            koila__idset_find(&p->by_label, hash, label_same, p->t, koila_opaque_label(p->t, id));
        p->next_same[id] = KOILA_NONE;
        if (first != KOILA_NONE) {
            p->next_same[last[first]] = id;
            last[first] = id;
            continue;
        }
        if (!koila__idset_reserve(p->mem, &p->by_label, label_hash_of, p->t))
            return NO_MEM(p);
        koila__idset_insert(&p->by_label, hash, id);
        p->next_free[id] = last[id] = id;
    }
    return KOILA_OK;
}

static koila_status read_opaque(parser *p)
{
    uint32_t name = 0, id = KOILA_NONE;
    KOILA_TRY(expect(p, '#'));
    KOILA_TRY(read_u32(p, KOILA_NONE - 1, &name));
    if (name != p->opaques.n)
        return BAD(p, "opaques are numbered in order: expected #%u", p->opaques.n);
    KOILA_TRY(read_string(p));
    if (!p->indexed)
        KOILA_TRY(index_opaques(p));
    uint64_t h = 1469598103934665603u;
    for (const char *s = p->str.at; *s; s++)
        h = (h ^ (unsigned char)*s) * 1099511628211u;
    const uint32_t first =
        koila__idset_find(&p->by_label, koila__mix(h, 1), label_same, p->t, p->str.at);
    if (first != KOILA_NONE && (id = p->next_free[first]) != KOILA_NONE)
        p->next_free[first] = p->next_same[id];
    if (id == KOILA_NONE)
        KOILA_TRY(worded(p, koila_table_opaque(p->t, p->str.at, &id), "no room for an opaque"));
    PUSH(p, &p->opaques, id);
    return KOILA_OK;
}

/* One argument that is no list. `link`: tensors are metas, else values. */
static koila_status read_one(parser *p, call *c, bool link)
{
    koila_arg a = { 0 };
    koila_dtype dtype;
    blanks(p);
    if (peek(p) == '%' && !link) {
        koila_value v = 0;
        p->at++;
        KOILA_TRY(read_u32(p, KOILA_NONE - 1, &v));
        if (v >= p->g->values.n)
            return BAD(p, "value %%%u is not made yet", v);
        if (p->g->values.at[v].meta == KOILA_NONE)
            return BAD(p, "value %%%u is None", v);
        a.kind = KOILA_ARG_TENSOR;
        a.u.id = p->g->values.at[v].meta;
        PUSH(p, &c->inputs, v);
    } else if (peek(p) == '#') {
        p->at++;
        KOILA_TRY(read_u32(p, KOILA_NONE - 1, &a.u.id));
        if (a.u.id >= p->opaques.n)
            return BAD(p, "no opaque #%u", a.u.id);
        a.kind = KOILA_ARG_OPAQUE;
        a.u.id = p->opaques.at[a.u.id];
    } else if (peek(p) == '"') {
        KOILA_TRY(read_string(p));
        a.kind = KOILA_ARG_STR;
        KOILA_TRY(worded(p, koila_table_text(p->t, p->str.at, &a.u.id), "no room for a text"));
    } else if (take_word(p, "None"))
        a.kind = KOILA_ARG_ABSENT;
    else if (take_word(p, "true") || take_word(p, "false")) {
        a.kind = KOILA_ARG_BOOL;
        a.u.i = p->text[p->at - 2] == 'u';
    } else if (take_word(p, "nan")) {
        uint64_t bits = 0x7ff8000000000000u;
        if (peek(p) == ':') {
            p->at++;
            bits = 0;
            for (int i = 0; i < 16; i++, p->at++) {
                if (hex_digit(peek(p)) < 0)
                    return BAD(p, "expected 16 hexadecimal digits");
                bits = bits << 4 | (uint64_t)hex_digit(peek(p));
            }
        }
        a.kind = KOILA_ARG_FLOAT;
        memcpy(&a.u.f, &bits, sizeof bits);
        if (!isnan(a.u.f))
            return BAD(p, "the bits of nan: are a number");
    } else {
        const size_t begin = p->at;
        if (take_dtype(p, &dtype)) {
            if (link && peek(p) == '[') {
                p->at = begin;
                a.kind = KOILA_ARG_TENSOR;
                KOILA_TRY(read_meta(p, &a.u.id));
            } else {
                a.kind = KOILA_ARG_DTYPE;
                a.u.id = (uint32_t)dtype;
            }
        } else
            KOILA_TRY(read_number(p, &a));
    }
    PUSH(p, &c->tokens, a);
    return KOILA_OK;
}

/* An argument's name and '=', if they are there. */
static koila_status read_kw(parser *p, bool *found)
{
    blanks(p);
    const size_t begin = p->at;
    *found = false;
    if (peek(p) != '"' && !is_word_start(peek(p)))
        return KOILA_OK;
    KOILA_TRY(read_name(p));
    if (take(p, '='))
        *found = true;
    else
        p->at = begin; /* read again as a value: twice at most */
    return KOILA_OK;
}

static koila_status read_args(parser *p, call *c, bool link)
{
    if (take(p, ')'))
        return KOILA_OK;
    do {
        bool named = false;
        KOILA_TRY(read_kw(p, &named));
        if (named) {
            uint32_t name = 0;
            KOILA_TRY(worded(p, koila_table_text(p->t, p->str.at, &name), "no room for a name"));
            PUSH(p, &c->kw_names, name);
        } else if (c->kw_names.n)
            return BAD(p, "a positional argument behind a named one");
        else
            c->n_pos++;
        if (!take(p, '[')) {
            KOILA_TRY(read_one(p, c, link));
            continue;
        }
        const uint32_t list = c->tokens.n;
        PUSH(p, &c->tokens, ((koila_arg){ .kind = KOILA_ARG_LIST }));
        if (take(p, ']'))
            continue;
        do
            KOILA_TRY(read_one(p, c, link));
        while (take(p, ','));
        KOILA_TRY(expect(p, ']'));
        c->tokens.at[list].n = c->tokens.n - list - 1;
    } while (take(p, ','));
    return expect(p, ')');
}

static koila_status read_result(parser *p, call *c)
{
    static const char open[] = "<([{";
    static const char close[] = ">)]}";
    koila_meta meta = KOILA_NONE;
    for (uint8_t kind = 0; kind < 4; kind++) {
        if (!take(p, open[kind]))
            continue;
        c->result_kind = kind;
        if (take(p, close[kind]))
            return KOILA_OK;
        do {
            meta = KOILA_NONE;
            if (!take_word(p, "None"))
                KOILA_TRY(read_meta(p, &meta));
            PUSH(p, &c->outputs, meta);
        } while (take(p, ','));
        return expect(p, close[kind]);
    }
    c->result_kind = 0;
    KOILA_TRY(read_meta(p, &meta));
    PUSH(p, &c->outputs, meta);
    return KOILA_OK;
}

static koila_status read_call(parser *p, call *c, bool link)
{
    c->tokens.n = c->kw_names.n = c->outputs.n = c->inputs.n = c->n_pos = 0;
    c->grad_mode = 0;
    KOILA_TRY(read_name(p));
    const size_t at = p->at;
    KOILA_TRY(expect(p, '('));
    p->at = at;
    KOILA_TRY(worded(p, koila_table_op(p->t, p->str.at, 0, &c->op), "no room for an operator"));
    if (p->t->ops.at[c->op].flags && !(c->op < p->declared.n && p->declared.at[c->op]))
        return BAD(p, "this table's operator has flags: the text needs an op line");
    KOILA_TRY(expect(p, '('));
    KOILA_TRY(read_args(p, c, link));
    KOILA_TRY(expect(p, '-'));
    KOILA_TRY(expect(p, '>'));
    KOILA_TRY(read_result(p, c));
    if (take_word(p, "grad")) {
        uint32_t mode = 1;
        if (take(p, '='))
            KOILA_TRY(read_u32(p, UINT8_MAX, &mode));
        c->grad_mode = (uint8_t)mode;
    }
    return KOILA_OK;
}

static koila_status intern_call(parser *p, const call *c, const koila_write *writes,
                                uint32_t n_writes, koila_sig *out)
{
    const koila_sig_info desc = { .op = c->op,
                                  .n_tokens = c->tokens.n,
                                  .n_pos = c->n_pos,
                                  .n_kw = c->kw_names.n,
                                  .tokens = c->tokens.at,
                                  .kw_names = c->kw_names.at,
                                  .n_fresh = c->outputs.n,
                                  .outputs = c->outputs.at,
                                  .result_kind = c->result_kind,
                                  .grad_mode = c->grad_mode,
                                  .n_writes = n_writes,
                                  .writes = writes };
    return worded(
        p, koila_table_sig(p->t, &desc, out),
        "not a valid call: a write of no input, a chain that is none, or too many arguments");
}

static koila_status read_write(parser *p, bool overwrites)
{
    koila_write w = { .overwrites = overwrites };
    KOILA_TRY(read_u32(p, KOILA_NONE - 1, &w.input));
    PUSH(p, &p->first_link, p->links.n);
    while (take_word(p, "via")) {
        koila_link link = { 0 };
        KOILA_TRY(read_call(p, &p->link, true));
        KOILA_TRY(intern_call(p, &p->link, NULL, 0, &link.sig));
        KOILA_TRY(expect(p, ':'));
        KOILA_TRY(read_u32(p, KOILA_NONE - 1, &link.output));
        PUSH(p, &p->links, link);
        w.n_links++;
    }
    PUSH(p, &p->writes, w);
    return KOILA_OK;
}

/* { VALUE } "=" leaf | node. The values listed must be the next ones. */
static koila_status read_values(parser *p)
{
    const koila_value first = p->g->values.n;
    uint32_t n_listed = 0;
    for (; take(p, '%'); n_listed++) {
        koila_value v = 0;
        KOILA_TRY(read_u32(p, KOILA_NONE - 1, &v));
        if (v != first + n_listed)
            return BAD(p, "values are numbered in order: expected %%%u", first + n_listed);
    }
    KOILA_TRY(expect(p, '='));
    blanks(p);
    const size_t begin = p->at;
    const bool batch = take_word(p, "batch");
    if ((batch || take_word(p, "real")) && (blanks(p), is_word_start(peek(p)))) {
        uint32_t axis = 0, dim = 0;
        koila_meta meta = 0;
        koila_value v = 0;
        if (batch) {
            if (!take_word(p, "axis"))
                return BAD(p, "expected axis");
            KOILA_TRY(read_u32(p, UINT16_MAX, &axis));
            if (!take_word(p, "dim"))
                return BAD(p, "expected dim");
            KOILA_TRY(read_u32(p, KOILA_MAX_DIMS - 1, &dim));
        }
        KOILA_TRY(read_meta(p, &meta));
        blanks(p);
        const bool named = peek(p) == '"';
        if (named)
            KOILA_TRY(read_string(p));
        if (n_listed != 1)
            return BAD(p, "a leaf is one value");
        return worded(p,
                      koila_graph_leaf(p->g, meta, batch ? KOILA_LEAF_BATCH : KOILA_LEAF_REAL,
                                       (uint16_t)axis, dim, named ? p->str.at : NULL, &v),
                      "a batch leaf whose dimension is not the size of its axis");
    }
    p->at = begin;
    koila_sig sig = 0;
    koila_value out = 0;
    uint32_t line = KOILA_NONE;
    p->writes.n = p->links.n = p->first_link.n = 0;
    KOILA_TRY(read_call(p, &p->node, false));
    for (;;) {
        const bool overwrites = take_word(p, "overwrites");
        if (!overwrites && !take_word(p, "writes"))
            break;
        KOILA_TRY(read_write(p, overwrites));
    }
    for (uint32_t w = 0; w < p->writes.n; w++)
        p->writes.at[w].links = p->links.n ? p->links.at + p->first_link.at[w] : NULL;
    if (take(p, '@'))
        KOILA_TRY(read_u32(p, KOILA_NONE - 1, &line));
    KOILA_TRY(intern_call(p, &p->node, p->writes.at, p->writes.n, &sig));
    if (n_listed != koila__sig(p->t, sig)->n_outputs)
        return BAD(p, "%u values are listed, the call has %u results", n_listed,
                   koila__sig(p->t, sig)->n_outputs);
    return worded(p, koila_graph_node(p->g, sig, p->node.inputs.at, line, &out),
                  "not a valid node");
}

static koila_status read_op(parser *p)
{
    uint32_t flags = 0;
    koila_op op = 0;
    KOILA_TRY(read_name(p));
    for (;;) {
        uint32_t bits = 0;
        for (size_t i = 0; i < KOILA_COUNT(op_flags) && !bits; i++)
            if (take_word(p, op_flags[i].word))
                bits = op_flags[i].flag;
        blanks(p);
        if (!bits && peek(p) >= '0' && peek(p) <= '9')
            KOILA_TRY(read_u32(p, UINT32_MAX, &bits));
        if (!bits)
            break;
        flags |= bits;
    }
    const uint32_t n_ops = p->t->ops.n;
    KOILA_TRY(worded(p, koila_table_op(p->t, p->str.at, flags, &op), "no room for an operator"));
    if (op < n_ops && p->t->ops.at[op].flags != flags)
        return BAD(p, "operator has other flags in this table, or was used above");
    while (p->declared.n <= op)
        PUSH(p, &p->declared, 0);
    p->declared.at[op] = 1;
    return KOILA_OK;
}

static koila_status read_line(parser *p)
{
    int64_t size = 0;
    uint16_t axis = 0;
    blanks(p);
    if (peek(p) == '\n' || (peek(p) == '/' && p->at + 1 < p->n && p->text[p->at + 1] == '/')) {
        while (peek(p) != '\n')
            p->at++;
        return KOILA_OK;
    }
    if (p->ended)
        return BAD(p, "something behind the end of the graph");
    if (peek(p) == '%' || peek(p) == '=')
        return read_values(p);
    if (take_word(p, "axis")) {
        KOILA_TRY(read_i64(p, &size));
        return worded(p, koila_graph_axis(p->g, size, &axis),
                      "an axis of negative size, or one too many");
    }
    if (take_word(p, "opaque"))
        return read_opaque(p);
    if (take_word(p, "op"))
        return read_op(p);
    if (take_word(p, "line")) {
        uint32_t name = 0, number = 0, id = 0;
        KOILA_TRY(expect(p, '@'));
        KOILA_TRY(read_u32(p, KOILA_NONE - 1, &name));
        KOILA_TRY(read_string(p));
        KOILA_TRY(read_u32(p, UINT32_MAX, &number));
        KOILA_TRY(worded(p, koila_graph_line(p->g, p->str.at, number, &id), "no room for a line"));
        return id == name && id == p->g->lines.n - 1
                   ? KOILA_OK
                   : BAD(p, "lines are numbered in order and differ: this one is @%u", id);
    }
    if (p->has_end && take_word(p, "end")) {
        uint32_t n_values = 0, n_nodes = 0;
        KOILA_TRY(read_u32(p, UINT32_MAX, &n_values));
        KOILA_TRY(read_u32(p, UINT32_MAX, &n_nodes));
        p->ended = true;
        if (n_values == p->g->values.n && n_nodes == p->g->nodes.n)
            return KOILA_OK;
        return BAD(p,
                   "the end says %u values and %u nodes, but there are %u and %u: lines are "
                   "missing, or the end was cut",
                   n_values, n_nodes, (uint32_t)p->g->values.n, (uint32_t)p->g->nodes.n);
    }
    return BAD(p, "expected axis, op, opaque, line, %%<value> =%s", p->has_end ? " or end" : "");
}

koila_status koila_graph_parse(koila_table *table, const char *text, size_t n, koila_graph **out,
                               koila_error *err)
{
    static const char magic[] = "koila graph "; /* and the version: 2, or 1, which had no end */
    const koila_allocator mem = table->mem;
    parser p = { .text = text, .n = n, .t = table, .err = err, .mem = &mem };
    koila__arena_init(&p.tmp, &mem);
    koila_status status = koila_graph_new(table, &mem, &p.g);
    if (status != KOILA_OK)
        return NO_MEM(&p);
    const size_t n_magic = sizeof magic - 1;
    if (n <= n_magic || memcmp(text, magic, n_magic) != 0 ||
        (text[n_magic] != '1' && text[n_magic] != '2'))
        status = BAD(&p, "the first line is not \"%s2\"", magic);
    else {
        p.has_end = text[n_magic] == '2';
        p.at = n_magic + 1;
    }
    while (status == KOILA_OK) {
        blanks(&p);
        if (p.at >= n)
            break;
        if (text[p.at] != '\n') {
            status = BAD(&p, "something behind the end of a line");
            break;
        }
        p.at++;
        status = read_line(&p);
    }
    if (status == KOILA_OK && p.has_end && !p.ended)
        status = BAD(
            &p,
            "the graph ends early, after %u values and %u nodes: its last line would be \"end\"",
            (uint32_t)p.g->values.n, (uint32_t)p.g->nodes.n);
    call *const calls[] = { &p.node, &p.link };
    for (size_t i = 0; i < KOILA_COUNT(calls); i++) {
        koila__vec_free(&mem, &calls[i]->tokens);
        koila__vec_free(&mem, &calls[i]->kw_names);
        koila__vec_free(&mem, &calls[i]->outputs);
        koila__vec_free(&mem, &calls[i]->inputs);
    }
    koila__vec_free(&mem, &p.str);
    koila__vec_free(&mem, &p.writes);
    koila__vec_free(&mem, &p.first_link);
    koila__vec_free(&mem, &p.links);
    koila__vec_free(&mem, &p.opaques);
    koila__vec_free(&mem, &p.declared);
    koila__idset_free(&mem, &p.by_label);
    koila__arena_deinit(&p.tmp);
    if (status != KOILA_OK) {
        koila_graph_free(p.g);
        return status;
    }
    *out = p.g;
    return KOILA_OK;
}
