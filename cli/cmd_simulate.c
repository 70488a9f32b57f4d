/* cmd_simulate.c — koila simulate: replay a snapshot; print whether it is exact, its peak, the lost
 * bytes, and the result under other settings. */
#include "cmd.h"

typedef struct simulate_options {
    snapshot_options in;
    const char *conf, *events, *memory_text;
    uint64_t memory, outside;
    bool check, json, has_whatif;
} simulate_options;

static const char *const verdicts[] = { "exact", "exact with external decisions", "differs",
                                        "not checkable", "no trace" };

/* "at event 92,117, train.py:88 in forward" */
static void put_where(FILE *f, const koila_snapshot *s, uint32_t device, uint64_t entry)
{
    koila_entry x = { .struct_size = sizeof x };
    koila_frame frame;
    char n[32];
    fprintf(f, "at event %s", grouped(entry, n));
    if (!koila_snapshot_entry(s, device, entry, &x) || !user_frame(s, x.stack, &frame))
        return;
    fputs(", ", f);
    put_plain(f, frame.filename);
    fprintf(f, ":%u in ", frame.line);
    put_plain(f, frame.name);
}

typedef struct event_list {
    FILE *f;
} event_list;
static const char *const action_names[] = { "other",          "alloc",         "free_requested",
                                            "free_completed", "segment_alloc", "segment_free",
                                            "segment_map",    "segment_unmap", "oom",
                                            "snapshot" };
static void put_event(void *user, const koila_moment *m)
{
    const event_list *l = user;
    progress_done = m->entry;
    fprintf(l->f, "%llu\t%s\t0x%llx\t%llu\t%llu\t%llu\t%llu\n", (unsigned long long)m->entry,
            action_names[m->kind], (unsigned long long)m->addr, (unsigned long long)m->size,
            (unsigned long long)m->allocated, (unsigned long long)m->active,
            (unsigned long long)m->reserved);
}

static int write_events(const simulate_options *o, const koila_snapshot *s,
                        const koila_cache_config *conf)
{
    char *temporary;
    bool exact;
    koila_error e = KOILA_ERROR_INIT;
    event_list l = { create_beside(o->events, &temporary) };
    if (!l.f)
        return EXIT_BAD;
    fputs("event\taction\taddress\tsize\tallocated\tactive\treserved\n", l.f);
    progress("writing", o->events, koila_snapshot_n_entries(s, (uint32_t)o->in.device));
    koila_status status = koila_timeline(s, (uint32_t)o->in.device, conf, put_event, &l, UINT64_MAX,
                                         NULL, NULL, &exact, &e);
    progress(NULL, NULL, 0);
    if (status) {
        fclose(l.f);
        if (temporary)
            remove(temporary);
        free(temporary);
        return complain_about(o->in.path, &e, NULL);
    }
    return finish_file(l.f, temporary, o->events);
}

static void put_stat(FILE *f, const koila_cache_stat *s)
{
    char name[64];
    uint64_t value;
    fputc('{', f);
    for (size_t i = 0; koila_cache_stat_at(s, i, name, &value); i++)
        fprintf(f, "%s\"%s\":%llu", i ? "," : "", name, (unsigned long long)value);
    fputc('}', f);
}

static uint64_t n_decisions(const koila_replay_result *r)
{
    return r->n_retries + r->n_retry_or_empty + r->n_empty + r->n_cap_set +
           r->n_expandable_switched + r->n_collected + r->n_start_learned;
}

static bool starts_with(const char *name, const char *start)
{
    return !strncmp(name, start, strlen(start));
}

/* Does the recording leave this statistic open? An empty_cache that freed nothing leaves no entry,
 * and one right before a new segment looks like that segment's retry. Between the last request that
 * shows expandable segments off and the first that shows them on, the rest of a block may have been
 * split off or not. Of the time before a window nobody has counted anything. */
