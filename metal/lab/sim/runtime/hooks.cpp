// What the compiler calls at every load and store (its address-sanitizer instrumentation), and the library at every atomic.
#include <stdio.h>
#include <string.h>

#include "races.h"
#include "state.h"

namespace {
// A type of this size has this alignment, too.
inline void must_be_aligned(uintptr_t address, uint32_t size, bool is_write, uintptr_t pc) {
  if (!(address & (size - 1))) return;
  Finding* f = add_finding(SIM_FAULT_MISALIGNED, pc, kNone, kNone, 0, size, is_write);
  if (f) snprintf(f->text, sizeof f->text, "%s %u bytes at an address that is a multiple of %u only", is_write ? "writes" : "reads", size,
                  1u << __builtin_ctzll(address));
  abandon_launch();
}
}  // namespace

extern "C" void sim_atomic_access(const void* address, unsigned size, unsigned how) {
  if (!S.launch->checked) return;
  const uintptr_t pc = (uintptr_t)__builtin_return_address(0);
  must_be_aligned((uintptr_t)address, size, how & SIM_ATOMIC_STORE, pc);
  if (how & SIM_ATOMIC_LOAD) memory_access((uintptr_t)address, size, false, true, pc);
  if (how & SIM_ATOMIC_STORE) memory_access((uintptr_t)address, size, true, true, pc);
}

namespace {

// A sized hook stands for a type of that size; anything else comes through the N hooks.
inline void aligned_access(uintptr_t address, uint32_t size, bool is_write, uintptr_t pc) {
  must_be_aligned(address, size, is_write, pc);
  memory_access(address, size, is_write, false, pc);
}

// Copies of whole structs: as the loads and stores of 16 bytes that they amount to.
inline void access_bytes(uintptr_t address, size_t size, bool is_write, uintptr_t pc) {
  memory_settle();
  store_is_pending = is_write;
  for (size_t done = 0; done < size; done += 16)
    memory_access(address + done, (uint32_t)(size - done < 16 ? size - done : 16), is_write, false, pc);
  store_is_pending = false;
}

}  // namespace

#define SIM_HOOKS(bytes)                                                                                    \
  extern "C" void __asan_load##bytes(uintptr_t a) { aligned_access(a, bytes, false, (uintptr_t)__builtin_return_address(0)); } \
  extern "C" void __asan_store##bytes(uintptr_t a) { aligned_access(a, bytes, true, (uintptr_t)__builtin_return_address(0)); }
SIM_HOOKS(1) SIM_HOOKS(2) SIM_HOOKS(4) SIM_HOOKS(8) SIM_HOOKS(16)
extern "C" void __asan_loadN(uintptr_t a, size_t n) { if (n) access_bytes(a, n, false, (uintptr_t)__builtin_return_address(0)); }
extern "C" void __asan_storeN(uintptr_t a, size_t n) { if (n) access_bytes(a, n, true, (uintptr_t)__builtin_return_address(0)); }
extern "C" void* __asan_memcpy(void* to, const void* from, size_t n) {
  const uintptr_t pc = (uintptr_t)__builtin_return_address(0);
  if (n) access_bytes((uintptr_t)from, n, false, pc), access_bytes((uintptr_t)to, n, true, pc);
  return memcpy(to, from, n);
}
extern "C" void* __asan_memmove(void* to, const void* from, size_t n) {
  const uintptr_t pc = (uintptr_t)__builtin_return_address(0);
  if (n) access_bytes((uintptr_t)from, n, false, pc), access_bytes((uintptr_t)to, n, true, pc);
  return memmove(to, from, n);
}
extern "C" void* __asan_memset(void* to, int value, size_t n) {
  if (n) access_bytes((uintptr_t)to, n, true, (uintptr_t)__builtin_return_address(0));
  return memset(to, value, n);
}
extern "C" void __asan_handle_no_return() {}
