/* cmd_report.c — koila report: a memory snapshot as one page that needs no network and no script.
 *
 * The trace may have any length, but the size of the page is bounded: time is cut into N_COLUMNS
 * columns, and each keeps the least and the most of every curve, so a peak of one event is still
 * drawn. Maps merge what is thinner than a pixel. Every text from the file goes through put_text(),
 * which cuts and escapes it; stacks are left out once the page has MAX_STACKS bytes. So no file
 * makes a page of more than 5 MiB.
 *
 *   pass 1  replay         verdict, where the peaks are, what was lost
 *   pass 2  timeline       the columns; what is live, until the peak of allocated bytes; the limit
 *   pass 3  timeline       every block at the peak of allocated bytes: with those that were there
 *           before the first event
 *   pass 4  timeline       when the largest of those were freed
 *   pass 5  timeline       every block at the peak of reserved bytes
 */
#include "cmd.h"

enum {
    N_COLUMNS = 1000,
    N_CURVES = 3,
    N_BANDS = 12,
    MAX_RECTS = 12000,
    MAX_TOP = 200,
    MAX_STEPS = 400,
    MAX_TEXT = 160,
    MAX_STACKS = 5 << 19
};
#define BEFORE UINT64_MAX /* born before the first event, or not dead after the last */

/* blue, orange, green, sky, vermilion, purple: told apart with any colour vision (Okabe and Ito) */
static const char *const band_colours[] = { "#0072b2", "#e69f00", "#009e73",
                                            "#56b4e9", "#d55e00", "#cc79a7" };

typedef struct column {
    uint64_t low[N_CURVES], high[N_CURVES]; /* allocated, active, reserved */
    bool any;
} column;

typedef struct live_one {
    uint64_t addr, size, born, died; /* events, or BEFORE */
    uint32_t stack;
    bool used;
} live_one;

/* What is allocated: open addressing by address. The command line sees only koila.h, and so not the
 * hash set of the core. */
typedef struct live_table {
    live_one *at;
    size_t n, cap;
    bool failed;
} live_table;

static live_one *live_find(live_table *t, uint64_t addr)
{
    if (!t->cap)
        return NULL;
    for (size_t h = (size_t)((addr >> 9) * 0x9E3779B97F4A7C15u >> 20) & (t->cap - 1);;
         h = (h + 1) & (t->cap - 1)) {
        if (!t->at[h].addr)
            return NULL;
        if (t->at[h].addr == addr)
            return &t->at[h];
    }
}

static void live_put(live_table *t, const live_one *x)
{
    live_one *old = live_find(t, x->addr);
    if (old) {
        *old = *x;
        return;
    }
    if ((t->n + 1) * 2 > t->cap) {
        const size_t cap = t->cap ? t->cap * 2 : 1024;
        live_table bigger = { calloc(cap, sizeof(live_one)), 0, cap, false };
        if (!bigger.at) {
            t->failed = true;
            return;
        }
        for (size_t i = 0; i < t->cap; i++)
            /* skips freed entries */
            if (t->at[i].addr && t->at[i].used)
                live_put(&bigger, &t->at[i]);
        free(t->at);
        *t = bigger;
    }
    size_t h = (size_t)((x->addr >> 9) * 0x9E3779B97F4A7C15u >> 20) & (t->cap - 1);
    while (t->at[h].addr)
        h = (h + 1) & (t->cap - 1);
    t->at[h] = *x;
    t->n++;
}

typedef struct drawn_block {
    uint64_t addr, size;
    koila_block_state state;
    uint32_t segment;
} drawn_block;

typedef struct report {
    const koila_snapshot *s;
    uint32_t device;
    const char *path;
    uint64_t memory, outside; /* as given, 0: not */
    uint64_t limit;           /* what this process can reserve at most, 0: not known */
    bool limit_seen;          /* known from an out-of-memory, not given */
    koila_snapshot_info info;
    koila_cache_config conf;
    koila_replay_result r;
    uint64_t n, top;
    column columns[N_COLUMNS];
    live_table live;
    live_one *largest; /* at the peak of allocated, by size */
    size_t n_largest;
    uint64_t maybe[64]; /* bits: addresses of `largest`, hashed */
    drawn_block *blocks;
    size_t n_blocks, blocks_cap;
    bool exact, failed;
    FILE *f;
} report;

static size_t column_of(const report *p, uint64_t entry)
{
    return p->n ? (size_t)(entry * N_COLUMNS / p->n) : 0;
}

