/* sites.c — notes the line that allocates each block, for koila.memlab.start(trace=True) and
 * timelines.
 *
 * The allocating thread usually does not hold the GIL (torch releases it around every operator), so
 * Python objects may only be read: this thread's own frames, which no other thread changes
 * meanwhile, their code objects and the characters of the file names. A site is a copy of (file,
 * line) and, for timelines, the address of the module whose method runs and the site of the line
 * that called; its number is the block's tag. Frames of torch and koila are skipped, so the line is
 * the user's.
 */
#include "memlab/memlab.h"

#include <frameobject.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/idset.h"
#include "base/vec.h"
#include "ground/cpu_bytes.h"
#include "memory/ptrtab.h"

/* Site i has tag i + 1. The array and the set of known sites grow inside an allocator. That is
 * safe: the hooks do not see the C library's malloc, and nothing here calls Python. */
static pthread_mutex_t site_lock = PTHREAD_MUTEX_INITIALIZER;
static VEC(koila__site) sites;
static PyObject *module_class; /* torch.nn.Module while modules are noted */

/* Borrowed: torch keeps the class alive. */
void koila__sites_note_modules(PyObject *class) { module_class = class; }
uint32_t koila__sites_n(void) { return sites.n; }
koila__site koila__sites_get(uint32_t tag)
{
    pthread_mutex_lock(&site_lock);
    koila__site s = tag && tag <= sites.n ? sites.at[tag - 1] : (koila__site){ 0 };
    pthread_mutex_unlock(&site_lock);
    return s;
}

static void after_fork_child(void) { pthread_mutex_init(&site_lock, NULL); }

#if PY_VERSION_HEX >= 0x030F0000 ||                                                                \
    (PY_VERSION_HEX >= 0x030E0000 &&                                                               \
     defined Py_GIL_DISABLED) /* 3.14t runs one copy of the bytecode per thread */
#define CAN_TRACE 0
uint32_t koila__sites_who_asks(void) { return 0; }
#else
#define CAN_TRACE 1
enum { FRAMES_MAX = 1000, CALLERS_MAX = 24 }; /* deeper frames are not read */
#define FNV_PRIME 1099511628211u

typedef struct any_frame any_frame;
/* The first fields of struct _PyInterpreterFrame. The layout is the same within a minor version. */
#if PY_VERSION_HEX >= 0x030E0000
struct any_frame {
    uintptr_t f_executable;
    any_frame *previous;
    uintptr_t f_funcobj;
    PyObject *f_globals, *f_builtins, *f_locals;
    PyFrameObject *frame_obj;
    const char *instr;
    void *stack_top;
    char flags[8];
    uintptr_t fast[1];
};
/* The object of a tagged reference, whose two low bits are not part of the address; NULL: none, or
 * a tagged number. */
static PyObject *object_of(uintptr_t reference)
{
    return (reference & 3) == 3 ? NULL : (PyObject *)(reference & ~(uintptr_t)3);
}
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->current_frame; }
static PyObject *frame_first_local(any_frame *f) { return object_of(f->fast[0]); }
static PyCodeObject *frame_code(any_frame *f)
{
    PyObject *code = object_of(f->f_executable);
    return code && PyCode_Check(code) ? (PyCodeObject *)code : NULL;
}
#elif PY_VERSION_HEX >= 0x030D0000
struct any_frame {
    PyObject *f_executable;
    any_frame *previous;
    PyObject *f_funcobj, *f_globals, *f_builtins, *f_locals;
    PyFrameObject *frame_obj;
    const char *instr;
    int stacktop;
    char flags[4];
    PyObject *fast[1];
};
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->current_frame; }
static PyCodeObject *frame_code(any_frame *f)
{
    return f->f_executable && PyCode_Check(f->f_executable) ? (PyCodeObject *)f->f_executable
                                                            : NULL;
}
#elif PY_VERSION_HEX >= 0x030C0000
struct any_frame {
    PyCodeObject *f_code;
    any_frame *previous;
    PyObject *f_funcobj, *f_globals, *f_builtins, *f_locals;
    PyFrameObject *frame_obj;
    const char *instr;
    int stacktop;
    char flags[4];
    PyObject *fast[1];
};
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->cframe->current_frame; }
static PyCodeObject *frame_code(any_frame *f) { return f->f_code; }
#elif PY_VERSION_HEX >= 0x030B0000
struct any_frame {
    PyFunctionObject *f_func;
    PyObject *f_globals, *f_builtins, *f_locals;
    PyCodeObject *f_code;
    PyFrameObject *frame_obj;
    any_frame *previous;
    const char *instr;
    int stacktop;
    char flags[4];
    PyObject *fast[1];
};
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->cframe->current_frame; }
static PyCodeObject *frame_code(any_frame *f) { return f->f_code; }
#endif
#if PY_VERSION_HEX >= 0x030B0000
#if PY_VERSION_HEX < 0x030E0000
static PyObject *frame_first_local(any_frame *f) { return f->fast[0]; }
#endif
static any_frame *frame_below(any_frame *f) { return f->previous; }
static int frame_line(any_frame *f)
{
    PyCodeObject *code = frame_code(f);
    return PyCode_Addr2Line(code, (int)(f->instr - (const char *)code->co_code_adaptive));
}
#else
struct any_frame {
    PyFrameObject f;
};
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->frame; }
static PyCodeObject *frame_code(any_frame *f) { return f->f.f_code; }
static PyObject *frame_first_local(any_frame *f) { return f->f.f_localsplus[0]; }
static any_frame *frame_below(any_frame *f) { return (any_frame *)f->f.f_back; }
static int frame_line(any_frame *f) { return PyCode_Addr2Line(f->f.f_code, f->f.f_lasti * 2); }
#endif

