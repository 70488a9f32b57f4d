/* outline_state.h — what an outline knows. Only outline.c, outline_choice.c and outline_bound.c see
 * it. */
#ifndef KOILA_SRC_OUTLINE_STATE_H
#define KOILA_SRC_OUTLINE_STATE_H

#include "base/vec.h"
#include "engine/cost.h"
#include "engine/outline.h"
#include "graph/table.h"

/* A storage, named by the value that makes it. */
typedef struct store {
    koila_value value;
    koila_node made;
    uint64_t n_bytes;      /* of a slice, as far as the bound counts it */
    koila_node last_back;  /* the last node after `at` that surely reads it, or KOILA_NONE */
    koila_node first_back; /* the first node after `at` that reads it at all, or KOILA_NONE */
    koila_node last_view;  /* the last view of it up to `at` that a node after `at` reads */
    bool is_held;          /* a node after `at` wants it */
    bool is_fixed;         /* stays in any case */
    bool is_write;         /* of a write */
    bool is_written;       /* a later node writes to it */
    bool is_result;        /* of the step */
    bool is_sure;          /* its maker runs in the loop that is counted */
} store;

/* A node up to `at` that makes storages. */
typedef struct maker {
    koila_node node;
    uint32_t first_store, n_stores, first_edge, n_edges;
    double work;
    double needed_work; /* that, if it is needed, else 0 */
    uint64_t n_bytes;   /* of its storages */
    bool may_repeat, is_expensive;
    koila_node sure; /* its node, if it runs in the loop that is counted, else KOILA_NONE */
} maker;

/* A maker reads a storage. */
typedef struct edge {
    uint32_t store;
    koila_node made; /* of the storage */
    bool takes;      /* it may read a second one */
} edge;

/* Bytes that begin and end with a node. */
typedef struct moment {
    uint64_t rise, fall; /* fall: with the marks below */
} moment;
/* Marks of a node beside its bytes, which are fewer: those of all values are. Something runs again
 * before it; it uses memory inside. */
#define RUNS_BEFORE ((uint64_t)1 << 63)
#define USES_INSIDE ((uint64_t)1 << 62)
#define BYTES_OF_FALL (USES_INSIDE - 1)

/* A storage of some bytes, for the bound. */
typedef struct counted {
    uint64_t n_bytes;
    uint64_t own_end; /* key_of() its maker, where that surely runs; else 0 */
    uint32_t store, maker;
    koila_node begin; /* it counts from `begin` on */
    /* the first node after `at` that reads it, and the one behind the last that surely does; 0:
     * none does */
    koila_node first_back, end_back;
    bool to_end;
} counted;

/* What is asked of a storage, as bits: a second one is wanted, but it stays. */
enum { WANTED = 1, STAYS = 2 };

/* How a node up to `at` runs, as bits. */
enum { RUNS_FIRST = 1, RUNS_AGAIN = 2 };

struct koila__outline {
    const koila__placed *p;
    const koila_graph *g;
    koila__outline_options options;
    koila_allocator mem;
    koila__arena arena;
    koila_node at;
    uint32_t n_nodes;
    koila_value *root;    /* [value] */
    bool *is_part;        /* [value] of a write to a part of a storage, or to what that left */
    uint32_t *store_of;   /* [value] as root: index + 1; 0: not made in the forward pass */
    koila_node *last_use; /* [value] as root: the last node up to `at` that uses it */
    VEC(store) stores;
    VEC(maker) makers;
    VEC(edge) edges;
    double work;       /* of the step as recorded */
    koila__cost *cost; /* [signature] of the nodes' */
    bool uses_host, is_whole;
    bool is_one;         /* all that runs in slices runs in one loop, or nothing does */
    bool *is_needed;     /* [node] it runs at all */
    uint8_t *is_target;  /* [node] RUNS_FIRST where it makes a result of the step, else 0 */
    bool *is_sure;       /* [node] it surely runs in the loop that is counted */
    bool *is_walked;     /* [value as root] a node that surely runs there reads it */
    uint64_t *workspace; /* [node]; NULL: none */
    uint64_t *sum_bytes; /* [node] of a sum's result, which may be written over a term; or 0 */
    uint16_t last_axis;  /* of the loop that is counted, which is the last */
    uint64_t collected;  /* bytes that are there from its second slice on */
    uint64_t results;    /* bytes */

    uint64_t *held, *crossing; /* [node up to at] bytes for the backward pass; see weigh() */
    uint64_t all_held;
    double *share;     /* [node up to at] of what is held */
    uint32_t *viewed;  /* [n_viewed] storages that stay where another segment views them */
    uint32_t n_viewed; /* they are not fixed */
    uint32_t *segment; /* [node up to at] */
    uint32_t last_segment, n_segments;

