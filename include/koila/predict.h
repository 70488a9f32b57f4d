/* koila/predict.h — what a recorded step will need on a GPU that is not here, and which plan of it
 * fits on one that is: a device profile, the step's graph, and the model of torch's cache.
 *
 *   koila_device_builtin("h100-80gb", NULL, &dev, &err);
 *   koila_predict(graph, dev, NULL, NULL, &p, &err);       p.steady.reserved.expected, p.fits, ...
 *
 * All sizes are in bytes. Graphs, devices, plans and options are borrowed for the call; options may
 * be NULL where that is said, and count as zeros then. Host memory comes from the C library, but
 * where a function takes an allocator.
 */
#ifndef KOILA_PREDICT_H
#define KOILA_PREDICT_H

#include "koila/cache.h"
#include "koila/device.h"
#include "koila/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The kernels that scaled_dot_product_attention runs. */
typedef enum koila_sdpa {
    KOILA_SDPA_AUTO, /**< as torch chooses: by dtype, head size, mask, capability, cuDNN */
    KOILA_SDPA_FLASH,
    KOILA_SDPA_EFFICIENT,
    KOILA_SDPA_MATH,
    KOILA_SDPA_CUDNN
} koila_sdpa;
typedef enum koila_optimizer {
    KOILA_OPTIMIZER_NONE,
    KOILA_OPTIMIZER_SGD,
    KOILA_OPTIMIZER_MOMENTUM, /**< SGD with momentum */
    KOILA_OPTIMIZER_ADAM,
    KOILA_OPTIMIZER_ADAMW
} koila_optimizer;
/** How the optimizer goes over its parameters: torch's arguments foreach and fused, or neither. */
typedef enum koila_optimizer_way {
    KOILA_WAY_FOREACH,
    KOILA_WAY_FUSED,
    KOILA_WAY_LOOP
} koila_optimizer_way;

enum {
    KOILA_ROWS_AUTO = -1,     /**< koila_predict_opts.rows: the most that fit */
    KOILA_MAX_SIMULATIONS = 8 /**< plans that are tried before one is taken */
};

typedef struct koila_predict_opts {
    uint32_t struct_size;
    uint64_t memory_bytes; /**< of the device, instead of the profile's; 0: the profile's */
    /** rows of the batch in a slice; 0: the whole batch at once; KOILA_ROWS_AUTO: the most that
     * fit */
    int64_t rows;
    uint32_t sdpa; /**< koila_sdpa */
    /** koila_optimizer, koila_optimizer_way: a graph does not hold the optimizer's step */
    uint32_t optimizer, way;
    bool weight_decay, amsgrad;
    bool clip_grad_norm; /**< torch.nn.utils.clip_grad_norm_ before each optimizer step */
    /** half-precision leaves are casts of float32 parameters, which the graph does not show */
    bool autocast;
    /** the model is wrapped in DistributedDataParallel: its buckets count, NCCL's memory does not
     */
    bool ddp;
    bool grad_scaler;     /**< torch.amp.GradScaler around the optimizer's step */
    bool cudnn_sdpa_last; /**< TORCH_CUDNN_SDPA_DEPRIORITIZED is set */
    /** CUBLAS_WORKSPACE_CONFIG, read as torch reads it; NULL: not set, the profile's bytes count */
    const char *cublas_workspace;
    const char *cublaslt_workspace; /**< CUBLASLT_WORKSPACE_SIZE; NULL: not set, torch's default */
    bool keeps_cublas;              /**< TORCH_CUBLAS_WORKSPACE_CACHE is 1 */
    bool rows_only;                 /**< koila_plan_options.axes is KOILA_AXES_ROWS, not ANY */
} koila_predict_opts;

/** koila_cache_config.torch_version from which on a product on CUDA takes its workspace for itself
 * and gives it back, unless TORCH_CUBLAS_WORKSPACE_CACHE is 1. Before, and with that, cuBLAS keeps
 * one from a thread's first product on. */
