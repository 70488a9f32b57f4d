/* koila/plan.h — how to run a recorded step in slices of the batch: loops, barriers, kept values,
 * and the bytes it will need.
 *
 * A plan is a list of *stages*, each a list of *instructions* over the nodes and values of a
 * lowered graph (the recorded one, with operators that hide a reduction over the batch written
 * out). A whole stage runs once, on whole values; a loop stage runs once per slice of one axis:
 *
 *   RUN n     run node n                                      loop: on local values (slices and
 *                                                             partials); whole stage: on whole ones
 *   SLICE v   local v := this slice's rows of whole v         (a view)
 *   ADD v     whole v := combine(whole v, local v)            first slice: local v becomes whole v
 *   PUT v     rows of whole v := local v                      the gather of a sharded value
 *   KEEP v    kept v [this slice] := local v                  for a later loop
 *   FETCH v   local v := kept v [this slice]                  `last`: the kept piece is released
 *   FREE v    local v (loop) or whole v (whole stage) is dead
 *   INNER     the calls of the slice run as a step of its own, cut along another axis (koila_inner)
 *
 * Invariants: every RUN finds its inputs made; each local value is freed exactly once per slice;
 * whole values of targets are never freed.
 */
#ifndef KOILA_PLAN_H
#define KOILA_PLAN_H

#include "koila/graph.h"

