/* Any sequence of allocations, frees, limits and refusals on the ledger and its pointer table,
 * against a list of what is live. */
#include <stdlib.h>
#include <string.h>

#include "memory/ledger.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define MUST(x)                                                                                    \
    do                                                                                             \
        if (!(x))                                                                                  \
            abort();                                                                               \
    while (0)
enum { N = 1024 };

/* Whole because each byte is one call, and the calls share the state of the model. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static uint64_t live[N]; /* bytes + 1 at address (i + 1) * 64; 0: none */
    static uint32_t tags[N];
    memset(live, 0, sizeof live);
    koila__ledger l;
    koila__ledger_init(&l, NULL);
    uint64_t current = 0, n_live = 0, n_put = 0, n_gone = 0, limit = UINT64_MAX;
    unsigned fail_in = 0;
    for (size_t i = 0; i + 4 <= n; i += 4) {
        const uint8_t *b = data + i;
        size_t k = (b[1] | (size_t)b[2] << 8) % N;
        void *p = (void *)(uintptr_t)((k + 1) * 64);
        uint64_t bytes = (uint64_t)b[3] << b[0] % 24, now, got;
        uint32_t tag;
        switch (b[0] >> 5) {
        case 0:
            koila__ledger_fail_nth(&l, b[3] % 8);
            fail_in = b[3] % 8;
            break;
        case 1:
            limit = b[3] ? bytes : UINT64_MAX;
            atomic_store(&l.limit, limit);
            break;
        case 2:
        case 3: {
            bool ours = koila__ledger_release(&l, p, &got, &now);
            MUST(ours == !!live[k]);
            if (!ours)
                break;
            MUST(got == live[k] - 1 && now == current - got);
            current = now;
            live[k] = 0;
            n_live--;
            n_gone++;
            break;
        }
        default: {
            bool refused =
                fail_in == 1 || (limit != UINT64_MAX && (bytes > limit || current > limit - bytes));
            if (fail_in)
                fail_in--;
            MUST(koila__ledger_reserve(&l, bytes, &now) == !refused);
            if (refused)
                break;
            MUST(now == current + bytes);
            if (b[0] >> 5 == 7) {
                koila__ledger_cancel(&l, bytes);
                break;
            }
            MUST(koila__ledger_commit(&l, p, bytes, (uint32_t)k, now));
            n_put++;
            current += bytes - (live[k] ? live[k] - 1 : 0);
            n_live += !live[k];
            live[k] = bytes + 1;
            tags[k] = (uint32_t)k;
        }
        }
        MUST(l.current == current && l.peak >= current);
        MUST(koila__ptrtab_get(&l.blocks, p, &got, &tag) == !!live[k] &&
             (!live[k] || (got == live[k] - 1 && tag == tags[k])));
    }
    MUST(koila__ptrtab_count(&l.blocks) == n_live && koila__ptrtab_check(&l.blocks));
    MUST(koila__ledger_granted(&l) == n_put && koila__ledger_released(&l) == n_gone);
    koila__ledger_deinit(&l);
    return 0;
}
