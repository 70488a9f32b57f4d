/* Memory of the device (cudaMalloc, and cuMem* for expandable segments), pinned memory of the host,
 * and copies between them: all of it is host memory. */
#define _GNU_SOURCE
#include "device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct range {
    uintptr_t base;
    size_t size;   /* as asked for */
    size_t backed; /* counted against the device */
    int device;
    enum kind kind;
};
static struct range *ranges; /* by base */
static size_t n_ranges, max_ranges;
static size_t used[MAX_DEVICES];
static bool touched[MAX_DEVICES];

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* the last range whose base is at most p, as an index; n_ranges if none */
static size_t find(uintptr_t p)
{
    size_t low = 0, high = n_ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].base <= p)
            low = middle + 1;
        else
            high = middle;
    }
    return low ? low - 1 : n_ranges;
}

static bool insert(struct range r)
{
    if (n_ranges == max_ranges) {
        size_t n = max_ranges ? 2 * max_ranges : 64;
        struct range *grown = realloc(ranges, n * sizeof *grown);
        if (!grown)
            return false;
        ranges = grown;
        max_ranges = n;
    }
    size_t at = find(r.base);
    at = at == n_ranges ? 0 : at + 1;
    memmove(ranges + at + 1, ranges + at, (n_ranges - at) * sizeof *ranges);
    ranges[at] = r;
    n_ranges++;
    return true;
}

static bool take_out(uintptr_t base, enum kind kind, struct range *out)
{
    size_t at = find(base);
    if (at == n_ranges || ranges[at].base != base || ranges[at].kind != kind)
        return false;
    *out = ranges[at];
    memmove(ranges + at, ranges + at + 1, (n_ranges - at - 1) * sizeof *ranges);
    n_ranges--;
    return true;
}

/* Bytes that other processes hold on each device: what the file FAKECUDA_OTHERS says now. */
static size_t others_bytes(void)
{
    char text[64] = "";
    const char *path = config()->others;
    FILE *f = path ? fopen(path, "re") : NULL;
    if (!f)
        return 0;
    size_t n = fgets(text, sizeof text, f) ? parse_bytes(text, 0) : 0;
    fclose(f);
    return n;
}

static size_t less(size_t a, size_t b) { return a > b ? a - b : 0; }

static bool charge(int device, size_t n_bytes)
{
    const struct config *c = config();
    size_t limit = less(c->total_bytes - c->context_bytes, others_bytes());
    if (n_bytes > limit || used[device] > limit - n_bytes)
        return false;
    used[device] += n_bytes;
    return true;
}

/* address space that starts at a multiple of the alignment; nothing is committed until it is
 * touched */
