/* graph.c — a recorded step: nodes in recorded order over values in SSA form (see koila/graph.h).
 * Appending is the hot path: no search, no allocation but the growth of four arrays, and a running
 * hash that names the whole recording for the plan cache. */
#include "graph/table.h"

koila_status koila_graph_new(koila_table *table, const koila_allocator *mem, koila_graph **out)
{
    const koila_allocator a = koila__allocator(mem);
    koila_graph *g = koila__realloc(&a, NULL, 0, sizeof *g);
    if (!g)
        return KOILA_NO_MEMORY;
    memset(g, 0, sizeof *g);
    g->mem = a;
    g->table = table;
    g->next = table->graphs;
    if (g->next)
        g->next->prev = g;
    table->graphs = g;
    *out = g;
    return KOILA_OK;
}

void koila_graph_free(koila_graph *g)
{
    if (!g)
        return;
    const koila_allocator mem = g->mem;
    if (g->prev)
        g->prev->next = g->next;
    else
        g->table->graphs = g->next;
    if (g->next)
        g->next->prev = g->prev;
    koila__vec_free(&mem, &g->nodes);
    koila__vec_free(&mem, &g->inputs);
    koila__vec_free(&mem, &g->values);
    koila__vec_free(&mem, &g->leaf_names);
    koila__vec_free(&mem, &g->axes);
    koila__vec_free(&mem, &g->drops);
    koila__vec_free(&mem, &g->stored);
    koila__vec_free(&mem, &g->lines);
    koila__idset_free(&mem, &g->line_set);
    koila__release(&mem, g, sizeof *g);
}

bool koila__graph_reserve(koila_graph *g, uint32_t n_nodes, uint32_t n_inputs, uint32_t n_values)
{
    return koila__vec_reserve(&g->mem, &g->nodes, n_nodes) &&
           koila__vec_reserve(&g->mem, &g->inputs, n_inputs) &&
           koila__vec_reserve(&g->mem, &g->values, n_values);
}

koila_table *koila_graph_table(const koila_graph *g) { return g->table; }
uint32_t koila_graph_n_axes(const koila_graph *g) { return g->axes.n; }
int64_t koila_graph_axis_size(const koila_graph *g, uint16_t axis)
{
    return axis < g->axes.n ? g->axes.at[axis] : 0;
}
uint32_t koila_graph_n_nodes(const koila_graph *g) { return g->nodes.n; }
uint32_t koila_graph_n_values(const koila_graph *g) { return g->values.n; }
uint64_t koila_graph_hash(const koila_graph *g) { return koila__mix(g->axes_hash, g->hash); }
koila_node_info koila_node_get(const koila_graph *g, koila_node n) { return g->nodes.at[n]; }
koila_value_info koila_value_get(const koila_graph *g, koila_value v) { return g->values.at[v]; }
const koila_value *koila_node_inputs(const koila_graph *g, koila_node n)
{
    return g->inputs.at ? g->inputs.at + g->nodes.at[n].first_input : NULL;
}

static bool same_values(const koila_value_info *a, const koila_value_info *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (a[i].meta != b[i].meta || a[i].node != b[i].node || a[i].leaf_kind != b[i].leaf_kind ||
            a[i].dim != b[i].dim || a[i].axis != b[i].axis)
            return false;
    return true;
}

static bool same_nodes(const koila_graph *a, const koila_graph *b, uint32_t n)
{
    for (koila_node i = 0; i < n; i++) {
        const koila_node_info x = a->nodes.at[i], y = b->nodes.at[i];
        if (x.sig != y.sig || x.first_input != y.first_input || x.first_output != y.first_output)
            return false;
        const uint32_t n_inputs = koila__sig(a->table, x.sig)->n_inputs;
        for (uint32_t k = 0; k < n_inputs; k++)
            if (a->inputs.at[x.first_input + k] != b->inputs.at[x.first_input + k])
                return false;
    }
    return true;
}

bool koila_graph_begin_alike(const koila_graph *a, const koila_graph *b, uint32_t n_nodes,
                             uint32_t n_values)
{
    koila_assert(a->table == b->table);
    if (a->axes.n != b->axes.n || n_nodes > a->nodes.n || n_nodes > b->nodes.n ||
        n_values > a->values.n || n_values > b->values.n)
        return false;
    for (uint32_t i = 0; i < a->axes.n; i++)
        if (a->axes.at[i] != b->axes.at[i])
            return false;
    return same_values(a->values.at, b->values.at, n_values) && same_nodes(a, b, n_nodes);
}

