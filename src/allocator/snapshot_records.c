/* snapshot_records.c — equal strings, frames, stacks and pools are kept once; a dict becomes its
 * record by the keys it has; a list of records becomes a range of them. */
#include "allocator/snapshot_reader.h"

const char *const koila__snap_key_names[N_KEYS] = {
#define KEY_NAME(name, text) text,
    KEY_MAP(KEY_NAME)
#undef KEY_NAME
};

const char *const koila__snap_kind_names[] = {
#define KIND_NAME(name, text) text,
    KIND_MAP(KIND_NAME)
#undef KIND_NAME
};
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
    for (; n; n--, b++)
        h = (h ^ *b) * 0x100000001b3u;
    return h ^ h >> 29;
}

/* Room for one more id in a set of equal things. */
static bool room_in(reader *r, koila__idset *set, koila__hash_fn hash_of)
{
    const koila_allocator mem = koila__snap_counted(r);
    /* if memory was short, that was said already, and the first failure stands */
    return koila__idset_reserve(&mem, set, hash_of, r->s) || BAD(r, "too many different strings");
}

static size_t str_len(const koila_snapshot *s, uint32_t id)
{
    return (size_t)((id + 1 < s->n_strs ? s->strs[id + 1] : s->text_n) - s->strs[id] - 1);
}
static uint64_t str_hash_of(const void *snapshot, uint32_t id)
{
    const koila_snapshot *s = snapshot;
    return hash_bytes(s->text + s->strs[id], str_len(s, id));
}
typedef struct bytes {
    const void *p;
    size_t n;
} bytes;
static bool str_same(const void *snapshot, uint32_t id, const void *key)
{
    const koila_snapshot *s = snapshot;
    const bytes *b = key;
    return str_len(s, id) == b->n && !memcmp(s->text + s->strs[id], b->p, b->n);
}

/* Well-formed UTF-8 only, no overlong forms or surrogates. Returns the bytes of one character, 0 if
 * bad. */
static size_t utf8_one(const uint8_t *p, size_t n)
{
    if (p[0] < 0x80)
        return 1;
    size_t len = 0;
    if (p[0] >= 0xC2 && p[0] < 0xE0)
        len = 2;
    else if (p[0] >= 0xE0 && p[0] < 0xF0)
        len = 3;
    else if (p[0] >= 0xF0 && p[0] < 0xF5)
        len = 4;
    if (!len || n < len)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((p[i] & 0xC0) != 0x80)
            return 0;
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) ||
        (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F))
        return 0;
    return len;
}

/* Replaces *p by a copy in r->scratch, with U+FFFD for each byte that is not UTF-8 and for NUL. */
static bool clean_copy(reader *r, const uint8_t **p, uint64_t *n)
{
    if (!koila__snap_grow64(r, &r->scratch, &r->scratch_cap, 3 * *n + 1, 1))
        return false;
    uint64_t m = 0;
    for (uint64_t i = 0; i < *n;) {
        const size_t len = (*p)[i] ? utf8_one(*p + i, (size_t)(*n - i)) : 0;
        if (len) {
            memcpy(r->scratch + m, *p + i, len);
            m += len;
            i += len;
        } else {
            memcpy(r->scratch + m, "\xEF\xBF\xBD", 3);
            m += 3;
            i++;
        }
    }
    koila_assert(m <= r->scratch_cap);
    *p = (const uint8_t *)r->scratch;
    *n = m;
    return true;
}

bool koila__snap_intern(reader *r, const uint8_t *p, uint64_t n, uint32_t *id)
{
    koila_snapshot *s = r->s;
    if (n > r->lim.max_string_bytes && s->n_strs >= N_OWN_STRS)
        return koila__snap_long_string(r, n);
    bool plain = true;
    for (uint64_t i = 0; i < n && plain; i++)
        plain = p[i] < 0x80 && p[i];
    if (!plain && !clean_copy(r, &p, &n))
        return false;
    koila_assert(s->text_n <= s->text_cap && s->n_strs == s->str_set.n);
    const uint64_t hash = hash_bytes(p, (size_t)n);
    *id = koila__idset_find(&s->str_set, hash, str_same, s, &(bytes){ p, (size_t)n });
    if (*id != KOILA__NO_ID)
        return true;
    if (!room_in(r, &s->str_set, str_hash_of) ||
        !koila__snap_grow64(r, &s->text, &s->text_cap, s->text_n + n + 1, 1) ||
        !koila__snap_grow32(r, &s->strs, &s->strs_cap, s->n_strs + 1, sizeof(uint64_t)))
        return false;
    memcpy(s->text + s->text_n, p, (size_t)n);
    s->text[s->text_n + n] = 0;
    s->strs[s->n_strs] = s->text_n;
    s->text_n += n + 1;
    *id = s->n_strs++;
    koila__idset_insert(&s->str_set, hash, *id);
    return true;
}

