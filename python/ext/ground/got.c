/* got.c — see got.h.
 *
 * A slot may lie in a page that RELRO made read-only. So its protection is read from
 * /proc/self/maps, the page is made writable for one aligned, atomic store, and the protection is
 * restored. A concurrent call through the slot reads the old pointer or the new one, and both are
 * valid.
 */
#include "ground/got.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"

#if defined(__x86_64__)
static bool is_slot_type(uint64_t type)
{
    return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT || type == R_X86_64_64;
}
#elif defined(__aarch64__)
static bool is_slot_type(uint64_t type)
{
    return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT || type == R_AARCH64_ABS64;
}
#else
static bool is_slot_type(uint64_t type) { return false; }
#endif

/* The bits that mprotect() takes for "rwx". */
static int protection_bits(const char *rwx)
{
    int prot = PROT_NONE;
    if (rwx[0] == 'r')
        prot |= PROT_READ;
    if (rwx[1] == 'w')
        prot |= PROT_WRITE;
    if (rwx[2] == 'x')
        prot |= PROT_EXEC;
    return prot;
}

/* Protection of the mapping that holds `at`, from /proc/self/maps; -1 when unknown. */
static int protection_of(const void *at)
{
    FILE *f = fopen("/proc/self/maps", "re");
    if (!f)
        return -1;
    char line[512];
    int prot = -1;
    while (prot < 0 && fgets(line, sizeof line, f)) {
        unsigned long lo, hi;
        char rwx[5];
        if (sscanf(line, "%lx-%lx %4s", &lo, &hi, rwx) != 3)
            continue;
        if ((uintptr_t)at >= lo && (uintptr_t)at < hi)
            prot = protection_bits(rwx);
    }
    fclose(f);
    return prot;
}

static bool store(void **at, void *value)
{
    int prot = protection_of(at);
    if (prot < 0)
        return false;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *start = (void *)((uintptr_t)at & ~(uintptr_t)(page - 1));
    if (!(prot & PROT_WRITE) && mprotect(start, page, prot | PROT_WRITE) != 0)
        return false;
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
    if (!(prot & PROT_WRITE))
        mprotect(start, page, prot);
    return true;
}

static bool named(const char *path, const char *library)
{
    const char *slash = strrchr(path, '/');
    return strncmp(slash ? slash + 1 : path, library, strlen(library)) == 0;
}

typedef struct patch_request {
    koila__got_set *set;
    const char *library, *symbol;
    void *ours;
    int n_found;
    bool failed;
} patch_request;

/* Index of the set's slot at this address, or the index at which it would be added. */
static size_t slot_index(const koila__got_set *set, void **at)
{
    size_t k = 0;
    while (k < set->n && set->slots[k].at != at)
        k++;
    return k;
}

/* Redirects one slot and remembers its original pointer. */
static bool patch_slot(patch_request *r, void **at)
{
    koila__got_set *set = r->set;
    const size_t k = slot_index(set, at);
    const bool known = k < set->n;
    if (!known && set->n == KOILA__GOT_MAX)
        return false;
    void *before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    /* counted before the store, since our function may run at once */
    if (!known)
        set->slots[k] = (koila__got_slot){ at, before, r->ours };
    if (before != r->ours && !store(at, r->ours))
        return false;
    if (!known)
        set->n++;
    koila_assert(set->n <= KOILA__GOT_MAX);
    r->n_found++;
    return true;
}

/* The relocation tables in an object's dynamic section: addresses, 0 where an entry is missing. */
typedef struct dynamic_info {
    uintptr_t symtab, strtab;
    struct {
        uintptr_t at;
        size_t n_bytes;
    } rela, jmprel;
} dynamic_info;

static dynamic_info read_dynamic(const ElfW(Dyn) * dyn)
{
    dynamic_info d = { 0 };
    for (; dyn->d_tag != DT_NULL; dyn++)
        switch (dyn->d_tag) {
        case DT_SYMTAB:
            d.symtab = dyn->d_un.d_ptr;
            break;
        case DT_STRTAB:
            d.strtab = dyn->d_un.d_ptr;
            break;
        case DT_RELA:
            d.rela.at = dyn->d_un.d_ptr;
            break;
        case DT_RELASZ:
            d.rela.n_bytes = dyn->d_un.d_val;
            break;
        case DT_JMPREL:
            d.jmprel.at = dyn->d_un.d_ptr;
            break;
        case DT_PLTRELSZ:
            d.jmprel.n_bytes = dyn->d_un.d_val;
            break;
        }
    return d;
}

