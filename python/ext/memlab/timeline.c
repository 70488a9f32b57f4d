/* timeline.c — koila.memlab.timeline: every allocator event of one device between two moments, kept
 * in src/memory/history.c.
 *
 * Timeline is equivalent to:
 *     class Timeline:                         # one records at a time
 *         def __init__(self, device, limit): ...      # device: 0 the CPU, 1 + i accelerator i;
 *                                                     # limit: events
 *         def begin(self, module_class, held): ...    # held: [(address, bytes)] of an
 *                                                     # accelerator's live blocks
 *         def end(self): ...                  # solves; the rest is known after it
 *         start, peak, end_bytes, n_events, n_lost: int
 *         def at_peak(self): ...  # [(address, bytes, (file, line) or None, module address,
 *                                 #   ns since the beginning, still there,
 *                                 #   ((file, line), ...) of the lines that called, nearest first)]
 *         def events(self): ...   # [(address, +-bytes, (file, line) or None, ns)]
 *         def body(self) -> str: ...      # of its page, HTML
 */
#include "memlab/memlab.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "memory/history.h"
#include "ground/cpu_bytes.h"

static _Atomic int recorded_device = -1; /* -1: none is recorded */
/* An event may be in flight when the recording ends: written under the lock only. */
static koila__history *recording;
static pthread_rwlock_t in_use = PTHREAD_RWLOCK_INITIALIZER;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void record_event(int device, const void *p, int64_t delta, uint64_t now)
{
    uint32_t tag = 0;
    uint64_t n;
    if (atomic_load_explicit(&recorded_device, memory_order_relaxed) != device)
        return;
    if (delta > 0 && (device != 0 || !koila__cpu_bytes_find(p, &n, &tag)))
        tag = koila__sites_who_asks();
    pthread_rwlock_rdlock(&in_use);
    if (recording && recorded_device == device)
        koila__history_add(recording, now_ns(), p, delta, tag);
    pthread_rwlock_unlock(&in_use);
}

typedef struct timeline {
    PyObject_HEAD
    koila__history history;
    int device;
    bool running, solved;
} timeline;

static PyObject *timeline_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int device;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "in:Timeline", &device, &limit))
        return NULL;
    if (limit < 1)
        return PyErr_Format(PyExc_ValueError, "timeline(limit=%zd): expected 1 or more", limit);
    timeline *t = (timeline *)type->tp_alloc(type, 0);
    if (t) {
        t->device = device;
        koila__history_init(&t->history, (size_t)limit, NULL);
    }
    return (PyObject *)t;
}

static bool add_first(void *user, const void *p, uint64_t n, uint32_t tag)
{
    timeline *t = user;
    koila__history_add(&t->history, 0, p, (int64_t)n, tag);
    return true;
}
static void stop_recording(timeline *t)
{
    if (!t->running)
        return;
    koila_assert(recording == &t->history);
    koila__events_set_listener(KOILA__LISTENS_TIMELINE, NULL);
    recorded_device = -1;
    pthread_rwlock_wrlock(&in_use);
    recording = NULL;
    pthread_rwlock_unlock(&in_use);
    koila__sites_note_modules(NULL);
    t->running = false;
}
static PyObject *timeline_begin(timeline *t, PyObject *args)
{
    PyObject *module_class, *held;
    if (!PyArg_ParseTuple(args, "OO!:begin", &module_class, &PyList_Type, &held))
        return NULL;
    if (recording || t->solved || t->running)
        return PyErr_Format(PyExc_RuntimeError, "timeline: %s",
                            recording ? "another one is recording" : "this one has ended");
    if (t->device == 0)
        koila__cpu_bytes_each(add_first, t);
    for (Py_ssize_t i = 0; t->device && i < PyList_GET_SIZE(held); i++) {
        unsigned long long p, n;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(held, i), "KK", &p, &n))
            return NULL;
        koila__history_add(&t->history, 0, (const void *)(uintptr_t)p, (int64_t)n, 0);
    }
    koila__sites_note_modules(module_class == Py_None ? NULL : module_class);
    koila__history_begin(&t->history);
    pthread_rwlock_wrlock(&in_use);
    recording = &t->history;
    pthread_rwlock_unlock(&in_use);
    t->running = true;
    recorded_device = t->device;
    koila__events_set_listener(KOILA__LISTENS_TIMELINE, record_event);
    Py_RETURN_NONE;
}
static PyObject *timeline_end(timeline *t, PyObject *none)
{
    if (!t->running)
        return PyErr_Format(PyExc_RuntimeError, "timeline: nothing is recorded");
    stop_recording(t);
    if (koila__history_solve(&t->history) != KOILA_OK)
        return PyErr_NoMemory();
    t->solved = true;
    Py_RETURN_NONE;
}
static void timeline_dealloc(timeline *t)
{
    PyTypeObject *type = Py_TYPE(t);
    stop_recording(t);
    koila__history_deinit(&t->history);
    type->tp_free(t);
    Py_DECREF(type);
}
static bool is_over(const timeline *t)
{
    if (!t->solved)
        PyErr_SetString(PyExc_RuntimeError, "timeline: it is not over yet");
    return t->solved;
}

