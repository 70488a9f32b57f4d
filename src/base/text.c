/* text.c — see text.h. */
#include "base/text.h"

#include "base/vec.h"

#include <math.h>

void koila__text_init(koila__text *t, const koila_allocator *mem)
{
    *t = (koila__text){ .mem = koila__allocator(mem) };
}
void koila__text_deinit(koila__text *t)
{
    koila__release(&t->mem, t->s, t->capacity);
    t->s = NULL;
    t->n = t->capacity = 0;
}

/* Where to write n bytes and a NUL; NULL when the text has failed. */
static char *room(koila__text *t, size_t n)
{
    koila_assert(t->n < t->capacity || !t->capacity);
    if (!t->failed && !koila__grow(&t->mem, &t->s, &t->capacity, t->n + n + 1, 1))
        t->failed = true;
    return t->failed ? NULL : t->s + t->n;
}

void koila__text_add(koila__text *t, const char *s, size_t n)
{
    char *at = room(t, n);
    if (!at)
        return;
    memcpy(at, s, n);
    t->n += n;
    t->s[t->n] = 0;
}
void koila__text_puts(koila__text *t, const char *s) { koila__text_add(t, s, strlen(s)); }

void koila__text_printf(koila__text *t, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    char *at = n < 0 ? NULL : room(t, (size_t)n);
    if (at) {
        vsnprintf(at, (size_t)n + 1, fmt, again);
        t->n += (size_t)n;
    }
    va_end(again);
    va_end(ap);
}

void koila__text_fill(koila__text *t, char c, size_t n)
{
    char *at = room(t, n);
    if (!at)
        return;
    memset(at, c, n);
    t->n += n;
    t->s[t->n] = 0;
}

size_t koila__text_width(const char *s)
{
    size_t n = 0;
    for (; *s; s++)
        n += ((unsigned char)*s & 0xC0) != 0x80;
    return n;
}
void koila__text_right(koila__text *t, const char *s, size_t width)
{
    size_t n = koila__text_width(s);
    koila__text_fill(t, ' ', n < width ? width - n : 0);
    koila__text_puts(t, s);
}
void koila__text_left(koila__text *t, const char *s, size_t width)
{
    size_t n = koila__text_width(s);
    koila__text_puts(t, s);
    koila__text_fill(t, ' ', n < width ? width - n : 0);
}
void koila__text_trim(koila__text *t)
{
    while (t->n && t->s[t->n - 1] == ' ')
        t->s[--t->n] = 0;
}

void koila__text_html(koila__text *t, const char *s)
{
    for (; *s; s++)
        switch (*s) {
        case '&':
            koila__text_puts(t, "&amp;");
            break;
        case '<':
            koila__text_puts(t, "&lt;");
            break;
        case '>':
            koila__text_puts(t, "&gt;");
            break;
        case '"':
            koila__text_puts(t, "&quot;");
            break;
        case '\'':
            koila__text_puts(t, "&#39;");
            break;
        default:
            koila__text_add(t, s, 1);
        }
}

void koila__text_json(koila__text *t, const char *s)
{
    koila__text_puts(t, "\"");
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            koila__text_printf(t, "\\%c", c);
        else if (c == '<' || c < 0x20)
            koila__text_printf(t, "\\u%04x", c); /* '<': the text may stand inside a page */
        else
            koila__text_add(t, s, 1);
    }
    koila__text_puts(t, "\"");
}

void koila__text_csv(koila__text *t, const char *s)
{
    if (!strpbrk(s, ",\"\r\n")) {
        koila__text_puts(t, s);
        return;
    }
    koila__text_puts(t, "\"");
    for (; *s; s++)
        koila__text_add(t, *s == '"' ? "\"\"" : s, *s == '"' ? 2 : 1);
    koila__text_puts(t, "\"");
}

const char *koila__size_text(double bytes, char *buffer)
{
    static const char units[] = "BKMGTP";
    if (isnan(bytes))
        return strcpy(buffer, "");
    int u = 0;
    while (fabs(bytes) >= 1024 && u < 5) {
        bytes /= 1024;
        u++;
    }
    snprintf(buffer, 32, "%.2f%c", bytes, units[u]);
    return buffer;
}

const char *koila__time_text(double ns, char *buffer)
{
    if (ns < 1e3)
        snprintf(buffer, 32, "%.0fns", ns);
    else if (ns < 1e6)
        snprintf(buffer, 32, "%.2fus", ns / 1e3);
    else if (ns < 1e9)
        snprintf(buffer, 32, "%.2fms", ns / 1e6);
    else
        snprintf(buffer, 32, "%.2fs", ns / 1e9);
    return buffer;
}
