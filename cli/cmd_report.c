/* cmd_report.c — koila report: a memory snapshot as one page that needs no network and no script.
 *
 * The trace may have any length, the page may not: time is cut into N_COLUMNS columns, and each keeps the least and the most of every
 * curve, so a peak of one event is still drawn. Maps merge what is thinner than a pixel. Every text from the file goes through put_html().
 *
 *   pass 1  replay         verdict, where the peaks are, what was lost
 *   pass 2  timeline       the columns; what is live, until the peak of allocated bytes
 *   pass 3  timeline       when the largest of those were freed; every block at the peak of reserved bytes
 */
#include "cmd.h"

enum { N_COLUMNS = 1000, N_BANDS = 12, MAX_RECTS = 12000, MAX_TOP = 200, MAX_STEPS = 400 };

/* blue, orange, green, sky, vermilion, purple: told apart with any colour vision (Okabe and Ito) */
static const char *const band_colours[] = { "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7" };

typedef struct column {
    uint64_t low[3], high[3]; /* allocated, active, reserved */
    bool any;
} column;

typedef struct live_one {
    uint64_t addr, size, born, died;
    uint32_t stack;
    bool used;
} live_one;

/* What is allocated: open addressing by address. */
typedef struct live_table {
    live_one *at;
    size_t n, cap;
    bool failed;
} live_table;

static live_one *live_find(live_table *t, uint64_t addr)
{
    if (!t->cap) return NULL;
    for (size_t h = (size_t)((addr >> 9) * 0x9E3779B97F4A7C15u >> 20) & (t->cap - 1);; h = (h + 1) & (t->cap - 1)) {
        if (!t->at[h].addr) return NULL;
        if (t->at[h].addr == addr) return &t->at[h];
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
        live_table bigger = { calloc(t->cap ? t->cap * 2 : 1024, sizeof(live_one)), 0, t->cap ? t->cap * 2 : 1024, false };
        if (!bigger.at) {
            t->failed = true;
            return;
        }
        for (size_t i = 0; i < t->cap; i++)
            if (t->at[i].addr && t->at[i].used) live_put(&bigger, &t->at[i]); /* freed ones stay behind */
        free(t->at);
        *t = bigger;
    }
    size_t h = (size_t)((x->addr >> 9) * 0x9E3779B97F4A7C15u >> 20) & (t->cap - 1);
    while (t->at[h].addr) h = (h + 1) & (t->cap - 1);
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
    koila_snapshot_info info;
    koila_cache_config conf;
    koila_replay_result r;
    uint64_t n, top;
    column columns[N_COLUMNS];
    live_table live;
    live_one *largest; /* at the peak of allocated, by size */
    size_t n_largest;
    drawn_block *blocks;
    size_t n_blocks, blocks_cap;
    bool exact, failed;
    FILE *f;
} report;

static size_t column_of(const report *p, uint64_t entry) { return p->n ? (size_t)(entry * N_COLUMNS / p->n) : 0; }

static void count_live(report *p, const koila_moment *m)
{
    live_one x = { m->addr, m->size, m->entry, UINT64_MAX, m->stack, true };
    if (m->kind == KOILA_EVENT_ALLOC && m->addr) live_put(&p->live, &x);
    if (m->kind == KOILA_EVENT_FREE_REQUESTED) {
        live_one *old = live_find(&p->live, m->addr);
        if (old) old->used = false;
    }
}

static int by_size(const void *a, const void *b)
{
    const live_one *x = a, *y = b;
    return x->size != y->size ? (x->size < y->size ? 1 : -1) : x->addr < y->addr ? -1 : x->addr > y->addr;
}

static void keep_largest(report *p)
{
    size_t n = 0;
    free(p->largest);
    p->largest = calloc(p->live.n + 1, sizeof *p->largest);
    for (size_t i = 0; p->largest && i < p->live.cap; i++)
        if (p->live.at[i].addr && p->live.at[i].used) p->largest[n++] = p->live.at[i];
    p->failed |= !p->largest;
    if (p->largest) qsort(p->largest, n, sizeof *p->largest, by_size);
    p->n_largest = n < MAX_TOP ? n : MAX_TOP;
}

