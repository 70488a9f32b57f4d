/* snapshot_reader.h — one reading under way, shared by the snapshot_*.c.
 *
 *   opcode      stack before -> after        what torch's and Python's writers use it for
 *   }  ]  )     -> container                 an entry; a trace, a stack; (rare)
 *   (  u e s a  c ( k v ... -> c             fill a dict or a list, whole or one by one
 *   q r \x94    x -> x                       remember x          h j   -> x      recall it:
 *               strings, frames, stacks
 *
 * Values on the stack are 8-byte handles (5 bits kind, 59 bits value), never trees: a dict becomes
 * its fixed record as soon as it is known to be complete, so a trace of ten million entries under
 * one MARK costs a handle and a record each. A dict is complete when it is used, or when another
 * container is pushed right on top of it (as a key must come first, that one cannot be its value).
 * A dict's keys say which kind of record it is. JSON feeds the same builder.
 *
 *   open[]      containers under construction, innermost last: they finish in the opposite order
 *   items[]     keys and values of open dicts and the frames of open lists, the same way
 *
 * Every byte of host memory is counted against budget = 32 x input + 64 MiB, and every length
 * against the bytes that are really there.
 */
#ifndef KOILA_SRC_SNAPSHOT_READER_H
#define KOILA_SRC_SNAPSHOT_READER_H

#include "base/alloc.h"
#include "allocator/snapshot.h"

#define MIB ((uint64_t)1 << 20)
#define SIZE_LIMIT ((uint64_t)1 << 60)

enum { MAX_FRAMES = 1024, MAX_DEVICES = 1024 };

/* key of the dicts we know; their string ids are these numbers */
/* clang-format off: one entry a line */
#define KEY_MAP(X)                                                                                 \
    X(ACTION, "action")                                                                            \
    X(ADDR, "addr")                                                                                \
    X(SIZE, "size")                                                                                \
    X(STREAM, "stream")                                                                            \
    X(TIME_US, "time_us")                                                                          \
    X(FRAMES, "frames")                                                                            \
    X(DEVICE_FREE, "device_free")                                                                  \
    X(POOL_ID, "pool_id")                                                                          \
    X(DEVICE, "device")                                                                            \
    X(ADDRESS, "address")                                                                          \
    X(TOTAL_SIZE, "total_size")                                                                    \
    X(ALLOCATED_SIZE, "allocated_size")                                                            \
    X(ACTIVE_SIZE, "active_size")                                                                  \
    X(REQUESTED_SIZE, "requested_size")                                                            \
    X(SEGMENT_TYPE, "segment_type")                                                                \
    X(SEGMENT_POOL_ID, "segment_pool_id")                                                          \
    X(IS_EXPANDABLE, "is_expandable")                                                              \
    X(BLOCKS, "blocks")                                                                            \
    X(STATE, "state")                                                                              \
    X(HISTORY, "history")                                                                          \
    X(REAL_SIZE, "real_size")                                                                      \
    X(NAME, "name")                                                                                \
    X(FILENAME, "filename")                                                                        \
    X(LINE, "line")                                                                                \
    X(SEGMENTS, "segments")                                                                        \
    X(DEVICE_TRACES, "device_traces")                                                              \
    X(ALLOCATOR_SETTINGS, "allocator_settings")                                                    \
    X(EXTERNAL_ANNOTATIONS, "external_annotations")                                                \
    X(STAGE, "stage")                                                                              \
    X(CONF, "PYTORCH_CUDA_ALLOC_CONF")                                                             \
    X(MAX_SPLIT_SIZE, "max_split_size")                                                            \
    X(GC_THRESHOLD, "garbage_collection_threshold")                                                \
    X(EXPANDABLE_SEGMENTS, "expandable_segments")                                                  \
    X(RELEASE_LOCK, "release_lock_on_cudamalloc")                                                  \
    X(DIVISIONS, "roundup_power2_divisions")                                                       \
    X(FRACTION, "per_process_memory_fraction")                                                     \
    X(OOM_REJECT, "throw_on_cudamalloc_oom")                                                       \
    X(CAPTURE_REUSE, "graph_capture_record_stream_reuse")                                          \
    X(PINNED_CACHED, "max_cached_size")                                                            \
    X(HOST_TRACES, "host_traces")
