/* schedule_state.h — what scheduling a step knows. Only schedule.c, loops.c, policy.c and emit.c
 * see it. */
#ifndef KOILA_SRC_SCHEDULE_STATE_H
#define KOILA_SRC_SCHEDULE_STATE_H

#include "base/vec.h"
#include "engine/cost.h"
#include "engine/schedule.h"
#include "graph/table.h"

typedef VEC(koila_instr) instr_vec;
typedef VEC(koila__event) event_vec;

typedef struct loop_info {
    uint32_t level;
    uint16_t axis;
} loop_info;

/* One use of a value: an entry of the flat inputs. Those of node n are span[n].in ..
 * span[n].in_end. */
typedef struct use {
    koila_value value;
    koila_node from, user; /* the producer, or KOILA_NONE; the node with this input */
    /* the next use of the value by a needed node that reads it, or KOILA_NONE */
    uint32_t next;
    bool reads, local; /* see koila__reads(); find_local(): only what is read */
    bool is_whole;     /* reads the whole value as it is: no slice is needed */
} use;

typedef struct span {
    uint32_t in, in_end, out, out_end; /* of a node: its uses, its results */
} span;

/* When a node runs. */
typedef enum runs { RUNS_NEVER, RUNS_ONCE, RUNS_IN_LOOP } runs;

/* What is rare of a node, as bits. */
enum {
    IS_MODULE = 1,          /* runs as it is, and leaves a graph */
    IS_MODULE_BACKWARD = 2, /* reads one */
    SPLITS_UNSAFELY = 4,    /* each fresh result has a part of the storage of its own */
    SUMS = 8,               /* Note [Shared terms] */
    WRITES = 16,
    ADDS = 32, /* makes a sum of two terms, perhaps in the memory of one of them */
};

/* A set of loops: 64 to a cell, cells in order, empty ones left out; a set is its first cell or
 * KOILA_NONE. Most nodes run in one loop forward and one backward. */
typedef uint32_t loop_set;
typedef struct cell {
    uint64_t bits;
    uint32_t word, next;
} cell;

/* Who owns a storage; decides what happens when the last value on it is dead. */
typedef enum owner {
    /* not owned here: a leaf, a whole value that is viewed, a piece just kept */
    OWNER_NONE,
    OWNER_SCOPE, /* owned by this scope alone: may be written in place */
    OWNER_PIECE, /* a kept piece in its last use: released when the slice is complete */
    /* a copied slice of a whole value; a slice of all rows is no copy */
    OWNER_SLICE,
    OWNER_CUT,       /* a slice of several blocks: always a copy */
    OWNER_COLLECTED, /* whole, made slice by slice: dense */
} owner;

typedef struct sig_cost {
    koila__cost cost;
    double n_bytes; /* of the results */
    bool known, is_view;
    bool is_opaque; /* results stay in the loop that made them */
} sig_cost;

typedef struct life {
    /* its storage, named by the value that allocated it, or see pass_on() */
    koila_value root;
    uint32_t alive;   /* as root: values alive on that storage */
    koila_value made; /* as root: the value that allocated it, by which events name it */
    /* the part of the storage it may touch: the root for all of it, else the unsafe_split result
     * from which it comes */
    koila_value region;
    /* as region: values alive there; sum over the regions of a root == alive of the root */
    uint32_t touching;
    /* as root: owner. Two bytes: as compilers see it a write to one byte may change any memory, and
     * all that is in registers is read again */
    uint16_t owned;
    bool shared; /* as root: Note [Shared terms] */
    bool here;   /* alive in this scope */
} life;
typedef life *scope; /* [value] */

/* The storage of a whole value, as loops see it. */
typedef struct whole_value {
    uint32_t begin; /* the first loop at whose end it is there */
    uint32_t end;   /* the first at whose end it need not be, as far as calls that run once go */
    uint32_t until; /* the same, of one policy */
    koila_node last_call; /* the last call outside loops that reads it, or KOILA_NONE */
    bool is_result, is_read_in_loop;
    uint64_t n_bytes;
} whole_value;

/* [value] the loop after the last one that reads it whole, under a policy. */
typedef struct whole_reads {
    koila__keep keep;
    uint32_t *until;
} whole_reads;
enum { MOST_READS = 6 };

typedef struct slice_of {
    koila_node user;
    uint32_t input;
} slice_of;

struct koila__scheduler {
    const koila__placed *p;
    const koila_graph *g;
    koila_allocator mem;
    koila__arena tmp;
    koila__arena spare; /* memory of a recycled schedule, for the next one */
    koila__keep keep;
    uint32_t n_nodes, n_values;

