/* limits.c — see limits.h.
 *
 *   limit = resident now + what a control group (or the machine) leaves, or the user's budget
 *   base  = resident - torch's bytes, when nothing was retained      # Python, libraries, buffers
 *   torch may have  limit - margin - base - extra
 *
 * What the C library retains of freed blocks is no part of it: the guard gives it back when it is
 * needed. `base` is measured: exactly, after giving back, at the end of a step that came near the
 * limit and before the first plan that has to cut. In between the least that was seen counts; more
 * may be retained, and if it is not, the guard finds out and the step learns it.
 *
 * Asking takes 0.1 to 0.2 ms. A step that needs a small part of what was free takes the answer of a
 * moment ago: koila__resident_room_lately().
 *
 * extra: before the first step that came near a limit, what libraries are known to take at first
 * use. After a refusal, the bytes by which the plan was too optimistic; forgotten when several
 * steps went well.
 */
#include "ground/limits.h"
#include "ground/clock.h"

#include "memory/freemem.h"

/* clang-format off: one number a line */
enum {
    FIRST_USE = 24 << 20,   /* bytes: kernels made at first use, buffers of products, measured */
    LEAST_MARGIN = 8 << 20, /* bytes: what an operator may take beside torch's allocator */
    MARGIN_SHARE = 64,      /* and one part in so many of the limit */
    WELL_STEPS = 4,         /* after so many without a refusal, what was learned of one ... */
    FORGET_SHARE = 4,       /* ... is divided by this */
    SHARE_OF_FREE_PERCENT = 90, /* of the machine's free memory; the rest is for other programs */
    ANSWER_LASTS = 100,         /* milliseconds: koila__resident_room_lately() */
    FOR_RETAINED = 1 << 30,     /* bytes: 16 times what koila__resident_retain() is about */
};
/* clang-format on */

koila__resident koila__guard;

static koila__freemem_files files;
static char root[256]; /* where /proc and /sys are looked for; "" but in tests */

static struct {
    uint64_t base;
    bool is_known, is_exact, with_files;
    bool was_near; /* a step came near a limit and ended: first uses are over */
    uint64_t learned;
    uint32_t n_well;
} seen;

/* What the system said last. */
static struct {
    koila__resident_room room;
    uint64_t held, budget; /* it was asked with */
    bool all, is_known;
    int64_t when;     /* milliseconds */
    uint64_t n_asked; /* times, in all */
} answer;

static uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

static koila__freemem_files *held_files(void)
{
    if (!files.pid)
        koila__freemem_open(&files, root);
    return &files;
}

static uint64_t share_of_free(uint64_t free)
{
    return free == UINT64_MAX ? free : free / 100 * SHARE_OF_FREE_PERCENT;
}

/* ---- what is held beside torch's bytes */

static void base_is(uint64_t base, bool is_exact, bool with_files)
{
    seen.base = base;
    seen.is_exact = is_exact;
    seen.with_files = with_files;
    seen.is_known = true;
    answer.is_known = false;
}

/* Without giving anything back: the least seen so far. */
static void look_at_base(uint64_t resident, uint64_t held, bool with_files)
{
    const uint64_t beside = minus(resident, held);
    if (!seen.is_known || seen.with_files != with_files)
        base_is(beside, false, with_files);
    else if (beside < seen.base)
        base_is(beside, seen.is_exact, with_files);
}

static void settle(uint64_t held, bool with_files)
{
    koila__resident_trim();
    base_is(minus(koila__resident_now(&koila__guard, with_files), held), true, with_files);
}

bool koila__resident_settle(uint64_t held)
{
    if (!seen.is_known || seen.is_exact)
        return false;
    settle(held, seen.with_files);
    return true;
}

/* ---- the room */

