// How well the lanes of a simdgroup share memory lines. Between two meetings the lanes run one after another, so the n-th execution
// of an instruction by each lane is taken to be the same access of the simdgroup: its 128-byte lines are counted once.
#include <string.h>

#include "state.h"

namespace {
constexpr uint32_t kSlots = 1 << 14, kLines = 96;
struct Entry {
  uintptr_t pc;
  uint32_t turn, simd;
  uint32_t generation;
  int buffer;
  uint32_t line_count;
  uintptr_t lines[kLines];
  uint64_t used[kLines][2];  // which bytes of the line
};
struct Turn { uintptr_t pc; uint32_t lane_key, generation, count; };
Entry entries[kSlots];
Turn turns[kSlots];
uint32_t used[kSlots], used_count, generation;

void close_all() {
  for (uint32_t i = 0; i < used_count; ++i) {
    const Entry& e = entries[used[i]];
    BufferCounters& c = S.launch->buffers[e.buffer].counters;
    c.simd_accesses++;
    c.simd_segments += e.line_count;
    uint32_t bytes = 0;
    for (uint32_t k = 0; k < e.line_count; ++k) bytes += __builtin_popcountll(e.used[k][0]) + __builtin_popcountll(e.used[k][1]);
    c.simd_ideal_segments += (bytes + 127) / 128;
  }
  used_count = 0;
  ++generation;
}

uint32_t turn_of(uintptr_t pc, uint32_t lane_key) {
  uint32_t h = (uint32_t)((pc * 0x9e3779b97f4a7c15ull >> 40) ^ lane_key * 2654435761u) % kSlots;
  for (;; h = (h + 1) % kSlots) {
    Turn& t = turns[h];
    if (t.generation != generation) {
      t = {pc, lane_key, generation, 0};
      return 0;
    }
    if (t.pc == pc && t.lane_key == lane_key) return ++t.count;
  }
}
}  // namespace

void coalescing_begin() {
  used_count = 0;
  ++generation;
}

void coalescing_flush(Simdgroup*) { close_all(); }

void coalescing_access(int buffer, uintptr_t address, uint32_t size, uintptr_t pc) {
  static uint32_t turns_used;
  if (used_count == 0) turns_used = 0;
  if (used_count > kSlots / 2 || turns_used > kSlots / 2) close_all(), turns_used = 0;
  const SimThread& t = S.current->thread;
  const uint32_t turn = turn_of(pc, t.index_in_threadgroup);
  turns_used += turn == 0;
  uint32_t h = (uint32_t)((pc * 0x9e3779b97f4a7c15ull >> 40) ^ (turn * 40503u + t.simdgroup) * 2654435761u) % kSlots;
  for (;; h = (h + 1) % kSlots) {
    Entry& e = entries[h];
    if (e.generation != generation) {
      e.pc = pc;
      e.turn = turn;
      e.simd = t.simdgroup;
      e.generation = generation;
      e.buffer = buffer;
      e.line_count = 0;
      used[used_count++] = h;
    } else if (e.pc != pc || e.turn != turn || e.simd != t.simdgroup || e.buffer != buffer) {
      continue;
    }
    for (uint32_t k = 0; k < size; ++k) {
      const uintptr_t line = (address + k) >> 7;
      const uint32_t byte = (address + k) & 127;
      uint32_t i = 0;
      while (i < e.line_count && e.lines[i] != line) ++i;
      if (i == kLines) break;
      if (i == e.line_count) {
        e.lines[e.line_count++] = line;
        e.used[i][0] = e.used[i][1] = 0;
      }
      e.used[i][byte >> 6] |= 1ull << (byte & 63);
    }
    return;
  }
}
