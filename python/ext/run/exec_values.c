/* exec_values.c — the values of a run: rows of whole values for a slice, and what slices give to
 * whole values: rows, sums, and pieces that a later loop fetches. */
#include "run/exec.h"

const koila_meta_info *koila__exec_meta(const exec *x, koila_value v)
{
    return koila_meta_get(x->table, koila_value_get(x->g, v).meta);
}

/* A view of t, which has `rows` rows, with dimension s.dim split in two: [..., outer, rows * inner,
 * ...] */
static PyObject *unflattened(PyObject *t, koila_share s, int64_t rows)
{
    PyObject *sizes = Py_BuildValue("(LL)", (long long)s.outer, (long long)(rows * s.inner));
    PyObject *split =
        sizes ? PyObject_CallFunction(koila__torch.unflatten, "OiO", t, (int)s.dim, sizes) : NULL;
    Py_XDECREF(sizes);
    return split;
}

/* Undoes unflattened(). Takes over `rows`, which may be NULL. */
static PyObject *flattened(PyObject *rows, koila_share s)
{
    if (!rows || s.outer == 1)
        return rows;
    PyObject *flat =
        PyObject_CallFunction(koila__torch.flatten, "Oii", rows, (int)s.dim, (int)s.dim + 1);
    Py_DECREF(rows);
    return flat;
}

/* A view of t, which has `batch` rows, on rows [begin, end) as share `s` places them; unflattened
 * where s.outer is not 1. */
static PyObject *rows_of(PyObject *t, koila_share s, int64_t batch, int64_t begin, int64_t end)
{
    koila_assert(0 <= begin && begin < end && end <= batch);
    const int64_t first = begin * s.inner;
    const int64_t n = (end - begin) * s.inner;
    if (s.outer == 1)
        return koila__torch_narrow(t, s.dim, first, n);
    PyObject *split = unflattened(t, s, batch);
    PyObject *rows = split ? koila__torch_narrow(split, s.dim + 1, first, n) : NULL;
    Py_XDECREF(split);
    return rows;
}

PyObject *koila__exec_rows(const exec *x, PyObject *whole, koila_share s)
{
    return flattened(rows_of(whole, s, x->batch, x->begin, x->end), s);
}

/* Copies rows of a value, which may lie in several blocks, into a dense tensor of the slice's form,
 * with no other memory. */
static PyObject *dense_slice(const exec *x, koila_value v, koila_share s)
{
    const int64_t n_rows = koila__exec_n_rows(x);
    PyObject *dense = koila__torch_empty(koila__exec_meta(x, v), s.dim, s.outer * s.inner * n_rows);
    if (!dense)
        return NULL;
    PyObject *rows = rows_of(x->whole[v], s, x->batch, x->begin, x->end);
    PyObject *to = s.outer > 1 ? unflattened(dense, s, n_rows) : Py_NewRef(dense);
    PyObject *done =
        rows && to ? PyObject_CallFunctionObjArgs(koila__torch.copy_, to, rows, NULL) : NULL;
    Py_XDECREF(rows);
    Py_XDECREF(to);
    if (!done)
        Py_CLEAR(dense);
    Py_XDECREF(done);
    return dense;
}

PyObject *koila__exec_slice(exec *x, koila_value v, koila_share s)
{
    koila_assert(x->whole[v] && !x->local[v]);
    const koila_meta_info *m = koila__exec_meta(x, v);
    const bool is_view = koila_slice_form(m, s, koila__exec_is_whole(x)) == KOILA_SLICE_VIEW;
    return is_view || !koila_meta_is_dense(m) ? koila__exec_rows(x, x->whole[v], s)
                                              : dense_slice(x, v, s);
}

/* An uninitialised tensor for all rows of v: in v's order of dimensions if it is dense, else
 * contiguous. */
static PyObject *empty_whole(const exec *x, koila_value v)
{
    koila_meta_info like = *koila__exec_meta(x, v);
    if (!koila_meta_is_dense(&like))
        like.stride = NULL;
    return koila__torch_empty(&like, -1, -1);
}

