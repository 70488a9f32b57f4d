/* cmd_plan.c — koila plan: the memory of a recorded step on a GPU that need not be present, as
 * three ranges and a verdict. */
#include "cmd.h"

typedef struct plan_options {
    const char *path, *gpu, *conf, *torch;
    koila_predict_opts o;
    bool json, list;
} plan_options;

static const char *const sdpa_names[] = { "auto", "flash", "efficient", "math", "cudnn" };
static const char *const optimizer_names[] = { "none", "sgd", "momentum", "adam", "adamw" };
static const char *const way_names[] = { "foreach", "fused", "loop" };

static bool choose(const char *value, const char *const *names, size_t n, uint32_t *out)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(value, names[i])) {
            *out = (uint32_t)i;
            return true;
        }
    return false;
}

static int list_gpus(void)
{
    const char *name;
    char total[32], context[32];
    printf("%-16s %5s %6s %12s %12s\n", "name", "SMs", "sm", "usable", "context");
    for (size_t i = 0; (name = koila_device_builtin_name(i)); i++) {
        koila_device *d = NULL;
        if (koila_device_builtin(name, NULL, &d, NULL))
            return complain(NULL, NULL, "the host is out of memory");
        printf("%-16s %5llu %6llu %12s %12s\n", name,
               (unsigned long long)koila_device_get(d, KOILA_DEVICE_SM_COUNT).value,
               (unsigned long long)koila_device_get(d, KOILA_DEVICE_CAPABILITY).value,
               gib(koila_device_get(d, KOILA_DEVICE_TOTAL_BYTES).value, total),
               gib(koila_device_get(d, KOILA_DEVICE_CONTEXT_BYTES).value, context));
        koila_device_free(d);
    }
    printf(
        "usable memory and context are estimated; koila.measure_device(path) measures your own\n");
    return EXIT_OK;
}

static bool is_file(const char *name)
{
    FILE *f = fopen(name, "rb");
    if (f)
        fclose(f);
    return f != NULL;
}

static koila_device *open_gpu(const char *name)
{
    koila_error e = KOILA_ERROR_INIT;
    koila_device *d = NULL;
    size_t n;
    if (!koila_device_builtin(name, NULL, &d, &e))
        return d;
    if (!is_file(name)) {
        complain("--gpu", "koila plan --list-gpus names them all.", "%s", e.text);
        return NULL;
    }
    char *text = read_text(name, &n, &e);
    if (!text || koila_device_open(text, n, NULL, &d, &e))
        complain_about(name, &e, NULL);
    free(text);
    return d;
}

static void put_range(const char *name, const koila_range *r)
{
    char a[32], b[32], c[32];
    printf("  %-10s %s", name, gib(r->expected, a));
    if (r->low != r->high)
        printf("   (%s to %s)", gib(r->low, b), gib(r->high, c));
    putchar('\n');
}
static void put_peaks(const char *name, const koila_peaks *p)
{
    printf("%s\n", name);
    put_range("allocated", &p->allocated);
    put_range("reserved", &p->reserved);
    put_range("device", &p->device);
}

