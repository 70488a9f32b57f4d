/* What streams.c and captures.c share: streams, events, and the captures that they take part in. */
#ifndef FAKECUDA_STREAMS_H
#define FAKECUDA_STREAMS_H

#include "device.h"

#include <pthread.h>

/* Numbers of nodes of one capture: the last ones of a stream, or of an event recorded on it. */
struct ends {
    size_t *list, n;
};

struct capture {
    unsigned long long id;
    struct CUstream_st *origin;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;         /* that began it */
    struct CUgraph_st *graph; /* what it has recorded; NULL once it has ended */
    bool invalid;             /* by an operation that a capture forbids */
    struct capture *next;     /* of those under way */
};

struct CUstream_st {
    int device, priority;
    uint64_t busy_until;
    struct capture *capture;
    struct ends ends;
    struct CUstream_st *next;
};

struct CUevent_st {
    uint64_t done_at;
    struct capture *capture; /* it was last recorded in; stays when the capture ends */
    struct ends ends;
};

/* streams.c */
struct CUstream_st *resolve(cudaStream_t stream);
struct CUstream_st *each_stream(
    struct CUstream_st *after); /* NULL: the first; under streams_lock */
extern pthread_mutex_t streams_lock;

/* captures.c */

/* Is a stream, or an event, free to be waited for? If not, its capture is invalid. */
cudaError_t not_captured(struct capture *c, cudaError_t otherwise);
/* The same of every stream of a device. */
cudaError_t device_not_captured(int device);
cudaError_t record_in_capture(struct CUevent_st *event, struct CUstream_st *stream);
cudaError_t wait_in_capture(struct CUstream_st *stream, struct CUevent_st *event);

#endif
