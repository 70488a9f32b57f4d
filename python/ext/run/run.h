/* run.h — the executor's names for the rest of the extension (see run.c). */
#ifndef KOILA_EXT_RUN_H
#define KOILA_EXT_RUN_H

#include "capture/tape.h"

/* ---- call.c: one recorded call on real tensors */
typedef struct koila__arg_fix { /* positional value `arg` is replaced for this call */
    uint32_t arg;
    uint32_t n; /* number of ints; is_list tells a list from one int */
    bool is_list;
    const int64_t *ints;
} koila__arg_fix;
typedef struct koila__call_fix {
    uint32_t n_fix;
    const koila__arg_fix *fix;
} koila__call_fix;
/* Run signature `sig` on inputs[n_inputs] (borrowed real tensors; for a written input: the base
 * tensor, written in place, the caller has cloned it where needed). `fix` adapts the call itself,
 * link_fix[k] the k-th link of all writes' chains (either may be NULL). On success
 * outputs[n_outputs] are new references (NULL for a None result; for a write the base tensor
 * itself, or a copy laid out as recorded when as_strided needs that) and 0 is returned; on failure
 * -1 with torch's own exception set. Runs below autograd, in the signature's grad mode; the caller
 * holds the mode guards (koila__mode_enter in run.c). */
int koila__call(koila_sig sig, PyObject *const *inputs, const koila__call_fix *fix,
                const koila__call_fix *link_fix, PyObject **outputs);

/* ---- what executor.h promises to capture */
int koila__run(koila__tape *t, const koila_value *targets, uint32_t n_targets, bool commit_effects);
int koila__run_held(koila__tape *t, const koila_value *held, uint32_t n_held);
int koila__run_whole(koila__tape *t, const koila_value *targets, uint32_t n_targets);

/* 0, or -1: OutOfMemory, torch holds more than the budget before `call` begins */
int koila__held_fits(const char *call);
/* A gather worded for people: "aten::sort over the batch at train.py:41 needs f32[4096, 1000]
 * whole, 15.6 MiB; one slice is 512.0 KiB. ..." New reference. `op` at `line`: who needs it; NULL:
 * node g.node. */
PyObject *koila__gather_text(const koila_plan *plan, const koila_graph *part, koila_gather g,
                             int64_t rows, const char *op, const char *line);
/* plan_report.c: a plan as the dict that koila._plan reads; every byte count includes `base`.
 * early: see koila__tape, or NULL. */
struct cached;
PyObject *koila__shape_of(const koila_meta_info *m);
PyObject *koila__plan_dict(const struct cached *c, PyObject *early, uint64_t base,
                           const uint64_t *measured, uint64_t limit, uint32_t retries,
                           uint64_t n_run);
int koila__save_graph(const koila_graph *g, const char *path);
/* predict.c */
/* What a recorded step does not show: koila_predict_opts in words. */
typedef struct koila__training {
    const char *optimizer, *way, *sdpa, *cublas_workspace, *conf, *torch_version;
    /* strict_conf: conf was typed by the user */
    int weight_decay, amsgrad, clip_grad_norm, ddp, autocast, grad_scaler, cudnn_sdpa_last,
        strict_conf;
} koila__training;
/* rows: KOILA_ROWS_AUTO for the most that fit. *plan: the one that was predicted, the caller's. */
PyObject *koila__predict_graph(const koila_graph *g, const char *device, unsigned long long memory,
                               long long rows, const koila__training *with, koila_plan **plan);
PyObject *koila__device_names(void);
int koila__run_module_add(PyObject *m);

#endif