koila_status koila_graph_axis(koila_graph *g, int64_t size, uint16_t *out)
{
    if (size < 0 || g->axes.n >= UINT16_MAX)
        return KOILA_BAD_ARGUMENT;
    if (!koila__vec_push(&g->mem, &g->axes, size))
        return KOILA_NO_MEMORY;
    g->axes_hash = koila__mix(g->axes_hash, (uint64_t)size);
    *out = (uint16_t)(g->axes.n - 1);
    return KOILA_OK;
}

/* May a dimension of so many entries be cut along an axis? Each row has as many of them. */
static bool is_batch_size(int64_t size, int64_t axis_size)
{
    return size == axis_size || (axis_size > 0 && size > 0 && size % axis_size == 0);
}

/* name: a text of the table, or KOILA_NONE. */
static koila_status add_leaf(koila_graph *g, koila_meta meta, koila_leaf_kind kind, uint16_t axis,
                             uint32_t dim, uint32_t name, koila_value *out)
{
    if (!koila_meta_get(g->table, meta))
        return KOILA_BAD_ARGUMENT;
    const koila_meta_info *m = koila__meta(g->table, meta);
    if (kind == KOILA_LEAF_BATCH &&
        (axis >= g->axes.n || dim >= m->n_dims || !is_batch_size(m->size[dim], g->axes.at[axis])))
        return KOILA_BAD_ARGUMENT;
    if (kind != KOILA_LEAF_BATCH) {
        axis = 0;
        dim = 0;
    }
    const uint32_t id = g->values.n;
    if (name != KOILA_NONE) {
        while (g->leaf_names.n <= id)
            if (!koila__vec_push(&g->mem, &g->leaf_names, KOILA_NONE))
                return KOILA_NO_MEMORY;
        g->leaf_names.at[id] = name;
    }
    const koila_value_info v = { .meta = meta,
                                 .node = KOILA_NONE,
                                 .leaf_kind = (uint8_t)kind,
                                 .dim = (uint8_t)dim,
                                 .axis = axis };
    if (!koila__vec_push(&g->mem, &g->values, v))
        return KOILA_NO_MEMORY;
    g->hash = koila__mix(g->hash,
                         (uint64_t)meta << 32 | (uint64_t)kind << 24 | (uint64_t)dim << 16 | axis);
    *out = id;
    return KOILA_OK;
}

koila_status koila_graph_leaf(koila_graph *g, koila_meta meta, koila_leaf_kind kind, uint16_t axis,
                              uint32_t dim, const char *name, koila_value *out)
{
    uint32_t text = KOILA_NONE;
    if (name)
        KOILA_TRY(koila_table_text(g->table, name, &text));
    return add_leaf(g, meta, kind, axis, dim, text, out);
}

koila_status koila__graph_copy_leaf(koila_graph *to, const koila_graph *from, koila_value v,
                                    koila_value *out)
{
    const koila_value_info *leaf = &from->values.at[v];
    const bool is_named = *koila_graph_leaf_name(from, v) != '\0';
    koila_assert(to->table == from->table && leaf->node == KOILA_NONE);
    return add_leaf(to, leaf->meta, (koila_leaf_kind)leaf->leaf_kind, leaf->axis, leaf->dim,
                    is_named ? from->leaf_names.at[v] : KOILA_NONE, out);
}

const char *koila_graph_leaf_name(const koila_graph *g, koila_value v)
{
    return v < g->leaf_names.n && g->leaf_names.at[v] != KOILA_NONE
               ? koila_text(g->table, g->leaf_names.at[v])
               : "";
}

static uint64_t line_hash_of(const void *g, uint32_t id)
{
    const koila__line l = ((const koila_graph *)g)->lines.at[id];
    return koila__mix(l.file, l.number);
}
static bool line_same(const void *g, uint32_t id, const void *key)
{
    const koila__line a = ((const koila_graph *)g)->lines.at[id];
    const koila__line *b = key;
    return a.file == b->file && a.number == b->number;
}