    bool *needed;     /* [node] */
    uint16_t *runs;   /* [node] runs */
    uint16_t *rare;   /* [node] what is rare of it */
    bool any_again;   /* a needed node runs again */
    bool any_foreign; /* a needed node is_foreign (graph/table.h) */
    uint32_t *level;  /* [node] */
    /* [node] the last level that it can run at, outside loops; of a node in loops its level */
    uint32_t *latest;
    uint32_t n_levels;
    uint32_t *loop_of;    /* [level, axis] the loop of such nodes */
    double *work;         /* [node] of its cost */
    sig_cost *cost;       /* [signature]: calls repeat, so each is computed once */
    bool *is_expensive;   /* [node] its results are worth keeping */
    bool *is_start;       /* [node] calls that run again begin with its results */
    bool *is_keepable;    /* [value] */
    bool *is_result;      /* [value] final target */
    bool *is_barrier;     /* [value] some use needs it whole */
    uint32_t *made_whole; /* [value] loop that makes it whole, or KOILA_NONE */
    span *span;           /* [node] */
    use *uses;            /* [flat input] */
    uint32_t *first_use;  /* [value] chain of its uses */
    bool *is_viewed;      /* [node] a result is the only input of a view */
    bool *is_mere_view;   /* [node] such a view */
    bool *aliases;        /* [node] its fresh results share the storage of its first input */

    loop_info *loops;
    uint32_t n_loops;
    uint32_t *home;  /* [node] first loop that runs it, or KOILA_NONE */
    VEC(cell) cells; /* of all sets */
    loop_set *exec;  /* [node] loops that run it when exactly the expensive results are kept */
    loop_set *use;   /* [value] keepable only, else KOILA_NONE: loops that read it locally */
    bool no_memory;  /* a set could not grow */

    bool *kept; /* [value] its pieces, one per slice, are held now */
    /* [loop], [value]: kept pieces by the loop that uses them next */
    koila_value *kept_first, *kept_next;
    bool *given_up;    /* [value] its piece was fetched for the last time in the current loop */
    uint32_t *in_loop; /* [node] == loop + 1: runs in that loop */
    /* [node / 64] in_loop of the current loop as bits, for reading in order; zero between loops */
    uint64_t *order_bits;
    uint64_t *keeps_bits; /* [node / 64] a result is expensive, and a later loop may use it */
    uint32_t n_needed;    /* nodes */
    uint32_t *stack;      /* DFS; then the order of the current loop */
    uint32_t *mark;       /* [node] epoch */
    uint32_t epoch;
    /* nodes outside loops by level: chains in recorded order */
    uint32_t *whole_of_level, *whole_next;
    uint32_t *target_first, *target_next; /* [loop], [value]: what each loop makes whole */
    uint32_t *ending_first, *ending_next; /* [stage], [value]: whole values by whole_last */

    /* emission */
    /* [value] instruction number of its last use in the current stage's emission order */
    uint32_t *last_use;
    uint32_t *last_run; /* [node] last loop that can possibly run it, or KOILA_NONE */
    /* [value] of a result that p->addends names: calls of the current loop that make addends of it,
     * and those still to be emitted; NULL: there are none */
    uint32_t *n_addends, *n_addends_left;
    koila_value *first_term; /* [value] Note [Second terms] in emit.c; KOILA_NONE: it is none */
    /* which values are alive on which storage: whole values; values of the running slice */
    scope whole, slice;
    scope s; /* the scope of the current emission */
    /* [value] the use for which a whole value was sliced; user KOILA_NONE: not a slice */
    slice_of *sliced;
    uint32_t *whole_until; /* [value] last stage that may read whole v, whatever is kept */
    uint32_t *call_until;  /* [value] last stage outside loops that reads it, or KOILA_NONE */
    uint32_t *loop_stage;  /* [loop] its stage */
    uint32_t *whole_seen;  /* [value] last stage so far that reads it, in the current emission */
    uint32_t *whole_last;  /* [value] last stage that reads it, for the current emission */
    uint32_t stage;        /* that is emitted */
    instr_vec instrs;
    event_vec events;
    uint64_t n_emitted, max_emitted;
    uint32_t n_keeps;
    bool any_wide;         /* of the stage being emitted */
    koila__kept work_kept; /* koila__scheduler_kept() */
    /* for it: whole values that are not results of loops, and [value] as which one it is there + 1;
     * [value] the loop after the last one that reads it whole; [loop] bytes that it adds to what is
     * held */
    whole_value *wholes;
    uint32_t n_wholes, *whole_of, *read_until;
    whole_reads reads[MOST_READS]; /* [n_reads] of policies of which the work was asked */
    uint32_t n_reads;
    uint64_t *held_change;
    /* [loop, and behind the last one]: the most bytes that calls outside loops, between the loop
     * before and this one, hold of what no loop behind them needs; of one policy: bytes among them
     * that the loop before leaves */
    uint64_t *call_peak, *ending;
};

