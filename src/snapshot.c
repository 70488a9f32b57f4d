/* snapshot.c — reads torch.cuda.memory._snapshot() as data. A pickle is a program; this machine knows only the opcodes that build plain
 * data, so no object can be made and nothing can be called. The rest is refused by name before it has any effect.
 *
 *   opcode      stack before -> after        what torch's and Python's writers use it for
 *   }  ]  )     -> container                 an entry; a trace, a stack; (rare)
 *   (  u e s a  c ( k v ... -> c             fill a dict or a list, whole or one by one
 *   q r \x94    x -> x                       remember x          h j   -> x      recall it: strings, frames, stacks
 *
 * Values on the stack are 8-byte handles (5 bits kind, 59 bits value), never trees: a dict becomes its fixed record as soon as it is
 * known to be complete, so a trace of ten million entries under one MARK costs a handle and a record each. A dict is complete when it is
 * used, or when another container is pushed right on top of it (as a key must come first, that one cannot be its value). What kind of
 * record a dict is, its keys say. JSON feeds the same builder.
 *
 *   open[]      containers under construction, innermost last: they finish in the opposite order
 *   items[]     keys and values of open dicts and the frames of open lists, the same way
 *
 * Every byte of host memory is counted against budget = 32 x input + 64 MiB, and every length against the bytes that are really there.
 */
#include "snapshot.h"

#include "alloc.h"

#define MIB ((uint64_t)1 << 20)
#define SIZE_LIMIT ((uint64_t)1 << 60)

enum { MAX_FRAMES = 1024, MAX_DEVICES = 1024 };

/* key of the dicts we know; their string ids are these numbers */
#define KEY_MAP(X)                                                                                            \
    X(ACTION, "action") X(ADDR, "addr") X(SIZE, "size") X(STREAM, "stream") X(TIME_US, "time_us") X(FRAMES, "frames") X(DEVICE_FREE, "device_free")                 \
    X(POOL_ID, "pool_id") X(DEVICE, "device") X(ADDRESS, "address") X(TOTAL_SIZE, "total_size") X(ALLOCATED_SIZE, "allocated_size")                                \
    X(ACTIVE_SIZE, "active_size") X(REQUESTED_SIZE, "requested_size") X(SEGMENT_TYPE, "segment_type") X(SEGMENT_POOL_ID, "segment_pool_id")                        \
    X(IS_EXPANDABLE, "is_expandable") X(BLOCKS, "blocks") X(STATE, "state") X(HISTORY, "history") X(REAL_SIZE, "real_size") X(NAME, "name")                       \
    X(FILENAME, "filename") X(LINE, "line") X(SEGMENTS, "segments") X(DEVICE_TRACES, "device_traces") X(ALLOCATOR_SETTINGS, "allocator_settings")                  \
    X(EXTERNAL_ANNOTATIONS, "external_annotations") X(STAGE, "stage") X(CONF, "PYTORCH_CUDA_ALLOC_CONF") X(MAX_SPLIT_SIZE, "max_split_size")                       \
    X(GC_THRESHOLD, "garbage_collection_threshold") X(EXPANDABLE_SEGMENTS, "expandable_segments") X(RELEASE_LOCK, "release_lock_on_cudamalloc")                    \
    X(DIVISIONS, "roundup_power2_divisions") X(FRACTION, "per_process_memory_fraction") X(OOM_REJECT, "throw_on_cudamalloc_oom")
enum {
#define KEY_ENUM(name, text) KEY_##name,
    KEY_MAP(KEY_ENUM)
#undef KEY_ENUM
    N_KEYS
};
enum { N_ACTIONS = 10, N_OWN_STRS = N_KEYS + N_ACTIONS }; /* interned first, under these numbers */
static const char *const key_names[] = {
#define KEY_NAME(name, text) text,
    KEY_MAP(KEY_NAME)
#undef KEY_NAME
};

/* ---- handles */

typedef uint64_t value;
/* kind, what it is called in a message */
#define KIND_MAP(X)                                                                                           \
    X(NONE, "None") X(BOOL, "a bool") X(INT, "an integer") X(WIDE, "an integer") X(REAL, "a float") X(STR, "a string") X(DICT, "a dict") X(LIST, "a list")         \
    X(EMPTY, "empty") X(POOL, "a pair of integers") X(ENTRY, "a trace entry") X(ENTRIES, "a trace") X(SEGMENT, "a segment") X(SEGMENTS, "a list of segments")      \
    X(BLOCK, "a block") X(BLOCKS, "a list of blocks") X(FRAME, "a frame") X(STACK, "a stack") X(TRACES, "a list of traces") X(NOTE, "an annotation")               \
    X(NOTES, "a list of annotations") X(SETTINGS, "settings") X(DIVS, "divisions") X(HIST, "a history") X(TOP, "a snapshot") X(OTHER, "other data") X(MARK, "a MARK")
enum kind {
#define KIND_ENUM(name, text) K_##name,
    KIND_MAP(KIND_ENUM)
#undef KIND_ENUM
};
static const char *const kind_names[] = {
#define KIND_NAME(name, text) text,
    KIND_MAP(KIND_NAME)
#undef KIND_NAME
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
    uint8_t list_kind; /* kind of its elements so far, K_NONE = none yet */
    uint32_t memo;     /* slot + 1 to be updated when finished */
    uint64_t items, n; /* first in items[]; count */
    uint64_t first;    /* lists of records: the first one's number */
    uint64_t serial;
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

static uint64_t offset(const reader *r) { return r->base + r->at; }

/* All failures go through here; the first one stands. */
static void fail(reader *r, koila_status code, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
static void fail(reader *r, koila_status code, const char *fmt, ...)
{
    if (r->status) return;
    r->status = code;
    if (r->e) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(r->e->text, sizeof r->e->text, fmt, ap);
        va_end(ap);
        r->e->code = code;
        r->e->offset = offset(r);
    }
}
#define FAIL(r, code, ...) (fail((r), (code), __VA_ARGS__), false)
#define BAD(r, ...) FAIL(r, KOILA_BAD_INPUT, __VA_ARGS__)

/* "5 GiB", "16 MiB", "100,000 bytes" */
static const char *size_text(uint64_t n, char text[KOILA_GROUPED + 8])
{
    char digits[KOILA_GROUPED];
    const bool gib = n >= MIB << 10, mib = n >= MIB;
    snprintf(text, KOILA_GROUPED + 8, "%s %s", koila__grouped(gib ? n / (MIB << 10) : mib ? n / MIB : n, digits), gib ? "GiB" : mib ? "MiB" : "bytes");
    return text;
}

static bool long_string(reader *r, uint64_t n)
{
    char is[KOILA_GROUPED + 8], limit[KOILA_GROUPED + 8];
    return BAD(r, "string of %s, limit %s (max_string_bytes)", size_text(n, is), size_text(r->lim.max_string_bytes, limit));
}

/* ---- counted host memory */

static void *resize(reader *r, void *p, uint64_t old_n, uint64_t n)
{
    koila_snapshot *s = r->s;
    if (n > old_n && s->used + (n - old_n) > s->budget) {
        char limit[KOILA_GROUPED + 8];
        (void)BAD(r, "needs more than %s (limit: %s)", size_text(s->budget, limit), s->budget < s->budget_cap ? "32 times the file and 64 MiB" : "max_memory_bytes");
        return NULL;
    }
    void *q = koila__realloc(&s->mem, p, (size_t)old_n, (size_t)n);
    if (!q) {
        (void)FAIL(r, KOILA_NO_MEMORY, "the host is out of memory");
        return NULL;
    }
    s->used += n - old_n;
    return q;
}

static bool grow64(reader *r, void *array, uint64_t *cap, uint64_t want, size_t size)
{
    void **p = array;
    if (want <= *cap) return true;
    uint64_t n = *cap ? *cap : 16;
    while (n < want) n += n < 1 << 20 ? n : n / 2;
    void *q = resize(r, *p, *cap * size, n * size);
    if (!q) return false;
    *p = q;
    *cap = n;
    return true;
}
static bool grow32(reader *r, void *array, uint32_t *cap, uint32_t want, size_t size)
{
    uint64_t c = *cap;
    if (want > UINT32_MAX / 2) return BAD(r, "too many records");
    if (!grow64(r, array, &c, want, size)) return false;
    *cap = (uint32_t)c;
    return true;
}

/* ---- interning */

static uint64_t hash_bytes(const void *p, size_t n)
{
    const uint8_t *b = p;
    uint64_t h = 0xcbf29ce484222325u ^ n;
    for (; n >= 8; n -= 8, b += 8) {
        uint64_t w;
        memcpy(&w, b, 8);
        h = (h ^ w) * 0x9E3779B97F4A7C15u;
        h ^= h >> 32;
    }
    for (; n; n--, b++) h = (h ^ *b) * 0x100000001b3u;
    return h ^ h >> 29;
}

/* A table of ids + 1; `same` compares. Doubles at 1/2. */
static bool rehash(reader *r, uint32_t **table, uint32_t *cap, uint32_t n, uint64_t (*hash_of)(const koila_snapshot *, uint32_t))
{
    if ((uint64_t)n * 2 < *cap) return true;
    uint32_t want = *cap ? *cap * 2 : 256;
    if (want > 1u << 30) return BAD(r, "too many different strings");
    uint32_t *fresh = resize(r, NULL, 0, (uint64_t)want * sizeof(uint32_t));
    if (!fresh) return false;
    memset(fresh, 0, (size_t)want * sizeof(uint32_t));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t h = (uint32_t)hash_of(r->s, i) & (want - 1);
        while (fresh[h]) h = (h + 1) & (want - 1);
        fresh[h] = i + 1;
    }
    if (*table) {
        r->s->used -= (uint64_t)*cap * sizeof(uint32_t);
        koila__release(&r->s->mem, *table, (size_t)*cap * sizeof(uint32_t));
    }
    *table = fresh;
    *cap = want;
    return true;
}

static size_t str_len(const koila_snapshot *s, uint32_t id) { return (size_t)((id + 1 < s->n_strs ? s->strs[id + 1] : s->text_n) - s->strs[id] - 1); }
static uint64_t str_hash_of(const koila_snapshot *s, uint32_t id) { return hash_bytes(s->text + s->strs[id], str_len(s, id)); }

/* Well-formed UTF-8 only, no overlong forms or surrogates. Returns the bytes of one character, 0 if bad. */
static size_t utf8_one(const uint8_t *p, size_t n)
{
    if (p[0] < 0x80) return 1;
    size_t len = p[0] >= 0xC2 && p[0] < 0xE0 ? 2 : p[0] >= 0xE0 && p[0] < 0xF0 ? 3 : p[0] >= 0xF0 && p[0] < 0xF5 ? 4 : 0;
    if (!len || n < len) return 0;
    for (size_t i = 1; i < len; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) || (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F)) return 0;
    return len;
}

