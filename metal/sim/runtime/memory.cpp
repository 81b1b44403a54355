// Every load and store of the kernel comes through here: whose memory it is, whether the element exists, whether
// anything was written there, and how many bytes were touched. Addresses on the thread's own stack are its own business.
#include <stdlib.h>
#include <string.h>

#include "bitmap.h"
#include "races.h"
#include "state.h"

namespace {

constexpr uint64_t kPageBytes = 1024;

struct Track {
  Bits read_all, written_all, read_group, written_group;
  Dirty dirty;
  Cell** pages;
  uint32_t granule;
};
Track tracks[kMaxBuffers];

constexpr uint64_t kArenaBytes = 1 << 20, kRedzone = 512, kThreadgroupLimit = 32768;
struct Array {
  const char* name;
  uint64_t offset, bytes;
  uint32_t granule;
  uint64_t used_in;  // the launch that last declared it
};
alignas(256) uint8_t arena[kArenaBytes];
Cell arena_cells[kArenaBytes];
Array arrays[kMaxArrays];
uint32_t array_count;
uint64_t arena_used = kRedzone, launch_number;
int last_buffer;

Access access_now(bool is_write, bool atomic, bool device) {
  const SimThread& t = S.current->thread;
  return {t.index_in_threadgroup, t.simdgroup,
          device ? S.epoch_device : S.epoch_threadgroup,
          device ? S.simd->epoch_device : S.simd->epoch_threadgroup, is_write, atomic, device};
}

void threadgroup_access(uintptr_t address, uint32_t size, bool is_write, bool atomic, uintptr_t pc) {
  Launch& l = *S.launch;
  const uint64_t at = address - (uintptr_t)arena;
  int index = kNone;
  for (uint32_t i = 0; i < array_count; ++i)
    if (at >= arrays[i].offset && at + size <= arrays[i].offset + arrays[i].bytes) { index = (int)i; break; }
  if (index == kNone) {
    uint64_t best = ~0ull;
    for (uint32_t i = 0; i < array_count; ++i) {
      const uint64_t low = arrays[i].offset, high = low + arrays[i].bytes;
      const uint64_t distance = at < low ? low - at : at >= high ? at - high + 1 : 0;
      if (distance < best) best = distance, index = (int)i;
    }
    add_finding(SIM_FAULT_OUT_OF_BOUNDS, pc, kNone, index, index == kNone ? 0 : (int64_t)at - (int64_t)arrays[index].offset, size, is_write);
    abandon_launch();
  }
  if (is_write) l.threadgroup_writes++, l.threadgroup_bytes_written += size;
  else l.threadgroup_reads++, l.threadgroup_bytes_read += size;
  Array& array = arrays[index];
  if (size < array.granule || at % array.granule) {
    split_cells(arena_cells + array.offset, array.bytes, array.granule);
    array.granule = 1;
  }
  const Access a = access_now(is_write, atomic, false);
  const uint64_t g = array.granule, first = at & ~(g - 1);
  bool known = true;
  for (uint64_t i = first; i < at + size; i += g)
    known &= touch(arena_cells[i], a, pc, kNone, index, (int64_t)(at - array.offset), size, arena + at);
  if (!known) add_finding(SIM_FAULT_UNINITIALISED, pc, kNone, index, (int64_t)(at - array.offset), size, false);
}

Cell& device_cell(Track& t, uint64_t at) {
  Cell*& page = t.pages[at / kPageBytes];
  if (!page) page = (Cell*)calloc(kPageBytes, sizeof(Cell));
  return page[at % kPageBytes];
}

void device_access(int index, uintptr_t address, uint32_t size, bool is_write, bool atomic, uintptr_t pc) {
  Buffer& b = S.launch->buffers[index];
  Track& t = tracks[index];
  const uint64_t at = address - (uintptr_t)b.base;
  BufferCounters& c = b.counters;
  const uint64_t word = at >> 6;
  const bool clean = !(t.read_group.words[word] | t.written_group.words[word]);
  if (clean) t.dirty.push(word);
  if (((at + size - 1) >> 6) != word && !(t.read_group.words[word + 1] | t.written_group.words[word + 1])) t.dirty.push(word + 1);
  if (is_write) {
    if (!b.writable) {
      add_finding(SIM_FAULT_WRITE_TO_INPUT, pc, index, kNone, (int64_t)at, size, true);
      abandon_launch();
    }
    c.writes++;
    c.bytes_written += size;
    t.written_group.set(at, size);
  } else {
    c.reads++;
    c.bytes_read += size;
    t.read_group.set(at, size);
  }
  if (S.launch->coalescing) coalescing_access(index, address, size, pc);
  if (!b.writable) return;
  if (size < t.granule || at % t.granule) {
    for (uint64_t p = 0; p <= b.bytes / kPageBytes; ++p)
      if (t.pages[p]) split_cells(t.pages[p], kPageBytes, t.granule);
    t.granule = 1;
  }
  const Access a = access_now(is_write, atomic, true);
  bool known = true;
  for (uint64_t i = at; i < at + size; i += t.granule) known &= touch(device_cell(t, i), a, pc, index, kNone, (int64_t)at, size, (uint8_t*)address);
  if (!known && b.tracked) {
    const uint64_t w = at >> 6, bit = 1ull << (at & 63);
    if (!((t.written_all.words[w] | t.written_group.words[w]) & bit)) add_finding(SIM_FAULT_UNINITIALISED, pc, index, kNone, (int64_t)at, size, false);
  }
}

void outside(uintptr_t address, uint32_t size, bool is_write, uintptr_t pc) {
  int nearest = kNone;
  uint64_t best = ~0ull;
  for (uint32_t i = 0; i < S.launch->buffer_count; ++i) {
    const Buffer& b = S.launch->buffers[i];
    const uintptr_t low = (uintptr_t)b.base, high = low + b.bytes;
    const uint64_t distance = address < low ? low - address : address >= high ? address - high + 1 : 0;
    if (distance < best) best = distance, nearest = (int)i;
  }
  const int64_t offset = nearest == kNone ? (int64_t)address : (int64_t)(address - (uintptr_t)S.launch->buffers[nearest].base);
  add_finding(SIM_FAULT_OUT_OF_BOUNDS, pc, nearest, kNone, offset, size, is_write);
  abandon_launch();
}

}  // namespace

