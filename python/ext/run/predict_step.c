/* predict_step.c — koila.plan(..., device=...): a recorded step on a GPU that is not here. Thin
 * over koila/predict.h.
 *
 *   predict(device name or JSON text, memory | 0, rows | 0 | -1 for the most that fit, the
 *       training's words and switches) -> dict, of the step planned last, whose
 *   plan is from then on the one that was predicted
 */
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

static int word_of(const char *word, const char *const *words, uint32_t n, const char *what,
                   uint32_t *out)
{
    for (uint32_t i = 0; i < n; i++)
        if (strcmp(word, words[i]) == 0)
            return (int)(*out = i, 0);
    PyErr_Format(PyExc_ValueError, "%s: %s is not known", what, word);
    return -1;
}

PyObject *koila__predict_graph(const koila_graph *g, const char *device, unsigned long long memory,
                               long long rows, const koila__training *with, koila_plan **plan)
{
    static const char *const optimizers[] = { "none", "sgd", "momentum", "adam", "adamw" },
                             *const ways[] = { "foreach", "fused", "loop" };
    static const char *const back_ends[] = { "auto", "flash", "efficient", "math", "cudnn" };
    koila_device *d = NULL;
    koila_error err = KOILA_ERROR_INIT;
    koila_predict_opts o = { .struct_size = sizeof o,
                             .memory_bytes = memory,
                             .rows = rows,
                             .weight_decay = with->weight_decay,
                             .amsgrad = with->amsgrad,
                             .clip_grad_norm = with->clip_grad_norm,
                             .ddp = with->ddp,
                             .autocast = with->autocast,
                             .grad_scaler = with->grad_scaler,
                             .cudnn_sdpa_last = with->cudnn_sdpa_last,
                             .cublas_workspace = with->cublas_workspace };
    if (word_of(with->optimizer, optimizers, 5, "optimizer", &o.optimizer) < 0 ||
        word_of(with->way, ways, 3, "optimizer_way", &o.way) < 0 ||
        word_of(with->sdpa, back_ends, 5, "sdpa", &o.sdpa) < 0)
        return NULL;
    koila_cache_config conf;
    if (koila_cache_config_init(&conf, with->torch_version) != KOILA_OK)
        koila_cache_config_init(&conf, NULL);
    if (with->conf &&
        koila_cache_config_parse(&conf, with->conf, with->strict_conf, &err) != KOILA_OK) {
        PyErr_Format(PyExc_ValueError, "conf: %s", err.text);
        return NULL;
    }
    koila_status status = device[0] == '{'
                              ? koila_device_open(device, strlen(device), NULL, &d, &err)
                              : koila_device_builtin(device, NULL, &d, &err);
    if (status != KOILA_OK) {
        PyErr_SetString(PyExc_ValueError, err.text);
        return NULL;
    }
    koila_prediction *p = PyMem_Calloc(1, sizeof *p);
    PyObject *out = NULL;
    if (!p) {
        koila_device_free(d);
        return PyErr_NoMemory();
    }
    p->struct_size = sizeof *p;
    Py_BEGIN_ALLOW_THREADS status = koila_predict_plan(g, d, &conf, &o, p, plan, &err);
    Py_END_ALLOW_THREADS if (status == KOILA_OOM) koila__raise_no_fit(status, &err, "plan()");
    else if (status != KOILA_OK) PyErr_Format(PyExc_RuntimeError, "koila: %s",
                                              err.text[0] ? err.text : koila_status_text(status));
    else
    {
        PyObject *notes = PyList_New(0);
        PyObject *unknown = PyList_New(0);
        PyObject *largest = PyList_New(0);
        for (uint32_t i = 0; notes && i < p->n_notes; i++) {
            PyObject *s = PyUnicode_FromString(p->notes[i]);
            if (!s || PyList_Append(notes, s) < 0)
                Py_CLEAR(notes);
            Py_XDECREF(s);
        }
        for (uint32_t i = 0; unknown && i < p->n_not_modelled; i++) {
            PyObject *s = Py_BuildValue("(sI)", p->not_modelled[i].op, p->not_modelled[i].n_calls);
            if (!s || PyList_Append(unknown, s) < 0)
                Py_CLEAR(unknown);
            Py_XDECREF(s);
        }
        for (uint32_t i = 0; largest && i < p->n_largest; i++) {
            PyObject *s = Py_BuildValue("(Kss)", (unsigned long long)p->largest[i].bytes,
                                        p->largest[i].what, p->largest[i].line);
            if (!s || PyList_Append(largest, s) < 0)
                Py_CLEAR(largest);
            Py_XDECREF(s);
        }
        if (notes && unknown && largest)
            out = Py_BuildValue(
                "{s:s,s:N,s:N,s:K,s:O,s:K,s:I,s:L,s:L,s:s,s:s,s:N,s:N,s:N}", "device",
                koila_device_name(d), "first", peaks_of(&p->first), "steady", peaks_of(&p->steady),
                "memory_bytes", (unsigned long long)p->memory_bytes, "fits",
                p->fits ? Py_True : Py_False, "spare_bytes", (unsigned long long)p->spare_bytes,
                "n_slices", p->n_slices, "batch", (long long)p->batch, "rows", (long long)p->rows,
                "peak_op", p->peak_op, "peak_line", p->peak_line, "largest", largest, "notes",
                notes, "not_modelled", unknown);
        else {
            Py_XDECREF(notes);
            Py_XDECREF(unknown);
            Py_XDECREF(largest);
        }
    }
    PyMem_Free(p);
    koila_device_free(d);
    return out;
}

PyObject *koila__device_names(void)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && koila_device_builtin_name(i); i++) {
        PyObject *s = PyUnicode_FromString(koila_device_builtin_name(i));
        if (!s || PyList_Append(list, s) < 0)
            Py_CLEAR(list);
        Py_XDECREF(s);
    }
    return list;
}