static bool intern(reader *r, const uint8_t *p, uint64_t n, uint32_t *id)
{
    koila_snapshot *s = r->s;
    if (n > r->lim.max_string_bytes && s->n_strs >= N_OWN_STRS) return long_string(r, n);
    bool plain = true;
    for (uint64_t i = 0; i < n && plain; i++) plain = p[i] < 0x80 && p[i];
    if (!plain) { /* copy, with U+FFFD for what is no UTF-8 and for NUL */
        if (!grow64(r, &r->scratch, &r->scratch_cap, 3 * n + 1, 1)) return false;
        uint64_t m = 0;
        for (uint64_t i = 0; i < n;) {
            size_t len = p[i] ? utf8_one(p + i, (size_t)(n - i)) : 0;
            if (len) memcpy(r->scratch + m, p + i, len), m += len, i += len;
            else memcpy(r->scratch + m, "\xEF\xBF\xBD", 3), m += 3, i++;
        }
        p = (const uint8_t *)r->scratch;
        n = m;
    }
    if (!rehash(r, &s->str_hash, &s->str_hash_cap, s->n_strs, str_hash_of)) return false;
    uint32_t mask = s->str_hash_cap - 1, h = (uint32_t)hash_bytes(p, (size_t)n) & mask;
    for (; s->str_hash[h]; h = (h + 1) & mask) {
        *id = s->str_hash[h] - 1;
        if (str_len(s, *id) == n && !memcmp(s->text + s->strs[*id], p, (size_t)n)) return true;
    }
    if (!grow64(r, &s->text, &s->text_cap, s->text_n + n + 1, 1) || !grow32(r, &s->strs, &s->strs_cap, s->n_strs + 1, sizeof(uint64_t))) return false;
    memcpy(s->text + s->text_n, p, (size_t)n);
    s->text[s->text_n + n] = 0;
    s->strs[s->n_strs] = s->text_n;
    s->text_n += n + 1;
    *id = s->n_strs++;
    s->str_hash[h] = *id + 1;
    return true;
}

static uint64_t frame_hash_of(const koila_snapshot *s, uint32_t id) { return hash_bytes(&s->frames[id], sizeof(snap_frame)); }
static bool intern_frame(reader *r, snap_frame f, uint32_t *id)
{
    koila_snapshot *s = r->s;
    if (!rehash(r, &s->frame_hash, &s->frame_hash_cap, s->n_frames, frame_hash_of)) return false;
    uint32_t mask = s->frame_hash_cap - 1, h = (uint32_t)hash_bytes(&f, sizeof f) & mask;
    for (; s->frame_hash[h]; h = (h + 1) & mask) {
        *id = s->frame_hash[h] - 1;
        if (!memcmp(&s->frames[*id], &f, sizeof f)) return true;
    }
    if (!grow32(r, &s->frames, &s->frames_cap, s->n_frames + 1, sizeof f)) return false;
    s->frames[*id = s->n_frames++] = f;
    s->frame_hash[h] = *id + 1;
    return true;
}

static uint64_t stack_hash_of(const koila_snapshot *s, uint32_t id) { return hash_bytes(s->stack_ids + s->stacks[id].first, (size_t)s->stacks[id].n * sizeof(uint32_t)); }
static bool intern_stack(reader *r, const value *frames, uint64_t n, uint32_t *id)
{
    koila_snapshot *s = r->s;
    if (n > MAX_FRAMES) n = MAX_FRAMES;
    if (!grow32(r, &s->stack_ids, &s->stack_ids_cap, s->n_stack_ids + (uint32_t)n + 1, sizeof(uint32_t))) return false;
    uint32_t *ids = s->stack_ids + s->n_stack_ids; /* built in place, kept only if new */
    for (uint64_t i = 0; i < n; i++) ids[i] = (uint32_t)of(frames[i]);
    if (!rehash(r, &s->stack_hash, &s->stack_hash_cap, s->n_stacks, stack_hash_of)) return false;
    uint32_t mask = s->stack_hash_cap - 1, h = (uint32_t)hash_bytes(ids, (size_t)n * sizeof *ids) & mask;
    for (; s->stack_hash[h]; h = (h + 1) & mask) {
        *id = s->stack_hash[h] - 1;
        if (s->stacks[*id].n == n && !memcmp(s->stack_ids + s->stacks[*id].first, ids, (size_t)n * sizeof *ids)) return true;
    }
    if (!grow32(r, &s->stacks, &s->stacks_cap, s->n_stacks + 1, sizeof(snap_range))) return false;
    s->stacks[*id = s->n_stacks++] = (snap_range){ s->n_stack_ids, n };
    s->n_stack_ids += (uint32_t)n;
    s->stack_hash[h] = *id + 1;
    return true;
}

static bool intern_pool(reader *r, koila_pool p, uint32_t *id)
{
    koila_snapshot *s = r->s;
    for (uint32_t i = s->n_pools; i > 0; i--)
        if (s->pools[i - 1].owner == p.owner && s->pools[i - 1].id == p.id) return *id = i - 1, true;
    if (s->n_pools >= 1 << 16) return BAD(r, "more than 65536 memory pools");
    if (!grow32(r, &s->pools, &s->pools_cap, s->n_pools + 1, sizeof p)) return false;
    s->pools[*id = s->n_pools++] = p;
    return true;
}

/* ---- reading values out of handles */

static bool int_bits(const reader *r, value v, uint64_t *bits, bool *negative)
{
    switch (kind_of(v)) {
    case K_BOOL: *bits = of(v), *negative = false; return true;
    case K_INT: *bits = (uint64_t)small_int(v), *negative = small_int(v) < 0; return true;
    case K_WIDE: *bits = r->wides[of(v)].bits, *negative = r->wides[of(v)].negative; return true;
    default: return false;
    }
}

static bool make_int(reader *r, uint64_t bits, bool negative, value *out)
{
    int64_t x = (int64_t)bits;
    if ((negative ? x < 0 : x >= 0) && x >= -((int64_t)1 << (INT_BITS - 1)) && x < (int64_t)1 << (INT_BITS - 1)) return *out = make(K_INT, (uint64_t)x), true;
    if (!grow64(r, &r->wides, &r->wides_cap, r->n_wides + 1, sizeof(wide))) return false;
    r->wides[r->n_wides] = (wide){ bits, negative };
    *out = make(K_WIDE, r->n_wides++);
    return true;
}
static bool make_real(reader *r, double x, value *out)
{
    if (!grow64(r, &r->reals, &r->reals_cap, r->n_reals + 1, sizeof x)) return false;
    r->reals[r->n_reals] = x;
    *out = make(K_REAL, r->n_reals++);
    return true;
}

typedef struct place { /* for messages: "entry 42" */
    const char *what;
    uint64_t i;
} place;

static bool wrong_type(reader *r, place at, int key, value v)
{
    return BAD(r, "%s %llu: \"%s\" is %s", at.what, (unsigned long long)at.i, key_names[key], kind_names[kind_of(v)]);
}
static bool get_bits(reader *r, place at, int key, value v, uint64_t *out)
{
    bool negative;
    return int_bits(r, v, out, &negative) || wrong_type(r, at, key, v);
}
static bool get_size(reader *r, place at, int key, value v, uint64_t *out)
{
    bool negative;
    uint64_t n;
    if (!int_bits(r, v, &n, &negative)) return wrong_type(r, at, key, v);
    if (negative) return BAD(r, "%s %llu: %s %lld", at.what, (unsigned long long)at.i, key_names[key], (long long)n);
    if (n >= SIZE_LIMIT && !(n & (n - 1))) return BAD(r, "%s %llu: %s 2^%d, limit 2^60", at.what, (unsigned long long)at.i, key_names[key], __builtin_ctzll(n));
    if (n >= SIZE_LIMIT) return BAD(r, "%s %llu: %s %llu, limit 2^60", at.what, (unsigned long long)at.i, key_names[key], (unsigned long long)n);
    *out = n;
    return true;
}
static bool get_str(reader *r, place at, int key, value v, uint32_t *out)
{
    if (kind_of(v) != K_STR) return wrong_type(r, at, key, v);
    *out = (uint32_t)of(v);
    return true;
}
static bool get_stack(reader *r, place at, int key, value v, uint32_t *out)
{
    if (kind_of(v) == K_EMPTY || kind_of(v) == K_NONE) return *out = 0, true;
    if (kind_of(v) != K_STACK) return wrong_type(r, at, key, v);
    *out = (uint32_t)of(v) + 1;
    return true;
}
static bool get_pool(reader *r, place at, int key, value v, uint32_t *out)
{
    if (kind_of(v) != K_POOL) return wrong_type(r, at, key, v);
    *out = (uint32_t)of(v);
    return true;
}

/* ---- dicts become records */

/* The last value under each known key; unknown keys are counted, and records that were made under one are dropped again. */
typedef struct fields {
    value v[N_KEYS];
    uint64_t has; /* bits */
} fields;
#define HAS(f, key) ((f)->has >> KEY_##key & 1)
#define V(f, key) ((f)->v[KEY_##key])
_Static_assert(N_KEYS <= 64, "fields.has is one word");

static void drop_unused(reader *r, value v)
{
    koila_snapshot *s = r->s;
    if (kind_of(v) == K_ENTRY && of(v) + 1 == s->n_entries) s->n_entries--;
    else if (kind_of(v) == K_ENTRIES && s->ranges[of(v)].first + s->ranges[of(v)].n == s->n_entries) r->first_entry = s->n_entries = s->ranges[of(v)].first;
    else if (kind_of(v) == K_BLOCK && of(v) + 1 == s->n_blocks) s->n_blocks--;
    else if (kind_of(v) == K_SEGMENT && of(v) + 1 == s->n_segments) s->n_segments--;
}

static bool need(reader *r, place at, const fields *f, int key)
{
    return (f->has >> key & 1) || BAD(r, "%s %llu: \"%s\" missing", at.what, (unsigned long long)at.i, key_names[key]);
}

/* id, text, kind of event. "name" */
#define ACTION_MAP(X)                                                                                         \
    X(0, "alloc", KOILA_EVENT_ALLOC) X(1, "free_requested", KOILA_EVENT_FREE_REQUESTED) X(2, "free_completed", KOILA_EVENT_FREE_COMPLETED)                         \
    X(3, "segment_alloc", KOILA_EVENT_SEGMENT_ALLOC) X(4, "segment_free", KOILA_EVENT_SEGMENT_FREE) X(5, "segment_map", KOILA_EVENT_SEGMENT_MAP)                   \
    X(6, "segment_unmap", KOILA_EVENT_SEGMENT_UNMAP) X(7, "oom", KOILA_EVENT_OOM) X(8, "snapshot", KOILA_EVENT_SNAPSHOT) X(9, "user_defined", 0)
static const char *const action_texts[] = {
#define ACTION_TEXT(i, text, kind) text,
    ACTION_MAP(ACTION_TEXT)
#undef ACTION_TEXT
};
_Static_assert(KOILA_COUNT(action_texts) == N_ACTIONS, "N_ACTIONS");
static const struct { bool known; uint8_t kind; } kinds_by_id[] = {
#define ACTION_KIND(i, text, kind) [N_KEYS + (i)] = { true, kind },
    ACTION_MAP(ACTION_KIND)
#undef ACTION_KIND
};

static bool build_entry(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    const place at = { "entry", s->n_entries - r->first_entry };
    snap_entry x = { 0 };
    uint32_t name;
    if (!get_str(r, at, KEY_ACTION, V(f, ACTION), &name)) return false;
    if (name >= KOILA_COUNT(kinds_by_id) || !kinds_by_id[name].known) /* actions are interned right after the keys */
        return BAD(r, "entry %llu: unknown action \"%.40s\" (newest torch known: 2.13)", (unsigned long long)at.i, snap_str(s, name));
    x.kind = kinds_by_id[name].kind;
    if (!x.kind) s->n_skipped++;
    if (x.kind) {
        int key = HAS(f, DEVICE_FREE) && x.kind == KOILA_EVENT_OOM ? KEY_DEVICE_FREE : KEY_ADDR;
        if (!need(r, at, f, key) || !get_bits(r, at, key, f->v[key], &x.addr)) return false;
        if (!need(r, at, f, KEY_SIZE) || !get_size(r, at, KEY_SIZE, V(f, SIZE), &x.size)) return false;
        if (HAS(f, STREAM) && !get_bits(r, at, KEY_STREAM, V(f, STREAM), &x.stream)) return false;
        if (HAS(f, TIME_US) && !get_bits(r, at, KEY_TIME_US, V(f, TIME_US), (uint64_t *)&x.time_us)) return false;
        if (HAS(f, FRAMES) && !get_stack(r, at, KEY_FRAMES, V(f, FRAMES), &x.stack)) return false;
        if (HAS(f, POOL_ID)) {
            if (!get_pool(r, at, KEY_POOL_ID, V(f, POOL_ID), &x.pool)) return false;
            x.has_pool = 1;
            s->has_pool_ids = true;
        }
    }
    if (s->n_entries >> ENTRY_CHUNK_BITS == s->n_chunks) {
        if (!grow32(r, &s->chunks, &s->chunks_cap, s->n_chunks + 1, sizeof *s->chunks)) return false;
        if (!(s->chunks[s->n_chunks] = resize(r, NULL, 0, ENTRY_CHUNK * sizeof(snap_entry)))) return false;
        s->n_chunks++;
    }
    s->chunks[s->n_entries >> ENTRY_CHUNK_BITS][s->n_entries & (ENTRY_CHUNK - 1)] = x;
    *out = make(K_ENTRY, s->n_entries++);
    return true;
}

