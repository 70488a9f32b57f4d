/* graph_read.c — reads text in the grammar of graph_text.h as a graph.
 *
 * Text may be hostile: every id is checked, every value is written out where it is made (so a graph
 * is never more than a constant times larger than its text), and no byte is read more than twice.
 * Numbers are not read by the C library, whose result depends on the locale. */
#include "graph/graph_text.h"

#include <math.h>

/* ---- decimal numbers */

/* *out = m * 10^e. False unless it is exact up to one rounding: m and 10^|e| are doubles (Clinger
 * 1990, the fast path). */
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

/* False: m has too many digits for a double. */
static bool push_digit(uint64_t *m, uint32_t digit)
{
    if (*m >> 53)
        return false;
    *m = *m * 10 + digit;
    return true;
}

/* Digits [. digits] from s[*at] on are m * 10^-n_fraction. False: no digit, or too many. */
static bool read_digits(const char *s, size_t n, size_t *at, uint64_t *m, int64_t *n_fraction)
{
    size_t n_zeros = 0; /* pending zeros at the end of the fraction */
    bool dot = false;
    bool any = false;
    for (; *at < n; ++*at) {
        const char c = s[*at];
        if (c == '.' && !dot) {
            dot = true;
            continue;
        }
        if (!koila__is_digit(c))
            break;
        any = true;
        if (dot && c == '0') {
            n_zeros++;
            continue;
        }
        for (; n_zeros; n_zeros--) {
            if (!push_digit(m, 0))
                return false;
            ++*n_fraction;
        }
        if (!push_digit(m, (uint32_t)(c - '0')))
            return false;
        *n_fraction += dot;
    }
    return any;
}

/* [e [+-] digits] from s[*at] on. */
static bool read_exponent(const char *s, size_t n, size_t *at, int64_t *e)
{
    enum { BEYOND_ANY = 100000 };
    if (*at == n || s[*at] != 'e')
        return true;
    ++*at;
    const bool minus = *at < n && s[*at] == '-';
    if (*at < n && (s[*at] == '-' || s[*at] == '+'))
        ++*at;
    if (*at == n)
        return false;
    for (; *at < n && koila__is_digit(s[*at]) && *e < BEYOND_ANY; ++*at)
        *e = *e * 10 + (s[*at] - '0');
    if (minus)
        *e = -*e;
    return true;
}

bool koila__read_decimal(const char *s, size_t n, double *out)
{
    uint64_t m = 0;
    int64_t e = 0;
    int64_t n_fraction = 0;
    size_t at = 0;
    return read_digits(s, n, &at, &m, &n_fraction) && read_exponent(s, n, &at, &e) && at == n &&
           decimal(m, e - n_fraction, out);
}

/* ---- the parser. Every function returns a koila_status; the offset of BAD_INPUT is the byte where
 * reading stopped. */

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

/* Turns the status of a function of the table or graph into an error about the text. */
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
    if (p->at + n < p->n && koila__is_word((unsigned char)p->text[p->at + n]))
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

/* <hex>p[-]<exponent>, which stands behind "0x". */
static koila_status read_hex_float(parser *p, double *out)
{
    enum { MANTISSA_BITS = 53, MAX_EXPONENT = 4096 };
    uint64_t m = 0;
    uint64_t e = 0;
    const size_t first = p->at;
    for (; hex_digit(peek(p)) >= 0; p->at++) {
        m = m << 4 | (uint64_t)hex_digit(peek(p));
        if (m >> MANTISSA_BITS)
            return BAD(p, "a mantissa of more than 53 bits");
    }
    if (p->at == first || peek(p) != 'p')
        return BAD(p, "expected a hexadecimal mantissa and p<exponent>");
    p->at++;
    const bool down = peek(p) == '-';
    p->at += down;
    KOILA_TRY(read_u64(p, MAX_EXPONENT, &e));
    *out = ldexp((double)m, down ? -(int)e : (int)e);
    return isinf(*out) ? BAD(p, "a number beyond a double") : KOILA_OK;
}

/* Skips a possible decimal number; true when it consists of digits only. */
static bool skip_decimal(parser *p)
{
    const size_t first = p->at;
    bool integer = true;
    for (;; p->at++) {
        const int c = peek(p);
        const bool sign = (c == '-' || c == '+') && p->at > first && p->text[p->at - 1] == 'e';
        if (!koila__is_digit(c) && c != '.' && c != 'e' && !sign)
            return integer;
        integer &= koila__is_digit(c);
    }
}

