/* got.h — redirect a loaded shared object's calls to an imported function, by writing its GOT
 * slots.
 *
 * A call from libX.so to an imported f goes through one or more pointer-sized slots that ld.so
 * fills in (JUMP_SLOT, GLOB_DAT, absolute data relocations). We find those slots in the object's
 * own dynamic section and store our function there. This needs no headers of the other library, no
 * LD_PRELOAD and no privileges, and only that library's calls are seen. Names are compared without
 * their version. Linux, ELF64, x86-64 and aarch64.
 */
#ifndef KOILA_EXT_GOT_H
#define KOILA_EXT_GOT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct koila__got_slot {
    void **at;      /* where the pointer is kept */
    void *original; /* the pointer before us */
    void *ours;
} koila__got_slot;

#define KOILA__GOT_MAX 128
typedef struct koila__got_set {
    koila__got_slot slots[KOILA__GOT_MAX];
    size_t n;
} koila__got_set;

/* Redirects `symbol` to `ours` in every loaded object whose file name starts with `library` (NULL:
 * any), except this one. The slots are added to `set`, each only once. Returns the number of slots
 * found, or -1 if one could not be written or there are too many. */
int koila__got_patch(koila__got_set *set, const char *library, const char *symbol, void *ours);
/* Do all slots that were redirected to `ours` (NULL: all of the set) still hold it? False when
 * there are none. */
bool koila__got_holds(const koila__got_set *set, const void *ours);
/* Restores `original` in the slots that still hold `ours`, and removes them from the set. */
void koila__got_restore(koila__got_set *set, const void *ours);
/* Path of the loaded object whose file name starts with `library`; false if there is none. */
bool koila__got_path(const char *library, char *path, size_t n_path);
/* The address of an exported function of a loaded object, or NULL. */
void *koila__got_symbol(const char *path, const char *symbol);
/* The number of objects ever loaded. When it has changed, there may be new slots. */
uint64_t koila__got_n_loads(void);

#endif
