/* workspaces.c — learns the workspaces of operators: bytes that they use beyond their results, such
 * as a copy of an operand in another layout, or an unfolded image. No rule predicts them.
 *
 * For each signature a few row counts and their bytes are kept. A workspace has a fixed part (a
 * weight in another layout) and a part that grows with the rows, so it is interpolated linearly in
 * between, and beyond them. WHOLE: outside a loop, or all rows in one slice.
 *
 * Slices of about as many rows do not always use as much: each slice of a causal attention reads
 * more keys than the one before. Of 8,192 tokens the slices are 2,731, 2,731 and 2,730, of which
 * the last uses the most. That says nothing of a row: beyond them, near row counts are one place on
 * the line, with the most bytes of them.
 *
 * One call may be cut along its rows in one step, and along tokens in the next. One row of two is
 * half of it, one token of 192 next to nothing, so each batch size has entries of its own, the last
 * few of them. A size that was never measured is taken from another by its share of the whole.
 *
 * What is kept is the most of the last runs, not the most ever: one sample that was too large must
 * not make plans worse for good. A run is one plan, executed.
 *
 *   seen again, always with less    after HEALS_AFTER runs the most of those counts
 *   never seen again, because the   the signature was measured at other rows in so many runs: what
 *   plans avoid those rows          was seen once only is doubted, that is, left out; measured
 *                                   alike once more, it is kept for good
 *   no plan fits any more           so many times for one step: all that was seen once is doubted
 *   no plan fits any more, and      at once: bounds are left out, and of these signatures no more
 *   some numbers are bounds alone   are taken. A step that ran must not end by what it may have
 *                                   used
 *
 * The backward of a module that runs as it is frees what waited for it while it makes gradients, so
 * that less is there than both. How much less is known for the measured row counts alone, and is
 * the less of the last two samples.
 */
#include "run/run.h"

#include <math.h>

#include "base/vec.h"

enum {
    N_SEEN = 6,         /* row counts kept for a signature and batch size */
    MOST_BATCHES = 3,   /* sizes kept for a signature */
    SIGS_AHEAD = 64,    /* room for signatures still to come */
    NOISE_BYTES = 4096, /* smaller changes, or less than one part in NOISE_SHARE, are ignored */
    NOISE_SHARE = 50,
    HEALS_AFTER = 8,
    NEAR_SHARE = 8, /* row counts are near that differ by less than that part of the one */
};
#define WHOLE INT64_MAX

typedef struct seen {
    int64_t rows;
    uint64_t bytes;
    uint64_t lately;    /* the most since a sample was as large as `bytes` */
    uint32_t n_less;    /* runs since then */
    uint64_t spared[2]; /* koila__spared_of(): of the last two samples */
    uint32_t run;       /* of the signature, in which it was seen last */
    bool is_sure;       /* measured alike more than once, or by a probe */
    bool was_spared;    /* there are samples of it */
    bool is_bound;      /* it uses no more than that, maybe less */
} seen;
typedef struct workspace {
    seen at[N_SEEN]; /* ascending rows */
    seen doubted;    /* the last one that was left out; rows 0: none */
    int64_t batch;   /* 0: not known */
    uint32_t n;
    bool takes_no_bounds;   /* no plan fitted with them */
    uint32_t run;           /* number of runs in which it was measured */
    uint64_t when;          /* the last of them, on `learned.clock` */
    struct workspace *next; /* the same signature at another batch size; this one owns it */
} workspace;
static struct {
    workspace *at; /* [n] by signature */
    uint32_t n;
    uint64_t generation;
    uint64_t misfit;    /* the key of the step for which no plan fitted last */
    uint32_t n_misfits; /* so many times in a row */
    uint64_t clock;     /* number of runs */
} learned;

