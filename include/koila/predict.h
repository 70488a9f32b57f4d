/* koila/predict.h — what a recorded step will need on a GPU that is not here: a device profile, the
 * step's graph, and the cache.
 *
 *   koila_device_builtin("h100-80gb", NULL, &dev, &err);
 *   koila_predict(graph, dev, NULL, NULL, &p, &err);       p.steady.reserved.expected, p.fits, ...
 */
#ifndef KOILA_PREDICT_H
#define KOILA_PREDICT_H

#include "koila/cache.h"
#include "koila/device.h"
#include "koila/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum koila_sdpa {
    KOILA_SDPA_AUTO,
    KOILA_SDPA_FLASH,
    KOILA_SDPA_EFFICIENT,
    KOILA_SDPA_MATH,
    KOILA_SDPA_CUDNN
} koila_sdpa;
typedef enum koila_optimizer {
    KOILA_OPTIMIZER_NONE,
    KOILA_OPTIMIZER_SGD,
    KOILA_OPTIMIZER_MOMENTUM,
    KOILA_OPTIMIZER_ADAM,
    KOILA_OPTIMIZER_ADAMW
} koila_optimizer;
typedef enum koila_optimizer_way {
    KOILA_WAY_FOREACH,
    KOILA_WAY_FUSED,
    KOILA_WAY_LOOP
} koila_optimizer_way;

/* so many tries of numbers of slices before one is taken */
enum { KOILA_ROWS_AUTO = -1, KOILA_MAX_SIMULATIONS = 8 };

typedef struct koila_predict_opts {
    uint32_t struct_size;
    uint64_t memory_bytes; /**< of the device, instead of the profile's; 0 = the profile's */
    /** rows of the batch in a slice; 0 = the whole batch at once; KOILA_ROWS_AUTO = the most that
     * fit */
    int64_t rows;
    uint32_t sdpa; /**< koila_sdpa */
    /** koila_optimizer, koila_optimizer_way: a graph does not hold the optimizer's step */
    uint32_t optimizer, way;
    bool weight_decay, amsgrad;
    bool clip_grad_norm; /**< torch.nn.utils.clip_grad_norm_ before each optimizer step */
    /** half-precision leaves are casts of float32 parameters, which the graph does not show */
    bool autocast;
    /** the model is wrapped in DistributedDataParallel: its buckets count, NCCL is outside */
    bool ddp;
    bool grad_scaler;     /**< torch.amp.GradScaler around the optimizer's step */
    bool cudnn_sdpa_last; /**< TORCH_CUDNN_SDPA_DEPRIORITIZED is set */
    /** CUBLAS_WORKSPACE_CONFIG, read as torch reads it; NULL: not set, the profile's bytes count */
    const char *cublas_workspace;
} koila_predict_opts;

typedef struct koila_range {
    /** low <= expected <= high: the least and the most of three runs, with the least, the likely
     * and the most that operators may use */
    uint64_t low, expected, high;
} koila_range;
typedef struct koila_peaks {
    /** device: reserved as the driver rounds it, and everything outside the cache */
    koila_range allocated, reserved, device;
} koila_peaks;

enum { KOILA_PREDICT_LARGEST = 12, KOILA_PREDICT_NOTES = 24, KOILA_PREDICT_NOT_MODELLED = 32 };

typedef struct koila_prediction {
    uint32_t struct_size;
    koila_peaks first, steady;
    uint64_t memory_bytes; /**< the limit it was judged against */
    bool fits;             /**< all three runs, in every step, under that limit */
    uint64_t spare_bytes;  /**< memory - highest device bytes; 0 if it does not fit */
    /** of the high end under the limit; up to the request that failed if it does not fit */
    uint64_t n_retries;
    bool settled; /**< two steps in a row left the same state */
    uint32_t n_steps, n_slices;
    int64_t batch, rows;
    char peak_op[96], peak_line[160]; /**< where allocated was highest */
    struct {
        uint64_t bytes;
        char what[64], line[160];
    } largest[KOILA_PREDICT_LARGEST]; /**< live then, largest first */
    uint32_t n_largest;
    char notes[KOILA_PREDICT_NOTES][200]; /**< every assumption used */
    uint32_t n_notes;
    struct {
        char op[80];
        uint32_t n_calls;
    } not_modelled
        /** operators of which it is not known what they use inside; they widen the high end */
        [KOILA_PREDICT_NOT_MODELLED];
    uint32_t n_not_modelled;
} koila_prediction;