#ifdef __cplusplus
extern "C" {
#endif

/** immutable once made; independent of the recorded graph */
typedef struct koila_plan koila_plan;

typedef enum koila_instr_kind {
    KOILA_DO_RUN,
    KOILA_DO_SLICE,
    KOILA_DO_ADD,
    KOILA_DO_PUT,
    KOILA_DO_KEEP,
    KOILA_DO_FETCH,
    KOILA_DO_FREE,
    KOILA_DO_INNER
} koila_instr_kind;

enum { /* koila_instr.flags */
       /** ADD: local v itself may become the accumulator (it owns its dense storage and nothing
        * else uses it); PUT: the same when the slice is all rows. Without this flag a copy must be
        * made: others may write to the storage */
       KOILA_INSTR_OWNED = 1,
       KOILA_INSTR_LAST = 2,  /**< FETCH: the last use of the kept piece */
       KOILA_INSTR_ADDED = 4, /**< ADD: the inner step has added to the accumulator already */
       /** RUN of a module as it is: nothing in this loop reads its graph, so it makes none */
       KOILA_INSTR_NO_GRAPH = 8,
       /** RUN: the result goes into the accumulator of `user`, a whole value of the loop, at once:
        * the first becomes it. They lie in memory alike, though their dimensions may differ.
        * Outside loops: it is added to whole `user`, which becomes the result too */
       KOILA_INSTR_ADDS = 16,
       /** RUN, beside ADDS: where there is an accumulator and the slice is not all rows, or adds to
        * what earlier rows left, the call adds to it while it computes, and makes no result */
       KOILA_INSTR_ONTO = 32,
       /** RUN, ADD, FREE: of what ADDS has done. RUN outside loops: of what SECOND has done; the
        * result is `user` then. Who ignores all these flags gets the same values */
       KOILA_INSTR_TOLD = 64,
       /** ADD: the loop adds to whole `user`, instead of beginning with nothing */
       KOILA_INSTR_SECOND = 128,
};

/** Of koila_instr.steal of a sum that is written over a term: 0: the first, 1: the second. */
static inline uint32_t koila_term_written_over(uint16_t steal) { return steal >> 1; }

typedef struct koila_instr {
    uint8_t kind;
    uint8_t flags;
    /** RUN of a node with writes: bit w: the base of write w is dead afterwards and is written in
     * place; bit clear: it is cloned first. RUN of a sum of two terms: bit i: term i is dead
     * afterwards, and the sum is written over it. SLICE: which input of `user` */
    uint16_t steal;
    uint32_t id; /**< node (RUN) or value */
    /** SLICE: the node that needs the slice; koila_plan_need(plan, user, steal) says which. RUN and
     * ADD: a value, where a flag says so */
    uint32_t user;
} koila_instr;

/** The slices of a loop, one row each, as steps of their own (KOILA_DO_INNER). All arrays belong to
 * the plan. */
typedef struct koila_inner {
    const koila_plan *plan;
    uint32_t n_leaves, n_results, n_nodes;
    /** leaf `inner` of the inner plan's graph is local `outer` of the loop, or whole `outer` */
    const struct koila_inner_leaf {
        koila_value outer, inner;
        bool is_local;
    } *leaves;
    /** whole `inner` of the inner plan becomes local `outer`; adds_on: the inner step adds to the
     * loop's accumulator of `outer` instead */
    const struct koila_inner_result {
        koila_value outer, inner;
        bool adds_on;
    } *results;
    /** [n_nodes] the loop's node that each node of the inner step's recorded graph is */
    const koila_node *nodes;
} koila_inner;

typedef struct koila_stage {
    bool is_loop;
    uint16_t axis; /**< loop: which */
    uint32_t n_instrs;
    const koila_instr *instrs;
    uint64_t peak_bytes;      /**< predicted, beyond what was live before the step */
    const koila_inner *inner; /**< what KOILA_DO_INNER runs; NULL: there is none */
} koila_stage;

typedef enum koila_share_kind {
    KOILA_SHARE_WHOLE,
    KOILA_SHARE_SLICE,
    KOILA_SHARE_PARTIAL
} koila_share_kind;
typedef enum koila_partial_kind {
    KOILA_PARTIAL_SUM,
    KOILA_PARTIAL_MAX,
    KOILA_PARTIAL_MIN,
    KOILA_PARTIAL_MOMENTS,
    /** taken from rows outer .. inner: the value of the one slice that has them all, and absent in
     * the others */
    KOILA_PARTIAL_PIECE
} koila_partial_kind;

/** Where a value (or a use of it) lives: whole; a slice: size[dim] = outer * rows * inner; or a
 * partial to be combined over slices. */
typedef struct koila_share {
    uint8_t kind;    /**< koila_share_kind */
    uint8_t partial; /**< koila_partial_kind */
    uint8_t dim;
    uint16_t axis;
    int64_t outer, inner;
} koila_share;

/** The dtype in which ADD accumulates a value of `dtype`: float32 for a partial sum of half
 * precision, unless one slice is all rows (`all_rows`); `dtype` itself for everything else. A wider
 * accumulator is cast back when the loop ends. */
KOILA_API koila_dtype koila_accumulator_dtype(koila_dtype dtype, koila_share share, bool all_rows);

typedef enum koila_slice_kind {
    KOILA_SLICE_VIEW, /**< of the whole value's storage */
    /** storage of its own; if the value is dense, so is the copy, with the same dimension order */
    KOILA_SLICE_COPY,
} koila_slice_kind;
/** How SLICE makes the rows `cut` of a whole value of meta `whole`. A copy whenever cut.outer != 1.
 * Otherwise a view if the rows lie in one block (the dimension is the outermost in memory, or the
 * slice is all rows), and also if the value is not dense, since a view of it has gaps anyway.
 */
KOILA_API koila_slice_kind koila_slice_form(const koila_meta_info *whole, koila_share cut,
                                            bool all_rows);

typedef enum koila_keep_policy {
    /** the least work that fits; with forced rows and no budget: the least memory at moderate work
     */
    KOILA_KEEP_AUTO,
    KOILA_KEEP_ALL,  /**< keep results of expensive operators that a later loop needs */
    KOILA_KEEP_NONE, /**< recompute everything */
} koila_keep_policy;

/** Which dimensions of the batch may be cut. */
typedef enum koila_axes {
    KOILA_AXES_ROWS, /**< those that the leaves name */
    /** where no number of rows fits: another one that batched leaves have; with `recomputes` also
     * both, row by row. `rows` > 0: as ROWS */
    KOILA_AXES_ANY,
    KOILA_AXES_OTHER, /**< another one in any case; `rows` counts its entries */
    KOILA_AXES_BOTH,  /**< row by row, and in each row another one; `rows` counts its entries */
} koila_axes;

/** What fits in rows is taken as it is, up to so many times the work of the recorded step
 * (koila_plan_info.replay_ratio), which is that of a second forward pass. Loops whose rows wait for
 * each other, as for batch norm's statistics of the whole batch, compute much of the forward pass
 * once more: with `recomputes` that is compared with the whole batch of which results are dropped.
 * A ResNet-50 of eight images takes 1.18 of the work so in half of the memory, in slices 1.67. */
#define KOILA_SLOW_ROWS (4.0 / 3)

typedef struct koila_plan_options {
    uint32_t struct_size;
    /** bytes the step may use beyond those live before it; UINT64_MAX = no limit */
    uint64_t budget_bytes;
    int64_t rows;  /**< force slices of so many rows; 0 = the fewest slices that fit */
    uint32_t keep; /**< koila_keep_policy */
    /** Bytes of workspace that an operator uses beyond its inputs and outputs, for a call on `rows`
     * of `batch` rows (both 0: whole). NULL: always 0. `user` is passed on. */
    uint64_t (*workspace)(void *user, koila_sig sig, int64_t rows, int64_t batch);
    /** Bytes by which a backward of KOILA_FACT_OPAQUE_BACKWARD stays below what it is given and its
     * results together, for it frees the one while it makes the other. As `workspace`. */
    uint64_t (*spared)(void *user, koila_sig sig, int64_t rows, int64_t batch);
    void *user;
    /** Shall this plan be taken? Called for plans whose sum of live bytes fits the budget: fewest
     * slices first, then least work. Once one is taken, some of the skipped slice counts are tried
     * too, since fitting is not monotone in them. `p` exists during the call only; it has no
     * gathers, no curve and no peak node yet. NULL: the budget decides. If none is taken,
     * koila_plan_new() returns the last one found. Not called with forced rows and no budget. */
    bool (*accepts)(void *user, const koila_plan *p);
    void *accepts_user;
    uint32_t axes; /**< koila_axes */
    /** if nothing fits, or rows take more than KOILA_SLOW_ROWS: may results of the forward pass be
     * dropped and computed again for the backward pass? */
    bool recomputes;
    /** with `recomputes`: may they wait in host memory instead? A price above 0: the work of a byte
     * that is copied there, or back; work of 1 is a byte that goes through the device's memory. Of
     * values on host_device (koila_meta_info.device), in at most host_bytes of host memory. */
    double host_price;
    uint64_t host_bytes;
    uint16_t host_device;
    /** if nothing fits: shall the error tell the smallest budget in which a plan fits? That takes
     * several plans more. Else it tells the least of what was tried within budget_bytes, and a
     * budget between may do. Not with `rows` > 0 */
    bool finds_least;
} koila_plan_options;

typedef struct koila_plan_info {
    uint32_t struct_size;
    int64_t batch, rows; /**< of the main axis: all rows, rows per slice */
    uint32_t n_slices;   /**< of the main axis */
    uint64_t peak_bytes; /**< predicted, beyond what was live before the step */
    uint64_t budget_bytes;
    uint32_t n_stages, n_loops;
    uint32_t n_recorded;        /**< nodes the targets need, as recorded */
    double replay_ratio;        /**< work run in all slices / work recorded, by estimated time */
    double work, work_recorded; /**< the two; only their ratios mean something */
    uint32_t n_gathers;
    /** node of the lowered graph that runs at the peak; KOILA_NONE: nothing runs */
    koila_node peak_node;
    /** KOILA_NONE: rows are cut. Else another axis, which all of this calls rows: this dimension of
     * the first leaf that has it */
    uint32_t dim;
    int64_t unit;             /**< entries of that dimension in what is called a row; 1 for rows */
    bool has_other_axes;      /**< batched leaves have another one */
    uint32_t n_again;         /**< nodes of the forward pass that run again: options.recomputes */
    uint32_t n_offloaded;     /**< values that wait in host memory, in each slice */
    uint64_t offloaded_bytes; /**< theirs, in a slice */
    uint32_t n_inner;         /**< loops whose rows are steps of their own: koila_inner */
    /** how the largest of these is cut: as `dim`, `batch`, `rows`, `n_slices`. inner_dim
     * KOILA_NONE: results are dropped and computed again instead */
    uint32_t inner_dim;
    int64_t inner_size, inner_rows;
    uint32_t inner_slices;
    /** estimated time in all slices / of each recorded call once: work, and what a call takes
     * whatever its operands. Plans that fit along other axes are compared by it */
    double time_ratio;
} koila_plan_info;

/** Plan how to make `targets` (recorded values). Of `graph` only the table is kept.
 *  Expected: OOM (even one row per slice, or one entry of each other axis that is tried, needs more
 *  than the budget; err names the largest values; a budget of UINT64_MAX gives that plan),
 *  BAD_ARGUMENT, NO_MEMORY, UNSUPPORTED. */
KOILA_API koila_status koila_plan_new(const koila_graph *graph, const koila_value *targets,
                                      uint32_t n_targets, const koila_plan_options *options,
                                      const koila_allocator *mem, koila_plan **out,
                                      koila_error *err);
KOILA_API void koila_plan_free(koila_plan *p);
KOILA_API koila_plan_info koila_plan_get(const koila_plan *p);
/** the lowered graph; borrowed from the plan */
KOILA_API const koila_graph *koila_plan_graph(const koila_plan *p);
KOILA_API const koila_stage *koila_plan_stage(const koila_plan *p, uint32_t stage);
/** lowered value of targets[target] */
KOILA_API koila_value koila_plan_target(const koila_plan *p, uint32_t target);
/** lowered value of a recorded leaf, KOILA_NONE when not needed */
KOILA_API koila_value koila_plan_leaf(const koila_plan *p, koila_value recorded);
/** the recorded node that `lowered` stands for */
KOILA_API koila_node koila_plan_recorded(const koila_plan *p, koila_node lowered);
KOILA_API koila_share koila_plan_share(const koila_plan *p, koila_value v);
KOILA_API koila_share koila_plan_need(const koila_plan *p, koila_node n, uint32_t input);
KOILA_API bool koila_plan_in_loop(const koila_plan *p, koila_node n);
/** Does some node work on pieces of the axis? Then slices may differ in length, and in what they
 * run. */
KOILA_API bool koila_plan_has_pieces(const koila_plan *p, uint16_t axis);
/** Does node n run in the slice of rows begin .. end? Always, unless it works on a piece of other
 * rows. What it would have made is then absent: a zero to a sum, to be made by whoever reads it.
 */
KOILA_API bool koila_plan_runs_in(const koila_plan *p, koila_node n, int64_t begin, int64_t end);
/** Does node n belong to a piece: does it run once, as it was recorded? */
KOILA_API bool koila_plan_runs_once(const koila_plan *p, koila_node n);
/** How node n treats absent inputs. */
typedef enum koila_absence {
    KOILA_ABSENT_ZEROS, /**< as zeros */
    KOILA_ABSENT_SKIP,  /**< a list of tensors, from which they are left out */
    /** of two terms: both absent: so is the result; one: the result may be the other, if they are
     * alike */
    KOILA_ABSENT_SUM
} koila_absence;
KOILA_API koila_absence koila_plan_absence(const koila_plan *p, koila_node n);
/** May the value be absent in some slices? */
KOILA_API bool koila_plan_may_be_absent(const koila_plan *p, koila_value v);
/** Of an inner step: is v added to the accumulator that the outer loop brings along? Then it is no
 * result, and stays in its accumulator's dtype. */
KOILA_API bool koila_plan_adds_on(const koila_plan *p, koila_value v);
/** The end of the slice that begins at row `begin` and shall have `rows` rows. Slices are as long
 * as that, but shorter at the end of the batch and where a piece would be cut, and longer where a
 * piece is. */
KOILA_API int64_t koila_plan_slice_end(const koila_plan *p, uint16_t axis, int64_t begin,
                                       int64_t rows);
/** Number of slices and the rows [*begin, *end) of slice i of an axis. */
KOILA_API uint32_t koila_plan_slices(const koila_plan *p, uint16_t axis);
KOILA_API int64_t koila_plan_axis_rows(const koila_plan *p, uint16_t axis);
/** Gathers: values that are made whole because an operator needs them so: its rule says it (keys
 * and values of attention cut along its queries), or it has none. i < n_gathers. */
typedef struct koila_gather {
    koila_node node; /**< of the lowered graph: the operator that needs it whole */
    koila_value value;
    uint64_t bytes; /**< of the whole value */
} koila_gather;
KOILA_API koila_gather koila_plan_gather(const koila_plan *p, uint32_t i);
/** The memory curve: predicted bytes after each instruction of the plan's simulated run, thinned to
 * at most `cap` points; returns how many. */
typedef struct koila_curve_point {
    uint32_t stage;
    koila_node node; /**< KOILA_NONE: not at an operator */
    uint64_t bytes;
} koila_curve_point;
KOILA_API uint32_t koila_plan_curve(const koila_plan *p, koila_curve_point *out, uint32_t cap);
/** The largest values live at the predicted peak, largest first; returns how many. */
KOILA_API uint32_t koila_plan_largest(const koila_plan *p, koila_gather *out, uint32_t cap);
/** Predicted bytes of value v for a slice of `rows` rows of its axis (whole values: rows ignored).
 */
KOILA_API uint64_t koila_plan_value_bytes(const koila_plan *p, koila_value v, int64_t rows);

/** How the arguments of a call are adapted to a slice of `rows` rows. */
typedef enum koila_adapt_kind {
    KOILA_ADAPT_INTS,
    KOILA_ADAPT_INT,
    KOILA_ADAPT_SCALE,
    KOILA_ADAPT_ALIAS,
    KOILA_ADAPT_SQUEEZE
} koila_adapt_kind;
typedef struct koila_adapt {
    uint8_t kind;
    uint8_t arg;     /**< INTS, INT: the positional value to replace */
    uint16_t output; /**< SCALE: output multiplied by rows / batch */
    uint32_t n;      /**< INTS: how many; SQUEEZE: dims */
    int64_t ints[KOILA_MAX_DIMS];
} koila_adapt;
#define KOILA_MAX_ADAPTS 4
/** Adaptations of node n (link < 0) or of link `link` of its writes' chains; writes at most
 * KOILA_MAX_ADAPTS, returns how many. */
KOILA_API uint32_t koila_plan_adapt(const koila_plan *p, koila_node n, int32_t link, int64_t rows,
                                    koila_adapt *out);
/** The same for a slice that begins at row `begin`, where koila_plan_adapt() means the first one.
 * Calls that take rows out of the batch differ. */
KOILA_API uint32_t koila_plan_adapt_at(const koila_plan *p, koila_node n, int32_t link,
                                       int64_t begin, int64_t rows, koila_adapt *out);
/** The plan as a table for people: facts, then every stage with its instructions, one per line;
 * successive FREEs share a line. */
KOILA_API koila_status koila_plan_print(const koila_plan *p, koila_write_fn write, void *user);
/** The plan as a Graphviz drawing: a box per stage, with the operators it runs (again in each stage
 * that runs them again); barriers and kept pieces are edges between boxes. */
KOILA_API koila_status koila_plan_dot(const koila_plan *p, koila_write_fn write, void *user);
/** Checks every invariant of this header. */
KOILA_API bool koila_plan_check(const koila_plan *p, koila_error *err);

#ifdef __cplusplus
}
#endif
#endif
