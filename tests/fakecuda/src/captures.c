/* Captures and graphs. While a stream is captured, what is put on it is recorded as nodes and does
 * not happen; a graph that is launched does them in the order in which they were recorded. A
 * capture keeps the rules of CUDA: who may join it, what it forbids to whom, and that an operation
 * that it forbids makes it invalid. */
#include "streams.h"

#include <stdlib.h>
#include <string.h>

struct CUgraph_st {
    int references; /* the capture, the graph, its executables */
    struct node *nodes;
    size_t n, max;
};
struct CUgraphExec_st {
    struct CUgraph_st *graph;
};

static struct CUgraph_st being_captured; /* stands for the one under way */
static struct capture *under_way;        /* under streams_lock */
static unsigned long long n_captures;
static int n_under_way;
static __thread enum cudaStreamCaptureMode my_mode = cudaStreamCaptureModeGlobal;
static __thread int shadows;

int fakecuda_any_capture(void) { return __atomic_load_n(&n_under_way, __ATOMIC_RELAXED); }

/* Between +1 and -1, what this thread's host code copies is not recorded: somebody else records the
 * operator as a whole. */
void fakecuda_shadow(int by) { shadows += by; }
bool in_shadow(void) { return shadows > 0; }

/* ---- what is recorded */

static void put_ends(struct ends *to, const size_t *list, size_t n)
{
    size_t *copied = n ? malloc(n * sizeof *copied) : NULL;
    if (n && !copied)
        abort();
    if (n)
        memcpy(copied, list, n * sizeof *copied);
    free(to->list);
    *to = (struct ends){ copied, n };
}

static void join_ends(struct ends *to, const struct ends *more)
{
    to->list = realloc(to->list, (to->n + more->n + 1) * sizeof *to->list);
    if (!to->list)
        abort();
    for (size_t i = 0; i < more->n; i++) {
        size_t k = 0;
        while (k < to->n && to->list[k] != more->list[i])
            k++;
        if (k == to->n)
            to->list[to->n++] = more->list[i];
    }
}

static void unhold(struct CUgraph_st *g)
{
    if (__atomic_sub_fetch(&g->references, 1, __ATOMIC_ACQ_REL))
        return;
    for (size_t i = 0; i < g->n; i++) {
        if (g->nodes[i].release)
            g->nodes[i].release(g->nodes[i].data);
        free(g->nodes[i].after);
    }
    free(g->nodes);
    free(g);
}

bool is_captured(cudaStream_t stream) { return resolve(stream)->capture != NULL; }

cudaError_t add_node(cudaStream_t stream, struct node node)
{
    struct CUstream_st *s = resolve(stream);
    struct capture *c = s->capture;
    struct CUgraph_st *g = c ? c->graph : NULL;
    if (!g || c->invalid) {
        if (node.release)
            node.release(node.data);
        return fail(c ? cudaErrorStreamCaptureInvalidated : cudaErrorInvalidValue);
    }
    pthread_mutex_lock(&streams_lock);
    if (g->n == g->max) {
        g->max = g->max ? 2 * g->max : 64;
        g->nodes = realloc(g->nodes, g->max * sizeof *g->nodes);
        if (!g->nodes)
            abort();
    }
    node.after = s->ends.list;
    node.n_after = s->ends.n;
    s->ends = (struct ends){ NULL, 0 };
    put_ends(&s->ends, &g->n, 1);
    g->nodes[g->n++] = node;
    pthread_mutex_unlock(&streams_lock);
    return cudaSuccess;
}

int fakecuda_captured(cudaStream_t stream) { return is_captured(stream); }

int fakecuda_add_node(cudaStream_t stream, cudaError_t (*run)(void *, cudaStream_t), void *data,
                      void (*release)(void *))
{
    return add_node(stream, (struct node){ .run = run, .data = data, .release = release });
}

/* ---- what is forbidden */

cudaError_t not_captured(struct capture *c, cudaError_t otherwise)
{
    if (!c)
        return cudaSuccess;
    c->invalid = true;
    return fail(otherwise);
}