static bool is_uncertain(const koila_replay_result *r, const char *name)
{
    static const char *const by_split[] = { "allocated_bytes.", "active_bytes.", "inactive_split.",
                                            "inactive_split_bytes." };
    if (!strcmp(name, "num_sync_all_streams"))
        return true;
    if (r->n_retry_or_empty && !strcmp(name, "num_alloc_retries"))
        return true;
    for (size_t i = 0; r->n_expandable_switched && i < sizeof by_split / sizeof *by_split; i++)
        if (starts_with(name, by_split[i]))
            return true;
    const char *dot = strrchr(name, '.');
    return r->n_start_segments && (!dot || strcmp(dot, ".current"));
}

static void put_uncertain_json(const koila_replay_result *r)
{
    char name[64];
    uint64_t unused;
    bool any = false;
    fputs(",\"stats_uncertain\":[", stdout);
    for (size_t i = 0; koila_cache_stat_at(&r->stat, i, name, &unused); i++) {
        if (!is_uncertain(r, name))
            continue;
        printf("%s\"%s\"", any ? "," : "", name);
        any = true;
    }
    putchar(']');
}

static const char *json_bool(bool x) { return x ? "true" : "false"; }
static void put_number(const char *key, uint64_t value)
{
    printf(",\"%s\":%llu", key, (unsigned long long)value);
}

static void put_replay_json(const koila_replay_result *r)
{
    printf(",\"replay\":{\"verdict\":\"%s\",\"reason\":", verdicts[r->verdict]);
    put_json(stdout, r->reason);
    if (r->verdict == KOILA_DIFFERS || r->verdict == KOILA_NOT_CHECKABLE)
        put_number("at_event", r->at_entry);
    put_number("addresses", r->n_addresses);
    put_number("segment_events", r->n_segment_events);
    put_number("end_blocks", r->n_end_blocks);
    put_number("external_decisions", n_decisions(r));
    put_number("retries", r->n_retries);
    put_number("retry_or_empty_cache", r->n_retry_or_empty);
    put_number("empty_cache", r->n_empty);
    put_number("cap_set", r->n_cap_set);
    put_number("expandable_switched", r->n_expandable_switched);
    put_number("collected", r->n_collected);
    put_number("start_learned", r->n_start_learned);
    put_number("start_segments", r->n_start_segments);
    put_number("start_blocks", r->n_start_blocks);
    put_number("start_blocks_assumed", r->n_assumed);
    printf(",\"reservations_inferred\":%s,\"end_checked\":%s}", json_bool(r->reservations_inferred),
           json_bool(r->end_checked));
}

static void put_peak_json(const koila_replay_result *r)
{
    printf(",\"peak\":{\"allocated\":%llu", (unsigned long long)r->peak_allocated);
    put_number("active", r->peak_active);
    put_number("reserved", r->peak_reserved);
    put_number("allocated_at_event", r->peak_allocated_entry);
    put_number("reserved_at_event", r->peak_entry);
    printf(",\"added_up\":%s}", json_bool(r->peak_added_up));
    printf(",\"lost\":{\"requested\":%llu", (unsigned long long)r->at_peak_requested);
    put_number("rounding", r->lost_rounding);
    put_number("unsplit", r->lost_unsplit);
    put_number("free_but_pinned", r->lost_pinned);
    put_number("whole_free_segments", r->lost_whole);
    put_number("waiting", r->waiting);
    printf("}");
}

static void put_stack_json(const koila_snapshot *s, uint32_t stack)
{
    koila_frame frame;
    for (uint32_t i = 0; koila_snapshot_frame(s, stack, i, &frame); i++) {
        fputs(i ? ",{\"name\":" : "{\"name\":", stdout);
        put_json(stdout, frame.name);
        fputs(",\"filename\":", stdout);
        put_json(stdout, frame.filename);
        printf(",\"line\":%u}", frame.line);
    }
}