static void see_first(void *user, const koila_moment *m)
{
    report *p = user;
    column *c = &p->columns[column_of(p, m->entry)];
    const uint64_t v[3] = { m->allocated, m->active, m->reserved };
    for (int k = 0; k < 3; k++) {
        if (!c->any || v[k] < c->low[k]) c->low[k] = v[k];
        if (!c->any || v[k] > c->high[k]) c->high[k] = v[k];
    }
    c->any = true;
    if (m->entry > p->r.peak_allocated_entry) return;
    count_live(p, m);
    if (m->entry == p->r.peak_allocated_entry) keep_largest(p);
}

static void see_again(void *user, const koila_moment *m)
{
    report *p = user;
    if (m->kind != KOILA_EVENT_FREE_REQUESTED || m->entry <= p->r.peak_allocated_entry) return;
    for (size_t i = 0; i < p->n_largest && i < N_BANDS; i++)
        if (p->largest[i].addr == m->addr && p->largest[i].died == UINT64_MAX) p->largest[i].died = m->entry;
}

static bool see_block(void *user, const koila_block *b)
{
    report *p = user;
    if (b->state == KOILA_BLOCK_UNMAPPED) return true;
    if (p->n_blocks == p->blocks_cap) {
        p->blocks_cap = p->blocks_cap ? p->blocks_cap * 2 : 1024;
        drawn_block *q = realloc(p->blocks, p->blocks_cap * sizeof *q);
        if (!q) return p->failed = true, false;
        p->blocks = q;
    }
    p->blocks[p->n_blocks++] = (drawn_block){ b->addr, b->size, b->state, b->segment };
    return true;
}

/* ---- the page */

static const char *const style =
    ":root{color-scheme:light dark;--bg:#fff;--fg:#1a1a1a;--dim:#5c5c5c;--line:#d4d4d4;--used:#0072b2;--wait:#e69f00;--free:#dcdcdc;--res:#1a1a1a;--act:#d55e00}"
    "@media(prefers-color-scheme:dark){:root{--bg:#16181c;--fg:#e8e8e8;--dim:#a0a4ab;--line:#3a3e45;--used:#3d9bd6;--wait:#e69f00;--free:#3a3e45;--res:#e8e8e8;--act:#ff8c42}}"
    "body{margin:2rem auto;max-width:1100px;padding:0 1rem;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}"
    "h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2.2rem}svg{width:100%;height:auto;display:block}text{fill:var(--dim);font:11px system-ui,sans-serif}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}"
    "td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}code,pre{font:13px/1.4 ui-monospace,monospace}pre{margin:.3rem 0;white-space:pre-wrap}"
    "summary{cursor:pointer}.dim{color:var(--dim)}.key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em;vertical-align:-.05em}"
    ".used{fill:var(--used)}.wait{fill:var(--wait)}.free{fill:var(--free)}";

static void put_size(FILE *f, uint64_t n)
{
    char text[32];
    fputs(gib(n, text), f);
}

static void put_frames(report *p, uint32_t stack)
{
    koila_frame f;
    bool any = false;
    for (uint32_t i = 0; i < 60 && koila_snapshot_frame(p->s, stack, i, &f); i++) {
        fputs(any ? "\n" : "<pre>", p->f);
        any = true;
        put_html(p->f, f.filename);
        fprintf(p->f, ":%u in ", f.line);
        put_html(p->f, f.name);
    }
    fputs(any ? "</pre>" : "<span class=dim>no stack recorded</span>", p->f);
}

static void put_line_of(report *p, uint32_t stack)
{
    koila_frame f, first;
    bool any = koila_snapshot_frame(p->s, stack, 0, &first);
    for (uint32_t i = 0; koila_snapshot_frame(p->s, stack, i, &f); i++) {
        const char *dot = strrchr(f.filename, '.');
        if (!dot || strcmp(dot, ".py") || strstr(f.filename, "/torch/") || strstr(f.filename, "site-packages")) continue;
        first = f;
        break;
    }
    if (!any) {
        fputs("<span class=dim>unknown</span>", p->f);
        return;
    }
    fputs("<code>", p->f);
    put_html(p->f, first.filename);
    fprintf(p->f, ":%u</code> in ", first.line);
    put_html(p->f, first.name);
}

enum { CHART_W = 1000, CHART_H = 300, LEFT_EDGE = 70 };

