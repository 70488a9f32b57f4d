/* device.c — device profiles: the numbers that a prediction needs of a GPU, each with its origin
 * and its possible error.
 *
 * The built-in table holds vendors' counts (SMs, capability, memory) and estimates (what is usable,
 * the context); we measured none of them, and the output says so. koila.measure_device() writes a
 * measured profile.
 */
#include "base/alloc.h"
#include "base/base.h"
#include "koila/device.h"

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

typedef struct field {
    uint64_t value, spread;
    char how[12], date[16];
    bool set;
} field;

struct koila_device {
    koila_allocator mem;
    char name[64];
    field of[KOILA_N_DEVICE_FIELDS];
};

static const char *const field_keys[] = {
#define KEY(id, key, text) key,
    KOILA_DEVICE_FIELD_MAP(KEY)
#undef KEY
};

const char *koila_device_field_key(koila_device_field f)
{
    return (unsigned)f < KOILA_N_DEVICE_FIELDS ? field_keys[f] : "?";
}

/* name, SMs, capability, GiB on the card */
static const struct {
    const char *name;
    uint16_t sms, capability, gib;
} cards[] = {
    { "v100-16gb", 80, 70, 16 },     { "v100-32gb", 80, 70, 32 },
    { "t4-16gb", 40, 75, 16 },       { "rtx2080ti-11gb", 68, 75, 11 },
    { "a100-40gb", 108, 80, 40 },    { "a100-80gb", 108, 80, 80 },
    { "a10-24gb", 72, 86, 24 },      { "a40-48gb", 84, 86, 48 },
    { "rtx3060-12gb", 28, 86, 12 },  { "rtx3090-24gb", 82, 86, 24 },
    { "l4-24gb", 58, 89, 24 },       { "l40s-48gb", 142, 89, 48 },
    { "rtx4070-12gb", 46, 89, 12 },  { "rtx4090-24gb", 128, 89, 24 },
    { "h100-80gb", 132, 90, 80 },    { "h200-141gb", 132, 90, 141 },
    { "b200-180gb", 148, 100, 180 }, { "rtx5090-32gb", 170, 120, 32 },
};

const char *koila_device_builtin_name(size_t i)
{
    return i < KOILA_COUNT(cards) ? cards[i].name : NULL;
}

static void set(koila_device *d, koila_device_field f, uint64_t value, uint64_t spread,
                const char *how, const char *date)
{
    field *x = &d->of[f];
    x->value = value;
    x->spread = spread;
    snprintf(x->how, sizeof x->how, "%s", how);
    snprintf(x->date, sizeof x->date, "%s", date);
    x->set = true;
}

/* Fills in estimates of fields that a profile lacks. */
static void fill_in(koila_device *d)
{
    const uint64_t capability = d->of[KOILA_DEVICE_CAPABILITY].value;
    if (!d->of[KOILA_DEVICE_INFO_TOTAL_BYTES].set)
        set(d, KOILA_DEVICE_INFO_TOTAL_BYTES, d->of[KOILA_DEVICE_TOTAL_BYTES].value,
            d->of[KOILA_DEVICE_TOTAL_BYTES].spread, "estimated", "");
    /* 32 MiB; 4096 KiB x 2 + 16 KiB x 8 */
    if (!d->of[KOILA_DEVICE_CUBLAS_BYTES].set)
        set(d, KOILA_DEVICE_CUBLAS_BYTES, capability >= 90 ? 33554432 : 8519680, 0, "vendor", "");
    if (!d->of[KOILA_DEVICE_CUDNN].set)
        set(d, KOILA_DEVICE_CUDNN, 0, 0, "estimated", "");
    if (!d->of[KOILA_DEVICE_CONV_BYTES].set)
        set(d, KOILA_DEVICE_CONV_BYTES, 64 * MIB, 64 * MIB, "estimated", "");
}

