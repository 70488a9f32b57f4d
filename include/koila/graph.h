/* koila/graph.h — a recorded training step: values, nodes, axes; interned operators, metas and
 * signatures.
 *
 * A koila_table interns what repeats from step to step: operators, metas (dtype, device, sizes,
 * strides) and *call signatures* (operator, argument tokens, metas of tensor arguments, metas of
 * results). Graphs refer to one table, so a node is only (signature, inputs, outputs). A graph is a
 * list of nodes in recorded order over values in SSA form: an in-place write makes a new value of
 * the written base (Note [Writes] below). A leaf is either a batched input (`batch`: sharded along
 * one axis) or another tensor from outside (`real`: parameters, masks).
 *
 * Sizes and strides are in elements, n_bytes in bytes. Ids are dense and start at 0; KOILA_NONE is
 * "no id". Pointers returned by getters are borrowed and stay valid until the table (or graph) is
 * freed, or their entry is forgotten; arrays inside koila_graph may move when the graph grows.
 *
 * A program that makes new shapes and numbers all the time fills its table without end, unless the
 * owner calls koila_table_forget() now and then.
 *
 * Note [Writes]. A node whose signature has n_writes > 0 is an in-place or out= operator. For write
 * w, input `w.input` is the *base* value (oldest storage owner, never a view); `w.chain` lists the
 * view calls (signature, and which result) from the base to the tensor that the operator really
 * writes. The node means: take the base, walk the chain, run the operator on that view. Its outputs
 * are first the fresh results (sig.n_fresh), then one new base value per write, with the base's
 * meta. A returned `self` is not an output. An `overwrites` write does not read the old contents
 * and has an empty chain (copy_, fill_, zero_, bernoulli_, normal_, out=).
 */
#ifndef KOILA_GRAPH_H
#define KOILA_GRAPH_H

#include "koila/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KOILA_NONE UINT32_MAX
#define KOILA_MAX_DIMS 16

typedef uint32_t koila_op;    /**< operator id in a table */
typedef uint32_t koila_meta;  /**< meta id in a table */
typedef uint32_t koila_sig;   /**< signature id in a table */
typedef uint32_t koila_value; /**< value id in a graph */
typedef uint32_t koila_node;  /**< node id in a graph */

/* name, text, bytes of one element, torch attribute */
#define KOILA_DTYPE_MAP(X)                                                                         \
    X(U8, "u8", 1, "uint8")                                                                        \
    X(I8, "i8", 1, "int8")                                                                         \
    X(I16, "i16", 2, "int16")                                                                      \
    X(I32, "i32", 4, "int32")                                                                      \
    X(I64, "i64", 8, "int64")                                                                      \
    X(F16, "f16", 2, "float16")                                                                    \
    X(F32, "f32", 4, "float32")                                                                    \
    X(F64, "f64", 8, "float64")                                                                    \
    X(C32, "c32", 4, "complex32")                                                                  \
    X(C64, "c64", 8, "complex64")                                                                  \
    X(C128, "c128", 16, "complex128")                                                              \
    X(BOOL, "bool", 1, "bool")                                                                     \
    X(BF16, "bf16", 2, "bfloat16")                                                                 \
    X(U16, "u16", 2, "uint16")                                                                     \
    X(U32, "u32", 4, "uint32")                                                                     \
    X(U64, "u64", 8, "uint64")                                                                     \
    X(F8E5, "f8e5", 1, "float8_e5m2")                                                              \
    X(F8E4, "f8e4", 1, "float8_e4m3fn")

typedef enum koila_dtype {
#define KOILA_DTYPE_ENUM(name, text, n_bytes, torch) KOILA_DTYPE_##name,
    KOILA_DTYPE_MAP(KOILA_DTYPE_ENUM)
#undef KOILA_DTYPE_ENUM
        KOILA_N_DTYPES
} koila_dtype;

KOILA_API const char *koila_dtype_text(koila_dtype dtype);  /**< "f32" */
KOILA_API const char *koila_dtype_torch(koila_dtype dtype); /**< "float32" */
KOILA_API uint32_t koila_dtype_bytes(koila_dtype dtype);

/** What a tensor looks like. `device` is type << 8 | index: 0 = cpu, 0x100 + i = cuda:i, 0xff00 =
 * other. */