static void count_live(report *p, const koila_moment *m)
{
    live_one x = { m->addr, m->size, m->entry, BEFORE, m->stack, true };
    if (m->kind == KOILA_EVENT_ALLOC && m->addr)
        live_put(&p->live, &x);
    if (m->kind == KOILA_EVENT_FREE_REQUESTED) {
        live_one *old = live_find(&p->live, m->addr);
        if (old)
            old->used = false;
    }
}

static size_t bit_of(uint64_t addr) { return (size_t)((addr >> 9) * 0x9E3779B97F4A7C15u >> 52); }

static int by_size(const void *a, const void *b)
{
    const live_one *x = a;
    const live_one *y = b;
    if (x->size != y->size)
        return x->size < y->size ? 1 : -1;
    if (x->addr != y->addr)
        return x->addr < y->addr ? -1 : 1;
    return 0;
}

static void keep_largest(report *p)
{
    size_t n = 0;
    free(p->largest);
    p->largest = calloc(p->live.n + 1, sizeof *p->largest);
    for (size_t i = 0; p->largest && i < p->live.cap; i++)
        if (p->live.at[i].addr && p->live.at[i].used)
            p->largest[n++] = p->live.at[i];
    p->failed |= !p->largest;
    if (p->largest)
        qsort(p->largest, n, sizeof *p->largest, by_size);
    p->n_largest = n < MAX_TOP ? n : MAX_TOP;
    for (size_t i = 0; i < p->n_largest; i++)
        p->maybe[bit_of(p->largest[i].addr) >> 6] |= (uint64_t)1
                                                     << (bit_of(p->largest[i].addr) & 63);
}

static void see_first(void *user, const koila_moment *m)
{
    report *p = user;
    column *c = &p->columns[column_of(p, m->entry)];
    const uint64_t v[N_CURVES] = { m->allocated, m->active, m->reserved };
    for (int k = 0; k < N_CURVES; k++) {
        if (!c->any || v[k] < c->low[k])
            c->low[k] = v[k];
        if (!c->any || v[k] > c->high[k])
            c->high[k] = v[k];
    }
    c->any = true;
    progress_done = m->entry;
    /* addr: free bytes of the device at that moment */
    if (m->kind == KOILA_EVENT_OOM && !p->limit && m->addr && m->addr < (uint64_t)1 << 44) {
        p->limit = m->reserved + m->addr;
        p->limit_seen = true;
    }
    if (m->entry <= p->r.peak_allocated_entry)
        count_live(p, m);
}

/* At the peak of allocated bytes: a block that no event made was there before the first one. */
static bool see_before(void *user, const koila_block *b)
{
    report *p = user;
    const live_one *old = b->state == KOILA_BLOCK_USED ? live_find(&p->live, b->addr) : NULL;
    live_one x = { b->addr, b->requested ? b->requested : b->size, BEFORE, BEFORE, KOILA_NO_STACK,
                   true };
    if (b->state == KOILA_BLOCK_USED && !(old && old->used))
        live_put(&p->live, &x);
    return !p->live.failed;
}

static void see_again(void *user, const koila_moment *m)
{
    report *p = user;
    progress_done = m->entry;
    if (m->kind != KOILA_EVENT_FREE_REQUESTED || m->entry <= p->r.peak_allocated_entry)
        return;
    if (!(p->maybe[bit_of(m->addr) >> 6] >> (bit_of(m->addr) & 63) & 1))
        return;
    for (size_t i = 0; i < p->n_largest; i++)
        if (p->largest[i].addr == m->addr && p->largest[i].died == BEFORE)
            p->largest[i].died = m->entry;
}

/* A block from before the first event that was never freed is still there at the end, with its
 * stack.
 */
static void find_stacks(report *p)
{
    size_t n;
    const koila_segment *segs = koila_snapshot_segments(p->s, p->device, &n);
    for (size_t k = 0; k < p->n_largest; k++) {
        live_one *x = &p->largest[k];
        if (x->born != BEFORE || x->died != BEFORE)
            continue;
        for (size_t i = 0; i < n; i++) {
            if (x->addr < segs[i].addr || x->addr >= segs[i].addr + segs[i].size)
                continue;
            for (size_t b = 0; b < segs[i].n_blocks; b++)
                if (segs[i].blocks[b].addr == x->addr &&
                    segs[i].blocks[b].state == KOILA_BLOCK_USED)
                    x->stack = koila_snapshot_block_stack(p->s, &segs[i].blocks[b]);
        }
    }
}

