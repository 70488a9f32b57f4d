/* cost.h — estimated time of one call at full batch size. */
#ifndef KOILA_SRC_COST_H
#define KOILA_SRC_COST_H

#include "engine/plan_costs.h"
#include "koila/graph.h"

typedef struct koila__cost {
    /* bytes moved, or the multiply-adds converted to bytes if that is more (plan_costs.h); 0 for a
     * view */
    double work;
    bool expensive; /* keeping its results is cheaper than running it again */
} koila__cost;

koila__cost koila__cost_of(const koila_table *t, const koila_sig_info *sig);
/* The same of a copy of n_bytes to host memory or back, where a byte costs `price`. */
static inline double koila__offload_work(double n_bytes, double price)
{
    return price * (n_bytes + KOILA_COST_BYTES_PER_OFFLOAD);
}

#endif
