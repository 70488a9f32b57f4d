/* history.c — see history.h. */
#include "memory/history.h"

void koila__history_init(koila__history *h, size_t limit, const koila_allocator *mem)
{
    *h = (koila__history){ .mem = koila__allocator(mem), .limit = limit, .peak_at = SIZE_MAX };
}
void koila__history_deinit(koila__history *h)
{
    koila__release(&h->mem, h->events, h->capacity * sizeof *h->events);
    koila__release(&h->mem, h->other, h->n_other * sizeof *h->other);
    h->events = NULL;
    h->other = NULL;
    h->n = h->capacity = 0;
}

void koila__history_add(koila__history *h, uint64_t ns, const void *p, int64_t n_bytes,
                        uint32_t tag)
{
    while (atomic_flag_test_and_set_explicit(&h->busy, memory_order_acquire))
        continue;
    bool full = h->n_lost || (h->begun && h->n - h->n_first >= h->limit);
    if (h->n == h->capacity && !full) {
        size_t wider = h->capacity ? h->capacity * 2 : 1024;
        koila__event *more =
            koila__realloc(&h->mem, h->events, h->capacity * sizeof *more, wider * sizeof *more);
        if (more) {
            h->events = more;
            h->capacity = wider;
        }
    }
    if (h->n == h->capacity || full) {
        h->n_lost++;
    } else {
        if (h->n && ns < h->events[h->n - 1].ns)
            ns = h->events[h->n - 1].ns;
        h->events[h->n++] = (koila__event){ ns, p, n_bytes, tag };
    }
    atomic_flag_clear_explicit(&h->busy, memory_order_release);
}
void koila__history_begin(koila__history *h)
{
    h->n_first = h->n;
    h->begun = true;
}

/* ---- address -> event of the live allocation there; open addressing, deletion shifts back */

typedef struct live_map {
    size_t *slots; /* event + 1; 0: empty */
    size_t n_slots;
    const koila__event *events;
} live_map;
static size_t live_home(const live_map *m, const void *p)
{
    return ((uintptr_t)p >> 4) * 0x9E3779B97F4A7C15u >> 20 & (m->n_slots - 1);
}
static size_t live_find(const live_map *m, const void *p)
{
    size_t k = live_home(m, p);
    while (m->slots[k] && m->events[m->slots[k] - 1].p != p)
        k = (k + 1) & (m->n_slots - 1);
    return k;
}
static void live_remove(live_map *m, size_t hole)
{
    size_t mask = m->n_slots - 1;
    m->slots[hole] = 0;
    for (size_t k = (hole + 1) & mask; m->slots[k]; k = (k + 1) & mask) {
        size_t home = live_home(m, m->events[m->slots[k] - 1].p);
        /* it would not be found from its home any more */
        if (((k - home) & mask) < ((k - hole) & mask))
            continue;
        m->slots[hole] = m->slots[k];
        m->slots[k] = 0;
        hole = k;
    }
}

koila_status koila__history_solve(koila__history *h)
{
    size_t n_slots = 64, kept = 0;
    while (n_slots < h->n * 2)
        n_slots *= 2;
    live_map live = { koila__realloc(&h->mem, NULL, 0, n_slots * sizeof(size_t)), n_slots,
                      h->events };
    size_t *other = koila__realloc(&h->mem, NULL, 0, (h->n + 1) * sizeof *other);
    if (!live.slots || !other) {
        koila__release(&h->mem, live.slots, n_slots * sizeof *live.slots);
        koila__release(&h->mem, other, (h->n + 1) * sizeof *other);
        return KOILA_NO_MEMORY;
    }
    memset(live.slots, 0, n_slots * sizeof *live.slots);
    uint64_t now = 0;
    size_t n_first = h->n_first;
    for (size_t i = 0; i < h->n; i++) {
        koila__event e = h->events[i];
        if (i == h->n_first)
            h->start = now;
        size_t k = live_find(&live, e.p);
        if (e.n_bytes < 0 && !live.slots[k]) { /* a block nobody knew */
            n_first -= i < h->n_first;
            continue;
        }
        if (live.slots[k]) { /* freed; or handed out again, the free was missed: it is freed here */
            size_t made = live.slots[k] - 1;
            now -= (uint64_t)h->events[made].n_bytes;
            other[made] = kept;
            e.tag = e.n_bytes < 0 ? h->events[made].tag : e.tag;
            other[kept] = e.n_bytes < 0 ? made : SIZE_MAX;
            live_remove(&live, k);
            k = live_find(&live, e.p);
        } else {
            other[kept] = SIZE_MAX;
        }
        h->events[kept] = e;
        if (e.n_bytes > 0) {
            live.slots[k] = kept + 1;
            now += (uint64_t)e.n_bytes;
            if (kept >= n_first && (h->peak_at == SIZE_MAX || now > h->peak)) {
                h->peak = now;
                h->peak_at = kept;
            }
        }
        kept++;
    }
    if (h->n_first >= h->n)
        h->start = now;
    if (h->start >= h->peak) { /* it never rose above the beginning */
        h->peak = h->start;
        h->peak_at = n_first ? n_first - 1 : SIZE_MAX;
    }
    h->end = now;
    h->n_first = n_first;
    koila__release(&h->mem, live.slots, n_slots * sizeof *live.slots);
    h->other = other;
    h->n_other = h->n + 1;
    h->n = kept;
    return KOILA_OK;
}

