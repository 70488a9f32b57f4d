/* cache_config.c — what differs between torch versions, as one table of flags; and
 * PYTORCH_CUDA_ALLOC_CONF, read as torch reads it.
 *
 * A row says what is new from that version on; later rows inherit. `verified` says how we know:
 * "simulated" (recordings of that version's own allocator on a simulated device are replayed
 * without a difference: tools/allocator_matrix.py), "hardware" (so are recordings made on a GPU:
 * tools/record_history.py), "read" (read in that version's source), "told" (known from a change's
 * description).
 *
 * The string: key:value,key:value,...  where a value may be a list [a:b,c:d]. Blanks do not count.
 * A string found in a snapshot was accepted by torch, whose integers are read like C's strtol
 * (30garbage is 30, -1 is no limit); one typed by a user is read strictly.
 */
#include "allocator/cache.h"

#define MIB ((uint64_t)1 << 20)

typedef struct profile {
    uint32_t version; /* 100 * major + minor */
    uint32_t adds, drops;
    const char *verified, *what;
} profile;

static const profile profiles[] = {
    { 200, 0, 0, "read",
      "2.0 to 2.5: max_non_split_rounding fixed at 20 MiB, a fraction of 1.0 also sets a cap" },
    { 206, KOILA_RULE_ROUNDING_SETTABLE, 0, "read", "max_non_split_rounding_mb" },
    { 208, KOILA_RULE_OOM_POOLS_LAST, 0, "told", "use_on_oom pools are a last resort" },
    { 209, KOILA_RULE_NEW_CAP | KOILA_RULE_SKIP_EXPANDABLE, 0, "told",
      "per_process_memory_fraction; no cap at 1.0; expandable blocks skipped" },
    { 210, KOILA_RULE_OOM_POOLS_FIRST | KOILA_RULE_NO_SPLIT_POOLS, KOILA_RULE_OOM_POOLS_LAST,
      "simulated", "use_on_oom before retries; no_split pools" },
    { 211, KOILA_RULE_LARGE_SEGMENT, 0, "hardware", "large_segment_size_mb" },
    { 212, KOILA_RULE_OLDEST_BLOCK | KOILA_RULE_POOL_ID_IN_TRACE, 0, "simulated",
      "ties to the oldest block; pool_id in traces" },
    { 213,
      KOILA_RULE_ROUTING_KEEPS_RETRY | KOILA_RULE_OOM_REJECT | KOILA_RULE_OLDEST_SEGMENT |
          KOILA_RULE_POOL_DEATH_FREES,
      KOILA_RULE_OLDEST_BLOCK, "simulated",
      "release-all stopped by real captures only; throw_on_cudamalloc_oom; ties to the oldest "
      "segment; a MemPool's death frees its memory" },
    { 214, 0, 0, "simulated", "nothing" },
    { 215, 0, 0, "simulated", "nothing" },
};

const char *koila_cache_verified_words(const char *verified)
{
    static const char *const words[][2] = {
        { "simulated",
          "checked against that version's own allocator on a simulated device, never on hardware" },
        { "hardware", "checked against that version's own allocator on a GPU (an H200), its memory "
                      "pools on a simulated device alone" },
        { "read", "read in its source, not yet proved on a recording of that version" },
        { "told", "known from descriptions of its changes, not yet proved on a recording of that "
                  "version" },
        { "later", "those of the newest version that koila knows" },
    };
    for (size_t i = 0; i < KOILA_COUNT(words); i++)
        if (!strcmp(verified, words[i][0]))
            return words[i][1];
    return "of unknown origin";
}

const char *koila_cache_profile(size_t i, uint32_t *version, const char **verified)
{
    if (i >= KOILA_COUNT(profiles))
        return NULL;
    if (version)
        *version = profiles[i].version;
    if (verified)
        *verified = profiles[i].verified;
    return profiles[i].what;
}