static bool see_block(void *user, const koila_block *b)
{
    report *p = user;
    if (b->state == KOILA_BLOCK_UNMAPPED)
        return true;
    if (p->n_blocks == p->blocks_cap) {
        p->blocks_cap = p->blocks_cap ? p->blocks_cap * 2 : 1024;
        drawn_block *q = realloc(p->blocks, p->blocks_cap * sizeof *q);
        if (!q) {
            p->failed = true;
            return false;
        }
        p->blocks = q;
    }
    p->blocks[p->n_blocks++] = (drawn_block){ b->addr, b->size, b->state, b->segment };
    return true;
}

/* ---- the page */

static const char *const style =
    ":root{color-scheme:light "
    "dark;--bg:#fff;--fg:#1a1a1a;--dim:#5c5c5c;--line:#d4d4d4;--used:#0072b2;--wait:#e69f00;--free:"
    "#dcdcdc;--res:#1a1a1a;--act:#d55e00;--limit:#a3005c}"
    "@media(prefers-color-scheme:dark){:root{--bg:#16181c;--fg:#e8e8e8;--dim:#a0a4ab;--line:#"
    "3a3e45;--used:#3d9bd6;--wait:#e69f00;--free:#3a3e45;--res:#e8e8e8;--act:#ff8c42;--limit:#"
    "ff7ac0}}"
    "body{margin:2rem auto;max-width:1100px;padding:0 "
    "1rem;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}"
    "h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2.2rem}svg{width:100%;height:auto;display:"
    "block}text{fill:var(--dim);font:11px system-ui,sans-serif}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.25rem .6rem .25rem "
    "0;border-bottom:1px solid var(--line);vertical-align:top}"
    "td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}code,pre{font:"
    "13px/1.4 ui-monospace,monospace}pre{margin:.3rem 0;white-space:pre-wrap}"
    "summary{cursor:pointer}.dim{color:var(--dim)}.key{display:inline-block;width:.8em;height:.8em;"
    "margin:0 .3em 0 1em;vertical-align:-.05em}"
    ".used{fill:var(--used)}.wait{fill:var(--wait)}.free{fill:var(--free)}";

static void put_size(FILE *f, uint64_t n)
{
    char text[32];
    fputs(gib(n, text), f);
}

/* Text from the file: cut and escaped. */
static void put_text(FILE *f, const char *s)
{
    char cut[MAX_TEXT + 1];
    size_t n = strlen(s);
    if (n > MAX_TEXT) { /* the end of a file name says more than its start */
        s += n - MAX_TEXT;
        while (((unsigned char)*s & 0xC0) == 0x80)
            s++;
        fputs("\xe2\x80\xa6", f);
    }
    snprintf(cut, sizeof cut, "%s", s);
    put_html(f, cut);
}

static void put_frames(report *p, uint32_t stack)
{
    koila_frame f;
    bool any = false;
    if (ftell(p->f) > MAX_STACKS) {
        fputs("<span class=dim>left out: the page is full</span>", p->f);
        return;
    }
    for (uint32_t i = 0; i < 60 && koila_snapshot_frame(p->s, stack, i, &f); i++) {
        fputs(any ? "\n" : "<pre>", p->f);
        any = true;
        put_text(p->f, f.filename);
        fprintf(p->f, ":%u in ", f.line);
        put_text(p->f, f.name);
    }
    fputs(any ? "</pre>" : "<span class=dim>no stack recorded</span>", p->f);
}

static void put_line_of(report *p, uint32_t stack)
{
    koila_frame f;
    if (!user_frame(p->s, stack, &f)) {
        fputs("<span class=dim>unknown</span>", p->f);
        return;
    }
    fputs("<code>", p->f);
    put_text(p->f, f.filename);
    fprintf(p->f, ":%u</code> in ", f.line);
    put_text(p->f, f.name);
}

enum { CHART_W = 1000, CHART_H = 300, LEFT_EDGE = 70 };

static double y_of(uint64_t bytes, uint64_t most)
{
    return CHART_H - (double)bytes / (double)most * (CHART_H - 10);
}
static double x_of(const report *p, uint64_t entry)
{
    return LEFT_EDGE + (double)entry / (double)(p->n ? p->n : 1) * (CHART_W - LEFT_EDGE);
}

/* The band between a curve's least and most, column by column: forward along the most, back along
 * the least. */
