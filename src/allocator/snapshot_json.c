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
    uint8_t c = json_peek(r);
    return r->status ? false : c ? BAD(r, "JSON: expected %s", what) : koila__snap_early(r, what);
}

static bool json_hex4(reader *r, uint64_t i, uint32_t *c)
{
    *c = 0;
    for (int k = 0; k < 4; k++) {
        int h = koila__snap_have(r, i + 1 + (uint64_t)k)
                    ? koila__snap_hex_digit(r->buf[r->at + i + (uint64_t)k])
                    : -1;
        if (h < 0)
            return r->status ? false : BAD(r, "JSON: bad \\u escape");
        *c = *c << 4 | (uint32_t)h;
    }
    return true;
}

static bool json_string(reader *r, value *out)
{
    uint64_t i = 0;
    bool plain = true;
    uint32_t id;
    r->at++;
    for (;; i++) { /* find the end */
        if (r->at + i >= r->end && !koila__snap_have(r, i + 1))
            return r->status ? false
                             : BAD(r, "ends early: inside a string, %llu bytes are there",
                                   (unsigned long long)i);
        uint8_t c = r->buf[r->at + i];
        if (c == '"')
            break;
        if (i > r->lim.max_string_bytes)
            return koila__snap_long_string(r, i);
        if (c < 0x20) {
            r->at += i;
            return BAD(r, "JSON: control character in a string");
        }
        if (c == '\\') {
            plain = false;
            i++;
        }
    }
    if (plain) {
        if (!koila__snap_intern(r, r->buf + r->at, i, &id))
            return false;
    } else {
        uint8_t *copy = koila__snap_resize(r, NULL, 0, i + 8);
        uint64_t m = 0;
        if (!copy)
            return false;
        for (uint64_t k = 0; k < i && !r->status;) {
            uint8_t c = r->buf[r->at + k++];
            if (c != '\\') {
                copy[m++] = c;
                continue;
            }
            static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
            const char *at = memchr(from, r->buf[r->at + k], 8);
            uint32_t u, low;
            if (at) {
                copy[m++] = (uint8_t)to[at - from];
                k++;
            } else if (r->buf[r->at + k] == 'u' && k + 5 <= i) {
                if (!json_hex4(r, k + 1, &u))
                    break;
                k += 5;
                if (u >= 0xD800 && u < 0xDC00 && k + 6 <= i && r->buf[r->at + k] == '\\' &&
                    r->buf[r->at + k + 1] == 'u') {
                    if (!json_hex4(r, k + 2, &low))
                        break;
                    if (low >= 0xDC00 && low < 0xE000) {
                        u = 0x10000 + ((u - 0xD800) << 10) + (low - 0xDC00);
                        k += 6;
                    }
                }
                if (u >= 0xD800 && u < 0xE000)
                    u = 0xFFFD;
                m += koila__snap_put_utf8(copy + m, u);
            } else {
                (void)BAD(r, "JSON: bad escape");
            }
        }
        bool ok = !r->status && koila__snap_intern(r, copy, m, &id);
        r->s->used -= i + 8;
        koila__release(&r->s->mem, copy, (size_t)(i + 8));
        if (!ok)
            return false;
    }
    r->at += i + 1;
    *out = make(K_STR, id);
    return true;
}

static bool json_number(reader *r, value *out)
{
    uint64_t n = 0;
    bool real = false, negative;
    for (;; n++) {
        if (r->at + n >= r->end && !koila__snap_have(r, n + 1))
            break;
        uint8_t c = r->buf[r->at + n];
        if (c == '.' || c == 'e' || c == 'E')
            real = true;
        else if (!((c >= '0' && c <= '9') || c == '-' || c == '+'))
            break;
        if (n > 400)
            return BAD(r, "JSON: a number of more than 400 digits");
    }
    if (r->status)
        return false;
    const uint8_t *p = r->buf + r->at;
    const uint64_t lead = n && p[0] == '-';
    if (n <= lead || p[lead] < '0' || p[lead] > '9' ||
        (p[lead] == '0' && lead + 1 < n && p[lead + 1] >= '0' && p[lead + 1] <= '9'))
        return BAD(r, "JSON: bad number");
    if (real) {
        double x;
        if (p[n - 1] < '0' || p[n - 1] > '9' || !koila__snap_parse_real(p, n, &x))
            return BAD(r, "JSON: bad number");
        for (uint64_t i = 1; i < n; i++)
            if (p[i] == '.' &&
                (p[i - 1] < '0' || p[i - 1] > '9' || p[i + 1] < '0' || p[i + 1] > '9'))
                return BAD(r, "JSON: bad number");
        if (!koila__snap_make_real(r, x, out))
            return false;
    } else {
        uint64_t bits;
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
        return r->status ? false : koila__snap_early(r, "inside a word");
    if (memcmp(r->buf + r->at, word, n))
        return BAD(r, "JSON: unknown word");
    r->at += n;
    *out = v;
    return true;
}

static bool json_value(reader *r, value *out)
{
    uint8_t c = json_peek(r);
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
        if (c == '-' || (c >= '0' && c <= '9'))
            return json_number(r, out);
        return json_want(r, "a value");
    }
    const bool is_dict = c == '{';
    const uint8_t close = is_dict ? '}' : ']';
    r->at++;
    value self = koila__snap_open_new(r, is_dict), key, v; /* depth is bounded by max_nesting */
    if (r->status)
        return false;
    const uint32_t i = r->n_open - 1;
    if (json_peek(r) != close) {
        for (;;) {
            if (is_dict) {
                if (json_peek(r) != '"')
                    return json_want(r, "a key");
                if (!json_string(r, &key))
                    return false;
                if (json_peek(r) != ':')
                    return json_want(r, "':'");
                r->at++;
            }
            if (!json_value(r, &v))
                return false;
            if (!(is_dict ? dict_add(r, &r->open[i], key, v)
                          : koila__snap_list_add(r, &r->open[i], v)))
                return false;
            c = json_peek(r);
            if (c == close)
                break;
            if (c != ',')
                return json_want(r, is_dict ? "',' or '}'" : "',' or ']'");
            r->at++;
        }
    }
    r->at++;
    if (!finish(r, &self))
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