/* Makes room for signature `sig`. False: no memory; then predictions are only less exact. */
static bool make_room(koila_sig sig)
{
    if (sig < learned.n)
        return true;
    const uint32_t n = koila_table_n_sigs(koila__table) + SIGS_AHEAD;
    workspace *grown = PyMem_RawRealloc(learned.at, n * sizeof *grown);
    if (!grown)
        return false;
    koila_assert(sig < n);
    memset(grown + learned.n, 0, (n - learned.n) * sizeof *grown);
    learned.at = grown;
    learned.n = n;
    return true;
}

static void forget(workspace *w)
{
    for (workspace *next = w->next, *after; next; next = after) {
        after = next->next;
        PyMem_RawFree(next);
    }
    *w = (workspace){ 0 };
}

/* A module that runs as it is (koila::opaque, ...) is another signature once other bytes are known
 * to wait for its backward, and uses inside what it used before. Its numbers are kept with the
 * signature that was asked for last. */
typedef struct module_call {
    koila_op op;
    int64_t id;     /* of the call: all sizes but the number of rows */
    koila_sig home; /* whose entry in `learned` has the numbers */
} module_call;
static VEC(module_call) modules;

static bool module_call_of(koila_sig sig, module_call *out)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    if (!s || !s->n_pos || !(koila_op_facts(koila__table, s->op) & KOILA_FACT_OPAQUE_CALL))
        return false;
    const koila_arg *id = &s->tokens[s->start[s->n_pos - 1]];
    *out = (module_call){ .op = s->op, .id = id->u.i, .home = sig };
    return id->kind == KOILA_ARG_INT;
}

/* Brings what was learned of the module that signature sig calls to sig. True: nothing was. */
static bool bring_home(koila_sig sig)
{
    module_call now;
    if (!modules.n || !module_call_of(sig, &now) || !make_room(sig))
        return true;
    for (uint32_t i = 0; i < modules.n; i++) {
        module_call *m = &modules.at[i];
        if (m->op != now.op || m->id != now.id)
            continue;
        if (m->home != sig) {
            forget(&learned.at[sig]);
            learned.at[sig] = learned.at[m->home];
            learned.at[m->home] = (workspace){ 0 };
            m->home = sig;
        }
        return false;
    }
    return true;
}

/* NULL: nothing was seen of it. */
static const workspace *workspace_at(koila_sig sig)
{
    const workspace *w = sig < learned.n ? &learned.at[sig] : NULL;
    while (w && !w->n)
        w = w->next;
    return w;
}

/* Those of that batch size; 0: the first. NULL: there are none. */
static workspace *of_batch(workspace *w, int64_t batch)
{
    while (w && batch && w->batch && w->batch != batch)
        w = w->next;
    return w;
}

static int64_t rows_or_whole(int64_t rows, int64_t batch)
{
    return !batch || rows == batch ? WHOLE : rows;
}

/* The first entry with at least so many rows; w->n: none. */
static uint32_t entry_from(const workspace *w, int64_t rows)
{
    uint32_t i = 0;
    while (i < w->n && w->at[i].rows < rows)
        i++;
    return i;
}

static bool is_entry(const workspace *w, uint32_t i, int64_t rows)
{
    return i < w->n && w->at[i].rows == rows;
}

static double rows_of(const workspace *w, uint32_t i)
{
    return w->at[i].rows == WHOLE ? (double)w->batch : (double)w->at[i].rows;
}

typedef struct point {
    double rows;
    double bytes;
} point;

static point point_of(const workspace *w, uint32_t i)
{
    return (point){ .rows = rows_of(w, i), .bytes = (double)w->at[i].bytes };
}

static double line_at(point a, point b, double x)
{
    return a.bytes + (b.bytes - a.bytes) * (x - a.rows) / (b.rows - a.rows);
}

/* Bytes at x rows, which are fewer or more than all of the first n entries have: on the line
 * through the nearest entry and the next one that is not near it. Fewer rows take no more than the
 * fewest that were measured, and more no less than the most. Never less than the measured bytes
 * imply. */
