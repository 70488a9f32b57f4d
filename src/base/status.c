/* status.c — the list of statuses, once, as names and texts; and the one place that words a
 * koila_error. */
#include "base/base.h"

#include <stdlib.h>

#ifndef KOILA_VERSION
#define KOILA_VERSION "unknown"
#endif

const char *koila_version(void) { return KOILA_VERSION; }

const char *koila_status_name(koila_status status)
{
    switch (status) {
#define KOILA_STATUS_NAME(name, text)                                                              \
    case KOILA_##name:                                                                             \
        return #name;
        KOILA_STATUS_MAP(KOILA_STATUS_NAME)
#undef KOILA_STATUS_NAME
    }
    return "?";
}

const char *koila_status_text(koila_status status)
{
    switch (status) {
#define KOILA_STATUS_TEXT(name, text)                                                              \
    case KOILA_##name:                                                                             \
        return text;
        KOILA_STATUS_MAP(KOILA_STATUS_TEXT)
#undef KOILA_STATUS_TEXT
    }
    return "?";
}

static void word(koila_error *err, koila_status code, uint64_t offset, uint64_t missing_bytes,
                 const char *fmt, va_list ap)
{
    if (!err)
        return;
    vsnprintf(err->text, sizeof err->text, fmt, ap);
    err->code = code;
    err->offset = offset;
    /* callers built before this field was there have no room for it */
    if (err->struct_size >= sizeof *err)
        err->missing_bytes = missing_bytes;
}

koila_status koila__fail(koila_error *err, koila_status code, uint64_t offset, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    word(err, code, offset, 0, fmt, ap);
    va_end(ap);
    return code;
}

koila_status koila__fail_short(koila_error *err, uint64_t missing_bytes, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    word(err, KOILA_OOM, 0, missing_bytes, fmt, ap);
    va_end(ap);
    return KOILA_OOM;
}

/* The only exit of the core, and only in builds with debug_level >= 1: a broken invariant is a bug
 * of ours, not bad input. */
void koila__assert_failed(const char *expr, const char *file, int line)
{
    fprintf(stderr, "koila: %s:%d: broken invariant: %s\n", file, line, expr);
    abort();
}

const char *koila__grouped(uint64_t n, char buffer[KOILA_GROUPED])
{
    size_t at = KOILA_GROUPED - 1;
    size_t digits = 0;
    buffer[at] = 0;
    do {
        if (digits && digits % 3 == 0)
            buffer[--at] = ',';
        buffer[--at] = (char)('0' + n % 10);
        digits++;
    } while (n /= 10);
    return buffer + at;
}
