/* run.h — shared by the files of this folder. From the top:
 *
 *   run_module.c    functions of koila._core       predict_step.c  a GPU that is not here
 *   run.c           what capture asks for          whole.c         the simple executor of tests
 *   request.c       a request, start to end        strict.c        what strict() refuses
 *   effects.c       writes that a step leaves      plan_report.c   plans as people see them
 *   exec.h          a plan, on real tensors        ranks.c         other processes, sharded modules
 *   plan_cache.c    which plan                     room.c          the memory a step may use
 *   probe.c         operators that never ran here  workspaces.c    bytes used inside operators
 *   cuda_state.c    a GPU's allocator as it is     tuning.c        the fastest slices
 *   part.c          what makes the targets         torch_calls.c   the executor's own calls
 *   past.c          the last runs of a context      reads.c         what a read leaves
 *   tell.c          who is told of runs             slices_done.c   told while a long run runs
 *   call.c          one recorded call              modes.c         other people's modes, put aside
 *   aside.c         steps that torch does alone     body.c          slices as a compiled function
 *   body_trace.c    has that function made
 *
 * Unless stated otherwise, functions fail with -1 or NULL and an exception, and return new
 * references.
 */
#ifndef KOILA_EXT_RUN_H
#define KOILA_EXT_RUN_H

#include "base/base.h"
#include "capture/capture.h"
#include "ground/cpu_bytes.h"
#include "ground/errors.h"
#include "ground/limits.h"
#include "ground/settings.h"
#include "memory/account.h"

/* ---- run_module.c */
int koila__run_module_add(PyObject *m);

/* ---- torch_calls.c: functions of torch and koila._run that the executor calls; set at start-up */
extern struct koila__torch_calls {
    /* aten overloads' _op */
    PyObject *as_strided, *narrow, *copy_, *add_, *clone, *empty_strided, *maximum, *minimum,
        *unflatten, *flatten, *cat, *to_copy, *mul_, *zero_, *squeeze_dims;
    PyObject *add_on;                       /* koila._run.add_on: as `add_`, in half the time */
    PyObject *addmm_, *baddbmm_, *add_rows; /* of koila._run */
    PyObject *oom_type;                     /* torch.OutOfMemoryError */
    /* koila._run.guards(): its result holds the mode guards while it lives */
    PyObject *guards;
    PyObject *skip_next;     /* torch._C._set_skip_next_torch_function; NULL: torch is older */
    PyObject *pseudo;        /* dict of koila._run.PSEUDO */
    PyObject *direct_schema; /* koila._run.direct_schema */
    PyObject *version;       /* (major, minor) */
    PyObject *own_generator;
    /* the lengths of torch's stacks of modes, and koila._torch.ModesAside */
    PyObject *n_dispatch_modes, *n_function_modes, *modes_aside;
    bool ready;
} koila__torch;
int koila__torch_setup(void);
/* Borrowed callable that implements "koila::name". */
PyObject *koila__pseudo_object(const char *name);
/* A view of t on entries first ... first + n of dimension `dim`. */
PyObject *koila__torch_narrow(PyObject *t, int64_t dim, int64_t first, int64_t n);
/* An uninitialised tensor of meta m. If extent >= 0, dimension `dim` has that size. It is dense, in
 * m's order of dimensions (contiguous if m->stride is NULL). */
PyObject *koila__torch_empty(const koila_meta_info *m, int32_t dim, int64_t extent);
/* t in another dtype. */
PyObject *koila__torch_cast(PyObject *t, koila_dtype dtype);

/* ---- direct.c */
typedef struct koila__direct koila__direct;
/* How calls of a signature go there. objects[n_pos + n_kw]: its constants, NULL for what holds
 * tensors. Owned by the caller; NULL without an exception: they do not. */
koila__direct *koila__direct_new(const koila_sig_info *s, PyObject *const *objects);
void koila__direct_free(koila__direct *d); /* NULL is fine */
/* 1: outputs[n_outputs] are new references, None where there is no tensor; 0: it has failed, nobody
 * knows why, and nothing was changed; -1 with an exception. */
int koila__direct_call(const koila__direct *d, PyObject *const *inputs, PyObject **outputs);