/* ---- the page */

enum { WIDTH = 1000, HEIGHT = 360, SHOWN = 14, FLAME = 26 };
static const char *const colours[SHOWN + 1] = { "#4e79a7", "#f28e2b", "#59a14f", "#e15759",
                                                "#76b7b2", "#edc948", "#b07aa1", "#ff9da7",
                                                "#9c755f", "#86bcb6", "#d37295", "#499894",
                                                "#b6992d", "#a0cbe8", "#bab0ac" };

typedef struct group_sums {
    uint64_t live, highest, at_peak, total, n_blocks;
    int shown; /* 0 .. SHOWN-1; SHOWN: the rest */
} group_sums;

typedef struct page {
    const koila__history *h;
    const uint32_t *group_of;
    uint32_t n_groups;
    const char *(*name)(void *, uint32_t);
    void *user;
    group_sums *groups;
    uint32_t *order; /* groups, most bytes at the peak first, then by highest */
    uint64_t (*columns)[SHOWN + 1];
    koila__text *out;
} page;

static void sum_up(page *pg)
{
    const koila__history *h = pg->h;
    for (size_t i = 0; i < h->n; i++) {
        group_sums *g = &pg->groups[pg->group_of[h->events[i].tag]];
        g->live += (uint64_t)h->events[i].n_bytes;
        if (h->events[i].n_bytes > 0) {
            g->n_blocks++;
            g->total += (uint64_t)h->events[i].n_bytes;
            if (h->peak_at != SIZE_MAX && koila__history_is_live(h, i, h->peak_at))
                g->at_peak += (uint64_t)h->events[i].n_bytes;
        }
        if (g->live > g->highest)
            g->highest = g->live;
    }
}
static bool is_larger(const group_sums *a, const group_sums *b)
{
    return a->at_peak != b->at_peak ? a->at_peak > b->at_peak : a->highest > b->highest;
}
static void put_in_order(page *pg)
{
    /* there are few: insertion into the head of the list */
    for (uint32_t i = 0; i < pg->n_groups; i++) {
        uint32_t k = i;
        pg->order[i] = i;
        for (; k > 0 && is_larger(&pg->groups[pg->order[k]], &pg->groups[pg->order[k - 1]]); k--) {
            uint32_t swap = pg->order[k];
            pg->order[k] = pg->order[k - 1];
            pg->order[k - 1] = swap;
        }
    }
    for (uint32_t i = 0; i < pg->n_groups; i++)
        pg->groups[pg->order[i]].shown = i < SHOWN ? (int)i : SHOWN;
}
/* For every column of the picture what was live at its highest moment. */
static void fill_columns(page *pg)
{
    const koila__history *h = pg->h;
    uint64_t now[SHOWN + 1] = { 0 }, total = 0, highest = 0;
    uint64_t t0 = h->n > h->n_first ? h->events[h->n_first].ns : 0;
    uint64_t span = h->n ? h->events[h->n - 1].ns - t0 + 1 : 1;
    size_t column = 0;
    for (size_t i = 0; i < h->n; i++) {
        const koila__event *e = &h->events[i];
        size_t c = i < h->n_first ? 0 : (size_t)((double)(e->ns - t0) * WIDTH / (double)span);
        /* the next columns begin as this one ended */
        for (; column < c && column + 1 < WIDTH; column++) {
            memcpy(pg->columns[column + 1], now, sizeof now);
            highest = total;
        }
        now[pg->groups[pg->group_of[e->tag]].shown] += (uint64_t)e->n_bytes;
        total += (uint64_t)e->n_bytes;
        if (i < h->n_first || total > highest) {
            highest = total;
            memcpy(pg->columns[column], now, sizeof now);
        }
    }
    for (; column + 1 < WIDTH; column++)
        memcpy(pg->columns[column + 1], now, sizeof now);
}

