/* run.c — placeholder until the executor: everything runs whole. */
#include "tape.h"

int koila__run(koila__tape *t, const koila_value *targets, uint32_t n_targets, bool commit_effects)
{
    return koila__run_whole(t, targets, n_targets, commit_effects);
}