/* ---- call.c */
/* Replaces positional value `arg` for one call. */
typedef struct koila__arg_fix {
    uint32_t arg;
    uint32_t n; /* number of ints; is_list tells a list from one int */
    bool is_list;
    const int64_t *ints;
} koila__arg_fix;
typedef struct koila__call_fix {
    uint32_t n_fix;
    const koila__arg_fix *fix;
    PyObject *generator; /* borrowed: given by the name `generator` too; NULL: none */
    PyObject *device;    /* borrowed: given for each device that is recorded; NULL: as it is */
} koila__call_fix;
/* Runs signature `sig` on inputs[n_inputs], borrowed real tensors. A written input is its base
 * tensor, which is written in place; the caller has cloned it where needed. `fix` adapts the call
 * itself, link_fix[k] the k-th link of all writes' chains; either may be NULL. 0:
 * outputs[n_outputs] are new references: NULL for a None result; for a write the base tensor
 * itself, or a copy in recorded strides where as_strided needs that. -1: torch's own exception is
 * set. Runs below autograd, in the signature's grad mode; the caller holds the mode guards
 * (koila._run.guards). */
int koila__call(koila_sig sig, PyObject *const *inputs, const koila__call_fix *fix,
                const koila__call_fix *link_fix, PyObject **outputs);
/* Until the matching call with what this returns: torch functions and their modes are off in this
 * thread, so calls need not look for any in their arguments. */
bool koila__calls_need_no_functions(bool on);
/* For tests: may calls go through torch's C ABI from now on? How many have. */
uint64_t koila__direct_allow(bool may);
/* Drops the templates of signatures that the table has forgotten. Objects go to the list `gone`;
 * runs no Python. */
void koila__templates_forget(PyObject *gone);

/* ---- run.c, whole.c: what executor.h promises to capture */
int koila__run(koila__tape *t, const koila_value *targets, uint32_t n_targets, bool commit_effects);
int koila__run_held(koila__tape *t, const koila_value *held, uint32_t n_held);
int koila__run_whole(koila__tape *t, const koila_value *targets, uint32_t n_targets);
/* The same while a step is planned, of what depends on whole numbers and truth values alone.
 * UnsupportedError for all else. */
int koila__run_planned(koila__tape *t, const koila_value *targets, uint32_t n_targets);
PyObject *koila__run_elsewhere(koila__tape *t, koila_value v, bool is_known, PyObject *device);

/* ---- part.c: the part of a tape that makes some targets, with maps back. Arrays are PyMem. */
typedef struct koila__part {
    koila_graph *graph;     /* owned until koila__part_give() */
    koila_value *value_of;  /* [values of the tape] see koila__part_value() */
    koila_value *leaf_from; /* [leaves of the part, its first values] -> of the tape */
    uint32_t n_leaves;
    koila_node *node_from; /* [nodes of the part] -> of the tape */
    koila_value *targets;  /* [as many as were asked for], of the part */
    /* of the tape when the part was made: what is recorded while it runs is not in it */
    uint32_t n_values;
    /* [n_leaves] owned: those of its leaves that are kept values, NULL for others; NULL: none is */
    PyObject **kept;
    bool has_only_whole; /* one of them cannot be sliced (koila__kept.only_whole) */
} koila__part;
/* The value of the part that value v of the tape is; KOILA_NONE: it is not in it. */
static inline koila_value koila__part_value(const koila__part *p, koila_value v)
{
    return v < p->n_values && p->value_of[v] ? p->value_of[v] - 1 : KOILA_NONE;
}
/* with_kept: what is kept (capture/kept.c) is a leaf too, as in the run that would come. */
int koila__part_make(koila__tape *t, const koila_value *targets, uint32_t n, bool with_kept,
                     koila__part *out);
/* What is to be kept becomes a target too, behind the first n. */
int koila__part_add_targets(koila__part *p, uint32_t n, const koila__kept *more, uint32_t n_more);
/* Borrowed: the tensor of leaf i; NULL: it has none any more. */
static inline PyObject *koila__part_leaf(const koila__tape *t, const koila__part *p, uint32_t i)
{
    return p->kept && p->kept[i] ? p->kept[i] : t->values[p->leaf_from[i]].real;
}
koila_graph *koila__part_give(koila__part *p); /* the caller owns it from now on */
void koila__part_free(koila__part *p);
/* StaleValueError if a leaf was written after it was recorded. */
int koila__part_check_versions(koila__tape *t, const koila__part *p);
/* *out: bytes that the leaves hold, as koila._run.held_bytes counts them. */
int koila__part_leaf_bytes(koila__tape *t, const koila__part *p, uint64_t *out);

