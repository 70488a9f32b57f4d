/* Any sequence of events on the line table: calls, lines, ends, allocations on two devices and any
 * thread, nodes and captured work, profilers that come, change, are copied and go; then any names
 * as columns, and tables with any names and source lines in the four formats. What must hold: the
 * stacks are consistent, peaks are not below what a line ended with, pages and JSON are escaped. */
#include <stdlib.h>
#include <string.h>

#include "memory/columns.h"
#include "memory/linetab.h"
#include "memory/linetext.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { N_CODES = 4, N_ROWS = 6, N_STACKS = 3, N_FUNCS = 8 };
static koila__meter meter; /* large */

typedef struct input {
    const uint8_t *p, *end;
} input;
static unsigned take(input *in) { return in->p < in->end ? *in->p++ : 0; }

#define MUST(x)                                                                                    \
    do                                                                                             \
        if (!(x))                                                                                  \
            abort();                                                                               \
    while (0)

static void check_page(const char *s)
{
    int open = 0;
    for (; *s; s++) {
        MUST(*s != '<' || !open);
        if (*s == '<' || *s == '>')
            open = *s == '<';
    }
    MUST(!open);
}
static void check_json(const char *s)
{
    int depth = 0, quoted = 0;
    for (; *s; s++) {
        if (quoted) {
            MUST((unsigned char)*s >= 0x20);
            if (*s == '\\')
                MUST(*++s);
            else
                quoted = *s != '"';
        } else if (*s == '"') {
            quoted = 1;
        } else {
            depth += (*s == '[' || *s == '{') - (*s == ']' || *s == '}');
            MUST(depth >= 0);
        }
    }
    MUST(!quoted && !depth);
}