static void put_curve(report *p, int k, uint64_t most, const char *colour, const char *name)
{
    const double step = (double)(CHART_W - LEFT_EDGE) / N_COLUMNS;
    fprintf(p->f, "<path fill=\"%s\" fill-opacity=\".35\" stroke=\"%s\" stroke-width=\"1\" d=\"",
            colour, colour);
    char move = 'M';
    for (size_t i = 0; i < N_COLUMNS; i++) {
        if (!p->columns[i].any)
            continue;
        fprintf(p->f, "%c%.1f %.1f", move, LEFT_EDGE + step * (double)i,
                y_of(p->columns[i].high[k], most));
        move = 'L';
    }
    for (size_t i = N_COLUMNS; i-- > 0;)
        if (p->columns[i].any)
            fprintf(p->f, "L%.1f %.1f", LEFT_EDGE + step * (double)i,
                    y_of(p->columns[i].low[k], most));
    fprintf(p->f, "%s\"><title>%s</title></path>\n", move == 'L' ? "Z" : "", name);
}

static void put_steps(report *p)
{
    koila_annotation a;
    koila_entry x = { .struct_size = sizeof x };
    uint64_t at = 0;
    int n = 0;
    for (uint64_t i = 0; n < MAX_STEPS && koila_snapshot_annotation(p->s, i, &a); i++) {
        if (strcmp(a.stage, "START") || a.device != p->device)
            continue;
        while (koila_snapshot_entry(p->s, p->device, at, &x) && x.time_us < a.time_us)
            at++;
        const double left = x_of(p, at);
        fprintf(p->f,
                "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%d\" stroke=\"var(--line)\"><title>",
                left, left, CHART_H);
        put_text(p->f, a.name);
        fputs("</title></line>\n", p->f);
        n++;
    }
}

enum { N_GRID = 4 };

static void put_grid(FILE *f, uint64_t most)
{
    for (int i = 0; i <= N_GRID; i++) {
        const uint64_t v = most / N_GRID * (uint64_t)i;
        const double y = y_of(v, most);
        fprintf(f,
                "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"var(--line)\"/><text "
                "x=\"%d\" y=\"%.1f\" text-anchor=\"end\">",
                LEFT_EDGE, CHART_W, y, y, LEFT_EDGE - 6, y + 4);
        put_size(f, v);
        fputs("</text>\n", f);
    }
}

/* The largest at the peak, stacked: they are all live there, so nothing overlaps. */
static void put_bands(report *p, uint64_t most)
{
    FILE *f = p->f;
    uint64_t band = 0;
    for (size_t i = 0; i < p->n_largest && i < N_BANDS; i++) {
        const live_one *x = &p->largest[i];
        const double left = x_of(p, x->born == BEFORE ? 0 : x->born);
        const double right = x_of(p, x->died == BEFORE ? p->n : x->died);
        const double top = y_of(band + x->size, most);
        fprintf(f,
                "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\" "
                "fill-opacity=\".8\"><title>",
                left, top, right - left > 0.5 ? right - left : 0.5, y_of(band, most) - top,
                band_colours[i % (sizeof band_colours / sizeof *band_colours)]);
        put_size(f, x->size);
        fputs(" ", f);
        koila_frame frame;
        if (user_frame(p->s, x->stack, &frame)) {
            put_text(f, frame.filename);
            fprintf(f, ":%u", frame.line);
        }
        fputs("</title></rect>\n", f);
        band += x->size;
    }
}

static void put_limit(report *p, uint64_t most, bool limit_fits)
{
    FILE *f = p->f;
    const double y = limit_fits ? y_of(p->limit, most) : 3;
    fprintf(f,
            "<g class=limit><line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" "
            "stroke=\"var(--limit)\" stroke-width=\"1.5\" stroke-dasharray=\"8 4\"/><text "
            "x=\"%d\" y=\"%.1f\" text-anchor=\"end\">limit ",
            LEFT_EDGE, CHART_W, y, y, CHART_W - 4, y + 12);
    put_size(f, p->limit);
    fprintf(f, "%s%s</text></g>\n",
            p->limit_seen ? ", as the device had it at the first out-of-memory" : "",
            limit_fits ? "" : " (above the picture)");
}

/* The most of active or reserved in any column: the top of the picture. */
static uint64_t most_of(const report *p)
{
    uint64_t most = 1;
    for (size_t i = 0; i < N_COLUMNS; i++)
        for (int k = 1; k < N_CURVES; k++)
            if (p->columns[i].any && p->columns[i].high[k] > most)
                most = p->columns[i].high[k];
    return most;
}

