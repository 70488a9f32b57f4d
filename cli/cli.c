/* cli.c — what the commands share: messages, options, sizes, text made safe to show, files. */
#include "cmd.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static void vcomplain(const char *subject, const char *todo, const char *fmt, va_list ap)
{
    char text[1024];
    vsnprintf(text, sizeof text, fmt, ap);
    fputs("koila: ", stderr);
    if (subject) {
        put_plain(stderr, subject);
        fputs(": ", stderr);
    }
    put_plain(stderr, text);
    fputc('\n', stderr);
    if (todo)
        fprintf(stderr, "  %s\n", todo);
}

int complain(const char *subject, const char *todo, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vcomplain(subject, todo, fmt, ap);
    va_end(ap);
    return EXIT_BAD;
}

static const char elsewhere[] = "Give another place to write to, or make room there.";

/* The library's text says what is wrong; here what to do about it, by the words in it. */
static const char *advice(const koila_error *e)
{
    static const struct {
        const char *words, *todo;
    } known[] = {
        { "refused opcode",
          "Do not load this file in Python unless you trust where it came from." },
        { "not a snapshot",
          "Give the file written by torch.cuda.memory._dump_snapshot(), or its JSON." },
        { "empty file",
          "Give the file written by torch.cuda.memory._dump_snapshot(), or its JSON." },
        { "no \"segments\"",
          "Give the file written by torch.cuda.memory._dump_snapshot(), or its JSON." },
        { "graph ends early",
          "The file was cut: copy it again, or write it again with plan.save(\"step.kgraph\")." },
        { "ends early", "The file was cut: copy it again, or write a new snapshot." },
        { "max_memory_bytes", "Raise the limit with --max-memory, such as --max-memory 2GiB." },
        { "max_string_bytes", "Raise the limit with --max-string, such as --max-string 64MiB." },
        { "nested deeper", "Raise the limit with --max-nesting, such as --max-nesting 200." },
        { "unknown action", "It may come from a newer torch than this koila knows." },
        { "unknown state", "It may come from a newer torch than this koila knows." },
        { "is not known", "It may come from a newer torch than this koila knows." },
        { "is not allocated", "The trace is damaged: record it again." },
        { "is allocated already", "The trace is damaged: record it again." },
        { "was not freed", "The trace is damaged: record it again." },
        { "No such file", "Check the path; - is standard input." },
        { "Permission denied", "Make it readable, or give another file." },
        { "cannot be read", "Give a file, or - for standard input." },
        { "device profile", "Write one with koila.measure_device(path), or name a built-in one: "
                            "koila plan --list-gpus." },
        { "no operators", "Give the file that plan.save(\"step.kgraph\") wrote." },
        { "the first line is not", "Give the file that plan.save(\"step.kgraph\") wrote." },
        { "CUDA context alone", "Say more with --memory, such as --memory 24GiB." },
    };
    if (e->code == KOILA_NO_MEMORY)
        return "Close other programs, or use a shorter recording.";
    if (e->code == KOILA_UNSUPPORTED)
        return "This cannot be simulated; koila does not guess.";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strstr(e->text, known[i].words))
            return known[i].todo;
    return NULL;
}

int complain_about(const char *subject, const koila_error *e, const char *todo)
{
    const char *better = advice(e);
    if (better)
        todo = better;
    if (e->offset)
        return complain(subject, todo, "%s (byte %llu)", e->text, (unsigned long long)e->offset);
    return complain(subject, todo, "%s", e->text);
}

int usage_of(const char *verb, const char *fmt, ...)
{
    char todo[700] = "See koila help.";
    for (const command *c = commands; c->verb; c++)
        if (!strcmp(c->verb, verb))
            snprintf(todo, sizeof todo, "usage: %s", c->usage);
    va_list ap;
    va_start(ap, fmt);
    vcomplain(verb, todo, fmt, ap);
    va_end(ap);
    return EXIT_BAD;
}

bool args_next(args *a, const char **name)
{
    a->value = a->positional = NULL;
    if (a->at >= a->n)
        return false;
    char *s = a->v[a->at++];
    if (s[0] != '-' || !s[1]) {
        *name = NULL;
        a->positional = s;
        return true;
    }
    char *eq = s[1] == '-' ? strchr(s, '=') : NULL;
    if (eq) {
        *eq = 0;
        a->value = eq + 1;
    }
    *name = s;
    return true;
}

const char *args_value(args *a)
{
    if (!a->value && a->at < a->n)
        a->value = a->v[a->at++];
    if (!a->value)
        a->bad = true;
    return a->value;
}

