/* snapshot.c — reads torch.cuda.memory._snapshot() as data. A pickle is a program; this machine
 * knows only the opcodes that build plain data, so no object can be made and nothing can be called.
 * The rest is refused by name before it has any effect.
 *
 *   snapshot_reader.h     a reading under way: handles, open containers, limits
 *   snapshot_pickle.c     the pickle machine
 *   snapshot_json.c       the same from JSON
 *   snapshot_records.c    dicts and lists become records
 *   snapshot_input.c      bytes, numbers, failures, counted memory
 *   snapshot.c            opening and checking the whole; what a caller can look at
 */
#include "allocator/snapshot_reader.h"

/* ---- the whole */

static bool valid_blocks(reader *r, const snap_segment *g)
{
    koila_snapshot *s = r->s;
    const snap_range *range = &s->ranges[g->blocks];
    uint64_t at = 0, allocated = 0, active = 0;
    const unsigned long long name = g->addr;
    if (!g->size || g->addr == 0 || g->addr >= (uint64_t)1 << 62)
        return BAD(r, "segment 0x%llx: address or size out of range", name);
    for (uint64_t i = range->first; i < range->first + range->n; i++) {
        snap_block *b = &s->blocks[i];
        if (!b->has_addr)
            b->addr = g->addr + at;
        if (b->addr != g->addr + at || !b->size)
            return BAD(r, "segment 0x%llx: blocks do not tile it", name);
        at += b->size;
        if (at > g->size)
            break;
        if (b->state == KOILA_BLOCK_USED)
            allocated += b->size;
        if (b->state != KOILA_BLOCK_FREE)
            active += b->size;
        if (b->requested > b->size)
            return BAD(r, "segment 0x%llx: a block of %llu holds %llu", name,
                       (unsigned long long)b->size, (unsigned long long)b->requested);
    }
    char a[KOILA_GROUPED], c[KOILA_GROUPED];
    if (at != g->size)
        return BAD(r, "segment 0x%llx: blocks sum to %s, segment is %s", name,
                   koila__grouped(at, a), koila__grouped(g->size, c));
    if (g->has_sums && allocated != g->allocated)
        return BAD(r, "segment 0x%llx: blocks allocated sum to %s, segment says %s", name,
                   koila__grouped(allocated, a), koila__grouped(g->allocated, c));
    if (g->has_sums && active != g->active)
        return BAD(r, "segment 0x%llx: active blocks sum to %s, segment says %s", name,
                   koila__grouped(active, a), koila__grouped(g->active, c));
    return true;
}

/* Sort by device, then address: shell sort, for they come sorted or nearly so. */
static void sort_segments(snap_segment *a, uint64_t n)
{
    for (uint64_t gap = n / 2; gap; gap /= 2)
        for (uint64_t i = gap; i < n; i++) {
            const snap_segment x = a[i];
            uint64_t k = i;
            for (; k >= gap && (a[k - gap].device > x.device ||
                                (a[k - gap].device == x.device && a[k - gap].addr > x.addr));
                 k -= gap)
                a[k] = a[k - gap];
            a[k] = x;
        }
}

/* The arrays that the caller sees. */
static bool make_room(reader *r, uint64_t n_segments, uint64_t n_blocks)
{
    koila_snapshot *s = r->s;
    s->n_device_first = s->n_devices + 1;
    s->device_first =
        koila__snap_resize(r, NULL, 0, (uint64_t)s->n_device_first * sizeof *s->device_first);
    if (!s->device_first)
        return false;
    if (n_segments) {
        s->out_segments = koila__snap_resize(r, NULL, 0, n_segments * sizeof *s->out_segments);
        if (!s->out_segments)
            return false;
        s->n_out_segments = (uint32_t)n_segments;
    }
    if (n_blocks) {
        s->out_blocks = koila__snap_resize(r, NULL, 0, n_blocks * sizeof *s->out_blocks);
        if (!s->out_blocks)
            return false;
        s->n_out_blocks = (uint32_t)n_blocks;
        s->out_stacks = koila__snap_resize(r, NULL, 0, n_blocks * sizeof *s->out_stacks);
        if (!s->out_stacks)
            return false;
    }
    return true;
}