static uint64_t frame_hash_of(const void *snapshot, uint32_t id)
{
    const koila_snapshot *s = snapshot;
    return hash_bytes(&s->frames[id], sizeof(snap_frame));
}
static bool frame_same(const void *snapshot, uint32_t id, const void *key)
{
    const koila_snapshot *s = snapshot;
    return !memcmp(&s->frames[id], key, sizeof(snap_frame));
}
static bool intern_frame(reader *r, snap_frame f, uint32_t *id)
{
    koila_snapshot *s = r->s;
    koila_assert(s->n_frames == s->frame_set.n && f.name < s->n_strs && f.file < s->n_strs);
    const uint64_t hash = hash_bytes(&f, sizeof f);
    *id = koila__idset_find(&s->frame_set, hash, frame_same, s, &f);
    if (*id != KOILA__NO_ID)
        return true;
    if (!room_in(r, &s->frame_set, frame_hash_of) ||
        !koila__snap_grow32(r, &s->frames, &s->frames_cap, s->n_frames + 1, sizeof f))
        return false;
    *id = s->n_frames++;
    s->frames[*id] = f;
    koila__idset_insert(&s->frame_set, hash, *id);
    return true;
}

static uint64_t stack_hash_of(const void *snapshot, uint32_t id)
{
    const koila_snapshot *s = snapshot;
    return hash_bytes(s->stack_ids + s->stacks[id].first,
                      (size_t)s->stacks[id].n * sizeof(uint32_t));
}
static bool stack_same(const void *snapshot, uint32_t id, const void *key)
{
    const koila_snapshot *s = snapshot;
    const bytes *b = key;
    return s->stacks[id].n * sizeof(uint32_t) == b->n &&
           !memcmp(s->stack_ids + s->stacks[id].first, b->p, b->n);
}
static bool intern_stack(reader *r, const value *frames, uint64_t n, uint32_t *id)
{
    koila_snapshot *s = r->s;
    if (n > MAX_FRAMES)
        n = MAX_FRAMES;
    if (!koila__snap_grow32(r, &s->stack_ids, &s->stack_ids_cap, s->n_stack_ids + (uint32_t)n + 1,
                            sizeof(uint32_t)))
        return false;
    uint32_t *ids = s->stack_ids + s->n_stack_ids; /* built in place, kept only if new */
    for (uint64_t i = 0; i < n; i++)
        ids[i] = (uint32_t)of(frames[i]);
    koila_assert(s->n_stacks == s->stack_set.n);
    const bytes key = { ids, (size_t)n * sizeof *ids };
    const uint64_t hash = hash_bytes(key.p, key.n);
    *id = koila__idset_find(&s->stack_set, hash, stack_same, s, &key);
    if (*id != KOILA__NO_ID)
        return true;
    if (!room_in(r, &s->stack_set, stack_hash_of) ||
        !koila__snap_grow32(r, &s->stacks, &s->stacks_cap, s->n_stacks + 1, sizeof(snap_range)))
        return false;
    *id = s->n_stacks++;
    s->stacks[*id] = (snap_range){ s->n_stack_ids, n };
    s->n_stack_ids += (uint32_t)n;
    koila__idset_insert(&s->stack_set, hash, *id);
    return true;
}

static bool intern_pool(reader *r, koila_pool p, uint32_t *id)
{
    koila_snapshot *s = r->s;
    for (uint32_t i = s->n_pools; i > 0; i--)
        if (s->pools[i - 1].owner == p.owner && s->pools[i - 1].id == p.id) {
            *id = i - 1;
            return true;
        }
    if (s->n_pools >= 1 << 16)
        return BAD(r, "more than 65536 memory pools");
    if (!koila__snap_grow32(r, &s->pools, &s->pools_cap, s->n_pools + 1, sizeof p))
        return false;
    *id = s->n_pools++;
    s->pools[*id] = p;
    return true;
}

/* ---- reading values out of handles */

static bool int_bits(const reader *r, value v, uint64_t *bits, bool *negative)
{
    switch (kind_of(v)) {
    case K_BOOL:
        *bits = of(v);
        *negative = false;
        return true;
    case K_INT:
        *bits = (uint64_t)small_int(v);
        *negative = small_int(v) < 0;
        return true;
    case K_WIDE:
        *bits = r->wides[of(v)].bits;
        *negative = r->wides[of(v)].negative;
        return true;
    default:
        return false;
    }
}