/* ---- room.c */
/* Bytes of torch's allocator on a GPU: handed out now and at most, and given back in all. */
typedef struct koila__gpu_count {
    uint64_t now, peak, freed;
} koila__gpu_count;
/* The memory that a step may use on a GPU, or on the CPU (gpu -1). In bytes. */
typedef struct koila__room {
    uint64_t bytes; /* available beyond `held` */
    uint64_t limit; /* on all bytes held; UINT64_MAX: none */
    uint64_t held;
    int gpu;
    uint64_t state;         /* GPU: state of its allocator at the last look, never 0 */
    koila__gpu_count count; /* GPU: now */
    /* GPU: the limit is the user's budget. Beyond it torch refuses nothing, so a plan must not go
     * there. */
    bool is_budget;
    /* CPU: where all of the process is limited, and not torch's bytes alone */
    koila__resident_room resident;
    /* What others have left was not asked of the system, for it was a moment ago. Torch's own bytes
     * are those of now. */
    bool is_recalled;
} koila__room;
/* What a step needs of the room, as far as is known: `little` if the plan is ample for it. */
typedef enum koila__need {
    KOILA__NEEDS_UNKNOWN,
    KOILA__NEEDS_LITTLE,
    KOILA__NEEDS_MUCH
} koila__need;
/* A step that needs little does not ask the system, if that was asked a moment ago; on the CPU, one
 * that is not known neither. -1 with UnsupportedError while the GPU's work is captured into a
 * graph. */
int koila__room_for(const koila_graph *part, koila__need need, koila__room *out);
/* The same for tensors of this GPU, or of the CPU (-1), outside of koila.plan(). anew: the system
 * is asked in any case. */
int koila__room_on(int gpu, bool anew, koila__room *out);
/* Is the plan's need small beside the room? Such a step does not ask for free memory, and runs
 * without the guard of resident memory, if the system was asked a moment ago. */
bool koila__room_is_ample(const koila__room *room, const koila_plan_info *info);
/* Of the step of this key. */
koila__need koila__step_need(uint64_t key);
void koila__step_needs(uint64_t key, koila__need need);
void koila__needs_forget(void);
/* The same without the bytes that are left free because libraries may take them: for a step that
 * else does not fit at all. False: there are none. */
bool koila__room_without_extra(koila__room *room);
/* Writes what of the process's resident memory is not torch's, for the text of an error; "" where
 * something else limits the room. */
void koila__room_tell(const koila__room *room, char *text, size_t n);
/* Subtracts `held` more bytes that are held. */
void koila__room_holds(koila__room *room, uint64_t held);
/* OutOfMemory if torch holds more than the budget before `call` begins: nothing could be
 * allocated. */
int koila__held_fits(const char *call);

/* ---- tuning.c: the fastest of the sizes that fit */
/* What one run does for that. */
typedef struct koila__turn {
    uint64_t key;      /* of the plan of fewest slices; 0: the run is not counted */
    uint32_t size;     /* number of its size; 0: the fewest slices */
    int64_t rows;      /* of a slice, if size is not 0 */
    uint32_t n_fewest; /* slices */
    bool is_timed;
} koila__turn;
/* Of a step whose plan of fewest slices has this key in the cache. Does not fail. */
koila__turn koila__turn_of(uint64_t key, const koila_graph *part, const koila_plan_info *fewest);
/* Its size does not fit, or it ran out of memory: another one is run from now on. */
void koila__turn_refuse(const koila__turn *turn);
/* The run of a turn that is counted went well. */
void koila__turn_took(const koila__turn *turn, double seconds);
/* Times of a thread. If it never waited, the time in which it did not run was another process's,
 * and does not count. */
typedef struct koila__stopwatch {
    double seconds, busy;
    long n_waits;
} koila__stopwatch;
koila__stopwatch koila__stopwatch_now(void);
double koila__stopwatch_since(const koila__stopwatch *start); /* seconds */
/* For tests: a function that tells the seconds; NULL: the clock does. */
void koila__stopwatch_plant(PyObject *seconds);

