/* linetext.c — see linetext.h. */
#include "memory/linetext.h"

enum { N_HEADS = 3 }; /* header cells of a column */

bool koila__func_recorded(const koila__func *f)
{
    for (int i = 0; i < f->code->n_rows; i++)
        if (f->rows[i].recorded)
            return true;
    return false;
}

/* Rows shown: every source line known and every line the code has; the text may be shorter when the
 * file has changed. */
static int n_shown(const koila__view *v)
{
    return (int)v->n_code > v->func->code->n_rows ? (int)v->n_code : v->func->code->n_rows;
}
static const koila__row *row_at(const koila__view *v, int i)
{
    return i < v->func->code->n_rows ? &v->func->rows[i] : NULL;
}
static const char *code_at(const koila__view *v, int i)
{
    return i < (int)v->n_code ? v->code[i] : "";
}

static bool is_twin(const koila__view *views, size_t n, size_t k)
{
    for (size_t i = 0; i < n; i++)
        if (i != k && strcmp(views[i].name, views[k].name) == 0)
            return true;
    return false;
}

static bool cell(koila__lines *l, const koila__column *c, const koila__row *row, int device,
                 double *value)
{
    return row && row->recorded && koila__column_value(l, c, row, device, value);
}

static void heading(const koila__view *views, size_t n, size_t k,
                    void (*put)(koila__text *t, const char *s), koila__text *out)
{
    const koila__view *v = &views[k];
    put(out, v->name);
    if (!is_twin(views, n, k))
        return;
    put(out, " (");
    put(out, v->file);
    koila__text_printf(out, ":%d)", v->first_line);
}

static const char *line_text(const koila__view *v, int i, char *buffer)
{
    const koila__row *row = row_at(v, i);
    snprintf(buffer, 32, "%d%s", v->first_line + i, row && row->shared ? "*" : "");
    return buffer;
}

static void widen(size_t *width, const char *s)
{
    const size_t n = strlen(s);
    if (n > *width)
        *width = n;
}

/* Of every column, and last of the line numbers. */
static void find_widths(koila__lines *l, const koila__view *v, const koila__column *columns,
                        size_t n_columns, int device, size_t *widths)
{
    char buffer[64];
    double value;
    widths[n_columns] = strlen("line");
    for (size_t k = 0; k < n_columns; k++) {
        widths[k] = 0;
        for (int h = 0; h < N_HEADS; h++)
            widen(&widths[k], koila__column_head(&columns[k], h));
    }
    for (int i = 0; i < n_shown(v); i++) {
        widen(&widths[n_columns], line_text(v, i, buffer));
        for (size_t k = 0; k < n_columns; k++)
            if (cell(l, &columns[k], row_at(v, i), device, &value))
                widen(&widths[k], koila__column_text(&columns[k], value, buffer));
    }
}

static void write_notes(koila__lines *l, const koila__view *v, const koila__column *columns,
                        size_t n_columns, int device, koila__text *out)
{
    bool shared = false, from_ends = false;
    for (int i = 0; i < n_shown(v); i++) {
        const koila__row *row = row_at(v, i);
        if (!row)
            break;
        shared |= row->shared;
        const koila__rec *rec = row->recorded ? koila__row_rec(l, row, device) : NULL;
        for (size_t k = 0; rec && rec->stats_max && k < n_columns; k++)
            from_ends |=
                koila__column_needs_stats(&columns[k]) && columns[k].stat == KOILA__STAT_PEAK;
    }
    if (shared)
        koila__text_puts(out, "* several threads were in profiled code at once: allocations of "
                              "worker threads count for each\n");
    if (from_ends)
        koila__text_puts(
            out, "peaks of statistics read from the allocator are the larger end of the line\n");
}

