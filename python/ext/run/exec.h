/* exec.h — what the executor's files share: run.c (a request for values, start to end), exec.c (one
 * plan walked on real tensors), plan_cache.c (which plan), run_module.c (the module's functions).
 * The rest of the extension sees run.h. */
#ifndef KOILA_EXT_EXEC_H
#define KOILA_EXT_EXEC_H

#include "capture/capture.h"
#include "run/run.h"
#include "ground/cpu_bytes.h"
#include "ground/errors.h"
#include "ground/settings.h"

/* ---- torch_calls.c: what we call of torch and of koila's Python; filled by koila__torch_setup() */
extern struct koila__torch_calls {
    /* aten overloads' _op */
    PyObject *as_strided, *narrow, *copy_, *add_, *clone, *empty_strided, *maximum, *minimum,
        *unflatten, *flatten, *cat, *to_copy, *mul_, *squeeze_dims;
    PyObject *float32;
    PyObject *oom_type; /* torch.OutOfMemoryError */
    /* koila._run.guards: returns an object that holds the mode guards while it lives */
    PyObject *guards;
    PyObject *pseudo; /* dict of koila._run.PSEUDO */
    bool ready;
} koila__torch;
int koila__torch_setup(void); /* -1 with an exception */
/* borrowed callable that implements "koila::name" */
PyObject *koila__pseudo_object(const char *name);

/* ---- plan_cache.c */
/* A plan with the recorded part it was made for; shared by the cache and the last step's report. */
typedef struct cached {
    uint32_t refs;
    uint64_t key, generation, used, budget;
    /* the CPU's budget as the user gave it: under another one it is planned anew, for fewer slices
     * may do */
    uint64_t asked;
    koila_graph *part;
    struct cached *part_of; /* whose it is; NULL: ours */
    koila_plan *plan;
    koila_plan_info info;
    int gpu;           /* that it was planned for; -1: the CPU */
    uint64_t state;    /* of the GPU's allocator when it was found to fit, 0: ask again */
    uint32_t n_states; /* how often that was another one, of all plans of this step */
    koila_fit fit;     /* struct_size 0: the sum of live bytes decided */
} cached;

extern struct koila__last_step {
    cached *c;
    uint64_t base_bytes, measured_peak_bytes, n_run, budget_bytes, n_made;
    uint32_t retries;
    bool measured;
    PyObject *early; /* owned tuple or NULL: what was gathered while the step was recorded */
} koila__last;       /* the step that ran (or was planned) last */

void koila__cached_release(cached *c); /* NULL is fine */
/* of the last step's part: it is the last step's plan now, taken over. -1 with an exception, and
 * not taken */
int koila__adopt_plan(koila_plan *plan);
/* Memory a step may use: beyond what is held now; in all (UINT64_MAX: no limit). Of a GPU, or of
 * the CPU (gpu -1). */
typedef struct koila__room {
    uint64_t bytes, limit, held;
    int gpu;
    uint64_t state; /* GPU: of its allocator, never 0 */
} koila__room;
koila__room koila__room_for(const koila_graph *part);
/* A plan for targets of `part` (taken over) that fits `room`, with slices of `rows` rows (0: as few
 * as fit). A new reference, or NULL with *status and err filled. */
cached *koila__plan_for(koila_graph *part, const koila_value *targets, uint32_t n_targets,
                        const koila__room *room, int64_t rows, koila_error *err,
                        koila_status *status);

/* ---- cuda_state.c: none of these fails or leaves an exception; without a GPU, or where its
 * allocator is not the one that is modelled, the sum of live bytes decides */
/* the GPU that g's leaves are on, -1: none */
int koila__gpu_of(const koila_graph *g);
bool koila__gpu_look(int index, koila__room *room); /* false: it cannot be asked */
/* koila_plan_new, and on a GPU koila_plan_live; *fit: as cached.fit. */
koila_status koila__gpu_plan(const koila__room *room, const koila_graph *part,
                             const koila_value *targets, uint32_t n_targets,
                             const koila_plan_options *o, koila_plan **out, koila_fit *fit,
                             koila_error *err);