static koila_status intern_line(koila_graph *g, koila__line l, uint32_t *out)
{
    const uint64_t hash = koila__mix(l.file, l.number);
    uint32_t id = koila__idset_find(&g->line_set, hash, line_same, g, &l);
    if (id == KOILA_NONE) {
        if (!koila__idset_reserve(&g->mem, &g->line_set, line_hash_of, g) ||
            !koila__vec_push(&g->mem, &g->lines, l))
            return KOILA_NO_MEMORY;
        id = g->lines.n - 1;
        koila__idset_insert(&g->line_set, hash, id);
    }
    *out = id;
    return KOILA_OK;
}
koila_status koila_graph_line(koila_graph *g, const char *file, uint32_t line, uint32_t *out)
{
    koila__line l = { 0, line };
    KOILA_TRY(koila_table_text(g->table, file, &l.file));
    return intern_line(g, l, out);
}
koila_status koila__graph_copy_lines(koila_graph *to, const koila_graph *from)
{
    koila_assert(to->table == from->table && !to->lines.n);
    for (uint32_t l = 0; l < from->lines.n; l++) {
        uint32_t id;
        KOILA_TRY(intern_line(to, from->lines.at[l], &id));
        koila_assert(id == l);
    }
    return KOILA_OK;
}

const char *koila_graph_line_file(const koila_graph *g, uint32_t line)
{
    return line < g->lines.n ? koila_text(g->table, g->lines.at[line].file) : "";
}
uint32_t koila_graph_line_number(const koila_graph *g, uint32_t line)
{
    return line < g->lines.n ? g->lines.at[line].number : 0;
}

koila_status koila_graph_node(koila_graph *g, koila_sig sig, const koila_value *inputs,
                              uint32_t line, koila_value *first_output)
{
    if (!koila_sig_get(g->table, sig))
        return KOILA_BAD_ARGUMENT;
    const koila_sig_info *s = koila__sig(g->table, sig);
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (inputs[i] >= g->values.n || g->values.at[inputs[i]].meta != s->inputs[i])
            return KOILA_BAD_ARGUMENT;
    if (!koila__vec_reserve(&g->mem, &g->nodes, 1) ||
        !koila__vec_reserve(&g->mem, &g->inputs, s->n_inputs) ||
        !koila__vec_reserve(&g->mem, &g->values, s->n_outputs))
        return KOILA_NO_MEMORY;
    const koila_node_info n = { sig, g->inputs.n, g->values.n, line };
    uint64_t h = koila__mix(g->hash, (uint64_t)sig ^ 0xc300000000u);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        g->inputs.at[g->inputs.n++] = inputs[i];
        h = koila__mix(h, inputs[i]);
    }
    const koila_node id = g->nodes.n;
    g->nodes.at[g->nodes.n++] = n;
    for (uint32_t i = 0; i < s->n_outputs; i++)
        g->values.at[g->values.n++] = (koila_value_info){ .meta = s->outputs[i], .node = id };
    g->hash = h;
    *first_output = n.first_output;
    koila_check(koila_graph_check(g, NULL));
    return KOILA_OK;
}

/* ---- where leaves lie, and when values are dropped */

koila_status koila_graph_drop(koila_graph *g, koila_value v)
{
    const koila_drop drop = { .value = v, .n_nodes = g->nodes.n };
    if (v >= g->values.n)
        return KOILA_BAD_ARGUMENT;
    return koila__vec_push(&g->mem, &g->drops, drop) ? KOILA_OK : KOILA_NO_MEMORY;
}

uint32_t koila_graph_n_drops(const koila_graph *g) { return g->drops.n; }

koila_drop koila_graph_drop_get(const koila_graph *g, uint32_t i)
{
    koila_assert(i < g->drops.n);
    return g->drops.at[i];
}

koila_status koila_graph_stored(koila_graph *g, koila_value v, uint32_t storage, uint64_t bytes)
{
    if (v >= g->values.n || g->values.at[v].node != KOILA_NONE)
        return KOILA_BAD_ARGUMENT;
    while (g->stored.n <= v) {
        const koila_stored none = { .storage = KOILA_NONE };
        if (!koila__vec_push(&g->mem, &g->stored, none))
            return KOILA_NO_MEMORY;
    }
    g->stored.at[v] = (koila_stored){ .storage = storage, .bytes = bytes };
    return KOILA_OK;
}

koila_stored koila_graph_stored_get(const koila_graph *g, koila_value v)
{
    return v < g->stored.n ? g->stored.at[v] : (koila_stored){ .storage = KOILA_NONE };
}

void koila_graph_take_lives(koila_graph *to, koila_graph *from)
{
    koila_assert(to != from && to->nodes.n == from->nodes.n);
    koila__vec_free(&to->mem, &to->drops);
    koila__vec_free(&to->mem, &to->stored);
    memcpy(&to->drops, &from->drops, sizeof to->drops);
    memcpy(&to->stored, &from->stored, sizeof to->stored);
    memset(&from->drops, 0, sizeof from->drops);
    memset(&from->stored, 0, sizeof from->stored);
}

