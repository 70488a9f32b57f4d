/* room.c — the memory that a step may use: the budget, or the free memory. For a GPU it asks
 * cuda_state.c. */
#include "memory/freemem.h"
#include "run/run.h"

#define MIB 1048576.0

enum { AMPLE_SHARE = 10 }; /* a step that takes one part in so many of the room needs little */

static uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

/* Torch's bytes may come to `limit`. */
static void limit_to(koila__room *room, uint64_t limit)
{
    room->limit = least_of(room->limit, limit);
    koila__room_holds(room, room->held);
}

/* The CPU's, or that of a GPU that cannot be read. */
static void look_at_cpu(koila__room *room, bool anew)
{
    const koila__settings set = koila__settings_now();
    const uint64_t budget = set.cpu_budget;
    const bool is_resident = set.resident;
    room->held = koila__cpu_bytes_current();
    const uint64_t most = is_resident ? budget : UINT64_MAX;
    const bool all = budget == UINT64_MAX;
    room->is_recalled =
        !anew && koila__resident_room_lately(room->held, most, all, &room->resident);
    if (!room->is_recalled)
        room->resident = koila__resident_room_for(room->held, most, all);
    if (budget != UINT64_MAX && !is_resident)
        limit_to(room, budget);
    if (room->resident.mapped != UINT64_MAX)
        limit_to(room, room->held + room->resident.mapped);
    if (room->resident.limit != UINT64_MAX)
        limit_to(room, minus(room->resident.limit, room->resident.base + room->resident.extra));
}

/* What torch's bytes may come to in a step that is only planned. */
static uint64_t dry_budget(const koila__settings *set)
{
    const uint64_t budget = set->budget;
    if (!set->resident || set->cpu_budget != budget)
        return budget;
    const koila__resident_room r =
        koila__resident_room_for(koila__cpu_bytes_current(), budget, false);
    return least_of(budget, minus(r.limit, r.base + r.extra));
}

void koila__room_tell(const koila__room *room, char *text, size_t n)
{
    const koila__resident_room *r = &room->resident;
    *text = 0;
    if (room->gpu < 0 && r->limit != UINT64_MAX && room->limit <= minus(r->limit, r->base))
        snprintf(text, n, " (of at most %.1f MiB resident memory, %.1f MiB are not torch's)",
                 (double)r->limit / MIB, (double)r->base / MIB);
}

bool koila__room_without_extra(koila__room *room)
{
    const koila__resident_room *r = &room->resident;
    if (room->gpu >= 0 || r->limit == UINT64_MAX || !r->extra)
        return false;
    const uint64_t with = minus(r->limit, r->base + r->extra);
    if (room->limit < with) /* something else limits it */
        return false;
    room->limit = minus(r->limit, r->base);
    koila__room_holds(room, room->held);
    return true;
}

static const koila__room NO_ROOM_KNOWN = {
    .bytes = UINT64_MAX, .limit = UINT64_MAX, .gpu = -1, .resident = { .limit = UINT64_MAX }
};

int koila__room_for(const koila_graph *part, koila__need need, koila__room *out)
{
    *out = NO_ROOM_KNOWN;
    const koila__settings set = koila__settings_now();
    if (set.dry) {
        if (set.has_budget)
            out->bytes = out->limit = dry_budget(&set);
        return 0;
    }
    const int gpu = koila__gpu_of(part);
    const bool anew = need == KOILA__NEEDS_MUCH || (gpu >= 0 && need == KOILA__NEEDS_UNKNOWN);
    return koila__room_on(gpu, anew, out);
}

int koila__room_on(int gpu, bool anew, koila__room *out)
{
    *out = NO_ROOM_KNOWN;
    const int seen = gpu >= 0 ? koila__gpu_look(gpu, anew, out) : 0;
    if (seen == 0)
        look_at_cpu(out, anew);
    return seen < 0 ? -1 : 0;
}

uint64_t koila__host_room(void)
{
    const uint64_t budget = koila__settings_now().cpu_budget;
    const uint64_t held = koila__cpu_bytes_current();
    koila__freemem f;
    koila__freemem_read("", &f);
    const uint64_t free = f.bound < 0 ? UINT64_MAX : f.bytes[f.bound] / 2;
    return budget == UINT64_MAX ? free : least_of(free, minus(budget, held));
}

KOILA__HOT void koila__room_holds(koila__room *room, uint64_t held)
{
    room->held = held;
    if (room->limit != UINT64_MAX)
        room->bytes = room->limit > held ? room->limit - held : 0;
}

bool koila__room_is_ample(const koila__room *room, const koila_plan_info *info)
{
    return info->n_slices == 1 && !info->n_again && !info->n_offloaded && !info->n_inner &&
           info->peak_bytes <= room->bytes / AMPLE_SHARE;
}

/* By their keys. One that is forgotten for another asks once more. */
static struct {
    uint64_t key;
    koila__need need;
} needs[64];

koila__need koila__step_need(uint64_t key)
{
    const size_t i = key % KOILA_COUNT(needs);
    return needs[i].key == key ? needs[i].need : KOILA__NEEDS_UNKNOWN;
}

void koila__step_needs(uint64_t key, koila__need need)
{
    const size_t i = key % KOILA_COUNT(needs);
    needs[i].key = key;
    needs[i].need = need;
}

void koila__needs_forget(void) { memset(needs, 0, sizeof needs); }

int koila__held_fits(const char *call)
{
    uint64_t held = koila__cpu_bytes_current();
    const koila__settings set = koila__settings_now();
    const uint64_t budget = set.cpu_budget;
    const bool is_limit = budget != UINT64_MAX && koila__cpu_bytes_get_limit() == budget;
    if (is_limit && held > budget) {
        koila__reads_drop_open();
        held = koila__cpu_bytes_current();
    }
    if (!is_limit || set.dry || set.resident || held <= budget)
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
