/* simulation.h — a plan that runs on a simulated cache instead of a GPU: the state of that run, and
 * the part of each file of src/predict/. Internal to src/predict/.
 *
 *   simulate.c   storages, slices, accumulators: the plan's instructions as requests to the cache
 *   plain.c      the same for plain PyTorch: the recorded operators in their order
 *   training.c   what a training step holds besides its plan: leaves, optimizer, buckets
 *   inside.c     temporaries of operators (inside.h)
 *   fit.c        which plan fits; the planner on a live device
 *   predict.c    koila_predict(): several runs, their ranges and notes
 *
 * A storage is counted, not a tensor: values that share memory share a storage. Between two
 * instructions (koila__sim_check() has them as code):
 *   sum of refs == slots of whole, local, kept and last_out that are not 0
 *   between two slices every slot of local is 0
 *   the simulation's blocks in the cache == storages with refs > 0, and `state`
 */
#ifndef KOILA_SRC_SIMULATION_H
#define KOILA_SRC_SIMULATION_H

#include "allocator/cache.h"
#include "base/vec.h"
#include "predict/inside.h"

/* Index of a storage; 0: none. */
typedef uint32_t koila__storage_id;

typedef struct koila__storage {
    uint64_t addr;     /* in the cache; 0 when it has no bytes, or the request failed */
    uint64_t bytes;    /* as requested */
    uint32_t refs;     /* values and lists that hold it; 0: it may be used for the next storage */
    koila_value value; /* that made it */
    koila__storage_id next_unused; /* while refs == 0; 0 ends the list */
} koila__storage;

/* When a value ends: after so many nodes, and there in which order. */
typedef struct koila__ending {
    uint32_t n_nodes, order;
    koila_value value;
} koila__ending;