static bool read_version(const char *s, uint32_t *out)
{
    uint32_t part[2] = { 0, 0 };
    for (int i = 0; i < 2; i++) {
        if (*s < '0' || *s > '9')
            return false;
        for (; *s >= '0' && *s <= '9'; s++) {
            part[i] = part[i] * 10 + (uint32_t)(*s - '0');
            if (part[i] > 99)
                return false;
        }
        if (i == 0 && *s++ != '.')
            return false;
    }
    *out = part[0] * 100 + part[1];
    return true;
}

koila_status koila_cache_config_init(koila_cache_config *c, const char *torch_version)
{
    uint32_t version = profiles[KOILA_COUNT(profiles) - 1].version;
    if (torch_version && !read_version(torch_version, &version))
        return KOILA_BAD_ARGUMENT;
    if (version < profiles[0].version)
        return KOILA_UNSUPPORTED;
    memset(c, 0, sizeof *c);
    c->struct_size = (uint32_t)sizeof *c;
    for (size_t i = 0; i < KOILA_COUNT(profiles) && profiles[i].version <= version; i++) {
        c->rules = (c->rules & ~profiles[i].drops) | profiles[i].adds;
        c->verified = profiles[i].verified;
    }
    if (version > profiles[KOILA_COUNT(profiles) - 1].version)
        c->verified = "later";
    koila_assert(c->verified); /* the first profile is at or below this version */
    c->torch_version = version;
    c->first_address = 0x700000000000;
    c->max_split_bytes = KOILA_NO_LIMIT;
    c->large_segment_bytes = c->max_non_split_rounding_bytes = 20 * MIB;
    return KOILA_OK;
}

koila_status koila_cache_config_fraction(koila_cache_config *c, double fraction,
                                         uint64_t total_global, uint64_t info_total)
{
    if (!(fraction > 0.0 && fraction <= 1.0))
        return KOILA_BAD_ARGUMENT;
    if (c->rules & KOILA_RULE_NEW_CAP)
        c->cap_bytes = fraction < 1.0 ? (uint64_t)(fraction * (double)total_global) : 0;
    else
        c->cap_bytes = (uint64_t)(fraction * (double)info_total);
    return KOILA_OK;
}

/* ---- the configuration string */

typedef struct scan {
    const char *p;
    int strict;
    koila_cache_config *c;
    koila_error *e;
    const char *start;
} scan;

#define TOKEN_MAX 64

static koila_status bad(scan *s, const char *key, const char *value, const char *range)
{
    return koila__fail(s->e, KOILA_BAD_INPUT, (uint64_t)(s->p - s->start),
                       "%s: '%.40s' is not valid, expected %s", key, value, range);
}

static bool is_blank(char ch) { return ch == ' ' || (ch >= '\t' && ch <= '\r'); }
static char peek(scan *s)
{
    while (is_blank(*s->p))
        s->p++;
    return *s->p == '=' && s->strict ? ':' : *s->p;
}
static bool take(scan *s, char ch)
{
    if (peek(s) != ch)
        return false;
    s->p++;
    return true;
}

/* letters up to one of , : [ ] or the end; blanks left out. false: too long */
static bool token(scan *s, char out[TOKEN_MAX])
{
    size_t n = 0;
    for (char ch; (ch = peek(s)) && ch != ',' && ch != ':' && ch != '[' && ch != ']'; s->p++) {
        if (n + 1 >= TOKEN_MAX)
            return false;
        out[n++] = *s->p;
    }
    out[n] = 0;
    return true;
}

/* -1 (any negative) is KOILA_NO_LIMIT where torch reads it. */
static bool read_count(const scan *s, const char *t, uint64_t *out)
{
    bool negative = *t == '-' && !s->strict;
    if (negative || (*t == '+' && !s->strict))
        t++;
    if (*t < '0' || *t > '9')
        return false;
    uint64_t n = 0;
    for (; *t >= '0' && *t <= '9'; t++)
        if (!koila__mul(n, 10, &n) || !koila__add(n, (uint64_t)(*t - '0'), &n))
            return false;
    if (*t && s->strict)
        return false;
    *out = negative ? KOILA_NO_LIMIT : n;
    return true;
}

