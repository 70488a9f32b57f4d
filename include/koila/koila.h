/* koila.h — the public C interface of libkoila: the engine of koila without Python and without
 * torch.
 *
 *   base.h      status, error buffer, host allocator
 *   cache.h     PyTorch's CUDA caching allocator, simulated
 *   snapshot.h  a PyTorch memory snapshot, read as data and replayed
 *   device.h    a device profile: sizes and capabilities of a GPU
 *   graph.h     a recorded training step: operators, metas, signatures, values, nodes, axes; its
 *               text form
 *   plan.h      how to run it in slices of the batch
 *   predict.h   the memory it will need on a GPU that need not be present
 */
#ifndef KOILA_H
#define KOILA_H

#include "koila/base.h"
#include "koila/cache.h"
#include "koila/snapshot.h"
#include "koila/device.h"
#include "koila/graph.h"
#include "koila/plan.h"
#include "koila/predict.h"

#endif