typedef struct koila__sim {
    /* ---- what runs, and where. All borrowed */
    const koila_plan *plan; /* NULL: koila__sim_open() alone, or plain PyTorch */
    const koila_graph *g;   /* the plan's lowered graph; the recorded one without a plan */
    const koila_table *t;   /* of g */
    const koila_device *d;  /* the profile of the device */
    koila_predict_opts o;   /* copied; zeros: a step without optimizer */
    koila_cache *c;         /* whoever opens the simulation sets it; not freed here */
    uint64_t stream;        /* that requests come from, as c names it */
    koila__level level;     /* low, expected or high use of memory by operators */
    uint32_t n_stages;      /* of the plan */
    uint32_t n_values;      /* of g */
    uint32_t n_ops;         /* of t, when the simulation was opened */

    /* ---- host memory */
    koila_allocator mem;
    koila__arena arena; /* every array below that has no capacity of its own */

    /* ---- facts of values and operators, known before the run */
    koila_node middle;  /* the first after the forward; the number of nodes: there is no backward */
    uint8_t *is_target; /* [n_values] made by the step, and alive after it */
    uint8_t *is_grad;   /* [n_values] a target of a parameter's sizes: its gradient */
    uint8_t *is_mask;   /* [n_values] Note [Masks] */
    /* as in koila_fit_opts, or NULL */
    bool (*measured)(void *user, koila_sig sig, int64_t rows, int64_t batch, uint64_t *bytes);
    void *measured_user;
    uint8_t *is_square;        /* [n_values] Note [Square matrices] */
    koila__inside_kind *kinds; /* [n_ops] */

    /* ---- plain PyTorch */
    bool is_plain;
    /* [n_ends <= 2 * n_values] of values that end in the step, in their order */
    koila__ending *ends;
    /* [n_values] of casts: in which part of the step they were read; nodes after which those of a
     * checkpoint's forward end, or 0 */
    uint8_t *was_read;
    uint32_t *early_end;
    uint32_t *release; /* [nodes + 1] when autograd next gives up what it saved */
    uint32_t n_ends;
    uint8_t *adds_up;  /* [nodes] a sum of gradients that is written over its first term, which is
                        * held by nothing else then */
    koila_value *twin; /* [n_values] of a cast: the first leaf with the same storage; else itself */

    /* ---- storages */
    VEC(koila__storage) storages; /* [0] is none */
    koila__storage_id unused;     /* the first with refs == 0; 0: none */
    koila__storage_id *whole;     /* [n_values] of a whole value */
    koila__storage_id *local;     /* [n_values] of a value's slice, in the loop that runs */

    /* ---- pieces that loops keep for later loops */
    uint32_t *kept_row;      /* [n_values] row + 1 of `kept`; 0: never kept */
    koila__storage_id *kept; /* [n_kept][kept_slices] */
    uint32_t n_kept;         /* values that are kept */
    uint32_t kept_slices;    /* slices of the loop that has most */
    koila_value *drop;       /* [drop_cap] kept pieces given up at the end of the slice */
    uint32_t n_drop;
    uint32_t drop_cap; /* FETCH instructions of the plan */

    /* ---- the slice that runs */
    bool in_loop;             /* else a whole stage */
    const koila_inner *inner; /* of the stage */
    int64_t rows;             /* of the slice; 0 in a whole stage */
    int64_t batch;            /* rows of the loop's axis; 0 in a whole stage */

    /* ---- what outlives a step */
    VEC(uint64_t) state;             /* addresses: optimizer, buckets, parameters behind casts */
    VEC(koila__storage_id) last_out; /* loss and outputs of the step before, until rebound */
    bool has_cublas[2];              /* its workspace of backward [0], of forward [1] is there */
    bool one_cublas;                 /* both are the same */

    /* ---- the outcome */
    koila_status status;  /* the first failure: then nothing more is requested */
    bool ends_at_oom;     /* in: a request that fails is a failure, KOILA_OOM */
    bool oom;             /* some request failed */
    bool may_do_without;  /* a request of now that fails is no failure */
    uint64_t peak_bytes;  /* highest bytes allocated in c after a request */
    koila_node at_node;   /* that runs; KOILA_NONE: none */
    koila_node peak_node; /* that ran at the peak */

    /* ---- a look at what is alive */
    uint64_t look_at_bytes; /* in: when so many bytes are allocated for the first time; 0: never */
    void (*look)(void *user, const struct koila__sim *s);
    void *look_user;
    bool looked;
} koila__sim;

/* ---- simulate.c. A failure of the host's memory is kept in s->status. */

/* Finds the facts of a graph's values that do not depend on a plan. `o` may be NULL. Close it also
 * after a failure: koila__sim_close(). Expected: NO_MEMORY. */
koila_status koila__sim_open(koila__sim *s, const koila_graph *g, const koila_device *d,
                             const koila_predict_opts *o, koila__level level);
/* The same for the lowered graph of a plan, which can then run. Expected: NO_MEMORY; UNSUPPORTED
 * when the plan keeps too many pieces. */
koila_status koila__sim_open_plan(koila__sim *s, const koila_plan *plan, const koila_device *d,
                                  const koila_predict_opts *o, koila__level level);
void koila__sim_close(koila__sim *s);
/* One operator, on the slice that runs: results, temporaries. steal: see koila_instr. */
void koila__sim_run_node(koila__sim *s, koila_node n, uint16_t steal);
/* The first two equations above, between two slices; true after a failure, which may leave a slice
 * half done. */
bool koila__sim_check(const koila__sim *s);
/* Every stage of the plan once. */
void koila__sim_run_plan(koila__sim *s);

/* A request to the cache, and its release. 0: no bytes, or it failed. */
uint64_t koila__sim_take(koila__sim *s, uint64_t bytes);
void koila__sim_give(koila__sim *s, uint64_t addr);
/* A request that is never released: it lives as long as the model. */
void koila__sim_take_state(koila__sim *s, uint64_t bytes);
/* A storage with one reference; 0 when the host is out of memory. */
koila__storage_id koila__storage_new(koila__sim *s, uint64_t bytes, koila_value v);
koila__storage_id koila__storage_hold(koila__sim *s, koila__storage_id i); /* one reference more */
void koila__storage_drop(koila__sim *s, koila__storage_id *slot);          /* one less; *slot = 0 */

