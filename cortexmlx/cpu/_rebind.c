/* Points the CBLAS calls of an MLX that is loaded already to the shim's functions.

   MLX calls each product through a slot in its global offset table, which the loader fills at the first call and never
   again. `cortexmlx_rebind` finds these slots by the relocations that name the three functions, and writes the shim's
   addresses into them. A slot is one aligned pointer, so threads that are multiplying meanwhile call either function.
   Either every slot is set, or none is. */

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

enum { FUNCTIONS = 3, MOST_SLOTS = 32 };

static const char LIBRARY[] = "/libmlx.so";
static const char *const NAMES[FUNCTIONS] = {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"};

struct slot {
    void **address;
    int function;  /* index into NAMES */
    int read_only; /* the loader has made its page read-only */
    void *before;  /* what was in it */
};

struct slots {
    struct slot all[MOST_SLOTS];
    int count;
    int too_many;
};

static uintptr_t page_of(uintptr_t address) { return address & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1); }

/* Whether the loader has made the page of an address read-only: it does so for all whole pages that end before the end
   of PT_GNU_RELRO. The last, partial page also holds data that must stay writable. */
static int is_read_only(const struct dl_phdr_info *object, uintptr_t address) {
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &object->dlpi_phdr[i];
        const uintptr_t start = object->dlpi_addr + header->p_vaddr;
        if (header->p_type == PT_GNU_RELRO && address >= page_of(start) && address < page_of(start + header->p_memsz))
            return 1;
    }
    return 0;
}

static void note(struct slots *slots, const struct dl_phdr_info *object, uintptr_t address, int function) {
    void **const slot = (void **)address;
    for (int i = 0; i < slots->count; i++)
        if (slots->all[i].address == slot) return; /* some linkers list a table in another one, too */
    if (slots->count == MOST_SLOTS || address % sizeof(void *) != 0)
        slots->too_many = 1;
    else
        slots->all[slots->count++] = (struct slot){slot, function, is_read_only(object, address), NULL};
}

/* Note the slots of a libmlx.so. Reads only what the loader itself has read to load the file. */
static int visit(struct dl_phdr_info *object, size_t size, void *data) {
    struct slots *slots = data;
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
            for (int f = 0; f < FUNCTIONS; f++)
                if (strcmp(name, NAMES[f]) == 0) note(slots, object, object->dlpi_addr + relocation->r_offset, f);
        }
    return 0;
}

/* Write a slot; where its page is read-only, it is so again afterwards. Returns 0, with nothing written, if the system
   refuses to make the page writable. */
static int write_slot(struct slot *slot, void *function) {
    const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *const page = (void *)page_of((uintptr_t)slot->address);
    if (slot->read_only && mprotect(page, size, PROT_READ | PROT_WRITE) != 0) return 0;
    slot->before = __atomic_exchange_n(slot->address, function, __ATOMIC_ACQ_REL);
    if (slot->read_only) mprotect(page, size, PROT_READ);
    return 1;
}

/* Set the slots of every libmlx.so to `functions`: sgemm, dgemm and cgemm. Returns how many of the three functions MLX
   calls from then on: all, or none. */
int cortexmlx_rebind(void *const *functions) {
    struct slots slots = {.count = 0};
    int found[FUNCTIONS] = {0};
    dl_iterate_phdr(visit, &slots);
    for (int i = 0; i < slots.count; i++) found[slots.all[i].function] = 1;
    if (slots.too_many || !(found[0] && found[1] && found[2])) return 0;
    for (int i = 0; i < slots.count; i++)
        if (!write_slot(&slots.all[i], functions[slots.all[i].function])) {
            while (i-- > 0) write_slot(&slots.all[i], slots.all[i].before);
            return 0;
        }
    return FUNCTIONS;
}

#else

int cortexmlx_rebind(void *const *functions) {
    (void)functions;
    return 0;
}

#endif