void memory_access(uintptr_t address, uint32_t size, bool is_write, bool atomic, uintptr_t pc) {
  const Fiber* f = S.current;
  if (address - f->stack_low < S.launch->stack_bytes) return;
  if (pending.active && !store_is_pending) settle();
  if (address - (uintptr_t)arena < kArenaBytes) return threadgroup_access(address, size, is_write, atomic, pc);
  const Buffer* buffers = S.launch->buffers;
  const Buffer& last = buffers[last_buffer];
  if (address - (uintptr_t)last.base < last.bytes && address - (uintptr_t)last.base + size <= last.bytes)
    return device_access(last_buffer, address, size, is_write, atomic, pc);
  for (uint32_t i = 0; i < S.launch->buffer_count; ++i) {
    const uint64_t at = address - (uintptr_t)buffers[i].base;
    if (at < buffers[i].bytes && at + size <= buffers[i].bytes) {
      last_buffer = (int)i;
      return device_access((int)i, address, size, is_write, atomic, pc);
    }
  }
  if (address - library_begin() < library_bytes() && !is_write) return;  // a table of constants
  outside(address, size, is_write, pc);
}

void memory_settle() {
  if (pending.active) settle();
}

void memory_begin_launch() {
  Launch& l = *S.launch;
  ++launch_number;
  pending.active = store_is_pending = false;
  last_buffer = 0;
  first_stamp = stamp + 1;
  coalescing_begin();
  if (!l.checked) return;
  for (uint32_t i = 0; i < l.buffer_count; ++i) {
    const Buffer& b = l.buffers[i];
    Track& t = tracks[i];
    memset(&t, 0, sizeof t);
    const size_t words = b.bytes / 64 + 2;
    t.read_all.words = (uint64_t*)calloc(words, 8);
    t.written_all.words = (uint64_t*)calloc(words, 8);
    t.read_group.words = (uint64_t*)calloc(words, 8);
    t.written_group.words = (uint64_t*)calloc(words, 8);
    t.granule = b.item_bytes >= 4 ? 4 : b.item_bytes;
    if (b.writable) t.pages = (Cell**)calloc(b.bytes / kPageBytes + 1, sizeof(Cell*));
  }
}

