/* koila.h — the public C interface of libkoila: the engine of koila without Python and without torch.
 *
 *   base.h      status, error buffer, host allocator
 *   cache.h     PyTorch's CUDA caching allocator, simulated
 *   snapshot.h  a PyTorch memory snapshot, read as data and replayed
 */
#ifndef KOILA_H
#define KOILA_H

#include "koila/base.h"
#include "koila/cache.h"
#include "koila/snapshot.h"

#endif
