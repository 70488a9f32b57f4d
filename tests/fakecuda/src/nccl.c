/* NCCL between processes of this machine, through shared memory. Each pair of ranks has a ring of
 * bytes in either direction, and every collective is made of sends and receives over the rings;
 * what is reduced is reduced in the order of ranks, rounded at each step to its type.
 *
 * A call returns when its data have come: the host waits where on a device the stream would. Ranks
 * that enter collectives in another order than through the host (a message of another library
 * between them, say) may therefore wait for each other; FAKECUDA_NCCL_SECONDS (300) ends it. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

/* numbers and layouts of NCCL's public header, 2.28 */
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;
typedef enum {
    INT8,
    UINT8,
    INT32,
    UINT32,
    INT64,
    UINT64,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    BFLOAT16
} type_t;
typedef enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, N_OPERATIONS } operation_t;
#define VERSION 22809

#define MAX_RANKS 16
#define RING_BYTES ((size_t)256 << 10)
#define MAX_OWN 64 /* sums with a factor that one communicator may hold */

struct ring {
    _Atomic uint64_t written, taken; /* bytes */
    char data[RING_BYTES];
};

struct shared {
    _Atomic int n_joined;
    _Atomic pid_t pid[MAX_RANKS];
    struct ring rings[]; /* of rank i to rank j: i * n + j */
};

typedef struct ncclComm {
    int rank, n, device;
    struct shared *shared;
    size_t n_bytes;
    char name[64];
    _Atomic bool aborted;
    int n_splits;
    bool has_factor[MAX_OWN];
    double factor[MAX_OWN];
} *ncclComm_t;

static __thread char last_error[256];

static ncclResult_t refuse(ncclResult_t code, const char *words)
{
    snprintf(last_error, sizeof last_error, "%s", words);
    return code;
}