static bool build_block(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    const place at = { "block", s->n_blocks };
    snap_block x = { 0 };
    uint32_t state;
    if (!need(r, at, f, KEY_SIZE) || !get_size(r, at, KEY_SIZE, V(f, SIZE), &x.size)) return false;
    if (!get_str(r, at, KEY_STATE, V(f, STATE), &state)) return false;
    const char *t = snap_str(s, state);
    if (!strcmp(t, "active_allocated")) x.state = KOILA_BLOCK_USED;
    else if (!strcmp(t, "active_pending_free") || !strcmp(t, "active_awaiting_free")) x.state = KOILA_BLOCK_PENDING;
    else if (!strcmp(t, "inactive")) x.state = KOILA_BLOCK_FREE;
    else return BAD(r, "block %llu: unknown state \"%.40s\" (newest torch known: 2.13)", (unsigned long long)at.i, t);
    x.has_addr = HAS(f, ADDRESS);
    if (x.has_addr && !get_bits(r, at, KEY_ADDRESS, V(f, ADDRESS), &x.addr)) return false;
    if (HAS(f, REQUESTED_SIZE)) {
        if (!get_size(r, at, KEY_REQUESTED_SIZE, V(f, REQUESTED_SIZE), &x.requested)) return false;
    } else if (HAS(f, HISTORY) && kind_of(V(f, HISTORY)) == K_HIST) {
        x.requested = of(V(f, HISTORY));
    }
    if (x.state == KOILA_BLOCK_FREE) x.requested = 0;
    if (HAS(f, FRAMES) && !get_stack(r, at, KEY_FRAMES, V(f, FRAMES), &x.stack)) return false;
    if (!grow32(r, &s->blocks, &s->blocks_cap, s->n_blocks + 1, sizeof x)) return false;
    s->blocks[s->n_blocks] = x;
    *out = make(K_BLOCK, s->n_blocks++);
    return true;
}

static bool build_segment(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    const place at = { "segment", s->n_segments };
    snap_segment x = { 0 };
    uint64_t n;
    uint32_t type;
    static const int needed[] = { KEY_ADDRESS, KEY_TOTAL_SIZE, KEY_BLOCKS };
    for (size_t i = 0; i < KOILA_COUNT(needed); i++)
        if (!need(r, at, f, needed[i])) return false;
    if (!get_bits(r, at, KEY_ADDRESS, V(f, ADDRESS), &x.addr) || !get_size(r, at, KEY_TOTAL_SIZE, V(f, TOTAL_SIZE), &x.size)) return false;
    if (HAS(f, DEVICE)) {
        if (!get_size(r, at, KEY_DEVICE, V(f, DEVICE), &n)) return false;
        if (n >= MAX_DEVICES) return BAD(r, "segment %llu: device %llu, limit %d", (unsigned long long)at.i, (unsigned long long)n, MAX_DEVICES);
        x.device = (uint32_t)n;
    }
    if (HAS(f, STREAM) && !get_bits(r, at, KEY_STREAM, V(f, STREAM), &x.stream)) return false;
    x.has_sums = HAS(f, ALLOCATED_SIZE) && HAS(f, ACTIVE_SIZE);
    if (HAS(f, ALLOCATED_SIZE) && !get_size(r, at, KEY_ALLOCATED_SIZE, V(f, ALLOCATED_SIZE), &x.allocated)) return false;
    if (HAS(f, ACTIVE_SIZE) && !get_size(r, at, KEY_ACTIVE_SIZE, V(f, ACTIVE_SIZE), &x.active)) return false;
    if (HAS(f, REQUESTED_SIZE) && !get_size(r, at, KEY_REQUESTED_SIZE, V(f, REQUESTED_SIZE), &x.requested)) return false;
    x.is_small = x.size <= 2 * MIB;
    if (HAS(f, SEGMENT_TYPE)) {
        if (!get_str(r, at, KEY_SEGMENT_TYPE, V(f, SEGMENT_TYPE), &type)) return false;
        const char *t = snap_str(s, type);
        if (strcmp(t, "small") && strcmp(t, "large")) return BAD(r, "segment %llu: unknown type \"%.40s\"", (unsigned long long)at.i, t);
        x.is_small = t[0] == 's';
    }
    if (HAS(f, SEGMENT_POOL_ID) && !get_pool(r, at, KEY_SEGMENT_POOL_ID, V(f, SEGMENT_POOL_ID), &x.pool)) return false;
    if (HAS(f, IS_EXPANDABLE)) {
        if (!get_size(r, at, KEY_IS_EXPANDABLE, V(f, IS_EXPANDABLE), &n)) return false;
        x.is_expandable = n != 0;
    }
    if (HAS(f, FRAMES) && !get_stack(r, at, KEY_FRAMES, V(f, FRAMES), &x.stack)) return false;
    if (kind_of(V(f, BLOCKS)) != K_BLOCKS) return kind_of(V(f, BLOCKS)) == K_EMPTY ? BAD(r, "segment %llu: no blocks", (unsigned long long)at.i) : wrong_type(r, at, KEY_BLOCKS, V(f, BLOCKS));
    x.blocks = (uint32_t)of(V(f, BLOCKS));
    if (!grow32(r, &s->segments, &s->segments_cap, s->n_segments + 1, sizeof x)) return false;
    s->segments[s->n_segments] = x;
    *out = make(K_SEGMENT, s->n_segments++);
    return true;
}

static bool build_frame(reader *r, const fields *f, value *out)
{
    snap_frame x = { 0 };
    const place at = { "frame", r->s->n_frames };
    uint64_t line = 0;
    uint32_t id;
    bool negative;
    if (!get_str(r, at, KEY_FILENAME, V(f, FILENAME), &x.file)) return false;
    if (HAS(f, NAME) && !get_str(r, at, KEY_NAME, V(f, NAME), &x.name)) return false;
    if (!HAS(f, NAME)) x.name = x.file;
    if (HAS(f, LINE) && !int_bits(r, V(f, LINE), &line, &negative)) return wrong_type(r, at, KEY_LINE, V(f, LINE));
    x.line = line > INT32_MAX ? 0 : (uint32_t)line;
    if (!intern_frame(r, x, &id)) return false;
    *out = make(K_FRAME, id);
    return true;
}

static bool get_real(const reader *r, value v, double *out)
{
    uint64_t bits;
    bool negative;
    if (kind_of(v) == K_REAL) return *out = r->reals[of(v)], true;
    if (!int_bits(r, v, &bits, &negative)) return false;
    *out = negative ? (double)(int64_t)bits : (double)bits;
    return true;
}

static bool build_settings(reader *r, const fields *f, value *out)
{
    snap_settings x = { .present = true, .conf = UINT32_MAX, .max_split = -1 };
    const place at = { "settings", 0 };
    uint64_t n;
    if (HAS(f, CONF) && kind_of(V(f, CONF)) != K_NONE && !get_str(r, at, KEY_CONF, V(f, CONF), &x.conf)) return false;
    if (HAS(f, MAX_SPLIT_SIZE)) {
        if (!get_bits(r, at, KEY_MAX_SPLIT_SIZE, V(f, MAX_SPLIT_SIZE), &n)) return false;
        x.max_split = n < SIZE_LIMIT ? (int64_t)n : -1;
        x.has_max_split = true;
    }
    if (HAS(f, GC_THRESHOLD) && !get_real(r, V(f, GC_THRESHOLD), &x.gc)) return wrong_type(r, at, KEY_GC_THRESHOLD, V(f, GC_THRESHOLD));
    if (HAS(f, FRACTION) && !get_real(r, V(f, FRACTION), &x.fraction)) return wrong_type(r, at, KEY_FRACTION, V(f, FRACTION));
    x.has_new_keys = x.has_fraction = HAS(f, FRACTION);
    if (HAS(f, EXPANDABLE_SEGMENTS)) {
        if (!get_bits(r, at, KEY_EXPANDABLE_SEGMENTS, V(f, EXPANDABLE_SEGMENTS), &n)) return false;
        x.expandable = n != 0;
    }
    if (HAS(f, RELEASE_LOCK) && get_bits(r, at, KEY_RELEASE_LOCK, V(f, RELEASE_LOCK), &n)) x.release_lock = n != 0;
    if (HAS(f, OOM_REJECT) && get_bits(r, at, KEY_OOM_REJECT, V(f, OOM_REJECT), &n)) x.oom_reject = n != 0;
    if (HAS(f, DIVISIONS) && kind_of(V(f, DIVISIONS)) == K_DIVS) {
        x.has_divisions = true;
        memcpy(x.divisions, r->s->settings.divisions, sizeof x.divisions);
    }
    if (r->status) return false;
    r->s->settings = x;
    *out = make(K_SETTINGS, 0);
    return true;
}

static bool build_annotation(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    snap_annotation x = { 0 };
    const place at = { "annotation", s->n_annotations };
    uint64_t n = 0;
    if (!get_str(r, at, KEY_STAGE, V(f, STAGE), &x.stage)) return false;
    if (!need(r, at, f, KEY_NAME) || !get_str(r, at, KEY_NAME, V(f, NAME), &x.name)) return false;
    if (HAS(f, TIME_US) && !get_bits(r, at, KEY_TIME_US, V(f, TIME_US), (uint64_t *)&x.time_us)) return false;
    if (HAS(f, DEVICE) && !get_bits(r, at, KEY_DEVICE, V(f, DEVICE), &n)) return false;
    x.device = n < MAX_DEVICES ? (uint32_t)n : 0;
    if (!grow32(r, &s->annotations, &s->annotations_cap, s->n_annotations + 1, sizeof x)) return false;
    s->annotations[s->n_annotations] = x;
    *out = make(K_NOTE, s->n_annotations++);
    return true;
}

static bool build_top(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    if (HAS(f, SEGMENTS) && kind_of(V(f, SEGMENTS)) != K_SEGMENTS && kind_of(V(f, SEGMENTS)) != K_EMPTY)
        return BAD(r, "\"segments\" is %s", kind_names[kind_of(V(f, SEGMENTS))]);
    if (!HAS(f, SEGMENTS)) return BAD(r, "no \"segments\"");
    if (HAS(f, DEVICE_TRACES)) {
        value v = V(f, DEVICE_TRACES);
        if (kind_of(v) != K_TRACES && kind_of(v) != K_EMPTY) return BAD(r, "\"device_traces\" is %s", kind_names[kind_of(v)]);
        s->n_traces = kind_of(v) == K_TRACES ? (uint32_t)(of(v) >> 32) : 0;
        if (!grow32(r, &s->traces, &s->traces_cap, s->n_traces, sizeof(snap_range))) return false;
        for (uint32_t i = 0; i < s->n_traces; i++) {
            s->traces[i] = s->ranges[(of(v) & UINT32_MAX) + i];
            s->has_traces |= s->traces[i].n > 0;
        }
    }
    if (HAS(f, ALLOCATOR_SETTINGS) && kind_of(V(f, ALLOCATOR_SETTINGS)) != K_SETTINGS) s->settings.present = false;
    *out = make(K_TOP, 0);
    return true;
}