typedef struct koila_meta_info {
    koila_dtype dtype;
    uint16_t device;
    uint8_t n_dims;
    const int64_t *size, *stride;
    uint64_t n_elements;
    uint64_t n_bytes; /**< n_elements * bytes of one element */
    /** smallest storage that holds it: (1 + sum (size-1)*stride) * bytes; 0 when empty */
    uint64_t n_storage_bytes;
} koila_meta_info;

/** Flags of an operator, independent of its arguments. */
enum {
    KOILA_OP_VIEW = 1,    /**< results alias the first tensor argument's storage */
    KOILA_OP_INPLACE = 2, /**< writes an argument (in-place or out=) */
    KOILA_OP_RANDOM = 4,  /**< draws from a generator */
    KOILA_OP_FACTORY = 8, /**< makes a tensor from sizes alone: no tensor argument */
    /** results may not leave the loop that made them (workspace of an RNN) */
    KOILA_OP_OPAQUE = 16,
};

/** Facts that koila knows of an operator by its name: the last column of src/graph/ops.def. The
 * flags above come from the recorder. An in-place operator has the facts of its functional twin. */
enum {
    KOILA_FACT_ARANGE = 1 << 0,       /**< arange(end), arange(start, end), ... of numbers */
    KOILA_FACT_ARANGE_START = 1 << 1, /**< an arange whose arguments begin start, end */
    KOILA_FACT_ARANGE_STEP = 1 << 2,  /**< the third argument is the step */
    KOILA_FACT_RESHAPES = 1 << 3,     /**< the same elements in the same order, in another shape */
    KOILA_FACT_BROADCASTS = 1 << 4,   /**< expand */
    KOILA_FACT_SAME_VALUES = 1 << 5, /**< the same values in the same shape; the dtype may change */
    KOILA_FACT_ADDS = 1 << 6,        /**< add(x, argument 1) */
    KOILA_FACT_FACTORY = 1 << 7,     /**< no element depends on its position: any rows of it do */
    KOILA_FACT_ZEROS = 1 << 8,       /**< results are all 0 */
    KOILA_FACT_FILLS = 1 << 9,       /**< results are argument 1 everywhere */
    KOILA_FACT_EMPTY = 1 << 10,      /**< memory without values */
    KOILA_FACT_MAY_ALIAS = 1 << 11,  /**< may return its input, or a view of it */
    KOILA_FACT_SPLITS_UNSAFELY = 1 << 12, /**< results share memory, which autograd is not told */
    KOILA_FACT_JOINS = 1 << 13,           /**< refuses strides that do not fit: view and the like */
    KOILA_FACT_STRIDED = 1 << 14,         /**< as_strided: the strides of the storage are given */
    KOILA_FACT_CONJUGATES = 1 << 15,      /**< _conj: a view with a flag on it */
    KOILA_FACT_AS_REAL = 1 << 16,         /**< view_as_real */
    KOILA_FACT_AS_COMPLEX = 1 << 17,      /**< view_as_complex */
    KOILA_FACT_DRAWS_MASK = 1 << 18,      /**< bernoulli: the mask of a dropout */
    KOILA_FACT_SAFE_SOFTMAX = 1 << 19,    /**< _safe_softmax: attention written out for the CPU */
    KOILA_FACT_OF_ATTENTION = 1 << 20, /**< stands between the two products of such an attention */
    KOILA_FACT_PSEUDO = 1 << 21,       /**< "koila::...": not torch's; the executor implements it */
    KOILA_FACT_OPAQUE_CALL = 1 << 22, /**< of a module that koila.opaque() names, or its backward */
    KOILA_FACT_OPAQUE_BACKWARD = 1 << 23,
    /* the kind of a dense kernel, a number: compare koila_facts_dense(facts) */
    KOILA_FACT_DENSE_CONTRACT = 1 << 24,        /**< mm, bmm, mv, linear */
    KOILA_FACT_DENSE_CONTRACT_BIASED = 2 << 24, /**< addmm, baddbmm: what is added comes first */
    KOILA_FACT_DENSE_CONV = 3 << 24,
    KOILA_FACT_DENSE_CONV_BACKWARD = 4 << 24,
    KOILA_FACT_DENSE_ATTENTION = 5 << 24,
    KOILA_FACT_DENSE_ATTENTION_BACKWARD = 6 << 24,
    KOILA_FACT_DENSE_RNN = 7 << 24,
    KOILA_FACT_DENSE_RNN_BACKWARD = 8 << 24,
    KOILA_FACT_DENSE_POOL = 9 << 24,
    KOILA_FACT_DENSE_MASK = 15 << 24,
    /** takes rows of whole tensors wherever the result is cut: its use decides its placement */
    KOILA_FACT_SPREADS = 1 << 28,
    /** on tensors of floating-point numbers: sizes, strides, dtype and errors depend on no value of
     * a number, only on its type. Numbers in lists are left out. */
    KOILA_FACT_ANY_NUMBERS = 1 << 29,
    /** copies to host memory or back (argument 1 is the work of a byte), or waits for that, as a
     * view */
    KOILA_FACT_OFFLOADS = 1 << 30,
};
/** KOILA_FACT_DENSE_..., or 0. */
static inline uint32_t koila_facts_dense(uint32_t facts) { return facts & KOILA_FACT_DENSE_MASK; }