int args_size(args *a, const char *name, uint64_t least, const char *example, uint64_t *out)
{
    if (!args_value(a) || (parse_size(a->value, out) && *out >= least))
        return EXIT_OK;
    return usage_of(a->verb, "%s %s: say %s", name, a->value, example);
}

bool parse_count(const char *s, uint64_t max, uint64_t *out)
{
    uint64_t n = 0;
    if (!*s)
        return false;
    for (; *s; s++) {
        if (*s < '0' || *s > '9' || n > (max - (uint64_t)(*s - '0')) / 10)
            return false;
        n = n * 10 + (uint64_t)(*s - '0');
    }
    *out = n;
    return n <= max;
}

bool parse_size(const char *s, uint64_t *out)
{
    static const struct {
        const char *unit;
        uint64_t bytes;
    } units[] = {
        { "", 1 },
        { "B", 1 },
        { "KiB", 1 << 10 },
        { "MiB", 1 << 20 },
        { "GiB", 1 << 30 },
        { "TiB", (uint64_t)1 << 40 },
        { "kB", 1000 },
        { "MB", 1000000 },
        { "GB", 1000000000 },
        { "TB", 1000000000000 },
    };
    uint64_t whole = 0, tenths = 0, scale = 1;
    bool any = false;
    for (; *s >= '0' && *s <= '9'; s++, any = true) {
        whole = whole * 10 + (uint64_t)(*s - '0');
        if (whole > (uint64_t)1 << 60)
            return false;
    }
    if (*s == '.')
        for (s++; *s >= '0' && *s <= '9'; s++, any = true)
            if (scale < 1000000) {
                tenths = tenths * 10 + (uint64_t)(*s - '0');
                scale *= 10;
            }
    if (*s == ' ')
        s++;
    for (size_t i = 0; any && i < sizeof units / sizeof *units; i++) {
        if (strcmp(units[i].unit, s))
            continue;
        if (units[i].bytes == 1 && scale > 1)
            return false;
        if (whole && units[i].bytes > ((uint64_t)1 << 61) / whole)
            return false;
        *out = whole * units[i].bytes +
               (uint64_t)((double)tenths / (double)scale * (double)units[i].bytes);
        return *out < (uint64_t)1 << 60;
    }
    return false;
}

const char *grouped(uint64_t n, char out[32])
{
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    int at = 0;
    for (int i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0)
            out[at++] = ',';
        out[at++] = digits[i];
    }
    out[at] = 0;
    return out;
}

const char *gib(uint64_t n, char out[32])
{
    if (n >= (uint64_t)1 << 30)
        snprintf(out, 32, "%.2f GiB", (double)n / 1073741824.0);
    else if (n >= 1 << 20)
        snprintf(out, 32, "%.2f MiB", (double)n / 1048576.0);
    else if (n >= 1 << 10)
        snprintf(out, 32, "%.1f KiB", (double)n / 1024.0);
    else
        snprintf(out, 32, "%llu B", (unsigned long long)n);
    return out;
}

/* One character of UTF-8 (or a byte that is none) and its length. */
static size_t character(const char *s, uint32_t *c)
{
    const unsigned char *p = (const unsigned char *)s;
    static const uint32_t payload[] = { 0, 0x7f, 31, 15, 7 }; /* bits of the first byte, by n */
    size_t n = 0;
    if (p[0] < 0x80)
        n = 1;
    else if (p[0] >= 0xC2 && p[0] < 0xE0)
        n = 2;
    else if (p[0] >= 0xE0 && p[0] < 0xF0)
        n = 3;
    else if (p[0] >= 0xF0 && p[0] < 0xF5)
        n = 4;
    *c = p[0] & payload[n];
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80)
            n = 0;
        else
            *c = *c << 6 | (p[i] & 63u);
    }
    if (!n)
        *c = 0xFFFD;
    return n ? n : 1;
}
static bool is_hidden(uint32_t c)
{
    return c < 0x20 || (c >= 0x7f && c < 0xa0) || (c >= 0x202a && c <= 0x202e) ||
           (c >= 0x2066 && c <= 0x2069) || c == 0x200e || c == 0x200f || c == 0x2028 || c == 0x2029;
}
static void put_visible(FILE *f, uint32_t c)
{
    if (c < 0x20)
        fprintf(f, "\xe2\x90%c", (int)(0x80 + c)); /* U+2400 + c */
    else if (c == 0x7f)
        fputs("\xe2\x90\xa1", f);
    else
        fprintf(f, "[U+%04X]", c);
}

