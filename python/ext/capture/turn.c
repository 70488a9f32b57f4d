/* turn.c — one thread at a time records in a tape or runs it.
 *
 * The GIL passes to another thread wherever an operator runs Python: for a call never seen before,
 * for one that a function decides, and all through a run. Another thread's operator on the same
 * tape waits for its turn then, with the GIL released. A turn is one recorded operator, or one run;
 * never a whole backward, whose operators autograd's device threads record.
 */
#include "capture/capture.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

enum { WAIT_NANOSECONDS = 10000000 }; /* then it looks again; a turn that ends wakes it sooner */

/* All threads that wait, under the GIL. */
static struct waiter {
    unsigned long thread;
    const koila__tape *tape;
    struct waiter *next;
} *waiters;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn_ended = PTHREAD_COND_INITIALIZER;

/* Would this thread wait for itself: has it a turn that the holder of `t`, or whoever that waits
 * for, waits for? */
static bool is_circle(const koila__tape *t, unsigned long me)
{
    for (;;) {
        const struct waiter *w = waiters;
        while (w && w->thread != t->thread)
            w = w->next;
        if (!w)
            return false;
        t = w->tape;
        if (t->thread == me)
            return true;
    }
}

static void wait_a_while(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WAIT_NANOSECONDS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&lock);
    pthread_cond_timedwait(&turn_ended, &lock, &until);
    pthread_mutex_unlock(&lock);
    Py_END_ALLOW_THREADS;
}

static int wait_for_turn(koila__tape *t, unsigned long me)
{
    struct waiter w = { me, t, waiters };
    int status = 0;
    if (is_circle(t, me)) {
        koila__unsupported("two threads wait for each other: each needs a lazy tensor of the step "
                           "that the other one computes now. Make it plain with x.torch() in the "
                           "thread that made it, before another thread uses it");
        return -1;
    }
    waiters = &w;
    while (status == 0 && t->n_entered && t->thread != me) {
        wait_a_while();
        status = PyErr_CheckSignals();
    }
    struct waiter **at = &waiters;
    while (*at != &w)
        at = &(*at)->next;
    *at = w.next;
    return status;
}

bool koila__tape_is_busy(const koila__tape *t)
{
    return t->n_entered && t->thread != PyThread_get_thread_ident();
}

int koila__tape_enter(koila__tape *t)
{
    const unsigned long me = PyThread_get_thread_ident();
    if (t->n_entered && t->thread != me && wait_for_turn(t, me) < 0)
        return -1;
    t->thread = me;
    t->n_entered++;
    return 0;
}

void koila__tape_leave(koila__tape *t)
{
    koila_assert(t->n_entered && t->thread == PyThread_get_thread_ident());
    t->n_entered--;
    if (t->n_entered || !waiters)
        return;
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&turn_ended);
    pthread_mutex_unlock(&lock);
}