static double y_of(uint64_t bytes, uint64_t most) { return CHART_H - (double)bytes / (double)most * (CHART_H - 10); }
static double x_of(const report *p, uint64_t entry) { return LEFT_EDGE + (double)entry / (double)(p->n ? p->n : 1) * (CHART_W - LEFT_EDGE); }

/* The band between a curve's least and most, column by column: forward along the most, back along the least. */
static void put_curve(report *p, int k, uint64_t most, const char *colour, const char *name)
{
    const double step = (double)(CHART_W - LEFT_EDGE) / N_COLUMNS;
    fprintf(p->f, "<path fill=\"%s\" fill-opacity=\".35\" stroke=\"%s\" stroke-width=\"1\" d=\"", colour, colour);
    char move = 'M';
    for (size_t i = 0; i < N_COLUMNS; i++) {
        if (!p->columns[i].any) continue;
        fprintf(p->f, "%c%.1f %.1f", move, LEFT_EDGE + step * (double)i, y_of(p->columns[i].high[k], most));
        move = 'L';
    }
    for (size_t i = N_COLUMNS; i-- > 0;)
        if (p->columns[i].any) fprintf(p->f, "L%.1f %.1f", LEFT_EDGE + step * (double)i, y_of(p->columns[i].low[k], most));
    fprintf(p->f, "%s\"><title>%s</title></path>\n", move == 'L' ? "Z" : "", name);
}

static void put_steps(report *p)
{
    koila_annotation a;
    koila_entry x;
    uint64_t at = 0;
    int n = 0;
    for (uint64_t i = 0; n < MAX_STEPS && koila_snapshot_annotation(p->s, i, &a); i++) {
        if (strcmp(a.stage, "START") || a.device != p->device) continue;
        while (koila_snapshot_entry(p->s, p->device, at, &x) && x.time_us < a.time_us) at++;
        const double left = x_of(p, at);
        fprintf(p->f, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%d\" stroke=\"var(--line)\"><title>", left, left, CHART_H);
        put_html(p->f, a.name);
        fputs("</title></line>\n", p->f);
        n++;
    }
}