static void put_prediction(const plan_options *o, const koila_device *d, const koila_prediction *p)
{
    char a[32];
    put_plain(stdout, o->path);
    printf(": ");
    if (p->dim == KOILA_NONE)
        printf("batch %lld", (long long)p->batch);
    else
        printf("%lld along dim %u", (long long)p->batch, p->dim);
    printf(" in %u %s of %lld, on ", p->n_slices, p->n_slices == 1 ? "slice" : "slices",
           (long long)p->rows);
    put_plain(stdout, koila_device_name(d));
    printf("\n");
    put_peaks("first step", &p->first);
    put_peaks(p->settled ? "later steps" : "later steps (not settled after 16)", &p->steady);
    printf("%s %s", p->fits ? "fits in" : "does not fit in", gib(p->memory_bytes, a));
    if (p->fits)
        printf(", %s to spare", gib(p->spare_bytes, a));
    if (p->fits && p->n_retries)
        printf(" (%llu retries)", (unsigned long long)p->n_retries);
    printf("\npeak at %s", p->peak_op[0] ? p->peak_op : "the start");
    if (p->peak_line[0]) {
        printf(", ");
        put_plain(stdout, p->peak_line);
    }
    printf("; largest then:\n");
    for (uint32_t i = 0; i < p->n_largest; i++) {
        printf("  %12s  %-28s ", gib(p->largest[i].bytes, a), p->largest[i].what);
        put_plain(stdout, p->largest[i].line);
        putchar('\n');
    }
    for (uint32_t i = 0; i < p->n_not_modelled; i++) {
        printf("%s", i ? "               " : "not modelled   ");
        put_plain(stdout, p->not_modelled[i].op);
        printf(" (%u calls)\n", p->not_modelled[i].n_calls);
    }
    for (uint32_t i = 0; i < p->n_notes; i++) {
        printf("%s", i ? "               " : "assumed        ");
        put_plain(stdout, p->notes[i]);
        putchar('\n');
    }
}

static void json_range(const char *key, const koila_range *r, const char *end)
{
    printf("\"%s\":{\"low\":%llu,\"expected\":%llu,\"high\":%llu}%s", key,
           (unsigned long long)r->low, (unsigned long long)r->expected, (unsigned long long)r->high,
           end);
}
static void json_peaks(const char *key, const koila_peaks *p)
{
    printf(",\"%s\":{", key);
    json_range("allocated", &p->allocated, ",");
    json_range("reserved", &p->reserved, ",");
    json_range("device", &p->device, "}");
}

static void put_json_prediction(const plan_options *o, const koila_device *d,
                                const koila_prediction *p)
{
    printf("{\"schema\":\"koila.plan/1\",\"file\":");
    put_json(stdout, o->path);
    printf(",\"gpu\":");
    put_json(stdout, koila_device_name(d));
    printf(",\"batch\":%lld,\"rows\":%lld,\"slices\":%u,\"steps\":%u,\"settled\":%s",
           (long long)p->batch, (long long)p->rows, p->n_slices, p->n_steps,
           p->settled ? "true" : "false");
    if (p->dim != KOILA_NONE)
        printf(",\"dim\":%u", p->dim);
    json_peaks("first_step", &p->first);
    json_peaks("later_steps", &p->steady);
    printf(",\"memory\":%llu,\"fits\":%s,\"spare\":%llu,\"retries\":%llu,\"peak\":{\"op\":",
           (unsigned long long)p->memory_bytes, p->fits ? "true" : "false",
           (unsigned long long)p->spare_bytes, (unsigned long long)p->n_retries);
    put_json(stdout, p->peak_op);
    printf(",\"line\":");
    put_json(stdout, p->peak_line);
    printf(",\"largest\":[");
    for (uint32_t i = 0; i < p->n_largest; i++) {
        printf("%s{\"bytes\":%llu,\"what\":", i ? "," : "",
               (unsigned long long)p->largest[i].bytes);
        put_json(stdout, p->largest[i].what);
        printf(",\"line\":");
        put_json(stdout, p->largest[i].line);
        printf("}");
    }
    printf("]},\"not_modelled\":[");
    for (uint32_t i = 0; i < p->n_not_modelled; i++) {
        printf("%s{\"op\":", i ? "," : "");
        put_json(stdout, p->not_modelled[i].op);
        printf(",\"calls\":%u}", p->not_modelled[i].n_calls);
    }
    printf("],\"assumed\":[");
    for (uint32_t i = 0; i < p->n_notes; i++) {
        if (i)
            putchar(',');
        put_json(stdout, p->notes[i]);
    }
    printf("],\"device\":{");
    for (int f = 0; f < KOILA_N_DEVICE_FIELDS; f++) {
        const koila_device_value v = koila_device_get(d, (koila_device_field)f);
        printf("%s\"%s\":{\"value\":%llu,\"spread\":%llu,\"how\":\"%s\"}", f ? "," : "",
               koila_device_field_key((koila_device_field)f), (unsigned long long)v.value,
               (unsigned long long)v.spread, v.how);
    }
    printf("}}\n");
}