static uint64_t beyond(const workspace *w, uint32_t n, double x)
{
    const bool is_below = x < rows_of(w, 0);
    point end = point_of(w, is_below ? 0 : n - 1);
    uint32_t n_near = 0;
    point next = end;
    while (n_near < n) {
        next = point_of(w, is_below ? n_near : n - 1 - n_near);
        if (fabs(next.rows - end.rows) * NEAR_SHARE >= end.rows)
            break;
        end.bytes = fmax(end.bytes, next.bytes);
        n_near++;
    }
    const double share = end.bytes * x / end.rows;
    if (n_near == n)
        return (uint64_t)share;
    const double y = line_at(end, next, x);
    return (uint64_t)(is_below ? fmin(fmax(y, share), end.bytes) : fmax(y, end.bytes));
}

/* Bytes at x rows, on the line through the two nearest of the first n entries, of which `above` is
 * the first with more rows. */
static uint64_t on_a_line(const workspace *w, uint32_t n, uint32_t above, double x)
{
    if (!above || above >= n)
        return beyond(w, n, x);
    const point a = point_of(w, above - 1);
    const point b = point_of(w, above);
    /* WHOLE means today's batch, which is smaller than the one at which entry a was measured */
    return b.rows <= a.rows ? w->at[n - 1].bytes : (uint64_t)line_at(a, b, x);
}

/* Bytes at that many rows of that batch size; w->n > 0. */
static uint64_t bytes_at(const workspace *w, int64_t rows)
{
    const uint32_t above = entry_from(w, rows);
    if (is_entry(w, above, rows))
        return w->at[above].bytes;
    uint32_t n = w->n;
    if (!w->batch && w->at[n - 1].rows == WHOLE)
        n--; /* without a known batch WHOLE has no place on the line */
    if (!n)
        return 0;
    if (rows == WHOLE && !w->batch)
        return w->at[n - 1].bytes;
    return on_a_line(w, n, above, rows == WHOLE ? (double)w->batch : (double)rows);
}

uint64_t koila__workspace_of(void *ignored, koila_sig sig, int64_t rows, int64_t batch)
{
    (void)ignored;
    bring_home(sig);
    const workspace *w = workspace_at(sig);
    if (!w)
        return 0;
    const workspace *same = of_batch(&learned.at[sig], batch);
    rows = rows_or_whole(rows, batch);
    if (same && same->n)
        return bytes_at(same, rows);
    if (rows == WHOLE)
        return bytes_at(w, WHOLE);
    const double share = (double)rows / (double)batch * (double)w->batch;
    return on_a_line(w, w->n, entry_from(w, (int64_t)ceil(share)), share);
}

static uint64_t less_of(const uint64_t two[2]) { return two[0] < two[1] ? two[0] : two[1]; }

/* The entry of exactly these rows; NULL: there is none. */
static seen *entry_of(koila_sig sig, int64_t rows, int64_t batch)
{
    bring_home(sig);
    workspace *w = workspace_at(sig) ? of_batch(&learned.at[sig], batch) : NULL;
    rows = rows_or_whole(rows, batch);
    const uint32_t i = w ? entry_from(w, rows) : 0;
    return w && is_entry(w, i, rows) ? &w->at[i] : NULL;
}

uint64_t koila__spared_of(void *ignored, koila_sig sig, int64_t rows, int64_t batch)
{
    (void)ignored;
    const seen *e = entry_of(sig, rows, batch);
    return e ? less_of(e->spared) : 0;
}

bool koila__workspace_known(void *ignored, koila_sig sig, int64_t rows, int64_t batch,
                            uint64_t *bytes)
{
    *bytes = koila__workspace_of(ignored, sig, rows, batch);
    return workspace_at(sig) != NULL;
}

uint64_t koila__slice_result_bytes(const koila_plan *plan, koila_node n, int64_t rows)
{
    const koila_node_info info = koila_node_get(koila_plan_graph(plan), n);
    const koila_sig_info *s = koila_sig_get(koila__table, info.sig);
    uint64_t sum = 0;
    for (uint32_t o = 0; o < s->n_outputs; o++)
        if (s->outputs[o] != KOILA_NONE)
            sum += koila_plan_value_bytes(plan, info.first_output + o, rows);
    return sum;
}

