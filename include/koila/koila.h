/* koila.h — the public C interface of libkoila: the engine of koila without Python and without torch.
 *
 *   base.h      status, error buffer, host allocator
 *   graph.h     a recorded training step: operators, metas, signatures, values, nodes, axes; its text form
 */
#ifndef KOILA_H
#define KOILA_H

#include "koila/base.h"
#include "koila/graph.h"

#endif