static void put_chart(report *p)
{
    FILE *f = p->f;
    uint64_t most = most_of(p);
    /* a far limit would flatten the curves */
    const bool limit_fits = p->limit && p->limit / 3 < most;
    if (limit_fits && p->limit > most)
        most = p->limit;
    fprintf(f, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"memory over time\">\n",
            CHART_W, CHART_H + 24);
    put_grid(f, most);
    put_steps(p);
    put_bands(p, most);
    /* each is at least the next: later ones leave the earlier in sight */
    put_curve(p, 2, most, "var(--res)", "reserved");
    put_curve(p, 1, most, "var(--act)", "active");
    put_curve(p, 0, most, "var(--used)", "allocated");
    if (p->limit)
        put_limit(p, most, limit_fits);
    if (p->r.n_ooms && p->r.first_oom_entry != UINT64_MAX)
        fprintf(f,
                "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%d\" stroke=\"#d55e00\" "
                "stroke-dasharray=\"4 3\"><title>out of memory</title></line>\n",
                x_of(p, p->r.first_oom_entry), x_of(p, p->r.first_oom_entry), CHART_H);
    fprintf(f,
            "<text x=\"%d\" y=\"%d\">event 0</text><text x=\"%d\" y=\"%d\" "
            "text-anchor=\"end\">event %llu</text></svg>\n",
            LEFT_EDGE, CHART_H + 18, CHART_W, CHART_H + 18, (unsigned long long)p->n);
    fprintf(f,
            "<p class=dim><span class=key style=\"background:var(--res)\"></span>reserved <span "
            "class=key style=\"background:var(--act)\"></span>active "
            "<span class=key style=\"background:var(--used)\"></span>allocated%s; solid boxes: the "
            "largest allocations at the peak, from birth to death. "
            "Each column shows least and most, so no peak is lost.</p>\n",
            p->limit ? " <span class=key style=\"background:var(--limit)\"></span>limit" : "");
}

/* Segments as rows, widths to scale. What is thinner than a pixel is merged into its neighbour. */
static void put_map(report *p, const drawn_block *b, size_t n, const char *label)
{
    FILE *f = p->f;
    uint64_t widest = 1;
    size_t n_rows = 0, rects = 0, row = 0;
    for (size_t i = 0; i < n;) {
        size_t end = i;
        uint64_t size = 0;
        for (; end < n && b[end].addr == b[i].addr + size && b[end].segment == b[i].segment; end++)
            size += b[end].size;
        if (size > widest)
            widest = size;
        n_rows++;
        i = end;
    }
    const size_t shown = n_rows < 400 ? n_rows : 400;
    if (!n_rows) {
        fputs("<p class=dim>nothing is reserved</p>\n", f);
        return;
    }
    fprintf(f, "<svg viewBox=\"0 0 %d %zu\" role=\"img\" aria-label=\"%s\">\n", CHART_W,
            shown * 8 + 2, label);
    const double scale = (double)CHART_W / (double)widest;
    for (size_t i = 0; i < n && row < shown; row++) {
        size_t end = i;
        uint64_t size = 0, run = 0;
        for (; end < n && b[end].addr == b[i].addr + size && b[end].segment == b[i].segment; end++)
            size += b[end].size;
        double x = 0;
        for (size_t k = i; k < end && rects < MAX_RECTS; k++) {
            run += b[k].size;
            const double width = (double)run * scale;
            if (width < 0.8 && k + 1 < end)
                continue; /* too thin to see */
            static const char *const classes[] = { "free", "used", "wait", "free" };
            fprintf(f, "<rect class=\"%s\" x=\"%.1f\" y=\"%zu\" width=\"%.1f\" height=\"6\"/>",
                    classes[b[k].state], x, row * 8 + 1, width > 0.3 ? width - 0.2 : 0.3);
            x += width;
            run = 0;
            rects++;
        }
        i = end;
    }
    fputs("</svg>\n", f);
    fprintf(f,
            "<p class=dim>%zu segments%s. <span class=key "
            "style=\"background:var(--used)\"></span>allocated <span class=key "
            "style=\"background:var(--wait)\"></span>waiting for another "
            "stream <span class=key style=\"background:var(--free)\"></span>free; the longest is ",
            n_rows, shown < n_rows || rects >= MAX_RECTS ? ", the first of them shown" : "");
    put_size(f, widest);
    fputs(".</p>\n", f);
}

static void put_row(report *p, const char *name, uint64_t n, const char *meaning)
{
    fprintf(p->f, "<tr><th>%s<td class=n>", name);
    put_size(p->f, n);
    fprintf(p->f, "<td class=dim>%s</tr>\n", meaning);
}