enum { KOILA_PRODUCTS_GIVE_BACK = 215 };
/** The bytes of that workspace: `cublaslt_bytes` where cuBLASLt makes the product, else
 * `cublas_bytes`; 0: the call is no product. cuBLASLt adds a vector, of a number for each
 * column, to a product of real matrices that has more than one column and sums up more than one
 * term. [seen: the allocations of torch 2.15 on the simulated device. It makes some others too, as
 * half precision's sums with a matrix: those count as cuBLAS's] */
KOILA_API uint64_t koila_product_workspace(const koila_table *t, koila_sig sig,
                                           uint64_t cublas_bytes, uint64_t cublaslt_bytes);
/** The bytes of a CUBLASLT_WORKSPACE_SIZE, which is in KiB. NULL, or no number: torch's default. */
KOILA_API uint64_t koila_cublaslt_workspace(const char *size);

/** Bytes that the call uses inside on a CPU, of all rows, where its shapes tell them; 0: none, or
 * nobody knows. They are copies of its operands in another dtype, where it computes in one (a mask
 * times numbers, a half-precision tensor plus a float32 one, a sum of flags), and CTC's table of
 * backward sums. */
KOILA_API uint64_t koila_cpu_inside_bytes(const koila_table *t, koila_sig sig);

/** Bytes of three runs, in which operators use the least, the likely and the most memory inside.
 * low <= expected <= high; low and high are the least and the most of the three. */
typedef struct koila_range {
    uint64_t low, expected, high;
} koila_range;
/** Highest bytes of a step. */
typedef struct koila_peaks {
    koila_range allocated; /**< torch.cuda.max_memory_allocated() */
    koila_range reserved;  /**< torch.cuda.max_memory_reserved() */
    koila_range device;    /**< reserved as the driver rounds it, and the CUDA context */
} koila_peaks;

enum { KOILA_PREDICT_LARGEST = 12, KOILA_PREDICT_NOTES = 24, KOILA_PREDICT_NOT_MODELLED = 32 };

/** Holds no pointers: copy it as you like. Texts end with NUL and are cut where they are longer. */
typedef struct koila_prediction {
    uint32_t struct_size;
    koila_peaks first;     /**< of the first step, which makes the optimizer's state */
    koila_peaks steady;    /**< of the later steps */
    uint64_t memory_bytes; /**< the limit that `fits` is about */
    bool fits;             /**< all three runs, in every step, under that limit */
    uint64_t spare_bytes;  /**< memory_bytes - highest device bytes; 0 if it does not fit */
    /** times that the cache had to give cached memory back and ask again, under the limit: of the
     * high end; if it does not fit, of the first run that did not, up to the request that failed */
    uint64_t n_retries;
    bool settled;     /**< in all three runs two steps in a row left the same state */
    uint32_t n_steps; /**< until then, in the expected run */
    uint32_t n_slices;
    int64_t batch, rows; /**< rows of the batch, and of a slice */
    /** operator that ran when most was allocated, and "file.py:12" that called it; "" when none */
    char peak_op[96], peak_line[160];
    struct {
        uint64_t bytes;
        /** "f32[64, 1024]"; the line that made it, or the name of the leaf */
        char what[64], line[160];
    } largest[KOILA_PREDICT_LARGEST]; /**< live at that moment, largest first */
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
    /** of the whole batch in plain PyTorch, which keeps values for as long as the program and
     * autograd hold them, not until their last use (koila_graph_drop() says how long; a value of
     * which it is not known lives until its last use) */
    koila_peaks plain_first, plain_steady;
    /** KOILA_NONE: `batch` and `rows` are rows; else entries of another axis, as
     * koila_plan_info.dim says */
    uint32_t dim;
} koila_prediction;

/** Predicts the step that makes all values of g that nobody uses. `c` NULL: defaults of the newest
 * torch that is known. `o` NULL: the whole batch, no optimizer. On success *out is written, its
 * struct_size too.
 *  Expected: NO_MEMORY; UNSUPPORTED; BAD_ARGUMENT for negative rows and for a graph without
 *      nodes. A step that does not fit is no error (out->fits is false), but a context that does
 *      not is: OOM, with the bytes short in *e. */
KOILA_API koila_status koila_predict(const koila_graph *g, const koila_device *d,
                                     const koila_cache_config *c, const koila_predict_opts *o,
                                     koila_prediction *out, koila_error *e);