/* {'1': 0, '2': 0, ...}: sixteen divisions by their size in MiB */
static bool build_divisions(reader *r, const value *items, uint64_t n, value *out)
{
    uint32_t of16[16] = { 0 };
    for (uint64_t i = 0; i < n; i++) {
        uint64_t mib = 0, d;
        bool negative;
        for (const char *t = snap_str(r->s, (uint32_t)of(items[2 * i])); *t >= '0' && *t <= '9' && mib < 1 << 20; t++) mib = mib * 10 + (uint64_t)(*t - '0');
        if (!mib || (mib & (mib - 1)) || mib > 32768 || !int_bits(r, items[2 * i + 1], &d, &negative) || negative || d > 1u << 20 || (d & (d - 1))) return *out = make(K_OTHER, 0), true;
        of16[__builtin_ctzll(mib)] = (uint32_t)d;
    }
    memcpy(r->s->settings.divisions, of16, sizeof of16);
    *out = make(K_DIVS, 0);
    return true;
}

static bool build_record(reader *r, const value *items, uint64_t n, value *out)
{
    fields f;
    uint64_t n_unknown = 0;
    f.has = 0;
    for (uint64_t i = n; i-- > 0;) { /* from the back: the last of equal keys wins, and records under unknown keys leave in order */
        if (kind_of(items[2 * i]) != K_STR) continue;
        uint64_t key = of(items[2 * i]);
        if (key >= N_KEYS) {
            n_unknown++;
            drop_unused(r, items[2 * i + 1]);
        } else if (!(f.has >> key & 1)) {
            f.v[key] = items[2 * i + 1];
            f.has |= (uint64_t)1 << key;
        }
    }
    if (!f.has && n && kind_of(items[0]) == K_STR) { /* divisions have numbers for keys */
        const char *t = snap_str(r->s, (uint32_t)of(items[0]));
        if (*t >= '0' && *t <= '9') return build_divisions(r, items, n, out);
    }
    r->s->n_unknown_keys += n_unknown;
    if (HAS(&f, ACTION)) return build_entry(r, &f, out);
    if (HAS(&f, SEGMENTS) || HAS(&f, DEVICE_TRACES)) return build_top(r, &f, out);
    if (HAS(&f, BLOCKS) || HAS(&f, TOTAL_SIZE)) return build_segment(r, &f, out);
    if (HAS(&f, STATE)) return build_block(r, &f, out);
    if (HAS(&f, FILENAME)) return build_frame(r, &f, out);
    if (HAS(&f, STAGE)) return build_annotation(r, &f, out);
    if (HAS(&f, CONF) || HAS(&f, MAX_SPLIT_SIZE) || HAS(&f, GC_THRESHOLD)) return build_settings(r, &f, out);
    if (HAS(&f, REAL_SIZE)) {
        uint64_t size;
        if (!get_size(r, (place){ "history", 0 }, KEY_REAL_SIZE, V(&f, REAL_SIZE), &size)) return false;
        *out = make(K_HIST, size < (uint64_t)1 << 58 ? size : 0);
        return true;
    }
    *out = make(n ? K_OTHER : K_EMPTY, 0);
    return true;
}

/* ---- containers under construction */

static value open_new(reader *r, bool is_dict)
{
    if (r->n_open >= r->lim.max_nesting) {
        (void)BAD(r, "nested deeper than %u", r->lim.max_nesting);
        return 0;
    }
    if (!grow32(r, &r->open, &r->open_cap, r->n_open + 1, sizeof(open_one))) return 0;
    r->open[r->n_open] = (open_one){ .is_dict = is_dict, .items = r->n_items, .serial = r->serial };
    return make(is_dict ? K_DICT : K_LIST, (uint64_t)r->n_open++ | (r->serial++ << 20));
}
static open_one *open_of(reader *r, value v)
{
    uint32_t i = (uint32_t)(of(v) & 0xFFFFF);
    if ((kind_of(v) != K_DICT && kind_of(v) != K_LIST) || i >= r->n_open || r->open[i].serial != of(v) >> 20) return NULL;
    return &r->open[i];
}

static inline bool items_put(reader *r, value v)
{
    if (r->n_items == r->items_cap && !grow64(r, &r->items, &r->items_cap, r->n_items + 1, sizeof v)) return false;
    r->items[r->n_items++] = v;
    return true;
}

static const value *items_of(const reader *r, const open_one *o) { return r->items ? r->items + o->items : NULL; }

static bool list_add(reader *r, open_one *o, value v)
{
    enum kind k = kind_of(v);
    if (k == K_FRAME && o->list_kind == K_FRAME) {
        if (o->n < MAX_FRAMES && !items_put(r, v)) return false;
        o->n++;
        return true;
    }
    if (k == K_ENTRY && o->list_kind == K_ENTRY && of(v) == o->first + o->n) return o->n++, true;
    if (k == K_WIDE || k == K_BOOL) k = K_INT;
    if (k == K_ENTRIES || (k == K_EMPTY && (o->list_kind == K_NONE || o->list_kind == K_TRACES))) {
        /* a list of lists of entries: the traces, one per device; an empty one is a trace too */
        if (o->list_kind && o->list_kind != K_TRACES) return BAD(r, "a trace inside a list of something else");
        o->list_kind = K_TRACES;
        if (!items_put(r, v)) return false;
        o->n++;
        return true;
    }
    if (k == K_STACK || k == K_NONE || k == K_EMPTY || k == K_STR || k == K_REAL || k == K_SETTINGS || k == K_DIVS || k == K_POOL || k == K_TOP || k == K_DICT || k == K_LIST) k = K_OTHER;
    if (o->list_kind == K_TRACES) return BAD(r, "a list of traces holds %s", kind_names[kind_of(v)]);
    if (o->list_kind && o->list_kind != k) {
        if (k == K_ENTRY || k == K_SEGMENT || k == K_BLOCK || o->list_kind == K_ENTRY || o->list_kind == K_SEGMENT || o->list_kind == K_BLOCK)
            return BAD(r, "a list of %s holds %s", kind_names[o->list_kind], kind_names[kind_of(v)]);
        k = K_OTHER;
    }
    if (k == K_ENTRY || k == K_SEGMENT || k == K_BLOCK || k == K_NOTE) {
        if (o->n == 0) o->first = of(v);
        else if (of(v) != o->first + o->n) return BAD(r, "broken pickle: the same %s reached twice", kind_names[k] + 2);
    } else if (k == K_FRAME) {
        if (o->n < MAX_FRAMES && !items_put(r, v)) return false;
    } else if (k == K_INT) {
        if (o->n < 2 && !items_put(r, v)) return false;
    } else if (k == K_HIST) {
        if (o->n == 0) o->first = of(v);
    } else {
        k = K_OTHER;
    }
    o->list_kind = (uint8_t)k;
    o->n++;
    return true;
}

static bool range_new(reader *r, enum kind k, uint64_t first, uint64_t n, value *out)
{
    koila_snapshot *s = r->s;
    if (!grow32(r, &s->ranges, &s->ranges_cap, s->n_ranges + 1, sizeof(snap_range))) return false;
    s->ranges[s->n_ranges] = (snap_range){ first, n };
    *out = make(k, s->n_ranges++);
    return true;
}

static bool pair_of_ints(reader *r, value a, value b, value *out)
{
    koila_pool p;
    bool negative;
    uint32_t id;
    if (!int_bits(r, a, &p.owner, &negative) || !int_bits(r, b, &p.id, &negative)) return *out = make(K_OTHER, 0), true;
    if (!intern_pool(r, p, &id)) return false;
    *out = make(K_POOL, id);
    return true;
}

static bool finish_list(reader *r, open_one *o, value *out)
{
    koila_snapshot *s = r->s;
    const value *items = items_of(r, o);
    uint32_t id;
    if (!o->n) return *out = make(K_EMPTY, 0), true;
    switch (o->list_kind) {
    case K_ENTRY: r->first_entry = o->first + o->n; return range_new(r, K_ENTRIES, o->first, o->n, out);
    case K_SEGMENT: return range_new(r, K_SEGMENTS, o->first, o->n, out);
    case K_BLOCK: return range_new(r, K_BLOCKS, o->first, o->n, out);
    case K_NOTE: *out = make(K_NOTES, 0); return true;
    case K_HIST: *out = make(K_HIST, o->first); return true;
    case K_INT: return o->n == 2 ? pair_of_ints(r, items[0], items[1], out) : (*out = make(K_OTHER, 0), true);
    case K_FRAME:
        if (!intern_stack(r, items, o->n < MAX_FRAMES ? o->n : MAX_FRAMES, &id)) return false;
        *out = make(K_STACK, id);
        return true;
    case K_TRACES:
        if (o->n > MAX_DEVICES) {
            for (uint64_t i = 0; i < o->n; i++)
                if (kind_of(items[i]) != K_EMPTY) return BAD(r, "%llu devices, limit %d", (unsigned long long)o->n, MAX_DEVICES);
            return *out = make(K_OTHER, 0), true;
        }
        if (!grow32(r, &s->ranges, &s->ranges_cap, s->n_ranges + (uint32_t)o->n, sizeof(snap_range))) return false;
        *out = make(K_TRACES, s->n_ranges | o->n << 32);
        for (uint64_t i = 0; i < o->n; i++, s->n_ranges++) s->ranges[s->n_ranges] = kind_of(items[i]) == K_ENTRIES ? s->ranges[of(items[i])] : (snap_range){ 0, 0 };
        return true;
    default: *out = make(K_OTHER, 0); return true;
    }
}

/* The outermost dict is no snapshot: say what it holds. */
static bool no_segments(reader *r, const open_one *o)
{
    char names[160] = "";
    for (uint64_t i = 0; i < o->n && i < 6; i++) {
        const value key = r->items[o->items + 2 * i];
        const size_t at = strlen(names);
        if (kind_of(key) == K_STR) snprintf(names + at, sizeof names - at, "%s%.40s", at ? ", " : "", snap_str(r->s, (uint32_t)of(key)));
    }
    return BAD(r, "no \"segments\": found keys %s", names[0] ? names : "(none)");
}

/* The innermost open container becomes its record. */
static bool finish_open(reader *r, value *v)
{
    open_one *o = open_of(r, *v);
    if (!o) return BAD(r, "broken pickle: a container is used twice");
    if (o != &r->open[r->n_open - 1]) return BAD(r, "broken pickle: a container is used before another inside it is finished");
    open_one done = *o;
    value out = 0;
    if (!(done.is_dict ? build_record(r, items_of(r, &done), done.n, &out) : finish_list(r, o, &out))) return false;
    if (done.is_dict && r->n_open == 1 && kind_of(out) != K_TOP) return no_segments(r, &done);
    r->n_items = done.items;
    r->n_open--;
    if (done.memo) r->memo[done.memo - 1] = out;
    *v = out;
    return true;
}

static inline bool finish(reader *r, value *v) { return (kind_of(*v) != K_DICT && kind_of(*v) != K_LIST) || finish_open(r, v); }

static bool dict_add(reader *r, open_one *o, value key, value v)
{
    if (!items_put(r, key) || !items_put(r, v)) return false;
    o->n++;
    return true;
}

/* ---- input */