bool koila__snap_make_int(reader *r, uint64_t bits, bool negative, value *out)
{
    int64_t x = (int64_t)bits;
    if ((negative ? x < 0 : x >= 0) && x >= -((int64_t)1 << (INT_BITS - 1)) &&
        x < (int64_t)1 << (INT_BITS - 1)) {
        *out = make(K_INT, (uint64_t)x);
        return true;
    }
    if (!koila__snap_grow64(r, &r->wides, &r->wides_cap, r->n_wides + 1, sizeof(wide)))
        return false;
    r->wides[r->n_wides] = (wide){ bits, negative };
    *out = make(K_WIDE, r->n_wides++);
    return true;
}
bool koila__snap_make_real(reader *r, double x, value *out)
{
    if (!koila__snap_grow64(r, &r->reals, &r->reals_cap, r->n_reals + 1, sizeof x))
        return false;
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
    return BAD(r, "%s %llu: \"%s\" is %s", at.what, (unsigned long long)at.i,
               koila__snap_key_names[key], koila__snap_kind_names[kind_of(v)]);
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
    if (!int_bits(r, v, &n, &negative))
        return wrong_type(r, at, key, v);
    if (negative)
        return BAD(r, "%s %llu: %s %lld", at.what, (unsigned long long)at.i,
                   koila__snap_key_names[key], (long long)n);
    if (n >= SIZE_LIMIT && !(n & (n - 1)))
        return BAD(r, "%s %llu: %s 2^%d, limit 2^60", at.what, (unsigned long long)at.i,
                   koila__snap_key_names[key], __builtin_ctzll(n));
    if (n >= SIZE_LIMIT)
        return BAD(r, "%s %llu: %s %llu, limit 2^60", at.what, (unsigned long long)at.i,
                   koila__snap_key_names[key], (unsigned long long)n);
    *out = n;
    return true;
}
static bool get_str(reader *r, place at, int key, value v, uint32_t *out)
{
    if (kind_of(v) != K_STR)
        return wrong_type(r, at, key, v);
    *out = (uint32_t)of(v);
    return true;
}
static bool get_stack(reader *r, place at, int key, value v, uint32_t *out)
{
    if (kind_of(v) == K_EMPTY || kind_of(v) == K_NONE) {
        *out = 0;
        return true;
    }
    if (kind_of(v) != K_STACK)
        return wrong_type(r, at, key, v);
    *out = (uint32_t)of(v) + 1;
    return true;
}
static bool get_pool(reader *r, place at, int key, value v, uint32_t *out)
{
    if (kind_of(v) != K_POOL)
        return wrong_type(r, at, key, v);
    *out = (uint32_t)of(v);
    return true;
}

/* ---- dicts become records */

/* The last value under each known key; unknown keys are counted, and records that were made under
 * one are dropped again. */
typedef struct fields {
    value v[N_KEYS];
    uint64_t has; /* bits */
} fields;
#define HAS(f, key) ((f)->has >> KEY_##key & 1)
#define V(f, key) ((f)->v[KEY_##key])
_Static_assert(N_KEYS <= 64, "fields.has is one word");

void koila__snap_drop_unused(reader *r, value v)
{
    koila_snapshot *s = r->s;
    if (kind_of(v) == K_ENTRY && of(v) + 1 == s->n_entries)
        s->n_entries--;
    else if (kind_of(v) == K_ENTRIES && s->ranges[of(v)].first + s->ranges[of(v)].n == s->n_entries)
        r->first_entry = s->n_entries = s->ranges[of(v)].first;
    else if (kind_of(v) == K_BLOCK && of(v) + 1 == s->n_blocks)
        s->n_blocks--;
    else if (kind_of(v) == K_SEGMENT && of(v) + 1 == s->n_segments)
        s->n_segments--;
}

static bool need(reader *r, place at, const fields *f, int key)
{
    return (f->has >> key & 1) || BAD(r, "%s %llu: \"%s\" missing", at.what,
                                      (unsigned long long)at.i, koila__snap_key_names[key]);
}

/* Of keys that may be missing: *out is then as it was. */
static bool may_bits(reader *r, place at, const fields *f, int key, uint64_t *out)
{
    return !(f->has >> key & 1) || get_bits(r, at, key, f->v[key], out);
}
static bool may_size(reader *r, place at, const fields *f, int key, uint64_t *out)
{
    return !(f->has >> key & 1) || get_size(r, at, key, f->v[key], out);
}
static bool may_stack(reader *r, place at, const fields *f, uint32_t *out)
{
    return !HAS(f, FRAMES) || get_stack(r, at, KEY_FRAMES, V(f, FRAMES), out);
}

/* id, text, kind of event; 0: an entry that says nothing about memory */
/* clang-format off: one entry a line */
#define ACTION_MAP(X)                                                                              \
    X(0, "alloc", KOILA_EVENT_ALLOC)                                                               \
    X(1, "free_requested", KOILA_EVENT_FREE_REQUESTED)                                             \
    X(2, "free_completed", KOILA_EVENT_FREE_COMPLETED)                                             \
    X(3, "segment_alloc", KOILA_EVENT_SEGMENT_ALLOC)                                               \
    X(4, "segment_free", KOILA_EVENT_SEGMENT_FREE)                                                 \
    X(5, "segment_map", KOILA_EVENT_SEGMENT_MAP)                                                   \
    X(6, "segment_unmap", KOILA_EVENT_SEGMENT_UNMAP)                                               \
    X(7, "oom", KOILA_EVENT_OOM)                                                                   \
    X(8, "snapshot", KOILA_EVENT_SNAPSHOT)                                                         \
    X(9, "user_defined", 0)
/* clang-format on */
static const char *const action_texts[] = {
#define ACTION_TEXT(i, text, kind) text,
    ACTION_MAP(ACTION_TEXT)
#undef ACTION_TEXT
};
_Static_assert(KOILA_COUNT(action_texts) == N_ACTIONS, "N_ACTIONS");
static const struct {
    bool known;
    uint8_t kind;
} kinds_by_id[] = {
#define ACTION_KIND(i, text, kind) [N_KEYS + (i)] = { true, kind },
    ACTION_MAP(ACTION_KIND)
#undef ACTION_KIND
};