static void put_escaped(FILE *f, const char *s, bool html)
{
    while (*s) {
        uint32_t c;
        const size_t n = character(s, &c);
        if (is_hidden(c))
            put_visible(f, c);
        else if (c == 0xFFFD)
            fputs("\xef\xbf\xbd", f);
        else if (html && c == '&')
            fputs("&amp;", f);
        else if (html && c == '<')
            fputs("&lt;", f);
        else if (html && c == '>')
            fputs("&gt;", f);
        else if (html && c == '"')
            fputs("&quot;", f);
        else if (html && c == '\'')
            fputs("&#39;", f);
        else
            fwrite(s, 1, n, f);
        s += n;
    }
}
void put_plain(FILE *f, const char *s) { put_escaped(f, s, false); }
void put_html(FILE *f, const char *s) { put_escaped(f, s, true); }

void put_json(FILE *f, const char *s)
{
    fputc('"', f);
    while (*s) {
        uint32_t c;
        const size_t n = character(s, &c);
        if (c == '"' || c == '\\')
            fprintf(f, "\\%c", (int)c);
        else if (c < 0x20 || c == 0x7f)
            fprintf(f, "\\u%04x", c);
        else if (c == 0xFFFD)
            fputs("\\ufffd", f);
        else
            fwrite(s, 1, n, f);
        s += n;
    }
    fputc('"', f);
}

static int64_t read_fd(void *user, void *p, size_t n)
{
    for (;;) {
        ssize_t got = read(*(int *)user, p, n);
        if (got > 0)
            progress_done += (uint64_t)got;
        if (got >= 0 || errno != EINTR)
            return got;
    }
}

/* Read, not mapped: the pages of a mapped file of gigabytes would count as ours. */
static koila_snapshot *read_snapshot(const snapshot_options *o)
{
    koila_error e = KOILA_ERROR_INIT;
    koila_snapshot *s = NULL;
    struct stat st;
    int fd = strcmp(o->path, "-") ? open(o->path, O_RDONLY | O_CLOEXEC) : 0;
    if (fd < 0 || fstat(fd, &st)) {
        snprintf(e.text, sizeof e.text, "%s", strerror(errno));
        if (fd > 0)
            close(fd);
        complain_about(o->path, &e, NULL);
        return NULL;
    }
    koila_source src = { .struct_size = (uint32_t)sizeof src, .read = read_fd, .user = &fd };
    progress("reading", o->path, S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0);
    koila_status status = koila_snapshot_open(&src, &o->limits, &s, &e);
    progress(NULL, NULL, 0);
    if (fd)
        close(fd);
    if (!status)
        return s;
    const char *todo = advice(&e);
    if (status != KOILA_BAD_INPUT)
        complain_about(o->path, &e, NULL);
    else
        complain(o->path,
                 todo ? todo
                      : "The file is damaged or no snapshot: write it again with "
                        "torch.cuda.memory._dump_snapshot().",
                 "%s (byte %llu)", e.text, (unsigned long long)e.offset);
    return NULL;
}

bool snapshot_option(snapshot_options *o, args *a, const char *name, int *code)
{
    uint64_t n = 0;
    *code = EXIT_OK;
    if (!strcmp(name, "--torch")) {
        o->torch = args_value(a);
    } else if (!strcmp(name, "--device")) {
        if (args_value(a) && !parse_count(a->value, 1023, &o->device))
            *code = usage_of(a->verb, "--device %s: a number from 0 to 1023", a->value);
    } else if (!strcmp(name, "--max-memory")) {
        *code = args_size(a, name, 1, "2GiB or 2GB", &o->limits.max_memory_bytes);
    } else if (!strcmp(name, "--max-string")) {
        *code = args_size(a, name, 1, "64MiB or 64MB", &o->limits.max_string_bytes);
    } else if (!strcmp(name, "--max-nesting")) {
        if (args_value(a) && (!parse_count(a->value, 4096, &n) || !n))
            *code = usage_of(a->verb, "--max-nesting %s: a number from 1 to 4096", a->value);
        o->limits.max_nesting = (uint32_t)n;
    } else {
        return false;
    }
    return true;
}