static void write_text_table(koila__lines *l, const koila__view *v, const koila__column *columns,
                             size_t n_columns, int device, size_t *widths, koila__text *out)
{
    char buffer[64];
    double value;
    find_widths(l, v, columns, n_columns, device, widths);
    for (int h = 0; h < N_HEADS; h++) {
        for (size_t k = 0; k < n_columns; k++) {
            koila__text_right(out, koila__column_head(&columns[k], h), widths[k]);
            koila__text_puts(out, " ");
        }
        koila__text_right(out, h ? "" : "line", widths[n_columns]);
        koila__text_puts(out, h ? "" : " code");
        koila__text_trim(out);
        koila__text_puts(out, "\n");
    }
    for (int i = 0; i < n_shown(v); i++) {
        for (size_t k = 0; k < n_columns; k++) {
            const bool known = cell(l, &columns[k], row_at(v, i), device, &value);
            koila__text_right(out, known ? koila__column_text(&columns[k], value, buffer) : "",
                              widths[k]);
            koila__text_puts(out, " ");
        }
        koila__text_right(out, line_text(v, i, buffer), widths[n_columns]);
        koila__text_puts(out, " ");
        koila__text_puts(out, code_at(v, i));
        koila__text_trim(out);
        koila__text_puts(out, "\n");
    }
    write_notes(l, v, columns, n_columns, device, out);
}

static bool is_blank_head(const koila__column *columns, size_t n_columns, int h)
{
    for (size_t k = 0; k < n_columns; k++)
        if (*koila__column_head(&columns[k], h))
            return false;
    return true;
}

static void write_html_table(koila__lines *l, const koila__view *v, const koila__column *columns,
                             size_t n_columns, int device, const double *maxima, koila__text *out)
{
    /* as much colour as leaves the page's ink readable, be it dark or light */
    static const char *const colours[] = { "#6fa8dc55", "#93c47d55", "#f6b26b55",
                                           "#c27ba055", "#8e7cc355", "#ffd96655" };
    char buffer[64];
    double value;
    koila__text_puts(out, "<div style=\"overflow-x: auto\"><table style=\"border-collapse: "
                          "collapse; font-family: monospace\">\n<thead>\n");
    for (int h = 0; h < N_HEADS; h++) {
        if (h && is_blank_head(columns, n_columns, h))
            continue;
        koila__text_puts(out, "<tr>");
        for (size_t k = 0; k < n_columns; k++) {
            koila__text_puts(out, "<th style=\"text-align: right; padding: 0 0.5em\">");
            koila__text_html(out, koila__column_head(&columns[k], h));
            koila__text_puts(out, "</th>");
        }
        koila__text_puts(out, h ? "<th></th><th></th></tr>\n"
                                : "<th style=\"text-align: right; padding: 0 0.5em\">line</th><th "
                                  "style=\"text-align: left\">code</th></tr>\n");
    }
    koila__text_puts(out, "</thead>\n<tbody>\n");
    for (int i = 0; i < n_shown(v); i++) {
        const koila__row *row = row_at(v, i);
        koila__text_puts(out, "<tr>");
        for (size_t k = 0; k < n_columns; k++) {
            koila__text_puts(out, "<td style=\"text-align: right; padding: 0 0.5em");
            bool known = cell(l, &columns[k], row, device, &value);
            if (known) {
                double share = maxima[k] > 0 && value > 0 ? 100 * value / maxima[k] : 0;
                koila__text_printf(
                    out, "; background: linear-gradient(90deg, %s %.1f%%, transparent %.1f%%)",
                    colours[k % KOILA_COUNT(colours)], share, share);
            }
            koila__text_puts(out, "\">");
            if (known)
                koila__text_html(out, koila__column_text(&columns[k], value, buffer));
            koila__text_puts(out, "</td>");
        }
        koila__text_printf(out,
                           "<td style=\"text-align: right; padding: 0 0.5em\">%s</td><td "
                           "style=\"text-align: left; white-space: pre\">",
                           line_text(v, i, buffer));
        koila__text_html(out, code_at(v, i));
        koila__text_puts(out, "</td></tr>\n");
    }
    koila__text_puts(out, "</tbody>\n</table></div>\n");
}

static void write_number(const koila__column *c, bool known, double value, const char *none,
                         koila__text *out)
{
    if (!known)
        koila__text_puts(out, none);
    else if (c->word == KOILA__WORD_TIME)
        koila__text_printf(out, "%.1f", value);
    else
        koila__text_printf(out, "%.0f", value);
}

