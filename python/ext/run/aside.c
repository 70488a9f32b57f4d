/* aside.c — stepping aside: steps that need no koila are done by torch alone.
 *
 *   lazy(x, y)    recorded    the step runs; its plan is whole, with room to spare      n_equal = 1
 *   lazy(x, y)    recorded    the same                                                  n_equal = 2
 *   ...
 *   lazy(x, y)    aside       copies of x and y, plain tensors; torch does the step
 *
 * Steps are of one kind when their inputs have the same shapes, dtypes, devices and batch
 * dimensions, in the same grad mode and under the same settings. After EQUAL_STEPS whole steps of
 * a kind in a row lazy() hands out copies, not lazy tensors: copies, so that the tensor that was
 * given is never written, whatever the program does with them. What is computed from them is
 * torch's own, and as exact as torch is.
 *
 * A step is known by one call of lazy(): what it needs is measured from there to the next call.
 * koila comes back, and records the next step, when
 *
 *   another kind    of inputs, grad mode or settings: at once, it is recorded
 *   less room       a step may need one part in SPARE of what is free (or of the budget)
 *   more held       or less: other tensors than when it was recorded, perhaps another model's
 *   more needed     the last step took more than those that were recorded
 *   a look          each LOOK_EVERY steps
 *   out of memory   torch was refused memory meanwhile: EQUAL_STEPS are recorded again
 *
 * All of it is decided from the context's own state: other threads and tasks have theirs.
 */
#include "run/run.h"
#include "ground/clock.h"

/* clang-format off: one number a line */
enum {
    N_KINDS = 8,           /* are remembered; the one that was not used for longest is forgotten */
    MOST_INPUTS = 16,      /* batched tensors of one call */
    SPARE = 2,             /* the same step needs the same again. The other half of the room is for
                            what other programs take until the next look at it */
    MOST_WINDOWS = 16,     /* of koila__cpu_bytes_open(): runs need theirs */
    LOOK_LASTS = 100,      /* milliseconds: a look at memory, as ANSWER_LASTS in limits.c */
    LITTLE_SHARE = 256,    /* a step that needs at most one part in so many of what is free ... */
    LITTLE_LASTS = 1000,   /* ... asks for it so often: milliseconds */
    MOST_SLACK = 16 << 20, /* bytes: less than a process is free to take at any time */
    SLACK_SHARE = 64,      /* and at most one part in so many of the room */
};
/* clang-format on */

/* Tests change these two. A few steps that are looked at one by one are recorded; a look costs at
 * most three plain steps, so a thousandth of them less than a percent. */
static uint32_t equal_steps = 16;
static uint32_t look_every = 1024;

typedef struct inputs {
    PyObject *at[MOST_INPUTS]; /* borrowed */
    koila_meta meta[MOST_INPUTS];
    uint32_t dim[MOST_INPUTS]; /* that is the batch */
    uint32_t n;
    const koila_meta *like; /* borrowed [n_like]: most likely these */
    uint32_t n_like;
} inputs;

/* What else decides a step. Compared as bytes: made by look_around(). */
typedef struct around {
    uint64_t budget, cpu_budget;
    uint32_t axes;
    uint8_t mode; /* koila__call_mode() */
    bool resident, no_host;
} around;

typedef struct kind {
    uint32_t n_inputs; /* 0: none */
    koila_meta meta[MOST_INPUTS];
    uint32_t dim[MOST_INPUTS];
    around around;
    uint32_t n_equal;  /* whole steps in a row */
    uint32_t n_unseen; /* steps that torch did since the last one that was recorded */
    bool look_due;
    uint64_t n_bytes;     /* of its inputs */
    uint64_t need;        /* beyond what is held when it begins, the most of those in a row */
    uint64_t held;        /* when the last recorded one began */
    int gpu;              /* -1: the CPU */
    uint64_t used;        /* when, by `clock_of_uses` */
    uint64_t after;       /* koila__n_told() when torch did it last */
    uint32_t n_backwards; /* of the last recorded one */
    koila__step step;     /* of the last recorded one, owned; .c NULL: there is none */
} kind;