static bool fill_entry(reader *r, place at, const fields *f, snap_entry *x)
{
    const bool oom = x->kind == KOILA_EVENT_OOM;
    const int key = HAS(f, DEVICE_FREE) && oom ? KEY_DEVICE_FREE : KEY_ADDR;
    if (!need(r, at, f, key) || !get_bits(r, at, key, f->v[key], &x->addr))
        return false;
    if (!need(r, at, f, KEY_SIZE) || !get_size(r, at, KEY_SIZE, V(f, SIZE), &x->size))
        return false;
    if (!may_bits(r, at, f, KEY_STREAM, &x->stream) ||
        !may_bits(r, at, f, KEY_TIME_US, (uint64_t *)&x->time_us) ||
        !may_stack(r, at, f, &x->stack))
        return false;
    if (HAS(f, POOL_ID)) {
        if (!get_pool(r, at, KEY_POOL_ID, V(f, POOL_ID), &x->pool))
            return false;
        x->has_pool = 1;
        r->s->has_pool_ids = true;
    }
    return true;
}

static bool append_entry(reader *r, const snap_entry *x)
{
    koila_snapshot *s = r->s;
    if (s->n_entries >> ENTRY_CHUNK_BITS == s->n_chunks) {
        if (!koila__snap_grow32(r, &s->chunks, &s->chunks_cap, s->n_chunks + 1, sizeof *s->chunks))
            return false;
        snap_entry *chunk = koila__snap_resize(r, NULL, 0, ENTRY_CHUNK * sizeof *chunk);
        if (!chunk)
            return false;
        s->chunks[s->n_chunks++] = chunk;
    }
    koila_assert(s->n_entries >> ENTRY_CHUNK_BITS < s->n_chunks);
    s->chunks[s->n_entries >> ENTRY_CHUNK_BITS][s->n_entries & (ENTRY_CHUNK - 1)] = *x;
    s->n_entries++;
    return true;
}

static bool build_entry(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    koila_assert(r->first_entry <= s->n_entries);
    const place at = { "entry", s->n_entries - r->first_entry };
    snap_entry x = { 0 };
    uint32_t name;
    if (!get_str(r, at, KEY_ACTION, V(f, ACTION), &name))
        return false;
    /* actions are interned right after the keys */
    if (name >= KOILA_COUNT(kinds_by_id) || !kinds_by_id[name].known)
        return BAD(r, "entry %llu: unknown action \"%.40s\" (newest torch known: 2.13)",
                   (unsigned long long)at.i, snap_str(s, name));
    x.kind = kinds_by_id[name].kind;
    if (!x.kind)
        s->n_skipped++;
    else if (!fill_entry(r, at, f, &x))
        return false;
    if (!append_entry(r, &x))
        return false;
    *out = make(K_ENTRY, s->n_entries - 1);
    return true;
}

static bool build_block(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    const place at = { "block", s->n_blocks };
    snap_block x = { 0 };
    uint32_t state;
    if (!need(r, at, f, KEY_SIZE) || !get_size(r, at, KEY_SIZE, V(f, SIZE), &x.size))
        return false;
    if (!get_str(r, at, KEY_STATE, V(f, STATE), &state))
        return false;
    const char *t = snap_str(s, state);
    if (!strcmp(t, "active_allocated"))
        x.state = KOILA_BLOCK_USED;
    else if (!strcmp(t, "active_pending_free") || !strcmp(t, "active_awaiting_free"))
        x.state = KOILA_BLOCK_PENDING;
    else if (!strcmp(t, "inactive"))
        x.state = KOILA_BLOCK_FREE;
    else
        return BAD(r, "block %llu: unknown state \"%.40s\" (newest torch known: 2.13)",
                   (unsigned long long)at.i, t);
    x.has_addr = HAS(f, ADDRESS);
    if (x.has_addr && !get_bits(r, at, KEY_ADDRESS, V(f, ADDRESS), &x.addr))
        return false;
    if (HAS(f, REQUESTED_SIZE)) {
        if (!get_size(r, at, KEY_REQUESTED_SIZE, V(f, REQUESTED_SIZE), &x.requested))
            return false;
    } else if (HAS(f, HISTORY) && kind_of(V(f, HISTORY)) == K_HIST) {
        x.requested = of(V(f, HISTORY));
    }
    if (x.state == KOILA_BLOCK_FREE)
        x.requested = 0;
    if (!may_stack(r, at, f, &x.stack))
        return false;
    if (!koila__snap_grow32(r, &s->blocks, &s->blocks_cap, s->n_blocks + 1, sizeof x))
        return false;
    s->blocks[s->n_blocks] = x;
    *out = make(K_BLOCK, s->n_blocks++);
    return true;
}

/* The device and the kind of memory, where they are told. */
static bool fill_segment_kind(reader *r, place at, const fields *f, snap_segment *x)
{
    uint64_t n = 0;
    uint32_t type;
    if (!may_size(r, at, f, KEY_DEVICE, &n))
        return false;
    if (n >= MAX_DEVICES)
        return BAD(r, "segment %llu: device %llu, limit %d", (unsigned long long)at.i,
                   (unsigned long long)n, MAX_DEVICES);
    x->device = (uint32_t)n;
    x->is_small = x->size <= 2 * MIB;
    if (HAS(f, SEGMENT_TYPE)) {
        if (!get_str(r, at, KEY_SEGMENT_TYPE, V(f, SEGMENT_TYPE), &type))
            return false;
        const char *t = snap_str(r->s, type);
        if (strcmp(t, "small") && strcmp(t, "large"))
            return BAD(r, "segment %llu: unknown type \"%.40s\"", (unsigned long long)at.i, t);
        x->is_small = t[0] == 's';
    }
    n = 0;
    if (!may_size(r, at, f, KEY_IS_EXPANDABLE, &n))
        return false;
    x->is_expandable = n != 0;
    return true;
}