static const char *file_of(PyCodeObject *code)
{
    PyObject *name = code ? code->co_filename : NULL;
    return name && PyUnicode_IS_COMPACT_ASCII(name) ? (const char *)PyUnicode_1BYTE_DATA(name)
                                                    : NULL;
}
/* Folders of koila and torch, with a slash at the end; NULL: torch was not imported. Each is set
 * once, and kept for good. */
enum { MOST_FOLDERS = 2 };
static char *library[MOST_FOLDERS];

static bool is_inside(const char *file)
{
    for (int i = 0; i < MOST_FOLDERS && library[i]; i++)
        if (strncmp(file, library[i], strlen(library[i])) == 0)
            return true;
    return file[0] == '<';
}

static koila__idset known_sites; /* ids: indices in `sites` */

static bool same_site(const void *at, uint32_t id, const void *key)
{
    const koila__site *a = (const koila__site *)at + id;
    const koila__site *b = key;
    return a->hash == b->hash && a->line == b->line && a->module == b->module &&
           a->caller == b->caller && strcmp(a->file, b->file) == 0;
}
static uint64_t site_hash(const void *at, uint32_t id)
{
    return ((const koila__site *)at)[id].hash;
}

/* Adds a site, with a copy of its file name. Returns its tag; 0: no memory, or no tag left. */
static uint32_t add_site(koila__site s)
{
    const koila_allocator mem = koila__libc;
    if (sites.n >= KOILA__PTRTAB_MAX_TAG || !koila__vec_reserve(&mem, &sites, 1) ||
        !koila__idset_reserve(&mem, &known_sites, site_hash, sites.at))
        return 0;
    s.file = strdup(s.file);
    if (!s.file)
        return 0;
    koila__idset_insert(&known_sites, s.hash, sites.n);
    sites.at[sites.n++] = s;
    koila_assert(known_sites.n == sites.n);
    return sites.n;
}

static uint32_t intern_site(const char *file, int line, const void *module, uint32_t caller)
{
    uint64_t h = koila__mix(koila__mix(caller, (uint64_t)line), (uint64_t)(uintptr_t)module);
    for (const char *s = file; *s; s++)
        h = (h ^ (unsigned char)*s) * FNV_PRIME;
    h ^= h >> 32;
    const koila__site wanted = { (char *)file, line, module, caller, h };
    pthread_mutex_lock(&site_lock);
    const uint32_t id = koila__idset_find(&known_sites, h, same_site, sites.at, &wanted);
    const uint32_t tag = id == KOILA__NO_ID ? add_site(wanted) : id + 1;
    pthread_mutex_unlock(&site_lock);
    return tag;
}

/* The module whose method this frame runs, or NULL. */
static const void *module_of(any_frame *f)
{
    PyCodeObject *code = frame_code(f);
    PyObject *self = code && code->co_argcount > 0 ? frame_first_local(f) : NULL;
    if (self && PyCell_Check(self))
        self = PyCell_GET(self);
    PyObject *mro =
        self && Py_TYPE(self)->tp_flags & Py_TPFLAGS_HEAPTYPE ? Py_TYPE(self)->tp_mro : NULL;
    for (Py_ssize_t i = 0; mro && i < PyTuple_GET_SIZE(mro); i++)
        if (PyTuple_GET_ITEM(mro, i) == module_class)
            return self;
    return NULL;
}

