/* ops.c — names and facts of ops.def, found by name when a table interns an operator. The other
 * columns are rule_table.c's, line by line the same. */
#include "graph/table.h"

static const struct {
    const char *name;
    uint32_t facts;
} lines[] = {
#define KOILA_OP(name, rule, says, facts) { name, facts },
#define KOILA_GATHERED(name, facts) { name, facts },
#include "graph/ops.def"
#undef KOILA_OP
#undef KOILA_GATHERED
};

static uint64_t line_hash_of(const void *owner, uint32_t line)
{
    return koila__hash_text(lines[line].name);
}
static bool line_same(const void *owner, uint32_t line, const void *name)
{
    return strcmp(lines[line].name, name) == 0;
}

bool koila__op_lines_init(koila_table *t)
{
    for (uint32_t i = 0; i < KOILA_COUNT(lines); i++) {
        if (!koila__idset_reserve(&t->mem, &t->op_lines, line_hash_of, NULL))
            return false;
        koila__idset_insert(&t->op_lines, line_hash_of(NULL, i), i);
    }
    return true;
}

/* "aten::add_.Tensor" -> "aten::add.Tensor"; the name itself when it has no underscore to lose. */
static const char *twin_of(koila_table *t, const char *name)
{
    const size_t n = strlen(name);
    const size_t dot = strcspn(name, ".");
    if (dot == 0 || name[dot - 1] != '_')
        return name;
    char *twin = koila__arena_alloc(&t->arena, n);
    if (!twin)
        return NULL;
    memcpy(twin, name, dot - 1);
    memcpy(twin + dot - 1, name + dot, n - dot + 1);
    return twin;
}

bool koila__op_fill_in(koila_table *t, koila__op *op)
{
    op->twin = op->flags & KOILA_OP_INPLACE ? twin_of(t, op->name) : op->name;
    if (!op->twin)
        return false;
    op->line =
        koila__idset_find(&t->op_lines, koila__hash_text(op->twin), line_same, NULL, op->twin);
    op->facts = op->line == KOILA_NONE ? 0 : lines[op->line].facts;
    op->is_foreign =
        (strncmp(op->name, "aten::", 6) != 0 && strncmp(op->name, "koila::", 7) != 0) ||
        op->facts & (KOILA_FACT_OPAQUE_CALL | KOILA_FACT_OPAQUE_BACKWARD);
    return true;
}
