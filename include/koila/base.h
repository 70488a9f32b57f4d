/* koila/base.h — status codes, the caller's error buffer, and the host allocator.
 *
 * Every function that can fail returns koila_status (0 = ok). The last parameter `err` is the
 * caller's buffer, may be NULL, and is written on failure only; other outputs are untouched then.
 * The library keeps no global state, prints nothing, never exits.
 */
#ifndef KOILA_BASE_H
#define KOILA_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KOILA_API __attribute__((visibility("default")))
#else
#define KOILA_API
#endif

/* name, text. One list: enum, name and text come from it. */
#define KOILA_STATUS_MAP(X)                                                                        \
    X(OK, "ok")                                                                                    \
    X(OOM, "does not fit in the memory given")                                                     \
    X(BAD_INPUT, "input is malformed")                                                             \
    X(NO_MEMORY, "the host is out of memory")                                                      \
    X(UNSUPPORTED, "not supported")                                                                \
    X(BAD_ARGUMENT, "an argument is out of range")

typedef enum koila_status {
#define KOILA_STATUS_ENUM(name, text) KOILA_##name,
    KOILA_STATUS_MAP(KOILA_STATUS_ENUM)
#undef KOILA_STATUS_ENUM
} koila_status;

/** Name of a status, for example "BAD_INPUT". Static storage; "?" for an unknown value. */
KOILA_API const char *koila_status_name(koila_status status);
/** One line of text for a status. Static storage. */
KOILA_API const char *koila_status_text(koila_status status);

/** The caller's error buffer. `struct_size` = sizeof(koila_error) before the call (KOILA_ERROR_INIT
 * does it). */
typedef struct koila_error {
    uint32_t struct_size;
    koila_status code;
    uint64_t offset; /**< byte of the input at which it went wrong, or 0 */
    char text[240];  /**< NUL-terminated; cut if longer */
    /** OOM: how many bytes are missing; 0: not known, or not about memory. Written only if
     * `struct_size` has room for it. */
    uint64_t missing_bytes;
} koila_error;
#define KOILA_ERROR_INIT { (uint32_t)sizeof(koila_error), KOILA_OK, 0, { 0 }, 0 }

/** Host memory: one function for allocate, grow and free, as Lua's. `n == 0` frees and returns
 * NULL; otherwise like realloc. `old_n` is the current size of `p`. */
typedef struct koila_allocator {
    void *(*fn)(void *user, void *p, size_t old_n, size_t n);
    void *user;
} koila_allocator;

/** Version of the library, for example "0.2.0". */
KOILA_API const char *koila_version(void);

#ifdef __cplusplus
}
#endif
#endif