static int plan_step(plan_options *o)
{
    koila_error e = KOILA_ERROR_INIT;
    koila_cache_config conf;
    koila_table *table = NULL;
    koila_graph *g = NULL;
    koila_prediction p;
    size_t n;
    int code = EXIT_BAD;
    if (koila_cache_config_init(&conf, o->torch))
        return usage_of("plan", "--torch %s: say a version, such as 2.10", o->torch);
    if (o->conf && koila_cache_config_parse(&conf, o->conf, 1, &e))
        return complain(
            "--conf",
            "Settings are those of PYTORCH_CUDA_ALLOC_CONF, such as max_split_size_mb=128.", "%s",
            e.text);
    koila_device *d = open_gpu(o->gpu);
    if (!d)
        return EXIT_BAD;
    char *text = read_text(o->path, &n, &e);
    koila_status status = text ? koila_table_new(NULL, &table) : KOILA_BAD_INPUT;
    if (text && status)
        snprintf(e.text, sizeof e.text, "the host is out of memory");
    if (!status)
        status = koila_graph_parse(table, text, n, &g, &e);
    if (!status)
        status = koila_predict(g, d, &conf, &o->o, &p, &e);
    if (status) {
        if (!e.text[0])
            snprintf(e.text, sizeof e.text, "%s", koila_status_text(status));
        complain_about(
            o->path, &e,
            status == KOILA_BAD_INPUT
                ? "The file is damaged or no graph: write it again with plan.save(\"step.kgraph\")."
                : NULL);
        if (status == KOILA_OOM)
            code = EXIT_NO_FIT;
    } else {
        if (o->json)
            put_json_prediction(o, d, &p);
        else
            put_prediction(o, d, &p);
        code = p.fits ? EXIT_OK : EXIT_NO_FIT;
    }
    koila_graph_free(g);
    koila_table_free(table);
    koila_device_free(d);
    free(text);
    return code;
}

/* ---- options. A missing value is EXIT_OK here, and a->bad says so. */