static void put_chart(report *p)
{
    FILE *f = p->f;
    uint64_t most = 1, band = 0;
    for (size_t i = 0; i < N_COLUMNS; i++)
        if (p->columns[i].any && p->columns[i].high[2] > most) most = p->columns[i].high[2];
    for (size_t i = 0; i < N_COLUMNS; i++)
        if (p->columns[i].any && p->columns[i].high[1] > most) most = p->columns[i].high[1];
    fprintf(f, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"memory over time\">\n", CHART_W, CHART_H + 24);
    for (int i = 0; i <= 4; i++) {
        const uint64_t v = most / 4 * (uint64_t)i;
        const double y = y_of(v, most);
        fprintf(f, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"var(--line)\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">", LEFT_EDGE, CHART_W, y, y, LEFT_EDGE - 6, y + 4);
        put_size(f, v);
        fputs("</text>\n", f);
    }
    put_steps(p);
    for (size_t i = 0; i < p->n_largest && i < N_BANDS; i++) { /* the largest at the peak, stacked: they are all live there, so nothing overlaps */
        const live_one *x = &p->largest[i];
        const double left = x_of(p, x->born), right = x_of(p, x->died == UINT64_MAX ? p->n : x->died), top = y_of(band + x->size, most);
        fprintf(f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\" fill-opacity=\".8\"><title>", left, top, right - left > 0.5 ? right - left : 0.5,
                y_of(band, most) - top, band_colours[i % (sizeof band_colours / sizeof *band_colours)]);
        put_size(f, x->size);
        fputs(" ", f);
        koila_frame frame;
        if (koila_snapshot_frame(p->s, x->stack, 0, &frame)) {
            put_html(f, frame.filename);
            fprintf(f, ":%u", frame.line);
        }
        fputs("</title></rect>\n", f);
        band += x->size;
    }
    put_curve(p, 0, most, "var(--used)", "allocated");
    put_curve(p, 1, most, "var(--act)", "active");
    put_curve(p, 2, most, "var(--res)", "reserved");
    if (p->r.n_ooms && p->r.first_oom_entry != UINT64_MAX)
        fprintf(f, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%d\" stroke=\"#d55e00\" stroke-dasharray=\"4 3\"><title>out of memory</title></line>\n", x_of(p, p->r.first_oom_entry),
                x_of(p, p->r.first_oom_entry), CHART_H);
    fprintf(f, "<text x=\"%d\" y=\"%d\">event 0</text><text x=\"%d\" y=\"%d\" text-anchor=\"end\">event %llu</text></svg>\n", LEFT_EDGE, CHART_H + 18, CHART_W, CHART_H + 18,
            (unsigned long long)p->n);
    fputs("<p class=dim><span class=key style=\"background:var(--res)\"></span>reserved <span class=key style=\"background:var(--act)\"></span>active "
          "<span class=key style=\"background:var(--used)\"></span>allocated; solid boxes: the largest allocations at the peak, from birth to death. "
          "Each column shows least and most, so no peak is lost.</p>\n", f);
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
        for (; end < n && b[end].addr == b[i].addr + size && b[end].segment == b[i].segment; end++) size += b[end].size;
        if (size > widest) widest = size;
        n_rows++;
        i = end;
    }
    const size_t shown = n_rows < 400 ? n_rows : 400;
    if (!n_rows) {
        fputs("<p class=dim>nothing is reserved</p>\n", f);
        return;
    }
    fprintf(f, "<svg viewBox=\"0 0 %d %zu\" role=\"img\" aria-label=\"%s\">\n", CHART_W, shown * 8 + 2, label);
    const double scale = (double)CHART_W / (double)widest;
    for (size_t i = 0; i < n && row < shown; row++) {
        size_t end = i;
        uint64_t size = 0, run = 0;
        for (; end < n && b[end].addr == b[i].addr + size && b[end].segment == b[i].segment; end++) size += b[end].size;
        double x = 0;
        for (size_t k = i; k < end && rects < MAX_RECTS; k++) {
            run += b[k].size;
            const double width = (double)run * scale;
            if (width < 0.8 && k + 1 < end) continue; /* too thin to see */
            static const char *const classes[] = { "free", "used", "wait", "free" };
            fprintf(f, "<rect class=\"%s\" x=\"%.1f\" y=\"%zu\" width=\"%.1f\" height=\"6\"/>", classes[b[k].state], x, row * 8 + 1, width > 0.3 ? width - 0.2 : 0.3);
            x += width;
            run = 0;
            rects++;
        }
        i = end;
    }
    fputs("</svg>\n", f);
    fprintf(f, "<p class=dim>%zu segments%s. <span class=key style=\"background:var(--used)\"></span>allocated <span class=key style=\"background:var(--wait)\"></span>waiting for another "
               "stream <span class=key style=\"background:var(--free)\"></span>free; the longest is ", n_rows, shown < n_rows || rects >= MAX_RECTS ? ", the first of them shown" : "");
    put_size(f, widest);
    fputs(".</p>\n", f);
}

static void put_row(report *p, const char *name, uint64_t n, const char *meaning)
{
    fprintf(p->f, "<tr><th>%s<td class=n>", name);
    put_size(p->f, n);
    fprintf(p->f, "<td class=dim>%s</tr>\n", meaning);
}

