/* snapshot_input.c — the window on the bytes of the file; numbers and characters written as text;
 * failures; counted host memory. */
#include "allocator/snapshot_reader.h"

void koila__snap_fail(reader *r, koila_status code, const char *fmt, ...)
{
    if (r->status)
        return;
    r->status = code;
    if (r->e) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(r->e->text, sizeof r->e->text, fmt, ap);
        va_end(ap);
        r->e->code = code;
        r->e->offset = offset(r);
    }
}

/* "5 GiB", "16 MiB", "100,000 bytes" */
static const char *size_text(uint64_t n, char text[KOILA_GROUPED + 8])
{
    char digits[KOILA_GROUPED];
    const char *unit = "bytes";
    if (n >= MIB << 10) {
        n /= MIB << 10;
        unit = "GiB";
    } else if (n >= MIB) {
        n /= MIB;
        unit = "MiB";
    }
    snprintf(text, KOILA_GROUPED + 8, "%s %s", koila__grouped(n, digits), unit);
    return text;
}

bool koila__snap_long_string(reader *r, uint64_t n)
{
    char is[KOILA_GROUPED + 8], limit[KOILA_GROUPED + 8];
    return BAD(r, "string of %s, limit %s (max_string_bytes)", size_text(n, is),
               size_text(r->lim.max_string_bytes, limit));
}

/* ---- counted host memory */

void *koila__snap_resize(reader *r, void *p, uint64_t old_n, uint64_t n)
{
    koila_snapshot *s = r->s;
    if (n > old_n && s->used + (n - old_n) > s->budget) {
        char limit[KOILA_GROUPED + 8];
        (void)BAD(r, "needs more than %s (limit: %s)", size_text(s->budget, limit),
                  s->budget < s->budget_cap ? "32 times the file and 64 MiB" : "max_memory_bytes");
        return NULL;
    }
    void *q = koila__realloc(&s->mem, p, (size_t)old_n, (size_t)n);
    if (!q) {
        (void)FAIL(r, KOILA_NO_MEMORY, "the host is out of memory");
        return NULL;
    }
    s->used += n - old_n;
    koila_assert(s->used <= s->budget || n <= old_n);
    return q;
}

static void *counted_realloc(void *user, void *p, size_t old_n, size_t n)
{
    reader *r = user;
    if (n)
        return koila__snap_resize(r, p, old_n, n);
    koila_assert(r->s->used >= old_n);
    r->s->used -= old_n;
    koila__release(&r->s->mem, p, old_n);
    return NULL;
}
koila_allocator koila__snap_counted(reader *r) { return (koila_allocator){ counted_realloc, r }; }

/* Beyond a million elements by half and not by two, as koila__grow would: the budget is a small
 * multiple of the file, and the arrays of a large file would be half empty. */
bool koila__snap_grow64(reader *r, void *array, uint64_t *cap, uint64_t want, size_t size)
{
    void **p = array;
    if (want <= *cap)
        return true;
    uint64_t n = *cap ? *cap : 16;
    while (n < want)
        n += n < 1 << 20 ? n : n / 2;
    void *q = koila__snap_resize(r, *p, *cap * size, n * size);
    if (!q)
        return false;
    *p = q;
    *cap = n;
    return true;
}
bool koila__snap_grow32(reader *r, void *array, uint32_t *cap, uint32_t want, size_t size)
{
    uint64_t c = *cap;
    if (want > UINT32_MAX / 2)
        return BAD(r, "too many records");
    if (!koila__snap_grow64(r, array, &c, want, size))
        return false;
    *cap = (uint32_t)c;
    return true;
}

void koila__snap_set_budget(koila_snapshot *s)
{
    const uint64_t most = UINT64_MAX / 2;
    const uint64_t budget =
        s->n_bytes > most / BUDGET_FACTOR / 2 ? most : BUDGET_FACTOR * s->n_bytes + BUDGET_BASE;
    s->budget = budget < s->budget_cap ? budget : s->budget_cap;
}

#define FIRST_BUFFER ((uint64_t)1 << 16)

/* At least n bytes at buf + at, if the file has them. */
bool koila__snap_have(reader *r, uint64_t n)
{
    koila_assert(r->at <= r->end);
    if (r->end - r->at >= n)
        return true;
    if (!r->src->read || r->eof)
        return false;
    if (r->at) {
        memmove(r->own, r->own + r->at, (size_t)(r->end - r->at));
        r->base += r->at;
        r->end -= r->at;
        r->at = 0;
    }
    while (r->end < n && !r->eof) {
        /* the buffer grows with what is really there, not with what a length in the file says */
        uint64_t want = n < r->end * 2 ? n : r->end * 2;
        if (want < FIRST_BUFFER)
            want = FIRST_BUFFER;
        if (want > r->own_cap && !koila__snap_grow64(r, &r->own, &r->own_cap, want, 1))
            return false;
        int64_t got = r->src->read(r->src->user, r->own + r->end, (size_t)(r->own_cap - r->end));
        r->buf = r->own;
        if (got < 0)
            return BAD(r, "cannot be read");
        if (got == 0)
            r->eof = true;
        r->end += (uint64_t)got;
        r->s->n_bytes += (uint64_t)got;
        koila__snap_set_budget(r->s);
    }
    return r->end >= n;
}

bool koila__snap_early(reader *r, const char *where) { return BAD(r, "ends early: %s", where); }

