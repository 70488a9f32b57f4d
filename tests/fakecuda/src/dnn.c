/* cuDNN by its older interface: descriptors that hold sizes, algorithms that need no workspace
 * unless FAKECUDA_CUDNN_WORKSPACE says so, and no computing. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int version[] = CUDNN_PARTS;

size_t cudnnGetVersion(void)
{
    return (size_t)(10000 * version[0] + 100 * version[1] + version[2]);
}

size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int e)
{
    return e == 0 ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_NOT_SUPPORTED";
}

void cudnnGetLastErrorString(char *out, size_t n)
{
    snprintf(out, n, "the stub of cuDNN has no such function");
}

int cudnnGetProperty(int which, int *value)
{
    *value = which >= 0 && which < 3 ? version[which] : 0;
    return 0;
}

/* what dropout draws from, where numbers find it: the seed, and how many masks were drawn */
struct drawn {
    int64_t seed, n;
};

struct thing {
    void *stream;
    int type, dims, size[8], stride[8];
    struct drawn *drawn; /* of a dropout descriptor: in its states */
};
#define MAKES(kind)                                                                                \
    int cudnnCreate##kind(struct thing **out)                                                      \
    {                                                                                              \
        *out = calloc(1, sizeof **out);                                                            \
        return *out ? 0 : 1;                                                                       \
    }
#define THING(kind)                                                                                \
    MAKES(kind)                                                                                    \
    int cudnnDestroy##kind(struct thing *t)                                                        \
    {                                                                                              \
        free(t);                                                                                   \
        return 0;                                                                                  \
    }
MAKES()
THING(TensorDescriptor)
THING(FilterDescriptor)
THING(ConvolutionDescriptor)
THING(ActivationDescriptor)
THING(DropoutDescriptor)
THING(RNNDescriptor)
THING(RNNDataDescriptor)
THING(SpatialTransformerDescriptor)
THING(CTCLossDescriptor)
MAKES(PoolingDescriptor)

int cudnnSetStream(struct thing *h, void *stream)
{
    h->stream = stream;
    return 0;
}

int cudnnGetStream(struct thing *h, void **stream)
{
    *stream = h->stream;
    return 0;
}

int cudnnSetTensorNdDescriptor(struct thing *t, int type, int n, const int *size, const int *stride)
{
    t->type = type;
    t->dims = n;
    for (int i = 0; i < n && i < 8; i++) {
        t->size[i] = size[i];
        t->stride[i] = stride[i];
    }
    return 0;
}

int cudnnSetFilterNdDescriptor(struct thing *t, int type, int format, int n, const int *size)
{
    t->type = type;
    t->dims = n;
    for (int i = 0; i < n && i < 8; i++)
        t->size[i] = size[i];
    return 0;
}

int cudnnSetConvolutionNdDescriptor(struct thing *t) { return 0; }
int cudnnSetConvolutionGroupCount(struct thing *t) { return 0; }
int cudnnSetConvolutionMathType(struct thing *t) { return 0; }
int cudnnSetActivationDescriptor(struct thing *t) { return 0; }

/* what one algorithm costs: the layout of cudnnConvolution*AlgoPerf_t */
struct cost {
    int algorithm, status;
    float ms;
    size_t memory;
    int determinism, math, reserved[3];
};

static size_t width_of(int type)
{
    if (type == 1)
        return 8;
    return type == 2 || type == 9 ? 2 : 4;
}

/* Bytes of the columns by which a convolution becomes one matrix product: for each position of y,
 * the inputs that its filter sees. */
static size_t columns(const struct thing *x, const struct thing *w, const struct thing *y)
{
    size_t n = width_of(x->type) * (size_t)x->size[0] * (size_t)x->size[1];
    for (int i = 2; i < x->dims && i < 8; i++)
        n *= (size_t)w->size[i] * (size_t)y->size[i];
    return n;
}

static size_t workspace(const struct thing *x, const struct thing *w, const struct thing *y)
{
    const char *said = getenv("FAKECUDA_CUDNN_WORKSPACE");
    if (said && !strcmp(said, "columns"))
        return columns(x, w, y);
    return parse_bytes(said, 0);
}

static int only_one(int *n, struct cost *costs, size_t memory)
{
    memset(costs, 0, sizeof *costs);
    costs->algorithm = 1;
    costs->ms = 1;
    costs->determinism = 1;
    costs->memory = memory;
    *n = 1;
    return 0;
}

