/* bench_linetab.c — instructions of the mechanisms that run per line and per allocation; run by
 * bench/instructions.py under callgrind. usage: bench_linetab quiet|event|ledger N */
#include <stdlib.h>

#include "memory/ledger.h"
#include "memory/linetab.h"

static koila__meter meter;
static koila__lines lines;
static koila__ledger ledger;

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    long n = atol(argv[2]);
    static int key;
    koila__wish on = { .enabled = true, .stats_mode = KOILA__STATS_AUTO };
    koila__func *f;
    koila__meter_init(&meter, 1);
    koila__lines_init(&lines, &meter, NULL);
    koila__ledger_init(&ledger, NULL);
    koila__stack *s = koila__stack_new(&lines);
    koila__flow *mine = koila__meter_take_flow(&meter);
    if (s)
        s->thread.flow = mine;
    if (!s || koila__func_new(&lines, &key, 1, 5000, &on, &f) != KOILA_OK)
        return 1;
    koila__lines_enter(&lines, s, f->code, 1, true);
    uint64_t held = 0;
    for (long i = 0; i < n; i++) {
        uint64_t now, bytes;
        if (argv[1][0] == 'l') {
            void *p = (void *)(uintptr_t)((i % 64 + 1) * 4096);
            if (koila__ledger_reserve(&ledger, 4096, &now) &&
                koila__ledger_commit(&ledger, p, 4096, 0, now))
                koila__ledger_release(&ledger, p, &bytes, &now);
            continue;
        }
        if (argv[1][0] == 'e') {
            held += 64;
            koila__meter_event(&meter, mine, &s->thread, 0, 64, held, UINT64_MAX);
        }
        koila__lines_line(&lines, s, f->code, 2 + (int)(i & 1));
    }
    koila__lines_leave(&lines, s);
    return 0;
}