static const char *label(const page *pg, uint32_t group)
{
    const char *s = pg->name(pg->user, group);
    return s && *s ? s : "line not known";
}
static void write_curve(page *pg)
{
    char size[32];
    uint64_t top = pg->h->peak ? pg->h->peak : 1;
    koila__text_printf(
        pg->out,
        "<svg viewBox=\"0 0 %d %d\" preserveAspectRatio=\"none\" role=\"img\" class=\"curve\">\n",
        WIDTH, HEIGHT);
    for (int k = 0; k <= SHOWN; k++) {
        bool any = false;
        for (int c = 0; c < WIDTH; c++)
            any |= pg->columns[c][k] != 0;
        if (!any)
            continue;
        koila__text_printf(pg->out, "<path fill=\"%s\" d=\"M", colours[k]);
        for (int side = 0; side < 2; side++)
            for (int i = 0; i < WIDTH; i++) {
                int c = side ? WIDTH - 1 - i : i;
                uint64_t below = 0;
                for (int j = 0; j < k + !side; j++)
                    below += pg->columns[c][j];
                koila__text_printf(pg->out, "%d %.1f ", c,
                                   HEIGHT - HEIGHT * (double)below / (double)top);
            }
        uint32_t group = k < SHOWN ? pg->order[k] : 0;
        koila__text_puts(pg->out, "z\"><title>");
        koila__text_html(pg->out, k < SHOWN ? label(pg, group) : "all other lines");
        if (k < SHOWN)
            koila__text_printf(pg->out, ": at most %s",
                               koila__size_text((double)pg->groups[group].highest, size));
        koila__text_puts(pg->out, "</title></path>\n");
    }
    koila__text_puts(pg->out, "</svg>\n");
}

static size_t file_length(const char *s)
{
    const char *colon = strrchr(s, ':');
    return colon ? (size_t)(colon - s) : strlen(s);
}
static void write_box(page *pg, double x, double width, int row, const char *colour,
                      const char *text, size_t n, uint64_t bytes)
{
    char size[32];
    if (width < 0.5)
        return;
    koila__text *whole = pg->out;
    koila__text one;
    koila__text_init(&one, NULL);
    koila__text_add(&one, text, n);
    const char *shown = one.s ? one.s : "";
    const char *slash = strrchr(shown, '/');
    koila__text_printf(
        whole,
        "<div class=\"box\" style=\"left:%.3f%%;width:%.3f%%;top:%dpx;background:%s\" title=\"",
        x / WIDTH * 100, width / WIDTH * 100, row * FLAME, colour);
    koila__text_html(whole, shown);
    koila__text_printf(whole, ": %s\">", koila__size_text((double)bytes, size));
    koila__text_html(whole, slash ? slash + 1 : shown);
    koila__text_printf(whole, " %s</div>\n", size);
    koila__text_deinit(&one);
}
/* Three levels: everything, its files, their lines; widths are bytes at the peak. */
static void write_flames(page *pg)
{
    double scale = pg->h->peak ? (double)WIDTH / (double)pg->h->peak : 0;
    double x = 0;
    koila__text_printf(pg->out, "<div class=\"flames\" style=\"height:%dpx\">\n", 3 * FLAME);
    write_box(pg, 0, WIDTH, 0, "#bab0ac", "all", 3, pg->h->peak);
    for (uint32_t i = 0; i < pg->n_groups; i++) { /* a file begins with its largest line */
        if (!pg->groups[pg->order[i]].at_peak)
            break;
        const char *first = label(pg, pg->order[i]);
        size_t n = file_length(first);
        bool known = false;
        for (uint32_t j = 0; j < i && !known; j++) {
            const char *s = label(pg, pg->order[j]);
            known = file_length(s) == n && memcmp(s, first, n) == 0;
        }
        if (known)
            continue;
        double begin = x;
        uint64_t bytes = 0;
        for (uint32_t j = i; j < pg->n_groups; j++) {
            const group_sums *g = &pg->groups[pg->order[j]];
            const char *s = label(pg, pg->order[j]);
            if (!g->at_peak || file_length(s) != n || memcmp(s, first, n) != 0)
                continue;
            write_box(pg, x, (double)g->at_peak * scale, 2, colours[g->shown], s, strlen(s),
                      g->at_peak);
            x += (double)g->at_peak * scale;
            bytes += g->at_peak;
        }
        write_box(pg, begin, x - begin, 1, "#d9d5d2", first, n, bytes);
    }
    koila__text_puts(pg->out, "</div>\n");
}
static void write_legend(page *pg)
{
    char size[32];
    koila__text_puts(pg->out, "<table>\n<tr><th></th><th>at the peak</th><th>at most</th><th>in "
                              "all</th><th>blocks</th><th class=\"l\">line</th></tr>\n");
    for (uint32_t i = 0; i < pg->n_groups && i < 60; i++) {
        const group_sums *g = &pg->groups[pg->order[i]];
        koila__text_printf(pg->out, "<tr><td style=\"background:%s\">&nbsp;</td>",
                           colours[g->shown]);
        const uint64_t values[] = { g->at_peak, g->highest, g->total };
        for (size_t k = 0; k < KOILA_COUNT(values); k++)
            koila__text_printf(pg->out, "<td>%s</td>", koila__size_text((double)values[k], size));
        koila__text_printf(pg->out, "<td>%llu</td><td class=\"l\">",
                           (unsigned long long)g->n_blocks);
        koila__text_html(pg->out, label(pg, pg->order[i]));
        koila__text_puts(pg->out, "</td></tr>\n");
    }
    if (pg->n_groups > 60)
        koila__text_printf(
            pg->out, "<tr><td></td><td colspan=\"5\" class=\"l\">and %u more lines</td></tr>\n",
            pg->n_groups - 60);
    koila__text_puts(pg->out, "</table>\n");
}

