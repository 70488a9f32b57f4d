/* linetext.h — a line table as text, HTML, JSON and CSV. One walk over functions, lines and
 * columns; the formats differ in what they wrap around a cell. All of it works on the arguments
 * alone: recorded rows, names and source lines. */
#ifndef KOILA_SRC_LINETEXT_H
#define KOILA_SRC_LINETEXT_H

#include "memory/columns.h"

typedef enum koila__format {
    KOILA__FORMAT_TEXT,
    KOILA__FORMAT_HTML,
    KOILA__FORMAT_JSON,
    KOILA__FORMAT_CSV
} koila__format;

typedef struct koila__view { /* one function to be shown */
    const char *name, *file;
    int first_line;
    const koila__func *func;
    size_t n_code; /* source lines known; 0: the source is not readable */
    const char *const *code;
} koila__view;

/* Append the tables of `views`; functions that recorded nothing are listed by name only, and if
 * none did: "No data collected". `all` adds those names even when others did record (the text
 * printed at exit). Check koila__text_ok(out) afterwards. */
void koila__lines_write(koila__lines *l, koila__format format, const koila__view *views,
                        size_t n_views, const koila__column *columns, size_t n_columns, int device,
                        bool all, koila__text *out);
/* Has any row of it been recorded? */
bool koila__func_recorded(const koila__func *f);

#endif