bool koila_cublas_workspace(const char *config, uint64_t *bytes)
{
    uint64_t sum = 0;
    bool any = false;
    for (const char *p = config; *p;) {
        uint64_t n[2] = { 0, 0 };
        const char *q = p;
        int k = 0;
        for (; k < 2 && *q == ':' && q[1] >= '0' && q[1] <= '9'; k++)
            for (q++; *q >= '0' && *q <= '9'; q++)
                n[k] = n[k] < 1000000 ? n[k] * 10 + (uint64_t)(*q - '0') : n[k];
        if (k < 2) {
            p++;
            continue;
        }
        sum += n[0] * n[1] * 1024;
        any = true;
        p = q;
    }
    if (any)
        *bytes = sum;
    return any;
}

static koila_status device_new(const koila_allocator *mem, koila_device **out, koila_error *e)
{
    koila_allocator m = koila__allocator(mem);
    koila_device *d = koila__realloc(&m, NULL, 0, sizeof *d);
    if (!d)
        return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    memset(d, 0, sizeof *d);
    d->mem = m;
    *out = d;
    return KOILA_OK;
}

void koila_device_free(koila_device *d)
{
    if (!d)
        return;
    koila_allocator m = d->mem;
    koila__release(&m, d, sizeof *d);
}

const char *koila_device_name(const koila_device *d) { return d->name; }
koila_device_value koila_device_get(const koila_device *d, koila_device_field f)
{
    if ((unsigned)f >= KOILA_N_DEVICE_FIELDS)
        return (koila_device_value){ 0, 0, "", "" };
    return (koila_device_value){ d->of[f].value, d->of[f].spread, d->of[f].how, d->of[f].date };
}

static char lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c + 32) : c; }
static bool same_name(const char *a, const char *b)
{
    while (*a && lower(*a) == lower(*b)) {
        a++;
        b++;
    }
    return !*a && !*b;
}

/* Number of edits between two short names. */
static unsigned distance(const char *a, const char *b)
{
    unsigned row[65];
    size_t n = strlen(b);
    if (n > 64)
        n = 64;
    for (unsigned i = 0; i <= n; i++)
        row[i] = i;
    for (unsigned i = 1; *a && i < 64; a++, i++) {
        unsigned diagonal = row[0];
        row[0] = i;
        for (size_t k = 1; k <= n; k++) {
            unsigned cost = diagonal + (lower(*a) != lower(b[k - 1]));
            diagonal = row[k];
            if (row[k] + 1 < cost)
                cost = row[k] + 1;
            if (row[k - 1] + 1 < cost)
                cost = row[k - 1] + 1;
            row[k] = cost;
        }
    }
    return row[n];
}

koila_status koila_device_builtin(const char *name, const koila_allocator *mem, koila_device **out,
                                  koila_error *e)
{
    size_t best[3] = { 0, 0, 0 };
    unsigned worst[3] = { UINT32_MAX, UINT32_MAX, UINT32_MAX };
    for (size_t i = 0; i < KOILA_COUNT(cards); i++) {
        if (!same_name(name, cards[i].name)) {
            unsigned far = distance(name, cards[i].name);
            for (int k = 0; k < 3; k++) {
                if (far >= worst[k])
                    continue;
                for (int j = 2; j > k; j--) {
                    worst[j] = worst[j - 1];
                    best[j] = best[j - 1];
                }
                worst[k] = far;
                best[k] = i;
                break;
            }
            continue;
        }
        koila_device *d = NULL;
        KOILA_TRY(device_new(mem, &d, e));
        snprintf(d->name, sizeof d->name, "%s", cards[i].name);
        set(d, KOILA_DEVICE_SM_COUNT, cards[i].sms, 0, "vendor", "");
        set(d, KOILA_DEVICE_CAPABILITY, cards[i].capability, 0, "vendor", "");
        /* drivers and ECC keep about 1.5 % of what is on the card; some cards have a little more
         * than they say */
        set(d, KOILA_DEVICE_TOTAL_BYTES, cards[i].gib * GIB / 1000 * 985,
            cards[i].gib * GIB / 1000 * 15, "estimated", "");
        set(d, KOILA_DEVICE_CONTEXT_BYTES, (cards[i].capability >= 90 ? 550 : 420) * MIB, 150 * MIB,
            "estimated", "");
        fill_in(d);
        *out = d;
        return KOILA_OK;
    }
    return koila__fail(e, KOILA_BAD_ARGUMENT, 0,
                       "no GPU '%.40s' is built in; nearest: %s, %s, %s (or name a profile file)",
                       name, cards[best[0]].name, cards[best[1]].name, cards[best[2]].name);
}