koila_status koila__history_page(const koila__history *h, const uint32_t *group_of,
                                 uint32_t n_groups, const char *(*name)(void *user, uint32_t group),
                                 void *user, const char *title, const char *sections,
                                 koila__text *out)
{
    koila_allocator mem = h->mem;
    page pg = { h, group_of, n_groups, name, user, NULL, NULL, NULL, out };
    size_t n_columns_bytes = WIDTH * sizeof *pg.columns;
    pg.groups = koila__realloc(&mem, NULL, 0, (n_groups + 1) * sizeof *pg.groups);
    pg.order = koila__realloc(&mem, NULL, 0, (n_groups + 1) * sizeof *pg.order);
    pg.columns = koila__realloc(&mem, NULL, 0, n_columns_bytes);
    koila_status status = pg.groups && pg.order && pg.columns ? KOILA_OK : KOILA_NO_MEMORY;
    if (status == KOILA_OK) {
        char a[32], b[32];
        memset(pg.groups, 0, (n_groups + 1) * sizeof *pg.groups);
        memset(pg.columns, 0, n_columns_bytes);
        sum_up(&pg);
        put_in_order(&pg);
        fill_columns(&pg);
        koila__text_puts(out, "<!doctype html>\n<html><head><meta charset=\"utf-8\"><title>");
        koila__text_html(out, title);
        koila__text_puts(
            out, "</title><style>:root{color-scheme:light "
                 "dark}body{font-family:sans-serif;margin:2em;max-width:1100px}"
                 ".curve{width:100%;height:360px;border:1px solid "
                 "#888}.flames{position:relative;margin:1em 0}"
                 ".box{position:absolute;box-sizing:border-box;height:25px;overflow:hidden;white-"
                 "space:nowrap;font:12px/24px monospace;color:#000;"
                 "border:1px solid #fff;padding:0 3px}td,th{text-align:right;padding:1px "
                 ".8em;font-family:monospace}.l{text-align:left}</style></head><body>\n<h1>");
        koila__text_html(out, title);
        double seconds = h->n > h->n_first
                             ? (double)(h->events[h->n - 1].ns - h->events[h->n_first].ns) / 1e9
                             : 0;
        koila__text_printf(out, "</h1>\n<p>%zu events in %.3f s; highest %s, at the beginning %s",
                           h->n - h->n_first, seconds, koila__size_text((double)h->peak, a),
                           koila__size_text((double)h->start, b));
        koila__text_printf(out, ", at the end %s.", koila__size_text((double)h->end, a));
        if (h->n_lost)
            koila__text_printf(out, " <b>%llu later events are not in it.</b>",
                               (unsigned long long)h->n_lost);
        koila__text_puts(out, "</p>\n<h2>Memory over time, by the line that asked</h2>\n");
        write_curve(&pg);
        write_legend(&pg);
        koila__text_puts(out, "<h2>At the peak</h2>\n");
        write_flames(&pg);
        koila__text_puts(out, sections);
        koila__text_puts(out, "</body></html>\n");
        if (!koila__text_ok(out))
            status = KOILA_NO_MEMORY;
    }
    koila__release(&mem, pg.groups, (n_groups + 1) * sizeof *pg.groups);
    koila__release(&mem, pg.order, (n_groups + 1) * sizeof *pg.order);
    koila__release(&mem, pg.columns, n_columns_bytes);
    return status;
}
