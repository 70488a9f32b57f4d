/* credit.c — credits memory to the line that caused it while another line runs: captured work and
 * autograd nodes. See credit.h, and linetab.h for how a row is credited. */
#include "memlab/memlab.h"

/* The captured work that runs on this thread. */
static __thread struct work {
    const void *key; /* the code that it was captured in; NULL: no work runs for a profiled line */
    int line;
    koila__origin_path path; /* of the autograd node that captured it; path 0: none did */
} running;
int koila__lines_enabled; /* number of enabled line tables */

KOILA__HOT static void credit_event(int device, const void *p, int64_t delta, uint64_t now)
{
    koila__nodes_credit(device, delta);
    const struct work *work = &running;
    if (work->key)
        koila__lines_credit_line(&koila__memlab_lines, work->key, work->line, device, delta, now);
    if (work->path.path && delta > 0)
        koila__lines_credit_path(&koila__memlab_lines, work->path, device, (uint64_t)delta);
}

void koila__credit_enable(bool on)
{
    koila__lines_enabled += on ? 1 : -1;
    koila_assert(koila__lines_enabled >= 0);
    koila__nodes_listen(koila__lines_enabled > 0);
    koila__events_set_listener(KOILA__LISTENS_CREDIT, koila__lines_enabled ? credit_event : NULL);
}

static bool is_inside(const koila__code *c, int line)
{
    return line >= c->first_line && line < c->first_line + c->n_rows;
}

void koila__lines_work_for(const char *file, int line)
{
    struct work *work = &running;
    work->key = NULL;
    work->line = line;
    work->path = (koila__origin_path){ 0 };
    if (!koila__lines_enabled || !file)
        return;
    int first = 0;
    /* the innermost function around that line */
    for (koila__code *c = koila__memlab_lines.codes; c; c = c->next) {
        if (!is_inside(c, line) || c->first_line < first || !koila__code_wanted(c))
            continue;
        if (PyUnicode_CompareWithASCIIString(((PyCodeObject *)c->key)->co_filename, file) != 0)
            continue;
        work->key = c->key;
        first = c->first_line;
    }
}

void koila__lines_work_of(uint64_t tape, uint32_t node)
{
    running.path = koila__nodes_path_of_captured(tape, node);
}
