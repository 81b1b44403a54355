// Threadgroup memory: every array that the kernel declares, each alone in 64 GiB of address space, so that no index that a
// kernel is likely to compute leads from one into another. What is never touched takes no memory.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "races.h"
#include "state.h"

// The linker's bounds of the table that the declarations make (shim/sim/keywords.h), and whose declarations count.
#ifdef __APPLE__
extern "C" SimArray sim_arrays_begin[] __asm("section$start$__DATA$sim_arrays");
extern "C" SimArray sim_arrays_end[] __asm("section$end$__DATA$sim_arrays");
#else
extern "C" __attribute__((weak, visibility("hidden"))) SimArray sim_arrays_begin[] __asm("__start_sim_arrays");
extern "C" __attribute__((weak, visibility("hidden"))) SimArray sim_arrays_end[] __asm("__stop_sim_arrays");
#endif
extern "C" __attribute__((visibility("hidden"))) const char sim_kernel_function[];

namespace {

constexpr uint64_t kArraySlot = 1ull << 36, kArrayStagger = 33 * 4096, kThreadgroupLimit = 32768;

struct Array {
  uint8_t* base;
  uint64_t bytes;
  const char* name;
  Cell* cells;
  uint32_t granule;
};
Array arrays[kMaxArrays];
uint32_t array_count;
uint64_t declared_bytes, arena_bytes;

Access access_now(bool is_write, bool atomic, bool device) {
  const SimThread& t = S.current->thread;
  return {t.index_in_threadgroup, t.simdgroup,
          device ? S.epoch_device : S.epoch_threadgroup,
          device ? S.simd->epoch_device : S.simd->epoch_threadgroup, is_write, atomic, device};
}

void threadgroup_access(uintptr_t address, uint32_t size, bool is_write, bool atomic, uintptr_t pc) {
  Launch& l = *S.launch;
  const int index = (int)((address - (uintptr_t)l.arena) / kArraySlot);
  Array& array = arrays[index];
  const uint64_t at = address - (uintptr_t)array.base;
  if (at >= array.bytes || at + size > array.bytes) {
    add_finding(SIM_FAULT_OUT_OF_BOUNDS, pc, kNone, index, (int64_t)at, size, is_write);
    abandon_launch();
  }
  if (size < array.granule || at % array.granule) {
    split_cells(array.cells, array.bytes, array.granule);
    array.granule = 1;
  }
  const Access a = access_now(is_write, atomic, false);
  const uint64_t g = array.granule;
  bool known = true;
  for (uint64_t i = at & ~(g - 1); i < at + size; i += g)
    known &= touch(array.cells[i], a, pc, kNone, index, (int64_t)at, size, (uint8_t*)array.base + i, g);
  if (!known) add_finding(SIM_FAULT_UNINITIALISED, pc, kNone, index, (int64_t)at, size, false);
}

// Metal's limit is on what the kernel function declares, reached or not: each array at its own alignment, the sum in units of 16.
void place_arrays() {
  for (SimArray* a = sim_arrays_begin; a < sim_arrays_end; ++a) {
    if (a->base || strcmp(a->function, sim_kernel_function) != 0) continue;
    declared_bytes = (declared_bytes + a->align - 1) / a->align * a->align + a->bytes;
    if (array_count == kMaxArrays) {
      declared_bytes += kThreadgroupLimit;
      continue;
    }
    // No array is a round number of bytes from another, or from a buffer: an index off by 2^34 elements must meet nothing, either.
    // And it lies at a multiple of its own alignment that is one of no greater: Metal promises no more.
    a->base = S.launch->arena + array_count * kArraySlot + kArraySlot / 2 + (array_count + 1) * kArrayStagger + a->align;
    Cell* cells = (Cell*)calloc(a->bytes + 1, sizeof(Cell));
    arrays[array_count++] = {(uint8_t*)a->base, a->bytes, a->name, cells, (uint32_t)(a->align >= 4 ? 4 : a->align)};
  }
}

void arena_begin_launch() {
  Launch& l = *S.launch;
  place_arrays();
  l.threadgroup_bytes = (declared_bytes + 15) & ~15ull;
  l.array_count = array_count;
  arena_bytes = array_count * kArraySlot;
  for (uint32_t i = 0; i < array_count; ++i) {
    l.arrays[i].bytes = arrays[i].bytes;
    strncpy(l.arrays[i].name, arrays[i].name, sizeof l.arrays[i].name - 1);
  }
  if (l.threadgroup_bytes <= kThreadgroupLimit) return;
  add_finding(SIM_FAULT_THREADGROUP_MEMORY, 0, kNone, kNone, (int64_t)l.threadgroup_bytes, 0, false);
  S.abort = true;
  l.aborted = 1;
}

void arena_begin_group() {
  for (uint32_t i = 0; i < array_count; ++i) memset(arrays[i].base, 0xff, arrays[i].bytes);
}

}  // namespace
