/* rule_table.c — the rules of ops.def and their words, line by line. */
#include "placement/rules.h"
#include "graph/table.h"

static const koila__rule rules[] = {
#define KOILA_OP(name, rule, says, facts) koila__rule_##rule,
#define KOILA_GATHERED(name, facts) NULL,
#include "graph/ops.def"
#undef KOILA_OP
#undef KOILA_GATHERED
};

koila__rule koila__rule_of(const koila_table *t, koila_op op)
{
    const uint32_t line = t->ops.at[op].line;
    return line == KOILA_NONE ? NULL : rules[line];
}

static const struct {
    const char *name, *family, *says;
} sliced[] = {
#define KOILA_OP(name, rule, says, facts) { name, #rule, says },
#define KOILA_GATHERED(name, facts)
#include "graph/ops.def"
#undef KOILA_OP
#undef KOILA_GATHERED
};

bool koila__op_line(uint32_t i, const char **name, const char **family, const char **says)
{
    if (i >= KOILA_COUNT(sliced))
        return false;
    *name = sliced[i].name;
    *family = sliced[i].family;
    *says = sliced[i].says;
    return true;
}