static void put_whatif_json(const simulate_options *o, const koila_snapshot *s,
                            const koila_whatif_result *w)
{
    koila_entry x = { .struct_size = sizeof x };
    printf(",\"what_if\":{\"fits\":%s,\"approximate_start\":%s", json_bool(w->fits),
           json_bool(w->approximate_start));
    put_number("ooms", w->n_ooms);
    if (w->n_ooms) {
        put_number("first_oom_event", w->first_oom_entry);
        put_number("first_oom_bytes", w->first_oom_bytes);
        if (koila_snapshot_entry(s, (uint32_t)o->in.device, w->first_oom_entry, &x)) {
            fputs(",\"first_oom_stack\":[", stdout);
            put_stack_json(s, x.stack);
            putchar(']');
        }
    }
    put_number("memory", o->memory);
    put_number("outside", o->outside);
    put_number("spare", w->spare_bytes);
    fputs(",\"stats\":", stdout);
    put_stat(stdout, &w->stat);
    putchar('}');
}

static void put_result_json(const simulate_options *o, const koila_snapshot *s,
                            const koila_snapshot_info *info, const koila_cache_config *conf,
                            const koila_replay_result *r, const koila_whatif_result *w)
{
    fputs("{\"schema\":\"koila.simulate/1\",\"file\":", stdout);
    put_json(stdout, o->in.path);
    put_number("devices", info->n_devices);
    put_number("device", o->in.device);
    put_number("events", r->n_entries);
    put_number("skipped_events", info->n_skipped_entries);
    put_number("unknown_keys", info->n_unknown_keys);
    printf(",\"torch\":\"%u.%u\",\"torch_inferred\":%s", r->torch_version / 100,
           r->torch_version % 100, json_bool(!o->in.torch));
    printf(",\"rules_verified_by\":\"%s\",\"expandable_segments\":%s", r->verified,
           json_bool(conf->expandable));
    put_replay_json(r);
    put_peak_json(r);
    put_number("ooms", r->n_ooms);
    fputs(",\"stats\":", stdout);
    put_stat(stdout, &r->stat);
    put_uncertain_json(r);
    if (w)
        put_whatif_json(o, s, w);
    puts("}");
}

static void put_whatif(const simulate_options *o, const koila_snapshot *s,
                       const koila_whatif_result *w)
{
    char a[32], b[32];
    printf("with %-6s ", o->memory_text ? o->memory_text : "these");
    if (w->approximate_start)
        printf("(approximate start) ");
    if (w->fits) {
        if (o->memory)
            printf("fits with %s to spare", gib(w->spare_bytes, a));
        else
            printf("reserved %s, allocated %s at most",
                   gib(w->stat.of[KOILA_STAT_RESERVED_BYTES][0].peak, a),
                   gib(w->stat.of[KOILA_STAT_ALLOCATED_BYTES][0].peak, b));
        if (w->stat.num_alloc_retries)
            printf(" (%llu %s)", (unsigned long long)w->stat.num_alloc_retries,
                   w->stat.num_alloc_retries == 1 ? "retry" : "retries");
        putchar('\n');
        return;
    }
    printf("does not fit: a request of %s fails ", gib(w->first_oom_bytes, a));
    put_where(stdout, s, (uint32_t)o->in.device, w->first_oom_entry);
    printf(" (%s fail in all)\n", grouped(w->n_ooms, b));
    koila_entry x = { .struct_size = sizeof x };
    koila_frame f;
    if (koila_snapshot_entry(s, (uint32_t)o->in.device, w->first_oom_entry, &x))
        for (uint32_t i = 0; i < 12 && koila_snapshot_frame(s, x.stack, i, &f); i++) {
            fputs("            ", stdout);
            put_plain(stdout, f.filename);
            printf(":%u in ", f.line);
            put_plain(stdout, f.name);
            putchar('\n');
        }
}

static void put_decisions(const koila_replay_result *r)
{
    static const char *const names[] = { "retry",
                                         "retry or empty_cache",
                                         "empty_cache",
                                         "cap set",
                                         "expandable switched",
                                         "garbage collection",
                                         "learned of the start" };
    const uint64_t n[] = { r->n_retries,      r->n_retry_or_empty,      r->n_empty,
                           r->n_cap_set,      r->n_expandable_switched, r->n_collected,
                           r->n_start_learned };
    bool any = false;
    for (size_t i = 0; i < sizeof n / sizeof *n; i++) {
        if (!n[i])
            continue;
        printf("%s%llu x %s", any ? ", " : "; decisions: ", (unsigned long long)n[i], names[i]);
        any = true;
    }
}