/* the name where it is written: while it is filled, and while a policy is scheduled */
typedef koila__scheduler work_state;

#define TRY_ALLOC(p)                                                                               \
    do {                                                                                           \
        if (!(p))                                                                                  \
            return KOILA_NO_MEMORY;                                                                \
    } while (0)

static inline const koila_sig_info *sig_of(const work_state *w, koila_node n)
{
    return koila__node_sig(w->g, n);
}
static inline double work_of(const work_state *w, koila_node n) { return w->work[n]; }
static inline bool exists(const work_state *w, koila_value v)
{
    return w->g->values.at[v].meta != KOILA_NONE;
}
static inline koila_node producer(const work_state *w, koila_value v)
{
    return w->g->values.at[v].node;
}
static inline bool made_in_loop(const work_state *w, koila_value v)
{
    const koila_node n = producer(w, v);
    return n != KOILA_NONE && w->p->node[n].in_loop;
}
static inline koila_placement need_of(const work_state *w, koila_node n, uint32_t i)
{
    return w->p->need[w->g->nodes.at[n].first_input + i];
}
static inline koila_value input_of(const work_state *w, koila_node n, uint32_t i)
{
    return w->uses[w->span[n].in + i].value;
}

/* May the operator's results be its input, or views of it? */
static inline bool maybe_alias(const koila_table *t, koila_op op)
{
    return (t->ops.at[op].flags & KOILA_OP_VIEW) || (t->ops.at[op].facts & KOILA_FACT_MAY_ALIAS);
}

static inline const use *use_at(const work_state *w, uint32_t at)
{
    return at == KOILA_NONE ? NULL : &w->uses[at];
}
static inline const use *uses_of(const work_state *w, koila_value v)
{
    return use_at(w, w->first_use[v]);
}
static inline const use *next_use_of(const work_state *w, const use *u)
{
    return use_at(w, u->next);
}

/* Is sharded v whole before loop j? Then the loop slices it instead of recomputing it. */
static inline bool sliced_in(const work_state *w, koila_value v, uint32_t j)
{
    /* KOILA_NONE is greater than every loop */
    return w->made_whole[v] < j && w->p->value[v].kind == KOILA_S;
}

/* The first loop of the set from `first` on, or KOILA_NONE. */
static inline uint32_t next_loop(const work_state *w, loop_set set, uint32_t first)
{
    for (; set != KOILA_NONE; set = w->cells.at[set].next) {
        const cell *c = &w->cells.at[set];
        uint64_t bits = c->bits;
        if (c->word < first >> 6)
            continue;
        if (c->word == first >> 6)
            bits &= UINT64_MAX << (first & 63);
        if (bits)
            return c->word * 64 + (uint32_t)__builtin_ctzll(bits);
    }
    return KOILA_NONE;
}

static inline bool is_too_much(const work_state *w, double work)
{
    return w->keep.max_work > 0 && work > w->keep.max_work;
}

/* ---- loops.c */

/* v is one term of a sum outside loops: a partial sum that is made whole for that; or what a call
 * outside loops can add to the other term, in a step that does not run as it was recorded. Returns
 * the other term; else KOILA_NONE. */
koila_value koila__other_term(const work_state *w, koila_value v);
/* Finds all that the policies of one graph share. Expected: as koila__scheduler_new(). */
koila_status koila__loops_find(work_state *w, const koila_value *targets, uint32_t n_targets);
/* Once, before the first policy is emitted: a policy that is only bounded asks for none of it.
 * Expected: NO_MEMORY. */
koila_status koila__find_whole_until(work_state *w);

/* ---- policy.c */

/* Forgets the kept values and the loops of an earlier policy. */
void koila__forget_demand(work_state *w);
/* Is v worth keeping after loop j? */
bool koila__keeps(const work_state *w, koila_value v, uint32_t j);
/* v stays kept after loop j, at least until its next use: the decision can only change there. */
void koila__keep_until_next(work_state *w, koila_value v, uint32_t j);
/* What a loop runs: from node lo to hi, in_loop and order_bits tell which; and a lower bound of its
 * instructions: each run, and the end of each result. */
typedef struct koila__demanded {
    koila_node lo, hi;
    uint64_t n_instrs;
} koila__demanded;
/* Finds the nodes that loop j runs: from its targets back to leaves, whole values and kept pieces.
 * *work grows by theirs. */
koila__demanded koila__find_demand(work_state *w, uint32_t j, double *work);
/* The limit of instructions. */
uint64_t koila__max_emitted(const work_state *w);

/* ---- schedule.c */

/* Writes the message of a failure, and returns it. */
koila_status koila__schedule_failed(koila_status status, koila_error *err);

#endif
