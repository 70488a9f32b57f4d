/* snapshot_json.c — RFC 8259 into the same builder. Integers are read exactly as integers, never
 * through double; the last of equal keys wins. */
#include "allocator/snapshot_reader.h"

static uint8_t json_peek(reader *r)
{
    for (;; r->at++) {
        if (r->at == r->end && !koila__snap_have(r, 1))
            return 0;
        uint8_t c = r->buf[r->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t')
            return c ? c : 1;
    }
}
static bool json_want(reader *r, const char *what)
{
    const uint8_t c = json_peek(r);
    /* should reading have failed, that failure stands */
    return c ? BAD(r, "JSON: expected %s", what) : koila__snap_early(r, what);
}

static bool json_hex4(reader *r, uint64_t i, uint32_t *c)
{
    *c = 0;
    for (uint64_t k = i; k < i + 4; k++) {
        const int h = koila__snap_have(r, k + 1) ? koila__snap_hex_digit(r->buf[r->at + k]) : -1;
        if (h < 0)
            return BAD(r, "JSON: bad \\u escape");
        *c = *c << 4 | (uint32_t)h;
    }
    return true;
}

/* Looks for the end of a string whose first byte is under r->at: *n bytes before the quote. */
static bool json_string_end(reader *r, uint64_t *n, bool *has_escapes)
{
    *has_escapes = false;
    for (uint64_t i = 0;; i++) {
        if (r->at + i >= r->end && !koila__snap_have(r, i + 1))
            return BAD(r, "ends early: inside a string, %llu bytes are there",
                       (unsigned long long)i);
        const uint8_t c = r->buf[r->at + i];
        if (c == '"') {
            *n = i;
            return true;
        }
        if (i > r->lim.max_string_bytes)
            return koila__snap_long_string(r, i);
        if (c < 0x20) {
            r->at += i;
            return BAD(r, "JSON: control character in a string");
        }
        if (c == '\\') {
            *has_escapes = true;
            i++;
        }
    }
}

static bool is_surrogate(uint32_t c) { return c >= 0xD800 && c < 0xE000; }

/* \uXXXX, or two of them for one character beyond U+FFFF; *k is behind the u, of a string of n
 * bytes. A surrogate by itself becomes U+FFFD. */
static bool json_unicode(reader *r, uint64_t *k, uint64_t n, uint32_t *c)
{
    uint32_t low;
    if (!json_hex4(r, *k, c))
        return false;
    *k += 4;
    const uint8_t *p = r->buf + r->at + *k;
    if (*c >= 0xD800 && *c < 0xDC00 && *k + 6 <= n && p[0] == '\\' && p[1] == 'u') {
        if (!json_hex4(r, *k + 2, &low))
            return false;
        if (low >= 0xDC00 && low < 0xE000) {
            *c = 0x10000 + ((*c - 0xD800) << 10) + (low - 0xDC00);
            *k += 6;
        }
    }
    if (is_surrogate(*c))
        *c = 0xFFFD;
    return true;
}

/* Writes the string of n bytes under r->at into `copy`, escapes resolved; *m is its length then. */
static bool json_unescape(reader *r, uint64_t n, uint8_t *copy, uint64_t *m)
{
    static const char from[] = "\"\\/bfnrt";
    static const char to[] = "\"\\/\b\f\n\r\t";
    koila_assert(r->at + n <= r->end);
    *m = 0;
    for (uint64_t k = 0; k < n;) {
        const uint8_t c = r->buf[r->at + k++];
        if (c != '\\') {
            copy[(*m)++] = c;
            continue;
        }
        const uint8_t escape = r->buf[r->at + k++];
        const char *at = memchr(from, escape, sizeof from - 1);
        uint32_t u;
        if (at) {
            copy[(*m)++] = (uint8_t)to[at - from];
        } else if (escape == 'u' && k + 4 <= n) {
            if (!json_unicode(r, &k, n, &u))
                return false;
            *m += koila__snap_put_utf8(copy + *m, u);
        } else {
            return BAD(r, "JSON: bad escape");
        }
    }
    return true;
}

static bool json_string(reader *r, value *out)
{
    uint64_t n = 0, m;
    bool has_escapes;
    uint32_t id;
    r->at++;
    if (!json_string_end(r, &n, &has_escapes))
        return false;
    if (has_escapes) {
        const koila_allocator mem = koila__snap_counted(r);
        const size_t room = (size_t)n + 8;
        uint8_t *copy = koila__realloc(&mem, NULL, 0, room);
        if (!copy)
            return false;
        const bool ok = json_unescape(r, n, copy, &m) && koila__snap_intern(r, copy, m, &id);
        koila__release(&mem, copy, room);
        if (!ok)
            return false;
    } else if (!koila__snap_intern(r, r->buf + r->at, n, &id)) {
        return false;
    }
    r->at += n + 1;
    *out = make(K_STR, id);
    return true;
}

static bool is_digit(uint8_t c) { return c >= '0' && c <= '9'; }

enum { MAX_NUMBER = 400 };

/* Bytes that may belong to a number; *real: not an integer. */
static bool json_number_end(reader *r, uint64_t *n, bool *real)
{
    *real = false;
    for (*n = 0; r->at + *n < r->end || koila__snap_have(r, *n + 1); ++*n) {
        const uint8_t c = r->buf[r->at + *n];
        if (c == '.' || c == 'e' || c == 'E')
            *real = true;
        else if (!is_digit(c) && c != '-' && c != '+')
            break;
        if (*n > MAX_NUMBER)
            return BAD(r, "JSON: a number of more than 400 digits");
    }
    return !r->status;
}

/* JSON is stricter than the parsers: digits first and last, on both sides of the point, no 01. */
static bool json_number_is_good(const uint8_t *p, uint64_t n, bool real)
{
    const uint64_t lead = n && p[0] == '-';
    if (n <= lead || !is_digit(p[lead]))
        return false;
    if (p[lead] == '0' && lead + 1 < n && is_digit(p[lead + 1]))
        return false;
    if (!real)
        return true;
    if (!is_digit(p[n - 1]))
        return false;
    for (uint64_t i = 1; i < n; i++)
        if (p[i] == '.' && (!is_digit(p[i - 1]) || !is_digit(p[i + 1])))
            return false;
    return true;
}

static bool json_number(reader *r, value *out)
{
    uint64_t n, bits;
    bool real, negative;
    double x;
    if (!json_number_end(r, &n, &real))
        return false;
    const uint8_t *p = r->buf + r->at;
    if (!json_number_is_good(p, n, real))
        return BAD(r, "JSON: bad number");
    if (real) {
        if (!koila__snap_parse_real(p, n, &x))
            return BAD(r, "JSON: bad number");
        if (!koila__snap_make_real(r, x, out))
            return false;
    } else {
        if (!koila__snap_parse_int(p, n, &bits, &negative))
            return BAD(r, "JSON: integer out of range");
        if (!koila__snap_make_int(r, bits, negative, out))
            return false;
    }
    r->at += n;
    return true;
}

static bool json_word(reader *r, const char *word, value v, value *out)
{
    size_t n = strlen(word);
    if (!koila__snap_have(r, n))
        return koila__snap_early(r, "inside a word");
    if (memcmp(r->buf + r->at, word, n))
        return BAD(r, "JSON: unknown word");
    r->at += n;
    *out = v;
    return true;
}

static bool json_value(reader *r, value *out);

static bool json_key(reader *r, value *key)
{
    if (json_peek(r) != '"')
        return json_want(r, "a key");
    if (!json_string(r, key))
        return false;
    if (json_peek(r) != ':')
        return json_want(r, "':'");
    r->at++;
    return true;
}

/* Container number i of r->open gets its elements, up to and with the closing bracket. */
static bool json_elements(reader *r, uint32_t i, bool is_dict)
{
    const uint8_t close = is_dict ? '}' : ']';
    value key = 0, v;
    bool more = json_peek(r) != close;
    while (more) {
        if (is_dict && !json_key(r, &key))
            return false;
        if (!json_value(r, &v))
            return false;
        koila_assert(i + 1 == r->n_open);
        open_one *o = &r->open[i];
        if (is_dict ? !dict_add(r, o, key, v) : !koila__snap_list_add(r, o, v))
            return false;
        const uint8_t c = json_peek(r);
        if (c != ',' && c != close)
            return json_want(r, is_dict ? "',' or '}'" : "',' or ']'");
        more = c == ',';
        r->at += more;
    }
    r->at++;
    return true;
}

/* Recursion is bounded by max_nesting. */
static bool json_value(reader *r, value *out)
{
    const uint8_t c = json_peek(r);
    switch (c) {
    case '"':
        return json_string(r, out);
    case 'n':
        return json_word(r, "null", make(K_NONE, 0), out);
    case 't':
        return json_word(r, "true", make(K_BOOL, 1), out);
    case 'f':
        return json_word(r, "false", make(K_BOOL, 0), out);
    case '{':
    case '[':
        break;
    default:
        if (c == '-' || is_digit(c))
            return json_number(r, out);
        return json_want(r, "a value");
    }
    r->at++;
    value self = koila__snap_open_new(r, c == '{');
    if (r->status || !json_elements(r, r->n_open - 1, c == '{') || !finish(r, &self))
        return false;
    *out = self;
    return true;
}

bool koila__snap_read_json(reader *r)
{
    if (!json_value(r, &r->top))
        return false;
    return json_peek(r) ? BAD(r, "JSON: text after the end") : !r->status;
}