/* ---- plan_cache.c */
/* Compiled bodies of a plan's loops: body.c */
typedef struct koila__bodies koila__bodies;
/* A plan and the recorded part it was made for; shared by the cache and the last step's report. */
typedef struct cached {
    uint32_t refs;
    uint64_t key, generation, used, budget;
    /* cpu_budget at planning; under another one a new plan is made, since fewer slices may fit */
    uint64_t user_budget;
    koila_graph *part;
    bool is_predicted; /* `part` is a copy over a table of its own (predict_step.c) */
    koila_plan *plan;
    koila_plan_info info;
    int gpu;           /* planned for this GPU; -1: the CPU */
    uint64_t state;    /* state of the GPU's allocator in which it fits; 0: check again */
    uint32_t n_states; /* number of changes of that state, over all plans of this step */
    koila_fit fit;     /* struct_size 0: the sum of live bytes decided */
    /* GPU: bytes between what was held and the allocator's highest peak, the least at which a run
     * of it has not raised that; UINT64_MAX: none yet */
    uint64_t below_peak;
    koila__bodies *bodies; /* owned; NULL: nobody asked to compile its loops */
    bool compiles;         /* the step that runs asks to, whatever the setting */
    bool rests;            /* the run: what its calls use inside is not measured (request.c) */
    uint32_t n_calm;       /* runs in a row that taught nothing */
    koila_value *targets;  /* owned [n_targets] of `part`; NULL: of a prediction */
    uint32_t n_targets;
    /* predicted for all rows at once, in recorded order, beyond what is held before; 0: not looked
     * at yet */
    uint64_t plain_peak_bytes;
    uint8_t told;   /* what of it the log knows: bits of koila._log */
    uint32_t asked; /* of tell.c: at which change of levels the log was asked about it */
} cached;
void koila__cached_release(cached *c); /* NULL is fine */
/* A plan for a copy of a recorded part, both taken over. NULL + error: they are not. */
cached *koila__cached_predicted(koila_graph *part, koila_plan *plan);
/* How a step may be cut. */
typedef struct koila__cutting {
    int64_t rows;  /* of a slice; 0: as few slices as fit */
    bool must_fit; /* so many rows fit, or there is no plan */
    /* another size may be taken in place of the fewest slices, and this is then what the run does
     * for tuning.c; NULL: no */
    koila__turn *turn;
    uint32_t axes; /* koila_axes */
    /* results may be dropped and computed again. It is the last thing that is tried, as other axes
     * are */
    bool recomputes;
    bool offloads; /* or wait in host memory: koila__may_offload() */
    /* a plan of the last try, with these axes, will do, if one was made before and still holds:
     * then no number of rows fitted */
    bool or_known_last;
    uint32_t last_axes;
    bool finds_least; /* who is told that nothing fits is told the least that would */
} koila__cutting;
koila__cutting koila__cutting_now(const koila__room *room); /* as the running code's settings say */
/* A plan for targets of `part` (taken over) that fits `room`. A new reference, or NULL with *status
 * and err filled and no exception. */
cached *koila__plan_for(koila_graph *part, const koila_value *targets, uint32_t n_targets,
                        const koila__room *room, koila__cutting how, koila_error *err,
                        koila_status *status);
void koila__plan_cache_clear(void); /* also drops learned workspaces */

/* ---- workspaces.c: measured bytes that operators use beyond their results, for `rows` of `batch`
 * rows; both 0: whole. Nothing here fails. */
uint64_t koila__workspace_of(void *ignored, koila_sig sig, int64_t rows, int64_t batch);
/* The same, as koila_fit_opts.measured: false if nothing was measured of `sig`. */
bool koila__workspace_known(void *ignored, koila_sig sig, int64_t rows, int64_t batch,
                            uint64_t *bytes);
/* As koila_plan_options.spared, of calls that were measured on exactly these rows. */
uint64_t koila__spared_of(void *ignored, koila_sig sig, int64_t rows, int64_t batch);
/* Directly after koila__learn(). */
void koila__learn_spared(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes);
/* Bytes of the results of node n of a plan in a slice of so many rows. */
uint64_t koila__slice_result_bytes(const koila_plan *plan, koila_node n, int64_t rows);
/* was it measured for exactly these rows? */
bool koila__learned(koila_sig sig, int64_t rows, int64_t batch);
/* More than once, and alike? */
bool koila__learned_surely(koila_sig sig, int64_t rows, int64_t batch);
typedef enum koila__measured {
    KOILA__MEASURED_HERE,  /* in a step */
    KOILA__MEASURED_APART, /* from any step: once is enough */
    KOILA__MEASURED_BOUND, /* in a step, which tells only that it was no more */
} koila__measured;
void koila__learn(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes, koila__measured how);
/* A plan is about to run: what is learned until the next one belongs to it. */
void koila__learned_run(void);
/* No plan fits the step of this key. True: some of what was learned is doubted now, so that one
 * may. */
bool koila__learned_misfit(uint64_t key);
/* No plan fits, whatever is done for it. True: some of what was learned was a bound alone, and is
 * left out now, so that one may. */
bool koila__learned_bounds_misfit(void);
/* Changes whenever an earlier plan would come out differently now. */
uint64_t koila__learned_generation(void);
void koila__unlearn(void);
void koila__workspaces_forget(void); /* those of signatures that the table has forgotten */

/* ---- cuda_state.c. All but the look do not fail and leave no exception. Without a GPU, or with an
 * allocator that is not modelled, the sum of live bytes decides. */
int koila__gpu_of(const koila_graph *g); /* the GPU that g's leaves are on, -1: none */
/* 1; 0: it cannot be read; -1: UnsupportedError, its work is captured into a graph. anew: its
 * driver is asked in any case. */
