/* predict_step.c — koila.plan(..., device=...): predicts a recorded step on a GPU that is not
 * present. A thin layer over koila/predict.h: it turns words into numbers, and the prediction into
 * a dict. */
#include "run/run.h"

static PyObject *range_of(koila_range r)
{
    return Py_BuildValue("(KKK)", (unsigned long long)r.low, (unsigned long long)r.expected,
                         (unsigned long long)r.high);
}

static PyObject *peaks_of(const koila_peaks *p)
{
    return Py_BuildValue("{s:N,s:N,s:N}", "allocated", range_of(p->allocated), "reserved",
                         range_of(p->reserved), "device", range_of(p->device));
}

/* *out := the index of `word` in `words` (NULL at the end), or ValueError. */
static int word_of(const char *word, const char *const *words, const char *what, uint32_t *out)
{
    for (uint32_t i = 0; words[i]; i++)
        if (strcmp(word, words[i]) == 0) {
            *out = i;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "%s: %s is not known", what, word);
    return -1;
}

static int options_of(const koila__training *with, koila_predict_opts *o)
{
    static const char *const optimizers[] = { "none", "sgd", "momentum", "adam", "adamw", NULL };
    static const char *const ways[] = { "foreach", "fused", "loop", NULL };
    static const char *const back_ends[] = { "auto", "flash", "efficient", "math", "cudnn", NULL };
    *o = (koila_predict_opts){ .struct_size = sizeof *o,
                               .weight_decay = with->weight_decay,
                               .amsgrad = with->amsgrad,
                               .clip_grad_norm = with->clip_grad_norm,
                               .ddp = with->ddp,
                               .autocast = with->autocast,
                               .grad_scaler = with->grad_scaler,
                               .cudnn_sdpa_last = with->cudnn_sdpa_last,
                               .cublas_workspace = with->cublas_workspace,
                               .cublaslt_workspace = with->cublaslt_workspace,
                               .keeps_cublas = with->keeps_cublas };
    if (word_of(with->optimizer, optimizers, "optimizer", &o->optimizer) < 0 ||
        word_of(with->way, ways, "optimizer_way", &o->way) < 0)
        return -1;
    return word_of(with->sdpa, back_ends, "sdpa", &o->sdpa);
}

static int allocator_of(const koila__training *with, koila_cache_config *conf)
{
    koila_error err = KOILA_ERROR_INIT;
    if (koila_cache_config_init(conf, with->torch_version) != KOILA_OK)
        koila_cache_config_init(conf, NULL);
    if (!with->conf ||
        koila_cache_config_parse(conf, with->conf, with->strict_conf, &err) == KOILA_OK)
        return 0;
    PyErr_Format(PyExc_ValueError, "conf: %s", err.text);
    return -1;
}

/* The device profile of a name, or from JSON text. */
static koila_device *device_of(const char *device)
{
    koila_device *d = NULL;
    koila_error err = KOILA_ERROR_INIT;
    const koila_status status = device[0] == '{'
                                    ? koila_device_open(device, strlen(device), NULL, &d, &err)
                                    : koila_device_builtin(device, NULL, &d, &err);
    if (status == KOILA_OK)
        return d;
    PyErr_SetString(PyExc_ValueError, err.text);
    return NULL;
}

/* Appends `o` (taken over) and returns the list. If either is NULL: releases the list, returns
 * NULL. */
static PyObject *with_item(PyObject *list, PyObject *o)
{
    if (list && (!o || PyList_Append(list, o) < 0))
        Py_CLEAR(list);
    Py_XDECREF(o);
    return list;
}

static PyObject *notes_of(const koila_prediction *p)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->n_notes; i++)
        list = with_item(list, PyUnicode_FromString(p->notes[i]));
    return list;
}

static PyObject *not_modelled_of(const koila_prediction *p)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->n_not_modelled; i++)
        list = with_item(list,
                         Py_BuildValue("(sI)", p->not_modelled[i].op, p->not_modelled[i].n_calls));
    return list;
}

static PyObject *largest_of(const koila_prediction *p)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->n_largest; i++)
        list = with_item(list, Py_BuildValue("(Kss)", (unsigned long long)p->largest[i].bytes,
                                             p->largest[i].what, p->largest[i].line));
    return list;
}