void memory_begin_group() {
  ++stamp;
  for (uint32_t i = 0; i < array_count; ++i) memset(arena + arrays[i].offset, 0xff, arrays[i].bytes);
}

void memory_end_group() {
  memory_settle();
  if (!S.launch->checked) return;
  for (uint32_t i = 0; i < S.launch->buffer_count; ++i) {
    Track& t = tracks[i];
    BufferCounters& c = S.launch->buffers[i].counters;
    for (uint64_t d = 0; d < t.dirty.count; ++d) {
      const uint64_t w = t.dirty.words[d];
      c.group_distinct_read += __builtin_popcountll(t.read_group.words[w]);
      c.group_distinct_written += __builtin_popcountll(t.written_group.words[w]);
      c.distinct_read += __builtin_popcountll(t.read_group.words[w] & ~t.read_all.words[w]);
      c.distinct_written += __builtin_popcountll(t.written_group.words[w] & ~t.written_all.words[w]);
      t.read_all.words[w] |= t.read_group.words[w];
      t.written_all.words[w] |= t.written_group.words[w];
      t.read_group.words[w] = t.written_group.words[w] = 0;
    }
    t.dirty.count = 0;
  }
}

static void note_unwritten(uint32_t index) {
  Buffer& b = S.launch->buffers[index];
  const Track& t = tracks[index];
  for (uint64_t at = 0; at < b.bytes; at += b.item_bytes) {
    if ((at & 63) == 0 && at + 64 <= b.bytes && t.written_all.words[at >> 6] == ~0ull) {
      at += 64 - b.item_bytes;
      continue;
    }
    bool written = true;
    for (uint64_t k = at; k < at + b.item_bytes; ++k) written &= (t.written_all.words[k >> 6] >> (k & 63)) & 1;
    if (!written && b.counters.unwritten_elements++ == 0) b.counters.first_unwritten = at / b.item_bytes;
  }
}

void memory_end_launch() {
  Launch& l = *S.launch;
  l.threadgroup_bytes = 0;
  l.array_count = array_count;
  for (uint32_t i = 0; i < array_count; ++i) {
    l.arrays[i].bytes = arrays[i].bytes;
    strncpy(l.arrays[i].name, arrays[i].name, sizeof l.arrays[i].name - 1);
    if (arrays[i].used_in == launch_number) l.threadgroup_bytes += (arrays[i].bytes + 15) & ~15ull;
  }
  if (l.threadgroup_bytes > kThreadgroupLimit) add_finding(SIM_FAULT_THREADGROUP_MEMORY, 0, kNone, kNone, (int64_t)l.threadgroup_bytes, 0, false);
  if (!l.checked) return;
  for (uint32_t i = 0; i < l.buffer_count; ++i) {
    Buffer& b = l.buffers[i];
    Track& t = tracks[i];
    if (b.writable && b.tracked && !l.aborted) note_unwritten(i);
    free(t.read_all.words);
    free(t.written_all.words);
    free(t.read_group.words);
    free(t.written_group.words);
    free(t.dirty.words);
    if (t.pages)
      for (uint64_t p = 0; p <= b.bytes / kPageBytes; ++p) free(t.pages[p]);
    free(t.pages);
  }
}

extern "C" void* sim_threadgroup_memory(void** slot, unsigned long size, unsigned long align, const char* name) {
  if (!*slot) {
    const uint64_t offset = (arena_used + 255) & ~255ull;
    if (offset + size + kRedzone > kArenaBytes || array_count == kMaxArrays) {
      add_finding(SIM_FAULT_THREADGROUP_MEMORY, (uintptr_t)__builtin_return_address(0), kNone, kNone, (int64_t)(arena_used + size), 0, false);
      abandon_launch();
    }
    arrays[array_count++] = {name, offset, size, (uint32_t)(align >= 4 ? 4 : align), 0};
    memset(arena + offset, 0xff, size);
    arena_used = offset + size + kRedzone;
    *slot = arena + offset;
  }
  for (uint32_t i = 0; i < array_count; ++i)
    if (arena + arrays[i].offset == *slot) arrays[i].used_in = launch_number;
  return *slot;
}