/* At least n bytes at buf + at, if the file has them. */
static bool have(reader *r, uint64_t n)
{
    if (r->end - r->at >= n) return true;
    if (!r->src->read || r->eof) return false;
    if (r->at) {
        memmove(r->own, r->own + r->at, (size_t)(r->end - r->at));
        r->base += r->at;
        r->end -= r->at;
        r->at = 0;
    }
    while (r->end < n && !r->eof) {
        uint64_t want = n < 1 << 16 ? 1 << 16 : n < r->end * 2 ? n : r->end * 2 < 1 << 16 ? 1 << 16 : r->end * 2; /* grows with what is really there */
        if (want > r->own_cap && !grow64(r, &r->own, &r->own_cap, want, 1)) return false;
        int64_t got = r->src->read(r->src->user, r->own + r->end, (size_t)(r->own_cap - r->end));
        r->buf = r->own;
        if (got < 0) return BAD(r, "cannot be read");
        if (got == 0) r->eof = true;
        r->end += (uint64_t)got;
        r->s->n_bytes += (uint64_t)got;
        uint64_t budget = r->s->n_bytes > (UINT64_MAX >> 6) ? UINT64_MAX / 2 : 32 * r->s->n_bytes + 64 * MIB;
        r->s->budget = budget < r->s->budget_cap ? budget : r->s->budget_cap;
    }
    return r->end >= n;
}

static bool early(reader *r, const char *where) { return BAD(r, "ends early: %s", where); }

static inline bool take_u(reader *r, unsigned n, uint64_t *out)
{
    if (r->end - r->at < n && !have(r, n)) return early(r, "inside a number");
    uint64_t x = 0;
    for (unsigned i = 0; i < n; i++) x |= (uint64_t)r->buf[r->at + i] << 8 * i; /* n is a constant where it is called: one load */
    *out = x;
    r->at += n;
    return true;
}

/* A line of text without its newline. */
static bool take_line(reader *r, uint64_t max, const uint8_t **p, uint64_t *n)
{
    for (uint64_t i = 0;; i++) {
        if (i > max) return BAD(r, "a line of more than %llu bytes", (unsigned long long)max);
        if (!have(r, i + 1)) return early(r, "inside a line of text");
        if (r->buf[r->at + i] != '\n') continue;
        *p = r->buf + r->at;
        *n = i;
        r->at += i + 1;
        return true;
    }
}

/* ---- the pickle machine */

/* byte, name, what to do. Everything else is refused. */
enum op {
    OP_PROTO = 0x80, OP_FRAME = 0x95, OP_STOP = '.', OP_MARK = '(', OP_NONE = 'N', OP_NEWTRUE = 0x88, OP_NEWFALSE = 0x89, OP_INT = 'I', OP_LONG = 'L', OP_LONG1 = 0x8a,
    OP_LONG4 = 0x8b, OP_BININT = 'J', OP_BININT1 = 'K', OP_BININT2 = 'M', OP_FLOAT = 'F', OP_BINFLOAT = 'G', OP_UNICODE = 'V', OP_SHORT_BINUNICODE = 0x8c, OP_BINUNICODE = 'X',
    OP_BINUNICODE8 = 0x8d, OP_EMPTY_LIST = ']', OP_LIST = 'l', OP_APPEND = 'a', OP_APPENDS = 'e', OP_EMPTY_DICT = '}', OP_DICT = 'd', OP_SETITEM = 's', OP_SETITEMS = 'u',
    OP_EMPTY_TUPLE = ')', OP_TUPLE = 't', OP_TUPLE1 = 0x85, OP_TUPLE2 = 0x86, OP_TUPLE3 = 0x87, OP_PUT = 'p', OP_BINPUT = 'q', OP_LONG_BINPUT = 'r', OP_MEMOIZE = 0x94,
    OP_GET = 'g', OP_BINGET = 'h', OP_LONG_BINGET = 'j',
};
static const struct { uint8_t op; const char *name; } refused[] = {
    { 'c', "GLOBAL" }, { 0x93, "STACK_GLOBAL" }, { 'R', "REDUCE" }, { 'b', "BUILD" }, { 'i', "INST" }, { 'o', "OBJ" }, { 0x81, "NEWOBJ" }, { 0x92, "NEWOBJ_EX" },
    { 0x82, "EXT1" }, { 0x83, "EXT2" }, { 0x84, "EXT4" }, { 'P', "PERSID" }, { 'Q', "BINPERSID" }, { 0x97, "NEXT_BUFFER" }, { 0x98, "READONLY_BUFFER" }, { 'S', "STRING" },
    { 'T', "BINSTRING" }, { 'U', "SHORT_BINSTRING" }, { 'B', "BINBYTES" }, { 'C', "SHORT_BINBYTES" }, { 0x8e, "BINBYTES8" }, { 0x96, "BYTEARRAY8" }, { 0x8f, "EMPTY_SET" },
    { 0x90, "ADDITEMS" }, { 0x91, "FROZENSET" }, { '2', "DUP" }, { '0', "POP" }, { '1', "POP_MARK" },
};

static inline bool push(reader *r, value v)
{
    if (kind_of(v) == K_DICT || kind_of(v) == K_LIST) { /* a dict right below cannot be its parent: it is complete */
        if (r->status) return false;
        if (r->n_stack && kind_of(r->stack[r->n_stack - 1]) == K_DICT) return BAD(r, "broken pickle: a dict where a key belongs");
    }
    if (r->n_stack == r->stack_cap && !grow64(r, &r->stack, &r->stack_cap, r->n_stack + 1, sizeof v)) return false;
    r->stack[r->n_stack++] = v;
    return true;
}

static bool push_open(reader *r, bool is_dict)
{
    if (r->n_stack && kind_of(r->stack[r->n_stack - 1]) == K_DICT && !finish(r, &r->stack[r->n_stack - 1])) return false;
    value v = open_new(r, is_dict);
    return !r->status && push(r, v);
}

static bool pop_to_mark(reader *r, uint64_t *first)
{
    if (!r->n_marks) return BAD(r, "broken pickle: no MARK");
    *first = r->marks[--r->n_marks];
    /* finish what is open, innermost first */
    for (uint64_t i = r->n_stack; i-- > *first;)
        if (!finish(r, &r->stack[i])) return false;
    return true;
}

static bool underflow(reader *r) { return BAD(r, "broken pickle: stack underflow"); }
static bool room_below(reader *r, uint64_t n) { return r->n_stack >= (r->n_marks ? r->marks[r->n_marks - 1] : 0) + n || underflow(r); }

static bool memo_put(reader *r, uint64_t slot)
{
    if (!room_below(r, 1)) return false;
    if (slot > offset(r)) return BAD(r, "broken pickle: memo slot %llu", (unsigned long long)slot);
    if (slot >= r->memo_cap && !grow64(r, &r->memo, &r->memo_cap, slot + 1, sizeof(value))) return false;
    while (r->n_memo <= slot) r->memo[r->n_memo++] = make(K_MARK, 0);
    value v = r->stack[r->n_stack - 1];
    open_one *o = open_of(r, v);
    if (o) {
        if (o->memo) return BAD(r, "broken pickle: a container is remembered twice");
        o->memo = (uint32_t)slot + 1;
        if (slot >= UINT32_MAX - 1) return BAD(r, "broken pickle: memo slot %llu", (unsigned long long)slot);
    }
    /* two containers must not fight for a slot: the older one forgets it */
    if (open_of(r, r->memo[slot]) && r->memo[slot] != v) open_of(r, r->memo[slot])->memo = 0;
    r->memo[slot] = v;
    return true;
}

static bool memo_get(reader *r, uint64_t slot)
{
    if (slot >= r->n_memo || kind_of(r->memo[slot]) == K_MARK) return BAD(r, "broken pickle: memo slot %llu is empty", (unsigned long long)slot);
    value v = r->memo[slot];
    switch (kind_of(v)) {
    case K_DICT: case K_LIST: return BAD(r, "broken pickle: a reference to an unfinished container");
    case K_ENTRY: case K_ENTRIES: case K_SEGMENT: case K_SEGMENTS: case K_BLOCK: case K_BLOCKS: case K_TRACES: case K_NOTE: case K_NOTES: case K_TOP:
        return BAD(r, "broken pickle: the same %s reached twice", strchr(kind_names[kind_of(v)], ' ') + 1);
    default: return push(r, v);
    }
}

static bool slot_number(reader *r, uint64_t *slot)
{
    const uint8_t *p;
    uint64_t n;
    *slot = 0;
    if (!take_line(r, 20, &p, &n)) return false;
    if (!n) return BAD(r, "broken pickle: memo slot without a number");
    for (uint64_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9' || *slot > UINT32_MAX) return BAD(r, "broken pickle: memo slot is no number");
        *slot = *slot * 10 + (uint64_t)(p[i] - '0');
    }
    return true;
}

static bool push_int(reader *r, uint64_t bits, bool negative)
{
    value v;
    return make_int(r, bits, negative, &v) && push(r, v);
}

/* Little-endian two's complement of n bytes: at most 9, in [-2^63, 2^64). */
static bool push_long(reader *r, uint64_t n)
{
    if (n > 9) return BAD(r, "integer of %llu bytes", (unsigned long long)n);
    if (!have(r, n)) return early(r, "inside an integer");
    const uint8_t *p = r->buf + r->at;
    uint64_t bits = 0;
    bool negative = n && (p[n - 1] & 0x80);
    for (uint64_t i = 0; i < n && i < 8; i++) bits |= (uint64_t)p[i] << 8 * i;
    if (negative && n < 8) bits |= ~(uint64_t)0 << 8 * n;
    if (n == 9 && p[8] != (negative ? 0xff : 0)) return BAD(r, "integer out of range");
    if (n == 9 && negative && !(bits >> 63)) return BAD(r, "integer out of range");
    r->at += n;
    return push_int(r, bits, negative);
}

/* [-]digits, all of it; false: no number or out of range. */
static bool parse_int(const uint8_t *p, uint64_t n, uint64_t *bits, bool *negative)
{
    uint64_t i = 0, x = 0;
    *negative = n && p[0] == '-';
    i += *negative || (n && p[0] == '+');
    if (i == n) return false;
    for (; i < n; i++) {
        if (p[i] < '0' || p[i] > '9') return false;
        if (!koila__mul(x, 10, &x) || !koila__add(x, (uint64_t)(p[i] - '0'), &x)) return false;
    }
    if (*negative && x > (uint64_t)1 << 63) return false;
    *negative = *negative && x;
    *bits = *negative ? (uint64_t)0 - x : x;
    return true;
}

/* Digits, point, exponent: near enough to the nearest double for times and fractions, and no locale is asked. */
static bool parse_real(const uint8_t *p, uint64_t n, double *out)
{
    uint64_t i = 0, digits = 0;
    int scale = 0, n_digits = 0;
    bool negative = n && p[0] == '-', any = false, dot = false;
    i += negative || (n && p[0] == '+');
    if (n - i == 3 && (!memcmp(p + i, "inf", 3) || !memcmp(p + i, "nan", 3))) return *out = 0, true;
    for (; i < n && ((p[i] >= '0' && p[i] <= '9') || (p[i] == '.' && !dot)); i++) {
        if (p[i] == '.') {
            dot = true;
            continue;
        }
        any = true;
        if (n_digits < 18) {
            digits = digits * 10 + (uint64_t)(p[i] - '0');
            n_digits += digits != 0;
            scale -= dot;
        } else {
            scale += !dot;
        }
    }
    if (!any) return false;
    if (i < n && (p[i] == 'e' || p[i] == 'E')) {
        bool minus = ++i < n && p[i] == '-';
        int x = 0;
        i += i < n && (p[i] == '-' || p[i] == '+');
        if (i == n) return false;
        for (; i < n && p[i] >= '0' && p[i] <= '9'; i++) x = x < 10000 ? x * 10 + (p[i] - '0') : x;
        scale += minus ? -x : x;
    }
    if (i != n) return false;
    double v = (double)digits, ten = 10.0;
    if (scale > 400) scale = 400;
    if (scale < -400) scale = -400;
    for (int k = scale < 0 ? -scale : scale; k; k >>= 1, ten *= ten)
        if (k & 1) v = scale < 0 ? v / ten : v * ten;
    *out = negative ? -v : v;
    return true;
}