typedef struct koila__aside {
    kind at[N_KINDS];
    uint64_t generation; /* of what is remembered */
    /* the step since the last lazy() */
    kind *last;           /* NULL: it is none of them */
    bool is_aside;        /* torch does it */
    bool is_spoiled;      /* it was cut, or its run failed */
    uint32_t n_runs;      /* of it */
    uint32_t n_backwards; /* among them; of a step that torch does alone, those that were told */
    double began;         /* seconds of CLOCK_MONOTONIC, while somebody listens; else 0 */
    uint64_t held;        /* when it began */
    uint64_t peak;        /* until its window was opened anew */
    uint64_t planned;     /* bytes that its plans needed */
    uint64_t n_refused;
    int window; /* while `last` is set */
    /* the last look at the settings */
    uint64_t version; /* koila__settings_version() then, and 1; 0: none yet */
    around around;
    bool is_always_seen; /* koila looks at every step */
    /* the last look at memory */
    koila__room room;
    uint64_t room_version; /* `version` then */
    uint64_t room_answer;  /* of the system: koila__resident_answer() */
    int64_t looked_at;     /* at a GPU's: milliseconds */
} aside;

static uint64_t clock_of_uses, generation;
static uint64_t n_steps;       /* that torch has done alone */
static uint64_t n_turns;       /* times that koila has stepped aside, or come back */
static const char *why = "";   /* the last of these, in words */
static uint64_t n_gpu_refused; /* allocations on GPUs */
static uint32_t n_windows;     /* open, in all contexts */
static bool is_heard;          /* does somebody listen to steps (koila.on_step)? */

/* The one place where koila steps aside or comes back. */
static void turned(const char *reason)
{
    why = reason;
    n_turns++;
}

/* ---- the peak of a step, of the few windows that there are */

static int window_open(void)
{
    const int window = n_windows < MOST_WINDOWS ? koila__cpu_bytes_open() : -1;
    n_windows += window >= 0;
    return window;
}

static uint64_t window_close(int window)
{
    n_windows -= window >= 0;
    return koila__cpu_bytes_close(window);
}

/* ---- what is remembered */

static void end_window(aside *s)
{
    if (s->last)
        window_close(s->window);
    s->last = NULL;
}

/* May run Python, last. */
static void step_release(koila__step gone)
{
    koila__cached_release(gone.c);
    Py_XDECREF(gone.early);
}

static void kind_free(kind *k)
{
    const koila__step gone = k->step;
    memset(k, 0, sizeof *k);
    step_release(gone);
}

static void forget_all(aside *s)
{
    end_window(s);
    for (uint32_t i = 0; i < N_KINDS; i++)
        kind_free(&s->at[i]);
}

static void aside_free(aside *s)
{
    forget_all(s);
    PyMem_Free(s);
}

void koila__aside_forget(void) { generation++; }

/* That of the running context; with `make` it is made. NULL without an exception. */
KOILA__HOT static aside *aside_now(bool make)
{
    koila__context *c = make ? koila__context_now() : koila__context_peek();
    if (make && c && !c->aside) {
        c->aside = PyMem_Calloc(1, sizeof *c->aside);
        c->aside_free = aside_free;
    }
    if (make)
        PyErr_Clear();
    aside *s = c ? c->aside : NULL;
    const uint64_t now = generation + koila__n_forgotten; /* ids of metas go with these */
    if (s && s->generation != now) {
        forget_all(s);
        s->generation = now;
    }
    return s;
}

static void look_at_settings(aside *s)
{
    const koila__settings set = koila__settings_now();
    memset(&s->around, 0, sizeof s->around);
    s->around.budget = set.budget;
    s->around.cpu_budget = set.cpu_budget;
    s->around.axes = (uint32_t)set.axes;
    s->around.resident = set.resident;
    s->around.no_host = set.no_host;
    s->is_always_seen = set.aside == KOILA__ASIDE_OFF || set.dry || set.strict ||
                        set.slices == KOILA__SLICES_FASTEST || set.rows ||
                        (set.axes != KOILA__CUT_ANY && set.axes != KOILA__CUT_BATCH);
}

/* Brings s->around up to date. False: under these settings koila looks at every step. */
KOILA__HOT static bool look_around(aside *s)
{
    const uint64_t version = koila__settings_version() + 1;
    if (s->version != version)
        look_at_settings(s);
    s->version = version;
    s->around.mode = koila__call_mode();
    return !s->is_always_seen && !koila__maybe_inference();
}