static bool read_real(const scan *s, const char *t, double *out)
{
    /* Up to 15 digits over a power of ten up to 22 is correctly rounded, and no locale is asked. */
    uint64_t digits = 0;
    int n_digits = 0, scale = 0;
    bool dot = false, any = false;
    for (; (*t >= '0' && *t <= '9') || (*t == '.' && !dot); t++) {
        if (*t == '.') {
            dot = true;
            continue;
        }
        any = true;
        if (n_digits >= 15) {
            if (s->strict)
                return false;
            scale -= !dot;
            continue;
        }
        digits = digits * 10 + (uint64_t)(*t - '0');
        n_digits += digits != 0;
        scale += dot;
    }
    if (!any || (*t && s->strict) || scale < 0 || scale > 22)
        return false;
    double ten = 1.0;
    for (; scale > 0; scale--)
        ten *= 10.0;
    *out = (double)digits / ten;
    return true;
}

static bool is_power_of_two(uint64_t n) { return n && !(n & (n - 1)); }

static koila_status set_mib(scan *s, const char *key, const char *value, uint64_t *out)
{
    uint64_t n;
    if (!read_count(s, value, &n))
        return bad(s, key, value, "a whole number of MiB");
    if (!koila__mul(n, MIB, out))
        *out = KOILA_NO_LIMIT;
    return KOILA_OK;
}

static koila_status set_flag(scan *s, const char *key, const char *value, uint8_t *out)
{
    if (strcmp(value, "True") && strcmp(value, "False"))
        return bad(s, key, value, "True or False");
    *out = value[0] == 'T';
    return KOILA_OK;
}

static koila_status set_max_split(scan *s, const char *k, const char *v)
{
    return set_mib(s, k, v, &s->c->max_split_bytes);
}
static koila_status set_rounding(scan *s, const char *k, const char *v)
{
    s->c->rounding_set = 1;
    return set_mib(s, k, v, &s->c->max_non_split_rounding_bytes);
}
static koila_status set_large(scan *s, const char *k, const char *v)
{
    return set_mib(s, k, v, &s->c->large_segment_bytes);
}
static koila_status set_gc(scan *s, const char *k, const char *v)
{
    double x;
    if (!read_real(s, v, &x) || !(x > 0.0 && x < 1.0))
        return bad(s, k, v, "a number strictly between 0 and 1");
    s->c->gc_threshold = x;
    return KOILA_OK;
}
static koila_status set_fraction(scan *s, const char *k, const char *v)
{
    double x;
    if (!read_real(s, v, &x) || !(x >= 0.0 && x <= 1.0))
        return bad(s, k, v, "a number from 0 to 1");
    s->c->memory_fraction = x;
    return KOILA_OK;
}
static koila_status set_expandable(scan *s, const char *k, const char *v)
{
    return set_flag(s, k, v, &s->c->expandable);
}
static koila_status set_release_lock(scan *s, const char *k, const char *v)
{
    return set_flag(s, k, v, &s->c->release_lock);
}
static koila_status set_reject(scan *s, const char *k, const char *v)
{
    return set_flag(s, k, v, &s->c->oom_reject);
}
static koila_status set_ignored_flag(scan *s, const char *k, const char *v)
{
    uint8_t unused;
    return set_flag(s, k, v, &unused);
}
static koila_status set_ignored_count(scan *s, const char *k, const char *v)
{
    uint64_t unused;
    return read_count(s, v, &unused) ? KOILA_OK : bad(s, k, v, "a whole number");
}
static koila_status set_backend(scan *s, const char *k, const char *v)
{
    if (!strcmp(v, "native"))
        return KOILA_OK;
    if (!strcmp(v, "cudaMallocAsync") || !strcmp(v, "hipMallocAsync"))
        return koila__fail(
            s->e, KOILA_UNSUPPORTED, 0,
            "backend:%s is the driver's own allocator: only 'native' can be simulated", v);
    return bad(s, k, v, "native");
}
static koila_status refuse_reserve(scan *s, const char *k, const char *v)
{
    (void)v;
    return koila__fail(s->e, KOILA_UNSUPPORTED, 0, "%s (torch 2.14) is not simulated", k);
}

