/* room.c — the memory that a step may use: the budget, or the free memory. For a GPU it asks
 * cuda_state.c. */
#include "run/run.h"

#define MIB 1048576.0

/* Free bytes of the CPU's memory, as koila._run counts them. False: not known. */
static bool free_bytes(uint64_t *out)
{
    PyObject *mine = PyImport_ImportModule("koila._run");
    PyObject *n = mine ? PyObject_CallMethod(mine, "free_bytes", NULL) : NULL;
    if (n && n != Py_None)
        *out = PyLong_AsUnsignedLongLong(n);
    const bool known = n && n != Py_None && !PyErr_Occurred();
    PyErr_Clear();
    Py_XDECREF(mine);
    Py_XDECREF(n);
    return known;
}

/* The CPU's, or that of a GPU that cannot be read. */
static void look_at_cpu(koila__room *room)
{
    const uint64_t held = koila__cpu_bytes_current();
    uint64_t free;
    const uint64_t budget = koila__settings_now().cpu_budget;
    if (budget != UINT64_MAX) {
        room->limit = budget;
        koila__room_holds(room, held);
    } else if (free_bytes(&free)) {
        room->held = held;
        room->bytes = free;
        room->limit = free + held;
    } else
        room->held = held;
}

int koila__room_for(const koila_graph *part, koila__room *out)
{
    *out = (koila__room){ .bytes = UINT64_MAX, .limit = UINT64_MAX, .gpu = -1 };
    const koila__settings set = koila__settings_now();
    if (set.dry) {
        if (set.has_budget)
            out->bytes = out->limit = set.budget;
        return 0;
    }
    const int gpu = koila__gpu_of(part);
    const int seen = gpu >= 0 ? koila__gpu_look(gpu, out) : 0;
    if (seen == 0)
        look_at_cpu(out);
    return seen < 0 ? -1 : 0;
}

void koila__room_holds(koila__room *room, uint64_t held)
{
    room->held = held;
    if (room->limit != UINT64_MAX)
        room->bytes = room->limit > held ? room->limit - held : 0;
}

int koila__held_fits(const char *call)
{
    const uint64_t held = koila__cpu_bytes_current();
    const koila__settings set = koila__settings_now();
    const uint64_t budget = set.cpu_budget;
    const bool is_limit = budget != UINT64_MAX && koila__cpu_bytes_get_limit() == budget;
    if (!is_limit || set.dry || held <= budget)
        return 0;
    char text[400];
    snprintf(text, sizeof text,
             "%s: torch already holds %.1f MiB, and the budget is %.1f MiB: %llu bytes too much "
             "before anything is computed. A budget counts all memory of torch, including model, "
             "data and optimizer. Try: a larger budget, a fraction (of the memory that is still "
             "free), or deleting tensors that are no longer needed",
             call, (double)held / MIB, (double)budget / MIB, (unsigned long long)(held - budget));
    return koila__raise_out_of_memory(text, held - budget);
}
