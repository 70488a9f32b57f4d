/* inside.h — the effect on CUDA's memory of an operator recorded on a CPU: the temporaries of its
 * kernels, and results whose size differs from the recorded one. Internal to src/predict/.
 *
 * All sizes are in bytes. No function here can fail, allocates, or uses the simulated cache.
 */
#ifndef KOILA_SRC_INSIDE_H
#define KOILA_SRC_INSIDE_H

#include "koila/predict.h"

/* Three runs bound the unknowns: operators use the least, the likely and the most memory. */
typedef enum koila__level {
    KOILA__LOW,
    KOILA__EXPECTED,
    KOILA__HIGH,
    KOILA__N_LEVELS
} koila__level;

/* The kind of an operator: a group of rows of cuda_ops.def. */
typedef enum koila__inside_kind {
    KOILA__INSIDE_VIEW,    /* the first result shares the first input's storage */
    KOILA__INSIDE_NOTHING, /* results only */
    KOILA__INSIDE_REDUCE,  /* partial results, estimated */
    KOILA__INSIDE_SUM,     /* dims are argument 1: partial results as computed by reduce.c */
    KOILA__INSIDE_NORM,    /* dims are argument 2 */
    KOILA__INSIDE_GEMM,
    KOILA__INSIDE_CONV,
    KOILA__INSIDE_CONV_GRAD,
    KOILA__INSIDE_DENSE, /* the first two inputs are copied where they are not contiguous */
    KOILA__INSIDE_LAYER_NORM,
    KOILA__INSIDE_LAYER_NORM_GRAD,
    KOILA__INSIDE_BATCH_NORM,
    KOILA__INSIDE_SDPA,      /* scaled dot product attention, of the back end that torch chooses */
    KOILA__INSIDE_FLASH,     /* of this one */
    KOILA__INSIDE_EFFICIENT, /* of this one */
    KOILA__INSIDE_CUDNN,     /* of this one */
    KOILA__INSIDE_DRAWN,     /* flash or efficient, with an input more: the draws of dropout */
    KOILA__INSIDE_SDPA_GRAD,
    KOILA__INSIDE_FLASH_GRAD,
    KOILA__INSIDE_EFFICIENT_GRAD,
    KOILA__INSIDE_CUDNN_GRAD,
    KOILA__INSIDE_DRAWN_GRAD,
    KOILA__INSIDE_LOSS,       /* plain PyTorch's result keeps all elements' losses */
    KOILA__INSIDE_TWICE_LOSS, /* and there once more while they are reduced */
    KOILA__INSIDE_EMBEDDING_GRAD,
    KOILA__INSIDE_SORT,
    KOILA__INSIDE_RNN,
    KOILA__INSIDE_RNN_GRAD,
    KOILA__INSIDE_CTC,
    KOILA__INSIDE_CTC_GRAD,
    KOILA__INSIDE_UNKNOWN, /* no row in cuda_ops.def */
    KOILA__N_INSIDE_KINDS
} koila__inside_kind;

koila__inside_kind koila__inside_of(const koila_table *t, koila_op op);

/* One call of an operator on a slice of the batch. All pointers are borrowed. */
typedef struct koila__cuda_call {
    const koila_table *t;
    const koila_device *d;
    const koila_predict_opts *o;
    const koila_sig_info *sig; /* recorded on the whole batch: its metas have all rows */
    koila__inside_kind kind;
    koila__level level;
    double part; /* the slice's share of the batch: 0 < part <= 1 */
    /* plain PyTorch's: the number that a loss returns lies in the memory of all losses; koila's
     * copy it (settle_results() of python/ext/run/exec_node.c) */
    bool is_plain;
} koila__cuda_call;

enum { KOILA__MAX_TEMPS = 8 };
/* Temporaries of one call, in the order in which they are allocated, after the results. The first
 * n_early of them end before the others begin, which live to the end of the call. */
typedef struct koila__temps {
    uint64_t bytes[KOILA__MAX_TEMPS];
    uint32_t n; /* <= KOILA__MAX_TEMPS */
    uint32_t n_early;
} koila__temps;

/* Bytes that a call uses when it has made result i, and gives back before it makes the next one:
 * cuDNN's workspaces of a convolution's backward. */
uint64_t koila__between_results(const koila__cuda_call *k, uint32_t i);
/* out_bytes: of all results of the call, as allocated. */
koila__temps koila__temporaries(const koila__cuda_call *k, uint64_t out_bytes);
/* reduce.c: of a reduction whose dims are argument pos_dims. */
koila__temps koila__reduction(const koila__cuda_call *k, uint32_t pos_dims);
/* Bytes of the losses of all elements, in whose memory plain PyTorch's result lies; 0: of another
 * call. */
uint64_t koila__kept_losses(const koila__cuda_call *k);
/* Bytes on CUDA of result `output`, whose recorded size for the slice is `bytes`. */
uint64_t koila__result_bytes(const koila__cuda_call *k, uint32_t output, uint64_t bytes);
/* Bytes of one cuBLAS workspace: those of CUBLAS_WORKSPACE_CONFIG if it has any, else the
 * profile's. */
uint64_t koila__cublas_bytes(const koila_device *d, const koila_predict_opts *o,
                             koila__level level);

/* Dropout masks of g: sets is_mask[v], Note [Masks]. `is_mask` has a zero for every value of g. */
void koila__find_masks(const koila_graph *g, uint8_t *is_mask);
/* Attention matrices that CUDA never makes: sets is_square[v], Note [Square matrices]. `is_square`
 * has a zero for every value of g; `kinds` has koila__inside_of() every operator of g's table. */
void koila__find_squares(const koila_graph *g, const koila__inside_kind *kinds, uint8_t *is_square);
bool koila__has_safe_softmax(const koila_graph *g);

/* Does the profile say that cuDNN asks for no memory at all (conv_workspace_bytes is 0, without a
 * spread)? So is a simulated device. */
bool koila__is_silent(const koila_device *d);
/* Would torch try cuDNN's attention first on this device, with a new enough cuDNN?
 */
bool koila__may_prefer_cudnn(const koila_device *d);

static inline bool koila__is_convolution(koila__inside_kind kind)
{
    return kind == KOILA__INSIDE_CONV || kind == KOILA__INSIDE_CONV_GRAD;
}

static inline bool koila__is_half(koila_dtype dtype)
{
    return dtype == KOILA_DTYPE_F16 || dtype == KOILA_DTYPE_BF16;
}

#endif