int koila__gpu_look(int index, bool anew, koila__room *room);
/* Host memory that a step may take: half of what this process can still get. */
uint64_t koila__host_room(void);
/* koila_plan_new, and on a GPU koila_plan_live; *fit: as cached.fit. */
koila_status koila__gpu_plan(const koila__room *room, const koila_graph *part,
                             const koila_value *targets, uint32_t n_targets,
                             const koila_plan_options *o, koila_plan **out, koila_fit *fit,
                             koila_error *err);
bool koila__gpu_still_fits(const koila__room *room, cached *c);
/* koila__workspace_of() of a step on a GPU, after koila__gpu_plan(): with the workspace that a
 * product takes for itself. */
uint64_t koila__gpu_workspace_of(void *ignored, koila_sig sig, int64_t rows, int64_t batch);
/* Plan c ran out of memory although it fitted: its graph gets a margin. */
void koila__gpu_ran_out(cached *c);
/* A run of plan c has learned more of what operators use inside: its graph's margin ends. */
void koila__gpu_has_learned(const cached *c);
/* A step has run a matrix product there. Before torch 2.15, and with
 * TORCH_CUBLAS_WORKSPACE_CACHE=1, cuBLAS keeps its workspace from then on; else each product takes
 * one for itself. */
void koila__gpu_ran_product(int index);
bool koila__gpu_bytes(int index, koila__gpu_count *out); /* false: it cannot be read */
/* What that function or class of koila._cuda gives for the GPU. New; NULL with an exception. */
PyObject *koila__gpu_ask(const char *what, int index);
/* Bytes that a call used beyond its results, from the counts before and after it. Exact if it
 * raised the peak. Else an upper bound: what it gave back inside, or what the peak leaves room for.
 */
uint64_t koila__gpu_inside(const koila__gpu_count *before, const koila__gpu_count *after,
                           koila__measured *how);
/* May values of this GPU wait in host memory, by the settings of the running code, and did the host
 * give memory until now? -1: not a GPU, so no. */
bool koila__may_offload(int index);
/* The work of a byte on the way there (koila_plan_options.host_price), measured at the first call;
 * 0: it may not. */
double koila__host_price(int index);
PyObject *koila__fit_dict(const cached *c); /* for reports; None where the sum decided */
void koila__gpu_forget(void);

/* ---- probe.c: learns the workspaces of operators that never ran here. These functions do not
 * fail, and leave no memory and no exception behind. */
/* Before planning. rows: forced rows of a slice, or 0. */
void koila__probe_graph(const koila_graph *g, int64_t rows);
/* After planning: at the planned rows of a slice, where they are few. */
void koila__probe_plan(const koila_plan *plan);

/* ---- ranks.c: sharded modules, which all ranks must call equally often */
void koila__ranks_ask(PyObject *ask); /* koila._opaque.ranks_of */
/* The koila._sharded.Ranks of the sharded calls in `part`; None: nothing is sharded. */
PyObject *koila__ranks_of(const koila_graph *part);
/* Is node n a call that talks to the other ranks? (ranks NULL: no) */
bool koila__ranks_share(PyObject *ranks, const koila_graph *g, koila_node n);
/* The exchange: may plan c run? 0: yes, all ranks will make the same calls; or, if *n_slices is not
 * 0, all ranks plan again with that many slices. -1 with an exception on all ranks. `settled`: the
 * rows are forced, or were agreed on before. */
int koila__ranks_agree(PyObject *ranks, const cached *c, bool settled, uint32_t *n_slices);
/* Called instead of the exchange: this rank cannot go on. The exception stays set. */
void koila__ranks_withdraw(PyObject *ranks);
/* -1 with an exception: another rank failed, and all ranks know. */
int koila__ranks_meet(PyObject *ranks);
/* Called instead of the next meeting: this rank failed. The exception stays set. Did all failed
 * ranks run out of memory? */
bool koila__ranks_failed(PyObject *ranks);

/* ---- exec.c */
/* Where ranks run a plan together: who announced a failure to all of them. */
typedef enum koila__announced {
    KOILA__ANNOUNCED_BY_NOBODY,
    KOILA__ANNOUNCED_BY_US, /* all ranks may try again together */
    KOILA__ANNOUNCED_BY_ANOTHER
} koila__announced;
typedef struct koila__exec_report {
    uint64_t n_run;             /* operators run */
    uint32_t retries;           /* slices that ran out of memory and were halved */
    koila__announced announced; /* how a failure was announced */
    uint64_t compiled;          /* bit k: stage k ran compiled */
    bool failed_in_body;        /* a compiled one raised */
} koila__exec_report;
/* Runs plan c for part p; results[n] are new references. On failure nothing outside has changed.
 * `ranks`: those that agreed on the plan, or NULL. uses_bodies: compiled ones, where there are any.
 * *report is always filled. */