/* clang-format on */
enum {
#define KEY_ENUM(name, text) KEY_##name,
    KEY_MAP(KEY_ENUM)
#undef KEY_ENUM
        N_KEYS
};
enum { N_ACTIONS = 10, N_OWN_STRS = N_KEYS + N_ACTIONS }; /* interned first, under these numbers */
extern const char *const koila__snap_key_names[N_KEYS];

/* ---- handles */

typedef uint64_t value;
/* kind, what it is called in a message */
/* clang-format off: one entry a line */
#define KIND_MAP(X)                                                                                \
    X(NONE, "None")                                                                                \
    X(BOOL, "a bool")                                                                              \
    X(INT, "an integer")                                                                           \
    X(WIDE, "an integer")                                                                          \
    X(REAL, "a float")                                                                             \
    X(STR, "a string")                                                                             \
    X(DICT, "a dict")                                                                              \
    X(LIST, "a list")                                                                              \
    X(EMPTY, "empty")                                                                              \
    X(POOL, "a pair of integers")                                                                  \
    X(ENTRY, "a trace entry")                                                                      \
    X(ENTRIES, "a trace")                                                                          \
    X(SEGMENT, "a segment")                                                                        \
    X(SEGMENTS, "a list of segments")                                                              \
    X(BLOCK, "a block")                                                                            \
    X(BLOCKS, "a list of blocks")                                                                  \
    X(FRAME, "a frame")                                                                            \
    X(STACK, "a stack")                                                                            \
    X(TRACES, "a list of traces")                                                                  \
    X(NOTE, "an annotation")                                                                       \
    X(NOTES, "a list of annotations")                                                              \
    X(SETTINGS, "settings")                                                                        \
    X(DIVS, "divisions")                                                                           \
    X(HIST, "a history")                                                                           \
    X(TOP, "a snapshot")                                                                           \
    X(OTHER, "other data")                                                                         \
    X(MARK, "a MARK")
/* clang-format on */
enum kind {
#define KIND_ENUM(name, text) K_##name,
    KIND_MAP(KIND_ENUM)
#undef KIND_ENUM
};
static inline value make(enum kind k, uint64_t v) { return v << 5 | k; }
static inline enum kind kind_of(value v) { return (enum kind)(v & 31); }
static inline uint64_t of(value v) { return v >> 5; }
#define INT_BITS 59
static inline int64_t small_int(value v) { return (int64_t)v >> 5; }

typedef struct wide {
    uint64_t bits;
    bool negative;
} wide;

typedef struct open_one {
    bool is_dict;
    bool is_closed;    /* `out` is what it became, for it was referred to: nothing may be added */
    uint8_t list_kind; /* kind of its elements so far, K_NONE = none yet */
    uint32_t memo;     /* slot + 1 to be updated when finished */
    uint64_t items, n; /* first in items[]; count */
    uint64_t first;    /* lists of records: the first one's number */
    uint64_t serial;
    value out;
} open_one;

typedef struct reader {
    koila_snapshot *s;
    koila_error *e;
    koila_limits lim;
    /* input window: buf[at..end), whose first byte is byte `base` of the file */
    const uint8_t *buf;
    uint64_t at, end, base;
    uint8_t *own;
    uint64_t own_cap;
    const koila_source *src;
    bool eof;
    koila_status status;
    /* machine */
    value *stack;
    uint64_t n_stack, stack_cap;
    uint64_t *marks;
    uint64_t n_marks, marks_cap;
    value *memo;
    uint64_t n_memo, memo_cap;
    open_one *open;
    uint32_t n_open, open_cap;
    value *items;
    uint64_t n_items, items_cap;
    wide *wides;
    uint64_t n_wides, wides_cap;
    double *reals;
    uint64_t n_reals, reals_cap;
    char *scratch;
    uint64_t scratch_cap;
    uint64_t serial;
    uint64_t first_entry; /* of the trace that is being read: messages count from there */
    value top;
} reader;

extern const char *const koila__snap_kind_names[];

