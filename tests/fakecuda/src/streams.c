/* Devices, streams, events, graphs, and the clock they share. Everything has happened by the time a
 * call returns; the clock only says when an event counts as complete, so that what depends on it
 * (memory that another stream still uses, say) sees a device that runs behind the host, the same
 * every time. */
#include "device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static uint64_t now_us, device_busy[MAX_DEVICES];
static __thread int current;
static unsigned long long n_captures;

struct capture {
    unsigned long long id;
    struct CUstream_st *origin;
    int references;
};

struct CUstream_st {
    int device, priority;
    uint64_t busy_until;
    struct capture *capture;
    struct CUstream_st *next;
};

struct CUevent_st {
    uint64_t done_at;
    struct capture *capture;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st defaults[MAX_DEVICES], *all;

static uint64_t now(void) { return __atomic_load_n(&now_us, __ATOMIC_RELAXED); }

void pass_time(void) { __atomic_fetch_add(&now_us, config()->call_us, __ATOMIC_RELAXED); }

static void wait_until(uint64_t t)
{
    uint64_t n = now();
    while (n < t &&
           !__atomic_compare_exchange_n(&now_us, &n, t, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

/* ---- devices */

int current_device(void) { return current; }
cudaError_t cudaGetDevice(int *device)
{
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= config()->n_devices)
        return fail(cudaErrorInvalidDevice);
    current = device;
    touch_device(device);
    return cudaSuccess;
}

void wait_for_device(int device)
{
    wait_until(__atomic_load_n(&device_busy[device], __ATOMIC_RELAXED));
}

cudaError_t cudaDeviceSynchronize(void)
{
    touch_device(current);
    wait_for_device(current);
    return cudaSuccess;
}

/* ---- streams */

static struct CUstream_st *resolve(cudaStream_t s)
{
    return (uintptr_t)s <= 2 ? &defaults[current] : s;
}

static int device_of_stream(const struct CUstream_st *s)
{
    return s >= defaults && s < defaults + MAX_DEVICES ? (int)(s - defaults) : s->device;
}

void work_on(cudaStream_t stream, uint64_t us)
{
    struct CUstream_st *s = resolve(stream);
    pass_time();
    uint64_t t = now();
    if (s->capture || !us)
        return;
    s->busy_until = (s->busy_until > t ? s->busy_until : t) + us;
    int d = device_of_stream(s);
    if (device_busy[d] < s->busy_until)
        device_busy[d] = s->busy_until;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    struct CUstream_st *s = calloc(1, sizeof *s);
    if (!s)
        return fail(cudaErrorMemoryAllocation);
    s->device = current;
    s->priority = priority;
    pthread_mutex_lock(&lock);
    s->next = all;
    all = s;
    pthread_mutex_unlock(&lock);
    *out = s;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    for (struct CUstream_st **at = &all; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            free(stream);
            break;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = resolve(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    pass_time();
    return resolve(stream)->busy_until <= now() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    struct CUstream_st *s = resolve(stream);
    if (s->capture)
        return fail(cudaErrorStreamCaptureUnsupported);
    wait_until(s->busy_until);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data,
                                  unsigned flags)
{
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data)
{
    call(data);
    return cudaSuccess;
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr p, cuuint32_t value, unsigned flags)
{
    *(cuuint32_t *)p = value;
    return CUDA_SUCCESS;
}

/* ---- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    *out = calloc(1, sizeof **out);
    return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    struct CUstream_st *s = resolve(stream);
    pass_time();
    uint64_t t = now();
    event->done_at = s->busy_until > t ? s->busy_until : t;
    event->capture = s->capture;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    pass_time();
    if (event->capture)
        return fail(cudaErrorCapturedEvent);
    return event->done_at <= now() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (event->capture)
        return fail(cudaErrorCapturedEvent);
    wait_until(event->done_at);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    *ms = (float)((double)end->done_at - (double)start->done_at) / 1000;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    struct CUstream_st *s = resolve(stream);
    if (event->capture && !s->capture)
        s->capture = event->capture;
    else if (s->busy_until < event->done_at)
        s->busy_until = event->done_at;
    return cudaSuccess;
}

/* ---- graphs: a capture is begun, joined by other streams, and ended; what it held is nothing */

struct CUgraph_st {
    int nothing;
};
struct CUgraphExec_st {
    int nothing;
};
static struct CUgraph_st being_captured;

static cudaError_t begin(cudaStream_t stream)
{
    struct CUstream_st *s = resolve(stream);
    struct capture *c = calloc(1, sizeof *c);
    if (!c)
        return fail(cudaErrorMemoryAllocation);
    c->id = __atomic_add_fetch(&n_captures, 1, __ATOMIC_RELAXED);
    c->origin = s;
    s->capture = c;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    return begin(stream);
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t *after,
                                          const cudaGraphEdgeData *data, size_t n,
                                          enum cudaStreamCaptureMode mode)
{
    return begin(stream);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    struct capture *c = resolve(stream)->capture;
    if (!c)
        return fail(cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    for (struct CUstream_st *s = all; s; s = s->next)
        if (s->capture == c)
            s->capture = NULL;
    pthread_mutex_unlock(&lock);
    resolve(stream)->capture = NULL; /* the capture itself stays: events recorded in it name it */
    *graph = calloc(1, sizeof **graph);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status =
        resolve(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **data,
                                     size_t *n)
{
    struct capture *c = resolve(stream)->capture;
    *status = c ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
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

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                const cudaGraphEdgeData *data, size_t n,
                                                unsigned flags)
{
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    static __thread enum cudaStreamCaptureMode mine = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode before = mine;
    mine = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    if (graph != &being_captured)
        free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph,
                                          unsigned long long flags)
{
    *out = calloc(1, sizeof **out);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph)
{
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    work_on(stream, config()->kernel_us);
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n)
{
    *n = 1;
    return cudaSuccess; /* none would be warned about */
}