KOILA__HOT static kind *find(aside *s, const inputs *in)
{
    const around *now = &s->around;
    for (uint32_t i = 0; i < N_KINDS; i++) {
        kind *k = &s->at[i];
        if (k->n_inputs == in->n && memcmp(&k->around, now, sizeof *now) == 0 &&
            memcmp(k->meta, in->meta, in->n * sizeof *in->meta) == 0 &&
            memcmp(k->dim, in->dim, in->n * sizeof *in->dim) == 0)
            return k;
    }
    return NULL;
}

static kind *add(aside *s, const inputs *in)
{
    kind *k = &s->at[0];
    for (uint32_t i = 1; i < N_KINDS; i++)
        if (s->at[i].used < k->used)
            k = &s->at[i];
    const koila__step gone = k->step;
    memset(k, 0, sizeof *k);
    k->n_inputs = in->n;
    memcpy(k->meta, in->meta, in->n * sizeof *in->meta);
    memcpy(k->dim, in->dim, in->n * sizeof *in->dim);
    k->around = s->around;
    k->gpu = -1;
    for (uint32_t i = 0; i < in->n; i++)
        k->n_bytes += koila_meta_get(koila__table, in->meta[i])->n_bytes;
    step_release(gone);
    return k;
}

/* ---- the inputs of a call */

static bool is_plain_tensor(PyObject *o)
{
    return koila__lazy_class && Py_TYPE(o) == koila__lazy_class->tp_base;
}

/* Adds `t`, whose batch dimension may count from the end. False: koila must look at it. */
KOILA__HOT static bool add_input(inputs *in, PyObject *t, int64_t dim)
{
    koila_meta meta;
    if (in->n == MOST_INPUTS || !is_plain_tensor(t) || koila__requires_grad(t))
        return false;
    if (in->n < in->n_like && koila__is_like(t, in->like[in->n]))
        meta = in->like[in->n];
    else if (koila__meta_of(t, &meta) < 0) {
        PyErr_Clear();
        return false;
    }
    const int64_t n_dims = koila_meta_get(koila__table, meta)->n_dims;
    if (dim == 0 && n_dims == 0)
        return true; /* it has no batch, and is handed out as it is */
    if (dim < -n_dims || dim >= n_dims)
        return false;
    in->at[in->n] = t;
    in->meta[in->n] = meta;
    in->dim[in->n++] = (uint32_t)(dim < 0 ? dim + n_dims : dim);
    return true;
}

/* Of a tuple or list of tensors. */
KOILA__HOT static bool add_inputs(inputs *in, PyObject *items, int64_t dim)
{
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); i++)
        if (!add_input(in, PySequence_Fast_GET_ITEM(items, i), dim))
            return false;
    return in->n > 0;
}

static bool is_sequence(PyObject *o) { return PyTuple_CheckExact(o) || PyList_CheckExact(o); }

/* What the arguments of lazy() hold, borrowed: they, or the one tuple or list that they are. None:
 * one argument that is no sequence. */
static PyObject *items_of(PyObject *values)
{
    if (PyTuple_GET_SIZE(values) != 1)
        return values;
    PyObject *only = PyTuple_GET_ITEM(values, 0);
    return is_sequence(only) ? only : Py_None;
}

static bool have_one_size(const inputs *in)
{
    const int64_t size = koila_meta_get(koila__table, in->meta[0])->size[in->dim[0]];
    for (uint32_t i = 1; i < in->n; i++)
        if (koila_meta_get(koila__table, in->meta[i])->size[in->dim[i]] != size)
            return false;
    return true;
}