static void write_json(koila__lines *l, const koila__view *views, size_t n_views,
                       const koila__column *columns, size_t n_columns, int device, koila__text *out)
{
    char buffer[64];
    double value;
    koila__text_puts(out, "[");
    for (size_t i = 0; i < n_views; i++) {
        koila__text_puts(out, i ? ",\n {\"function\": " : "\n {\"function\": ");
        koila__text_json(out, views[i].name);
        koila__text_puts(out, ", \"file\": ");
        koila__text_json(out, views[i].file);
        koila__text_printf(out, ", \"line\": %d, \"lines\": [", views[i].first_line);
        for (int r = 0; r < n_shown(&views[i]); r++) {
            koila__text_printf(out, "%s\n  {\"line\": %d, \"code\": ", r ? "," : "",
                               views[i].first_line + r);
            koila__text_json(out, code_at(&views[i], r));
            for (size_t k = 0; k < n_columns; k++) {
                koila__text_puts(out, ", ");
                koila__text_json(out, koila__column_name(&columns[k], buffer));
                koila__text_puts(out, ": ");
                bool known = cell(l, &columns[k], row_at(&views[i], r), device, &value);
                write_number(&columns[k], known, known ? value : 0, "null", out);
            }
            koila__text_puts(out, "}");
        }
        koila__text_puts(out, "]}");
    }
    koila__text_puts(out, "\n]\n");
}

static void write_csv(koila__lines *l, const koila__view *views, size_t n_views,
                      const koila__column *columns, size_t n_columns, int device, koila__text *out)
{
    char buffer[64];
    double value;
    koila__text_puts(out, "function,file,line");
    for (size_t k = 0; k < n_columns; k++)
        koila__text_printf(out, ",%s", koila__column_name(&columns[k], buffer));
    koila__text_puts(out, ",code\n");
    for (size_t i = 0; i < n_views; i++)
        for (int r = 0; r < n_shown(&views[i]); r++) {
            koila__text_csv(out, views[i].name);
            koila__text_puts(out, ",");
            koila__text_csv(out, views[i].file);
            koila__text_printf(out, ",%d", views[i].first_line + r);
            for (size_t k = 0; k < n_columns; k++) {
                koila__text_puts(out, ",");
                bool known = cell(l, &columns[k], row_at(&views[i], r), device, &value);
                write_number(&columns[k], known, known ? value : 0, "", out);
            }
            koila__text_puts(out, ",");
            koila__text_csv(out, code_at(&views[i], r));
            koila__text_puts(out, "\n");
        }
}

void koila__lines_write(koila__lines *l, koila__format format, const koila__view *views,
                        size_t n_views, const koila__column *columns, size_t n_columns, int device,
                        bool all, koila__text *out)
{
    static const koila_allocator none;
    koila__arena arena;
    koila__arena_init(&arena, &none);
    size_t *widths = koila__arena_array(&arena, n_columns + 1, sizeof *widths);
    double *maxima = koila__arena_array(&arena, n_columns + 1, sizeof *maxima), value;
    if (!widths || !maxima) {
        out->failed = true;
        goto end;
    }
    if (format == KOILA__FORMAT_JSON) {
        write_json(l, views, n_views, columns, n_columns, device, out);
        goto end;
    }
    if (format == KOILA__FORMAT_CSV) {
        write_csv(l, views, n_views, columns, n_columns, device, out);
        goto end;
    }
    for (size_t i = 0; i < n_views; i++)
        for (int r = 0; r < n_shown(&views[i]); r++)
            for (size_t k = 0; k < n_columns; k++)
                if (cell(l, &columns[k], row_at(&views[i], r), device, &value) && value > maxima[k])
                    maxima[k] = value;
    bool any = false;
    for (size_t i = 0; i < n_views; i++) {
        bool recorded = koila__func_recorded(views[i].func);
        if (!recorded && !all)
            continue;
        if (format == KOILA__FORMAT_HTML) {
            koila__text_puts(out, "<h3><span style=\"font-family: monospace\">");
            heading(views, n_views, i, koila__text_html, out);
            koila__text_puts(out, "</span></h3>");
            if (recorded)
                write_html_table(l, &views[i], columns, n_columns, device, maxima, out);
            else
                koila__text_puts(out, "<p>No data collected</p>\n");
        } else {
            koila__text_puts(out, any ? "\n\n## " : "## ");
            heading(views, n_views, i, koila__text_puts, out);
            koila__text_puts(out, "\n\n");
            if (recorded)
                write_text_table(l, &views[i], columns, n_columns, device, widths, out);
            else
                koila__text_puts(out, "No data collected\n");
        }
        any = true;
    }
    if (!any)
        koila__text_puts(out, format == KOILA__FORMAT_HTML ? "<p>No data collected</p>"
                                                           : "No data collected\n");
end:
    koila__arena_deinit(&arena);
}
