/* Devices, streams, events, and the clock they share. Everything has happened by the time a
 * call returns; the clock only says when an event counts as complete, so that what depends on it
 * (memory that another stream still uses, say) sees a device that runs behind the host, the same
 * every time. */
#include "streams.h"

#include <stdlib.h>
#include <string.h>

static uint64_t now_us, device_busy[MAX_DEVICES];
static __thread int current;

pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
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
    COUNT_CALL();
    touch_device(current);
    cudaError_t e = device_not_captured(current);
    if (e == cudaSuccess)
        wait_for_device(current);
    return e;
}

/* ---- streams */

struct CUstream_st *resolve(cudaStream_t s) { return (uintptr_t)s <= 2 ? &defaults[current] : s; }

struct CUstream_st *each_stream(struct CUstream_st *after) { return after ? after->next : all; }

static int device_of_stream(const struct CUstream_st *s)
{
    return s >= defaults && s < defaults + MAX_DEVICES ? (int)(s - defaults) : s->device;
}

static void busy(struct CUstream_st *s, uint64_t until)
{
    if (s->busy_until < until)
        s->busy_until = until;
    int d = device_of_stream(s);
    if (device_busy[d] < until)
        device_busy[d] = until;
}

cudaError_t work_on(cudaStream_t stream, uint64_t us)
{
    struct CUstream_st *s = resolve(stream);
    pass_time();
    if (s->capture)
        return add_node(stream, (struct node){ .us = us });
    uint64_t t = now();
    if (!us)
        return cudaSuccess;
    busy(s, (s->busy_until > t ? s->busy_until : t) + us);
    return cudaSuccess;
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
    COUNT_CALL();
    struct CUstream_st *s = calloc(1, sizeof *s);
    if (!s)
        return fail(cudaErrorMemoryAllocation);
    s->device = current;
    s->priority = priority;
    pthread_mutex_lock(&streams_lock);
    s->next = all;
    all = s;
    pthread_mutex_unlock(&streams_lock);
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
    pthread_mutex_lock(&streams_lock);
    for (struct CUstream_st **at = &all; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            free(stream->ends.list);
            free(stream);
            break;
        }
    pthread_mutex_unlock(&streams_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = resolve(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    COUNT_CALL();
    struct CUstream_st *s = resolve(stream);
    pass_time();
    cudaError_t e = not_captured(s->capture, cudaErrorStreamCaptureUnsupported);
    if (e != cudaSuccess)
        return e;
    return s->busy_until <= now() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    COUNT_CALL();
    struct CUstream_st *s = resolve(stream);
    cudaError_t e = not_captured(s->capture, cudaErrorStreamCaptureUnsupported);
    if (e == cudaSuccess)
        wait_until(s->busy_until);
    return e;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data,
                                  unsigned flags)
{
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}

struct host_call {
    cudaHostFn_t call;
    void *data;
};

static cudaError_t call_host(void *data, cudaStream_t stream)
{
    const struct host_call *h = data;
    h->call(h->data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data)
{
    if (!is_captured(stream)) {
        call(data);
        return cudaSuccess;
    }
    struct host_call *h = malloc(sizeof *h);
    if (!h)
        return fail(cudaErrorMemoryAllocation);
    *h = (struct host_call){ call, data };
    return add_node(stream, (struct node){ .run = call_host, .release = free, .data = h });
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr p, cuuint32_t value, unsigned flags)
{
    *(cuuint32_t *)p = value;
    return CUDA_SUCCESS;
}

/* ---- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    COUNT_CALL();
    *out = calloc(1, sizeof **out);
    return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    if (event)
        free(event->ends.list);
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    COUNT_CALL();
    struct CUstream_st *s = resolve(stream);
    pass_time();
    if (s->capture)
        return record_in_capture(event, s);
    uint64_t t = now();
    event->done_at = s->busy_until > t ? s->busy_until : t;
    event->capture = NULL;
    return cudaSuccess;
}

/* a node that records: of the stream that the graph is launched on, by the time it is launched */
static cudaError_t record_again(void *event, cudaStream_t stream)
{
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    if ((flags & cudaEventRecordExternal) && resolve(stream)->capture)
        return add_node(stream, (struct node){ .run = record_again, .data = event });
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    COUNT_CALL();
    pass_time();
    cudaError_t e = not_captured(event->capture, cudaErrorCapturedEvent);
    if (e == cudaSuccess)
        e = safe_now();
    if (e != cudaSuccess)
        return e;
    return event->done_at <= now() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    COUNT_CALL();
    cudaError_t e = not_captured(event->capture, cudaErrorCapturedEvent);
    if (e == cudaSuccess)
        e = safe_now();
    if (e == cudaSuccess)
        wait_until(event->done_at);
    return e;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    *ms = (float)((double)end->done_at - (double)start->done_at) / 1000;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    COUNT_CALL();
    struct CUstream_st *s = resolve(stream);
    if (flags == cudaEventWaitExternal && s->capture)
        return add_node(stream, (struct node){ 0 });
    if (event->capture || s->capture)
        return wait_in_capture(s, event);
    busy(s, event->done_at);
    return cudaSuccess;
}
