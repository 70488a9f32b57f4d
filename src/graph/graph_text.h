/* graph_text.h — what graph_text.c and print.c share: a buffered writer, and the words for metas,
 * strings and numbers. Internal to src/. */
#ifndef KOILA_SRC_GRAPH_TEXT_H
#define KOILA_SRC_GRAPH_TEXT_H

#include "koila/graph.h"
#include "graph/table.h"

/* Pieces are collected and handed to `write` in blocks. `status` is the first failure; everything
 * after it is dropped. */
typedef struct koila__out {
    koila_write_fn write;
    void *user;
    koila_status status;
    size_t n;
    char at[4096];
} koila__out;

void koila__out_init(koila__out *o, koila_write_fn write, void *user);
void koila__out_bytes(koila__out *o, const char *s, size_t n);
static inline void koila__out_str(koila__out *o, const char *s)
{
    koila__out_bytes(o, s, strlen(s));
}
/* at most 255 bytes: longer text goes by koila__out_str */
void koila__out_fmt(koila__out *o, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
koila_status koila__out_finish(koila__out *o); /* hands over the rest */

void koila__out_quoted(koila__out *o, const char *s);
void koila__out_float(koila__out *o, double x);
void koila__out_meta(koila__out *o, const koila_meta_info *m);
/* One argument token that is no list and no tensor; `opaque_names` may be NULL, then an opaque is
 * shown by its label. */
void koila__out_token(koila__out *o, const koila_table *t, const koila_arg *a,
                      const uint32_t *opaque_names);

#endif