/* The prediction as a dict. NULL with the exception of the first part that fails. */
static PyObject *prediction_dict(const koila_prediction *p, const koila_device *d)
{
    return Py_BuildValue(
        "{s:s,s:N,s:N,s:{s:N,s:N},s:K,s:O,s:K,s:I,s:L,s:L,s:s,s:s,s:N,s:N,s:N}", "device",
        koila_device_name(d), "first", peaks_of(&p->first), "steady", peaks_of(&p->steady), "plain",
        "first", peaks_of(&p->plain_first), "steady", peaks_of(&p->plain_steady), "memory_bytes",
        (unsigned long long)p->memory_bytes, "fits", p->fits ? Py_True : Py_False, "spare_bytes",
        (unsigned long long)p->spare_bytes, "n_slices", p->n_slices, "batch", (long long)p->batch,
        "rows", (long long)p->rows, "peak_op", p->peak_op, "peak_line", p->peak_line, "largest",
        largest_of(p), "notes", notes_of(p), "not_modelled", not_modelled_of(p));
}

/* koila_predict_plan() without Python's lock, on a copy that no other thread knows: rewriting a
 * step enters calls into its table. *part: the copy, the caller's also where this fails. */
static koila_status predict_alone(const koila_graph *g, const koila_device *d,
                                  const koila_cache_config *conf, const koila_predict_opts *o,
                                  koila_prediction *p, koila_graph **part, koila_plan **plan,
                                  koila_error *err)
{
    koila_status status = koila_graph_copy(g, NULL, part);
    if (status != KOILA_OK)
        return status;
    Py_BEGIN_ALLOW_THREADS;
    status = koila_predict_plan(*part, d, conf, o, p, plan, err);
    Py_END_ALLOW_THREADS;
    return status;
}

/* d: the device profile. */
static PyObject *predict_on(const koila_device *d, const koila_graph *g,
                            const koila_cache_config *conf, const koila_predict_opts *o,
                            cached **out)
{
    koila_error err = KOILA_ERROR_INIT;
    koila_graph *part = NULL;
    koila_plan *plan = NULL;
    PyObject *dict = NULL;
    koila_prediction *p = PyMem_Calloc(1, sizeof *p);
    if (!p)
        return PyErr_NoMemory();
    p->struct_size = sizeof *p;
    const koila_status status = predict_alone(g, d, conf, o, p, &part, &plan, &err);
    *out = status == KOILA_OK ? koila__cached_predicted(part, plan) : NULL;
    if (*out)
        dict = prediction_dict(p, d);
    else if (status != KOILA_OK)
        koila__raise_no_fit(status, &err, "plan()");
    if (!*out) {
        koila_plan_free(plan);
        koila_graph_copy_free(part);
    } else if (!dict) {
        koila__cached_release(*out);
        *out = NULL;
    }
    PyMem_Free(p);
    return dict;
}

PyObject *koila__predict_graph(const koila_graph *g, const char *device, uint64_t memory,
                               int64_t rows, const koila__training *with, cached **out)
{
    koila_predict_opts o;
    koila_cache_config conf;
    if (options_of(with, &o) < 0 || allocator_of(with, &conf) < 0)
        return NULL;
    o.memory_bytes = memory;
    o.rows = rows;
    o.rows_only = koila__settings_now().axes == KOILA__CUT_BATCH;
    koila_device *d = device_of(device);
    if (!d)
        return NULL;
    PyObject *dict = predict_on(d, g, &conf, &o, out);
    koila_device_free(d);
    return dict;
}

PyObject *koila__device_field(const char *device, const char *key)
{
    koila_device *d = device_of(device);
    PyObject *out = NULL;
    for (int i = 0; d && i < KOILA_N_DEVICE_FIELDS && !out; i++)
        if (strcmp(koila_device_field_key((koila_device_field)i), key) == 0)
            out = PyLong_FromUnsignedLongLong(koila_device_get(d, (koila_device_field)i).value);
    if (d && !out && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "a device profile has no field %s", key);
    koila_device_free(d);
    return out;
}

PyObject *koila__device_names(void)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && koila_device_builtin_name(i); i++)
        list = with_item(list, PyUnicode_FromString(koila_device_builtin_name(i)));
    return list;
}
