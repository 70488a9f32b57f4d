/* Any text as PYTORCH_CUDA_ALLOC_CONF: settings that a cache takes, or a message and nothing
 * changed. */
#include <stdlib.h>
#include <string.h>

#include "koila/koila.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char *text = malloc(n + 1);
    if (!text)
        return 0;
    memcpy(text, data, n);
    text[n] = 0;
    for (int strict = 0; strict < 2; strict++) {
        koila_cache_config c, before;
        koila_error e = KOILA_ERROR_INIT;
        koila_cache_config_init(&c, NULL);
        memcpy(&before, &c, sizeof c);
        if (koila_cache_config_parse(&c, text, strict, &e)) {
            if (memcmp(&c, &before, sizeof c) || !e.text[0])
                abort();
            continue;
        }
        koila_cache *cache = NULL;
        uint64_t addr;
        if (koila_cache_new(&c, NULL, &cache, &e))
            continue;
        (void)koila_cache_malloc(cache, 3 << 20, 0, KOILA_POOL_DEFAULT, &addr);
        koila_cache_free(cache);
    }
    free(text);
    return 0;
}