static bool build_segment(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    const place at = { "segment", s->n_segments };
    snap_segment x = { 0 };
    static const int needed[] = { KEY_ADDRESS, KEY_TOTAL_SIZE, KEY_BLOCKS };
    for (size_t i = 0; i < KOILA_COUNT(needed); i++)
        if (!need(r, at, f, needed[i]))
            return false;
    if (!get_bits(r, at, KEY_ADDRESS, V(f, ADDRESS), &x.addr) ||
        !get_size(r, at, KEY_TOTAL_SIZE, V(f, TOTAL_SIZE), &x.size))
        return false;
    x.has_sums = HAS(f, ALLOCATED_SIZE) && HAS(f, ACTIVE_SIZE);
    if (!fill_segment_kind(r, at, f, &x) || !may_bits(r, at, f, KEY_STREAM, &x.stream) ||
        !may_size(r, at, f, KEY_ALLOCATED_SIZE, &x.allocated) ||
        !may_size(r, at, f, KEY_ACTIVE_SIZE, &x.active) ||
        !may_size(r, at, f, KEY_REQUESTED_SIZE, &x.requested) || !may_stack(r, at, f, &x.stack))
        return false;
    if (HAS(f, SEGMENT_POOL_ID) &&
        !get_pool(r, at, KEY_SEGMENT_POOL_ID, V(f, SEGMENT_POOL_ID), &x.pool))
        return false;
    const value blocks = V(f, BLOCKS);
    if (kind_of(blocks) == K_EMPTY)
        return BAD(r, "segment %llu: no blocks", (unsigned long long)at.i);
    if (kind_of(blocks) != K_BLOCKS)
        return wrong_type(r, at, KEY_BLOCKS, blocks);
    x.blocks = (uint32_t)of(blocks);
    if (!koila__snap_grow32(r, &s->segments, &s->segments_cap, s->n_segments + 1, sizeof x))
        return false;
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
    if (!get_str(r, at, KEY_FILENAME, V(f, FILENAME), &x.file))
        return false;
    if (HAS(f, NAME) && !get_str(r, at, KEY_NAME, V(f, NAME), &x.name))
        return false;
    if (!HAS(f, NAME))
        x.name = x.file;
    if (HAS(f, LINE) && !int_bits(r, V(f, LINE), &line, &negative))
        return wrong_type(r, at, KEY_LINE, V(f, LINE));
    x.line = line > INT32_MAX ? 0 : (uint32_t)line;
    if (!intern_frame(r, x, &id))
        return false;
    *out = make(K_FRAME, id);
    return true;
}

static bool get_real(const reader *r, value v, double *out)
{
    uint64_t bits;
    bool negative;
    if (kind_of(v) == K_REAL) {
        *out = r->reals[of(v)];
        return true;
    }
    if (!int_bits(r, v, &bits, &negative))
        return false;
    *out = negative ? (double)(int64_t)bits : (double)bits;
    return true;
}

static bool build_settings(reader *r, const fields *f, value *out)
{
    snap_settings x = { .present = true, .conf = UINT32_MAX, .max_split = -1 };
    const place at = { "settings", 0 };
    uint64_t n;
    if (HAS(f, CONF) && kind_of(V(f, CONF)) != K_NONE &&
        !get_str(r, at, KEY_CONF, V(f, CONF), &x.conf))
        return false;
    if (HAS(f, MAX_SPLIT_SIZE)) {
        if (!get_bits(r, at, KEY_MAX_SPLIT_SIZE, V(f, MAX_SPLIT_SIZE), &n))
            return false;
        x.max_split = n < SIZE_LIMIT ? (int64_t)n : -1;
        x.has_max_split = true;
    }
    if (HAS(f, GC_THRESHOLD) && !get_real(r, V(f, GC_THRESHOLD), &x.gc))
        return wrong_type(r, at, KEY_GC_THRESHOLD, V(f, GC_THRESHOLD));
    if (HAS(f, FRACTION) && !get_real(r, V(f, FRACTION), &x.fraction))
        return wrong_type(r, at, KEY_FRACTION, V(f, FRACTION));
    x.has_new_keys = x.has_fraction = HAS(f, FRACTION);
    x.has_capture_reuse = HAS(f, CAPTURE_REUSE);
    x.has_pinned_cached = HAS(f, PINNED_CACHED);
    if (HAS(f, EXPANDABLE_SEGMENTS)) {
        if (!get_bits(r, at, KEY_EXPANDABLE_SEGMENTS, V(f, EXPANDABLE_SEGMENTS), &n))
            return false;
        x.expandable = n != 0;
    }
    if (HAS(f, RELEASE_LOCK) && get_bits(r, at, KEY_RELEASE_LOCK, V(f, RELEASE_LOCK), &n))
        x.release_lock = n != 0;
    if (HAS(f, OOM_REJECT) && get_bits(r, at, KEY_OOM_REJECT, V(f, OOM_REJECT), &n))
        x.oom_reject = n != 0;
    if (HAS(f, DIVISIONS) && kind_of(V(f, DIVISIONS)) == K_DIVS) {
        x.has_divisions = true;
        memcpy(x.divisions, r->s->settings.divisions, sizeof x.divisions);
    }
    if (r->status)
        return false;
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
    if (!get_str(r, at, KEY_STAGE, V(f, STAGE), &x.stage))
        return false;
    if (!need(r, at, f, KEY_NAME) || !get_str(r, at, KEY_NAME, V(f, NAME), &x.name))
        return false;
    if (HAS(f, TIME_US) && !get_bits(r, at, KEY_TIME_US, V(f, TIME_US), (uint64_t *)&x.time_us))
        return false;
    if (HAS(f, DEVICE) && !get_bits(r, at, KEY_DEVICE, V(f, DEVICE), &n))
        return false;
    x.device = n < MAX_DEVICES ? (uint32_t)n : 0;
    if (!koila__snap_grow32(r, &s->annotations, &s->annotations_cap, s->n_annotations + 1,
                            sizeof x))
        return false;
    s->annotations[s->n_annotations] = x;
    *out = make(K_NOTE, s->n_annotations++);
    return true;
}

