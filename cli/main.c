/* main.c — finds the command in cmd.h's table and runs it. */
#include "cmd.h"

#include <errno.h>
#include <signal.h>

const command commands[] = {
#define COMMAND_ROW(verb, fn, line, usage) { verb, fn, line, usage },
    COMMANDS(COMMAND_ROW)
#undef COMMAND_ROW
        { NULL, NULL, NULL, NULL },
};

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of write, and quiet */
    const char *verb = argc > 1 ? argv[1] : "help";
    int code = -1;
    if (!strcmp(verb, "--help") || !strcmp(verb, "-h"))
        verb = "help";
    if (!strcmp(verb, "--version")) {
        printf("koila %s\n", koila_version());
        code = EXIT_OK;
    }
    for (const command *c = commands; c->verb && code < 0; c++)
        if (!strcmp(c->verb, verb))
            code = c->run(argc > 1 ? argc - 2 : 0, argv + (argc > 1 ? 2 : 1));
    if (code < 0)
        return no_command(verb);
    errno = 0;
    if (!stdout_ok()) {
        if (errno && errno != EPIPE)
            return complain("standard output", NULL, "cannot be written: %s", strerror(errno));
        return code ? code : EXIT_BAD;
    }
    return code;
}
