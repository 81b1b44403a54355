// Every load and store of the kernel comes through here: whose memory it is, whether the element exists, whether
// anything was written there, and how many bytes were touched. Addresses on the thread's own stack are its own business.
#include <stdlib.h>
#include <string.h>

#include "arena.h"
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

int last_buffer;

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
  for (uint64_t i = at; i < at + size; i += t.granule)
    known &= touch(device_cell(t, i), a, pc, index, kNone, (int64_t)at, size, b.base + i, t.granule);
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
  if (S.overdue) give_up_waiting(pc);
  const Fiber* f = S.current;
  if (address - f->stack_low < S.launch->stack_bytes) return;
  if (pending.count && !store_is_pending) settle();
  if (address - (uintptr_t)S.launch->arena < arena_bytes) return threadgroup_access(address, size, is_write, atomic, pc);
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
  if (pending.count) settle();
}

void memory_begin_launch() {
  Launch& l = *S.launch;
  pending.count = 0;
  store_is_pending = false;
  last_buffer = 0;
  first_stamp = stamp + 1;
  atomic_accesses.count = 0;
  coalescing_begin();
  arena_begin_launch();
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
  arena_begin_group();
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