typedef enum koila_arg_kind {
    KOILA_ARG_ABSENT, /**< None */
    KOILA_ARG_TENSOR, /**< the next input of the node; `id` is its meta */
    KOILA_ARG_INT,
    KOILA_ARG_FLOAT,
    KOILA_ARG_BOOL,
    KOILA_ARG_STR,   /**< `id`: interned text */
    KOILA_ARG_DTYPE, /**< `id`: koila_dtype */
    /** `id`: an object of the graph's owner (device, layout, memory format, complex), with a
     * readable label */
    KOILA_ARG_OPAQUE,
    KOILA_ARG_LIST, /**< the next `n` tokens, none of them a list */
} koila_arg_kind;

typedef struct koila_arg {
    uint8_t kind;
    uint32_t n; /**< KOILA_ARG_LIST only */
    union {
        int64_t i;
        double f; /**< compared by bits */
        uint32_t id;
    } u;
} koila_arg;

typedef struct koila_link { /**< one view call of a chain */
    /** its first input is the previous link's result; it has no other tensor input */
    koila_sig sig;
    uint32_t output; /**< which result */
} koila_link;

typedef struct koila_write {
    uint32_t input;     /**< index among the node's inputs: the base */
    uint8_t overwrites; /**< old contents are not read */
    uint32_t n_links;
    const koila_link *links;
} koila_write;

/** One call signature. Arguments are `n_pos` positional values then `n_kw` keyword values,
 * flattened into `n_tokens` tokens. */
typedef struct koila_sig_info {
    koila_op op;
    uint32_t n_tokens, n_pos, n_kw;
    const koila_arg *tokens;
    /** [n_pos + n_kw] index of each value's first token (filled by the table) */
    const uint32_t *start;
    const uint32_t *kw_names; /**< [n_kw] interned texts */
    uint32_t n_inputs;        /**< TENSOR tokens (filled by the table) */
    const koila_meta *inputs; /**< [n_inputs] their metas (filled by the table) */
    uint32_t n_fresh;         /**< fresh results */
    uint32_t n_outputs;       /**< n_fresh + n_writes (filled by the table) */
    /** [n_fresh] on input, [n_outputs] when read; KOILA_NONE for a result that is None */
    const koila_meta *outputs;
    /** of the call: 0 one tensor, 1 tuple, 2 list, 3 nothing or `self`, 4 tuple that ends in a
     * list, whose items are the last results */
    uint8_t result_kind;
    /** bit 0: grad mode at capture; higher bits: settings of the recorder that decide the result.
     * Part of the signature */
    uint8_t grad_mode;
    uint32_t n_writes;
    const koila_write *writes;
} koila_sig_info;

typedef struct koila_table koila_table;
typedef struct koila_graph koila_graph;

/* ---- the table. Expected failures everywhere: NO_MEMORY; BAD_ARGUMENT for ids out of range,
 * KOILA_MAX_DIMS, negative or overflowing sizes. */

KOILA_API koila_status koila_table_new(const koila_allocator *mem, koila_table **out);
KOILA_API void koila_table_free(koila_table *t); /**< NULL is fine; free its graphs first */
/** Intern an operator by its full name "aten::add.Tensor" (no overload name: "aten::mm"). The flags
 * given first are kept. */
KOILA_API koila_status koila_table_op(koila_table *t, const char *name, uint32_t flags,
                                      koila_op *out);