static bool push_string(reader *r, uint64_t n)
{
    if (n > r->lim.max_string_bytes) return long_string(r, n);
    if (!have(r, n)) return BAD(r, "ends early: inside a string of %llu bytes, %llu are there", (unsigned long long)n, (unsigned long long)(r->end - r->at));
    uint32_t id;
    if (!intern(r, r->buf + r->at, n, &id)) return false;
    r->at += n;
    return push(r, make(K_STR, id));
}

static int hex_digit(uint8_t c) { return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1; }

static size_t put_utf8(uint8_t *p, uint32_t c)
{
    if (c < 0x80) return p[0] = (uint8_t)c, 1;
    if (c < 0x800) return p[0] = (uint8_t)(0xC0 | c >> 6), p[1] = (uint8_t)(0x80 | (c & 63)), 2;
    if (c < 0x10000) return p[0] = (uint8_t)(0xE0 | c >> 12), p[1] = (uint8_t)(0x80 | (c >> 6 & 63)), p[2] = (uint8_t)(0x80 | (c & 63)), 3;
    if (c > 0x10FFFF) c = 0xFFFD;
    if (c < 0x10000) return put_utf8(p, c);
    return p[0] = (uint8_t)(0xF0 | c >> 18), p[1] = (uint8_t)(0x80 | (c >> 12 & 63)), p[2] = (uint8_t)(0x80 | (c >> 6 & 63)), p[3] = (uint8_t)(0x80 | (c & 63)), 4;
}

/* UNICODE: a line, Latin-1 with \uXXXX and \UXXXXXXXX */
static bool push_unicode(reader *r)
{
    const uint8_t *p;
    uint64_t n, m = 0;
    if (!take_line(r, r->lim.max_string_bytes, &p, &n)) return false;
    uint8_t *copy = resize(r, NULL, 0, 4 * n + 4);
    if (!copy) return false;
    for (uint64_t i = 0; i < n;) {
        unsigned len = p[i] == '\\' && i + 1 < n ? (p[i + 1] == 'u' ? 4 : p[i + 1] == 'U' ? 8 : 0) : 0;
        uint32_t c = 0;
        bool ok = len && i + 2 + len <= n;
        for (unsigned k = 0; ok && k < len; k++) {
            int h = hex_digit(p[i + 2 + k]);
            ok = h >= 0;
            c = c << 4 | (uint32_t)(h & 15);
        }
        m += put_utf8(copy + m, ok ? c : p[i]);
        i += ok ? 2 + len : 1;
    }
    uint32_t id;
    bool ok = intern(r, copy, m, &id);
    r->s->used -= 4 * n + 4;
    koila__release(&r->s->mem, copy, (size_t)(4 * n + 4));
    return ok && push(r, make(K_STR, id));
}

static bool push_tuple(reader *r, uint64_t first)
{
    uint64_t n = r->n_stack - first;
    value v = make(n ? K_OTHER : K_EMPTY, 0);
    for (uint64_t i = r->n_stack; i-- > first;)
        if (!finish(r, &r->stack[i])) return false;
    if (n == 2 && !pair_of_ints(r, r->stack[first], r->stack[first + 1], &v)) return false;
    if (n == 1 || n > 2 || kind_of(v) == K_OTHER)
        for (uint64_t i = r->n_stack; i-- > first;) drop_unused(r, r->stack[i]);
    r->n_stack = first;
    return push(r, v);
}

static bool fill_dict(reader *r, uint64_t first)
{
    if (!first || (r->n_stack - first) % 2) return BAD(r, "broken pickle: a key without a value");
    open_one *o = open_of(r, r->stack[first - 1]);
    if (!o || !o->is_dict) return BAD(r, "broken pickle: %s is filled like an open dict", kind_names[kind_of(r->stack[first - 1])]);
    if (o != &r->open[r->n_open - 1]) return BAD(r, "broken pickle: a dict is filled before another inside it is finished");
    for (uint64_t i = first; i < r->n_stack; i += 2)
        if (!dict_add(r, o, r->stack[i], r->stack[i + 1])) return false;
    r->n_stack = first;
    return true;
}

static bool fill_list(reader *r, uint64_t first)
{
    if (!first) return underflow(r);
    open_one *o = open_of(r, r->stack[first - 1]);
    if (!o || o->is_dict) return BAD(r, "broken pickle: %s is filled like an open list", kind_names[kind_of(r->stack[first - 1])]);
    if (o != &r->open[r->n_open - 1]) return BAD(r, "broken pickle: a list is filled before another inside it is finished");
    for (uint64_t i = first; i < r->n_stack; i++)
        if (!list_add(r, o, r->stack[i])) return false;
    r->n_stack = first;
    return true;
}

/* DICT and LIST: from MARK, in one. The container is opened late, so its memo slot comes after. */
static bool from_mark(reader *r, bool is_dict)
{
    uint64_t first;
    if (!pop_to_mark(r, &first)) return false;
    value v = open_new(r, is_dict);
    if (r->status || !push(r, v)) return false;
    uint64_t n = r->n_stack - 1 - first;
    memmove(r->stack + first + 1, r->stack + first, (size_t)n * sizeof(value));
    r->stack[first] = v;
    return is_dict ? fill_dict(r, first + 1) : fill_list(r, first + 1);
}

static bool step(reader *r, uint8_t op)
{
    uint64_t n, first;
    const uint8_t *p;
    bool negative;
    switch (op) {
    case OP_PROTO:
        if (!take_u(r, 1, &n)) return false;
        return n <= 5 || BAD(r, "pickle protocol %llu is not known", (unsigned long long)n);
    case OP_FRAME: return take_u(r, 8, &n);
    case OP_MARK:
        if (!grow64(r, &r->marks, &r->marks_cap, r->n_marks + 1, sizeof(uint64_t))) return false;
        /* a MARK right on a dict may be SETITEMS' or the start of another element: only what follows tells */
        r->marks[r->n_marks++] = r->n_stack;
        return true;
    case OP_NONE: return push(r, make(K_NONE, 0));
    case OP_NEWTRUE: return push(r, make(K_BOOL, 1));
    case OP_NEWFALSE: return push(r, make(K_BOOL, 0));
    case OP_INT:
        if (!take_line(r, 32, &p, &n)) return false;
        if (n == 2 && p[0] == '0' && (p[1] == '0' || p[1] == '1')) return push(r, make(K_BOOL, (uint64_t)(p[1] - '0')));
        return (parse_int(p, n, &first, &negative) || BAD(r, "INT is no integer in range")) && push_int(r, first, negative);
    case OP_LONG:
        if (!take_line(r, 32, &p, &n)) return false;
        if (n && p[n - 1] == 'L') n--;
        return (parse_int(p, n, &first, &negative) || BAD(r, "LONG is no integer in range")) && push_int(r, first, negative);
    case OP_LONG1: return take_u(r, 1, &n) && push_long(r, n);
    case OP_LONG4: return take_u(r, 4, &n) && push_long(r, n);
    case OP_BININT: return take_u(r, 4, &n) && push_int(r, (uint64_t)(int64_t)(int32_t)(uint32_t)n, n >> 31);
    case OP_BININT1: return take_u(r, 1, &n) && push(r, make(K_INT, n));
    case OP_BININT2: return take_u(r, 2, &n) && push(r, make(K_INT, n));
    case OP_FLOAT: {
        double x;
        value v;
        if (!take_line(r, 400, &p, &n)) return false;
        return (parse_real(p, n, &x) || BAD(r, "FLOAT is no number")) && make_real(r, x, &v) && push(r, v);
    }
    case OP_BINFLOAT: {
        double x;
        value v;
        if (!take_u(r, 8, &n)) return false;
        n = __builtin_bswap64(n);
        memcpy(&x, &n, 8);
        if (!(x == x) || x > 1e300 || x < -1e300) x = 0;
        return make_real(r, x, &v) && push(r, v);
    }
    case OP_UNICODE: return push_unicode(r);
    case OP_SHORT_BINUNICODE: return take_u(r, 1, &n) && push_string(r, n);
    case OP_BINUNICODE: return take_u(r, 4, &n) && push_string(r, n);
    case OP_BINUNICODE8: return take_u(r, 8, &n) && push_string(r, n);
    case OP_EMPTY_LIST: return push_open(r, false);
    case OP_EMPTY_DICT: return push_open(r, true);
    case OP_LIST: return from_mark(r, false);
    case OP_DICT: return from_mark(r, true);
    case OP_APPEND:
        if (!room_below(r, 2)) return false;
        return finish(r, &r->stack[r->n_stack - 1]) && fill_list(r, r->n_stack - 1);
    case OP_APPENDS: return pop_to_mark(r, &first) && fill_list(r, first);
    case OP_SETITEM:
        if (!room_below(r, 3)) return false;
        return finish(r, &r->stack[r->n_stack - 1]) && finish(r, &r->stack[r->n_stack - 2]) && fill_dict(r, r->n_stack - 2);
    case OP_SETITEMS: return pop_to_mark(r, &first) && fill_dict(r, first);
    case OP_EMPTY_TUPLE: return push(r, make(K_EMPTY, 0));
    case OP_TUPLE: return pop_to_mark(r, &first) && push_tuple(r, first);
    case OP_TUPLE1: return room_below(r, 1) && push_tuple(r, r->n_stack - 1);
    case OP_TUPLE2: return room_below(r, 2) && push_tuple(r, r->n_stack - 2);
    case OP_TUPLE3: return room_below(r, 3) && push_tuple(r, r->n_stack - 3);
    case OP_PUT: return slot_number(r, &n) && memo_put(r, n);
    case OP_BINPUT: return take_u(r, 1, &n) && memo_put(r, n);
    case OP_LONG_BINPUT: return take_u(r, 4, &n) && memo_put(r, n);
    case OP_MEMOIZE: return memo_put(r, r->n_memo);
    case OP_GET: return slot_number(r, &n) && memo_get(r, n);
    case OP_BINGET: return take_u(r, 1, &n) && memo_get(r, n);
    case OP_LONG_BINGET: return take_u(r, 4, &n) && memo_get(r, n);
    default:
        r->at--; /* the offset of the opcode itself */
        for (size_t i = 0; i < KOILA_COUNT(refused); i++)
            if (refused[i].op == op)
                return BAD(r, "refused opcode %s: a memory snapshot holds only plain data; this file could run code if loaded in Python", refused[i].name);
        return BAD(r, "0x%02x is no pickle opcode", op);
    }
}

static bool read_pickle(reader *r)
{
    for (;;) {
        if (r->at == r->end && !have(r, 1)) return r->status ? false : early(r, "before STOP");
        uint8_t op = r->buf[r->at++];
        if (op == OP_STOP) break;
        if (!step(r, op)) return false;
    }
    if (r->n_stack != 1 || r->n_marks) return BAD(r, "broken pickle: %llu values and %llu MARKs at STOP", (unsigned long long)r->n_stack, (unsigned long long)r->n_marks);
    r->top = r->stack[0];
    /* names for the message, should this be no snapshot */
    return true;
}

/* ---- JSON */