/* x, w and y name those of the four descriptors a, b, c (the convolution's) and d. */
#define CONVOLUTION(which, x, w, y)                                                                \
    int cudnnGetConvolution##which##Algorithm_v7(void *h, struct thing *a, struct thing *b,        \
                                                 void *c, struct thing *d, int wanted, int *n,     \
                                                 struct cost *costs)                               \
    {                                                                                              \
        return only_one(n, costs, workspace(x, w, y));                                             \
    }                                                                                              \
    int cudnnFindConvolution##which##AlgorithmEx(                                                  \
        void *h, struct thing *a, void *ap, struct thing *b, void *bp, void *c, struct thing *d,   \
        void *dp, int wanted, int *n, struct cost *costs)                                          \
    {                                                                                              \
        return only_one(n, costs, workspace(x, w, y));                                             \
    }                                                                                              \
    int cudnnGetConvolution##which##WorkspaceSize(void *h, struct thing *a, struct thing *b,       \
                                                  void *c, struct thing *d, int algorithm,         \
                                                  size_t *n)                                       \
    {                                                                                              \
        *n = workspace(x, w, y);                                                                   \
        return 0;                                                                                  \
    }                                                                                              \
    int cudnnConvolution##which(void *h) { return 0; }
CONVOLUTION(Forward, a, b, d)
CONVOLUTION(BackwardData, d, a, b)
CONVOLUTION(BackwardFilter, a, d, b)
int cudnnConvolutionBiasActivationForward(void *h) { return 0; }

/* batch normalisation */
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int ops, void *x,
                                                             void *z, void *y, void *p, void *a,
                                                             size_t *n)
{
    *n = 0;
    return 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int ops, void *a,
                                                         void *x, size_t *n)
{
    *n = 0;
    return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int ops, void *x, void *y,
                                                      void *dy, void *dz, void *dx, void *p,
                                                      void *a, size_t *n)
{
    *n = 0;
    return 0;
}

int cudnnBatchNormalizationForwardTrainingEx(void *h) { return 0; }
int cudnnBatchNormalizationForwardInference(void *h) { return 0; }
int cudnnBatchNormalizationBackwardEx(void *h) { return 0; }

/* recurrent layers: the weights of all gates of all layers, each layer's projection behind them,
 * then the biases, without gaps; a workspace of the gates, and a reserve of gates and states */
struct recurrent {
    void *stream;
    int cell, bias, directions, type, input, hidden, projection, layers;
    struct drawn *drawn;
};

int cudnnSetRNNDescriptor_v8(struct recurrent *r, int algorithm, int cell, int bias, int direction,
                             int input_mode, int type, int precision, int math, int input,
                             int hidden, int projection, int layers, struct thing *dropout)
{
    *r = (struct recurrent){
        NULL,   cell,       bias != 0, direction == 1 ? 2 : 1,         type, input,
        hidden, projection, layers,    dropout ? dropout->drawn : NULL
    };
    return 0;
}

static size_t gates(const struct recurrent *r)
{
    if (r->cell == 2)
        return 4;
    return r->cell == 3 ? 3 : 1;
}

/* the size of what a direction gives, which may be projected */
static size_t given_by(const struct recurrent *r)
{
    return (size_t)(r->projection ? r->projection : r->hidden);
}

static size_t inputs_of(const struct recurrent *r, int layer)
{
    return layer == 0 ? (size_t)r->input : given_by(r) * (size_t)r->directions;
}

static size_t projected(const struct recurrent *r)
{
    return given_by(r) == (size_t)r->hidden ? 0 : given_by(r) * (size_t)r->hidden;
}

/* numbers of weights before a pseudo-layer's, of both kinds of matrices */
static size_t before(const struct recurrent *r, int pseudo)
{
    size_t n = 0;
    for (int i = 0; i < pseudo; i++)
        n += gates(r) * (size_t)r->hidden * (inputs_of(r, i / r->directions) + given_by(r)) +
             projected(r);
    return n;
}

int cudnnGetRNNWeightSpaceSize(void *h, struct recurrent *r, size_t *n)
{
    size_t layers = (size_t)(r->layers * r->directions);
    *n = (before(r, (int)layers) + (r->bias ? layers * 2 * gates(r) * (size_t)r->hidden : 0)) *
         width_of(r->type);
    return 0;
}