/* `a`: n segments by device and address. */
static void lay_out(koila_snapshot *s, const snap_segment *a, uint64_t n)
{
    uint32_t d = 0, at = 0;
    for (uint64_t i = 0; i < n; i++) {
        const snap_segment *g = &a[i];
        const snap_range *range = &s->ranges[g->blocks];
        const koila_pool pool = s->pools[g->pool];
        while (d <= g->device)
            s->device_first[d++] = (uint32_t)i;
        s->out_segments[i] = (koila_segment){
            KOILA_SEGMENT_SIZES, g->addr, g->size, g->stream, pool, g->is_small, g->is_expandable,
            s->out_blocks + at,  range->n
        };
        for (uint64_t k = 0; k < range->n; k++, at++) {
            const snap_block *b = &s->blocks[range->first + k];
            s->out_blocks[at] = (koila_block){
                b->addr,         b->size,   b->requested, (koila_block_state)b->state,
                (uint32_t)i,     g->stream, pool,         g->is_small,
                g->is_expandable
            };
            s->out_stacks[at] = b->stack;
        }
    }
    koila_assert(at == s->n_out_blocks && d <= s->n_device_first);
    while (d < s->n_device_first)
        s->device_first[d++] = (uint32_t)n;
}

/* Check the segments and lay them out as the caller sees them. */
static bool publish(reader *r, uint64_t first, uint64_t n)
{
    koila_snapshot *s = r->s;
    uint32_t n_devices = s->n_traces;
    snap_segment *a = s->segments ? s->segments + first : NULL;
    uint64_t n_blocks = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (!valid_blocks(r, &a[i]))
            return false;
        if (a[i].device >= n_devices)
            n_devices = a[i].device + 1;
        n_blocks += s->ranges[a[i].blocks].n;
    }
    sort_segments(a, n);
    for (uint64_t i = 1; i < n; i++)
        if (a[i].device == a[i - 1].device && a[i].addr < a[i - 1].addr + a[i - 1].size)
            return BAD(r, "segment 0x%llx: overlaps segment 0x%llx", (unsigned long long)a[i].addr,
                       (unsigned long long)a[i - 1].addr);
    s->n_devices = n_devices ? n_devices : 1;
    if (!make_room(r, n, n_blocks))
        return false;
    lay_out(s, a, n);
    return true;
}

/* By its first two bytes: pickle or JSON? What is neither is named. */
static bool find_format(reader *r)
{
    koila_snapshot *s = r->s;
    if (!koila__snap_have(r, 1))
        return BAD(r, "empty file");
    const uint8_t c = r->buf[0];
    const uint8_t next = koila__snap_have(r, 2) ? r->buf[1] : 0;
    if (r->status)
        return false;
    if (c == 'P' && next == 'K')
        return BAD(r, "not a snapshot: expected a pickle or JSON, found zip");
    if (c == 0x1f && next == 0x8b)
        return BAD(r, "not a snapshot: expected a pickle or JSON, found gzip");
    s->is_json = c && strchr("{[ \n\r\t", c);
    if (!s->is_json && c != 0x80 && !(c && strchr("(}]", c)))
        return BAD(r, "not a snapshot: expected a pickle or JSON, found %s",
                   c >= 0x20 && c < 0x7f ? "text" : "other data");
    return true;
}