static koila_status division(scan *s, const char *key, const char *t, uint32_t *out)
{
    uint64_t n;
    if (!read_count(s, t, &n) || n > 1u << 30 || (n && !is_power_of_two(n)) || (s->strict && !n))
        return bad(s, key, t, "a power of two, 1 to switch rounding off");
    *out = (uint32_t)n;
    return KOILA_OK;
}

/* One number for all sizes, or [mib:number,...,>:number]. */
static koila_status set_divisions(scan *s, const char *key)
{
    uint32_t *of = s->c->divisions;
    uint32_t n = 0;
    char name[TOKEN_MAX], value[TOKEN_MAX];
    if (!take(s, '[')) {
        if (!token(s, value))
            return bad(s, key, s->p, "a number or a list");
        KOILA_TRY(division(s, key, value, &n));
        /* 0 only in a list */
        if (!n)
            return bad(s, key, value, "a power of two, 1 to switch rounding off");
        for (int i = 0; i < 16; i++)
            of[i] = n;
        return KOILA_OK;
    }
    uint32_t last = 0;
    bool first = true;
    memset(of, 0, sizeof s->c->divisions);
    do {
        if (!token(s, name) || !take(s, ':') || !token(s, value))
            return bad(s, key, s->p, "[MiB:divisions,...,>:divisions]");
        KOILA_TRY(division(s, key, value, &n));
        uint32_t from, to;
        if (!strcmp(name, ">")) {
            from = last + 1;
            to = 15;
        } else {
            uint64_t mib;
            if (!read_count(s, name, &mib) || !is_power_of_two(mib) || (s->strict && mib > 32768))
                return bad(s, key, name, "a power of two from 1 to 32768, or >");
            uint32_t log = 0;
            while (mib >>= 1)
                log++;
            to = log > 15 ? 15 : log;
            from = first ? 0 : to;
            last = to;
        }
        koila_assert(to < KOILA_COUNT(s->c->divisions));
        for (uint32_t i = from; i <= to; i++)
            of[i] = n;
        first = false;
    } while (take(s, ','));
    return take(s, ']') ? KOILA_OK : bad(s, key, s->p, "a closing ]");
}

/* key, what it does */
static const struct {
    const char *key;
    koila_status (*set)(scan *s, const char *key, const char *value);
} keys[] = {
    { "backend", set_backend },
    { "max_split_size_mb", set_max_split },
    { "max_non_split_rounding_mb", set_rounding },
    { "large_segment_size_mb", set_large },
    { "garbage_collection_threshold", set_gc },
    { "roundup_power2_divisions", NULL }, /* a list, see set_divisions */
    { "expandable_segments", set_expandable },
    { "per_process_memory_fraction", set_fraction },
    { "throw_on_cudamalloc_oom", set_reject },
    { "release_lock_on_cudamalloc", set_release_lock },
    { "release_lock_on_hipmalloc", set_release_lock },
    { "expandable_segments_reserve", refuse_reserve },
    /* host memory and graphs: nothing on the device changes */
    { "graph_capture_record_stream_reuse", set_ignored_flag },
    { "pinned_use_cuda_host_register", set_ignored_flag },
    { "pinned_use_hip_host_register", set_ignored_flag },
    { "pinned_use_background_threads", set_ignored_flag },
    { "pinned_free_catch_all", set_ignored_flag },
    { "pinned_num_register_threads", set_ignored_count },
    { "pinned_reserve_segment_size_mb", set_ignored_count },
    { "pinned_max_round_threshold_mb", set_ignored_count },
    { "pinned_max_cached_size_mb", set_ignored_count },
};

