// Which accesses to one element are ordered. Barriers start epochs; two accesses of one element by different threads, one of them a
// write, are a race if they lie in the same epoch. So a race is found from the accesses, whatever order they happened to run in.
#pragma once
#include <string.h>

#include "state.h"

namespace {

uint32_t stamp, first_stamp;  // number of the running threadgroup, and of the launch's first

// The last write of a granule (up to 4 bytes) and the reads since. A stamp names the threadgroup; 0 is nobody.
struct Cell {
  uint32_t w_stamp, w_epoch, w_simd_epoch;
  uint32_t r_stamp, r_epoch, r_simd_epoch;
  uint16_t w_thread, r_thread, r_far_thread;
  uint8_t w_atomic, r_atomic;
  uint8_t r_many;  // several lanes of r_thread's simdgroup read it in this epoch
  uint8_t r_far;   // a lane of another simdgroup or threadgroup read it, too
  uint32_t r_far_stamp;
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

inline bool ordered(const Access& a, uint32_t p_stamp, uint32_t p_thread, uint32_t p_epoch, uint32_t p_simd_epoch) {
  if (p_stamp != stamp) return !a.device;  // threadgroup memory of another group: long gone
  if (p_thread == a.thread || p_epoch != a.epoch) return true;
  return p_thread / SIM_LANES == a.simd && p_simd_epoch != a.simd_epoch;
}

// Looks at one granule and records the access. Returns false if the granule was never written and this reads it.
inline bool touch(Cell& c, const Access& a, uintptr_t pc, int buffer, int array, int64_t offset, uint32_t size, const uint8_t* at) {
  if (c.w_stamp && !(a.atomic && c.w_atomic) && !ordered(a, c.w_stamp, c.w_thread, c.w_epoch, c.w_simd_epoch)) {
    if (a.is_write && !a.atomic && size <= sizeof pending.before) {
      if (!pending.active) {
        pending = {at, {}, size, buffer, array, offset, pc, c.w_stamp, c.w_thread, true};
        memcpy(pending.before, at, size);
      }
    } else {
      report_race(pc, buffer, array, offset, size, a.is_write, true, c.w_stamp, c.w_thread);
    }
  }
  if (a.is_write) {
    if (c.r_stamp && !(a.atomic && c.r_atomic)) {
      const bool same_epoch = c.r_stamp == stamp && c.r_epoch == a.epoch && c.r_simd_epoch == a.simd_epoch;
      if (!ordered(a, c.r_stamp, c.r_thread, c.r_epoch, c.r_simd_epoch))
        report_race(pc, buffer, array, offset, size, true, false, c.r_stamp, c.r_thread);
      else if (c.r_many && same_epoch && c.r_thread / SIM_LANES == a.simd)
        report_race(pc, buffer, array, offset, size, true, false, c.r_stamp, c.r_thread);
      else if (c.r_far &&
               (a.device ? c.r_far_stamp != stamp || c.r_epoch == a.epoch : c.r_stamp == stamp && c.r_epoch == a.epoch) &&
               !(c.r_far_stamp == stamp && c.r_far_thread == a.thread))
        report_race(pc, buffer, array, offset, size, true, false, c.r_far_stamp, c.r_far_thread);
    }
    c.w_stamp = stamp;
    c.w_thread = (uint16_t)a.thread;
    c.w_epoch = a.epoch;
    c.w_simd_epoch = a.simd_epoch;
    c.w_atomic = a.atomic;
    return true;
  }
  const bool known = c.w_stamp && (a.device || c.w_stamp == stamp);
  const bool same_group = c.r_stamp == stamp, same_epoch = same_group && c.r_epoch == a.epoch;
  if (c.r_stamp && (same_epoch || (a.device && !same_group))) {
    if (same_group && c.r_thread / SIM_LANES == a.simd) {
      c.r_many = c.r_simd_epoch == a.simd_epoch && (c.r_many || c.r_thread != a.thread);
    } else {
      c.r_far = 1;
      c.r_far_thread = c.r_thread;
      c.r_far_stamp = c.r_stamp;
      c.r_many = 0;
    }
  } else {
    c.r_far = c.r_far && a.device && c.r_far_stamp != stamp;
    c.r_many = 0;
  }
  c.r_stamp = stamp;
  c.r_thread = (uint16_t)a.thread;
  c.r_epoch = a.epoch;
  c.r_simd_epoch = a.simd_epoch;
  c.r_atomic = a.atomic;
  return known;
}

// Bytes of an element are used on their own: from here on single bytes are watched, each with the element's history.
void split_cells(Cell* cells, uint64_t bytes, uint32_t granule) {
  for (uint64_t i = 0; i < bytes; ++i) cells[i] = cells[i - i % granule];
}

}  // namespace
