/* table.c — interning. Operators, metas and call signatures repeat from step to step; each is
 * stored once and named by a dense id, so that recording a node is an array append and comparing
 * two steps is comparing ids. An entry is one block, which never moves. Each kind has: a hash of
 * its contents, a comparison, and an id set. A new entry is complete before it enters the set. What
 * no graph names is forgotten on request (forget.c), and its id given to a new entry. */
#include "graph/table.h"

_Static_assert(KOILA__NO_ID == KOILA_NONE, "ids of sets are ids of the graph");

/* ---- dtypes */

#define DTYPE_TEXT(name, text, n_bytes, torch) text,
#define DTYPE_BYTES(name, text, n_bytes, torch) n_bytes,
#define DTYPE_TORCH(name, text, n_bytes, torch) torch,
static const char *const dtype_texts[] = { KOILA_DTYPE_MAP(DTYPE_TEXT) };
static const char *const dtype_torches[] = { KOILA_DTYPE_MAP(DTYPE_TORCH) };
static const uint8_t dtype_bytes[] = { KOILA_DTYPE_MAP(DTYPE_BYTES) };

const char *koila_dtype_text(koila_dtype d)
{
    return (unsigned)d < KOILA_N_DTYPES ? dtype_texts[d] : "?";
}
const char *koila_dtype_torch(koila_dtype d)
{
    return (unsigned)d < KOILA_N_DTYPES ? dtype_torches[d] : "?";
}
uint32_t koila_dtype_bytes(koila_dtype d)
{
    return (unsigned)d < KOILA_N_DTYPES ? dtype_bytes[d] : 0;
}

/* ---- ids and blocks */

