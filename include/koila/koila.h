/* koila.h — the public C interface of libkoila: the engine of koila without Python and without torch.
 *
 *   base.h      status, error buffer, host allocator
 */
#ifndef KOILA_H
#define KOILA_H

#include "koila/base.h"

#endif