/* Whole because each byte is one event, and the events share the state of the model. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static int keys[N_CODES];
    input in = { data, data + n };
    koila__lines lines;
    koila__wish wishes[N_FUNCS];
    koila__func *funcs[N_FUNCS] = { NULL };
    koila__stack *stacks[N_STACKS];
    koila__flow *flows[N_STACKS];
    uint64_t held[2] = { 0 }, number = 0;
    koila__meter_init(&meter, 2);
    koila__lines_init(&lines, &meter, NULL);
    for (int i = 0; i < N_STACKS; i++) {
        stacks[i] = koila__stack_new(&lines);
        MUST(stacks[i]);
        flows[i] = i ? koila__meter_take_flow(&meter) : NULL;
        stacks[i]->thread.flow = flows[i];
    }
    while (in.p < in.end && in.p[0] != 0xff) {
        unsigned what = take(&in);
        unsigned who = take(&in);
        koila__stack *s = stacks[who % N_STACKS];
        unsigned slot = (who >> 2) % N_FUNCS;
        unsigned code = (who >> 5) % N_CODES;
        koila__code *c = koila__lines_find(&lines, &keys[code]);
        switch (what % 12) {
        case 0: /* a profiler comes, or changes */
            wishes[slot].enabled = what & 16;
            wishes[slot].target = (what >> 5) & 1;
            wishes[slot].stats_mode = KOILA__STATS_HOOK;
            if (!funcs[slot])
                MUST(koila__func_new(&lines, &keys[code], 10 * (int)code, N_ROWS, &wishes[slot],
                                     &funcs[slot]) == KOILA_OK);
            break;
        case 1:
            if (funcs[slot])
                koila__func_free(&lines, funcs[slot]);
            funcs[slot] = NULL;
            while (koila__lines_reap(&lines))
                continue;
            break;
        case 2:
            if (c && s->n < 40)
                koila__lines_enter(&lines, s, c, 10 * (int)code + (int)(what >> 4) % (N_ROWS + 2),
                                   what & 8);
            break;
        case 3:
            koila__lines_leave(&lines, s);
            break;
        case 4:
        case 5:
        /* a line of the code that runs; rarely of another, as when an activation began unseen */
        case 6:
            c = what == 6 || !s->n ? c : s->activations[s->n - 1]->code;
            if (c && s->n < 40)
                koila__lines_line(&lines, s, c, c->first_line + (int)(what >> 4) % (N_ROWS + 1));
            break;
        case 7:
        case 8: {
            int device = what & 16 ? 1 : 0;
            int64_t delta = (int64_t)take(&in) << (what >> 5) * 3;
            if (who & 64)
                delta = -(delta < (int64_t)held[device] ? delta : (int64_t)held[device]);
            if (!delta)
                break;
            held[device] += (uint64_t)delta;
            koila__meter_event(&meter, flows[who % N_STACKS], what % 12 == 7 ? &s->thread : NULL,
                               device, delta, held[device],
                               who & 128 ? held[device] + 4096 : UINT64_MAX);
            break;
        }
        case 9:
            koila__lines_made(&lines, s, 1 + who % N_STACKS, number++);
            break;
        case 10:
            koila__lines_credit_node(&lines, 1 + who % N_STACKS, number ? take(&in) % number : 0,
                                     what & 1, who);
            break;
        default:
            koila__lines_credit_line(&lines, &keys[code], 10 * (int)code + (int)who % 8, what & 1,
                                     (int64_t)who - 128, held[what & 1]);
            break;
        }
        MUST(koila__stack_check(&lines, s));
    }
    (void)take(&in);
    for (int i = 0; i < N_STACKS; i++)
        koila__stack_clear(&lines, stacks[i]);
    for (koila__code *c = lines.codes; c; c = c->next)
        for (int r = 0; r < c->n_rows; r++)
            MUST(c->n_open[r] == 0);

    /* what is left of the input: names of columns, functions and files, and source lines */
    char words[6][40] = { "" };
    koila__column columns[6];
    size_t n_columns = 0, n_views = 0;
    for (int i = 0; i < 6; i++)
        for (size_t k = 0; k < sizeof words[i] - 1 && in.p < in.end; k++)
            if (!(words[i][k] = (char)take(&in)))
                break;
    static const char *const some[] = { "active_bytes.all.peak",
                                        "hits",
                                        "time",
                                        "backward",
                                        "requested_bytes.small_pool.allocated",
                                        "delta" };
    for (int i = 0; i < 6; i++) {
        koila_error err = KOILA_ERROR_INIT;
        if (koila__column_parse(words[i], &columns[n_columns], &err) == KOILA_OK)
            n_columns++;
        else
            MUST(err.text[0]);
    }
    for (; n_columns < 6; n_columns++)
        MUST(koila__column_parse(some[n_columns], &columns[n_columns], NULL) == KOILA_OK);
    const char *code[] = { words[3], words[4], words[5], words[3] };
    koila__view views[N_FUNCS];
    for (int i = 0; i < N_FUNCS; i++) {
        if (!funcs[i])
            continue;
        for (int r = 0; r < N_ROWS; r++)
            for (int d = 0; d < 2; d++) {
                const koila__rec *rec = koila__row_rec(&lines, &funcs[i]->rows[r], d);
                for (int q = 0; rec && q < KOILA__Q_COUNT; q++)
                    MUST(rec->peak[q] >= rec->current[q]);
            }
        views[n_views++] =
            (koila__view){ words[i % 2], words[2], 10, funcs[i], (size_t)i % 5, code };
    }
    for (int f = KOILA__FORMAT_TEXT; f <= KOILA__FORMAT_CSV; f++) {
        koila__text out;
        koila__text_init(&out, NULL);
        koila__lines_write(&lines, (koila__format)f, views, n_views, columns, n_columns,
                           (int)n_views % 3 - 1, n & 1, &out);
        MUST(koila__text_ok(&out) && (!out.s || strlen(out.s) == out.n));
        if (f == KOILA__FORMAT_HTML && out.s)
            check_page(out.s);
        if (f == KOILA__FORMAT_JSON && out.s)
            check_json(out.s);
        koila__text_deinit(&out);
    }
    for (int i = 0; i < N_FUNCS; i++) {
        koila__func *copy = NULL;
        koila__wish off = { 0 };
        if (funcs[i] && koila__func_copy(&lines, funcs[i], &off, &copy) == KOILA_OK)
            koila__func_free(&lines, copy);
        if (funcs[i])
            koila__func_free(&lines, funcs[i]);
    }
    while (koila__lines_reap(&lines))
        continue;
    MUST(!lines.n_codes);
    koila__lines_deinit(&lines);
    /* kept by the table for events in flight: here there are none */
    for (int i = 0; i < N_STACKS; i++) {
        for (size_t k = 0; k < stacks[i]->n_made; k++)
            free(stacks[i]->activations[k]);
        free(stacks[i]->activations);
        free(stacks[i]->origins);
        free(stacks[i]);
    }
    return 0;
}
