// Which accesses to one element are ordered. Barriers start epochs; two accesses of one element by different threads, one of them a
// write and one of them not atomic, are a race if they lie in the same epoch. So a race is found from the accesses, whatever order they
// happened to run in.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "state.h"

namespace {

uint32_t stamp, first_stamp;  // number of the running threadgroup, and of the launch's first

struct Access {
  uint32_t thread, simd, epoch, simd_epoch;
  bool is_write, atomic, device;
};

// The accesses of one kind to one granule, as far as a later access of any thread can be unordered with them: the last one, and one
// from each of the places that the last one does not speak for. Threads count from 1 here, and 0 is nobody.
struct Accesses {
  uint32_t stamp, epoch, simd_epoch;  // of the last: its threadgroup's number, and when
  uint32_t foreign_stamp;             // of one in another threadgroup
  uint16_t thread, foreign_thread;
  uint16_t far;   // another simdgroup's, in this epoch of the threadgroup
  uint16_t mate;  // another lane's of the same simdgroup, in this epoch of the simdgroup
};

// An element of up to 4 bytes. Atomics are rare: where there were any, `atomics` leads to them.
struct Cell {
  Accesses writes, reads;
  uint32_t atomics;
};
struct AtomicAccesses { Accesses writes, reads; const Cell* cell; };
struct { AtomicAccesses* at; uint32_t count, capacity; } atomic_accesses;  // Cell::atomics counts from 1

struct Other { uint32_t stamp, thread; };

// Writes of one store to what another thread wrote: harmless if they leave the same values. Known after the store.
struct Pending {
  const uint8_t* at;
  uint32_t before, bytes, size;
  int buffer, array;
  int64_t offset;
  uintptr_t pc;
  Other other;
};
struct { Pending at[256]; uint32_t count; } pending;
bool store_is_pending;  // the hooks of one store of many bytes are running: nothing is stored yet

uint32_t group_of(uint32_t other_stamp) {
  // memory_begin_group numbers the groups as they run; the scheduler visits them in arithmetic progression.
  return (uint32_t)((S.first_group + (uint64_t)(other_stamp - first_stamp) * S.group_step) % S.group_total);
}

void report_race(uintptr_t pc, int buffer, int array, int64_t offset, uint32_t size, bool is_write, bool other_write, Other other) {
  Finding* f = add_finding(SIM_FAULT_RACE, pc, buffer, array, offset, size, is_write);
  if (!f) return;
  f->other_state = other_write;
  set_other(f, group_of(other.stamp), other.thread);
}

void settle() {
  bool same = true;
  for (uint32_t i = 0; i < pending.count; ++i) {
    const Pending& p = pending.at[i];
    if (memcmp(p.at, &p.before, p.bytes) == 0) continue;
    same = false;
    report_race(p.pc, p.buffer, p.array, p.offset, p.size, true, true, p.other);
  }
  pending.count = 0;
  S.launch->benign_races += same;
}

// Whether these still tell of this granule: threadgroup memory of another group, or of an earlier launch, is long gone.
inline bool tells(const Accesses& s, const Access& a) { return s.thread && (a.device || s.stamp == stamp); }

// Whether one of them is another thread's and nothing orders it with this access.
inline bool unordered(const Accesses& s, const Access& a, Other& other) {
  if (!tells(s, a)) return false;
  const uint32_t thread = s.thread - 1u;
  if (s.stamp != stamp) return other = {s.stamp, thread}, true;
  if (a.device && s.foreign_thread) return other = {s.foreign_stamp, s.foreign_thread - 1u}, true;
  if (s.epoch != a.epoch) return false;
  if (thread / SIM_LANES != a.simd) return other = {stamp, thread}, true;
  if (s.far) return other = {stamp, s.far - 1u}, true;
  if (s.simd_epoch != a.simd_epoch) return false;
  if (thread != a.thread) return other = {stamp, thread}, true;
  if (s.mate) return other = {stamp, s.mate - 1u}, true;
  return false;
}

inline void record(Accesses& s, const Access& a) {
  if (s.stamp != stamp) {
    s.foreign_stamp = s.stamp;
    s.foreign_thread = a.device ? s.thread : 0;
    s.far = s.mate = 0;
  } else if (s.epoch != a.epoch) {
    s.far = s.mate = 0;
  } else if ((s.thread - 1u) / SIM_LANES != a.simd) {
    s.far = s.thread;
    s.mate = 0;
  } else if (s.simd_epoch != a.simd_epoch) {
    s.mate = 0;
  } else if (s.thread != a.thread + 1) {
    s.mate = s.thread;
  }
  s.stamp = stamp;
  s.epoch = a.epoch;
  s.simd_epoch = a.simd_epoch;
  s.thread = (uint16_t)(a.thread + 1);
}

inline AtomicAccesses* atomics_of(const Cell& c) {
  if (!c.atomics || c.atomics > atomic_accesses.count) return nullptr;
  AtomicAccesses* found = &atomic_accesses.at[c.atomics - 1];
  return found->cell == &c ? found : nullptr;  // or it was another launch's
}

AtomicAccesses* make_atomics(Cell& c) {
  auto& all = atomic_accesses;
  if (all.count == all.capacity) {
    all.capacity = all.capacity ? all.capacity * 2 : 256;
    all.at = (AtomicAccesses*)realloc(all.at, all.capacity * sizeof *all.at);
  }
  AtomicAccesses* made = &all.at[all.count++];
  *made = {};
  made->cell = &c;
  c.atomics = all.count;
  return made;
}

// Looks at one granule (`bytes` at `at`) of an access and records it. Returns false if the granule was never written and this reads it.
inline bool touch(Cell& c, const Access& a, uintptr_t pc, int buffer, int array, int64_t offset, uint32_t size, const uint8_t* at, uint32_t bytes) {
  Other other;
  AtomicAccesses* atomics = atomics_of(c);
  if (!a.atomic && atomics && unordered(atomics->writes, a, other)) {
    report_race(pc, buffer, array, offset, size, a.is_write, true, other);
  } else if (unordered(c.writes, a, other)) {
    if (!a.is_write || a.atomic || pending.count == 256) {
      report_race(pc, buffer, array, offset, size, a.is_write, true, other);
    } else {
      Pending& p = pending.at[pending.count++] = {at, 0, bytes, size, buffer, array, offset, pc, other};
      memcpy(&p.before, at, bytes);
    }
  }
  if (a.is_write && (unordered(c.reads, a, other) || (!a.atomic && atomics && unordered(atomics->reads, a, other))))
    report_race(pc, buffer, array, offset, size, true, false, other);
  const bool written = tells(c.writes, a) || (atomics && tells(atomics->writes, a));
  if (a.atomic && !atomics) atomics = make_atomics(c);
  record(a.atomic ? (a.is_write ? atomics->writes : atomics->reads) : a.is_write ? c.writes : c.reads, a);
  return a.is_write || written;
}

// Bytes of an element are used on their own: from here on single bytes are watched, each with the element's history.
void split_cells(Cell* cells, uint64_t bytes, uint32_t granule) {
  for (uint64_t i = 0; i < bytes; ++i) {
    const Cell& whole = cells[i - i % granule];
    if (&whole == &cells[i]) continue;
    cells[i] = whole;
    if (!atomics_of(whole)) continue;
    AtomicAccesses* own = make_atomics(cells[i]);
    own->writes = atomics_of(whole)->writes;
    own->reads = atomics_of(whole)->reads;
  }
}

}  // namespace