static bool build_top(reader *r, const fields *f, value *out)
{
    koila_snapshot *s = r->s;
    if (HAS(f, SEGMENTS) && kind_of(V(f, SEGMENTS)) != K_SEGMENTS &&
        kind_of(V(f, SEGMENTS)) != K_EMPTY)
        return BAD(r, "\"segments\" is %s", koila__snap_kind_names[kind_of(V(f, SEGMENTS))]);
    if (!HAS(f, SEGMENTS))
        return BAD(r, "no \"segments\"");
    if (HAS(f, DEVICE_TRACES)) {
        value v = V(f, DEVICE_TRACES);
        if (kind_of(v) != K_TRACES && kind_of(v) != K_EMPTY)
            return BAD(r, "\"device_traces\" is %s", koila__snap_kind_names[kind_of(v)]);
        s->n_traces = kind_of(v) == K_TRACES ? (uint32_t)(of(v) >> 32) : 0;
        if (!koila__snap_grow32(r, &s->traces, &s->traces_cap, s->n_traces, sizeof(snap_range)))
            return false;
        for (uint32_t i = 0; i < s->n_traces; i++) {
            s->traces[i] = s->ranges[(of(v) & UINT32_MAX) + i];
            s->has_traces |= s->traces[i].n > 0;
        }
    }
    if (HAS(f, ALLOCATOR_SETTINGS) && kind_of(V(f, ALLOCATOR_SETTINGS)) != K_SETTINGS)
        s->settings.present = false;
    s->has_host_traces = HAS(f, HOST_TRACES);
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
        for (const char *t = snap_str(r->s, (uint32_t)of(items[2 * i]));
             *t >= '0' && *t <= '9' && mib < 1 << 20; t++)
            mib = mib * 10 + (uint64_t)(*t - '0');
        if (!mib || (mib & (mib - 1)) || mib > 32768 ||
            !int_bits(r, items[2 * i + 1], &d, &negative) || negative || d > 1u << 20 ||
            (d & (d - 1))) {
            *out = make(K_OTHER, 0);
            return true;
        }
        of16[__builtin_ctzll(mib)] = (uint32_t)d;
    }
    memcpy(r->s->settings.divisions, of16, sizeof of16);
    *out = make(K_DIVS, 0);
    return true;
}

/* The known keys of a dict. From the back: the last of equal keys wins, and records under unknown
 * keys leave in order. Returns how many keys were unknown. */
static uint64_t gather_fields(reader *r, const value *items, uint64_t n, fields *f)
{
    uint64_t n_unknown = 0;
    f->has = 0;
    for (uint64_t i = n; i-- > 0;) {
        if (kind_of(items[2 * i]) != K_STR)
            continue;
        const uint64_t key = of(items[2 * i]);
        if (key >= N_KEYS) {
            n_unknown++;
            koila__snap_drop_unused(r, items[2 * i + 1]);
        } else if (!(f->has >> key & 1)) {
            f->v[key] = items[2 * i + 1];
            f->has |= (uint64_t)1 << key;
        }
    }
    return n_unknown;
}

static bool build_history(reader *r, const fields *f, value *out)
{
    uint64_t size;
    if (!get_size(r, (place){ "history", 0 }, KEY_REAL_SIZE, V(f, REAL_SIZE), &size))
        return false;
    *out = make(K_HIST, size < (uint64_t)1 << 58 ? size : 0);
    return true;
}

/* A dict becomes the first record of this list of which it has a key. */
static const struct {
    int key;
    bool (*build)(reader *r, const fields *f, value *out);
} records[] = {
    { KEY_ACTION, build_entry },          { KEY_SEGMENTS, build_top },
    { KEY_DEVICE_TRACES, build_top },     { KEY_BLOCKS, build_segment },
    { KEY_TOTAL_SIZE, build_segment },    { KEY_STATE, build_block },
    { KEY_FILENAME, build_frame },        { KEY_STAGE, build_annotation },
    { KEY_CONF, build_settings },         { KEY_MAX_SPLIT_SIZE, build_settings },
    { KEY_GC_THRESHOLD, build_settings }, { KEY_REAL_SIZE, build_history },
};