static bool read_all(reader *r)
{
    koila_snapshot *s = r->s;
    if (!koila__snap_intern_own(r) || !find_format(r))
        return false;
    if (s->is_json ? !koila__snap_read_json(r) : !koila__snap_read_pickle(r))
        return false;
    if (!finish(r, &r->top))
        return false;
    switch (kind_of(r->top)) {
    case K_TOP:
        /* all of them: drop_unused has dropped those that the snapshot does not reach */
        return publish(r, 0, s->n_segments);
    case K_SEGMENTS:
        return publish(r, s->ranges[of(r->top)].first, s->ranges[of(r->top)].n);
    case K_EMPTY:
        return publish(r, 0, 0);
    default:
        return BAD(r, "not a snapshot: holds %s", koila__snap_kind_names[kind_of(r->top)]);
    }
}

koila_status koila_snapshot_open(const koila_source *src, const koila_limits *lim,
                                 koila_snapshot **out, koila_error *e)
{
    reader r = { .src = src, .e = e };
    if (lim && lim->struct_size == sizeof r.lim)
        r.lim = *lim;
    if (!r.lim.max_nesting)
        r.lim.max_nesting = 64;
    if (r.lim.max_nesting > 4096)
        r.lim.max_nesting = 4096;
    if (!r.lim.max_string_bytes)
        r.lim.max_string_bytes = 16 * MIB;
    koila_allocator mem = koila__allocator(r.lim.mem.fn ? &r.lim.mem : NULL);
    koila_snapshot *s = koila__realloc(&mem, NULL, 0, sizeof *s);
    if (!s)
        return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    memset(s, 0, sizeof *s);
    s->mem = mem;
    s->settings.conf = UINT32_MAX;
    s->settings.max_split = -1;
    s->budget_cap = r.lim.max_memory_bytes ? r.lim.max_memory_bytes : UINT64_MAX / 2;
    r.s = s;
    if (!src->read) {
        r.buf = src->data;
        r.end = s->n_bytes = src->n_bytes;
        r.eof = true;
    }
    koila__snap_set_budget(s);
    bool ok = read_all(&r);
    koila__release(&mem, r.stack, (size_t)r.stack_cap * sizeof(value));
    koila__release(&mem, r.marks, (size_t)r.marks_cap * sizeof(uint64_t));
    koila__release(&mem, r.memo, (size_t)r.memo_cap * sizeof(value));
    koila__release(&mem, r.open, r.open_cap * sizeof(open_one));
    koila__release(&mem, r.items, (size_t)r.items_cap * sizeof(value));
    koila__release(&mem, r.wides, (size_t)r.wides_cap * sizeof(wide));
    koila__release(&mem, r.reals, (size_t)r.reals_cap * sizeof(double));
    koila__release(&mem, r.scratch, (size_t)r.scratch_cap);
    koila__release(&mem, r.own, (size_t)r.own_cap);
    if (!ok) {
        koila_snapshot_free(s);
        return r.status;
    }
    *out = s;
    return KOILA_OK;
}

void koila_snapshot_free(koila_snapshot *s)
{
    if (!s)
        return;
    koila_allocator m = s->mem;
    for (uint32_t i = 0; i < s->n_chunks; i++)
        koila__release(&m, s->chunks[i], ENTRY_CHUNK * sizeof(snap_entry));
    koila__release(&m, s->chunks, s->chunks_cap * sizeof *s->chunks);
    koila__release(&m, s->text, (size_t)s->text_cap);
    koila__release(&m, s->strs, s->strs_cap * sizeof *s->strs);
    koila__idset_free(&m, &s->str_set);
    koila__release(&m, s->segments, s->segments_cap * sizeof *s->segments);
    koila__release(&m, s->blocks, s->blocks_cap * sizeof *s->blocks);
    koila__release(&m, s->frames, s->frames_cap * sizeof *s->frames);
    koila__idset_free(&m, &s->frame_set);
    koila__release(&m, s->stacks, s->stacks_cap * sizeof *s->stacks);
    koila__release(&m, s->stack_ids, s->stack_ids_cap * sizeof(uint32_t));
    koila__idset_free(&m, &s->stack_set);
    koila__release(&m, s->ranges, s->ranges_cap * sizeof *s->ranges);
    koila__release(&m, s->pools, s->pools_cap * sizeof *s->pools);
    koila__release(&m, s->annotations, s->annotations_cap * sizeof *s->annotations);
    koila__release(&m, s->traces, s->traces_cap * sizeof *s->traces);
    koila__release(&m, s->device_first, s->n_device_first * sizeof(uint32_t));
    koila__release(&m, s->out_segments, s->n_out_segments * sizeof(koila_segment));
    koila__release(&m, s->out_blocks, s->n_out_blocks * sizeof(koila_block));
    koila__release(&m, s->out_stacks, s->n_out_blocks * sizeof(uint32_t));
    koila__release(&m, s, sizeof *s);
}