/* Sizes of a value, in bytes. NULL, 0: it does not exist. */
const koila_meta_info *koila__sim_meta(const koila__sim *s, koila_value v);
uint64_t koila__whole_bytes(const koila__sim *s, koila_value v);
/* Bytes on CUDA of a storage of v that was recorded with `bytes`. */
uint64_t koila__cuda_bytes(const koila__sim *s, koila_value v, uint64_t bytes);

/* ---- plain.c */

/* After koila__sim_open(): the step runs as plain PyTorch does. Then koila__sim_set_targets() and
 * koila__sim_load_leaves(), koila__sim_sort_ends(), once. Expected: NO_MEMORY. */
koila_status koila__sim_open_plain(koila__sim *s);
void koila__sim_sort_ends(koila__sim *s);
/* Is v autocast's copy of a parameter? It is a leaf, because what happens to parameters alone is
 * not recorded; plain PyTorch makes it for the first operator that reads it. */
bool koila__is_cast(const koila__sim *s, koila_value v);
/* Every recorded operator once. */
void koila__sim_run_plain(koila__sim *s);

/* ---- training.c */

/* Values that nobody uses are the targets of a step: gradients, loss, outputs. On success *out is
 * yours: koila__vec_free(). Expected: NO_MEMORY. */
typedef VEC(koila_value) koila__values;
koila_status koila__find_targets(const koila_graph *g, const koila_allocator *mem,
                                 koila__values *out);
/* The step makes targets[n], some of which are gradients. */
void koila__sim_set_targets(koila__sim *s, const koila_value *targets, uint32_t n);
/* Is v a parameter, mask or table: used by the recording but not made by it? */
bool koila__is_real_leaf(const koila__sim *s, koila_value v);
/* Does the leaf share the storage of another one? See koila__sim_load_leaves(). */
bool koila__is_transposed_leaf(const koila__sim *s, koila_value v);
/* Loads the tensors that are on the device before the first step. */
void koila__sim_load_leaves(koila__sim *s);
/* The names of the last step's loss and outputs are bound to those of this one: before the backward
 * begins, or, of a step without one, at its end. */
void koila__sim_drop_last_outputs(koila__sim *s);
/* One training step; `first`: it makes the optimizer's state. */
void koila__sim_step(koila__sim *s, bool first);

/* ---- fit.c */

/* A search for a plan that fits: koila_plan_options.accepts. At most KOILA_MAX_SIMULATIONS plans
 * are tried of each way (rows, another axis, both, with results dropped), and the last try is left
 * for one row a slice. */
typedef struct koila__fit_search {
    /* in: does p fit? *yes is written on success */
    koila_status (*fits)(void *user, const koila_plan *p, bool *yes);
    void *user;
    koila_status status;     /* of the first try that failed: nothing is tried afterwards */
    uint32_t n_simulations;  /* tries */
    uint32_t refused_slices; /* of the last plan that did not fit; 0: none */
    uint64_t refused_bytes;  /* its peak */
    uint32_t along;          /* 1 + the dimension of the axis that is tried now; 0: the rows */
    bool drops;              /* results are computed again, or wait in host memory */
    bool accepted;           /* some plan fits */
    const koila_graph *accepted_graph; /* of the last one that does; only to be compared */
    int64_t accepted_rows;
} koila__fit_search;
/* koila_plan_options.accepts; `user` is a koila__fit_search. */
bool koila__fit_accepts(void *user, const koila_plan *p);
/* Rows of a slice that cut the largest axis of g into at most n slices. */
int64_t koila__rows_of_slices(const koila_graph *g, int64_t n);

#endif