static void put_lost(report *p)
{
    const koila_replay_result *r = &p->r;
    put_row(p, "reserved", r->peak_reserved, "taken from the device");
    if (r->peak_added_up)
        return;
    put_row(p, "requested", r->at_peak_requested, "what the program asked for and holds");
    put_row(p, "rounding", r->lost_rounding,
            "requests are rounded to 512 bytes or by roundup_power2_divisions");
    put_row(p, "unsplit", r->lost_unsplit,
            "blocks handed out larger than asked, as the rest was too small to split");
    put_row(p, "waiting", r->waiting,
            "freed, but another stream may still use them (record_stream)");
    put_row(p, "free but pinned", r->lost_pinned,
            "free parts of segments that something still lives in: fragmentation");
    put_row(p, "whole free segments", r->lost_whole,
            "could go back to the device with empty_cache");
}

static void put_head(report *p)
{
    static const char *const verdicts[] = { "exact", "exact, with external decisions", "differs",
                                            "not checkable", "no trace" };
    FILE *f = p->f;
    const koila_replay_result *r = &p->r;
    char a[32];
    fputs("<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport "
          "content=\"width=device-width,initial-scale=1\">"
          "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src "
          "'unsafe-inline'\"><title>",
          f);
    put_text(f, p->path);
    fprintf(f, "</title><style>%s</style></head><body>\n<h1>", style);
    put_text(f, p->path);
    fprintf(f,
            "</h1>\n<p>device %u, %s events, rules of torch %u.%u, expandable segments %s. Replay: "
            "<b>%s</b>",
            p->device, grouped(p->n, a), r->torch_version / 100, r->torch_version % 100,
            p->conf.expandable ? "on" : "off", verdicts[r->verdict]);
    if (r->reason[0]) {
        fputs(", ", f);
        put_html(f, r->reason);
    }
    fputs(".</p>\n", f);
}

static void put_curves(report *p)
{
    FILE *f = p->f;
    fputs("<h2>Memory over time</h2>\n", f);
    if (p->n)
        put_chart(p);
    else
        fputs("<p class=dim>No trace was recorded.</p>\n", f);
    if (!p->exact && p->n)
        fputs("<p class=dim>The replay stopped early; from there on the curves add up what the "
              "trace says.</p>\n",
              f);
}

static void put_largest(report *p)
{
    FILE *f = p->f;
    char a[32];
    fputs("<h2>Largest live allocations at the peak of allocated bytes</h2>\n", f);
    fputs("<table><tr><th class=n>size<th>made by<th class=n>at event</tr>\n", f);
    for (size_t i = 0; i < p->n_largest && i < p->top; i++) {
        fputs("<tr><td class=n>", f);
        put_size(f, p->largest[i].size);
        fputs("<td><details><summary>", f);
        put_line_of(p, p->largest[i].stack);
        fputs("</summary>", f);
        put_frames(p, p->largest[i].stack);
        fprintf(f, "</details><td class=n>%s</tr>\n",
                p->largest[i].born == BEFORE ? "before" : grouped(p->largest[i].born, a));
    }
    fputs("</table>\n", f);
    if (!p->n_largest)
        fputs("<p class=dim>None.</p>\n", f);
}

static void put_end_map(report *p)
{
    size_t n_segs, n = 0;
    const koila_segment *segs = koila_snapshot_segments(p->s, p->device, &n_segs);
    for (size_t i = 0; i < n_segs; i++)
        n += segs[i].n_blocks;
    drawn_block *end = calloc(n + 1, sizeof *end);
    n = 0;
    for (size_t i = 0; end && i < n_segs; i++)
        for (size_t k = 0; k < segs[i].n_blocks; k++)
            end[n++] = (drawn_block){ segs[i].blocks[k].addr, segs[i].blocks[k].size,
                                      segs[i].blocks[k].state, (uint32_t)i };
    if (end)
        put_map(p, end, n, "segments at the end");
    free(end);
}