int koila__exec_plan(koila__tape *t, const koila__part *p, const cached *c, PyObject *ranks,
                     bool uses_bodies, uint32_t n, PyObject **results, koila__exec_report *report);
/* Does the plan read the graph of the module that this thread runs now (koila::opaque_kept)? */
bool koila__wants_graph(void);
/* That module is being compiled: what the call uses inside is not learned. */
void koila__note_compiled(void);
/* So many bytes waited for the backward that it runs: not those that the plan counted with. */
void koila__note_used_up(uint64_t bytes);
int koila__as_it_is_add(PyObject *m); /* as_it_is.c */

/* ---- body.c: loops whose slices run as one compiled function */
int koila__body_module_add(PyObject *m);
void koila__bodies_free(koila__bodies *bodies, uint32_t n_stages);
/* Plan c has run: its loops are compiled, if it is time by the settings of the running code. True:
 * as they ran they will run from now on. Never fails. */
bool koila__bodies_ran(cached *c, bool is_sharded);
/* Has it any, that may be used now and fit the room as far as they were measured? */
bool koila__bodies_fit(const cached *c, const koila__room *room);
/* The peak that c's run with its bodies is expected to have, as koila_plan_info.peak_bytes. */
uint64_t koila__bodies_peak(const cached *c);
/* Has each of them run? What one takes that has not is not known: it counts as uncompiled. */
bool koila__bodies_have_run(const cached *c);
void koila__body_saw(const cached *c, uint32_t stage, uint64_t peak_bytes); /* measured */
/* The same of a whole run with bodies, on a GPU. */
void koila__bodies_saw(const cached *c, uint64_t peak_bytes);
/* A full slice took this thread so long, with its body or without. c has bodies. */
void koila__body_took(const cached *c, uint32_t stage, bool is_compiled, double seconds);
/* The slices of a loop begin on a GPU, and have ended: n_slices full ones, 0: they tell nothing.
 * false: that run is not timed, and not to be ended. */
bool koila__clock_begins(const cached *c, uint32_t stage, bool is_compiled);
void koila__clock_ends(const cached *c, uint32_t stage, uint32_t n_slices);
/* One of them raised: drops them all. Takes the exception, an Exception. */
void koila__bodies_raised(cached *c, const koila__room *room);

/* ---- modes.c */
/* Takes all modes off torch's stacks. *aside: what koila__modes_back() puts back; NULL: there were
 * none. */
int koila__modes_aside(PyObject **aside);
/* Steals `aside`. Gives `status`, or -1 with an exception where a mode could not be put back; an
 * exception that is set stays. */
int koila__modes_back(PyObject *aside, int status);

/* ---- effects.c */
/* Writes the effects whose values are concrete: all of them, or none and -1. */
int koila__commit_effects(koila__tape *t);
/* Does making the targets also make the values of all effects? */
bool koila__effects_pass_by(koila__tape *t, const koila_value *targets, uint32_t n);

/* ---- strict.c */
/* GatherError if strict() refuses plan c, whose first n targets are asked for. */
int koila__strict_check(koila__tape *t, const cached *c, uint32_t n);
/* Reorders targets [n_must, n) so that those which strict() accepts along with the first n_must
 * come first, and returns their end. Returns n if strict() refuses one of the first n_must. */
uint32_t koila__strict_pass(koila__tape *t, koila_value *targets, uint32_t n_must, uint32_t n);

/* ---- past.c: the last runs of the running code's context. What is returned is borrowed, and valid
 * until its next koila__last_step_is(). */
