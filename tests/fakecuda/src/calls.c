/* How often functions were called that begin with COUNT_CALL(): tests compare programs by them. */
#include "device.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct call_count *all; /* those that were called */

void count_call(struct call_count *function)
{
    if (__atomic_fetch_add(&function->n, 1, __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&lock);
    function->next = all;
    all = function;
    pthread_mutex_unlock(&lock);
}

/* The name of the i-th function that was called, and how often; NULL: there are no more. Others
 * may come before it between two calls. */
const char *fakecuda_called(int i, unsigned long long *n)
{
    pthread_mutex_lock(&lock);
    const struct call_count *function = all;
    for (; function && i; i--)
        function = function->next;
    pthread_mutex_unlock(&lock);
    if (!function)
        return NULL;
    *n = __atomic_load_n(&function->n, __ATOMIC_RELAXED);
    return function->name;
}