void koila_graph_take_lines(koila_graph *to, koila_graph *from)
{
    koila_assert(to != from && to->nodes.n == from->nodes.n && to->table == from->table);
    for (uint32_t i = 0; i < to->nodes.n; i++) {
        const uint32_t line = to->nodes.at[i].line;
        to->nodes.at[i].line = from->nodes.at[i].line;
        from->nodes.at[i].line = line;
    }
    koila_graph other = { 0 };
    memcpy(&other.lines, &to->lines, sizeof other.lines);
    memcpy(&to->lines, &from->lines, sizeof to->lines);
    memcpy(&from->lines, &other.lines, sizeof from->lines);
    const koila__idset set = to->line_set;
    to->line_set = from->line_set;
    from->line_set = set;
}

/* Finds the first dimension of a value whose size is that of an axis, the newest axis first. */
static bool along_an_axis(const koila_graph *g, koila_meta meta, uint16_t *axis, uint32_t *dim)
{
    const koila_meta_info *m = koila__meta(g->table, meta);
    for (uint32_t a = g->axes.n; a-- > 0;)
        for (uint32_t d = 0; d < m->n_dims; d++)
            if (g->axes.at[a] > 1 && m->size[d] == g->axes.at[a]) {
                *axis = (uint16_t)a;
                *dim = d;
                return true;
            }
    return false;
}

/* One bit for each id. */
typedef struct id_set {
    uint64_t *words;
    uint32_t n_words;
} id_set;

static bool id_set_new(const koila_allocator *mem, uint32_t n_ids, id_set *out)
{
    out->n_words = n_ids / 64 + 1;
    out->words = koila__realloc(mem, NULL, 0, out->n_words * sizeof *out->words);
    if (out->words)
        memset(out->words, 0, out->n_words * sizeof *out->words);
    return out->words != NULL;
}

static void id_set_free(const koila_allocator *mem, id_set *s)
{
    koila__release(mem, s->words, s->words ? s->n_words * sizeof *s->words : 0);
}

static void id_set_add(id_set *s, uint32_t id) { s->words[id / 64] |= 1ull << id % 64; }
static bool id_set_has(const id_set *s, uint32_t id) { return s->words[id / 64] >> id % 64 & 1; }

/* The least member >= from; KOILA_NONE: none. */
static uint32_t id_set_next(const id_set *s, uint32_t from)
{
    uint32_t w = from / 64;
    if (w >= s->n_words)
        return KOILA_NONE;
    uint64_t bits = s->words[w] >> from % 64 << from % 64;
    while (!bits && ++w < s->n_words)
        bits = s->words[w];
    return bits ? w * 64 + (uint32_t)__builtin_ctzll(bits) : KOILA_NONE;
}

/* The greatest member < end; KOILA_NONE: none. */
static uint32_t id_set_before(const id_set *s, uint32_t end)
{
    if (!end)
        return KOILA_NONE;
    uint32_t w = (end - 1) / 64;
    const uint32_t last = (end - 1) % 64;
    uint64_t bits = s->words[w] << (63 - last) >> (63 - last);
    while (!bits && w-- > 0)
        bits = s->words[w];
    return bits ? w * 64 + 63 - (uint32_t)__builtin_clzll(bits) : KOILA_NONE;
}

/* The state that the parts of koila_graph_extract() share. Its time is that of the part, and of 1
 * bit for each node and value of g: a short part of a long recording is found quickly. */
typedef struct extraction {
    const koila_graph *g;
    koila_known_fn known; /* may be NULL */
    void *user;
    koila_graph *part;
    id_set nodes, leaves; /* of g: that the part gets; the leaves include known values */
    koila_value *value_of, *leaf_from;
    koila_node *node_from;
} extraction;

static bool is_known(const extraction *x, koila_value v, koila_cut *cut)
{
    *cut = (koila_cut){ 0 };
    return x->known && x->known(x->user, v, cut);
}

static void need(extraction *x, koila_value v)
{
    const koila_node maker = x->g->values.at[v].node;
    koila_cut cut;
    if (maker == KOILA_NONE || is_known(x, v, &cut))
        id_set_add(&x->leaves, v);
    else
        id_set_add(&x->nodes, maker);
}