bool koila__learned(koila_sig sig, int64_t rows, int64_t batch)
{
    return entry_of(sig, rows, batch) != NULL;
}

static bool is_more(uint64_t a, uint64_t b) { return a > b + b / NOISE_SHARE + NOISE_BYTES; }
static bool is_alike(uint64_t a, uint64_t b) { return !is_more(a, b) && !is_more(b, a); }

/* One more sample of entry e, in a run that e has not seen (is_next) or has. What was measured
 * stands before any bound, and of bounds the least. */
static void see_again(seen *e, uint64_t bytes, bool is_bound, bool is_next)
{
    if (is_bound && e->is_bound && bytes < e->bytes) {
        e->bytes = bytes;
        return;
    }
    if (!is_bound && e->is_bound) {
        *e = (seen){ .rows = e->rows, .bytes = bytes, .is_sure = is_alike(bytes, e->bytes) };
        return;
    }
    if (!is_more(e->bytes, bytes)) {
        e->is_sure = is_alike(bytes, e->bytes); /* of more bytes only this sample is known */
        e->bytes = bytes > e->bytes ? bytes : e->bytes;
        e->lately = 0;
        e->n_less = 0;
        return;
    }
    e->n_less += is_next;
    if (e->n_less > HEALS_AFTER) { /* the first sample of this run is one of the next ones */
        e->bytes = e->lately > bytes ? e->lately : bytes;
        e->is_bound |= is_bound;
        e->lately = 0;
        e->n_less = 0;
    } else if (bytes > e->lately)
        e->lately = bytes;
}

static void leave_out(workspace *w, uint32_t i)
{
    w->n--;
    memmove(&w->at[i], &w->at[i + 1], (w->n - i) * sizeof *w->at);
    learned.generation++;
}

/* Entry i is left out, until it is measured again. */
static void doubt(workspace *w, uint32_t i)
{
    w->doubted = w->at[i];
    leave_out(w, i);
}

/* Makes room at i for an entry of `rows`. */
static seen *insert(workspace *w, uint32_t i)
{
    if (w->n == N_SEEN) {
        /* the ends determine the line best: drop an entry between them */
        const uint32_t gone = i > 1 && i < N_SEEN ? i - 1 : N_SEEN / 2;
        w->n--;
        memmove(&w->at[gone], &w->at[gone + 1], (w->n - gone) * sizeof *w->at);
        if (i > gone)
            i--;
    }
    koila_assert(i <= w->n && w->n < N_SEEN);
    memmove(&w->at[i + 1], &w->at[i], (w->n - i) * sizeof *w->at);
    w->n++;
    return &w->at[i];
}

/* Finds or adds the entry of `rows`, and enters a sample. */
static const seen *add_entry(workspace *w, int64_t rows, uint64_t bytes, koila__measured how)
{
    const bool is_bound = how == KOILA__MEASURED_BOUND;
    const bool is_sure = how == KOILA__MEASURED_APART;
    const uint32_t i = entry_from(w, rows);
    seen *e = is_entry(w, i, rows) ? &w->at[i] : NULL;
    if (e) {
        see_again(e, bytes, is_bound, e->run != w->run);
        e->is_sure |= is_sure;
    } else {
        const bool was_right = w->doubted.rows == rows && is_alike(w->doubted.bytes, bytes);
        e = insert(w, i);
        *e = (seen){
            .rows = rows, .bytes = bytes, .is_sure = is_sure || was_right, .is_bound = is_bound
        };
    }
    e->run = w->run;
    return e;
}

/* The signature is measured: the first time in this run? Then what was seen only once, long ago, is
 * doubted. */
static void count_run(workspace *w)
{
    if (w->when == learned.clock)
        return;
    w->when = learned.clock;
    w->run++;
    for (uint32_t i = w->n; i-- > 0;)
        if (!w->at[i].is_sure && w->run - w->at[i].run > HEALS_AFTER)
            doubt(w, i);
}