koila_snapshot *open_snapshot(const char *verb, snapshot_options *o, koila_cache_config *conf)
{
    koila_snapshot_info info;
    koila_error e = KOILA_ERROR_INIT;
    koila_snapshot *s = read_snapshot(o);
    size_t n_segs = 0;
    if (!s)
        return NULL;
    koila_snapshot_get_info(s, &info);
    if (o->device == UINT64_MAX) { /* the first with a trace, else the first with memory */
        uint32_t d = 0;
        while (d < info.n_devices && !koila_snapshot_n_entries(s, d))
            d++;
        if (d == info.n_devices)
            for (d = 0; d < info.n_devices && !koila_snapshot_segments(s, d, &n_segs);)
                d++;
        o->device = d < info.n_devices ? d : 0;
    }
    koila_status status = KOILA_BAD_ARGUMENT;
    if (o->device >= info.n_devices) {
        complain(o->path, "Leave --device out for the first that recorded something.",
                 "no device %llu: the snapshot has %u", (unsigned long long)o->device,
                 info.n_devices);
    } else {
        status = koila_snapshot_config(s, (uint32_t)o->device, o->torch, conf, &e);
        if (!status)
            return s;
        if (e.text[0])
            complain_about(o->path, &e, NULL);
        else
            usage_of(verb,
                     status == KOILA_UNSUPPORTED ? "--torch %s: versions before 2.0 are not known"
                                                 : "--torch %s: say a version, such as 2.10",
                     o->torch);
    }
    koila_snapshot_free(s);
    return NULL;
}

bool user_frame(const koila_snapshot *s, uint32_t stack, koila_frame *out)
{
    koila_frame f;
    for (uint32_t i = 0; koila_snapshot_frame(s, stack, i, &f); i++) {
        const char *dot = strrchr(f.filename, '.');
        if (!dot || strcmp(dot, ".py") || strstr(f.filename, "/torch/") ||
            strstr(f.filename, "site-packages") || f.filename[0] == '<')
            continue;
        *out = f;
        return true;
    }
    return koila_snapshot_frame(s, stack, 0, out);
}

char *read_text(const char *path, size_t *n, koila_error *e)
{
    FILE *f = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    size_t cap = 1 << 16;
    char *p = f ? malloc(cap) : NULL;
    *n = 0;
    while (p) {
        size_t got = fread(p + *n, 1, cap - *n - 1, f);
        *n += got;
        if (!got)
            break;
        if (cap - *n - 1 == 0) {
            char *q = cap < (size_t)1 << 30 ? realloc(p, cap * 2) : NULL;
            if (!q) {
                free(p);
                p = NULL;
                errno = EFBIG;
                break;
            }
            p = q;
            cap *= 2;
        }
    }
    if (p && ferror(f)) {
        free(p);
        p = NULL;
    }
    if (p)
        p[*n] = 0;
    else {
        e->code = KOILA_BAD_INPUT;
        e->offset = 0;
        snprintf(e->text, sizeof e->text, "%s", strerror(errno));
    }
    if (f && f != stdin)
        fclose(f);
    return p;
}

FILE *create_beside(const char *path, char **temporary)
{
    struct stat st;
    *temporary = NULL;
    /* such as /dev/stdout: not to be replaced by a file */
    if (!stat(path, &st) && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) {
        FILE *f = fopen(path, "wb");
        if (!f)
            complain(path, elsewhere, "cannot be written: %s", strerror(errno));
        return f;
    }
    char *real = realpath(path, NULL); /* a link stays a link */
    if (!real)
        real = strdup(path);
    const size_t n = real ? strlen(real) + 12 : 0;
    *temporary = real ? malloc(n) : NULL;
    if (!*temporary) {
        free(real);
        complain(path, NULL, "the host is out of memory");
        return NULL;
    }
    snprintf(*temporary, n, "%s.XXXXXX", real);
    free(real);
    int fd = mkstemp(*temporary);
    mode_t mask = umask(0);
    umask(mask);
    if (fd >= 0 && fchmod(fd, 0666 & ~mask)) {
        /* the file keeps mkstemp's stricter mode */
    }
    FILE *f = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (!f) {
        complain(path, elsewhere, "cannot be written: %s", strerror(errno));
        if (fd >= 0) {
            close(fd);
            unlink(*temporary);
        }
        free(*temporary);
        *temporary = NULL;
    }
    return f;
}

int finish_file(FILE *f, char *temporary, const char *path)
{
    int failed = 0;
    if (ferror(f)) /* of the write that failed */
        failed = errno ? errno : EIO;
    if (fclose(f) && !failed)
        failed = errno;
    if (!failed && temporary) { /* beside what it becomes: cut ".XXXXXX" off */
        char *to = strdup(temporary);
        if (to)
            to[strlen(to) - 7] = 0;
        if (!to || rename(temporary, to))
            failed = errno;
        free(to);
    }
    if (failed && temporary)
        unlink(temporary);
    if (failed && failed != EPIPE)
        complain(path, elsewhere, "cannot be written: %s", strerror(failed));
    free(temporary);
    return failed ? EXIT_BAD : EXIT_OK;
}

bool stdout_ok(void) { return fflush(stdout) == 0 && !ferror(stdout); }
