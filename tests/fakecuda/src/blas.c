/* cuBLAS and cuBLASLt: handles exist, workspaces are taken note of, and every routine succeeds
 * without doing anything. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct handle {
    int math_mode, pointer_mode;
};

int cublasCreate_v2(struct handle **out)
{
    *out = calloc(1, sizeof **out);
    return *out ? 0 : 3;
}

int cublasDestroy_v2(struct handle *h)
{
    free(h);
    return 0;
}

int cublasGetMathMode(struct handle *h, int *mode)
{
    *mode = h->math_mode;
    return 0;
}

int cublasSetMathMode(struct handle *h, int mode)
{
    h->math_mode = mode;
    return 0;
}

int cublasGetPointerMode_v2(struct handle *h, int *mode)
{
    *mode = h->pointer_mode;
    return 0;
}

int cublasSetPointerMode_v2(struct handle *h, int mode)
{
    h->pointer_mode = mode;
    return 0;
}

#ifdef LT
size_t cublasLtGetVersion(void) { return 130001; }
static int make(void **out)
{
    *out = calloc(1, 64);
    return *out ? 0 : 3;
}

int cublasLtMatmulDescCreate(void **out, int compute, int scale) { return make(out); }
int cublasLtMatmulDescDestroy(void *d)
{
    free(d);
    return 0;
}

int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t ld)
{
    return make(out);
}

int cublasLtMatrixLayoutDestroy(void *d)
{
    free(d);
    return 0;
}

int cublasLtMatmulPreferenceCreate(void **out) { return make(out); }
int cublasLtMatmulPreferenceDestroy(void *d)
{
    free(d);
    return 0;
}

struct heuristic {
    uint64_t algo[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, struct heuristic *results, int *n)
{
    *n = wanted > 0;
    if (*n) {
        memset(results, 0, sizeof *results);
        results->waves = 1;
    }
    return 0;
}
#endif