static uint8_t json_peek(reader *r)
{
    for (;; r->at++) {
        if (r->at == r->end && !have(r, 1)) return 0;
        uint8_t c = r->buf[r->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return c ? c : 1;
    }
}
static bool json_want(reader *r, const char *what)
{
    uint8_t c = json_peek(r);
    return r->status ? false : c ? BAD(r, "JSON: expected %s", what) : early(r, what);
}

static bool json_hex4(reader *r, uint64_t i, uint32_t *c)
{
    *c = 0;
    for (int k = 0; k < 4; k++) {
        int h = have(r, i + 1 + (uint64_t)k) ? hex_digit(r->buf[r->at + i + (uint64_t)k]) : -1;
        if (h < 0) return r->status ? false : BAD(r, "JSON: bad \\u escape");
        *c = *c << 4 | (uint32_t)h;
    }
    return true;
}

static bool json_string(reader *r, value *out)
{
    uint64_t i = 0;
    bool plain = true;
    uint32_t id;
    r->at++;
    for (;; i++) { /* find the end */
        if (r->at + i >= r->end && !have(r, i + 1)) return r->status ? false : BAD(r, "ends early: inside a string, %llu bytes are there", (unsigned long long)i);
        uint8_t c = r->buf[r->at + i];
        if (c == '"') break;
        if (i > r->lim.max_string_bytes) return long_string(r, i);
        if (c < 0x20) return r->at += i, BAD(r, "JSON: control character in a string");
        if (c == '\\') plain = false, i++;
    }
    if (plain) {
        if (!intern(r, r->buf + r->at, i, &id)) return false;
    } else {
        uint8_t *copy = resize(r, NULL, 0, i + 8);
        uint64_t m = 0;
        if (!copy) return false;
        for (uint64_t k = 0; k < i && !r->status;) {
            uint8_t c = r->buf[r->at + k++];
            if (c != '\\') {
                copy[m++] = c;
                continue;
            }
            static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
            const char *at = memchr(from, r->buf[r->at + k], 8);
            uint32_t u, low;
            if (at) {
                copy[m++] = (uint8_t)to[at - from], k++;
            } else if (r->buf[r->at + k] == 'u' && k + 5 <= i) {
                if (!json_hex4(r, k + 1, &u)) break;
                k += 5;
                if (u >= 0xD800 && u < 0xDC00 && k + 6 <= i && r->buf[r->at + k] == '\\' && r->buf[r->at + k + 1] == 'u') {
                    if (!json_hex4(r, k + 2, &low)) break;
                    if (low >= 0xDC00 && low < 0xE000) u = 0x10000 + ((u - 0xD800) << 10) + (low - 0xDC00), k += 6;
                }
                if (u >= 0xD800 && u < 0xE000) u = 0xFFFD;
                m += put_utf8(copy + m, u);
            } else {
                (void)BAD(r, "JSON: bad escape");
            }
        }
        bool ok = !r->status && intern(r, copy, m, &id);
        r->s->used -= i + 8;
        koila__release(&r->s->mem, copy, (size_t)(i + 8));
        if (!ok) return false;
    }
    r->at += i + 1;
    *out = make(K_STR, id);
    return true;
}

static bool json_number(reader *r, value *out)
{
    uint64_t n = 0;
    bool real = false, negative;
    for (;; n++) {
        if (r->at + n >= r->end && !have(r, n + 1)) break;
        uint8_t c = r->buf[r->at + n];
        if (c == '.' || c == 'e' || c == 'E') real = true;
        else if (!((c >= '0' && c <= '9') || c == '-' || c == '+')) break;
        if (n > 400) return BAD(r, "JSON: a number of more than 400 digits");
    }
    if (r->status) return false;
    const uint8_t *p = r->buf + r->at;
    const uint64_t lead = n && p[0] == '-';
    if (n <= lead || p[lead] < '0' || p[lead] > '9' || (p[lead] == '0' && lead + 1 < n && p[lead + 1] >= '0' && p[lead + 1] <= '9')) return BAD(r, "JSON: bad number");
    if (real) {
        double x;
        if (p[n - 1] < '0' || p[n - 1] > '9' || !parse_real(p, n, &x)) return BAD(r, "JSON: bad number");
        for (uint64_t i = 1; i < n; i++)
            if (p[i] == '.' && (p[i - 1] < '0' || p[i - 1] > '9' || p[i + 1] < '0' || p[i + 1] > '9')) return BAD(r, "JSON: bad number");
        if (!make_real(r, x, out)) return false;
    } else {
        uint64_t bits;
        if (!parse_int(p, n, &bits, &negative)) return BAD(r, "JSON: integer out of range");
        if (!make_int(r, bits, negative, out)) return false;
    }
    r->at += n;
    return true;
}

static bool json_word(reader *r, const char *word, value v, value *out)
{
    size_t n = strlen(word);
    if (!have(r, n)) return r->status ? false : early(r, "inside a word");
    if (memcmp(r->buf + r->at, word, n)) return BAD(r, "JSON: unknown word");
    r->at += n;
    *out = v;
    return true;
}

static bool json_value(reader *r, value *out)
{
    uint8_t c = json_peek(r);
    switch (c) {
    case '"': return json_string(r, out);
    case 'n': return json_word(r, "null", make(K_NONE, 0), out);
    case 't': return json_word(r, "true", make(K_BOOL, 1), out);
    case 'f': return json_word(r, "false", make(K_BOOL, 0), out);
    case '{': case '[': break;
    default:
        if (c == '-' || (c >= '0' && c <= '9')) return json_number(r, out);
        return json_want(r, "a value");
    }
    const bool is_dict = c == '{';
    const uint8_t close = is_dict ? '}' : ']';
    r->at++;
    value self = open_new(r, is_dict), key, v; /* depth is bounded by max_nesting */
    if (r->status) return false;
    const uint32_t i = r->n_open - 1;
    if (json_peek(r) != close) {
        for (;;) {
            if (is_dict) {
                if (json_peek(r) != '"') return json_want(r, "a key");
                if (!json_string(r, &key)) return false;
                if (json_peek(r) != ':') return json_want(r, "':'");
                r->at++;
            }
            if (!json_value(r, &v)) return false;
            if (!(is_dict ? dict_add(r, &r->open[i], key, v) : list_add(r, &r->open[i], v))) return false;
            c = json_peek(r);
            if (c == close) break;
            if (c != ',') return json_want(r, is_dict ? "',' or '}'" : "',' or ']'");
            r->at++;
        }
    }
    r->at++;
    if (!finish(r, &self)) return false;
    *out = self;
    return true;
}

static bool read_json(reader *r)
{
    if (!json_value(r, &r->top)) return false;
    return json_peek(r) ? BAD(r, "JSON: text after the end") : !r->status;
}

/* ---- the whole */

static bool valid_blocks(reader *r, const snap_segment *g, uint64_t number)
{
    koila_snapshot *s = r->s;
    const snap_range *range = &s->ranges[g->blocks];
    uint64_t at = 0, allocated = 0, active = 0;
    const unsigned long long name = g->addr;
    (void)number;
    if (!g->size || g->addr == 0 || g->addr >= (uint64_t)1 << 62) return BAD(r, "segment 0x%llx: address or size out of range", name);
    for (uint64_t i = range->first; i < range->first + range->n; i++) {
        snap_block *b = &s->blocks[i];
        if (!b->has_addr) b->addr = g->addr + at;
        if (b->addr != g->addr + at || !b->size) return BAD(r, "segment 0x%llx: blocks do not tile it", name);
        at += b->size;
        if (at > g->size) break;
        if (b->state == KOILA_BLOCK_USED) allocated += b->size;
        if (b->state != KOILA_BLOCK_FREE) active += b->size;
        if (b->requested > b->size) return BAD(r, "segment 0x%llx: a block of %llu holds %llu", name, (unsigned long long)b->size, (unsigned long long)b->requested);
    }
    char a[KOILA_GROUPED], c[KOILA_GROUPED];
    if (at != g->size) return BAD(r, "segment 0x%llx: blocks sum to %s, segment is %s", name, koila__grouped(at, a), koila__grouped(g->size, c));
    if (g->has_sums && allocated != g->allocated) return BAD(r, "segment 0x%llx: blocks allocated sum to %s, segment says %s", name, koila__grouped(allocated, a), koila__grouped(g->allocated, c));
    if (g->has_sums && active != g->active) return BAD(r, "segment 0x%llx: active blocks sum to %s, segment says %s", name, koila__grouped(active, a), koila__grouped(g->active, c));
    return true;
}

/* Sort by device, then address: shell sort, for they come sorted or nearly so. */
static void sort_segments(snap_segment *a, uint64_t n)
{
    for (uint64_t gap = n / 2; gap; gap /= 2)
        for (uint64_t i = gap; i < n; i++) {
            const snap_segment x = a[i];
            uint64_t k = i;
            for (; k >= gap && (a[k - gap].device > x.device || (a[k - gap].device == x.device && a[k - gap].addr > x.addr)); k -= gap) a[k] = a[k - gap];
            a[k] = x;
        }
}

/* Check the segments and lay them out as the caller sees them. */
static bool publish(reader *r, uint64_t first, uint64_t n)
{
    koila_snapshot *s = r->s;
    uint32_t n_devices = s->n_traces;
    snap_segment *a = s->segments ? s->segments + first : NULL;
    uint64_t n_blocks = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (!valid_blocks(r, &a[i], i)) return false;
        if (a[i].device >= n_devices) n_devices = a[i].device + 1;
        n_blocks += s->ranges[a[i].blocks].n;
    }
    sort_segments(a, n);
    for (uint64_t i = 1; i < n; i++)
        if (a[i].device == a[i - 1].device && a[i].addr < a[i - 1].addr + a[i - 1].size)
            return BAD(r, "segment 0x%llx: overlaps segment 0x%llx", (unsigned long long)a[i].addr, (unsigned long long)a[i - 1].addr);
    s->n_devices = n_devices ? n_devices : 1;
    s->n_device_first = s->n_devices + 1;
    if (!(s->device_first = resize(r, NULL, 0, (uint64_t)s->n_device_first * sizeof(uint32_t)))) return false;
    if (n && !(s->out_segments = resize(r, NULL, 0, n * sizeof(koila_segment)))) return false;
    s->n_out_segments = (uint32_t)n;
    if (n_blocks && !(s->out_blocks = resize(r, NULL, 0, n_blocks * sizeof(koila_block)))) return false;
    s->n_out_blocks = (uint32_t)n_blocks;
    if (n_blocks && !(s->out_stacks = resize(r, NULL, 0, n_blocks * sizeof(uint32_t)))) return false;
    if (!s->n_pools) { /* segments without segment_pool_id are the default pool's */
        uint32_t id;
        if (!intern_pool(r, KOILA_POOL_DEFAULT, &id)) return false;
    }
    uint32_t d = 0, at = 0;
    for (uint64_t i = 0; i < n; i++) {
        const snap_segment *g = &a[i];
        const snap_range *range = &s->ranges[g->blocks];
        while (d <= g->device) s->device_first[d++] = (uint32_t)i;
        s->out_segments[i] = (koila_segment){ g->addr, g->size, g->stream, s->pools[g->pool], g->is_small, g->is_expandable, s->out_blocks + at, range->n };
        for (uint64_t k = 0; k < range->n; k++, at++) {
            const snap_block *b = &s->blocks[range->first + k];
            s->out_blocks[at] = (koila_block){ b->addr, b->size, b->requested, (koila_block_state)b->state, (uint32_t)i, g->stream, s->pools[g->pool], g->is_small, g->is_expandable };
            s->out_stacks[at] = b->stack;
        }
    }
    while (d < s->n_device_first) s->device_first[d++] = (uint32_t)n;
    return true;
}