static koila__resident_room ask(uint64_t held, uint64_t budget, bool all)
{
    koila__resident_room room = { .limit = UINT64_MAX, .mapped = UINT64_MAX };
    koila__freemem f;
    uint64_t growth;
    if (all) {
        koila__freemem_look(held_files(), &f);
        growth = least_of(f.bytes[KOILA__FREEMEM_CGROUP],
                          share_of_free(f.bytes[KOILA__FREEMEM_AVAILABLE]));
        room.mapped = share_of_free(
            least_of(f.bytes[KOILA__FREEMEM_RLIMIT_DATA], f.bytes[KOILA__FREEMEM_RLIMIT_AS]));
    } else
        growth = koila__freemem_in_groups(held_files());
    if (growth == UINT64_MAX && budget == UINT64_MAX)
        return room;
    uint64_t resident = koila__resident_now(&koila__guard, false);
    if (budget != UINT64_MAX) {
        const uint64_t with_files = koila__resident_now(&koila__guard, true);
        if (minus(budget, with_files) < growth) {
            growth = minus(budget, with_files);
            room.with_files = true;
            resident = with_files;
        }
    }
    if (!resident)
        return room;
    look_at_base(resident, held, room.with_files);
    const uint64_t limit = resident + growth;
    room.limit = minus(limit, LEAST_MARGIN + limit / MARGIN_SHARE);
    room.base = seen.base;
    room.extra = seen.learned + (seen.was_near ? 0 : FIRST_USE);
    return room;
}

koila__resident_room koila__resident_room_for(uint64_t held, uint64_t budget, bool all)
{
    const koila__resident_room room = ask(held, budget, all);
    answer.room = room;
    answer.held = held;
    answer.budget = budget;
    answer.all = all;
    answer.when = koila__milliseconds_now();
    answer.n_asked++;
    answer.is_known = true;
    return room;
}

uint64_t koila__resident_answer(void) { return answer.n_asked; }

KOILA__HOT int64_t koila__resident_answer_age(uint64_t number)
{
    const bool counts = answer.is_known && number == answer.n_asked;
    return counts ? koila__milliseconds_now() - answer.when : INT64_MAX;
}

bool koila__resident_room_lately(uint64_t held, uint64_t budget, bool all,
                                 koila__resident_room *out)
{
    if (answer.budget != budget || answer.all != all ||
        koila__resident_answer_age(answer.n_asked) > ANSWER_LASTS)
        return false;
    *out = answer.room;
    if (out->mapped != UINT64_MAX) /* it is beyond what was held then */
        out->mapped = minus(out->mapped + answer.held, held);
    return true;
}

/* ---- a step */

static koila__resident_room current; /* of the step that runs */

void koila__resident_prepare(const koila__resident_room *room, uint64_t held)
{
    static bool retains;
    if (retains || minus(room->limit, room->base + held) < FOR_RETAINED)
        return;
    koila__resident_retain();
    retains = true;
}

bool koila__resident_begin(const koila__resident_room *room, uint64_t held)
{
    const bool inside = koila__resident_refuses_here();
    current = *room;
    koila__resident_on(&koila__guard, room->limit, room->with_files, room->base, held);
    koila__resident_refuse_here(true);
    return inside;
}

static void learn(uint64_t planned, uint64_t refused_at)
{
    const uint64_t before = seen.learned;
    if (seen.learned && !refused_at && ++seen.n_well >= WELL_STEPS) {
        seen.learned = seen.learned / FORGET_SHARE;
        seen.n_well = 0;
    }
    if (refused_at) {
        const uint64_t too_much = minus(planned, refused_at);
        seen.learned = least_of(seen.learned + too_much, current.limit / 2);
        seen.n_well = 0;
    }
    answer.is_known &= seen.learned == before;
}

void koila__resident_went_well(void) { learn(0, 0); }

void koila__resident_end(bool inside, uint64_t held, uint64_t planned)
{
    koila__resident_refuse_here(inside);
    koila__resident_off(&koila__guard);
    const koila__resident_news news = koila__resident_news_of(&koila__guard);
    learn(planned, news.refused_at);
    if (!news.was_near)
        return;
    seen.was_near = true;
    settle(held, current.with_files);
}

