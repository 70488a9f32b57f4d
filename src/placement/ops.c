/* ops.c — the operator table: the lines of ops.def as names and rules. An operator without a line
 * gathers, and is right. */
#include "placement/rules.h"

static const struct op_line {
    const char *name;
    koila__rule rule;
    const char *family, *says;
} lines[] = {
#define KOILA_OP(name, rule, says) { name, koila__rule_##rule, #rule, says },
#include "placement/ops.def"
#undef KOILA_OP
};

koila__rule koila__rule_of(const char *op)
{ /* asked once per operator of a table, so a walk over a few hundred lines is enough */
    for (size_t i = 0; i < KOILA_COUNT(lines); i++)
        if (strcmp(lines[i].name, op) == 0)
            return lines[i].rule;
    return NULL;
}

bool koila__op_line(uint32_t i, const char **name, const char **family, const char **says)
{
    if (i >= KOILA_COUNT(lines))
        return false;
    *name = lines[i].name;
    *family = lines[i].family;
    *says = lines[i].says;
    return true;
}