/* Notes on the events of the replay. */
static void put_event_notes(report *p)
{
    FILE *f = p->f;
    const koila_replay_result *r = &p->r;
    char a[32];
    if (r->n_ooms)
        fprintf(f, "<li>%s requests ran out of memory, the first at event %llu.\n",
                grouped(r->n_ooms, a), (unsigned long long)r->first_oom_entry);
    if (r->n_retries + r->n_retry_or_empty)
        fprintf(f,
                "<li>%s times the cache was given back to make room (or empty_cache was called): "
                "each stalls the device.\n",
                grouped(r->n_retries + r->n_retry_or_empty, a));
    if (r->n_cap_set)
        fprintf(f, "<li>%s requests failed at a memory cap.\n", grouped(r->n_cap_set, a));
    if (r->n_expandable_switched)
        fprintf(f, "<li>Expandable segments were switched %s times.\n",
                grouped(r->n_expandable_switched, a));
    if (r->n_collected)
        fprintf(f, "<li>Garbage collection ran %s times.\n", grouped(r->n_collected, a));
    if (r->n_empty)
        fprintf(f, "<li>empty_cache was called %s times.\n", grouped(r->n_empty, a));
    if (r->n_start_blocks)
        fprintf(f, "<li>%s blocks were live before the first event; of %llu the size is assumed.\n",
                grouped(r->n_start_blocks, a), (unsigned long long)r->n_assumed);
    if (r->reservations_inferred)
        fputs("<li>Where expandable reservations begin and end is inferred.\n", f);
}

/* Notes on gaps in the file and the rules. */
static void put_other_notes(report *p)
{
    FILE *f = p->f;
    const koila_replay_result *r = &p->r;
    char a[32];
    fprintf(f, "<li>The rules of torch %u.%u are %s.\n", r->torch_version / 100,
            r->torch_version % 100, koila_cache_verified_words(r->verified));
    if (p->info.n_unknown_keys)
        fprintf(f,
                "<li>%s keys of the file are not known to this version of koila and were passed "
                "over.\n",
                grouped(p->info.n_unknown_keys, a));
    if (p->info.has_settings && p->info.conf[0]) {
        fputs("<li>PYTORCH_CUDA_ALLOC_CONF: <code>", f);
        put_text(f, p->info.conf);
        fputs("</code>\n", f);
    }
    if (p->limit && p->r.peak_reserved > p->limit)
        fputs("<li>The peak of reserved bytes is above the limit given: it would not fit.\n", f);
}

static void put_page(report *p)
{
    FILE *f = p->f;
    put_head(p);
    put_curves(p);
    fputs("<h2>Where the bytes went at the peak</h2>\n", f);
    if (p->r.peak_added_up)
        fputs("<p class=dim>Only what was reserved: the replay stopped before the peak.</p>\n", f);
    fputs("<table>\n", f);
    put_lost(p);
    fputs("</table>\n", f);
    put_largest(p);
    if (p->n && p->exact) {
        fputs("<h2>Segments at the peak of reserved bytes</h2>\n", f);
        put_map(p, p->blocks, p->n_blocks, "segments at the peak");
    }
    fputs("<h2>Segments at the end</h2>\n", f);
    put_end_map(p);
    fputs("<h2>Notes</h2>\n<ul>\n", f);
    put_event_notes(p);
    put_other_notes(p);
    fprintf(f, "</ul>\n<p class=dim>koila %s</p></body></html>\n", koila_version());
}

/* Finds how much this process can reserve at most, as far as the options tell. */
static void find_limit(report *p)
{
    if (!p->memory)
        return;
    p->limit = p->memory > p->outside ? p->memory - p->outside : 1;
    if (p->conf.memory_fraction > 0.0 &&
        !koila_cache_config_fraction(&p->conf, p->conf.memory_fraction, p->memory, p->memory) &&
        p->conf.cap_bytes && p->conf.cap_bytes < p->limit)
        p->limit = p->conf.cap_bytes;
}

/* Passes 2 to 5. */
static koila_status walk_trace(report *p, koila_error *e)
{
    const uint64_t at_allocated = p->r.peak_allocated_entry;
    bool again;
    progress("drawing", p->path, 2 * p->n);
    koila_status status = koila_timeline(p->s, p->device, &p->conf, see_first, p, UINT64_MAX, NULL,
                                         NULL, &p->exact, e);
    if (!status)
        status = koila_timeline(p->s, p->device, &p->conf, NULL, NULL, at_allocated, see_before, p,
                                &again, e);
    keep_largest(p);
    if (!status)
        status = koila_timeline(p->s, p->device, &p->conf, see_again, p, UINT64_MAX, NULL, NULL,
                                &again, e);
    find_stacks(p);
    if (!status)
        status = koila_timeline(p->s, p->device, &p->conf, NULL, NULL, p->r.peak_entry, see_block,
                                p, &again, e);
    return status;
}

