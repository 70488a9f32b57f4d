/* effort.h — what planning a step has taken so far: a count of passes over nodes, each as long as
 * it took where it was measured. It is no clock, so that a step is planned alike wherever and
 * whenever that is done. Internal to src/engine. */
#ifndef KOILA_SRC_EFFORT_H
#define KOILA_SRC_EFFORT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/plan_costs.h"

typedef struct koila__effort {
    double spent, allowed; /* ns */
    /* nothing is left out because planning has taken long, or because what was tried makes it
     * unlikely to fit: tests/oracle/test_scan_oracle.c */
    bool tries_all;
} koila__effort;

/* Of a step of so many recorded nodes. */
static inline koila__effort koila__effort_for(uint32_t n_nodes)
{
    const double by_nodes = KOILA_COST_NS_ALLOWED * n_nodes;
    return (koila__effort){ .allowed = by_nodes > KOILA_COST_NS_AT_LEAST ? by_nodes
                                                                         : KOILA_COST_NS_AT_LEAST };
}

/* A pass of so many ns a node has gone over so many nodes. */
static inline void koila__spend(koila__effort *e, double ns, uint32_t n_nodes)
{
    e->spent += ns * n_nodes;
}

/* Is all of it spent? Then what fits is not compared with more. */
static inline bool koila__is_spent(const koila__effort *e)
{
    return e->spent >= e->allowed && !e->tries_all;
}

#endif
