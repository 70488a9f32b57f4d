/* module.c — the module koila._core. Each part of the extension adds its names in one function. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "koila/koila.h"

#include "run/run.h"
#include "memlab/memlab.h"
#include "ground/accumulate.h"
#include "ground/autograd_nodes.h"
#include "ground/backward_form.h"
#include "ground/context.h"
#include "ground/errors.h"
#include "ground/random.h"
#include "ground/settings.h"
#include "ground/shield.h"
#include "ground/cpu_bytes.h"
#include "ground/limits.h"

int koila__module_add(PyObject *m); /* capture/capture_module.c */

static int (*const memlab[])(PyObject *) = {
    koila__events_add_module,       koila__accelerators_add_module, koila__sites_add_module,
    koila__measure_add_module,      koila__line_table_add_module,   koila__timeline_add_module,
    koila__find_tensors_add_module, koila__report_add_module,
};

static int exec(PyObject *m)
{
    if (PyModule_AddStringConstant(m, "__version__", koila_version()) < 0)
        return -1;
    if (koila__module_add(m) < 0)
        return -1;
    if (koila__shield_init(m) < 0 || koila__random_add_module(m) < 0)
        return -1;
    if (koila__errors_add_module(m) < 0 || koila__context_add_module(m) < 0 ||
        koila__settings_add_module(m) < 0 || koila__run_module_add(m) < 0 ||
        koila__aside_add_module(m) < 0)
        return -1;
    if (koila__cpu_bytes_add_module(m) < 0 || koila__resident_add_module(m) < 0)
        return -1;
    if (koila__autograd_nodes_add(m) < 0 || koila__backward_form_add(m) < 0 ||
        koila__accumulate_add(m) < 0)
        return -1;
    for (size_t i = 0; i < sizeof memlab / sizeof *memlab; i++)
        if (memlab[i](m) < 0)
            return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    { Py_mod_exec, exec },
    { 0, NULL },
};

static struct PyModuleDef def = { PyModuleDef_HEAD_INIT, .m_name = "koila._core",
                                  .m_doc = "The C part of koila.", .m_size = 0, .m_slots = slots };

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&def); }
