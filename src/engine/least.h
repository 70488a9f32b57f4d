/* least.h — the smallest budget in which a step that does not fit would fit. Internal to
 * src/engine. */
#ifndef KOILA_SRC_LEAST_H
#define KOILA_SRC_LEAST_H

#include "engine/ways.h"

/* *n_bytes: what a plan that was made needs, above the budget of `q`; then a budget in which a plan
 * fits: a 64th less does not do, unless the step is so large that fewer plans are made. Expected:
 * NO_MEMORY. */
koila_status koila__least_budget(const koila__planning *q, uint64_t *n_bytes);

#endif