static inline uint64_t offset(const reader *r) { return r->base + r->at; }

/* ---- failures: the first one stands */
void koila__snap_fail(reader *r, koila_status code, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
#define FAIL(r, code, ...) (koila__snap_fail((r), (code), __VA_ARGS__), false)
#define BAD(r, ...) FAIL(r, KOILA_BAD_INPUT, __VA_ARGS__)

bool koila__snap_early(reader *r, const char *where);      /* "ends early: " where */
bool koila__snap_long_string(reader *r, uint64_t n_bytes); /* over max_string_bytes */

/* ---- counted host memory. NULL and false: failed, and said so. */
#define BUDGET_FACTOR 32
#define BUDGET_BASE (64 * MIB)
/* From the bytes of the file that are known so far. */
void koila__snap_set_budget(koila_snapshot *s);
void *koila__snap_resize(reader *r, void *p, uint64_t old_n, uint64_t n);
/* The same as an allocator, which the reader must outlive. */
koila_allocator koila__snap_counted(reader *r);
bool koila__snap_grow64(reader *r, void *array, uint64_t *cap, uint64_t want, size_t size);
bool koila__snap_grow32(reader *r, void *array, uint32_t *cap, uint32_t want, size_t size);

/* ---- snapshot_input.c: bytes, and numbers and characters written as text */
/* At least n bytes at buf + at, if the file has them. */
bool koila__snap_have(reader *r, uint64_t n);
/* A line of text without its newline. */
bool koila__snap_take_line(reader *r, uint64_t max, const uint8_t **p, uint64_t *n);
/* [-]digits, all of it; false: no number or out of range. */
bool koila__snap_parse_int(const uint8_t *p, uint64_t n, uint64_t *bits, bool *negative);
bool koila__snap_parse_real(const uint8_t *p, uint64_t n, double *out);
int koila__snap_hex_digit(uint8_t c); /* -1: none */
size_t koila__snap_put_utf8(uint8_t *p, uint32_t c);

static inline bool take_u(reader *r, unsigned n, uint64_t *out)
{
    if (r->end - r->at < n && !koila__snap_have(r, n))
        return koila__snap_early(r, "inside a number");
    uint64_t x = 0;
    /* n is a constant where it is called: one load */
    for (unsigned i = 0; i < n; i++)
        x |= (uint64_t)r->buf[r->at + i] << 8 * i;
    *out = x;
    r->at += n;
    return true;
}

/* ---- snapshot_records.c: values, containers under construction, and the records they become */
bool koila__snap_intern_own(reader *r);
bool koila__snap_intern(reader *r, const uint8_t *p, uint64_t n, uint32_t *id);
bool koila__snap_make_int(reader *r, uint64_t bits, bool negative, value *out);
bool koila__snap_make_real(reader *r, double x, value *out);
bool koila__snap_pair_of_ints(reader *r, value a, value b, value *out); /* a pool, or K_OTHER */
void koila__snap_drop_unused(reader *r, value v);
value koila__snap_open_new(reader *r, bool is_dict);
open_one *koila__snap_open_of(reader *r, value v); /* NULL: not under construction */
bool koila__snap_list_add(reader *r, open_one *o, value v);
/* the innermost open container becomes its record */
bool koila__snap_finish_open(reader *r, value *v);
/* Any open container becomes its record where it is; it leaves open[] when it is finished. */
bool koila__snap_close(reader *r, open_one *o);

static inline bool finish(reader *r, value *v)
{
    return (kind_of(*v) != K_DICT && kind_of(*v) != K_LIST) || koila__snap_finish_open(r, v);
}

static inline bool items_put(reader *r, value v)
{
    if (r->n_items == r->items_cap &&
        !koila__snap_grow64(r, &r->items, &r->items_cap, r->n_items + 1, sizeof v))
        return false;
    r->items[r->n_items++] = v;
    return true;
}

static inline bool dict_add(reader *r, open_one *o, value key, value v)
{
    if (!items_put(r, key) || !items_put(r, v))
        return false;
    o->n++;
    return true;
}

bool koila__snap_read_pickle(reader *r);
bool koila__snap_read_json(reader *r);

#endif