/* Gives `entry` an id: one that is free, else the next. False: no memory. */
#define PLACE(t, kind, entry, id)                                                                  \
    (koila__vec_reserve(&(t)->mem, &(t)->kind, (t)->free_##kind.n ? 0 : 1) &&                      \
     (*(id) = (t)->free_##kind.n ? (t)->free_##kind.at[--(t)->free_##kind.n] : (t)->kind.n++,      \
      (t)->kind.at[*(id)] = (entry), true))

/* Gives a block back; NULL is fine. Where invariants are checked, whoever still reads it sees that
 * at once. */
static void release_block(const koila_table *t, void *block, size_t n_bytes)
{
    if (!block)
        return;
#if KOILA_DEBUG_LEVEL >= 2
    memset(block, 0xdb, n_bytes);
#endif
    koila__release(&t->mem, block, n_bytes);
}

/* ---- texts and operators */

uint64_t koila__text_hash_of(const void *t, uint32_t id)
{
    return koila__hash_text(((const koila_table *)t)->texts.at[id]);
}
static bool text_same(const void *t, uint32_t id, const void *key)
{
    return strcmp(((const koila_table *)t)->texts.at[id], key) == 0;
}
static uint64_t op_hash_of(const void *t, uint32_t id)
{
    return koila__hash_text(((const koila_table *)t)->ops.at[id].name);
}
static bool op_same(const void *t, uint32_t id, const void *key)
{
    return strcmp(((const koila_table *)t)->ops.at[id].name, key) == 0;
}

char *koila__table_copy_text(const koila_table *t, const char *text)
{
    const size_t n = strlen(text) + 1;
    char *copy = koila__realloc(&t->mem, NULL, 0, n);
    return copy ? memcpy(copy, text, n) : NULL;
}

void koila__table_free_text(const koila_table *t, char *text)
{
    release_block(t, text, text ? strlen(text) + 1 : 0);
}

koila_status koila_table_text(koila_table *t, const char *text, uint32_t *out)
{
    const uint64_t hash = koila__hash_text(text);
    uint32_t id = koila__idset_find(&t->text_set, hash, text_same, t, text);
    if (id == KOILA_NONE) {
        char *copy = koila__table_copy_text(t, text);
        if (!copy || !koila__idset_reserve(&t->mem, &t->text_set, koila__text_hash_of, t) ||
            !PLACE(t, texts, copy, &id)) {
            koila__table_free_text(t, copy);
            return KOILA_NO_MEMORY;
        }
        koila__idset_insert(&t->text_set, hash, id);
    }
    *out = id;
    return KOILA_OK;
}
const char *koila_text(const koila_table *t, uint32_t text)
{
    return koila_table_has_text(t, text) ? t->texts.at[text] : "";
}
bool koila_table_has_text(const koila_table *t, uint32_t text)
{
    return text < t->texts.n && t->texts.at[text];
}

koila_status koila_table_op(koila_table *t, const char *name, uint32_t flags, koila_op *out)
{
    const uint64_t hash = koila__hash_text(name);
    uint32_t id = koila__idset_find(&t->op_set, hash, op_same, t, name);
    if (id == KOILA_NONE) {
        char *copy = koila__arena_str(&t->arena, name, strlen(name));
        koila__op op = { .name = copy, .flags = flags };
        if (!copy || !koila__op_fill_in(t, &op) ||
            !koila__idset_reserve(&t->mem, &t->op_set, op_hash_of, t) ||
            !koila__vec_push(&t->mem, &t->ops, op))
            return KOILA_NO_MEMORY;
        id = t->ops.n - 1;
        koila__idset_insert(&t->op_set, hash, id);
    }
    *out = id;
    return KOILA_OK;
}
const char *koila_op_name(const koila_table *t, koila_op op)
{
    return op < t->ops.n ? t->ops.at[op].name : "";
}
uint32_t koila_op_flags(const koila_table *t, koila_op op)
{
    return op < t->ops.n ? t->ops.at[op].flags : 0;
}
uint32_t koila_op_facts(const koila_table *t, koila_op op)
{
    return op < t->ops.n ? t->ops.at[op].facts : 0;
}
uint32_t koila_table_n_ops(const koila_table *t) { return t->ops.n; }

koila_status koila_table_opaque(koila_table *t, const char *label, uint32_t *out)
{
    char *copy = koila__table_copy_text(t, label);
    if (copy && PLACE(t, opaques, copy, out))
        return KOILA_OK;
    koila__table_free_text(t, copy);
    return KOILA_NO_MEMORY;
}
const char *koila_opaque_label(const koila_table *t, uint32_t id)
{
    return koila_table_has_opaque(t, id) ? t->opaques.at[id] : "";
}
bool koila_table_has_opaque(const koila_table *t, uint32_t opaque)
{
    return opaque < t->opaques.n && t->opaques.at[opaque];
}

/* ---- metas */

/* One step of a hash of many numbers, which koila__mix() ends: half as long as one of that. */
static uint64_t hash_next(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
}

static uint64_t hash_meta(const koila_meta_info *m)
{
    uint64_t h = (uint64_t)m->dtype << 32 | (uint64_t)m->device << 8;
    for (uint32_t d = 0; d < m->n_dims; d++)
        h = hash_next(hash_next(h, (uint64_t)m->size[d]), (uint64_t)m->stride[d]);
    return koila__mix(h, m->n_dims);
}
uint64_t koila__meta_hash_of(const void *t, uint32_t id)
{
    return hash_meta(((const koila_table *)t)->metas.at[id]);
}
static bool meta_same(const void *t, uint32_t id, const void *key)
{
    const koila_meta_info *a = ((const koila_table *)t)->metas.at[id];
    const koila_meta_info *b = key;
    return a->dtype == b->dtype && a->device == b->device && a->n_dims == b->n_dims &&
           memcmp(a->size, b->size, a->n_dims * sizeof *a->size) == 0 &&
           memcmp(a->stride, b->stride, a->n_dims * sizeof *a->stride) == 0;
}

/* Computes the strides of a contiguous tensor and its number of elements. False: not valid sizes.
 */
static bool contiguous(uint32_t n_dims, const int64_t *size, int64_t *stride, uint64_t *n_elements)
{
    uint64_t n = 1;
    bool empty = false;
    for (uint32_t d = n_dims; d-- > 0;) {
        if (size[d] < 0)
            return false;
        stride[d] = (int64_t)n;
        empty |= size[d] == 0;
        if (size[d] > 1 && (!koila__mul(n, (uint64_t)size[d], &n) || n > INT64_MAX))
            return false;
    }
    *n_elements = empty ? 0 : n;
    return true;
}

/* Elements of the smallest storage that holds a tensor that is not empty. False: too many. */
static bool storage_elements(const koila_meta_info *m, uint64_t *out)
{
    uint64_t reach = 1;
    for (uint32_t d = 0; d < m->n_dims; d++) {
        uint64_t span;
        const uint64_t step = m->stride[d] < 0 ? 0 : (uint64_t)m->stride[d];
        if (!koila__mul((uint64_t)(m->size[d] - 1), step, &span) ||
            !koila__add(reach, span, &reach))
            return false;
    }
    *out = reach;
    return true;
}

/* False: more than a signed 64-bit number. */
static bool bytes_of(uint64_t n_elements, koila_dtype dtype, uint64_t *out)
{
    return koila__mul(n_elements, dtype_bytes[dtype], out) && *out <= INT64_MAX;
}

/* With its own sizes and strides. */
koila_meta_info *koila__table_copy_meta(const koila_table *t, const koila_meta_info *m)
{
    const size_t n_bytes = m->n_dims * sizeof *m->size;
    koila_meta_info *copy = koila__realloc(&t->mem, NULL, 0, sizeof *copy + 2 * n_bytes);
    if (!copy)
        return NULL;
    int64_t *dims = (int64_t *)(copy + 1);
    *copy = *m;
    if (m->n_dims) {
        memcpy(dims, m->size, n_bytes);
        memcpy(dims + m->n_dims, m->stride, n_bytes);
    }
    copy->size = dims;
    copy->stride = dims + m->n_dims;
    return copy;
}

void koila__table_free_meta(const koila_table *t, koila_meta_info *m)
{
    release_block(t, m, m ? sizeof *m + 2 * m->n_dims * sizeof *m->size : 0);
}

koila_status koila_table_meta(koila_table *t, koila_dtype dtype, uint16_t device, uint32_t n_dims,
                              const int64_t *size, const int64_t *stride, koila_meta *out)
{
    int64_t dense[KOILA_MAX_DIMS];
    uint64_t n_stored = 0;
    if ((unsigned)dtype >= KOILA_N_DTYPES || n_dims > KOILA_MAX_DIMS)
        return KOILA_BAD_ARGUMENT;
    koila_meta_info m = { .dtype = dtype,
                          .device = device,
                          .n_dims = (uint8_t)n_dims,
                          .size = size,
                          .stride = stride ? stride : dense };
    if (!contiguous(n_dims, size, dense, &m.n_elements) ||
        (m.n_elements && !storage_elements(&m, &n_stored)) ||
        !bytes_of(m.n_elements, dtype, &m.n_bytes) ||
        !bytes_of(n_stored, dtype, &m.n_storage_bytes))
        return KOILA_BAD_ARGUMENT;
    const uint64_t hash = hash_meta(&m);
    uint32_t id = koila__idset_find(&t->meta_set, hash, meta_same, t, &m);
    if (id == KOILA_NONE) {
        koila_meta_info *copy = koila__table_copy_meta(t, &m);
        if (!copy || !koila__idset_reserve(&t->mem, &t->meta_set, koila__meta_hash_of, t) ||
            !PLACE(t, metas, copy, &id)) {
            koila__table_free_meta(t, copy);
            return KOILA_NO_MEMORY;
        }
        koila__idset_insert(&t->meta_set, hash, id);
    }
    *out = id;
    return KOILA_OK;
}
KOILA__HOT const koila_meta_info *koila_meta_get(const koila_table *t, koila_meta meta)
{
    return meta < t->metas.n ? t->metas.at[meta] : NULL;
}

KOILA__HOT bool koila_meta_is_contiguous(const koila_meta_info *m)
{
    int64_t expect = 1;
    for (uint32_t i = m->n_dims; i-- > 0;) {
        if (m->size[i] != 1 && m->stride[i] != expect)
            return false;
        expect *= m->size[i];
    }
    return true;
}

/* The innermost dimension not yet done. */
static uint32_t innermost(const koila_meta_info *m, const bool *done)
{
    uint32_t found = KOILA_NONE;
    for (uint32_t d = m->n_dims; d-- > 0;) {
        if (done[d])
            continue;
        if (found == KOILA_NONE || (m->stride && m->stride[d] < m->stride[found]))
            found = d;
    }
    return found;
}

/* Does each dimension lie within the one before it? */
static bool is_in_order(const koila_meta_info *m)
{
    for (uint32_t d = 1; d < m->n_dims && m->stride; d++)
        if (m->stride[d] > m->stride[d - 1])
            return false;
    return true;
}

void koila_dense_strides(const koila_meta_info *like, const int64_t *size, int64_t *stride)
{
    bool done[KOILA_MAX_DIMS] = { 0 };
    int64_t step = 1;
    koila_assert_arg(like->n_dims <= KOILA_MAX_DIMS);
    if (is_in_order(like)) {
        for (uint32_t d = like->n_dims; d-- > 0;) {
            stride[d] = step;
            step *= size[d] > 1 ? size[d] : 1;
        }
        return;
    }
    for (uint32_t k = 0; k < like->n_dims; k++) {
        const uint32_t d = innermost(like, done);
        done[d] = true;
        stride[d] = step;
        if (size[d] > 1)
            step *= size[d];
    }
}

bool koila_meta_is_dense(const koila_meta_info *m)
{
    int64_t expect[KOILA_MAX_DIMS];
    if (m->n_storage_bytes != m->n_bytes)
        return false;
    /* as many elements as there is room for, but some may lie on each other beside a gap */
    koila_dense_strides(m, m->size, expect);
    for (uint32_t d = 0; d < m->n_dims && m->n_bytes && m->stride; d++)
        if (m->size[d] > 1 && m->stride[d] != expect[d])
            return false;
    return true;
}

/* ---- signatures */

/* The kind goes with the number: one step for both. */
static uint64_t hash_token(uint64_t h, const koila_arg *a)
{
    h += (uint64_t)a->kind << 56;
    switch ((koila_arg_kind)a->kind) {
    case KOILA_ARG_ABSENT:
        return hash_next(h, 0);
    case KOILA_ARG_LIST:
        return hash_next(h, a->n);
    case KOILA_ARG_INT:
    case KOILA_ARG_BOOL:
        return hash_next(h, (uint64_t)a->u.i);
    case KOILA_ARG_FLOAT: {
        uint64_t bits;
        memcpy(&bits, &a->u.f, sizeof bits);
        return hash_next(h, bits);
    }
    default:
        return hash_next(h, a->u.id);
    }
}
static bool token_same(const koila_arg *a, const koila_arg *b)
{
    if (a->kind != b->kind)
        return false;
    switch ((koila_arg_kind)a->kind) {
    case KOILA_ARG_ABSENT:
        return true;
    case KOILA_ARG_LIST:
        return a->n == b->n;
    case KOILA_ARG_INT:
    case KOILA_ARG_BOOL:
        return a->u.i == b->u.i;
    case KOILA_ARG_FLOAT:
        return memcmp(&a->u.f, &b->u.f, sizeof a->u.f) == 0;
    default:
        return a->u.id == b->u.id;
    }
}
static uint64_t hash_sig(const koila_sig_info *s)
{
    uint64_t h = hash_next((uint64_t)s->op << 8 | s->grad_mode, (uint64_t)s->n_pos << 32 | s->n_kw);
    for (uint32_t i = 0; i < s->n_tokens; i++)
        h = hash_token(h, &s->tokens[i]);
    for (uint32_t i = 0; i < s->n_kw; i++)
        h = hash_next(h, s->kw_names[i]);
    for (uint32_t i = 0; i < s->n_fresh; i++)
        h = hash_next(h, s->outputs[i]);
    for (uint32_t w = 0; w < s->n_writes; w++) {
        h = hash_next(h, (uint64_t)s->writes[w].input << 1 | s->writes[w].overwrites);
        for (uint32_t l = 0; l < s->writes[w].n_links; l++)
            h = hash_next(h,
                          (uint64_t)s->writes[w].links[l].sig << 32 | s->writes[w].links[l].output);
    }
    return koila__mix(h, 0);
}
uint64_t koila__sig_hash_of(const void *t, uint32_t id)
{
    return hash_sig(((const koila_table *)t)->sigs.at[id]);
}
static bool write_same(const koila_write *a, const koila_write *b)
{
    if (a->input != b->input || a->overwrites != b->overwrites || a->n_links != b->n_links)
        return false;
    for (uint32_t l = 0; l < a->n_links; l++)
        if (a->links[l].sig != b->links[l].sig || a->links[l].output != b->links[l].output)
            return false;
    return true;
}
static bool sig_same(const void *t, uint32_t id, const void *key)
{
    const koila_sig_info *a = ((const koila_table *)t)->sigs.at[id];
    const koila_sig_info *b = key;
    if (a->op != b->op || a->grad_mode != b->grad_mode || a->result_kind != b->result_kind ||
        a->n_tokens != b->n_tokens || a->n_pos != b->n_pos || a->n_kw != b->n_kw ||
        a->n_fresh != b->n_fresh || a->n_writes != b->n_writes)
        return false;
    for (uint32_t i = 0; i < a->n_tokens; i++)
        if (!token_same(&a->tokens[i], &b->tokens[i]))
            return false;
    for (uint32_t i = 0; i < a->n_kw; i++)
        if (a->kw_names[i] != b->kw_names[i])
            return false;
    for (uint32_t i = 0; i < a->n_fresh; i++)
        if (a->outputs[i] != b->outputs[i])
            return false;
    for (uint32_t w = 0; w < a->n_writes; w++)
        if (!write_same(&a->writes[w], &b->writes[w]))
            return false;
    return true;
}

/* Does the token name an existing id? */
static bool is_token(const koila_table *t, const koila_arg *a)
{
    switch ((koila_arg_kind)a->kind) {
    case KOILA_ARG_TENSOR:
        return koila_meta_get(t, a->u.id) != NULL;
    case KOILA_ARG_BOOL:
        return (uint64_t)a->u.i <= 1;
    case KOILA_ARG_STR:
        return koila_table_has_text(t, a->u.id);
    case KOILA_ARG_DTYPE:
        return a->u.id < KOILA_N_DTYPES;
    case KOILA_ARG_OPAQUE:
        return koila_table_has_opaque(t, a->u.id);
    case KOILA_ARG_ABSENT:
    case KOILA_ARG_INT:
    case KOILA_ARG_FLOAT:
    case KOILA_ARG_LIST:
        return true;
    }
    return false;
}

/* Counts the values that the tokens form, and the tensors among them. False: a token is invalid. */
static bool count_values(const koila_table *t, const koila_sig_info *d, uint32_t *n_values,
                         uint32_t *n_tensors)
{
    uint32_t n_rest = 0; /* remaining tokens of a list */
    *n_values = 0;
    *n_tensors = 0;
    for (uint32_t i = 0; i < d->n_tokens; i++) {
        const koila_arg *a = &d->tokens[i];
        const bool is_list = a->kind == KOILA_ARG_LIST;
        if (!is_token(t, a) || (is_list && (n_rest || a->n > d->n_tokens - i - 1)))
            return false;
        *n_tensors += a->kind == KOILA_ARG_TENSOR;
        if (n_rest) {
            n_rest--;
            continue;
        }
        ++*n_values;
        if (is_list)
            n_rest = a->n;
    }
    return true;
}

/* A view call of one tensor, and one of its results. */
static bool is_link(const koila_table *t, koila_link link)
{
    if (!koila_sig_get(t, link.sig))
        return false;
    const koila_sig_info *view = koila__sig(t, link.sig);
    return view->n_inputs == 1 && !view->n_writes && link.output < view->n_fresh &&
           view->outputs[link.output] != KOILA_NONE;
}

static bool is_write(const koila_table *t, const koila_write *w, uint32_t n_inputs)
{
    if (w->input >= n_inputs || (w->overwrites && w->n_links))
        return false;
    for (uint32_t l = 0; l < w->n_links; l++)
        if (!is_link(t, w->links[l]))
            return false;
    return true;
}

/* Counts TENSOR tokens and checks that ids exist and values cover the tokens exactly. */
static koila_status check_desc(const koila_table *t, const koila_sig_info *d, uint32_t *n_inputs)
{
    enum { MOST_VALUES = 4096, N_RESULT_KINDS = 5 };
    uint32_t n_tensors;
    uint32_t n_values;
    if (d->op >= t->ops.n || d->n_pos > MOST_VALUES || d->n_kw > MOST_VALUES ||
        d->result_kind >= N_RESULT_KINDS)
        return KOILA_BAD_ARGUMENT;
    if (d->n_fresh > UINT32_MAX / 2 || d->n_writes > UINT32_MAX / 2)
        return KOILA_BAD_ARGUMENT;
    if (!count_values(t, d, &n_values, &n_tensors) || n_values != d->n_pos + d->n_kw)
        return KOILA_BAD_ARGUMENT;
    for (uint32_t i = 0; i < d->n_kw; i++)
        if (!koila_table_has_text(t, d->kw_names[i]))
            return KOILA_BAD_ARGUMENT;
    for (uint32_t i = 0; i < d->n_fresh; i++)
        if (d->outputs[i] != KOILA_NONE && !koila_meta_get(t, d->outputs[i]))
            return KOILA_BAD_ARGUMENT;
    for (uint32_t w = 0; w < d->n_writes; w++)
        if (!is_write(t, &d->writes[w], n_tensors))
            return KOILA_BAD_ARGUMENT;
    *n_inputs = n_tensors;
    return KOILA_OK;
}

/* Bytes of the block of signature `d`, which holds all its arrays. 0: too many. */
static size_t sig_bytes(const koila_sig_info *d, uint32_t n_inputs)
{
    uint64_t n = sizeof *d + (uint64_t)d->n_tokens * sizeof *d->tokens +
                 (uint64_t)d->n_writes * sizeof *d->writes;
    n += ((uint64_t)d->n_pos + 2 * (uint64_t)d->n_kw + n_inputs) * sizeof(uint32_t);
    n += ((uint64_t)d->n_fresh + d->n_writes) * sizeof(koila_meta);
    for (uint32_t w = 0; w < d->n_writes; w++)
        n += (uint64_t)d->writes[w].n_links * sizeof *d->writes[w].links;
    return n <= SIZE_MAX / 2 ? (size_t)n : 0;
}

/* The next n_bytes of a block; *at moves on. */
static void *take(char **at, size_t n_bytes)
{
    void *p = *at;
    *at += n_bytes;
    return p;
}

static koila_sig_info *copy_sig(const koila_table *t, const koila_sig_info *d, uint32_t n_inputs)
{
    const size_t n_bytes = sig_bytes(d, n_inputs);
    char *block = n_bytes ? koila__realloc(&t->mem, NULL, 0, n_bytes) : NULL;
    if (!block)
        return NULL;
    memset(block, 0, n_bytes);
    char *at = block; /* first what is aligned to 8 bytes, then what is to 4 */
    koila_sig_info *s = take(&at, sizeof *s);
    koila_arg *tokens = take(&at, d->n_tokens * sizeof *tokens);
    koila_write *writes = take(&at, d->n_writes * sizeof *writes);
    uint32_t *start = take(&at, (d->n_pos + d->n_kw) * sizeof *start);
    uint32_t *kw_names = take(&at, d->n_kw * sizeof *kw_names);
    koila_meta *inputs = take(&at, n_inputs * sizeof *inputs);
    koila_meta *outputs = take(&at, (d->n_fresh + d->n_writes) * sizeof *outputs);
    *s = *d;
    if (d->n_tokens)
        memcpy(tokens, d->tokens, d->n_tokens * sizeof *tokens);
    if (d->n_kw)
        memcpy(kw_names, d->kw_names, d->n_kw * sizeof *kw_names);
    if (d->n_fresh)
        memcpy(outputs, d->outputs, d->n_fresh * sizeof *outputs);
    uint32_t k = 0, in = 0;
    for (uint32_t i = 0; i < d->n_tokens;
         i += 1 + (tokens[i].kind == KOILA_ARG_LIST ? tokens[i].n : 0))
        start[k++] = i;
    for (uint32_t i = 0; i < d->n_tokens; i++)
        if (tokens[i].kind == KOILA_ARG_TENSOR)
            inputs[in++] = tokens[i].u.id;
    for (uint32_t w = 0; w < d->n_writes; w++) {
        koila_link *links = take(&at, d->writes[w].n_links * sizeof *links);
        if (d->writes[w].n_links)
            memcpy(links, d->writes[w].links, d->writes[w].n_links * sizeof *links);
        writes[w] = d->writes[w];
        writes[w].links = links;
        outputs[d->n_fresh + w] = inputs[d->writes[w].input];
    }
    koila_assert(at == block + n_bytes);
    s->tokens = tokens;
    s->start = start;
    s->kw_names = kw_names;
    s->inputs = inputs;
    s->n_inputs = n_inputs;
    s->outputs = outputs;
    s->n_outputs = d->n_fresh + d->n_writes;
    s->writes = writes;
    return s;
}

koila_sig_info *koila__table_copy_sig(const koila_table *t, const koila_sig_info *s)
{
    return copy_sig(t, s, s->n_inputs);
}

void koila__table_free_sig(const koila_table *t, koila_sig_info *s)
{
    release_block(t, s, s ? sig_bytes(s, s->n_inputs) : 0);
}

koila_status koila_table_sig(koila_table *t, const koila_sig_info *desc, koila_sig *out)
{
    uint32_t n_inputs = 0;
    KOILA_TRY(check_desc(t, desc, &n_inputs));
    const uint64_t hash = hash_sig(desc);
    uint32_t id = koila__idset_find(&t->sig_set, hash, sig_same, t, desc);
    if (id == KOILA_NONE) {
        koila_sig_info *s = copy_sig(t, desc, n_inputs);
        if (!s || !koila__idset_reserve(&t->mem, &t->sig_set, koila__sig_hash_of, t) ||
            !PLACE(t, sigs, s, &id)) {
            koila__table_free_sig(t, s);
            return KOILA_NO_MEMORY;
        }
        koila__idset_insert(&t->sig_set, hash, id);
    }
    *out = id;
    return KOILA_OK;
}
const koila_sig_info *koila_sig_get(const koila_table *t, koila_sig sig)
{
    return sig < t->sigs.n ? t->sigs.at[sig] : NULL;
}
uint32_t koila_table_n_sigs(const koila_table *t) { return t->sigs.n; }

/* ---- life */

koila_status koila_table_new(const koila_allocator *mem, koila_table **out)
{
    const koila_allocator a = koila__allocator(mem);
    koila_table *t = koila__realloc(&a, NULL, 0, sizeof *t);
    if (!t)
        return KOILA_NO_MEMORY;
    memset(t, 0, sizeof *t);
    t->mem = a;
    koila__arena_init(&t->arena, &a);
    if (!koila__op_lines_init(t)) {
        koila_table_free(t);
        return KOILA_NO_MEMORY;
    }
    *out = t;
    return KOILA_OK;
}

void koila_table_free(koila_table *t)
{
    if (!t)
        return;
    const koila_allocator mem = t->mem;
    koila__idset *sets[] = { &t->op_set, &t->op_lines, &t->text_set, &t->meta_set, &t->sig_set };
    for (size_t i = 0; i < KOILA_COUNT(sets); i++)
        koila__idset_free(&mem, sets[i]);
    koila_assert_arg(!t->graphs);
    for (uint32_t i = 0; i < t->texts.n; i++)
        koila__table_free_text(t, t->texts.at[i]);
    for (uint32_t i = 0; i < t->opaques.n; i++)
        koila__table_free_text(t, t->opaques.at[i]);
    for (uint32_t i = 0; i < t->metas.n; i++)
        koila__table_free_meta(t, t->metas.at[i]);
    for (uint32_t i = 0; i < t->sigs.n; i++)
        koila__table_free_sig(t, t->sigs.at[i]);
    koila__vec_free(&mem, &t->free_texts);
    koila__vec_free(&mem, &t->free_opaques);
    koila__vec_free(&mem, &t->free_metas);
    koila__vec_free(&mem, &t->free_sigs);
    koila__vec_free(&mem, &t->ops);
    koila__vec_free(&mem, &t->texts);
    koila__vec_free(&mem, &t->opaques);
    koila__vec_free(&mem, &t->metas);
    koila__vec_free(&mem, &t->sigs);
    koila__vec_free(&mem, &t->user_rules);
    koila__arena_deinit(&t->arena);
    koila__release(&mem, t, sizeof *t);
}