bool koila__exec_is_absent(const exec *x, koila_value v)
{
    return !x->local[v] && koila_plan_may_be_absent(x->plan, v);
}

int koila__exec_make_absent(exec *x, koila_value v)
{
    const koila_share s = koila_plan_share(x->plan, v);
    const bool is_rows = s.kind == KOILA_SHARE_SLICE;
    PyObject *zeros = koila__torch_empty(koila__exec_meta(x, v), is_rows ? (int32_t)s.dim : -1,
                                         is_rows ? s.outer * s.inner * koila__exec_n_rows(x) : -1);
    PyObject *done = zeros ? PyObject_CallFunctionObjArgs(koila__torch.zero_, zeros, NULL) : NULL;
    if (done)
        x->local[v] = Py_NewRef(zeros);
    Py_XDECREF(zeros);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int koila__exec_put(exec *x, koila_value v, bool owned)
{
    if (koila__exec_is_absent(x, v) && koila__exec_make_absent(x, v) < 0)
        return -1;
    koila_assert(x->local[v]);
    const koila_share s = koila_plan_share(x->plan, v);
    if (!x->acc[v] && owned && koila__exec_is_whole(x)) {
        x->acc[v] = Py_NewRef(x->local[v]);
        return 0;
    }
    if (!x->acc[v])
        x->acc[v] = empty_whole(x, v);
    if (!x->acc[v])
        return -1;
    PyObject *rows = rows_of(x->acc[v], s, x->batch, x->begin, x->end);
    PyObject *source =
        s.outer > 1 ? unflattened(x->local[v], s, koila__exec_n_rows(x)) : Py_NewRef(x->local[v]);
    PyObject *done = NULL;
    if (rows && source)
        done = PyObject_CallFunctionObjArgs(koila__torch.copy_, rows, source, NULL);
    Py_XDECREF(rows);
    Py_XDECREF(source);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The addend of the first slice, in the dtype in which the sum is accumulated. */
static PyObject *first_addend(const exec *x, koila_value v, koila_share s, bool owned)
{
    const koila_dtype dtype = koila__exec_meta(x, v)->dtype;
    const koila_dtype wide =
        koila_accumulator_dtype(dtype, s, koila__exec_is_whole(x) && !x->inner);
    if (wide != dtype)
        return koila__torch_cast(x->local[v], wide);
    return owned ? Py_NewRef(x->local[v])
                 : PyObject_CallFunctionObjArgs(koila__torch.clone, x->local[v], NULL);
}

/* The operator that combines two partial results; borrowed. */
static PyObject *combination_of(koila_partial_kind kind)
{
    switch (kind) {
    case KOILA_PARTIAL_SUM:
        return koila__torch.add_on;
    case KOILA_PARTIAL_MAX:
        return koila__torch.maximum;
    case KOILA_PARTIAL_MIN:
        return koila__torch.minimum;
    case KOILA_PARTIAL_MOMENTS:
        return koila__pseudo_object("koila::combine_moments");
    case KOILA_PARTIAL_PIECE:
        break; /* one slice alone has it */
    }
    koila_assert(!"a kind of partial result");
    return NULL;
}

int koila__exec_add(exec *x, koila_value v, bool owned)
{
    if (koila__exec_is_absent(x, v))
        return 0;
    koila_assert(x->local[v]);
    const koila_share s = koila_plan_share(x->plan, v);
    if (!x->acc[v]) {
        x->acc[v] = first_addend(x, v, s, owned);
        return x->acc[v] ? 0 : -1;
    }
    if (s.kind != KOILA_SHARE_PARTIAL)
        return 0; /* v is the same in every slice */
    PyObject *combine = combination_of((koila_partial_kind)s.partial);
    PyObject *const terms[] = { x->acc[v], x->local[v] };
    const bool in_place = s.partial == KOILA_PARTIAL_SUM;
    PyObject *sum = NULL;
    if (combine)
        sum = in_place ? koila__write_unseen(combine, terms, 2)
                       : PyObject_Vectorcall(combine, terms, 2, NULL);
    if (!sum)
        return -1;
    if (in_place)
        Py_DECREF(sum); /* in place */
    else
        Py_SETREF(x->acc[v], sum);
    return 0;
}

PyObject *koila__exec_seen_as(const exec *x, PyObject *t, koila_value from, koila_value to)
{
    const koila_meta_info *m = koila__exec_meta(x, to);
    if (koila_value_get(x->g, from).meta == koila_value_get(x->g, to).meta)
        return Py_NewRef(t);
    koila__hold_ids();
    PyObject *size = koila__ints_object(m->size, m->n_dims);
    PyObject *stride = koila__ints_object(m->stride, m->n_dims);
    koila__release_ids();
    PyObject *seen = size && stride ? PyObject_CallFunctionObjArgs(koila__torch.as_strided, t, size,
                                                                   stride, NULL)
                                    : NULL;
    Py_XDECREF(size);
    Py_XDECREF(stride);
    return seen;
}

int koila__exec_take_addend(exec *x, const koila_instr *in)
{
    const koila_value from = koila_node_get(x->g, in->id).first_output;
    PyObject *seen = koila__exec_seen_as(x, x->local[from], from, in->user);
    Py_CLEAR(x->local[from]);
    if (!seen)
        return -1;
    koila_assert(!x->local[in->user]);
    x->local[in->user] = seen;
    const int status = koila__exec_add(x, in->user, true);
    Py_CLEAR(x->local[in->user]);
    return status;
}

int koila__exec_keep(exec *x, koila_value v)
{
    if (koila__exec_is_absent(x, v) && koila__exec_make_absent(x, v) < 0)
        return -1;
    koila_assert(x->local[v]);
    const piece kept = { x->begin, x->end, x->local[v] };
    if (!koila__vec_push(&koila__libc, &x->kept[v], kept)) {
        PyErr_NoMemory();
        return -1;
    }
    Py_INCREF(kept.tensor);
    return 0;
}

PyObject *koila__exec_fetch(exec *x, koila_value v)
{
    const koila_share s = koila_plan_share(x->plan, v);
    pieces *p = &x->kept[v];
    koila_assert(!x->local[v]);
    for (uint32_t i = 0; i < p->n; i++)
        if (p->at[i].begin == x->begin && p->at[i].end == x->end) {
            Py_INCREF(p->at[i].tensor);
            return p->at[i].tensor;
        }
    PyObject *list = PyList_New(0);
    PyObject *joined = NULL;
    for (int64_t at = x->begin; list && at < x->end;) {
        const piece *found = NULL;
        for (uint32_t i = 0; i < p->n && !found; i++)
            if (p->at[i].begin <= at && at < p->at[i].end)
                found = &p->at[i];
        if (!found) {
            PyErr_Format(PyExc_SystemError, "koila: rows %lld of a kept value are missing",
                         (long long)at);
            Py_CLEAR(list);
            break;
        }
        const int64_t end = found->end < x->end ? found->end : x->end;
        PyObject *rows = rows_of(found->tensor, s, found->end - found->begin, at - found->begin,
                                 end - found->begin);
        if (!rows || PyList_Append(list, rows) < 0)
            Py_CLEAR(list);
        Py_XDECREF(rows);
        at = end;
    }
    if (list)
        joined = PyObject_CallFunction(koila__torch.cat, "Oi", list,
                                       (int)(s.outer > 1 ? s.dim + 1 : s.dim));
    Py_XDECREF(list);
    return flattened(joined, s);
}

void koila__exec_give_up(exec *x, koila_value v, int64_t begin, int64_t end)
{
    pieces *p = &x->kept[v];
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n; i++)
        if (p->at[i].begin >= begin && p->at[i].end <= end)
            Py_DECREF(p->at[i].tensor);
        else
            p->at[n++] = p->at[i];
    p->n = n;
}
