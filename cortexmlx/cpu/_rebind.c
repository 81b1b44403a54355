/* Points the CBLAS calls of an MLX that is loaded already to the shim's functions.

   MLX calls each product through a slot in its global offset table, which the loader fills at the first call and never
   again. `cortexmlx_rebind` finds these slots by the relocations that name the three functions, and writes the shim's
   addresses into them. A slot is one aligned pointer, so threads that are multiplying meanwhile call either function. */

#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if __ELF_NATIVE_CLASS == 64

#if defined(__x86_64__)
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_SLOT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_SLOT(type) 0
#endif

static const char LIBRARY[] = "/libmlx.so";
static const char *const NAMES[] = {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"};

struct wanted {
    void *const *functions; /* in the order of NAMES */
    int set;                /* slots that were set */
};

/* Write a slot, in a page that the loader may have made read-only. */
static int set_slot(void **slot, void *function, int read_only) {
    const uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)slot & ~(size - 1);
    if (read_only && mprotect((void *)page, size, PROT_READ | PROT_WRITE) != 0) return 0;
    __atomic_store_n(slot, function, __ATOMIC_RELEASE);
    if (read_only) mprotect((void *)page, size, PROT_READ);
    return 1;
}

static int is_read_only(const struct dl_phdr_info *object, uintptr_t address) {
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &object->dlpi_phdr[i];
        const uintptr_t start = object->dlpi_addr + header->p_vaddr;
        if (header->p_type == PT_GNU_RELRO && address >= start && address < start + header->p_memsz) return 1;
    }
    return 0;
}

static int visit(struct dl_phdr_info *object, size_t size, void *data) {
    struct wanted *wanted = data;
    const size_t length = strlen(object->dlpi_name), suffix = sizeof(LIBRARY) - 1;
    (void)size;
    if (length < suffix || strcmp(object->dlpi_name + length - suffix, LIBRARY) != 0) return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    if (dynamic == NULL) return 0;
    const char *strings = NULL;
    const ElfW(Sym) *symbols = NULL;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t bytes[2] = {0, 0};
    int has_addends = 1;
    for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++) switch (entry->d_tag) {
            case DT_STRTAB: strings = (const char *)entry->d_un.d_ptr; break;
            case DT_SYMTAB: symbols = (const ElfW(Sym) *)entry->d_un.d_ptr; break;
            case DT_JMPREL: tables[0] = (const ElfW(Rela) *)entry->d_un.d_ptr; break;
            case DT_PLTRELSZ: bytes[0] = entry->d_un.d_val; break;
            case DT_PLTREL: has_addends = entry->d_un.d_val == DT_RELA; break;
            case DT_RELA: tables[1] = (const ElfW(Rela) *)entry->d_un.d_ptr; break;
            case DT_RELASZ: bytes[1] = entry->d_un.d_val; break;
        }
    /* glibc has made these addresses; another loader may leave offsets there, which are not followed. */
    if (strings == NULL || symbols == NULL || !has_addends || (uintptr_t)strings < object->dlpi_addr) return 0;
    for (int table = 0; table < 2; table++)
        for (size_t i = 0; tables[table] != NULL && i < bytes[table] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Rela) *relocation = &tables[table][i];
            if (!IS_SLOT(ELF64_R_TYPE(relocation->r_info))) continue;
            const char *name = strings + symbols[ELF64_R_SYM(relocation->r_info)].st_name;
            const uintptr_t address = object->dlpi_addr + relocation->r_offset;
            for (int f = 0; f < 3; f++)
                if (strcmp(name, NAMES[f]) == 0)
                    wanted->set += set_slot((void **)address, wanted->functions[f], is_read_only(object, address));
        }
    return 0;
}

/* Set the slots of every libmlx.so to `functions`: sgemm, dgemm and cgemm. Returns how many slots were set. */
int cortexmlx_rebind(void *const *functions) {
    struct wanted wanted = {functions, 0};
    dl_iterate_phdr(visit, &wanted);
    return wanted.set;
}

#else

int cortexmlx_rebind(void *const *functions) {
    (void)functions;
    return 0;
}

#endif