static void mark_needed(extraction *x, const koila_value *targets, uint32_t n_targets)
{
    const koila_graph *g = x->g;
    for (uint32_t i = 0; i < n_targets; i++)
        need(x, targets[i]);
    /* a node's inputs were made before it, so what they add lies below n */
    for (koila_node n = g->nodes.n; (n = id_set_before(&x->nodes, n)) != KOILA_NONE;)
        for (uint32_t i = 0; i < koila__node_sig(g, n)->n_inputs; i++)
            need(x, g->inputs.at[g->nodes.at[n].first_input + i]);
}

static koila_status copy_axes(const extraction *x)
{
    for (uint32_t a = 0; a < x->g->axes.n; a++) {
        uint16_t id;
        KOILA_TRY(koila_graph_axis(x->part, x->g->axes.at[a], &id));
    }
    return KOILA_OK;
}

/* Copies the leaves, in recorded order. If everything that came from a batch is known, the known
 * values become the batch (any slice of a whole value is sound). As plain leaves they would leave
 * nothing to slice: `total = torch.zeros(()); total += loss_1; total += loss_2` would read all the
 * rows that loss_2 needs.
 */
static koila_status copy_leaves(const extraction *x)
{
    const koila_graph *g = x->g;
    bool has_batch = false;
    for (koila_value v = 0; (v = id_set_next(&x->leaves, v)) != KOILA_NONE && !has_batch; v++) {
        koila_cut cut = { 0 };
        const koila_value_info *info = &g->values.at[v];
        has_batch = info->node == KOILA_NONE ? info->leaf_kind == KOILA_LEAF_BATCH
                                             : is_known(x, v, &cut) && cut.is_cut;
    }
    for (koila_value v = 0; (v = id_set_next(&x->leaves, v)) != KOILA_NONE; v++) {
        const koila_value_info *info = &g->values.at[v];
        const char *name = koila_graph_leaf_name(g, v);
        koila_leaf_kind kind = (koila_leaf_kind)info->leaf_kind;
        uint16_t axis = info->axis;
        uint32_t dim = info->dim;
        if (info->node != KOILA_NONE) {
            koila_cut cut;
            (void)is_known(x, v, &cut);
            axis = cut.axis;
            dim = cut.dim;
            kind = cut.is_cut || (!has_batch && along_an_axis(g, info->meta, &axis, &dim))
                       ? KOILA_LEAF_BATCH
                       : KOILA_LEAF_REAL;
        }
        koila_value leaf;
        KOILA_TRY(
            koila_graph_leaf(x->part, info->meta, kind, axis, dim, *name ? name : NULL, &leaf));
        x->value_of[v] = leaf + 1;
        x->leaf_from[leaf] = v;
    }
    return KOILA_OK;
}

/* Copies the nodes, in recorded order. inputs: room for the inputs of any node. */
static koila_status copy_nodes(const extraction *x, koila_value *inputs)
{
    const koila_graph *g = x->g;
    for (koila_node n = 0; (n = id_set_next(&x->nodes, n)) != KOILA_NONE; n++) {
        const koila_node_info *node = &g->nodes.at[n];
        const koila_sig_info *s = koila__node_sig(g, n);
        koila_value first = 0;
        uint32_t line = node->line;
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            inputs[i] = x->value_of[g->inputs.at[node->first_input + i]] - 1;
            koila_assert(inputs[i] < x->part->values.n);
        }
        if (line != KOILA_NONE)
            KOILA_TRY(intern_line(x->part, g->lines.at[line], &line));
        KOILA_TRY(koila_graph_node(x->part, node->sig, inputs, line, &first));
        x->node_from[x->part->nodes.n - 1] = n;
        for (uint32_t o = 0; o < s->n_outputs; o++)
            if (!id_set_has(&x->leaves, node->first_output + o)) /* a known result keeps its leaf */
                x->value_of[node->first_output + o] = first + o + 1;
    }
    return KOILA_OK;
}

/* Copies the drops of values of the part; node_from has the nodes by now. */
static koila_status copy_drops(const extraction *x)
{
    koila_graph *const part = x->part;
    uint32_t n_nodes = 0;
    for (uint32_t i = 0; i < x->g->drops.n; i++) {
        koila_drop drop = x->g->drops.at[i];
        while (n_nodes < part->nodes.n && x->node_from[n_nodes] < drop.n_nodes)
            n_nodes++;
        drop.n_nodes = n_nodes;
        if (!x->value_of[drop.value])
            continue;
        drop.value = x->value_of[drop.value] - 1;
        if (!koila__vec_push(&part->mem, &part->drops, drop))
            return KOILA_NO_MEMORY;
    }
    return KOILA_OK;
}

