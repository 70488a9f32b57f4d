/* text.h — a growing text, and how memory sizes, times and foreign strings are written in it.
 *
 * Appending never fails to the caller: when the host is out of memory the text is marked and the
 * rest is dropped; ask koila__text_ok() once at the end. `s` is NUL-terminated after the first
 * append.
 */
#ifndef KOILA_SRC_TEXT_H
#define KOILA_SRC_TEXT_H

#include "base/alloc.h"

typedef struct koila__text {
    koila_allocator mem;
    char *s;
    size_t n, capacity;
    bool failed;
} koila__text;

void koila__text_init(koila__text *t, const koila_allocator *mem);
void koila__text_deinit(koila__text *t);
static inline bool koila__text_ok(const koila__text *t) { return !t->failed; }

void koila__text_add(koila__text *t, const char *s, size_t n);
void koila__text_puts(koila__text *t, const char *s);
void koila__text_printf(koila__text *t, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
void koila__text_fill(koila__text *t, char c, size_t n);
/* `s` in a field of `width` columns (UTF-8 code points), at its right or left end. */
void koila__text_right(koila__text *t, const char *s, size_t width);
void koila__text_left(koila__text *t, const char *s, size_t width);
/* Drop blanks at the end. */
void koila__text_trim(koila__text *t);
/* Code points in a UTF-8 string. */
size_t koila__text_width(const char *s);

/* `s` made harmless: & < > " ' for HTML; quotes, backslashes and control characters for JSON, with
 * the quotes around; CSV quoting if needed. */
void koila__text_html(koila__text *t, const char *s);
void koila__text_json(koila__text *t, const char *s);
void koila__text_csv(koila__text *t, const char *s);

/* "39.45K": two decimals and B K M G T P, base 1024; NaN is "". At least 32 bytes of buffer. */
const char *koila__size_text(double bytes, char *buffer);
/* "1.25ms": ns us ms s. */
const char *koila__time_text(double ns, char *buffer);

#endif