/* ---- looking */

void koila_snapshot_get_info(const koila_snapshot *s, koila_snapshot_info *out)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < s->n_traces; i++)
        n += s->traces[i].n;
    *out =
        (koila_snapshot_info){ .struct_size = (uint32_t)sizeof *out,
                               .n_devices = s->n_devices,
                               .n_bytes = s->n_bytes,
                               .n_entries = n,
                               .n_segments = s->n_out_segments,
                               .n_blocks = s->n_out_blocks,
                               .n_annotations = s->n_annotations,
                               .n_unknown_keys = s->n_unknown_keys,
                               .n_skipped_entries = s->n_skipped,
                               .is_json = s->is_json,
                               .has_traces = s->has_traces,
                               .has_pool_ids = s->has_pool_ids,
                               .has_settings = s->settings.present,
                               .conf = s->settings.present ? snap_str(s, s->settings.conf) : "" };
}

uint64_t koila_snapshot_n_entries(const koila_snapshot *s, uint32_t device)
{
    return device < s->n_traces ? s->traces[device].n : 0;
}

bool koila_snapshot_entry(const koila_snapshot *s, uint32_t device, uint64_t i, koila_entry *out)
{
    if (i >= koila_snapshot_n_entries(s, device))
        return false;
    const snap_entry *x = snap_entry_at(s, s->traces[device].first + i);
    const koila_entry e = { (uint32_t)sizeof e,
                            (koila_event_kind)x->kind,
                            x->addr,
                            x->size,
                            x->stream,
                            x->time_us,
                            x->stack,
                            x->has_pool,
                            x->has_pool ? s->pools[x->pool] : KOILA_POOL_DEFAULT };
    const uint32_t n = out->struct_size < e.struct_size ? out->struct_size : e.struct_size;
    memcpy(out, &e, n);
    if (n >= sizeof n)
        out->struct_size = n;
    return true;
}

const koila_segment *koila_snapshot_segments(const koila_snapshot *s, uint32_t device, size_t *n)
{
    *n = 0;
    if (device >= s->n_devices)
        return NULL;
    *n = s->device_first[device + 1] - s->device_first[device];
    return *n ? s->out_segments + s->device_first[device] : NULL;
}

uint32_t koila_snapshot_block_stack(const koila_snapshot *s, const koila_block *block)
{
    const size_t i = (size_t)(block - s->out_blocks);
    return i < s->n_out_blocks ? s->out_stacks[i] : KOILA_NO_STACK;
}

bool koila_snapshot_frame(const koila_snapshot *s, uint32_t stack, uint32_t i, koila_frame *out)
{
    if (!stack || stack > s->n_stacks || i >= s->stacks[stack - 1].n)
        return false;
    const snap_frame *f = &s->frames[s->stack_ids[s->stacks[stack - 1].first + i]];
    *out = (koila_frame){ snap_str(s, f->name), snap_str(s, f->file), f->line };
    return true;
}

bool koila_snapshot_annotation(const koila_snapshot *s, uint64_t i, koila_annotation *out)
{
    if (i >= s->n_annotations)
        return false;
    const snap_annotation *x = &s->annotations[i];
    *out = (koila_annotation){ snap_str(s, x->name), snap_str(s, x->stage), x->time_us, x->device };
    return true;
}

/* The large segment size is not in a snapshot but for the string: the first miss between 1 and 10
 * MiB shows it. */