/* (file, line) or None of a tag; kept in a list by tag. Borrowed. */
static PyObject *site_tuple(PyObject *cache, uint32_t tag)
{
    PyObject *known = PyList_GET_ITEM(cache, tag); // borrowed
    if (known != Py_None || !tag)
        return known;
    koila__site s = koila__sites_get(tag);
    PyObject *pair = s.file ? Py_BuildValue("(si)", s.file, s.line) : Py_NewRef(Py_None);
    if (pair)
        PyList_SetItem(cache, tag, pair);
    return pair;
}
static PyObject *new_cache(void)
{
    Py_ssize_t n = (Py_ssize_t)koila__sites_n() + 1;
    PyObject *cache = PyList_New(n);
    for (Py_ssize_t i = 0; cache && i < n; i++)
        PyList_SET_ITEM(cache, i, Py_NewRef(Py_None));
    return cache;
}
static unsigned long long since(const koila__history *h, size_t i)
{
    return i < h->n_first || h->n == h->n_first ? 0 : h->events[i].ns - h->events[h->n_first].ns;
}

/* The lines that called the one of a tag, the nearest first, as a list of (file, line). */
static PyObject *callers_of(PyObject *cache, uint32_t tag)
{
    PyObject *list = PyList_New(0);
    for (tag = koila__sites_get(tag).caller; list && tag; tag = koila__sites_get(tag).caller) {
        PyObject *site = site_tuple(cache, tag);
        if (!site || PyList_Append(list, site) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *timeline_at_peak(timeline *t, PyObject *none)
{
    const koila__history *h = &t->history;
    PyObject *cache = is_over(t) ? new_cache() : NULL;
    PyObject *out = cache ? PyList_New(0) : NULL;
    for (size_t i = 0; out && h->peak_at != SIZE_MAX && i <= h->peak_at; i++) {
        if (!koila__history_is_live(h, i, h->peak_at))
            continue;
        const koila__event *e = &h->events[i];
        const void *module = koila__sites_get(e->tag).module;
        PyObject *still_there = h->other[i] == SIZE_MAX ? Py_True : Py_False;
        PyObject *site = site_tuple(cache, e->tag);
        PyObject *callers = site ? callers_of(cache, e->tag) : NULL;
        PyObject *row = callers ? Py_BuildValue("(KKOKKON)", (unsigned long long)(uintptr_t)e->p,
                                                (unsigned long long)e->n_bytes, site,
                                                (unsigned long long)(uintptr_t)module, since(h, i),
                                                still_there, callers)
                                : NULL;
        if (!row || PyList_Append(out, row) < 0)
            Py_CLEAR(out);
        Py_XDECREF(row);
    }
    Py_XDECREF(cache);
    return out;
}
static PyObject *timeline_events(timeline *t, PyObject *none)
{
    const koila__history *h = &t->history;
    PyObject *cache = is_over(t) ? new_cache() : NULL;
    PyObject *out = cache ? PyList_New((Py_ssize_t)h->n) : NULL;
    for (size_t i = 0; out && i < h->n; i++) {
        const koila__event *e = &h->events[i];
        PyObject *site = site_tuple(cache, e->tag);
        PyObject *row = site ? Py_BuildValue("(KLOK)", (unsigned long long)(uintptr_t)e->p,
                                             (long long)e->n_bytes, site, since(h, i))
                             : NULL;
        if (!row)
            Py_CLEAR(out);
        else
            PyList_SET_ITEM(out, (Py_ssize_t)i, row);
    }
    Py_XDECREF(cache);
    return out;
}

/* All tags of one line are one group, whatever module ran. */
typedef struct groups {
    uint32_t *of; /* group, by tag */
    char **names; /* by group; the first is "" */
    uint32_t n_tags, n;
} groups;
static const char *group_name(void *user, uint32_t group) { return ((groups *)user)->names[group]; }
static void groups_free(groups *g)
{
    for (uint32_t i = 0; g->names && i < g->n; i++)
        free(g->names[i]);
    free(g->names);
    free(g->of);
}
/* The group of the line `name`, a new one if it is not yet in `known` {line: group}. false: no
 * memory. */
static bool group_of(groups *g, PyObject *known, PyObject *name, uint32_t *group)
{
    PyObject *seen = PyDict_GetItemWithError(known, name); // borrowed
    if (seen) {
        *group = (uint32_t)PyLong_AsUnsignedLong(seen);
        koila_assert(*group < g->n);
        return true;
    }
    const char *text = PyUnicode_AsUTF8(name);
    PyObject *number = PyLong_FromUnsignedLong(g->n);
    bool ok = text && number && PyDict_SetItem(known, name, number) == 0;
    Py_XDECREF(number);
    char *copy = ok ? strdup(text) : NULL;
    if (!copy)
        return false;
    *group = g->n;
    g->names[g->n++] = copy;
    return true;
}
static bool groups_make(groups *g)
{
    *g = (groups){ .n_tags = koila__sites_n() + 1, .n = 1 };
    g->of = calloc(g->n_tags, sizeof *g->of);
    g->names = calloc(g->n_tags, sizeof *g->names);
    PyObject *known = PyDict_New();
    bool ok = g->of && g->names && known;
    if (ok)
        g->names[0] = strdup("");
    ok = ok && g->names[0];
    for (uint32_t tag = 1; ok && tag < g->n_tags; tag++) {
        koila__site s = koila__sites_get(tag);
        PyObject *name = PyUnicode_FromFormat("%s:%d", s.file, s.line);
        ok = name && group_of(g, known, name, &g->of[tag]);
        Py_XDECREF(name);
    }
    Py_XDECREF(known);
    if (!ok && !PyErr_Occurred())
        PyErr_NoMemory();
    return ok;
}
static PyObject *timeline_body(timeline *t, PyObject *ignored)
{
    (void)ignored;
    if (!is_over(t))
        return NULL;
    groups g;
    PyObject *result = NULL;
    koila__text out;
    koila__text_init(&out, NULL);
    if (groups_make(&g)) {
        if (koila__history_body(&t->history, g.of, g.n, group_name, &g, &out) == KOILA_OK)
            result = PyUnicode_DecodeUTF8(out.s, (Py_ssize_t)out.n, "replace");
        else
            PyErr_NoMemory();
    }
    groups_free(&g);
    koila__text_deinit(&out);
    return result;
}

enum { START, PEAK, END, N_EVENTS, N_LOST };
static PyObject *timeline_get(timeline *t, void *what)
{
    const koila__history *h = &t->history;
    if (!is_over(t))
        return NULL;
    switch ((int)(intptr_t)what) {
    case START:
        return PyLong_FromUnsignedLongLong(h->start);
    case PEAK:
        return PyLong_FromUnsignedLongLong(h->peak);
    case END:
        return PyLong_FromUnsignedLongLong(h->end);
    case N_EVENTS:
        return PyLong_FromSize_t(h->n - h->n_first);
    default:
        return PyLong_FromUnsignedLongLong(h->n_lost);
    }
}
static PyMethodDef timeline_methods[] = {
    { "begin", (PyCFunction)timeline_begin, METH_VARARGS,
      "begin(module_class or None, [(address, bytes)] of an accelerator's live blocks): record "
      "from now on." },
    { "end", (PyCFunction)timeline_end, METH_NOARGS, "Stop recording." },
    { "at_peak", (PyCFunction)timeline_at_peak, METH_NOARGS,
      "[(address, bytes, (file, line) or None, module, ns, still there, callers)] of what was "
      "live at the peak." },
    { "events", (PyCFunction)timeline_events, METH_NOARGS,
      "[(address, +-bytes, (file, line) or None, ns)], blocks live at the beginning first." },
    { "body", (PyCFunction)timeline_body, METH_NOARGS, "body() -> HTML, without a head." },
    { NULL, NULL, 0, NULL },
};
static PyGetSetDef timeline_getset[] = {
    { "start", (getter)timeline_get, NULL, "Bytes live at the beginning.", (void *)START },
    { "peak", (getter)timeline_get, NULL, "Highest bytes.", (void *)PEAK },
    { "end_bytes", (getter)timeline_get, NULL, "Bytes at the end.", (void *)END },
    { "n_events", (getter)timeline_get, NULL, "Events recorded.", (void *)N_EVENTS },
    { "n_lost", (getter)timeline_get, NULL, "Events after the limit.", (void *)N_LOST },
    { NULL, NULL, NULL, NULL, NULL },
};
static PyType_Slot timeline_slots[] = {
    { Py_tp_doc, "Every allocator event of a device between two moments; see timeline.c." },
    { Py_tp_new, timeline_new },
    { Py_tp_dealloc, timeline_dealloc },
    { Py_tp_methods, timeline_methods },
    { Py_tp_getset, timeline_getset },
    { 0, NULL },
};
static PyType_Spec timeline_spec = { "koila._core.Timeline", sizeof(timeline), 0,
                                     Py_TPFLAGS_DEFAULT, timeline_slots };

int koila__timeline_add_module(PyObject *m)
{
    PyObject *type = PyType_FromSpec(&timeline_spec);
    if (!type || PyModule_AddObject(m, "Timeline", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    return 0;
}
