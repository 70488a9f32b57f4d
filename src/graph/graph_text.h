/* graph_text.h — a graph as text that reads back to an equal graph. For the command line, fuzzing,
 * bug reports and tests/data. graph_write.c writes it, graph_read.c reads it; print.c shares the
 * buffered writer. Internal to src/.
 *
 *   koila graph 2                                                     first line, always
 *   axis 32                                                           axes, in order: 0, 1, …
 *   op aten::t view
 *         operators that have flags, before their first use
 *   opaque #0 "torch.channels_last"
 *         opaque arguments, numbered by first use
 *   line @0 "train.py" 12                                             source lines, in order
 *   %0 = batch axis 0 dim 0 f32[32, 8] "input 0"
 *         leaves and nodes in recorded order; values are numbered as they come
 *   %1 = real f32[16, 8] "layer.weight"
 *   %2 = aten::t(%1) -> f32[8, 16]{1, 8} grad @0
 *   %3 = aten::mm(%0, %2) -> f32[32, 16] grad @0
 *   %4 %5 = aten::max.dim(%3, 1, keepdim=false) -> (f32[32], i64[32]) @0
 *   %6 = aten::add_.Tensor(%3, 1.5) -> {} writes 0 via aten::select.int(f32[32, 16], 0, 3) ->
 *       f32[16] :0
 *   end 7 4
 *         numbers of values and nodes: truncated text is refused
 *
 *   file   = "koila graph 2" NL { [ line ] NL } "end" N N { NL }      a line that begins with // is
 *          a comment. "koila graph 1": the same without an end
 *   line   = "axis" INT | "op" NAME { FLAG } | "opaque" "#"N STRING | "line" "@"N STRING N | {
 *          VALUE } "=" ( leaf | call { write } [ "@"N ] )
 *   leaf   = ( "real" | "batch" "axis" N "dim" N ) meta [ STRING ]
 *   call   = NAME "(" [ arg { "," arg } ] ")" "->" result [ "grad" [ "=" N ] ]         arguments
 *          with a name come last
 *   arg    = [ NAME "=" ] ( one | "[" [ one { "," one } ] "]" )
 *   one    = "None" | "true" | "false" | INT | FLOAT | STRING | DTYPE | "#"N | tensor
 *   tensor = VALUE in a node, meta in the link of a chain (its tensor is the previous link's
 *       result)
 *   result = meta | "(" results ")" tuple | "[" results "]" list | "{" results "}" nothing or
 *       self | "<" results ">" one tensor, though there is not exactly one result;
 *            each of the results is a meta or None
 *   write  = ( "writes" | "overwrites" ) N { "via" call ":"N }        N: index among the node's
 *          tensor inputs; which result
 *   meta   = DTYPE "[" sizes "]" [ "{" strides "}" ] [ "on" ( "cuda:"N | "device:"N ) ]   no
 *          strides: contiguous; no device: cpu
 *   VALUE  = "%"N    STRING = as in C, with \" \\ \n \t \xHH    FLOAT = decimal, or
 *          0x<hex>p<exponent> where decimal would not be exact, inf, nan, nan:<bits>
 *
 * Equal means: parsed into the table it came from, the graph has the same signatures, values,
 * lines, names and hash; parsed into any table, it prints as the same text. (Opaque arguments are
 * found in the table by label. Different ones stay different; several with one label are told apart
 * by their order.) */
#ifndef KOILA_SRC_GRAPH_TEXT_H
#define KOILA_SRC_GRAPH_TEXT_H

#include "koila/graph.h"
#include "graph/table.h"

/* Pieces are collected and handed to `write` in blocks. `status` is the first failure; everything
 * after it is dropped. */
typedef struct koila__out {
    koila_write_fn write;
    void *user;
    koila_status status;
    size_t n;
    char at[4096];
} koila__out;

void koila__out_init(koila__out *o, koila_write_fn write, void *user);
void koila__out_bytes(koila__out *o, const char *s, size_t n);
static inline void koila__out_str(koila__out *o, const char *s)
{
    koila__out_bytes(o, s, strlen(s));
}
/* At most 255 bytes: longer text goes by koila__out_str. */
void koila__out_fmt(koila__out *o, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
koila_status koila__out_finish(koila__out *o); /* hands over the rest */

void koila__out_quoted(koila__out *o, const char *s);
void koila__out_float(koila__out *o, double x);
void koila__out_meta(koila__out *o, const koila_meta_info *m);
/* The arguments of a call, without parentheses: "%1, [2, 3], dim=0". `inputs`: the values that are
 * its tensors; NULL: tensors are shown by their metas. `opaque_names`: the numbers of opaques;
 * NULL: opaques are shown by their labels. */
void koila__out_arguments(koila__out *o, const koila_table *t, const koila_sig_info *s,
                          const koila_value *inputs, const uint32_t *opaque_names);

/* ---- shared by the reader and the writer */

#define KOILA__NAN_BITS ((uint64_t)0x7ff8000000000000) /* of "nan"; others are "nan:<bits>" */

typedef struct koila__op_flag {
    const char *word;
    uint32_t flag;
} koila__op_flag;
enum { KOILA__N_OP_FLAGS = 5 };
extern const koila__op_flag koila__op_flags[KOILA__N_OP_FLAGS];

/* Digits [. digits] [e [+-] digits] of n bytes, without sign. False: no such number, or one that is
 * not read exactly with one rounding. */
bool koila__read_decimal(const char *s, size_t n, double *out);

static inline bool koila__is_digit(int c) { return c >= '0' && c <= '9'; }
static inline bool koila__is_word_start(int c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
static inline bool koila__is_word(int c) { return koila__is_word_start(c) || koila__is_digit(c); }

#endif