KOILA_API const char *koila_op_name(const koila_table *t, koila_op op);
KOILA_API uint32_t koila_op_flags(const koila_table *t, koila_op op);
/** KOILA_FACT_... bits. They are found when the operator is interned; this reads an array. */
KOILA_API uint32_t koila_op_facts(const koila_table *t, koila_op op);
KOILA_API uint32_t koila_table_n_ops(const koila_table *t);
KOILA_API koila_status koila_table_text(koila_table *t, const char *text, uint32_t *out);
KOILA_API const char *koila_text(const koila_table *t, uint32_t text);
/** A new opaque argument with a label such as "torch.channels_last". */
KOILA_API koila_status koila_table_opaque(koila_table *t, const char *label, uint32_t *out);
KOILA_API const char *koila_opaque_label(const koila_table *t, uint32_t id);
/** `stride` NULL means contiguous. */
KOILA_API koila_status koila_table_meta(koila_table *t, koila_dtype dtype, uint16_t device,
                                        uint32_t n_dims, const int64_t *size, const int64_t *stride,
                                        koila_meta *out);
KOILA_API const koila_meta_info *koila_meta_get(const koila_table *t, koila_meta meta);
/** Does the tensor fill its storage: no gaps, no element shared by two indices? */
KOILA_API bool koila_meta_is_dense(const koila_meta_info *m);
/** Do the elements follow one another in memory, the last dimension innermost? */
KOILA_API bool koila_meta_is_contiguous(const koila_meta_info *m);
/** stride[like->n_dims] of a dense tensor of size[like->n_dims] whose dimensions lie in memory in
 * the order of like's strides; among equal strides the last dimension is innermost. like->stride
 * NULL: contiguous. */
KOILA_API void koila_dense_strides(const koila_meta_info *like, const int64_t *size,
                                   int64_t *stride);
/** A placement rule for a custom operator, such as "S0,R->S0; S1,S0->P": each alternative gives the
 * placement of every tensor argument and every result: R whole, S<d> sliced along dimension d, P
 * partial sum. The rule is trusted, not verified. It replaces an earlier one.
 *      Expected: BAD_INPUT with the offset in `rule`. */
KOILA_API koila_status koila_table_rule(koila_table *t, const char *op, const char *rule,
                                        koila_error *err);
/** Intern a signature; `desc` is copied. */
KOILA_API koila_status koila_table_sig(koila_table *t, const koila_sig_info *desc, koila_sig *out);
KOILA_API const koila_sig_info *koila_sig_get(const koila_table *t, koila_sig sig);
/** 1 + the greatest id of a signature so far */
KOILA_API uint32_t koila_table_n_sigs(const koila_table *t);

/** What koila_table_forget() keeps, and all that these name. */
typedef struct koila_keeper koila_keeper;
KOILA_API void koila_keep_text(koila_keeper *k, uint32_t text);
KOILA_API void koila_keep_opaque(koila_keeper *k, uint32_t opaque);
KOILA_API void koila_keep_meta(koila_keeper *k, koila_meta meta); /**< KOILA_NONE: nothing */
KOILA_API void koila_keep_sig(koila_keeper *k, koila_sig sig);
/** Forgets each text, opaque argument, meta and signature that no living graph of the table names,
 * no rule of koila_table_rule(), and that `keep` (may be NULL) does not keep by the calls above.
 * What is kept has the same id and stays where it is. The ids of the rest are given again, to other
 * entries: nobody may hold one, or a pointer to its entry. Operators are never forgotten.
 *      Expected: NO_MEMORY: nothing was forgotten. */
KOILA_API koila_status koila_table_forget(koila_table *t, void (*keep)(void *user, koila_keeper *k),
                                          void *user);
/** Texts, opaque arguments, metas and signatures that the table holds, together. */
KOILA_API uint32_t koila_table_n_known(const koila_table *t);
/** Is it an id, and not forgotten? For metas and signatures: koila_..._get() gives NULL. */
KOILA_API bool koila_table_has_text(const koila_table *t, uint32_t text);
KOILA_API bool koila_table_has_opaque(const koila_table *t, uint32_t opaque);

/* ---- the graph */