static bool build_record(reader *r, const value *items, uint64_t n, value *out)
{
    fields f;
    const uint64_t n_unknown = gather_fields(r, items, n, &f);
    if (!f.has && n && kind_of(items[0]) == K_STR) { /* divisions have numbers for keys */
        const char *t = snap_str(r->s, (uint32_t)of(items[0]));
        if (*t >= '0' && *t <= '9')
            return build_divisions(r, items, n, out);
    }
    r->s->n_unknown_keys += n_unknown;
    for (size_t i = 0; i < KOILA_COUNT(records); i++)
        if (f.has >> records[i].key & 1)
            return records[i].build(r, &f, out);
    *out = make(n ? K_OTHER : K_EMPTY, 0);
    return true;
}

/* Keys and actions under their own numbers, and the default pool as number 0. */
bool koila__snap_intern_own(reader *r)
{
    uint32_t id;
    for (size_t i = 0; i < N_KEYS; i++)
        if (!koila__snap_intern(r, (const uint8_t *)koila__snap_key_names[i],
                                strlen(koila__snap_key_names[i]), &id))
            return false;
    for (size_t i = 0; i < KOILA_COUNT(action_texts); i++)
        if (!koila__snap_intern(r, (const uint8_t *)action_texts[i], strlen(action_texts[i]), &id))
            return false;
    if (!intern_pool(r, KOILA_POOL_DEFAULT, &id))
        return false;
    return true;
}

/* ---- containers under construction */

value koila__snap_open_new(reader *r, bool is_dict)
{
    if (r->n_open >= r->lim.max_nesting) {
        (void)BAD(r, "nested deeper than %u", r->lim.max_nesting);
        return 0;
    }
    if (!koila__snap_grow32(r, &r->open, &r->open_cap, r->n_open + 1, sizeof(open_one)))
        return 0;
    r->open[r->n_open] = (open_one){ .is_dict = is_dict, .items = r->n_items, .serial = r->serial };
    return make(is_dict ? K_DICT : K_LIST, (uint64_t)r->n_open++ | (r->serial++ << 20));
}
open_one *koila__snap_open_of(reader *r, value v)
{
    uint32_t i = (uint32_t)(of(v) & 0xFFFFF);
    if ((kind_of(v) != K_DICT && kind_of(v) != K_LIST) || i >= r->n_open ||
        r->open[i].serial != of(v) >> 20)
        return NULL;
    return &r->open[i];
}

static const value *items_of(const reader *r, const open_one *o)
{
    return r->items ? r->items + o->items : NULL;
}

static bool is_record(enum kind k) { return k == K_ENTRY || k == K_SEGMENT || k == K_BLOCK; }

/* An element of a list of traces, one per device: a list of entries; an empty list is one too. */
static bool add_trace(reader *r, open_one *o, value v)
{
    if (o->list_kind && o->list_kind != K_TRACES)
        return BAD(r, "a trace inside a list of something else");
    o->list_kind = K_TRACES;
    if (!items_put(r, v))
        return false;
    o->n++;
    return true;
}

/* How a list sees an element: K_OTHER unless lists of its kind mean something. */
static enum kind element_kind(value v)
{
    const enum kind k = kind_of(v);
    switch (k) {
    case K_WIDE:
    case K_BOOL:
        return K_INT;
    case K_INT:
    case K_FRAME:
    case K_HIST:
    case K_NOTE:
    case K_ENTRY:
    case K_SEGMENT:
    case K_BLOCK:
        return k;
    default:
        return K_OTHER;
    }
}

/* Keeps what finish_list will need of an element: the number of the first record, the handles of
 * frames and of up to two integers. */
static bool keep_element(reader *r, open_one *o, enum kind k, value v)
{
    if (is_record(k) || k == K_NOTE) {
        if (o->n == 0)
            o->first = of(v);
        else if (of(v) != o->first + o->n)
            return BAD(r, "broken pickle: the same %s reached twice",
                       strchr(koila__snap_kind_names[k], ' ') + 1);
        return true;
    }
    if (k == K_FRAME)
        return o->n >= MAX_FRAMES || items_put(r, v);
    if (k == K_INT)
        return o->n >= 2 || items_put(r, v);
    if (k == K_HIST && o->n == 0)
        o->first = of(v);
    return true;
}

bool koila__snap_list_add(reader *r, open_one *o, value v)
{
    if (kind_of(v) == K_ENTRY && o->list_kind == K_ENTRY && of(v) == o->first + o->n) {
        o->n++; /* the usual case by itself */
        return true;
    }
    if (kind_of(v) == K_ENTRIES ||
        (kind_of(v) == K_EMPTY && (o->list_kind == K_NONE || o->list_kind == K_TRACES)))
        return add_trace(r, o, v);
    enum kind k = element_kind(v);
    if (o->list_kind == K_TRACES)
        return BAD(r, "a list of traces holds %s", koila__snap_kind_names[kind_of(v)]);
    if (o->list_kind && o->list_kind != k) {
        if (is_record(k) || is_record(o->list_kind))
            return BAD(r, "a list of %s holds %s", koila__snap_kind_names[o->list_kind],
                       koila__snap_kind_names[kind_of(v)]);
        k = K_OTHER;
    }
    if (!keep_element(r, o, k, v))
        return false;
    o->list_kind = (uint8_t)k;
    o->n++;
    return true;
}