const char *ncclGetLastError(ncclComm_t comm) { return last_error; }
const char *ncclGetErrorString(ncclResult_t e)
{
    static const char *const words[] = {
        "no error",
        "unhandled cuda error",
        "unhandled system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return (unsigned)e < sizeof words / sizeof *words ? words[e] : "unknown result code";
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = VERSION;
    return ncclSuccess;
}

/* ---- bytes over rings */

struct transfer {
    struct ncclComm *comm;
    int peer;
    bool sends;
    char *at;
    size_t left;
};

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* as many bytes as the ring takes or has now */
static size_t push(struct ring *r, const char *from, size_t n)
{
    uint64_t w = atomic_load_explicit(&r->written, memory_order_relaxed);
    n = least(n, RING_BYTES - (w - atomic_load_explicit(&r->taken, memory_order_acquire)));
    size_t first = least(n, RING_BYTES - w % RING_BYTES);
    memcpy(r->data + w % RING_BYTES, from, first);
    memcpy(r->data, from + first, n - first);
    atomic_store_explicit(&r->written, w + n, memory_order_release);
    return n;
}

static size_t pull(struct ring *r, char *to, size_t n)
{
    uint64_t t = atomic_load_explicit(&r->taken, memory_order_relaxed);
    n = least(n, atomic_load_explicit(&r->written, memory_order_acquire) - t);
    size_t first = least(n, RING_BYTES - t % RING_BYTES);
    memcpy(to, r->data + t % RING_BYTES, first);
    memcpy(to + first, r->data, n - first);
    atomic_store_explicit(&r->taken, t + n, memory_order_release);
    return n;
}

static struct ring *ring_of(const struct transfer *t)
{
    const struct ncclComm *c = t->comm;
    int from = t->sends ? c->rank : t->peer, to = t->sends ? t->peer : c->rank;
    return &c->shared->rings[from * c->n + to];
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double patience(void)
{
    const char *s = getenv("FAKECUDA_NCCL_SECONDS");
    return s && *s ? atof(s) : 300;
}

/* Why go on waiting is in vain, if it is. */
static ncclResult_t in_vain(const struct ncclComm *c, double since)
{
    if (c->aborted)
        return refuse(ncclInternalError, "the communicator was aborted");
    for (int i = 0; i < c->n; i++) {
        pid_t pid = c->shared->pid[i];
        if (pid && kill(pid, 0) && errno == ESRCH)
            return refuse(ncclRemoteError, "a process of the communicator is gone");
    }
    if (seconds() - since > patience())
        return refuse(ncclSystemError, "waited for FAKECUDA_NCCL_SECONDS");
    return ncclSuccess;
}

static void pause_for(long microseconds)
{
    nanosleep(&(struct timespec){ 0, microseconds * 1000 }, NULL);
}

/* All transfers at once, those over one ring in their order. */
static ncclResult_t exchange(struct transfer *list, size_t n)
{
    double since = seconds();
    size_t idle = 0, first = 0;
    while (first < n) {
        bool moved = false;
        for (size_t i = first; i < n; i++) {
            struct transfer *t = &list[i];
            bool waits = !t->left;
            for (size_t k = first; k < i && !waits; k++)
                waits =
                    list[k].left && ring_of(&list[k]) == ring_of(t) && list[k].sends == t->sends;
            if (waits)
                continue;
            size_t m =
                t->sends ? push(ring_of(t), t->at, t->left) : pull(ring_of(t), t->at, t->left);
            t->at += m;
            t->left -= m;
            moved |= m > 0;
        }
        while (first < n && !list[first].left)
            first++;
        if (moved) {
            idle = 0;
            continue;
        }
        if (first == n)
            break;
        if (++idle < 50)
            sched_yield();
        else
            pause_for(100);
        ncclResult_t e = idle % 500 == 499 ? in_vain(list[first].comm, since) : ncclSuccess;
        if (e == ncclSuccess && list[first].comm->aborted)
            e = in_vain(list[first].comm, since);
        if (e != ncclSuccess)
            return e;
    }
    return ncclSuccess;
}

/* ---- numbers */

static size_t bytes_of(type_t type)
{
    static const unsigned char size[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2 };
    return (unsigned)type < sizeof size ? size[type] : 0;
}

static bool floats(type_t type) { return type >= FLOAT16; }

static float from_bfloat16(uint16_t v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* to the nearest, ties to even */
static uint16_t to_bfloat16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (f != f)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static double get_float(type_t type, const void *p)
{
    switch (type) {
    case FLOAT16:
        return (double)*(const _Float16 *)p;
    case FLOAT32:
        return *(const float *)p;
    case BFLOAT16:
        return from_bfloat16(*(const uint16_t *)p);
    default:
        return *(const double *)p;
    }
}

static void put_float(type_t type, void *p, double v)
{
    switch (type) {
    case FLOAT16:
        *(_Float16 *)p = (_Float16)v;
        break;
    case FLOAT32:
        *(float *)p = (float)v;
        break;
    case BFLOAT16:
        *(uint16_t *)p = to_bfloat16((float)v);
        break;
    default:
        *(double *)p = v;
    }
}

/* modulo 2^64; signed ones are extended */
static uint64_t get_integer(type_t type, const void *p)
{
    switch (type) {
    case INT8:
        return (uint64_t)(int64_t)*(const int8_t *)p;
    case UINT8:
        return *(const uint8_t *)p;
    case INT32:
        return (uint64_t)(int64_t)*(const int32_t *)p;
    case UINT32:
        return *(const uint32_t *)p;
    default:
        return *(const uint64_t *)p;
    }
}

static double combine_floats(operation_t op, double a, double b)
{
    switch (op) {
    case PRODUCT:
        return a * b;
    case MAXIMUM:
        return a != a || a > b ? a : b;
    case MINIMUM:
        return a != a || a < b ? a : b;
    default:
        return a + b;
    }
}

static uint64_t combine_integers(type_t type, operation_t op, uint64_t a, uint64_t b)
{
    bool is_signed = type == INT8 || type == INT32 || type == INT64;
    bool less = is_signed ? (int64_t)a < (int64_t)b : a < b;
    switch (op) {
    case PRODUCT:
        return a * b;
    case MAXIMUM:
        return less ? b : a;
    case MINIMUM:
        return less ? a : b;
    default:
        return a + b;
    }
}

/* `out` may be none of the parts; `factor`: of each part before it is added */
static void reduce(char *out, char *const *parts, int n, size_t count, type_t type, operation_t op,
                   double factor)
{
    size_t size = bytes_of(type);
    for (size_t i = 0; i < count; i++) {
        if (floats(type)) {
            double v = get_float(type, parts[0] + i * size) * factor;
            put_float(type, out + i * size, v);
            for (int k = 1; k < n; k++) {
                double next = get_float(type, parts[k] + i * size) * factor;
                v = combine_floats(op, get_float(type, out + i * size), next);
                put_float(type, out + i * size, v);
            }
        } else {
            uint64_t v = get_integer(type, parts[0] + i * size);
            for (int k = 1; k < n; k++)
                v = combine_integers(type, op, v, get_integer(type, parts[k] + i * size));
            if (op == AVERAGE && (type == UINT8 || type == UINT32 || type == UINT64))
                v /= (uint64_t)n;
            else if (op == AVERAGE)
                v = (uint64_t)((int64_t)v / n);
            memcpy(out + i * size, &v, size);
        }
    }
}

/* ---- operations */

enum call { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE };

struct operation {
    enum call kind;
    struct ncclComm *comm;
    const char *from;
    char *to;
    size_t count;
    type_t type;
    operation_t op;
    double factor;
    int peer; /* or root */
    cudaStream_t stream;
    char *parts[MAX_RANKS]; /* of all ranks, to be reduced; allocated together at the first */
};

struct job { /* what happens together */
    struct operation *list;
    size_t n, max;
};

static void add_transfer(struct transfer **list, size_t *n, const struct operation *o, int peer,
                         bool sends, const char *at, size_t n_bytes)
{
    *list = realloc(*list, (*n + 1) * sizeof **list);
    if (!*list)
        abort();
    (*list)[(*n)++] = (struct transfer){ o->comm, peer, sends, (char *)at, n_bytes };
}

static bool reduces(enum call k) { return k == ALL_REDUCE || k == REDUCE || k == REDUCE_SCATTER; }

/* What goes to and comes from a peer, which may be oneself; NULL: nothing. */
static const char *outgoing(const struct operation *o, int peer, size_t n_bytes)
{
    bool root = o->comm->rank == o->peer;
    switch (o->kind) {
    case BROADCAST:
        return root ? o->from : NULL;
    case REDUCE:
        return peer == o->peer ? o->from : NULL;
    case REDUCE_SCATTER:
    case ALL_TO_ALL:
        return o->from + (size_t)peer * n_bytes;
    case SEND:
        return peer == o->peer ? o->from : NULL;
    case RECEIVE:
        return NULL;
    default:
        return o->from;
    }
}

static char *incoming(const struct operation *o, int peer, size_t n_bytes)
{
    switch (o->kind) {
    case BROADCAST:
    case RECEIVE:
        return peer == o->peer ? o->to : NULL;
    case REDUCE:
        return o->comm->rank == o->peer ? o->parts[peer] : NULL;
    case ALL_REDUCE:
    case REDUCE_SCATTER:
        return o->parts[peer];
    case SEND:
        return NULL;
    default:
        return o->to + (size_t)peer * n_bytes;
    }
}

/* Collectives, or messages between two: whichever order a group has them in. */
static ncclResult_t run_kind(struct job *job, bool between_two)
{
    struct transfer *list = NULL;
    size_t n = 0;
    for (size_t i = 0; i < job->n; i++) {
        struct operation *o = &job->list[i];
        if ((o->kind == SEND || o->kind == RECEIVE) != between_two)
            continue;
        size_t n_bytes = o->count * bytes_of(o->type);
        if (reduces(o->kind)) {
            o->parts[0] = malloc((size_t)o->comm->n * n_bytes + 1);
            if (!o->parts[0])
                abort();
            for (int k = 1; k < o->comm->n; k++)
                o->parts[k] = o->parts[0] + (size_t)k * n_bytes;
        }
        for (int k = 0; k < o->comm->n; k++) {
            const char *out = outgoing(o, k, n_bytes);
            char *in = incoming(o, k, n_bytes);
            bool own = k == o->comm->rank && !between_two;
            if (own && in && out != in)
                memmove(in, out, n_bytes);
            if (!own && out)
                add_transfer(&list, &n, o, k, true, out, n_bytes);
            if (!own && in)
                add_transfer(&list, &n, o, k, false, in, n_bytes);
        }
    }
    ncclResult_t e = exchange(list, n);
    free(list);
    for (size_t i = 0; i < job->n; i++) {
        struct operation *o = &job->list[i];
        bool mine = o->kind != REDUCE || o->comm->rank == o->peer;
        if (e == ncclSuccess && o->parts[0] && mine)
            reduce(o->to, o->parts, o->comm->n, o->count, o->type, o->op, o->factor);
        free(o->parts[0]);
        o->parts[0] = NULL;
    }
    return e;
}

static ncclResult_t run_job(struct job *job)
{
    ncclResult_t e = run_kind(job, false);
    return e == ncclSuccess ? run_kind(job, true) : e;
}

/* ---- groups, and operations as nodes of a graph */

static __thread struct job group;
static __thread int depth;

static void release_job(void *data)
{
    struct job *job = data;
    free(job->list);
    free(job);
}

static cudaError_t run_node(void *job, cudaStream_t stream)
{
    return run_job(job) == ncclSuccess ? cudaSuccess : cudaErrorLaunchFailure;
}

/* does what the group holds, or makes it a node of the capture */
static ncclResult_t flush(void)
{
    struct job job = group;
    group = (struct job){ NULL, 0, 0 };
    if (!job.n)
        return ncclSuccess;
    cudaStream_t stream = job.list[0].stream;
    if (is_captured(stream)) {
        struct job *kept = malloc(sizeof *kept);
        if (!kept)
            abort();
        *kept = job;
        cudaError_t e = add_node(stream, (struct node){ .run = run_node,
                                                        .release = release_job,
                                                        .data = kept,
                                                        .us = config()->kernel_us });
        return e == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
    }
    for (size_t i = 0; i < job.n; i++)
        work_on(job.list[i].stream, config()->kernel_us);
    ncclResult_t e = run_job(&job);
    free(job.list);
    return e;
}

ncclResult_t ncclGroupStart(void)
{
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (!depth)
        return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    return --depth ? ncclSuccess : flush();
}

static ncclResult_t enqueue(struct operation o, operation_t op)
{
    struct ncclComm *c = o.comm;
    if (!c || c->aborted)
        return refuse(ncclInvalidUsage, "no such communicator, or it was aborted");
    if (!bytes_of(o.type))
        return refuse(ncclInvalidArgument, "a type that the simulated device does not reduce");
    if (o.peer < 0 || o.peer >= c->n)
        return refuse(ncclInvalidArgument, "no such rank");
    o.op = op;
    o.factor = op == AVERAGE && floats(o.type) ? 1.0 / c->n : 1;
    if (op >= N_OPERATIONS) {
        int own = (int)op - N_OPERATIONS;
        if (own >= MAX_OWN || !c->has_factor[own])
            return refuse(ncclInvalidArgument, "no such operation");
        o.factor = c->factor[own];
        o.op = SUM;
    }
    if (group.n == group.max) {
        group.max = group.max ? 2 * group.max : 4;
        group.list = realloc(group.list, group.max * sizeof *group.list);
        if (!group.list)
            abort();
    }
    group.list[group.n++] = o;
    trace("nccl operation %d of %zu numbers, rank %d of %d", (int)o.kind, o.count, c->rank, c->n);
    return depth ? ncclSuccess : flush();
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, type_t type, operation_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    return enqueue((struct operation){ ALL_REDUCE, comm, from, to, count, type, .stream = stream },
                   op);
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, type_t type, operation_t op,
                        int root, ncclComm_t comm, cudaStream_t stream)
{
    return enqueue(
        (struct operation){ REDUCE, comm, from, to, count, type, .peer = root, .stream = stream },
        op);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, type_t type,
                               operation_t op, ncclComm_t comm, cudaStream_t stream)
{
    return enqueue(
        (struct operation){ REDUCE_SCATTER, comm, from, to, count, type, .stream = stream }, op);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, type_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    return enqueue((struct operation){ BROADCAST, comm, from, to, count, type, .peer = root,
                                       .stream = stream },
                   SUM);
}

ncclResult_t ncclBcast(void *at, size_t count, type_t type, int root, ncclComm_t comm,
                       cudaStream_t stream)
{
    return ncclBroadcast(at, at, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, type_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    return enqueue((struct operation){ ALL_GATHER, comm, from, to, count, type, .stream = stream },
                   SUM);
}

ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, type_t type, ncclComm_t comm,
                          cudaStream_t stream)
{
    return enqueue((struct operation){ ALL_TO_ALL, comm, from, to, count, type, .stream = stream },
                   SUM);
}

ncclResult_t ncclSend(const void *from, size_t count, type_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return enqueue(
        (struct operation){ SEND, comm, from, NULL, count, type, .peer = peer, .stream = stream },
        SUM);
}

ncclResult_t ncclRecv(void *to, size_t count, type_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return enqueue(
        (struct operation){ RECEIVE, comm, NULL, to, count, type, .peer = peer, .stream = stream },
        SUM);
}

/* the scalar lies on the host or on the device: the same memory */
ncclResult_t ncclRedOpCreatePreMulSum(operation_t *op, void *scalar, type_t type, int residence,
                                      ncclComm_t comm)
{
    for (int i = 0; i < MAX_OWN; i++)
        if (!comm->has_factor[i]) {
            comm->has_factor[i] = true;
            comm->factor[i] = get_float(type, scalar);
            *op = (operation_t)(N_OPERATIONS + i);
            return ncclSuccess;
        }
    return refuse(ncclInternalError, "too many operations of one's own");
}

ncclResult_t ncclRedOpDestroy(operation_t op, ncclComm_t comm)
{
    comm->has_factor[(int)op - N_OPERATIONS] = false;
    return ncclSuccess;
}

/* ---- communicators */

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    uint64_t number[2];
    memset(id, 0, sizeof *id);
    if (getrandom(number, sizeof number, 0) != sizeof number)
        return refuse(ncclSystemError, "no random numbers");
    snprintf(id->internal, sizeof id->internal, "/fakenccl-%016llx%016llx",
             (unsigned long long)number[0], (unsigned long long)number[1]);
    return ncclSuccess;
}

static ncclResult_t join(ncclComm_t *out, int n, const char *name, int rank, bool waits)
{
    if (n < 1 || n > MAX_RANKS || rank < 0 || rank >= n)
        return refuse(ncclInvalidArgument, "the simulated device has communicators of 1 to 16");
    struct ncclComm *c = calloc(1, sizeof *c);
    if (!c)
        return refuse(ncclSystemError, "out of memory");
    *c = (struct ncclComm){ .rank = rank, .n = n, .device = current_device() };
    c->n_bytes = sizeof(struct shared) + (size_t)n * (size_t)n * sizeof(struct ring);
    snprintf(c->name, sizeof c->name, "%s", name);
    int file = shm_open(c->name, O_RDWR | O_CREAT, 0600);
    bool sized = file >= 0 && ftruncate(file, (off_t)c->n_bytes) == 0; /* new bytes are zero */
    void *p =
        sized ? mmap(NULL, c->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (file >= 0)
        close(file);
    if (p == MAP_FAILED) {
        free(c);
        return refuse(ncclSystemError, "no shared memory");
    }
    c->shared = p;
    c->shared->pid[rank] = getpid();
    if (atomic_fetch_add(&c->shared->n_joined, 1) + 1 == n)
        shm_unlink(c->name); /* the mappings keep it */
    *out = c;
    double since = seconds();
    ncclResult_t e = ncclSuccess;
    while (waits && e == ncclSuccess && c->shared->n_joined < n) {
        pause_for(200);
        e = in_vain(c, since);
    }
    return e;
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int n, ncclUniqueId id, int rank)
{
    return join(out, n, id.internal, rank, depth == 0);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int n, ncclUniqueId id, int rank, void *config)
{
    return ncclCommInitRank(out, n, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int n, int rank, int n_ids,
                                      ncclUniqueId *ids, void *config)
{
    return ncclCommInitRank(out, n, ids[0], rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t *out, int n, const int *devices)
{
    ncclUniqueId id;
    ncclResult_t e = ncclGetUniqueId(&id);
    for (int i = 0; i < n && e == ncclSuccess; i++) {
        e = join(&out[i], n, id.internal, i, false);
        if (e == ncclSuccess)
            out[i]->device = devices ? devices[i] : i;
    }
    return e;
}

/* who has the same color, by key, then by rank */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, void *config)
{
    int all[MAX_RANKS][2], mine[2] = { color, key }, n = 0, rank = 0;
    char name[64];
    *out = NULL;
    ncclResult_t e = ncclAllGather(mine, all, 2, INT32, comm, NULL);
    if (e != ncclSuccess)
        return e;
    int number = ++comm->n_splits;
    if (color < 0)
        return ncclSuccess;
    for (int i = 0; i < comm->n; i++) {
        if (all[i][0] != color)
            continue;
        n++;
        rank += all[i][1] < key || (all[i][1] == key && i < comm->rank);
    }
    /* 58 of 63: the names of splits of splits are hashes */
    uint64_t hash = 1469598103934665603ull;
    for (const char *p = comm->name; *p; p++)
        hash = (hash ^ (unsigned char)*p) * 1099511628211ull;
    snprintf(name, sizeof name, "/fakenccl-%016llx-%d-%d", (unsigned long long)hash, number, color);
    return join(out, n, name, rank, true);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm)
        return ncclSuccess;
    shm_unlink(comm->name); /* if some never joined */
    munmap(comm->shared, comm->n_bytes);
    free(comm);
    return ncclSuccess;
}

/* another thread may be inside: what it uses stays */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (comm) {
        comm->aborted = true;
        shm_unlink(comm->name);
    }
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *e)
{
    *e = comm->aborted ? ncclInternalError : ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *n)
{
    *n = comm->n;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void *p, size_t size, void **handle)
{
    *handle = p;
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void *handle) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void **out, size_t size)
{
    return cudaMalloc(out, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *p)
{
    return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