/* Exactly one of: exact | exact with N external decisions | differs at event i: ... | not
 * checkable: ... */
static void put_verdict(const koila_replay_result *r)
{
    char a[32], b[32], c[32];
    fputs("replay      ", stdout);
    if (r->verdict > KOILA_EXACT_WITH_DECISIONS) {
        fputs(r->verdict == KOILA_DIFFERS ? "differs " : "not checkable: ", stdout);
        put_plain(stdout, r->reason);
        putchar('\n');
        return;
    }
    const uint64_t n = n_decisions(r);
    if (n)
        printf("exact with %s external decisions", grouped(n, a));
    else
        fputs("exact", stdout);
    printf(": %s addresses, %s segment events", grouped(r->n_addresses, a),
           grouped(r->n_segment_events, b));
    if (r->end_checked)
        printf(", %s blocks at the end", grouped(r->n_end_blocks, c));
    put_decisions(r);
    if (r->n_start_blocks)
        printf("; %s blocks were live before", grouped(r->n_start_blocks, a));
    if (r->n_assumed)
        printf(", of %s the size is assumed", grouped(r->n_assumed, a));
    if (r->reservations_inferred)
        printf("; where reservations begin and end is inferred");
    if (r->reason[0]) {
        fputs("; ", stdout);
        put_plain(stdout, r->reason);
    }
    putchar('\n');
}

static void put_result(const simulate_options *o, const koila_snapshot *s,
                       const koila_snapshot_info *info, const koila_cache_config *conf,
                       const koila_replay_result *r, const koila_whatif_result *w)
{
    char a[32], b[32], c[32], d[32];
    koila_entry first = { .struct_size = sizeof first };
    koila_entry last = { .struct_size = sizeof last };
    put_plain(stdout, o->in.path);
    if (info->n_devices == 1)
        printf(": 1 device");
    else
        printf(": device %u of %u", (unsigned)o->in.device, info->n_devices);
    printf(", %s events", grouped(r->n_entries, a));
    if (koila_snapshot_entry(s, (uint32_t)o->in.device, 0, &first) &&
        koila_snapshot_entry(s, (uint32_t)o->in.device, r->n_entries - 1, &last) && first.time_us &&
        last.time_us >= first.time_us)
        printf(", %.1f s", (double)(last.time_us - first.time_us) / 1e6);
    printf(", rules of torch %u.%u%s, expandable %s\n", r->torch_version / 100,
           r->torch_version % 100, o->in.torch ? "" : " (inferred)",
           conf->expandable ? "on" : "off");
    if (r->verdict == KOILA_STATE_ONLY) {
        printf("state       %s\n", r->reason);
    } else {
        put_verdict(r);
    }
    printf("peak        allocated %s   reserved %s   ", gib(r->peak_allocated, a),
           gib(r->peak_reserved, b));
    if (r->n_entries)
        put_where(stdout, s, (uint32_t)o->in.device, r->peak_entry);
    puts(r->peak_added_up ? " (added up: the replay stopped before)" : "");
    if (!r->peak_added_up)
        printf(
            "lost        rounding %s   unsplit %s   free but pinned %s   whole free segments %s\n",
            gib(r->lost_rounding, a), gib(r->lost_unsplit, b), gib(r->lost_pinned, c),
            gib(r->lost_whole, d));
    if (r->n_ooms) {
        printf("oom         %s, first ", grouped(r->n_ooms, a));
        put_where(stdout, s, (uint32_t)o->in.device, r->first_oom_entry);
        putchar('\n');
    }
    if (w)
        put_whatif(o, s, w);
}

