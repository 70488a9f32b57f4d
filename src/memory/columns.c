/* columns.c — see columns.h. */
#include "memory/columns.h"

static const char *const words[] = {
#define X(id, name) name,
    KOILA__WORD_MAP(X)
};
static const char *const metrics[] = { KOILA__METRIC_MAP(X) };
static const char *const pools[] = { KOILA__POOL_MAP(X) };
static const char *const stats[] = { KOILA__STAT_MAP(X) };
#undef X

static int index_of(const char *s, size_t n, const char *const *names, size_t n_names)
{
    for (size_t i = 0; i < n_names; i++)
        if (strlen(names[i]) == n && memcmp(names[i], s, n) == 0)
            return (int)i;
    return -1;
}

static void list(char *out, size_t n_out, const char *const *names, size_t n)
{
    size_t at = 0;
    for (size_t i = 0; i < n && at < n_out; i++)
        at += (size_t)snprintf(out + at, n_out - at, "%s%s", i ? ", " : "", names[i]);
}

koila_status koila__column_parse(const char *name, koila__column *out, koila_error *err)
{
    int word = index_of(name, strlen(name), words, KOILA_COUNT(words));
    if (word >= 0) {
        *out = (koila__column){ .word = (enum koila__word)word };
        return KOILA_OK;
    }
    char known[256];
    const char *pool = strchr(name, '.');
    const char *stat = pool ? strchr(pool + 1, '.') : NULL;
    if (!stat || strchr(stat + 1, '.') || pool == name || stat == pool + 1 || !stat[1]) {
        list(known, sizeof known, words, KOILA_COUNT(words));
        return koila__fail(
            err, KOILA_BAD_INPUT, 0,
            "column '%.60s': expected three dot-separated parts, metric.pool.stat, or one of %s",
            name, known);
    }
    int m = index_of(name, (size_t)(pool - name), metrics, KOILA_COUNT(metrics));
    int p = index_of(pool + 1, (size_t)(stat - pool - 1), pools, KOILA_COUNT(pools));
    int s = index_of(stat + 1, strlen(stat + 1), stats, KOILA_COUNT(stats));
    if (m < 0) {
        list(known, sizeof known, metrics, KOILA_COUNT(metrics));
        return koila__fail(err, KOILA_BAD_INPUT, 0, "column '%.60s': no such metric; there are %s",
                           name, known);
    }
    if (p < 0 || s < 0) {
        list(known, sizeof known, p < 0 ? pools : stats,
             p < 0 ? KOILA_COUNT(pools) : KOILA_COUNT(stats));
        return koila__fail(err, KOILA_BAD_INPUT, 0, "column '%.60s': no such %s; there are %s",
                           name, p < 0 ? "pool" : "stat", known);
    }
    *out = (koila__column){ KOILA__WORD_METRIC, (enum koila__metric)m, (enum koila__pool)p,
                            (enum koila__stat)s };
    return KOILA_OK;
}

const char *koila__column_head(const koila__column *c, int i)
{
    if (c->word != KOILA__WORD_METRIC)
        return i ? "" : words[c->word];
    const char *const heads[] = { metrics[c->metric], pools[c->pool], stats[c->stat] };
    return heads[i];
}
const char *koila__column_name(const koila__column *c, char *buffer)
{
    if (c->word != KOILA__WORD_METRIC)
        snprintf(buffer, 64, "%s", words[c->word]);
    else
        snprintf(buffer, 64, "%s.%s.%s", metrics[c->metric], pools[c->pool], stats[c->stat]);
    return buffer;
}

static bool is_bytes(const koila__column *c)
{
    switch (c->word) {
    case KOILA__WORD_HITS:
    case KOILA__WORD_TIME:
        return false;
    case KOILA__WORD_METRIC:
        return strstr(metrics[c->metric], "byte") != NULL;
    default:
        return true;
    }
}

bool koila__column_needs_stats(const koila__column *c)
{
    if (c->word != KOILA__WORD_METRIC)
        return false;
    switch (c->metric) {
    case KOILA__METRIC_ACTIVE:
    case KOILA__METRIC_ACTIVE_BYTES:
    case KOILA__METRIC_ALLOCATION:
    case KOILA__METRIC_ALLOCATED_BYTES:
        return false;
    case KOILA__METRIC_RESERVED_BYTES:
        return c->pool != KOILA__POOL_ALL || c->stat > KOILA__STAT_PEAK;
    default:
        return true;
    }
}

