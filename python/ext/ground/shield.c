/* shield.c — sections that Ctrl-C does not interrupt.
 *
 *   with _core.shield:    # or koila__shield_enter() ... koila__shield_leave()
 *       ...               # a signal waits here; Python's handler runs after the section
 *
 * Python runs its signal handlers between any two bytecodes, even in a __del__ (where the exception
 * is lost) or between two statements that belong together. A shield delays the usual interrupting
 * signals below Python, so that a step either is complete or has changed nothing. Long work inside
 * calls koila__check_signals() where the step can still be undone; it delivers pending signals. A
 * second signal of the same kind is delivered at once: the user insists.
 *
 * Only the main thread is shielded: Python runs handlers nowhere else.
 */
#include "ground/shield.h"

#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static const int held_back[] = { SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1, SIGUSR2 };
enum { N_SIGNALS = sizeof held_back / sizeof *held_back };

static struct sigaction before[N_SIGNALS]; /* valid where `installed` is set */
static bool installed[N_SIGNALS];
static volatile sig_atomic_t arrived[N_SIGNALS], any_arrived;
/* Process that entered the section. A child forked inside it delivers signals at once. */
static pid_t owner;
static uint32_t depth;

_Thread_local bool koila__interrupted;

static void pass_on(int k)
{
    if (before[k].sa_flags & SA_SIGINFO) {
        siginfo_t info;
        memset(&info, 0, sizeof info);
        info.si_signo = held_back[k];
        before[k].sa_sigaction(held_back[k], &info, NULL);
    } else
        before[k].sa_handler(held_back[k]);
}

static void hold_back(int signal)
{
    for (int k = 0; k < N_SIGNALS; k++) {
        if (held_back[k] != signal)
            continue;
        const bool again = arrived[k];
        arrived[k] = !again;
        if (again || owner != getpid())
            pass_on(k);
        else
            any_arrived = 1;
    }
}

static bool in_main_thread(void) { return (pid_t)syscall(SYS_gettid) == getpid(); }

static void let_through(void)
{
    any_arrived = 0;
    for (int k = 0; k < N_SIGNALS; k++) {
        if (!arrived[k])
            continue;
        arrived[k] = 0;
        if (installed[k])
            pass_on(k);
    }
}

int koila__shield_enter(void)
{
    if (!in_main_thread())
        return 0;
    if (depth++)
        return 0;
    owner = getpid();
    for (int k = 0; k < N_SIGNALS; k++) {
        installed[k] = false;
        if (sigaction(held_back[k], NULL, &before[k]) < 0)
            continue;
        if (!(before[k].sa_flags & SA_SIGINFO) &&
            (before[k].sa_handler == SIG_DFL || before[k].sa_handler == SIG_IGN))
            continue;
        struct sigaction ours = { .sa_handler = hold_back,
                                  .sa_flags = before[k].sa_flags & (SA_RESTART | SA_ONSTACK) };
        sigemptyset(&ours.sa_mask);
        arrived[k] = 0;
        installed[k] = sigaction(held_back[k], &ours, NULL) == 0;
    }
    if (PyErr_CheckSignals() == 0)
        return 0; /* no handler of an earlier signal has raised */
    koila__shield_leave();
    return -1;
}

void koila__shield_leave(void)
{
    if (!in_main_thread() || --depth)
        return;
    for (int k = 0; k < N_SIGNALS; k++)
        if (installed[k])
            sigaction(held_back[k], &before[k], NULL);
    let_through();
    memset(installed, 0, sizeof installed);
}

int koila__check_signals(void)
{
    if (any_arrived && in_main_thread())
        let_through();
    if (PyErr_CheckSignals() == 0)
        return 0;
    koila__interrupted = true;
    return -1;
}

/* ---- as a context manager */

static PyObject *py_enter(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    return koila__shield_enter() < 0 ? NULL : Py_NewRef(self);
}

static PyObject *py_exit(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    koila__shield_leave();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "__enter__", py_enter, METH_NOARGS, NULL },
    { "__exit__", py_exit, METH_VARARGS, NULL },
    { NULL, NULL, 0, NULL },
};

static PyTypeObject shield_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.Shield",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = methods,
    .tp_doc = "with _core.shield: signals that arrive inside are handled after it",
};

int koila__shield_init(PyObject *module)
{
    if (PyType_Ready(&shield_type) < 0)
        return -1;
    PyObject *shield = PyObject_New(PyObject, &shield_type);
    const int status = shield ? PyModule_AddObjectRef(module, "shield", shield) : -1;
    Py_XDECREF(shield);
    return status;
}