static int simulate(const simulate_options *o, const koila_snapshot *s,
                    const koila_cache_config *conf)
{
    koila_error e = KOILA_ERROR_INIT;
    koila_snapshot_info info;
    koila_cache_config other = *conf;
    koila_replay_result r;
    koila_whatif_result w;
    koila_snapshot_get_info(s, &info);
    if (o->conf && koila_cache_config_parse(&other, o->conf, 1, &e))
        return complain(
            "--conf",
            "Settings are those of PYTORCH_CUDA_ALLOC_CONF, such as max_split_size_mb=128.", "%s",
            e.text);
    progress("replaying", o->in.path, 0);
    koila_status status = koila_replay(s, (uint32_t)o->in.device, conf, &r, &e);
    progress(NULL, NULL, 0);
    if (status)
        return complain_about(o->in.path, &e, NULL);
    if (o->events) {
        int code = write_events(o, s, conf);
        if (code)
            return code;
    }
    if (o->has_whatif) {
        other.total_bytes = o->memory;
        other.outside_bytes = o->outside;
        if (other.memory_fraction > 0.0 && o->memory)
            koila_cache_config_fraction(&other, other.memory_fraction, o->memory, o->memory);
        progress("replaying under other settings", o->in.path, 0);
        status = koila_whatif(s, (uint32_t)o->in.device, &other, &w, &e);
        progress(NULL, NULL, 0);
        if (status)
            return complain_about(o->in.path, &e, NULL);
    }
    if (o->json)
        put_result_json(o, s, &info, conf, &r, o->has_whatif ? &w : NULL);
    else
        put_result(o, s, &info, conf, &r, o->has_whatif ? &w : NULL);
    if (r.verdict != KOILA_STATE_ONLY)
        fprintf(stderr, "koila: note: the rules of torch %u.%u are %s\n", r.torch_version / 100,
                r.torch_version % 100, koila_cache_verified_words(r.verified));
    if (o->has_whatif && !w.fits)
        return EXIT_NO_FIT;
    if (o->check && r.verdict > KOILA_EXACT_WITH_DECISIONS)
        return EXIT_NO_FIT;
    return EXIT_OK;
}

/* A missing value is EXIT_OK here, and a->bad says so. */
static int simulate_option(simulate_options *o, args *a, const char *name)
{
    int code = EXIT_OK;
    if (snapshot_option(&o->in, a, name, &code))
        return code;
    if (!strcmp(name, "--check"))
        o->check = true;
    else if (!strcmp(name, "--json"))
        o->json = true;
    else if (!strcmp(name, "--events"))
        o->events = args_value(a);
    else if (!strcmp(name, "--conf")) {
        o->conf = args_value(a);
        o->has_whatif = true;
    } else if (!strcmp(name, "--memory")) {
        o->has_whatif = true;
        code = args_size(a, name, 1, "24GiB or 24GB", &o->memory);
        o->memory_text = a->value;
    } else if (!strcmp(name, "--outside")) {
        code = args_size(a, name, 0, "500MiB or 500MB", &o->outside);
    } else {
        code = no_option("simulate", name);
    }
    return code;
}

int cmd_simulate(int argc, char **argv)
{
    simulate_options o = { .in = SNAPSHOT_OPTIONS };
    args a = { .verb = "simulate", .n = argc, .v = argv };
    for (const char *name; args_next(&a, &name);) {
        if (!name) {
            if (o.in.path)
                return usage_of("simulate", "one snapshot at a time");
            o.in.path = a.positional;
            continue;
        }
        if (!strcmp(name, "--help"))
            return cmd_help(1, (char *[]){ (char *)"simulate" });
        const int code = simulate_option(&o, &a, name);
        if (code)
            return code;
        if (a.bad)
            return usage_of("simulate", "%s needs a value", name);
    }
    if (!o.in.path)
        return usage_of("simulate", "which snapshot?");
    koila_cache_config conf;
    koila_snapshot *s = open_snapshot("simulate", &o.in, &conf);
    if (!s)
        return EXIT_BAD;
    const int code = simulate(&o, s, &conf);
    koila_snapshot_free(s);
    return code;
}