/* What asked for a run. */
typedef enum koila__asked_by {
    KOILA__ASKED_BY_READ, /* print, .item(), if, ...; .asked_by_op may tell the operator */
    KOILA__ASKED_BY_BACKWARD,
    KOILA__ASKED_BY_LEAVING, /* a step was left: what is held of it, and its effects, are made */
    KOILA__ASKED_BY_PLAN,    /* koila.plan(): nothing ran */
    KOILA__N_ASKED_BY
} koila__asked_by;
/* How a step went or would go, as last_plan() and explain() report it. */
typedef struct koila__step {
    koila__asked_by asked_by;
    char asked_by_op[60];  /* "aten::nonzero", or "": not known */
    char asked_at[300];    /* "file.py:12", or "" */
    uint64_t number;       /* of all runs and plans of the process; koila__last_step_is() sets it */
    cached *c;             /* counted */
    PyObject *early;       /* owned tuple or NULL: gathers while the step was recorded */
    uint64_t base_bytes;   /* held before the step */
    uint64_t budget_bytes; /* limit on all bytes held; UINT64_MAX: free memory */
    bool measured;
    uint64_t measured_peak_bytes;
    uint64_t predicted_peak_bytes; /* beyond base_bytes; 0: the plan's */
    bool predicted_uncompiled;     /* with loops that ran compiled for the first time */
    uint64_t compiled;             /* bit k: stage k ran compiled */
    uint64_t n_run;                /* operators run, over all slices */
    uint32_t retries;              /* times that one slice or all slices were made smaller */
    uint32_t n_fewest; /* slices that would do, where more were run for speed; 0: those of `c` */
    uint32_t n_reads;  /* of a backward: runs for values that were read before it in its step */
    double seconds;    /* that its runs took, those that ran out of memory too */
    uint64_t n_aside;  /* steps like it that torch has done alone since: see aside.c */
    /* with the runs of its step before it; 0: those of the plan */
    uint32_t n_recorded;
    double work, work_recorded;
} koila__step;
PyObject *koila__step_dict(const koila__step *step);
/* The same without what takes long: for each step (koila.on_step). */
PyObject *koila__step_facts(const koila__step *step);
enum { KOILA__MOST_PAST = 16 };
/* What last_plan() tells where koila has run the last step: see past.c. NULL: nothing yet, without
 * an exception. */
const koila__step *koila__past_last(void);
/* i runs and plans before the newest; NULL: it is not remembered. */
const koila__step *koila__past_step(uint32_t i);
const koila__step *koila__past_numbered(uint64_t number); /* NULL: it is not remembered */
uint64_t koila__n_past(void);                             /* runs and plans so far */
/* The newest run, and the newest of a backward, whatever last_plan() tells; NULL: there is none. */
const koila__step *koila__past_ran(void);
const koila__step *koila__past_backward(void);
void koila__last_step_is(const koila__step *step); /* takes its references over */
/* What koila.plan() planned as run `number` has plan c from now on, if it is remembered. */
void koila__past_predicted(uint64_t number, cached *c);
/* Plan c ran for part `p` of tape t, with n_run operators over all slices, and no backward did. */
void koila__count_read(koila__tape *t, const koila__part *p, const cached *c, uint64_t n_run);
/* A backward ran it: `step`, whose plan is set, also tells what was counted, which begins anew. */
void koila__count_backward(koila__tape *t, const koila__part *p, koila__step *step);

/* ---- tell.c */
/* Calls `told` for each run whose plan it has not told in full; NULL: nobody. levels: its logger's
 * table of levels, or NULL. */
void koila__tell_to(PyObject *told, PyObject *levels);
/* A request is over. What `told` raises is written to sys.unraisablehook. */
void koila__tell(void);

/* ---- slices_done.c */
/* Calls `show` for long runs; NULL: nobody. */
void koila__progress_to(PyObject *show);
/* For tests: a run is long after so many seconds. Returns what it was before. */
double koila__progress_after(double seconds);
/* The slices of a run. Nothing here fails. */
typedef struct koila__progress {
    bool is_shown;          /* somebody looks */
    bool was_shown;         /* and has been told of this run */
    uint64_t n_done, n_all; /* slices */
    double next;            /* seconds of CLOCK_MONOTONIC: not told again before */
} koila__progress;
koila__progress koila__progress_begin(const koila_plan *plan);
void koila__progress_slice(koila__progress *p); /* one more is done */
void koila__progress_end(koila__progress *p);
/* Of the newest run or plan of the process (koila__step.number). */
uint64_t koila__n_told(void);
/* A new number, for a step that is told and has no run. */
uint64_t koila__number_next(void);

/* ---- aside.c: the steps of the running code's context that torch may do alone */
/* A run has ended, which `step` tells of. gpu: where, -1: on the CPU. alone: no other rank makes
 * the same calls. */
void koila__aside_ran(const koila__step *step, int gpu, bool alone);
void koila__aside_failed(void); /* a run has failed */
void koila__aside_forget(void); /* of all contexts: koila looks at each step again */
/* What last_plan() tells: koila__past_last(), or what the last step was like, if torch has done it
 * alone since. NULL: nothing yet. Borrowed until the next step. */
const koila__step *koila__last_step(void);
/* The run of this number, or the step that torch did alone and that was told by it; NULL: it is not
 * remembered. */
const koila__step *koila__step_numbered(uint64_t number);
int koila__aside_add_module(PyObject *m);