/* Those of lazy(*values, batch=batch). False: koila must look at them. */
KOILA__HOT static bool call_inputs(inputs *in, PyObject *values, PyObject *batch)
{
    if (!PyTuple_GET_SIZE(values) || !PyLong_CheckExact(batch))
        return false;
    const int64_t dim = PyLong_AsLongLong(batch);
    if (dim == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    PyObject *items = items_of(values);
    return add_inputs(in, items == Py_None ? values : items, dim);
}

/* ---- the step since the last lazy() */

/* Steps of this kind are recorded again from the beginning. */
static void comes_back(kind *k, const char *reason)
{
    if (k->step.n_aside)
        turned(reason);
    k->n_equal = k->n_unseen = 0;
    k->need = 0;
    k->step.n_aside = 0;
}

/* Changes of what is held, or needed, that are none. */
static uint64_t slack(const aside *s)
{
    const uint64_t share = s->room.bytes / SLACK_SHARE;
    return share < MOST_SLACK ? share : MOST_SLACK;
}

static uint64_t n_refused_now(void) { return koila__cpu_bytes_n_refused() + n_gpu_refused; }

KOILA__HOT static void judge_aside(aside *s, kind *k, uint64_t need)
{
    if (s->n_refused != n_refused_now())
        comes_back(k, "a step ran out of memory");
    else
        k->look_due = need > k->need + k->need / 4 + slack(s);
}

static void judge_recorded(aside *s, kind *k, uint64_t need)
{
    if (s->is_spoiled || !s->n_runs) {
        comes_back(k, "a step was cut, or failed");
        return;
    }
    k->n_equal++;
    k->n_unseen = 0;
    k->look_due = false;
    k->held = s->held;
    k->n_backwards = s->n_backwards;
    if (need > k->need)
        k->need = need;
}

/* Closes its window. */
KOILA__HOT static uint64_t peak_so_far(const aside *s)
{
    const uint64_t peak = window_close(s->window);
    return peak > s->peak ? peak : s->peak;
}

/* It is over. */
KOILA__HOT static void judge(aside *s)
{
    kind *k = s->last;
    if (!k)
        return;
    const uint64_t peak = peak_so_far(s);
    const uint64_t measured = k->gpu < 0 && peak > s->held ? peak - s->held : 0;
    s->last = NULL;
    if (s->is_aside)
        judge_aside(s, k, measured);
    else
        judge_recorded(s, k, measured > s->planned ? measured : s->planned);
}

KOILA__HOT static void begin(aside *s, kind *k, bool is_aside)
{
    koila_assert(!s->last);
    s->last = k;
    s->is_aside = is_aside;
    s->is_spoiled = false;
    s->n_runs = s->n_backwards = 0;
    s->planned = s->peak = 0;
    s->began = is_aside && is_heard ? koila__seconds_now() : 0;
    s->held = koila__cpu_bytes_current();
    s->n_refused = n_refused_now();
    s->window = window_open();
    k->used = ++clock_of_uses;
}

void koila__aside_ran(const koila__step *step, int gpu, bool alone)
{
    aside *s = aside_now(false);
    const koila_plan_info *info = &step->c->info;
    kind *k = s ? s->last : NULL;
    if (!k || s->is_aside || step->asked_by == KOILA__ASKED_BY_PLAN)
        return;
    const uint64_t measured = step->measured && step->measured_peak_bytes > step->base_bytes
                                  ? step->measured_peak_bytes - step->base_bytes
                                  : 0;
    const uint64_t need = measured > info->peak_bytes ? measured : info->peak_bytes;
    s->n_runs++;
    s->is_spoiled |= info->n_slices > 1 || info->n_again || info->n_offloaded || info->n_inner ||
                     step->retries || !alone;
    s->planned = need > s->planned ? need : s->planned;
    k->gpu = gpu;
    const bool is_backward = step->asked_by == KOILA__ASKED_BY_BACKWARD;
    if (s->n_backwards && !is_backward)
        return; /* a value was read after it */
    s->n_backwards += is_backward;
    const koila__step gone = k->step;
    k->step = *step;
    k->step.n_aside = gone.n_aside;
    k->step.c->refs++;
    Py_XINCREF(k->step.early);
    step_release(gone);
}

void koila__aside_failed(void)
{
    aside *s = aside_now(false);
    if (s)
        s->is_spoiled = true;
}

/* ---- stepping aside */

KOILA__HOT static bool has_room(const aside *s, const kind *k, uint32_t share)
{
    return k->need + k->n_bytes <= s->room.bytes / share;
}

/* Brings s->room up to date for a step of kind k on the CPU. */
KOILA__HOT static bool look_at_cpu(aside *s, const kind *k)
{
    const bool is_same = s->room.gpu < 0 && s->room_version == s->version;
    const int64_t age = is_same ? koila__resident_answer_age(s->room_answer) : INT64_MAX;
    if (age <= LOOK_LASTS || (age <= LITTLE_LASTS && has_room(s, k, LITTLE_SHARE))) {
        koila__room_holds(&s->room, koila__cpu_bytes_current());
        return true;
    }
    const bool is_known = koila__room_on(-1, false, &s->room) == 0;
    s->room_version = s->version;
    s->room_answer = koila__resident_answer();
    return is_known;
}

/* Brings s->room up to date; whoever takes long to ask is asked at most ten times a second. */
static bool look_at_gpu(aside *s, int gpu)
{
    const int64_t now = koila__milliseconds_now();
    if (s->room.gpu == gpu && s->looked_at && now - s->looked_at <= LOOK_LASTS)
        return true;
    s->looked_at = now;
    const bool is_known = koila__room_on(gpu, true, &s->room) == 0 && s->room.gpu == gpu;
    PyErr_Clear();
    return is_known;
}

static uint64_t apart(uint64_t a, uint64_t b) { return a > b ? a - b : b - a; }

/* Than when it was recorded last. */
KOILA__HOT static bool holds_other(const aside *s, const kind *k)
{
    return k->gpu < 0 && apart(koila__cpu_bytes_current(), k->held) > k->need + slack(s);
}

/* A step of kind k begins. Does torch do it? -1 with an exception: what was left of the step before
 * could not be made. */
KOILA__HOT static int takes(aside *s, kind *k)
{
    const bool counts = s->last == k && !s->is_aside; /* and was not judged yet */
    if (k->n_equal + counts < equal_steps)
        return 0;
    const int is_free = koila__step_make_way();
    if (is_free <= 0)
        return is_free;
    judge(s);
    if (k->n_equal < equal_steps || k->look_due || k->n_unseen >= look_every)
        return 0;
    const bool is_known = k->gpu < 0 ? look_at_cpu(s, k) : look_at_gpu(s, k->gpu);
    if (!is_known || !has_room(s, k, SPARE)) {
        comes_back(k, "too little memory is free");
        return 0;
    }
    k->look_due = holds_other(s, k);
    return !k->look_due;
}

KOILA__HOT static int start(aside *s, kind *k)
{
    if (!k->step.n_aside) {
        PyObject *gpu = PyLong_FromLong(k->gpu);
        PyObject *done = gpu ? koila__ask("steps_aside", gpu, NULL, NULL) : NULL;
        Py_XDECREF(gpu);
        if (!done)
            return -1;
        Py_DECREF(done);
        turned("the last steps were whole, with room to spare");
    }
    k->step.n_aside++;
    k->n_unseen++;
    k->after = koila__n_told();
    n_steps++;
    begin(s, k, true);
    return 0;
}

/* 1: torch does the step with these inputs; 0; -1 with an exception. */
KOILA__HOT static int step_aside(aside *s, const inputs *in)
{
    if (!look_around(s))
        return 0;
    kind *k = find(s, in);
    const int does = k ? takes(s, k) : 0;
    return does > 0 && start(s, k) < 0 ? -1 : does;
}

/* What the last step was like, if torch has done it alone, and after run `number`; else NULL. */
static const koila__step *done_alone_since(uint64_t number)
{
    const aside *s = aside_now(false);
    const kind *found = NULL;
    for (uint32_t i = 0; s && i < N_KINDS; i++) {
        const kind *k = &s->at[i];
        if (!k->step.n_aside || k->after < number)
            continue;
        const bool is_backward = k->step.asked_by == KOILA__ASKED_BY_BACKWARD;
        const bool was = found && found->step.asked_by == KOILA__ASKED_BY_BACKWARD;
        if (!found || (is_backward == was ? k->used > found->used : is_backward))
            found = k;
    }
    return found ? &found->step : NULL;
}

const koila__step *koila__last_step(void)
{
    const koila__step *recorded = koila__past_last();
    const koila__step *alone = recorded ? done_alone_since(recorded->number) : NULL;
    return alone ? alone : recorded;
}

const koila__step *koila__step_numbered(uint64_t number)
{
    const aside *s = aside_now(false);
    for (uint32_t i = 0; s && i < N_KINDS; i++)
        if (s->at[i].step.n_aside && s->at[i].step.number == number)
            return &s->at[i].step;
    return koila__past_numbered(number);
}

/* A backward is over. If it is one of a step that torch does alone, the step is told from here on
 * with what is known of it now: the step, else NULL. Such a step has as many backwards as when it
 * was recorded. */
static const koila__step *ends_alone(void)
{
    aside *s = aside_now(false);
    kind *k = s ? s->last : NULL;
    if (!k || !s->is_aside || s->n_backwards >= k->n_backwards)
        return NULL;
    s->n_backwards++;
    k->step.measured = k->gpu < 0 && s->window >= 0;
    s->peak = peak_so_far(s);
    s->window = window_open();
    k->step.number = koila__number_next();
    k->after = k->step.number;
    k->step.seconds = s->began ? koila__seconds_now() - s->began : 0;
    k->step.base_bytes = s->held;
    k->step.measured_peak_bytes = s->peak;
    return &k->step;
}

/* ---- the copies */

/* New: a copy of batched input `o`, the same for the same tensor; anything else as it is. copies:
 * [in->n] borrowed, those made until now. */
KOILA__HOT static PyObject *handed_out(const inputs *in, PyObject **copies, PyObject *o)
{
    for (uint32_t i = 0; i < in->n; i++) {
        if (in->at[i] != o)
            continue;
        if (copies[i])
            return Py_NewRef(copies[i]);
        copies[i] = koila__copy_of(o, in->meta[i]);
        return copies[i];
    }
    return Py_NewRef(o);
}

KOILA__HOT static PyObject *copied_items(const inputs *in, PyObject **copies, PyObject *items)
{
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(items);
    const bool is_list = PyList_CheckExact(items);
    PyObject *out = is_list ? PyList_New(n) : PyTuple_New(n);
    for (Py_ssize_t i = 0; out && i < n; i++) {
        PyObject *copy = handed_out(in, copies, PySequence_Fast_GET_ITEM(items, i));
        if (!copy)
            Py_CLEAR(out);
        else if (is_list)
            PyList_SET_ITEM(out, i, copy);
        else
            PyTuple_SET_ITEM(out, i, copy);
    }
    return out;
}

/* ---- Python */

/* step_aside(values, batch): what lazy(*values, batch=batch) returns where torch does the step: of
 * tensors, or of one tuple or list of tensors. None: lazy() goes on. */
KOILA__HOT static PyObject *py_step_aside(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    inputs in = { .n = 0 };
    PyObject *copies[MOST_INPUTS] = { NULL };
    (void)self;
    if (n_args != 2 || !PyTuple_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "step_aside(tuple of values, batch)");
        return NULL;
    }
    PyObject *values = args[0];
    aside *s = aside_now(false);
    if (!s)
        Py_RETURN_NONE;
    if (s->last) {
        in.like = s->last->meta;
        in.n_like = s->last->n_inputs;
    }
    if (!call_inputs(&in, values, args[1]))
        Py_RETURN_NONE;
    const int does = step_aside(s, &in);
    if (does < 0)
        return NULL;
    if (!does)
        Py_RETURN_NONE;
    PyObject *items = items_of(values);
    return items == Py_None ? handed_out(&in, copies, PyTuple_GET_ITEM(values, 0))
                            : copied_items(&in, copies, items);
}

