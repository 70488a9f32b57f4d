/* outline.h — a placed step as far as dropping results is concerned: the storages that its forward
 * pass makes, who reads them, and what becomes of each. Internal to src/engine. */
#ifndef KOILA_SRC_OUTLINE_H
#define KOILA_SRC_OUTLINE_H

#include "placement/place.h"

/* Host memory for values of one device. */
typedef struct koila__host {
    uint64_t n_bytes; /* that may be taken of it */
    double price;     /* work (plan_costs.h) of a byte that is copied there or back; 0: none */
    uint16_t device;  /* whose values; as koila_meta_info.device */
} koila__host;

/* What is dropped. */
typedef struct koila__recompute {
    /* the forward pass ends with this node: where the step holds the most */
    koila_node at;
    /* The nodes up to `at` are cut into so many segments that hold equal bytes for the backward
     * pass. What crosses from one to another stays, and so does the last segment: it is needed at
     * once. 2 or more; 1 where only host memory is used; 0: there are none, each maker may run
     * again. */
    uint32_t n_segments;
    bool keeps_expensive; /* results of expensive operators (cost.h) stay too */
    /* Of the bytes held for the backward pass, the first so many KOILA__OFFLOAD_PARTS may wait in
     * host memory: what stays, and what is cheaper to move than to compute again. 0: none may.
     * With n_segments == 1 nothing is computed again, but views of what was moved. */
    uint32_t n_offloaded;
    koila__host host; /* where they wait */
    /* each copy ends one copy later than its value is needed: copies run beside the kernels */
    bool ahead;
    bool apart; /* what is collected again has loops of its own: less at once, more loops */
    /* what runs again waits for the calls before it: less at once, more loops */
    bool behind;
} koila__recompute;
enum { KOILA__OFFLOAD_PARTS = 16 };

/* What becomes of a storage that the forward pass makes. */
typedef enum koila__fate {
    KOILA__STAYS, /* until its last use, as recorded */
    KOILA__AGAIN, /* dropped after its last use in the forward pass, and made once more */
    KOILA__WAITS, /* in host memory */
} koila__fate;

/* How the step runs, for the bound. */
typedef struct koila__outline_options {
    const int64_t *rows; /* [axes] of a slice */
    uint64_t (*workspace)(void *user, koila_sig sig, int64_t rows, int64_t batch);
    void *user;
    uint32_t n_loops; /* of the step as it was placed; 0: it runs whole */
    bool uses_host;   /* results may wait in host memory */
    /* Calls that write in place may run again. What they have written ends the segments of many
     * nets well (the sums of residual blocks), so it stays where that helps. */
    bool repeats_writes;
} koila__outline_options;

/* With no more of them, forward and backward pass share one. */
enum { KOILA__FEW_LOOPS = 2 };

typedef struct koila__outline koila__outline;
/* p and the options' rows must outlive it; targets: values of p; at: koila__recompute.at. On
 * KOILA_OK *out is yours: koila__outline_free(). Expected: NO_MEMORY. */
koila_status koila__outline_new(koila__outline **out, const koila__placed *p,
                                const koila_value *targets, uint32_t n_targets, koila_node at,
                                const koila__outline_options *options, const koila_allocator *mem);
void koila__outline_free(koila__outline *o);
/* Once, before anything is chosen: an outline whose floor is too high needs no choice. Expected:
 * NO_MEMORY. */
koila_status koila__outline_begin(koila__outline *o);
/* Before koila__outline_gauge(): chooses that nothing is dropped, and remembers what that needs. */
void koila__outline_measure(koila__outline *o);

/* Decides what becomes of each storage. False: nothing is dropped. */
bool koila__outline_choose(koila__outline *o, const koila__recompute *how);
/* The same; false, sooner, also where more waits (koila__outline_waiting()). Then nothing is known
 * of what becomes of each. */
bool koila__outline_choose_within(koila__outline *o, const koila__recompute *how,
                                  uint64_t most_waiting);
/* A maker is a call of the forward pass that makes storages. */
uint32_t koila__outline_n_makers(const koila__outline *o);
/* Its work, the bytes of its results in a slice, and whether it runs again by what was chosen last.
 */
double koila__outline_maker_work(const koila__outline *o, uint32_t k);
uint64_t koila__outline_maker_bytes(const koila__outline *o, uint32_t k);
bool koila__outline_is_again(const koila__outline *o, uint32_t k);
/* [makers] the results of which ones stay: fill it before koila__outline_choose_makers(). */
bool *koila__outline_spared(koila__outline *o);
/* Decides by what is spared alone, whatever the segments: all that the backward pass needs of the
 * others is dropped, and so is what these need. False: nothing is. */
bool koila__outline_choose_makers(koila__outline *o);

/* Bytes that are there at some moment whatever is chosen: no bound is lower. Before
 * koila__outline_begin() too. */
uint64_t koila__outline_floor(const koila__outline *o);
/* Of what was chosen last: a lower bound of the peak of its schedule, in the options' rows. */
uint64_t koila__outline_bound(koila__outline *o);
/* The same where it is at most `limit`; else some number above that, which is found sooner. */
uint64_t koila__outline_bound_up_to(koila__outline *o, uint64_t limit);
/* Is it no more than n_bytes? */
bool koila__outline_may_fit(koila__outline *o, uint64_t n_bytes);
/* False: no choice of makers that spares what is spared now, and maybe more, needs as little as
 * n_bytes. That is found sooner than what a choice needs. Not of an outline with host memory. */
bool koila__outline_may_spare(koila__outline *o, uint64_t n_bytes);
/* The same, found much sooner: as far as the node tells where too much was held last. */
bool koila__outline_may_spare_there(const koila__outline *o, uint64_t n_bytes);
/* Bytes of the storages that stay and that the backward pass, or what runs again, reads: in a
 * slice, or, where loops lie between, in all rows what is worth keeping. */
uint64_t koila__outline_waiting(const koila__outline *o);
/* No less waits in any choice of makers that spares what is spared now, and maybe more. What was
 * chosen last says where to look for it. */
uint64_t koila__outline_waiting_at_least(koila__outline *o);
/* Bytes of the results of the step. */
uint64_t koila__outline_results(const koila__outline *o);
/* Does so much exceed the budget by far, beyond the results of the step? */
bool koila__outline_is_hopeless(const koila__outline *o, uint64_t bound, uint64_t budget);
/* The bound, and how much is held near that: each moment counts by a power of its bytes. */
typedef struct koila__gauge {
    uint64_t bound;
    double strain;
} koila__gauge;
koila__gauge koila__outline_gauge(koila__outline *o);
/* The same of its work: every call once, those that run again twice, and copies. */
double koila__outline_work(const koila__outline *o);
/* The same, and no less: of each call that is needed, views and what may be one too. Takes as long
 * as a choice. Not of an outline with host memory. */
double koila__outline_work_of_all(koila__outline *o);

/* The work of the step as recorded, and how many calls it needs. */
double koila__outline_recorded(const koila__outline *o, uint32_t *n_needed);

/* The value that names the storage in which v lies. */
koila_value koila__outline_root(const koila__outline *o, koila_value v);
/* What became of the storage that `root` names. */
koila__fate koila__outline_fate(const koila__outline *o, koila_value root);
/* The last node of the forward pass that uses it. */
koila_node koila__outline_last(const koila__outline *o, koila_value root);

/* Does the step need node n? */
bool koila__outline_is_needed(const koila__outline *o, koila_node n);
/* May node n read a second value as its input i? */
bool koila__outline_may_take(const koila__outline *o, koila_node n, uint32_t i);

#endif