int cudnnGetRNNWeightParams(void *h, struct recurrent *r, int pseudo, size_t size, char *space,
                            int gate, struct thing *m, void **matrix, struct thing *b, void **bias)
{
    size_t g = gates(r);
    size_t hidden = (size_t)r->hidden;
    size_t in = inputs_of(r, pseudo / r->directions);
    size_t w = width_of(r->type);
    size_t k = (size_t)gate % g;
    int of_state = (size_t)gate >= g;
    int is_projection = (size_t)gate == 2 * g;
    if ((size_t)gate > 2 * g || (is_projection && !projected(r)))
        return 3000;
    size_t rows = is_projection ? given_by(r) : hidden;
    size_t columns = is_projection ? hidden : of_state ? given_by(r) : in;
    size_t at = before(r, pseudo) + (of_state ? g * hidden * in : 0) + k * hidden * columns;
    if (is_projection)
        at = before(r, pseudo + 1) - projected(r);
    if (m)
        *m = (struct thing){ NULL, r->type, 3, { 1, (int)rows, (int)columns }, { 1, 1, 1 }, NULL };
    if (b)
        *b = (struct thing){ NULL, r->type, 3, { 1, r->hidden, 1 }, { 1, 1, 1 }, NULL };
    if (matrix)
        *matrix = space + at * w;
    size_t biases = before(r, r->layers * r->directions);
    size_t row = ((size_t)pseudo * 2 + (size_t)of_state) * g * hidden + k * hidden;
    if (bias)
        *bias = r->bias && !is_projection ? space + (biases + row) * w : NULL;
    return 0;
}

int cudnnGetTensorNdDescriptor(struct thing *t, int wanted, int *type, int *n, int *size,
                               int *stride)
{
    *type = t->type;
    *n = t->dims;
    for (int i = 0; i < wanted; i++) {
        size[i] = i < t->dims ? t->size[i] : 1;
        stride[i] = i < t->dims ? t->stride[i] : 1;
    }
    return 0;
}

int cudnnSetRNNDataDescriptor(struct thing *t, int type, int layout, int length, int batch,
                              int vector)
{
    t->type = type;
    t->dims = 3;
    t->size[0] = length;
    t->size[1] = batch;
    t->size[2] = vector;
    return 0;
}

int cudnnGetRNNTempSpaceSizes(void *h, struct recurrent *r, int training, struct thing *x,
                              size_t *work, size_t *reserve)
{
    const char *estimate = getenv("FAKECUDA_CUDNN_RNN");
    const bool silent = estimate && !strcmp(estimate, "0");
    size_t cells = silent ? 0
                          : (size_t)x->size[0] * (size_t)x->size[1] * (size_t)r->hidden *
                                (size_t)(r->layers * r->directions) * width_of(r->type);
    if (work)
        *work = cells * gates(r);
    if (reserve)
        *reserve = training ? cells * (gates(r) + 2) : 0;
    return 0;
}

/* How a reserve begins. Backward writes into a reserve, so one serves a single backward. */
struct reserve {
    struct drawn drawn; /* what forward's dropout drew from */
    int64_t used;       /* by a backward: RESERVE_USED */
};
#define RESERVE_USED 0x75736564 /* emulations.cpp knows it too */

/* The next mask of each layer is another one: the state counts. In a graph it draws the same at
 * each replay. */
int cudnnRNNForward(void *h, struct recurrent *r, int training, const int *lengths, void *x_is,
                    void *x, void *y_is, void *y, void *h_is, void *hx, void *hy, void *c_is,
                    void *cx, void *cy, size_t n_weights, void *weights, size_t n_work, void *work,
                    size_t n_reserve, struct reserve *reserve)
{
    if (!training || n_reserve < sizeof *reserve)
        return 0;
    reserve->used = 0;
    if (!r->drawn)
        return 0;
    reserve->drawn = *r->drawn;
    if (!is_captured(((struct thing *)h)->stream))
        r->drawn->n++;
    return 0;
}

/* In a graph nothing is said of the reserve: forward would not take it back at the next replay. */
int cudnnRNNBackwardData_v8(void *h, struct recurrent *r, const int *lengths, void *y_is, void *y,
                            void *dy, void *x_is, void *dx, void *h_is, void *hx, void *dhy,
                            void *dhx, void *c_is, void *cx, void *dcy, void *dcx, size_t n_weights,
                            void *weights, size_t n_work, void *work, size_t n_reserve,
                            struct reserve *reserve)
{
    if (n_reserve >= sizeof *reserve && !is_captured(((struct thing *)h)->stream))
        reserve->used = RESERVE_USED;
    return 0;
}
int cudnnRNNBackwardWeights_v8(void *h) { return 0; }

int cudnnDropoutGetStatesSize(void *h, size_t *n)
{
    *n = 2 << 20;
    return 0;
}

int cudnnRestoreDropoutDescriptor(struct thing *t, void *h, float p, void *states)
{
    t->drawn = states;
    return 0;
}

int cudnnSetDropoutDescriptor(struct thing *t, void *h, float p, void *states, size_t n,
                              unsigned long long seed)
{
    if (states && n < sizeof *t->drawn)
        return 3;
    t->drawn = states;
    if (states)
        *t->drawn = (struct drawn){ (int64_t)seed, 0 };
    return 0;
}
