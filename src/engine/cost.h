/* cost.h — estimated time of one call at full batch size. */
#ifndef KOILA_SRC_COST_H
#define KOILA_SRC_COST_H

#include "koila/graph.h"

typedef struct koila__cost {
    /* bytes moved, or as many as the multiply-adds are worth (plan_costs.h); 0 for a view */
    double work;
    bool expensive; /* worth keeping its results instead of running it again */
} koila__cost;

koila__cost koila__cost_of(const koila_table *t, const koila_sig_info *sig);

#endif
