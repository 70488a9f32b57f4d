/* The schedule oracle: random steps, placed by the real rules, scheduled under every keep policy
 * and run slice by slice by the interpreter, against the recorded graph run whole. Numbers must be
 * equal (they are exact), and the interpreter's bytes must be what live.c predicted, at the byte. A
 * checker that cannot fail proves nothing: faults of each kind are planted and must be seen.
 *
 * KOILA_ORACLE_GRAPHS=<n> in the environment runs more graphs; KOILA_ORACLE_SEED=<n> and the
 * argument `seed` show one. */
#include "interpreter.h"
#include "random_graph.h"

static uint32_t n_steps(uint64_t seed) { return seed % 4 == 0 ? 60 : 6 + seed % 25; }

static const koila__keep keeps[] = { { .horizon = UINT32_MAX },
                                     { .horizon = UINT32_MAX, .cheap = true },
                                     { .horizon = 0, .cheap = true },
                                     { .horizon = 1, .cheap = true },
                                     { .horizon = 3, .spacing = 1, .cheap = true },
                                     { .horizon = 4, .spacing = 2, .cheap = true } };

static uint32_t n_graphs_wanted(void)
{
    const char *s = getenv("KOILA_ORACLE_GRAPHS");
    return s ? (uint32_t)atoi(s) : 1500;
}

/* What running one schedule showed. */
typedef struct seen {
    bool wrong_numbers, broken, wrong_bytes, leaks;
    char why[200];
} seen;

/* `truth`: values of the recorded graph. */
static seen run_one(const random_graph *r, tensor *const *truth, const koila__placed *p,
                    const koila__schedule *s, const int64_t *rows)
{
    seen out = { 0 };
    const koila_graph *g = p->graph;
    uint64_t *leaf = calloc(g->values.n + 1, sizeof *leaf);
    for (uint32_t v = 0; v < r->g->values.n; v++)
        if (r->g->values.at[v].node == KOILA_NONE && p->lowered[v] != KOILA_NONE)
            leaf[p->lowered[v]] = v;
    interpreter x = { .p = p, .s = s, .rows = rows };
    out.broken = !interpret(&x, leaf);
    snprintf(out.why, sizeof out.why, "%s", x.why);
    for (uint32_t i = 0; i < r->n_targets && !out.broken; i++) {
        const koila_value v = p->lowered[r->targets[i]];
        if (!same_elements(x.whole[v], truth[r->targets[i]])) {
            out.wrong_numbers = true;
            snprintf(out.why, sizeof out.why, "target %%%u (lowered %%%u) %s", r->targets[i], v,
                     x.whole[v] ? "has other numbers" : "was not made");
        }
    }
    const koila__live live =
        koila__live_simulate(p, s, &(koila__live_options){ .rows = rows }, NULL, NULL, NULL);
    if (!out.broken && live.peak_bytes != x.h.peak) {
        out.wrong_bytes = true;
        if (!out.wrong_numbers)
            snprintf(out.why, sizeof out.why, "predicted %llu bytes, held %llu",
                     (unsigned long long)live.peak_bytes, (unsigned long long)x.h.peak);
    }
    interpreter_deinit(&x);
    if (x.h.n_stores)
        out.leaks = true;
    free(leaf);
    return out;
}