/* ---- the JSON of a profile: objects, strings, whole numbers; nothing else is needed */

typedef struct json {
    const char *p, *end, *start;
    koila_error *e;
} json;

static koila_status bad(const json *j, const char *what, const char *name)
{
    return koila__fail(j->e, KOILA_BAD_INPUT, (uint64_t)(j->p - j->start),
                       "device profile: %s%s%.40s", what, *name ? " " : "", name);
}
static char peek(json *j)
{
    while (j->p < j->end && (*j->p == ' ' || *j->p == '\n' || *j->p == '\t' || *j->p == '\r'))
        j->p++;
    return j->p < j->end ? *j->p : 0;
}
static bool take(json *j, char c) { return peek(j) == c ? j->p++, true : false; }

static koila_status take_string(json *j, char *out, size_t room)
{
    size_t n = 0;
    if (!take(j, '"'))
        return bad(j, "a string was expected", "");
    for (; j->p < j->end && *j->p != '"'; j->p++) {
        if (*j->p == '\\' || (unsigned char)*j->p < 0x20)
            return bad(j, "escapes are not read", "");
        if (n + 1 >= room)
            return bad(j, "a string is too long", "");
        out[n++] = *j->p;
    }
    if (j->p == j->end)
        return bad(j, "ends early", "");
    j->p++;
    out[n] = 0;
    return KOILA_OK;
}

static koila_status take_number(json *j, const char *name, uint64_t *out)
{
    uint64_t n = 0;
    char c = peek(j);
    if (c < '0' || c > '9')
        return bad(j, "a whole number was expected for", name);
    for (; j->p < j->end && *j->p >= '0' && *j->p <= '9'; j->p++)
        if (!koila__mul(n, 10, &n) || !koila__add(n, (uint64_t)(*j->p - '0'), &n))
            return bad(j, "number out of range for", name);
    if (j->p < j->end && (*j->p == '.' || *j->p == 'e' || *j->p == 'E'))
        return bad(j, "a whole number was expected for", name);
    if (n >= (uint64_t)1 << 60)
        return bad(j, "number out of range for", name);
    *out = n;
    return KOILA_OK;
}

static koila_status take_field(json *j, koila_device *d, const char *name)
{
    char key[24], how[16] = "", date[16] = "";
    uint64_t value = 0, spread = 0;
    bool has_value = false;
    size_t f = 0;
    while (f < KOILA_N_DEVICE_FIELDS && strcmp(field_keys[f], name))
        f++;
    if (f == KOILA_N_DEVICE_FIELDS)
        return bad(j, "no such field:", name);
    if (d->of[f].set)
        return bad(j, "said twice:", name);
    if (!take(j, '{'))
        return bad(j, "an object was expected for", name);
    do {
        KOILA_TRY(take_string(j, key, sizeof key));
        if (!take(j, ':'))
            return bad(j, "':' was expected in", name);
        if (!strcmp(key, "value")) {
            KOILA_TRY(take_number(j, name, &value));
            has_value = true;
        } else if (!strcmp(key, "spread"))
            KOILA_TRY(take_number(j, name, &spread));
        else if (!strcmp(key, "how"))
            KOILA_TRY(take_string(j, how, sizeof how));
        else if (!strcmp(key, "date"))
            KOILA_TRY(take_string(j, date, sizeof date));
        else
            return bad(j, "value, spread, how or date was expected in", name);
    } while (take(j, ','));
    if (!take(j, '}'))
        return bad(j, "'}' was expected after", name);
    if (!has_value)
        return bad(j, "no value for", name);
    if (strcmp(how, "measured") && strcmp(how, "vendor") && strcmp(how, "estimated"))
        return bad(j, "how must be measured, vendor or estimated in", name);
    if (spread > value)
        spread = value;
    set(d, (koila_device_field)f, value, spread, how, date);
    return KOILA_OK;
}