static void *map_aligned(size_t n_bytes, size_t alignment, int protection)
{
    size_t whole = n_bytes + alignment;
    if (whole < n_bytes)
        return NULL;
    char *p = mmap(NULL, whole, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    char *start = (char *)round_up((uintptr_t)p, alignment);
    char *end = start + n_bytes;
    if (start > p)
        munmap(p, (size_t)(start - p));
    if (p + whole > end)
        munmap(end, (size_t)(p + whole - end));
    return start;
}

/* Addresses of the device, out of one stretch of address space: where allocations go is
 * FAKECUDA_ADDRESSES: `first` (the lowest hole that fits, the way a driver goes about it), `up`
 * (never twice), or `down` (never twice, from the top). */
#define ARENA ((size_t)16 << 40)
static uintptr_t arena, next_up, next_down;

static bool open_arena(void)
{
    if (!arena) {
        void *p = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            return false;
        arena = next_up = round_up((uintptr_t)p, GRANULE);
        next_down = arena + ARENA - 2 * GRANULE;
    }
    return true;
}

/* the lock is held */
static void *take_addresses(size_t n_bytes, int protection)
{
    if (n_bytes > ARENA / 2 || !open_arena())
        return NULL;
    uintptr_t at;
    if (config()->addresses == 'u') {
        at = next_up;
        next_up += n_bytes;
    } else if (config()->addresses == 'd') {
        at = (next_down - n_bytes) / GRANULE * GRANULE;
        next_down = at;
    } else {
        at = arena;
        for (size_t i = 0; i < n_ranges; i++)
            if (ranges[i].base >= arena && ranges[i].base < arena + ARENA) {
                if (ranges[i].base - at >= n_bytes)
                    break;
                at = round_up(ranges[i].base + ranges[i].size, GRANULE);
            }
    }
    if (at < arena || at + n_bytes > arena + ARENA - GRANULE)
        return NULL;
    void *p = mmap((void *)at, n_bytes, protection,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void give_addresses(void *p, size_t n_bytes)
{
    mmap(p, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void touch_device(int device)
{
    if (!__atomic_load_n(&touched[device], __ATOMIC_RELAXED))
        __atomic_store_n(&touched[device], true, __ATOMIC_RELAXED);
}

size_t device_used_bytes(int device)
{
    pthread_mutex_lock(&lock);
    size_t n = used[device] + (touched[device] ? config()->context_bytes : 0) + others_bytes();
    pthread_mutex_unlock(&lock);
    return n;
}

size_t device_free_bytes(int device)
{
    return less(config()->total_bytes, device_used_bytes(device));
}

int device_of(const void *p, enum kind *kind, uintptr_t *base, size_t *size)
{
    pthread_mutex_lock(&lock);
    size_t at = find((uintptr_t)p);
    int device = -1;
    if (at < n_ranges && (uintptr_t)p - ranges[at].base < ranges[at].size) {
        device = ranges[at].device;
        *kind = ranges[at].kind;
        *base = ranges[at].base;
        *size = ranges[at].size;
    }
    pthread_mutex_unlock(&lock);
    return device;
}

/* ---- cudaMalloc */

cudaError_t cudaMalloc(void **out, size_t size)
{
    COUNT_CALL();
    int device = current_device();
    pass_time();
    touch_device(device);
    *out = NULL;
    cudaError_t e = safe_now();
    if (e != cudaSuccess || !size)
        return e;
    size_t backed = size > SIZE_MAX - GRANULE ? SIZE_MAX : round_up(size, GRANULE);
    pthread_mutex_lock(&lock);
    bool ok = charge(device, backed);
    if (ok) {
        *out = take_addresses(backed, PROT_READ | PROT_WRITE);
        ok = *out &&
             insert((struct range){ (uintptr_t)*out, backed, backed, device, DEVICE_MEMORY });
        if (!ok)
            used[device] -= backed;
    }
    pthread_mutex_unlock(&lock);
    trace("cudaMalloc(%zu) on %d: %p", size, device, *out);
    return ok ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *p)
{
    COUNT_CALL();
    touch_device(current_device());
    cudaError_t e = safe_now();
    if (e != cudaSuccess || !p)
        return e;
    struct range r;
    pthread_mutex_lock(&lock);
    bool ok = take_out((uintptr_t)p, DEVICE_MEMORY, &r);
    if (ok) {
        used[r.device] -= r.backed;
        give_addresses(p, r.backed);
    }
    pthread_mutex_unlock(&lock);
    trace("cudaFree(%p)", p);
    if (!ok)
        return fail(cudaErrorInvalidValue);
    wait_for_device(r.device);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream)
{
    return cudaMalloc(out, size);
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) { return cudaFree(p); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    COUNT_CALL();
    int device = current_device();
    touch_device(device);
    *free_bytes = device_free_bytes(device);
    *total = config()->total_bytes;
    return cudaSuccess;
}

/* ---- memory pools of the driver, as far as backend:cudaMallocAsync asks */

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    *pool = (cudaMemPool_t)(uintptr_t)(device + 1);
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t n)
{
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) { return cudaSuccess; }

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
    *(uint64_t *)value = used[(uintptr_t)pool - 1];
    return cudaSuccess;
}

/* ---- virtual memory management: address space, physical memory, and the one mapped into the other
 */

struct physical {
    size_t size;
    int device, references;
};

static void drop(struct physical *h)
{
    if (--h->references == 0) {
        used[h->device] -= h->size;
        free(h);
    }
}

static struct {
    uintptr_t base;
    size_t size;
    struct physical *handle;
} *pieces;
static size_t n_pieces, max_pieces;

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option)
{
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags)
{
    pthread_mutex_lock(&lock);
    void *p = take_addresses(round_up(size, GRANULE), PROT_NONE);
    bool ok = p && insert((struct range){ (uintptr_t)p, size, 0, current_device(), RESERVED });
    pthread_mutex_unlock(&lock);
    *out = (CUdeviceptr)p;
    trace("cuMemAddressReserve(%zu): %p", size, p);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t size)
{
    struct range r;
    pthread_mutex_lock(&lock);
    bool ok = take_out((uintptr_t)p, RESERVED, &r);
    pthread_mutex_unlock(&lock);
    if (ok)
        give_addresses((void *)p, size);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size,
                     const CUmemAllocationProp *prop, unsigned long long flags)
{
    COUNT_CALL();
    pass_time();
    int device = prop->location.id;
    struct physical *h = malloc(sizeof *h);
    pthread_mutex_lock(&lock);
    bool ok = h && charge(device, round_up(size, GRANULE));
    pthread_mutex_unlock(&lock);
    trace("cuMemCreate(%zu) on %d%s", size, device, ok ? "" : ": out of memory");
    if (!ok) {
        free(h);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *h = (struct physical){ round_up(size, GRANULE), device, 1 };
    *out = (CUmemGenericAllocationHandle)(uintptr_t)h;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    pthread_mutex_lock(&lock);
    drop((struct physical *)(uintptr_t)handle);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    COUNT_CALL();
    struct physical *h = (struct physical *)(uintptr_t)handle;
    if (mmap((void *)p, size, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (n_pieces == max_pieces) {
        max_pieces = max_pieces ? 2 * max_pieces : 64;
        pieces = realloc(pieces, max_pieces * sizeof *pieces);
        if (!pieces)
            abort();
    }
    pieces[n_pieces].base = (uintptr_t)p;
    pieces[n_pieces].size = size;
    pieces[n_pieces++].handle = h;
    h->references++;
    size_t at = find((uintptr_t)p);
    if (at < n_ranges)
        ranges[at].device = h->device;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t size)
{
    COUNT_CALL();
    pass_time();
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n_pieces;)
        if (pieces[i].base >= (uintptr_t)p && pieces[i].base < (uintptr_t)p + size) {
            drop(pieces[i].handle);
            pieces[i] = pieces[--n_pieces];
        } else
            i++;
    pthread_mutex_unlock(&lock);
    trace("cuMemUnmap(%p, %zu)", (void *)p, size);
    mmap((void *)p, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc *list, size_t n)
{
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr p)
{
    enum kind kind;
    uintptr_t b;
    size_t n;
    if (device_of((void *)p, &kind, &b, &n) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (base)
        *base = b;
    if (size)
        *size = n;
    return CUDA_SUCCESS;
}

/* ---- the host's memory */

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags)
{
    COUNT_CALL();
    touch_device(current_device());
    if (safe_now() != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    *out = map_aligned(round_up(size, 4096), 4096, PROT_READ | PROT_WRITE);
    pthread_mutex_lock(&lock);
    bool ok = *out && insert((struct range){ (uintptr_t)*out, round_up(size, 4096), 0,
                                             current_device(), PINNED });
    pthread_mutex_unlock(&lock);
    trace("cudaHostAlloc(%zu)", size);
    return ok ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *p)
{
    COUNT_CALL();
    struct range r;
    pthread_mutex_lock(&lock);
    bool ok = !p || take_out((uintptr_t)p, PINNED, &r);
    pthread_mutex_unlock(&lock);
    if (p && ok)
        munmap(p, r.size);
    return ok ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags)
{
    pthread_mutex_lock(&lock);
    size_t at = find((uintptr_t)p);
    bool taken = at < n_ranges && (uintptr_t)p - ranges[at].base < ranges[at].size;
    bool ok =
        !taken && insert((struct range){ (uintptr_t)p, size, 0, current_device(), REGISTERED });
    pthread_mutex_unlock(&lock);
    return ok ? cudaSuccess
              : fail(taken ? cudaErrorHostMemoryAlreadyRegistered : cudaErrorMemoryAllocation);
}

cudaError_t cudaHostUnregister(void *p)
{
    struct range r;
    pthread_mutex_lock(&lock);
    bool ok = take_out((uintptr_t)p, REGISTERED, &r);
    pthread_mutex_unlock(&lock);
    return ok ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    enum kind kind;
    uintptr_t base;
    size_t size;
    int device = device_of(p, &kind, &base, &size);
    memset(a, 0, sizeof *a);
    a->device = -1;
    a->type = cudaMemoryTypeUnregistered;
    a->hostPointer = (void *)p;
    if (device < 0)
        return cudaSuccess;
    bool host = kind == PINNED || kind == REGISTERED;
    a->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = device;
    a->devicePointer = (void *)p;
    a->hostPointer = host ? (void *)p : NULL;
    return cudaSuccess;
}

void *symbol_memory(size_t n_bytes)
{
    size_t n = round_up(n_bytes ? n_bytes : 1, 4096);
    void *p = map_aligned(n, 4096, PROT_READ | PROT_WRITE);
    pthread_mutex_lock(&lock);
    bool ok = p && insert((struct range){ (uintptr_t)p, n, 0, 0, SYMBOL });
    pthread_mutex_unlock(&lock);
    return ok ? p : NULL;
}

/* ---- copies */

/* What the next copy of so many bytes from the device to the host is to say instead of what lies
 * there: lets a caller that knows a kernel's count have the host code behind the kernel go on with
 * it. One at a time and thread. */
static __thread struct {
    size_t n_bytes;
    uint64_t value;
} answer;
void fakecuda_answer(size_t n_bytes, uint64_t value)
{
    answer.n_bytes = n_bytes;
    answer.value = value;
}

int fakecuda_answer_taken(void) { return answer.n_bytes == 0; }

/* How often this thread's host code, inside of an operator, has read memory of the device that no
 * answer was given for. */
static __thread unsigned long n_reads_inside;
unsigned long fakecuda_reads_inside(void) { return n_reads_inside; }

static void copy_now(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
    if (n && n == answer.n_bytes && kind == cudaMemcpyDeviceToHost) {
        memcpy(to, &answer.value, n);
        answer.n_bytes = 0;
        return;
    }
    trace("copy of %zu bytes, kind %d", n, (int)kind);
    n_reads_inside += n && kind == cudaMemcpyDeviceToHost && in_shadow();
    memmove(to, from, n);
}

/* copies and fills as nodes of a graph */
struct recorded {
    void *to;
    const void *from; /* NULL: filled with `value` */
    size_t n;
    int value;
};

static cudaError_t do_recorded(void *data, cudaStream_t stream)
{
    const struct recorded *r = data;
    if (r->from)
        memmove(r->to, r->from, r->n);
    else
        memset(r->to, r->value, r->n);
    return cudaSuccess;
}

static cudaError_t add_recorded(cudaStream_t stream, struct recorded r)
{
    struct recorded *kept = malloc(sizeof *kept);
    if (!kept)
        return fail(cudaErrorMemoryAllocation);
    *kept = r;
    return add_node(stream, (struct node){ .run = in_shadow() ? NULL : do_recorded,
                                           .release = free,
                                           .data = kept,
                                           .us = config()->kernel_us });
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
    COUNT_CALL();
    cudaError_t e = safe_now();
    if (e != cudaSuccess)
        return e;
    pass_time();
    copy_now(to, from, n, kind);
    wait_for_device(current_device());
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    COUNT_CALL();
    if (is_captured(stream))
        return add_recorded(stream, (struct recorded){ .to = to, .from = from, .n = n });
    work_on(stream, config()->kernel_us);
    copy_now(to, from, n, kind);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t n, cudaStream_t stream)
{
    return cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    cudaError_t e = cudaSuccess;
    for (size_t i = 0; i < height && e == cudaSuccess; i++)
        e = cudaMemcpyAsync((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width,
                            kind, stream);
    return e;
}

/* zeros over whole pages are had by giving the pages back: large buffers that no one reads cost
 * nothing */
static void fill(void *to, int value, size_t n)
{
    size_t page = 4096;
    char *start = (char *)round_up((uintptr_t)to, page);
    char *end = (char *)(((uintptr_t)to + n) / page * page);
    if (value || n < 64 * page) {
        memset(to, value, n);
        return;
    }
    memset(to, 0, (size_t)(start - (char *)to));
    memset(end, 0, (size_t)((char *)to + n - end));
    if (madvise(start, (size_t)(end - start), MADV_DONTNEED))
        memset(start, 0, (size_t)(end - start));
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t stream)
{
    if (is_captured(stream))
        return add_recorded(stream, (struct recorded){ .to = to, .n = n, .value = value });
    work_on(stream, config()->kernel_us);
    fill(to, value, n);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t n)
{
    return cudaMemsetAsync(to, value, n, NULL);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, CUstream stream)
{
    if (work_on((cudaStream_t)stream, config()->kernel_us) != cudaSuccess)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    for (size_t i = 0; i < n; i++)
        ((unsigned *)to)[i] = value;
    return CUDA_SUCCESS;
}

/* ---- sharing between processes: not here */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p)
{
    return fail(cudaErrorNotSupported);
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags)
{
    return fail(cudaErrorNotSupported);
}

cudaError_t cudaIpcCloseMemHandle(void *p) { return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event)
{
    return fail(cudaErrorNotSupported);
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle)
{
    return fail(cudaErrorNotSupported);
}