/* plain_inputs(values, batch): the batched tensors of lazy(*values, batch=batch), where these are
 * tensors, or one tuple or list of tensors, and all of them plain, with batches of one size; with
 * their batch dimensions. None: lazy() must look at them one by one. */
static PyObject *py_plain_inputs(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    inputs in = { .n = 0 };
    (void)self;
    if (n_args != 2 || !PyTuple_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "plain_inputs(tuple of values, batch)");
        return NULL;
    }
    if (!call_inputs(&in, args[0], args[1]) || !have_one_size(&in))
        Py_RETURN_NONE;
    PyObject *found = PyList_New(in.n);
    for (uint32_t i = 0; found && i < in.n; i++) {
        PyObject *one = Py_BuildValue("OIs", in.at[i], in.dim[i], "");
        if (one)
            PyList_SET_ITEM(found, i, one);
        else
            Py_CLEAR(found);
    }
    return found;
}

/* The inputs of a list of (tensor, batch dimension, ...). */
static bool found_inputs(PyObject *found, inputs *in)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found); i++) {
        PyObject *t, *dim, *where;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(found, i), "OO!O", &t, &PyLong_Type, &dim, &where) ||
            !add_input(in, t, PyLong_AsLongLong(dim))) {
            PyErr_Clear();
            return false;
        }
    }
    return in->n > 0;
}