typedef enum koila_leaf_kind {
    KOILA_LEAF_REAL,  /**< a tensor from outside: the same for every slice */
    KOILA_LEAF_BATCH, /**< sharded along `dim` of axis `axis` */
} koila_leaf_kind;

typedef struct koila_node_info {
    koila_sig sig;
    uint32_t first_input; /**< into the graph's flat inputs */
    koila_value first_output;
    uint32_t line; /**< id of the source line, or KOILA_NONE */
} koila_node_info;

typedef struct koila_value_info {
    koila_meta meta;
    koila_node node;   /**< its producer; KOILA_NONE for a leaf */
    uint8_t leaf_kind; /**< koila_leaf_kind */
    uint8_t dim;       /**< BATCH: the sharded dimension */
    uint16_t axis;     /**< BATCH: its axis */
} koila_value_info;

KOILA_API koila_status koila_graph_new(koila_table *table, const koila_allocator *mem,
                                       koila_graph **out);
KOILA_API void koila_graph_free(koila_graph *g);
KOILA_API koila_table *koila_graph_table(const koila_graph *g);
/** A batch axis of `size` rows. */
KOILA_API koila_status koila_graph_axis(koila_graph *g, int64_t size, uint16_t *out);
KOILA_API uint32_t koila_graph_n_axes(const koila_graph *g);
KOILA_API int64_t koila_graph_axis_size(const koila_graph *g, uint16_t axis);
/** Is a dimension of `size` entries the axis of `length` entries but for a few: tokens without the
 * last, behind a first one or a prompt? Few are one, or one in 16. */
static inline bool koila_is_near_length(int64_t size, int64_t length)
{
    const int64_t few = length < 16 ? 1 : length / 16;
    return size >= length - few && size <= length + few;
}
/** A leaf. BATCH: size[dim] must be the axis' size, or a multiple: each row has as many entries.
 * `name` may be NULL (for people: "input 0",
 * "layer.weight"). */
KOILA_API koila_status koila_graph_leaf(koila_graph *g, koila_meta meta, koila_leaf_kind kind,
                                        uint16_t axis, uint32_t dim, const char *name,
                                        koila_value *out);
/** "" when it has none */
KOILA_API const char *koila_graph_leaf_name(const koila_graph *g, koila_value v);
/** A source line "file.py:12" and its text form; interned. */
KOILA_API koila_status koila_graph_line(koila_graph *g, const char *file, uint32_t line,
                                        uint32_t *out);
KOILA_API const char *koila_graph_line_file(const koila_graph *g, uint32_t line);
KOILA_API uint32_t koila_graph_line_number(const koila_graph *g, uint32_t line);
/** Append a node: inputs[sig.n_inputs] must have exactly the signature's metas. *first_output is
 * the first of sig.n_outputs values. */
KOILA_API koila_status koila_graph_node(koila_graph *g, koila_sig sig, const koila_value *inputs,
                                        uint32_t line, koila_value *first_output);
KOILA_API uint32_t koila_graph_n_nodes(const koila_graph *g);
KOILA_API uint32_t koila_graph_n_values(const koila_graph *g);
KOILA_API koila_node_info koila_node_get(const koila_graph *g, koila_node n);
KOILA_API koila_value_info koila_value_get(const koila_graph *g, koila_value v);
/** borrowed until the graph grows */
KOILA_API const koila_value *koila_node_inputs(const koila_graph *g, koila_node n);
/** Nobody outside of the graph holds value v any more, when the nodes appended so far have run:
 * then plain PyTorch frees it. Decides no plan; it is for predictions.
 * Expected: BAD_ARGUMENT, NO_MEMORY. */
KOILA_API koila_status koila_graph_drop(koila_graph *g, koila_value v);
typedef struct koila_drop {
    koila_value value;
    uint32_t n_nodes; /**< that were appended before */
} koila_drop;
KOILA_API uint32_t koila_graph_n_drops(const koila_graph *g);
/** i < koila_graph_n_drops(g), in the order of the calls */
KOILA_API koila_drop koila_graph_drop_get(const koila_graph *g, uint32_t i);
/** Leaf v lies in storage number `storage`, of so many bytes: leaves with the same number share it.
 * Decides no plan; for predictions. Expected: BAD_ARGUMENT, NO_MEMORY. */
KOILA_API koila_status koila_graph_stored(koila_graph *g, koila_value v, uint32_t storage,
                                          uint64_t bytes);