/* A line of text without its newline. */
bool koila__snap_take_line(reader *r, uint64_t max, const uint8_t **p, uint64_t *n)
{
    for (uint64_t i = 0;; i++) {
        if (i > max)
            return BAD(r, "a line of more than %llu bytes", (unsigned long long)max);
        if (!koila__snap_have(r, i + 1))
            return koila__snap_early(r, "inside a line of text");
        if (r->buf[r->at + i] != '\n')
            continue;
        *p = r->buf + r->at;
        *n = i;
        r->at += i + 1;
        return true;
    }
}

/* [-]digits, all of it; false: no number or out of range. */
bool koila__snap_parse_int(const uint8_t *p, uint64_t n, uint64_t *bits, bool *negative)
{
    uint64_t i = 0, x = 0;
    *negative = n && p[0] == '-';
    i += *negative || (n && p[0] == '+');
    if (i == n)
        return false;
    for (; i < n; i++) {
        if (p[i] < '0' || p[i] > '9')
            return false;
        if (!koila__mul(x, 10, &x) || !koila__add(x, (uint64_t)(p[i] - '0'), &x))
            return false;
    }
    if (*negative && x > (uint64_t)1 << 63)
        return false;
    *negative = *negative && x;
    *bits = *negative ? (uint64_t)0 - x : x;
    return true;
}

typedef struct decimal { /* digits x 10^scale */
    uint64_t digits;
    int scale;
} decimal;
enum { MAX_DIGITS = 18, MAX_SCALE = 400, MAX_EXPONENT = 10000 };

static bool is_digit(uint8_t c) { return c >= '0' && c <= '9'; }

/* Digits with at most one point, from p[*i] on; false: no digit. */
static bool parse_digits(const uint8_t *p, uint64_t n, uint64_t *i, decimal *x)
{
    int n_digits = 0;
    bool any = false, dot = false;
    for (; *i < n && (is_digit(p[*i]) || (p[*i] == '.' && !dot)); ++*i) {
        if (p[*i] == '.') {
            dot = true;
            continue;
        }
        any = true;
        if (n_digits < MAX_DIGITS) {
            x->digits = x->digits * 10 + (uint64_t)(p[*i] - '0');
            n_digits += x->digits != 0;
            x->scale -= dot;
        } else {
            x->scale += !dot;
        }
    }
    return any;
}

/* What follows the e of an exponent. */
static bool parse_exponent(const uint8_t *p, uint64_t n, uint64_t *i, decimal *x)
{
    const bool minus = *i < n && p[*i] == '-';
    int exponent = 0;
    *i += *i < n && (p[*i] == '-' || p[*i] == '+');
    if (*i == n)
        return false;
    for (; *i < n && is_digit(p[*i]); ++*i)
        if (exponent < MAX_EXPONENT)
            exponent = exponent * 10 + (p[*i] - '0');
    x->scale += minus ? -exponent : exponent;
    return true;
}

static double scaled(decimal x)
{
    double v = (double)x.digits;
    double ten = 10.0;
    int scale = x.scale < 0 ? -x.scale : x.scale;
    if (scale > MAX_SCALE)
        scale = MAX_SCALE;
    for (; scale; scale >>= 1) {
        if (scale & 1)
            v = x.scale < 0 ? v / ten : v * ten;
        ten *= ten;
    }
    return v;
}

/* Digits, point, exponent: near enough to the nearest double for times and fractions, and no locale
 * is asked. Infinities and NaNs are read as 0. */
bool koila__snap_parse_real(const uint8_t *p, uint64_t n, double *out)
{
    const bool negative = n && p[0] == '-';
    uint64_t i = negative || (n && p[0] == '+');
    decimal x = { 0 };
    if (n - i == 3 && (!memcmp(p + i, "inf", 3) || !memcmp(p + i, "nan", 3))) {
        *out = 0;
        return true;
    }
    if (!parse_digits(p, n, &i, &x))
        return false;
    if (i < n && (p[i] == 'e' || p[i] == 'E')) {
        i++;
        if (!parse_exponent(p, n, &i, &x))
            return false;
    }
    if (i != n)
        return false;
    *out = negative ? -scaled(x) : scaled(x);
    return true;
}

int koila__snap_hex_digit(uint8_t c)
{
    const uint8_t lower = c | 32;
    if (is_digit(c))
        return c - '0';
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

size_t koila__snap_put_utf8(uint8_t *p, uint32_t c)
{
    if (c < 0x80) {
        p[0] = (uint8_t)c;
        return 1;
    }
    if (c < 0x800) {
        p[0] = (uint8_t)(0xC0 | c >> 6);
        p[1] = (uint8_t)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        p[0] = (uint8_t)(0xE0 | c >> 12);
        p[1] = (uint8_t)(0x80 | (c >> 6 & 63));
        p[2] = (uint8_t)(0x80 | (c & 63));
        return 3;
    }
    if (c > 0x10FFFF)
        c = 0xFFFD;
    if (c < 0x10000)
        return koila__snap_put_utf8(p, c);
    p[0] = (uint8_t)(0xF0 | c >> 18);
    p[1] = (uint8_t)(0x80 | (c >> 12 & 63));
    p[2] = (uint8_t)(0x80 | (c >> 6 & 63));
    p[3] = (uint8_t)(0x80 | (c & 63));
    return 4;
}