/* What the random schedules hold: an oracle that never meets a thing says nothing about it. */
static struct {
    uint32_t loops, two_loops, many_loops, two_axes, after_gather, steals, copies, owned, clones,
        puts, keeps, fetches_again, wide, maxima, copied_slices, cuts, recut, overwrites,
        sums_over_terms;
} covered;
static void count(const koila__placed *p, const koila__schedule *s)
{
    bool axis[2] = { false };
    for (uint32_t k = 0; k < s->n_stages; k++) {
        const koila_stage *st = &s->stages[k].stage;
        if (st->is_loop)
            axis[st->axis] = true;
        for (uint32_t i = 0; i < s->stages[k].n_events; i++) {
            covered.wide += s->stages[k].events[i].kind == KOILA__ADD_OWNED_WIDE;
            covered.copied_slices += s->stages[k].events[i].kind == KOILA__SLICE_ALLOC;
            covered.cuts += s->stages[k].events[i].kind == KOILA__CUT_ALLOC;
        }
        for (uint32_t i = 0; i < st->n_instrs; i++) {
            const koila_instr in = st->instrs[i];
            const bool add = in.kind == KOILA_DO_ADD;
            const bool is_write =
                in.kind == KOILA_DO_RUN && koila__node_sig(p->graph, in.id)->n_writes;
            covered.steals += is_write && in.steal;
            covered.copies += is_write && !in.steal;
            covered.sums_over_terms += in.kind == KOILA_DO_RUN && !is_write && in.steal;
            covered.overwrites +=
                is_write && koila__node_sig(p->graph, in.id)->writes[0].overwrites;
            covered.owned += add && in.flags;
            covered.clones += add && !in.flags;
            covered.maxima += add && p->value[in.id].combine == KOILA_MAX;
            covered.puts += in.kind == KOILA_DO_PUT;
            covered.keeps += in.kind == KOILA_DO_KEEP;
            covered.fetches_again += in.kind == KOILA_DO_FETCH && !(in.flags & KOILA_INSTR_LAST);
            covered.recut += in.kind == KOILA_DO_SLICE && p->value[in.id].kind == KOILA_S &&
                             p->graph->values.at[in.id].node != KOILA_NONE;
        }
    }
    for (uint32_t n = 0; n < p->graph->nodes.n; n++)
        for (uint32_t i = 0; i < koila__node_sig(p->graph, n)->n_inputs; i++) {
            const koila_node q =
                p->graph->values.at[p->graph->inputs.at[p->graph->nodes.at[n].first_input + i]]
                    .node;
            covered.after_gather += p->node[n].in_loop && q != KOILA_NONE && p->node[q].gathered;
        }
    covered.loops += s->n_loops > 0;
    covered.two_loops += s->n_loops > 1;
    covered.many_loops += s->n_loops > 4;
    covered.two_axes += axis[0] && axis[1];
}

typedef void (*fault_fn)(koila__placed *p, koila__schedule *s, random_graph *r, bool *planted);

/* One graph under every policy and number of rows; how many runs, and how many were wrong. */
static void try_graph(uint64_t seed, fault_fn fault, uint32_t *n_runs, uint32_t *n_planted,
                      uint32_t *n_caught, bool loud)
{
    random_graph r;
    if (rg_init(&r, NULL, seed, NULL, 0, n_steps(seed)) != KOILA_OK)
        abort();
    heap h = { 0 };
    tensor **truth = calloc(r.g->values.n + 1, sizeof *truth);
    if (!run_recorded(&h, r.g, truth))
        abort();
    koila_error err = KOILA_ERROR_INIT;
    koila_status (*const ways[])(
        const koila_graph *, const koila_value *, uint32_t, const koila_allocator *,
        koila__placed **, koila_error *) = { koila__place, koila__place_cut, koila__place_whole };
    for (uint32_t way = 0; way < KOILA_COUNT(ways); way++) {
        const bool whole = ways[way] == koila__place_whole;
        koila__placed *p = NULL;
        const koila_status status = ways[way](r.g, r.targets, r.n_targets, NULL, &p, &err);
        CHECK(status == KOILA_OK && koila__placed_check(p, &err));
        if (status != KOILA_OK) {
            printf("seed %llu: %s\n", (unsigned long long)seed, err.text);
            continue;
        }
        koila_value targets[RG_MAX_VALUES];
        for (uint32_t i = 0; i < r.n_targets; i++)
            targets[i] = p->lowered[r.targets[i]];
        for (size_t k = 0; k < (whole ? 1 : KOILA_COUNT(keeps)); k++) {
            /* a fault may stay in the placement */
            if (fault && !whole && k != seed % KOILA_COUNT(keeps))
                continue;
            koila__schedule s;
            if (koila__schedule_init(&s, p, targets, r.n_targets, keeps[k], NULL, &err) !=
                KOILA_OK) {
                CHECK(!"scheduled");
                printf("seed %llu keep %zu: %s\n", (unsigned long long)seed, k, err.text);
                continue;
            }
            bool planted = false;
            count(p, &s);
            if (fault)
                fault(p, &s, &r, &planted);
            for (int64_t rows = 1; rows <= r.extent[1] + 1 && !(fault && !planted); rows++) {
                int64_t of_axis[2];
                for (uint32_t a = 0; a < r.g->axes.n; a++)
                    of_axis[a] = rows < r.g->axes.at[a] ? rows : r.g->axes.at[a];
                const seen got = run_one(&r, truth, p, &s, of_axis);
                const bool wrong = got.wrong_numbers || got.broken || got.wrong_bytes || got.leaks;
                ++*n_runs;
                *n_planted += planted;
                *n_caught += wrong;
                if (wrong && !fault) {
                    test_failures_in_case++;
                    if (loud || *n_caught < 20)
                        printf("seed %llu, %s, keep %zu, %lld rows: %s\n", (unsigned long long)seed,
                               (const char *[]){ "sliced", "sliced again", "whole" }[way], k,
                               (long long)rows, got.why);
                }
                if (whole)
                    break;
            }
            koila__schedule_deinit(&s);
        }
        koila__placed_free(p);
    }
    for (uint32_t v = 0; v < r.g->values.n; v++)
        drop(&truth[v]);
    free(truth);
    CHECK_EQ(h.n_stores, 0);
    rg_deinit(&r);
}