typedef struct koila_stored {
    uint32_t storage; /**< KOILA_NONE: never told */
    uint64_t bytes;
} koila_stored;
KOILA_API koila_stored koila_graph_stored_get(const koila_graph *g, koila_value v);
/** The drops and storages of `from`, a graph with the same nodes, replace those of `to`; `from` is
 * left with none. */
KOILA_API void koila_graph_take_lives(koila_graph *to, koila_graph *from);
/** The source lines of the nodes of `from`, a graph with the same nodes over the same table,
 * replace those of `to`; `from` is left with those of `to`. */
KOILA_API void koila_graph_take_lines(koila_graph *to, koila_graph *from);
/** `g` over a table of its own, which has what `g` names under the same ids, and the operators and
 * rules: another thread may use the copy while the table of `g` is used here. Freed by
 * koila_graph_copy_free(), with its table. Expected: NO_MEMORY. */
KOILA_API koila_status koila_graph_copy(const koila_graph *g, const koila_allocator *mem,
                                        koila_graph **out);
KOILA_API void koila_graph_copy_free(koila_graph *copy); /**< NULL is fine */
/** Hash of everything that decides a plan: axes, leaves, nodes; lines and names excluded. Kept up
 * to date while recording. */
KOILA_API uint64_t koila_graph_hash(const koila_graph *g);
/** Do two graphs of one table begin alike: the same axes (all of them), the same first `n_values`
 * values and `n_nodes` nodes, lines and names excluded? Both have as many. */
KOILA_API bool koila_graph_begin_alike(const koila_graph *a, const koila_graph *b, uint32_t n_nodes,
                                       uint32_t n_values);
/** How a known value may be sliced: along `dim` of axis `axis`, if is_cut. */
typedef struct koila_cut {
    bool is_cut;
    uint8_t dim;
    uint16_t axis;
} koila_cut;
/** Is the value of `v` known? *cut is no cut when it is called. */
typedef bool (*koila_known_fn)(void *user, koila_value v, koila_cut *cut);
/** The part of `g` that makes `targets`. A made value that is known (`known` may be NULL; `user` is
 * passed on) becomes a leaf instead: BATCH if it may be cut, else REAL; BATCH leaves stay. If no
 * BATCH leaf is left, each known value with a dimension as large as an axis becomes one. Drops of
 * values of the part are those of the part. Ids are dense and depend on the part alone, so equal
 * steps give equal graphs and hashes, whatever was recorded around them. Leaves come first.
 *  value_of[n_values of g]: all 0 before the call; then 1 + the new value, or 0.
 *  leaf_from[n_values of g]: the first entries, one for each leaf of *out, are their values in g.
 *  node_from[n_nodes of g]: the same for nodes.
 *  Takes the time of the part, not of `g`.
 *  Expected: BAD_ARGUMENT for a target that does not exist, NO_MEMORY; the contents of the arrays
 *  are then undefined. */
KOILA_API koila_status koila_graph_extract(const koila_graph *g, const koila_value *targets,
                                           uint32_t n_targets, koila_known_fn known, void *user,
                                           const koila_allocator *mem, koila_graph **out,
                                           koila_value *value_of, koila_value *leaf_from,
                                           koila_node *node_from);
/** Every invariant of this header; true when all hold. */
KOILA_API bool koila_graph_check(const koila_graph *g, koila_error *err);

/* ---- text form: reads back to an equal graph. For the command line, fuzzing and bug reports. */

/** Receives the text in pieces; a nonzero return stops with KOILA_BAD_ARGUMENT. */
typedef int (*koila_write_fn)(void *user, const char *text, size_t n);
KOILA_API koila_status koila_graph_print(const koila_graph *g, koila_write_fn write, void *user);
/** Parse text into a fresh graph over `table`. BAD_INPUT with the byte offset. Printed text ends
 * with its counts, so truncated text is BAD_INPUT; version 1, which has no such end, is read too.
 */
KOILA_API koila_status koila_graph_parse(koila_table *table, const char *text, size_t n,
                                         koila_graph **out, koila_error *err);
/** The graph as a Graphviz drawing: leaves, operators, and an edge per use with the meta of the
 * value. */
KOILA_API koila_status koila_graph_dot(const koila_graph *g, koila_write_fn write, void *user);

#ifdef __cplusplus
}
#endif
#endif