/* Without a trace: what is live at the end. */
static void look_at_end(report *p)
{
    size_t n_segs;
    const koila_segment *segs = koila_snapshot_segments(p->s, p->device, &n_segs);
    for (size_t i = 0; i < n_segs; i++)
        for (size_t k = 0; k < segs[i].n_blocks; k++)
            (void)see_before(p, &segs[i].blocks[k]);
    keep_largest(p);
    find_stacks(p);
}

static int out_of_memory(const report *p)
{
    return complain(p->path, NULL, "the host is out of memory");
}

/* The page is written as a whole into memory first: it is small, and put_frames wants to know its
 * size. */
static int write_page(report *p, const char *out)
{
    char *page = NULL, *temporary = NULL;
    size_t n = 0;
    p->f = open_memstream(&page, &n);
    if (!p->f)
        return out_of_memory(p);
    put_page(p);
    const bool whole = !ferror(p->f);
    if (fclose(p->f) || !whole) {
        free(page);
        return out_of_memory(p);
    }
    const bool to_stdout = !strcmp(out, "-");
    FILE *to = to_stdout ? stdout : create_beside(out, &temporary);
    if (to)
        fwrite(page, 1, n, to);
    free(page);
    if (!to)
        return EXIT_BAD;
    return to_stdout ? EXIT_OK : finish_file(to, temporary, out);
}

static int make_report(report *p, const char *out)
{
    koila_error e = KOILA_ERROR_INIT;
    koila_snapshot_get_info(p->s, &p->info);
    p->n = koila_snapshot_n_entries(p->s, p->device);
    find_limit(p);
    p->conf.cap_bytes = 0;
    progress("replaying", p->path, 0);
    koila_status status = koila_replay(p->s, p->device, &p->conf, &p->r, &e);
    if (!status && p->n)
        status = walk_trace(p, &e);
    else if (!status)
        look_at_end(p);
    progress(NULL, NULL, 0);
    if (status)
        return complain_about(p->path, &e, NULL);
    if (p->failed || p->live.failed)
        return out_of_memory(p);
    return write_page(p, out);
}

typedef struct report_options {
    snapshot_options in;
    const char *out;
    uint64_t top, memory, outside;
} report_options;

/* A missing value is EXIT_OK here, and a->bad says so. */
static int report_option(report_options *o, args *a, const char *name)
{
    int code = EXIT_OK;
    if (snapshot_option(&o->in, a, name, &code))
        return code;
    if (!strcmp(name, "-o") || !strcmp(name, "--output")) {
        o->out = args_value(a);
    } else if (!strcmp(name, "--top")) {
        if (args_value(a) && !parse_count(a->value, MAX_TOP, &o->top))
            code = usage_of("report", "--top %s: a number up to %d", a->value, MAX_TOP);
    } else if (!strcmp(name, "--memory")) {
        code = args_size(a, name, 1, "24GiB or 24GB", &o->memory);
    } else if (!strcmp(name, "--outside")) {
        code = args_size(a, name, 0, "500MiB or 500MB", &o->outside);
    } else {
        code = no_option("report", name);
    }
    return code;
}

static int report_snapshot(report_options *o)
{
    report *p = calloc(1, sizeof *p);
    if (!p)
        return complain(o->in.path, NULL, "the host is out of memory");
    koila_snapshot *s = open_snapshot("report", &o->in, &p->conf);
    int code = EXIT_BAD;
    if (s) {
        p->s = s;
        p->device = (uint32_t)o->in.device;
        p->path = o->in.path;
        p->top = o->top;
        p->memory = o->memory;
        p->outside = o->outside;
        code = make_report(p, o->out);
    }
    free(p->live.at);
    free(p->largest);
    free(p->blocks);
    free(p);
    koila_snapshot_free(s);
    return code;
}

int cmd_report(int argc, char **argv)
{
    report_options o = { .in = SNAPSHOT_OPTIONS, .top = 30 };
    args a = { .verb = "report", .n = argc, .v = argv };
    for (const char *name; args_next(&a, &name);) {
        if (!name) {
            if (o.in.path)
                return usage_of("report", "one snapshot at a time");
            o.in.path = a.positional;
            continue;
        }
        if (!strcmp(name, "--help"))
            return cmd_help(1, (char *[]){ (char *)"report" });
        const int code = report_option(&o, &a, name);
        if (code)
            return code;
        if (a.bad)
            return usage_of("report", "%s needs a value", name);
    }
    if (!o.in.path)
        return usage_of("report", "which snapshot?");
    if (!o.out)
        return usage_of("report", "where to? say -o report.html");
    return report_snapshot(&o);
}