TEST(oracle__every_schedule_computes_what_was_recorded_in_the_bytes_predicted)
{
    uint32_t n_runs = 0, n_planted = 0, n_wrong = 0;
    const uint32_t n = n_graphs_wanted();
    for (uint64_t seed = 1; seed <= n; seed++)
        try_graph(seed, NULL, &n_runs, &n_planted, &n_wrong, false);
    printf("%u graphs, %u runs, %u wrong\n", n, n_runs, n_wrong);
    CHECK_EQ(n_wrong, 0);
#define COVERED(field)                                                                             \
    do {                                                                                           \
        printf("  %u %s\n", covered.field, #field);                                                \
        CHECK(covered.field > 0 || n < 1000);                                                      \
    } while (0)
    COVERED(loops);
    COVERED(two_loops);
    COVERED(many_loops);
    COVERED(two_axes);
    COVERED(after_gather);
    COVERED(steals);
    COVERED(copies);
    COVERED(overwrites);
    COVERED(owned);
    COVERED(clones);
    COVERED(wide);
    COVERED(maxima);
    COVERED(puts);
    COVERED(keeps);
    COVERED(fetches_again);
    COVERED(copied_slices);
    COVERED(cuts);
    COVERED(recut);
    COVERED(sums_over_terms);
}

/* ---- planted faults */

static koila_instr *instrs_of(koila__schedule *s, uint32_t k)
{
    return (koila_instr *)(uintptr_t)s->stages[k].stage.instrs;
}

/* A base that somebody still reads is written in place. */
static void steal_what_lives(koila__placed *p, koila__schedule *s, random_graph *r, bool *planted)
{
    for (uint32_t k = 0; k < s->n_stages && !*planted; k++)
        for (uint32_t i = 0; i < s->stages[k].stage.n_instrs && !*planted; i++) {
            koila_instr *in = &instrs_of(s, k)[i];
            if (in->kind != KOILA_DO_RUN)
                continue;
            const koila_sig_info *sig = koila__node_sig(p->graph, in->id);
            if (!sig->n_writes || in->steal & 1 || sig->writes[0].overwrites)
                continue;
            in->steal |= 1;
            *planted = true;
        }
}
/* A sum is written over a term that somebody still reads. */
static void write_over_what_lives(koila__placed *p, koila__schedule *s, random_graph *r,
                                  bool *planted)
{
    for (uint32_t k = 0; k < s->n_stages && !*planted; k++)
        for (uint32_t i = 0; i < s->stages[k].stage.n_instrs && !*planted; i++) {
            koila_instr *in = &instrs_of(s, k)[i];
            if (in->kind != KOILA_DO_RUN || in->steal)
                continue;
            const koila_sig_info *sig = koila__node_sig(p->graph, in->id);
            if (!koila__adds_two(p->graph->table, sig) || sig->inputs[0] != sig->outputs[0])
                continue;
            in->steal = 1;
            *planted = true;
        }
}
/* The first value freed is freed before its last use. */
static void free_too_early(koila__placed *p, koila__schedule *s, random_graph *r, bool *planted)
{
    for (uint32_t k = 0; k < s->n_stages && !*planted; k++)
        for (uint32_t i = 1; i < s->stages[k].stage.n_instrs && !*planted; i++) {
            koila_instr *in = instrs_of(s, k);
            if (in[i].kind != KOILA_DO_FREE || in[i - 1].kind != KOILA_DO_RUN)
                continue;
            const koila_instr was = in[i];
            in[i] = in[i - 1];
            in[i - 1] = was;
            *planted = true;
        }
}
static void lose_a_free(koila__placed *p, koila__schedule *s, random_graph *r, bool *planted)
{
    for (uint32_t k = 0; k < s->n_stages && !*planted; k++)
        for (uint32_t i = 0; i < s->stages[k].stage.n_instrs && !*planted; i++) {
            if (!s->stages[k].stage.is_loop || instrs_of(s, k)[i].kind != KOILA_DO_FREE)
                continue;
            memmove(&instrs_of(s, k)[i], &instrs_of(s, k)[i + 1],
                    (s->stages[k].stage.n_instrs - i - 1) * sizeof(koila_instr));
            s->stages[k].stage.n_instrs--;
            *planted = true;
        }
}
static void add_twice(koila__placed *p, koila__schedule *s, random_graph *r, bool *planted)
{
    for (uint32_t k = 0; k < s->n_stages && !*planted; k++)
        for (uint32_t i = 1; i < s->stages[k].stage.n_instrs && !*planted; i++)
            if (instrs_of(s, k)[i].kind == KOILA_DO_ADD &&
                instrs_of(s, k)[i - 1].kind == KOILA_DO_RUN &&
                i + 1 < s->stages[k].stage.n_instrs) {
                for (uint32_t h = 0; h < i; h++)
                    /* its place is taken by the second ADD */
                    if (instrs_of(s, k)[h].kind == KOILA_DO_FREE) {
                        memmove(&instrs_of(s, k)[h], &instrs_of(s, k)[h + 1],
                                (i - h) * sizeof(koila_instr));
                        *planted = true;
                        break;
                    }
            }
}
/* A clone where the plan says the storage is taken over: right numbers, more bytes. */
static void own_nothing(koila__placed *p, koila__schedule *s, random_graph *r, bool *planted)
{
    for (uint32_t k = 0; k < s->n_stages; k++)
        for (uint32_t i = 0; i < s->stages[k].stage.n_instrs; i++)
            if (instrs_of(s, k)[i].kind == KOILA_DO_ADD &&
                instrs_of(s, k)[i].flags & KOILA_INSTR_OWNED) {
                instrs_of(s, k)[i].flags = 0;
                *planted = true;
            }
}
static void forget_an_allocation(koila__placed *p, koila__schedule *s, random_graph *r,
                                 bool *planted)
{
    for (uint32_t k = 0; k < s->n_stages && !*planted; k++)
        for (uint32_t i = 0; i < s->stages[k].n_events && !*planted; i++)
            if (s->stages[k].events[i].kind == KOILA__WHOLE_FREE) {
                s->stages[k].events[i].kind = KOILA__RUN;
                s->stages[k].events[i].value = 0;
                *planted = true;
            }
}
static void keep_nothing(koila__placed *p, koila__schedule *s, random_graph *r, bool *planted)
{
    for (uint32_t k = 0; k < s->n_stages && !*planted; k++)
        for (uint32_t i = 0; i < s->stages[k].stage.n_instrs && !*planted; i++) {
            if (instrs_of(s, k)[i].kind != KOILA_DO_KEEP)
                continue;
            memmove(&instrs_of(s, k)[i], &instrs_of(s, k)[i + 1],
                    (s->stages[k].stage.n_instrs - i - 1) * sizeof(koila_instr));
            s->stages[k].stage.n_instrs--;
            *planted = true;
        }
}
/* A slice of the whole value takes the place of another cut: rows of the wrong dimension. */
static void cut_elsewhere(koila__placed *p, koila__schedule *s, random_graph *r, bool *planted)
{
    for (uint32_t n = 0; n < p->graph->nodes.n; n++) {
        const koila_sig_info *sig = koila__node_sig(p->graph, n);
        for (uint32_t i = 0; i < sig->n_inputs; i++) {
            koila_placement *need = &p->need[p->graph->nodes.at[n].first_input + i];
            const koila_meta_info *m = koila__meta(p->graph->table, sig->inputs[i]);
            if (*planted || need->kind != KOILA_S || m->n_dims != 2 || m->size[0] != m->size[1] ||
                m->size[0] < 2)
                continue;
            bool is_cut = false;
            for (uint32_t k = 0; k < s->n_stages; k++)
                for (uint32_t h = 0; h < s->stages[k].stage.n_instrs; h++)
                    is_cut |= instrs_of(s, k)[h].kind == KOILA_DO_SLICE &&
                              instrs_of(s, k)[h].user == n && instrs_of(s, k)[h].steal == i;
            if (is_cut) {
                need->dim = 1 - need->dim;
                *planted = true;
            }
        }
    }
}

TEST(oracle__planted_faults_are_caught)
{
    static const struct {
        const char *name;
        fault_fn fn;
        /* at least so many of the runs must show it; what is written over may not matter, a peak
         * may lie elsewhere */
        uint32_t percent;
    } faults[] = {
        { "a base that lives is written in place", steal_what_lives, 30 },
        { "a sum is written over a term that lives", write_over_what_lives, 30 },
        { "a free before the last use", free_too_early, 90 },
        { "a lost free", lose_a_free, 90 },
        { "an accumulator added twice", add_twice, 60 },
        { "a clone nobody planned", own_nothing, 3 },
        { "a free nobody does", forget_an_allocation, 1 },
        { "a piece nobody kept", keep_nothing, 95 },
        { "rows of the wrong dimension", cut_elsewhere, 50 },
    };
    for (size_t f = 0; f < KOILA_COUNT(faults); f++) {
        uint32_t n_runs = 0, n_planted = 0, n_caught = 0;
        for (uint64_t seed = 1; seed <= 300; seed++)
            try_graph(seed, faults[f].fn, &n_runs, &n_planted, &n_caught, false);
        printf("%s: caught in %u of %u runs\n", faults[f].name, n_caught, n_planted);
        CHECK(n_planted > 0 && n_caught * 100 >= n_planted * faults[f].percent);
    }
}

static int show(void *user, const char *text, size_t n)
{
    return fwrite(text, 1, n, user) == n ? 0 : 1;
}

TEST(seed)
{ /* look at one: KOILA_ORACLE_SEED=<n> test_schedule_oracle seed */
    const char *s = getenv("KOILA_ORACLE_SEED");
    uint32_t n_runs = 0, n_planted = 0, n_wrong = 0;
    if (!s)
        return;
    const uint64_t seed = strtoull(s, NULL, 10);
    try_graph(seed, NULL, &n_runs, &n_planted, &n_wrong, true);
    random_graph r;
    koila_plan *p = NULL;
    const koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = UINT64_MAX, .rows = 1 };
    CHECK(rg_init(&r, NULL, seed, NULL, 0, n_steps(seed)) == KOILA_OK);
    koila_graph_print(r.g, show, stdout);
    CHECK(koila_plan_new(r.g, r.targets, r.n_targets, &o, NULL, &p, NULL) == KOILA_OK);
    if (p)
        koila_plan_print(p, show, stdout);
    koila_plan_free(p);
    rg_deinit(&r);
}
