/* Any text as a device profile: a device whose fields are in range, or a message. */
#include <stdlib.h>

#include "koila/koila.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    koila_device *d = NULL;
    koila_error e = KOILA_ERROR_INIT;
    if (koila_device_open((const char *)data, n, NULL, &d, &e)) {
        if (d || !e.text[0] || e.offset > n)
            abort();
        return 0;
    }
    for (int f = 0; f < KOILA_N_DEVICE_FIELDS; f++) {
        koila_device_value v = koila_device_get(d, (koila_device_field)f);
        if (v.spread > v.value || !v.how[0])
            abort();
    }
    koila_device_free(d);
    return 0;
}
