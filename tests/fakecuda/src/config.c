#define _GNU_SOURCE
#include "device.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct config the;
static pthread_once_t once = PTHREAD_ONCE_INIT;

size_t parse_bytes(const char *text, size_t otherwise)
{
    if (!text || !*text)
        return otherwise;
    char *end;
    double n = strtod(text, &end);
    while (*end == ' ')
        end++;
    switch (*end) {
    case 'k':
    case 'K':
        n *= 1 << 10;
        break;
    case 'm':
    case 'M':
        n *= 1 << 20;
        break;
    case 'g':
    case 'G':
        n *= 1 << 30;
        break;
    }
    return n > 0 ? (size_t)n : otherwise;
}

static void read_environment(void)
{
    const char *s = getenv("FAKECUDA_DEVICES");
    int n = s && *s ? atoi(s) : 1;
    if (n < 0)
        n = 0;
    the.n_devices = n > MAX_DEVICES ? MAX_DEVICES : n;
    the.total_bytes = parse_bytes(getenv("FAKECUDA_MEMORY"), (size_t)80994 << 20);
    the.context_bytes = parse_bytes(getenv("FAKECUDA_CONTEXT"), (size_t)520 << 20);
    if (the.context_bytes > the.total_bytes / 2)
        the.context_bytes = the.total_bytes / 2;
    s = getenv("FAKECUDA_CALL_US");
    the.call_us = s && *s ? strtoull(s, NULL, 10) : 5;
    s = getenv("FAKECUDA_KERNEL_US");
    the.kernel_us = s && *s ? strtoull(s, NULL, 10) : 0;
    the.others = getenv("FAKECUDA_OTHERS");
    s = getenv("FAKECUDA_ADDRESSES");
    the.addresses = s && *s ? *s : 'f';
    s = getenv("FAKECUDA_TRACE");
    the.trace = s && *s && strcmp(s, "0") != 0;
}

const struct config *config(void)
{
    pthread_once(&once, read_environment);
    return &the;
}

void trace(const char *format, ...)
{
    if (!config()->trace)
        return;
    va_list args;
    va_start(args, format);
    fputs("fakecuda: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

/* Convolutions are asked of the cuDNN stub by its older interface, which has named functions; the
 * newer one is a graph compiler. Set before torch reads it. */
__attribute__((constructor)) static void choose_older_cudnn(void)
{
    setenv("TORCH_CUDNN_V8_API_DISABLED", "1", 0);
}
