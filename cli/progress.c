/* progress.c — one line of progress on a terminal. A timer writes it, so the work itself only
 * counts; nothing is shown in the first second, nor where standard error is no terminal. The
 * handler uses write() and numbers made by hand: the rest is not safe there. */
#include "cmd.h"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

volatile uint64_t progress_done;
static volatile uint64_t total;
static volatile sig_atomic_t shown;
static char doing[160];
static volatile size_t n_doing;

static size_t put_number(char *p, uint64_t n)
{
    char digits[20];
    size_t len = 0;
    do
        digits[len++] = (char)('0' + n % 10);
    while (n /= 10);
    for (size_t i = 0; i < len; i++)
        p[i] = digits[len - 1 - i];
    return len;
}

static void tick(int signal_number)
{
    char line[240];
    size_t n = 0;
    (void)signal_number;
    line[n++] = '\r';
    memcpy(line + n, doing, n_doing);
    n += n_doing;
    if (total) {
        line[n++] = ' ';
        n += put_number(line + n, progress_done < total ? progress_done / (total / 100 + 1) : 100);
        memcpy(line + n, " % ", 3);
        n += 3;
    } else {
        memcpy(line + n, " ... ", 5);
        n += 5;
    }
    shown = 1;
    if (write(2, line, n) < 0) { /* it is only a progress line */
    }
}

static void set_timer(long first_us, long every_us)
{
    struct itimerval t = { { every_us / 1000000, every_us % 1000000 },
                           { first_us / 1000000, first_us % 1000000 } };
    setitimer(ITIMER_REAL, &t, NULL);
}

void progress(const char *verb, const char *what, uint64_t of)
{
    static bool on;
    if (!on && (!verb || !isatty(2)))
        return;
    sigset_t alarm, before;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    sigprocmask(SIG_BLOCK, &alarm, &before);
    if (shown) { /* blanks, not an escape: any terminal knows those */
        fprintf(stderr, "\r%*s\r", (int)n_doing + 8, "");
        shown = 0;
    }
    progress_done = 0;
    total = of;
    if (verb) {
        const char *path = what ? what : "";
        const char *slash = strrchr(path, '/');
        const char *name = slash ? slash + 1 : path;
        int n = snprintf(doing, sizeof doing, "koila: %s", verb);
        /* a plain name only: it goes to a terminal */
        for (size_t i = 0; name[i] && i < 60 && n < (int)sizeof doing - 2; i++) {
            if (!i)
                doing[n++] = ' ';
            doing[n++] =
                (unsigned char)name[i] < 0x20 || (unsigned char)name[i] >= 0x7f ? '?' : name[i];
        }
        n_doing = (size_t)n;
    }
    if (verb && !on) {
        struct sigaction a = { .sa_handler = tick, .sa_flags = SA_RESTART };
        sigaction(SIGALRM, &a, NULL);
        set_timer(1000000, 200000);
    }
    if (!verb)
        set_timer(0, 0);
    on = verb != NULL;
    sigprocmask(SIG_SETMASK, &before, NULL);
}