static void put_page(report *p)
{
    static const char *const verdicts[] = { "exact", "exact, with external decisions", "differs", "not checkable", "no trace" };
    FILE *f = p->f;
    const koila_replay_result *r = &p->r;
    char a[32];
    fputs("<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content=\"width=device-width,initial-scale=1\">"
          "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>", f);
    put_html(f, p->path);
    fprintf(f, "</title><style>%s</style></head><body>\n<h1>", style);
    put_html(f, p->path);
    fprintf(f, "</h1>\n<p>device %u, %s events, rules of torch %u.%u, expandable segments %s. Replay: <b>%s</b>", p->device, grouped(p->n, a), r->torch_version / 100, r->torch_version % 100,
            p->conf.expandable ? "on" : "off", verdicts[r->verdict]);
    if (r->reason[0]) fputs(", ", f), put_html(f, r->reason);
    fputs(".</p>\n<h2>Memory over time</h2>\n", f);
    if (p->n) put_chart(p);
    else fputs("<p class=dim>No trace was recorded.</p>\n", f);
    if (!p->exact && p->n) fputs("<p class=dim>The replay stopped early; from there on the curves add up what the trace says.</p>\n", f);

    fputs("<h2>Where the bytes went at the peak</h2>\n<table>\n", f);
    put_row(p, "reserved", r->peak_reserved, "taken from the device");
    put_row(p, "requested", r->at_peak_requested, "what the program asked for and holds");
    put_row(p, "rounding", r->lost_rounding, "requests are rounded to 512 bytes or by roundup_power2_divisions");
    put_row(p, "unsplit", r->lost_unsplit, "blocks handed out larger than asked, as the rest was too small to split");
    put_row(p, "waiting", r->waiting, "freed, but another stream may still use them (record_stream)");
    put_row(p, "free but pinned", r->lost_pinned, "free parts of segments that something still lives in: fragmentation");
    put_row(p, "whole free segments", r->lost_whole, "could go back to the device with empty_cache");
    fputs("</table>\n<h2>Largest live allocations at the peak of allocated bytes</h2>\n", f);
    fputs("<table><tr><th class=n>size<th>made by<th class=n>at event</tr>\n", f);
    for (size_t i = 0; i < p->n_largest && i < p->top; i++) {
        fputs("<tr><td class=n>", f);
        put_size(f, p->largest[i].size);
        fputs("<td><details><summary>", f);
        put_line_of(p, p->largest[i].stack);
        fputs("</summary>", f);
        put_frames(p, p->largest[i].stack);
        fprintf(f, "</details><td class=n>%s</tr>\n", grouped(p->largest[i].born, a));
    }
    fputs("</table>\n", f);
    if (!p->n_largest) fputs("<p class=dim>None was recorded being made.</p>\n", f);

    if (p->n && p->exact) {
        fputs("<h2>Segments at the peak of reserved bytes</h2>\n", f);
        put_map(p, p->blocks, p->n_blocks, "segments at the peak");
    }
    fputs("<h2>Segments at the end</h2>\n", f);
    size_t n_segs, n = 0;
    const koila_segment *segs = koila_snapshot_segments(p->s, p->device, &n_segs);
    for (size_t i = 0; i < n_segs; i++) n += segs[i].n_blocks;
    drawn_block *end = calloc(n + 1, sizeof *end);
    n = 0;
    for (size_t i = 0; end && i < n_segs; i++)
        for (size_t k = 0; k < segs[i].n_blocks; k++) end[n++] = (drawn_block){ segs[i].blocks[k].addr, segs[i].blocks[k].size, segs[i].blocks[k].state, (uint32_t)i };
    if (end) put_map(p, end, n, "segments at the end");
    free(end);

    fputs("<h2>Notes</h2>\n<ul>\n", f);
    if (r->n_ooms) fprintf(f, "<li>%s requests ran out of memory, the first at event %llu.\n", grouped(r->n_ooms, a), (unsigned long long)r->first_oom_entry);
    if (r->n_retries + r->n_retry_or_empty) fprintf(f, "<li>%s times the cache was given back to make room (or empty_cache was called): each stalls the device.\n", grouped(r->n_retries + r->n_retry_or_empty, a));
    if (r->n_empty) fprintf(f, "<li>empty_cache was called %s times.\n", grouped(r->n_empty, a));
    if (r->n_start_blocks) fprintf(f, "<li>%s blocks were live before the first event; of %llu the size is assumed.\n", grouped(r->n_start_blocks, a), (unsigned long long)r->n_assumed);
    if (r->reservations_inferred) fputs("<li>Where expandable reservations begin and end is inferred.\n", f);
    if (strcmp(r->verified, "recording")) fprintf(f, "<li>The rules of torch %u.%u are not yet proved on a recording of that version.\n", r->torch_version / 100, r->torch_version % 100);
    if (p->info.n_unknown_keys) fprintf(f, "<li>%s keys of the file are not known to this version of koila and were passed over.\n", grouped(p->info.n_unknown_keys, a));
    if (p->info.has_settings && p->info.conf[0]) {
        fputs("<li>PYTORCH_CUDA_ALLOC_CONF: <code>", f);
        put_html(f, p->info.conf);
        fputs("</code>\n", f);
    }
    fprintf(f, "</ul>\n<p class=dim>koila %s</p></body></html>\n", koila_version());
}