static bool range_new(reader *r, enum kind k, uint64_t first, uint64_t n, value *out)
{
    koila_snapshot *s = r->s;
    if (!koila__snap_grow32(r, &s->ranges, &s->ranges_cap, s->n_ranges + 1, sizeof(snap_range)))
        return false;
    s->ranges[s->n_ranges] = (snap_range){ first, n };
    *out = make(k, s->n_ranges++);
    return true;
}

bool koila__snap_pair_of_ints(reader *r, value a, value b, value *out)
{
    koila_pool p;
    bool negative;
    uint32_t id;
    if (!int_bits(r, a, &p.owner, &negative) || !int_bits(r, b, &p.id, &negative)) {
        *out = make(K_OTHER, 0);
        return true;
    }
    if (!intern_pool(r, p, &id))
        return false;
    *out = make(K_POOL, id);
    return true;
}

static bool finish_list(reader *r, open_one *o, value *out)
{
    koila_snapshot *s = r->s;
    const value *items = items_of(r, o);
    uint32_t id;
    if (!o->n) {
        *out = make(K_EMPTY, 0);
        return true;
    }
    switch (o->list_kind) {
    case K_ENTRY:
        r->first_entry = o->first + o->n;
        return range_new(r, K_ENTRIES, o->first, o->n, out);
    case K_SEGMENT:
        return range_new(r, K_SEGMENTS, o->first, o->n, out);
    case K_BLOCK:
        return range_new(r, K_BLOCKS, o->first, o->n, out);
    case K_NOTE:
        *out = make(K_NOTES, 0);
        return true;
    case K_HIST:
        *out = make(K_HIST, o->first);
        return true;
    case K_INT:
        if (o->n == 2)
            return koila__snap_pair_of_ints(r, items[0], items[1], out);
        *out = make(K_OTHER, 0);
        return true;
    case K_FRAME:
        if (!intern_stack(r, items, o->n < MAX_FRAMES ? o->n : MAX_FRAMES, &id))
            return false;
        *out = make(K_STACK, id);
        return true;
    case K_TRACES:
        if (o->n > MAX_DEVICES) {
            for (uint64_t i = 0; i < o->n; i++)
                if (kind_of(items[i]) != K_EMPTY)
                    return BAD(r, "%llu devices, limit %d", (unsigned long long)o->n, MAX_DEVICES);
            *out = make(K_OTHER, 0);
            return true;
        }
        if (!koila__snap_grow32(r, &s->ranges, &s->ranges_cap, s->n_ranges + (uint32_t)o->n,
                                sizeof(snap_range)))
            return false;
        *out = make(K_TRACES, s->n_ranges | o->n << 32);
        for (uint64_t i = 0; i < o->n; i++, s->n_ranges++)
            s->ranges[s->n_ranges] =
                kind_of(items[i]) == K_ENTRIES ? s->ranges[of(items[i])] : (snap_range){ 0, 0 };
        return true;
    default:
        *out = make(K_OTHER, 0);
        return true;
    }
}

/* The outermost dict is no snapshot: say what it holds. */
static bool no_segments(reader *r, const open_one *o)
{
    char names[160] = "";
    for (uint64_t i = 0; i < o->n && i < 6; i++) {
        const value key = r->items[o->items + 2 * i];
        const size_t at = strlen(names);
        if (kind_of(key) == K_STR)
            snprintf(names + at, sizeof names - at, "%s%.40s", at ? ", " : "",
                     snap_str(r->s, (uint32_t)of(key)));
    }
    return BAD(r, "no \"segments\": found keys %s", names[0] ? names : "(none)");
}

/* What an open container holds becomes its record. The outermost dict must be a snapshot. */
static bool build_open(reader *r, open_one *o, value *out)
{
    koila_assert(!o->is_closed && o->items <= r->n_items);
    const bool outermost = o == &r->open[0];
    open_one done = *o;
    if (!done.is_dict)
        return finish_list(r, &done, out);
    if (!build_record(r, items_of(r, &done), done.n, out))
        return false;
    return !outermost || kind_of(*out) == K_TOP || no_segments(r, &done);
}

bool koila__snap_close(reader *r, open_one *o)
{
    value out = 0;
    if (o->is_closed)
        return true;
    if (!build_open(r, o, &out))
        return false;
    o->is_closed = true;
    o->out = out;
    if (o->memo)
        r->memo[o->memo - 1] = out;
    o->memo = 0;
    return true;
}

bool koila__snap_finish_open(reader *r, value *v)
{
    open_one *o = koila__snap_open_of(r, *v);
    if (!o)
        return BAD(r, "broken pickle: a container is used twice");
    if (o != &r->open[r->n_open - 1])
        return BAD(r, "broken pickle: a container is used before another inside it is finished");
    if (!koila__snap_close(r, o))
        return false;
    r->n_items = o->items;
    r->n_open--;
    *v = o->out;
    return true;
}