static koila_status extract(const extraction *x)
{
    uint32_t most_inputs = 0;
    for (koila_node n = 0; (n = id_set_next(&x->nodes, n)) != KOILA_NONE; n++)
        if (koila__node_sig(x->g, n)->n_inputs > most_inputs)
            most_inputs = koila__node_sig(x->g, n)->n_inputs;
    KOILA_TRY(copy_axes(x));
    KOILA_TRY(copy_leaves(x));
    const size_t n_bytes = ((size_t)most_inputs + 1) * sizeof(koila_value);
    koila_value *inputs = koila__realloc(&x->g->mem, NULL, 0, n_bytes);
    if (!inputs)
        return KOILA_NO_MEMORY;
    const koila_status status = copy_nodes(x, inputs);
    koila__release(&x->g->mem, inputs, n_bytes);
    return status ? status : copy_drops(x);
}

koila_status koila_graph_extract(const koila_graph *g, const koila_value *targets,
                                 uint32_t n_targets, koila_known_fn known, void *user,
                                 const koila_allocator *mem, koila_graph **out,
                                 koila_value *value_of, koila_value *leaf_from,
                                 koila_node *node_from)
{
    for (uint32_t i = 0; i < n_targets; i++)
        if (targets[i] >= g->values.n || g->values.at[targets[i]].meta == KOILA_NONE)
            return KOILA_BAD_ARGUMENT;
    extraction x = { .g = g,
                     .known = known,
                     .user = user,
                     .value_of = value_of,
                     .leaf_from = leaf_from,
                     .node_from = node_from };
    KOILA_TRY(koila_graph_new(g->table, mem, &x.part));
    koila_status status = KOILA_NO_MEMORY;
    if (id_set_new(&g->mem, g->nodes.n, &x.nodes) && id_set_new(&g->mem, g->values.n, &x.leaves)) {
        mark_needed(&x, targets, n_targets);
        status = extract(&x);
    }
    id_set_free(&g->mem, &x.nodes);
    id_set_free(&g->mem, &x.leaves);
    if (status != KOILA_OK) {
        koila_graph_free(x.part);
        return status;
    }
    *out = x.part;
    return KOILA_OK;
}

bool koila_graph_check(const koila_graph *g, koila_error *err)
{
    uint32_t next_input = 0;
    for (uint32_t n = 0; n < g->nodes.n; n++) {
        const koila_node_info *info = &g->nodes.at[n];
        KOILA__HOLDS(err, koila_sig_get(g->table, info->sig), "node %u: no such signature", n);
        const koila_sig_info *s = koila__sig(g->table, info->sig);
        KOILA__HOLDS(err, info->first_input == next_input, "node %u: inputs out of order", n);
        next_input += s->n_inputs;
        KOILA__HOLDS(err,
                     next_input <= g->inputs.n && info->first_output + s->n_outputs <= g->values.n,
                     "node %u: inputs or outputs missing", n);
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_value v = g->inputs.at[info->first_input + i];
            KOILA__HOLDS(err, v < info->first_output, "node %u: input %u is made later", n, i);
            KOILA__HOLDS(err, g->values.at[v].meta == s->inputs[i],
                         "node %u: input %u has another meta", n, i);
        }
        for (uint32_t i = 0; i < s->n_outputs; i++)
            KOILA__HOLDS(err, g->values.at[info->first_output + i].node == n,
                         "node %u: output %u has another producer", n, i);
        for (uint32_t w = 0; w < s->n_writes; w++)
            KOILA__HOLDS(err, s->writes[w].input < s->n_inputs, "node %u: writes no input", n);
    }
    for (uint32_t v = 0; v < g->values.n; v++) {
        const koila_value_info *info = &g->values.at[v];
        KOILA__HOLDS(err, info->node == KOILA_NONE || info->node < g->nodes.n,
                     "value %u: no such producer", v);
        if (info->node == KOILA_NONE && info->leaf_kind == KOILA_LEAF_BATCH) {
            const koila_meta_info *m = koila__meta(g->table, info->meta);
            KOILA__HOLDS(err,
                         info->axis < g->axes.n && info->dim < m->n_dims &&
                             is_batch_size(m->size[info->dim], g->axes.at[info->axis]),
                         "value %u: its batch dimension is not the axis' size", v);
        }
    }
    return true;
}