/* A key newer than this table, in a snapshot: its value is passed over. */
static void skip_value(scan *s)
{
    for (int depth = 0; peek(s) && (depth || peek(s) != ','); s->p++) {
        if (*s->p == '[')
            depth++;
        else if (*s->p == ']' && depth)
            depth--;
    }
}

/* The value of `key`, whose colon has been taken. */
static koila_status set_key(scan *s, const char *key)
{
    char value[TOKEN_MAX];
    for (size_t i = 0; i < KOILA_COUNT(keys); i++) {
        if (strcmp(key, keys[i].key))
            continue;
        if (!keys[i].set)
            return set_divisions(s, key);
        if (!token(s, value))
            return bad(s, key, s->p, "a short value");
        return keys[i].set(s, key, value);
    }
    if (!strncmp(key, "expandable_segments_reserve", 27))
        return refuse_reserve(s, key, "");
    if (s->strict)
        return koila__fail(s->e, KOILA_BAD_INPUT, (uint64_t)(s->p - s->start),
                           "%s: no such setting", key);
    skip_value(s);
    return KOILA_OK;
}

/* A setting that this torch does not have. */
static koila_status too_new(const koila_cache_config *c, const char *key, const char *first_torch,
                            koila_error *e)
{
    return koila__fail(e, KOILA_BAD_INPUT, 0, "%s: not known to torch %u.%u, from %s on", key,
                       c->torch_version / 100, c->torch_version % 100, first_torch);
}
/* The checks that torch makes after it has read all settings. */
static koila_status check_together(koila_cache_config *c, bool strict, koila_error *e)
{
    const unsigned large_mib = (unsigned)(c->large_segment_bytes / MIB);
    const bool rounding_settable = c->rules & KOILA_RULE_ROUNDING_SETTABLE;
    if (strict && c->large_segment_bytes != 20 * MIB && !(c->rules & KOILA_RULE_LARGE_SEGMENT))
        return too_new(c, "large_segment_size_mb", "2.11", e);
    if (strict && c->rounding_set && !rounding_settable)
        return too_new(c, "max_non_split_rounding_mb", "2.6", e);
    if (strict && c->oom_reject && !(c->rules & KOILA_RULE_OOM_REJECT))
        return too_new(c, "throw_on_cudamalloc_oom", "2.13", e);
    if (c->large_segment_bytes <= 10 * MIB || c->large_segment_bytes > (uint64_t)1 << 50)
        return koila__fail(e, KOILA_BAD_INPUT, 0, "large_segment_size_mb: must be more than 10");
    if (!c->rounding_set || !rounding_settable)
        c->max_non_split_rounding_bytes = c->large_segment_bytes;
    if (c->max_split_bytes < c->large_segment_bytes)
        return koila__fail(e, KOILA_BAD_INPUT, 0,
                           "max_split_size_mb: must be %u or more (the large segment size)",
                           large_mib);
    /* torch 2.13 takes it */
    if (strict && c->max_non_split_rounding_bytes < c->large_segment_bytes)
        return koila__fail(e, KOILA_BAD_INPUT, 0,
                           "max_non_split_rounding_mb: must be %u or more (the large segment size)",
                           large_mib);
    return KOILA_OK;
}

koila_status koila_cache_config_parse(koila_cache_config *c, const char *conf, int strict,
                                      koila_error *e)
{
    if (!conf)
        return KOILA_OK;
    koila_cache_config fresh = *c; /* assigned last: a failed call changes nothing */
    scan s = { conf, strict, &fresh, e, conf };
    char key[TOKEN_MAX];
    while (peek(&s)) {
        if (take(&s, ','))
            continue;
        if (!token(&s, key) || !*key || !take(&s, ':'))
            return bad(&s, "settings", s.p, "key:value,key:value");
        KOILA_TRY(set_key(&s, key));
        if (peek(&s) && !take(&s, ','))
            return bad(&s, key, s.p, "',' or the end after the value");
    }
    KOILA_TRY(check_together(&fresh, strict, e));
    *c = fresh;
    return KOILA_OK;
}