/* ---- plan_report.c */
PyObject *koila__shape_of(const koila_meta_info *m);
/* Writes "file.py:12"; without a line `out` is unchanged. */
void koila__line_text(const koila_graph *g, uint32_t line, char *out, size_t n);
/* The n largest values at plan c's peak: " aten::mm 3.0 MiB input 1.0 MiB", cut at `room`. */
void koila__largest_text(const cached *c, uint32_t n, char *out, size_t room);
/* What a program can do so that operator `op` is cut, as a sentence; "": nothing is known. */
const char *koila__instead_of(const char *op);
/* The text of a gather: "aten::sort over the batch at train.py:41 needs f32[4096, 1000] whole, 15.6
 * MiB; one slice is 512.0 KiB. ..." `op` at `line` is the operator that needs it; NULL: node
 * g.node. */
PyObject *koila__gather_text(const cached *c, koila_gather g, const char *op, const char *line);
int koila__save_graph(const koila_graph *g, const char *path);

/* ---- request.c */
typedef struct koila__wanted {
    const koila_value *wanted; /* the values that are asked for */
    uint32_t n_wanted;
    const koila_value *held; /* could still be asked for: made too, if that costs nothing */
    uint32_t n_held;
    bool effects; /* also make the values of the tape's effects */
    bool later;   /* the caller itself calls koila__commit_effects() */
    koila__asked_by asked_by;
    /* of a read: all that variables of the program hold, as far as it is not concrete */
    const koila_value *variables;
    uint32_t n_variables;
} koila__wanted;
int koila__request(koila__tape *t, const koila__wanted *w);

/* ---- reads.c: what is kept of a read, see there */
typedef struct koila__kept_memory {
    const void *storage;
    uint64_t n_bytes;   /* of the largest value that is kept there */
    uint32_t n_results; /* of the read, which lie there */
} koila__kept_memory;

typedef struct koila__keeping {
    /* owned [n]: what the tape will keep, without its tensors; the cut is that of a run that is
     * whole */
    koila__kept *at;
    uint32_t n;
    const void **shown; /* owned [n_shown], sorted: memory that tensors outside have */
    uint32_t n_shown;
    koila__kept_memory *memory; /* owned [n_memory], sorted by address */
    uint32_t n_memory;
} koila__keeping;
void koila__keeping_free(koila__keeping *k);
/* Chooses what to keep of a read that runs part `p`, whose first n targets are values `targets` of
 * the tape, and makes them targets too. 1: kept values were dropped, so there is more room now; 0;
 * -1 with an exception. */
int koila__reads_choose(koila__tape *t, koila__part *p, const koila_value *targets, uint32_t n,
                        const koila__room *room, const koila__wanted *w, koila__keeping *k);
/* From now on only what variables of the program hold is kept. w NULL: no read, so nothing. */
void koila__reads_tighten(koila__tape *t, const koila__wanted *w);
/* Drops what part `p` reads and cannot slice. */
void koila__reads_drop_only_whole(koila__tape *t, const koila__part *p);
/* Drops all that the open step of the running code keeps, unless another thread is in that step. */
void koila__reads_drop_open(void);
/* The budget of the CPU has changed: what is kept takes no more of the room than it may, so that
 * what the program allocates before the next run finds some. */
void koila__reads_fit(void);
/* After it: how later runs of the step may slice the targets, which will be concrete. */
void koila__reads_cut(koila__tape *t, const cached *c, const koila_value *targets, uint32_t n);
/* Before the run: remembers which memory its leaves have. -1 with an exception. */
int koila__reads_begin(koila__tape *t, const koila__part *p, koila__keeping *k);
/* After it: takes over results[n + k->n], keeps those behind the first n where that is safe, and
 * leaves results[n], perhaps copied, to be handed out. No run: p->graph was given away. */
void koila__reads_end(koila__tape *t, const koila__part *p, const cached *c, uint32_t n,
                      PyObject **results, const koila__wanted *w, koila__keeping *k);

/* ---- predict_step.c */
/* What a recorded step does not contain: the fields of koila_predict_opts in words. */
typedef struct koila__training {
    const char *optimizer, *way, *sdpa, *cublas_workspace, *cublaslt_workspace, *conf;
    const char *torch_version;
    /* strict_conf: conf was typed by the user */
    int weight_decay, amsgrad, clip_grad_norm, ddp, autocast, grad_scaler, keeps_cublas,
        cudnn_sdpa_last, strict_conf;
} koila__training;
/* rows: KOILA_ROWS_AUTO for the most that fit. *out: the predicted plan, a new reference. Other
 * threads run meanwhile; what they record and forget does not change `g`, which is copied first. */
PyObject *koila__predict_graph(const koila_graph *g, const char *device, uint64_t memory,
                               int64_t rows, const koila__training *with, cached **out);
PyObject *koila__device_names(void);
/* of a profile: a name, or JSON text. ValueError when there is no such profile or field */
PyObject *koila__device_field(const char *device, const char *key);

#endif