    /* the choice */
    uint8_t *fate;   /* [store] */
    uint8_t *ask;    /* [store] WANTED, STAYS */
    bool *may_wait;  /* [store] */
    bool *is_spared; /* [maker] its results stay */
    /* [store] how a choice begins: what the backward pass wants, for which node, what stays by its
     * segment, and what is read in the forward pass too if it stays */
    uint8_t *ask0;
    bool *is_late0, *is_read0;
    koila_node *need0;
    bool any;          /* something is dropped */
    koila_node *need;  /* [store] the first node after `at` for which it is wanted */
    koila_node *needs; /* [maker] the first one for which it runs again */
    bool *is_again;    /* [maker] */
    uint32_t *again;   /* [n_again] those makers, the last first */
    uint32_t n_again;
    bool *is_first;   /* [maker] it runs in the forward pass too: something there needs it */
    bool *is_read;    /* [store] by what runs in the forward pass, or what runs again */
    bool *is_late;    /* [store] by the backward pass, or what runs again */
    bool *is_start;   /* [store] by what runs again */
    bool *is_taken;   /* [store] room: it is counted */
    koila_node *last; /* [store] the last node up to `at` that surely reads it, or KOILA_NONE */
    double chosen_work;
    uint8_t *runs; /* [node] RUNS_FIRST, RUNS_AGAIN: see koila__outline_work_of_all() */

    /* the bound */
    uint64_t floor;   /* of all choices */
    uint64_t most;    /* of the step as recorded */
    moment *moments0; /* [node] of what is made after `at` */
    moment *moments;  /* [node] with what the choice adds */
    /* the node where the last choice that may not fit held too much, or KOILA_NONE; what is held
     * there whatever is chosen: collected, and of what is made after `at` */
    koila_node too_much;
    uint64_t held_there;
    uint32_t *maker_of; /* [store] */
    counted *counted;   /* [n_counted] */
    uint32_t n_counted;
    uint64_t *rise_again, *fall_again; /* [maker] the same when it runs again */
    uint64_t *end;                     /* [store] key_of() its last reader so far; 0: none */
    uint64_t *end0;                    /* [store] of the backward pass */
    /* [node] with RUNS_BEFORE, [maker] + 1: who runs again before it */
    uint32_t *head, *next;
};

#define TRY_ALLOC(x)                                                                               \
    do {                                                                                           \
        if (!(x))                                                                                  \
            return KOILA_NO_MEMORY;                                                                \
    } while (0)
/* o->field := n zeroes, until the outline is freed */
#define MAKE(field, n)                                                                             \
    TRY_ALLOC(o->field = koila__arena_array(&o->arena, (size_t)(n), sizeof *o->field))
/* The same, unset. */
#define MAKE_ROOM(field, n)                                                                        \
    TRY_ALLOC(o->field = koila__arena_room(&o->arena, (size_t)(n) * sizeof *o->field))

/* Steps of koila__outline_new(), in this order; each makes arrays of its own. Expected: NO_MEMORY.
 *
 * Finds which nodes the bound counts; storages and needed nodes are known. */
koila_status koila__outline_find_counted(koila__outline *o);
/* Counts what is there whatever is dropped, and finds the floor; makers, their readers and the
 * results are known. */
koila_status koila__outline_count_fixed(koila__outline *o, const koila_value *targets,
                                        uint32_t n_targets);
/* The first step of koila__outline_begin(): finds how each choice begins. */
koila_status koila__outline_begin_choice(koila__outline *o);

/* Is its result its first input, or a view of it? */
bool koila__outline_is_view(const koila__outline *o, koila_node n);
/* Does node n read input i as its producer left it: no barrier, and no slice of a whole value? */
bool koila__outline_is_local(const koila__outline *o, koila_node n, uint32_t i);
/* The bytes that the bound counts of result j of node n, which lies in a storage of its own. A
 * write takes over its base, or makes a copy; if the base is a part of a storage, it is no bytes of
 * its own. */
uint64_t koila__outline_bytes(const koila__outline *o, koila_node n, uint32_t j);

static inline const koila_sig_info *sig_of(const koila__outline *o, koila_node n)
{
    return koila__node_sig(o->g, n);
}

static inline koila_node producer(const koila__outline *o, koila_value v)
{
    return o->g->values.at[v].node;
}

static inline koila_value input_of(const koila__outline *o, koila_node n, uint32_t i)
{
    return o->g->inputs.at[o->g->nodes.at[n].first_input + i];
}

static inline koila_value output_of(const koila__outline *o, koila_node n, uint32_t j)
{
    return o->g->nodes.at[n].first_output + j;
}

static inline uint64_t storage_bytes(const koila__outline *o, koila_value v)
{
    return o->g->values.at[v].meta == KOILA_NONE ? 0 : koila__value_meta(o->g, v)->n_storage_bytes;
}

/* A moment behind node n, after all that runs again before it. */
static inline uint64_t key_of(koila_node n) { return (uint64_t)n << 32 | UINT32_MAX; }

#endif