/** `c` NULL: torch's newest known defaults. `o` NULL: the whole batch, no optimizer.
 * out->struct_size is set.
 *  Expected: KOILA_NO_MEMORY, KOILA_UNSUPPORTED, KOILA_BAD_ARGUMENT. Not fitting is no error,
 *      but for memory that a context alone fills: KOILA_OOM. */
KOILA_API koila_status koila_predict(const koila_graph *g, const koila_device *d,
                                     const koila_cache_config *c, const koila_predict_opts *o,
                                     koila_prediction *out, koila_error *e);
/** The same, and the plan that was predicted (may be NULL): koila_plan_free(). */
KOILA_API koila_status koila_predict_plan(const koila_graph *g, const koila_device *d,
                                          const koila_cache_config *c, const koila_predict_opts *o,
                                          koila_prediction *out, koila_plan **plan, koila_error *e);

/* ---- the planner on a device that is here: leaves and what is live already are in `live`, which
 * is as before when a function returns (koila_cache_mark, _rewind). All of it is judged by the high
 * end: widest estimates, frees that wait for other streams as late as can be. */

typedef struct koila_fit_opts {
    uint32_t struct_size;
    uint32_t sdpa;                /**< koila_sdpa */
    uint64_t stream;              /**< that the step runs on, as `live` names it */
    const char *cublas_workspace; /**< as koila_predict_opts */
    /** of the device, not to be counted with: what a step that was said to fit was found to need
     * beyond (koila_fit_margin) */
    uint64_t margin_bytes;
} koila_fit_opts;

typedef struct koila_fit {
    uint32_t struct_size;
    bool fits;
    /** of the live cache while the step ran in it, high end; up to the request that failed if it
     * does not fit */
    uint64_t peak_allocated, peak_reserved, n_retries;
    uint32_t n_simulations;
} koila_fit;
/** Does the step fit into a live cache, `slice` rows at a time (0: all)? Expected: KOILA_NO_MEMORY,
 * KOILA_UNSUPPORTED, KOILA_BAD_ARGUMENT. */
KOILA_API koila_status koila_fits(const koila_graph *g, const koila_device *d, koila_cache *live,
                                  uint64_t slice, koila_fit *out, koila_error *e);
/** Does this plan? `o` may be NULL. */
KOILA_API koila_status koila_fits_plan(const koila_plan *p, const koila_device *d,
                                       koila_cache *live, const koila_fit_opts *o, koila_fit *out,
                                       koila_error *e);
/** koila_plan_new, of the plans that fit `live`: the fewest slices, then the least work. First by
 * the sum of live bytes (the budget, and what `live` has left), then by at
 *  most KOILA_MAX_SIMULATIONS runs of the step. When none fits that fits by the sum, the plan
 *      of one row a slice, and fit->fits is false.
 *  Expected: what koila_plan_new and koila_fits expect; KOILA_OOM when one row does not fit by
 *      the sum. */
KOILA_API koila_status koila_plan_live(const koila_graph *g, const koila_value *targets,
                                       uint32_t n_targets, const koila_plan_options *po,
                                       const koila_device *d, koila_cache *live,
                                       const koila_fit_opts *o, const koila_allocator *mem,
                                       koila_plan **out, koila_fit *fit, koila_error *e);
/** Such a plan ran out of memory: the least margin with which it would have been refused, within 2
 * MiB. At least o->margin_bytes. */
KOILA_API koila_status koila_fit_margin(const koila_plan *p, const koila_device *d,
                                        koila_cache *live, const koila_fit_opts *o,
                                        uint64_t *margin_bytes, koila_error *e);

#ifdef __cplusplus
}
#endif
#endif
