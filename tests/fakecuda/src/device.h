/* The fake device: what the runtime (cudart), the driver (cuda) and NVML share.
 *
 * Device memory is host memory (anonymous mappings), counted against a limit per device. Kernels do
 * nothing. Time is virtual: every call that a program can wait with costs a fixed number of
 * microseconds, work on a stream ends at a moment of that clock, and an event is complete once its
 * moment has passed. */
#ifndef FAKECUDA_DEVICE_H
#define FAKECUDA_DEVICE_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_DEVICES 16
#define GRANULE ((size_t)2 << 20) /* physical memory is handed out in pieces of this many bytes */

/* config.c: read once from the environment */
struct config {
    int n_devices;      /* FAKECUDA_DEVICES, 1 */
    size_t total_bytes; /* FAKECUDA_MEMORY, 80994 MiB: with suffix KiB, MiB, GiB or none */
    /* FAKECUDA_CONTEXT, 520 MiB: what the driver itself takes on a device once it is used */
    size_t context_bytes;
    const char *others; /* FAKECUDA_OTHERS: a file, bytes held by other processes; NULL: none */
    uint64_t call_us;   /* FAKECUDA_CALL_US, 5: what a call takes */
    uint64_t kernel_us; /* FAKECUDA_KERNEL_US, 0: what a kernel takes */
    char addresses;     /* FAKECUDA_ADDRESSES, first: where allocations go (memory.c) */
    /* FAKECUDA_TRACE: every call that allocates, copies or launches, on stderr */
    bool trace;
};
const struct config *config(void);
size_t parse_bytes(const char *text, size_t otherwise);
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* calls.c */
struct call_count {
    const char *name;
    unsigned long long n;
    struct call_count *next;
};
void count_call(struct call_count *function);
#define COUNT_CALL()                                                                               \
    do {                                                                                           \
        static struct call_count here = { .name = __func__ };                                      \
        count_call(&here);                                                                         \
    } while (0)

/* errors.c: each thread's last error, as cudaGetLastError gives it */
cudaError_t fail(cudaError_t e);

/* memory.c */
enum kind { DEVICE_MEMORY, RESERVED, PINNED, REGISTERED, SYMBOL };
size_t device_free_bytes(int device);
size_t device_used_bytes(int device);
int device_of(const void *p, enum kind *kind, uintptr_t *base, size_t *size); /* -1: not ours */
void *symbol_memory(size_t n_bytes);

/* streams.c */
int current_device(void);
void touch_device(int device);
void pass_time(void);
cudaError_t work_on(cudaStream_t stream, uint64_t us); /* an error: its capture is invalid */
void wait_for_device(int device);

/* captures.c */

/* What a graph does when it is launched: `run` (NULL: nothing that is seen), which takes `us` of
 * the stream. `release` (or NULL) is called on `data` with the last graph that holds the node. */
struct node {
    cudaError_t (*run)(void *data, cudaStream_t stream);
    void (*release)(void *data);
    void *data;
    uint64_t us;
    size_t *after, n_after; /* the captures' own: the nodes that it depends on */
};
/* One more node of the capture that the stream takes part in; an error releases the data. */
cudaError_t add_node(cudaStream_t stream, struct node node);
bool is_captured(cudaStream_t stream);
bool in_shadow(void);
/* May this thread call what is potentially unsafe while streams are captured? If not, the captures
 * are invalid, and this is cudaErrorStreamCaptureUnsupported. */
cudaError_t safe_now(void);

#endif
