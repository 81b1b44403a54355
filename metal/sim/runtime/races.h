// Which accesses to one element are ordered. Barriers start epochs; two accesses of one element by different threads, one of them a
// write, are a race if they lie in the same epoch. So a race is found from the accesses, whatever order they happened to run in.
#pragma once
#include <string.h>

#include "state.h"

namespace {

uint32_t stamp, first_stamp;  // number of the running threadgroup, and of the launch's first

// Who made an access, and when. A stamp names the threadgroup; 0 is nobody.
struct Mark {
  uint32_t stamp, epoch, simd_epoch;
  uint16_t thread;
  uint8_t atomic;
};

// The last write of a granule (up to 4 bytes) and the reads since.
struct Cell {
  Mark write, read;
  uint16_t far_thread;
  uint8_t many;  // several lanes of the reader's simdgroup read it in this epoch
  uint8_t far;   // a lane of another simdgroup or threadgroup read it, too
  uint32_t far_stamp;
};

// A write to what another thread wrote: harmless if it wrote the same value. Known after the store.
struct Pending {
  const uint8_t* at;
  uint8_t before[64];
  uint32_t size;
  int buffer, array;
  int64_t offset;
  uintptr_t pc;
  uint32_t other_stamp, other_thread;
  bool active;
} pending;
bool store_is_pending;  // the hooks of one store of many bytes are running: nothing is stored yet


uint32_t group_of(uint32_t other_stamp) {
  // memory_begin_group numbers the groups as they run; the scheduler visits them in arithmetic progression.
  return (uint32_t)((S.first_group + (uint64_t)(other_stamp - first_stamp) * S.group_step) % S.group_total);
}

void report_race(uintptr_t pc, int buffer, int array, int64_t offset, uint32_t size, bool is_write, bool other_write,
                 uint32_t other_stamp, uint32_t other_thread) {
  Finding* f = add_finding(SIM_FAULT_RACE, pc, buffer, array, offset, size, is_write);
  if (!f) return;
  f->other_state = other_write;
  set_other(f, group_of(other_stamp), other_thread);
}

void settle() {
  pending.active = false;
  if (memcmp(pending.at, pending.before, pending.size) == 0) {
    S.launch->benign_races++;
    return;
  }
  report_race(pending.pc, pending.buffer, pending.array, pending.offset, pending.size, true, true, pending.other_stamp, pending.other_thread);
}

struct Access {
  uint32_t thread, simd, epoch, simd_epoch;
  bool is_write, atomic, device;
};

// Whether a mark still tells of this granule: threadgroup memory of another group, or of an earlier launch, is long gone.
inline bool tells(const Access& a, const Mark& m) { return m.stamp && (a.device || m.stamp == stamp); }

inline bool ordered(const Access& a, const Mark& m) {
  if (m.stamp != stamp) return false;
  if (m.thread == a.thread || m.epoch != a.epoch) return true;
  return m.thread / SIM_LANES == a.simd && m.simd_epoch != a.simd_epoch;
}

inline Mark mark(const Access& a) { return {stamp, a.epoch, a.simd_epoch, (uint16_t)a.thread, a.atomic}; }

// Looks at one granule and records the access. Returns false if the granule was never written and this reads it.
inline bool touch(Cell& c, const Access& a, uintptr_t pc, int buffer, int array, int64_t offset, uint32_t size, const uint8_t* at) {
  const bool written = tells(a, c.write), seen = tells(a, c.read);
  if (written && !(a.atomic && c.write.atomic) && !ordered(a, c.write)) {
    if (a.is_write && !a.atomic && size <= sizeof pending.before) {
      if (!pending.active) {
        pending = {at, {}, size, buffer, array, offset, pc, c.write.stamp, c.write.thread, true};
        memcpy(pending.before, at, size);
      }
    } else {
      report_race(pc, buffer, array, offset, size, a.is_write, true, c.write.stamp, c.write.thread);
    }
  }
  if (a.is_write) {
    if (seen && !(a.atomic && c.read.atomic)) {
      const bool same_epoch = c.read.stamp == stamp && c.read.epoch == a.epoch && c.read.simd_epoch == a.simd_epoch;
      if (!ordered(a, c.read) || (c.many && same_epoch && c.read.thread / SIM_LANES == a.simd))
        report_race(pc, buffer, array, offset, size, true, false, c.read.stamp, c.read.thread);
      else if (c.far && (c.far_stamp != stamp || c.read.epoch == a.epoch) &&
               !(c.far_stamp == stamp && c.far_thread == a.thread))
        report_race(pc, buffer, array, offset, size, true, false, c.far_stamp, c.far_thread);
    }
    c.write = mark(a);
    return true;
  }
  const bool same_group = c.read.stamp == stamp, same_epoch = same_group && c.read.epoch == a.epoch;
  if (seen && (same_epoch || !same_group)) {
    if (same_group && c.read.thread / SIM_LANES == a.simd) {
      c.many = c.read.simd_epoch == a.simd_epoch && (c.many || c.read.thread != a.thread);
    } else {
      c.far = 1;
      c.far_thread = c.read.thread;
      c.far_stamp = c.read.stamp;
      c.many = 0;
    }
  } else {
    c.far = c.far && a.device && c.far_stamp != stamp;
    c.many = 0;
  }
  c.read = mark(a);
  return written;
}

// Bytes of an element are used on their own: from here on single bytes are watched, each with the element's history.
void split_cells(Cell* cells, uint64_t bytes, uint32_t granule) {
  for (uint64_t i = 0; i < bytes; ++i) cells[i] = cells[i - i % granule];
}

}  // namespace
