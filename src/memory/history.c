/* history.c — see history.h. */
#include "memory/history.h"

#include "base/idset.h"
#include "base/vec.h"

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
    koila_assert(h->n <= h->capacity);
    if (full || !koila__grow(&h->mem, &h->events, &h->capacity, h->n + 1, sizeof *h->events)) {
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

/* ---- which event belongs to which */

/* One walk over the events, oldest first. The events that are kept move down over those dropped. */
typedef struct walk {
    koila__history *h;
    koila__idset live; /* events (places after the move) of live blocks, by address */
    size_t *other;
    size_t n_kept, n_first; /* n_first: how many of those kept are of the beginning */
    uint64_t now;           /* bytes live after the last event */
} walk;

/* A block is gone: freed, or its address was handed out again because the free was missed. */
static void end_block(walk *w, uint32_t made)
{
    koila__history *h = w->h;
    koila_assert(h->events[made].n_bytes > 0 && w->other[made] == SIZE_MAX);
    koila_assert(w->now >= (uint64_t)h->events[made].n_bytes);
    w->now -= (uint64_t)h->events[made].n_bytes;
    w->other[made] = w->n_kept;
    koila__idset_remove_word(&w->live, &h->events->p, sizeof *h->events, made);
}

static void begin_block(walk *w)
{
    koila__history *h = w->h;
    const koila__event *e = &h->events[w->n_kept];
    koila__idset_insert_word(&w->live, (uintptr_t)e->p, (uint32_t)w->n_kept);
    w->now += (uint64_t)e->n_bytes;
    if (w->n_kept >= w->n_first && (h->peak_at == SIZE_MAX || w->now > h->peak)) {
        h->peak = w->now;
        h->peak_at = w->n_kept;
    }
}

static void walk_event(walk *w, size_t i)
{
    koila__history *h = w->h;
    koila__event e = h->events[i];
    const uint32_t made =
        koila__idset_find_word(&w->live, &h->events->p, sizeof *h->events, (uintptr_t)e.p);
    const bool is_free = e.n_bytes < 0;
    if (is_free && made == KOILA__NO_ID) { /* of a block that nobody saw being handed out */
        w->n_first -= i < h->n_first;
        return;
    }
    w->other[w->n_kept] = SIZE_MAX;
    if (made != KOILA__NO_ID) {
        end_block(w, made);
        if (is_free) {
            e.tag = h->events[made].tag;
            w->other[w->n_kept] = made;
        }
    }
    koila_assert(w->n_kept <= i);
    h->events[w->n_kept] = e;
    if (e.n_bytes > 0)
        begin_block(w);
    w->n_kept++;
}

koila_status koila__history_solve(koila__history *h)
{
    _Static_assert(sizeof(void *) == sizeof(uint64_t), "an address is the word of a set");
    walk w = { .h = h, .n_first = h->n_first };
    w.other = koila__realloc(&h->mem, NULL, 0, (h->n + 1) * sizeof *w.other);
    if (!w.other || !koila__idset_init(&h->mem, &w.live, h->n)) {
        koila__release(&h->mem, w.other, (h->n + 1) * sizeof *w.other);
        return KOILA_NO_MEMORY;
    }
    for (size_t i = 0; i < h->n; i++) {
        if (i == h->n_first)
            h->start = w.now;
        walk_event(&w, i);
    }
    if (h->n_first >= h->n)
        h->start = w.now;
    if (h->start >= h->peak) { /* it never rose above the beginning */
        h->peak = h->start;
        h->peak_at = w.n_first ? w.n_first - 1 : SIZE_MAX;
    }
    h->end = w.now;
    h->n_first = w.n_first;
    koila_assert(h->n_first <= w.n_kept && h->end <= h->peak);
    koila__idset_free(&h->mem, &w.live);
    h->other = w.other;
    h->n_other = h->n + 1;
    h->n = w.n_kept;
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

/* The curve between its axes: bytes from none to the peak, and seconds. */
static void write_plot(page *pg, double seconds)
{
    enum { N_LABELS = 5 };
    char size[32];
    koila__text_puts(pg->out, "<div class=\"plot\"><div class=\"y\">");
    for (int k = N_LABELS - 1; k >= 0; k--)
        koila__text_printf(pg->out, "<span>%s</span>",
                           koila__size_text((double)pg->h->peak * k / (N_LABELS - 1), size));
    koila__text_puts(pg->out, "</div>\n");
    write_curve(pg);
    koila__text_printf(pg->out,
                       "<div></div><div class=\"x\"><span>0 s</span><span>time</span>"
                       "<span>%.3g s</span></div></div>\n",
                       seconds);
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
/* Lines that never held a byte come last in the order, and are left out. */
static void write_legend(page *pg)
{
    char size[32];
    uint32_t n = 0;
    while (n < pg->n_groups && pg->groups[pg->order[n]].highest)
        n++;
    koila__text_puts(
        pg->out,
        "<div class=\"wide\"><table>\n<tr><th></th><th>at the peak</th><th>at most</th><th>in "
        "all</th><th>blocks</th><th class=\"l\">line</th></tr>\n");
    for (uint32_t i = 0; i < n && i < 60; i++) {
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
    if (n > 60)
        koila__text_printf(
            pg->out, "<tr><td></td><td colspan=\"5\" class=\"l\">and %u more lines</td></tr>\n",
            n - 60);
    koila__text_puts(pg->out, "</table></div>\n");
}

koila_status koila__history_body(const koila__history *h, const uint32_t *group_of,
                                 uint32_t n_groups, const char *(*name)(void *user, uint32_t group),
                                 void *user, koila__text *out)
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
        double seconds = h->n > h->n_first
                             ? (double)(h->events[h->n - 1].ns - h->events[h->n_first].ns) / 1e9
                             : 0;
        koila__text_printf(out, "<p>%zu events in %.3f s; highest %s, at the beginning %s",
                           h->n - h->n_first, seconds, koila__size_text((double)h->peak, a),
                           koila__size_text((double)h->start, b));
        koila__text_printf(out, ", at the end %s.", koila__size_text((double)h->end, a));
        if (h->n_lost)
            koila__text_printf(out, " <b>%llu later events are not in it.</b>",
                               (unsigned long long)h->n_lost);
        koila__text_puts(out, "</p>\n<h2>Memory over time, by the line that asked</h2>\n");
        write_plot(&pg, seconds);
        write_legend(&pg);
        koila__text_puts(out, "<h2>At the peak, by file and line</h2>\n");
        write_flames(&pg);
        if (!koila__text_ok(out))
            status = KOILA_NO_MEMORY;
    }
    koila__release(&mem, pg.groups, (n_groups + 1) * sizeof *pg.groups);
    koila__release(&mem, pg.order, (n_groups + 1) * sizeof *pg.order);
    koila__release(&mem, pg.columns, n_columns_bytes);
    return status;
}