/* The entries of that batch size, which are made: in place of the oldest where there are too many.
 * A call on all rows is the same at each size. */
static workspace *entries_of(workspace *first, int64_t batch)
{
    workspace *w = of_batch(first, batch);
    workspace *oldest = first;
    uint32_t n = 1;
    if (w)
        return w;
    for (w = first; w->next; w = w->next, n++)
        oldest = w->next->when < oldest->when ? w->next : oldest;
    workspace *made = n < MOST_BATCHES ? PyMem_RawCalloc(1, sizeof *made) : NULL;
    if (made)
        w->next = made;
    else
        made = oldest;
    const seen whole = first->n ? first->at[first->n - 1] : (seen){ 0 };
    *made = (workspace){ .batch = batch, .next = made->next };
    if (whole.rows == WHOLE)
        made->at[made->n++] = whole;
    return made;
}

void koila__learn(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes, koila__measured how)
{
    module_call module;
    if (!make_room(sig))
        return;
    if (bring_home(sig) && module_call_of(sig, &module))
        koila__vec_push(&koila__libc, &modules, module);
    workspace *w = entries_of(&learned.at[sig], batch);
    count_run(w);
    const uint64_t counted_with = koila__workspace_of(NULL, sig, rows, batch);
    const bool is_known = workspace_at(sig) != NULL;
    /* what used more than is counted with would have raised the peak, and been measured */
    if (how == KOILA__MEASURED_BOUND && (w->takes_no_bounds || (is_known && bytes > counted_with)))
        return;
    if (batch)
        w->batch = batch;
    const seen *now = add_entry(w, rows_or_whole(rows, batch), bytes, how);
    if (!is_alike(now->bytes, counted_with))
        learned.generation++;
}

void koila__learn_spared(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes)
{
    seen *e = entry_of(sig, rows, batch);
    if (!e)
        return;
    const uint64_t before = less_of(e->spared);
    const bool is_first = !e->was_spared;
    e->spared[0] = is_first ? bytes : e->spared[1];
    e->spared[1] = bytes;
    e->was_spared = true;
    if (!is_alike(less_of(e->spared), before))
        learned.generation++;
}

bool koila__learned_surely(koila_sig sig, int64_t rows, int64_t batch)
{
    const seen *e = entry_of(sig, rows, batch);
    return e && e->is_sure && !e->n_less;
}

void koila__learned_run(void) { learned.clock++; }

bool koila__learned_misfit(uint64_t key)
{
    const uint64_t before = learned.generation;
    if (learned.misfit != key)
        learned.n_misfits = 0;
    learned.misfit = key;
    if (++learned.n_misfits <= HEALS_AFTER)
        return false;
    learned.n_misfits = 0;
    for (uint32_t s = 0; s < learned.n; s++)
        for (workspace *w = &learned.at[s]; w; w = w->next)
            for (uint32_t i = w->n; i-- > 0;)
                if (!w->at[i].is_sure)
                    doubt(w, i);
    return learned.generation != before;
}

bool koila__learned_bounds_misfit(void)
{
    const uint64_t before = learned.generation;
    for (uint32_t s = 0; s < learned.n; s++)
        for (workspace *w = &learned.at[s]; w; w = w->next)
            for (uint32_t i = w->n; i-- > 0;)
                if (w->at[i].is_bound) {
                    w->takes_no_bounds = true;
                    leave_out(w, i);
                }
    return learned.generation != before;
}

void koila__workspaces_forget(void)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < modules.n; i++)
        if (koila_sig_get(koila__table, modules.at[i].home))
            modules.at[n++] = modules.at[i];
    modules.n = n;
    for (koila_sig s = 0; s < learned.n; s++)
        if (!koila_sig_get(koila__table, s))
            forget(&learned.at[s]);
}

uint64_t koila__learned_generation(void) { return learned.generation; }

void koila__unlearn(void)
{
    for (koila_sig s = 0; s < learned.n; s++)
        forget(&learned.at[s]);
    learned.generation++;
}
