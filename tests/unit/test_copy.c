/* A copied step: the same to print, to hash and to predict, and nobody else's. */
#include <pthread.h>

#include "harness.h"
#include "graph/table.h"
#include "koila/koila.h"
#include "random_graph.h"

typedef struct text {
    char *at;
    size_t n;
} text;

static int collect(void *user, const char *s, size_t n)
{
    text *t = user;
    t->at = realloc(t->at, t->n + n + 1);
    memcpy(t->at + t->n, s, n);
    t->n += n;
    t->at[t->n] = 0;
    return 0;
}

static char *printed(const koila_graph *g)
{
    text t = { 0 };
    CHECK(koila_graph_print(g, collect, &t) == KOILA_OK);
    return t.at;
}

/* Calls that no graph names, and ids between those that a graph names. */
static void litter(koila_table *t, int64_t from, int64_t n)
{
    for (int64_t size = from; size < from + n; size++) {
        char name[32];
        uint32_t id;
        snprintf(name, sizeof name, "text %lld", (long long)size);
        CHECK(koila_table_text(t, name, &id) == KOILA_OK);
        CHECK(koila_table_opaque(t, name, &id) == KOILA_OK);
        CHECK(koila_table_meta(t, KOILA_DTYPE_F64, 0, 1, &size, NULL, &id) == KOILA_OK);
    }
}

static bool same_entries(const koila_table *a, const koila_table *b, const koila_graph *g)
{
    bool same = true;
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        const koila_sig_info *x = koila_sig_get(a, koila_node_get(g, n).sig);
        const koila_sig_info *y = koila_sig_get(b, koila_node_get(g, n).sig);
        koila_sig again = KOILA_NONE;
        same &= y && x != y && x->n_tokens == y->n_tokens && x->grad_mode == y->grad_mode &&
                strcmp(koila_op_name(a, x->op), koila_op_name(b, y->op)) == 0;
        CHECK(koila_table_sig((koila_table *)b, x, &again) == KOILA_OK);
        same &= again == koila_node_get(g, n).sig; /* the same contents are found, not entered */
    }
    return same;
}

TEST(copy__is_the_same_and_knows_nothing_else)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        random_graph r;
        CHECK_EQ(rg_init(&r, NULL, seed, NULL, 0, 1 + (uint32_t)seed % 40), KOILA_OK);
        litter(r.t, 1000, 20);
        koila_graph *copy = NULL;
        uint32_t line = 0;
        CHECK(koila_graph_line(r.g, "model.py", 3, &line) == KOILA_OK);
        for (koila_value v = 0; v < koila_graph_n_values(r.g); v++) {
            if (koila_value_get(r.g, v).node == KOILA_NONE)
                CHECK(koila_graph_stored(r.g, v, v % 3, 100 * v) == KOILA_OK);
            if (v % 4 == 0)
                CHECK(koila_graph_drop(r.g, v) == KOILA_OK);
        }
        CHECK_EQ(koila_graph_copy(r.g, NULL, &copy), KOILA_OK);
        char *const of_it = printed(r.g);
        CHECK(koila_graph_hash(copy) == koila_graph_hash(r.g));
        CHECK(same_entries(r.t, koila_graph_table(copy), r.g));
        CHECK(koila_table_forget(r.t, NULL, NULL) == KOILA_OK);
        CHECK_EQ(koila_table_n_known(koila_graph_table(copy)), koila_table_n_known(r.t));
        CHECK_EQ(koila_table_n_ops(koila_graph_table(copy)), koila_table_n_ops(r.t));
        for (koila_value v = 0; v < koila_graph_n_values(r.g); v++) {
            const koila_stored a = koila_graph_stored_get(r.g, v);
            const koila_stored b = koila_graph_stored_get(copy, v);
            CHECK(a.storage == b.storage && a.bytes == b.bytes);
        }
        CHECK_EQ(koila_graph_n_drops(copy), koila_graph_n_drops(r.g));
        rg_deinit(&r); /* the copy outlives it */
        litter(koila_graph_table(copy), 5000, 50);
        CHECK(koila_graph_check(copy, NULL));
        char *const of_copy = printed(copy);
        CHECK_STR(of_copy, of_it);
        free(of_it);
        free(of_copy);
        koila_graph_copy_free(copy);
    }
}