enum { KEY_MAX = 40 };

static koila_status take_key(json *j, char key[KEY_MAX])
{
    KOILA_TRY(take_string(j, key, KEY_MAX));
    return take(j, ':') ? KOILA_OK : bad(j, "':' was expected after", key);
}

static koila_status take_fields(json *j, koila_device *d)
{
    char key[KEY_MAX];
    if (!take(j, '{'))
        return bad(j, "an object was expected for fields", "");
    do {
        KOILA_TRY(take_key(j, key));
        KOILA_TRY(take_field(j, d, key));
    } while (take(j, ','));
    return take(j, '}') ? KOILA_OK : bad(j, "'}' was expected after the fields", "");
}

/* Checks required fields and ranges. */
static koila_status check_profile(json *j, const koila_device *d)
{
    static const koila_device_field needed[] = { KOILA_DEVICE_SM_COUNT, KOILA_DEVICE_CAPABILITY,
                                                 KOILA_DEVICE_TOTAL_BYTES,
                                                 KOILA_DEVICE_CONTEXT_BYTES };
    for (size_t i = 0; i < KOILA_COUNT(needed); i++)
        if (!d->of[needed[i]].set)
            return bad(j, "missing:", field_keys[needed[i]]);
    const uint64_t n_sms = d->of[KOILA_DEVICE_SM_COUNT].value;
    const uint64_t capability = d->of[KOILA_DEVICE_CAPABILITY].value;
    const uint64_t n_bytes = d->of[KOILA_DEVICE_TOTAL_BYTES].value;
    if (n_sms == 0 || n_sms > 100000)
        return bad(j, "out of range:", "sm_count");
    if (capability < 10 || capability > 10000)
        return bad(j, "out of range:", "compute_capability");
    if (n_bytes < 64 * MIB || n_bytes > (uint64_t)1 << 50)
        return bad(j, "out of range:", "total_bytes");
    return KOILA_OK;
}

static koila_status take_profile(json *j, koila_device *d)
{
    char key[KEY_MAX];
    uint64_t format = 0;
    if (!take(j, '{'))
        return bad(j, "not a profile", "");
    do {
        KOILA_TRY(take_key(j, key));
        if (!strcmp(key, "koila_device"))
            KOILA_TRY(take_number(j, key, &format));
        else if (!strcmp(key, "name"))
            KOILA_TRY(take_string(j, d->name, sizeof d->name));
        else if (!strcmp(key, "fields")) {
            KOILA_TRY(take_fields(j, d));
        } else {
            char versions[64]; /* driver, cuda, cudnn, torch: for people */
            KOILA_TRY(take_string(j, versions, sizeof versions));
        }
    } while (take(j, ','));
    if (!take(j, '}') || peek(j))
        return bad(j, "text after the end", "");
    if (format != 1)
        return bad(j, "\"koila_device\": 1 was expected", "");
    KOILA_TRY(check_profile(j, d));
    if (!d->name[0])
        snprintf(d->name, sizeof d->name, "unnamed");
    return KOILA_OK;
}

koila_status koila_device_open(const char *text, size_t n, const koila_allocator *mem,
                               koila_device **out, koila_error *e)
{
    json j = { text, text + n, text, e };
    koila_device *d = NULL;
    KOILA_TRY(device_new(mem, &d, e));
    koila_status status = take_profile(&j, d);
    if (status) {
        koila_device_free(d);
        return status;
    }
    fill_in(d);
    *out = d;
    return KOILA_OK;
}
