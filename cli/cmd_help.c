/* cmd_help.c — koila help [COMMAND] */
#include "cmd.h"

#define SNAPSHOT_HELP                                                                              \
    "  SNAPSHOT          file of torch.cuda.memory._dump_snapshot(), pickle or JSON; - is "        \
    "standard input. It is read as data, never executed\n"                                         \
    "  --device N        of a snapshot with several; without it the first that recorded "          \
    "something\n"                                                                                  \
    "  --torch V         rules of this torch version, such as 2.10; without it inferred from the " \
    "file\n"
#define LIMITS_HELP                                                                                \
    "  --max-memory SIZE host memory that reading may take (at most 32 times the file and 64 "     \
    "MiB)\n"                                                                                       \
    "  --max-string SIZE longest string, without it 16MiB;   --max-nesting N  deepest nesting, "   \
    "without it 64\n"

static const struct {
    const char *verb, *text;
} details[] = {
    { "simulate",
      "Gives the recorded requests to a model of PyTorch's caching allocator. Says whether every "
      "address and segment came out as recorded, what the\n"
      "peaks were and where bytes were lost then; with --memory or --conf also what would have "
      "happened.\n\n" SNAPSHOT_HELP
      "  --memory SIZE     would it fit in a device of this much? exit 1 if not\n"
      "  --outside SIZE    of that, taken by others: context, other processes, libraries\n"
      "  --conf KEY=VALUE  with these settings of PYTORCH_CUDA_ALLOC_CONF, such as "
      "max_split_size_mb=128,expandable_segments=True\n"
      "  --check           exit 1 unless the replay is exact\n"
      "  --events FILE     every event with the state after it, tab-separated\n"
      "  --json            one JSON object, byte counts as integers\n" LIMITS_HELP
      "\nThe verdict is one of: exact; exact with N external decisions (such as a call of "
      "empty_cache, which a snapshot does not record);\n"
      "differs at event i, with what was expected and what recorded; not checkable, with the "
      "reason.\n\n"
      "  koila simulate step.pickle --memory 24GiB --conf expandable_segments=True\n" },
    { "report",
      "One page without scripts or network: memory over time, segments at the peak and at the end, "
      "the largest live allocations with their stacks,\n"
      "where bytes were lost. Never more than 5 MiB, however long the recording.\n\n" SNAPSHOT_HELP
      "  -o FILE           where to; - is standard output\n"
      "  --top N           so many of the largest allocations, without it 30, at most 200\n"
      "  --memory SIZE     of the device: draws the limit. Without it the limit is known only if "
      "the recording ran out of memory\n"
      "  --outside SIZE    of that, taken by others: context, other processes, "
      "libraries\n" LIMITS_HELP "\n  koila report step.pickle -o report.html\n" },
    { "plan", "Peak memory of a step recorded with plan.save(\"step.kgraph\"), on a GPU that need "
              "not be here: allocated, reserved, and of the whole device.\n"
              "Whether it fits is judged by the high end of each number.\n\n"
              "  --gpu NAME|FILE   a built-in profile, or a file of koila.measure_device(); "
              "--list-gpus names them\n"
              "  --memory SIZE     of the device, if not all of it\n"
              "  --conf KEY=VALUE  settings of PYTORCH_CUDA_ALLOC_CONF\n"
              "  --slice N|auto    rows of the batch at a time; auto: the most that fit\n"
              "  --sdpa NAME       attention back end: auto, flash, efficient, math, cudnn\n"
              "  --optimizer KIND  none, sgd, momentum, adam or adamw, with :foreach, :fused or "
              ":loop; --weight-decay, --amsgrad\n"
              "  --clip-grad-norm  gradients are clipped after backward, whose temporaries count\n"
              "  --autocast        half-precision leaves are casts of float32 parameters: those "
              "and float32 gradients count too\n"
              "  --ddp             DistributedDataParallel's buckets count\n"
              "  --grad-scaler     torch.amp.GradScaler's numbers count\n"
              "  --fsdp            is refused: what a sharded model needs has not been measured\n"
              "  --cublas-workspace CONFIG  as CUBLAS_WORKSPACE_CONFIG is set where the step runs, "
              "such as :4096:8\n"
              "  --cublaslt-workspace KIB   as CUBLASLT_WORKSPACE_SIZE is set there\n"
              "  --cublas-cache    TORCH_CUBLAS_WORKSPACE_CACHE is 1 there\n"
              "  --torch V         rules of this torch version; without it the newest known\n"
              "  --json            one JSON object\n\n"
              "  koila plan step.kgraph --gpu a100-40gb --optimizer adamw --slice auto\n" },
    { "run",
      "Runs a training script as it is, or with -m a module, under koila's settings. What follows "
      "the script is the script's own.\n\n"
      "  --budget SIZE     what torch may hold, as KOILA_BUDGET: 20GiB, or 80% of what is free\n"
      "  --micro-batch N   rows of a slice, or fastest, as KOILA_MICRO_BATCH\n"
      "  --lazy            batches of every torch.utils.data.DataLoader are lazy, along their "
      "first dimension; where the script says lazy() itself this is not needed\n"
      "  --log             what koila logs goes to standard error\n"
      "  --page FILE.html  the last plan as a page, also when the script fails\n\n"
      "  koila run --budget 20GiB --lazy --page step.html train.py\n" },
};

const char *command_details(const char *verb)
{
    for (size_t i = 0; i < sizeof details / sizeof *details; i++)
        if (!strcmp(details[i].verb, verb))
            return details[i].text;
    return "";
}

/* What the exit code 1 of a command may say, too. */
static const char *one_means_also(const char *verb)
{
    if (!strcmp(verb, "simulate"))
        return " (with --check: not exact)";
    return strcmp(verb, "run") ? "" : " or the script fails (its own exit code is kept)";
}

int cmd_help(int argc, char **argv)
{
    if (argc > 0) {
        for (const command *c = commands; c->verb; c++) {
            if (strcmp(c->verb, argv[0]))
                continue;
            printf("%s\n\nusage: %s\n", c->line, c->usage);
            if (*command_details(c->verb))
                printf("\n%s\nSIZE is bytes, or has a unit: 24GiB is 24 x 2^30, 24GB is 24 x "
                       "10^9.\nexit 0 ok, 1 does not fit%s, 2 bad input or usage\n",
                       command_details(c->verb), one_means_also(c->verb));
            return EXIT_OK;
        }
        return no_command(argv[0]);
    }
    printf("koila %s: know what a PyTorch training step needs before you run it\n\nusage: koila "
           "COMMAND ...\n\n",
           koila_version());
    for (const command *c = commands; c->verb; c++)
        printf("  %-9s %s\n", c->verb, c->line);
    printf("\n  SNAPSHOT  file from torch.cuda.memory._dump_snapshot(), pickle or JSON; - is "
           "standard input. It is read, never executed.\n"
           "  SIZE      bytes, or with a unit: 24GiB, 24GB\n"
           "  exit      0 ok, 1 does not fit (with --check: not exact), 2 bad input or usage\n\n"
           "koila help COMMAND says more; man koila says all.\n");
    return EXIT_OK;
}