TEST(copy__has_the_rules_of_users)
{
    random_graph r;
    koila_graph *copy = NULL;
    CHECK_EQ(rg_init(&r, NULL, 7, NULL, 0, 20), KOILA_OK);
    litter(r.t, 1000, 20);
    CHECK_EQ(koila_table_rule(r.t, "mylib::op", "S0,R->S0", NULL), KOILA_OK);
    CHECK_EQ(koila_graph_copy(r.g, NULL, &copy), KOILA_OK);
    const koila_table *t = koila_graph_table(copy);
    CHECK_EQ(t->user_rules.n, 1);
    CHECK_STR(koila_text(t, t->user_rules.at[0].op), "mylib::op");
    CHECK_STR(koila_text(t, t->user_rules.at[0].text), "S0,R->S0");
    koila_graph_copy_free(copy);
    rg_deinit(&r);
}

TEST(copy__the_nth_allocation_may_fail)
{
    random_graph r;
    CHECK_EQ(rg_init(&r, NULL, 7, NULL, 0, 20), KOILA_OK);
    uint64_t at = 1;
    for (;; at++) {
        failing_allocator fail = { .at = at };
        const koila_allocator mem = { failing_realloc, &fail };
        koila_graph *copy = NULL;
        const koila_status status = koila_graph_copy(r.g, &mem, &copy);
        CHECK(status == (fail.n_calls < at ? KOILA_OK : KOILA_NO_MEMORY));
        CHECK((status == KOILA_OK) == (copy != NULL));
        koila_graph_copy_free(copy);
        CHECK_EQ(fail.n_live_bytes, 0);
        if (fail.n_calls < at)
            break;
    }
    CHECK(at > 30);
    rg_deinit(&r);
}

/* ---- beside the thread that owns the table */

typedef struct job {
    koila_graph *copy;
    const koila_device *device;
    koila_prediction p;
    koila_status status;
} job;

static void *predict(void *user)
{
    job *j = user;
    j->status = koila_predict(j->copy, j->device, NULL, NULL, &j->p, NULL);
    return NULL;
}

TEST(copy__is_predicted_by_one_thread_while_another_uses_the_table)
{
    koila_device *d = NULL;
    CHECK_EQ(koila_device_builtin("h100-80gb", NULL, &d, NULL), KOILA_OK);
    for (uint64_t seed = 0; seed < 40; seed++) {
        enum { N = 2 };
        random_graph r;
        job jobs[N] = { 0 };
        pthread_t threads[N];
        koila_prediction alone;
        CHECK_EQ(rg_init(&r, NULL, seed, NULL, 0, 30), KOILA_OK);
        for (int i = 0; i < N; i++) {
            jobs[i].device = d;
            CHECK_EQ(koila_graph_copy(r.g, NULL, &jobs[i].copy), KOILA_OK);
            CHECK_EQ(pthread_create(&threads[i], NULL, predict, &jobs[i]), 0);
        }
        for (int64_t round = 0; round < 20; round++) {
            litter(r.t, 1000 * round, 30);
            CHECK(koila_table_forget(r.t, NULL, NULL) == KOILA_OK);
        }
        const koila_status status = koila_predict(r.g, d, NULL, NULL, &alone, NULL);
        for (int i = 0; i < N; i++) {
            CHECK_EQ(pthread_join(threads[i], NULL), 0);
            CHECK_EQ(jobs[i].status, status);
            if (status == KOILA_OK)
                CHECK(memcmp(&jobs[i].p.steady, &alone.steady, sizeof alone.steady) == 0 &&
                      jobs[i].p.rows == alone.rows && jobs[i].p.n_notes == alone.n_notes);
            koila_graph_copy_free(jobs[i].copy);
        }
        rg_deinit(&r);
    }
    koila_device_free(d);
}
