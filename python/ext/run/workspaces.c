/* workspaces.c — learns the workspaces of operators: bytes that they use beyond their results, such
 * as a copy of an operand in another layout, or an unfolded image. No rule predicts them.
 *
 * For each signature a few row counts and their bytes are kept. A workspace has a fixed part (a
 * weight in another layout) and a part that grows with the rows, so it is interpolated linearly in
 * between. WHOLE: outside a loop, or all rows in one slice.
 */
#include "run/run.h"

enum {
    N_SEEN = 6,         /* row counts kept for a signature */
    SIGS_AHEAD = 64,    /* room for signatures still to come */
    NOISE_BYTES = 4096, /* smaller changes, or less than one part in NOISE_SHARE, are ignored */
    NOISE_SHARE = 50,
};
#define WHOLE INT64_MAX

typedef struct seen {
    int64_t rows;
    uint64_t bytes;
} seen;
typedef struct workspace {
    seen at[N_SEEN]; /* ascending rows */
    int64_t batch;   /* 0: not known */
    uint32_t n;
} workspace;
static struct {
    workspace *at; /* [n] by signature */
    uint32_t n;
    uint64_t generation;
} learned;

/* NULL: nothing was seen of it. */
static const workspace *workspace_at(koila_sig sig)
{
    return sig < learned.n && learned.at[sig].n ? &learned.at[sig] : NULL;
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

/* Bytes at x rows, on the line through the two nearest of the first n entries, of which `above` is
 * the first with more rows. Never less than the measured bytes imply. */
static uint64_t on_a_line(const workspace *w, uint32_t n, uint32_t above, double x)
{
    const double smallest = (double)w->at[0].bytes * x / rows_of(w, 0);
    if (n == 1)
        return (uint64_t)smallest;
    uint32_t k = above ? above - 1 : 0;
    double least = 0;
    if (above == 0)
        least = smallest;
    else if (above >= n) {
        k = n - 2;
        least = (double)w->at[n - 1].bytes;
    }
    const double a = rows_of(w, k);
    const double b = rows_of(w, k + 1);
    koila_assert(k + 1 < n);
    /* WHOLE means today's batch, which is smaller than the one at which entry k was measured */
    if (b <= a)
        return w->at[n - 1].bytes;
    const double bytes_a = (double)w->at[k].bytes;
    const double bytes_b = (double)w->at[k + 1].bytes;
    const double y = bytes_a + (bytes_b - bytes_a) * (x - a) / (b - a);
    return (uint64_t)(y > least ? y : least);
}

uint64_t koila__workspace_of(void *ignored, koila_sig sig, int64_t rows, int64_t batch)
{
    (void)ignored;
    const workspace *w = workspace_at(sig);
    if (!w)
        return 0;
    rows = rows_or_whole(rows, batch);
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

bool koila__workspace_known(void *ignored, koila_sig sig, int64_t rows, int64_t batch,
                            uint64_t *bytes)
{
    *bytes = koila__workspace_of(ignored, sig, rows, batch);
    return workspace_at(sig) != NULL;
}

bool koila__learned(koila_sig sig, int64_t rows, int64_t batch)
{
    const workspace *w = workspace_at(sig);
    rows = rows_or_whole(rows, batch);
    return w && is_entry(w, entry_from(w, rows), rows);
}

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

/* Finds or adds the entry of `rows`, and raises it to at least `bytes`. */
static const seen *add_entry(workspace *w, int64_t rows, uint64_t bytes)
{
    uint32_t i = entry_from(w, rows);
    if (is_entry(w, i, rows)) {
        if (bytes > w->at[i].bytes)
            w->at[i].bytes = bytes;
        return &w->at[i];
    }
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
    w->at[i] = (seen){ rows, bytes };
    return &w->at[i];
}

static bool is_more(uint64_t a, uint64_t b) { return a > b + b / NOISE_SHARE + NOISE_BYTES; }

void koila__learn(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes)
{
    if (!make_room(sig))
        return;
    const uint64_t counted_with = koila__workspace_of(NULL, sig, rows, batch);
    workspace *w = &learned.at[sig];
    if (batch)
        w->batch = batch;
    const seen *now = add_entry(w, rows_or_whole(rows, batch), bytes);
    if (is_more(now->bytes, counted_with) || is_more(counted_with, now->bytes))
        learned.generation++;
}

uint64_t koila__learned_generation(void) { return learned.generation; }

void koila__unlearn(void)
{
    if (learned.n)
        memset(learned.at, 0, learned.n * sizeof *learned.at);
    learned.generation++;
}