/* Where an allocator's own statistic stands in koila__stats: metric-major, then pool. */
static int stats_index(const koila__column *c)
{
    static const int order[KOILA__METRIC_N] = { [KOILA__METRIC_REQUESTED_BYTES] = 0,
                                                [KOILA__METRIC_INACTIVE_SPLIT] = 1,
                                                [KOILA__METRIC_INACTIVE_SPLIT_BYTES] = 2,
                                                [KOILA__METRIC_SEGMENT] = 3,
                                                [KOILA__METRIC_RESERVED_BYTES] = 4 };
    return order[c->metric] * 3 + (int)c->pool;
}

/* As the allocator's statistics say; a peak is the larger of the two ends of the line. */
static double value_from_stats(const koila__column *c, const koila__rec *rec)
{
    const int i = stats_index(c);
    switch (c->stat) {
    case KOILA__STAT_PEAK:
        return (double)rec->stats_peak->current[i];
    case KOILA__STAT_CURRENT:
        return (double)rec->stats_max->current[i];
    case KOILA__STAT_ALLOCATED:
        return (double)rec->stats_max->allocated[i];
    default:
        return (double)rec->stats_max->freed[i];
    }
}

/* As the events say. */
static double value_from_events(const koila__column *c, const koila__rec *rec, bool on_cpu,
                                const koila__credit *credit)
{
    static const int flow_of_pool[] = { [KOILA__POOL_ALL] = 0,
                                        [KOILA__POOL_SMALL] = 1,
                                        [KOILA__POOL_LARGE] = 2 };
    const bool active =
        c->metric == KOILA__METRIC_ACTIVE || c->metric == KOILA__METRIC_ACTIVE_BYTES;
    const int i = flow_of_pool[c->pool] + (is_bytes(c) ? 0 : 3); /* the same order as koila__q */
    int q = i;
    if (!on_cpu && c->metric == KOILA__METRIC_RESERVED_BYTES)
        q = KOILA__Q_RESERVED;
    else if (!on_cpu && active)
        q = KOILA__Q_ACTIVE + i;
    switch (c->stat) {
    case KOILA__STAT_PEAK:
        if (i == KOILA__Q_BYTES_ALL && credit->peak > rec->peak[q])
            return (double)credit->peak;
        return (double)rec->peak[q];
    case KOILA__STAT_CURRENT:
        return (double)rec->current[q];
    case KOILA__STAT_ALLOCATED:
        return (double)rec->allocated[i];
    default:
        return (double)rec->freed[i];
    }
}

static bool metric_value(const koila__column *c, const koila__row *row, const koila__rec *rec,
                         int device, const koila__credit *credit, double *out)
{
    const bool on_cpu = device == 0 || (device < 0 && row->seen_target == 0);
    const bool needs_stats = koila__column_needs_stats(c);
    if (rec->stats_max && needs_stats)
        *out = value_from_stats(c, rec);
    else if (needs_stats && !on_cpu)
        return false;
    else if (c->metric == KOILA__METRIC_INACTIVE_SPLIT ||
             c->metric == KOILA__METRIC_INACTIVE_SPLIT_BYTES)
        *out = 0;
    else
        *out = value_from_events(c, rec, on_cpu, credit);
    return true;
}

bool koila__column_value(koila__lines *l, const koila__column *c, const koila__row *row, int device,
                         double *out)
{
    const koila__rec *rec = koila__row_rec(l, row, device);
    if (!row->recorded || !rec)
        return false;
    const koila__credit credit = koila__row_credit(l, row, device);
    switch (c->word) {
    case KOILA__WORD_HITS:
        *out = (double)row->n_hits;
        break;
    case KOILA__WORD_TIME:
        *out = koila__ticks_to_ns(l, row->n_ticks);
        break;
    case KOILA__WORD_RISE:
        *out = (double)rec->rise;
        break;
    case KOILA__WORD_DELTA:
        *out = (double)(rec->sum_delta + (int64_t)(credit.alloc - credit.freed));
        break;
    case KOILA__WORD_ALLOC:
        *out = (double)(rec->sum_alloc + credit.alloc);
        break;
    case KOILA__WORD_FREED:
        *out = (double)(rec->sum_freed + credit.freed);
        break;
    case KOILA__WORD_BACKWARD:
        *out = (double)credit.backward;
        return l->sees_nodes;
    case KOILA__WORD_RSS:
        *out = (double)row->rss_bytes;
        break;
    case KOILA__WORD_METRIC:
        return metric_value(c, row, rec, device, &credit, out);
    }
    return true;
}

const char *koila__column_text(const koila__column *c, double value, char *buffer)
{
    if (c->word == KOILA__WORD_TIME)
        return koila__time_text(value, buffer);
    if (is_bytes(c))
        return koila__size_text(value, buffer);
    snprintf(buffer, 32, "%.0f", value);
    return buffer;
}