uint32_t koila__sites_who_asks(void)
{
    PyThreadState *ts = PyGILState_GetThisThreadState();
    any_frame *users[CALLERS_MAX]; /* the nearest first */
    int n = 0;
    const int most = module_class ? CALLERS_MAX : 1;
    any_frame *f = ts ? first_frame(ts) : NULL;
    const void *module = NULL;
    for (int depth = 0; f && n < most && depth < FRAMES_MAX; f = frame_below(f), depth++) {
        const char *file = file_of(frame_code(f));
        if (module_class && !module && !n)
            module = module_of(f);
        if (file && !is_inside(file))
            users[n++] = f;
    }
    uint32_t tag = 0;
    while (n-- > 0)
        tag = intern_site(file_of(frame_code(users[n])), frame_line(users[n]), n ? NULL : module,
                          tag);
    return tag;
}
#endif

/* ---- Python */

static PyObject *memlab_library(PyObject *self, PyObject *folders)
{
    if (!PyTuple_Check(folders)) {
        PyErr_SetString(PyExc_TypeError, "memlab_library() takes a tuple");
        return NULL;
    }
#if CAN_TRACE
    for (int i = 0; i < MOST_FOLDERS && i < PyTuple_GET_SIZE(folders); i++) {
        const char *folder = PyUnicode_AsUTF8(PyTuple_GET_ITEM(folders, i));
        if (!folder)
            return NULL;
        if (!library[i])
            library[i] = strdup(folder); /* no memory: its frames are told */
    }
#endif
    Py_RETURN_NONE;
}

static PyObject *memlab_trace(PyObject *self, PyObject *on)
{
    int want = PyObject_IsTrue(on);
    if (want < 0)
        return NULL;
#if CAN_TRACE
    koila__cpu_bytes_set_tagger(want ? koila__sites_who_asks : NULL);
    return PyBool_FromLong(want);
#else
    Py_RETURN_FALSE;
#endif
}
static PyObject *memlab_tracing(PyObject *self, PyObject *none)
{
    return PyBool_FromLong(koila__cpu_bytes_get_tagger() != NULL);
}
/* (file, line) of a tag, or None. */
static PyObject *site_tuple(uint32_t tag)
{
    koila__site s = koila__sites_get(tag);
    return s.file ? Py_BuildValue("(si)", s.file, s.line) : Py_NewRef(Py_None);
}
/* (file, line) that allocated the block at an address, or None. */
static PyObject *memlab_site(PyObject *self, PyObject *address)
{
    uint64_t n;
    uint32_t tag = 0;
    const void *p = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred())
        return NULL;
    if (!koila__cpu_bytes_find(p, &n, &tag))
        Py_RETURN_NONE;
    return site_tuple(tag);
}

/* Live CPU blocks: [(address, bytes, (file, line) or None)] */
typedef struct block {
    uintptr_t p;
    uint64_t n;
    uint32_t tag;
} block;
typedef VEC(block) block_list;
static bool add_to_list(void *user, const void *p, uint64_t n, uint32_t tag)
{
    block_list *l = user;
    return koila__vec_push(&koila__libc, l, ((block){ (uintptr_t)p, n, tag }));
}
static PyObject *memlab_blocks(PyObject *self, PyObject *none)
{
    block_list l = { 0 };
    koila__cpu_bytes_each(add_to_list, &l);
    PyObject *out = PyList_New((Py_ssize_t)l.n);
    for (uint32_t i = 0; out && i < l.n; i++) {
        PyObject *where = site_tuple(l.at[i].tag);
        PyObject *row = where ? Py_BuildValue("(KKN)", (unsigned long long)l.at[i].p,
                                              (unsigned long long)l.at[i].n, where)
                              : NULL;
        if (!row)
            Py_CLEAR(out);
        else
            PyList_SET_ITEM(out, (Py_ssize_t)i, row);
    }
    koila__vec_free(&koila__libc, &l);
    return out;
}

static PyMethodDef methods[] = {
    { "memlab_library", memlab_library, METH_O,
      "memlab_library((folder, ...)): code in these folders is no program's." },
    { "memlab_trace", memlab_trace, METH_O,
      "Keep file and line of every CPU allocation from now on. False: not possible here." },
    { "memlab_tracing", memlab_tracing, METH_NOARGS, "Are lines of allocations kept now?" },
    { "memlab_site", memlab_site, METH_O,
      "(file, line) that allocated the CPU block at an address, or None." },
    { "memlab_blocks", memlab_blocks, METH_NOARGS,
      "Live CPU blocks: [(address, bytes, (file, line) or None)]." },
    { NULL, NULL, 0, NULL },
};

int koila__sites_add_module(PyObject *m)
{
    static bool ready;
    if (!ready && pthread_atfork(NULL, NULL, after_fork_child) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    ready = true;
    return PyModule_AddFunctions(m, methods);
}
