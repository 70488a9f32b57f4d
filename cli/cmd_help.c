/* cmd_help.c — koila help [COMMAND] */
#include "cmd.h"

int cmd_help(int argc, char **argv)
{
    if (argc > 0) {
        for (const command *c = commands; c->verb; c++)
            if (!strcmp(c->verb, argv[0])) {
                printf("%s\n\nusage: %s\n", c->line, c->usage);
                return EXIT_OK;
            }
        return complain(NULL, "Try koila --help.", "no command '%s'", argv[0]);
    }
    printf("koila %s: know what a PyTorch training step needs before you run it\n\nusage: koila COMMAND ...\n\n", koila_version());
    for (const command *c = commands; c->verb; c++) printf("  %-9s %s\n", c->verb, c->line);
    printf("\n  SNAPSHOT  file from torch.cuda.memory._dump_snapshot(), pickle or JSON; - is standard input. It is read, never executed.\n"
           "  SIZE      bytes, or with a unit: 24GiB, 24GB\n"
           "  exit      0 ok, 1 does not fit (with --check: not exact), 2 bad input or usage\n\n"
           "koila help COMMAND says more; man koila says all.\n");
    return EXIT_OK;
}