/* takes_alone(found): does torch do the step with the tensors of `found`? */
static PyObject *py_takes_alone(PyObject *self, PyObject *found)
{
    inputs in = { .n = 0 };
    (void)self;
    aside *s = aside_now(false);
    const int does = s && PyList_Check(found) && found_inputs(found, &in) ? step_aside(s, &in) : 0;
    return does < 0 ? NULL : PyBool_FromLong(does);
}

/* watch_step(found | None): lazy() has opened a step with the tensors of `found`, or joined one.
 * None: torch must not do steps of its kind. */
static PyObject *py_watch_step(PyObject *self, PyObject *found)
{
    inputs in = { .n = 0 };
    (void)self;
    const koila__tape *t = koila__tape_open();
    const bool joins = t && t->n_axis_ids > 1;
    const bool is_plain = !joins && PyList_Check(found) && found_inputs(found, &in);
    aside *s = aside_now(is_plain);
    if (!s)
        Py_RETURN_NONE;
    const bool counts = is_plain && look_around(s);
    if (joins && s->last) /* more than the first call tells */
        s->is_spoiled = true;
    if (joins)
        Py_RETURN_NONE;
    judge(s);
    if (!counts)
        Py_RETURN_NONE;
    kind *k = find(s, &in);
    begin(s, k ? k : add(s, &in), false);
    Py_RETURN_NONE;
}