static bool *plan_flag(plan_options *o, const char *name)
{
    const struct {
        const char *name;
        bool *flag;
    } flags[] = {
        { "--list-gpus", &o->list },
        { "--json", &o->json },
        { "--weight-decay", &o->o.weight_decay },
        { "--amsgrad", &o->o.amsgrad },
        { "--clip-grad-norm", &o->o.clip_grad_norm },
        { "--autocast", &o->o.autocast },
        { "--ddp", &o->o.ddp },
        { "--grad-scaler", &o->o.grad_scaler },
        { "--cublas-cache", &o->o.keeps_cublas },
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (!strcmp(name, flags[i].name))
            return flags[i].flag;
    return NULL;
}

static int set_gpu(plan_options *o, args *a)
{
    o->gpu = args_value(a);
    return EXIT_OK;
}
static int set_conf(plan_options *o, args *a)
{
    o->conf = args_value(a);
    return EXIT_OK;
}
static int set_torch(plan_options *o, args *a)
{
    o->torch = args_value(a);
    return EXIT_OK;
}
static int set_memory(plan_options *o, args *a)
{
    return args_size(a, "--memory", 1, "24GiB or 24GB", &o->o.memory_bytes);
}
static int refuse_fsdp(plan_options *o, args *a)
{
    (void)o;
    (void)a;
    return complain("--fsdp",
                    "Plan the unsharded model (a graph recorded without FSDP), or measure a run "
                    "with torch.cuda.max_memory_reserved().",
                    "what FSDP needs has not been measured, so it is refused rather than guessed");
}
static int set_workspace(plan_options *o, args *a)
{
    uint64_t bytes;
    o->o.cublas_workspace = args_value(a);
    if (!a->value || koila_cublas_workspace(a->value, &bytes))
        return EXIT_OK;
    return usage_of("plan", "--cublas-workspace %s: pairs of KiB and count, such as :4096:2:16:8",
                    a->value);
}
static int set_lt_workspace(plan_options *o, args *a)
{
    uint64_t kib;
    o->o.cublaslt_workspace = args_value(a);
    if (!a->value || parse_count(a->value, INT32_MAX, &kib))
        return EXIT_OK;
    return usage_of("plan", "--cublaslt-workspace %s: a number of KiB, such as 1024", a->value);
}
static int set_slice(plan_options *o, args *a)
{
    uint64_t rows = 0;
    if (!args_value(a))
        return EXIT_OK;
    const bool is_auto = !strcmp(a->value, "auto");
    if (!is_auto && (!parse_count(a->value, INT64_MAX, &rows) || !rows))
        return usage_of("plan", "--slice %s: a number of rows, or auto", a->value);
    o->o.rows = is_auto ? KOILA_ROWS_AUTO : (int64_t)rows;
    return EXIT_OK;
}
static int set_sdpa(plan_options *o, args *a)
{
    if (!args_value(a) || choose(a->value, sdpa_names, 5, &o->o.sdpa))
        return EXIT_OK;
    return usage_of("plan", "--sdpa %s: auto, flash, efficient, math or cudnn", a->value);
}
static int set_optimizer(plan_options *o, args *a)
{
    char kind[32];
    if (!args_value(a))
        return EXIT_OK;
    snprintf(kind, sizeof kind, "%s", a->value);
    char *colon = strchr(kind, ':');
    if (colon)
        *colon++ = 0;
    if (choose(kind, optimizer_names, 5, &o->o.optimizer) &&
        (!colon || choose(colon, way_names, 3, &o->o.way)))
        return EXIT_OK;
    return usage_of("plan",
                    "--optimizer %s: none, sgd, momentum, adam or adamw, and perhaps :foreach, "
                    ":fused or :loop",
                    a->value);
}

static const struct {
    const char *name;
    int (*set)(plan_options *o, args *a);
} values[] = {
    { "--gpu", set_gpu },
    { "--conf", set_conf },
    { "--torch", set_torch },
    { "--memory", set_memory },
    { "--fsdp", refuse_fsdp },
    { "--cublas-workspace", set_workspace },
    { "--cublaslt-workspace", set_lt_workspace },
    { "--slice", set_slice },
    { "--sdpa", set_sdpa },
    { "--optimizer", set_optimizer },
};

static int plan_option(plan_options *o, args *a, const char *name)
{
    bool *flag = plan_flag(o, name);
    if (flag) {
        *flag = true;
        return EXIT_OK;
    }
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (!strcmp(name, values[i].name))
            return values[i].set(o, a);
    return no_option("plan", name);
}

int cmd_plan(int argc, char **argv)
{
    plan_options o = { .o = { .struct_size = sizeof o.o } };
    args a = { .verb = "plan", .n = argc, .v = argv };
    for (const char *name; args_next(&a, &name);) {
        if (!name) {
            if (o.path)
                return usage_of("plan", "one step at a time");
            o.path = a.positional;
            continue;
        }
        if (!strcmp(name, "--help"))
            return cmd_help(1, (char *[]){ (char *)"plan" });
        const int code = plan_option(&o, &a, name);
        if (code)
            return code;
        if (a.bad)
            return usage_of("plan", "%s needs a value", name);
    }
    if (o.list)
        return list_gpus();
    if (!o.path)
        return usage_of("plan", "which step?");
    if (!o.gpu)
        return usage_of("plan", "on which GPU? say --gpu NAME, or --list-gpus");
    return plan_step(&o);
}