/* An integer or a floating-point number. */
static koila_status read_number(parser *p, koila_arg *out)
{
    blanks(p);
    const size_t begin = p->at;
    const bool minus = take(p, '-');
    const bool hex = peek(p) == '0' && p->at + 1 < p->n && p->text[p->at + 1] == 'x';
    double x = 0;
    if (hex) {
        p->at += 2;
        KOILA_TRY(read_hex_float(p, &x));
    } else if (take_word(p, "inf")) {
        x = INFINITY;
    } else {
        const size_t first = p->at;
        const bool integer = skip_decimal(p);
        const size_t end = p->at;
        if (integer) {
            p->at = begin;
            out->kind = KOILA_ARG_INT;
            return read_i64(p, &out->u.i);
        }
        if (!koila__read_decimal(p->text + first, end - first, &x)) {
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

/* Reads the escape that follows a backslash. */
static koila_status read_escape(parser *p, int *out)
{
    const int e = peek(p);
    p->at++;
    switch (e) {
    case '"':
    case '\\':
        *out = e;
        return KOILA_OK;
    case 'n':
        *out = '\n';
        return KOILA_OK;
    case 't':
        *out = '\t';
        return KOILA_OK;
    case 'x':
        if (p->at + 2 > p->n || hex_digit(p->text[p->at]) < 0 || hex_digit(p->text[p->at + 1]) < 0)
            break;
        *out = hex_digit(p->text[p->at]) << 4 | hex_digit(p->text[p->at + 1]);
        p->at += 2;
        return KOILA_OK;
    }
    p->at = p->at <= p->n ? p->at - 1 : p->n;
    return BAD(p, "an escape that is none of \\\" \\\\ \\n \\t \\xHH");
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
        if (c == '\\')
            KOILA_TRY(read_escape(p, &c));
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
    if (!koila__is_word_start(peek(p)))
        return BAD(p, "expected a name");
    p->str.n = 0;
    for (;;) {
        const int c = peek(p);
        const int next = p->at + 1 < p->n ? (unsigned char)p->text[p->at + 1] : '\n';
        if (koila__is_word(c) || (c == '.' && koila__is_word(next))) {
            PUSH(p, &p->str, (char)c);
            p->at++;
        } else if (c == ':' && next == ':' && p->at + 2 < p->n &&
                   koila__is_word_start((unsigned char)p->text[p->at + 2])) {
            PUSH(p, &p->str, ':');
            PUSH(p, &p->str, ':');
            p->at += 2;
        } else
            break;
    }
    PUSH(p, &p->str, 0);
    return KOILA_OK;
}

/* A dtype's word, if it is there. A dtype inside a longer word is not taken. */
static bool take_dtype(parser *p, koila_dtype *out)
{
    blanks(p);
    size_t n = 0;
    while (p->at + n < p->n && n < 8 && koila__is_word((unsigned char)p->text[p->at + n]))
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
    return koila__hash_text(koila_opaque_label(t, id));
}
static bool label_same(const void *t, uint32_t id, const void *key)
{
    return strcmp(koila_opaque_label(t, id), key) == 0;
}

/* Chains the opaques of the table by label. */
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
    const uint32_t first =
        koila__idset_find(&p->by_label, koila__hash_text(p->str.at), label_same, p->t, p->str.at);
    if (first != KOILA_NONE)
        id = p->next_free[first];
    if (id != KOILA_NONE)
        p->next_free[first] = p->next_same[id];
    else
        KOILA_TRY(worded(p, koila_table_opaque(p->t, p->str.at, &id), "no room for an opaque"));
    PUSH(p, &p->opaques, id);
    return KOILA_OK;
}

/* %<value>: a tensor that exists. */
static koila_status read_tensor(parser *p, call *c, koila_arg *a)
{
    koila_value v = 0;
    p->at++;
    KOILA_TRY(read_u32(p, KOILA_NONE - 1, &v));
    if (v >= p->g->values.n)
        return BAD(p, "value %%%u is not made yet", v);
    if (p->g->values.at[v].meta == KOILA_NONE)
        return BAD(p, "value %%%u is None", v);
    a->kind = KOILA_ARG_TENSOR;
    a->u.id = p->g->values.at[v].meta;
    PUSH(p, &c->inputs, v);
    return KOILA_OK;
}

/* #<number> of an opaque line. */
static koila_status read_opaque_number(parser *p, koila_arg *a)
{
    uint32_t number = 0;
    p->at++;
    KOILA_TRY(read_u32(p, KOILA_NONE - 1, &number));
    if (number >= p->opaques.n)
        return BAD(p, "no opaque #%u", number);
    a->kind = KOILA_ARG_OPAQUE;
    a->u.id = p->opaques.at[number];
    return KOILA_OK;
}

/* [:<bits>], which stands behind "nan". */
static koila_status read_nan_bits(parser *p, koila_arg *a)
{
    enum { N_HEX_DIGITS = 16 };
    uint64_t bits = KOILA__NAN_BITS;
    if (peek(p) == ':') {
        p->at++;
        bits = 0;
        for (int i = 0; i < N_HEX_DIGITS; i++) {
            if (hex_digit(peek(p)) < 0)
                return BAD(p, "expected 16 hexadecimal digits");
            bits = bits << 4 | (uint64_t)hex_digit(peek(p));
            p->at++;
        }
    }
    a->kind = KOILA_ARG_FLOAT;
    memcpy(&a->u.f, &bits, sizeof bits);
    return isnan(a->u.f) ? KOILA_OK : BAD(p, "the bits of nan: are a number");
}

/* A dtype; or, where tensors are metas, a meta; or a number. */
static koila_status read_dtype_or_number(parser *p, koila_arg *a, bool link)
{
    koila_dtype dtype;
    const size_t begin = p->at;
    if (!take_dtype(p, &dtype))
        return read_number(p, a);
    if (link && peek(p) == '[') {
        p->at = begin;
        a->kind = KOILA_ARG_TENSOR;
        return read_meta(p, &a->u.id);
    }
    a->kind = KOILA_ARG_DTYPE;
    a->u.id = (uint32_t)dtype;
    return KOILA_OK;
}

/* One argument that is no list. `link`: it is of the link of a chain, where tensors are metas. */
static koila_status read_one(parser *p, call *c, bool link)
{
    koila_arg a = { 0 };
    blanks(p);
    if (peek(p) == '%' && !link) {
        KOILA_TRY(read_tensor(p, c, &a));
    } else if (peek(p) == '#') {
        KOILA_TRY(read_opaque_number(p, &a));
    } else if (peek(p) == '"') {
        KOILA_TRY(read_string(p));
        a.kind = KOILA_ARG_STR;
        KOILA_TRY(worded(p, koila_table_text(p->t, p->str.at, &a.u.id), "no room for a text"));
    } else if (take_word(p, "None")) {
        a.kind = KOILA_ARG_ABSENT;
    } else if (take_word(p, "true")) {
        a.kind = KOILA_ARG_BOOL;
        a.u.i = 1;
    } else if (take_word(p, "false")) {
        a.kind = KOILA_ARG_BOOL;
    } else if (take_word(p, "nan")) {
        KOILA_TRY(read_nan_bits(p, &a));
    } else {
        KOILA_TRY(read_dtype_or_number(p, &a, link));
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
    if (peek(p) != '"' && !koila__is_word_start(peek(p)))
        return KOILA_OK;
    KOILA_TRY(read_name(p));
    if (take(p, '='))
        *found = true;
    else
        p->at = begin; /* read again as a value: twice at most */
    return KOILA_OK;
}

/* { one } "]" of a list whose '[' was read. */
static koila_status read_list(parser *p, call *c, bool link)
{
    const uint32_t list = c->tokens.n;
    PUSH(p, &c->tokens, ((koila_arg){ .kind = KOILA_ARG_LIST }));
    if (take(p, ']'))
        return KOILA_OK;
    do
        KOILA_TRY(read_one(p, c, link));
    while (take(p, ','));
    c->tokens.at[list].n = c->tokens.n - list - 1;
    return expect(p, ']');
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
        } else if (c->kw_names.n) {
            return BAD(p, "a positional argument behind a named one");
        } else {
            c->n_pos++;
        }
        KOILA_TRY(take(p, '[') ? read_list(p, c, link) : read_one(p, c, link));
    } while (take(p, ','));
    return expect(p, ')');
}

/* Up to the bracket that closes them. */
static koila_status read_results(parser *p, call *c, char close)
{
    if (take(p, close))
        return KOILA_OK;
    do {
        koila_meta meta = KOILA_NONE;
        if (!take_word(p, "None"))
            KOILA_TRY(read_meta(p, &meta));
        PUSH(p, &c->outputs, meta);
    } while (take(p, ','));
    return expect(p, close);
}

static koila_status read_result(parser *p, call *c)
{
    enum { TUPLE = 1, ENDS_IN_LIST = 4 };
    static const char open[] = "<([{";
    static const char close[] = ">)]}";
    koila_meta meta = KOILA_NONE;
    for (uint8_t kind = 0; kind < ENDS_IN_LIST; kind++) {
        if (!take(p, open[kind]))
            continue;
        c->result_kind = kind;
        if (kind != TUPLE || !take(p, '['))
            return read_results(p, c, close[kind]);
        c->result_kind = ENDS_IN_LIST;
        KOILA_TRY(read_results(p, c, ']'));
        return expect(p, ')');
    }
    c->result_kind = 0;
    KOILA_TRY(read_meta(p, &meta));
    PUSH(p, &c->outputs, meta);
    return KOILA_OK;
}

/* Into *c. `link`: the link of a chain, where tensors are metas. */
static koila_status read_call(parser *p, call *c, bool link)
{
    c->tokens.n = 0;
    c->kw_names.n = 0;
    c->outputs.n = 0;
    c->inputs.n = 0;
    c->n_pos = 0;
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

/* A leaf, whose "batch" or "real" was read. */
static koila_status read_leaf(parser *p, bool batch, uint32_t n_listed)
{
    uint32_t axis = 0;
    uint32_t dim = 0;
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

/* call { write } [ "@"N ] */
static koila_status read_node(parser *p, uint32_t n_listed)
{
    koila_sig sig = 0;
    koila_value out = 0;
    uint32_t line = KOILA_NONE;
    p->writes.n = 0;
    p->links.n = 0;
    p->first_link.n = 0;
    KOILA_TRY(read_call(p, &p->node, false));
    for (;;) {
        const bool overwrites = take_word(p, "overwrites");
        if (!overwrites && !take_word(p, "writes"))
            break;
        KOILA_TRY(read_write(p, overwrites));
    }
    koila_assert(p->first_link.n == p->writes.n);
    for (uint32_t w = 0; w < p->writes.n; w++)
        p->writes.at[w].links = p->links.n ? p->links.at + p->first_link.at[w] : NULL;
    if (take(p, '@'))
        KOILA_TRY(read_u32(p, KOILA_NONE - 1, &line));
    KOILA_TRY(intern_call(p, &p->node, p->writes.at, p->writes.n, &sig));
    const uint32_t n_outputs = koila__sig(p->t, sig)->n_outputs;
    if (n_listed != n_outputs)
        return BAD(p, "%u values are listed, the call has %u results", n_listed, n_outputs);
    return worded(p, koila_graph_node(p->g, sig, p->node.inputs.at, line, &out),
                  "not a valid node");
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
    const bool leaf = batch || take_word(p, "real");
    blanks(p);
    if (leaf && koila__is_word_start(peek(p)))
        return read_leaf(p, batch, n_listed);
    p->at = begin; /* else it is the name of an operator */
    return read_node(p, n_listed);
}

static koila_status read_op(parser *p)
{
    uint32_t flags = 0;
    koila_op op = 0;
    KOILA_TRY(read_name(p));
    for (;;) {
        uint32_t bits = 0;
        for (size_t i = 0; i < KOILA__N_OP_FLAGS && !bits; i++)
            if (take_word(p, koila__op_flags[i].word))
                bits = koila__op_flags[i].flag;
        blanks(p);
        if (!bits && koila__is_digit(peek(p)))
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

/* "@"N STRING N, which stands behind "line". */
static koila_status read_source_line(parser *p)
{
    uint32_t name = 0;
    uint32_t number = 0;
    uint32_t id = 0;
    KOILA_TRY(expect(p, '@'));
    KOILA_TRY(read_u32(p, KOILA_NONE - 1, &name));
    KOILA_TRY(read_string(p));
    KOILA_TRY(read_u32(p, UINT32_MAX, &number));
    KOILA_TRY(worded(p, koila_graph_line(p->g, p->str.at, number, &id), "no room for a line"));
    if (id != name || id != p->g->lines.n - 1)
        return BAD(p, "lines are numbered in order and differ: this one is @%u", id);
    return KOILA_OK;
}

/* N N, which stand behind "end". */
static koila_status read_end(parser *p)
{
    uint32_t n_values = 0;
    uint32_t n_nodes = 0;
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

static koila_status read_line(parser *p)
{
    blanks(p);
    const bool comment = peek(p) == '/' && p->at + 1 < p->n && p->text[p->at + 1] == '/';
    if (comment || peek(p) == '\n') {
        while (peek(p) != '\n')
            p->at++;
        return KOILA_OK;
    }
    if (p->ended)
        return BAD(p, "something behind the end of the graph");
    if (peek(p) == '%' || peek(p) == '=')
        return read_values(p);
    if (take_word(p, "axis")) {
        int64_t size = 0;
        uint16_t axis = 0;
        KOILA_TRY(read_i64(p, &size));
        return worded(p, koila_graph_axis(p->g, size, &axis),
                      "an axis of negative size, or one too many");
    }
    if (take_word(p, "opaque"))
        return read_opaque(p);
    if (take_word(p, "op"))
        return read_op(p);
    if (take_word(p, "line"))
        return read_source_line(p);
    if (p->has_end && take_word(p, "end"))
        return read_end(p);
    return BAD(p, "expected axis, op, opaque, line, %%<value> =%s", p->has_end ? " or end" : "");
}

static koila_status read_file(parser *p)
{
    static const char magic[] = "koila graph "; /* and the version: 2, or 1, which had no end */
    const size_t n_magic = sizeof magic - 1;
    const int version =
        p->n > n_magic && memcmp(p->text, magic, n_magic) == 0 ? p->text[n_magic] : 0;
    if (version != '1' && version != '2')
        return BAD(p, "the first line is not \"%s2\"", magic);
    p->has_end = version == '2';
    p->at = n_magic + 1;
    for (;;) {
        blanks(p);
        koila_assert(p->at <= p->n);
        if (p->at == p->n)
            break;
        if (p->text[p->at] != '\n')
            return BAD(p, "something behind the end of a line");
        p->at++;
        KOILA_TRY(read_line(p));
    }
    if (p->has_end && !p->ended)
        return BAD(
            p, "the graph ends early, after %u values and %u nodes: its last line would be \"end\"",
            (uint32_t)p->g->values.n, (uint32_t)p->g->nodes.n);
    return KOILA_OK;
}

static void free_call(const koila_allocator *mem, call *c)
{
    koila__vec_free(mem, &c->tokens);
    koila__vec_free(mem, &c->kw_names);
    koila__vec_free(mem, &c->outputs);
    koila__vec_free(mem, &c->inputs);
}

/* All but the graph. */
static void deinit_parser(parser *p)
{
    free_call(p->mem, &p->node);
    free_call(p->mem, &p->link);
    koila__vec_free(p->mem, &p->str);
    koila__vec_free(p->mem, &p->writes);
    koila__vec_free(p->mem, &p->first_link);
    koila__vec_free(p->mem, &p->links);
    koila__vec_free(p->mem, &p->opaques);
    koila__vec_free(p->mem, &p->declared);
    koila__idset_free(p->mem, &p->by_label);
    koila__arena_deinit(&p->tmp);
}

koila_status koila_graph_parse(koila_table *table, const char *text, size_t n, koila_graph **out,
                               koila_error *err)
{
    const koila_allocator mem = table->mem;
    parser p = { .text = text, .n = n, .t = table, .err = err, .mem = &mem };
    koila__arena_init(&p.tmp, &mem);
    if (koila_graph_new(table, &mem, &p.g) != KOILA_OK)
        return NO_MEM(&p);
    const koila_status status = read_file(&p);
    deinit_parser(&p);
    if (status != KOILA_OK) {
        koila_graph_free(p.g);
        return status;
    }
    *out = p.g;
    return KOILA_OK;
}