cudaError_t device_not_captured(int device)
{
    bool found = false;
    pthread_mutex_lock(&streams_lock);
    for (struct CUstream_st *s = each_stream(NULL); s; s = each_stream(s))
        if (s->capture && s->device == device)
            found = s->capture->invalid = true;
    pthread_mutex_unlock(&streams_lock);
    return found ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t safe_now(void)
{
    if (my_mode == cudaStreamCaptureModeRelaxed || !fakecuda_any_capture())
        return cudaSuccess;
    bool found = false;
    pthread_mutex_lock(&streams_lock);
    for (struct capture *c = under_way; c; c = c->next) {
        bool mine = pthread_equal(c->thread, pthread_self());
        bool forbids =
            mine ? c->mode != cudaStreamCaptureModeRelaxed
                 : c->mode == cudaStreamCaptureModeGlobal && my_mode == cudaStreamCaptureModeGlobal;
        if (forbids)
            found = c->invalid = true;
    }
    pthread_mutex_unlock(&streams_lock);
    return found ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = my_mode;
    my_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

/* ---- events */

cudaError_t record_in_capture(struct CUevent_st *event, struct CUstream_st *s)
{
    if (s->capture->invalid)
        return fail(cudaErrorStreamCaptureInvalidated);
    event->capture = s->capture;
    put_ends(&event->ends, s->ends.list, s->ends.n);
    return cudaSuccess;
}

/* a stream joins the capture of the event that it waits for */
cudaError_t wait_in_capture(struct CUstream_st *s, struct CUevent_st *event)
{
    struct capture *c = event->capture;
    if (s->capture && s->capture->invalid)
        return fail(cudaErrorStreamCaptureInvalidated);
    if (!c) /* what it waits for is no part of the capture */
        return not_captured(s->capture, cudaErrorStreamCaptureIsolation);
    if (c->invalid || !c->graph)
        return fail(c->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorCapturedEvent);
    if (s->capture && s->capture != c) {
        s->capture->invalid = c->invalid = true;
        return fail(cudaErrorStreamCaptureMerge);
    }
    if (!s->capture) {
        s->capture = c;
        put_ends(&s->ends, NULL, 0);
    }
    join_ends(&s->ends, &event->ends);
    return cudaSuccess;
}

/* ---- captures */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    struct CUstream_st *s = resolve(stream);
    if ((uintptr_t)stream <= 2)
        return fail(cudaErrorStreamCaptureUnsupported);
    if (s->capture)
        return fail(cudaErrorIllegalState);
    struct capture *c = calloc(1, sizeof *c);
    struct CUgraph_st *g = calloc(1, sizeof *g);
    if (!c || !g) {
        free(c);
        free(g);
        return fail(cudaErrorMemoryAllocation);
    }
    g->references = 1;
    *c = (struct capture){ .origin = s, .mode = mode, .thread = pthread_self(), .graph = g };
    put_ends(&s->ends, NULL, 0);
    pthread_mutex_lock(&streams_lock);
    c->id = ++n_captures;
    c->next = under_way;
    under_way = c;
    s->capture = c;
    __atomic_fetch_add(&n_under_way, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&streams_lock);
    return cudaSuccess;
}

/* into a graph that is there: bodies of conditional nodes, which cannot be made here */
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t *after,
                                          const cudaGraphEdgeData *data, size_t n,
                                          enum cudaStreamCaptureMode mode)
{
    return fail(cudaErrorNotSupported);
}

