/* cmd_run.c — koila run: needs Python, and is the Python package's (python/koila/_launch.py). The
 * koila of that package answers it before it comes here. */
#include "cmd.h"

int cmd_run(int argc, char **argv)
{
    if (argc > 0 && (!strcmp(argv[0], "--help") || !strcmp(argv[0], "-h"))) {
        char verb[] = "run", *of_run[] = { verb, NULL };
        return cmd_help(1, of_run);
    }
    return complain("run", "Install the Python package, and say: python -m koila run SCRIPT.py",
                    "runs Python programs, and this koila was installed without Python");
}