bool koila__gpu_still_fits(const koila__room *room, cached *c);
/* though it was said to fit: its graph gets a margin */
void koila__gpu_ran_out(cached *c);
/* for people; None where the sum decided */
PyObject *koila__fit_dict(const cached *c);
void koila__gpu_forget(void);
/* An operator was seen to use `bytes` inside, on `rows` of `batch` rows (both 0: whole). */
void koila__learn(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes);
bool koila__learned(koila_sig sig, int64_t rows, int64_t batch); /* was just that seen? */
int64_t koila__tuned_rows(uint64_t key);
void koila__tuned_record(uint64_t key, int64_t rows, double seconds);
void koila__plan_cache_clear(void); /* and what was learned */

/* ---- probe.c: what operators use inside that never ran here. Both learn; neither fails, neither
 * leaves anything allocated or an exception set. */
/* before planning; rows: as forced, 0: not */
void koila__probe_graph(const koila_graph *g, int64_t rows);
/* at the rows that were planned, where they are few */
void koila__probe_plan(const koila_plan *plan);

/* ---- ranks.c: sharded modules, which all ranks must call equally often */
void koila__ranks_ask(PyObject *ask); /* koila._opaque.ranks_of */
/* a new reference: the koila._sharded.Ranks of the sharded calls in it, None where nothing is
 * sharded; NULL with an exception */
PyObject *koila__ranks_of(const koila_graph *part);
/* is node n a call that talks to the other ranks? (ranks NULL: no) */
bool koila__ranks_share(PyObject *ranks, const koila_graph *g, koila_node n);
/* The exchange: may plan c run? 0: all ranks are about to make the same calls, or *n_slices is not
 * 0 and is the number that all plan with now. -1: an exception, on all ranks. `settled`: the rows
 * are forced, or were agreed on before. */
int koila__ranks_agree(PyObject *ranks, const cached *c, bool settled, uint32_t *n_slices);
/* to the exchange, instead: this rank cannot go on, for the exception that is set and stays set */
void koila__ranks_withdraw(PyObject *ranks);
/* -1 with an exception: another rank failed, and every rank knows */
int koila__ranks_meet(PyObject *ranks);
/* to the next meeting, instead: this rank failed with what is set and stays set. Was it want of
 * memory, on all that failed? */
bool koila__ranks_failed(PyObject *ranks);

/* ---- run_module.c */
/* the operator that waits for the values of the run that is asked for, or NULL: strict() refuses
 * those that are sliced */
extern const char *koila__gathers_for;
/* "file.py:12"; `out` as it was for no line */
void koila__line_text(const koila_graph *g, uint32_t line, char *out, size_t n);

/* ---- run.c */
/* The part of the tape that makes the targets, and the way back. All arrays are PyMem. */
typedef struct request {
    koila_graph *part;
    koila_value *value_of; /* [tape values] */
    koila_node *node_from;
    koila_value *targets; /* of part */
    uint8_t *known;
} request;
/* -1 with an exception */
int koila__request_make(koila__tape *t, const koila_value *targets, uint32_t n, request *r);
void koila__request_free(request *r);
/* `later`: the effects' values are made, but koila__commit_effects() is the caller's. */
int koila__run_request(koila__tape *t, const koila_value *wanted, uint32_t n_wanted,
                       const koila_value *held, uint32_t n_held, bool commit_effects, bool later);
int koila__commit_effects(koila__tape *t);

/* ---- exec.c: run plan c for request r; results[n] are new references. 0, or -1 with an exception
 * and nothing outside changed. `ranks`: that agreed on it, or NULL; *told: on failure, who told all
 * of them of it; by us only where they may try again together. */
typedef enum { KOILA__TOLD_NOBODY, KOILA__TOLD_BY_US, KOILA__TOLD_BY_ANOTHER } koila__told;
int koila__exec_plan(koila__tape *t, const request *r, const cached *c, PyObject *ranks, uint32_t n,
                     PyObject **results, uint32_t *retries, uint64_t *n_run, koila__told *told);

#endif