/* Does what the origin has waited for reach every node? */
static bool all_joined(const struct CUgraph_st *g, const struct ends *ends)
{
    bool *reached = calloc(g->n + 1, 1), all = true;
    if (!reached)
        abort();
    for (size_t i = 0; i < ends->n; i++)
        reached[ends->list[i]] = true;
    for (size_t i = g->n; i-- > 0;) {
        all &= reached[i];
        for (size_t k = 0; k < g->nodes[i].n_after; k++)
            reached[g->nodes[i].after[k]] |= reached[i]; /* these come earlier */
    }
    free(reached);
    return all;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    struct CUstream_st *s = resolve(stream);
    struct capture *c = s->capture;
    *graph = NULL;
    if (!c)
        return fail(cudaErrorIllegalState);
    if (c->origin != s)
        return not_captured(c, cudaErrorStreamCaptureUnmatched);
    if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self()))
        return fail(cudaErrorStreamCaptureWrongThread);
    struct CUgraph_st *g = c->graph;
    bool joined = all_joined(g, &s->ends);
    pthread_mutex_lock(&streams_lock);
    for (struct CUstream_st *other = each_stream(NULL); other; other = each_stream(other))
        if (other->capture == c)
            other->capture = NULL;
    for (struct capture **at = &under_way; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    __atomic_fetch_sub(&n_under_way, 1, __ATOMIC_RELAXED);
    c->graph = NULL; /* the capture itself stays: events recorded in it name it */
    pthread_mutex_unlock(&streams_lock);
    if (!c->invalid && joined) {
        *graph = g;
        return cudaSuccess;
    }
    unhold(g);
    return fail(c->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined);
}

static enum cudaStreamCaptureStatus status_of(const struct capture *c)
{
    if (!c)
        return cudaStreamCaptureStatusNone;
    return c->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    COUNT_CALL();
    *status = status_of(resolve(stream)->capture);
    return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                unsigned long long *id, cudaGraph_t *graph,
                                const cudaGraphNode_t **nodes, const cudaGraphEdgeData **data,
                                size_t *n)
{
    struct capture *c = resolve(stream)->capture;
    *status = status_of(c);
    if (id)
        *id = c ? c->id : 0;
    if (graph)
        *graph = c ? &being_captured : NULL;
    if (nodes)
        *nodes = NULL;
    if (data)
        *data = NULL;
    if (n)
        *n = 0;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **data,
                                     size_t *n)
{
    return capture_info(stream, status, id, graph, nodes, data, n);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                const cudaGraphEdgeData *data, size_t n,
                                                unsigned flags)
{
    return cudaSuccess;
}
#else /* CUDA 12: before edges had data */
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, size_t *n)
{
    return capture_info(stream, status, id, graph, nodes, NULL, n);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                size_t n, unsigned flags)
{
    return cudaSuccess;
}
#endif

/* ---- graphs */

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    if (graph && graph != &being_captured)
        unhold(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph,
                                          unsigned long long flags)
{
    *out = calloc(1, sizeof **out);
    if (!*out)
        return fail(cudaErrorMemoryAllocation);
    (*out)->graph = graph;
    __atomic_fetch_add(&graph->references, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    if (exec)
        unhold(exec->graph);
    free(exec);
    return cudaSuccess;
}

static cudaError_t run_graph(void *graph, cudaStream_t stream)
{
    const struct CUgraph_st *g = graph;
    for (size_t i = 0; i < g->n; i++) {
        cudaError_t e = g->nodes[i].us ? work_on(stream, g->nodes[i].us) : cudaSuccess;
        if (e == cudaSuccess && g->nodes[i].run)
            e = g->nodes[i].run(g->nodes[i].data, stream);
        if (e != cudaSuccess)
            return fail(e);
    }
    return cudaSuccess;
}

static void release_graph(void *graph) { unhold(graph); }

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    trace("launch of a graph of %zu nodes", exec->graph->n);
    if (!is_captured(stream))
        return run_graph(exec->graph, stream);
    __atomic_fetch_add(&exec->graph->references, 1, __ATOMIC_RELAXED);
    return add_node(
        stream, (struct node){ .run = run_graph, .release = release_graph, .data = exec->graph });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n)
{
    for (size_t i = 0; nodes && i < *n && i < graph->n; i++)
        nodes[i] = (cudaGraphNode_t)&graph->nodes[i];
    *n = graph->n;
    return cudaSuccess;
}