/** The same. `plan` may be NULL; else *plan is the plan that was predicted, and yours:
 * koila_plan_free(). */
KOILA_API koila_status koila_predict_plan(const koila_graph *g, const koila_device *d,
                                          const koila_cache_config *c, const koila_predict_opts *o,
                                          koila_prediction *out, koila_plan **plan, koila_error *e);

/* ---- the planner on a device that is here. `live` is the state of its cache: leaves, and whatever
 * else is alive, are in it already. Plans are run in it behind a mark (koila_cache_mark,
 * koila_cache_rewind), so it is as before when a function returns. A plan is judged by the high
 * end: operators use the most, and memory that waits for other streams comes free as late as it
 * can. */

typedef struct koila_fit_opts {
    uint32_t struct_size;
    uint32_t sdpa;   /**< koila_sdpa */
    uint64_t stream; /**< that the step runs on, as `live` names it */
    const char *cublas_workspace, *cublaslt_workspace; /**< as koila_predict_opts */
    bool keeps_cublas;
    /** of the device's memory, to be left alone: by so much have earlier steps needed more than was
     * predicted (koila_fit_margin) */
    uint64_t margin_bytes;
    /** cuBLAS has its workspace already, from an earlier product in the thread that runs the step
     */
    bool has_cublas_workspace;
    /** Was it measured what a call uses inside, on `rows` of `batch` rows (both 0: whole)? Then
     * *bytes stand for the temporaries that its kind of operator is known for. NULL: nothing was.
     * `user` is passed on. */
    bool (*measured)(void *user, koila_sig sig, int64_t rows, int64_t batch, uint64_t *bytes);
    void *user;
} koila_fit_opts;

typedef struct koila_fit {
    uint32_t struct_size;
    bool fits; /**< no request of the step failed */
    /** of the live cache while the step ran in it; if it does not fit, up to the request that
     * failed */
    uint64_t peak_allocated, peak_reserved, n_retries;
    uint32_t n_simulations; /**< plans that were tried */
} koila_fit;
/** Does the step fit into a live cache, `slice` rows at a time (0: all)? Expected: NO_MEMORY;
 * UNSUPPORTED; BAD_ARGUMENT when `slice` is above INT64_MAX. */
KOILA_API koila_status koila_fits(const koila_graph *g, const koila_device *d, koila_cache *live,
                                  uint64_t slice, koila_fit *out, koila_error *e);
/** Does this plan? `o` may be NULL. Expected: NO_MEMORY, UNSUPPORTED. */
KOILA_API koila_status koila_fits_plan(const koila_plan *p, const koila_device *d,
                                       koila_cache *live, const koila_fit_opts *o, koila_fit *out,
                                       koila_error *e);
/** koila_plan_new(), of the plans that fit `live`: the fewest slices, then the least work. Plans
 * are compared by their sum of live bytes first (with the budget, and with what `live` has left);
 * then at most KOILA_MAX_SIMULATIONS of them are run, of each axis that is tried, and again with
 * results dropped. When some fit by the sum but none when run, *out is the plan of one row a
 * slice, and fit->fits is false. `o` may be NULL. On success *out is yours: koila_plan_free().
 * Expected: as koila_plan_new() and koila_fits(); OOM when one row does not fit by the sum. */
KOILA_API koila_status koila_plan_live(const koila_graph *g, const koila_value *targets,
                                       uint32_t n_targets, const koila_plan_options *po,
                                       const koila_device *d, koila_cache *live,
                                       const koila_fit_opts *o, const koila_allocator *mem,
                                       koila_plan **out, koila_fit *fit, koila_error *e);
/** For a plan that was said to fit and ran out of memory: the least margin with which it would have
 * been refused, within 2 MiB, and at least o->margin_bytes. `o` may be NULL. Expected: NO_MEMORY,
 * UNSUPPORTED. */
KOILA_API koila_status koila_fit_margin(const koila_plan *p, const koila_device *d,
                                        koila_cache *live, const koila_fit_opts *o,
                                        uint64_t *margin_bytes, koila_error *e);

#ifdef __cplusplus
}
#endif
#endif