/* ---- a budget on resident memory, for all that torch does */

static _Thread_local uint64_t limit_here = UINT64_MAX;
static uint64_t limit_of_all = UINT64_MAX;

static void keep_from_now(uint64_t limit, uint64_t held)
{
    settle(held, true);
    koila__resident_on(&koila__guard, limit, true, seen.base, held);
}

void koila__resident_budget(uint64_t limit, uint64_t held)
{
    if (limit_of_all != UINT64_MAX)
        koila__resident_off(&koila__guard);
    limit_of_all = limit;
    atomic_store(&koila__guard.for_all, limit != UINT64_MAX);
    if (limit != UINT64_MAX)
        keep_from_now(limit, held);
}

void koila__resident_budget_here(uint64_t limit, uint64_t held)
{
    if (limit == limit_here)
        return;
    if (limit_here != UINT64_MAX)
        koila__resident_off(&koila__guard);
    limit_here = limit;
    koila__resident_refuse_here(limit != UINT64_MAX);
    if (limit != UINT64_MAX)
        keep_from_now(limit, held);
}

/* ---- Python */

PyDoc_STRVAR(limits_from_doc,
             "limits_from(root)\n\n"
             "For tests: look for /proc and /sys, which tell the limits of control groups and the "
             "free memory, below root from now on; '': the system's.");
static PyObject *limits_from(PyObject *self, PyObject *arg)
{
    const char *text = PyUnicode_AsUTF8(arg);
    if (!text)
        return NULL;
    if (strlen(text) >= sizeof root) {
        PyErr_SetString(PyExc_ValueError, "limits_from: the path is too long");
        return NULL;
    }
    koila__freemem_close(&files);
    strcpy(root, text);
    memset(&seen, 0, sizeof seen);
    answer.is_known = false;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    resident_doc,
    "resident() -> dict\n\n"
    "Bytes: now, with_files, base (beside torch's; None: not looked at yet), learned. "
    "Counts of the last step: looks, trims, refused. asked: times that the system was asked "
    "for free memory.");
static PyObject *resident(PyObject *self, PyObject *none)
{
    koila__resident *g = &koila__guard;
    const koila__resident_news news = koila__resident_news_of(g);
    PyObject *base = seen.is_known ? PyLong_FromUnsignedLongLong(seen.base) : Py_NewRef(Py_None);
    return Py_BuildValue(
        "{s:K,s:K,s:N,s:K,s:K,s:K,s:K,s:K}", "now",
        (unsigned long long)koila__resident_now(g, false), "with_files",
        (unsigned long long)koila__resident_now(g, true), "base", base, "learned",
        (unsigned long long)seen.learned, "looks", (unsigned long long)news.n_looks, "trims",
        (unsigned long long)news.n_trims, "refused", (unsigned long long)news.n_refused, "asked",
        (unsigned long long)answer.n_asked);
}

static PyMethodDef methods[] = {
    { "limits_from", limits_from, METH_O, limits_from_doc },
    { "resident", resident, METH_NOARGS, resident_doc },
    { NULL, NULL, 0, NULL },
};

static void after_fork_child(void)
{
    pthread_mutex_init(&koila__guard.lock, NULL);
    atomic_store(&koila__guard.n_on, 0);
    memset(&seen, 0, sizeof seen);
    answer.is_known = false;
    atomic_store(&koila__guard.for_all, false);
    limit_here = limit_of_all = UINT64_MAX;
    koila__resident_refuse_here(false);
}

int koila__resident_add_module(PyObject *m)
{
    static bool ready;
    if (!ready) {
        koila__resident_init(&koila__guard);
        if (pthread_atfork(NULL, NULL, after_fork_child) != 0) {
            PyErr_NoMemory();
            return -1;
        }
        ready = true;
    }
    return PyModule_AddFunctions(m, methods);
}