static PyObject *py_gpu_refused(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    n_gpu_refused++;
    Py_RETURN_NONE;
}

static PyObject *py_aside(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    return Py_BuildValue("{s:K,s:K,s:s}", "steps", (unsigned long long)n_steps, "turns",
                         (unsigned long long)n_turns, "why", why);
}

static PyObject *py_aside_step(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    const koila__step *told = koila__last_step();
    return PyBool_FromLong(told && told->n_aside);
}

/* ends_alone() → the number by which the step is told; 0: koila has recorded it, or it has no such
 * backward. */
static PyObject *py_ends_alone(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    const koila__step *step = ends_alone();
    return PyLong_FromUnsignedLongLong(step ? step->number : 0);
}

static PyObject *py_heard(PyObject *self, PyObject *yes)
{
    (void)self;
    is_heard = yes == Py_True;
    Py_RETURN_NONE;
}

static PyObject *py_aside_after(PyObject *self, PyObject *args)
{
    unsigned int equal, every;
    const uint32_t before[] = { equal_steps, look_every };
    (void)self;
    if (!PyArg_ParseTuple(args, "II:aside_after", &equal, &every))
        return NULL;
    equal_steps = equal;
    look_every = every;
    generation++;
    return Py_BuildValue("II", before[0], before[1]);
}

static PyMethodDef methods[] = {
    { "step_aside", (PyCFunction)(void (*)(void))py_step_aside, METH_FASTCALL,
      "step_aside(values, batch): what lazy(*values, batch=batch) returns where torch does the "
      "step; None: lazy() goes on." },
    { "plain_inputs", (PyCFunction)(void (*)(void))py_plain_inputs, METH_FASTCALL,
      "plain_inputs(values, batch) -> [(tensor, batch dimension, ''), ...] of lazy(*values, "
      "batch=batch), where all are plain and alike; None: lazy() looks at them one by one." },
    { "takes_alone", py_takes_alone, METH_O,
      "takes_alone([(tensor, batch dimension, where), ...]): does torch do the step with these?" },
    { "watch_step", py_watch_step, METH_O,
      "watch_step([(tensor, batch dimension, where), ...] | None): lazy() has opened a step with "
      "these, or joined one. None: torch must not do steps like it." },
    { "gpu_refused", py_gpu_refused, METH_NOARGS, "A GPU has run out of memory." },
    { "aside", py_aside, METH_NOARGS,
      "aside() -> {'steps': done by torch alone, 'turns': times that koila stepped aside or came "
      "back, 'why': the last of them}" },
    { "is_aside", py_aside_step, METH_NOARGS, "Has torch done the last step alone?" },
    { "ends_alone", py_ends_alone, METH_NOARGS,
      "ends_alone(): a backward of torch's own is over -> the number of the step that torch does "
      "alone, if it is one of that; else 0." },
    { "heard", py_heard, METH_O, "heard(bool): somebody listens to steps, or nobody any more." },
    { "aside_after", py_aside_after, METH_VARARGS,
      "aside_after(steps, every) -> before: koila steps aside after so many equal steps, and looks "
      "at one in so many; for tests." },
    { NULL, NULL, 0, NULL },
};

int koila__aside_add_module(PyObject *m) { return PyModule_AddFunctions(m, methods); }