static int make_report(report *p, const char *out, const char *torch)
{
    koila_error e = KOILA_ERROR_INIT;
    koila_snapshot_get_info(p->s, &p->info);
    if (p->device >= p->info.n_devices) return complain(p->path, NULL, "no device %u: the snapshot has %u", p->device, p->info.n_devices);
    koila_status status = koila_snapshot_config(p->s, p->device, torch, &p->conf, &e);
    if (status == KOILA_BAD_ARGUMENT || (status && !e.text[0])) return usage_of("report", "--torch %s: say a version, such as 2.10", torch);
    if (status) return complain_about(p->path, &e);
    p->n = koila_snapshot_n_entries(p->s, p->device);
    if (koila_replay(p->s, p->device, &p->conf, &p->r, &e)) return complain_about(p->path, &e);
    if (p->n) {
        bool again;
        /* live before the first event: from the end state, if still there */
        status = koila_timeline(p->s, p->device, &p->conf, see_first, p, UINT64_MAX, NULL, NULL, &p->exact, &e);
        if (!status) status = koila_timeline(p->s, p->device, &p->conf, see_again, p, UINT64_MAX, NULL, NULL, &again, &e);
        if (!status) status = koila_timeline(p->s, p->device, &p->conf, NULL, NULL, p->r.peak_entry, see_block, p, &again, &e);
        if (status) return complain_about(p->path, &e);
    } else {
        size_t n_segs;
        const koila_segment *segs = koila_snapshot_segments(p->s, p->device, &n_segs);
        for (size_t i = 0; i < n_segs; i++)
            for (size_t k = 0; k < segs[i].n_blocks; k++) {
                const koila_block *b = &segs[i].blocks[k];
                live_one x = { b->addr, b->requested ? b->requested : b->size, 0, UINT64_MAX, koila_snapshot_block_stack(p->s, b), true };
                if (b->state == KOILA_BLOCK_USED) live_put(&p->live, &x);
            }
        keep_largest(p);
    }
    if (p->failed || p->live.failed) return complain(p->path, NULL, "the host is out of memory");
    char *temporary = NULL;
    if (!strcmp(out, "-")) {
        p->f = stdout;
        put_page(p);
        return EXIT_OK;
    }
    if (!(p->f = create_beside(out, &temporary))) return EXIT_BAD;
    put_page(p);
    return finish_file(p->f, temporary, out);
}

int cmd_report(int argc, char **argv)
{
    const char *path = NULL, *out = NULL, *torch = NULL;
    uint64_t device = 0, top = 30;
    args a = { .verb = "report", .n = argc, .v = argv };
    for (const char *name; args_next(&a, &name);) {
        if (!name) {
            if (path) return usage_of("report", "one snapshot at a time");
            path = a.positional;
        } else if (!strcmp(name, "-o") || !strcmp(name, "--output")) out = args_value(&a);
        else if (!strcmp(name, "--torch")) torch = args_value(&a);
        else if (!strcmp(name, "--help")) return cmd_help(1, (char *[]){ (char *)"report" });
        else if (!strcmp(name, "--top")) {
            if (args_value(&a) && !parse_count(a.value, MAX_TOP, &top)) return usage_of("report", "--top %s: a number up to %d", a.value, MAX_TOP);
        } else if (!strcmp(name, "--device")) {
            if (args_value(&a) && !parse_count(a.value, 1023, &device)) return usage_of("report", "--device %s: a number from 0 to 1023", a.value);
        } else {
            return usage_of("report", "no option %s", name);
        }
        if (a.bad) return usage_of("report", "%s needs a value", name);
    }
    if (!path) return usage_of("report", "which snapshot?");
    if (!out) return usage_of("report", "where to? say -o report.html");
    koila_error e = KOILA_ERROR_INIT;
    koila_snapshot *s = NULL;
    if (read_snapshot(path, &s, &e)) return complain_about(path, &e);
    report *p = calloc(1, sizeof *p);
    int code = EXIT_BAD;
    if (p) {
        p->s = s;
        p->device = (uint32_t)device;
        p->path = path;
        p->top = top;
        code = make_report(p, out, torch);
        free(p->live.at);
        free(p->largest);
        free(p->blocks);
        free(p);
    } else {
        complain(path, NULL, "the host is out of memory");
    }
    koila_snapshot_free(s);
    return code;
}