static bool read_all(reader *r)
{
    koila_snapshot *s = r->s;
    uint32_t id;
    for (size_t i = 0; i < N_KEYS; i++)
        if (!intern(r, (const uint8_t *)key_names[i], strlen(key_names[i]), &id)) return false;
    for (size_t i = 0; i < KOILA_COUNT(action_texts); i++)
        if (!intern(r, (const uint8_t *)action_texts[i], strlen(action_texts[i]), &id)) return false;
    if (!intern_pool(r, KOILA_POOL_DEFAULT, &id)) return false;
    if (!have(r, 1)) return r->status ? false : BAD(r, "empty file");
    const uint8_t c = r->buf[0];
    if (have(r, 2) && c == 'P' && r->buf[1] == 'K') return BAD(r, "not a snapshot: expected a pickle or JSON, found zip");
    if (have(r, 2) && c == 0x1f && r->buf[1] == 0x8b) return BAD(r, "not a snapshot: expected a pickle or JSON, found gzip");
    if (r->status) return false;
    s->is_json = c == '{' || c == '[' || c == ' ' || c == '\n' || c == '\r' || c == '\t';
    if (!s->is_json && c != 0x80 && c != '(' && c != '}' && c != ']') return BAD(r, "not a snapshot: expected a pickle or JSON, found %s", c >= 0x20 && c < 0x7f ? "text" : "other data");
    if (!(s->is_json ? read_json(r) : read_pickle(r))) return false;
    if (!finish(r, &r->top)) return false;
    switch (kind_of(r->top)) {
    case K_TOP: {
        /* segments that are reached: all there are, or drop_unused has dropped them */
        return publish(r, 0, s->n_segments);
    }
    case K_SEGMENTS: return publish(r, s->ranges[of(r->top)].first, s->ranges[of(r->top)].n);
    case K_EMPTY: return publish(r, 0, 0);
    default: return BAD(r, "not a snapshot: holds %s", kind_names[kind_of(r->top)]);
    }
}

koila_status koila_snapshot_open(const koila_source *src, const koila_limits *lim, koila_snapshot **out, koila_error *e)
{
    reader r = { .src = src, .e = e };
    if (lim && lim->struct_size == sizeof r.lim) r.lim = *lim;
    if (!r.lim.max_nesting) r.lim.max_nesting = 64;
    if (r.lim.max_nesting > 4096) r.lim.max_nesting = 4096;
    if (!r.lim.max_string_bytes) r.lim.max_string_bytes = 16 * MIB;
    koila_allocator mem = koila__allocator(r.lim.mem.fn ? &r.lim.mem : NULL);
    koila_snapshot *s = koila__realloc(&mem, NULL, 0, sizeof *s);
    if (!s) return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    memset(s, 0, sizeof *s);
    s->mem = mem;
    s->settings.conf = UINT32_MAX;
    s->settings.max_split = -1;
    s->budget_cap = r.lim.max_memory_bytes ? r.lim.max_memory_bytes : UINT64_MAX / 2;
    r.s = s;
    if (!src->read) {
        r.buf = src->data;
        r.end = s->n_bytes = src->n_bytes;
        r.eof = true;
    }
    uint64_t budget = s->n_bytes > UINT64_MAX >> 7 ? UINT64_MAX / 2 : 32 * s->n_bytes + 64 * MIB;
    s->budget = budget < s->budget_cap ? budget : s->budget_cap;
    bool ok = read_all(&r);
    koila__release(&mem, r.stack, (size_t)r.stack_cap * sizeof(value));
    koila__release(&mem, r.marks, (size_t)r.marks_cap * sizeof(uint64_t));
    koila__release(&mem, r.memo, (size_t)r.memo_cap * sizeof(value));
    koila__release(&mem, r.open, r.open_cap * sizeof(open_one));
    koila__release(&mem, r.items, (size_t)r.items_cap * sizeof(value));
    koila__release(&mem, r.wides, (size_t)r.wides_cap * sizeof(wide));
    koila__release(&mem, r.reals, (size_t)r.reals_cap * sizeof(double));
    koila__release(&mem, r.scratch, (size_t)r.scratch_cap);
    koila__release(&mem, r.own, (size_t)r.own_cap);
    if (!ok) {
        koila_snapshot_free(s);
        return r.status;
    }
    *out = s;
    return KOILA_OK;
}

void koila_snapshot_free(koila_snapshot *s)
{
    if (!s) return;
    koila_allocator m = s->mem;
    for (uint32_t i = 0; i < s->n_chunks; i++) koila__release(&m, s->chunks[i], ENTRY_CHUNK * sizeof(snap_entry));
    koila__release(&m, s->chunks, s->chunks_cap * sizeof *s->chunks);
    koila__release(&m, s->text, (size_t)s->text_cap);
    koila__release(&m, s->strs, s->strs_cap * sizeof *s->strs);
    koila__release(&m, s->str_hash, s->str_hash_cap * sizeof(uint32_t));
    koila__release(&m, s->segments, s->segments_cap * sizeof *s->segments);
    koila__release(&m, s->blocks, s->blocks_cap * sizeof *s->blocks);
    koila__release(&m, s->frames, s->frames_cap * sizeof *s->frames);
    koila__release(&m, s->frame_hash, s->frame_hash_cap * sizeof(uint32_t));
    koila__release(&m, s->stacks, s->stacks_cap * sizeof *s->stacks);
    koila__release(&m, s->stack_ids, s->stack_ids_cap * sizeof(uint32_t));
    koila__release(&m, s->stack_hash, s->stack_hash_cap * sizeof(uint32_t));
    koila__release(&m, s->ranges, s->ranges_cap * sizeof *s->ranges);
    koila__release(&m, s->pools, s->pools_cap * sizeof *s->pools);
    koila__release(&m, s->annotations, s->annotations_cap * sizeof *s->annotations);
    koila__release(&m, s->traces, s->traces_cap * sizeof *s->traces);
    koila__release(&m, s->device_first, s->n_device_first * sizeof(uint32_t));
    koila__release(&m, s->out_segments, s->n_out_segments * sizeof(koila_segment));
    koila__release(&m, s->out_blocks, s->n_out_blocks * sizeof(koila_block));
    koila__release(&m, s->out_stacks, s->n_out_blocks * sizeof(uint32_t));
    koila__release(&m, s, sizeof *s);
}

/* ---- looking */

void koila_snapshot_get_info(const koila_snapshot *s, koila_snapshot_info *out)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < s->n_traces; i++) n += s->traces[i].n;
    *out = (koila_snapshot_info){ .struct_size = (uint32_t)sizeof *out, .n_devices = s->n_devices, .n_bytes = s->n_bytes, .n_entries = n, .n_segments = s->n_out_segments,
                                  .n_blocks = s->n_out_blocks, .n_annotations = s->n_annotations, .n_unknown_keys = s->n_unknown_keys, .n_skipped_entries = s->n_skipped, .is_json = s->is_json,
                                  .has_traces = s->has_traces, .has_pool_ids = s->has_pool_ids, .has_settings = s->settings.present,
                                  .conf = s->settings.present ? snap_str(s, s->settings.conf) : "" };
}

uint64_t koila_snapshot_n_entries(const koila_snapshot *s, uint32_t device) { return device < s->n_traces ? s->traces[device].n : 0; }

bool koila_snapshot_entry(const koila_snapshot *s, uint32_t device, uint64_t i, koila_entry *out)
{
    if (i >= koila_snapshot_n_entries(s, device)) return false;
    const snap_entry *x = snap_entry_at(s, s->traces[device].first + i);
    *out = (koila_entry){ (koila_event_kind)x->kind, x->addr, x->size, x->stream, x->time_us, x->stack, x->has_pool, x->has_pool ? s->pools[x->pool] : KOILA_POOL_DEFAULT };
    return true;
}

const koila_segment *koila_snapshot_segments(const koila_snapshot *s, uint32_t device, size_t *n)
{
    *n = 0;
    if (device >= s->n_devices) return NULL;
    *n = s->device_first[device + 1] - s->device_first[device];
    return *n ? s->out_segments + s->device_first[device] : NULL;
}

uint32_t koila_snapshot_block_stack(const koila_snapshot *s, const koila_block *block)
{
    const size_t i = (size_t)(block - s->out_blocks);
    return i < s->n_out_blocks ? s->out_stacks[i] : KOILA_NO_STACK;
}

bool koila_snapshot_frame(const koila_snapshot *s, uint32_t stack, uint32_t i, koila_frame *out)
{
    if (!stack || stack > s->n_stacks || i >= s->stacks[stack - 1].n) return false;
    const snap_frame *f = &s->frames[s->stack_ids[s->stacks[stack - 1].first + i]];
    *out = (koila_frame){ snap_str(s, f->name), snap_str(s, f->file), f->line };
    return true;
}

bool koila_snapshot_annotation(const koila_snapshot *s, uint64_t i, koila_annotation *out)
{
    if (i >= s->n_annotations) return false;
    const snap_annotation *x = &s->annotations[i];
    *out = (koila_annotation){ snap_str(s, x->name), snap_str(s, x->stage), x->time_us, x->device };
    return true;
}

/* The large segment size is not in a snapshot but for the string: the first miss between 1 and 10 MiB shows it. */
static uint64_t seen_large_segment(const koila_snapshot *s, uint32_t device)
{
    const uint64_t n = koila_snapshot_n_entries(s, device);
    for (uint64_t i = 1; i < n; i++) {
        const snap_entry *x = snap_entry_at(s, s->traces[device].first + i), *before = x - 1;
        if (!(i & (ENTRY_CHUNK - 1)) || (s->traces[device].first + i) % ENTRY_CHUNK == 0) before = snap_entry_at(s, s->traces[device].first + i - 1);
        if (x->kind != KOILA_EVENT_ALLOC || before->kind != KOILA_EVENT_SEGMENT_ALLOC || x->addr != before->addr) continue;
        if (x->size > MIB && x->size < 10 * MIB - 511 && before->size > 10 * MIB) return before->size;
    }
    return 0;
}

koila_status koila_snapshot_config(const koila_snapshot *s, uint32_t device, const char *torch_version, koila_cache_config *out, koila_error *e)
{
    const snap_settings *x = &s->settings;
    koila_cache_config c;
    if (!torch_version) torch_version = s->has_pool_ids ? "2.13" : x->has_new_keys ? "2.10" : x->present ? "2.6" : NULL;
    KOILA_TRY(koila_cache_config_init(&c, torch_version));
    if (x->present && x->conf != UINT32_MAX) KOILA_TRY(koila_cache_config_parse(&c, snap_str(s, x->conf), 0, e));
    if (x->present) {
        const uint64_t seen = seen_large_segment(s, device);
        if (c.large_segment_bytes == 20 * MIB && seen && seen != c.large_segment_bytes && seen % MIB == 0 && seen < (uint64_t)1 << 40 && (c.rules & KOILA_RULE_LARGE_SEGMENT)) {
            c.large_segment_bytes = seen;
            if (!c.rounding_set) c.max_non_split_rounding_bytes = seen;
        }
        if (x->has_max_split) c.max_split_bytes = x->max_split < 0 ? KOILA_NO_LIMIT : (uint64_t)x->max_split;
        if (c.max_split_bytes < c.large_segment_bytes) return koila__fail(e, KOILA_BAD_INPUT, 0, "settings: max_split_size %llu is below the large segment", (unsigned long long)c.max_split_bytes);
        if (x->gc > 0.0 && x->gc < 1.0) c.gc_threshold = x->gc;
        if (x->has_divisions) memcpy(c.divisions, x->divisions, sizeof c.divisions);
        c.expandable = x->expandable;
        if (x->release_lock) c.release_lock = 1;
        if (x->oom_reject) c.oom_reject = 1;
        if (x->has_fraction && x->fraction >= 0.0 && x->fraction <= 1.0) c.memory_fraction = x->fraction;
    }
    *out = c;
    return KOILA_OK;
}
