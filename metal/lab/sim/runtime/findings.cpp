// Findings: what went wrong, where, and by which threads. One per kind and place; repeats are counted.
#include <string.h>

#include "state.h"

#ifdef __APPLE__
extern "C" char __dso_handle;
uintptr_t library_begin() { return (uintptr_t)&__dso_handle; }
uintptr_t library_bytes() { return 16u << 20; }
#else
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;
uintptr_t library_begin() { return (uintptr_t)&__ehdr_start; }
uintptr_t library_bytes() { return (uintptr_t)(&_end - &__ehdr_start); }
#endif

static void unravel(uint32_t linear, const uint32_t* extent, uint32_t* out) {
  out[0] = linear % extent[0];
  out[1] = linear / extent[0] % extent[1];
  out[2] = linear / extent[0] / extent[1];
}

Finding* add_finding(uint32_t kind, uintptr_t pc, int buffer, int array, int64_t offset, uint32_t size, bool is_write) {
  Launch& l = *S.launch;
  const uint64_t at = pc ? pc - library_begin() : 0;
  for (uint32_t i = 0; i < l.finding_count; ++i) {
    Finding& f = l.findings[i];
    if (f.kind == kind && f.pc == at && f.buffer == buffer && f.array == array && f.is_write == is_write) {
      ++f.count;
      return nullptr;
    }
  }
  if (l.finding_count == kMaxFindings) return nullptr;
  Finding& f = l.findings[l.finding_count++];
  memset(&f, 0, sizeof f);
  f.kind = kind;
  f.is_write = is_write;
  f.buffer = buffer;
  f.array = array;
  f.offset = offset;
  f.size = size;
  f.count = 1;
  f.pc = at;
  memcpy(f.group, S.group, sizeof f.group);
  if (S.current) memcpy(f.thread, S.current->thread.position_in_threadgroup, sizeof f.thread);
  return &f;
}

void set_other(Finding* f, uint32_t group_linear, uint32_t thread_linear) {
  if (!f) return;
  const SimThread& t = S.fibers[0].thread;
  unravel(group_linear, t.threadgroups_per_grid, f->other_group);
  // A group at the edge of the grid is smaller than the launched size: its own extents number its threads.
  uint32_t extent[3];
  for (int i = 0; i < 3; ++i) {
    const uint32_t start = f->other_group[i] * S.launch->threadgroup[i], left = S.launch->grid[i] - start;
    extent[i] = left < S.launch->threadgroup[i] ? left : S.launch->threadgroup[i];
  }
  unravel(thread_linear, extent, f->other_thread);
}