static void patch_table(patch_request *r, uintptr_t base, const dynamic_info *d, uintptr_t table,
                        size_t n_bytes)
{
    const ElfW(Rela) *rela = (const ElfW(Rela) *)table;
    const ElfW(Sym) *symtab = (const ElfW(Sym) *)d->symtab;
    const char *strtab = (const char *)d->strtab;
    const size_t n = table ? n_bytes / sizeof *rela : 0;
    for (size_t i = 0; i < n && !r->failed; i++) {
        if (!is_slot_type(ELF64_R_TYPE(rela[i].r_info)))
            continue;
        uint64_t sym = ELF64_R_SYM(rela[i].r_info);
        if (!sym || strcmp(strtab + symtab[sym].st_name, r->symbol) != 0)
            continue;
        r->failed = !patch_slot(r, (void **)(base + rela[i].r_offset));
    }
}

/* The dynamic section of an object; NULL: it has none, or it is this extension. */
static const ElfW(Dyn) * dynamic_of(const struct dl_phdr_info *info)
{
    const uintptr_t base = info->dlpi_addr;
    const uintptr_t self = (uintptr_t)&dynamic_of;
    const ElfW(Dyn) *dyn = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *ph = &info->dlpi_phdr[i];
        if (ph->p_type == PT_DYNAMIC)
            dyn = (const ElfW(Dyn) *)(base + ph->p_vaddr);
        if (ph->p_type == PT_LOAD && self >= base + ph->p_vaddr &&
            self < base + ph->p_vaddr + ph->p_memsz)
            return NULL;
    }
    return dyn;
}

static int patch_object(struct dl_phdr_info *info, size_t size, void *user)
{
    patch_request *r = user;
    const uintptr_t base = info->dlpi_addr;
    if (r->library && !named(info->dlpi_name, r->library))
        return 0;
    const ElfW(Dyn) *dyn = dynamic_of(info);
    if (!dyn)
        return 0;
    const dynamic_info d = read_dynamic(dyn);
    /* ld.so has relocated these in place. Only the vdso has plain offsets; it imports nothing, so
     * skip it. */
    if (!d.symtab || !d.strtab || d.symtab < base)
        return 0;
    patch_table(r, base, &d, d.rela.at, d.rela.n_bytes);
    patch_table(r, base, &d, d.jmprel.at, d.jmprel.n_bytes);
    return r->failed;
}

int koila__got_patch(koila__got_set *set, const char *library, const char *symbol, void *ours)
{
    patch_request r = { set, library, symbol, ours, 0, false };
    dl_iterate_phdr(patch_object, &r);
    return r.failed ? -1 : r.n_found;
}

bool koila__got_holds(const koila__got_set *set, const void *ours)
{
    bool any = false;
    for (size_t i = 0; i < set->n; i++) {
        if (ours && set->slots[i].ours != ours)
            continue;
        any = true;
        if (__atomic_load_n(set->slots[i].at, __ATOMIC_RELAXED) != set->slots[i].ours)
            return false;
    }
    return any;
}

void koila__got_restore(koila__got_set *set, const void *ours)
{
    size_t n_kept = 0;
    for (size_t i = 0; i < set->n; i++) {
        koila__got_slot s = set->slots[i];
        if (s.ours == ours) {
            if (__atomic_load_n(s.at, __ATOMIC_SEQ_CST) == ours)
                store(s.at, s.original);
        } else {
            set->slots[n_kept++] = s;
        }
    }
    set->n = n_kept;
}

typedef struct path_request {
    const char *library;
    char *path;
    size_t n_path;
} path_request;
static int path_of_object(struct dl_phdr_info *info, size_t size, void *user)
{
    path_request *r = user;
    return named(info->dlpi_name, r->library) &&
           snprintf(r->path, r->n_path, "%s", info->dlpi_name) < (int)r->n_path;
}
bool koila__got_path(const char *library, char *path, size_t n_path)
{
    path_request r = { library, path, n_path };
    return dl_iterate_phdr(path_of_object, &r) != 0;
}

static int loads_of(struct dl_phdr_info *info, size_t size, void *user)
{
    *(uint64_t *)user = info->dlpi_adds;
    return 1;
}
uint64_t koila__got_n_loads(void)
{
    uint64_t n = 0;
    dl_iterate_phdr(loads_of, &n);
    return n;
}

void *koila__got_symbol(const char *path, const char *symbol)
{
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_NOW);
    void *at = library ? dlsym(library, symbol) : NULL;
    if (library)
        dlclose(library);
    return at;
}