static uint64_t seen_large_segment(const koila_snapshot *s, uint32_t device)
{
    const uint64_t n = koila_snapshot_n_entries(s, device);
    for (uint64_t i = 1; i < n; i++) {
        const snap_entry *x = snap_entry_at(s, s->traces[device].first + i);
        const snap_entry *before = x - 1;
        if (!(i & (ENTRY_CHUNK - 1)) || (s->traces[device].first + i) % ENTRY_CHUNK == 0)
            before = snap_entry_at(s, s->traces[device].first + i - 1);
        if (x->kind != KOILA_EVENT_ALLOC || before->kind != KOILA_EVENT_SEGMENT_ALLOC ||
            x->addr != before->addr)
            continue;
        if (x->size > MIB && x->size < 10 * MIB - 511 && before->size > 10 * MIB)
            return before->size;
    }
    return 0;
}

/* A snapshot does not say which torch wrote it. The oldest that writes what is in it, 2.11 for 2.10
 * (which has fewer settings, and else the same rules); 2.13 where nothing tells. */
static const char *guess_version(const koila_snapshot *s)
{
    const snap_settings *x = &s->settings;
    if (s->has_pool_ids && s->has_host_traces)
        return "2.14";
    if (s->has_pool_ids && x->present && x->has_capture_reuse && !x->has_pinned_cached)
        return "2.12";
    if (s->has_pool_ids)
        return "2.13";
    if (x->present && x->has_capture_reuse)
        return "2.11";
    if (s->settings.has_new_keys)
        return "2.10";
    return s->settings.present ? "2.6" : "2.13";
}

static void apply_large_segment(const koila_snapshot *s, uint32_t device, koila_cache_config *c)
{
    const uint64_t seen = seen_large_segment(s, device);
    const bool is_default = c->large_segment_bytes == 20 * MIB;
    const bool is_possible = seen && seen % MIB == 0 && seen < (uint64_t)1 << 40;
    if (!is_default || seen == c->large_segment_bytes || !is_possible ||
        !(c->rules & KOILA_RULE_LARGE_SEGMENT))
        return;
    c->large_segment_bytes = seen;
    if (!c->rounding_set)
        c->max_non_split_rounding_bytes = seen;
}

static koila_status apply_settings(const snap_settings *x, koila_cache_config *c, koila_error *e)
{
    if (x->has_max_split)
        c->max_split_bytes = x->max_split < 0 ? KOILA_NO_LIMIT : (uint64_t)x->max_split;
    if (c->max_split_bytes < c->large_segment_bytes)
        return koila__fail(e, KOILA_BAD_INPUT, 0,
                           "settings: max_split_size %llu is below the large segment",
                           (unsigned long long)c->max_split_bytes);
    if (x->gc > 0.0 && x->gc < 1.0)
        c->gc_threshold = x->gc;
    if (x->has_divisions)
        memcpy(c->divisions, x->divisions, sizeof c->divisions);
    c->expandable = x->expandable;
    c->release_lock |= x->release_lock;
    c->oom_reject |= x->oom_reject;
    if (x->has_fraction && x->fraction >= 0.0 && x->fraction <= 1.0)
        c->memory_fraction = x->fraction;
    return KOILA_OK;
}

koila_status koila_snapshot_config(const koila_snapshot *s, uint32_t device,
                                   const char *torch_version, koila_cache_config *out,
                                   koila_error *e)
{
    const snap_settings *x = &s->settings;
    koila_cache_config c;
    KOILA_TRY(koila_cache_config_init(&c, torch_version ? torch_version : guess_version(s)));
    if (x->present) {
        if (x->conf != UINT32_MAX)
            KOILA_TRY(koila_cache_config_parse(&c, snap_str(s, x->conf), 0, e));
        apply_large_segment(s, device, &c);
        KOILA_TRY(apply_settings(x, &c, e));
    }
    *out = c;
    return KOILA_OK;
}
