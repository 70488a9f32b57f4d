/* cmd.h — the table of commands, and what they share. The command line sees only koila.h.
 *
 * Exit codes: 0 ok, 1 does not fit (with --check: differs or not checkable), 2 bad input or usage.
 * Results go to stdout, errors and progress to stderr. All text that comes from a file is shown
 * with its control characters made visible. No colours, so NO_COLOR holds.
 */
#ifndef KOILA_CLI_CMD_H
#define KOILA_CLI_CMD_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "koila/koila.h"

enum { EXIT_OK = 0, EXIT_NO_FIT = 1, EXIT_BAD = 2 };

/* verb, function, one line, usage. What the options mean is in cmd_help.c. */
#define COMMANDS(X)                                                                                \
    X("plan", cmd_plan, "Predict a recorded step's memory on a GPU, without the GPU",              \
      "koila plan STEP.kgraph --gpu NAME|FILE [--memory SIZE] [--conf KEY=VALUE,…] [--slice "      \
      "N|auto] [--sdpa NAME] [--optimizer KIND] [--torch V] [--json]\n       koila plan "          \
      "--list-gpus")                                                                               \
    X("simulate", cmd_simulate,                                                                    \
      "Replay a memory snapshot; what if memory or settings were different",                       \
      "koila simulate SNAPSHOT [--device N] [--torch V] [--memory SIZE] [--outside SIZE] [--conf " \
      "KEY=VALUE,…] [--check] [--events FILE] [--json]")                                           \
    X("report", cmd_report, "Write a memory snapshot as one web page",                             \
      "koila report SNAPSHOT -o report.html [--top 30] [--device N] [--torch V] [--memory SIZE] "  \
      "[--outside SIZE]")                                                                          \
    X("run", cmd_run, "Run a training script within a budget, without changing it",                \
      "koila run [--budget SIZE] [--micro-batch N|fastest] [--lazy] [--log] [--page FILE.html] "   \
      "SCRIPT.py|-m MODULE [ARGS]")                                                                \
    X("help", cmd_help, "This text, or a command's", "koila help [COMMAND]")

typedef struct command {
    const char *verb;
    int (*run)(int argc, char **argv);
    const char *line, *usage;
} command;
#define COMMAND_DECLARE(verb, fn, line, usage) int fn(int argc, char **argv);
COMMANDS(COMMAND_DECLARE)
#undef COMMAND_DECLARE
extern const command commands[];

/* ---- messages */
/* "koila: SUBJECT: text", then, if `todo` is not NULL, a line of what to do. Returns EXIT_BAD. */
int complain(const char *subject, const char *todo, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
/* Prints a library error: what, at which byte if it has one, what to do (`todo`, if nothing better
 * is known). Returns EXIT_BAD. */
int complain_about(const char *subject, const koila_error *e, const char *todo);
int usage_of(const char *verb, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* What `koila help VERB` says of the command's options; empty if there are none. */
const char *command_details(const char *verb);
/* These complain of a command or an option that there is not, say which was meant if one is near,
 * and return EXIT_BAD. The options are those that the help names. */
int no_command(const char *verb);
int no_option(const char *verb, const char *name);

/* ---- options: option(&a, "--memory") is its value, from "--memory X" or "--memory=X" */
typedef struct args {
    const char *verb;
    int n, at;
    char **v;
    const char *value, *positional;
    bool bad;
} args;
/* false at the end; *name: the option, or NULL and a->positional */
bool args_next(args *a, const char **name);
/* of the option just returned; NULL (and a->bad) if missing */
const char *args_value(args *a);
/* Its value as a number of bytes, at least `least`. EXIT_OK, also if it is missing (and a->bad);
 * else complained: "say EXAMPLE". */
int args_size(args *a, const char *name, uint64_t least, const char *example, uint64_t *out);

/* ---- numbers */
bool parse_size(const char *s, uint64_t *out); /* bytes, GiB MiB KiB (2^n), GB MB kB (10^n) */
bool parse_count(const char *s, uint64_t max, uint64_t *out);
const char *grouped(uint64_t n, char out[32]); /* 184,213 */
const char *gib(uint64_t n, char out[32]);     /* "17.42 GiB", "311.5 MiB", "512 B" */

/* ---- text from files */
void put_plain(FILE *f, const char *s); /* control characters made visible */
void put_json(FILE *f, const char *s);  /* with its quotes */
void put_html(FILE *f, const char *s);  /* escaped for element content and quoted attributes */

/* ---- snapshots */
typedef struct snapshot_options { /* of every command that reads one */
    const char *path, *torch;
    uint64_t device; /* UINT64_MAX: the first that recorded something */
    koila_limits limits;
} snapshot_options;
#define SNAPSHOT_OPTIONS                                                                           \
    {                                                                                              \
        .device = UINT64_MAX, .limits = { .struct_size = sizeof(koila_limits) }                    \
    }
/* Is `name` one of theirs? *code: EXIT_OK, or EXIT_BAD and complained. */
bool snapshot_option(snapshot_options *o, args *a, const char *name, int *code);
/* Opens it, and replaces o->device = UINT64_MAX by a device. NULL: complained. */
koila_snapshot *open_snapshot(const char *verb, snapshot_options *o, koila_cache_config *conf);
/* the first frame that looks like the user's, else the first */
bool user_frame(const koila_snapshot *s, uint32_t stack, koila_frame *out);

/* ---- progress: a line on standard error if that is a terminal, from the second second on. NULL
 * ends it. `of`: progress_done's end, 0 = unknown */
void progress(const char *doing, const char *what, uint64_t of);
extern volatile uint64_t progress_done;

/* ---- files */
/* malloc'ed, NUL-terminated; at most 1 GiB */
char *read_text(const char *path, size_t *n, koila_error *e);
/* A temporary file beside `path`, renamed by finish_file; a device or a pipe is written as it is
 * (*temporary NULL). NULL: complained. */
FILE *create_beside(const char *path, char **temporary);
/* EXIT_OK or EXIT_BAD; frees temporary */
int finish_file(FILE *f, char *temporary, const char *path);
bool stdout_ok(void); /* flushes; a closed pipe is quiet but false */

#endif
